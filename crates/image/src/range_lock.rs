//! Keeps read-modify-write apart from other writes to the same blocks.
//!
//! Only images whose O_DIRECT unit is larger than a sector need this: there a write of part of a block reads the block,
//! changes it and writes it whole, and would undo a write to the rest of the block that came in between. All writes of
//! such an image take their blocks first. Reactors share the lock; images with 512-byte units never touch it.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Mutex;
use std::task::{Poll, Waker};

#[derive(Debug, Default)]
pub struct RangeLock {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    ranges: Vec<Range<u64>>,
    waiting: Vec<Waker>,
}

impl RangeLock {
    /// Waits until nobody holds a byte of `range` (bytes), and holds it until the guard is dropped.
    pub async fn hold(&self, range: Range<u64>) -> RangeGuard<'_> {
        poll_fn(|cx| {
            let mut held = self.held.lock().unwrap_or_else(|e| e.into_inner());
            if held.ranges.iter().any(|r| r.start < range.end && range.start < r.end) {
                held.waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            held.ranges.push(range.clone());
            Poll::Ready(())
        })
        .await;
        RangeGuard { lock: self, range }
    }
}

pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    range: Range<u64>,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.lock.held.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(at) = held.ranges.iter().position(|r| *r == self.range) {
            held.ranges.swap_remove(at);
        }
        for waker in held.waiting.drain(..) {
            waker.wake();
        }
    }
}
