//! Pauses for work that a reactor does itself although it may block: after it blocked, io_uring
//! does it for a while.
//!
//! In: when the work is due, when it was done, and whether the thread slept. Out: whether the
//! reactor may do it.
//!
//! What must hold: such work blocks a reactor for at most a twentieth of its time, unless it blocks
//! for seconds at a time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::{Counters, Latest};

/// Work that takes less has not blocked.
const QUICK: Duration = Duration::from_micros(200);
/// Length of a pause, in multiples of the time that the work blocked.
const FACTOR: u32 = 20;
/// Longest pause. After it the reactor tries the work again.
const MOST: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct Pauses {
    until: Cell<Option<Instant>>,
    counters: Rc<Counters>,
}

impl Pauses {
    pub fn new(counters: Rc<Counters>) -> Self {
        Pauses { until: Cell::default(), counters }
    }

    /// Returns whether the reactor may do the work at `now`.
    #[inline]
    pub fn allows(&self, now: Instant) -> bool {
        let allows = self.until.get().is_none_or(|until| now >= until);
        if !allows {
            self.counters.count(|figures| figures.left += 1);
        }
        allows
    }

    /// Reports that the work was done. `has_slept` is called only after slow work. Time alone does
    /// not show whether the work blocked, because a busy machine may have run other threads
    /// meanwhile.
    #[inline]
    pub fn done(&self, began: Instant, ended: Instant, has_slept: impl FnOnce() -> bool) {
        let took = ended.saturating_duration_since(began);
        if took > QUICK && has_slept() {
            self.counters.count(|figures| {
                figures.blocked += 1;
                figures.last_blocked = Some(Latest { at: ended, value: took });
            });
            self.until.set(Some(ended + (took * FACTOR).min(MOST)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn work_that_blocked_is_paused_for_a_while() {
        let counters = Rc::<Counters>::default();
        let (pauses, start) = (Pauses::new(counters.clone()), Instant::now());
        assert!(pauses.allows(start));
        pauses.done(start, start + ms(100), || true);
        let (end, tick) = (start + ms(2100), Duration::from_nanos(1));
        assert!(!pauses.allows(start + ms(100)) && !pauses.allows(end - tick));
        assert!(pauses.allows(end));
        pauses.done(end, end + QUICK, || unreachable!("quick work is not checked"));
        assert!(pauses.allows(end + QUICK));
        let figures = counters.figures();
        assert_eq!((figures.blocked, figures.left), (1, 2));
        assert_eq!(figures.last_blocked, Some(Latest { at: start + ms(100), value: ms(100) }));
    }

    #[test]
    fn slow_work_that_did_not_sleep_has_not_blocked() {
        let (pauses, start) = (Pauses::default(), Instant::now());
        pauses.done(start, start + ms(100), || false);
        assert!(pauses.allows(start + ms(100)));
    }

    #[test]
    fn the_longest_pause_is_one_minute() {
        let (pauses, start) = (Pauses::default(), Instant::now());
        let end = start + Duration::from_secs(3600);
        pauses.done(start, end, || true);
        assert!(!pauses.allows(end + MOST - ms(1)) && pauses.allows(end + MOST));
    }

    /// Work is due every millisecond. One in three blocks, for 0.3 to 4.8 ms.
    #[test]
    fn a_reactor_is_blocked_for_at_most_a_twentieth_of_its_time() {
        let (pauses, start) = (Pauses::default(), Instant::now());
        let (mut now, mut blocked, mut random) = (start, Duration::ZERO, 1u64);
        while now - start < Duration::from_secs(60) {
            now += ms(1);
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            if !pauses.allows(now) {
                continue;
            }
            let blocks = (random >> 40) % 3 == 0;
            let took =
                Duration::from_micros(if blocks { 300 + 300 * ((random >> 50) % 16) } else { 5 });
            pauses.done(now, now + took, || blocks);
            now += took;
            blocked += if blocks { took } else { Duration::ZERO };
        }
        assert!(
            blocked * 20 < now - start && blocked * 60 > now - start,
            "{blocked:?} of {:?}",
            now - start
        );
    }
}
