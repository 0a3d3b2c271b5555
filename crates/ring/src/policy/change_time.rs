//! Sets the mtime of files that bypass the page cache before writes that would wait for the
//! kernel's own update of it.
//!
//! A write updates the file's mtime and ctime, once per tick of the kernel's coarse clock (4 ms).
//! On some file systems (ext4 from Linux 7, XFS) that update may block. So they refuse the first
//! writes of each tick that io_uring submits without waiting; worker threads then make them, which
//! costs two context switches each.
//!
//! With this policy such writes fail instead of waiting (RWF_NOWAIT). The reactor sets the mtime by
//! a call of a few microseconds and repeats the write, which now succeeds on submission. After the
//! first repeated write that succeeds, the reactor sets the mtime in advance: before the first
//! write of each tick. In the names of this module, "note" means to set the mtime in this way.
//!
//! In: the beginning and the result of each write. Out: how to make it, how to repeat it, and
//! whether to set the mtime, which `file/change_time.rs` does.
//!
//! What must hold
//! - A write that fails only because of RWF_NOWAIT is repeated, in the end without RWF_NOWAIT.
//! - The mtime is set at most once per tick.
//! - On files whose writes are not refused, the mtime is never set here.

use std::cell::Cell;
use std::rc::Rc;

use super::Counters;
use super::pauses::Pauses;

/// Number of seconds for which writes are plain after a write was refused in the tick in which the
/// mtime was set. Such a write needs new space.
const PLAIN_SECONDS: i64 = 1;

/// How to make a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    /// The write may wait (in a worker thread).
    Plain,
    /// The write fails if it would have to wait (RWF_NOWAIT).
    NoWait,
    /// Like `NoWait`, after the mtime was set.
    Noted,
}

impl Attempt {
    pub fn flags(self) -> i32 {
        if self == Attempt::Plain { 0 } else { libc::RWF_NOWAIT }
    }
}

/// What to do after a result of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// The result is final.
    Done,
    Again(Attempt),
    /// Set the mtime, and repeat the write: as `Noted` if the mtime was set, else as `Plain`.
    Note,
}

/// The coarse clocks. They are read only if a decision needs them.
pub(crate) trait Clock {
    /// Returns the beginning of the current tick (seconds, nanoseconds): the mtime that the kernel
    /// sets.
    fn tick(&self) -> (i64, i64);
    /// Returns the monotonic clock in seconds.
    fn seconds(&self) -> i64;
}

pub(crate) struct ChangeTime {
    /// Whether the policy applies to the file. False if the file goes through the page cache, or if
    /// RWF_NOWAIT or setting the mtime is not possible.
    on: Cell<bool>,
    /// Whether the last refused write succeeded after the mtime was set. If so, the mtime is set
    /// before the first write of each tick.
    ahead: Cell<bool>,
    /// The last tick in which the mtime was set.
    noted: Cell<(i64, i64)>,
    /// Writes are plain until this second of the monotonic clock.
    plain_until: Cell<i64>,
    /// After a call that blocked, the reactor makes no such call for a while.
    pub pauses: Pauses,
    /// Number of operations that may hold the inode lock for long. Setting the mtime would wait for
    /// them.
    holders: Cell<u32>,
    counters: Rc<Counters>,
}

impl ChangeTime {
    /// Creates the policy of a file. `is_direct`: whether the file is a regular one that bypasses
    /// the page cache.
    pub fn new(is_direct: bool, counters: Rc<Counters>) -> Self {
        let (ahead, noted, plain_until, holders) = Default::default();
        let pauses = Pauses::new(counters.clone());
        ChangeTime {
            on: Cell::new(is_direct),
            ahead,
            noted,
            plain_until,
            pauses,
            holders,
            counters,
        }
    }

    /// Returns how to make a write, and whether to set the mtime before it. `alone`: whether no
    /// other file is open for writing on the reactor, so that the thread may block for a while if
    /// necessary.
    #[inline]
    pub fn first(&self, clock: &impl Clock, alone: bool) -> (Attempt, bool) {
        if !self.on.get() || !alone {
            return (Attempt::Plain, false);
        }
        if self.ahead.get() {
            return (Attempt::NoWait, self.may_note(clock));
        }
        if self.plain_until.get() != 0 && clock.seconds() < self.plain_until.get() {
            return (Attempt::Plain, false);
        }
        (Attempt::NoWait, false)
    }

    /// Returns what to do after a result.
    #[inline]
    pub fn next(&self, clock: &impl Clock, attempt: Attempt, result: i32, alone: bool) -> Next {
        match (attempt, result) {
            (Attempt::Plain, _) => Next::Done,
            (_, result) if result == -libc::EAGAIN => self.refused(clock, attempt, alone),
            (_, result) if result == -libc::EOPNOTSUPP => {
                self.turn_off();
                Next::Again(Attempt::Plain)
            }
            (Attempt::Noted, result) if result >= 0 => {
                self.ahead.set(true);
                Next::Done
            }
            _ => Next::Done,
        }
    }

    fn refused(&self, clock: &impl Clock, attempt: Attempt, alone: bool) -> Next {
        self.counters.count(|figures| figures.refused += 1);
        if attempt == Attempt::Noted {
            // The mtime was set, but the tick has passed since.
            if self.noted.get() != clock.tick() {
                return Next::Again(Attempt::Plain);
            }
            self.ahead.set(false);
            self.plain_until.set(clock.seconds() + PLAIN_SECONDS);
            return Next::Again(Attempt::Plain);
        }
        if alone && self.may_note(clock) { Next::Note } else { Next::Again(Attempt::Plain) }
    }

    /// Returns whether the mtime may be set now: not twice in a tick, and not while the call would
    /// wait.
    #[inline]
    fn may_note(&self, clock: &impl Clock) -> bool {
        let tick = clock.tick();
        let may = self.noted.get() != tick && self.holders.get() == 0;
        if may {
            self.noted.set(tick);
        }
        may
    }

    /// Reports that the mtime was set.
    #[inline]
    pub fn was_noted(&self) {
        self.counters.count(|figures| figures.noted += 1);
    }

    /// Reports that the mtime cannot be set: the file belongs to another user, but is writable.
    pub fn cannot_be_noted(&self) {
        self.turn_off();
    }

    /// Writes that are in flight may each find that the policy is impossible. It counts once.
    #[cold]
    fn turn_off(&self) {
        if self.on.replace(false) {
            self.counters.count(|figures| figures.off += 1);
        }
    }

    /// Counts a plain write as a holder of the inode lock until the result is dropped.
    #[inline]
    pub fn may_hold(&self, attempt: Attempt) -> Option<impl Drop + '_> {
        (self.on.get() && attempt == Attempt::Plain).then(|| self.held())
    }

    /// Counts a holder of the inode lock until the result is dropped. Until then the mtime is not
    /// set.
    pub fn held(&self) -> impl Drop + '_ {
        self.holders.set(self.holders.get() + 1);
        Held(self)
    }
}

struct Held<'a>(&'a ChangeTime);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.holders.set(self.0.holders.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGAIN: i32 = -libc::EAGAIN;
    const NOT_AHEAD: (Attempt, bool) = (Attempt::NoWait, false);
    const PLAIN: Next = Next::Again(Attempt::Plain);

    /// Ticks of 4 ms since 1970.
    #[derive(Default)]
    struct Ticks(Cell<i64>);

    impl Ticks {
        fn pass(&self, ticks: i64) {
            self.0.set(self.0.get() + ticks);
        }
    }

    impl Clock for Ticks {
        fn tick(&self) -> (i64, i64) {
            (self.seconds(), self.0.get() % 250 * 4_000_000)
        }

        fn seconds(&self) -> i64 {
            self.0.get() / 250
        }
    }

    fn direct_file() -> (Ticks, ChangeTime) {
        (Ticks(Cell::new(1000)), ChangeTime::new(true, Rc::default()))
    }

    #[test]
    fn nothing_is_noted_on_a_file_that_refuses_nothing() {
        let (clock, change) = direct_file();
        for _ in 0..3 {
            assert_eq!(change.first(&clock, true), NOT_AHEAD);
            assert_eq!(change.next(&clock, Attempt::NoWait, 4096, true), Next::Done);
            clock.pass(1);
        }
        assert_eq!(change.counters.figures(), Default::default());
    }

    #[test]
    fn the_time_is_noted_ahead_once_that_has_helped() {
        let (clock, change) = direct_file();
        assert_eq!(change.first(&clock, true), NOT_AHEAD);
        assert_eq!(change.next(&clock, Attempt::NoWait, AGAIN, true), Next::Note);
        assert_eq!(change.next(&clock, Attempt::Noted, 4096, true), Next::Done);
        assert_eq!(change.first(&clock, true), NOT_AHEAD, "the time was noted in this tick");
        clock.pass(1);
        assert_eq!(
            change.first(&clock, true),
            (Attempt::NoWait, true),
            "the first write of the next tick notes it"
        );
        assert_eq!(change.first(&clock, true), NOT_AHEAD);
        change.was_noted();
        assert_eq!((change.counters.figures().refused, change.counters.figures().noted), (1, 1));
    }

    #[test]
    fn the_time_is_noted_once_per_tick() {
        let (clock, change) = direct_file();
        let again = [(); 2].map(|()| change.next(&clock, Attempt::NoWait, AGAIN, true));
        assert_eq!(again, [Next::Note, PLAIN]);
    }

    #[test]
    fn writes_refused_for_another_reason_are_plain_for_a_second() {
        let (clock, change) = direct_file();
        assert_eq!(change.next(&clock, Attempt::NoWait, AGAIN, true), Next::Note);
        assert_eq!(change.next(&clock, Attempt::Noted, AGAIN, true), PLAIN);
        assert_eq!(
            change.first(&clock, true),
            (Attempt::Plain, false),
            "writes are plain for a second"
        );
        assert_eq!(change.next(&clock, Attempt::Plain, AGAIN, true), Next::Done);
        clock.pass(249);
        assert_eq!(change.first(&clock, true), (Attempt::Plain, false));
        clock.pass(1);
        assert_eq!(change.first(&clock, true), NOT_AHEAD);
    }

    #[test]
    fn a_write_that_is_refused_after_its_tick_proves_nothing() {
        let (clock, change) = direct_file();
        assert_eq!(change.next(&clock, Attempt::NoWait, AGAIN, true), Next::Note);
        assert_eq!(change.next(&clock, Attempt::Noted, 4096, true), Next::Done);
        clock.pass(1);
        assert_eq!(change.first(&clock, true), (Attempt::NoWait, true));
        clock.pass(1);
        assert_eq!(change.next(&clock, Attempt::NoWait, AGAIN, true), Next::Note);
        clock.pass(1);
        assert_eq!(change.next(&clock, Attempt::Noted, AGAIN, true), PLAIN);
        assert_eq!(
            change.first(&clock, true),
            (Attempt::NoWait, true),
            "the mtime is still set before the first write of a tick"
        );
    }

    #[test]
    fn nothing_is_noted_while_the_file_is_held() {
        let (clock, change) = direct_file();
        let held = change.held();
        assert_eq!(change.next(&clock, Attempt::NoWait, AGAIN, true), PLAIN);
        drop(held);
        assert_eq!(change.next(&clock, Attempt::NoWait, AGAIN, true), Next::Note);
    }

    #[test]
    fn nothing_is_noted_while_other_files_would_wait() {
        let (clock, change) = direct_file();
        assert_eq!(change.first(&clock, false), (Attempt::Plain, false));
        assert_eq!(change.next(&clock, Attempt::NoWait, AGAIN, false), PLAIN);
        let held = change.may_hold(Attempt::Plain);
        assert!(held.is_some() && change.may_hold(Attempt::NoWait).is_none());
        assert_eq!(
            change.next(&clock, Attempt::NoWait, AGAIN, true),
            PLAIN,
            "a plain write waits in a worker thread"
        );
    }

    #[test]
    fn writes_are_plain_if_noting_is_impossible_or_useless() {
        let (clock, change) = direct_file();
        assert_eq!(change.next(&clock, Attempt::NoWait, -libc::EOPNOTSUPP, true), PLAIN);
        assert_eq!(change.first(&clock, true), (Attempt::Plain, false));
        let (clock, change) = direct_file();
        change.cannot_be_noted();
        change.cannot_be_noted();
        assert_eq!(change.first(&clock, true), (Attempt::Plain, false));
        assert_eq!(change.counters.figures().off, 1);
        assert_eq!(
            ChangeTime::new(false, Rc::default()).first(&clock, true),
            (Attempt::Plain, false)
        );
    }

    /// Returns the result of a write on a file system that refuses the first write of each tick
    /// unless the mtime was set in that tick. If `full`, it refuses every write that may not wait.
    fn answer(attempt: Attempt, is_noted: bool, full: bool) -> i32 {
        if attempt != Attempt::Plain && (full || !is_noted) { AGAIN } else { 4096 }
    }

    /// Makes ten writes in each of 1000 ticks. In the last 500 ticks, one in three needs new space.
    #[test]
    fn every_write_of_a_trace_is_made_and_the_time_noted_once_per_tick() {
        let (clock, change) = direct_file();
        let (mut noted_in, mut made, mut plain, mut taking) = ((0, 0), 0, 0, 0);
        for tick in 0..1000 {
            clock.pass(1);
            let full = tick >= 500 && tick % 3 == 0;
            for _ in 0..10 {
                let note = |last: (i64, i64)| {
                    assert_ne!(last, clock.tick(), "noted once per tick");
                    change.was_noted();
                    clock.tick()
                };
                let (mut attempt, ahead) = change.first(&clock, true);
                if ahead {
                    noted_in = note(noted_in);
                }
                loop {
                    let result = answer(attempt, noted_in == clock.tick(), full);
                    match change.next(&clock, attempt, result, true) {
                        Next::Done => {
                            assert_eq!(result, 4096, "a write that NOWAIT refused is repeated");
                            break;
                        }
                        Next::Again(again) => attempt = again,
                        Next::Note => {
                            noted_in = note(noted_in);
                            attempt = Attempt::Noted;
                        }
                    }
                }
                made += 1;
                plain += u64::from(attempt == Attempt::Plain);
                taking += u64::from(full);
            }
        }
        assert_eq!(made, 10_000);
        assert_eq!(plain, taking, "only writes that need new space are plain");
        let figures = change.counters.figures();
        assert_eq!(
            (figures.noted, figures.refused),
            (1000, 1 + taking),
            "the first refusal showed that noting helps"
        );
    }
}
