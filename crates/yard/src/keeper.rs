//! The thread that owns the table of disks.
//!
//! A disk is in the table from the first command for its name to the last. While a command runs, a
//! thread of the pool owns the disk, and further commands for it wait in its entry.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, ImagePaths, Unusable};
use blockyard_image::Opener;
use blockyard_ring::pool::{Pool, Refused};

use crate::context::Context;
use crate::exports::Exports;
use crate::interface::sample::KnownDisk;
use crate::interface::settings::DiskSettings;
use crate::interface::state::DiskState;
use crate::served::{Ended, ServedDisk, describe_image};

/// Threads that open disks. They mostly wait for an image's metadata.
const OPENING_THREADS: usize = 8;
/// Threads that run other commands. Those that hang do not count; see [`LONG`].
const OTHER_THREADS: usize = 4;
/// Maximum number of threads of each pool while commands hang, because the storage of their disks
/// does.
const MOST_THREADS: usize = 64;
/// A command that runs for this time may hang. It gets a thread beyond the usual ones, so that it
/// does not delay the commands of other disks.
const LONG: Duration = Duration::from_secs(1);
/// How long an idle thread waits for more commands. An idle server uses no memory for stacks.
const LINGER: Duration = Duration::from_millis(250);

/// A command. It receives the disk that it names, if the yard has that disk. It returns the disk
/// for the yard to keep, and its answer, a closure. The yard calls the answer when the table has
/// the disk again, so that the receiver sees the effect of the command.
pub(crate) type Operation =
    Box<dyn FnOnce(&Context, &Opener, Option<ServedDisk>) -> (Option<ServedDisk>, Answer) + Send>;
pub(crate) type Answer = Box<dyn FnOnce()>;

pub(crate) enum Message {
    Do {
        name: String,
        state: DiskState,
        operation: Operation,
    },
    /// Like `Do`, if no other command works on the disk. Else the operation comes back.
    Try {
        name: String,
        operation: Operation,
        refused: SyncSender<Option<Operation>>,
    },
    Done {
        name: String,
        disk: Option<Box<ServedDisk>>,
    },
    List(SyncSender<Vec<DiskInfo>>),
    Info {
        name: String,
        reply: SyncSender<Option<DiskInfo>>,
    },
    Known(SyncSender<Vec<KnownDisk>>),
    /// All disks that were opened, also those that are being closed.
    Disks(SyncSender<Vec<Arc<Disk>>>),
    Prepare(SyncSender<io::Result<()>>),
    Find {
        name: String,
        reply: SyncSender<Option<(Arc<Disk>, Exports)>>,
    },
    Close(SyncSender<Vec<Ended>>),
}

/// A row of the list of disks.
#[derive(Clone, Debug)]
pub struct DiskInfo {
    pub name: String,
    pub state: DiskState,
    /// The image that was given when the disk was added. None while it is being opened.
    pub image: Option<PathBuf>,
    /// The topmost image of a chain. None: the image has no other format than raw.
    pub top: Option<PathBuf>,
    /// The images that the disk consists of now.
    pub images: String,
    /// The files of these images. Empty while no image is open.
    pub paths: ImagePaths,
    /// Size of the disk in bytes; 0 while the image is being opened.
    pub capacity: u64,
    pub is_read_only: bool,
    /// Addresses at which its exports offer the disk.
    pub ways: Vec<String>,
    /// Number of requests that wait for space on the host.
    pub paused: u64,
    /// Whether an operator holds the requests back.
    pub is_drained: bool,
    /// Time after which the requests of a drained disk go on without a call.
    pub drain_left: Option<Duration>,
    /// Why the disk accepts no writes, or no requests, until its image is opened again.
    pub unusable: Option<Unusable>,
    /// Whether the image is closed because no guest uses the disk.
    pub is_inactive: bool,
}

impl DiskInfo {
    /// Returns the row of a disk that is not open yet.
    pub fn opening(name: String) -> Self {
        let (image, top, images, paths, ways) = Default::default();
        let (capacity, is_read_only, paused, is_drained) = Default::default();
        let (drain_left, unusable, is_inactive) = Default::default();
        let state = DiskState::Opening;
        DiskInfo {
            name,
            state,
            image,
            top,
            images,
            paths,
            capacity,
            is_read_only,
            ways,
            paused,
            is_drained,
            drain_left,
            unusable,
            is_inactive,
        }
    }
}

struct Entry {
    /// Number of the disk in order of arrival. The list of disks has this order.
    arrival: u64,
    state: DiskState,
    /// The disk. None while a thread of the pool owns it, or before it is open.
    disk: Option<Box<ServedDisk>>,
    /// What the list shows of the disk. None before it is open.
    shown: Option<Shown>,
    waiting: VecDeque<(DiskState, Operation)>,
}

/// What a disk shows while a command works on it.
struct Shown {
    disk: Arc<Disk>,
    settings: DiskSettings,
    exports: Exports,
}

/// State of closing the yard: the caller that waits for it, and the statistics of the disks that
/// have ended so far.
struct Closing {
    reply: SyncSender<Vec<Ended>>,
    sender: Sender<Ended>,
    ended: Receiver<Ended>,
}

pub(crate) struct Keeper {
    context: Arc<Context>,
    messages: Sender<Message>,
    entries: BTreeMap<String, Entry>,
    arrivals: u64,
    /// Runs commands that open images. A slow server on another host must not delay other commands.
    opening: Pool<Opener>,
    others: Pool<Opener>,
    /// Whether a command may wait for a thread.
    has_waiting: bool,
    closing: Option<Closing>,
}

impl Keeper {
    pub fn new(context: Arc<Context>, messages: Sender<Message>) -> Self {
        Keeper {
            context,
            messages,
            entries: BTreeMap::new(),
            arrivals: 0,
            opening: Pool::new("yard open", OPENING_THREADS, LINGER),
            others: Pool::new("yard", OTHER_THREADS, LINGER),
            has_waiting: false,
            closing: None,
        }
    }

    /// Runs commands until the yard is closed.
    pub fn run(mut self, messages: &Receiver<Message>) {
        let mut relieved = Instant::now();
        loop {
            let message = match self.has_waiting {
                true => messages.recv_timeout(LONG),
                false => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            if self.has_waiting && relieved.elapsed() >= LONG {
                self.has_waiting = self.relieve();
                relieved = Instant::now();
            }
            let message = match message {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            match message {
                Message::Try { name, operation, refused } => {
                    let is_free = |entry: &Entry| entry.disk.is_some();
                    let is_free = self.entries.get(&name).is_none_or(is_free);
                    let (operation, back) =
                        if is_free { (Some(operation), None) } else { (None, Some(operation)) };
                    let _ = refused.send(back);
                    if let Some(operation) = operation {
                        self.take(name, DiskState::Busy, operation);
                    }
                }
                Message::Do { name, state, operation } => self.take(name, state, operation),
                Message::Done { name, disk } => self.put_back(name, disk),
                Message::List(reply) => drop(reply.send(self.list())),
                Message::Info { name, reply } => drop(reply.send(self.info(&name))),
                Message::Known(reply) => drop(reply.send(self.known())),
                Message::Disks(reply) => drop(reply.send(self.disks())),
                Message::Prepare(reply) => self.prepare(reply),
                Message::Find { name, reply } => drop(reply.send(self.find(&name))),
                Message::Close(reply) => self.close(reply),
            }
            if self.closing.is_some()
                && self.entries.values().all(|entry| entry.state == DiskState::Opening)
            {
                break;
            }
        }
        if let Some(Closing { reply, sender, ended }) = self.closing {
            drop(sender);
            let _ = reply.send(ended.try_iter().collect());
        }
    }

    /// Starts threads for commands that wait behind commands that hang. Returns whether commands
    /// still wait.
    fn relieve(&self) -> bool {
        let opening = self.opening.relieve(LONG, MOST_THREADS);
        self.others.relieve(LONG, MOST_THREADS) || opening
    }

    fn take(&mut self, name: String, state: DiskState, operation: Operation) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        let new = || Entry { arrival, state, disk: None, shown: None, waiting: VecDeque::new() };
        let is_new = !self.entries.contains_key(&name);
        let entry = self.entries.entry(name.clone()).or_insert_with(new);
        if is_new || entry.disk.is_some() {
            self.begin(name, state, operation);
        } else {
            entry.waiting.push_back((state, operation));
        }
    }

    /// Passes the disk and the command to a thread of a pool.
    fn begin(&mut self, name: String, state: DiskState, operation: Operation) {
        let Some(entry) = self.entries.get_mut(&name) else { return };
        // Adding a disk under a name in use opens nothing and fails. It must not wait for slow
        // images.
        let opens = state == DiskState::Opening && entry.disk.is_none();
        entry.state = if state == DiskState::Opening && !opens { DiskState::Busy } else { state };
        let done = Done { messages: self.messages.clone(), name, disk: None };
        let (disk, context) = (entry.disk.take(), self.context.clone());
        let pool = if opens { &self.opening } else { &self.others };
        let begun = pool.run(Box::new(move |opener| {
            let mut done = done;
            let (disk, answer) = operation(&context, opener, disk.map(|disk| *disk));
            done.disk = disk.map(Box::new);
            drop(done);
            answer();
        }));
        self.has_waiting = true;
        if let Err(Refused { error, task }) = begun {
            tracing::warn!("cannot start a thread for commands: {error}");
            task(&Opener::default());
        }
    }

    fn put_back(&mut self, name: String, disk: Option<Box<ServedDisk>>) {
        let Some(entry) = self.entries.get_mut(&name) else { return };
        entry.shown = disk.as_ref().map(|disk| Shown {
            disk: disk.disk.clone(),
            settings: disk.settings.clone(),
            exports: disk.exports.clone(),
        });
        entry.disk = disk;
        match entry.waiting.pop_front() {
            Some((state, operation)) => self.begin(name, state, operation),
            None if entry.disk.is_some() => entry.state = DiskState::Serving,
            None => drop(self.entries.remove(&name)),
        }
    }

    fn prepare(&self, reply: SyncSender<io::Result<()>>) {
        let context = self.context.clone();
        let _ = self.opening.run(Box::new(move |opener| {
            let _ = reply.send(opener.prepare().and_then(|()| context.reactors.prepare()));
        }));
    }

    fn list(&self) -> Vec<DiskInfo> {
        let entries = self.by_arrival().into_iter().filter(|(_, entry)| entry.is_disk());
        entries.map(|(name, entry)| entry.info(name)).collect()
    }

    fn info(&self, name: &str) -> Option<DiskInfo> {
        let entry = self.entries.get(name).filter(|entry| entry.is_disk())?;
        Some(entry.info(name))
    }

    fn known(&self) -> Vec<KnownDisk> {
        self.by_arrival().into_iter().filter_map(|(_, entry)| entry.known()).collect()
    }

    fn disks(&self) -> Vec<Arc<Disk>> {
        let shown = self.entries.values().filter_map(|entry| entry.shown.as_ref());
        shown.map(|shown| shown.disk.clone()).collect()
    }

    /// Returns a disk that is open and stays open, also while a command works on it.
    fn find(&self, name: &str) -> Option<(Arc<Disk>, Exports)> {
        let Shown { disk, exports, .. } = self.entries.get(name)?.open()?;
        Some((disk.clone(), exports.clone()))
    }

    fn by_arrival(&self) -> Vec<(&String, &Entry)> {
        let mut entries: Vec<_> = self.entries.iter().collect();
        entries.sort_by_key(|(_, entry)| entry.arrival);
        entries
    }

    fn close(&mut self, reply: SyncSender<Vec<Ended>>) {
        self.context.is_closing.store(true, Ordering::SeqCst);
        let (sender, ended) = mpsc::channel();
        for name in self.entries.keys().cloned().collect::<Vec<_>>() {
            self.take(name, DiskState::Closing, close(sender.clone()));
        }
        self.closing = Some(Closing { reply, sender, ended });
    }
}

/// Closes a disk and sends its last statistics.
fn close(ended: Sender<Ended>) -> Operation {
    Box::new(move |context, _, disk| {
        disk.into_iter().for_each(|disk| drop(ended.send(disk.close(context))));
        (None, Box::new(|| ()))
    })
}

/// Reports the end of a command, whether it returns or panics.
struct Done {
    messages: Sender<Message>,
    name: String,
    disk: Option<Box<ServedDisk>>,
}

impl Drop for Done {
    fn drop(&mut self) {
        let (name, disk) = (std::mem::take(&mut self.name), self.disk.take());
        let _ = self.messages.send(Message::Done { name, disk });
    }
}

impl Entry {
    /// Returns whether the entry is one of a disk. A command for a disk that does not exist has an
    /// entry, too, until it is done.
    fn is_disk(&self) -> bool {
        self.shown.is_some() || self.state == DiskState::Opening
    }

    /// Returns the disk if it is open and stays open.
    fn open(&self) -> Option<&Shown> {
        self.shown.as_ref().filter(|_| self.state != DiskState::Closing)
    }

    fn known(&self) -> Option<KnownDisk> {
        let Shown { disk, settings, .. } = self.open()?;
        Some(KnownDisk {
            state: self.state,
            disk: disk.clone(),
            image: settings.image.path.display().to_string(),
            group: settings.group.clone(),
            knobs: settings.knobs.clone(),
        })
    }

    fn info(&self, name: &str) -> DiskInfo {
        let (name, state) = (name.to_string(), self.state);
        let Some(Shown { disk, settings, .. }) = &self.shown else {
            return DiskInfo { state, ..DiskInfo::opening(name) };
        };
        let drain = disk.drain_state();
        DiskInfo {
            name,
            state,
            image: Some(settings.image.path.clone()),
            top: disk.source().chain().map(|chain| chain.path().to_path_buf()),
            images: describe_image(settings, disk),
            paths: disk.source().paths(),
            capacity: disk.capacity(),
            is_read_only: settings.image.read_only,
            ways: settings.ways.iter().map(|way| way.describe()).collect(),
            paused: disk.paused(),
            is_drained: drain.is_drained,
            drain_left: drain.left(),
            unusable: disk.unusable(),
            is_inactive: disk.is_inactive(),
        }
    }
}

#[cfg(test)]
mod tests;
