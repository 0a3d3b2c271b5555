//! The guest memory of one front end in a ring's table of registered buffers.
//!
//! In: the regions of the memory. Out: operations on them that need not pin their pages
//! ([`crate::mem::buffers`]).
//!
//! What must hold: to pin or unpin a buffer takes the thread milliseconds, so a [`Registration`]
//! does one buffer in a step. A region is found only when it is registered as a whole.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::mem::buffers::{Outcome, Partial};
use crate::mem::memory::{GuestMemory, Region};
use crate::tasks::executor::Handle;

/// Guest memory that stays registered with a reactor's ring until this is dropped. A drop does all
/// remaining steps at once.
pub struct Registration {
    handle: Handle,
    /// The regions that are registered, or were refused.
    regions: Vec<Arc<Region>>,
    /// The region that is being registered.
    partial: Option<Partial>,
    /// The regions to register next.
    waiting: VecDeque<Arc<Region>>,
}

impl Registration {
    /// Creates a registration without memory.
    pub fn new(handle: &Handle) -> Self {
        let (regions, partial, waiting) = Default::default();
        Registration { handle: handle.clone(), regions, partial, waiting }
    }

    /// Replaces the memory. Operations no longer find the regions that are gone, and find the new
    /// ones after the steps that register them.
    pub fn set(&mut self, memory: &GuestMemory) {
        let new = memory.regions();
        self.handle.buffers(|buffers, _| {
            self.regions.retain(|region| {
                let stays = has(new, region);
                if !stays {
                    buffers.leave(region);
                }
                stays
            });
            if let Some(gone) = self.partial.take_if(|partial| !has(new, &partial.region)) {
                buffers.abandon(gone.buffers);
            }
        });
        let partial = self.partial.as_ref().map(|partial| &partial.region);
        let begun = |region: &Arc<Region>| partial.is_some_and(|r| Arc::ptr_eq(r, region));
        let is_new = |region: &Arc<Region>| !has(&self.regions, region) && !begun(region);
        self.waiting = new.iter().filter(|region| is_new(region)).cloned().collect();
    }

    /// Returns whether all regions are registered, or were refused.
    pub fn is_settled(&self) -> bool {
        self.partial.is_none() && self.waiting.is_empty()
    }

    /// Returns whether [`Registration::step`] has something to do.
    pub fn has_work(&self) -> bool {
        !self.is_settled() || self.handle.buffers(|buffers, _| buffers.has_clearable())
    }

    /// Clears one buffer that is no longer used, or registers one. A region is registered as a
    /// whole, or not at all. Returns false if there was nothing to do.
    pub fn step(&mut self) -> bool {
        self.handle.buffers(|buffers, submitter| {
            // Clear first, because the limit on pinned memory may not suffice for the old and the
            // new regions together.
            if buffers.clear_one(submitter) {
                return true;
            }
            let next = || self.waiting.pop_front().map(Partial::new);
            let Some(mut partial) = self.partial.take().or_else(next) else { return false };
            if buffers.join(&partial.region) {
                buffers.abandon(partial.buffers);
                self.regions.push(partial.region);
                return true;
            }
            match buffers.advance(submitter, &mut partial) {
                Ok(false) => self.partial = Some(partial),
                outcome => {
                    self.regions.push(partial.region.clone());
                    buffers.settle(partial, outcome.map(|_| ()));
                }
            }
            true
        })
    }

    /// Returns which regions are registered, and why others are not.
    pub fn outcome(&self) -> Outcome {
        self.handle.buffers(|buffers, _| buffers.outcome(&self.regions))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.set(&GuestMemory::default());
        while self.step() {}
    }
}

fn has(regions: &[Arc<Region>], region: &Arc<Region>) -> bool {
    regions.iter().any(|r| Arc::ptr_eq(r, region))
}
