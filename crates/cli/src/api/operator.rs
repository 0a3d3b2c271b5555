//! What each call of the API does: commands of the yard, and changes of the book of disks.

use std::path::PathBuf;
use std::sync::{Arc, MutexGuard, RwLockReadGuard};
use std::time::{Duration, Instant, UNIX_EPOCH};

use blockyard_control::events::EventLog;
use blockyard_control::figures::Figures;
use blockyard_control::types::{
    ChangeQuery, Disconnect, Disk, DiskRow, Drain, Drained, Flushed, Fork, Job, JobRequest, Reload,
    Removed, Resize, Resized, Resumed, ServerInfo, State, Upgraded,
};
use blockyard_control::{Answer, Departure, Kind, Object, Operator, Problem, invalid};
use blockyard_program::output::shell;
use blockyard_yard::{DiskInfo, JobKind, Pending, YardError};
use toml::Table;

use super::keeping::{NOT_WRITTEN, check_top, conflict, kept, not_kept};
use super::persist::Persistence;
use super::{backups, places, sampled};
use crate::disks::book::{Entry, HeldDisk, HoldError};
use crate::disks::check_writes;
use crate::disks::figures::describe_clients;
use crate::handover;
use crate::options::disk::DiskArgs;
use crate::options::knobs;
use crate::server::{NotOpened, STORAGE_TIME, Server, reopening, words};

/// Longest wait of a call that keeps a change for the end of another one, or of a reload. Shorter
/// than the 5 s for which an upgrade that has begun waits for the call.
const CHANGE_TIME: Duration = Duration::from_secs(2);
/// Length of a drain if the caller gives none.
const DRAIN_SECONDS: u64 = 60;
/// Longest drain. A guest that waits longer may report the disk as broken.
const MAX_DRAIN_SECONDS: u64 = 600;

impl Server {
    /// Holds a disk for a command.
    pub(super) fn hold(&self, name: &str) -> Answer<HeldDisk<'_>> {
        self.book.hold(name).map_err(|e| match e {
            HoldError::NotFound(_) => match self.row(name) {
                Ok(_) => Problem::new(
                    Kind::Conflict,
                    format!(
                        "a Xen toolstack owns disk \"{name}\": detach it there (xl block-detach)"
                    ),
                ),
                Err(problem) => problem,
            },
            HoldError::Busy(_) => self.busy(&e),
        })
    }

    fn busy(&self, error: &HoldError) -> Problem {
        let what = match self.hand_overs.has_left_api() {
            // The client has connected before the end of the upgrade.
            true => "an upgrade has handed the disks over: connect again".into(),
            false => error.to_string(),
        };
        Problem::new(Kind::Conflict, what)
    }

    /// Returns an error if clients use the disk. `remedy`: what the caller can do.
    fn check_unused(&self, name: &str, remedy: &str) -> Answer<()> {
        let clients = self.yard.report(name).map_err(words::problem)?.clients;
        if clients.is_empty() {
            return Ok(());
        }
        let clients = describe_clients(&clients);
        let what = format!("disk \"{name}\" is in use by {clients}: {remedy}");
        Err(Problem::new(Kind::Conflict, what))
    }

    /// Closes a disk and opens it with another configuration, or with the old one if that fails.
    /// The disk stays in the book meanwhile. All steps together have [`STORAGE_TIME`].
    fn open_again<'a>(
        &'a self,
        held: HeldDisk<'a>,
        args: DiskArgs,
        keys: Table,
        force: bool,
    ) -> Answer<HeldDisk<'a>> {
        let until = Instant::now() + STORAGE_TIME;
        let left = || until.saturating_duration_since(Instant::now()).max(CHANGE_TIME);
        let (name, old) = (args.name(), held.entry());
        let served = self.info(&name)?;
        let busy = match () {
            () if served.is_drained => Some("it is drained: resume it first"),
            () if self.has_job(&name) => Some(reopening::JOB),
            () => None,
        };
        let busy = busy.map(String::from);
        if let Some(why) = busy.or_else(|| reopening::obstacle(&served, &args)) {
            let what = format!("the cache mode of disk \"{name}\" cannot change: {why}");
            return Err(Problem::new(Kind::Conflict, what).in_field("cache"));
        }
        if !force {
            let remedy = "disconnect, or change it with force=true (--force): clients must \
                          connect again";
            self.check_unused(&name, remedy)?;
        }
        // A disk that cannot make its writes durable stays as it is.
        outcome(&name, "flush", self.yard.begin_flush(&name), left())?;
        let modes = format!("{} -> {}", old.args.cache, args.cache);
        tracing::info!(disk = name, "changed: cache: {modes}: closing and opening it");
        let closed = self.close_held(held, left()).map_err(|e| {
            let problem = words::removal(e);
            let detail = format!("{}; it is not opened again: add it then", problem.detail);
            Problem { detail, ..problem }
        });
        let (held, is_flushed) = closed?;
        if !is_flushed {
            held.remove();
            let what = format!(
                "disk \"{name}\" could not be flushed when it was closed, so it is not opened \
                 again: writes may be lost"
            );
            self.note_ended(&old, &what);
            return Err(Problem::new(Kind::Failed, what));
        }
        let opened = self.begin_open(held, args, keys).wait_or_return(left(), || false);
        let NotOpened { error: e, held } = match opened {
            Ok(held) => return Ok(held),
            Err(not) => not,
        };
        let Some(held) = held else { return Err(Problem::new(Kind::Busy, e.to_string())) };
        let what = format!("disk \"{name}\" does not open with the new cache mode: {e:#}");
        let again = self.begin_open(held, old.args.clone(), old.keys.clone());
        let restored = again.wait_within(left(), || false);
        if restored.as_ref().is_err_and(|e| !e.goes_on()) {
            self.note_ended(&old, &what);
        }
        reopening::log_restored(&name, restored.map(HeldDisk::keep));
        Err(Problem::new(Kind::Failed, what))
    }

    /// Excludes upgrades for a call that changes disks: the new server would not know the change.
    pub(super) fn exclude_upgrades(&self) -> Answer<RwLockReadGuard<'_, ()>> {
        let what = "an upgrade runs: try again when it has ended";
        self.hand_overs.try_exclude().ok_or_else(|| Problem::new(Kind::Conflict, what))
    }

    /// Excludes reloads. Other calls that keep changes end soon, so this waits for them.
    pub(super) fn exclude_reloads(&self) -> Answer<MutexGuard<'_, ()>> {
        let only = self.exclude_reloads_within(CHANGE_TIME);
        only.ok_or_else(|| {
            let waits = self.waits.describe();
            let what = format!("a reload or an upgrade runs{waits}: try again when it has ended");
            Problem::new(Kind::Conflict, what)
        })
    }

    pub(super) fn info(&self, name: &str) -> Answer<DiskInfo> {
        if let Some(info) = self.yard.info(name) {
            return Ok(info);
        }
        match self.book.find(name) {
            Some(entry) if entry.is_opening => Ok(DiskInfo::opening(name.into())),
            Some(_) => {
                let what = format!(
                    "disk \"{name}\" is opened again, or an upgrade hands it over: try again"
                );
                Err(Problem::new(Kind::Conflict, what))
            }
            None => Err(words::problem(YardError::NotFound { disk: name.into() })),
        }
    }

    /// Makes all answered writes of a disk durable.
    fn sync(&self, name: &str) -> Answer<()> {
        outcome(name, "flush", self.yard.begin_flush(name), STORAGE_TIME)
    }

    pub(super) fn row(&self, name: &str) -> Answer<DiskRow> {
        self.info(name).map(words::row)
    }

    /// Returns where changes are kept, if the caller asks for that.
    pub(super) fn persistence(&self, name: &str, wanted: bool) -> Answer<Option<Persistence>> {
        let (config, nbd) = (self.options.config.as_deref(), &self.options.nbd);
        let found = wanted.then(|| {
            let store = Persistence::of(config, nbd, name)?;
            // The folder may be younger than this server. From now on it must not go.
            self.known().missing.parts = false;
            Ok(store.with_served(&self.book.all()))
        });
        found.transpose().map_err(|e| conflict(&e))
    }

    fn job(&self, number: u64) -> Answer<blockyard_yard::Job> {
        let found = self.yard.jobs().into_iter().find(|job| job.number() == number);
        found.ok_or_else(|| Problem::new(Kind::NotFound, format!("there is no job {number}")))
    }
}

/// Returns the result of a command on a disk. Waits at most `limit` for it.
fn outcome<T>(
    name: &str,
    what: &str,
    begun: Result<Pending<T>, YardError>,
    limit: Duration,
) -> Answer<T> {
    match begun.map_err(words::problem)?.wait_at_most(limit) {
        Ok(result) => result.map_err(words::problem),
        Err(_goes_on) => {
            let what = format!(
                "the {what} of disk \"{name}\" has not ended after {} s and goes on: the disk's \
                 storage may not answer; `ctl show {}` shows the state busy until it ends",
                limit.as_secs(),
                shell(name)
            );
            Err(Problem::new(Kind::Busy, what))
        }
    }
}

impl Operator for Server {
    fn server(&self) -> ServerInfo {
        let since = self.since.duration_since(UNIX_EPOCH).unwrap_or_default();
        ServerInfo {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            since: since.as_secs(),
            disks: self.yard.list().len(),
            config: self.options.config.as_ref().map(|path| path.display().to_string()),
            failed: self.unopened.all(),
        }
    }

    fn events(&self) -> &Arc<EventLog> {
        self.events.log()
    }

    fn figures(&self) -> Answer<Figures> {
        let sample = self.yard.sample().map_err(|e| Problem::new(Kind::Busy, e.to_string()))?;
        let disks_failed = self.unopened.count() as u64;
        Ok(Figures { disks_failed, ..sampled::figures(&sample, self.since, self.started) })
    }

    fn disks(&self) -> Vec<DiskRow> {
        let mut rows = self.yard.list();
        let is_listed = |entry: &Entry| rows.iter().any(|row| row.name == entry.args.name());
        let opening = self.book.all().into_iter().filter(|entry| entry.is_opening);
        // Between two attempts to open them.
        let others: Vec<_> = opening.filter(|entry| !is_listed(entry)).collect();
        rows.extend(others.into_iter().map(|entry| DiskInfo::opening(entry.args.name())));
        rows.into_iter().map(words::row).collect()
    }

    fn disk(&self, name: &str) -> Answer<Disk> {
        let info = self.info(name)?;
        // A part of a second counts as a second.
        let left = info.drain_left.map(|left| left.as_millis().div_ceil(1000) as u64);
        let row = words::row(info);
        let settings = self.book.find(name).as_ref().map(words::settings);
        // A report of such a disk would wait until it is opened or closed.
        if matches!(row.state, State::Opening | State::Closing) {
            let (device, clients, share, requests) = Default::default();
            let drain_seconds_left = None;
            return Ok(Disk {
                row,
                drain_seconds_left,
                device,
                clients,
                share,
                settings,
                requests,
            });
        }
        // Waits for no command, so that a disk on storage that hangs is shown too.
        let report = self.yard.report(name).map_err(words::problem)?;
        Ok(Disk {
            row,
            drain_seconds_left: left,
            device: report.device.as_ref().map(|path| path.display().to_string()),
            clients: report.clients.iter().map(words::client).collect(),
            share: Some(words::share(&report.share)),
            settings,
            requests: words::requests(&report.statistics),
        })
    }

    fn add(&self, keys: Object, persist: bool) -> Answer<Disk> {
        self.add_disk(keys, persist)
    }

    fn fork(&self, name: &str, fork: Fork) -> Answer<Disk> {
        self.fork_disk(name, fork)
    }

    fn remove(&self, name: &str, force: bool, persist: bool) -> Answer<Removed> {
        let _no_upgrade = self.exclude_upgrades()?;
        let store = self.persistence(name, persist)?;
        // No reload closes the disk now, to open it again. A later one finds the disk held, so this
        // waits for the disk's storage without delaying any.
        let only = persist.then(|| self.exclude_reloads()).transpose()?;
        let held = self.hold(name)?;
        drop(only);
        if !force {
            self.check_unused(name, "disconnect, or remove it with force=true (--force)")?;
        }
        if let Some(store) = &store {
            store.check_forget(name).map_err(|e| conflict(&e))?;
        }
        let mut forgotten = Ok(());
        let entry = Some(held.entry()).filter(|entry| !entry.by_api);
        let removed = self.remove_after(held, STORAGE_TIME, || {
            let lacks = store.map(|store| store.forget(name));
            // If the file does not have the disk any more, it may have it again later.
            if let Some(entry) = entry.filter(|_| !matches!(lacks, Some(Ok(())))) {
                self.book.note_removed(name, entry.file_keys());
            }
            forgotten = lacks.unwrap_or(Ok(()));
        });
        let flushed = removed.map_err(words::removal)?;
        let done = match flushed {
            true => "is removed",
            false => "is removed, its last writes may be lost because a flush failed",
        };
        not_kept(name, done, forgotten)?;
        Ok(Removed { name: name.into(), flushed })
    }

    fn set(&self, name: &str, keys: Object, query: ChangeQuery) -> Answer<Disk> {
        let _no_upgrade = self.exclude_upgrades()?;
        let store = self.persistence(name, query.persist)?;
        // No reload closes the disk now, to open it again. A later one finds the disk held, or that
        // its file has changed.
        let is_alone = query.persist || keys.contains_key("cache");
        let only = is_alone.then(|| self.exclude_reloads()).transpose()?;
        let mut held = self.hold(name)?;
        drop(only);
        let entry = held.entry();
        let cache = entry.args.cache;
        let set: Vec<_> = keys.keys().cloned().collect();
        let before = entry.keys.clone();
        let (args, table) = words::changed(entry.args, entry.keys, keys.clone())?;
        knobs::check(&args.knobs())
            .map_err(|e| Problem::new(Kind::Invalid, format!("disk \"{name}\": {e}")))?;
        if keys.contains_key("tls-allow") {
            self.check_clients(&args)?;
        }
        if keys.contains_key("on-enospc") {
            check_writes(&args).map_err(|e| invalid("on-enospc", &format!("{e:#}")))?;
        }
        let kept = store.as_ref().map(|store| kept(store, name, &table, keys)).transpose()?;
        if let Some(kept) = &kept {
            check_top(&self.info(name)?, kept)?;
        }
        held.note_set(&before, set.iter());
        if args.cache == cache {
            self.change(&held, args.clone(), table.clone()).map_err(words::problem)?;
        } else {
            let opened = self.open_again(held, args.clone(), table.clone(), query.force);
            held = opened.map_err(|problem| match query.persist {
                true => Problem { detail: format!("{}; {NOT_WRITTEN}", problem.detail), ..problem },
                false => problem,
            })?;
        }
        let kept = store.zip(kept).map_or(Ok(()), |(store, kept)| {
            let written = store.keep(name, &kept);
            // A reload that has read the file before must not take the change back. Not earlier: a
            // reload that begins meanwhile still reads the old file.
            held.note_kept();
            written?;
            self.book.adopt(&[args]);
            held.forget_set(set.iter());
            Ok(())
        });
        held.keep();
        not_kept(name, "is changed", kept)?;
        self.disk(name)
    }

    fn refresh(&self, name: &str) -> Answer<Resized> {
        let begun = self.yard.begin_refresh_alone(name);
        match outcome(name, "refresh", begun, STORAGE_TIME)? {
            Some(size) => Ok(words::resized(size)),
            None => self.row(name).map(|row| Resized { old: row.size, new: row.size }),
        }
    }

    fn resize(&self, name: &str, size: Resize) -> Answer<Resized> {
        let _no_upgrade = self.exclude_upgrades()?;
        let held = self.hold(name)?;
        let args = held.args();
        let row = self.row(name)?;
        words::check_growth(&args, row.size, size.size)?;
        let begun = self.yard.begin_grow(name, size.size);
        let grown = outcome(name, "growth", begun, STORAGE_TIME)?;
        let Resize { size } = size;
        Ok(grown.map_or(Resized { old: size, new: size }, words::resized))
    }

    fn flush(&self, name: &str) -> Answer<Flushed> {
        self.sync(name)?;
        Ok(Flushed { name: name.into() })
    }

    fn drain(&self, name: &str, drain: Drain) -> Answer<Drained> {
        let seconds = drain.seconds.unwrap_or(DRAIN_SECONDS);
        if !(1..=MAX_DRAIN_SECONDS).contains(&seconds) {
            return Err(invalid("seconds", &format!("it is 1 to {MAX_DRAIN_SECONDS}")));
        }
        if self.info(name)?.is_drained {
            let what = format!(
                "disk \"{name}\" is drained already, and its time goes on: `ctl resume {}` ends that \
                 drain",
                shell(name)
            );
            return Err(Problem::new(Kind::Conflict, what));
        }
        let begun = self.yard.begin_drain(name, Duration::from_secs(seconds));
        outcome(name, "drain", begun, STORAGE_TIME)?;
        Ok(Drained { name: name.into(), seconds })
    }

    fn disconnect(&self, name: &str, clients: Disconnect) -> Answer<Departure> {
        self.disconnect_clients(name, &clients)
    }

    fn resume(&self, name: &str) -> Answer<Resumed> {
        if self.book.find(name).is_some_and(|entry| entry.is_opening) {
            tracing::info!(disk = name, "resumed: if it waits for space, it tries again now");
            self.late.wake();
            let (requests, drained, opening) = (0, false, true);
            return Ok(Resumed { name: name.into(), requests, drained, opening });
        }
        let (drained, requests) = self.yard.resume(name).map_err(words::problem)?;
        tracing::info!(disk = name, "resumed: {requests} requests that waited for space try again");
        Ok(Resumed { name: name.into(), requests, drained, opening: false })
    }

    fn start(&self, name: &str, job: JobRequest) -> Answer<Job> {
        let kind = match job {
            JobRequest::Snapshot(snapshot) => {
                places::check("overlay", &snapshot.overlay)?;
                // Holds the disk until the job has ended.
                if snapshot.persist {
                    let _no_upgrade = self.exclude_upgrades()?;
                    return self.start_kept(name, &snapshot).map(|job| words::job(&job));
                }
                JobKind::Snapshot(self.snapshot_options(name, &snapshot)?.into())
            }
            JobRequest::Backup(backup) => JobKind::Backup(backups::options(backup)?),
            JobRequest::Commit => JobKind::Commit,
            JobRequest::Stream => JobKind::Stream,
        };
        // A command that holds the disk may close it, and open it with its old image.
        let _held = match self.book.hold(name) {
            Ok(held) => Some(held),
            // A Xen toolstack has it.
            Err(HoldError::NotFound(_)) => None,
            Err(e @ HoldError::Busy(_)) => return Err(self.busy(&e)),
        };
        let started = self.yard.start_job(name, kind).map_err(words::problem)?;
        Ok(words::job(&started))
    }

    fn jobs(&self) -> Vec<Job> {
        self.yard.jobs().iter().map(words::job).collect()
    }

    fn cancel(&self, number: u64) -> Answer<Job> {
        let job = self.job(number)?;
        job.cancel();
        Ok(words::job(&job))
    }

    fn reload(&self, dry_run: bool) -> Answer<Reload> {
        let Some(done) = self.try_reload(dry_run) else {
            let waits = self.waits.describe();
            let what =
                format!("another reload or an upgrade runs{waits}: try again when it has ended");
            return Err(Problem::new(Kind::Conflict, what));
        };
        done.map_err(|e| Problem::new(Kind::Failed, format!("not reloaded: {e:#}")))
    }

    fn upgrade(&self, binary: Option<PathBuf>) -> Answer<Upgraded> {
        handover::upgrade(self, binary).map_err(|e| words::upgrade(&e))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, channel};

    use blockyard_disk::Disk as Served;
    use blockyard_export::{Export, Reactors};
    use blockyard_yard::{Shares, Way, WayError, Yard};
    use toml::Table;

    use super::*;

    /// An export that does not start before the other end of the channel is dropped.
    struct HeldWay(Mutex<Receiver<()>>);

    impl Way for HeldWay {
        fn describe(&self) -> String {
            "held".into()
        }

        fn start(&self, _: &Arc<Served>, _: &Arc<Reactors>) -> Result<Box<dyn Export>, WayError> {
            let _ = self.0.lock().unwrap().recv();
            Err(WayError::caller("on purpose"))
        }
    }

    #[test]
    fn a_call_does_not_wait_without_limit_for_a_command() {
        let shares = Shares::new(false, Vec::new(), BTreeMap::new());
        let yard = Yard::start(Arc::new(Reactors::start(1, &[]).unwrap()), shares).unwrap();
        let (hold, held) = channel::<()>();
        let keys = "name = \"a\"\nimage = \"ram:1M\"\nvhost-user = \"/s\"\n";
        let args: DiskArgs = keys.parse::<Table>().unwrap().try_into().unwrap();
        let way = Arc::new(HeldWay(Mutex::new(held)));
        let begin = || yard.begin_add(crate::disks::settings(&args, vec![way.clone()]));
        let problem = outcome("a", "growth", Ok(begin()), Duration::ZERO).unwrap_err();
        assert_eq!(problem.status, 503);
        assert!(problem.detail.contains("the growth of disk \"a\" has not ended"), "{problem}");
        assert!(problem.detail.contains("goes on"), "{problem}");
        drop(hold);
        let problem = outcome("a", "growth", Ok(begin()), STORAGE_TIME).unwrap_err();
        assert!(problem.detail.contains("on purpose"), "{problem}");
        let busy = YardError::Busy { disk: "a".into() };
        let problem = outcome::<()>("a", "growth", Err(busy), STORAGE_TIME).unwrap_err();
        assert_eq!(problem.status, 409);
        yard.close();
    }

    #[test]
    fn only_keys_that_need_no_reconnection_change_and_null_restores_a_default() {
        let keys = |text: &str| serde_json::from_str::<Object>(text).unwrap();
        let disk = r#"{"image": "ram:1M", "vhost-user": "/s", "weight": 300, "iops": "1k"}"#;
        let (args, table) = words::disk(keys(disk)).unwrap();
        let (args, table): (DiskArgs, Table) =
            words::changed(args, table, keys(r#"{"iops": null, "bps": 5000}"#)).unwrap();
        assert_eq!((args.weight, args.iops, args.bps.map(|l| l.rate)), (300, None, Some(5000)));
        assert!(!table.contains_key("iops") && table.contains_key("bps"));
        let wrong = |text: &str| words::changed(args.clone(), table.clone(), keys(text));
        let problem = wrong(r#"{"queues": 2}"#).unwrap_err();
        assert_eq!(problem.field.as_deref(), Some("queues"));
        let problem = wrong(r#"{"weight": 0}"#).unwrap_err();
        assert_eq!(problem.field.as_deref(), Some("weight"), "{problem}");
        let problem = wrong(r#"{"wieght": 5}"#).unwrap_err();
        assert!(problem.detail.contains("weight"), "{problem}");
    }
}
