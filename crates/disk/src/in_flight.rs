//! The requests of a disk on one reactor that have arrived and have no result yet.
//!
//! In: the arrival and the end of requests. Out: their number, and the arrival of the oldest one.
//! What must hold: an entry is reused, so the steady state allocates nothing. Only a reader looks
//! through the entries.

use std::cell::RefCell;
use std::time::Instant;

#[derive(Default)]
pub(crate) struct InFlight(RefCell<Entries>);

#[derive(Default)]
struct Entries {
    /// Arrival of each operation and the number of its requests. Unused entries have none.
    all: Vec<(Instant, u32)>,
    unused: Vec<usize>,
}

/// An operation in flight, until it is dropped.
pub(crate) struct Entry<'a>(&'a InFlight, usize);

impl InFlight {
    /// Adds an operation of `requests` requests.
    #[inline]
    pub fn enter(&self, arrived: Instant, requests: u32) -> Entry<'_> {
        let mut entries = self.0.borrow_mut();
        let at = match entries.unused.pop() {
            Some(at) => {
                entries.all[at] = (arrived, requests);
                at
            }
            None => {
                entries.all.push((arrived, requests));
                entries.all.len() - 1
            }
        };
        Entry(self, at)
    }

    /// Returns the number of requests, and the arrival of the oldest one.
    pub fn counted(&self) -> (u64, Option<Instant>) {
        let entries = self.0.borrow();
        let used = entries.all.iter().filter(|(_, requests)| *requests > 0);
        let count = used.clone().map(|(_, requests)| u64::from(*requests)).sum();
        (count, used.map(|(arrived, _)| *arrived).min())
    }
}

impl Entry<'_> {
    /// Returns the number of the entry, which no other operation in flight has.
    #[inline]
    pub fn number(&self) -> usize {
        self.1
    }
}

impl Drop for Entry<'_> {
    #[inline]
    fn drop(&mut self) {
        let mut entries = self.0.0.borrow_mut();
        entries.all[self.1].1 = 0;
        entries.unused.push(self.1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_oldest_request_counts_until_it_ends() {
        let in_flight = InFlight::default();
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let run = in_flight.enter(at(2), 3);
        let oldest = in_flight.enter(at(1), 1);
        assert_eq!(in_flight.counted(), (4, Some(at(1))));
        drop(oldest);
        assert_eq!(in_flight.counted(), (3, Some(at(2))));
        let next = in_flight.enter(at(5), 1);
        drop(run);
        assert_eq!(in_flight.counted(), (1, Some(at(5))));
        drop(next);
        assert_eq!(in_flight.counted(), (0, None));
        assert_eq!(in_flight.0.borrow().all.len(), 2, "entries are reused");
    }
}
