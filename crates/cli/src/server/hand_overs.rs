//! What a server needs to hand its disks over.
//!
//! In: sockets for the next server, and calls that change disks. Out: whether another server has
//! the disks, and locks for the time of a hand-over. What must hold: one hand-over runs at a time.
//! A wait for calls that change disks has a limit. The end of the server ends a hand-over that is
//! not decided.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{
    Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError,
};
use std::time::{Duration, Instant};

use blockyard_control::Acceptance;
use blockyard_ring::parcel::Parcel;

/// How long calls that change the set of disks may take before a hand-over begins.
pub const CALLS_TIME: Duration = Duration::from_secs(5);
/// Time between two looks whether such calls have ended.
pub const CALLS_PAUSE: Duration = Duration::from_millis(5);

/// Why a hand-over cannot begin, or a disk cannot be given, at this moment.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotNow(pub String);

/// Returns a copy of a listening socket for the next server.
type Socket = Box<dyn Fn() -> io::Result<Parcel> + Send>;

/// What a server needs to hand its disks over.
pub struct HandOvers {
    /// Held during a hand-over: one at a time.
    only: Mutex<()>,
    /// Another server has the disks.
    is_done: AtomicBool,
    /// This server ends, so nothing waits for the end of another one.
    is_ending: AtomicBool,
    /// The connection of the hand-over that runs, until the new server may serve.
    uncommitted: Mutex<Option<UnixStream>>,
    /// Read by calls that change disks: the new server would not know what they do meanwhile.
    changes: RwLock<()>,
    sockets: Mutex<Vec<(&'static str, Socket)>>,
    /// Of the API, if there is one.
    acceptance: OnceLock<Acceptance>,
    /// Ends the wait of the main thread for signals.
    end: signal_hook::iterator::Handle,
}

impl HandOvers {
    pub fn new(end: signal_hook::iterator::Handle) -> Self {
        let (only, is_done, is_ending, uncommitted) = Default::default();
        let (changes, sockets, acceptance) = Default::default();
        HandOvers { only, is_done, is_ending, uncommitted, changes, sockets, acceptance, end }
    }

    /// Passes a listening socket on to the next server.
    pub fn offer(
        &self,
        name: &'static str,
        copy: impl Fn() -> io::Result<Parcel> + Send + 'static,
    ) {
        self.sockets().push((name, Box::new(copy)));
    }

    /// Stores what pauses the API. A hand-over pauses it before the next server serves.
    pub fn pauses(&self, acceptance: &Acceptance) {
        let _ = self.acceptance.set(acceptance.clone());
    }

    pub fn pause_api(&self) {
        self.acceptance.get().inspect(|api| api.pause());
    }

    pub fn resume_api(&self) {
        self.acceptance.get().inspect(|api| api.resume());
    }

    /// Excludes other hand-overs. Returns `None` if one runs.
    pub fn try_alone(&self) -> Option<MutexGuard<'_, ()>> {
        match self.only.try_lock() {
            Ok(only) => Some(only),
            Err(TryLockError::Poisoned(only)) => Some(only.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Another server has the disks from now on.
    pub fn set_done(&self) {
        self.is_done.store(true, Ordering::SeqCst);
    }

    /// Ends the wait of the main thread for signals.
    pub fn end_wait(&self) {
        self.end.close();
    }

    /// Returns whether the next server accepts the calls of the API, or will in a moment.
    pub fn has_left_api(&self) -> bool {
        self.is_done() || self.acceptance.get().is_some_and(Acceptance::is_paused)
    }

    /// Returns whether another server has the disks.
    pub fn is_done(&self) -> bool {
        self.is_done.load(Ordering::SeqCst)
    }

    /// Returns whether this server ends.
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::SeqCst)
    }

    /// Notes that this server ends. A hand-over that waits for the new server fails at once: a
    /// hung one must not delay the end.
    pub fn give_up(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
        if let Some(stream) = self.uncommitted().take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Notes the connection of a hand-over that begins.
    pub fn begins(&self, stream: &UnixStream) -> io::Result<()> {
        *self.uncommitted() = Some(stream.try_clone()?);
        if self.is_ending() {
            self.give_up();
        }
        Ok(())
    }

    /// Notes that the hand-over has failed, or that the new server may serve from now on. Then the
    /// end of this server must not interrupt it.
    pub fn is_decided(&self) {
        self.uncommitted().take();
    }

    fn uncommitted(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.uncommitted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Excludes hand-overs for a call that changes disks. None: one runs, or has ended.
    pub fn try_exclude(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let change = match self.changes.try_read() {
            Ok(change) => change,
            Err(TryLockError::Poisoned(change)) => change.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!self.is_done()).then_some(change)
    }

    /// Waits until no call changes disks, and excludes such calls. None: one has not ended.
    pub fn exclude_changes(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        let until = Instant::now() + CALLS_TIME;
        loop {
            match self.changes.try_write() {
                Ok(alone) => return Some(alone),
                Err(TryLockError::Poisoned(alone)) => return Some(alone.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(CALLS_PAUSE);
                }
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }

    /// Returns the sockets for the next server, each with its name.
    pub fn sockets(&self) -> MutexGuard<'_, Vec<(&'static str, Socket)>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use signal_hook::iterator::Signals;

    use super::*;

    /// A new server that hangs would delay the end of this one by the time for a message.
    #[test]
    fn the_end_of_the_server_ends_a_hand_over_that_is_not_decided() {
        let hand_overs = || HandOvers::new(Signals::new([0; 0]).unwrap().handle());
        let (own, mut new) = UnixStream::pair().unwrap();
        let waits = hand_overs();
        waits.begins(&own).unwrap();
        waits.give_up();
        assert_eq!(new.read(&mut [0]).unwrap(), 0, "the connection is shut down");

        let (own, mut new) = UnixStream::pair().unwrap();
        let late = hand_overs();
        late.give_up();
        late.begins(&own).unwrap();
        assert_eq!(new.read(&mut [0]).unwrap(), 0, "the end came first");

        let (own, mut new) = UnixStream::pair().unwrap();
        let decided = hand_overs();
        decided.begins(&own).unwrap();
        decided.is_decided();
        decided.give_up();
        new.set_nonblocking(true).unwrap();
        let kind = new.read(&mut [0]).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::WouldBlock, "the new server may serve");
    }
}
