//! The front end's side of a blkif ring: requests go in, answers come back in the same entries.
//!
//! What must hold: an entry is written before the index that shows it; the back end gets an event
//! only if it asked for one (`req_event`); an answer is read after the index that shows it; the
//! front end asks for an event (`rsp_event`) before it sleeps.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
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

/// What the back end wrote about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Answer {
    pub id: u64,
    pub operation: u8,
    pub status: i16,
}

pub struct FrontRing {
    pub channel: FrontChannel,
    event: OwnedFd,
    /// The domain's memory, and where in it the ring begins. Its pages are neighbours.
    memory: SharedSlice,
    start: usize,
    abi: Abi,
    entries: u32,
    /// Requests written and shown, answers taken. They run over.
    written: u32,
    shown: u32,
    taken: u32,
    /// Events sent to the back end, and received.
    pub kicks: u64,
    pub signals: u64,
}

impl FrontRing {
    /// An empty ring in `pages` pages of `memory` from page `first` on.
    pub fn new(
        memory: SharedSlice,
        first: usize,
        pages: usize,
        abi: Abi,
        channel: FrontChannel,
    ) -> Result<Self> {
        let start = first * PAGE;
        (0..pages).for_each(|page| memory.write(start + page * PAGE, &[0; PAGE]));
        // The first request and the first answer come with an event.
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

    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Offset in the domain's memory of byte `at` of the ring, for tests that write anything there.
    pub fn offset(&self, at: usize) -> usize {
        self.start + at
    }

    /// Offset in the domain's memory of the entry with number `index`.
    pub fn place(&self, index: u32) -> usize {
        self.start + HEADER + (index & (self.entries - 1)) as usize * self.abi.entry()
    }

    /// Becomes readable with each event of the back end.
    pub fn event(&self) -> &OwnedFd {
        &self.event
    }

    /// Writes a request; [`FrontRing::publish`] shows it. The caller keeps count of those without
    /// an answer.
    #[inline]
    pub fn push(&mut self, entry: &Entry<'_>) {
        let at = self.place(self.written);
        let bytes = entry.bytes(self.abi);
        self.memory.write(at, &bytes[..self.abi.entry()]);
        self.written = self.written.wrapping_add(1);
    }

    /// Shows what was written. Returns whether the back end wants an event for it.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (new, old) = (self.written, self.shown);
        if new == old {
            return false;
        }
        self.shown = new;
        self.memory.store_u32(self.start + REQ_PROD, new, Ordering::Release);
        // The index must be seen before we look whether the back end sleeps: else both sides wait
        // for each other.
        fence(Ordering::SeqCst);
        let wanted = self.memory.load_u32(self.start + REQ_EVENT, Ordering::Relaxed);
        new.wrapping_sub(wanted) < new.wrapping_sub(old)
    }

    /// Sends an event, wanted or not.
    #[inline]
    pub fn kick(&mut self) {
        self.kicks += 1;
        self.channel.notify();
    }

    /// Writes and shows one request, with an event if the back end wants one.
    pub fn send(&mut self, entry: &Entry<'_>) {
        self.push(entry);
        if self.publish() {
            self.kick();
        }
    }

    /// Stores any index of requests, and sends an event.
    pub fn run_away(&mut self, index: u32) {
        self.memory.store_u32(self.start + REQ_PROD, index, Ordering::SeqCst);
        self.kick();
    }

    /// Whether the back end has taken all requests, and wants an event for the next one.
    pub fn is_drained(&self) -> bool {
        self.memory.load_u32(self.start + REQ_EVENT, Ordering::Acquire)
            == self.shown.wrapping_add(1)
    }

    /// Answers that the back end has shown and that were not taken.
    #[inline]
    pub fn ready(&self) -> u32 {
        self.memory.load_u32(self.start + RSP_PROD, Ordering::Acquire).wrapping_sub(self.taken)
    }

    /// The next answer.
    #[inline]
    pub fn pop(&mut self) -> Option<Answer> {
        if self.ready() == 0 {
            return None;
        }
        let bytes = self.memory.copy_out::<12>(self.place(self.taken));
        self.taken = self.taken.wrapping_add(1);
        let [id @ .., operation, _, low, high] = bytes;
        Some(Answer {
            id: u64::from_le_bytes(id),
            operation,
            status: i16::from_le_bytes([low, high]),
        })
    }

    /// Asks for an event with the next answer. True: there is one already, do not wait.
    pub fn arm(&mut self) -> bool {
        self.memory.store_u32(
            self.start + RSP_EVENT,
            self.taken.wrapping_add(1),
            Ordering::Relaxed,
        );
        fence(Ordering::SeqCst);
        self.ready() > 0
    }

    /// Counts the events that have come.
    pub fn take_signals(&mut self) {
        self.signals += self.channel.take();
    }

    /// Waits until there is an answer, and takes it.
    pub fn wait(&mut self, limit: Duration) -> Result<Answer> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(answer) = self.pop() {
                return Ok(answer);
            }
            if self.arm() {
                continue;
            }
            let left = deadline.checked_duration_since(Instant::now());
            let left = left.with_context(|| format!("no answer to a request for {limit:?}"))?;
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

    /// A ring of one page, and the memory that it is in.
    fn ring() -> (FrontRing, SharedSlice) {
        let domain = Machine::new().add(1, 1).unwrap();
        let channel = domain.channel().unwrap();
        (FrontRing::new(domain.memory(), 0, 1, Abi::X86_64, channel).unwrap(), domain.memory())
    }

    #[test]
    fn the_back_end_gets_events_that_it_asked_for_and_no_others() {
        let (mut ring, memory) = ring();
        let entry = Entry { head: [operation::FLUSH, 0, 0, 0], id: 7, sector: 0, rest: &[] };
        assert!(!ring.publish(), "nothing is new");
        ring.push(&entry);
        assert!(ring.publish(), "the first one comes with an event");
        ring.push(&entry);
        assert!(!ring.publish(), "the back end has not asked again");
        memory.store_u32(REQ_EVENT, 4, Ordering::Relaxed);
        ring.push(&entry);
        assert!(!ring.publish());
        (0..2).for_each(|_| ring.push(&entry));
        assert!(ring.publish(), "a batch passes the index");
        assert_eq!(memory.load_u32(REQ_PROD, Ordering::Relaxed), 5);
    }

    #[test]
    fn answers_are_taken_once_and_asked_for_before_a_sleep() {
        let (mut ring, memory) = ring();
        assert!(ring.pop().is_none() && !ring.arm());
        assert_eq!(memory.load_u32(RSP_EVENT, Ordering::Relaxed), 1);
        memory.write(HEADER, &[9, 0, 0, 0, 0, 0, 0, 0, operation::WRITE, 0, 0xff, 0xff]);
        memory.store_u32(RSP_PROD, 1, Ordering::Relaxed);
        assert!(ring.arm());
        assert_eq!(ring.pop(), Some(Answer { id: 9, operation: operation::WRITE, status: -1 }));
        assert!(ring.pop().is_none() && !ring.arm());
        assert_eq!(memory.load_u32(RSP_EVENT, Ordering::Relaxed), 2);
    }
}
