//! Allocates space of a sparse data file ahead of new places.
//!
//! In: a new place that a request is about to write. Out: one allocation for many such writes,
//! because a write is slower if the host's file system has to allocate space for it.
//!
//! What must hold
//! - Only places that follow one another cause an allocation, so scattered places keep a file
//!   sparse.
//! - No write depends on it. If it fails, each write allocates its own space.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use blockyard_ring::semaphore::Semaphore;

use crate::storage::Storage;

/// Bytes of the first allocation of a run, and most bytes of one. Each has twice the bytes of the
/// one before.
const BYTES: (u64, u64) = (1 << 20, 16 << 20);

/// What is allocated ahead in one data file.
pub(super) struct Ahead {
    state: Mutex<State>,
    one: Semaphore,
}

struct State {
    /// End of the latest place that was not allocated ahead.
    next: u64,
    /// The latest allocation.
    allocated: Range<u64>,
    /// Bytes of the next one.
    bytes: u64,
}

impl State {
    fn has(&self, place: &Range<u64>) -> bool {
        self.allocated.start <= place.start && place.end <= self.allocated.end
    }

    /// Returns whether this place follows earlier ones, and has no space yet.
    fn follows(&mut self, place: &Range<u64>) -> bool {
        if self.has(place) {
            return false;
        }
        let Range { start, end } = self.allocated;
        let after_allocated = start < end && (start..=end).contains(&place.start);
        let follows = after_allocated || place.start == self.next;
        self.next = place.end;
        follows
    }

    /// Returns what to allocate for a place.
    fn allocate(&mut self, place: &Range<u64>) -> Range<u64> {
        let goes_on = (self.allocated.start..=self.allocated.end).contains(&place.start);
        self.bytes = if goes_on { (self.bytes * 2).clamp(BYTES.0, BYTES.1) } else { BYTES.0 };
        self.allocated = place.start..place.end.max(place.start + self.bytes);
        self.allocated.clone()
    }
}

impl Ahead {
    pub(super) fn new() -> Self {
        let state = State { next: u64::MAX, allocated: 0..0, bytes: 0 };
        Ahead { state: state.into(), one: Semaphore::new(1) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates space for a place, and for those that may follow it.
    pub(super) async fn prepare(&self, file: &impl Storage, place: Range<u64>) {
        if !self.state().follows(&place) {
            return;
        }
        let _one = self.one.acquire().await;
        let wanted = {
            let mut state = self.state();
            if state.has(&place) {
                return;
            }
            state.allocate(&place)
        };
        // An error is that of each write itself, if it matters.
        if let Err(e) = allocate(file, wanted).await {
            tracing::debug!("cannot allocate space ahead: {e}");
        }
    }
}

async fn allocate(file: &impl Storage, wanted: Range<u64>) -> io::Result<()> {
    let (Some(allocated), len) = (file.allocated()?, file.len().await?) else { return Ok(()) };
    let end = wanted.end.min(len);
    if allocated >= len || wanted.start >= end {
        return Ok(());
    }
    file.allocate(wanted.start, end - wanted.start).await
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn asked(ahead: &Ahead, place: Range<u64>) -> Option<Range<u64>> {
        let mut state = ahead.state();
        state.follows(&place).then(|| state.allocate(&place))
    }

    #[test]
    fn places_that_follow_one_another_get_growing_allocations() {
        let ahead = Ahead::new();
        let block = |number: u64| number * 4096..(number + 1) * 4096;
        assert_eq!(asked(&ahead, block(0)), None, "it may be the only one");
        let allocated: Vec<_> =
            (1..8192).filter_map(|number| asked(&ahead, block(number))).collect();
        let bytes = allocated.iter().map(|range| range.end - range.start);
        assert_eq!(bytes.collect::<Vec<_>>(), [1, 2, 4, 8, 16, 16].map(|mib| mib * MIB));
        let mut pairs = allocated.windows(2);
        assert!(pairs.all(|pair| pair[0].end == pair[1].start), "{allocated:?}");
    }

    #[test]
    fn scattered_places_get_nothing() {
        let ahead = Ahead::new();
        for number in 0..1000u64 {
            let at = number * 7919 % 1000 * MIB;
            assert_eq!(asked(&ahead, at..at + 4096), None, "at {at}");
        }
    }

    #[test]
    fn a_place_that_crosses_the_end_of_an_allocation_gets_the_next_one() {
        let ahead = Ahead::new();
        assert_eq!(asked(&ahead, 0..MIB), None);
        assert_eq!(asked(&ahead, MIB..2 * MIB - 512), Some(MIB..2 * MIB));
        let end = 3 * MIB - 512;
        assert_eq!(asked(&ahead, 2 * MIB - 512..end), Some(2 * MIB - 512..4 * MIB - 512));
        // A large place is allocated as a whole.
        let large = 4 * MIB - 512..40 * MIB;
        assert_eq!(asked(&ahead, large.clone()), Some(large));
    }
}
