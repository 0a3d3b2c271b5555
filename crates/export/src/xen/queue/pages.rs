//! The pages of a guest that a batch of requests needs. With persistent grants, one call maps the
//! new pages of a batch. Without, one call maps the pages of each request.
//!
//! In: requests of one batch. Out: their segments. Pages for reads are mapped writable. Pages for
//! writes are mapped read-only, because the guest grants no more. Persistent grants are mapped
//! writable, and stay mapped. If data is copied (`copies`), segments are buffers of this process.
//!
//! What must hold: a request gets all its own pages, or none. The number of pages that stay mapped
//! is limited. A page that cannot be mapped affects its own request only.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockyard_ring::xen::Grants;
use blockyard_ring::{Region, Segments};

use super::super::abi::{self, Ask, Place, SEGMENT_BYTES, Segment};
use super::Counts;
use super::copies::{Copies, Read};

/// Maximum number of pages of a queue that stay mapped: as many as Linux front ends use.
const PERSISTENT: usize = 1056;
/// Maximum number of mappings of a queue that stay, and of all queues together. A process may have
/// 65,530 mappings (`vm.max_map_count`), and without one it can serve no other guest. A front end
/// can make each mapping one page long.
const QUEUE_MAPPINGS: usize = PERSISTENT / 4;
const ALL_MAPPINGS: usize = 16 << 10;
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);
const PAGE: u64 = 4096;

/// Result of preparing a request's segments.
#[derive(Debug, PartialEq, Eq)]
pub enum Prepared {
    /// The request has its segments, with this total length in bytes.
    Filled(u64),
    /// A segment is invalid, or a page cannot be read or mapped.
    Failed,
}

/// The guest's pages of a queue; see the module documentation.
pub struct Pages {
    grants: Grants,
    persistent: Option<Persistent>,
    copies: Option<Copies>,
    /// For the current batch: the segments of each request in `segments`, and its pages in `found`,
    /// in the same order.
    segments: Vec<Segment>,
    found: Vec<Option<Page>>,
    bounds: Vec<Option<(usize, usize)>>,
    ranges: Vec<(usize, usize)>,
    references: Vec<u32>,
    requests: Vec<abi::Request>,
}

/// The pages of a queue that stay mapped.
#[derive(Default)]
struct Persistent {
    pages: HashMap<u32, Page>,
    /// Number of their mappings, which [`MAPPINGS`] counts, too.
    mappings: usize,
}

impl Persistent {
    /// Returns whether the pages of one more mapping may stay, and counts it.
    fn may_keep(&mut self, pages: usize) -> bool {
        let more = |all: usize| (all < ALL_MAPPINGS).then_some(all + 1);
        let may = self.pages.len() + pages <= PERSISTENT
            && self.mappings < QUEUE_MAPPINGS
            && MAPPINGS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        self.mappings += usize::from(may);
        may
    }
}

impl Drop for Persistent {
    fn drop(&mut self) {
        MAPPINGS.fetch_sub(self.mappings, Ordering::Relaxed);
    }
}

/// How the data of requests is transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// The guest's pages are mapped for each request.
    Mapped,
    /// The guest's pages stay mapped, because the guest reuses them (persistent grants).
    Persistent,
    Copied,
}

/// A page in a mapping.
#[derive(Clone)]
struct Page {
    region: Arc<Region>,
    offset: u64,
}

impl Pages {
    pub fn new(grants: Grants, data: Data) -> Self {
        let (segments, found, bounds, ranges, references, requests) = Default::default();
        let persistent = (data == Data::Persistent).then(Persistent::default);
        let copies = (data == Data::Copied).then(Copies::default);
        Pages { grants, persistent, copies, segments, found, bounds, ranges, references, requests }
    }

    /// Returns an empty vector for the requests of a batch; [`Pages::keep`] takes it back.
    pub fn batch(&mut self) -> Vec<abi::Request> {
        let mut requests = std::mem::take(&mut self.requests);
        requests.clear();
        requests
    }

    pub fn keep(&mut self, batch: Vec<abi::Request>) {
        self.requests = batch;
    }

    /// Maps the pages of a batch's requests, or copies the data of writes from them.
    pub fn prepare(&mut self, batch: &[abi::Request], counts: &Counts) {
        if let Some(copies) = &mut self.copies {
            copies.describe(&self.grants, batch, counts);
        }
        for request in batch {
            let from = self.segments.len();
            let good = self.collect(request, counts);
            if !good {
                self.segments.truncate(from);
            }
            self.bounds.push(good.then_some((from, self.segments.len())));
        }
        if let Some(copies) = &mut self.copies {
            return copies.prepare(&self.grants, batch, &self.segments, &self.bounds, counts);
        }
        self.found.resize_with(self.segments.len(), || None);
        if self.persistent.is_some() {
            self.map_group(batch, |_| true, true, counts);
        } else {
            self.map_group(batch, |ask| ask == Ask::Read, true, counts);
            self.map_group(batch, |ask| ask != Ask::Read, false, counts);
        }
    }

    /// Drops the data of the batch. The batch's requests keep the pages that they need.
    pub fn end_batch(&mut self) {
        self.segments.clear();
        self.found.clear();
        self.bounds.clear();
        self.copies.iter_mut().for_each(Copies::end_batch);
    }

    /// Keeps the target segments of a read, if data is copied. Returns its number.
    pub fn note_read(&mut self, at: usize) -> Option<u32> {
        let (copies, (from, to)) = (self.copies.as_mut()?, self.bounds[at]?);
        Some(copies.note(&self.segments[from..to]))
    }

    /// Copies data that was read to the guest, in one call, and calls `answer` with each read and
    /// its status.
    pub fn finish_reads(
        &mut self,
        reads: &mut Vec<Read>,
        counts: &Counts,
        answer: impl FnMut(&Read, i16),
    ) {
        if let Some(copies) = &mut self.copies {
            copies.finish(&self.grants, reads, counts, answer);
        }
    }

    /// Drops the target segments of a read that failed.
    pub fn forget_read(&mut self, number: u32) {
        self.copies.iter_mut().for_each(|copies| copies.forget(number));
    }

    /// Returns how many bytes of further requests the queue may take. Mapped pages are the guest's
    /// memory, so this limit does not count them.
    pub fn room(&self) -> usize {
        self.copies.as_ref().map_or(usize::MAX, Copies::room)
    }

    /// Takes back the buffer of a request, or releases its pages.
    pub fn give_back(&mut self, segments: &mut Segments) {
        match &mut self.copies {
            Some(copies) => copies.give_back(segments),
            None => segments.reset_regions(),
        }
    }

    /// Unmaps all persistent pages.
    pub fn clear(&mut self) {
        self.end_batch();
        self.persistent = None;
    }

    /// Sets `segments` to the memory of request `at` of the batch.
    pub fn fill(&mut self, at: usize, request: &abi::Request, segments: &mut Segments) -> Prepared {
        if let Some(copies) = &mut self.copies {
            let buffer = self.bounds[at].and_then(|_| copies.take(at));
            let Some(buffer) = buffer else { return Prepared::Failed };
            *segments = buffer;
            return Prepared::Filled(segments.len() as u64);
        }
        segments.reset_regions();
        let Some((from, to)) = self.bounds[at] else { return Prepared::Failed };
        debug_assert_eq!(to - from, if request.ask.moves() { request.segments } else { 0 });
        let mut len = 0;
        for (segment, page) in self.segments[from..to].iter().zip(&self.found[from..to]) {
            let (Some((offset, bytes)), Some(page)) = (segment.range(), page) else {
                return Prepared::Failed;
            };
            if segments
                .push_region(&page.region, page.offset + u64::from(offset), bytes.into())
                .is_err()
            {
                return Prepared::Failed;
            }
            len += u64::from(bytes);
        }
        Prepared::Filled(len)
    }

    /// Appends the segments of a request. Returns false if they are invalid or cannot be read.
    fn collect(&mut self, request: &abi::Request, counts: &Counts) -> bool {
        if !request.ask.moves() {
            return true;
        }
        let from = self.segments.len();
        match (&request.place, &mut self.copies) {
            (Place::Here(segments), _) => {
                self.segments.extend_from_slice(&segments[..request.segments])
            }
            (Place::Pages(_), Some(copies)) => {
                if !copies.segments(request, &mut self.segments) {
                    return false;
                }
            }
            (Place::Pages(_), None) => {
                for (reference, here) in request.tables() {
                    if !self.collect_indirect(reference, here, counts) {
                        return false;
                    }
                }
            }
        }
        self.segments[from..].iter().all(|segment| segment.range().is_some())
    }

    /// Parses `segments` segments of an indirect request from the guest page `reference`. Copies
    /// each one once, because the guest may change the page.
    fn collect_indirect(&mut self, reference: u32, segments: usize, counts: &Counts) -> bool {
        let known = self.persistent.as_ref().and_then(|known| known.pages.get(&reference));
        let page = match known {
            Some(page) => page.clone(),
            None => {
                // A front end with persistent grants also keeps the pages that describe segments,
                // and may later use them for data.
                let Ok(region) = self.grants.map(&[reference], self.persistent.is_some()) else {
                    return false;
                };
                count(counts, 1);
                let page = Page { region: Arc::new(region), offset: 0 };
                if let Some(persistent) = &mut self.persistent
                    && persistent.may_keep(1)
                {
                    persistent.pages.insert(reference, page.clone());
                }
                page
            }
        };
        let slice = page.region.slice();
        for at in 0..segments {
            let bytes = slice.copy_out::<SEGMENT_BYTES>(page.offset as usize + at * SEGMENT_BYTES);
            self.segments.push(Segment::parse(&bytes));
        }
        true
    }

    /// Finds or maps the pages of requests with an operation in `group`.
    fn map_group(
        &mut self,
        batch: &[abi::Request],
        group: impl Fn(Ask) -> bool,
        write: bool,
        counts: &Counts,
    ) {
        let mut ranges = std::mem::take(&mut self.ranges);
        ranges.clear();
        let of_group = batch.iter().zip(&self.bounds).filter(|(request, _)| group(request.ask));
        ranges.extend(of_group.filter_map(|(_, range)| *range));
        if self.persistent.is_none() {
            // A mapping is unmapped as a whole. With one mapping per batch, the pages of a
            // completed request would stay mapped. The guest then tries to revoke its grants, and
            // Linux's driver stops the device if the revocation fails (XSA-396).
            ranges.iter().for_each(|range| self.find(&[*range], write, counts));
            self.ranges = ranges;
            return;
        }
        self.find(&ranges, write, counts);
        // A page that cannot be mapped must not fail other requests, so retry each request alone.
        for range in ranges.iter().filter(|_| ranges.len() > 1) {
            if self.found[range.0..range.1].iter().any(Option::is_none) {
                self.find(&[*range], write, counts);
            }
        }
        self.ranges = ranges;
    }

    /// Finds the pages in these ranges of `segments`, and maps all that are not mapped in one call.
    fn find(&mut self, ranges: &[(usize, usize)], write: bool, counts: &Counts) {
        self.references.clear();
        for at in ranges.iter().flat_map(|(from, to)| *from..*to) {
            let reference = self.segments[at].reference;
            self.found[at] =
                self.persistent.as_ref().and_then(|known| known.pages.get(&reference)).cloned();
            if self.found[at].is_none()
                && !(self.persistent.is_some() && self.references.contains(&reference))
            {
                self.references.push(reference);
            }
        }
        if self.references.is_empty() {
            return;
        }
        let Ok(region) = self.grants.map(&self.references, write) else { return };
        count(counts, self.references.len());
        let region = Arc::new(region);
        let page = |at: usize| Page { region: region.clone(), offset: at as u64 * PAGE };
        let Some(persistent) = &mut self.persistent else {
            // The mapping has the order of the segments.
            let mapped = ranges.iter().flat_map(|(from, to)| *from..*to).enumerate();
            mapped.for_each(|(at, segment)| self.found[segment] = Some(page(at)));
            return;
        };
        let new: HashMap<u32, Page> =
            self.references.iter().enumerate().map(|(at, r)| (*r, page(at))).collect();
        for at in ranges.iter().flat_map(|(from, to)| *from..*to) {
            if self.found[at].is_none() {
                self.found[at] = new.get(&self.segments[at].reference).cloned();
            }
        }
        if persistent.may_keep(new.len()) {
            persistent.pages.extend(new);
        }
    }
}

fn count(counts: &Counts, pages: usize) {
    counts.maps.fetch_add(1, Ordering::Relaxed);
    counts.pages.fetch_add(pages as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use blockyard_ring::xen::{Host, Machine};

    use super::super::super::abi::{Abi, ENTRY_MOST, Request};
    use super::*;

    /// Returns a read of one page.
    fn read(reference: u32) -> Request {
        let mut bytes = [0; ENTRY_MOST];
        bytes[1] = 1;
        bytes[24..28].copy_from_slice(&reference.to_le_bytes());
        Request::parse(Abi::X86_64, &bytes)
    }

    /// A front end may send each page in a request of its own.
    #[test]
    fn the_number_of_mappings_that_stay_is_limited() {
        let machine = Machine::new();
        let domain = machine.add(3, 2 * QUEUE_MAPPINGS).unwrap();
        let mut pages = Pages::new(Host::Machine(machine).grants(3).unwrap(), Data::Persistent);
        for page in 0..2 * QUEUE_MAPPINGS {
            let mut segments = Segments::default();
            let batch = [read(domain.grant(page, false))];
            pages.prepare(&batch, &Counts::default());
            assert_eq!(pages.fill(0, &batch[0], &mut segments), Prepared::Filled(512));
            pages.give_back(&mut segments);
            pages.end_batch();
        }
        let persistent = pages.persistent.as_ref().unwrap();
        assert_eq!((persistent.mappings, persistent.pages.len()), (QUEUE_MAPPINGS, QUEUE_MAPPINGS));
        assert!(MAPPINGS.load(Ordering::Relaxed) >= QUEUE_MAPPINGS);
        pages.clear();
        assert!(pages.persistent.is_none());
    }

    #[test]
    fn a_completed_request_is_unmapped_while_its_batch_is_in_flight() {
        let machine = Machine::new();
        let domain = machine.add(3, 2).unwrap();
        let batch = [read(domain.grant(0, false)), read(domain.grant(1, false))];
        let mut pages = Pages::new(Host::Machine(machine).grants(3).unwrap(), Data::Mapped);
        pages.prepare(&batch, &Counts::default());
        let mut segments = [Segments::default(), Segments::default()];
        for (at, segments) in segments.iter_mut().enumerate() {
            assert_eq!(pages.fill(at, &batch[at], segments), Prepared::Filled(512));
        }
        pages.end_batch();
        assert_eq!(domain.mapped(), 2);
        pages.give_back(&mut segments[0]);
        assert_eq!(domain.mapped(), 1);
        pages.give_back(&mut segments[1]);
        assert_eq!(domain.mapped(), 0);
    }
    /// Returns an indirect write with segments that page `reference` describes.
    fn indirect_write(reference: u32, segments: u8) -> Request {
        let mut bytes = [0; ENTRY_MOST];
        bytes[..3].copy_from_slice(&[6, 1, segments]);
        bytes[28..32].copy_from_slice(&reference.to_le_bytes());
        Request::parse(Abi::X86_64, &bytes)
    }

    #[test]
    fn descriptions_of_a_batch_are_copied_in_one_call() {
        let machine = Machine::new();
        let domain = machine.add(3, 64).unwrap();
        let memory = domain.memory();
        let references: Vec<u32> = (0..64).map(|page| domain.grant(page, true)).collect();
        // Pages 0 to 3 describe 12 segments each, in pages 16 to 63. Each of these pages contains
        // its number.
        for (page, reference) in references.iter().enumerate().skip(16) {
            memory.write(page * PAGE as usize, &[page as u8; PAGE as usize]);
            let (table, at) = ((page - 16) / 12, (page - 16) % 12);
            let mut bytes = [0; SEGMENT_BYTES];
            bytes[..4].copy_from_slice(&reference.to_le_bytes());
            bytes[5] = 7;
            memory.write(table * PAGE as usize + at * SEGMENT_BYTES, &bytes);
        }
        let mut batch: Vec<_> =
            references[..4].iter().map(|table| indirect_write(*table, 12)).collect();
        // A page that the guest has not granted fails only its own request. One request is direct.
        batch.insert(1, indirect_write(99_999, 12));
        batch.insert(2, read(references[16]));
        let mut pages = Pages::new(Host::Machine(machine).grants(3).unwrap(), Data::Copied);
        for _ in 0..2 {
            let counts = Counts::default();
            pages.prepare(&batch, &counts);
            for (at, (request, table)) in
                batch.iter().zip([Some(0), None, None, Some(1), Some(2), Some(3)]).enumerate()
            {
                let mut segments = Segments::default();
                let filled = pages.fill(at, request, &mut segments);
                match (at, table) {
                    (1, _) => assert_eq!(filled, Prepared::Failed),
                    (2, _) => assert_eq!(filled, Prepared::Filled(512)),
                    (_, table) => {
                        assert_eq!(filled, Prepared::Filled(12 * PAGE));
                        for page in 0..12 {
                            let mut byte = [0];
                            segments.copy_out(page * PAGE as usize, &mut byte);
                            assert_eq!(usize::from(byte[0]), 16 + table.unwrap() * 12 + page);
                        }
                    }
                }
                pages.give_back(&mut segments);
            }
            pages.end_batch();
            // The batch needs one call for the descriptions and one for the data.
            assert_eq!(counts.copies.load(Ordering::Relaxed), 2);
            assert_eq!(counts.copied.load(Ordering::Relaxed), 5 + 4 * 12);
        }
    }
}
