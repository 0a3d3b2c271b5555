//! The requests of one reactor that the server has not answered yet.
//!
//! In: a request and its segments. Out: a slot; the low half of its cookie on the wire is its
//! index.
//!
//! What must hold: a slot keeps its segments until the request is answered or is no longer sent,
//! also if the caller stops waiting. Each transmission has a cookie of its own.

use std::collections::VecDeque;
use std::io;
use std::task::{Poll, Waker};
use std::time::Instant;

use blockyard_ring::Segments;

/// An NBD request.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// See [`blockyard_nbd::wire::cmd`] and [`blockyard_nbd::wire::flag`].
    pub command: u16,
    pub flags: u16,
    pub offset: u64,
    pub len: u64,
}

/// An extent of an answer to NBD_CMD_BLOCK_STATUS: its bytes, and its
/// [`blockyard_nbd::wire::state`].
pub type Piece = (u64, u32);

/// The state of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    #[default]
    Free,
    /// Waits to be sent.
    Waiting,
    Sent,
    Done,
}

/// A request, and the part of its answer that has arrived.
#[derive(Default)]
pub struct Slot {
    pub ask: Option<Ask>,
    pub segments: Segments,
    pub state: State,
    pub cookie: u64,
    /// Number of bytes of the answer that have arrived.
    pub got: u64,
    /// The ranges that have arrived, if the answer has several chunks.
    pub parts: Vec<(u64, u64)>,
    pub error: Option<io::Error>,
    pub pieces: Vec<Piece>,
    /// Number of writes that were acknowledged when the request was sent. A flush covers these.
    pub covers: u64,
    /// Time when the request was sent.
    pub since: Option<Instant>,
    waker: Option<Waker>,
    /// Whether the caller has stopped waiting.
    abandoned: bool,
}

/// The slots of a client; see the module documentation.
#[derive(Default)]
pub struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    to_send: VecDeque<u32>,
    sent: u64,
    busy: usize,
}

impl Slots {
    /// Returns the number of requests that are not answered.
    pub fn busy(&self) -> usize {
        self.busy
    }

    /// Returns the number of requests sent so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    pub fn has_to_send(&self) -> bool {
        !self.to_send.is_empty()
    }

    /// Adds a request that waits to be sent. Returns its index.
    pub fn begin(&mut self, ask: Ask, segments: Segments) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        self.slots[index as usize] =
            Slot { ask: Some(ask), segments, state: State::Waiting, ..Slot::default() };
        self.to_send.push_back(index);
        self.busy += 1;
        index
    }

    /// Returns the next request to send, with a new cookie.
    pub fn next(&mut self) -> Option<(Ask, &mut Slot)> {
        let index = self.to_send.pop_front()?;
        self.sent += 1;
        let slot = &mut self.slots[index as usize];
        (slot.state, slot.cookie) = (State::Sent, self.sent << 32 | u64::from(index));
        slot.since = Some(Instant::now());
        Some((slot.ask?, slot))
    }

    /// Returns the request in flight that has this cookie.
    pub fn of_cookie(&mut self, cookie: u64) -> Option<(u32, Ask, &mut Slot)> {
        let index = cookie as u32;
        let slot = self.slots.get_mut(index as usize)?;
        (slot.state == State::Sent && slot.cookie == cookie).then_some((index, slot.ask?, slot))
    }

    /// Returns the slot at `index`.
    pub fn get(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// Ends a request: it was answered, or it has failed.
    pub fn finish(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Done;
        self.busy -= 1;
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
        if slot.abandoned {
            self.release(index);
        }
    }

    fn release(&mut self, index: u32) -> Slot {
        self.free.push(index);
        std::mem::take(&mut self.slots[index as usize])
    }

    /// Returns the slot if the request has ended. If not, wakes `waker` when it ends.
    pub fn poll(&mut self, index: u32, waker: &Waker) -> Poll<Slot> {
        let slot = &mut self.slots[index as usize];
        if slot.state == State::Done {
            return Poll::Ready(self.release(index));
        }
        if !slot.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            slot.waker = Some(waker.clone());
        }
        Poll::Pending
    }

    /// Records that the caller has stopped waiting.
    pub fn abandon(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        match slot.state {
            State::Free => {}
            State::Sent => slot.abandoned = true,
            State::Done => drop(self.release(index)),
            State::Waiting => {
                self.to_send.retain(|other| *other != index);
                self.busy -= 1;
                self.release(index);
            }
        }
    }

    /// Returns the time when the oldest request in flight was sent.
    pub fn oldest(&self) -> Option<Instant> {
        self.slots
            .iter()
            .filter(|slot| slot.state == State::Sent)
            .filter_map(|slot| slot.since)
            .min()
    }

    /// Returns whether a request in flight has a command for which `is` returns true.
    pub fn any_sent(&self, is: impl Fn(u16) -> bool) -> bool {
        self.slots
            .iter()
            .any(|slot| slot.state == State::Sent && slot.ask.is_some_and(|ask| is(ask.command)))
    }

    /// Queues the requests in flight again after a lost connection, in the same order, except those
    /// that no caller waits for.
    pub fn send_again(&mut self) {
        let sent: Vec<_> = self.indices(State::Sent);
        for index in sent {
            let slot = &mut self.slots[index as usize];
            if slot.abandoned {
                self.busy -= 1;
                self.release(index);
                continue;
            }
            (slot.state, slot.got, slot.error) = (State::Waiting, 0, None);
            slot.pieces.clear();
            slot.parts.clear();
            self.to_send.push_back(index);
        }
        let slots = &self.slots;
        // Requests that were never sent have no cookie. They come last, in order of arrival.
        self.to_send.make_contiguous().sort_by_key(|index| match slots[*index as usize].cookie {
            0 => u64::MAX,
            cookie => cookie,
        });
    }

    /// Fails the requests that wait to be sent and for which `which` returns true.
    pub fn fail(&mut self, which: impl Fn(&Ask) -> bool, error: impl Fn() -> io::Error) {
        for index in self.indices(State::Waiting) {
            let slot = &mut self.slots[index as usize];
            if slot.ask.as_ref().is_some_and(&which) {
                slot.error = Some(error());
                self.to_send.retain(|other| *other != index);
                self.finish(index);
            }
        }
    }

    fn indices(&self, state: State) -> Vec<u32> {
        let all = self.slots.iter().enumerate().filter(|(_, slot)| slot.state == state);
        all.map(|(index, _)| index as u32).collect()
    }
}
