//! The buffers that a reactor's connections read into and write from.
//!
//! In: lengths of requests. Out: buffers, and the room for them. What must hold: all connections of a reactor together hold
//! at most [`MOST`] bytes for requests, and [`ALWAYS`] for each connection, whatever their clients do; who finds no room
//! waits, and nobody waits while there is room; a recycled buffer holds anything, so whoever sends one has filled it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use blockyard_ring::{Handle, Segments, Signal};

/// Bytes that requests of one reactor may hold.
const MOST: usize = 256 << 20;
/// Bytes that a connection may hold however many the others do: who asks for little does not wait for who asks for much.
const ALWAYS: usize = 256 << 10;
/// Bytes that are kept for later.
const KEPT: usize = 32 << 20;
/// The smallest buffer, and the number of sizes: each twice the last, up to the longest request.
const SMALLEST: usize = 4096;
const SIZES: usize = 14;

#[derive(Default)]
pub struct Buffers {
    free: RefCell<[Vec<Segments>; SIZES]>,
    kept: Cell<usize>,
    taken: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiting>>>,
}

struct Waiting {
    len: usize,
    signal: Signal,
    granted: Cell<bool>,
}

thread_local! {
    static LOCAL: Rc<Buffers> = Rc::default();
}

fn size_class(len: usize) -> usize {
    (len.max(SMALLEST).next_power_of_two() / SMALLEST).trailing_zeros() as usize
}

fn rounded(len: usize) -> usize {
    SMALLEST << size_class(len)
}

impl Buffers {
    /// This thread's.
    pub fn local() -> Rc<Self> {
        LOCAL.with(Rc::clone)
    }

    /// A buffer of `len` bytes, at most those of the longest request, when there is room for it; for who holds `held` bytes.
    #[inline]
    pub async fn take(&self, handle: &Handle, len: usize, held: usize) -> Segments {
        let full = !self.waiting.borrow().is_empty() || self.taken.get() + rounded(len) > MOST;
        if full && held + rounded(len) > ALWAYS {
            self.wait(handle, len).await;
        } else {
            self.taken.set(self.taken.get() + rounded(len));
        }
        let recycled = self.free.borrow_mut()[size_class(len)].pop();
        if let Some(mut buffer) = recycled {
            self.kept.set(self.kept.get() - rounded(len));
            if buffer.refit(len) {
                return buffer;
            }
        }
        let mut buffer = Segments::buffer(rounded(len));
        let fits = buffer.refit(len);
        debug_assert!(fits);
        buffer
    }

    /// Waits in line for room.
    async fn wait(&self, handle: &Handle, len: usize) {
        let waiting = Rc::new(Waiting { len, signal: Signal::new(handle), granted: Cell::new(false) });
        self.waiting.borrow_mut().push_back(waiting.clone());
        super::links::watch(handle);
        while !waiting.granted.get() {
            waiting.signal.wait().await;
        }
    }

    /// Somebody waits: clients that do not take what was read for them keep others waiting.
    pub fn are_short(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    /// Takes back a buffer that was taken with this length.
    #[inline]
    pub fn give_back(&self, buffer: Segments, len: usize) {
        let size = rounded(len);
        if self.kept.get() + size <= KEPT {
            self.kept.set(self.kept.get() + size);
            self.free.borrow_mut()[size_class(len)].push(buffer);
        } else {
            drop(buffer);
        }
        self.taken.set(self.taken.get() - size);
        loop {
            let Some(first) = self.waiting.borrow().front().cloned() else { break };
            if self.taken.get() + rounded(first.len) > MOST {
                break;
            }
            self.taken.set(self.taken.get() + rounded(first.len));
            self.waiting.borrow_mut().pop_front();
            first.granted.set(true);
            first.signal.ring();
        }
    }

    /// For a reactor that has no connection any more.
    pub fn forget(&self) {
        self.free.borrow_mut().iter_mut().for_each(Vec::clear);
        self.kept.set(0);
    }
}
