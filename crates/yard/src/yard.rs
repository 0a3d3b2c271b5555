//! The handle to the yard. Each call sends one command to the keeper and waits for its answer.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use blockyard_disk::Disk;
use blockyard_export::{Client, Reactors};
use blockyard_image::{Format, Opener, Program, SharedImages};
use blockyard_sched::Knobs;

use crate::context::Context;
use crate::exports::Exports;
use crate::interface::error::YardError;
use crate::interface::job::{Job, JobKind};
use crate::interface::observer::{Observer, Resized};
use crate::interface::sample::{self, Sample, SampleError};
use crate::interface::settings::{DiskSettings, WayError};
use crate::interface::state::DiskState;
use crate::jobs::Jobs;
use crate::keeper::{Answer, DiskInfo, Keeper, Message, Operation};
use crate::openings::{HeldOpenings, Starting};
use crate::served::{Change, Ended, HandedDisk, Report, ServedDisk};
use crate::shares::Shares;

/// Longest time that a job waits for an answer of the keeper.
const KEEPER_TIME: Duration = Duration::from_secs(10);

/// How long a command that must run alone waits for the end of the disk's other commands.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);

/// The set of disks that this process serves. Clones are handles to the same set.
///
/// Calls block their thread until the command is done, except those with `then`. Reactors must not
/// call them. Dropping the last handle closes the yard without waiting: call [`Yard::close`] first
/// to learn what was flushed.
#[derive(Clone)]
pub struct Yard(Arc<Handle>);

struct Handle {
    messages: Sender<Message>,
    context: Arc<Context>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.messages.send(Message::Close(mpsc::sync_channel(1).0));
    }
}

impl Yard {
    /// Starts a yard without disks. `reactors` serve the queues of its disks.
    pub fn start(reactors: Arc<Reactors>, shares: Shares) -> io::Result<Self> {
        Self::start_observed(reactors, shares, None)
    }

    /// Like [`Yard::start`]. `observer` gets the events of the yard and of its disks.
    pub fn start_observed(
        reactors: Arc<Reactors>,
        shares: Shares,
        observer: Option<Arc<dyn Observer>>,
    ) -> io::Result<Self> {
        let (messages, receiver) = mpsc::channel();
        // If the keeper can start no thread, it closes a disk itself, and waits for the disk's job.
        let keeper = messages.clone();
        let all_disks = move || {
            let (sender, disks) = mpsc::sync_channel(1);
            let _ = keeper.send(Message::Disks(sender));
            disks.recv_timeout(KEEPER_TIME).ok()
        };
        let jobs = Jobs::new(observer.clone(), Arc::new(all_disks));
        let images = SharedImages::default();
        let is_closing = AtomicBool::new(false);
        let openings = Arc::default();
        let context = Context { reactors, shares, images, jobs, observer, is_closing, openings };
        let context = Arc::new(context);
        let keeper = Keeper::new(context.clone(), messages.clone());
        std::thread::Builder::new()
            .name("yard keeper".into())
            .spawn(move || keeper.run(&receiver))?;
        Ok(Yard(Arc::new(Handle { messages, context })))
    }

    /// Opens a disk and starts its exports. After an error nothing of the disk remains.
    pub fn add(&self, settings: DiskSettings) -> Result<(), YardError> {
        self.begin_add(settings).wait()
    }

    /// Like [`Yard::add`], but returns before the disk is open, so that several disks are opened at
    /// the same time.
    pub fn begin_add(&self, settings: DiskSettings) -> Pending<()> {
        let (answer, receiver) = answer();
        self.send_add(settings.name.clone(), || Ok(settings), answer);
        Pending(receiver)
    }

    /// Like [`Yard::add`], without waiting. `settings` returns the disk's settings, and may block.
    /// `then` gets the result before the next command for the disk begins. Both run on another
    /// thread. They do not run after the end of the yard.
    pub fn add_then(
        &self,
        name: String,
        settings: impl FnOnce() -> Result<DiskSettings, WayError> + Send + 'static,
        then: impl FnOnce(Result<(), YardError>) + Send + 'static,
    ) {
        self.send_add(name, settings, at_once(then));
    }

    fn send_add(
        &self,
        name: String,
        settings: impl FnOnce() -> Result<DiskSettings, WayError> + Send + 'static,
        answer: impl FnOnce(Result<(), YardError>) -> Answer + Send + 'static,
    ) {
        let named = name.clone();
        let operation: Operation = Box::new(move |context, opener, disk| match disk {
            Some(disk) => (Some(disk), answer(Err(YardError::NameTaken { disk: named }))),
            None => match open(context, opener, named, settings) {
                Ok((disk, starting)) => {
                    let answer = answer(Ok(()));
                    // The table has the disk when the answer runs.
                    let answer = move || {
                        drop(starting);
                        answer();
                    };
                    (Some(disk), Box::new(answer))
                }
                Err(e) => (None, answer(Err(e))),
            },
        });
        self.send(name, DiskState::Opening, operation);
    }

    /// Ends the exports of a disk, flushes its image and closes it. Running jobs of the disk are
    /// cancelled first.
    pub fn remove(&self, name: &str) -> Result<Ended, YardError> {
        self.begin_remove(name).wait()
    }

    /// Like [`Yard::remove`], but returns before the disk is closed.
    pub fn begin_remove(&self, name: &str) -> Pending<Ended> {
        let (answer, receiver) = answer();
        self.send_remove(name.into(), answer);
        Pending(receiver)
    }

    /// Like [`Yard::remove`], without waiting. `then` gets the result on another thread before the
    /// next command for the disk begins. It does not run after the end of the yard.
    pub fn remove_then(
        &self,
        name: String,
        then: impl FnOnce(Result<Ended, YardError>) + Send + 'static,
    ) {
        self.send_remove(name, at_once(then));
    }

    fn send_remove(
        &self,
        name: String,
        answer: impl FnOnce(Result<Ended, YardError>) -> Answer + Send + 'static,
    ) {
        let named = name.clone();
        let operation: Operation = Box::new(move |context, _, disk| {
            let ended = disk.map(|disk| disk.close(context));
            (None, answer(ended.ok_or(YardError::NotFound { disk: named })))
        });
        self.send(name, DiskState::Closing, operation);
    }

    /// Ends a disk like [`Yard::remove`], but so that another server can continue its exports. A
    /// disk that cannot be handed over stays as it is. Returns before the disk has ended.
    pub fn begin_hand_over(&self, name: &str) -> Pending<HandedDisk> {
        let (answer, receiver) = answer();
        let named = name.to_string();
        let operation: Operation = Box::new(move |context, opener, disk| {
            let Some(disk) = disk else {
                return (None, answer(Err(YardError::NotFound { disk: named })));
            };
            match disk.obstacle(context, opener) {
                Some(why) => (Some(disk), answer(Err(YardError::Stays { disk: named, why }))),
                None => (None, answer(Ok(disk.hand_over(context)))),
            }
        });
        self.send(name.into(), DiskState::Closing, operation);
        Pending(receiver)
    }

    /// Holds disks back that are being opened: until the end of the returned value none of them
    /// begins to be served. None: exports start already, and take longer than `limit`.
    pub fn hold_openings(&self, limit: Duration) -> Option<HeldOpenings> {
        self.0.context.openings.hold(limit)
    }

    /// Starts what the first disk would start: a guest that waits for a hand-over waits less.
    pub fn prepare(&self) -> io::Result<()> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let _ = self.0.messages.send(Message::Prepare(sender));
        receiver.recv().unwrap_or(Ok(()))
    }

    /// Returns a row for each disk, in the order in which they were added. Does not wait for
    /// commands.
    pub fn list(&self) -> Vec<DiskInfo> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let _ = self.0.messages.send(Message::List(sender));
        receiver.recv().unwrap_or_default()
    }

    /// Returns the row of one disk, if the yard has it. Does not wait for commands.
    pub fn info(&self, name: &str) -> Option<DiskInfo> {
        let (reply, receiver) = mpsc::sync_channel(1);
        let _ = self.0.messages.send(Message::Info { name: name.into(), reply });
        receiver.recv().ok().flatten()
    }

    /// Returns the figures of all open disks and of the reactors. Does not wait for commands. Costs
    /// much less than a report of each disk.
    pub fn sample(&self) -> Result<Sample, SampleError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let _ = self.0.messages.send(Message::Known(sender));
        let groups = self.0.context.shares.groups();
        sample::collect(receiver.recv().unwrap_or_default(), self.reactors(), groups)
    }

    /// Returns the clients and the statistics of a disk. Waits for no command of an open disk.
    /// Fails if a disk takes long to open or to close.
    pub fn report(&self, name: &str) -> Result<Report, YardError> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some((disk, exports)) = self.find_now(name).ok_or(YardError::Closing)? {
                return Ok(exports.report(&disk, self.reactors()));
            }
            let disk = name.to_string();
            match self.info(name) {
                None => return Err(YardError::NotFound { disk }),
                Some(_) if Instant::now() >= until => return Err(YardError::Busy { disk }),
                Some(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Changes a disk while clients are connected. Fails if another command works on it for long.
    pub fn change(&self, name: &str, change: Change) -> Result<(), YardError> {
        let change = move |_: &Context, disk: &mut ServedDisk| disk.change(&change);
        self.begin_alone(name, change)?.wait()
    }

    /// Adopts the present size of a disk's image. Returns None if it has not changed.
    pub fn refresh(&self, name: &str) -> Result<Option<Resized>, YardError> {
        self.begin_refresh(name).wait()
    }

    /// Like [`Yard::refresh`], but returns before the size is known. Waits for other commands of
    /// the disk.
    pub fn begin_refresh(&self, name: &str) -> Pending<Option<Resized>> {
        self.begin(name, |context, disk| disk.refresh(context))
    }

    /// Like [`Yard::begin_refresh`], but fails if another command works on the disk for long.
    pub fn begin_refresh_alone(&self, name: &str) -> Result<Pending<Option<Resized>>, YardError> {
        self.begin_alone(name, |context, disk| disk.refresh(context))
    }

    /// Begins to grow a disk's topmost image, a file or a qcow2 image, and to notify clients. The
    /// result is None if the disk has that size already. Fails if another command works on the disk
    /// for long.
    pub fn begin_grow(&self, name: &str, size: u64) -> Result<Pending<Option<Resized>>, YardError> {
        self.begin_alone(name, move |context, disk| disk.grow(size, context))
    }

    /// Makes all answered writes of a disk durable.
    pub fn flush(&self, name: &str) -> Result<(), YardError> {
        self.with(name, |context, disk| disk.flush(&context.reactors))
    }

    /// Like [`Yard::flush`], but returns before the end. Fails if another command works on the disk
    /// for long.
    pub fn begin_flush(&self, name: &str) -> Result<Pending<()>, YardError> {
        self.begin_alone(name, |context, disk| disk.flush(&context.reactors))
    }

    /// Begins to wait until no request of a disk is in flight and all answered writes are durable.
    /// Holds requests from then on, until [`Yard::resume`] or for `limit`. Fails if another command
    /// works on the disk for long.
    pub fn begin_drain(&self, name: &str, limit: Duration) -> Result<Pending<()>, YardError> {
        self.begin_alone(name, move |_, disk| {
            disk.check_hold("a drain", Some(limit))?;
            Ok(disk.disk.drain(limit)?)
        })
    }

    /// Begins to disconnect the clients of a disk with this description, or all of them. They may
    /// connect again. Returns the clients that will leave: a device such as one of ublk does not.
    /// Does not wait for commands.
    pub fn disconnect(
        &self,
        name: &str,
        description: Option<&str>,
    ) -> Result<Vec<Client>, YardError> {
        let found = self.find_now(name).ok_or(YardError::Closing)?;
        let (_, exports) = found.ok_or_else(|| YardError::NotFound { disk: name.into() })?;
        Ok(exports.disconnect(description))
    }

    /// Returns the clients of an open disk. Does not wait for commands or reactors.
    pub fn clients(&self, name: &str) -> Result<Vec<Client>, YardError> {
        let found = self.find_now(name).ok_or(YardError::Closing)?;
        let (_, exports) = found.ok_or_else(|| YardError::NotFound { disk: name.into() })?;
        Ok(exports.clients())
    }

    /// From now on the disk counts as opened from this qcow2 image, the overlay of a snapshot. A
    /// later server opens it. Does not wait, so that a job of the disk may call it.
    pub fn adopt_overlay(&self, name: &str, overlay: PathBuf) {
        let adopted: Pending<()> = self.begin(name, |_, disk| {
            disk.settings.image.path = overlay;
            disk.settings.image.format = Some(Format::Qcow2);
            Ok(())
        });
        drop(adopted);
    }

    /// Returns the program that decides where a disk's data lie (`exec:`), if there is one. Does
    /// not wait for commands.
    pub fn program(&self, name: &str) -> Option<Program> {
        self.find(name)?.source().file()?.opened()?.program()
    }

    /// The program that decides where a disk's data lie, if there is one, is this server's alone
    /// now. Does not wait for commands.
    pub fn own_program(&self, name: &str) {
        let Some(disk) = self.find(name) else { return };
        if let Some(opened) = disk.source().file().and_then(|file| file.opened()) {
            opened.own_program();
        }
    }

    /// Ends a drain, and lets the requests of a disk that wait for space on the host try again.
    /// Returns whether the disk was drained, and the number of those requests. Waits up to 2 s for
    /// the end of the drain, but not for commands, because one of them may wait for requests that a
    /// drain holds.
    pub fn resume(&self, name: &str) -> Result<(bool, u64), YardError> {
        let found = self.find_now(name).ok_or(YardError::Closing)?;
        found
            .map(|(disk, _)| disk.resume())
            .ok_or_else(|| YardError::NotFound { disk: name.into() })
    }

    /// Returns a disk without waiting for commands.
    fn find(&self, name: &str) -> Option<Arc<Disk>> {
        self.find_now(name).flatten().map(|(disk, _)| disk)
    }

    /// Like `find`, with the exports. The outer None: the yard is closing.
    fn find_now(&self, name: &str) -> Option<Option<(Arc<Disk>, Exports)>> {
        let (reply, receiver) = mpsc::sync_channel(1);
        let _ = self.0.messages.send(Message::Find { name: name.into(), reply });
        receiver.recv().ok()
    }

    /// Starts a snapshot, commit, stream or backup of a disk. Other commands for the disk run
    /// concurrently. Fails if another command works on the disk for long.
    pub fn start_job(&self, name: &str, kind: JobKind) -> Result<Job, YardError> {
        let start = |context: &Context, disk: &mut ServedDisk| {
            context.jobs.start(&disk.settings.name, (&disk.disk, &disk.exports), kind)
        };
        self.begin_alone(name, start)?.wait()
    }

    /// Returns the running jobs, and the latest ones that have ended, in the order of their starts.
    pub fn jobs(&self) -> Vec<Job> {
        self.0.context.jobs.list()
    }

    /// Changes the knobs of groups of disks at once.
    pub fn set_groups(&self, groups: BTreeMap<String, Knobs>) {
        self.0.context.shares.set_groups(groups);
    }

    pub fn reactors(&self) -> &Arc<Reactors> {
        &self.0.context.reactors
    }

    /// Removes all disks and ends the yard, for all handles. Does not wait for disks that are being
    /// opened, because no client has written to them yet.
    pub fn close(&self) -> Vec<Ended> {
        self.0.context.is_closing.store(true, Ordering::SeqCst);
        let (sender, receiver) = mpsc::sync_channel(1);
        let _ = self.0.messages.send(Message::Close(sender));
        receiver.recv().unwrap_or_default()
    }

    /// Runs a command on a served disk, and waits for its answer.
    fn with<T: Send + 'static>(
        &self,
        name: &str,
        command: impl FnOnce(&Context, &mut ServedDisk) -> Result<T, YardError> + Send + 'static,
    ) -> Result<T, YardError> {
        self.begin(name, command).wait()
    }

    fn begin<T: Send + 'static>(
        &self,
        name: &str,
        command: impl FnOnce(&Context, &mut ServedDisk) -> Result<T, YardError> + Send + 'static,
    ) -> Pending<T> {
        let (operation, pending) = operation(name, command);
        self.send(name.into(), DiskState::Busy, operation);
        pending
    }

    /// Begins a command when no other one works on the disk. Fails if one does for long: a disk on
    /// storage that hangs has at most one command of this kind.
    fn begin_alone<T: Send + 'static>(
        &self,
        name: &str,
        command: impl FnOnce(&Context, &mut ServedDisk) -> Result<T, YardError> + Send + 'static,
    ) -> Result<Pending<T>, YardError> {
        let (mut operation, pending) = operation(name, command);
        let until = Instant::now() + PATIENCE;
        loop {
            let (refused, receiver) = mpsc::sync_channel(1);
            let message = Message::Try { name: name.into(), operation, refused };
            let _ = self.0.messages.send(message);
            operation = match receiver.recv() {
                Ok(None) => return Ok(pending),
                Ok(Some(operation)) => operation,
                Err(_) => return Err(YardError::Closing),
            };
            if Instant::now() >= until {
                return Err(YardError::Busy { disk: name.into() });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn send(&self, name: String, state: DiskState, operation: Operation) {
        let _ = self.0.messages.send(Message::Do { name, state, operation });
    }
}

/// A command that may still run.
#[must_use = "nobody learns whether the command failed"]
pub struct Pending<T>(Receiver<Result<T, YardError>>);

impl<T> Pending<T> {
    /// Waits for the end of the command.
    pub fn wait(self) -> Result<T, YardError> {
        self.0.recv().unwrap_or(Err(YardError::Closing))
    }

    /// Waits for the end of the command, but not longer than `limit`. Returns the command itself if
    /// it still runs then.
    pub fn wait_at_most(self, limit: Duration) -> Result<Result<T, YardError>, Self> {
        match self.0.recv_timeout(limit) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Disconnected) => Ok(Err(YardError::Closing)),
            Err(RecvTimeoutError::Timeout) => Err(self),
        }
    }
}

/// Returns a command on a served disk, and its result.
fn operation<T: Send + 'static>(
    name: &str,
    command: impl FnOnce(&Context, &mut ServedDisk) -> Result<T, YardError> + Send + 'static,
) -> (Operation, Pending<T>) {
    let (answer, receiver) = answer();
    let named = name.to_string();
    let operation: Operation = Box::new(move |context, _, mut disk| {
        let result = disk.as_mut().map(|disk| command(context, disk));
        (disk, answer(result.unwrap_or(Err(YardError::NotFound { disk: named }))))
    });
    (operation, Pending(receiver))
}

/// Returns an answer to a caller that waits. The table has the disk again when the caller gets it.
fn answer<T: Send + 'static>() -> (impl FnOnce(T) -> Answer + Send + 'static, Receiver<T>) {
    let (sender, receiver) = mpsc::sync_channel(1);
    (move |result| Box::new(move || drop(sender.send(result))) as Answer, receiver)
}

/// Returns an answer to a caller that does not wait. The command ends with it.
fn at_once<T: 'static>(
    then: impl FnOnce(T) + Send + 'static,
) -> impl FnOnce(T) -> Answer + Send + 'static {
    move |result| {
        then(result);
        Box::new(|| ())
    }
}

fn open(
    context: &Context,
    opener: &Opener,
    name: String,
    settings: impl FnOnce() -> Result<DiskSettings, WayError>,
) -> Result<(ServedDisk, Starting), YardError> {
    let settings = DiskSettings { name, ..settings().map_err(YardError::Settings)? };
    if context.is_closing.load(Ordering::SeqCst) {
        return Err(YardError::Closing);
    }
    ServedDisk::open(settings, context, opener)
}

#[cfg(test)]
mod tests;
