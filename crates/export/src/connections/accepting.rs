//! Accepts the clients of one address, up to a limit.
//!
//! In: an [`Entrance`], when clients wait. Out: their sockets, each counted until it is closed.
//! What must hold: a client that leaves lets one that waits in, whatever the order of both.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::acceptor::{Bell, Entrance, Registration};
use crate::log::Log;
use crate::{Listener, Reactors, descriptors};

/// Maximum number of clients that are accepted before clients of other exports get their turn.
const TURN: usize = 16;

/// The number of clients at an address, and its limit.
pub struct Accepting {
    most: AtomicUsize,
    clients: AtomicUsize,
    /// Clients wait in the listening socket.
    is_paused: AtomicBool,
    /// Set when the acceptor waits for clients.
    bell: OnceLock<Bell>,
}

/// A client's socket. It counts until it is closed. A thread that closes received descriptors may
/// close the socket later than the reactor does.
pub struct Accepted {
    fd: OwnedFd,
    accepting: Arc<Accepting>,
}

impl Accepting {
    /// `most`: maximum number of clients. Further clients wait until one disconnects.
    pub fn new(most: usize) -> Arc<Self> {
        let (clients, is_paused, bell) = Default::default();
        Arc::new(Accepting { most: most.into(), clients, is_paused, bell })
    }

    /// Calls `admit` when clients wait. Dropping the registration waits for that call.
    pub fn listen(
        &self,
        listener: Listener,
        reactors: &Arc<Reactors>,
        admit: impl Fn(&Reactors, Entrance) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Registration> {
        listener.refuse_descriptors();
        // The callback must not keep the reactors: dropping their last reference waits until they
        // end. The export has them, and it waits for this call before it ends.
        let dealt = Arc::downgrade(reactors);
        let registration = reactors.acceptor()?.register(listener, move |entrance| {
            dealt.upgrade().map_or(Ok(()), |reactors| admit(&reactors, entrance))
        })?;
        let _ = self.bell.set(registration.bell());
        // A callback that came before left the listener shut without a bell.
        self.ring();
        Ok(registration)
    }

    /// Changes the limit for clients that connect from now on.
    pub fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::SeqCst);
        // The new limit may allow more clients.
        self.ring();
    }

    /// Accepts no client until [`Accepting::resume`].
    pub fn pause(&self) {
        self.is_paused.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
        self.ring();
    }

    /// Makes the acceptor call `admit`, although no client has connected.
    pub fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// Returns the number of clients that are counted.
    #[cfg(test)]
    pub fn clients(&self) -> usize {
        self.clients.load(Ordering::SeqCst)
    }

    /// Counts a client until its socket is closed, even beyond the limit.
    pub fn count(self: &Arc<Self>, fd: OwnedFd) -> Accepted {
        self.clients.fetch_add(1, Ordering::SeqCst);
        Accepted { fd, accepting: self.clone() }
    }

    /// Accepts the clients that wait. `name`: the disk or the address in the log. After an error,
    /// the acceptor calls again after a pause.
    pub fn admit(
        self: &Arc<Self>,
        entrance: Entrance,
        (log, name): (&Log, &str),
        mut take: impl FnMut(Accepted),
    ) -> io::Result<()> {
        for _ in 0..TURN {
            if self.is_paused.load(Ordering::SeqCst) {
                entrance.keep_shut();
                return Ok(());
            }
            // Read the limit before the count. A client that leaves after the count was read finds
            // this limit or a later one, and rings. (`set_most` rings too.)
            let most = self.most.load(Ordering::SeqCst);
            if self.clients.load(Ordering::SeqCst) >= most {
                let what = format_args!(
                    "the most clients ({most}) are connected: others wait until one leaves"
                );
                log.warn(name, None, what);
                entrance.keep_shut();
                return Ok(());
            }
            if let Some((left, limit)) = descriptors::too_few() {
                let what = format_args!(
                    "{left} of {limit} descriptors are left, which are kept for the server itself: \
                     clients wait until others disconnect (raise the limit: ulimit -n, LimitNOFILE)"
                );
                log.warn(name, None, what);
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            match entrance.listener().accept_now() {
                Ok(Some(fd)) => take(self.count(fd)),
                Ok(None) => return Ok(()),
                Err(e) => {
                    // Most likely the process has no free descriptor.
                    log.warn(name, None, format_args!("cannot accept a client: {e}"));
                    return Err(e);
                }
            }
        }
        Ok(())
    }
}

impl AsFd for Accepted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        let Accepting { clients, most, .. } = &*self.accepting;
        let before = clients.fetch_sub(1, Ordering::SeqCst);
        if before >= most.load(Ordering::SeqCst) {
            self.accepting.ring();
        }
    }
}
