//! vhost-user-blk: a disk for virtual machines and User Mode Linux, over a Unix socket.
//!
//! ```text
//!   socket ─► thread (accept, one front end at a time) ─► session (messages) ─► queues, on the reactors
//! ```
//! `Export` is one socket for one disk. Its thread accepts a front end, works through its messages until it goes, stops
//! its queues and listens again. Requests never pass this thread.

mod channel;
mod config;
mod inflight;
mod notify;
mod pin;
mod placement;
mod queue;
mod request;
mod session;
mod socket;
mod virtqueue;
mod write_cache;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use blockyard_disk::{Disk, Served, Store};
use vhost::vhost_user::{BackendReqHandler, Error};

pub use config::QueueShape;
pub use notify::Coalesce;

/// The parts by themselves, for fuzzing and for tests that have no front end: not an interface to build on.
#[doc(hidden)]
pub mod parts {
    pub use super::inflight::{Inflight, InflightRegion, PackedChain, allocate, queue_bytes};
    pub use super::notify::Call;
    pub use super::queue::{DeviceState, QueueHandle, QueueSetup};
    pub use super::request::{Ask, Parsed, Terms, parse};
    pub use super::virtqueue::{Desc, Head, MAX_CHAIN, PackedRing, Ring, RingError, SplitRing};
    pub use crate::log::Log;
}

use crate::log::Log;
use crate::{Listener, PollMode, Reactors};
use channel::BackChannel;
use queue::DeviceState;
use session::Session;
use socket::Next;

/// How queues are driven.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    pub poll: PollMode,
    pub coalesce: Coalesce,
    /// Offer notifications by message (UML's time travel needs them).
    pub in_band: bool,
    /// Register the guest's memory with io_uring, which pins it.
    pub pin_memory: bool,
}

/// What sessions, the listening thread and the program share.
pub struct Export {
    device: Arc<DeviceState>,
    shape: QueueShape,
    tuning: Tuning,
    reactors: Arc<Reactors>,
    /// The way to tell the front end of today something.
    channel: Mutex<Option<Arc<BackChannel>>>,
    /// The front end's connection, to end a read from outside.
    connection: Mutex<Option<UnixStream>>,
    stop: AtomicBool,
    wake: OwnedFd,
}

/// A listening export; `stop` (or drop) ends it.
pub struct VhostUser {
    export: Arc<Export>,
    thread: Option<JoinHandle<()>>,
}

impl VhostUser {
    /// Serves `disk` on a socket that listens already.
    pub fn start(
        disk: Arc<Disk>,
        listener: Listener,
        shape: QueueShape,
        tuning: Tuning,
        reactors: Arc<Reactors>,
    ) -> io::Result<Self> {
        let write_back = AtomicBool::new(disk.options().cache.write_back());
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let export = Arc::new(Export {
            device: Arc::new(DeviceState { disk, write_back, log: Log::default() }),
            shape,
            tuning,
            reactors,
            channel: Mutex::new(None),
            connection: Mutex::new(None),
            stop: AtomicBool::new(false),
            wake: rustix::event::eventfd(0, flags)?,
        });
        let shared = export.clone();
        let name = format!("vhost {}", export.device.disk.name());
        let thread = std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .stack_size(512 << 10)
            .spawn(move || listen(&shared, &listener))?;
        Ok(VhostUser { export, thread: Some(thread) })
    }

    /// Tells the guest that the configuration changed: the disk has another size.
    pub fn config_changed(&self) {
        let channel = lock(&self.export.channel).clone();
        if let Some(channel) = channel
            && let Err(e) = channel.config_changed()
        {
            tracing::warn!(disk = self.export.device.disk.name(), "the front end was not told of the new size: {e}");
        }
    }

    /// Stops taking requests, answers those in flight, and closes the socket.
    pub fn stop(&mut self) {
        self.export.stop.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.export.wake, &1u64.to_ne_bytes());
        // What a front end has in flight is not to wait for limits now.
        self.export.each_served(Served::suspend);
        if let Some(connection) = &*lock(&self.export.connection) {
            // Only the reading half: a reply that is being written still goes out.
            let _ = connection.shutdown(std::net::Shutdown::Read);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.export.each_served(Served::resume);
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Export {
    fn each_served(&self, f: fn(&Served<Store>)) {
        for reactor in self.reactors.all() {
            let disk = self.device.disk.clone();
            reactor.run(move |_| drop(Served::known(&disk).inspect(|served| f(served))));
        }
    }

    /// Syncs the disk on every reactor that has written to it.
    fn settle(&self) {
        crate::ending::settle(&self.device.disk, &self.reactors);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// The export's thread.
fn listen(export: &Arc<Export>, listener: &Listener) {
    let (disk, log) = (export.device.disk.name(), &export.device.log);
    while !export.stop.load(Ordering::SeqCst) {
        match listener.accept(export.wake.as_fd()) {
            Ok(Some(stream)) => {
                log.info(disk, None, format_args!("a front end connected"));
                match serve(export, stream.into()) {
                    Ok(()) => log.info(disk, None, format_args!("the front end went away; listening again")),
                    Err(e) => log.warn(disk, None, format_args!("the front end was let go: {e}; listening again")),
                }
            }
            Ok(None) => {}
            Err(e) => {
                // Out of descriptors, most likely: listening goes on, slowly.
                log.warn(disk, None, format_args!("accepting a front end failed: {e}"));
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
        }
    }
}

/// Works through one front end's messages until it goes.
fn serve(export: &Arc<Export>, stream: UnixStream) -> Result<(), String> {
    let explain = |what: &'static str| move |e: io::Error| format!("{what}: {e}");
    *lock(&export.connection) = Some(stream.try_clone().map_err(explain("copying its socket"))?);
    let peek = stream.try_clone().map_err(explain("copying its socket"))?;
    let peer = blockyard_ring::host::peer_process(&stream);
    let session = Arc::new(Mutex::new(Session::new(export.clone(), peer)));
    let mut handler = BackendReqHandler::from_stream(stream, session.clone());
    let result = loop {
        if export.stop.load(Ordering::SeqCst) {
            break Ok(());
        }
        match socket::next(&peek) {
            Ok(Next::Gone) => break Ok(()),
            Ok(Next::Kick { index, reply }) => {
                let good = lock(&session).kicked(index);
                if reply && let Err(e) = socket::acknowledge(&peek, socket::VRING_KICK, good) {
                    break Err(e.to_string());
                }
            }
            Ok(Next::BackChannel { fd, reply }) => {
                let good = fd.is_some();
                if let Some(fd) = fd {
                    lock(&session).set_channel(fd);
                }
                let reply = reply && lock(&session).acknowledges();
                if reply && let Err(e) = socket::acknowledge(&peek, socket::SET_BACKEND_REQ_FD, good) {
                    break Err(e.to_string());
                }
            }
            Ok(Next::Other { request }) => match handler.handle_request() {
                Ok(()) => {}
                // It would wait for its answer for ever.
                Err(e) if socket::is_question(request) => break Err(e.to_string()),
                Err(Error::ReqHandlerError(_) | Error::InvalidOperation(_)) => {}
                Err(Error::Disconnected) => break Ok(()),
                Err(e) => break Err(e.to_string()),
            },
            Err(e) => break Err(e.to_string()),
        }
    };
    lock(&session).stop();
    *lock(&export.channel) = None;
    *lock(&export.connection) = None;
    result
}
