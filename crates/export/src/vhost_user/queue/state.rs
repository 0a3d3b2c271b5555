//! The state of a queue that each request changes: the ring, the in-flight region, and the chains
//! that are taken and not answered.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_disk::Failure;
use blockyard_ring::{GuestMemory, MemoryAlarm, Segments};

use super::QueueSetup;
use super::marks::Marks;
use crate::policy::Counters;
use crate::policy::placement::Placement;
use crate::policy::polling::PollingPolicy;
use crate::vhost_user::inflight::{Inflight, PackedChain};
use crate::vhost_user::notify::Call;
use crate::vhost_user::virtqueue::{
    DESC_LEN, Desc, Head, PackedRing, Part, Ring, RingError, SplitRing, Written,
};

/// A chain that is taken and not answered.
#[derive(Clone, Copy, Default)]
pub(super) struct Pending {
    /// Number of the chain's requests that are not answered yet. 0: no chain has this id.
    pub(super) parts: u32,
    pub(super) failed: Option<Failure>,
    /// A request of the chain was withdrawn. The chain stays in the in-flight region.
    pub(super) withdrawn: bool,
    pub(super) count: u16,
    /// Bytes that the device writes into the chain's buffers if no request fails.
    pub(super) written: u32,
    pub(super) status: u64,
    /// The device writes to the chain's segments: a read, or GET_ID.
    pub(super) fills: bool,
    /// The chain's entry in the in-flight region.
    pub(super) entry: u16,
}

/// The state of a queue that each request changes.
pub(super) struct Core {
    pub(super) ring: Ring,
    pub(super) memory: Rc<GuestMemory>,
    /// What the queue marks for live migration.
    pub(super) marks: Option<Box<Marks>>,
    /// Guest address of the ring's descriptors.
    pub(super) descriptors: u64,
    pub(super) inflight: Option<Inflight>,
    pub(super) descs: Vec<Desc>,
    pub(super) pending: Vec<Pending>,
    pub(super) pool: Vec<Segments>,
    pub(super) call: Call,
    pub(super) polling: PollingPolicy,
    pub(super) placement: Placement,
    pub(super) counters: Rc<Counters>,
    pub(super) error: Option<OwnedFd>,
    /// Number of used elements that are pushed and not published.
    pub(super) unpublished: u32,
    pub(super) broken: bool,
    alarm: Option<Arc<MemoryAlarm>>,
}

/// A chain that the previous back end left unanswered.
pub(super) enum Unanswered {
    Split(u16),
    Packed(PackedChain),
}

impl Unanswered {
    /// Returns the chain's entry in the in-flight region.
    pub(super) fn entry(&self) -> u16 {
        match self {
            Unanswered::Split(head) => *head,
            Unanswered::Packed(chain) => chain.entry,
        }
    }
}

impl Core {
    /// Sets up the ring, and returns the chains that the previous back end left unanswered.
    pub(super) fn new(
        setup: &mut QueueSetup,
        placement: Placement,
        now: Instant,
        counters: Rc<Counters>,
    ) -> Result<(Core, Vec<Unanswered>), RingError> {
        let memory = Rc::new(setup.memory.clone());
        let region = setup.inflight.as_ref().map(|region| region.queue(setup.index, setup.packed));
        let mut inflight = region.transpose()?.flatten();
        if let Some(noted) = &mut inflight {
            if u32::from(noted.size()) < setup.size {
                return Err(RingError::Inflight { ring: setup.size, region: noted.size() });
            }
            if setup.is_base_valid {
                noted.format_if_idle();
            }
        }
        let (ring, unanswered) = if setup.packed {
            Self::packed(setup, &memory, &mut inflight)?
        } else {
            Self::split(setup, &memory, &mut inflight)?
        };
        let call = std::mem::replace(&mut setup.call, Call::None);
        let mut polling =
            PollingPolicy::new(setup.poll, placement.can_move(), now, counters.clone());
        polling.set_notified_by_stream(call.is_stream());
        let core = Core {
            pending: vec![Pending::default(); usize::from(ring.size())],
            ring,
            memory,
            marks: setup.marks.take().map(Box::new),
            descriptors: setup.parts.0,
            inflight,
            descs: Vec::new(),
            pool: Vec::new(),
            call,
            polling,
            placement,
            counters,
            error: setup.error.take(),
            unpublished: 0,
            broken: false,
            alarm: setup.alarm.take(),
        };
        // The recovery of a packed ring may have written to any of its descriptors.
        if setup.packed && !unanswered.is_empty() {
            let len = usize::from(core.ring.size()) * DESC_LEN;
            core.mark_ring(Some(Written { part: Part::Descriptors, offset: 0, len }));
        }
        Ok((core, unanswered))
    }

    fn split(
        setup: &QueueSetup,
        memory: &Rc<GuestMemory>,
        inflight: &mut Option<Inflight>,
    ) -> Result<(Ring, Vec<Unanswered>), RingError> {
        let mut ring = SplitRing::new(
            memory.clone(),
            setup.parts,
            setup.size,
            setup.base as u16,
            setup.event_idx,
        )?;
        let mut unanswered = Vec::new();
        if let Some(inflight) = inflight.as_mut().filter(|inflight| !inflight.is_used()) {
            inflight.begins_split(ring.used_index());
        }
        if let Some(inflight) = inflight
            && inflight.is_used()
        {
            // Each chain that was taken is answered or in the region. The front end's base may be
            // older than that: it cannot know what a back end did that was killed while it started.
            unanswered = inflight.recover_split(ring.used_index());
            ring.restore(unanswered.len() as u16);
        } else if setup.is_base_lost {
            ring.restore(0);
        }
        Ok((Ring::Split(ring), unanswered.into_iter().map(Unanswered::Split).collect()))
    }

    fn packed(
        setup: &QueueSetup,
        memory: &Rc<GuestMemory>,
        inflight: &mut Option<Inflight>,
    ) -> Result<(Ring, Vec<Unanswered>), RingError> {
        let mut ring =
            PackedRing::new(memory.clone(), setup.parts, setup.size, setup.base, setup.event_idx)?;
        let mut unanswered = Vec::new();
        if let Some(inflight) = inflight.as_mut().filter(|inflight| !inflight.is_used()) {
            inflight.begins_packed(ring.used_position());
        }
        if let Some(inflight) = inflight
            && inflight.is_used()
        {
            let (chains, used) =
                inflight.recover_packed(|index, wrap| ring.was_used(index, wrap))?;
            // This cannot overflow: the chains of a region have at most 32768 descriptors together.
            let ahead = chains.iter().map(|c| c.raw.len() as u16).sum();
            ring.restore(used, ahead)?;
            unanswered = chains.into_iter().map(Unanswered::Packed).collect();
        }
        Ok((Ring::Packed(ring), unanswered))
    }

    /// Records a taken chain in the in-flight region. Returns the chain's entry.
    #[inline]
    pub(super) fn note_taken(&mut self, head: Head) -> u16 {
        match (&mut self.inflight, &self.ring) {
            (None, _) => head.id,
            (Some(inflight), Ring::Split(_)) => {
                inflight.taken_split(head.id);
                head.id
            }
            (Some(inflight), Ring::Packed(ring)) => inflight.taken_packed(ring.raw()),
        }
    }

    /// Pushes a used element, and records that in the in-flight region.
    #[inline]
    pub(super) fn push_used(&mut self, head: Head, entry: u16, written: u32) {
        match (&mut self.inflight, &self.ring) {
            (None, _) => {}
            (Some(inflight), Ring::Split(_)) => inflight.pushed_split(entry),
            (Some(inflight), Ring::Packed(_)) => inflight.pushed_packed(entry),
        }
        let place = self.marks.is_some().then(|| self.ring.next_used());
        self.ring.push_used(head, written);
        self.mark_ring(place);
        self.unpublished += 1;
    }

    /// Returns whether the ring may be used.
    #[inline]
    pub(super) fn works(&self) -> bool {
        !self.broken && !self.has_lost_memory()
    }

    #[inline]
    fn has_lost_memory(&self) -> bool {
        self.alarm.as_ref().is_some_and(|alarm| alarm.is_raised())
    }

    /// Publishes the pushed used elements, and clears their entries in the in-flight region. If
    /// memory is lost, the guest may not see the elements, so the region keeps the entries.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.has_lost_memory() {
            return;
        }
        if let (Some(inflight), Ring::Packed(ring)) = (&mut self.inflight, &self.ring) {
            let (index, wrap) = ring.used_position();
            inflight.publishing_packed(index, wrap);
        }
        let place = self.marks.as_ref().and_then(|_| self.ring.publication());
        self.ring.publish();
        self.mark_ring(place);
        if self.has_lost_memory() {
            return;
        }
        match (&mut self.inflight, &self.ring) {
            (None, _) => {}
            (Some(inflight), Ring::Split(ring)) => inflight.published_split(ring.used_index()),
            (Some(inflight), Ring::Packed(_)) => inflight.published_packed(),
        }
    }

    /// Reads an unanswered chain of the previous back end into `descs`.
    pub(super) fn retake(&mut self, chain: &Unanswered) -> Result<Head, RingError> {
        self.descs.clear();
        match (chain, &self.ring) {
            (Unanswered::Split(head), Ring::Split(ring)) => {
                ring.chain(*head, &mut self.descs)?;
                Ok(Head { id: *head, count: 1 })
            }
            (Unanswered::Packed(chain), Ring::Packed(ring)) => {
                ring.retake(&chain.raw, &mut self.descs)
            }
            _ => Err(RingError::Id(chain.entry())),
        }
    }

    pub(super) fn set_memory(&mut self, memory: Rc<GuestMemory>) {
        self.ring.set_memory(memory.clone());
        self.memory = memory;
    }

    pub(super) fn set_call(&mut self, call: Call) {
        self.polling.set_notified_by_stream(call.is_stream());
        self.call = call;
        // Signals on the old descriptor may be lost, so signal on the new one.
        self.signal();
    }

    /// Signals the guest that `completions` were published. Never blocks.
    #[inline]
    pub(super) fn signal_of(&mut self, completions: u32) {
        let mut figures = self.counters.signals.get();
        figures.completions += u64::from(completions);
        figures.signals += 1;
        self.counters.signals.set(figures);
        self.signal();
    }

    /// Signals the guest. Never blocks.
    #[inline]
    pub(super) fn signal(&mut self) {
        self.call.ring(&self.counters.slow_calls);
    }
}
