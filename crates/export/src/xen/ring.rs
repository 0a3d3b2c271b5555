//! The ring that back end and front end share: requests and responses use the same entries.
//!
//! What must hold
//! - The back end copies each entry out once.
//! - The front end's index is accepted only if the ring can hold that many requests without a
//!   response.
//! - Responses are written before the index that publishes them. The back end sends an event only
//!   if the front end requested one.

use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use blockyard_ring::SharedSlice;

use super::abi::{Abi, ENTRY_MOST, HEADER, Request};
use super::record::{Record, RecordError};

/// Offsets in the header.
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// The front end's index claims more requests than the ring has entries.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{requests} requests without a response in a ring of {entries} entries")]
pub struct Overflow {
    requests: u32,
    entries: u32,
}

/// The back end's side of a ring.
pub struct Ring {
    slice: SharedSlice,
    abi: Abi,
    entries: u32,
    /// Number of requests taken, of responses written, and of responses published. The counters
    /// wrap.
    taken: u32,
    answered: u32,
    shown: u32,
    record: Option<Record>,
}

impl Ring {
    /// Creates the back end's side over the ring's pages. Continues after the responses that the
    /// last back end published.
    pub fn new(slice: SharedSlice, abi: Abi) -> Self {
        let entries = abi.entries(slice.len() / 4096);
        let shown = slice.load_u32(RSP_PROD, Ordering::Acquire);
        Ring { slice, abi, entries, taken: shown, answered: shown, shown, record: None }
    }

    /// Keeps a record of requests in flight. Returns the requests that the last server had taken
    /// without a response. `settled`: no server has taken requests that have no response. If that
    /// is not known, and the last server left no record, a ring with requests is refused.
    pub fn keep_record(
        &mut self,
        path: &Path,
        key: u64,
        settled: bool,
    ) -> Result<Vec<Request>, RecordError> {
        let (mut record, found) = Record::open(path, self.entries, key, self.shown)?;
        let (taken, found) = match found {
            Some(found) => found,
            None => {
                self.check_known(settled)?;
                record.begin(self.entries, key, self.shown);
                (self.shown, Vec::new())
            }
        };
        self.record = Some(record);
        self.taken = taken;
        let abi = self.abi;
        Ok(found
            .iter()
            .map(|(slot, bytes)| Request { slot: *slot, ..Request::parse(abi, bytes) })
            .collect())
    }

    /// Returns an error if the ring has requests that the last server may have completed.
    /// Responses may have overwritten the entries of other requests.
    pub fn check_known(&self, settled: bool) -> Result<(), RecordError> {
        let requests = self.slice.load_u32(REQ_PROD, Ordering::Acquire).wrapping_sub(self.shown);
        if settled || requests == 0 { Ok(()) } else { Err(RecordError::Unknown { requests }) }
    }

    /// Returns the next request, if there is one. After an error (an invalid producer index) the
    /// ring must not be used any more.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Request>, Overflow> {
        let produced = self.slice.load_u32(REQ_PROD, Ordering::Acquire);
        let requests = produced.wrapping_sub(self.answered);
        if requests > self.entries {
            return Err(Overflow { requests, entries: self.entries });
        }
        // A front end whose index went back only delays its own requests.
        if requests <= self.taken.wrapping_sub(self.answered) {
            return Ok(None);
        }
        let at = self.place(self.taken);
        let index = self.taken;
        self.taken = index.wrapping_add(1);
        let bytes = match self.abi {
            Abi::X86_64 => self.slice.copy_out::<ENTRY_MOST>(at),
            Abi::X86_32 => {
                let mut bytes = [0; ENTRY_MOST];
                bytes[..108].copy_from_slice(&self.slice.copy_out::<108>(at));
                bytes
            }
        };
        let slot = self.record.as_mut().map_or(0, |record| record.take(index, bytes));
        Ok(Some(Request { slot, ..Request::parse(self.abi, &bytes) }))
    }

    /// Writes the response to a taken request.
    #[inline]
    pub fn answer(&mut self, id: u64, operation: u8, slot: u32, status: i16) {
        debug_assert_ne!(self.answered, self.taken, "a response without a request");
        let at = self.place(self.answered);
        self.slice.copy_in(at, id.to_le_bytes());
        let [low, high] = status.to_le_bytes();
        self.slice.copy_in(at + 8, [operation, 0, low, high]);
        if let Some(record) = &mut self.record {
            record.answer(slot, self.answered);
        }
        self.answered = self.answered.wrapping_add(1);
    }

    /// Publishes all written responses. Returns whether the front end wants an event.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.shown == self.answered {
            return false;
        }
        self.slice.store_u32(RSP_PROD, self.answered, Ordering::Release);
        if let Some(record) = &mut self.record {
            record.shown();
        }
        fence(Ordering::SeqCst);
        let wanted = self.slice.load_u32(RSP_EVENT, Ordering::Acquire);
        let old = std::mem::replace(&mut self.shown, self.answered);
        self.shown.wrapping_sub(wanted) < self.shown.wrapping_sub(old)
    }

    /// Requests an event for the next request. Returns false if the ring already contains a
    /// request.
    #[inline]
    pub fn enable_events(&mut self) -> bool {
        self.slice.store_u32(REQ_EVENT, self.taken.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let requests = self.slice.load_u32(REQ_PROD, Ordering::Acquire).wrapping_sub(self.answered);
        requests <= self.taken.wrapping_sub(self.answered)
    }

    fn place(&self, index: u32) -> usize {
        HEADER + (index & (self.entries - 1)) as usize * self.abi.entry()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockyard_ring::Region;

    use super::super::abi::Ask;
    use super::*;

    fn slice() -> SharedSlice {
        Arc::new(Region::memfd("ring", 0, 0, 4096).unwrap().0).slice()
    }

    /// Does what a front end does for one request: a read of one page with id `id`.
    fn put(slice: &SharedSlice, index: u32, id: u8) {
        let at = HEADER + index as usize % 32 * ENTRY_MOST;
        slice.write(at, &[0, 1, 0, 0, 0, 0, 0, 0, id]);
        slice.store_u32(REQ_PROD, index.wrapping_add(1), Ordering::Release);
    }

    #[test]
    fn responses_have_any_order_even_if_indices_wrap() {
        let slice = slice();
        slice.store_u32(RSP_PROD, u32::MAX, Ordering::Relaxed);
        slice.store_u32(REQ_PROD, u32::MAX, Ordering::Relaxed);
        slice.store_u32(RSP_EVENT, 1, Ordering::Relaxed);
        let mut ring = Ring::new(slice.clone(), Abi::X86_64);
        assert_eq!((ring.pop(), ring.publish(), ring.enable_events()), (Ok(None), false, true));
        assert_eq!(slice.load_u32(REQ_EVENT, Ordering::Relaxed), 0);
        put(&slice, u32::MAX, 5);
        put(&slice, 0, 6);
        assert!(!ring.enable_events());
        let mut pop = || ring.pop().unwrap().map(|request| (request.id, request.ask));
        assert_eq!([pop(), pop(), pop()], [Some((5, Ask::Read)), Some((6, Ask::Read)), None]);
        ring.answer(6, 0, 0, 0);
        // The front end requested an event for response 1, which is index 0.
        assert!(!ring.publish());
        ring.answer(5, 0, 0, -1);
        assert!(ring.publish());
        assert_eq!(slice.load_u32(RSP_PROD, Ordering::Relaxed), 1);
        assert_eq!(slice.copy_out(HEADER + 31 * ENTRY_MOST), [6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(slice.copy_out(HEADER), [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
    }

    #[test]
    fn the_next_server_takes_requests_without_a_response_again() {
        let slice = slice();
        let path = std::env::temp_dir().join(format!("blockyard-record-{}", std::process::id()));
        let mut ring = Ring::new(slice.clone(), Abi::X86_64);
        assert!(ring.keep_record(&path, 1, false).unwrap().is_empty());
        (0..5).for_each(|index| put(&slice, index, index as u8));
        let taken: Vec<_> = (0..4).map(|_| ring.pop().unwrap().unwrap()).collect();
        // Responses overwrite the entries of the first requests.
        ring.answer(taken[2].id, 0, taken[2].slot, 0);
        ring.publish();
        ring.answer(taken[1].id, 0, taken[1].slot, 0);
        // The server is killed while one response is not published.
        drop(ring);
        let mut ring = Ring::new(slice.clone(), Abi::X86_64);
        let mut again: Vec<_> =
            ring.keep_record(&path, 1, false).unwrap().iter().map(|request| request.id).collect();
        again.sort();
        assert_eq!(again, [0, 1, 3]);
        assert_eq!(ring.pop().unwrap().map(|request| request.id), Some(4));
        assert_eq!(ring.pop(), Ok(None));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_ring_with_requests_and_without_a_record_is_served_only_if_no_server_took_them() {
        let slice = slice();
        let path = std::env::temp_dir().join(format!("blockyard-unknown-{}", std::process::id()));
        let mut ring = Ring::new(slice.clone(), Abi::X86_64);
        ring.keep_record(&path, 1, false).unwrap();
        (0..3).for_each(|index| put(&slice, index, index as u8));
        let taken: Vec<_> = (0..3).map(|_| ring.pop().unwrap().unwrap()).collect();
        // This response overwrites the entry of request 0.
        ring.answer(taken[2].id, 0, taken[2].slot, 0);
        ring.publish();
        // The server is killed, and the record is that of other rings.
        drop(ring);
        let mut ring = Ring::new(slice.clone(), Abi::X86_64);
        let refused = ring.keep_record(&path, 2, false).unwrap_err().to_string();
        assert!(refused.contains("2 requests of the guest have no response"), "{refused}");
        ring.check_known(false).unwrap_err();
        ring.check_known(true).unwrap();
        // The refusal keeps the record.
        assert_eq!(ring.keep_record(&path, 1, false).unwrap().len(), 2);
        std::fs::remove_file(&path).unwrap();
        assert!(ring.keep_record(&path, 1, true).unwrap().is_empty());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_index_too_far_ahead_is_an_error_and_one_that_went_back_is_not() {
        let slice = slice();
        let mut ring = Ring::new(slice.clone(), Abi::X86_32);
        slice.store_u32(REQ_PROD, 33, Ordering::Relaxed);
        assert_eq!(ring.pop(), Err(Overflow { requests: 33, entries: 32 }));
        slice.store_u32(REQ_PROD, 32, Ordering::Relaxed);
        for _ in 0..32 {
            assert!(ring.pop().unwrap().is_some());
        }
        assert_eq!(ring.pop(), Ok(None));
        slice.store_u32(REQ_PROD, 3, Ordering::Relaxed);
        assert_eq!((ring.pop(), ring.enable_events()), (Ok(None), true));
        slice.store_u32(REQ_PROD, u32::MAX, Ordering::Relaxed);
        assert!(ring.pop().is_err());
    }
}
