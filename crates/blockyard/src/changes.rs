//! Differences between two configuration files, as text for the log.

use std::collections::BTreeSet;

use clap::Args;
use toml::{Table, Value};

use crate::options::disk::DiskArgs;

/// The configuration file as the server applied it last.
pub struct Known {
    pub file: Table,
    /// The configuration file as the server read it at its start.
    pub at_start: Table,
}

impl Known {
    pub fn new(file: Table) -> Self {
        Known { at_start: file.clone(), file }
    }

    /// Returns the `[[disk]]` table of a disk, empty if there is none.
    pub fn disk(&self, name: &str) -> Table {
        table_of(&self.file, name)
    }
}

/// Returns the `[[disk]]` table of a disk in `file`, empty if there is none.
pub fn table_of(file: &Table, name: &str) -> Table {
    let disks = file.get("disk").and_then(Value::as_array).into_iter().flatten();
    let named = |table: &&Table| {
        Table::clone(table).try_into().is_ok_and(|args: DiskArgs| args.name() == name)
    };
    disks.filter_map(Value::as_table).find(named).cloned().unwrap_or_default()
}

/// Returns the table under `key`, empty if there is none.
pub fn inner(table: &Table, key: &str) -> Table {
    table.get(key).and_then(Value::as_table).cloned().unwrap_or_default()
}

/// Returns the keys in which two tables differ, with both values: `queues: 1 -> 4, read-only: false
/// -> true`.
pub fn changes(old: &Table, new: &Table) -> String {
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let all: Vec<_> =
        keys.into_iter().filter_map(|key| change(key, old.get(key), new.get(key))).collect();
    all.join(", ")
}

/// Returns a key with its old and its new value, or `None` if the values are equal.
pub fn change(key: &str, old: Option<&Value>, new: Option<&Value>) -> Option<String> {
    if old == new {
        return None;
    }
    let is_switch = old.or(new).is_some_and(Value::is_bool);
    let show = |value: Option<&Value>| match value {
        Some(value) => value.to_string(),
        None if is_switch => default_of(key).unwrap_or_else(|| "false".into()),
        None => default_of(key).unwrap_or_else(|| "not set".into()),
    };
    let (old, new) = (show(old), show(new));
    (old != new).then(|| format!("{key}: {old} -> {new}"))
}

/// Returns the default of a key. It is the default of the option with the same name.
fn default_of(key: &str) -> Option<String> {
    if let Some(default) =
        [("reactors", "1"), ("fair-share", "true")].iter().find(|(name, _)| *name == key)
    {
        return Some(default.1.into());
    }
    let options = DiskArgs::augment_args(clap::Command::new(""));
    let option =
        options.get_arguments().find(|option| option.get_id().as_str() == key.replace('-', "_"))?;
    let values = option.get_default_values().iter().map(|value| value.to_string_lossy());
    Some(values.collect::<Vec<_>>().join(",")).filter(|values| !values.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_have_old_and_new_values() {
        let old = "queues = 2\nimage = \"a\"\ntls-allow = [\"x\"]\nprime = true\n".parse().unwrap();
        let new = "image = \"b\"\ntls-allow = [\"x\"]\ncache = \"unsafe\"\niops = \"1k\"\n"
            .parse()
            .unwrap();
        let expected = "cache: none -> \"unsafe\", image: \"a\" -> \"b\", iops: not set -> \"1k\", \
                        prime: true -> false, queues: 2 -> 1";
        assert_eq!(changes(&old, &new), expected);
        assert_eq!(changes(&old, &old), "");
        assert_eq!(
            change("reactors", None, Some(&Value::from(2))).as_deref(),
            Some("reactors: 1 -> 2")
        );
        assert_eq!(
            change("fair-share", Some(&false.into()), None).as_deref(),
            Some("fair-share: false -> true")
        );
    }
}
