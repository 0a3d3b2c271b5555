//! Requests to a disk, for all protocols.
//!
//! ```text
//!   Request ──(serve)──► Finished ──(answer)──► the export's token, with a status
//! ```
//!
//! Each state consumes the one before, so a request cannot be answered twice. Dropping an
//! unanswered request is a bug: debug builds panic. Release builds answer it with an I/O error and
//! count it.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Instant;

use blockyard_ring::Segments;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Read,
    /// `fua`: durable before the answer (force unit access).
    Write {
        fua: bool,
    },
    Flush,
    Discard,
    /// `unmap`: the range may be deallocated. `fua`: as for a write. `fast`: fails if zeroes would
    /// have to be written.
    WriteZeroes {
        unmap: bool,
        fua: bool,
        fast: bool,
    },
}

/// Why a request failed, as far as protocols distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Io,
    NoSpace,
    ReadOnly,
    OutOfRange,
    Unsupported,
    /// An earlier flush failed. Writes since the last successful flush may be lost, so the disk
    /// acknowledges no more writes.
    Poisoned,
}

impl Failure {
    /// Returns the failure that corresponds to an I/O error.
    pub fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Failure::NoSpace,
            io::ErrorKind::Unsupported => Failure::Unsupported,
            _ => Failure::Io,
        }
    }
}

/// The result of a request.
pub type Status = Result<(), Failure>;

/// The export's own data of a request, which the disk passes back with the answer.
pub trait Token {
    /// Answers the guest. The segments are the request's own, for reuse.
    fn answer(self, status: Status, segments: Segments);

    /// Returns whether the request may wait until the host has space. False: the queue or the
    /// client of the request ends. If the value changes, the queue calls
    /// [`LocalDisk::release_paused`] or [`LocalDisk::drain`].
    ///
    /// [`LocalDisk::release_paused`]: crate::LocalDisk::release_paused
    /// [`LocalDisk::drain`]: crate::LocalDisk::drain
    fn may_wait(&self) -> bool;

    /// Returns whether the request must not begin any more, if it has not begun yet or waits for
    /// space. The export then wakes the request's task.
    fn is_withdrawn(&self) -> bool {
        false
    }

    /// Returns whether the next server repeats the request if this one does not answer it.
    fn is_repeated_later(&self) -> bool {
        false
    }

    /// Takes back a request that is not answered: it was withdrawn before it began or while it
    /// waited for space, or the next server repeats it.
    fn take_back(self, segments: Segments)
    where
        Self: Sized,
    {
        self.answer(Err(Failure::Io), segments);
    }
}

/// A request to a disk. `offset` and `len` are in bytes. For reads and writes `len` is the length
/// of the segments.
pub struct Request<T: Token> {
    pub op: Op,
    pub offset: u64,
    pub len: u64,
    /// Time when the request was taken from its queue.
    pub arrived: Instant,
    pub segments: Segments,
    owed: Owed<T>,
}

/// A request that has a status and must be answered.
#[must_use = "the guest waits for its answer"]
pub struct Finished<T: Token> {
    status: Status,
    /// The request goes back to its export unanswered. It has no status.
    withdrawn: bool,
    segments: Segments,
    owed: Owed<T>,
}

impl<T: Token> Request<T> {
    pub fn new(
        op: Op,
        offset: u64,
        len: u64,
        segments: Segments,
        arrived: Instant,
        token: T,
    ) -> Self {
        Request { op, offset, len, arrived, segments, owed: Owed(Some(token)) }
    }

    /// Returns whether the request is a write that need not be durable when it is answered.
    #[inline]
    pub fn is_volatile(&self) -> bool {
        matches!(self.op, Op::Write { fua: false } | Op::WriteZeroes { fua: false, .. })
    }

    /// Returns [`Token::may_wait`].
    pub(crate) fn may_wait(&self) -> bool {
        self.owed.0.as_ref().is_some_and(Token::may_wait)
    }

    /// Sets the status of the request.
    #[inline]
    pub fn finish(self, status: Status) -> Finished<T> {
        Finished { status, withdrawn: false, segments: self.segments, owed: self.owed }
    }

    /// Returns [`Token::is_repeated_later`].
    pub(crate) fn is_repeated_later(&self) -> bool {
        self.owed.0.as_ref().is_some_and(Token::is_repeated_later)
    }

    /// Returns [`Token::is_withdrawn`].
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.owed.0.as_ref().is_some_and(Token::is_withdrawn)
    }

    /// Returns the request to its export unanswered; see [`Token::take_back`].
    pub(crate) fn withdraw(self) -> Finished<T> {
        Finished { status: Ok(()), withdrawn: true, segments: self.segments, owed: self.owed }
    }

    /// Waits for a future, unless the request is withdrawn meanwhile.
    #[inline]
    pub(crate) async fn unless_withdrawn<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if self.is_withdrawn() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }
}

impl<T: Token> Finished<T> {
    /// Answers the guest.
    #[inline]
    pub fn answer(mut self) {
        if let Some(token) = self.owed.0.take() {
            let segments = std::mem::take(&mut self.segments);
            if self.withdrawn {
                token.take_back(segments);
            } else {
                token.answer(self.status, segments);
            }
        }
    }

    /// Returns the status that the guest will get.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Adds the status of further work that belonged to the request: the first error counts.
    pub fn and(mut self, status: Status) -> Self {
        self.status = self.status.and(status);
        self
    }
}

/// The token of a request that is not answered yet.
struct Owed<T: Token>(Option<T>);

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of requests that were dropped unanswered since the process began. Any other
/// value than 0 is a bug.
pub fn dropped_requests() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

impl<T: Token> Drop for Owed<T> {
    fn drop(&mut self) {
        if let Some(token) = self.0.take() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            token.answer(Err(Failure::Io), Segments::default());
            debug_assert!(std::thread::panicking(), "a request was dropped without an answer");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    struct Note(Rc<Cell<Option<Status>>>);

    impl Token for Note {
        fn answer(self, status: Status, _: Segments) {
            assert!(self.0.replace(Some(status)).is_none());
        }

        fn may_wait(&self) -> bool {
            true
        }
    }

    fn request(note: &Rc<Cell<Option<Status>>>) -> Request<Note> {
        Request::new(Op::Flush, 0, 0, Segments::default(), Instant::now(), Note(note.clone()))
    }

    #[test]
    fn an_answer_reaches_the_token() {
        let note = Rc::new(Cell::new(None));
        request(&note).finish(Err(Failure::NoSpace)).answer();
        assert_eq!(note.get(), Some(Err(Failure::NoSpace)));
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_dropped_request_is_answered_and_panics_in_debug_builds() {
        let note = Rc::new(Cell::new(None));
        let dropped = request(&note);
        let shout = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || drop(dropped)));
        assert!(shout.is_err());
        assert_eq!(note.get(), Some(Err(Failure::Io)));
        assert!(dropped_requests() > 0);
    }
}
