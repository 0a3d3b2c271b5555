//! Which requests may still use an old answer of a map.
//!
//! A request counts itself in one of two counters. An invalidation switches to the other counter,
//! and waits until the first one is zero. All requests that began before it have ended then.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

#[derive(Debug, Default)]
pub(super) struct InUse {
    current: AtomicU64,
    counts: [AtomicU64; 2],
    /// Set while an invalidation waits.
    waits: Mutex<Option<Waker>>,
}

pub(super) struct Guard<'a> {
    all: &'a InUse,
    side: usize,
}

impl InUse {
    /// Counts a request, until the guard is dropped.
    pub(super) fn enter(&self) -> Guard<'_> {
        loop {
            let epoch = self.current.load(SeqCst);
            let side = epoch as usize & 1;
            self.counts[side].fetch_add(1, SeqCst);
            let guard = Guard { all: self, side };
            if self.current.load(SeqCst) == epoch {
                return guard;
            }
        }
    }

    /// Waits until all requests have ended that began before this call. One caller at a time.
    pub(super) async fn settle(&self) {
        // A caller that was dropped may have left requests on the other side.
        self.is_empty((self.current.load(SeqCst) as usize & 1) ^ 1).await;
        let old = self.current.fetch_add(1, SeqCst) as usize & 1;
        self.is_empty(old).await;
    }

    /// Waits until the side that is not the current one is empty.
    async fn is_empty(&self, side: usize) {
        poll_fn(|cx| {
            *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
            match self.counts[side].load(SeqCst) {
                0 => Poll::Ready(()),
                _ => Poll::Pending,
            }
        })
        .await
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let is_last = self.all.counts[self.side].fetch_sub(1, SeqCst) == 1;
        // The current side is the common case: no lock.
        if is_last && self.all.current.load(SeqCst) as usize & 1 != self.side {
            let waker = self.all.waits.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    #[test]
    fn a_dropped_wait_does_not_shorten_the_next_one() {
        let (all, mut context) = (InUse::default(), Context::from_waker(Waker::noop()));
        let guard = all.enter();
        assert!(pin!(all.settle()).poll(&mut context).is_pending());
        // The future above was dropped.
        let mut next = pin!(all.settle());
        assert!(next.as_mut().poll(&mut context).is_pending());
        let later = all.enter();
        drop(guard);
        assert!(next.as_mut().poll(&mut context).is_pending(), "the later request began before");
        drop(later);
        assert!(next.as_mut().poll(&mut context).is_ready());
    }
}
