//! SIGHUP: reads the configuration and the NBD certificates again, and updates the sizes of images.
//!
//! In: the configuration file. Out: disks that are added, removed and changed. The log has each
//! changed key with its old and new value, the keys that only a restart applies, and the disks that
//! could not be served. What must hold: a file with an error changes nothing. If a disk cannot be
//! served as the file says, its old configuration stays.

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

/// Numbers of disks for the final log line.
#[derive(Default)]
struct Tally {
    added: usize,
    changed: usize,
    removed: usize,
    skipped: usize,
}

impl Server {
    /// Applies the current configuration file. Logs an error and changes nothing if it is wrong.
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
                tracing::warn!("not applied: {change}: restart the server to apply it");
            }
        }
        let nbd = changes(&inner(&self.known.file, "nbd"), &inner(&config.file, "nbd"));
        if !nbd.is_empty() {
            tracing::info!("changed for NBD: {nbd}");
        }
        self.log_groups(&inner(&config.file, "group"));
        // The groups' settings come first, because closing and opening disks takes long.
        self.yard.set_groups(config.group_knobs());
        let mut tally = Tally { changed: self.change_in_use(&config), ..Tally::default() };
        let old = self.remove_others(&config, &mut tally);
        // Update the sizes of all disks, including those of toolstacks.
        self.served().for_each(|disk| self.refresh(&disk.name));
        self.add_others(config.disks, old, &mut tally);
        self.known.file = config.file;
        if options.config.is_some() {
            let Tally { added, changed, removed, skipped } = tally;
            tracing::info!(
                "reloaded: disks added {added}, changed {changed}, removed {removed}, failed \
                 {skipped}"
            );
        }
    }

    /// Applies changes that need no reconnection: weight, limits, reservations and `tls-allow`.
    /// Returns the number of disks that changed.
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
            tracing::info!(disk = name, "changed without closing it: {what}");
            *served = args.clone();
            changed += 1;
        }
        changed
    }

    /// Removes the disks that are gone from the configuration or differ from it. Returns them.
    fn remove_others(&mut self, config: &Config, tally: &mut Tally) -> Vec<DiskArgs> {
        let gone: Vec<_> = self.disks.extract_if(.., |args| !config.disks.contains(args)).collect();
        for args in &gone {
            let name = args.name();
            if config.disks.iter().any(|args| args.name() == name) {
                let what = changes(&self.known.disk(&name), &table_of(&config.file, &name));
                tracing::info!(
                    disk = name,
                    "changed: {what}: closing and opening it; its clients are disconnected"
                );
            } else {
                tracing::info!(disk = name, "removed from the configuration: closing it");
                tally.removed += 1;
            }
            self.remove(&name);
        }
        gone
    }

    /// Adds the disks that are not served yet. `old`: the disks that `remove_others` removed.
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
                    tracing::error!(disk = name, "the disk cannot be served as configured: {e:#}");
                    match before {
                        // Keep the new tls-allow: it may revoke the access of a client.
                        Some(before) => self.restore(DiskArgs { tls_allow, ..before }),
                        None => tracing::error!(disk = name, "the disk is not served"),
                    }
                }
            }
        }
    }

    /// Serves a disk with its old configuration, because the new one failed. The next reload tries
    /// the new one again.
    fn restore(&mut self, args: DiskArgs) {
        let name = args.name();
        match self.add(args) {
            Ok(()) => tracing::warn!(disk = name, "the disk is served with its old configuration"),
            Err(e) => tracing::error!(
                disk = name,
                "the disk cannot be served with its old configuration either: {e:#}"
            ),
        }
    }

    /// Updates the size of a disk whose image was resized.
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

/// Returns whether `args` differs from the served disk only in keys that change without closing it:
/// weight, limits, reservations and `tls-allow`.
fn is_same(served: &DiskArgs, args: &DiskArgs) -> bool {
    let same = DiskArgs { tls_allow: served.tls_allow.clone(), ..args.clone() };
    same.with(&served.knobs()) == *served
}
