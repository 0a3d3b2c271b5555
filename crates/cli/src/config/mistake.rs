//! Describes mistakes in a configuration file in one line.
//!
//! In: the file and the error of the TOML parser, which is meant for programmers. Out: line number,
//! key, what is wrong, and the correct form.

use blockyard_control::wrong_type;

/// Returns a line that says what is wrong and where. `file` describes the file, if not all keys may
/// be in it.
pub fn describe(text: &str, error: &toml::de::Error, file: &str) -> String {
    let at = error.span().map_or(0, |span| span.start.min(text.len()));
    let number = text[..at].matches('\n').count() + 1;
    let line = text.lines().nth(number - 1).unwrap_or_default();
    let message = error.message().trim_end().replace('\n', "; ");
    if message == "invalid type: map, expected a sequence"
        && line.trim_start().starts_with("[disk]")
    {
        return format!("line {number}: [disk] is one table, and disks are a list: write [[disk]]");
    }
    // A header belongs to the file, not to the table before it.
    let is_header = line.trim_start().starts_with('[');
    if let Some(unknown) = message.strip_prefix("unknown field `") {
        return format!(
            "line {number}: {}",
            unknown_key(unknown, table_at(text, number).filter(|_| !is_header).unwrap_or(file))
        );
    }
    let mut what = wrong_type(&message, "a table").unwrap_or(message);
    if line.trim_start().strip_prefix("disk").is_some_and(|rest| rest.trim_start().starts_with('='))
    {
        what = what.replace(
            "must be a list, such as [\"one\", \"two\"]",
            "disks are a list: write [[disk]]",
        );
    }
    let key = line.split_once('=').map(|(key, _)| key.trim());
    let is_key = |key: &&str| {
        !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
    };
    match key.filter(is_key) {
        Some(key) => format!("line {number}: {key}: {what}"),
        None => format!("line {number}: {what}"),
    }
}

/// Describes the mistake in a value of JSON. `message`: the parser's; `path`: where the value is.
pub fn describe_value(message: &str, path: &str) -> String {
    if let Some(unknown) = message.strip_prefix("unknown field `") {
        let of_disk = if path.contains('.') { " in this object" } else { " in a disk" };
        return unknown_key(unknown, of_disk);
    }
    wrong_type(message, "an object").unwrap_or_else(|| message.into())
}

/// Returns a message about an unknown key, with the nearest known key. `unknown`: the rest of the
/// parser's message, which lists all keys of the table.
fn unknown_key(unknown: &str, table: &str) -> String {
    let mut quoted = unknown.split('`').step_by(2);
    let key = quoted.next().unwrap_or_default();
    let known = unknown.split('`').skip(2).step_by(2);
    match nearest(key, known) {
        Some(known) => format!("unknown key `{key}`: did you mean `{known}`?"),
        None => format!("unknown key `{key}`{table} (docs/configuration.md has the keys)"),
    }
}

/// Returns the known word that is most like `word`, if at most a third of its letters are wrong.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (wrong, nearest) = known.map(|known| (distance(word, known), known)).min()?;
    (wrong * 3 <= word.chars().count().max(3)).then_some(nearest)
}

/// Returns the table that contains a line, such as ` in [[disk]]`. None: the line is before all.
fn table_at(text: &str, line: usize) -> Option<&str> {
    let header = text.lines().take(line).filter(|line| line.starts_with('[')).last();
    match header.map(|header| header.split('#').next().unwrap_or_default().trim()) {
        Some("[[disk]]") => Some(" in [[disk]]"),
        Some("[nbd]") => Some(" in [nbd]"),
        Some(_) => Some(" in this table"),
        None => None,
    }
}

/// Returns the Damerau-Levenshtein distance of two words: the number of letters to insert, remove,
/// replace or transpose.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<_>, Vec<_>) = (one.chars().collect(), other.chars().collect());
    let mut rows = vec![(0..=other.len()).collect::<Vec<_>>()];
    for i in 1..=one.len() {
        let mut row = vec![i];
        for j in 1..=other.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}
