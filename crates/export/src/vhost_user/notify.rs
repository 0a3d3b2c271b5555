//! Telling the guest: how, and how often.
//!
//! A virtual machine's front end takes an eventfd, and an interrupt a batch is right for it. User Mode Linux gives a Unix
//! stream socket: there an interrupt is a Unix signal, costs more than the I/O, and stops the only CPU. For streams
//! completions are therefore gathered: a signal at `most` pending ones, or `wait` after the first. A wait that brought nothing new was
//! in vain (the guest waits for us), so the next `SKIP` are told at once; twice as many after each further one.

//!
//! The front end owns these descriptors too, and can clear O_NONBLOCK at any time. What must hold: a signal never waits. So
//! an eventfd is signalled by a [`Doorbell`], a socket with MSG_DONTWAIT. Other kinds are refused: a pipe, or a socket
//! that is read or of another family, has locks in the kernel that its other users hold while they wait for a page.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_ring::doorbell::{self, Doorbell};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketType, sockopt};

use super::caller::Caller;

const SKIP: u32 = 16;
const SKIP_MOST: u32 = 4096;

/// The way to the guest.
pub enum Call {
    None,
    /// An eventfd (virtual machines).
    Event(Doorbell),
    /// A Unix stream socket (User Mode Linux).
    Stream(OwnedFd),
    /// A message on the back channel (VHOST_USER_PROTOCOL_F_INBAND_NOTIFICATIONS).
    InBand {
        caller: Arc<Caller>,
        index: u16,
    },
}

impl Call {
    /// Error `InvalidInput`: the descriptor is neither an eventfd nor a Unix stream socket.
    pub fn fd(fd: OwnedFd) -> io::Result<Self> {
        if is_unix_stream(&fd) { Ok(Call::Stream(fd)) } else { Doorbell::new(&fd).map(Call::Event) }
    }

    pub fn is_stream(&self) -> bool {
        matches!(self, Call::Stream(_))
    }

    #[inline]
    pub fn ring(&mut self) {
        match self {
            Call::None => {}
            Call::Event(bell) => bell.ring(),
            Call::Stream(socket) => send(socket),
            Call::InBand { caller, index } => caller.call(*index),
        }
    }
}

/// Signals an error descriptor, which happens once for a broken ring.
pub fn signal_error(fd: &OwnedFd) {
    if is_unix_stream(fd) {
        send(fd);
    } else {
        let _ = doorbell::ring_once(fd);
    }
}

/// A full socket holds a signal that the guest has not read yet.
fn send(socket: &OwnedFd) {
    let _ = rustix::net::send(socket, &1u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Whether a reactor may wait for kicks of this descriptor: an eventfd, which needs no reads.
pub fn is_kick(fd: &OwnedFd) -> io::Result<bool> {
    doorbell::is_eventfd(fd)
}

/// Whether a reactor may signal, and close, this descriptor.
pub fn is_call(fd: &OwnedFd) -> io::Result<bool> {
    if is_unix_stream(fd) { close_input(fd).map(|()| true) } else { doorbell::is_eventfd(fd) }
}

/// Discards what a socket has received, and lets it receive nothing more. The last close of a socket closes the descriptors
/// in its receive queue too, and that may wait for their owner: such a queue must not reach a reactor.
fn close_input(socket: &OwnedFd) -> io::Result<()> {
    rustix::net::shutdown(socket, Shutdown::Read)?;
    let mut bytes = [0u8; 4096];
    loop {
        match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::AGAIN) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

pub(super) fn is_unix_stream(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    sockopt::socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
        && sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM)
}

/// When completions are told. Times of 0 tell at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coalesce {
    /// Gather for streams, tell eventfds at once.
    Auto,
    /// Gather for this long, whoever listens.
    Fixed(Duration),
}

impl Coalesce {
    /// The longest wait for a kind of listener.
    pub fn wait(self, is_stream: bool) -> Duration {
        match self {
            Coalesce::Auto if is_stream => Duration::from_micros(400),
            Coalesce::Auto => Duration::ZERO,
            Coalesce::Fixed(wait) => wait,
        }
    }
}

/// The policy; time is passed in.
#[derive(Debug)]
pub struct Coalescer {
    wait: Duration,
    most: u32,
    pending: u32,
    /// When the wait ends, and how many were pending when it began.
    due: Option<(Instant, u32)>,
    skip: u32,
    next_skip: u32,
}

impl Coalescer {
    pub fn new(wait: Duration, queue_size: u16) -> Self {
        let most = (u32::from(queue_size) / 4).clamp(1, 32);
        Coalescer { wait, most, pending: 0, due: None, skip: 0, next_skip: SKIP }
    }

    /// `new` completions were published that the guest wants to hear of; true: tell it now.
    #[inline]
    pub fn published(&mut self, new: u32, now: Instant) -> bool {
        if self.wait.is_zero() {
            return true;
        }
        self.pending += new;
        if self.skip > 0 {
            self.skip -= 1;
            return self.tell();
        }
        if self.pending >= self.most {
            self.next_skip = SKIP;
            return self.tell();
        }
        self.due.get_or_insert((now + self.wait, self.pending));
        false
    }

    /// When to look again, if anything is held back.
    pub fn due(&self) -> Option<Instant> {
        self.due.map(|(at, _)| at)
    }

    /// True when a wait is over: tell the guest now.
    pub fn expired(&mut self, now: Instant) -> bool {
        match self.due {
            Some((at, began)) if now >= at => {
                if self.pending == began {
                    self.skip = self.next_skip;
                    self.next_skip = (self.next_skip * 2).min(SKIP_MOST);
                } else {
                    self.next_skip = SKIP;
                }
                self.tell()
            }
            _ => false,
        }
    }

    fn tell(&mut self) -> bool {
        self.pending = 0;
        self.due = None;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the front end has put into the socket is gone before a reactor has it, and nothing more can be put there.
    #[test]
    fn a_call_socket_receives_nothing() {
        use std::io::{Read, Write};
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        theirs.write_all(&[7; 100_000]).unwrap();
        let ours = OwnedFd::from(ours);
        assert!(is_call(&ours).unwrap());
        assert_eq!(theirs.write(&[7]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let mut call = Call::fd(ours.try_clone().unwrap()).unwrap();
        assert_eq!(std::os::unix::net::UnixStream::from(ours).read(&mut [0; 8]).unwrap(), 0, "nothing is left");
        call.ring();
        let mut signal = [0; 8];
        theirs.read_exact(&mut signal).unwrap();
        assert_eq!(u64::from_ne_bytes(signal), 1);
    }

    #[test]
    fn a_wait_gathers_and_a_vain_one_is_not_repeated() {
        let start = Instant::now();
        let us = |n| start + Duration::from_micros(n);
        let mut c = Coalescer::new(Duration::from_micros(400), 128);
        assert!(!c.published(1, us(0)) && !c.published(5, us(10)));
        assert!(!c.expired(us(399)));
        assert!(c.expired(us(400)) && c.due().is_none());
        // Thirty-two at once need no wait.
        assert!(c.published(32, us(500)));
        // One alone waits in vain: the next sixteen are told at once, then it is tried again.
        assert!(!c.published(1, us(600)) && c.expired(us(1000)));
        assert!((0..16).all(|n| c.published(1, us(1001 + n))));
        assert!(!c.published(1, us(2000)) && c.expired(us(2400)));
        assert!((0..32).all(|n| c.published(1, us(2401 + n))), "and twice as many after the next vain one");
        assert!(!c.published(1, us(3000)) && !c.published(1, us(3001)) && c.expired(us(3400)));
        assert!(!c.published(1, us(3500)) && c.expired(us(3900)));
        assert!(
            (0..16).all(|n| c.published(1, us(3901 + n))) && !c.published(1, us(4000)),
            "a good one makes up for them"
        );
    }

    #[test]
    fn eventfds_are_told_at_once() {
        assert_eq!(Coalesce::Auto.wait(false), Duration::ZERO);
        assert!(Coalescer::new(Duration::ZERO, 128).published(1, Instant::now()));
    }
}
