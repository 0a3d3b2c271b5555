//! Page-cache writes that the reactor makes itself, instead of io_uring.
//!
//! A write to the page cache is a copy of a few microseconds. On file systems that support
//! non-blocking buffered writes (XFS, btrfs, block devices), io_uring makes it on submission. On
//! others (ext4 to this day), io_uring passes it to a worker thread, and the two wake-ups cost ten
//! times as much as the copy.
//!
//! On the latter file systems the reactor makes the copy itself, under two conditions. It has only
//! one file that is open for writing, so that no other disk waits. And no recent write blocked (on
//! the limit of dirty pages, or on a read of metadata). After a write that blocked, io_uring gets
//! the writes for a while.
//!
//! In: the length of a write, and the result of the first one. Out: whether the reactor or io_uring
//! makes it. `file/inline.rs` writes.

use std::cell::Cell;
use std::rc::Rc;

use super::Counters;
use super::pauses::Pauses;

/// Writes in a row before the task yields. A task that only writes would never wait without this.
const YIELD_AFTER: u32 = 32;
/// Longest write that the reactor makes, in bytes. For longer ones several workers copy at a time.
const LONGEST: usize = 256 << 10;

/// Which component makes the writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// The better way is unknown until the first write, which uses RWF_NOWAIT.
    Unknown,
    /// io_uring is at least as fast.
    Ring,
    Inline,
}

pub(crate) struct InlineWrites {
    way: Cell<Way>,
    /// After a write that blocked, io_uring gets the next ones.
    pub pauses: Pauses,
    /// Writes since the task last yielded.
    in_a_row: Cell<u32>,
    counters: Rc<Counters>,
}

impl InlineWrites {
    /// Creates the policy of a file. `is_cached`: whether the file is a regular one that is written
    /// through the page cache.
    pub fn new(is_cached: bool, counters: Rc<Counters>) -> Self {
        let way = Cell::new(if is_cached { Way::Unknown } else { Way::Ring });
        InlineWrites {
            way,
            pauses: Pauses::new(counters.clone()),
            in_a_row: Cell::new(0),
            counters,
        }
    }

    /// Returns whether the reactor may make a write of `len` bytes.
    #[inline]
    pub fn suits(&self, len: usize) -> bool {
        self.way.get() != Way::Ring && len <= LONGEST
    }

    #[inline]
    pub fn way(&self) -> Way {
        self.way.get()
    }

    /// Reports the result of the first write, which used RWF_NOWAIT. File systems without
    /// non-blocking buffered writes refuse it at once.
    pub fn tried(&self, was_refused: bool) {
        self.way.set(if was_refused { Way::Inline } else { Way::Ring });
    }

    /// Counts a write by the reactor. Returns whether its task must yield now.
    #[inline]
    pub fn must_yield(&self) -> bool {
        self.counters.count(|figures| figures.inline += 1);
        let in_a_row = (self.in_a_row.get() + 1) % YIELD_AFTER;
        self.in_a_row.set(in_a_row);
        in_a_row == 0
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn policy(is_cached: bool) -> InlineWrites {
        InlineWrites::new(is_cached, Rc::default())
    }

    #[test]
    fn the_first_write_decides() {
        let inline = policy(true);
        assert!(inline.way() == Way::Unknown && inline.suits(512));
        inline.tried(true);
        assert!(inline.way() == Way::Inline && inline.suits(512));
        let inline = policy(true);
        inline.tried(false);
        assert!(inline.way() == Way::Ring && !inline.suits(512));
    }

    #[test]
    fn direct_files_and_long_writes_go_to_io_uring() {
        assert!(!policy(false).suits(512));
        assert!(policy(true).suits(LONGEST) && !policy(true).suits(LONGEST + 1));
    }

    /// A seeded trace of writes: every hundredth to three hundredth one blocks for up to 5 ms, as
    /// on the limit of dirty pages. The reactor is blocked for at most a twentieth of the time,
    /// and still makes a tenth of the writes that suit.
    #[test]
    fn the_reactor_makes_writes_and_is_blocked_for_a_small_part_of_the_time() {
        for seed in 1..20u64 {
            let mut state = seed;
            let mut below = |most: u64| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) % most
            };
            let (inline, start) = (policy(true), Instant::now());
            inline.tried(true);
            let (mut now, mut blocked) = (start, Duration::ZERO);
            let (mut suited, mut made, mut until_blocked) = (0, 0, 100 + below(200));
            for _ in 0..100_000 {
                now += Duration::from_micros(10 + below(40));
                let len = 512 << below(11);
                if !inline.suits(len) {
                    assert!(len > LONGEST);
                    continue;
                }
                suited += 1;
                if !inline.pauses.allows(now) {
                    continue;
                }
                made += 1;
                let blocks = until_blocked == 0;
                let took = Duration::from_micros(if blocks { 300 + below(4700) } else { 3 });
                until_blocked = if blocks { 100 + below(200) } else { until_blocked - 1 };
                inline.pauses.done(now, now + took, || blocks);
                now += took;
                blocked += if blocks { took } else { Duration::ZERO };
            }
            let part = blocked.as_secs_f64() / (now - start).as_secs_f64();
            assert!(part < 0.05, "seed {seed}: blocked for {part} of the time");
            assert!(made * 10 > suited, "seed {seed}: {made} of {suited}");
        }
    }

    #[test]
    fn a_task_yields_after_32_writes_in_a_row() {
        let inline = policy(true);
        let yields: Vec<_> = (1..=3 * YIELD_AFTER).filter(|_| inline.must_yield()).collect();
        assert_eq!(yields, [YIELD_AFTER, 2 * YIELD_AFTER, 3 * YIELD_AFTER]);
        assert_eq!(inline.counters.figures().inline, u64::from(3 * YIELD_AFTER));
    }
}
