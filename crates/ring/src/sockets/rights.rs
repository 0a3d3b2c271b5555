//! Protects executors from file descriptors that arrive with bytes over a Unix socket (SCM_RIGHTS),
//! if only the bytes are wanted.
//!
//! The kernel closes such descriptors on the thread that reads the bytes, or that closes the
//! socket. The last close of a file may block, for example for a socket that lingers. What must
//! hold: no executor's thread closes such a descriptor.
//!
//! - From Linux 6.16 on, a socket can refuse them ([`refuse`]). Then reads need no check.
//! - On older kernels, and if bytes may have arrived earlier, each read first peeks at the bytes
//!   (MSG_PEEK). The kernel then reports descriptors (MSG_CTRUNC), but closes none, because they
//!   stay queued. When the socket ends, a thread discards what is queued (`discard`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::LazyLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, sockopt};

use crate::mem::segments::Segments;
use crate::offload::pool::Pool;
use crate::uring::file_slot::Descriptor;

/// Linux 6.16, `asm-generic/socket.h`.
const SO_PASSRIGHTS: libc::c_int = 83;
/// Linux 6.5.
const SO_PASSPIDFD: libc::c_int = 76;
/// Maximum number of bytes that one read discards.
const DISCARDED: usize = 16 << 10;

/// Most threads that close descriptors. A peer decides how long a close takes, so these threads do
/// nothing else. If all of them are blocked, the other sockets stay open until one is free.
const MOST_CLOSERS: usize = 8;
const LINGER: Duration = Duration::from_secs(1);

static CLOSERS: LazyLock<Pool> = LazyLock::new(|| closers("descriptors"));

fn closers(name: &'static str) -> Pool {
    Pool::new(name, MOST_CLOSERS, LINGER)
}

/// Makes a Unix socket refuse descriptors: the sender gets EPERM. On a listening socket it applies
/// to later connections too. Must be called before a socket is connected, because queued
/// descriptors stay. Returns false if the kernel is older than 6.16, or this is not a Unix socket.
pub fn refuse(socket: impl AsFd) -> bool {
    clear_option(socket.as_fd(), SO_PASSRIGHTS)
}

/// Clears a socket option.
fn clear_option(socket: BorrowedFd<'_>, option: libc::c_int) -> bool {
    let (no, len) = (0 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes, the size of `no`.
    unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const no).cast(), len)
            == 0
    }
}

/// Returns whether descriptors may arrive with the bytes of a socket. Such a socket must be read by
/// [`read_now`] only.
pub(crate) fn may_arrive(socket: BorrowedFd<'_>) -> bool {
    if !sockopt::socket_domain(socket).is_ok_and(|domain| domain == AddressFamily::UNIX) {
        return false;
    }
    let (mut passes, mut len) = (1 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    let to = (&raw mut passes).cast();
    // SAFETY: the kernel writes at most `len` bytes, the size of `passes`.
    let got = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, to, &mut len)
    };
    if got == 0 && passes == 0 {
        return false;
    }
    // Other control data would also be reported as MSG_CTRUNC (systemd may request it on a
    // listening socket), so it is switched off.
    for option in [libc::SO_PASSCRED, libc::SO_PASSSEC, SO_PASSPIDFD] {
        clear_option(socket, option);
    }
    true
}

/// Reads at least one byte into the first of `segments`, without blocking. 0: the peer has closed
/// the connection. `None`: no bytes have arrived. Error InvalidData: the next bytes carry a
/// descriptor.
pub(crate) fn read_now(socket: BorrowedFd<'_>, segments: &Segments) -> io::Result<Option<usize>> {
    let (seen, has_descriptors) = match receive(socket, segments, RecvFlags::PEEK) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        seen => seen?,
    };
    if has_descriptors {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the peer has sent file descriptors, which are not accepted",
        ));
    }
    if seen == 0 {
        return Ok(Some(0));
    }
    // Read only the bytes that were peeked at. Bytes that have arrived since were not checked.
    receive(socket, &segments.slice(0, seen), RecvFlags::empty()).map(|(n, _)| Some(n))
}

/// Receives without blocking. Also returns whether the kernel left out control data (MSG_CTRUNC).
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    segments: &Segments,
    flags: RecvFlags,
) -> io::Result<(usize, bool)> {
    assert!(segments.request().is_none(), "zero-copy data are not in this process's memory");
    let iov = segments.iovecs();
    // SAFETY: an all-zero `msghdr` is valid: no name, no control data, no iovec.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_ptr().cast_mut();
    message.msg_iovlen = iov.len().min(crate::MOST_PIECES);
    let flags = (flags | RecvFlags::DONTWAIT).bits() as libc::c_int;
    loop {
        // SAFETY: the message refers to the segments' iovec. Its owner keeps the memory alive
        // beyond this call, and it may be written.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) };
        match usize::try_from(got) {
            Ok(n) => return Ok((n, message.msg_flags & libc::MSG_CTRUNC != 0)),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

/// Discards what is queued on a socket that was shut down. If descriptors are queued, a thread does
/// it, and keeps the socket until they are closed.
pub(crate) fn discard(socket: &Descriptor) {
    discard_by(&CLOSERS, socket);
}

fn discard_by(closers: &Pool, socket: &Descriptor) {
    let bytes = Segments::buffer(DISCARDED);
    loop {
        match read_now(socket.as_fd(), &bytes) {
            Ok(None | Some(0)) => return,
            Ok(Some(_)) => {}
            // The peer has gone without reading all. The kernel reports that once.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {}
            Err(_) => break,
        }
    }
    let (theirs, ours) = (socket.clone(), socket.clone());
    let task = move |(): &()| {
        let mut bytes = [0; 4096];
        let mut receive = || rustix::net::recv(theirs.as_fd(), &mut bytes, RecvFlags::DONTWAIT);
        while let Ok((_, 1..)) | Err(Errno::INTR | Errno::CONNRESET) = receive() {}
    };
    if closers.run(Box::new(task)).is_err() {
        // Leak the socket, because closing it here may block.
        std::mem::forget(ours);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    use super::*;
    use crate::testing::waits;
    use crate::{Executor, Socket};

    /// Returns both ends of a TCP connection with SO_LINGER of an hour and a full send buffer. The
    /// close of the first end blocks until the second one is closed.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        sockopt::set_socket_linger(&ours, Some(Duration::from_secs(3600))).unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        (ours, theirs)
    }

    fn send(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    }

    /// Reads the socket until an error or the end.
    fn read_all(ours: UnixStream) -> (Vec<u8>, Option<io::Error>) {
        let executor = Executor::new().unwrap();
        let socket = Socket::new(executor.handle(), OwnedFd::from(ours)).unwrap();
        let work = async move {
            let mut all = Vec::new();
            loop {
                let (segments, read) = socket.read(Segments::buffer(64)).await;
                match read {
                    Ok(0) => return (all, None),
                    Ok(n) => {
                        let mut bytes = vec![0; n];
                        segments.copy_out(0, &mut bytes);
                        all.extend(bytes);
                    }
                    Err(e) => return (all, Some(e)),
                }
            }
        };
        waits::block_on(&executor, work).unwrap()
    }

    #[test]
    fn an_executor_closes_no_received_descriptor() {
        waits::within("the executor does not wait for a close", || {
            received_descriptors_are_closed_elsewhere()
        });
    }

    /// Never returns if the executor's thread closes the descriptors.
    fn received_descriptors_are_closed_elsewhere() {
        for read_first in [true, false] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (lingers, other) = lingering();
            let (mut reader, writer) = std::io::pipe().unwrap();
            (&theirs).write_all(b"before").unwrap();
            send(&theirs, b"with", &[lingers.as_fd(), writer.as_fd()]).unwrap();
            (&theirs).write_all(b"behind").unwrap();
            drop((lingers, writer));
            if read_first {
                let (bytes, end) = read_all(ours);
                assert_eq!((bytes, end.unwrap().kind()), (Vec::new(), io::ErrorKind::InvalidData));
            } else {
                // The socket is dropped while all of its bytes are unread.
                let executor = Executor::new().unwrap();
                drop(Socket::new(executor.handle(), OwnedFd::from(ours)).unwrap());
            }
            drop(other);
            // A thread has closed both descriptors.
            assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
        }
    }

    #[test]
    fn bytes_without_descriptors_are_read() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(may_arrive(ours.as_fd()));
        rustix::net::sockopt::set_socket_passcred(&ours, true).unwrap();
        let peer = std::thread::spawn(move || {
            (0..100u8).for_each(|n| (&theirs).write_all(&[n; 100]).unwrap())
        });
        let (bytes, end) = read_all(ours);
        waits::join(peer, "all is written");
        assert!(end.is_none(), "{end:?}");
        assert_eq!(bytes, (0..100u8).flat_map(|n| [n; 100]).collect::<Vec<_>>());
    }

    #[test]
    fn a_socket_that_refuses_descriptors_needs_no_check() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let refuses = refuse(&ours);
        assert_eq!(may_arrive(ours.as_fd()), !refuses);
        // A kernel before 6.16 accepts descriptors.
        assert_eq!(send(&theirs, b"with", &[ours.as_fd()]).err(), refuses.then_some(Errno::PERM));
        let (tcp, _other) = lingering();
        assert!(!refuse(&tcp) && !may_arrive(tcp.as_fd()));
    }

    /// Returns the number of threads with this name.
    fn threads(name: &str) -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let named = |path: std::path::PathBuf| {
            // A thread may end meanwhile.
            std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        tasks.filter(|task| named(task.as_ref().unwrap().path())).count()
    }

    /// The close of each socket's descriptor blocks.
    #[test]
    fn peers_that_block_the_close_use_few_threads() {
        const NAME: &str = "close bound";
        let closers = Arc::new(closers(NAME));
        let blocked: Vec<_> = (0..2 * MOST_CLOSERS)
            .map(|_| {
                let (ours, theirs) = waits::peers();
                let (lingers, other) = lingering();
                send(&theirs, b"with", &[lingers.as_fd()]).unwrap();
                drop(lingers);
                let (closers, socket): (_, Descriptor) = (closers.clone(), Arc::new(ours));
                waits::within("no close blocks", move || discard_by(&closers, &socket));
                (theirs, other)
            })
            .collect();
        waits::until("all threads close", || {
            let closing = threads(NAME);
            assert!(closing <= MOST_CLOSERS, "{closing} threads");
            closing == MOST_CLOSERS
        });
        let (sockets, others): (Vec<_>, Vec<_>) = blocked.into_iter().unzip();
        drop(others);
        for mut socket in sockets {
            let end = socket.read(&mut [0; 1]).map_err(|e| e.kind());
            // The kernel reports a reset if a byte was unread.
            assert!(matches!(end, Ok(0) | Err(io::ErrorKind::ConnectionReset)), "{end:?}");
        }
    }
}
