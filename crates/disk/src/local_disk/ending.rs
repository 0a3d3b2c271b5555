//! The end of a queue or an export: what its requests wait for no longer.
//!
//! In: calls of the exports. Out: requests that go on, or that end early.
//!
//! What must hold: an export ends in bounded time. A discard that ends early is a success, because
//! its answer promises nothing. Zeroes that end early stay unanswered if the next server repeats
//! them, and are an error otherwise. They do not end early in a hand-over.

use std::io;
use std::time::{Duration, Instant};

use super::LocalDisk;
use crate::request::Op;

/// How long the end of an export waits for zeroes that change many clusters. The zeroes of one
/// request usually take much less.
const LONG_TIME: Duration = Duration::from_secs(5);
/// Longer than any request takes.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

impl LocalDisk {
    /// Admits the requests that wait on this reactor for limits or the device, because a queue is
    /// drained. Their cost becomes a debt of the disk; see [`LocalDisk::queue_pause`]. Requests of
    /// the queue that wait for space must not wait any longer.
    pub fn drain(&self) {
        self.throttle.drain();
        self.release_paused();
        self.stop_discards();
    }

    /// Checks again which of the requests that wait for space may wait ([`Token::may_wait`]). The
    /// others go back unanswered if their queue leaves them to another server. Otherwise they make
    /// one last attempt, and fail if there is still no space.
    pub fn release_paused(&self) {
        self.pause.check_again();
    }

    /// Admits every request of the disk on this reactor at once until [`LocalDisk::resume`],
    /// because an export ends. The end does not wait for long requests: discards stop, and after
    /// some seconds zeroes stop, too.
    pub fn suspend(&self) {
        self.suspend_until(Instant::now() + LONG_TIME);
    }

    /// Like [`LocalDisk::suspend`], for a hand-over. Zeroes run to their end, because the client
    /// must see no error.
    pub fn suspend_for_next(&self) {
        self.suspend_until(Instant::now() + NEVER);
    }

    fn suspend_until(&self, fails_long: Instant) {
        // Another export may end at the same time.
        let fails_long = self.long_until.get().map_or(fails_long, |time| time.min(fails_long));
        self.throttle.suspend();
        self.release_paused();
        self.end_long_requests(Some(fails_long));
    }

    /// Returns whether an export of the disk ends on this reactor.
    pub fn is_suspended(&self) -> bool {
        self.throttle.is_suspended()
    }

    /// Ends [`LocalDisk::suspend`].
    pub fn resume(&self) {
        self.throttle.resume();
        if !self.is_suspended() {
            self.end_long_requests(None);
        }
    }

    /// Stops the discards in progress, because something waits for the end of all requests.
    pub(crate) fn stop_discards(&self) {
        self.image.borrow().backend.stop_discards();
    }

    /// Returns whether zeroes failed because an export ends. They have done a part, so they may be
    /// repeated.
    pub(super) fn has_ended_early(&self, op: Op, error: &io::Error) -> bool {
        matches!(op, Op::WriteZeroes { .. })
            && error.kind() == io::ErrorKind::TimedOut
            && self.long_until.get().is_some_and(|time| time <= Instant::now())
    }

    fn end_long_requests(&self, at: Option<Instant>) {
        self.long_until.set(at);
        self.image.borrow().backend.end_long_requests(at);
    }
}

#[cfg(test)]
mod tests;
