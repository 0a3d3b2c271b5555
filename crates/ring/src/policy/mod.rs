//! The policies of writes that a reactor makes, or prepares, by itself. Each one receives the time
//! and what its caller has observed, and returns decisions.
//!
//! ```text
//!   pauses       after work that blocked the reactor, for how long others do it
//!   inline       which writes to the page cache the reactor makes
//!   change_time  when a file's time of change is noted ahead of its writes
//! ```
//!
//! What must hold: nothing in this folder calls the system, starts a thread or reads a clock.
//! `file/` carries decisions out.

pub(crate) mod change_time;
pub(crate) mod inline;
pub(crate) mod pauses;

use std::cell::Cell;

/// What these policies chose for the files of a disk. Figures of several reactors can be added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteFigures {
    /// Writes to the page cache that reactors made.
    pub inline: u64,
    /// Times that work of a reactor blocked it.
    pub blocked: u64,
    /// Pieces of work that were left to others, because such work had blocked before.
    pub left: u64,
    /// Times of change that were noted.
    pub noted: u64,
    /// Writes that were refused because they would have waited, and were made again.
    pub refused: u64,
}

impl WriteFigures {
    pub fn merge(&mut self, other: &WriteFigures) {
        self.inline += other.inline;
        self.blocked += other.blocked;
        self.left += other.left;
        self.noted += other.noted;
        self.refused += other.refused;
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
    fn count(&self, f: impl FnOnce(&mut WriteFigures)) {
        let mut figures = self.0.get();
        f(&mut figures);
        self.0.set(figures);
    }
}
