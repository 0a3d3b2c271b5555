//! Page-cache writes that are made here and now.
//!
//! A write to the page cache is a copy of a few microseconds. Where the file system can promise
//! that it will not block (XFS, btrfs, block devices) io_uring makes it on submission. Elsewhere
//! (ext4 up to this day) io_uring hands it to a worker thread, and two wake-ups cost ten times what
//! the copy does. There the reactor copies by itself: while it has one file that is written to, so
//! that nobody else is kept waiting, and as long as no write blocks (dirty pages at their limit,
//! metadata to be read). One that did leaves the next ones to the workers for a while.
//!
//! In: the length of a write, and what the first one answered. Out: who makes it. `file/inline.rs`
//! writes.

use std::cell::Cell;
use std::rc::Rc;

use super::Counters;
use super::pauses::Pauses;

/// So many writes in a row, and the other tasks get a turn: a task that does nothing else never
/// waits by itself.
const TURN: u32 = 32;
/// Longer writes are the workers': several copy at a time.
const LONGEST: usize = 256 << 10;

/// Who makes a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// Not known before the first write, which asks not to block.
    Unknown,
    /// io_uring does it as well or better.
    Ring,
    Inline,
}

pub(crate) struct InlineWrites {
    way: Cell<Way>,
    /// A write that blocked sends the next ones to the workers.
    pub pauses: Pauses,
    /// Writes since others had a turn.
    turn: Cell<u32>,
    counters: Rc<Counters>,
}

impl InlineWrites {
    /// `is_cached`: a regular file that is written through the page cache.
    pub fn new(is_cached: bool, counters: Rc<Counters>) -> Self {
        let way = Cell::new(if is_cached { Way::Unknown } else { Way::Ring });
        InlineWrites { way, pauses: Pauses::new(counters.clone()), turn: Cell::new(0), counters }
    }

    /// Whether a write of `len` bytes may be made here.
    #[inline]
    pub fn suits(&self, len: usize) -> bool {
        self.way.get() != Way::Ring && len <= LONGEST
    }

    #[inline]
    pub fn way(&self) -> Way {
        self.way.get()
    }

    /// The first write asked not to block. File systems that cannot promise it refuse at once.
    pub fn tried(&self, was_refused: bool) {
        self.way.set(if was_refused { Way::Inline } else { Way::Ring });
    }

    /// After a write here: whether its task is to let others go first.
    #[inline]
    pub fn owes_a_turn(&self) -> bool {
        self.counters.count(|figures| figures.inline += 1);
        let turn = (self.turn.get() + 1) % TURN;
        self.turn.set(turn);
        turn == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(is_cached: bool) -> InlineWrites {
        InlineWrites::new(is_cached, Rc::default())
    }

    #[test]
    fn the_first_write_decides() {
        let inline = of(true);
        assert!(inline.way() == Way::Unknown && inline.suits(512));
        inline.tried(true);
        assert!(inline.way() == Way::Inline && inline.suits(512));
        let inline = of(true);
        inline.tried(false);
        assert!(inline.way() == Way::Ring && !inline.suits(512));
    }

    #[test]
    fn direct_files_and_long_writes_are_the_rings() {
        assert!(!of(false).suits(512));
        assert!(of(true).suits(LONGEST) && !of(true).suits(LONGEST + 1));
    }

    #[test]
    fn others_have_their_turn_after_so_many_writes() {
        let inline = of(true);
        let turns: Vec<_> = (1..=3 * TURN).filter(|_| inline.owes_a_turn()).collect();
        assert_eq!(turns, [TURN, 2 * TURN, 3 * TURN]);
        assert_eq!(inline.counters.figures().inline, u64::from(3 * TURN));
    }
}
