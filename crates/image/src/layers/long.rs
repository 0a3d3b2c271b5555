//! Long requests: discards and zeroes of many clusters. They are done in pieces, so that other
//! requests go on, and so that the end of an export does not wait for them.
//!
//! In: ranges of the guest's disk. Out: pieces of them, one after another.
//!
//! What must hold
//! - The long requests of an image begin at most [`TURNS`] pieces in one iteration of a reactor,
//!   however many requests there are. A turn lasts into the next iteration.
//! - A short request costs about as much as a write, so it is not divided and needs no turn.
//! - A request that stops has done some of its pieces completely, and has begun no other.

use std::cell::Cell;
use std::io;
use std::time::Instant;

use blockyard_ring::semaphore::Semaphore;

use crate::sync::pace::yield_once;

/// Number of pieces that are in progress at a time, of all requests for an image on a reactor.
const TURNS: u64 = 2;
/// A request is short up to this part of a piece.
const SHORT: u64 = 32;

/// Whether a request may be left undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duty {
    /// A discard: its answer promises nothing.
    Hint,
    /// The guest relies on the answer, so a request that stops is an error.
    Must,
}

/// The long requests for an image on one reactor.
pub(crate) struct LongRequests {
    turns: Semaphore,
    /// Number of times that hints in progress were stopped.
    stops: Cell<u64>,
    /// Some: all hints stop at once, and other requests stop at this time.
    ends: Cell<Option<Instant>>,
}

/// Returns whether a request must be done in pieces of `size` bytes.
pub(crate) fn is_long(len: u64, size: u64) -> bool {
    len > size / SHORT
}

impl Default for LongRequests {
    fn default() -> Self {
        let (stops, ends) = Default::default();
        LongRequests { turns: Semaphore::new(TURNS), stops, ends }
    }
}

impl LongRequests {
    /// Stops the hints that are in progress.
    pub fn stop_hints(&self) {
        self.stops.set(self.stops.get() + 1);
    }

    /// Some: stops all hints until the next call, and all other requests from this time on.
    pub fn end_at(&self, time: Option<Instant>) {
        self.ends.set(time);
    }

    /// Runs `work` with each piece of a range, with its offset and length. A piece has `size`
    /// bytes, and ends at a multiple of `size`.
    pub async fn in_pieces(
        &self,
        offset: u64,
        len: u64,
        size: u64,
        duty: Duty,
        work: impl AsyncFn(u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        if !is_long(len, size) {
            return work(offset, len).await;
        }
        let (mut at, end, stops) = (offset, offset + len, self.stops.get());
        while at < end {
            let _turn = self.turns.acquire().await;
            match (duty, self.ends.get()) {
                (Duty::Hint, Some(_)) => return Ok(()),
                (Duty::Hint, None) if self.stops.get() != stops => return Ok(()),
                (Duty::Must, Some(time)) if Instant::now() >= time => {
                    let what = "the disk's export ends, and the request would take too long";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                }
                _ => {}
            }
            let next = end.min((at / size + 1) * size);
            work(at, next - at).await?;
            at = next;
            yield_once().await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::pin::pin;
    use std::rc::Rc;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use blockyard_ring::Executor;

    use super::*;

    const SIZE: u64 = 64;

    /// Returns the pieces of a request that stops when `stop` says so, after it has begun a piece.
    fn pieces(
        offset: u64,
        len: u64,
        duty: Duty,
        stop: impl Fn(&LongRequests),
    ) -> (Vec<(u64, u64)>, bool) {
        let (long, done) = (LongRequests::default(), RefCell::new(Vec::new()));
        let request = long.in_pieces(offset, len, SIZE, duty, async |at, len| {
            done.borrow_mut().push((at, len));
            stop(&long);
            Ok(())
        });
        let mut request = pin!(request);
        let context = &mut Context::from_waker(Waker::noop());
        let result = loop {
            if let Poll::Ready(result) = request.as_mut().poll(context) {
                break result;
            }
        };
        (done.take(), result.is_ok())
    }

    #[test]
    fn pieces_cover_the_range_and_end_at_multiples_of_their_size() {
        let whole = pieces(60, 140, Duty::Must, |_| ());
        assert_eq!(whole, (vec![(60, 4), (64, 64), (128, 64), (192, 8)], true));
        assert_eq!(pieces(63, 2, Duty::Must, |_| ()), (vec![(63, 2)], true), "a short request");
    }

    #[test]
    fn a_stop_ends_hints_after_the_present_piece_and_other_requests_at_its_time() {
        let first = vec![(0, 64)];
        let now = Instant::now();
        let later = now + Duration::from_secs(3600);
        assert_eq!(pieces(0, 256, Duty::Hint, LongRequests::stop_hints), (first.clone(), true));
        for time in [now, later] {
            let hint = pieces(0, 256, Duty::Hint, |long| long.end_at(Some(time)));
            assert_eq!(hint, (first.clone(), true));
        }
        let must = |time| pieces(0, 256, Duty::Must, move |long| long.end_at(time));
        assert_eq!(must(Some(now)), (first, false));
        assert_eq!((must(Some(later)).0.len(), must(None).0.len()), (4, 4));
        assert_eq!(pieces(0, 256, Duty::Must, LongRequests::stop_hints).0.len(), 4);
    }

    #[test]
    fn many_requests_begin_few_pieces_in_an_iteration() {
        const REQUESTS: u64 = 200;
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let work = async move {
            let long = Rc::new(LongRequests::default());
            let begun = Rc::new(RefCell::new(BTreeMap::<u64, u64>::new()));
            let ended = Rc::new(Cell::new(0));
            for _ in 0..REQUESTS {
                let (long, begun, ended) = (long.clone(), begun.clone(), ended.clone());
                let tasks = handle.clone();
                handle.spawn(async move {
                    let piece = async |_, _| {
                        *begun.borrow_mut().entry(tasks.iteration()).or_default() += 1;
                        Ok(())
                    };
                    long.in_pieces(0, 4 * SIZE, SIZE, Duty::Must, piece).await.unwrap();
                    ended.set(ended.get() + 1);
                });
            }
            while ended.get() < REQUESTS {
                handle.yield_now().await;
            }
            let begun = begun.take();
            assert_eq!(begun.values().sum::<u64>(), 4 * REQUESTS);
            assert!(begun.values().all(|pieces| *pieces <= TURNS), "{begun:?}");
        };
        executor.block_on(work).unwrap();
    }
}
