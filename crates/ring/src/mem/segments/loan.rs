//! The memory of a request, lent to another thread.
//!
//! In: the segments of a request on a reactor. Out: a [`Lent`](super::Lent), which another thread
//! reads, fills, or uses in operations of its files.
//!
//! What must hold
//! - After [`Loan::end`] nothing reads or changes the guest's memory through the loan: no copy, and
//!   no operation of the kernel. The guest may use it for something else then.
//! - The memory stays mapped until then.
//! - Only a guest's memory is lent itself. Of other segments the other thread gets a copy, because
//!   a buffer of this process may have more users on the reactor.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use super::{AlignedBuf, Owner, Segments};
use crate::mem::memory::Region;

/// Addresses, and what keeps them valid.
struct Memory {
    iov: Vec<libc::iovec>,
    _keeps: Keeps,
}

#[expect(dead_code, reason = "the values only keep memory alive")]
enum Keeps {
    Regions(Vec<Arc<Region>>),
    Copy(AlignedBuf),
}

// The addresses are in a guest's memory, or in a buffer that only this loan uses.
// SAFETY: `_keeps` keeps both alive, and any thread may release them. A guest's memory is accessed
// by copies of bytes only, as another process accesses it. The buffer has one user at a time: the
// other thread until the end of the loan, then the reactor.
unsafe impl Send for Memory {}

struct State {
    /// None after the end.
    memory: Option<Memory>,
    /// Number of copies and operations that use the memory now.
    uses: usize,
    has_ended: bool,
    /// Set while the reactor waits for the last use.
    waker: Option<Waker>,
}

pub(super) struct Shared(Mutex<State>);

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a part of the memory for the calling thread. The loan does not end before the
    /// segments are dropped.
    pub(super) fn segments(self: &Arc<Self>, start: usize, len: usize) -> io::Result<Segments> {
        let mut state = self.state();
        let gone = || io::Error::new(io::ErrorKind::TimedOut, "the request is already answered");
        if state.has_ended {
            return Err(gone());
        }
        let iov = state.memory.as_ref().ok_or_else(gone)?.iov.clone();
        state.uses += 1;
        drop(state);
        let owner = Owner::Lent(Rc::new(Use(self.clone())));
        let total = iov.iter().map(|v| v.iov_len).sum();
        let all = Segments::new(iov, total, owner);
        Ok(all.slice(start, len))
    }
}

/// One use of lent memory, which stays until this is dropped.
pub(super) struct Use(Arc<Shared>);

impl Drop for Use {
    fn drop(&mut self) {
        let (waker, _memory) = {
            let mut state = self.0.state();
            state.uses -= 1;
            let is_last = state.uses == 0 && state.has_ended;
            let waker = state.waker.take_if(|_| is_last);
            // The reactor releases the memory, except if it does not wait.
            let memory = state.memory.take_if(|_| is_last && waker.is_none());
            (waker, memory)
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// What the reactor keeps of a loan.
#[must_use = "a loan must end before its request is answered"]
pub struct Loan {
    pub(super) shared: Arc<Shared>,
    pub(super) own: Segments,
    is_copy: bool,
}

impl Segments {
    /// Returns whether [`Segments::lend`] lends the memory itself, not a copy.
    pub fn is_lendable(&self) -> bool {
        matches!(self.parts().owner, Owner::Guest(_) | Owner::Regions(_))
    }

    /// Lends the memory to another thread. `is_filled`: it has data that the other thread needs.
    pub fn lend(self, is_filled: bool) -> Loan {
        let parts = self.parts();
        let regions = match &parts.owner {
            Owner::Guest(memory) => Some(memory.regions_of(&parts.iov)),
            Owner::Regions(regions) => Some(regions.clone()),
            _ => None,
        };
        let is_copy = regions.is_none();
        let memory = match regions {
            Some(regions) => Memory { iov: parts.iov.clone(), _keeps: Keeps::Regions(regions) },
            None => {
                let copy = AlignedBuf::zeroed(parts.len);
                let base = copy.ptr.as_ptr();
                if is_filled {
                    // SAFETY: the buffer has `len` initialized bytes, and no other user yet.
                    self.copy_out(0, unsafe { std::slice::from_raw_parts_mut(base, parts.len) });
                }
                let iov = vec![libc::iovec { iov_base: base.cast(), iov_len: parts.len }];
                Memory { iov, _keeps: Keeps::Copy(copy) }
            }
        };
        let state = State { memory: Some(memory), uses: 0, has_ended: false, waker: None };
        Loan { shared: Arc::new(Shared(state.into())), own: self, is_copy }
    }
}

impl Loan {
    /// Ends the loan, and waits for operations that use the guest's memory. `is_filled`: the other
    /// thread has put data into it. Returns the segments.
    pub async fn end(mut self, is_filled: bool) -> Segments {
        // Nothing else sees a copy that nothing needs.
        let waits = !self.is_copy || is_filled;
        let memory = poll_fn(|cx| {
            let mut state = self.shared.state();
            state.has_ended = true;
            if state.uses > 0 && waits {
                state.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(state.memory.take_if(|_| waits))
        })
        .await;
        let own = std::mem::take(&mut self.own);
        if let (Some(Memory { iov, .. }), true) = (&memory, self.is_copy) {
            // SAFETY: the buffer has these bytes, is alive, and has no other user any more.
            let copy = unsafe { std::slice::from_raw_parts(iov[0].iov_base.cast(), own.len()) };
            own.copy_in(0, copy);
        }
        own
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let _memory = {
            let mut state = self.shared.state();
            (state.has_ended, state.waker) = (true, None);
            // Else the last use releases it.
            let is_unused = state.uses == 0;
            state.memory.take_if(|_| is_unused)
        };
    }
}

#[cfg(test)]
mod tests;
