//! Whose turn it is at a limit that several wait for: the disks of a group; the reactors of a disk,
//! reads and writes.
//!
//! In: who passes, for how much of each limit; who was refused. Out: whether somebody may pass, or
//! others come first. Start-time fair queueing again: each has a tag for each limit, that goes on
//! by amount / (rate x weight); the lowest tag of those that wait comes first. What must hold: who
//! passes where nobody waits takes no lock; who waits for one limit holds nobody up at another.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::{Knobs, Time};

/// Who was refused and has not asked again for so long does not wait any more. More than anybody
/// sleeps who waits.
const PATIENCE: u64 = 40_000_000;
/// So far, in virtual time (nanoseconds of the rate, at the usual weight), one may be ahead of
/// another who waits, that they need not pass one by one; and so far behind, that nobody saves up
/// more.
const LEAD: u64 = 1_000_000;
/// The limits of a limiter.
const LIMITS: usize = 6;

/// One that waits for limits beside others.
#[derive(Debug)]
pub struct Flow {
    weight: AtomicU32,
    /// Virtual time at which what has passed ends, for each limit.
    tags: [AtomicU64; LIMITS],
    /// When it was refused last, if nothing of it has passed since; else 0.
    refused: [AtomicU64; LIMITS],
}

impl Flow {
    pub(crate) fn set_weight(&self, weight: u32) {
        self.weight.store(weight, Relaxed);
    }

    /// Virtual time for nanoseconds of the rate.
    fn step(&self, time: u64) -> u64 {
        let weight = u128::from(self.weight.load(Relaxed).max(1));
        (u128::from(time) * u128::from(Knobs::WEIGHT) / weight).clamp(1, 1 << 60) as u64
    }
}

#[derive(Debug, Default)]
pub(super) struct Flows {
    /// Virtual time of each limit: the most at which an operation has begun.
    times: [AtomicU64; LIMITS],
    /// When somebody was refused last.
    refused: [AtomicU64; LIMITS],
    all: Mutex<Vec<Weak<Flow>>>,
}

impl Flows {
    pub fn join(&self, weight: u32) -> Arc<Flow> {
        let (weight, tags, refused) =
            (AtomicU32::new(weight), Default::default(), Default::default());
        let flow = Arc::new(Flow { weight, tags, refused });
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|flow| flow.strong_count() > 0);
        all.push(Arc::downgrade(&flow));
        flow
    }

    /// Whether nobody waits for the limit who comes first.
    pub fn is_next(&self, limit: usize, now: Time, flow: &Flow) -> bool {
        let waits = |refused: &AtomicU64| now < refused.load(Relaxed).saturating_add(PATIENCE);
        if !waits(&self.refused[limit]) {
            return true;
        }
        let own = self.begins(limit, flow).saturating_sub(LEAD);
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).all(|other| {
            std::ptr::eq(&*other, flow)
                || !waits(&other.refused[limit])
                || own <= self.begins(limit, &other)
        })
    }

    /// Where its next operation begins, in virtual time.
    fn begins(&self, limit: usize, flow: &Flow) -> u64 {
        flow.tags[limit].load(Relaxed).max(self.times[limit].load(Relaxed).saturating_sub(LEAD))
    }

    pub fn refuse(&self, limit: usize, now: Time, flow: &Flow) {
        flow.refused[limit].store(now, Relaxed);
        self.refused[limit].fetch_max(now, Relaxed);
    }

    /// It does not wait for this limit.
    pub fn clear(&self, limit: usize, flow: &Flow) {
        if flow.refused[limit].load(Relaxed) > 0 {
            flow.refused[limit].store(0, Relaxed);
        }
    }

    /// It has passed, for so many nanoseconds of the rate.
    pub fn pass(&self, limit: usize, flow: &Flow, cost: u64) {
        let begins = self.begins(limit, flow);
        self.times[limit].fetch_max(begins, Relaxed);
        flow.tags[limit].store(begins.saturating_add(flow.step(cost)), Relaxed);
    }

    /// It has passed, and does not begin.
    pub fn refund(&self, limit: usize, flow: &Flow, cost: u64) {
        let step = flow.step(cost);
        let _ =
            flow.tags[limit].fetch_update(Relaxed, Relaxed, |tag| Some(tag.saturating_sub(step)));
    }
}
