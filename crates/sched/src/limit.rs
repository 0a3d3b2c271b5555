//! Limits: rates that are never exceeded, and what may pass at once after a time of less.
//!
//! In: operations, and when. Out: "begin", or when to ask again. Any thread asks, at the same time
//! as others; nobody waits for anybody, and who asks late loses nothing while he is less than half
//! of what a bucket holds late.
//!
//! A limit is a bucket that holds 10 ms of its rate; one with a burst is such a bucket of `max`,
//! and one of `rate` that holds the burst, `(max - rate) * length`. A bucket is a time: when it
//! will be full again if nothing more passes (the virtual scheduling algorithm of ITU-T I.371).
//! What must hold:
//!
//! - Of a bucket of rate R that holds H passes, over any time T, at most `R * T + H`; with requests
//!   larger than half of H at most half of H and one request more than `R * T`. While somebody
//!   always asks it is `R * T`, to the last request, for ever: fractions of a nanosecond are kept.
//! - Whether an operation may begin does not depend on its size: small ones on another reactor
//!   starve no large one. So the last one to pass may leave a debt, however large it is, and the
//!   next one waits for it.
//! - All limits are charged, or none.
//! - Of several that wait each has its part in turn ([`Flow`]).

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::{Limit, Limits, Operation, OperationKind, Time};

mod bucket;
mod flows;

use bucket::Bucket;
pub use flows::Flow;
use flows::Flows;

/// The limits of a disk, or of a group, and how far they are used up.
#[derive(Debug)]
pub struct Limiter {
    limited: AtomicBool,
    /// Counts the changes; what holds now is `generations[changes % 2]`.
    changes: AtomicU64,
    generations: [[Meter; 6]; 2],
    /// The last time that somebody asked: changes are reckoned from it.
    asked: AtomicU64,
    flows: Flows,
    /// What was set last. Held by those who change, never by those who ask.
    set: Mutex<Limits>,
}

/// One limit: of operations or bytes, of reads, writes or both.
#[derive(Debug, Default)]
struct Meter {
    /// The most that one operation has taken: see [`Bucket::slack`].
    largest: AtomicU64,
    /// The one of 10 ms, and that of the burst.
    buckets: [Bucket; 2],
}

/// What holds for requests that are under way was changed: they look anew.
struct Changed;

impl Limiter {
    pub fn new(limits: &Limits) -> Self {
        let (limited, changes, generations, asked, flows, set) = Default::default();
        let new = Limiter { limited, changes, generations, asked, flows, set };
        new.set(limits);
        new
    }

    /// Whether nothing is limited: then all else here may be left out.
    #[inline]
    pub fn is_unlimited(&self) -> bool {
        !self.limited.load(Relaxed)
    }

    /// Changes the limits, at any time and any number of times. What is the same goes on as it was;
    /// of the rest each bucket is as full as before, and a debt is paid at the new rate where that
    /// is the faster one. Those who were told to ask later should ask now.
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

    /// One that waits for these limits beside others, who are to have as much of them as it has, in
    /// proportion to weights.
    pub fn join(&self, weight: u32) -> Arc<Flow> {
        self.flows.join(weight)
    }

    /// Lets an operation begin and charges it; or says when to ask again, and charges nothing. With
    /// a turn, that may be at once: others come first.
    pub fn take(&self, now: Time, operation: &Operation, flow: Option<&Flow>) -> Result<(), Time> {
        if self.is_unlimited() {
            return Ok(());
        }
        self.note_time(now);
        let amounts = amounts(operation);
        loop {
            if let Ok(answer) = self.try_take(now, &amounts, flow) {
                return answer;
            }
        }
    }

    fn try_take(
        &self,
        now: Time,
        amounts: &[u64; 6],
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
            // Another reactor was quicker.
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

    /// Charges an operation that cannot wait. Returns when its limits would let the next one begin.
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

    /// Returns when all limits let an operation begin, if nothing passes before.
    pub fn opens(&self) -> Time {
        let meters = self.generation(self.changes.load(Acquire));
        meters.iter().flat_map(Meter::existing).map(Bucket::opens).max().unwrap_or(0)
    }

    /// Nanoseconds that an operation takes up of the limit that it uses most of.
    pub fn cost_ns(&self, operation: &Operation) -> u64 {
        if self.is_unlimited() {
            return 0;
        }
        let prices = |(bucket, amount): (&Bucket, u64)| bucket.price(amount);
        let meters = self.generation(self.changes.load(Acquire));
        buckets(meters, &amounts(operation)).map(prices).max().unwrap_or(0)
    }

    /// Takes back a charge: the operation does not begin, for another reason than these limits.
    pub fn refund(&self, operation: &Operation, flow: Option<&Flow>) {
        if self.is_unlimited() {
            return;
        }
        let (meters, amounts) = (self.generation(self.changes.load(Acquire)), amounts(operation));
        buckets(meters, &amounts).for_each(|(bucket, amount)| bucket.refund(amount));
        if let Some(flow) = flow {
            let refund = |(limit, meter, amount): (_, &Meter, _)| {
                self.flows.refund(limit, flow, meter.price(amount))
            };
            counted(meters, &amounts).for_each(refund);
        }
    }

    fn generation(&self, change: u64) -> &[Meter; 6] {
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
    /// Becomes what `old` was, under a limit that may be another.
    fn succeed(&self, old: &Meter, limit: Option<Limit>, now: Time) {
        let largest = old.largest.load(Acquire).max(1);
        self.largest.store(largest, Release);
        for (i, (bucket, old)) in self.buckets.iter().zip(&old.buckets).enumerate() {
            let (rate, holds) = limit.map_or((0, 0), |limit| shape(&limit, i));
            bucket.succeed(old, rate, holds, largest, now);
        }
    }

    #[inline]
    fn existing(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().filter(|bucket| bucket.exists())
    }

    /// Nanoseconds of the rate, or of `max`.
    fn price(&self, amount: u64) -> u64 {
        self.buckets[0].price(amount)
    }

    /// Buckets are given some slack, that depends on the largest operation.
    #[inline]
    fn note_size(&self, amount: u64) {
        if self.largest.load(Relaxed) < amount {
            self.largest.fetch_max(amount, AcqRel);
            self.buckets.iter().for_each(|bucket| bucket.note_size(amount));
        }
    }
}

/// Rate and contents, in nanoseconds of the rate, of one of a limit's buckets; a rate of 0 is no
/// bucket.
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

fn all(limits: &Limits) -> [Option<Limit>; 6] {
    [
        limits.iops,
        limits.iops_read,
        limits.iops_write,
        limits.bps,
        limits.bps_read,
        limits.bps_write,
    ]
}

/// What an operation takes of each limit, in the order of [`all`]. A discard is a write that moves
/// no bytes; a flush is neither read nor write.
#[inline]
fn amounts(operation: &Operation) -> [u64; 6] {
    let (requests, bytes) = (u64::from(operation.requests.max(1)), operation.bytes);
    match operation.kind {
        OperationKind::Read => [requests, requests, 0, bytes, bytes, 0],
        OperationKind::Write | OperationKind::WriteZeroes => {
            [requests, 0, requests, bytes, 0, bytes]
        }
        OperationKind::Discard => [requests, 0, requests, 0, 0, 0],
        OperationKind::Flush => [0; 6],
    }
}

/// The limits that count for an operation, and how much of each it takes.
#[inline]
fn counted<'a>(
    meters: &'a [Meter; 6],
    amounts: &'a [u64; 6],
) -> impl Iterator<Item = (usize, &'a Meter, u64)> {
    let all = meters
        .iter()
        .zip(amounts)
        .enumerate()
        .map(|(limit, (meter, amount))| (limit, meter, *amount));
    all.filter(|(_, meter, amount)| *amount > 0 && meter.buckets[0].exists())
}

/// Their buckets.
#[inline]
fn buckets<'a>(
    meters: &'a [Meter; 6],
    amounts: &'a [u64; 6],
) -> impl Iterator<Item = (&'a Bucket, u64)> {
    counted(meters, amounts)
        .flat_map(|(_, meter, amount)| meter.existing().map(move |bucket| (bucket, amount)))
}

#[cfg(test)]
mod tests;
