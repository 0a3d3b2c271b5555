//! SIGHUP: reads the configuration and the certificates of NBD anew, and looks at the images' sizes again.
//!
//! In: the configuration file. Out: disks that come, go and change, and a log of it: each changed key with its old and its
//! new value, keys that only a restart applies, disks that could not be served. What must hold: a file that is wrong changes
//! nothing; a disk that cannot be as the file says stays as it was.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use blockyard_yard::Change;
use clap::Args;
use toml::{Table, Value};

use crate::cli::{DiskArgs, ServeOptions};
use crate::config::Config;
use crate::serve::{Server, check, read};

/// Keys of the file that are read at start only.
const AT_START: [&str; 4] = ["reactors", "fair-share", "costs", "xen"];

/// What the configuration file said when it was last applied.
pub struct Known {
    file: Table,
    at_start: Table,
}

impl Known {
    pub fn new(file: Table) -> Self {
        Known { at_start: file.clone(), file }
    }

    /// The table of a disk.
    fn disk(&self, name: &str) -> Table {
        table_of(&self.file, name)
    }
}

/// What became of the disks.
#[derive(Default)]
struct Tally {
    added: usize,
    changed: usize,
    removed: usize,
    skipped: usize,
}

impl Server {
    /// Applies the configuration file as it is now. What is wrong with it is logged, and leaves what runs as it is.
    pub fn reload(&mut self, options: &ServeOptions) {
        let config = match read(options) {
            Ok(config) => config,
            Err(e) => return tracing::error!("not reloaded: {e:#}"),
        };
        if let Some(e) = config.disks.iter().find_map(|d| check(d).err()) {
            return tracing::error!("not reloaded: {e:#}");
        }
        match options.nbd.or(&config.nbd).settings(&config.disks) {
            Ok(settings) => self.common.nbd.lock().unwrap_or_else(PoisonError::into_inner).set(settings),
            Err(e) => return tracing::error!("not reloaded: {e:#}"),
        }
        for key in AT_START {
            if let Some(change) = change(key, self.known.at_start.get(key), config.file.get(key)) {
                tracing::warn!("not applied: {change}: only a restart of the server does that");
            }
        }
        let nbd = changes(&inner(&self.known.file, "nbd"), &inner(&config.file, "nbd"));
        if !nbd.is_empty() {
            tracing::info!("changed for NBD: {nbd}");
        }
        self.log_groups(&inner(&config.file, "group"));
        // At once: closing and opening disks takes its time.
        self.yard.set_groups(config.group_knobs());
        let mut tally = Tally { changed: self.change_in_use(&config), ..Tally::default() };
        let old = self.remove_others(&config, &mut tally);
        // Those of toolstacks too.
        self.served().for_each(|disk| self.refresh(&disk.name));
        self.add_others(config.disks, old, &mut tally);
        self.known.file = config.file;
        if options.config.is_some() {
            let Tally { added, changed, removed, skipped } = tally;
            tracing::info!(
                "reloaded: disks added {added}, changed {changed}, removed {removed}, not as wished {skipped}"
            );
        }
    }

    /// Applies what can be changed while clients are connected: knobs of shares, and names of clients. Returns the number of
    /// disks that changed.
    fn change_in_use(&mut self, config: &Config) -> usize {
        let mut changed = 0;
        for served in &mut self.disks {
            let Some(args) = config.disks.iter().find(|args| is_same(served, args)) else { continue };
            if served == args {
                continue;
            }
            let name = args.name();
            let (knobs, clients) = (args.knobs(), args.tls_allow.clone());
            let change = Change {
                clients: (served.tls_allow != clients).then_some(clients),
                knobs: (served.knobs() != knobs).then_some(knobs),
            };
            if let Err(e) = self.yard.change(&name, change) {
                tracing::error!("{e}");
                continue;
            }
            let what = changes(&self.known.disk(&name), &table_of(&config.file, &name));
            tracing::info!(disk = name, "changed while it is in use: {what}");
            *served = args.clone();
            changed += 1;
        }
        changed
    }

    /// Removes the disks that the configuration has no more, or has otherwise. Returns these.
    fn remove_others(&mut self, config: &Config, tally: &mut Tally) -> Vec<DiskArgs> {
        let gone: Vec<_> = self.disks.extract_if(.., |args| !config.disks.contains(args)).collect();
        for args in &gone {
            let name = args.name();
            if config.disks.iter().any(|args| args.name() == name) {
                let what = changes(&self.known.disk(&name), &table_of(&config.file, &name));
                tracing::info!(disk = name, "changed: {what}: closing and opening it, which disconnects its guests");
            } else {
                tracing::info!(disk = name, "removed from the configuration: closing it");
                tally.removed += 1;
            }
            self.remove(&name);
        }
        gone
    }

    /// Adds the disks that are not served yet. `old`: those that were removed for it.
    fn add_others(&mut self, disks: Vec<DiskArgs>, mut old: Vec<DiskArgs>, tally: &mut Tally) {
        for args in disks {
            if self.disks.contains(&args) {
                continue;
            }
            let (name, tls_allow) = (args.name(), args.tls_allow.clone());
            let before = old.iter().position(|o| o.name() == name).map(|at| old.swap_remove(at));
            match (self.add(args), before) {
                (Ok(()), None) => tally.added += 1,
                (Ok(()), Some(_)) => tally.changed += 1,
                (Err(e), before) => {
                    tally.skipped += 1;
                    tracing::error!(disk = name, "it cannot be served as configured: {e:#}");
                    match before {
                        // But a client that may not have it any more may not.
                        Some(before) => self.restore(DiskArgs { tls_allow, ..before }),
                        None => tracing::error!(disk = name, "skipped: it is not served"),
                    }
                }
            }
        }
    }

    /// Serves a disk as before, until the next reload, because it cannot be opened as it is configured now.
    fn restore(&mut self, args: DiskArgs) {
        let name = args.name();
        match self.add(args) {
            Ok(()) => tracing::warn!(disk = name, "it is served as before"),
            Err(e) => tracing::error!(disk = name, "nor can it be served as before: {e:#}"),
        }
    }

    /// Takes over a size that a person changed.
    fn refresh(&self, disk: &str) {
        match self.yard.refresh(disk) {
            Ok(Some(size)) => tracing::info!(disk, bytes = size.new, old = size.old, "the image has a new size"),
            Ok(None) => {}
            Err(e) => tracing::error!(disk, "{:#}", anyhow::Error::from(e)),
        }
    }

    fn log_groups(&self, new: &Table) {
        let old = inner(&self.known.file, "group");
        for group in old.keys() {
            let what = changes(&inner(&old, group), &inner(new, group));
            if new.contains_key(group) && !what.is_empty() {
                tracing::info!(group, "changed: {what}");
            }
        }
    }
}

/// Whether the configuration describes the disk that is served, apart from the knobs of its share and the names of its clients.
fn is_same(served: &DiskArgs, args: &DiskArgs) -> bool {
    let same = DiskArgs { tls_allow: served.tls_allow.clone(), ..args.clone() };
    same.with(&served.knobs()) == *served
}

/// The `[[disk]]` table of a disk, empty if there is none.
fn table_of(file: &Table, name: &str) -> Table {
    let disks = file.get("disk").and_then(Value::as_array).into_iter().flatten();
    let named = |table: &&Table| Table::clone(table).try_into().is_ok_and(|args: DiskArgs| args.name() == name);
    disks.filter_map(Value::as_table).find(named).cloned().unwrap_or_default()
}

/// A table in a table, empty if there is none.
fn inner(table: &Table, key: &str) -> Table {
    table.get(key).and_then(Value::as_table).cloned().unwrap_or_default()
}

/// The keys in which two tables differ, with both values: `queues: 1 -> 4, read-only: false -> true`.
fn changes(old: &Table, new: &Table) -> String {
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let all: Vec<_> = keys.into_iter().filter_map(|key| change(key, old.get(key), new.get(key))).collect();
    all.join(", ")
}

/// A key with its old and its new value, if they differ.
fn change(key: &str, old: Option<&Value>, new: Option<&Value>) -> Option<String> {
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

/// The default of a key, as `--help` has it.
fn default_of(key: &str) -> Option<String> {
    if let Some(default) = [("reactors", "1"), ("fair-share", "true")].iter().find(|(name, _)| *name == key) {
        return Some(default.1.into());
    }
    let options = DiskArgs::augment_args(clap::Command::new(""));
    let option = options.get_arguments().find(|option| option.get_id().as_str() == key.replace('-', "_"))?;
    let values = option.get_default_values().iter().map(|value| value.to_string_lossy());
    Some(values.collect::<Vec<_>>().join(",")).filter(|values| !values.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_have_old_and_new_values() {
        let old = "queues = 2\nimage = \"a\"\ntls-allow = [\"x\"]\nprime = true\n".parse().unwrap();
        let new = "image = \"b\"\ntls-allow = [\"x\"]\ncache = \"unsafe\"\niops = \"1k\"\n".parse().unwrap();
        let expected = "cache: none -> \"unsafe\", image: \"a\" -> \"b\", iops: not set -> \"1k\", prime: true -> false, \
                        queues: 2 -> 1";
        assert_eq!(changes(&old, &new), expected);
        assert_eq!(changes(&old, &old), "");
        assert_eq!(change("reactors", None, Some(&Value::from(2))).as_deref(), Some("reactors: 1 -> 2"));
        assert_eq!(change("fair-share", Some(&false.into()), None).as_deref(), Some("fair-share: false -> true"));
    }
}
