//! Disks that are served later, because their storage is slow, another program has locked their
//! image, the file system of one of their files does not answer, or the host has no space for the
//! replay of their journal.
//!
//! In: a disk that no command waits for any more. Out: the disk is served as soon as that is
//! possible, or the log says why it is not. What must hold: such a disk delays no other one, and no
//! command but its own. It stays in the book, held and opening, so its connections wait.

use std::error::Error;
use std::iter::successors;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blockyard_disk::OnEnospc;
use blockyard_program::output::shell;
use blockyard_yard::{DiskSettings, Pending, WayError, Yard, YardError};

use super::sandbox;
use crate::claims::UnseenError;
use crate::disks::book::{Book, HeldDisk};
use crate::options::disk::DiskArgs;
use crate::process::looks;

/// Time between two attempts to lock an image: the first, and the longest one.
const PAUSE: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];
/// Time between two looks at a file system that does not answer.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// Time between two lines of the log about a disk that waits.
const REPORT: Duration = Duration::from_secs(60);

/// Whether a disk waits for other programs that have locked its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locked {
    Fails,
    WaitsFor(Duration),
    Waits,
}

impl Locked {
    /// Returns whether a disk that has waited for `time` is tried again after this result.
    pub fn waits_after(self, added: &Result<(), YardError>, time: Duration) -> bool {
        let is_locked = matches!(added, Err(e) if e.is_locked());
        is_locked
            && match self {
                Locked::Fails => false,
                Locked::WaitsFor(limit) => time < limit,
                Locked::Waits => true,
            }
    }
}

/// Returns an error with its causes.
pub fn describe(error: &YardError) -> String {
    let causes = successors(Some(error as &(dyn Error + 'static)), |error| (**error).source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Returns whether a disk waits for space on the host after this result, as its requests do.
pub fn waits_for_space(settings: &DiskSettings, added: &Result<(), YardError>) -> bool {
    settings.on_enospc == OnEnospc::Pause && matches!(added, Err(e) if e.is_full())
}

/// Says what to do about a disk that waits for space.
pub fn describe_space(disk: &str, error: &YardError) -> String {
    let (why, disk) = (describe(error), shell(disk));
    format!(
        "{why}: the disk waits for space (on-enospc = \"pause\"), and is served then: free some; \
         `ctl resume {disk}` tries at once"
    )
}

/// Says what a disk waits for that another process has locked.
fn describe_lock(error: &YardError) -> String {
    format!("{}: the disk waits for the lock, and is served then", describe(error))
}

/// Ends the pauses of disks that wait for space.
#[derive(Default)]
pub struct Wakes {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Wakes {
    /// Makes the disks that wait try again.
    pub fn wake(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    fn count(&self) -> u64 {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `limit`, or until a wake that came after `seen`.
    fn wait(&self, seen: u64, limit: Duration) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(count, limit, |count| *count == seen));
    }
}

/// What is known of the first attempt.
pub enum First {
    Runs(Pending<()>),
    Failed(YardError),
    /// A file system does not answer. The book does not know the image.
    Unseen(UnseenError),
}

/// The server of the disks. It is above this module.
pub trait DiskServer: Send + Sync + 'static {
    /// Returns the server for a thread that outlives the call. None: the server ends.
    fn itself(&self) -> Option<Arc<Self>>;
    fn yard(&self) -> &Yard;
    fn book(&self) -> &Book;
    fn wakes(&self) -> &Wakes;
    /// Lists a disk among those that could not be opened.
    fn note_unopened(&self, args: &DiskArgs, why: &str);
}

/// A disk that is served later.
pub struct Late<S> {
    pub settings: DiskSettings,
    pub locked: Locked,
    /// Called at the end of the attempts.
    pub ended: fn(&S, HeldDisk<'_>, Result<(), YardError>),
}

impl<S: DiskServer> Late<S> {
    /// Serves the disk on a thread of its own. The wait would use up a pool, because storage may
    /// never answer. A disk is lent once, so it has at most one such thread.
    pub fn serve(self, server: &S, held: HeldDisk<'_>, first: First) {
        let ended = self.ended;
        let Some(itself) = server.itself() else {
            return ended(server, held, Err(YardError::Closing));
        };
        let (disk, lent) = (held.args().name(), held.lend());
        let again = lent.clone();
        let runs = matches!(first, First::Runs(_));
        let thread = std::thread::Builder::new().name("late disk".into());
        let spawned = thread.spawn(move || {
            let held = itself.book().lent(again);
            let added = match first {
                First::Runs(pending) => pending.wait(),
                First::Failed(e) => Err(e),
                First::Unseen(e) => {
                    see(&held, e).and_then(|()| itself.yard().add(self.settings.clone()))
                }
            };
            let added = self.add_when_unlocked(&*itself, added);
            ended(&itself, held, added);
        });
        match spawned {
            Ok(_) => {}
            // The disk stays held, because the yard may serve it.
            Err(e) if runs => {
                tracing::error!(disk, "its late opening is not noticed: no thread can start: {e}");
            }
            Err(source) => {
                ended(server, server.book().lent(lent), Err(YardError::Thread { disk, source }));
            }
        }
    }

    /// Adds the disk when other programs have unlocked its image, and the host has space for it.
    /// Returns the last result.
    fn add_when_unlocked(
        &self,
        server: &S,
        mut added: Result<(), YardError>,
    ) -> Result<(), YardError> {
        let (start, [mut pause, longest]) = (Instant::now(), PAUSE);
        let (mut reported, mut is_noted) = (start, false);
        loop {
            let seen = server.wakes().count();
            let is_for_space = waits_for_space(&self.settings, &added);
            if !is_for_space && !self.locked.waits_after(&added, start.elapsed()) {
                return added;
            }
            let reports = reported.elapsed() >= REPORT;
            // The holder of a lock can be another one at each attempt.
            let is_held = !is_noted && start.elapsed() >= longest;
            if is_for_space || is_held || reports {
                self.note_wait(server, &added, is_for_space);
                is_noted = true;
            }
            if let Err(e) = &added
                && reports
            {
                reported = Instant::now();
                let (disk, why) = (&self.settings.name, describe(e));
                let what = if e.is_full() { "space on the host" } else { "the lock of its image" };
                tracing::warn!(disk, "it still waits for {what}: {why}");
            }
            server.wakes().wait(seen, pause);
            pause = (pause * 2).min(longest);
            added = server.yard().add(self.settings.clone());
        }
    }

    /// Lists the disk among those that could not be opened.
    fn note_wait(&self, server: &S, added: &Result<(), YardError>, is_for_space: bool) {
        let (disk, entry) = (&self.settings.name, server.book().find(&self.settings.name));
        if let (Err(e), Some(entry)) = (added, entry.filter(|entry| !entry.by_api)) {
            let why = if is_for_space { describe_space(disk, e) } else { describe_lock(e) };
            server.note_unopened(&entry.args, &why);
        }
    }
}

/// Waits until the file systems of a disk answer, and the sandbox lets the server use them. Tells
/// the book which image the disk has.
///
/// The sandbox may not have the folders, because nothing can be granted on a file system that does
/// not answer. Then the disk waits for an upgrade: the next server takes its connections.
fn see(held: &HeldDisk<'_>, unseen: UnseenError) -> Result<(), YardError> {
    let (args, refused) = (held.args(), |e| YardError::Settings(WayError::caller(e)));
    let (mut why, mut is_refused, mut report) = (unseen.to_string(), false, Instant::now());
    loop {
        if Instant::now() >= report {
            report = Instant::now() + REPORT;
            tracing::warn!(disk = args.name(), "its clients wait: {why}");
        }
        std::thread::sleep(LOOK_PAUSE);
        match sandbox::check(&args, looks::LIMIT) {
            Ok(Ok(image)) => return held.found(image).map_err(refused),
            Ok(Err(e)) if !sandbox::was_late(&args) => return Err(refused(e.to_string())),
            Ok(Err(e)) => {
                why = e.to_string();
                if !std::mem::replace(&mut is_refused, true) {
                    report = Instant::now();
                }
            }
            Err(unseen) => (why, is_refused) = (unseen.to_string(), false),
        }
    }
}
