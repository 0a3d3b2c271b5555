//! Merges adjacent requests of one batch into one operation.
//!
//! ```text
//!   batch   read 0+4k   read 4k+4k   read 8k+8k   write 0+4k   read 16k+4k        offset + length
//!           └──────── a run: read 0+16k ──────┘   └ alone      └ alone
//! ```
//!
//! In: requests in the order in which they were taken. A run consists of requests that are adjacent
//! in the batch and on the disk. Requests are never reordered. Out: an answer and a statistics
//! entry for each request.
//!
//! What must hold: no request fails that would succeed by itself. So each request is checked by
//! itself. If the merged operation fails, each request is served again by itself: one bad sector
//! fails one request.

use std::future::{Future, poll_fn};
use std::task::Poll;

use blockyard_ring::Segments;
use blockyard_ring::probe;

use super::admitting::Wanted;
use super::{Attempt, LocalDisk};
use crate::current_image::CurrentImage;
use crate::request::{Finished, Op, Request, Token};

/// Largest run in bytes. At this length the transfer costs far more than the operation, so a longer
/// run gains nothing, and its first request would wait for its last.
const MAX_BYTES: u64 = 1 << 20;
/// Maximum number of iovec entries of a run: 1 MiB in 4 KiB pages, and as many again for data that
/// cross page boundaries. The kernel accepts 1024 (IOV_MAX).
const MAX_PIECES: usize = 512;

/// A run of requests, and their answers. Reusing it keeps the capacity of its vectors.
pub struct Run<T: Token> {
    pub(super) parts: Vec<Request<T>>,
    finished: Vec<Finished<T>>,
    /// The iovec of the whole run, until the operation begins.
    together: Segments,
}

impl<T: Token> Default for Run<T> {
    fn default() -> Self {
        Run { parts: Vec::new(), finished: Vec::new(), together: Segments::default() }
    }
}

impl<T: Token> Run<T> {
    /// Adds the requests that [`LocalDisk::neighbours`] has counted.
    pub fn fill(&mut self, neighbours: impl Iterator<Item = Request<T>>) {
        self.parts.extend(neighbours);
        debug_assert_eq!(self.parts.len(), count(&self.parts), "these are no neighbours");
    }

    /// Returns [`Request::is_volatile`], which is the same for all requests of a run.
    pub fn is_volatile(&self) -> bool {
        self.parts.first().is_some_and(Request::is_volatile)
    }

    /// Returns the requests as one operation, which is charged for `charged` bytes. Returns None if
    /// there are none. They lie in one run, but some of it may be missing.
    pub(super) fn wanted(&self, charged: u64) -> Option<Wanted> {
        let op = self.parts.first()?.op;
        let offset = self.parts.iter().map(|part| part.offset).min()?;
        let end = self.parts.iter().map(|part| part.offset.saturating_add(part.len)).max()?;
        let requests = self.parts.len() as u32;
        Some(Wanted { op, offset, len: end - offset, charged, requests })
    }

    /// Returns all requests to their export unanswered.
    pub(super) fn withdraw(&mut self) {
        self.finished.extend(self.parts.drain(..).map(Request::withdraw));
    }

    /// Removes and returns the served requests. The caller delivers their answers.
    pub fn finished(&mut self) -> impl Iterator<Item = Finished<T>> {
        self.finished.drain(..)
    }
}

/// Returns whether two requests are adjacent and of the same kind, so that one operation can do
/// both.
#[inline]
fn side_by_side<T: Token>(last: &Request<T>, next: &Request<T>) -> bool {
    // An end beyond 64 bits has no neighbour, because a run is one range.
    last.offset.checked_add(last.len) == Some(next.offset)
        && last.op == next.op
        && matches!(last.op, Op::Read | Op::Write { .. })
}

/// Returns the length of the run at the start of `batch`.
fn count<T: Token>(batch: &[Request<T>]) -> usize {
    let (mut bytes, mut pieces) = (0u64, 0);
    for (index, request) in batch.iter().enumerate() {
        bytes = bytes.saturating_add(request.len);
        pieces += request.segments.count();
        let fits = bytes <= MAX_BYTES && pieces <= MAX_PIECES;
        if index > 0 && !(fits && side_by_side(&batch[index - 1], request)) {
            return index;
        }
    }
    batch.len()
}

impl LocalDisk {
    /// Returns how many requests at the start of a batch form one [`Run`]. 1: serve the first one
    /// by itself.
    #[inline]
    pub fn neighbours<T: Token>(&self, batch: &[Request<T>]) -> usize {
        match batch {
            // Filters apply to each request by itself.
            [first, second, ..]
                if side_by_side(first, second) && self.disk.options().filters.is_empty() =>
            {
                count(batch)
            }
            _ => batch.len().min(1),
        }
    }

    /// Serves the requests of a run by one operation, or each by itself if that operation fails.
    /// All of them are of one queue, so they are withdrawn together.
    pub async fn serve_run<T: Token>(&self, run: &mut Run<T>) {
        let Some(first) = run.parts.first() else { return };
        let (op, offset) = (first.op, first.offset);
        let in_flight = self.in_flight.enter(first.arrived, run.parts.len() as u32);
        let bytes: u64 = run.parts.iter().map(|part| part.len).sum();
        let probed = self.probed(&in_flight, op, offset, bytes);
        probe::request_begin(probed);
        let resumed = self.pause.resumed();
        let good = run.parts.iter().all(|part| self.check(part).is_ok());
        let (charged, requests) = (if good { bytes } else { 0 }, run.parts.len() as u32);
        let wanted = Wanted { op, offset, len: bytes, charged, requests };
        let entered = match self.enter_now(&wanted) {
            Some(entered) => Some(entered),
            None => first.unless_withdrawn(self.enter_for(&wanted)).await,
        };
        let Some(entered) = entered else {
            return run.withdraw();
        };
        probe::request_admitted(probed);
        let admitted = self.now();
        let performed = self.perform_run(&entered.image, run);
        if !entered.image.measured(performed, &entered.file_io).await {
            let each = self.serve_each(&entered.image, run, true);
            entered.image.measured(each, &entered.file_io).await;
            drop(entered);
            if !run.parts.is_empty() {
                Box::pin(self.serve_paused_run(run, resumed, probed)).await;
            }
            let ok = run.finished.iter().all(|finished| finished.status().is_ok());
            probe::request_end(probed, ok);
            return;
        }
        self.statistics.borrow_mut().record_merged(op, run.parts.len() as u64 - 1);
        for part in run.parts.drain(..) {
            let status = self.check_not_poisoned(part.op);
            run.finished.push(self.conclude(part, admitted, status));
        }
        probe::request_end(probed, true);
    }

    /// Serves the run by one operation. Returns false if that is impossible or fails.
    async fn perform_run<T: Token>(&self, image: &CurrentImage, run: &mut Run<T>) -> bool {
        let Some(first) = run.parts.first() else { return false };
        let (op, offset) = (first.op, first.offset);
        let mut together = std::mem::take(&mut run.together);
        let joined = run
            .parts
            .iter()
            .all(|part| self.check(part).is_ok() && together.append(&part.segments));
        let mut done = false;
        if joined {
            let result;
            (together, result) =
                self.perform(image, op, offset, together.len() as u64, together).await;
            done = result.is_ok();
        }
        together.release();
        run.together = together;
        done
    }

    /// Serves each request by itself, all concurrently. If the device is slow to fail, they wait
    /// together. With `may_pause`, requests that must wait for space remain in the run.
    pub(super) async fn serve_each<T: Token>(
        &self,
        image: &CurrentImage,
        run: &mut Run<T>,
        may_pause: bool,
    ) {
        let Run { parts, finished, .. } = run;
        let serve = |part| Box::pin(self.serve_in(image, part, may_pause));
        let mut left: Vec<_> = parts.drain(..).map(serve).collect();
        poll_fn(|cx| {
            left.retain_mut(|part| match part.as_mut().poll(cx) {
                Poll::Ready(Attempt::Finished(done)) => {
                    finished.push(done);
                    false
                }
                Poll::Ready(Attempt::Paused(request)) => {
                    parts.push(request);
                    false
                }
                Poll::Pending => true,
            });
            if left.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await
    }
}

#[cfg(test)]
mod tests;
