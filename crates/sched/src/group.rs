//! Groups of disks.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::knobs::Knobs;
use crate::limit::Limiter;
use crate::reserve::Reserve;

/// A group of disks that share one weight, limits and reservation.
#[derive(Debug)]
pub struct Group {
    name: String,
    weight: AtomicU32,
    pub(crate) limiter: Limiter,
    pub(crate) reserve: Reserve,
    /// Latency target of the group's disks, in nanoseconds. 0: no target.
    pub(crate) latency_target: AtomicU64,
}

impl Group {
    pub fn new(name: &str, knobs: &Knobs) -> Self {
        let (weight, latency_target) = Default::default();
        let limiter = Limiter::new(&knobs.limits);
        let group = Group {
            name: name.to_string(),
            weight,
            limiter,
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

    pub(crate) fn weight(&self) -> u32 {
        self.weight.load(Relaxed)
    }
}
