//! SIGHUP and `ctl reload`: reads the configuration and the NBD certificates again, and updates the
//! sizes of images.
//!
//! In: the configuration file. Out: disks that are added, removed and changed. The log has each
//! changed key with its old and new value, the keys that only a restart applies, and the disks that
//! could not be served. What must hold: a file with an error changes nothing. If a disk cannot be
//! served as the file says, its old configuration stays.

mod compare;
pub mod reloader;
mod report;

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use blockyard_control::types::{DiskChange, FailedDisk, Ignored, Reload};
use toml::Table;

use crate::changes::{change, changes, describe, inner};
use crate::claims::Claims;
use crate::config::Config;
use crate::disks::book::{Entry, HeldDisk, HoldError};
use crate::disks::check;
use crate::disks::identities::Images;
use crate::exports::bound::{self, Address, Bound};
use crate::options::disk::DiskArgs;
use crate::server::error::RemoveError;
use crate::server::{Adding, STORAGE_TIME, Server, reopening, sandbox, wait_unless};
use compare::{compare, is_same, may_be_stale, of_file, stale, was_kept};
use report::{group_changes, log_others, log_size, lost_groups, note, note_new, summary, without};

/// Keys of the file that are read at start only.
const AT_START: [&str; 12] = [
    "reactors",
    "fair-share",
    "costs",
    "state-folder",
    "xen",
    "api",
    "socket-mode",
    "socket-group",
    "sandbox",
    "allow-folders",
    "user",
    "metrics",
];

/// Keys of these that an upgrade does not apply, or refuses.
const AT_RESTART: [&str; 3] = ["state-folder", "xen", "user"];

/// Returns how to apply the change of a key that is read at start only. `was_set`: whether the file
/// had the key at start.
fn how_to_apply(key: &str, was_set: bool) -> &'static str {
    // An upgrade can open the API's socket, but neither move nor close it.
    match AT_RESTART.contains(&key) || (key == "api" && was_set) {
        true => "restart the server to apply it",
        false => "restart or upgrade the server to apply it",
    }
}

/// Longest wait of SIGHUP for the end of another reload or an upgrade, and of a reload for the
/// sizes of images.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// Closes the sockets that no disk has taken at the end of a reload.
struct Unused<'a>(&'a Bound);

impl Drop for Unused<'_> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// A disk that was closed to be opened again.
struct Closed {
    entry: Entry,
    /// The old image has the data of the disk.
    may_restore: bool,
}

impl Server {
    /// Applies the current configuration file. Logs an error and changes nothing if it is wrong.
    pub fn reload(&self) {
        let hurry = self.waits.hurry();
        let Some(only) = self.exclude_reloads_within(PATIENCE) else {
            let waits = self.waits.describe();
            tracing::error!("not reloaded: another reload or an upgrade runs{waits}");
            return;
        };
        drop(hurry);
        if let Err(e) = self.apply_and_tell(&only, false) {
            tracing::error!("not reloaded: {e:#}");
        }
    }

    /// Like `reload`, without the log line about an error. `dry_run`: returns what would change,
    /// and changes nothing. Returns `None` if another reload or an upgrade runs.
    pub fn try_reload(&self, dry_run: bool) -> Option<anyhow::Result<Reload>> {
        let only = match dry_run || !self.waits.are_there() {
            true => self.try_exclude_reloads()?,
            // The one that runs ends its wait for storage that hangs.
            false => {
                let _hurry = self.waits.hurry();
                self.exclude_reloads_within(PATIENCE)?
            }
        };
        Some(self.apply_and_tell(&only, dry_run))
    }

    /// Excludes reloads and upgrades. Returns `None` if one runs, or another server has the disks.
    pub fn try_exclude_reloads(&self) -> Option<MutexGuard<'_, ()>> {
        let only = match self.reloading.try_lock() {
            Ok(only) => only,
            Err(TryLockError::Poisoned(only)) => only.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!self.hand_overs.is_done()).then_some(only)
    }

    /// Like `try_exclude_reloads`, but waits for the end of one that runs.
    pub fn exclude_reloads_within(&self, limit: Duration) -> Option<MutexGuard<'_, ()>> {
        let until = Instant::now() + limit;
        loop {
            if let Some(only) = self.try_exclude_reloads() {
                return Some(only);
            }
            // The next signal must not wait for the storage of a disk that is handed over.
            if self.hand_overs.is_done() || Instant::now() > until {
                return None;
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn apply_and_tell(&self, only: &MutexGuard<'_, ()>, dry_run: bool) -> anyhow::Result<Reload> {
        let done = self.apply(only, dry_run);
        if !dry_run {
            self.events.publish(summary(&done));
        }
        done
    }

    /// `_only`: no other reload runs.
    fn apply(&self, _only: &MutexGuard<'_, ()>, dry_run: bool) -> anyhow::Result<Reload> {
        let before = self.book.all();
        let images = Images::of(&before);
        let identify = |disk: &DiskArgs| images.known(disk);
        let config = Config::identified(&self.options, &identify)?;
        // The reload may fail, so the programs of the present disks stay reserved.
        let present = before.iter().map(|entry| &entry.args);
        sandbox::reserve(self.options.config.as_deref(), config.disks.iter().chain(present));
        if let Some(path) = &self.options.config {
            config.missing.check(self.known().missing, path)?;
        }
        config.api(&self.options.api).check()?;
        config.check_each(check)?;
        let settings = config.nbd_settings(&self.options.nbd)?;
        let plan = self.plan(&config, &before);
        let mut failed = conflicts(&config, &plan, &before, &images);
        let plan = without(plan, failed.clone());
        // What can fail comes before a client is disconnected.
        let present = bound::addresses(before.iter().map(|entry| &entry.args));
        let _bound = Unused(&self.common.bound);
        failed.extend(self.obstacles(&config, &plan, &present, dry_run));
        let mut plan = without(plan, failed.clone());
        if dry_run {
            return Ok(Reload { dry_run, ..plan });
        }
        config.warn();
        failed.iter().for_each(|FailedDisk { disk, error }| tracing::error!(disk, "{error}"));
        self.common.nbd.lock().unwrap_or_else(PoisonError::into_inner).set(settings);
        log_others(&plan);
        // The groups' settings come first, because closing and opening disks takes long.
        self.yard.set_groups(config.group_knobs());
        self.book.follow(&config.disks);
        self.change_in_use(&config, &mut plan, &before, &mut failed);
        let old = self.remove_others(&config, &mut plan, &before, &mut failed);
        // A disk may get the socket of one that could not be opened, and is gone.
        self.end_others(&config);
        // Update the sizes of all disks, including those of toolstacks.
        let sizes: Vec<_> =
            self.served().map(|disk| (self.yard.begin_refresh(&disk.name), disk.name)).collect();
        let until = Instant::now() + PATIENCE;
        for (size, disk) in sizes {
            match size.wait_at_most(until.saturating_duration_since(Instant::now())) {
                Ok(size) => log_size(&disk, size),
                Err(_goes_on) => tracing::error!(
                    disk,
                    "its size is not known yet: another command works on it, or its storage does \
                     not answer"
                ),
            }
        }
        self.add_others(&config, &plan, old, &mut failed);
        self.revoke(&config, &before, &failed);
        self.note_reloaded(&config, &failed);
        let mut known = self.known();
        (known.file, known.missing) = (config.file, config.missing);
        drop(known);
        let done = without(plan, failed);
        if self.options.config.is_some() {
            tracing::info!(
                "reloaded: disks added {}, changed {}, removed {}, failed {}",
                done.added.len(),
                done.changed.len(),
                done.removed.len(),
                done.failed.len()
            );
        }
        Ok(done)
    }

    pub fn known(&self) -> MutexGuard<'_, crate::changes::Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what a reload changes. `served`: the present disks. Disks that the API added stay.
    fn plan(&self, config: &Config, served: &[Entry]) -> Reload {
        let names: HashSet<_> = config.disks.iter().map(DiskArgs::name).collect();
        let present: HashMap<_, _> =
            served.iter().map(|entry| (entry.args.name(), entry)).collect();
        let mut plan = Reload::default();
        for (at, args) in config.disks.iter().enumerate() {
            let name = args.name();
            match present.get(&name) {
                None => plan.added.push(name),
                Some(entry) if entry.args == *args => {}
                Some(entry) => plan.changed.push(DiskChange {
                    disk: name,
                    keys: changes(&entry.keys, &config.keys(at)),
                    disconnects: !is_same(&entry.args, args),
                }),
            }
        }
        let gone = served.iter().filter(|entry| !entry.by_api).map(|entry| entry.args.name());
        plan.removed = gone.filter(|name| !names.contains(name)).collect();
        let known = self.known();
        let both = |key| (inner(&known.file, key), inner(&config.file, key));
        let (old, new) = both("group");
        plan.groups = group_changes(&old, &new);
        let (old, new) = both("nbd");
        plan.nbd = changes(&old, &new);
        let at_start = |key| change(key, known.at_start.get(key), config.file.get(key));
        plan.ignored = AT_START
            .into_iter()
            .filter_map(at_start)
            .map(|change| {
                let was_set = known.at_start.contains_key(&change.key);
                Ignored { reason: how_to_apply(&change.key, was_set).into(), change }
            })
            .chain(lost_groups(&config.file, served, &names))
            .collect();
        plan
    }

    /// Applies the new `tls-allow` of disks that stay as they are: it may revoke the access of a
    /// client.
    fn revoke(&self, config: &Config, before: &[Entry], failed: &[FailedDisk]) {
        for FailedDisk { disk, .. } in failed {
            let new = config.disks.iter().find(|args| args.name() == *disk);
            let (Some(new), Ok(held)) = (new, self.book.hold(disk)) else { continue };
            let entry = held.entry();
            // The file that was read may have an older value.
            if was_kept(&entry, before) {
                continue;
            }
            let Entry { args, keys, .. } = entry;
            let args = DiskArgs { tls_allow: new.tls_allow.clone(), ..args };
            if let Err(e) = self.change(&held, args, keys) {
                tracing::error!(disk, "its tls-allow stays: {:#}", anyhow::Error::from(e));
            }
        }
    }

    /// Returns the disks that must stay open, although their changes need that they are opened
    /// again. Binds the new sockets of the others. `dry_run`: binds nothing. Then it also returns
    /// the new disks that cannot be opened. `present`: addresses on which the server listens.
    fn obstacles(
        &self,
        config: &Config,
        plan: &Reload,
        present: &HashSet<Address>,
        dry_run: bool,
    ) -> Vec<FailedDisk> {
        let again = plan.changed.iter().filter(|change| change.disconnects);
        let again: HashSet<_> = again.map(|change| &change.disk).collect();
        let new: HashSet<_> = plan.added.iter().filter(|_| dry_run).collect();
        let failed = config.disks.iter().filter_map(|args| {
            let disk = args.name();
            if new.contains(&disk) {
                let error = reopening::unopenable(args);
                let error = error.or_else(|| bound::probe(args, present).err())?;
                return Some(FailedDisk { disk, error: format!("{error:#}") });
            }
            if !again.contains(&disk) {
                return None;
            }
            let why = reopening::obstacle(&self.yard.info(&disk)?, args);
            let why = why.or_else(|| {
                let bound = match dry_run {
                    true => bound::probe(args, present),
                    false => self.common.bound.bind(args, present),
                };
                bound.err().map(|e| format!("{e:#}"))
            });
            let error = format!("the disk stays as it is: {}", why?);
            Some(FailedDisk { disk, error })
        });
        failed.collect()
    }

    /// Returns why a disk that this command holds must stay open: a job may have begun or ended
    /// since the plan was made. None begins while the disk is held.
    fn obstacle_now(&self, config: &Config, disk: &str) -> Option<String> {
        if self.has_job(disk) {
            return Some(reopening::JOB.into());
        }
        let args = config.disks.iter().find(|args| args.name() == disk)?;
        reopening::obstacle(&self.yard.info(disk)?, args)
    }

    /// Applies changes that need no reconnection.
    fn change_in_use(
        &self,
        config: &Config,
        plan: &mut Reload,
        before: &[Entry],
        failed: &mut Vec<FailedDisk>,
    ) {
        for change in plan.changed.iter_mut().filter(|change| !change.disconnects) {
            let held = self.book.hold(&change.disk).map_err(anyhow::Error::from);
            let changed = held.and_then(|held| {
                compare(&held.entry(), before, config, change)?;
                if change.disconnects {
                    anyhow::bail!("{}", stale(&change.disk));
                }
                self.change_held(&held, config, change)
            });
            if let Err(e) = changed {
                failed.push(note(&change.disk, &e));
            }
        }
    }

    /// Applies changes of a held disk that need no reconnection.
    fn change_held(
        &self,
        held: &HeldDisk<'_>,
        config: &Config,
        change: &DiskChange,
    ) -> anyhow::Result<()> {
        let DiskChange { disk, keys, .. } = change;
        let Some((args, table)) = of_file(config, disk) else { return Ok(()) };
        self.change(held, args.clone(), table)?;
        held.follows_file();
        tracing::info!(disk, "changed without closing it: {}", describe(keys));
        Ok(())
    }

    /// Removes the disks that are gone from the configuration, and those that must be opened again.
    /// Returns the latter.
    fn remove_others(
        &self,
        config: &Config,
        plan: &mut Reload,
        before: &[Entry],
        failed: &mut Vec<FailedDisk>,
    ) -> HashMap<String, Closed> {
        // All disks together have this time. One that hangs must not use up that of the others.
        let until = Instant::now() + STORAGE_TIME;
        let left = || until.saturating_duration_since(Instant::now()).max(PATIENCE);
        for disk in &plan.removed {
            if let Err(e) = self.remove_gone(disk, before, left()) {
                failed.push(note(disk, &e));
            }
        }
        let mut old = HashMap::new();
        for change in plan.changed.iter_mut().filter(|change| change.disconnects) {
            match self.close_changed(config, before, change, &left) {
                Ok(Some(closed)) => drop(old.insert(change.disk.clone(), closed)),
                Ok(None) => {}
                Err(e) => failed.push(note(&change.disk, &e)),
            }
        }
        old
    }

    /// Removes a disk that is gone from the configuration.
    fn remove_gone(&self, disk: &str, before: &[Entry], limit: Duration) -> anyhow::Result<()> {
        let held = match self.book.hold(disk) {
            // A call has removed it meanwhile.
            Err(HoldError::NotFound(_)) => return Ok(()),
            held => held?,
        };
        anyhow::ensure!(!may_be_stale(&held.entry(), before), "{}", stale(disk));
        tracing::info!(disk, "removed from the configuration: closing it");
        anyhow::ensure!(
            self.remove(held, limit)?,
            "disk \"{disk}\": it is removed, but its image could not be flushed: writes since its \
             last flush may be lost"
        );
        Ok(())
    }

    /// Closes a disk that must be opened again. Returns `None` if it needs that no more. The disk
    /// stays as it is if it cannot make its writes durable: a later flush would report success for
    /// lost writes.
    fn close_changed(
        &self,
        config: &Config,
        before: &[Entry],
        change: &mut DiskChange,
        left: &dyn Fn() -> Duration,
    ) -> anyhow::Result<Option<Closed>> {
        let held = self.book.hold(&change.disk)?;
        compare(&held.entry(), before, config, change)?;
        let DiskChange { disk, keys, disconnects } = change;
        if !*disconnects {
            return self.change_held(&held, config, change).map(|()| None);
        }
        if let Some(why) = self.obstacle_now(config, disk) {
            anyhow::bail!("the disk stays as it is: {why}");
        }
        self.flush_within(disk, left())?;
        tracing::info!(
            disk,
            "changed: {}: closing and opening it; its clients are disconnected",
            describe(keys)
        );
        let info = self.yard.info(disk);
        let may_restore = !info.is_some_and(|info| reopening::has_overlay(&info));
        let entry = held.entry();
        match self.remove(held, left()) {
            Ok(true) => Ok(Some(Closed { entry, may_restore })),
            Ok(false) => {
                anyhow::bail!("disk \"{disk}\": its writes may be lost, so it is not opened again")
            }
            Err(e @ RemoveError::GoesOn { .. }) => {
                anyhow::bail!("{e}; it is not opened again: reload when it has ended")
            }
            Err(e) => Err(e.into()),
        }
    }

    /// Makes all answered writes of a disk durable, before it is closed.
    fn flush_within(&self, disk: &str, limit: Duration) -> anyhow::Result<()> {
        let (begun, listed) = (Instant::now(), self.waits.list(disk, "is flushed"));
        match wait_unless(self.yard.begin_flush(disk)?, limit, || listed.is_over()) {
            Ok(flushed) => Ok(flushed?),
            Err(_goes_on) => anyhow::bail!(
                "disk \"{disk}\" stays as it is: its flush has not ended after {} s and goes on; its \
                 storage may not answer",
                begun.elapsed().as_secs()
            ),
        }
    }

    /// Adds the disks that are not served yet. `old`: the disks that `remove_others` removed.
    fn add_others(
        &self,
        config: &Config,
        plan: &Reload,
        mut old: HashMap<String, Closed>,
        failed: &mut Vec<FailedDisk>,
    ) {
        let disks = || config.disks.iter().enumerate().map(|(at, args)| (at, args, args.name()));
        // One after the other, and before new disks: the old configuration of a disk that fails
        // must still be free of conflicts.
        for (at, args, name) in disks() {
            let Some(before) = old.remove(&name) else { continue };
            let Err(e) = self.add(args.clone(), config.keys(at), false) else { continue };
            let goes_on = e.goes_on();
            failed.push(note_new(&name, e));
            if goes_on {
                continue;
            }
            let Closed { entry: before, may_restore: true } = before else {
                tracing::error!(disk = name, "its old image is below a snapshot: not served");
                continue;
            };
            // Keep the new tls-allow: it may revoke the access of a client.
            let tls_allow = args.tls_allow.clone();
            let args = DiskArgs { tls_allow, ..before.args };
            self.restore(args, before.keys, false);
            self.book.note_set(&name, before.set);
        }
        // New disks open in parallel, as at start.
        let new: HashSet<_> = plan.added.iter().collect();
        let adding: Vec<_> = disks()
            .filter(|(_, _, name)| new.contains(name))
            .map(|(at, args, name)| (name, self.begin_add(args.clone(), config.keys(at), false)))
            .collect();
        for (name, adding) in adding {
            let Err(e) = adding.and_then(Adding::wait) else { continue };
            if !e.goes_on() {
                tracing::error!(disk = name, "the disk is not served");
            }
            failed.push(note_new(&name, e));
        }
    }

    /// Serves a disk with its old configuration, because the new one failed. After a reload the
    /// next one tries the new one again.
    fn restore(&self, args: DiskArgs, keys: Table, by_api: bool) {
        let name = args.name();
        reopening::log_restored(&name, self.add(args, keys, by_api));
    }
}

/// Returns the disks that cannot be served as configured, because a disk that the API added has
/// something of theirs.
fn conflicts(config: &Config, plan: &Reload, served: &[Entry], images: &Images) -> Vec<FailedDisk> {
    let names: HashSet<_> = config.disks.iter().map(DiskArgs::name).collect();
    let stays = |entry: &&Entry| entry.by_api && !names.contains(&entry.args.name());
    let mut claims = Claims::default();
    for Entry { args, image, .. } in served.iter().filter(stays) {
        // They are served, so they have no conflict.
        let _ = claims.add(args, image.clone());
    }
    let again = plan.changed.iter().filter(|change| change.disconnects).map(|change| &change.disk);
    let begins: HashSet<_> = plan.added.iter().chain(again).collect();
    let begins = |args: &&DiskArgs| begins.contains(&args.name());
    let failed = config.disks.iter().filter(begins).filter_map(|args| {
        let error = images.look(args).and_then(|image| claims.add(args, image)).err()?;
        Some(FailedDisk { disk: args.name(), error })
    });
    failed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_says_whether_an_upgrade_applies_it() {
        assert!(AT_RESTART.iter().all(|key| AT_START.contains(key)));
        let upgrades = |key, was_set| how_to_apply(key, was_set).contains("upgrade");
        assert!(upgrades("reactors", true) && upgrades("metrics", true) && upgrades("api", false));
        assert!(!upgrades("api", true) && !upgrades("state-folder", false));
    }

    #[test]
    fn the_manual_names_all_keys_that_are_read_at_start_only() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operate.md");
        let text = std::fs::read_to_string(path).unwrap();
        let begin = text.find("- These are read only at start:").unwrap();
        let list = text[begin..].split("\n- ").next().unwrap();
        for key in AT_START {
            assert!(list.contains(&format!("`{key}`")) || list.contains(&format!("`[{key}]`")));
        }
    }
}
