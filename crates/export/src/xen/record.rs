//! What a queue has taken and not answered, in memory that outlives this process: a file on tmpfs.
//!
//! ```text
//!   taken: slot (index, copy) ─► count of taken        answered: slot (index of the answer) ─► answer shown ─► slot free
//! ```
//! In: requests as they are taken, answers as they are written. Out, for the next server: the
//! requests without an answer that the front end sees. Answers lie in the ring where requests were,
//! so the ring alone does not tell. What must hold: at each step a process that is killed leaves
//! what the next one understands; a record of other rings says nothing.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use blockyard_ring::{Region, SharedSlice};

use super::abi::ENTRY_MOST;

/// `BYX1`.
const MAGIC: u32 = 0x3158_5942;
const HEADER: usize = 64;
const SLOT: usize = 128;
/// Of the header: magic, number of slots, key, requests taken.
const ENTRIES: usize = 4;
const KEY: usize = 8;
const TAKEN: usize = 16;
/// Of a slot: state, index, copy of the request.
const INDEX: usize = 4;
const COPY: usize = 16;

const FREE: u32 = 0;
const IN_FLIGHT: u32 = 1;
const ANSWERED: u32 = 2;

/// A request that was taken and not answered: its slot, and the ring's entry as it was taken.
pub type InFlight = (u32, [u8; ENTRY_MOST]);

/// The record of one queue.
pub struct Record {
    slice: SharedSlice,
    free: Vec<u32>,
    /// Answered, and not shown yet.
    answered: Vec<u32>,
}

impl Record {
    /// Opens the record of a ring of `entries` entries, which `key` tells from other rings.
    /// `shown`: answers that the front end sees. Returns requests taken, and those that are in
    /// flight, with their slots; a new record has `shown`, and none.
    pub fn open(
        path: &Path,
        entries: u32,
        key: u64,
        shown: u32,
    ) -> io::Result<(Self, u32, Vec<InFlight>)> {
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let len = (HEADER + entries as usize * SLOT) as u64;
        if file.metadata()?.len() != len {
            file.set_len(0)?;
            file.set_len(len)?;
        }
        let region = Region::map(&file, 0, 0, 0, len).map_err(io::Error::other)?;
        Ok(Self::over(Arc::new(region).slice(), entries, key, shown))
    }

    fn over(slice: SharedSlice, entries: u32, key: u64, shown: u32) -> (Self, u32, Vec<InFlight>) {
        let mut record = Record { slice, free: Vec::new(), answered: Vec::new() };
        match record.read(entries, key, shown) {
            Some((taken, found)) => (record, taken, found),
            None => {
                record.begin(entries, key, shown);
                (record, shown, Vec::new())
            }
        }
    }

    /// What the last server has left, if it makes sense.
    fn read(&mut self, entries: u32, key: u64, shown: u32) -> Option<(u32, Vec<InFlight>)> {
        let known = [self.load(0), self.load(ENTRIES), self.load(KEY), self.load(KEY + 4)];
        if known != [MAGIC, entries, key as u32, (key >> 32) as u32] {
            return None;
        }
        let taken = self.load(TAKEN);
        let (mut found, mut free) = (Vec::new(), Vec::new());
        for slot in 0..entries {
            let at = place(slot);
            let index = self.load(at + INDEX);
            let in_flight = match self.load(at) {
                // It is in the ring still.
                IN_FLIGHT => is_before(index, taken),
                ANSWERED => !is_before(index, shown),
                _ => false,
            };
            if in_flight {
                self.store(at, IN_FLIGHT);
                self.store(at + INDEX, taken.wrapping_sub(1));
                found.push((slot, self.slice.copy_out(at + COPY)));
            } else {
                self.store(at, FREE);
                free.push(slot);
            }
        }
        let sums_up = taken.wrapping_sub(shown) == found.len() as u32;
        self.free = free;
        sums_up.then_some((taken, found))
    }

    fn begin(&mut self, entries: u32, key: u64, shown: u32) {
        self.store(0, 0);
        (0..entries).for_each(|slot| self.store(place(slot), FREE));
        self.store(ENTRIES, entries);
        self.store(KEY, key as u32);
        self.store(KEY + 4, (key >> 32) as u32);
        self.store(TAKEN, shown);
        self.store(0, MAGIC);
        self.free = (0..entries).collect();
    }

    /// Notes a request that is taken as number `index`; returns its slot.
    #[inline]
    pub fn take(&mut self, index: u32, request: [u8; ENTRY_MOST]) -> u32 {
        let slot = self.free.pop().expect("no more requests are taken than there are entries");
        let at = place(slot);
        self.slice.copy_in(at + COPY, request);
        self.store(at + INDEX, index);
        self.store(at, IN_FLIGHT);
        self.store(TAKEN, index.wrapping_add(1));
        slot
    }

    /// Notes that a request has answer number `index`, before that is shown.
    #[inline]
    pub fn answer(&mut self, slot: u32, index: u32) {
        let at = place(slot);
        self.store(at + INDEX, index);
        self.store(at, ANSWERED);
        self.answered.push(slot);
    }

    /// The answers so far are shown.
    #[inline]
    pub fn shown(&mut self) {
        fence(Ordering::SeqCst);
        while let Some(slot) = self.answered.pop() {
            self.store(place(slot), FREE);
            self.free.push(slot);
        }
    }

    fn load(&self, at: usize) -> u32 {
        self.slice.load_u32(at, Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u32) {
        self.slice.store_u32(at, value, Ordering::Release);
    }
}

fn place(slot: u32) -> usize {
    HEADER + slot as usize * SLOT
}

/// Of indices that run over.
fn is_before(index: u32, other: u32) -> bool {
    (index.wrapping_sub(other) as i32) < 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(number: u8) -> [u8; ENTRY_MOST] {
        [number; ENTRY_MOST]
    }

    fn slice() -> SharedSlice {
        Arc::new(Region::memfd("record", 0, 0, (HEADER + 4 * SLOT) as u64).unwrap().0).slice()
    }

    /// The first byte of each request that the next server finds.
    fn found(slice: &SharedSlice, key: u64, shown: u32) -> (u32, Vec<u8>) {
        let (_, taken, found) = Record::over(slice.clone(), 4, key, shown);
        let mut found: Vec<_> = found.iter().map(|(_, bytes)| bytes[0]).collect();
        found.sort();
        (taken, found)
    }

    #[test]
    fn the_next_server_finds_what_has_no_answer_that_is_shown() {
        let slice = slice();
        let (mut record, taken, none) = Record::over(slice.clone(), 4, 7, u32::MAX);
        assert_eq!((taken, none.len()), (u32::MAX, 0));
        // Indices run over. Slots are used again.
        let (first, second) = (record.take(u32::MAX, request(1)), record.take(0, request(2)));
        assert_eq!(found(&slice, 7, u32::MAX), (1, vec![1, 2]));
        record.answer(second, u32::MAX);
        // Not shown yet; then shown, and the server is killed before it has noted that.
        assert_eq!(found(&slice, 7, u32::MAX), (1, vec![1, 2]));
        record.answered.clear();
        record.answer(second, u32::MAX);
        assert_eq!(found(&slice, 7, 0), (1, vec![1]));
        record.shown();
        record.answer(first, 0);
        record.shown();
        assert_eq!(found(&slice, 7, 1), (1, vec![]));
        for index in 1..5 {
            record.take(index, request(index as u8));
        }
        assert_eq!(found(&slice, 7, 1), (5, vec![1, 2, 3, 4]));
    }

    #[test]
    fn a_record_of_other_rings_or_of_garbage_says_nothing() {
        let slice = slice();
        let (mut record, ..) = Record::over(slice.clone(), 4, 7, 0);
        record.take(0, request(1));
        assert_eq!(found(&slice, 8, 9), (9, vec![]));
        let (mut record, ..) = Record::over(slice.clone(), 4, 7, 0);
        record.take(0, request(1));
        // The front end sees more answers than there were requests.
        assert_eq!(found(&slice, 7, 2), (2, vec![]));
        slice.write(0, &[0xa5; HEADER + 4 * SLOT]);
        assert_eq!(found(&slice, 7, 3), (3, vec![]));
    }

    #[test]
    fn a_server_that_is_killed_while_it_takes_a_request_leaves_that_in_the_ring() {
        let slice = slice();
        let (mut record, ..) = Record::over(slice.clone(), 4, 7, 0);
        record.take(0, request(1));
        // All but the last step of taking request 1.
        slice.copy_in(place(0) + COPY, request(2));
        slice.store_u32(place(0) + INDEX, 1, Ordering::Relaxed);
        slice.store_u32(place(0), IN_FLIGHT, Ordering::Relaxed);
        assert_eq!(found(&slice, 7, 0), (1, vec![1]));
    }
}
