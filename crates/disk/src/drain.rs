//! The state of a drain of a disk (`live/drain.rs`): its thread waits here until a call ends it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Whether an operator holds the requests of a disk back.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    is_drained: Mutex<bool>,
    changed: Condvar,
    /// A drain of the disk has a thread.
    has_thread: AtomicBool,
}

impl Drain {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_drained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the disk is drained.
    pub fn is_drained(&self) -> bool {
        *self.lock()
    }

    /// Takes the right to the disk's thread for drains. Returns false if it is taken.
    pub fn take_thread(&self) -> bool {
        !self.has_thread.swap(true, Ordering::SeqCst)
    }

    pub fn give_thread_back(&self) {
        self.has_thread.store(false, Ordering::SeqCst);
    }

    /// Notes that the requests are held now.
    pub fn begin(&self) {
        *self.lock() = true;
    }

    /// Lets the requests go on. Returns whether they were held.
    pub fn resume(&self) -> bool {
        let was_drained = std::mem::replace(&mut *self.lock(), false);
        self.changed.notify_all();
        was_drained
    }

    /// Waits for [`Drain::resume`]. Returns false if `limit` has passed without it.
    pub fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut is_drained = self.lock();
        while *is_drained {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                *is_drained = false;
                return false;
            }
            let waited = self.changed.wait_timeout(is_drained, left);
            is_drained = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
