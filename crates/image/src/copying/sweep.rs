//! Splits a range into pieces, handed out in order to workers on any thread; and counts progress.
//!
//! Invariants: each byte is in exactly one piece; after a worker's failure no piece is handed out.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockyard_ring::semaphore::Semaphore;

/// Progress of a job in bytes, for a progress bar.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress {
    /// Returns the number of bytes of the whole job.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that are finished.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Adds `bytes` to the size of the whole job.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds `bytes` to the number of finished bytes.
    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A range that several workers process piece by piece.
#[derive(Debug)]
pub(crate) struct Sweep {
    end: u64,
    next: AtomicU64,
    stopped: AtomicBool,
    one_at_a_time: Semaphore,
}

/// A piece, and the description that `judge` returned for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<T> {
    pub offset: u64,
    pub len: u64,
    pub what: T,
}

impl Sweep {
    /// Creates a sweep over `range`, in bytes.
    pub fn new(range: Range<u64>) -> Self {
        Sweep {
            end: range.end,
            next: AtomicU64::new(range.start),
            stopped: AtomicBool::new(false),
            one_at_a_time: Semaphore::new(1),
        }
    }

    /// Returns the next piece. `judge` gets the piece's offset and the number of bytes left.
    /// `judge` returns the piece's length and a description.
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

    /// Returns the end of the range.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Hands out no more pieces.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}
