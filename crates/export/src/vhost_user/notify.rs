//! Signals the guest.
//!
//! A virtual machine's front end gives an eventfd, User Mode Linux a Unix stream socket.
//!
//! What must hold: a signal never blocks. The front end has these descriptors too, and can clear
//! O_NONBLOCK at any time. So a `Doorbell` signals an eventfd, and a send with MSG_DONTWAIT signals
//! a socket. A thread sends signals that take long ([`super::signal`]). Other descriptors are
//! refused: pipes, other sockets, and sockets that this process reads have kernel locks, which
//! another process can hold while it waits for a page.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockyard_ring::{SlowCallCounters, doorbell};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown};

use super::caller::Caller;
use super::signal::{GuestSignal, SignalThread, is_unix_stream};

/// The means by which the device signals the guest (the call).
pub enum Call {
    None,
    /// An eventfd (virtual machines).
    Event(GuestSignal),
    /// A Unix stream socket (User Mode Linux).
    Stream(GuestSignal),
    /// A message on the back channel (VHOST_USER_PROTOCOL_F_INBAND_NOTIFICATIONS).
    InBand {
        caller: Arc<Caller>,
        index: u16,
    },
}

impl Call {
    /// Returns error `InvalidInput` if the descriptor is neither an eventfd nor a Unix stream
    /// socket. `thread`: sends the signals if they take long.
    pub fn fd(fd: OwnedFd, thread: &Arc<SignalThread>) -> io::Result<Self> {
        let call = if is_unix_stream(&fd) { Call::Stream } else { Call::Event };
        GuestSignal::new(fd, thread).map(call)
    }

    pub fn is_stream(&self) -> bool {
        matches!(self, Call::Stream(_))
    }

    /// Signals the guest, and counts slow signals. Never blocks.
    #[inline]
    pub fn ring(&mut self, counters: &SlowCallCounters) {
        match self {
            Call::None => {}
            Call::Event(signal) | Call::Stream(signal) => signal.ring(counters),
            Call::InBand { caller, index } => caller.call(*index),
        }
    }
}

/// Returns whether a reactor may wait for kicks on this descriptor. It may only if the descriptor
/// is an eventfd, because only eventfds need no read.
pub fn is_kick(fd: &OwnedFd) -> io::Result<bool> {
    doorbell::is_eventfd(fd)
}

/// Returns whether a reactor may signal and close this descriptor.
pub fn is_call(fd: &OwnedFd) -> io::Result<bool> {
    if is_unix_stream(fd) { close_input(fd).map(|()| true) } else { doorbell::is_eventfd(fd) }
}

/// Discards the data that a socket has received, and shuts its receiving half down. The last close
/// of a socket also closes the descriptors in its receive queue, and another process can block that
/// close. A reactor must never be blocked by such a close.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The data that the front end has sent is discarded before a reactor gets the socket. After
    /// that, the front end can send nothing more.
    #[test]
    fn a_call_socket_receives_nothing() {
        use std::io::{Read, Write};
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        theirs.write_all(&[7; 100_000]).unwrap();
        let ours = OwnedFd::from(ours);
        assert!(is_call(&ours).unwrap());
        assert_eq!(theirs.write(&[7]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let fd = ours.try_clone().unwrap();
        let mut call = Call::fd(fd, &SignalThread::for_tests()).unwrap();
        assert_eq!(
            std::os::unix::net::UnixStream::from(ours).read(&mut [0; 8]).unwrap(),
            0,
            "nothing is left"
        );
        call.ring(&SlowCallCounters::default());
        let mut signal = [0; 8];
        theirs.read_exact(&mut signal).unwrap();
        assert_eq!(u64::from_ne_bytes(signal), 1);
    }
}
