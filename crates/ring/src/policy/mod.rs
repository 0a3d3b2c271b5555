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
//! `file/`, sockets and exports carry out the decisions.

pub(crate) mod change_time;
pub(crate) mod dirty;
pub(crate) mod inline;
pub(crate) mod pauses;
pub(crate) mod slow_calls;

use std::cell::Cell;

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
    /// Number of page-cache writes that waited because too many pages of the machine were dirty.
    pub paced: u64,
}

impl WriteFigures {
    /// Adds the figures of `other`.
    pub fn merge(&mut self, other: &WriteFigures) {
        self.inline += other.inline;
        self.blocked += other.blocked;
        self.left += other.left;
        self.noted += other.noted;
        self.refused += other.refused;
        self.paced += other.paced;
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
