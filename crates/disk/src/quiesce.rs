//! Quiesces a disk on one reactor: counts the requests in flight, and holds new ones while the disk
//! is quiesced.
//!
//! In: requests; the start and the end of a quiesce, from [`crate::quiesced`]. Out: a message when
//! no request is in flight.
//! What must hold: a request that waits here holds nothing that another request needs. While the
//! disk is not quiesced, a request costs one read of a flag and one count, both local to the
//! reactor.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

use crate::replies::Replier;

/// The count of requests in flight on one reactor, and the requests that wait for the end of a
/// quiesce.
#[derive(Default)]
pub struct Quiesce {
    in_flight: Cell<u64>,
    is_quiesced: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
    /// Sends a reply when no request is in flight.
    when_drained: RefCell<Option<Replier>>,
}

/// Counts a request as in flight until it is dropped.
pub struct InFlightGuard<'a>(&'a Quiesce);

impl Quiesce {
    /// Waits while the disk is quiesced, then counts a request as in flight.
    #[inline]
    pub async fn enter(&self) -> InFlightGuard<'_> {
        loop {
            if let Some(guard) = self.try_enter() {
                return guard;
            }
            Box::pin(self.wait_for_resume()).await;
        }
    }

    /// Counts a request as in flight. Returns None while the disk is quiesced.
    #[inline]
    pub fn try_enter(&self) -> Option<InFlightGuard<'_>> {
        if self.is_quiesced.get() {
            return None;
        }
        self.in_flight.set(self.in_flight.get() + 1);
        Some(InFlightGuard(self))
    }

    /// Waits until the disk is not quiesced.
    #[cold]
    pub async fn wait_for_resume(&self) {
        poll_fn(|cx| {
            if !self.is_quiesced.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Starts quiesced, on a reactor that opens the disk during a quiesce.
    pub(crate) fn start_without_reply(&self) {
        self.start(None);
    }

    /// Holds new requests, and replies once no request is in flight.
    pub(crate) fn start(&self, when_drained: Option<Replier>) {
        self.is_quiesced.set(true);
        *self.when_drained.borrow_mut() = when_drained;
        self.reply_if_drained();
    }

    /// Ends the quiesce and wakes the requests that wait.
    pub(crate) fn resume(&self) {
        self.is_quiesced.set(false);
        *self.when_drained.borrow_mut() = None;
        for waker in self.waiting.take() {
            waker.wake();
        }
    }

    fn reply_if_drained(&self) {
        if self.in_flight.get() == 0
            && let Some(reply) = self.when_drained.borrow_mut().take()
        {
            reply.send(Ok(()));
        }
    }
}

impl Drop for InFlightGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
        if self.0.is_quiesced.get() {
            self.0.reply_if_drained();
        }
    }
}
