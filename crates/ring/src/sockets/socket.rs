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

use crate::files::file::completion_result;
use crate::mem::segments::Segments;
use crate::policy::slow_calls::{CallMode, SlowCallCounters, SlowCalls};
use crate::sockets::rights;
use crate::tasks::clock::Clock;
use crate::tasks::executor::Handle;
use crate::uring::Action;
use crate::uring::file_slot::FileSlot;

/// Maximum number of iovec entries that the kernel takes per call (UIO_MAXIOV).
pub const MOST_PIECES: usize = 1024;

/// Bytes that a task receives by system calls before other tasks run. A peer that sends as fast as
/// this side reads would keep the thread else.
const AT_ONCE: usize = 256 << 10;
/// What a call counts at least.
const CALL: usize = 1024;

/// The number of bytes of a call. `None`: nothing has arrived.
type Transfer = io::Result<Option<usize>>;

/// A connected stream socket. Clones are the same connection.
#[derive(Clone)]
pub struct Socket(Rc<Connected>);

struct Connected {
    slot: Rc<FileSlot<Handle>>,
    /// Whether the connection outlives this value ([`Socket::leave_open`]).
    kept: Cell<bool>,
    /// Whether descriptors may arrive with the socket's bytes (see `rights`).
    brings_descriptors: bool,
    /// Bytes that calls have received since another task could run.
    at_once: Cell<usize>,
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
        let (kept, at_once, calls, counters) = Default::default();
        let connected = Connected { slot, kept, brings_descriptors, at_once, calls, counters };
        Ok(Socket(Rc::new(connected)))
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
            if let Err(e) = self.until_worker_can_read().await {
                return (segments, Err(e));
            }
            let (result, back) = self.operation(Action::Read { offset: 0 }, segments).await;
            match completion_result(result) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => segments = back,
                result => return (back, result),
            }
        }
    }

    /// Waits for bytes, if a kernel worker must read them. While a worker has an operation, the
    /// reactor wakes from time to time (see `silence`), but an idle peer must cost nothing.
    #[inline]
    async fn until_worker_can_read(&self) -> io::Result<()> {
        if self.0.slot.leaves_to_worker(0) { self.readable().await } else { Ok(()) }
    }

    async fn readable(&self) -> io::Result<()> {
        loop {
            let result = self.operation(Action::Readable, Segments::default()).await.0;
            match completion_result(result) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map(drop),
            }
        }
    }

    async fn read_checked(&self, segments: &Segments) -> io::Result<usize> {
        let Connected { slot, at_once, .. } = &*self.0;
        loop {
            if at_once.get() >= AT_ONCE {
                at_once.set(0);
                slot.handle().yield_now().await;
            }
            match self.call(|| self.receive_now(segments)) {
                Some(read) => {
                    if let Some(n) = read? {
                        at_once.set(at_once.get() + n.max(CALL));
                        return Ok(n);
                    }
                }
                // The kernel drops descriptors that arrive, on the thread of its worker.
                None => {
                    self.readable().await?;
                    let all = segments.slice(0, segments.len());
                    return completion_result(
                        self.operation(Action::Read { offset: 0 }, all).await.0,
                    );
                }
            }
            self.readable().await?;
            at_once.set(0);
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
    fn operation(&self, action: Action, segments: Segments) -> crate::tasks::operation::Operation {
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
mod tests;
