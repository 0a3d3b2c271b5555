//! One thread that waits for clients on the listening sockets of all vhost-user exports.
//!
//! ```text
//!   listening sockets ──► epoll, one thread ──► the export's callback: starts a session's thread
//!                              ▲                                             │
//!                              └────────── the end of that thread ◄──────────┘
//! ```
//! So an export without a client has neither a thread nor a descriptor besides its socket.
//!
//! In: listeners, each with a callback. Out: a call when a client connects. The acceptor then
//! ignores the listener until the [`Entrance`] that the call received is dropped.
//! What must hold: a callback does not block. After the [`Registration`] is dropped, its callback
//! is not called any more.

use std::collections::HashMap;
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

/// A listener with clients, which the acceptor ignores until this is dropped.
pub struct Entrance {
    shared: Arc<Shared>,
    number: u64,
    listener: Arc<Listener>,
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
        Ok((registration, Entrance { shared, number, listener }))
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
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
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
            let failed = events.iter().filter(|e| self.client_of(number(e)).is_err()).count();
            if failed > 0 {
                self.pause();
            }
        }
    }

    /// Calls the callback of a listener that has a client.
    fn client_of(self: &Arc<Self>, number: u64) -> io::Result<()> {
        // The lock is held during the callback, so that the end of a registration waits for it.
        let doors = self.doors();
        let Some(Door { listener, on_client }) = doors.get(&number) else { return Ok(()) };
        on_client(Entrance { shared: self.clone(), number, listener: listener.clone() })
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
}

impl Entrance {
    pub fn listener(&self) -> &Listener {
        &self.listener
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
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
