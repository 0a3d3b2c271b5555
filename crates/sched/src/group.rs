//! Groups of disks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::Time;

use crate::knobs::Knobs;
use crate::limit::{Flow, Limiter, Owed};
use crate::reserve::Reserve;

/// A group of disks that share one weight, limits and reservation.
#[derive(Debug)]
pub struct Group {
    name: String,
    weight: AtomicU32,
    pub(crate) limiter: Limiter,
    /// What disks owe that are gone, and its flow in the limits.
    pub(crate) orphans: Owed,
    orphan_flow: Arc<Flow>,
    pub(crate) reserve: Reserve,
    /// Latency target of the group's disks, in nanoseconds. 0: no target.
    pub(crate) latency_target: AtomicU64,
}

impl Group {
    pub fn new(name: &str, knobs: &Knobs) -> Self {
        let (weight, latency_target) = Default::default();
        let limiter = Limiter::new(&knobs.limits);
        let (orphans, orphan_flow) = (Owed::default(), limiter.join(Knobs::WEIGHT));
        let group = Group {
            name: name.to_string(),
            weight,
            limiter,
            orphans,
            orphan_flow,
            reserve: Reserve::default(),
            latency_target,
        };
        group.set(knobs);
        group
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn set(&self, knobs: &Knobs) {
        self.weight.store(knobs.weight.clamp(1, Knobs::MAX_WEIGHT), Relaxed);
        self.limiter.set(&knobs.limits);
        self.reserve.set(knobs);
        self.latency_target.store(knobs.latency_target.map_or(0, |t| t.as_nanos() as u64), Relaxed);
    }

    /// Pays what disks owe that are gone, in turn with the others. The disks call this when they
    /// use the limits, because only then it counts.
    pub(crate) fn pay_orphans(&self, now: Time) {
        if !self.orphans.is_zero() {
            self.limiter.pay(now, Some(&self.orphan_flow), &self.orphans);
        }
    }

    pub(crate) fn weight(&self) -> u32 {
        self.weight.load(Relaxed)
    }
}
