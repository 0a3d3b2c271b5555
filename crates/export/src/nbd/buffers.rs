//! The buffers that a reactor's connections read into and write from.
//!
//! In: lengths of requests. Out: buffers, and the [`Room`] for them. What must hold: a recycled
//! buffer holds anything, so the client that sends a payload has filled it; memory beyond the room
//! that is taken is bounded by [`KEPT`], twice.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use blockyard_ring::{Handle, Segments};

use super::room::{Account, GUARANTEED, Need, Room};

/// Bytes that are kept for later; and bytes of kept buffers that payloads use beyond the room that
/// they have taken.
const KEPT: usize = 32 << 20;
/// The smallest buffer, and the number of sizes: each twice the last, up to the longest request.
const SMALLEST: usize = 4096;
const SIZES: usize = 14;

#[derive(Default)]
pub struct Buffers {
    free: RefCell<[Vec<Segments>; SIZES]>,
    kept: Cell<usize>,
    /// Bytes of recycled buffers that are being filled by clients.
    lent: Cell<usize>,
    room: Room,
}

/// The buffer of a long payload. Room for it is taken as the payload arrives: a client that only
/// announces one holds none.
pub struct Growing {
    pub payload: Segments,
    len: usize,
    taken: usize,
    lent: usize,
}

fn size_class(len: usize) -> usize {
    (len.max(SMALLEST).next_power_of_two() / SMALLEST).trailing_zeros() as usize
}

fn rounded(len: usize) -> usize {
    SMALLEST << size_class(len)
}

impl Buffers {
    /// A buffer of `len` bytes, at most those of the longest request, when there is room for it.
    #[inline]
    pub async fn take(&self, handle: &Handle, len: usize, account: &Rc<Account>) -> Segments {
        self.room.take(handle, account, rounded(len), Need::Buffer).await;
        self.recycled(len).unwrap_or_else(|| {
            let mut buffer = Segments::buffer(rounded(len));
            let fits = buffer.refit(len);
            debug_assert!(fits);
            buffer
        })
    }

    fn recycled(&self, len: usize) -> Option<Segments> {
        let mut buffer = self.free.borrow_mut()[size_class(len)].pop()?;
        self.kept.set(self.kept.get() - rounded(len));
        buffer.refit(len).then_some(buffer)
    }

    /// A buffer for a payload of `len` bytes, which takes its room by [`Buffers::grow`].
    pub fn growing(&self, len: usize) -> io::Result<Growing> {
        let size = rounded(len);
        let recycled = if self.lent.get() + size <= KEPT { self.recycled(len) } else { None };
        let lent = if recycled.is_some() { size } else { 0 };
        let payload = match recycled {
            Some(payload) => payload,
            None => {
                let mut payload = Segments::mapped_buffer(size)?;
                let fits = payload.refit(len);
                debug_assert!(fits);
                payload
            }
        };
        self.lent.set(self.lent.get() + lent);
        Ok(Growing { payload, len, taken: 0, lent })
    }

    /// Takes room for more of the payload, as much as has arrived; the length that may be filled.
    pub async fn grow(
        &self,
        handle: &Handle,
        growing: &mut Growing,
        account: &Rc<Account>,
    ) -> usize {
        let more = growing.taken.clamp(GUARANTEED, rounded(growing.len) - growing.taken);
        self.room.take(handle, account, more, Need::Payload).await;
        growing.taken += more;
        growing.taken.min(growing.len)
    }

    /// The payload is complete, and its buffer one like others.
    pub fn grown(&self, growing: Growing, account: &Rc<Account>) -> Segments {
        debug_assert_eq!(growing.taken, rounded(growing.len));
        self.lent.set(self.lent.get() - growing.lent);
        self.room.payload_ended(account);
        growing.payload
    }

    /// The payload will not be complete.
    pub fn abandon(&self, growing: Growing, account: &Rc<Account>) {
        self.lent.set(self.lent.get() - growing.lent);
        self.room.payload_ended(account);
        self.room.give_back(account, growing.taken);
    }

    /// Calls `alarm` from now on when a request must wait for room.
    pub fn on_shortage(&self, alarm: fn(&Handle)) {
        self.room.on_shortage(alarm);
    }

    /// Requests wait for room: clients that do not take what was read for them keep others waiting.
    pub fn are_short(&self) -> bool {
        self.room.is_short()
    }

    /// Takes back a buffer that was taken with this length.
    #[inline]
    pub fn give_back(&self, buffer: Segments, len: usize, account: &Account) {
        let size = rounded(len);
        if self.kept.get() + size <= KEPT {
            self.kept.set(self.kept.get() + size);
            self.free.borrow_mut()[size_class(len)].push(buffer);
        } else {
            drop(buffer);
        }
        self.room.give_back(account, size);
    }

    /// For a reactor that has no connection any more.
    pub fn forget(&self) {
        self.free.borrow_mut().iter_mut().for_each(Vec::clear);
        self.kept.set(0);
    }
}
