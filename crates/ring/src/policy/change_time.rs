//! The time of change of files that are written past the page cache, noted by the reactor where its
//! writes wait for that.
//!
//! A write changes the file's time of change, once a tick of the kernel's clock (4 ms). Some file
//! systems (ext4 from Linux 7 on, XFS) may have to wait for that, so they refuse the first writes
//! of each tick that io_uring makes on submission; worker threads then make them, at the price of
//! two changes of thread each. Here those writes are asked to fail instead, the time is noted by a
//! call of a few microseconds, and they are made again, now on submission. Once that is known to
//! help the time is noted ahead: with the first write of each tick.
//!
//! In: each write's beginning and result. Out: how it is to be made, or made again, and whether the
//! time is to be noted, which `file/change_time.rs` does. What must hold: a write that this asked
//! to fail is made again, at last without being asked to; the time is noted once a tick at most; on
//! files that need none of this nothing is noted.

use std::cell::Cell;
use std::rc::Rc;

use super::Counters;
use super::pauses::Pauses;

/// For how many seconds, at most, writes are not asked to fail, after one that failed for another
/// reason: it takes new space.
const OTHERWISE: i64 = 1;

/// How a write is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    /// Whoever has to wait waits.
    Plain,
    /// It fails if it would have to wait.
    Unless,
    /// The same, right after the time was noted.
    Noted,
}

impl Attempt {
    pub fn flags(self) -> i32 {
        if self == Attempt::Plain { 0 } else { libc::RWF_NOWAIT }
    }
}

/// What follows the result of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// The result is the write's.
    Done,
    Again(Attempt),
    /// Note the time, and make the write again: `Noted` if that worked, else `Plain`.
    Note,
}

/// The coarse clocks. They are read only where a decision needs them.
pub(crate) trait Clock {
    /// The tick, as the time at its beginning, which is what files are given.
    fn tick(&self) -> (i64, i64);
    /// Seconds of the monotonic clock.
    fn seconds(&self) -> i64;
}

pub(crate) struct ChangeTime {
    /// Whether any of this may be worth it.
    on: Cell<bool>,
    /// It was: the time is noted ahead.
    ahead: Cell<bool>,
    /// The tick in which it was noted.
    noted: Cell<(i64, i64)>,
    /// Until then, in the seconds of the monotonic clock, writes are plain.
    plain_until: Cell<i64>,
    /// A call that blocked is not repeated for a while.
    pub pauses: Pauses,
    /// Operations that may hold the file for long: then the call would block.
    holders: Cell<u32>,
    counters: Rc<Counters>,
}

impl ChangeTime {
    /// `is_direct`: a regular file that is written past the page cache.
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

    /// Returns how a write is to be made, and whether the time is to be noted before. `alone`: the
    /// thread may be blocked for a while, if it must.
    #[inline]
    pub fn first(&self, clock: &impl Clock, alone: bool) -> (Attempt, bool) {
        if !self.on.get() || !alone {
            return (Attempt::Plain, false);
        }
        if self.ahead.get() {
            return (Attempt::Unless, self.may_note(clock));
        }
        if self.plain_until.get() != 0 && clock.seconds() < self.plain_until.get() {
            return (Attempt::Plain, false);
        }
        (Attempt::Unless, false)
    }

    /// Returns what follows from a result.
    #[inline]
    pub fn next(&self, clock: &impl Clock, attempt: Attempt, result: i32, alone: bool) -> Next {
        match (attempt, result) {
            (Attempt::Plain, _) => Next::Done,
            (_, result) if result == -libc::EAGAIN => self.refused(clock, attempt, alone),
            (_, result) if result == -libc::EOPNOTSUPP => {
                self.on.set(false);
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
            self.ahead.set(false);
            self.plain_until.set(clock.seconds() + OTHERWISE);
            return Next::Again(Attempt::Plain);
        }
        if alone && self.may_note(clock) { Next::Note } else { Next::Again(Attempt::Plain) }
    }

    /// Whether the time may be noted: not if it was in this tick, and not while the call would
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

    /// The time was noted.
    #[inline]
    pub fn was_noted(&self) {
        self.counters.count(|figures| figures.noted += 1);
    }

    /// The time cannot be noted: it is another user's file, which may be written all the same.
    pub fn cannot_be_noted(&self) {
        self.on.set(false);
    }

    /// A plain write may hold the file while it waits.
    #[inline]
    pub fn may_hold(&self, attempt: Attempt) -> Option<impl Drop + '_> {
        (self.on.get() && attempt == Attempt::Plain).then(|| self.held())
    }

    /// As long as it is kept, no time is noted: see `holders`.
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
    const NOT_AHEAD: (Attempt, bool) = (Attempt::Unless, false);
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
    fn a_file_that_refuses_nothing_is_left_as_it_is() {
        let (clock, change) = direct_file();
        for _ in 0..3 {
            assert_eq!(change.first(&clock, true), NOT_AHEAD);
            assert_eq!(change.next(&clock, Attempt::Unless, 4096, true), Next::Done);
            clock.pass(1);
        }
        assert_eq!(change.counters.figures(), Default::default());
    }

    #[test]
    fn where_noting_the_time_helps_it_is_noted_ahead() {
        let (clock, change) = direct_file();
        assert_eq!(change.first(&clock, true), NOT_AHEAD);
        assert_eq!(change.next(&clock, Attempt::Unless, AGAIN, true), Next::Note);
        assert_eq!(change.next(&clock, Attempt::Noted, 4096, true), Next::Done);
        assert_eq!(change.first(&clock, true), NOT_AHEAD, "it was noted in this tick");
        clock.pass(1);
        assert_eq!(
            change.first(&clock, true),
            (Attempt::Unless, true),
            "the next tick's first write notes it"
        );
        assert_eq!(change.first(&clock, true), NOT_AHEAD);
        change.was_noted();
        assert_eq!((change.counters.figures().refused, change.counters.figures().noted), (1, 1));
    }

    #[test]
    fn once_a_tick() {
        let (clock, change) = direct_file();
        let again = [(); 2].map(|()| change.next(&clock, Attempt::Unless, AGAIN, true));
        assert_eq!(again, [Next::Note, PLAIN]);
    }

    #[test]
    fn what_is_refused_for_another_reason_waits_where_it_must() {
        let (clock, change) = direct_file();
        assert_eq!(change.next(&clock, Attempt::Noted, AGAIN, true), PLAIN);
        assert_eq!(change.first(&clock, true), (Attempt::Plain, false), "for a second");
        assert_eq!(change.next(&clock, Attempt::Plain, AGAIN, true), Next::Done);
        clock.pass(249);
        assert_eq!(change.first(&clock, true), (Attempt::Plain, false));
        clock.pass(1);
        assert_eq!(change.first(&clock, true), NOT_AHEAD);
    }

    #[test]
    fn not_while_the_file_is_held() {
        let (clock, change) = direct_file();
        let held = change.held();
        assert_eq!(change.next(&clock, Attempt::Unless, AGAIN, true), PLAIN);
        drop(held);
        assert_eq!(change.next(&clock, Attempt::Unless, AGAIN, true), Next::Note);
    }

    #[test]
    fn nor_while_others_would_wait() {
        let (clock, change) = direct_file();
        assert_eq!(change.first(&clock, false), (Attempt::Plain, false));
        assert_eq!(change.next(&clock, Attempt::Unless, AGAIN, false), PLAIN);
        let held = change.may_hold(Attempt::Plain);
        assert!(held.is_some() && change.may_hold(Attempt::Unless).is_none());
        assert_eq!(
            change.next(&clock, Attempt::Unless, AGAIN, true),
            PLAIN,
            "a write waits at a worker"
        );
    }

    #[test]
    fn where_it_cannot_be_or_is_no_use_writes_are_plain() {
        let (clock, change) = direct_file();
        assert_eq!(change.next(&clock, Attempt::Unless, -libc::EOPNOTSUPP, true), PLAIN);
        assert_eq!(change.first(&clock, true), (Attempt::Plain, false));
        let (clock, change) = direct_file();
        change.cannot_be_noted();
        assert_eq!(change.first(&clock, true), (Attempt::Plain, false));
        assert_eq!(
            ChangeTime::new(false, Rc::default()).first(&clock, true),
            (Attempt::Plain, false)
        );
    }

    /// Returns what a file system answers that refuses each tick's first write unless the time was
    /// noted in it, and, if it is `full`, every write that may not wait.
    fn answer(attempt: Attempt, is_noted: bool, full: bool) -> i32 {
        if attempt != Attempt::Plain && (full || !is_noted) { AGAIN } else { 4096 }
    }

    /// Ten writes in each of 1000 ticks. In the last 500, one tick in three takes new space.
    #[test]
    fn every_write_of_a_trace_is_made_and_the_time_noted_once_a_tick() {
        let (clock, change) = direct_file();
        let (mut noted_in, mut made, mut plain, mut taking) = ((0, 0), 0, 0, 0);
        for tick in 0..1000 {
            clock.pass(1);
            let full = tick >= 500 && tick % 3 == 0;
            for _ in 0..10 {
                let note = |last: (i64, i64)| {
                    assert_ne!(last, clock.tick(), "once a tick");
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
                            assert_eq!(result, 4096, "what was asked to fail is made again");
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
        assert_eq!(plain, taking, "workers make the writes that take new space, and no others");
        let figures = change.counters.figures();
        assert_eq!(
            (figures.noted, figures.refused),
            (1000, 1 + taking),
            "the first refusal showed that noting helps"
        );
    }
}
