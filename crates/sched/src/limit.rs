//! Limits: rates that are never exceeded, and the burst that may follow a time of lower use.
//!
//! In: operations and the current time. Out: "begin", or the time to retry. Any thread may call at
//! any time. No call blocks. A caller that retries late loses no tokens, up to half of the bucket's
//! size.
//!
//! A limit without a burst is one token bucket of 10 ms of its rate. A limit with a burst is such a
//! bucket of `max`, and a bucket of `rate` that holds the burst, `(max - rate) * length`. A bucket
//! is stored as the time when it is full again if nothing more is admitted (the virtual scheduling
//! algorithm of ITU-T I.371). What must hold:
//!
//! - A bucket of rate R and size H admits at most `R * T + H` in any time T. With operations larger
//!   than half of H it admits at most `R * T`, half of H and one operation. A caller that always
//!   has work receives exactly `R * T`: fractions of a nanosecond are carried over.
//! - Whether an operation may begin does not depend on its size. If it did, small operations of
//!   another reactor would starve large ones. So the last admitted operation may leave a debt of
//!   any size, and the next one waits until it is paid.
//! - Either all limits of an operation are charged, or none.
//! - Several flows that wait for the same limits share them by weight ([`Flow`]).
//! - An operation of one disk of a group delays the others by at most [`PART_NS`]. The disk owes
//!   the rest, and begins nothing that uses the limit before that is paid ([`Owed`]).

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::carried::{LimiterState, MAX_DEBT_NS, MeterState};
use crate::{Limit, Limits, Operation, OperationKind, Time};

mod bucket;
mod flows;
mod owed;

use bucket::Bucket;
pub use flows::Flow;
use flows::Flows;
pub use owed::Owed;

/// Number of limits of a limiter.
const LIMITS: usize = 6;
/// Largest part of an operation that a group's limits are charged at once, in nanoseconds of their
/// rate.
const PART_NS: u64 = 50_000_000;
/// What a disk pays at a time of what it owes to its group. Another disk that sends one small
/// operation at a time waits that long for each.
const SLICE_NS: u64 = 2_000_000;
/// Largest number of slices that a disk pays at a time, while a burst allows them.
const MOST_SLICES: u32 = 64;
/// Shortest time between two attempts to pay.
const RETRY_NS: u64 = 1_000_000;

/// The limits of a disk or of a group, and their token buckets.
#[derive(Debug)]
pub struct Limiter {
    limited: AtomicBool,
    /// Number of changes so far. The current limits are `generations[changes % 2]`.
    changes: AtomicU64,
    generations: [[Meter; LIMITS]; 2],
    /// Time of the latest call. A change of the limits takes effect from this time.
    asked: AtomicU64,
    flows: Flows,
    /// The limits that were set last. Only changes take this lock; admissions do not.
    set: Mutex<Limits>,
}

/// One limit: of operations or of bytes; of reads, of writes or of both.
#[derive(Debug, Default)]
struct Meter {
    /// Largest amount of one operation so far, which sets [`Bucket::slack`].
    largest: AtomicU64,
    /// The bucket that holds 10 ms of the rate, and the bucket that holds the burst.
    buckets: [Bucket; 2],
}

/// Error: the limits changed during the call. Retry with the new ones.
struct Changed;

impl Limiter {
    pub fn new(limits: &Limits) -> Self {
        let (limited, changes, generations, asked, flows, set) = Default::default();
        let new = Limiter { limited, changes, generations, asked, flows, set };
        new.set(limits);
        new
    }

    /// Returns whether no limit is set. Then the other methods need not be called.
    #[inline]
    pub fn is_unlimited(&self) -> bool {
        !self.limited.load(Relaxed)
    }

    /// Changes the limits. May be called at any time. A limit that stays the same keeps its state.
    /// Each other bucket keeps its fill level in proportion, and a debt is paid at the new rate if
    /// that is faster. Callers that wait for a time to retry should retry now.
    pub fn set(&self, limits: &Limits) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        if *set == *limits {
            return;
        }
        let (change, asked) = (self.changes.load(Relaxed), self.asked.load(Relaxed));
        let (old, new) = (self.generation(change), self.generation(change + 1));
        for ((new, old), limit) in new.iter().zip(old).zip(all(limits)) {
            new.succeed(old, limit, asked);
        }
        self.changes.store(change + 1, Release);
        self.limited.store(*limits != Limits::default(), Release);
        *set = limits.clone();
    }

    /// Adds a flow. Flows that wait for these limits share them in proportion to their weights.
    pub fn join(&self, weight: u32) -> Arc<Flow> {
        self.flows.join(weight)
    }

    /// Admits an operation and charges all its limits, or charges nothing and returns the time to
    /// retry. With a flow the time to retry may be `now`, because another flow comes first.
    pub fn take(&self, now: Time, operation: &Operation, flow: Option<&Flow>) -> Result<(), Time> {
        self.take_amounts(now, &amounts(operation), flow)
    }

    /// Like [`Limiter::take`] for a disk of a group: charges [`PART_NS`] of the operation at most,
    /// and adds the rest to what the disk owes.
    pub fn take_part(
        &self,
        now: Time,
        operation: &Operation,
        flow: Option<&Flow>,
        owed: &Owed,
    ) -> Result<(), Time> {
        if self.is_unlimited() {
            return Ok(());
        }
        let (amounts, most) = (amounts(operation), self.worth(PART_NS));
        let part = std::array::from_fn(|limit| amounts[limit].min(most[limit]));
        self.take_amounts(now, &part, flow)?;
        (0..LIMITS).for_each(|limit| owed.add_to(limit, amounts[limit] - part[limit]));
        Ok(())
    }

    /// Adds an operation that a drain admits to what the disk owes.
    pub fn owe(&self, operation: &Operation, owed: &Owed) {
        if !self.is_unlimited() {
            let meters = self.generation(self.changes.load(Acquire));
            let amounts = amounts(operation);
            counted(meters, &amounts).for_each(|(limit, _, amount)| owed.force_to(limit, amount));
        }
    }

    /// Adds what a disk owed to these limits at another server, by their names. Limits that only
    /// one of both has are left out.
    pub(crate) fn continue_owed(&self, state: &BTreeMap<String, u64>, owed: &Owed) {
        let (meters, most) = (self.generation(self.changes.load(Acquire)), self.worth(MAX_DEBT_NS));
        for (limit, name) in NAMES.iter().enumerate() {
            if let Some(amount) = state.get(*name).filter(|_| meters[limit].buckets[0].exists()) {
                owed.add_to(limit, (*amount).min(most[limit]));
            }
        }
    }

    /// Returns whether the disk owes something to a limit that the operation uses. Then the
    /// operation must wait.
    #[inline]
    pub fn is_owed(operation: &Operation, owed: &Owed) -> bool {
        !owed.is_zero() && owed.has(&amounts(operation))
    }

    /// Pays what a disk owes, as far as its turn at each limit allows. Returns the time to call
    /// this again, or `None` if all is paid.
    pub fn pay(&self, now: Time, flow: Option<&Flow>, owed: &Owed) -> Option<Time> {
        // Each limit by itself: a disk that waits for one must not lose its turn at another one.
        let next = (0..LIMITS).filter_map(|limit| self.pay_limit(limit, now, flow, owed));
        next.min()
    }

    fn pay_limit(&self, limit: usize, now: Time, flow: Option<&Flow>, owed: &Owed) -> Option<Time> {
        for _ in 0..MOST_SLICES {
            let slice = owed.of(limit).min(self.worth(SLICE_NS)[limit]);
            if slice == 0 {
                return None;
            }
            let mut amounts = [0; LIMITS];
            amounts[limit] = slice;
            if let Err(opens) = self.take_amounts(now, &amounts, flow) {
                return Some(opens.max(now + RETRY_NS));
            }
            // Another thread may have paid the same.
            amounts[limit] -= owed.remove_from(limit, slice);
            self.refund_amounts(&amounts, flow);
        }
        Some(now + RETRY_NS)
    }

    /// Returns how much each limit admits in a time, without a burst. `u64::MAX`: the limit is not
    /// set.
    fn worth(&self, time_ns: u64) -> [u64; LIMITS] {
        let meters = self.generation(self.changes.load(Acquire));
        std::array::from_fn(|limit| {
            let worth = meters[limit].existing().map(|bucket| bucket.worth(time_ns));
            worth.min().unwrap_or(u64::MAX)
        })
    }

    fn take_amounts(
        &self,
        now: Time,
        amounts: &[u64; LIMITS],
        flow: Option<&Flow>,
    ) -> Result<(), Time> {
        if self.is_unlimited() {
            return Ok(());
        }
        self.note_time(now);
        loop {
            if let Ok(answer) = self.try_take(now, amounts, flow) {
                return answer;
            }
        }
    }

    fn try_take(
        &self,
        now: Time,
        amounts: &[u64; LIMITS],
        flow: Option<&Flow>,
    ) -> Result<Result<(), Time>, Changed> {
        let change = self.changes.load(Acquire);
        let meters = self.generation(change);
        let (mut opens, mut refused) = (now, false);
        for (limit, meter, amount) in counted(meters, amounts) {
            meter.note_size(amount);
            let at = meter.existing().map(Bucket::opens).max().unwrap_or(0);
            let next = flow.is_none_or(|flow| self.flows.is_next(limit, now, flow));
            let waits = at > now || !next;
            (opens, refused) = (opens.max(at), refused || waits);
            match flow {
                Some(flow) if waits => self.flows.refuse(limit, now, flow),
                Some(flow) => self.flows.clear(limit, flow),
                None => {}
            }
        }
        if refused {
            return self.still(change).map(|()| Err(opens));
        }
        for (charged, (bucket, amount)) in buckets(meters, amounts).enumerate() {
            // Another reactor has charged this bucket since the check.
            if let Err(opens) = bucket.charge(now, amount, || self.still(change))? {
                buckets(meters, amounts)
                    .take(charged)
                    .for_each(|(bucket, amount)| bucket.refund(amount));
                return Ok(Err(opens));
            }
        }
        if let Some(flow) = flow {
            counted(meters, amounts).for_each(|(limit, meter, amount)| {
                self.flows.pass(limit, flow, meter.price(amount))
            });
        }
        Ok(Ok(()))
    }

    /// Charges an operation that cannot wait. Returns when the limits would admit the next one.
    pub fn force(&self, now: Time, operation: &Operation) -> Time {
        if self.is_unlimited() {
            return 0;
        }
        self.note_time(now);
        let amounts = amounts(operation);
        let charged = buckets(self.generation(self.changes.load(Acquire)), &amounts).map(
            |(bucket, amount)| {
                bucket.force(now, amount);
                bucket.opens()
            },
        );
        charged.max().unwrap_or(0)
    }

    /// Returns the time from which all limits admit an operation, if no other operation is admitted
    /// before.
    pub fn opens(&self) -> Time {
        let meters = self.generation(self.changes.load(Acquire));
        meters.iter().flat_map(Meter::existing).map(Bucket::opens).max().unwrap_or(0)
    }

    /// Returns the cost of an operation in nanoseconds of the limit that it uses most of.
    pub fn cost_ns(&self, operation: &Operation) -> u64 {
        if self.is_unlimited() {
            return 0;
        }
        let prices = |(bucket, amount): (&Bucket, u64)| bucket.price(amount);
        let meters = self.generation(self.changes.load(Acquire));
        buckets(meters, &amounts(operation)).map(prices).max().unwrap_or(0)
    }

    /// Refunds a charge, because the operation does not begin. The reason lies outside these
    /// limits.
    pub fn refund(&self, operation: &Operation, flow: Option<&Flow>) {
        self.refund_part(operation, flow, |_, _| 0);
    }

    /// Like [`Limiter::refund`] for a disk of a group. `reduce` reduces what the disk owes to a
    /// limit by at most an amount, and returns by how much.
    pub fn refund_part(
        &self,
        operation: &Operation,
        flow: Option<&Flow>,
        reduce: impl Fn(usize, u64) -> u64,
    ) {
        if self.is_unlimited() {
            return;
        }
        let mut amounts = amounts(operation);
        for (limit, amount) in amounts.iter_mut().enumerate() {
            *amount -= reduce(limit, *amount);
        }
        self.refund_amounts(&amounts, flow);
    }

    fn refund_amounts(&self, amounts: &[u64; LIMITS], flow: Option<&Flow>) {
        let meters = self.generation(self.changes.load(Acquire));
        buckets(meters, amounts).for_each(|(bucket, amount)| bucket.refund(amount));
        if let Some(flow) = flow {
            let refund = |(limit, meter, amount): (_, &Meter, _)| {
                self.flows.refund(limit, flow, meter.price(amount))
            };
            counted(meters, amounts).for_each(refund);
        }
    }

    /// Moves the state of the limits to the next server. The buckets are full afterwards.
    pub(crate) fn hand_over(&self, now: Time) -> LimiterState {
        // No change of the limits meanwhile.
        let _set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let meters = self.generation(self.changes.load(Acquire)).iter().zip(NAMES);
        let existing = meters.filter(|(meter, _)| meter.buckets[0].exists());
        LimiterState(existing.map(|(meter, name)| (name.into(), meter.hand_over(now))).collect())
    }

    /// Adds the state of another server's limits. Limits that only one of both has are left out.
    pub(crate) fn continue_from(&self, now: Time, state: &LimiterState) {
        let _set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        for (meter, name) in self.generation(self.changes.load(Acquire)).iter().zip(NAMES) {
            if let Some(state) = state.0.get(name).filter(|_| meter.buckets[0].exists()) {
                meter.buckets[0].continue_from(now, &state.short);
                meter.buckets[1].continue_from(now, &state.burst);
            }
        }
    }

    fn generation(&self, change: u64) -> &[Meter; LIMITS] {
        &self.generations[(change % 2) as usize]
    }

    fn still(&self, change: u64) -> Result<(), Changed> {
        if self.changes.load(Acquire) == change { Ok(()) } else { Err(Changed) }
    }

    fn note_time(&self, now: Time) {
        if self.asked.load(Relaxed) < now {
            self.asked.store(now, Relaxed);
        }
    }
}

impl Meter {
    /// Takes over the state of `old` under `limit`.
    fn succeed(&self, old: &Meter, limit: Option<Limit>, now: Time) {
        let largest = old.largest.load(Acquire).max(1);
        self.largest.store(largest, Release);
        for (i, (bucket, old)) in self.buckets.iter().zip(&old.buckets).enumerate() {
            let (rate, holds) = limit.map_or((0, 0), |limit| shape(&limit, i));
            bucket.succeed(old, rate, holds, largest, now);
        }
    }

    fn hand_over(&self, now: Time) -> MeterState {
        let [short, burst] = self.buckets.each_ref().map(|bucket| bucket.hand_over(now));
        MeterState { short, burst }
    }

    #[inline]
    fn existing(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().filter(|bucket| bucket.exists())
    }

    /// Returns the cost of `amount` in nanoseconds of the limit's `max`, or of its `rate` if the
    /// limit has no `max`.
    fn price(&self, amount: u64) -> u64 {
        self.buckets[0].price(amount)
    }

    /// Records the size of an operation: the buckets' slack depends on the largest one.
    #[inline]
    fn note_size(&self, amount: u64) {
        if self.largest.load(Relaxed) < amount {
            self.largest.fetch_max(amount, AcqRel);
            self.buckets.iter().for_each(|bucket| bucket.note_size(amount));
        }
    }
}

/// Returns the rate of one of a limit's two buckets, and its size in nanoseconds of the rate. Rate
/// 0: the limit does not use that bucket.
fn shape(limit: &Limit, which: usize) -> (u64, u64) {
    const HOLDS: u64 = Duration::from_millis(10).as_nanos() as u64;
    let rate = limit.rate.max(1);
    match (which, limit.max) {
        (0, max) => (max.unwrap_or(rate), HOLDS),
        (_, None) => (0, 0),
        (_, Some(max)) => {
            let burst =
                u128::from(max.saturating_sub(rate)) * limit.length.as_nanos() / u128::from(rate);
            (rate, u64::try_from(burst).unwrap_or(u64::MAX).clamp(HOLDS, 1 << 62))
        }
    }
}

/// Names of the limits in [`LimiterState`], in the order of [`all`].
const NAMES: [&str; LIMITS] = ["iops", "iops-read", "iops-write", "bps", "bps-read", "bps-write"];

fn all(limits: &Limits) -> [Option<Limit>; LIMITS] {
    [
        limits.iops,
        limits.iops_read,
        limits.iops_write,
        limits.bps,
        limits.bps_read,
        limits.bps_write,
    ]
}

/// Returns the amount that an operation takes of each limit, in the order of [`all`]. A discard
/// counts as a write of no bytes. A flush counts as neither read nor write.
#[inline]
fn amounts(operation: &Operation) -> [u64; LIMITS] {
    let (requests, bytes) = (u64::from(operation.requests.max(1)), operation.bytes);
    match operation.kind {
        OperationKind::Read => [requests, requests, 0, bytes, bytes, 0],
        OperationKind::Write | OperationKind::WriteZeroes => {
            [requests, 0, requests, bytes, 0, bytes]
        }
        OperationKind::Discard => [requests, 0, requests, 0, 0, 0],
        OperationKind::Flush => [0; LIMITS],
    }
}

/// Returns the limits that apply to an operation: index, meter and amount.
#[inline]
fn counted<'a>(
    meters: &'a [Meter; LIMITS],
    amounts: &'a [u64; LIMITS],
) -> impl Iterator<Item = (usize, &'a Meter, u64)> {
    let all = meters
        .iter()
        .zip(amounts)
        .enumerate()
        .map(|(limit, (meter, amount))| (limit, meter, *amount));
    all.filter(|(_, meter, amount)| *amount > 0 && meter.buckets[0].exists())
}

/// Returns the buckets of the limits that apply to an operation, each with its amount.
#[inline]
fn buckets<'a>(
    meters: &'a [Meter; LIMITS],
    amounts: &'a [u64; LIMITS],
) -> impl Iterator<Item = (&'a Bucket, u64)> {
    counted(meters, amounts)
        .flat_map(|(_, meter, amount)| meter.existing().map(move |bucket| (bucket, amount)))
}

#[cfg(test)]
mod tests;
