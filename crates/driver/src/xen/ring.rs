//! The front end's side of a blkif ring: requests and responses share the entries.
//!
//! What must hold
//! - An entry is written before the index that publishes it.
//! - The back end gets an event only if it requested one (`req_event`).
//! - A response is read after the index that publishes it.
//! - The front end requests an event (`rsp_event`) before it sleeps.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind::Late, Result};
use blockyard_ring::SharedSlice;
use blockyard_ring::xen::machine::FrontChannel;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::PAGE;
use super::request::{Abi, Entry, HEADER};

/// Offsets in the header.
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// The back end's response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Response {
    pub id: u64,
    pub operation: u8,
    pub status: i16,
}

/// The front end's side of a ring, and its event channel.
pub struct FrontRing {
    pub channel: FrontChannel,
    event: OwnedFd,
    /// The domain's memory, and the offset of the ring in that memory. The ring's pages are
    /// contiguous.
    memory: SharedSlice,
    start: usize,
    abi: Abi,
    entries: u32,
    /// Number of requests written, of requests published, and of responses taken. The counters
    /// wrap.
    written: u32,
    shown: u32,
    taken: u32,
    /// Number of events sent to the back end, and number of events received from it.
    pub kicks: u64,
    pub signals: u64,
}

impl FrontRing {
    /// Creates an empty ring in `pages` pages of `memory`, from page `first` on.
    pub fn new(
        memory: SharedSlice,
        first: usize,
        pages: usize,
        abi: Abi,
        channel: FrontChannel,
    ) -> Result<Self> {
        let start = first * PAGE;
        (0..pages).for_each(|page| memory.write(start + page * PAGE, &[0; PAGE]));
        // Request an event when the first request, and when the first response, is published.
        memory.store_u32(start + REQ_EVENT, 1, Ordering::SeqCst);
        memory.store_u32(start + RSP_EVENT, 1, Ordering::SeqCst);
        let event = channel.descriptor()?;
        let entries = abi.entries(pages);
        let (written, shown, taken, kicks, signals) = Default::default();
        Ok(FrontRing {
            channel,
            event,
            memory,
            start,
            abi,
            entries,
            written,
            shown,
            taken,
            kicks,
            signals,
        })
    }

    /// Returns the number of entries.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the offset of byte `at` of the ring in the domain's memory. Tests use the offset to
    /// write anything into the ring.
    pub fn offset(&self, at: usize) -> usize {
        self.start + at
    }

    /// Returns the offset of the entry with number `index` in the domain's memory.
    pub fn place(&self, index: u32) -> usize {
        self.start + HEADER + (index & (self.entries - 1)) as usize * self.abi.entry()
    }

    /// Returns the descriptor that becomes readable with each event of the back end.
    pub fn event(&self) -> &OwnedFd {
        &self.event
    }

    /// Writes a request, which [`FrontRing::publish`] makes visible. The caller limits the number
    /// of requests in flight.
    #[inline]
    pub fn push(&mut self, entry: &Entry<'_>) {
        let at = self.place(self.written);
        let bytes = entry.bytes(self.abi);
        self.memory.write(at, &bytes[..self.abi.entry()]);
        self.written = self.written.wrapping_add(1);
    }

    /// Publishes all written requests. Returns whether the back end wants an event.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (new, old) = (self.written, self.shown);
        if new == old {
            return false;
        }
        self.shown = new;
        self.memory.store_u32(self.start + REQ_PROD, new, Ordering::Release);
        // The index must be visible before the driver checks whether the back end wants an event.
        // Without the fence, both sides might wait for each other.
        fence(Ordering::SeqCst);
        let wanted = self.memory.load_u32(self.start + REQ_EVENT, Ordering::Relaxed);
        new.wrapping_sub(wanted) < new.wrapping_sub(old)
    }

    /// Sends an event, even if the back end does not want one.
    #[inline]
    pub fn kick(&mut self) {
        self.kicks += 1;
        self.channel.notify();
    }

    /// Writes and publishes a request, and sends an event if the back end wants one.
    pub fn send(&mut self, entry: &Entry<'_>) {
        self.push(entry);
        if self.publish() {
            self.kick();
        }
    }

    /// Stores `index` as the producer index of requests, unchecked, and sends an event.
    pub fn store_producer(&mut self, index: u32) {
        self.memory.store_u32(self.start + REQ_PROD, index, Ordering::SeqCst);
        self.kick();
    }

    /// Returns whether the back end has taken all requests, and wants an event for the next
    /// request.
    pub fn is_drained(&self) -> bool {
        self.memory.load_u32(self.start + REQ_EVENT, Ordering::Acquire)
            == self.shown.wrapping_add(1)
    }

    /// Returns the number of published responses that the driver has not taken.
    #[inline]
    pub fn ready(&self) -> u32 {
        self.memory.load_u32(self.start + RSP_PROD, Ordering::Acquire).wrapping_sub(self.taken)
    }

    /// Returns the next response.
    #[inline]
    pub fn pop(&mut self) -> Option<Response> {
        if self.ready() == 0 {
            return None;
        }
        let bytes = self.memory.copy_out::<12>(self.place(self.taken));
        self.taken = self.taken.wrapping_add(1);
        let [id @ .., operation, _, low, high] = bytes;
        Some(Response {
            id: u64::from_le_bytes(id),
            operation,
            status: i16::from_le_bytes([low, high]),
        })
    }

    /// Requests an event for the next response. Returns true if a response is already in the ring,
    /// so that the caller must not wait.
    pub fn arm(&mut self) -> bool {
        self.memory.store_u32(
            self.start + RSP_EVENT,
            self.taken.wrapping_add(1),
            Ordering::Relaxed,
        );
        fence(Ordering::SeqCst);
        self.ready() > 0
    }

    /// Adds the events that have arrived to the counter.
    pub fn take_signals(&mut self) {
        self.signals += self.channel.take();
    }

    /// Waits for a response, and takes it.
    pub fn wait(&mut self, limit: Duration) -> Result<Response> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(response) = self.pop() {
                return Ok(response);
            }
            if self.arm() {
                continue;
            }
            let left = deadline.checked_duration_since(Instant::now());
            let late = || Error::new(Late, format!("a request has no response for {limit:?}"));
            let left = left.ok_or_else(late)?;
            let left =
                Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
            let event = self.event.as_fd();
            let mut polled = [PollFd::new(&event, PollFlags::IN)];
            rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&left)))?;
            self.take_signals();
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_ring::xen::Machine;

    use super::super::operation;
    use super::*;

    /// Returns a ring of one page, and its memory.
    fn ring() -> (FrontRing, SharedSlice) {
        let domain = Machine::new().add(1, 1).unwrap();
        let channel = domain.channel().unwrap();
        (FrontRing::new(domain.memory(), 0, 1, Abi::X86_64, channel).unwrap(), domain.memory())
    }

    #[test]
    fn the_back_end_gets_only_events_that_it_requested() {
        let (mut ring, memory) = ring();
        let entry = Entry { head: [operation::FLUSH, 0, 0, 0], id: 7, sector: 0, rest: &[] };
        assert!(!ring.publish(), "no request is new");
        ring.push(&entry);
        assert!(ring.publish(), "the back end requested an event for the first request");
        ring.push(&entry);
        assert!(!ring.publish(), "the back end has not requested another event");
        memory.store_u32(REQ_EVENT, 4, Ordering::Relaxed);
        ring.push(&entry);
        assert!(!ring.publish());
        (0..2).for_each(|_| ring.push(&entry));
        assert!(ring.publish(), "the batch passes the event index");
        assert_eq!(memory.load_u32(REQ_PROD, Ordering::Relaxed), 5);
    }

    #[test]
    fn responses_are_taken_once_and_an_event_is_requested_before_a_sleep() {
        let (mut ring, memory) = ring();
        assert!(ring.pop().is_none() && !ring.arm());
        assert_eq!(memory.load_u32(RSP_EVENT, Ordering::Relaxed), 1);
        memory.write(HEADER, &[9, 0, 0, 0, 0, 0, 0, 0, operation::WRITE, 0, 0xff, 0xff]);
        memory.store_u32(RSP_PROD, 1, Ordering::Relaxed);
        assert!(ring.arm());
        assert_eq!(ring.pop(), Some(Response { id: 9, operation: operation::WRITE, status: -1 }));
        assert!(ring.pop().is_none() && !ring.arm());
        assert_eq!(memory.load_u32(RSP_EVENT, Ordering::Relaxed), 2);
    }
}
