//! Differences between two configuration files, as text for the log.

use std::collections::BTreeSet;

use blockyard_control::types::KeyChange;
use clap::Args;
use toml::{Table, Value};

use crate::config::Config;
use crate::config::files::Missing;
use crate::options::disk::DiskArgs;

/// The configuration file as the server applied it last.
pub struct Known {
    pub file: Table,
    /// The configuration file as the server read it at its start.
    pub at_start: Table,
    pub missing: Missing,
}

impl Known {
    pub fn new(config: &Config) -> Self {
        let Config { file, missing, .. } = config;
        Known { at_start: file.clone(), file: file.clone(), missing: *missing }
    }
}

/// Returns the table under `key`, empty if there is none.
pub fn inner(table: &Table, key: &str) -> Table {
    table.get(key).and_then(Value::as_table).cloned().unwrap_or_default()
}

/// Returns the keys in which two tables differ, with both values.
pub fn changes(old: &Table, new: &Table) -> Vec<KeyChange> {
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    keys.into_iter().filter_map(|key| change(key, old.get(key), new.get(key))).collect()
}

/// Describes changes: `queues: 1 -> 4, read-only: false -> true`.
pub fn describe(changes: &[KeyChange]) -> String {
    let each = changes.iter().map(|KeyChange { key, old, new }| format!("{key}: {old} -> {new}"));
    each.collect::<Vec<_>>().join(", ")
}

/// Returns a key with its old and its new value, or `None` if the values are equal.
pub fn change(key: &str, old: Option<&Value>, new: Option<&Value>) -> Option<KeyChange> {
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
    (old != new).then(|| KeyChange { key: key.into(), old, new })
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
        assert_eq!(describe(&changes(&old, &new)), expected);
        assert_eq!(changes(&old, &old), []);
        let (two, no) = (Value::from(2), Value::from(false));
        let one = |key, old: Option<&Value>, new| describe(change(key, old, new).as_slice());
        assert_eq!(one("reactors", None, Some(&two)), "reactors: 1 -> 2");
        assert_eq!(one("fair-share", Some(&no), None), "fair-share: false -> true");
    }
}
