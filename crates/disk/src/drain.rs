//! The state of a drain of a disk (`live/drain.rs`): its thread waits here until a call ends it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What has become of the drains of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainState {
    pub is_drained: bool,
    /// When the requests of a drained disk go on without a call.
    pub until: Option<Instant>,
    /// Number of drains that ended because their time had passed.
    pub expired: u64,
}

impl DrainState {
    /// Returns the time after which the requests of a drained disk go on without a call.
    pub fn left(&self) -> Option<Duration> {
        self.until.map(|until| until.saturating_duration_since(Instant::now()))
    }
}

/// Whether an operator holds the requests of a disk back.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    state: Mutex<DrainState>,
    changed: Condvar,
    /// A drain of the disk has a thread.
    has_thread: AtomicBool,
    /// Number of drains that have ended. A thread locks `state` before it changes this number.
    ended: AtomicU64,
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
        self.ended.fetch_add(1, Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
    }

    /// Notes that the requests are held now, at most for `limit`.
    pub fn begin(&self, limit: Duration) {
        let mut state = self.lock();
        (state.is_drained, state.until) = (true, Some(Instant::now() + limit));
    }

    /// Lets the requests go on. If they were held, returns the number of drains that have ended,
    /// for [`Drain::wait_for_end`].
    pub fn resume(&self) -> Option<u64> {
        let mut state = self.lock();
        let was_drained = std::mem::replace(&mut state.is_drained, false);
        state.until = None;
        let ended = self.ended.load(Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
        was_drained.then_some(ended)
    }

    /// Waits until the thread of one more drain than `ended` has ended, but at most for `limit`.
    pub fn wait_for_end(&self, ended: u64, limit: Duration) {
        let is_same = |_: &mut DrainState| self.ended.load(Ordering::SeqCst) == ended;
        drop(self.changed.wait_timeout_while(self.lock(), limit, is_same));
    }

    /// Waits for [`Drain::resume`]. Returns false if the time of the drain has passed without it.
    pub fn wait(&self) -> bool {
        let mut state = self.lock();
        while state.is_drained {
            let left = state.left().unwrap_or_default();
            if left.is_zero() {
                let expired = state.expired + 1;
                *state = DrainState { is_drained: false, until: None, expired };
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
