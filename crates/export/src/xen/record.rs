//! A queue's requests in flight, in memory that outlives this process: a file on tmpfs.
//!
//! ```text
//!   taken:    slot (index, copy) ─► count of taken
//!   response: slot (its index)   ─► published ─► slot free
//! ```
//!
//! In: requests when the queue takes them, and responses when the queue writes them. Out, for the
//! next server: the requests without a response that the front end can see. Responses overwrite
//! entries of the ring, so the ring alone does not contain these requests.
//!
//! What must hold
//! - If the process is killed at any step, the next server finds a consistent record.
//! - A server ignores a record of other rings.
//! - The space of the file is allocated when it is created. A store into a hole of a full tmpfs
//!   would fail, and the record would be lost without an error.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use blockyard_ring::{Region, SharedSlice};
use rustix::fs::FallocateFlags;

use super::abi::ENTRY_MOST;

/// `BYX1`.
const MAGIC: u32 = 0x3158_5942;
const HEADER: usize = 64;
const SLOT: usize = 128;
/// Offsets in the header: number of slots, key, number of requests taken. The magic is at 0.
const ENTRIES: usize = 4;
const KEY: usize = 8;
const TAKEN: usize = 16;
/// Offsets in a slot: index, copy of the request. The state is at 0.
const INDEX: usize = 4;
const COPY: usize = 16;

const FREE: u32 = 0;
const IN_FLIGHT: u32 = 1;
const ANSWERED: u32 = 2;

/// A request without a response: its slot, and a copy of its ring entry.
pub type InFlight = (u32, [u8; ENTRY_MOST]);

/// What a record says: the number of requests taken, and those in flight.
pub type Found = (u32, Vec<InFlight>);

/// Reasons why a ring cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot make record {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error(
        "{requests} requests of the guest have no response, and no record says which of them the \
         last server has completed, so a repeat could overwrite later data; restart the guest, or \
         remove the device and attach it again (blockyard xen detach --force)"
    )]
    Unknown { requests: u32 },
}

/// The record of one queue.
pub struct Record {
    slice: SharedSlice,
    free: Vec<u32>,
    /// Slots with a response that the queue has not published yet.
    answered: Vec<u32>,
}

impl Record {
    /// Opens the record of a ring of `entries` entries. `key` identifies the ring. `shown`: number
    /// of responses that the front end can see. Returns what the record says, or `None` if it is
    /// new, of other rings or not consistent. Then the caller must call [`Record::begin`].
    pub fn open(
        path: &Path,
        entries: u32,
        key: u64,
        shown: u32,
    ) -> Result<(Self, Option<Found>), RecordError> {
        let region = map(path, (HEADER + entries as usize * SLOT) as u64)
            .map_err(|source| RecordError::File { path: path.into(), source })?;
        Ok(Self::over(Arc::new(region).slice(), entries, key, shown))
    }

    fn over(slice: SharedSlice, entries: u32, key: u64, shown: u32) -> (Self, Option<Found>) {
        let mut record = Record { slice, free: Vec::new(), answered: Vec::new() };
        let found = record.read(entries, key, shown);
        (record, found)
    }

    /// Reads the record that the last server left. Returns `None` if the record is not consistent.
    fn read(&mut self, entries: u32, key: u64, shown: u32) -> Option<Found> {
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
                // If `taken` does not count the request's index, the server ended while it took the
                // request. Then the request is still in the ring.
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

    /// Begins a new record, of a ring without requests in flight.
    pub fn begin(&mut self, entries: u32, key: u64, shown: u32) {
        self.store(0, 0);
        (0..entries).for_each(|slot| self.store(place(slot), FREE));
        self.store(ENTRIES, entries);
        self.store(KEY, key as u32);
        self.store(KEY + 4, (key >> 32) as u32);
        self.store(TAKEN, shown);
        self.store(0, MAGIC);
        self.free = (0..entries).collect();
    }

    /// Records a request that is taken as number `index`. Returns its slot.
    #[inline]
    pub fn take(&mut self, index: u32, request: [u8; ENTRY_MOST]) -> u32 {
        let slot =
            self.free.pop().expect("a ring has at most as many requests in flight as entries");
        let at = place(slot);
        self.slice.copy_in(at + COPY, request);
        self.store(at + INDEX, index);
        self.store(at, IN_FLIGHT);
        self.store(TAKEN, index.wrapping_add(1));
        slot
    }

    /// Records that a request has response number `index`. Must be called before that response is
    /// published.
    #[inline]
    pub fn answer(&mut self, slot: u32, index: u32) {
        let at = place(slot);
        self.store(at + INDEX, index);
        self.store(at, ANSWERED);
        self.answered.push(slot);
    }

    /// Records that all responses written so far are published.
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

/// Maps the file of a record, and allocates its space.
fn map(path: &Path, len: u64) -> io::Result<Region> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    if file.metadata()?.len() != len {
        file.set_len(0)?;
    }
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len)?;
    Region::map(&file, 0, 0, 0, len).map_err(io::Error::other)
}

fn place(slot: u32) -> usize {
    HEADER + slot as usize * SLOT
}

/// Returns whether `index` is before `other`, for indices that wrap.
fn is_before(index: u32, other: u32) -> bool {
    (index.wrapping_sub(other) as i32) < 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn request(number: u8) -> [u8; ENTRY_MOST] {
        [number; ENTRY_MOST]
    }

    fn slice() -> SharedSlice {
        Arc::new(Region::memfd("record", 0, 0, (HEADER + 4 * SLOT) as u64).unwrap().0).slice()
    }

    /// Begins a new record.
    fn new(slice: &SharedSlice, shown: u32) -> Record {
        let (mut record, none) = Record::over(slice.clone(), 4, 7, shown);
        assert_eq!(none, None);
        record.begin(4, 7, shown);
        record
    }

    /// Returns the first byte of each request that the next server finds.
    fn found(slice: &SharedSlice, key: u64, shown: u32) -> Option<(u32, Vec<u8>)> {
        let (taken, found) = Record::over(slice.clone(), 4, key, shown).1?;
        let mut found: Vec<_> = found.iter().map(|(_, bytes)| bytes[0]).collect();
        found.sort();
        Some((taken, found))
    }

    #[test]
    fn the_next_server_finds_requests_without_a_published_response() {
        let slice = slice();
        let mut record = new(&slice, u32::MAX);
        assert_eq!(found(&slice, 7, u32::MAX), Some((u32::MAX, vec![])));
        // Indices wrap, and slots are reused.
        let (first, second) = (record.take(u32::MAX, request(1)), record.take(0, request(2)));
        assert_eq!(found(&slice, 7, u32::MAX), Some((1, vec![1, 2])));
        record.answer(second, u32::MAX);
        // The response is not published at first. Then it is published, but the server is killed
        // before it records that.
        assert_eq!(found(&slice, 7, u32::MAX), Some((1, vec![1, 2])));
        record.answered.clear();
        record.answer(second, u32::MAX);
        assert_eq!(found(&slice, 7, 0), Some((1, vec![1])));
        record.shown();
        record.answer(first, 0);
        record.shown();
        assert_eq!(found(&slice, 7, 1), Some((1, vec![])));
        for index in 1..5 {
            record.take(index, request(index as u8));
        }
        assert_eq!(found(&slice, 7, 1), Some((5, vec![1, 2, 3, 4])));
    }

    #[test]
    fn a_record_of_other_rings_or_with_garbage_says_nothing() {
        let slice = slice();
        new(&slice, 0).take(0, request(1));
        assert_eq!(found(&slice, 7, 0), Some((1, vec![1])));
        assert_eq!(found(&slice, 8, 0), None);
        // The front end sees more responses than the queue took requests.
        assert_eq!(found(&slice, 7, 2), None);
        slice.write(0, &[0xa5; HEADER + 4 * SLOT]);
        assert_eq!(found(&slice, 7, 3), None);
    }

    #[test]
    fn a_file_has_its_space_before_the_first_store() {
        let path = std::env::temp_dir().join(format!("blockyard-space-{}", std::process::id()));
        let (_record, none) = Record::open(&path, 512, 7, 0).unwrap();
        let file = std::fs::metadata(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((none, file.len()), (None, (HEADER + 512 * SLOT) as u64));
        assert!(file.blocks() * 512 >= file.len(), "{} blocks", file.blocks());
        let folder = std::env::temp_dir();
        let error = Record::open(&folder, 512, 7, 0).err().unwrap().to_string();
        assert!(error.contains(&format!("cannot make record {}: ", folder.display())), "{error}");
    }

    #[test]
    fn a_server_killed_while_taking_a_request_leaves_it_in_the_ring() {
        let slice = slice();
        new(&slice, 0).take(0, request(1));
        // Write all but the last step of taking request 1.
        slice.copy_in(place(0) + COPY, request(2));
        slice.store_u32(place(0) + INDEX, 1, Ordering::Relaxed);
        slice.store_u32(place(0), IN_FLIGHT, Ordering::Relaxed);
        assert_eq!(found(&slice, 7, 0), Some((1, vec![1])));
    }
}
