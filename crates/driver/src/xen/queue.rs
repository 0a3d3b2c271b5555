//! Requests in slots over a blkif ring. Each slot has pages of the domain for its data, and one
//! page for the segments of an indirect request.
//!
//! In: an operation, a sector, and a length. Out: slots with their status.
//!
//! With persistent grants, the driver grants a slot's pages once. Without, it grants them for each
//! request (read-only for a write), and revokes the grants after the response, as Linux's driver
//! does.
//!
//! What must hold: the driver does not touch a slot in flight until `reap` returns it. It checks
//! each id that the back end writes against the slots in flight.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{
    Error,
    ErrorKind::{self, Late},
    Result, ensure,
};
use blockyard_ring::SharedSlice;
use blockyard_ring::xen::machine::{Domain, GrantCounts};
use rustix::event::{Timespec, epoll};

use super::request::{DIRECT_SEGMENTS, Entry, SEGMENT_BYTES, indirect, operation, segment, status};
use super::ring::FrontRing;
use super::{PAGE, SECTOR};
use crate::queue::{Data, RequestQueue};
use crate::{request, status as virtio_status};

/// Parameters of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    pub slots: u16,
    /// Size of the data buffer of a request, in bytes.
    pub data_len: u32,
    pub persistent: bool,
}

impl QueueOptions {
    fn data_pages(&self) -> usize {
        (self.data_len as usize).div_ceil(PAGE)
    }

    /// Returns the number of pages of a slot: the pages of its data, and one page for the segments
    /// if they do not fit into the ring entry.
    fn slot_pages(&self) -> usize {
        self.data_pages() + usize::from(self.data_pages() > DIRECT_SEGMENTS)
    }

    /// Returns the number of pages of the domain's memory that a queue needs, without its ring.
    pub fn pages(&self) -> usize {
        self.slot_pages() * usize::from(self.slots)
    }
}

#[derive(Default)]
struct Slot {
    in_flight: bool,
    operation: u8,
    /// Grant references of the slot's pages. The reference of the page for segments is the last
    /// one.
    references: Vec<u32>,
}

/// A blkif ring with requests in slots.
pub struct Queue {
    pub ring: FrontRing,
    domain: Arc<Domain>,
    memory: SharedSlice,
    index: usize,
    options: QueueOptions,
    /// Number of the queue's first page in the domain's memory.
    first: usize,
    slots: Vec<Slot>,
    /// An edge-triggered epoll that contains only the event channel, so that a wake-up is one
    /// system call.
    waiter: OwnedFd,
    in_flight: usize,
    /// Grants that the back end still had mapped when it responded, and the number of such cases.
    late: Vec<u32>,
    pub still_mapped: u64,
    /// Counters of the domain's grant operations, one entry for each call of `notifications`. A
    /// caller calls it at the beginning and at the end of a measurement.
    pub marks: Vec<GrantCounts>,
}

impl Queue {
    /// Creates a queue over `ring`. Its data pages begin with page `first` of the domain.
    pub fn new(
        domain: Arc<Domain>,
        ring: FrontRing,
        index: usize,
        first: usize,
        options: QueueOptions,
    ) -> Result<Self> {
        let waiter = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &waiter,
            ring.event(),
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        let slots = (0..options.slots).map(|_| Slot::default()).collect();
        let (in_flight, late, still_mapped, marks) = Default::default();
        let memory = domain.memory();
        let mut queue = Queue {
            ring,
            domain,
            memory,
            index,
            options,
            first,
            slots,
            waiter,
            in_flight,
            late,
            still_mapped,
            marks,
        };
        if options.persistent {
            (0..options.slots).for_each(|slot| queue.grant(slot, options.slot_pages(), false));
        }
        Ok(queue)
    }

    fn page(&self, slot: u16) -> usize {
        self.first + usize::from(slot) * self.options.slot_pages()
    }

    /// Grants the first `pages` pages of a slot.
    fn grant(&mut self, slot: u16, pages: usize, read_only: bool) {
        let first = self.page(slot);
        let references = (first..first + pages).map(|page| self.domain.grant(page, read_only));
        self.slots[usize::from(slot)].references.extend(references);
    }

    /// Revokes the grants of a slot.
    fn revoke(&mut self, slot: usize) {
        for reference in self.slots[slot].references.drain(..) {
            if !self.domain.revoke(reference) {
                self.still_mapped += 1;
                self.late.push(reference);
            }
        }
    }

    /// Puts a read, a write, a barrier or a flush into a free slot. The back end sees the request
    /// after [`Queue::publish`].
    #[inline]
    pub fn submit(&mut self, slot: u16, operation: u8, sector: u64, len: u32) {
        let pages = (len as usize).div_ceil(PAGE);
        assert!(
            len as usize <= self.options.data_pages() * PAGE,
            "a slot holds {} bytes",
            self.options.data_len
        );
        let is_indirect = pages > DIRECT_SEGMENTS;
        self.begin(slot, operation);
        let table = self.options.data_pages();
        if !self.options.persistent {
            self.grant(slot, pages, operation != operation::READ);
            if is_indirect {
                let reference = self.domain.grant(self.page(slot) + table, true);
                self.slots[usize::from(slot)].references.push(reference);
            }
        }
        let references = &self.slots[usize::from(slot)].references;
        let last =
            |at: usize| if at + 1 < pages { 7 } else { ((len as usize - 1) % PAGE / SECTOR) as u8 };
        let segments = references[..pages]
            .iter()
            .enumerate()
            .map(|(at, reference)| segment(*reference, 0, last(at)));
        let id = u64::from(slot);
        if is_indirect {
            let at = (self.page(slot) + table) * PAGE;
            segments
                .enumerate()
                .for_each(|(n, bytes)| self.memory.copy_in(at + n * SEGMENT_BYTES, bytes));
            let [low, high] = (pages as u16).to_le_bytes();
            let rest = indirect(references[references.len() - 1]);
            self.ring.push(&Entry {
                head: [operation::INDIRECT, operation, low, high],
                id,
                sector,
                rest: &rest,
            });
        } else {
            let mut rest = [0; DIRECT_SEGMENTS * SEGMENT_BYTES];
            for (to, bytes) in rest.chunks_exact_mut(SEGMENT_BYTES).zip(segments) {
                to.copy_from_slice(&bytes);
            }
            self.ring.push(&Entry {
                head: [operation, pages as u8, 0, 0],
                id,
                sector,
                rest: &rest,
            });
        }
    }

    /// Puts a discard into a free slot.
    pub fn discard(&mut self, slot: u16, sector: u64, sectors: u64) {
        self.begin(slot, operation::DISCARD);
        let entry = Entry {
            head: [operation::DISCARD, 0, 0, 0],
            id: slot.into(),
            sector,
            rest: &sectors.to_le_bytes(),
        };
        self.ring.push(&entry);
    }

    fn begin(&mut self, slot: u16, operation: u8) {
        let state = &mut self.slots[usize::from(slot)];
        assert!(!state.in_flight, "slot {slot} is in flight");
        (state.in_flight, state.operation) = (true, operation);
        self.in_flight += 1;
    }

    /// Returns the next completed request: its slot and its status.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<(u16, i16)>> {
        let Some(response) = self.ring.pop() else { return Ok(None) };
        let slot = usize::try_from(response.id)
            .ok()
            .filter(|slot| self.slots.get(*slot).is_some_and(|s| s.in_flight));
        let Some(slot) = slot else {
            let (index, id) = (self.index, response.id);
            return Err(Error::new(
                ErrorKind::Protocol,
                format!(
                    "queue {index}: the back end has responded to request {id}, which is not \
                         in flight"
                ),
            ));
        };
        let requested = self.slots[slot].operation;
        ensure!(
            response.operation == requested,
            Protocol,
            "queue {}: {response:?} is the response to operation {requested}",
            self.index
        );
        self.slots[slot].in_flight = false;
        self.in_flight -= 1;
        if !self.options.persistent {
            self.revoke(slot);
        }
        Ok(Some((slot as u16, response.status)))
    }

    /// Makes submitted requests visible to the back end, and sends an event if the back end wants
    /// one.
    #[inline]
    pub fn publish(&mut self) {
        if self.ring.publish() {
            self.ring.kick();
        }
    }

    /// Sleeps until the back end sends an event, but at most for `limit`. May return early.
    pub fn sleep(&mut self, limit: Option<Duration>) -> Result<()> {
        let Queue { late, domain, .. } = self;
        late.retain(|reference| !domain.revoke(*reference));
        if !self.ring.arm() {
            let limit = limit
                .map(|l| Timespec { tv_sec: l.as_secs() as _, tv_nsec: l.subsec_nanos().into() });
            let mut events = [MaybeUninit::uninit()];
            rustix::io::retry_on_intr(|| {
                epoll::wait(&self.waiter, &mut events, limit.as_ref()).map(|_| ())
            })?;
        }
        Ok(())
    }

    /// Copies `bytes` to the start of a slot's data.
    pub fn write_data(&self, slot: u16, bytes: &[u8]) {
        assert!(
            bytes.len() <= self.options.data_pages() * PAGE,
            "a slot holds {} bytes",
            self.options.data_len
        );
        self.memory.write(self.page(slot) * PAGE, bytes);
    }

    /// Copies the start of a slot's data to `bytes`.
    pub fn read_data(&self, slot: u16, bytes: &mut [u8]) {
        assert!(
            bytes.len() <= self.options.data_pages() * PAGE,
            "a slot holds {} bytes",
            self.options.data_len
        );
        self.memory.read(self.page(slot) * PAGE, bytes);
    }

    /// Makes one request of `len` bytes in slot 0 and waits for its completion. Returns its status.
    pub fn call(&mut self, operation: u8, sector: u64, len: u32, limit: Duration) -> Result<i16> {
        ensure!(self.in_flight == 0, Usage, "a single request needs an idle queue");
        self.submit(0, operation, sector, len);
        self.publish();
        let start = std::time::Instant::now();
        loop {
            if let Some((_, status)) = self.reap()? {
                return Ok(status);
            }
            let left = limit.checked_sub(start.elapsed());
            let late = || Error::new(Late, format!("a request has not completed for {limit:?}"));
            self.sleep(Some(left.ok_or_else(late)?))?;
        }
    }
}

/// Translates request types from virtio's, and statuses to virtio's.
impl RequestQueue for Queue {
    type Error = Error;

    #[inline]
    fn submit(&mut self, slot: u16, request: u32, sector: u64, data: Data) {
        let operation = match request {
            request::IN => operation::READ,
            request::OUT => operation::WRITE,
            request::FLUSH => operation::FLUSH,
            request::DISCARD => {
                let mut range = [0; request::RANGE];
                Queue::read_data(self, slot, &mut range);
                let (sector, sectors) = request::parse_range(range);
                return Queue::discard(self, slot, sector, sectors.into());
            }
            other => panic!("request type {other} is not supported"),
        };
        let len = match data {
            Data::None => 0,
            Data::ToDevice(len) | Data::FromDevice(len) => len,
        };
        Queue::submit(self, slot, operation, sector, len);
    }

    #[inline]
    fn publish(&mut self) -> Result<()> {
        Queue::publish(self);
        Ok(())
    }

    #[inline]
    fn reap(&mut self) -> Result<Option<(u16, u8)>> {
        let virtio = |status| match status {
            status::OK => virtio_status::OK,
            status::ERROR => virtio_status::IOERR,
            status::UNSUPPORTED => virtio_status::UNSUPP,
            _ => virtio_status::NONE,
        };
        Ok(Queue::reap(self)?.map(|(slot, status)| (slot, virtio(status))))
    }

    fn ready(&self) -> bool {
        self.ring.ready() > 0
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn sleep(&mut self, limit: Option<Duration>) -> Result<()> {
        Queue::sleep(self, limit)
    }

    fn kick(&mut self) -> Result<()> {
        self.ring.kick();
        Ok(())
    }

    fn notifications(&mut self) -> Result<(u64, u64)> {
        self.ring.take_signals();
        self.marks.push(self.domain.counts());
        Ok((self.ring.kicks, self.ring.signals))
    }

    fn write_data(&self, slot: u16, bytes: &[u8]) {
        Queue::write_data(self, slot, bytes);
    }

    fn read_data(&self, slot: u16, bytes: &mut [u8]) {
        Queue::read_data(self, slot, bytes);
    }

    /// The next server continues with the ring unchanged, so there is nothing to prepare.
    fn resume_base(&mut self, _known: bool) -> u32 {
        0
    }
}
