//! SIGHUP: reads the configuration and the certificates of NBD anew, and looks at the images' sizes
//! again.
//!
//! In: the configuration file. Out: disks that come, go and change, and a log of it: each changed
//! key with its old and its new value, keys that only a restart applies, disks that could not be
//! served. What must hold: a file that is wrong changes nothing; a disk that cannot be as the file
//! says stays as it was.

use std::sync::PoisonError;

use blockyard_yard::Change;
use toml::Table;

use crate::changes::{change, changes, inner, table_of};
use crate::config::Config;
use crate::disks::check;
use crate::nbd;
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::serve::Server;

/// Keys of the file that are read at start only.
const AT_START: [&str; 4] = ["reactors", "fair-share", "costs", "xen"];

/// What became of the disks.
#[derive(Default)]
struct Tally {
    added: usize,
    changed: usize,
    removed: usize,
    skipped: usize,
}

impl Server {
    /// Applies the configuration file as it is now. What is wrong with it is logged, and leaves
    /// what runs as it is.
    pub fn reload(&mut self, options: &ServeOptions) {
        let config = match Config::of(options) {
            Ok(config) => config,
            Err(e) => return tracing::error!("not reloaded: {e:#}"),
        };
        if let Some(e) = config.disks.iter().find_map(|d| check(d).err()) {
            return tracing::error!("not reloaded: {e:#}");
        }
        match nbd::settings(&options.nbd.or(&config.nbd), &config.disks) {
            Ok(settings) => {
                self.common.nbd.lock().unwrap_or_else(PoisonError::into_inner).set(settings)
            }
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

    /// Applies what can be changed while clients are connected: knobs of shares, and names of
    /// clients. Returns the number of disks that changed.
    fn change_in_use(&mut self, config: &Config) -> usize {
        let mut changed = 0;
        for served in &mut self.disks {
            let Some(args) = config.disks.iter().find(|args| is_same(served, args)) else {
                continue;
            };
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
                tracing::info!(
                    disk = name,
                    "changed: {what}: closing and opening it, which disconnects its guests"
                );
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

    /// Serves a disk as before, until the next reload, because it cannot be opened as it is
    /// configured now.
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
            Ok(Some(size)) => {
                tracing::info!(disk, bytes = size.new, old = size.old, "the image has a new size")
            }
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

/// Whether the configuration describes the disk that is served, apart from the knobs of its share
/// and the names of its clients.
fn is_same(served: &DiskArgs, args: &DiskArgs) -> bool {
    let same = DiskArgs { tls_allow: served.tls_allow.clone(), ..args.clone() };
    same.with(&served.knobs()) == *served
}
