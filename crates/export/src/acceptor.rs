//! One thread that waits for clients on the listening sockets of vhost-user exports and of exports
//! over stream sockets.
//!
//! ```text
//!   listening sockets ──► epoll, one thread ──► the callback: starts a session's thread
//!                              ▲                (vhost-user), or gives clients to reactors (NBD)
//!                              └──── the end of the session, or of the callback ◄────┘
//! ```
//! So an export without a client has neither a thread nor a descriptor besides its socket.
//!
//! In: listeners, each with a callback. Out: a call when a client connects, or when a [`Bell`]
//! rings. The acceptor then ignores the listener until the [`Entrance`] that the call received is
//! dropped.
//! What must hold: a callback does not block. After the [`Registration`] is dropped, its callback
//! is not called any more.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::{Listener, custody};

/// Number of the eventfd that ends the thread. Listeners have other numbers.
const WAKE: u64 = 0;
/// Pause after a callback failed, most likely because the process cannot start a thread.
const PAUSE: Duration = Duration::from_millis(200);
/// Number of events that one system call returns.
const EVENTS: usize = 64;

/// Takes a client. After an error, the acceptor calls again after a pause.
type OnClient = Box<dyn Fn(Entrance) -> io::Result<()> + Send>;

/// The thread that waits for clients. Drop ends it.
pub struct Acceptor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    epoll: OwnedFd,
    wake: OwnedFd,
    stop: AtomicBool,
    next: AtomicU64,
    doors: Mutex<HashMap<u64, Door>>,
    /// Listeners with a bell that has rung.
    rung: Mutex<BTreeSet<u64>>,
}

struct Door {
    listener: Arc<Listener>,
    on_client: OnClient,
}

/// A listener on which the acceptor waits. Drop ends that, and closes the listener if no
/// [`Entrance`] of it exists.
pub struct Registration {
    shared: Arc<Shared>,
    number: u64,
    listener: Arc<Listener>,
}

/// Makes the acceptor call the callback of a listener, although no client has connected.
#[derive(Clone)]
pub struct Bell {
    shared: Arc<Shared>,
    number: u64,
}

/// A listener with clients, which the acceptor ignores until this is dropped.
pub struct Entrance {
    shared: Arc<Shared>,
    number: u64,
    listener: Arc<Listener>,
    is_shut: bool,
}

impl Acceptor {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
            next: AtomicU64::new(WAKE + 1),
            doors: Mutex::default(),
            rung: Mutex::default(),
        });
        epoll::add(&shared.epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let waiting = shared.clone();
        let thread = std::thread::Builder::new()
            .name("acceptor".into())
            .stack_size(256 << 10)
            .spawn(move || waiting.run())?;
        Ok(Acceptor { shared, thread: Some(thread) })
    }

    /// Waits for clients of `listener` from now on.
    pub fn register(
        &self,
        listener: Listener,
        on_client: impl Fn(Entrance) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Registration> {
        self.add(Arc::new(listener), on_client, FLAGS)
    }

    /// Like `register`, for a listener with a client that has connected already.
    pub fn register_entered(
        &self,
        listener: Listener,
        on_client: impl Fn(Entrance) -> io::Result<()> + Send + 'static,
    ) -> io::Result<(Registration, Entrance)> {
        let listener = Arc::new(listener);
        let registration = self.add(listener.clone(), on_client, EventFlags::ONESHOT)?;
        let (shared, number) = (self.shared.clone(), registration.number);
        Ok((registration, Entrance { shared, number, listener, is_shut: false }))
    }

    fn add(
        &self,
        listener: Arc<Listener>,
        on_client: impl Fn(Entrance) -> io::Result<()> + Send + 'static,
        flags: EventFlags,
    ) -> io::Result<Registration> {
        let shared = self.shared.clone();
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let door = Door { listener: listener.clone(), on_client: Box::new(on_client) };
        shared.doors().insert(number, door);
        let registration = Registration { shared, number, listener };
        for socket in registration.listener.sockets() {
            epoll::add(&registration.shared.epoll, socket, EventData::new_u64(number), flags)?;
        }
        Ok(registration)
    }
}

/// One event; the next one comes after [`Entrance`] has armed the socket again.
const FLAGS: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn doors(&self) -> MutexGuard<'_, HashMap<u64, Door>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(self: &Arc<Self>) {
        // A server that takes over accepts no client before it is the owner of the sockets.
        if !custody::decided() {
            return;
        }
        let mut events = Vec::with_capacity(EVENTS);
        while !self.stop.load(Ordering::SeqCst) {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => panic!("epoll_wait failed: {e}"),
            }
            let number = |event: &Event| {
                let data = event.data;
                data.u64()
            };
            let rung = self.rung();
            let listeners = events.iter().map(number).filter(|&number| number != WAKE).chain(rung);
            let failed = listeners.filter(|&number| self.client_of(number).is_err()).count();
            if failed > 0 {
                self.pause();
            }
        }
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Returns the listeners with a bell that has rung since the last call.
    fn rung(&self) -> BTreeSet<u64> {
        if !self.stop.load(Ordering::SeqCst) {
            // Before the list is taken, so that a bell that rings now wakes the thread again.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        std::mem::take(&mut *self.rung.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls the callback of a listener that has a client.
    fn client_of(self: &Arc<Self>, number: u64) -> io::Result<()> {
        // The lock is held during the callback, so that the end of a registration waits for it.
        let doors = self.doors();
        let Some(Door { listener, on_client }) = doors.get(&number) else { return Ok(()) };
        let (shared, listener) = (self.clone(), listener.clone());
        on_client(Entrance { shared, number, listener, is_shut: false })
    }

    /// Waits for [`PAUSE`], or until the acceptor ends.
    fn pause(&self) {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, Timespec::try_from(PAUSE).ok().as_ref());
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let door = self.shared.doors().remove(&self.number);
        for socket in self.listener.sockets() {
            let _ = epoll::delete(&self.shared.epoll, socket);
        }
        drop(door);
    }
}

impl Registration {
    pub fn listener(&self) -> &Arc<Listener> {
        &self.listener
    }

    pub fn bell(&self) -> Bell {
        Bell { shared: self.shared.clone(), number: self.number }
    }
}

impl Bell {
    /// Makes the acceptor call the callback soon. After the end of the registration, nothing
    /// happens.
    pub fn ring(&self) {
        let mut rung = self.shared.rung.lock().unwrap_or_else(PoisonError::into_inner);
        rung.insert(self.number);
        drop(rung);
        self.shared.wake();
    }
}

impl Entrance {
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Makes the acceptor ignore the listener until another entrance of it is dropped. Its
    /// [`Bell`] calls the callback with one.
    pub fn keep_shut(mut self) {
        self.is_shut = true;
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
        if self.is_shut {
            return;
        }
        for socket in self.listener.sockets() {
            // Fails after the end of the registration. Then no client is expected.
            let data = EventData::new_u64(self.number);
            let _ = epoll::modify(&self.shared.epoll, socket, data, FLAGS);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::sync::mpsc;

    use super::*;

    fn socket(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("blockyard-acceptor-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_listener_is_ignored_while_its_entrance_exists() {
        let acceptor = Acceptor::start().unwrap();
        let (path, (sender, entrances)) = (socket("once"), mpsc::channel());
        let registration = acceptor
            .register(Listener::bind(&path).unwrap(), move |entrance| {
                sender.send(entrance).map_err(io::Error::other)
            })
            .unwrap();
        let _one = UnixStream::connect(&path).unwrap();
        let entrance = entrances.recv().unwrap();
        let _two = UnixStream::connect(&path).unwrap();
        // Another listener has its event after all events of the first one.
        let (other, (sender, others)) = (socket("other"), mpsc::channel());
        let _other = acceptor
            .register(Listener::bind(&other).unwrap(), move |_| {
                sender.send(()).map_err(io::Error::other)
            })
            .unwrap();
        let _three = UnixStream::connect(&other).unwrap();
        others.recv().unwrap();
        assert!(entrances.try_recv().is_err());
        assert!(entrance.listener().accept_now().unwrap().is_some());
        assert!(entrance.listener().accept_now().unwrap().is_some());
        assert!(entrance.listener().accept_now().unwrap().is_none());
        let _four = UnixStream::connect(&path).unwrap();
        drop(entrance);
        let entrance = entrances.recv().unwrap();
        drop(registration);
        assert!(path.exists(), "a session has the listener");
        drop(entrance);
        assert!(!path.exists());
        assert!(entrances.recv().is_err(), "the callback is gone");
    }

    #[test]
    fn a_shut_listener_is_called_again_when_its_bell_rings() {
        let acceptor = Acceptor::start().unwrap();
        let (path, (sender, entrances)) = (socket("bell"), mpsc::channel());
        let registration = acceptor
            .register(Listener::bind(&path).unwrap(), move |entrance| {
                sender.send(entrance).map_err(io::Error::other)
            })
            .unwrap();
        let bell = registration.bell();
        bell.ring();
        // The callback is called without a client.
        let entrance = entrances.recv().unwrap();
        assert!(entrance.listener().accept_now().unwrap().is_none());
        drop(entrance);
        let _one = UnixStream::connect(&path).unwrap();
        entrances.recv().unwrap().keep_shut();
        // The thread handles one bell after another: no event came between.
        bell.ring();
        entrances.recv().unwrap().keep_shut();
        bell.ring();
        let entrance = entrances.recv().unwrap();
        assert!(entrance.listener().accept_now().unwrap().is_some());
        assert!(entrances.try_recv().is_err());
        drop(entrance);
        drop(registration);
        bell.ring();
        assert!(entrances.recv().is_err(), "the callback is gone");
    }

    #[test]
    fn a_callback_that_failed_is_called_again() {
        let acceptor = Acceptor::start().unwrap();
        let (path, (sender, calls)) = (socket("again"), mpsc::channel());
        let _registration = acceptor
            .register(Listener::bind(&path).unwrap(), move |_| {
                let _ = sender.send(());
                Err(io::ErrorKind::OutOfMemory.into())
            })
            .unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        calls.recv().unwrap();
        calls.recv().unwrap();
    }
}
