//! A reservation: a guaranteed rate of operations or bytes that takes precedence over shares (the
//! reservation tags of mClock, Gulati, Merchant and Varman, 2010).
//!
//! All operations of the disk count against the reservation, also those that its share admits. So
//! the disk gets the greater of the two, not the sum.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Time;
use crate::cost::Reserved;
use crate::knobs::Knobs;

/// Maximum time for which a missed reservation is caught up, in nanoseconds. An idle disk saves up
/// no more than the reservation of this time.
const CATCH_UP_NS: u64 = 100_000_000;

#[derive(Debug, Default)]
pub(crate) struct Reserve {
    operations: Clock,
    bytes: Clock,
}

/// Time when the next unit is due, and the nanoseconds between two units, with 20 fraction bits.
/// Interval 0: nothing is reserved.
#[derive(Debug, Default)]
struct Clock {
    interval: AtomicU64,
    due: AtomicU64,
    /// The reserved units a second.
    rate: AtomicU64,
    /// Units that were admitted so far, and their number at [`Reserve::mark`].
    admitted: AtomicU64,
    marked: AtomicU64,
}

/// A reservation in operations or bytes that is not met: units a second, and the units that were
/// admitted since [`Reserve::mark`].
pub(crate) struct Missed {
    pub is_bytes: bool,
    pub rate: u64,
    pub admitted: u64,
}

impl Clock {
    fn set(&self, rate: Option<u64>) {
        let interval = rate
            .filter(|rate| *rate > 0)
            .map_or(0, |rate| ((1_000_000_000u128 << 20) / u128::from(rate)) as u64);
        self.interval.store(interval, Relaxed);
        self.rate.store(rate.unwrap_or(0), Relaxed);
    }

    #[inline]
    fn is_due(&self, now: Time) -> bool {
        self.interval.load(Relaxed) > 0 && self.due.load(Relaxed) <= now
    }

    #[inline]
    fn charge(&self, now: Time, count: u64) {
        let interval = self.interval.load(Relaxed);
        if interval > 0 {
            self.admitted.fetch_add(count, Relaxed);
            let step = ((u128::from(interval) * u128::from(count)) >> 20) as u64;
            // A disk that got more than its reservation waits at most this long for its next
            // reserved operation.
            let most = now.saturating_add(step.max(CATCH_UP_NS));
            let next = |due: u64| {
                Some(due.max(now.saturating_sub(CATCH_UP_NS)).saturating_add(step).min(most))
            };
            let _ = self.due.fetch_update(Relaxed, Relaxed, next);
        }
    }

    /// Returns whether more has been due for long than was admitted.
    fn is_behind(&self, now: Time) -> bool {
        self.interval.load(Relaxed) > 0 && self.due.load(Relaxed) + CATCH_UP_NS / 2 < now
    }

    fn mark(&self) {
        self.marked.store(self.admitted.load(Relaxed), Relaxed);
    }

    fn missed(&self, now: Time, is_bytes: bool) -> Option<Missed> {
        let admitted = self.admitted.load(Relaxed).wrapping_sub(self.marked.load(Relaxed));
        let rate = self.rate.load(Relaxed);
        self.is_behind(now).then_some(Missed { is_bytes, rate, admitted })
    }

    /// Returns when the reservation is due for an operation with `ahead` units before it.
    fn next(&self, now: Time, ahead: u64) -> Option<Time> {
        let interval = self.interval.load(Relaxed);
        let later = ((u128::from(interval) * u128::from(ahead)) >> 20) as u64;
        (interval > 0).then(|| self.due.load(Relaxed).max(now).saturating_add(later))
    }
}

impl Reserve {
    /// Changes the reserved rates.
    pub fn set(&self, knobs: &Knobs) {
        self.operations.set(knobs.reserve_iops);
        self.bytes.set(knobs.reserve_bps);
    }

    #[inline]
    pub fn is_set(&self) -> bool {
        self.operations.interval.load(Relaxed) > 0 || self.bytes.interval.load(Relaxed) > 0
    }

    /// Returns whether an operation is due by reservation.
    #[inline]
    pub fn is_due(&self, now: Time) -> bool {
        self.operations.is_due(now) || self.bytes.is_due(now)
    }

    /// Counts an admitted operation against the reservation.
    #[inline]
    pub fn charge(&self, now: Time, reserved: Reserved) {
        self.operations.charge(now, reserved.operations);
        self.bytes.charge(now, reserved.bytes);
    }

    /// Returns whether the reservation was not met for 50 ms: operations were due, and none began.
    pub fn is_behind(&self, now: Time) -> bool {
        self.operations.is_behind(now) || self.bytes.is_behind(now)
    }

    /// Begins to count for [`Reserve::missed`].
    pub fn mark(&self) {
        self.operations.mark();
        self.bytes.mark();
    }

    /// Returns the reservations that are not met.
    pub fn missed(&self, now: Time) -> impl Iterator<Item = Missed> {
        let operations = self.operations.missed(now, false);
        operations.into_iter().chain(self.bytes.missed(now, true))
    }

    /// Returns when the reservation is due for the last of `ahead` waiting operations.
    pub fn next(&self, now: Time, ahead: u64) -> Option<Time> {
        // The sizes of the waiting operations are unknown here; assume 4 KiB each.
        let ahead = ahead.saturating_sub(1);
        self.operations.next(now, ahead).into_iter().chain(self.bytes.next(now, ahead * 4096)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Reserved = Reserved { operations: 1, bytes: 4096 };

    #[test]
    fn the_reserved_rate_is_due_and_100_ms_are_caught_up() {
        let reserve = Reserve::default();
        assert!(!reserve.is_set() && !reserve.is_due(u64::MAX));
        reserve.set(&Knobs { reserve_iops: Some(3000), ..Knobs::default() });
        let start = 5_000_000_000;
        let mut served = 0;
        for now in (start..start + 1_000_000_000).step_by(50_000) {
            while reserve.is_due(now) {
                reserve.charge(now, SMALL);
                served += 1;
            }
        }
        assert!(
            (3000..=3000 + 302).contains(&served),
            "{served}: 3000, and 100 ms of them saved up"
        );
    }

    #[test]
    fn use_beyond_the_reservation_delays_it_by_at_most_100_ms() {
        let reserve = Reserve::default();
        reserve.set(&Knobs { reserve_iops: Some(1000), ..Knobs::default() });
        let start = 5_000_000_000;
        (0..1_000_000).for_each(|n| reserve.charge(start + n * 50_000, SMALL));
        let end = start + 1_000_000 * 50_000;
        assert!(!reserve.is_due(end) && reserve.is_due(end + CATCH_UP_NS));
    }

    #[test]
    fn a_reservation_of_bytes_is_due_by_bytes() {
        let reserve = Reserve::default();
        reserve.set(&Knobs { reserve_bps: Some(1 << 20), ..Knobs::default() });
        reserve.charge(1_000_000_000, Reserved { operations: 1, bytes: 1 << 20 });
        assert!(!reserve.is_due(1_890_000_000) && reserve.is_due(1_910_000_000));
        assert_eq!(reserve.next(1_000_000_000, 1), Some(1_900_000_000));
    }
}
