//! The state of a drain of a disk (`live/drain.rs`): its thread waits here until a call ends it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What has become of the drains of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainState {
    pub is_drained: bool,
    /// Number of drains that ended because their time had passed.
    pub expired: u64,
}

/// Whether an operator holds the requests of a disk back.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    state: Mutex<DrainState>,
    changed: Condvar,
    /// A drain of the disk has a thread.
    has_thread: AtomicBool,
}

impl Drain {
    fn lock(&self) -> MutexGuard<'_, DrainState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> DrainState {
        *self.lock()
    }

    /// Takes the right to the disk's thread for drains. Returns false if it is taken.
    pub fn take_thread(&self) -> bool {
        !self.has_thread.swap(true, Ordering::SeqCst)
    }

    pub fn give_thread_back(&self) {
        let state = self.lock();
        self.has_thread.store(false, Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until no drain has a thread, but at most for `limit`. A caller that has resumed the
    /// disk may drain it again then.
    pub fn wait_for_thread(&self, limit: Duration) {
        let has_thread = |_: &mut DrainState| self.has_thread.load(Ordering::SeqCst);
        let waited = self.changed.wait_timeout_while(self.lock(), limit, has_thread);
        drop(waited);
    }

    /// Notes that the requests are held now.
    pub fn begin(&self) {
        self.lock().is_drained = true;
    }

    /// Lets the requests go on. Returns whether they were held.
    pub fn resume(&self) -> bool {
        let was_drained = std::mem::replace(&mut self.lock().is_drained, false);
        self.changed.notify_all();
        was_drained
    }

    /// Waits for [`Drain::resume`]. Returns false if `limit` has passed without it.
    pub fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        while state.is_drained {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                *state = DrainState { is_drained: false, expired: state.expired + 1 };
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
