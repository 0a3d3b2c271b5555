//! A disk in pieces that are handed out in order, to workers on any thread; and how far they have
//! come.
//!
//! What must hold: each byte is in one piece; when a worker fails no more are handed out.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockyard_ring::semaphore::Semaphore;

/// How much of a work is done, in bytes: for a progress bar.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress {
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Sweep {
    end: u64,
    next: AtomicU64,
    stopped: AtomicBool,
    one_at_a_time: Semaphore,
}

/// A piece, and what its worker was told of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<T> {
    pub offset: u64,
    pub len: u64,
    pub what: T,
}

impl Sweep {
    pub fn new(range: Range<u64>) -> Self {
        Sweep {
            end: range.end,
            next: AtomicU64::new(range.start),
            stopped: AtomicBool::new(false),
            one_at_a_time: Semaphore::new(1),
        }
    }

    /// The next piece; `judge` is told where it begins and how much is left, and says how long it
    /// is, and what.
    pub async fn next<T, E>(
        &self,
        judge: impl AsyncFnOnce(u64, u64) -> Result<(u64, T), E>,
    ) -> Result<Option<Piece<T>>, E> {
        let _permit = self.one_at_a_time.acquire().await;
        let offset = self.next.load(Ordering::Relaxed);
        if self.stopped.load(Ordering::Relaxed) || offset >= self.end {
            return Ok(None);
        }
        let (len, what) = judge(offset, self.end - offset).await.inspect_err(|_| self.stop())?;
        debug_assert!(len > 0 && len <= self.end - offset);
        self.next.store(offset + len, Ordering::Relaxed);
        Ok(Some(Piece { offset, len, what }))
    }

    /// Where the last piece ends.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// No more pieces.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}
