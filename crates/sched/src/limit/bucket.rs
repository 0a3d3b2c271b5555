//! A token bucket: a rate, a burst size, and the time when it is full again (the virtual scheduling
//! algorithm of ITU-T I.371).
//!
//! What must hold: concurrent callers together never get more than the bucket allows. Rounding
//! loses no fraction of a nanosecond.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::Time;
use crate::carried::{BucketState, MAX_DEBT_NS};

#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Units (operations or bytes) a second. 0: this bucket is not used.
    rate: AtomicU64,
    /// Size of the bucket, in nanoseconds of its rate. It is the amount that a full bucket admits
    /// at once.
    holds: AtomicU64,
    /// How long before the bucket is full it admits the next operation, in nanoseconds. It is the
    /// size of the bucket less the cost of the largest operation, because the last admitted
    /// operation may exceed the tokens by its own cost. It is at least half of the size, so that a
    /// caller that retries late finds tokens.
    slack: AtomicU64,
    /// Time when the bucket is full again.
    pub full: AtomicU64,
    /// Sum of what rounding left out of the charges, in billionths of a unit.
    fraction: AtomicU64,
}

const SECOND: u64 = 1_000_000_000;

impl Bucket {
    #[inline]
    pub fn exists(&self) -> bool {
        self.rate.load(Acquire) > 0
    }

    /// Returns the time from which the bucket admits an operation, if no other operation is
    /// admitted before.
    #[inline]
    pub fn opens(&self) -> Time {
        self.full.load(Acquire).saturating_sub(self.slack.load(Acquire))
    }

    /// Admits an operation of `amount` units. The inner `Err` is the time to retry. `good` returns
    /// an error if the bucket has been replaced; then nothing is charged, and that error is the
    /// outer one.
    pub fn charge<E>(
        &self,
        now: Time,
        amount: u64,
        good: impl Fn() -> Result<(), E>,
    ) -> Result<Result<(), Time>, E> {
        let mut full = self.full.load(Acquire);
        let mut cost = None;
        loop {
            let opens = full.saturating_sub(self.slack.load(Acquire));
            if opens > now {
                return good().map(|()| Err(opens));
            }
            let cost = *cost.get_or_insert_with(|| self.cost(amount));
            // After all loads: a change of the limits first increments the counter that `good`
            // checks, and then writes `full`.
            good()?;
            match self.full.compare_exchange_weak(
                full,
                full.max(now).saturating_add(cost),
                AcqRel,
                Acquire,
            ) {
                Ok(_) => return Ok(Ok(())),
                Err(other) => full = other,
            }
        }
    }

    /// Charges an operation that cannot wait.
    pub fn force(&self, now: Time, amount: u64) {
        let cost = self.cost(amount);
        let _ = self
            .full
            .fetch_update(AcqRel, Acquire, |full| Some(full.max(now).saturating_add(cost)));
    }

    /// Returns the tokens of a charge to the bucket.
    pub fn refund(&self, amount: u64) {
        let cost = self.refunded(amount);
        let _ = self.full.fetch_update(AcqRel, Acquire, |full| Some(full.saturating_sub(cost)));
    }

    /// Returns how many units the rate admits in a time, and at least one. `u64::MAX`: the bucket
    /// is not used.
    pub fn worth(&self, time_ns: u64) -> u64 {
        match self.rate.load(Acquire) {
            0 => u64::MAX,
            rate => u64::try_from(u128::from(rate) * u128::from(time_ns) / u128::from(SECOND))
                .unwrap_or(u64::MAX)
                .max(1),
        }
    }

    /// Returns the approximate cost of `amount` units, in nanoseconds of the rate.
    pub fn price(&self, amount: u64) -> u64 {
        divide(amount, self.rate.load(Acquire).max(1)).0
    }

    /// Returns the cost of `amount` units in nanoseconds of the rate. Carries the remainder over,
    /// so that the sum of all costs is exact.
    fn cost(&self, amount: u64) -> u64 {
        let rate = self.rate.load(Acquire).max(1);
        let (cost, rest) = divide(amount, rate);
        if rest == 0 {
            return cost;
        }
        let before = self.fraction.fetch_add(rest, AcqRel);
        cost + (before.wrapping_add(rest) / rate).saturating_sub(before / rate)
    }

    fn refunded(&self, amount: u64) -> u64 {
        let rate = self.rate.load(Acquire).max(1);
        let (cost, rest) = divide(amount, rate);
        if rest == 0 {
            return cost;
        }
        let before = self.fraction.fetch_sub(rest, AcqRel);
        cost + (before / rate).saturating_sub(before.wrapping_sub(rest) / rate)
    }

    /// Records the size of an operation, and reduces `slack` if it is the largest so far.
    pub fn note_size(&self, amount: u64) {
        let (rate, holds) = (self.rate.load(Acquire), self.holds.load(Acquire));
        self.slack.fetch_min(slack(rate, holds, amount), AcqRel);
    }

    /// Takes over the state of `old` with another rate and size: the same fill level in proportion,
    /// and a debt that lasts no longer than before.
    pub fn succeed(&self, old: &Bucket, rate: u64, holds: u64, largest: u64, now: Time) {
        let (old_rate, old_holds) = (old.rate.load(Acquire), old.holds.load(Acquire));
        let full = if old_rate == 0 || rate == 0 {
            0
        } else {
            let missing = old.full.load(Acquire).saturating_sub(now);
            now.saturating_add(converted(missing, (old_rate, old_holds), (rate, holds)))
        };
        self.rate.store(rate, Release);
        self.holds.store(holds, Release);
        self.slack.store(slack(rate, holds, largest), Release);
        self.full.store(full, Release);
        self.fraction.store(0, Relaxed);
    }

    /// Moves the charges to the next server. The bucket is full afterwards.
    pub fn hand_over(&self, now: Time) -> BucketState {
        let missing_ns = self.full.swap(0, AcqRel).saturating_sub(now);
        let (rate, holds_ns) = (self.rate.load(Acquire), self.holds.load(Acquire));
        BucketState { rate, holds_ns, missing_ns }
    }

    /// Adds the charges of another server, as [`Bucket::succeed`] takes them over.
    pub fn continue_from(&self, now: Time, state: &BucketState) {
        let (rate, holds) = (self.rate.load(Acquire), self.holds.load(Acquire));
        if rate == 0 || state.rate == 0 {
            return;
        }
        let old = (state.rate, state.holds_ns);
        let missing = converted(state.missing_ns, old, (rate, holds));
        let missing = missing.min(holds.saturating_add(MAX_DEBT_NS));
        let full = |full: u64| Some(full.max(now).saturating_add(missing));
        let _ = self.full.fetch_update(AcqRel, Acquire, full);
    }
}

/// Converts the time until a bucket of a rate and a size (`from`) is full to that of another one:
/// the same fill level in proportion, and a debt that lasts no longer.
fn converted(missing: u64, from: (u64, u64), (rate, holds): (u64, u64)) -> u64 {
    let (old_rate, old_holds) = from;
    let debt = missing.saturating_sub(old_holds);
    let of_holds = u128::from(missing - debt) * u128::from(holds) / u128::from(old_holds.max(1));
    let of_debt = u128::from(debt) * u128::from(old_rate.min(rate)) / u128::from(rate);
    u64::try_from(of_holds + of_debt).unwrap_or(u64::MAX)
}

fn slack(rate: u64, holds: u64, largest: u64) -> u64 {
    let (cost, rest) = divide(largest, rate.max(1));
    holds - (cost + u64::from(rest > 0)).min(holds / 2)
}

/// Returns `amount` in nanoseconds of `rate`, and the remainder in billionths of a unit.
#[inline]
fn divide(amount: u64, rate: u64) -> (u64, u64) {
    match amount.checked_mul(SECOND) {
        Some(product) => (product / rate, product % rate),
        None => {
            let product = u128::from(amount) * u128::from(SECOND);
            // The result is at most 2^62 ns, which are 146 years.
            (
                u64::try_from(product / u128::from(rate)).unwrap_or(u64::MAX).min(1 << 62),
                (product % u128::from(rate)) as u64,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_opens_no_bucket_early() {
        let (rate, holds, largest) = (738_165_246, 10_000_000, 1_274_896);
        let left = u128::from(holds - slack(rate, holds, largest));
        assert!(left * u128::from(rate) >= u128::from(largest) * u128::from(SECOND));
    }

    #[test]
    fn a_bucket_that_was_replaced_is_not_charged() {
        let bucket = Bucket::default();
        bucket.succeed(&Bucket::default(), 1000, 10_000_000, 1, 0);
        assert_eq!(bucket.charge(5, 1, || Err("changed")), Err("changed"));
        assert_eq!(bucket.full.load(Acquire), 0);
        // The bucket changes between the load and the compare-and-exchange. The charge must apply
        // to the new value.
        let mut changed = [9_000_000, 3_000_000].into_iter();
        let changed = std::cell::RefCell::new(&mut changed);
        let change = || {
            changed
                .borrow_mut()
                .next()
                .into_iter()
                .for_each(|full| bucket.full.store(full, Release));
            Ok::<_, ()>(())
        };
        assert_eq!(bucket.charge(5, 1, change), Ok(Ok(())));
        assert_eq!(bucket.full.load(Acquire), 4_000_000);
    }

    /// A unit costs 333,333,333 1/3 nanoseconds.
    #[test]
    fn refunds_return_exactly_what_was_charged() {
        let bucket = Bucket::default();
        bucket.succeed(&Bucket::default(), 3, 10_000_000, 1, 0);
        (0..3).for_each(|_| bucket.force(0, 1));
        assert_eq!(bucket.full.load(Acquire), SECOND);
        (0..3).for_each(|_| bucket.refund(1));
        assert_eq!(bucket.full.load(Acquire), 0);
    }
}
