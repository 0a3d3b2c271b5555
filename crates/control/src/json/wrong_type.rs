//! Describes values of a wrong type, without Rust's names of types.
//!
//! In: a message of serde, from JSON or TOML. Out: what the value is, and what it must be.

/// Returns a message about a value of a wrong type or beyond its range. None: `message` is about
/// something else. `table`: what the language calls a set of keys with values.
pub fn wrong_type(message: &str, table: &str) -> Option<String> {
    let (kind, rest) = message.strip_prefix("invalid ")?.split_once(": ")?;
    let (found, wanted) = rest.split_once(", expected ")?;
    // serde_json adds the place. Bodies of calls are short.
    let wanted = wanted.split(" at line ").next().unwrap_or(wanted);
    let value = ["string ", "integer ", "floating point ", "boolean "]
        .iter()
        .find_map(|kind| found.strip_prefix(kind));
    let value = value.unwrap_or(match found {
        "map" => table,
        "sequence" => "a list",
        found => found,
    });
    if let Some(number) = value.strip_suffix(" as i128").or(value.strip_suffix(" as u128")) {
        let number = number.replace('`', "");
        return Some(format!("it is {number}, and a number here has at most 64 bits"));
    }
    let wanted = match (kind, wanted) {
        ("type", "a boolean" | "bool") => "true or false",
        ("type", "a string" | "path string") => "a text",
        ("type", "f64" | "f32") => "a number",
        ("type", "a sequence") => "a list, such as [\"one\", \"two\"]",
        ("type", "struct GroupArgs") => "a table: write [group.NAME]",
        ("type", "a map") => table,
        ("type", wanted) if wanted.starts_with("struct ") => table,
        ("value", "u8") => "a whole number from 0 to 255",
        ("value", "u16") => "a whole number from 0 to 65535",
        ("value", "u32") => "a whole number from 0 to 4294967295",
        ("value", "u64" | "usize") => "a whole number, and not negative",
        ("type", wanted) if is_integer(wanted) => "a whole number",
        ("type", wanted) => wanted,
        _ => return None,
    };
    Some(format!("it is {}, and must be {wanted}", value.replace('`', "")))
}

/// Returns whether a name is that of an integer type.
fn is_integer(name: &str) -> bool {
    name.strip_prefix(['u', 'i']).is_some_and(|bits| bits == "size" || bits.parse::<u8>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_wrong_type_are_described_without_the_names_of_types() {
        for (message, expected) in [
            ("type: string \"16M\", expected u64", "\"16M\", and must be a whole number"),
            (
                "type: string \"16M\", expected u64 at line 1 column 14",
                "\"16M\", and must be a whole number",
            ),
            (
                "value: integer `-1`, expected u64",
                "-1, and must be a whole number, and not negative",
            ),
            ("value: integer `300`, expected u8", "300, and must be a whole number from 0 to 255"),
            (
                "type: integer `99999999999999999999` as i128, expected any value",
                "99999999999999999999, and a number here has at most 64 bits",
            ),
            (
                "type: integer `3`, expected struct GroupArgs",
                "3, and must be a table: write [group.NAME]",
            ),
            ("type: integer `3`, expected struct NbdArgs", "3, and must be a table"),
            ("type: map, expected path string", "a table, and must be a text"),
        ] {
            let found = wrong_type(&format!("invalid {message}"), "a table");
            assert_eq!(found, Some(format!("it is {expected}")), "{message}");
        }
        assert_eq!(wrong_type("missing field `image`", "a table"), None);
    }
}
