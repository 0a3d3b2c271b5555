//! Fair order among several flows that wait for the same limits. A flow is a disk of a group, or
//! the reads or the writes of one reactor.
//!
//! In: operations that a limit admitted, with their amounts, and flows that a limit refused. Out:
//! whether a flow may proceed, or another flow comes first. The order is start-time fair queueing.
//! Each flow has a start tag for each limit. An operation advances the tag by amount / (rate x
//! weight). The waiting flow with the lowest tag comes first. What must hold: a flow that finds no
//! other waiting takes no lock. A flow that waits for one limit does not delay other flows at
//! another limit.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::LIMITS;
use crate::{Knobs, Time};

/// Time after a refusal, in nanoseconds, until a flow that has not retried no longer counts as
/// waiting. It is longer than any sleep of a waiting flow between two retries.
const WAIT_EXPIRES_NS: u64 = 40_000_000;
/// Largest lead of a flow over another waiting flow, in virtual nanoseconds at the default weight.
/// The lead lets flows proceed in batches. A flow also falls behind by at most this much, so that
/// an idle flow saves up no credit.
const MAX_LEAD_NS: u64 = 1_000_000;

/// A flow: a stream of operations that competes with others for the same limits.
#[derive(Debug)]
pub struct Flow {
    weight: AtomicU32,
    /// Start tag of the next operation, for each limit, in virtual nanoseconds.
    tags: [AtomicU64; LIMITS],
    /// Time of the last refusal, for each limit. 0 if the limit has admitted an operation since.
    refused: [AtomicU64; LIMITS],
}

impl Flow {
    pub(crate) fn set_weight(&self, weight: u32) {
        self.weight.store(weight, Relaxed);
    }

    /// Converts nanoseconds of the limit's rate to virtual time: divides them by the weight.
    fn virtual_cost(&self, time: u64) -> u64 {
        let weight = u128::from(self.weight.load(Relaxed).max(1));
        (u128::from(time) * u128::from(Knobs::WEIGHT) / weight).clamp(1, 1 << 60) as u64
    }
}

/// The flows that share a limiter.
#[derive(Debug, Default)]
pub(super) struct Flows {
    /// Virtual time of each limit: the highest start tag of an admitted operation.
    times: [AtomicU64; LIMITS],
    /// Time of the last refusal of any flow, for each limit.
    refused: [AtomicU64; LIMITS],
    all: Mutex<Vec<Weak<Flow>>>,
}

impl Flows {
    /// Adds a flow of this weight.
    pub fn join(&self, weight: u32) -> Arc<Flow> {
        let (weight, tags, refused) =
            (AtomicU32::new(weight), Default::default(), Default::default());
        let flow = Arc::new(Flow { weight, tags, refused });
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|flow| flow.strong_count() > 0);
        all.push(Arc::downgrade(&flow));
        flow
    }

    /// Returns whether no other flow that waits for the limit comes before this one.
    pub fn is_next(&self, limit: usize, now: Time, flow: &Flow) -> bool {
        let waits =
            |refused: &AtomicU64| now < refused.load(Relaxed).saturating_add(WAIT_EXPIRES_NS);
        if !waits(&self.refused[limit]) {
            return true;
        }
        let own = self.begins(limit, flow).saturating_sub(MAX_LEAD_NS);
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).all(|other| {
            std::ptr::eq(&*other, flow)
                || !waits(&other.refused[limit])
                || own <= self.begins(limit, &other)
        })
    }

    /// Returns the start tag of the flow's next operation.
    fn begins(&self, limit: usize, flow: &Flow) -> u64 {
        flow.tags[limit]
            .load(Relaxed)
            .max(self.times[limit].load(Relaxed).saturating_sub(MAX_LEAD_NS))
    }

    /// Records that a limit refused the flow, which now waits.
    pub fn refuse(&self, limit: usize, now: Time, flow: &Flow) {
        flow.refused[limit].store(now, Relaxed);
        self.refused[limit].fetch_max(now, Relaxed);
    }

    /// Records that the flow does not wait for this limit.
    pub fn clear(&self, limit: usize, flow: &Flow) {
        if flow.refused[limit].load(Relaxed) > 0 {
            flow.refused[limit].store(0, Relaxed);
        }
    }

    /// Advances the flow's start tag: the limit admitted an operation that costs `cost` nanoseconds
    /// of the rate.
    pub fn pass(&self, limit: usize, flow: &Flow, cost: u64) {
        let begins = self.begins(limit, flow);
        self.times[limit].fetch_max(begins, Relaxed);
        flow.tags[limit].store(begins.saturating_add(flow.virtual_cost(cost)), Relaxed);
    }

    /// Takes back what [`Flows::pass`] added, because the admitted operation does not begin.
    pub fn refund(&self, limit: usize, flow: &Flow, cost: u64) {
        let step = flow.virtual_cost(cost);
        let _ =
            flow.tags[limit].fetch_update(Relaxed, Relaxed, |tag| Some(tag.saturating_sub(step)));
    }
}
