//! Requests that met a full host file system, and wait until an operator resumes the disk.
//!
//! ```text
//!   request ─► image: no space ─► waits here ── resume ─► admitted again ─► image
//!                                   ├── its queue ends ─► one last attempt ─► the error
//!                                   └── its queue leaves it to another server ─► unanswered
//! ```
//!
//! In: requests of a disk with `on-enospc = "pause"`. Out: whether to try again.
//!
//! What must hold: a waiting request holds no admission, and is not in flight for a quiesce, so it
//! blocks no other request, snapshot or limit. A queue or an export that ends never waits for it.
//! The host has refused such a request before it changed anything that counts: so it can run again.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use crate::disk::Disk;

/// The requests that wait on one reactor.
#[derive(Default)]
pub(crate) struct Pause {
    waiting: RefCell<Vec<Waker>>,
    /// Number of times that the disk was resumed.
    resumed: Cell<u64>,
}

impl Pause {
    /// Returns a number that changes with each [`Pause::resume`]. Read it before an attempt: a
    /// resume during the attempt then counts for the attempt.
    #[inline]
    pub fn resumed(&self) -> u64 {
        self.resumed.get()
    }

    /// Lets the waiting requests try again.
    pub fn resume(&self) {
        self.resumed.set(self.resumed.get() + 1);
        self.check_again();
    }

    /// Makes the waiting requests check again whether they may wait.
    pub fn check_again(&self) {
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// Waits until the disk is resumed. `seen`: [`Pause::resumed`] before the attempt that failed.
    /// Returns false if the request must not wait any longer. Meanwhile `disk` counts
    /// `requests` as paused.
    pub async fn wait(
        &self,
        disk: &Disk,
        requests: u64,
        seen: u64,
        may_wait: impl Fn() -> bool,
    ) -> bool {
        let _counted = Counted::new(disk, requests);
        poll_fn(|cx| {
            if !may_wait() {
                return Poll::Ready(false);
            }
            if self.resumed.get() != seen {
                return Poll::Ready(true);
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
}

/// Requests that are counted as waiting, until this is dropped.
struct Counted<'a>(&'a Disk, u64);

impl<'a> Counted<'a> {
    fn new(disk: &'a Disk, requests: u64) -> Self {
        if disk.paused.fetch_add(requests, Ordering::SeqCst) == 0 {
            disk.report_change();
        }
        Counted(disk, requests)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let Counted(disk, requests) = self;
        if disk.paused.fetch_sub(*requests, Ordering::SeqCst) == *requests {
            disk.report_change();
        }
    }
}
