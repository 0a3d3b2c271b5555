//! Data that the hypervisor copies between pages of the guest and buffers of this process.
//!
//! In: the requests of a batch with their segments, and reads that the disk has completed. Out:
//! buffers, and statuses.
//!
//! The data of a write is copied before the disk gets the request, the data of a read before the
//! response. Pages that describe segments are copied first. Each batch needs one call for each of
//! these three copies. What must hold: a copy that fails affects only its own request. Buffers and
//! vectors are reused. `held` counts the bytes of all buffers in requests, so that the queue can
//! limit them.

use std::sync::atomic::Ordering;

use blockyard_ring::Segments;
use blockyard_ring::xen::{CopyBatch, Grants};

use super::super::abi::{self, Ask, SEGMENT_BYTES, Segment};
use super::Counts;

/// Limits on buffers that are kept for reuse: their number, and their bytes.
const BUFFERS: usize = 64;
const KEPT: usize = 8 << 20;

/// Maximum number of bytes in the buffers of requests. At this limit, the queue takes no further
/// request.
const HELD: usize = 32 << 20;

#[derive(Default)]
pub(super) struct Copies {
    batch: CopyBatch,
    buffers: Vec<Segments>,
    /// Bytes of the buffers that are kept for reuse, and of the buffers in requests.
    kept: usize,
    held: usize,
    /// The buffers of the current batch's requests. `None`: the request has none, or its data could
    /// not be copied.
    filled: Vec<Option<Segments>>,
    /// The segments that pages of the current batch describe, and for each page whether it could be
    /// read.
    descriptions: Segments,
    tables: Vec<bool>,
    /// Index of the next page in `tables`, and the next offset in `descriptions`.
    table: usize,
    described: usize,
    /// Target segments of reads, indexed by the read's number, and the free numbers.
    targets: Vec<Vec<Segment>>,
    free: Vec<u32>,
}

/// A read that the disk has completed. Its data is not yet in the guest's pages.
pub struct Read {
    pub id: u64,
    pub operation: u8,
    pub slot: u32,
    /// Number from [`super::pages::Pages::note_read`].
    pub number: u32,
    pub buffer: Segments,
}

impl Copies {
    /// Allocates the buffers of a batch, and copies the data of writes into them.
    pub fn prepare(
        &mut self,
        grants: &Grants,
        batch: &[abi::Request],
        segments: &[Segment],
        bounds: &[Option<(usize, usize)>],
        counts: &Counts,
    ) {
        for (request, bounds) in batch.iter().zip(bounds) {
            let buffer = bounds.map(|(from, to)| {
                let segments = &segments[from..to];
                let buffer = self.buffer(length(segments));
                if request.ask.moves() && request.ask != Ask::Read {
                    push(&mut self.batch, grants, &buffer, segments, false);
                }
                buffer
            });
            self.filled.push(buffer);
        }
        let copied = copy(grants, &mut self.batch, counts);
        let mut statuses = self.batch.statuses();
        for ((request, bounds), filled) in batch.iter().zip(bounds).zip(&mut self.filled) {
            let Some((from, to)) = bounds else { continue };
            if request.ask.moves() && request.ask != Ask::Read {
                let good =
                    statuses.by_ref().take(to - from).filter(|status| status.is_ok()).count()
                        == to - from;
                if !(good && copied)
                    && let Some(buffer) = filled.take()
                {
                    self.held = self.held.saturating_sub(buffer.capacity());
                }
            }
        }
        drop(statuses);
        self.batch.clear();
    }

    /// Returns how many bytes of further requests the queue may take.
    pub fn room(&self) -> usize {
        HELD.saturating_sub(self.held)
    }

    /// Takes the buffer of request `at` of the batch.
    pub fn take(&mut self, at: usize) -> Option<Segments> {
        self.filled[at].take()
    }

    pub fn end_batch(&mut self) {
        self.filled.clear();
    }

    /// Copies the pages that describe the segments of a batch's requests, in one call.
    pub fn describe(&mut self, grants: &Grants, batch: &[abi::Request], counts: &Counts) {
        let tables = || {
            batch.iter().filter(|request| request.ask.moves()).flat_map(|request| request.tables())
        };
        let len = tables().map(|(_, segments)| segments * SEGMENT_BYTES).sum();
        self.tables.clear();
        (self.table, self.described) = (0, 0);
        if len == 0 {
            return;
        }
        if !self.descriptions.refit(len) {
            self.descriptions = Segments::buffer(len);
        }
        let mut at = 0;
        for (reference, segments) in tables() {
            let bytes = segments * SEGMENT_BYTES;
            let added = self.batch.push(
                grants,
                &self.descriptions,
                at,
                (reference, 0, bytes as u16),
                false,
            );
            debug_assert!(added, "all segments of a page fit into it");
            at += bytes;
        }
        let copied = copy(grants, &mut self.batch, counts);
        self.tables.extend(self.batch.statuses().map(|status| copied && status.is_ok()));
        self.batch.clear();
    }

    /// Appends the segments of the next indirect request. Must be called in the order of the batch.
    /// Returns false if a page cannot be read.
    pub fn segments(&mut self, request: &abi::Request, to: &mut Vec<Segment>) -> bool {
        let mut good = true;
        for (_, segments) in request.tables() {
            good &= self.tables[self.table];
            self.table += 1;
            for _ in 0..segments {
                let mut bytes = [0; SEGMENT_BYTES];
                self.descriptions.copy_out(self.described, &mut bytes);
                self.described += SEGMENT_BYTES;
                to.push(Segment::parse(&bytes));
            }
        }
        good
    }

    /// Keeps the target segments of a read until [`Copies::finish`]. Returns its number.
    pub fn note(&mut self, segments: &[Segment]) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.targets.push(Vec::new());
            self.targets.len() as u32 - 1
        });
        let target = &mut self.targets[number as usize];
        target.clear();
        target.extend_from_slice(segments);
        number
    }

    pub fn forget(&mut self, number: u32) {
        self.free.push(number);
    }

    /// Copies data that was read to the guest, and calls `answer` with each read and its status.
    pub fn finish(
        &mut self,
        grants: &Grants,
        reads: &mut Vec<Read>,
        counts: &Counts,
        mut answer: impl FnMut(&Read, i16),
    ) {
        for read in reads.iter() {
            push(&mut self.batch, grants, &read.buffer, &self.targets[read.number as usize], true);
        }
        let copied = copy(grants, &mut self.batch, counts);
        let mut statuses = self.batch.statuses();
        for read in reads.iter() {
            let pieces = self.targets[read.number as usize].len();
            let good =
                statuses.by_ref().take(pieces).filter(|status| status.is_ok()).count() == pieces;
            answer(read, if good && copied { abi::OK } else { abi::ERROR });
        }
        drop(statuses);
        self.batch.clear();
        for mut read in reads.drain(..) {
            self.free.push(read.number);
            self.give_back(&mut read.buffer);
        }
    }

    pub fn give_back(&mut self, segments: &mut Segments) {
        let bytes = segments.capacity();
        self.held = self.held.saturating_sub(bytes);
        if self.buffers.len() < BUFFERS && !segments.is_empty() && self.kept + bytes <= KEPT {
            self.kept += bytes;
            self.buffers.push(std::mem::take(segments));
        } else {
            segments.release();
        }
    }

    /// Returns a buffer of `len` bytes with undefined content.
    fn buffer(&mut self, len: usize) -> Segments {
        let mut buffer = self.buffers.pop().unwrap_or_default();
        self.kept -= buffer.capacity();
        if len == 0 || !buffer.refit(len) {
            buffer = Segments::buffer(len);
        }
        self.held += buffer.capacity();
        buffer
    }
}

fn length(segments: &[Segment]) -> usize {
    segments.iter().filter_map(|segment| segment.range()).map(|(_, len)| usize::from(len)).sum()
}

/// Adds the copies between a buffer and segments. The range of each segment is inside its page.
fn push(
    batch: &mut CopyBatch,
    grants: &Grants,
    buffer: &Segments,
    segments: &[Segment],
    to_guest: bool,
) {
    let mut at = 0;
    for segment in segments {
        let Some((offset, len)) = segment.range() else { continue };
        let added = batch.push(grants, buffer, at, (segment.reference, offset, len), to_guest);
        debug_assert!(added, "a segment is inside its page");
        at += usize::from(len);
    }
}

/// Carries out the copies of `batch`. Returns false if the call failed.
fn copy(grants: &Grants, batch: &mut CopyBatch, counts: &Counts) -> bool {
    if batch.is_empty() {
        return true;
    }
    counts.copies.fetch_add(1, Ordering::Relaxed);
    counts.copied.fetch_add(batch.len() as u64, Ordering::Relaxed);
    grants.copy(batch).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_and_kept_bytes_are_counted_by_buffer_size() {
        let mut copies = Copies::default();
        let mut buffers: Vec<_> = (0..32).map(|_| copies.buffer(1 << 20)).collect();
        assert_eq!((copies.room(), copies.kept), (0, 0));
        buffers.iter_mut().for_each(|buffer| copies.give_back(buffer));
        assert_eq!((copies.room(), copies.kept), (HELD, KEPT));
        // Small requests use large buffers.
        let mut buffers: Vec<_> = (0..16).map(|_| copies.buffer(4096)).collect();
        assert_eq!((copies.room(), copies.kept), (HELD - KEPT - 8 * 4096, 0));
        buffers.iter_mut().for_each(|buffer| copies.give_back(buffer));
        assert_eq!(copies.room(), HELD);
        assert!(copies.kept <= KEPT);
    }
}
