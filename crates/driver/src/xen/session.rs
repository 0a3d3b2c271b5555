//! A connected device and its queues, for load generators and most tests.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Result, ensure};
use blockyard_ring::xen::Machine;

use super::front::{Front, Terms};
use super::queue::{Queue, QueueOptions};
use super::request::{DIRECT_SEGMENTS, INDIRECT_SEGMENTS};
use super::{PAGE, SECTOR, state};

/// The features to negotiate, and the queues to set up.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Parameters that the front end requests. `persistent` takes effect only if the back end
    /// offers persistent grants.
    pub terms: Terms,
    /// Maximum number of requests in flight per queue.
    pub slots: u16,
    /// Size of the data buffer of a request, in bytes.
    pub data_len: u32,
    /// Longest time that the back end may take for each step.
    pub limit: Duration,
}

impl Plan {
    /// Returns a plan with the smallest ring that holds `slots` requests.
    pub fn new(queues: u16, slots: u16, data_len: u32, persistent: bool) -> Self {
        let mut terms = Terms { queues: queues.into(), persistent, ..Terms::PLAIN };
        while terms.abi.entries(terms.ring_pages()) < u32::from(slots) {
            terms.order = Some(terms.order.unwrap_or(0) + 1);
        }
        Plan { terms, slots, data_len, limit: Duration::from_secs(60) }
    }
}

/// The back end's features, and its description of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    pub sectors: u64,
    pub sector_size: u64,
    pub read_only: bool,
    pub flush: bool,
    pub barrier: bool,
    pub discard: bool,
    pub persistent: bool,
    pub max_indirect_segments: u64,
    pub max_ring_page_order: u64,
    pub max_queues: u64,
}

impl Offer {
    /// Reads the nodes of the back end. The nodes that describe the disk exist once the back end is
    /// connected.
    fn read(front: &mut Front) -> Result<Self> {
        let mut number = |key: &str| front.back_number(key);
        Ok(Offer {
            sectors: number("sectors")?,
            sector_size: number("sector-size")?,
            read_only: number("info")? & 4 != 0,
            flush: number("feature-flush-cache")? == 1,
            barrier: number("feature-barrier")? == 1,
            discard: number("feature-discard")? == 1,
            persistent: number("feature-persistent")? == 1,
            max_indirect_segments: number("feature-max-indirect-segments")?,
            max_ring_page_order: number("max-ring-page-order")?,
            max_queues: number("multi-queue-max-queues")?.max(1),
        })
    }

    /// Checks that the back end can serve the plan.
    fn allows(&self, plan: &Plan) -> Result<()> {
        let Plan { terms, slots, data_len, .. } = plan;
        let segments = (*data_len as usize).div_ceil(PAGE) as u64;
        let most =
            self.max_indirect_segments.clamp(DIRECT_SEGMENTS as u64, INDIRECT_SEGMENTS as u64);
        ensure!(
            segments <= most,
            NotOffered,
            "requests of {data_len} bytes are too large: the back end takes at most {most} pages"
        );
        ensure!(
            data_len.is_multiple_of(SECTOR as u32),
            Usage,
            "requests of {data_len} bytes are not whole sectors"
        );
        let (order, entries) =
            (u64::from(terms.order.unwrap_or(0)), terms.abi.entries(terms.ring_pages()));
        ensure!(
            order <= self.max_ring_page_order && u32::from(*slots) <= entries,
            NotOffered,
            "{slots} requests in flight do not fit: the back end's rings have at most 2^{} pages",
            self.max_ring_page_order
        );
        ensure!(
            terms.queues as u64 <= self.max_queues,
            NotOffered,
            "{} queues are too many: the back end has at most {}",
            terms.queues,
            self.max_queues
        );
        Ok(())
    }
}

/// A connected front end and its queues.
pub struct Session {
    pub front: Front,
    pub queues: Vec<Queue>,
    pub offer: Offer,
    /// The requested plan, without persistent grants if the back end does not offer them.
    pub plan: Plan,
}

impl Session {
    /// Adds domain `number` to the machine, and connects the domain to its device `device`. A
    /// toolstack must have created the device, or create it during this call.
    pub fn start(machine: &Machine, number: u16, device: u32, plan: &Plan) -> Result<Self> {
        let mut plan = *plan;
        let options = QueueOptions {
            slots: plan.slots,
            data_len: plan.data_len,
            persistent: plan.terms.persistent,
        };
        let rings = plan.terms.queues * plan.terms.ring_pages();
        let domain = machine.add(number, rings + plan.terms.queues * options.pages())?;
        let references: Vec<_> = (0..rings).map(|page| domain.grant(page, false)).collect();
        let mut front = Front::new(machine, Arc::clone(&domain), device, plan.limit)?;
        front.wait_for_state(state::INIT_WAIT)?;
        let offer = Offer::read(&mut front)?;
        offer.allows(&plan)?;
        plan.terms.persistent &= offer.persistent;
        let options = QueueOptions { persistent: plan.terms.persistent, ..options };
        let shared = front.connect(&plan.terms, &references)?;
        let queues = shared.into_iter().enumerate().map(|(index, ring)| {
            Queue::new(domain.clone(), ring, index, rings + index * options.pages(), options)
        });
        let queues = queues.collect::<Result<_>>()?;
        let offer = Offer::read(&mut front)?;
        Ok(Session { front, queues, offer, plan })
    }
}
