//! Policies for calls that a reactor makes, or prepares, without io_uring. Each policy receives
//! the time and its caller's observations, and returns decisions.
//!
//! ```text
//!   pauses       for how long the reactor avoids work that has blocked it
//!   inline       which page-cache writes the reactor makes itself
//!   change_time  when the reactor sets a file's mtime before its writes
//!   slow_calls   where calls are made that another process can make slow
//!   dirty        how long page-cache writes wait if too many pages are dirty
//! ```
//!
//! What must hold: nothing in this folder makes system calls, starts a thread or reads a clock.
//! Files, sockets and exports carry out the decisions.

pub(crate) mod change_time;
pub(crate) mod dirty;
pub(crate) mod inline;
pub(crate) mod pauses;
pub(crate) mod slow_calls;

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The last value that a policy saw, and when. Of two values, [`later`] keeps the younger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latest<T> {
    pub at: Instant,
    pub value: T,
}

/// Returns the younger one of two values.
pub fn later<T>(one: Option<Latest<T>>, other: Option<Latest<T>>) -> Option<Latest<T>> {
    match (&one, &other) {
        (Some(a), Some(b)) if a.at >= b.at => one,
        (_, None) => one,
        _ => other,
    }
}

/// What these policies decided for the files of a disk. Figures of several reactors can be added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteFigures {
    /// Number of page-cache writes that reactors made.
    pub inline: u64,
    /// Number of times that work of a reactor itself, not of io_uring, blocked the reactor.
    pub blocked: u64,
    /// Number of times that a reactor left work to io_uring, because work of the same kind had
    /// blocked the reactor before.
    pub left: u64,
    /// Number of mtime updates by reactors.
    pub noted: u64,
    /// Number of writes that failed because they would have waited, and were repeated.
    pub refused: u64,
    /// Number of times that a reactor stopped to set the mtime of a file, because that is
    /// impossible.
    pub off: u64,
    /// Number of page-cache writes that waited because too many pages of the machine were dirty.
    pub paced: u64,
    /// For how long such work last blocked a reactor.
    pub last_blocked: Option<Latest<Duration>>,
    /// For how long a write last waited because of the dirty pages.
    pub last_paced: Option<Latest<Duration>>,
}

impl WriteFigures {
    /// Adds the figures of `other`.
    pub fn merge(&mut self, other: &WriteFigures) {
        self.inline += other.inline;
        self.blocked += other.blocked;
        self.left += other.left;
        self.noted += other.noted;
        self.refused += other.refused;
        self.off += other.off;
        self.paced += other.paced;
        self.last_blocked = later(self.last_blocked, other.last_blocked);
        self.last_paced = later(self.last_paced, other.last_paced);
    }
}

/// The figures of some files on one reactor.
#[derive(Debug, Default)]
pub(crate) struct Counters(Cell<WriteFigures>);

impl Counters {
    pub fn figures(&self) -> WriteFigures {
        self.0.get()
    }

    #[inline]
    pub fn count(&self, f: impl FnOnce(&mut WriteFigures)) {
        let mut figures = self.0.get();
        f(&mut figures);
        self.0.set(figures);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_values_the_younger_one_is_kept() {
        let start = Instant::now();
        let old = Some(Latest { at: start, value: 2 });
        let young = Some(Latest { at: start + Duration::from_secs(1), value: 1 });
        assert_eq!(later(old, young), young);
        assert_eq!(later(young, old), young);
        assert_eq!(later(None, old), old);
        assert_eq!(later(old, None), old);
        assert_eq!(later::<u64>(None, None), None);
    }
}
