//! Changes the text of a file of `conf.d`, and keeps the comments and the order of its keys.
//!
//! In: the text as it is, and the keys that the disk of the file has now. Out: the new text. What
//! must hold: the new text has these keys and no others. Values that do not change stay as an
//! operator has written them. A comment stays, also if its key is gone.

use toml::{Table, Value};
use toml_edit::{ArrayOfTables, DocumentMut, Item};

/// First line of a file that has no text yet.
pub const HEADER: &str =
    "# ctl --persist changes this file, and keeps comments. Put anything else into another one.";
/// First line of files of earlier versions.
const OLD_HEADER: &str =
    "# ctl --persist rewrites this file as a whole: put anything else into another one.";

/// Reasons why a text cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    #[error("it is no TOML: {0}")]
    Parse(String),
    #[error("its disk cannot be changed: write it as one table [[disk]]")]
    Form,
}

fn parse(text: &str) -> Result<DocumentMut, EditError> {
    let line = |e: toml_edit::TomlError| e.message().to_string();
    text.parse().map_err(|e| EditError::Parse(line(e)))
}

/// Returns the text of a file with the disk. `old`: the present text, which has this disk only.
pub fn with_disk(old: Option<&str>, keys: &Table) -> Result<String, EditError> {
    let disk = Value::Array(vec![Value::Table(keys.clone())]);
    let wanted = Table::from_iter([("disk".to_string(), disk)]);
    let Some(old) = old else { return Ok(format!("{HEADER}\n{wanted}")) };
    let mut file = parse(old)?;
    let before = comments_before(&file, "remove");
    let before =
        before + &file.remove("remove").map(|item| comments(&item.to_string())).unwrap_or_default();
    let before_disk = comments_before(&file, "disk");
    let mut tables = match file.remove("disk") {
        Some(Item::ArrayOfTables(tables)) if tables.len() == 1 => tables,
        other => {
            let lost = other.map(|item| comments(&item.to_string())).unwrap_or_default();
            let lost = before_disk + &lost;
            let mut table = toml_edit::Table::new();
            table.decor_mut().set_prefix(lost);
            ArrayOfTables::from_iter([table])
        }
    };
    let table = tables.get_mut(0).ok_or(EditError::Form)?;
    let prefix = raw(table.decor().prefix()).to_string();
    table.decor_mut().set_prefix(before + &prefix);
    let after = set_keys(table, keys)?;
    file.insert("disk", Item::ArrayOfTables(tables));
    let trailing = after + raw(Some(file.trailing()));
    file.set_trailing(trailing);
    finished(&file, &wanted)
}

/// Returns the text of a file that removes the disk of earlier files. `old`: the present text.
pub fn without_disk(old: Option<&str>, name: &str) -> Result<String, EditError> {
    let wanted = Table::from_iter([("remove".to_string(), Value::Array(vec![name.into()]))]);
    let Some(old) = old else { return Ok(format!("{HEADER}\n{wanted}")) };
    let file = parse(old)?;
    if let Ok(text) = finished(&file, &wanted) {
        return Ok(text);
    }
    // Comments between the keys of the disk are about the disk that is gone.
    let prefix = match file.get("disk") {
        Some(Item::ArrayOfTables(tables)) => {
            tables.iter().map(|table| raw(table.decor().prefix())).collect()
        }
        _ => comments_before(&file, "disk"),
    };
    let prefix = comments_before(&file, "remove") + &prefix;
    let file = parse(&format!("{prefix}{wanted}{}", raw(Some(file.trailing()))))?;
    finished(&file, &wanted)
}

/// Returns the text of the file, if it has these keys.
fn finished(file: &DocumentMut, wanted: &Table) -> Result<String, EditError> {
    let text = file.to_string().replacen(OLD_HEADER, HEADER, 1);
    match text.parse::<Table>() {
        Ok(table) if table == *wanted => Ok(text),
        _ => Err(EditError::Form),
    }
}

/// Gives a table these keys. Returns the comments that no key follows.
fn set_keys(table: &mut toml_edit::Table, keys: &Table) -> Result<String, EditError> {
    let present: Table = table.to_string().parse().map_err(|_| EditError::Form)?;
    let mut left = String::new();
    let names: Vec<_> = table.iter().map(|(name, _)| name.to_string()).collect();
    for name in names {
        if !keys.contains_key(&name) {
            left += &comments_before(table, &name);
            if let Some(item) = table.remove(&name) {
                left += &comments(&item.to_string());
            }
        } else if !left.is_empty()
            && let Some(mut key) = table.key_mut(&name)
        {
            let prefix = raw(key.leaf_decor().prefix()).to_string();
            key.leaf_decor_mut().set_prefix(std::mem::take(&mut left) + &prefix);
        }
    }
    for (name, value) in keys {
        if present.get(name) == Some(value) {
            continue;
        }
        let mut new: toml_edit::Value = value.to_string().parse().map_err(|_| EditError::Form)?;
        if let Some(old) = table.get(name).and_then(Item::as_value) {
            *new.decor_mut() = old.decor().clone();
        }
        match table.get_mut(name) {
            // With the comments before the key.
            Some(item) if item.is_value() => *item = Item::Value(new),
            _ => {
                let old = table.remove(name).map(|item| comments(&item.to_string()));
                left += &old.unwrap_or_default();
                table.insert(name, Item::Value(new));
            }
        }
    }
    Ok(left)
}

/// Returns the comments before a key.
fn comments_before(table: &toml_edit::Table, name: &str) -> String {
    let key = table.key(name);
    key.map(|key| comments(raw(key.leaf_decor().prefix()))).unwrap_or_default()
}

/// Returns the comments of a text, a line each.
fn comments(text: &str) -> String {
    let lines = text.lines().filter_map(|line| Some(line.split_once('#')?.1));
    lines.map(|comment| format!("#{comment}\n")).collect()
}

fn raw(text: Option<&toml_edit::RawString>) -> &str {
    text.and_then(toml_edit::RawString::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Table {
        text.parse().unwrap()
    }

    const WRITTEN: &str = "\
# Of the shop. Ask Ada before you change it.

[[disk]]
# The name in the inventory.
name = \"a\"
image  =  'ram:1M' # no file yet
# During the backup.
iops = 5_000  # not more
vhost-user = \"/a\"
# The end.
";

    #[test]
    fn comments_and_the_order_of_keys_stay() {
        let mut new = keys(WRITTEN)["disk"][0].as_table().unwrap().clone();
        assert_eq!(with_disk(Some(WRITTEN), &new).unwrap(), WRITTEN);
        new.insert("iops".into(), 6000.into());
        let more = with_disk(Some(WRITTEN), &new).unwrap();
        assert_eq!(more, WRITTEN.replace("5_000", "6000"));
        new.insert("weight".into(), 300.into());
        let heavier = with_disk(Some(&more), &new).unwrap();
        let expected = more.replace("\"/a\"\n", "\"/a\"\nweight = 300\n");
        assert_eq!(heavier, expected);
        // The comments of a key that is gone are before the next one.
        new.remove("iops");
        let fewer = with_disk(Some(&heavier), &new).unwrap();
        let expected = expected.replace("iops = 5_000  # not more\n", "").replace(
            "# During the backup.\niops = 6000  # not more\n",
            "# During the backup.\n# not more\n",
        );
        assert_eq!(fewer, expected);
        new.remove("weight");
        new.remove("vhost-user");
        let fewest = with_disk(Some(&fewer), &new).unwrap();
        assert!(
            fewest.ends_with("yet\n# During the backup.\n# not more\n# The end.\n"),
            "{fewest}"
        );
    }

    #[test]
    fn a_file_that_removes_a_disk_keeps_comments_and_may_have_the_disk_again() {
        let disk = keys(WRITTEN)["disk"][0].as_table().unwrap().clone();
        let removed = without_disk(Some(WRITTEN), "a").unwrap();
        assert!(removed.starts_with("# Of the shop. Ask Ada"), "{removed}");
        assert!(removed.ends_with("remove = [\"a\"]\n# The end.\n"), "{removed}");
        assert_eq!(without_disk(Some(&removed), "a").unwrap(), removed);
        let again = with_disk(Some(&removed), &disk).unwrap();
        assert!(
            again.contains("# Of the shop. Ask Ada") && again.ends_with("# The end.\n"),
            "{again}"
        );
        assert_eq!(keys(&again)["disk"][0].as_table(), Some(&disk));
    }

    #[test]
    fn files_of_other_forms_get_the_keys_too() {
        let disk = keys("name = \"a\"\nimage = \"ram:1M\"\nbps = { rate = 5 }\n");
        for old in [
            "",
            "# why\ndisk = [{ name = \"a\", image = \"x\" }] # inline\n",
            "[[disk]]\nname = \"a\"\n[disk.bps]\n# why\nrate = 7\n",
            "remove = [\"a\"] # why\n[[disk]]\nname = \"a\"\n",
        ] {
            let new = with_disk(Some(old), &disk).unwrap();
            assert_eq!(keys(&new)["disk"][0].as_table(), Some(&disk), "{new}");
            assert_eq!(new.contains("# why"), old.contains("# why"), "{new}");
        }
        let earlier = format!("{OLD_HEADER}\n[[disk]]\nname = \"a\"\n");
        let new = with_disk(Some(&earlier), &disk).unwrap();
        assert!(new.starts_with(HEADER) && !new.contains(OLD_HEADER), "{new}");
        assert!(with_disk(Some("no TOML"), &disk).is_err());
        assert!(with_disk(None, &disk).unwrap().starts_with(HEADER));
    }
}
