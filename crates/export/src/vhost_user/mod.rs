//! vhost-user-blk: a disk for virtual machines and User Mode Linux, over a Unix socket.
//!
//! ```text
//!   socket ─► acceptor ─► thread (serves one front end at a time) ─► session (messages)
//!                                                                      │
//!                                                                      └─► queues, on the reactors
//! ```
//! A [`VhostUser`] serves one disk on one socket. When a front end connects, the acceptor of all
//! exports starts a thread. This thread accepts the front end, handles its messages until it
//! disconnects, and stops the queues. It ends when no other front end waits. Requests do not pass
//! through it. A front end that stalls in the middle of a message delays only its own thread.

mod caller;
mod channel;
mod config;
mod conversation;
mod device;
mod dirty_memory;
pub(crate) mod handed;
mod handover;
mod inflight;
mod kept;
mod memory;
mod messages;
mod migration;
mod notify;
mod own_region;
mod pin;
mod queue;
mod refusal;
mod request;
mod session;
mod signal;
mod socket;
mod state;
mod virtqueue;
mod waiting;
mod write_cache;

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blockyard_disk::{ConnectedClient, Disk, LocalDisk};
use blockyard_ring::Mapper;
use blockyard_ring::parcel::Parcel;
use rustix::event::{PollFd, PollFlags, Timespec};

pub use config::QueueShape;
pub use handed::{Before, HandedSocket};
pub use handover::KIND;

/// Internal parts, for fuzzing and for tests without a front end. They are no stable interface.
#[doc(hidden)]
pub mod parts {
    pub use super::device::DeviceState;
    pub use super::inflight::{Inflight, InflightRegion, PackedChain, allocate, queue_bytes};
    pub use super::notify::Call;
    pub use super::queue::{Marks, QueueHandle, QueueSetup};
    pub use super::request::{Action, ParseContext, Parsed, parse};
    pub use super::virtqueue::{Desc, Head, MAX_CHAIN, PackedRing, Ring, RingError, SplitRing};
}

use crate::acceptor::{Entrance, Registration};
use crate::export::{BY_OPERATOR, Obstacle, STOP_TIME};
use crate::{Client, Export, Handed, Listener, PollMode, Reactors, custody, keeper};
use channel::BackChannel;
use conversation::{Conversation, Disconnect, Leaving};
use device::DeviceState;
use handover::First;
use queue::QueueHandle;
use state::SessionState;
use waiting::{FrontEnd, Waiting};

/// How queues poll and signal, and how front ends are accepted.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    pub poll: PollMode,
    /// Offer in-band notifications, which UML's time travel needs.
    pub in_band: bool,
    /// Register the guest's memory with io_uring, which pins it.
    pub pin_memory: bool,
    /// Accept guest memory in files of FUSE and network file systems, although another process can
    /// withhold their pages.
    pub any_memory_file: bool,
    pub second_client: SecondClient,
}

/// What happens to a front end that connects while another one is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecondClient {
    /// The second front end waits until the first one disconnects.
    #[default]
    Wait,
    /// The server closes the connection of the second front end.
    Refuse,
}

/// State that the sessions, their thread and the program share.
pub struct Shared {
    device: Arc<DeviceState>,
    shape: QueueShape,
    tuning: Tuning,
    reactors: Arc<Reactors>,
    /// Maps the memory of every front end that connects to this socket.
    mapper: Mapper,
    /// The back channel of the current front end.
    channel: Mutex<Option<Arc<BackChannel>>>,
    /// The connection of the current front end.
    connection: Mutex<Option<Connection>>,
    stop: AtomicBool,
    /// The export stops because another server continues it.
    handing_over: AtomicBool,
    /// What the thread has released for the other server.
    released: Mutex<Option<io::Result<Parcel>>>,
    threads: Threads,
    /// The images of the disk have changed since the session was kept for the next server.
    has_new_images: AtomicBool,
    /// Number of current waits of the session for reactors or storage. The front end cannot prolong
    /// such a wait.
    own_waits: AtomicU32,
}

struct Connection {
    /// A copy of the socket, used to interrupt the session's reads.
    stream: UnixStream,
    /// An eventfd that interrupts the session's wait for messages.
    wake: Arc<OwnedFd>,
    client: Client,
    counted: ConnectedClient,
}

/// Number of threads that serve front ends of an export: one, or two for the moment in which the
/// next one has begun already.
#[derive(Default)]
struct Threads {
    running: Mutex<u32>,
    ended: Condvar,
}

/// Counts a thread until it is dropped.
struct Running(Arc<Shared>);

impl Running {
    fn new(export: &Arc<Shared>) -> Self {
        *lock(&export.threads.running) += 1;
        Running(export.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        *lock(&self.0.threads.running) -= 1;
        self.0.threads.ended.notify_all();
    }
}

/// Guard of one wait in the count [`Shared::own_waits`].
struct OwnWait(Arc<Shared>);

impl Drop for OwnWait {
    fn drop(&mut self) {
        self.0.own_waits.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Longest time that `stop` waits for a session that waits for neither a reactor nor storage. A
/// descriptor from the front end may block such a session: another process decides when a FUSE file
/// answers, or when the close of a socket returns.
const DESCRIPTOR_TIME: Duration = Duration::from_secs(5);
/// Time between two checks of what a session waits for.
const CHECK_PERIOD: Duration = Duration::from_millis(10);

/// A listening export. `stop` or drop ends it.
pub struct VhostUser {
    export: Arc<Shared>,
    /// None after `stop`.
    registration: Option<Registration>,
    descriptor_time: Duration,
}

impl VhostUser {
    /// Serves `disk` on `listener`.
    pub fn start(
        disk: Arc<Disk>,
        listener: Listener,
        shape: QueueShape,
        tuning: Tuning,
        reactors: Arc<Reactors>,
    ) -> io::Result<Self> {
        let export = Shared::new(disk, shape, tuning, reactors)?;
        let served = export.clone();
        let registration = export
            .reactors
            .acceptor()?
            .register(listener, move |entrance| begin(&served, entrance))?;
        export.keep_listener(registration.listener());
        let registration = Some(registration);
        Ok(VhostUser { export, registration, descriptor_time: DESCRIPTOR_TIME })
    }

    /// Waits until no thread serves front ends. Returns false if the thread is blocked by a
    /// descriptor of the front end at `deadline`, or for `descriptor_time`. The time of a wait that
    /// the front end cannot prolong does not count.
    fn ends(&self, deadline: Instant) -> bool {
        let Threads { running, ended } = &self.export.threads;
        let mut limit = deadline.min(Instant::now() + self.descriptor_time);
        let mut count = lock(running);
        while *count > 0 {
            let now = Instant::now();
            if self.export.own_waits.load(Ordering::SeqCst) > 0 {
                limit = limit.max(now + DESCRIPTOR_TIME);
            } else if now >= limit {
                return false;
            }
            let waited = ended.wait_timeout(count, CHECK_PERIOD);
            count = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Export for VhostUser {
    fn resize(&mut self) {
        let channel = lock(&self.export.channel).clone();
        let Some(channel) = channel else { return };
        // Only the name: a task that waits must not keep the image open.
        let disk = self.export.device.disk.name().to_string();
        // The front end can block the sender for a second, so nothing waits for the thread.
        let task = move |(): &()| {
            if let Err(e) = channel.config_changed() {
                tracing::warn!(disk, "cannot notify the front end of the new size: {e}");
            }
        };
        if let Err(refused) = self.export.device.changes.run(Box::new(task)) {
            let (disk, e) = (self.export.device.disk.name(), refused.error);
            tracing::warn!(
                disk,
                "cannot notify the front end of the new size: cannot start a thread: {e}"
            );
        }
    }

    fn stop(&mut self, deadline: Instant) {
        // No thread begins after this.
        if self.registration.take().is_none() {
            return;
        }
        self.export.stop.store(true, Ordering::SeqCst);
        self.end_session(deadline);
        // A session that ends keeps its socket for the next one.
        self.export.forget();
    }

    fn obstacle(&self) -> Option<Obstacle> {
        handover::obstacle(self)
    }

    fn waits_for_owner(&self) -> bool {
        true
    }

    fn hand_over(&mut self) -> Option<Handed> {
        handover::hand_over(self)
    }

    fn keep_images(&mut self) {
        if keeper::is_on() {
            self.export.has_new_images.store(true, Ordering::SeqCst);
            lock(&self.export.connection).iter().for_each(|connection| ring(&connection.wake));
        }
    }

    fn clients(&self) -> Vec<Client> {
        lock(&self.export.connection).iter().map(|connection| connection.client.clone()).collect()
    }

    fn disconnect(&mut self, description: Option<&str>) -> Vec<Client> {
        let connection = lock(&self.export.connection);
        let is_meant = |client: &Client| description.is_none_or(|d| d == client.description);
        match &*connection {
            Some(Connection { stream, client, counted, .. }) if is_meant(client) => {
                counted.ends(BY_OPERATOR);
                end(stream);
                vec![client.clone()]
            }
            _ => Vec::new(),
        }
    }
}

impl VhostUser {
    /// Ends the session of a front end. Waits for the front end until `deadline` at most.
    fn end_session(&self, deadline: Instant) {
        if *lock(&self.export.threads.running) == 0 {
            return;
        }
        // Requests in flight must not wait for throttles any more.
        self.export.each_served(LocalDisk::suspend);
        if let Some(Connection { stream, wake, .. }) = &*lock(&self.export.connection) {
            ring(wake);
            end(stream);
        }
        if self.ends(deadline) {
            self.export.each_served(LocalDisk::resume);
            return;
        }
        // The blocked thread stays until the process ends. Stop its queues without it.
        let device = &self.export.device;
        let what = format_args!(
            "a descriptor of the front end blocks the session: its queues are stopped without it"
        );
        device.log.warn(device.disk.name(), None, what);
        QueueHandle::stop_all(device, &self.export.reactors);
        self.export.each_served(LocalDisk::resume);
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.stop(Instant::now() + STOP_TIME);
    }
}

impl Shared {
    fn new(
        disk: Arc<Disk>,
        shape: QueueShape,
        tuning: Tuning,
        reactors: Arc<Reactors>,
    ) -> io::Result<Arc<Self>> {
        blockyard_ring::doorbell::prepare()?;
        blockyard_ring::survive_lost_memory()?;
        disk.note_export(KIND);
        let write_back = disk.options().cache.write_back();
        Ok(Arc::new(Shared {
            device: Arc::new(DeviceState::new(disk, write_back)),
            shape,
            tuning,
            reactors,
            mapper: Mapper::new(tuning.any_memory_file),
            channel: Mutex::new(None),
            connection: Mutex::new(None),
            stop: AtomicBool::new(false),
            handing_over: AtomicBool::new(false),
            released: Mutex::new(None),
            threads: Threads::default(),
            has_new_images: AtomicBool::new(false),
            own_waits: AtomicU32::new(0),
        }))
    }

    /// Returns the state of a front end that has set nothing yet.
    fn new_state(&self) -> SessionState {
        SessionState::new(self.shape.queues, self.device.disk.options().cache.write_back())
    }

    fn each_served(&self, f: fn(&LocalDisk)) {
        for reactor in self.reactors.all() {
            let disk = self.device.disk.clone();
            reactor.run(move |handle| {
                drop(LocalDisk::known(handle, &disk).inspect(|served| f(served)))
            });
        }
    }

    /// Counts a wait of the session for a reactor or for storage, until the guard is dropped.
    fn own_wait(self: &Arc<Self>) -> OwnWait {
        self.own_waits.fetch_add(1, Ordering::SeqCst);
        OwnWait(self.clone())
    }

    /// Syncs the disk on every reactor that has written to it. Returns false if one of the syncs
    /// failed.
    fn sync(&self) -> bool {
        crate::ending::sync(&self.device.disk, &self.reactors)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets a session end after its current message. The session still sends the reply to that message
/// if the socket has room for it. If the socket has no room, the front end does not read. Then the
/// session may be blocked in a write, so the write half is shut down too.
fn end(stream: &UnixStream) {
    // Another server may have the same connection: it must stay then.
    if custody::is_owner() {
        let half = if has_room(stream) { Shutdown::Read } else { Shutdown::Both };
        let _ = stream.shutdown(half);
    }
}

/// Returns whether a reply could be written without blocking.
fn has_room(connection: &UnixStream) -> bool {
    let mut fds = [PollFd::new(connection, PollFlags::OUT)];
    let _ = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    fds[0].revents().contains(PollFlags::OUT)
}

/// Interrupts a session's wait for messages.
fn ring(wake: &OwnedFd) {
    let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
}

/// Starts the thread that serves the front ends which have connected.
fn begin(export: &Arc<Shared>, entrance: Entrance) -> io::Result<()> {
    begin_with(export, entrance, None, Vec::new())
}

/// Like `begin`. `first`: a session of another server that continues. `waiting`: front ends that
/// have connected to that server and were not served.
fn begin_with(
    export: &Arc<Shared>,
    entrance: Entrance,
    first: Option<First>,
    waiting: Vec<FrontEnd>,
) -> io::Result<()> {
    let (served, running) = (export.clone(), Running::new(export));
    let name = format!("vhost {}", export.device.disk.name());
    let started = std::thread::Builder::new()
        .name(name.chars().take(15).collect())
        .stack_size(512 << 10)
        .spawn(move || {
            // Dropped last. `stop` may return then.
            let _running = running;
            let waiting = Waiting::new(&served, entrance.listener(), waiting);
            serve_all(&served, first, waiting);
            drop(entrance);
        });
    started.map(drop).inspect_err(|e| {
        let what = format_args!("cannot start a thread for a front end: {e}");
        export.device.log.warn(export.device.disk.name(), None, what);
    })
}

/// Serves front ends until none is connected.
fn serve_all(export: &Arc<Shared>, first: Option<First>, mut waiting: Waiting<'_>) {
    let (disk, log) = (export.device.disk.name(), &export.device.log);
    let report = |ended: Result<Option<Leaving>, Disconnect>| match ended {
        Ok(Some(leaving)) => Some(leaving),
        Ok(None) => {
            log.info(disk, None, format_args!("the front end disconnected; listening again"));
            None
        }
        Err(e) => {
            let what = format_args!("disconnected the front end: {e}; listening again");
            log.warn(disk, None, what);
            None
        }
    };
    // What another server has released is true until this server reads messages: of the session,
    // and of front ends that wait. So none is read before it is decided which of them goes on.
    let is_owner = custody::decided();
    let mut leaving = None;
    if !is_owner {
        export.stop.store(true, Ordering::SeqCst);
    }
    match first {
        Some(First::GoesOn(conversation)) => {
            if is_owner {
                conversation.run_held();
            }
            leaving = report(conversation.run(export, &mut waiting));
        }
        Some(First::Ends(stream, why)) if is_owner => {
            export.keep_listener(waiting.listener());
            // The other server and the keeper may have the same connection.
            let _ = stream.shutdown(Shutdown::Both);
            report(Err(why));
        }
        Some(First::Ends(..)) | None => {}
    }
    while !export.stop.load(Ordering::SeqCst) {
        match waiting.next() {
            Ok(Some(client)) => {
                log.info(disk, None, format_args!("a front end connected"));
                let begun = Conversation::begin(export, client);
                leaving = report(begun.and_then(|begun| begun.run(export, &mut waiting)));
            }
            Ok(None) => break,
            Err(e) => {
                // Most likely the process has no free descriptor. Retry after a pause.
                log.warn(disk, None, format_args!("cannot accept a front end: {e}"));
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
    if export.handing_over.load(Ordering::SeqCst) {
        let present = leaving.as_ref().map(Leaving::present);
        let packed = handed::pack(waiting.listener(), present, waiting.clients());
        *lock(&export.released) = Some(packed);
    }
    // Closing the front end's descriptors may block.
    drop(leaving);
}

#[cfg(test)]
mod tests;
