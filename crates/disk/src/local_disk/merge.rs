//! Neighbouring requests of one batch, done by one operation.
//!
//! ```text
//!   batch   read 0+4k   read 4k+4k   read 8k+8k   write 0+4k   read 16k+4k        offset + length
//!           └──────── a run: read 0+16k ──────┘   └ by itself  └ by itself
//! ```
//! In: requests in the order they were taken. A run is what stands side by side there and on the
//! disk: nothing is put before or after anything else. Out: each one's own answer, and its own
//! place in the statistics. What must hold: no request fails that would not have failed by itself.
//! So each is admitted for itself, and when the one operation fails, each is done again for itself:
//! one bad sector is one bad request.

use std::future::{Future, poll_fn};
use std::task::Poll;

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use super::{CurrentImage, LocalDisk};
use crate::request::{Finished, Op, Request, Token};

/// Bytes of a run, at most: data of that length cost far more than their operation does, so a
/// longer one gains nothing, and its first request waits for its last.
const MOST_BYTES: u64 = 1 << 20;
/// Entries of a run's iovec, at most: 1 MiB in pages of 4 KiB, and as many again for data that lie
/// across pages. The kernel takes 1024 (IOV_MAX).
const MOST_PIECES: usize = 512;

/// Requests that one operation does, and what is theirs afterwards. Used again: its vectors keep
/// their room.
pub struct Run<T: Token> {
    parts: Vec<Request<T>>,
    finished: Vec<Finished<T>>,
    /// The iovec of all, while the operation is not begun.
    together: Segments,
}

impl<T: Token> Default for Run<T> {
    fn default() -> Self {
        Run { parts: Vec::new(), finished: Vec::new(), together: Segments::default() }
    }
}

impl<T: Token> Run<T> {
    /// Takes requests that [`LocalDisk::neighbours`] has counted.
    pub fn fill(&mut self, neighbours: impl Iterator<Item = Request<T>>) {
        self.parts.extend(neighbours);
        debug_assert_eq!(self.parts.len(), count(&self.parts), "these are no neighbours");
    }

    /// See [`Request::is_volatile`]: all are, or none.
    pub fn is_volatile(&self) -> bool {
        self.parts.first().is_some_and(Request::is_volatile)
    }

    /// What was served, for the caller to deliver.
    pub fn finished(&mut self) -> impl Iterator<Item = Finished<T>> {
        self.finished.drain(..)
    }
}

/// Whether one operation can do both, as far as their places tell.
#[inline]
fn side_by_side<T: Token>(last: &Request<T>, next: &Request<T>) -> bool {
    // An end beyond 64 bits meets nothing that is admitted.
    last.offset.wrapping_add(last.len) == next.offset
        && last.op == next.op
        && matches!(last.op, Op::Read | Op::Write { .. })
}

/// How long the run is at the head of `batch`.
fn count<T: Token>(batch: &[Request<T>]) -> usize {
    let (mut bytes, mut pieces) = (0u64, 0);
    for (index, request) in batch.iter().enumerate() {
        bytes = bytes.saturating_add(request.len);
        pieces += request.segments.count();
        let fits = bytes <= MOST_BYTES && pieces <= MOST_PIECES;
        if index > 0 && !(fits && side_by_side(&batch[index - 1], request)) {
            return index;
        }
    }
    batch.len()
}

impl<S: Storage> LocalDisk<S> {
    /// How many requests at the head of a batch are for one [`Run`]; 1: the first is to be served
    /// by itself.
    #[inline]
    pub fn neighbours<T: Token>(&self, batch: &[Request<T>]) -> usize {
        match batch {
            // Filters are there to be seen: each request meets them by itself.
            [first, second, ..]
                if side_by_side(first, second) && self.disk.options().filters.is_empty() =>
            {
                count(batch)
            }
            _ => batch.len().min(1),
        }
    }

    /// Does what the requests of a run ask, by one operation if that goes well.
    pub async fn serve_run<T: Token>(&self, run: &mut Run<T>) {
        let (op, offset) =
            run.parts.first().map_or((Op::Flush, 0), |first| (first.op, first.offset));
        let good = run.parts.iter().all(|part| self.admit(part).is_ok());
        let len = if good { run.parts.iter().map(|part| part.len).sum() } else { 0 };
        let entered = self.enter_for(op, offset, len, run.parts.len() as u32).await;
        let admitted = self.now();
        let (done, mut work) = entered.image.measured(self.perform_run(&entered.image, run)).await;
        if !done {
            work = work.and(entered.image.measured(self.serve_each(&entered.image, run)).await.1);
            return self.settle_costs(&entered, work);
        }
        if let Some(first) = run.parts.first() {
            self.statistics.borrow_mut().record_merged(first.op, run.parts.len() as u64 - 1);
        }
        for part in run.parts.drain(..) {
            let status = self.still_good(part.op);
            run.finished.push(self.conclude(part, admitted, status));
        }
        self.settle_costs(&entered, work);
    }

    /// One operation for all; false: there is none, or it failed.
    async fn perform_run<T: Token>(&self, image: &CurrentImage<S>, run: &mut Run<T>) -> bool {
        let Some(first) = run.parts.first() else { return false };
        let (op, offset) = (first.op, first.offset);
        let mut together = std::mem::take(&mut run.together);
        let joined = run
            .parts
            .iter()
            .all(|part| self.admit(part).is_ok() && together.append(&part.segments));
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

    /// Each by itself, all at once: where a device takes its time to fail, they take it together.
    async fn serve_each<T: Token>(&self, image: &CurrentImage<S>, run: &mut Run<T>) {
        let Run { parts, finished, .. } = run;
        let mut left: Vec<_> =
            parts.drain(..).map(|part| Box::pin(self.serve_in(image, part))).collect();
        poll_fn(|cx| {
            left.retain_mut(|part| match part.as_mut().poll(cx) {
                Poll::Ready(done) => {
                    finished.push(done);
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
