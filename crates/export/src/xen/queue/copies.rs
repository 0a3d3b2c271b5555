//! Data that the hypervisor copies between pages of the guest and buffers of this process.
//!
//! In: the requests of a batch with their segments, and reads that the disk has done. Out: buffers, and statuses.
//! Data of writes are copied before the disk gets them, data of reads before the response: each batch by one call.
//! What must hold: a copy that fails, fails its request and no other. Buffers and lists are used again.

use std::sync::atomic::Ordering;

use blockyard_ring::Segments;
use blockyard_ring::xen::{CopyBatch, CopyStatus, Grants};

use super::super::abi::{self, Ask, SEGMENT_BYTES, Segment};
use super::Counts;
use super::pages::moves;

/// Buffers that are kept, at most.
const BUFFERS: usize = 64;

#[derive(Default)]
pub(super) struct Copies {
    batch: CopyBatch,
    buffers: Vec<Segments>,
    /// Those of the requests of the batch at hand; `None`: it has none, or its data could not be copied.
    filled: Vec<Option<Segments>>,
    /// Where the data of reads go, by number, and the numbers that are free.
    targets: Vec<Vec<Segment>>,
    free: Vec<u32>,
}

/// A read that the disk has done, and whose data the guest does not have yet.
pub struct Read {
    pub id: u64,
    pub operation: u8,
    pub slot: u32,
    /// Of [`super::pages::Pages::note_read`].
    pub number: u32,
    pub buffer: Segments,
}

impl Copies {
    /// Makes the buffers of a batch, and copies the data of writes to them.
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
                if moves(request.ask) && request.ask != Ask::Read {
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
            if moves(request.ask) && request.ask != Ask::Read {
                let good = statuses.by_ref().take(to - from).filter(|status| status.is_ok()).count() == to - from;
                *filled = filled.take().filter(|_| good && copied);
            }
        }
        drop(statuses);
        self.batch.clear();
    }

    /// The buffer of request `at` of the batch.
    pub fn take(&mut self, at: usize) -> Option<Segments> {
        self.filled[at].take()
    }

    pub fn end_batch(&mut self) {
        self.filled.clear();
    }

    /// Appends the segments that a page of the guest describes to `to`. False: the page cannot be read.
    pub fn segments(
        &mut self,
        grants: &Grants,
        reference: u32,
        segments: usize,
        to: &mut Vec<Segment>,
        counts: &Counts,
    ) -> bool {
        let len = segments * SEGMENT_BYTES;
        let mut buffer = self.buffer(len);
        // The batch is empty: each prepares its own, and clears it.
        let good = self.batch.push(grants, &buffer, 0, (reference, 0, len as u16), false)
            && copy(grants, &mut self.batch, counts)
            && self.batch.statuses().all(CopyStatus::is_ok);
        self.batch.clear();
        for at in (0..len).step_by(SEGMENT_BYTES).filter(|_| good) {
            let mut bytes = [0; SEGMENT_BYTES];
            buffer.copy_out(at, &mut bytes);
            to.push(Segment::parse(&bytes));
        }
        self.give_back(&mut buffer);
        good
    }

    /// Keeps the segments of a read until [`Copies::finish`].
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

    /// Copies what was read to the guest, and calls `answer` with each read and its status.
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
            let good = statuses.by_ref().take(pieces).filter(|status| status.is_ok()).count() == pieces;
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
        if self.buffers.len() < BUFFERS && !segments.is_empty() {
            self.buffers.push(std::mem::take(segments));
        } else {
            segments.release();
        }
    }

    /// A buffer of `len` bytes, which hold anything.
    fn buffer(&mut self, len: usize) -> Segments {
        let mut buffer = self.buffers.pop().unwrap_or_default();
        if len == 0 || !buffer.refit(len) {
            buffer = Segments::buffer(len);
        }
        buffer
    }
}

fn length(segments: &[Segment]) -> usize {
    segments.iter().filter_map(|segment| segment.range()).map(|(_, len)| usize::from(len)).sum()
}

/// Adds the copies between a buffer and segments, whose ranges are inside their pages.
fn push(batch: &mut CopyBatch, grants: &Grants, buffer: &Segments, segments: &[Segment], to_guest: bool) {
    let mut at = 0;
    for segment in segments {
        let Some((offset, len)) = segment.range() else { continue };
        let added = batch.push(grants, buffer, at, (segment.reference, offset, len), to_guest);
        debug_assert!(added, "a segment is inside its page");
        at += usize::from(len);
    }
}

/// Makes the copies; false: the call failed.
fn copy(grants: &Grants, batch: &mut CopyBatch, counts: &Counts) -> bool {
    if batch.is_empty() {
        return true;
    }
    counts.copies.fetch_add(1, Ordering::Relaxed);
    counts.copied.fetch_add(batch.len() as u64, Ordering::Relaxed);
    grants.copy(batch).is_ok()
}
