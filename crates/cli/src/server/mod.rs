//! A running server: the yard, which owns the disks, and the configuration that it serves.
//!
//! Signals (`serve/`), reloads, hand-overs and the API use it. In: commands on disks. Out: each
//! takes effect in the yard and in the book of configurations, or in neither.
//!
//! `late`, `unopened` and `waits` are about disks that are not open yet, `reopening` about disks
//! that are opened again. `sandbox` confines the process. `events` and `words` are for the API,
//! `hand_overs` for the next server.

pub mod error;
pub mod events;
pub mod hand_overs;
pub mod late;
mod notes;
pub mod reopening;
pub mod sandbox;
pub mod unopened;
pub mod waits;
pub mod words;

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime};

use blockyard_control::events::What;
use blockyard_disk::OnEnospc;
use blockyard_program::ending::Failure;
use blockyard_yard::{
    Change, DiskInfo, DiskSettings, DiskState, Ended, Job, JobState, Pending, Yard, YardError,
};
use toml::Table;

use crate::changes::{Known, changes};
use crate::claims::ImageId;
use crate::disks::book::{Book, Entry, HeldDisk};
use crate::disks::{early, figures, log_end, settings};
use crate::exports::{self, Common};
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::process::looks;
use events::Events;
use hand_overs::HandOvers;
use late::{DiskServer, First, Late, Locked, Wakes, describe, describe_space};
use unopened::Unopened;
use waits::Waits;

use error::{AddError, RemoveError};

/// How long a command waits for the storage of a disk. The growth of a large image takes minutes.
/// Storage that does not answer must not keep the command and its thread for ever.
pub const STORAGE_TIME: Duration = Duration::from_secs(600);

/// Time between two looks of a wait for a disk at whether the server ends.
const LOOK: Duration = Duration::from_millis(50);

/// A disk that is being opened.
pub struct Adding<'a> {
    server: &'a Server,
    held: HeldDisk<'a>,
    pending: Pending<()>,
    args: DiskArgs,
    settings: DiskSettings,
    locked: Locked,
    begun: Instant,
}

/// A disk of the book, before its image is opened. Dropping it removes it.
pub struct Reserved<'a> {
    server: &'a Server,
    held: HeldDisk<'a>,
    args: DiskArgs,
    settings: DiskSettings,
}

impl<'a> Reserved<'a> {
    /// Notes the image, which was missing. Returns an error if another disk has it.
    pub fn found_image(&self) -> Result<(), AddError> {
        let image = ImageId::within(&self.args, looks::LIMIT).map_err(AddError::Unseen)?;
        self.held.found(image).map_err(AddError::Conflict)
    }

    /// Begins to open the image.
    pub fn open(self) -> Adding<'a> {
        let Reserved { server, held, args, settings } = self;
        server.opening(held, args, settings)
    }
}

/// A disk that is not open.
pub struct NotOpened<'a> {
    pub error: Box<AddError>,
    /// None: it still opens.
    pub held: Option<HeldDisk<'a>>,
}

impl<'a> Adding<'a> {
    /// Waits until the disk is served, but not longer than [`STORAGE_TIME`] from the begin. Then it
    /// returns an error, and the disk is served when it is open.
    pub fn wait(self) -> Result<(), AddError> {
        self.wait_held().map(HeldDisk::keep)
    }

    /// Like `wait`, but no other command has the disk yet. The caller keeps it.
    pub fn wait_held(self) -> Result<HeldDisk<'a>, AddError> {
        self.wait_within(STORAGE_TIME, || false)
    }

    /// Makes the disk wait if other programs have locked its image. No caller waits for that.
    pub fn waits_for_lock(self) -> Self {
        Adding { locked: Locked::Waits, ..self }
    }

    /// Lets the disk be served when it is open, without a wait.
    pub fn later(self) {
        let Adding { server, held, pending, settings, locked, .. } = self;
        Late { settings, locked, ended: added_late }.serve(server, held, First::Runs(pending));
    }

    /// Like `wait_held`, with another limit. `is_stopped`: whether the wait ends at once, because
    /// the server does.
    pub fn wait_within(
        self,
        limit: Duration,
        is_stopped: impl Fn() -> bool,
    ) -> Result<HeldDisk<'a>, AddError> {
        self.wait_or_return(limit, is_stopped).map_err(|not| *not.error)
    }

    /// Like `wait_within`. An error returns the disk.
    pub fn wait_or_return(
        self,
        limit: Duration,
        is_stopped: impl Fn() -> bool,
    ) -> Result<HeldDisk<'a>, NotOpened<'a>> {
        let Adding { server, held, mut pending, args, settings, locked, begun } = self;
        let disk = args.name();
        let late = Late { settings, locked, ended: added_late };
        let listed = server.waits.list_since(&disk, "is opening", begun);
        let not = |error, held| Err(NotOpened { error: Box::new(error), held });
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            pending = match pending.wait_at_most(left.min(LOOK)) {
                Ok(Ok(())) => {
                    server.unopened.clear(&disk);
                    return Ok(held);
                }
                Ok(Err(e)) if locked == Locked::Waits && e.is_locked() => {
                    let why = describe(&e);
                    late.serve(server, held, First::Failed(e));
                    return not(AddError::Waits { disk, why }, None);
                }
                Ok(Err(e)) if e.is_full() && args.on_enospc == OnEnospc::Pause => {
                    let why = describe_space(&disk, &e);
                    late.serve(server, held, First::Failed(e));
                    return not(AddError::Full { disk, why }, None);
                }
                Ok(Err(e)) => return not(AddError::of(e, &args), Some(held)),
                Err(_) if is_stopped() => return not(AddError::Stopped { disk }, Some(held)),
                Err(runs) if left > LOOK && !listed.is_over() => runs,
                Err(runs) => {
                    late.serve(server, held, First::Runs(runs));
                    let limit = begun.elapsed();
                    return not(AddError::GoesOn { disk, limit }, None);
                }
            }
        }
    }
}

/// A running server: the yard, and the configuration that it serves.
pub struct Server {
    pub yard: Yard,
    pub events: Events,
    pub common: Common,
    pub options: ServeOptions,
    pub since: SystemTime,
    /// The same moment, on the clock that never goes back.
    pub started: Instant,
    /// Configuration of each disk that is served, without the disks of toolstacks.
    pub book: Book,
    /// Disks of the configuration that could not be opened.
    pub unopened: Unopened,
    /// Commands that wait for storage.
    pub waits: Waits,
    /// Wakes disks that are served later.
    pub late: Wakes,
    /// The configuration file that is in effect.
    pub known: Mutex<Known>,
    /// Held during a reload: one at a time.
    pub reloading: Mutex<()>,
    pub hand_overs: HandOvers,
    /// For threads that outlive a call.
    pub itself: Weak<Server>,
}

impl Server {
    /// Opens a disk and starts its exports. `keys`: the keys that were given. `by_api`: no
    /// configuration file has the disk.
    pub fn add(&self, args: DiskArgs, keys: Table, by_api: bool) -> Result<(), AddError> {
        self.begin_add(args, keys, by_api)?.wait()
    }

    /// Like `add`, but returns before the disk is open.
    pub fn begin_add(
        &self,
        args: DiskArgs,
        keys: Table,
        by_api: bool,
    ) -> Result<Adding<'_>, AddError> {
        Ok(self.reserve_disk(args, keys, by_api)?.open())
    }

    /// Like `begin_add`, but only enters the disk into the book. The image may be missing.
    pub fn reserve_disk(
        &self,
        args: DiskArgs,
        keys: Table,
        by_api: bool,
    ) -> Result<Reserved<'_>, AddError> {
        let checked = sandbox::check(&args, early::limit(&args.image)).map_err(AddError::Unseen)?;
        let image = checked.map_err(AddError::Open)?;
        let (held, settings) = self.reserve(&args, keys, by_api, image)?;
        Ok(Reserved { server: self, held, args, settings })
    }

    /// Like `begin_add`, for a disk that another server had, and with clients that wait for it. If
    /// a file system does not answer, the disk waits for it.
    pub fn begin_add_again(
        &self,
        args: DiskArgs,
        keys: Table,
        by_api: bool,
    ) -> Result<Adding<'_>, AddError> {
        let unseen = match self.begin_add(args.clone(), keys.clone(), by_api) {
            Err(AddError::Unseen(unseen)) => unseen,
            begun => return begun.map(Adding::waits_for_lock),
        };
        let (disk, why) = (args.name(), unseen.to_string());
        let (held, settings) = self.reserve(&args, keys, by_api, None)?;
        let late = Late { settings, locked: Locked::Waits, ended: added_late };
        late.serve(self, held, First::Unseen(unseen));
        Err(AddError::WaitsForFiles { disk, why })
    }

    /// Enters a disk into the book.
    fn reserve(
        &self,
        args: &DiskArgs,
        keys: Table,
        by_api: bool,
        image: Option<ImageId>,
    ) -> Result<(HeldDisk<'_>, DiskSettings), AddError> {
        let held = self.book.reserve(args.clone(), keys, by_api, image);
        let held = held.map_err(AddError::Conflict)?;
        let carried = match self.common.handed.take_carried(&args.name()) {
            Ok(carried) => carried,
            Err(e) => {
                held.remove();
                return Err(AddError::Open(e));
            }
        };
        let settings = settings(args, exports::ways(args, &self.common));
        Ok((held, DiskSettings { carried, ..settings }))
    }

    /// Opens a disk again that [`Server::close_held`] has closed. It leaves the book if it does not
    /// open and the caller drops it.
    pub fn begin_open<'a>(&'a self, held: HeldDisk<'a>, args: DiskArgs, keys: Table) -> Adding<'a> {
        held.set(args.clone(), keys);
        held.opens();
        let settings = settings(&args, exports::ways(&args, &self.common));
        self.opening(held.leaving(), args, settings)
    }

    fn opening<'a>(
        &'a self,
        held: HeldDisk<'a>,
        args: DiskArgs,
        settings: DiskSettings,
    ) -> Adding<'a> {
        let (pending, begun) = (self.yard.begin_add(settings.clone()), Instant::now());
        Adding { server: self, held, pending, args, settings, locked: Locked::Fails, begun }
    }

    /// Removes a disk, and logs its final statistics. Returns whether its image was flushed. After
    /// `limit` it returns an error, and the removal goes on: the disk stays held until then.
    pub fn remove(&self, held: HeldDisk<'_>, limit: Duration) -> Result<bool, RemoveError> {
        self.remove_after(held, limit, || {})
    }

    /// Like `remove`. `forget` runs when the disk has ended or the time has passed, and before the
    /// disk leaves the book: a reload that finds it in the files must not add it again.
    pub fn remove_after(
        &self,
        held: HeldDisk<'_>,
        limit: Duration,
        forget: impl FnOnce(),
    ) -> Result<bool, RemoveError> {
        let _listed = self.waits.list(&held.args().name(), "is closing");
        match end_within(&self.yard, held, limit).map_err(RemoveError::Yard)? {
            Ok((held, is_flushed)) => {
                forget();
                held.remove();
                Ok(is_flushed)
            }
            Err((held, late)) => {
                forget();
                Err(self.still_ends(held, late, limit))
            }
        }
    }

    /// Like `remove`, but the disk stays in the book, to be opened again. Returns also whether its
    /// image was flushed.
    pub fn close_held<'a>(
        &self,
        held: HeldDisk<'a>,
        limit: Duration,
    ) -> Result<(HeldDisk<'a>, bool), RemoveError> {
        let _listed = self.waits.list(&held.args().name(), "is closing");
        let ended = end_within(&self.yard, held, limit).map_err(RemoveError::Yard)?;
        ended.map_err(|(held, late)| self.still_ends(held, late, limit))
    }

    fn still_ends(&self, held: HeldDisk<'_>, late: Pending<Ended>, limit: Duration) -> RemoveError {
        let disk = held.args().name();
        self.remove_later(held, late);
        RemoveError::GoesOn { disk, limit }
    }

    /// Waits on a thread of its own for the end of a disk. Its storage may never answer, so the
    /// wait would use up a pool. A disk is lent once, so it has at most one such thread.
    fn remove_later(&self, held: HeldDisk<'_>, late: Pending<Ended>) {
        let Some(server) = self.itself.upgrade() else { return };
        let disk = held.lend();
        let thread = std::thread::Builder::new().name("late removal".into());
        let spawned = thread.spawn(move || {
            let held = server.book.lent(disk.clone());
            let ended = ended(held, late.wait());
            match ended.map(|(held, is_flushed)| (held.remove(), is_flushed).1) {
                Ok(true) => tracing::info!(disk, "it is removed now"),
                Ok(false) => {
                    let what = "it is removed now, but its image could not be flushed: writes since \
                                its last flush may be lost";
                    tracing::error!(disk, "{what}");
                }
                Err(e) => tracing::error!(disk, "{:#}", anyhow::Error::from(e)),
            }
        });
        if let Err(e) = spawned {
            tracing::error!("the end of a disk is not noticed: no thread can start: {e}");
        }
    }

    /// Applies keys that need no reconnection: weight, limits, reservations,
    /// `tls-allow` and `on-enospc`.
    pub fn change(
        &self,
        held: &HeldDisk<'_>,
        args: DiskArgs,
        keys: Table,
    ) -> Result<(), YardError> {
        let Entry { args: served, keys: old, .. } = held.entry();
        let (knobs, clients, disk) = (args.knobs(), args.tls_allow.clone(), args.name());
        let change = Change {
            clients: (served.tls_allow != clients).then_some(clients),
            knobs: (served.knobs() != knobs).then_some(knobs),
            on_enospc: (served.on_enospc != args.on_enospc).then_some(args.on_enospc),
        };
        self.yard.change(&disk, change)?;
        let changed = changes(&old, &keys);
        if !changed.is_empty() {
            self.events.publish(What::DiskChanged { disk, keys: changed });
        }
        held.set(args, keys);
        Ok(())
    }

    /// Returns the disks that are open. Commands to other disks would wait until these are opened
    /// or closed, and would delay the next signal.
    pub fn served(&self) -> impl Iterator<Item = DiskInfo> {
        let answers = |disk: &DiskInfo| matches!(disk.state, DiskState::Serving | DiskState::Busy);
        self.yard.list().into_iter().filter(answers)
    }

    /// Returns whether a job works on a disk.
    pub fn has_job(&self, disk: &str) -> bool {
        let is_running = |job: Job| job.disk() == disk && matches!(job.state(), JobState::Running);
        self.yard.jobs().into_iter().any(is_running)
    }

    /// Logs the statistics of the open disks.
    pub fn log_statistics(&self) {
        for disk in self.served() {
            // The disk may have been removed since the list was made.
            let Ok(report) = self.yard.report(&disk.name) else { continue };
            if !report.clients.is_empty() {
                let clients = figures::describe_clients(&report.clients);
                tracing::info!(disk = report.name, "clients: {clients}");
            }
            figures::log(&report.name, &report.statistics, &report.share);
            figures::log_policies(&report.name, &report.policies);
        }
    }

    /// Closes all disks. Returns an error if an image could not be flushed.
    pub fn close(&self) -> Result<(), Failure> {
        let ended = self.yard.close();
        if self.hand_overs.is_ending() && !self.hand_overs.is_done() {
            // No server continues them.
            self.common.handed.clear(&[]);
        }
        for disk in &ended {
            figures::log(&disk.name, &disk.statistics, &disk.share);
            figures::log_policies(&disk.name, &disk.policies);
        }
        if ended.iter().all(|disk| disk.is_flushed) {
            return Ok(());
        }
        Err(anyhow::anyhow!("an image could not be flushed, writes may be lost: see the log")
            .into())
    }
}

impl DiskServer for Server {
    fn itself(&self) -> Option<Arc<Self>> {
        self.itself.upgrade()
    }

    fn yard(&self) -> &Yard {
        &self.yard
    }

    fn book(&self) -> &Book {
        &self.book
    }

    fn wakes(&self) -> &Wakes {
        &self.late
    }

    fn note_unopened(&self, args: &DiskArgs, why: &str) {
        Server::note_unopened(self, args, why);
    }
}

/// Notes that a disk is served, or that it is not, after no command has waited for it.
fn added_late(server: &Server, held: HeldDisk<'_>, added: Result<(), YardError>) {
    let entry = held.entry();
    let args = &entry.args;
    match added {
        Ok(()) => {
            held.keep();
            server.unopened.clear(&args.name());
            tracing::info!(disk = args.name(), "it is served now");
        }
        // This server ends, or another one opens the disk.
        Err(YardError::Closing) => drop(held.lend()),
        Err(e) => {
            let e = AddError::of(e, args);
            held.remove();
            server.note_ended(&entry, &e.to_string());
            if entry.by_api {
                // No reload opens it again, so its clients must not wait.
                server.common.handed.end_disk(&args.name(), Vec::new());
            }
            tracing::error!(disk = args.name(), "it is not served: {:#}", anyhow::Error::from(e));
        }
    }
}

/// The end of a disk: whether its image was flushed, or what still runs.
type Ending<'a> = Result<(HeldDisk<'a>, bool), (HeldDisk<'a>, Pending<Ended>)>;

/// Ends a disk. Returns whether its image was flushed, or what still runs after `limit`. The disk
/// stays in the book.
fn end_within<'a>(
    yard: &Yard,
    held: HeldDisk<'a>,
    limit: Duration,
) -> Result<Ending<'a>, YardError> {
    match yard.begin_remove(&held.args().name()).wait_at_most(limit) {
        Ok(done) => ended(held, done).map(Ok),
        Err(late) => Ok(Err((held, late))),
    }
}

/// Waits at most `limit`, and not when `is_over`.
pub fn wait_unless<T>(
    mut pending: Pending<T>,
    limit: Duration,
    is_over: impl Fn() -> bool,
) -> Result<Result<T, YardError>, Pending<T>> {
    let begun = Instant::now();
    loop {
        let left = limit.saturating_sub(begun.elapsed());
        pending = match pending.wait_at_most(left.min(LOOK)) {
            Err(runs) if left > LOOK && !is_over() => runs,
            done => return done,
        };
    }
}

/// Logs the final statistics of a disk that has ended. Returns the disk, and whether its image was
/// flushed. After an error the disk is no longer in the book, because the yard does not have it.
fn ended(
    held: HeldDisk<'_>,
    ended: Result<Ended, YardError>,
) -> Result<(HeldDisk<'_>, bool), YardError> {
    match ended {
        Ok(ended) => {
            log_end(&ended);
            Ok((held, ended.is_flushed))
        }
        Err(e) => {
            held.remove();
            Err(e)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};

    use blockyard_disk::Disk;
    use blockyard_export::{Client, Export, Reactors};
    use blockyard_yard::{Shares, Way, WayError};

    use super::*;
    use crate::disks::book::HoldError;
    use crate::process::awaited::HANG;

    /// An export that does not stop before the other end of the channel is dropped.
    struct HeldExport(Receiver<()>);

    impl Export for HeldExport {
        fn resize(&mut self) {}

        fn stop(&mut self, _: Instant) {
            let _ = self.0.recv();
        }

        fn clients(&self) -> Vec<Client> {
            Vec::new()
        }
    }

    struct HeldWay(Mutex<Option<Receiver<()>>>);

    impl Way for HeldWay {
        fn describe(&self) -> String {
            "held".into()
        }

        fn start(&self, _: &Arc<Disk>, _: &Arc<Reactors>) -> Result<Box<dyn Export>, WayError> {
            Ok(Box::new(HeldExport(self.0.lock().unwrap().take().unwrap())))
        }
    }

    #[test]
    fn a_disk_that_does_not_end_in_time_stays_held_and_leaves_later() {
        let shares = Shares::new(false, Vec::new(), BTreeMap::new());
        let yard = Yard::start(Arc::new(Reactors::start(1, &[]).unwrap()), shares).unwrap();
        let keys: Table =
            "name = \"a\"\nimage = \"ram:1M\"\nvhost-user = \"/s\"\n".parse().unwrap();
        let args: DiskArgs = keys.clone().try_into().unwrap();
        let (hold, held) = channel::<()>();
        let way = Arc::new(HeldWay(Mutex::new(Some(held))));
        yard.add(settings(&args, vec![way])).unwrap();
        let book = Book::default();
        book.reserve(args.clone(), keys.clone(), true, None).unwrap().keep();
        let taken = book.hold("a").unwrap();
        let Err((taken, late)) = end_within(&yard, taken, Duration::ZERO).unwrap() else {
            panic!("it has ended")
        };
        assert!(matches!(book.hold("a"), Err(HoldError::Busy(_))));
        assert!(book.reserve(args, keys, true, None).is_err(), "its image is still in use");
        assert_eq!(yard.info("a").unwrap().state, DiskState::Closing);
        drop(hold);
        let Ok(late) = late.wait_at_most(HANG) else { panic!("it does not end") };
        let (taken, is_flushed) = ended(taken, late).unwrap();
        assert!(is_flushed && !book.all().is_empty());
        taken.remove();
        assert!(book.all().is_empty() && yard.info("a").is_none());
        yard.close();
    }
}
