//! One bucket of a limit: a rate, how much it holds, and when it will be full again.
//!
//! What must hold: it never gives more than it says, whoever asks at the same time; no fraction of
//! a nanosecond is lost.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::Time;

#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Units a second; 0: there is no such bucket.
    rate: AtomicU64,
    /// What it gives at once when it is full: nanoseconds of the rate.
    holds: AtomicU64,
    /// How long before it is full the next one may pass: so much less than it holds as the largest
    /// operation takes, for that is what the last one to pass may take too much. At least half: who
    /// asks late must find something.
    slack: AtomicU64,
    /// When it will be full again.
    pub full: AtomicU64,
    /// What charges were less than they should have been, all together: billionths of a unit, the
    /// sum of many.
    fraction: AtomicU64,
}

const SECOND: u64 = 1_000_000_000;

impl Bucket {
    #[inline]
    pub fn exists(&self) -> bool {
        self.rate.load(Acquire) > 0
    }

    /// When the next operation may pass, if nothing passes before.
    #[inline]
    pub fn opens(&self) -> Time {
        self.full.load(Acquire).saturating_sub(self.slack.load(Acquire))
    }

    /// Lets an operation pass that takes `amount`, or says when to ask again. `good` says whether
    /// the bucket may be used still; if not, nothing is done.
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
            // Behind all loads: who changes the bucket says so before, and then writes `full`.
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

    pub fn force(&self, now: Time, amount: u64) {
        let cost = self.cost(amount);
        let _ = self
            .full
            .fetch_update(AcqRel, Acquire, |full| Some(full.max(now).saturating_add(cost)));
    }

    pub fn refund(&self, amount: u64) {
        let cost = self.refunded(amount);
        let _ = self.full.fetch_update(AcqRel, Acquire, |full| Some(full.saturating_sub(cost)));
    }

    /// Nanoseconds of the rate, about.
    pub fn price(&self, amount: u64) -> u64 {
        divide(amount, self.rate.load(Acquire).max(1)).0
    }

    /// Nanoseconds of the rate, rounded so that the sum of all is right.
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

    /// There was an operation of this size.
    pub fn note_size(&self, amount: u64) {
        let (rate, holds) = (self.rate.load(Acquire), self.holds.load(Acquire));
        self.slack.fetch_min(slack(rate, holds, amount), AcqRel);
    }

    /// Becomes the successor of `old` with another shape: as full as that, and a debt lasts no
    /// longer than it did.
    pub fn succeed(&self, old: &Bucket, rate: u64, holds: u64, largest: u64, now: Time) {
        let (old_rate, old_holds) = (old.rate.load(Acquire), old.holds.load(Acquire));
        let full = if old_rate == 0 || rate == 0 {
            0
        } else {
            let missing = old.full.load(Acquire).saturating_sub(now);
            let debt = missing.saturating_sub(old_holds);
            let of_holds =
                u128::from(missing - debt) * u128::from(holds) / u128::from(old_holds.max(1));
            let of_debt = u128::from(debt) * u128::from(old_rate.min(rate)) / u128::from(rate);
            now.saturating_add(u64::try_from(of_holds + of_debt).unwrap_or(u64::MAX))
        };
        self.rate.store(rate, Release);
        self.holds.store(holds, Release);
        self.slack.store(slack(rate, holds, largest), Release);
        self.full.store(full, Release);
        self.fraction.store(0, Relaxed);
    }
}

fn slack(rate: u64, holds: u64, largest: u64) -> u64 {
    holds - divide(largest, rate.max(1)).0.min(holds / 2)
}

/// Nanoseconds of a rate, and what is left of a billion times the amount.
#[inline]
fn divide(amount: u64, rate: u64) -> (u64, u64) {
    match amount.checked_mul(SECOND) {
        Some(product) => (product / rate, product % rate),
        None => {
            let product = u128::from(amount) * u128::from(SECOND);
            // Nobody lives to see more.
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
    fn what_is_used_no_longer_is_not_charged() {
        let bucket = Bucket::default();
        bucket.succeed(&Bucket::default(), 1000, 10_000_000, 1, 0);
        assert_eq!(bucket.charge(5, 1, || Err("changed")), Err("changed"));
        assert_eq!(bucket.full.load(Acquire), 0);
        // Changed between the look and the charge: the charge is to what is there now.
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
}
