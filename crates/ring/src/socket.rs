//! A connected stream socket on one executor's io_uring.
//!
//! In: segments to fill, or to send. Out: the same segments, and the number of bytes transferred.
//!
//! What must hold: a dropped future of a read or write continues in the kernel, with its memory
//! and the descriptor, until its completion. [`Socket::shutdown`] forces that completion, and runs
//! when the last clone is dropped. If the peer makes system calls on the socket slow, a kernel
//! worker makes them ([`SlowCalls`]).

use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, Shutdown};

use crate::clock::Clock;
use crate::executor::Handle;
use crate::file::{FileSlot, completion_result};
use crate::policy::slow_calls::{CallMode, SlowCallCounters, SlowCalls};
use crate::rights;
use crate::segments::Segments;
use crate::uring::Action;

/// Maximum number of iovec entries that the kernel takes per call (UIO_MAXIOV).
pub const MOST_PIECES: usize = 1024;

/// The number of bytes of a call. `None`: nothing has arrived.
type Transfer = io::Result<Option<usize>>;

/// A connected stream socket. Clones are the same connection.
#[derive(Clone)]
pub struct Socket(Rc<Connected>);

struct Connected {
    slot: Rc<FileSlot>,
    /// Whether the connection outlives this value ([`Socket::leave_open`]).
    kept: Cell<bool>,
    /// Whether descriptors may arrive with the socket's bytes (see `rights`).
    brings_descriptors: bool,
    calls: RefCell<SlowCalls>,
    /// Where slow calls are counted ([`Socket::count_slow_calls`]).
    counters: OnceCell<Rc<SlowCallCounters>>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        if self.kept.get() {
            return;
        }
        let _ = rustix::net::shutdown(self.slot.fd(), Shutdown::Both);
        if self.brings_descriptors {
            rights::discard(self.slot.descriptor());
        }
    }
}

impl Socket {
    /// Takes over a connected stream socket. It becomes blocking, because io_uring then waits for
    /// it internally.
    pub fn new(handle: &Handle, fd: impl AsFd + Send + Sync + 'static) -> io::Result<Self> {
        ignore_broken_pipes();
        rustix::io::ioctl_fionbio(&fd, false)?;
        let brings_descriptors = rights::may_arrive(fd.as_fd());
        let slot = Rc::new(FileSlot::uncounted(handle, Arc::new(fd)));
        let (kept, calls, counters) = Default::default();
        Ok(Socket(Rc::new(Connected { slot, kept, brings_descriptors, calls, counters })))
    }

    /// Counts the later slow calls on the connection in `counters`, except if others count them
    /// already.
    pub fn count_slow_calls(&self, counters: Rc<SlowCallCounters>) {
        let _ = self.0.counters.set(counters);
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.slot.fd()
    }

    /// Returns a descriptor of the connection for another user. From now on, dropping this value
    /// does not shut the connection down. No operation may be in flight, or start later.
    pub fn keep(&self) -> io::Result<OwnedFd> {
        let fd = self.fd().try_clone_to_owned()?;
        self.leave_open();
        Ok(fd)
    }

    /// From now on, dropping this value does not shut the connection down, because another process
    /// has it, too. No operation may be in flight, or start later.
    pub fn leave_open(&self) {
        self.0.kept.set(true);
    }

    /// Reads at least one byte. 0: the peer has closed the connection.
    #[inline]
    pub async fn read(&self, mut segments: Segments) -> (Segments, io::Result<usize>) {
        if self.0.brings_descriptors {
            let read = Box::pin(self.read_checked(&segments)).await;
            return (segments, read);
        }
        loop {
            let (result, back) = self.operation(Action::Read { offset: 0 }, segments).await;
            match completion_result(result) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => segments = back,
                result => return (back, result),
            }
        }
    }

    async fn read_checked(&self, segments: &Segments) -> io::Result<usize> {
        loop {
            match self.call(|| self.receive_now(segments)) {
                Some(read) => {
                    if let Some(n) = read? {
                        return Ok(n);
                    }
                }
                // The kernel drops descriptors that arrive, on the thread of its worker.
                None => {
                    let all = segments.slice(0, segments.len());
                    return completion_result(
                        self.operation(Action::Read { offset: 0 }, all).await.0,
                    );
                }
            }
            completion_result(self.operation(Action::Readable, Segments::default()).await.0)?;
        }
    }

    /// Makes a system call that transfers bytes. `None`: a kernel worker must make it.
    #[inline]
    fn call(&self, call: impl FnOnce() -> Transfer) -> Option<Transfer> {
        let (Connected { slot, calls, .. }, began) = (&*self.0, Instant::now());
        let mode = calls.borrow_mut().mode(began);
        slot.leave_all_to_worker(mode == CallMode::Elsewhere);
        let (result, took) = match mode {
            CallMode::Direct => (call(), began.elapsed()),
            CallMode::Measured => {
                let before = Clock::Thread.read();
                (call(), Clock::Thread.read().saturating_sub(before))
            }
            CallMode::Elsewhere => return None,
        };
        let bytes = result.as_ref().map_or(0, |n| n.unwrap_or(0));
        let beside = SlowCalls::beside_bytes(took, bytes);
        if SlowCalls::is_slow(beside) {
            self.was_slow(began, took, beside);
        }
        Some(result)
    }

    #[cold]
    fn was_slow(&self, now: Instant, took: Duration, beside_bytes: Duration) {
        let becomes = self.0.calls.borrow_mut().made(now, beside_bytes);
        if let Some(counters) = self.0.counters.get() {
            counters.count(now, took, becomes);
        }
    }

    /// Reads at least one byte, by a system call instead of io_uring. 0: the peer has closed the
    /// connection. `None`: no bytes have arrived.
    pub fn read_now(&self, segments: &Segments) -> io::Result<Option<usize>> {
        if segments.request().is_some() {
            let buffer = Segments::buffer(segments.len());
            let read = self.read_now(&buffer)?;
            segments.copy_from(0, &buffer, 0, read.unwrap_or(0));
            return Ok(read);
        }
        self.receive_now(segments)
    }

    fn receive_now(&self, segments: &Segments) -> io::Result<Option<usize>> {
        if self.0.brings_descriptors {
            return rights::read_now(self.fd(), segments);
        }
        match rights::receive(self.fd(), segments, RecvFlags::empty()) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            read => read.map(|(n, _)| Some(n)),
        }
    }

    /// Fills `segments`. If the connection ends before, the error is UnexpectedEof.
    pub async fn read_full(&self, segments: Segments) -> (Segments, io::Result<()>) {
        let mut done = 0;
        while done < segments.len() {
            match self.read(segments.slice(done, segments.len() - done)).await.1 {
                Ok(0) => return (segments, Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => done += n,
                Err(e) => return (segments, Err(e)),
            }
        }
        (segments, Ok(()))
    }

    /// Sends as much as the socket takes at once, by a system call instead of io_uring. Returns 0
    /// if its buffer is full, or if a kernel worker must send.
    pub fn write_now(&self, segments: &Segments) -> io::Result<usize> {
        let sent = self.call(|| self.send_now(segments).map(Some));
        sent.map_or(Ok(0), |sent| sent.map(|n| n.unwrap_or(0)))
    }

    fn send_now(&self, segments: &Segments) -> io::Result<usize> {
        assert!(segments.request().is_none(), "zero-copy data are not in this process's memory");
        let iov = segments.iovecs();
        // SAFETY: an all-zero `msghdr` is valid: no name, no control data, no iovec.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = iov.as_ptr().cast_mut();
        message.msg_iovlen = iov.len().min(MOST_PIECES);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the message refers to the segments' iovec. Its owner keeps the memory alive
        // beyond this call; the kernel only reads it.
        let sent = unsafe { libc::sendmsg(self.fd().as_raw_fd(), &message, flags) };
        match usize::try_from(sent) {
            Ok(n) => Ok(n),
            Err(_) => match io::Error::last_os_error() {
                e if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    Ok(0)
                }
                e => Err(e),
            },
        }
    }

    /// Sends some of `segments` from `offset`, as much as the socket takes. Returns 0 after an
    /// interruption.
    #[inline]
    pub async fn write(&self, segments: Segments, offset: usize) -> (Segments, io::Result<usize>) {
        let action = Action::Write { offset: 0, rw_flags: 0 };
        // The first attempt uses the segments themselves, so it needs no copy of the iovec.
        let (result, segments) = if offset == 0 {
            self.operation(action, segments).await
        } else {
            let rest = segments.slice(offset, segments.len() - offset);
            (self.operation(action, rest).await.0, segments)
        };
        match completion_result(result) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => (segments, Ok(0)),
            result => (segments, result),
        }
    }

    /// Sends all of `segments`, which have at most [`MOST_PIECES`] entries.
    pub async fn write_full(&self, segments: Segments) -> (Segments, io::Result<()>) {
        write_rest(segments, 0, async |segments, done| self.write(segments, done).await).await
    }

    /// Ends the waiting reads and writes. An operation that has transferred nothing returns the
    /// error ECANCELED ([`is_canceled`]). No byte is lost.
    pub fn cancel(&self) {
        self.0.slot.handle().uring().cancel(&self.0.slot);
    }

    /// Shuts down both directions: all waiting reads and writes complete.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(self.fd(), Shutdown::Both);
    }

    /// Shuts down reading: waiting reads complete, and writes continue.
    pub fn shutdown_read(&self) {
        let _ = rustix::net::shutdown(self.fd(), Shutdown::Read);
    }

    #[inline]
    fn operation(&self, action: Action, segments: Segments) -> crate::operation::Operation {
        self.0.slot.handle().operation(action, segments, self.0.slot.clone())
    }
}

/// Returns whether the error is that of an operation that [`Socket::cancel`] has ended.
pub fn is_canceled(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ECANCELED)
}

/// Sends what `segments` have from `done` on, by as many calls of `write` as necessary. `write`
/// sends some of them, from an offset.
pub async fn write_rest(
    mut segments: Segments,
    mut done: usize,
    mut write: impl AsyncFnMut(Segments, usize) -> (Segments, io::Result<usize>),
) -> (Segments, io::Result<()>) {
    while done < segments.len() {
        let sent;
        (segments, sent) = write(segments, done).await;
        match sent {
            Ok(n) => done += n,
            Err(e) => return (segments, Err(e)),
        }
    }
    (segments, Ok(()))
}

/// Ignores SIGPIPE: an io_uring write to a socket that the peer has closed raises it, and no flag
/// prevents that. Rust's runtime ignores it too, but not if the process starts in another way (a
/// fuzzer).
fn ignore_broken_pipes() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: ignoring a signal runs no code of ours.
        let _ = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    });
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{Executor, SlowCallFigures};

    #[test]
    fn bytes_go_both_ways() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let executor = Executor::new().unwrap();
        let reader = ours.try_clone().unwrap();
        let peer = std::thread::spawn(move || {
            theirs.write_all(b"01234").unwrap();
            while rustix::io::ioctl_fionread(&reader).unwrap() > 0 {
                std::thread::yield_now();
            }
            theirs.write_all(b"56789").unwrap();
            // The message exceeds the socket's buffers, so it is sent in several steps.
            let mut all = vec![0; 3 << 20];
            theirs.read_exact(&mut all).unwrap();
            assert!(all.iter().all(|byte| *byte == 7));
        });
        let socket = Socket::new(executor.handle(), ours).unwrap();
        executor
            .block_on(async move {
                let (segments, read) = socket.read_full(Segments::buffer(10)).await;
                read.unwrap();
                let mut bytes = [0; 10];
                segments.copy_out(0, &mut bytes);
                assert_eq!(&bytes, b"0123456789");
                let (one, two) =
                    (Segments::from_bytes(&[7; 1 << 20]), Segments::from_bytes(&vec![7; 2 << 20]));
                let mut out = Segments::default();
                out.gather(&one, 0, one.len());
                out.gather(&two, 0, two.len());
                let at_once = socket.write_now(&out).unwrap();
                assert!(at_once > 0 && at_once < out.len(), "{at_once}");
                let rest = out.slice(at_once, out.len() - at_once);
                socket.write_full(rest).await.1.unwrap();
                let (_, end) = socket.read_full(Segments::buffer(1)).await;
                assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            })
            .unwrap();
        peer.join().unwrap();
    }

    #[test]
    fn a_kernel_worker_makes_the_calls_of_a_peer_that_makes_them_slow() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let executor = Executor::new().unwrap();
        let socket = Socket::new(executor.handle(), ours).unwrap();
        let answer = std::thread::spawn(move || {
            let mut bytes = [0; 5];
            theirs.read_exact(&mut bytes).unwrap();
            theirs.write_all(&bytes).unwrap();
        });
        executor
            .block_on(async move {
                let counters = Rc::<SlowCallCounters>::default();
                socket.count_slow_calls(counters.clone());
                (0..2).for_each(|_| socket.was_slow(Instant::now(), Duration::MAX, Duration::MAX));
                let SlowCallFigures { slow, measured, elsewhere, .. } = counters.figures();
                assert_eq!((slow, measured, elsewhere), (2, 1, 1));
                let out = Segments::from_bytes(b"bytes");
                assert_eq!(socket.write_now(&out).unwrap(), 0);
                assert!(socket.0.slot.leaves_to_worker(1));
                socket.write_full(out).await.1.unwrap();
                let (segments, read) = socket.read_full(Segments::buffer(5)).await;
                read.unwrap();
                let mut bytes = [0; 5];
                segments.copy_out(0, &mut bytes);
                assert_eq!(&bytes, b"bytes");
                // The peer's calls count as fast again.
                *socket.0.calls.borrow_mut() = SlowCalls::default();
                let _ = socket.write_now(&segments);
                assert!(!socket.0.slot.leaves_to_worker(1));
            })
            .unwrap();
        answer.join().unwrap();
    }

    #[test]
    fn a_shutdown_completes_waiting_operations() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let executor = Executor::new().unwrap();
        let socket = Socket::new(executor.handle(), ours).unwrap();
        let (other, handle) = (socket.clone(), executor.handle().clone());
        executor
            .block_on(async move {
                handle.spawn(async move { other.shutdown() });
                assert_eq!(socket.read(Segments::buffer(10)).await.1.unwrap(), 0);
                assert!(socket.write_full(Segments::buffer(10)).await.1.is_err());
            })
            .unwrap();
        drop(theirs);
    }

    /// Returns a socket with small buffers, and its peer.
    fn narrow(executor: &Executor) -> (Socket, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
        (Socket::new(executor.handle(), ours).unwrap(), theirs)
    }

    /// A message that is sent in several steps is complete and in order, whatever its entries.
    #[test]
    fn a_write_continues_where_the_last_one_stopped() {
        let executor = Executor::new().unwrap();
        let (socket, mut theirs) = narrow(&executor);
        let bytes: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
        let peer = std::thread::spawn(move || {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).unwrap();
            all
        });
        let sent = bytes.clone();
        executor
            .block_on(async move {
                let whole = Segments::from_bytes(&sent);
                let mut pieces = Segments::default();
                for (offset, len) in [(0, 70_001), (70_001, 3), (70_004, 129_996)] {
                    let piece = Segments::from_bytes(&sent[offset..offset + len]);
                    pieces.gather(&piece, 0, len);
                }
                assert_eq!((pieces.len(), pieces.count()), (whole.len(), 3));
                let steps = Cell::new(0);
                let (pieces, done) = write_rest(pieces, 0, async |segments, done| {
                    steps.set(steps.get() + 1);
                    socket.write(segments, done).await
                })
                .await;
                done.unwrap();
                assert_eq!(
                    (pieces.len(), pieces.count()),
                    (whole.len(), 3),
                    "the segments come back unchanged"
                );
                assert!(steps.get() > 1, "it took one step only");
            })
            .unwrap();
        assert!(peer.join().unwrap() == bytes);
    }

    #[test]
    fn reads_and_writes_fail_if_the_peer_closes_meanwhile() {
        let executor = Executor::new().unwrap();
        let (socket, mut theirs) = narrow(&executor);
        let handle = executor.handle().clone();
        executor
            .block_on(async move {
                // The socket's buffer is full, so the write waits; the peer closes meanwhile.
                while socket.write_now(&Segments::buffer(4096)).unwrap() > 0 {}
                let (writer, written) = (socket.clone(), Rc::new(Cell::new(None)));
                let (result, done) = (written.clone(), crate::Signal::new(&handle));
                let ended = done.clone();
                handle.spawn(async move {
                    let (segments, sent) = writer.write_full(Segments::buffer(1 << 20)).await;
                    assert_eq!(segments.len(), 1 << 20);
                    result.set(Some(sent.unwrap_err().kind()));
                    ended.ring();
                });
                handle.yield_now().await;
                assert_eq!(written.take(), None, "the write waits for room");
                theirs.write_all(b"012").unwrap();
                let (segments, read) = socket.read(Segments::buffer(10)).await;
                assert_eq!((segments.len(), read.unwrap()), (10, 3));
                theirs.write_all(b"34567").unwrap();
                drop(theirs);
                done.wait().await;
                assert!(matches!(
                    written.take(),
                    Some(io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
                ));
                // The peer has left bytes unread. The kernel may report that before it returns what
                // the peer had sent.
                let end = socket.read_full(Segments::buffer(6)).await.1.unwrap_err().kind();
                assert!(
                    matches!(end, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset),
                    "{end:?}"
                );
                assert!(socket.write_now(&Segments::buffer(1)).is_err());
            })
            .unwrap();
    }

    #[test]
    fn bytes_before_the_end_are_read_and_the_end_is_no_error() {
        let executor = Executor::new().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = Socket::new(executor.handle(), ours).unwrap();
        assert_eq!(socket.read_now(&Segments::buffer(4)).unwrap(), None, "no bytes have arrived");
        theirs.write_all(b"abcde").unwrap();
        drop(theirs);
        executor
            .block_on(async move {
                let (segments, read) = socket.read_full(Segments::buffer(4)).await;
                read.unwrap();
                let mut bytes = [0; 4];
                segments.copy_out(0, &mut bytes);
                assert_eq!(&bytes, b"abcd");
                assert_eq!(socket.read_now(&Segments::buffer(4)).unwrap(), Some(1));
                assert_eq!(socket.read_now(&Segments::buffer(4)).unwrap(), Some(0));
                assert_eq!(socket.read(Segments::buffer(4)).await.1.unwrap(), 0);
            })
            .unwrap();
    }

    #[test]
    fn canceled_operations_lose_no_bytes() {
        let executor = Executor::new().unwrap();
        let (socket, mut theirs) = narrow(&executor);
        let handle = executor.handle().clone();
        executor
            .block_on(async move {
                // Twice, because the connection goes on after a cancellation.
                for byte in [b'a', b'b'] {
                    let (other, later) = (socket.clone(), handle.clone());
                    handle.spawn(async move {
                        // The operation has been submitted then.
                        later.yield_now().await;
                        other.cancel();
                    });
                    let error = socket.read(Segments::buffer(10)).await.1.unwrap_err();
                    assert!(is_canceled(&error), "{error}");
                    theirs.write_all(&[byte]).unwrap();
                    let (read, n) = socket.read(Segments::buffer(10)).await;
                    let mut got = [0];
                    read.copy_out(0, &mut got);
                    assert_eq!((n.unwrap(), got[0]), (1, byte));
                }
                let mut full = 0;
                loop {
                    match socket.write_now(&Segments::buffer(4096)).unwrap() {
                        0 => break,
                        n => full += n,
                    }
                }
                let (other, later) = (socket.clone(), handle.clone());
                handle.spawn(async move {
                    later.yield_now().await;
                    other.cancel();
                });
                let error = socket.write(Segments::buffer(4096), 0).await.1.unwrap_err();
                assert!(is_canceled(&error), "{error}");
                drop(socket);
                let mut all = Vec::new();
                theirs.read_to_end(&mut all).unwrap();
                assert_eq!(all.len(), full);
            })
            .unwrap();
    }

    #[test]
    fn a_kept_connection_outlives_its_socket_and_others_do_not() {
        for kept in [true, false] {
            let executor = Executor::new().unwrap();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            // A second descriptor: closing the first one alone does not end the connection.
            let second = ours.try_clone().unwrap();
            let socket = Socket::new(executor.handle(), ours).unwrap();
            let clone = socket.clone();
            drop(socket);
            assert_eq!(clone.write_now(&Segments::from_bytes(b"first")).unwrap(), 5);
            let fd = kept.then(|| clone.keep().unwrap());
            drop(clone);
            let sent = (&second).write(b" last");
            assert_eq!(sent.is_ok(), kept);
            drop((fd, second));
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).unwrap();
            assert_eq!(all, if kept { &b"first last"[..] } else { b"first" });
        }
    }

    #[test]
    fn writes_continue_after_a_shutdown_of_reading() {
        let executor = Executor::new().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = Socket::new(executor.handle(), ours).unwrap();
        let (other, handle) = (socket.clone(), executor.handle().clone());
        executor
            .block_on(async move {
                handle.spawn(async move { other.shutdown_read() });
                assert_eq!(socket.read(Segments::buffer(10)).await.1.unwrap(), 0);
                socket.write_full(Segments::from_bytes(b"still")).await.1.unwrap();
            })
            .unwrap();
        let mut bytes = [0; 5];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"still");
    }
}
