//! The state of an executor, for a watchdog thread.
//!
//! In: the executor's iterations, and the labels of its tasks. Out: whether it sleeps, whether an
//! iteration takes long, and which task was polled last.
//!
//! What must hold: an executor takes no lock for this. It makes one store for each iteration, and
//! one for each poll of a task. An executor that sleeps does not wake the watchdog.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

/// Label of a task: its position in the list of labels, from 1. 0 means no label.
pub(crate) type Label = u32;

/// Wakes the watchdog thread, which rests while all executors sleep.
#[derive(Debug, Default)]
pub struct Watcher {
    rests: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Watcher {
    /// Sets the calling thread as the watchdog.
    pub fn set_this_thread(&self) {
        let _ = self.thread.set(std::thread::current());
    }

    /// Rests until [`Watcher::wake`], at most for `limit`. Returns at once if `asleep` returns
    /// false, because an executor has woken up meanwhile.
    pub fn rest(&self, asleep: impl Fn() -> bool, limit: Option<Duration>) {
        self.rests.store(true, Ordering::SeqCst);
        if asleep() {
            match limit {
                Some(limit) => std::thread::park_timeout(limit),
                None => std::thread::park(),
            }
        }
        self.rests.store(false, Ordering::SeqCst);
    }

    /// Wakes the watchdog thread if it rests.
    pub fn wake(&self) {
        if self.rests.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

/// The state of an executor as other threads see it.
#[derive(Debug, Default)]
pub struct Pulse {
    /// Odd while the executor is awake; it changes with each iteration.
    iterations: AtomicU64,
    label: AtomicU32,
    labels: Mutex<Vec<String>>,
    watcher: OnceLock<Arc<Watcher>>,
}

impl Pulse {
    /// Lets the executor wake this watcher whenever it wakes up itself.
    pub fn watched_by(&self, watcher: &Arc<Watcher>) {
        let _ = self.watcher.set(watcher.clone());
    }

    /// Returns the number of the current iteration, or `None` while the executor sleeps.
    pub fn iteration(&self) -> Option<u64> {
        Some(self.iterations.load(Ordering::SeqCst)).filter(|number| number % 2 == 1)
    }

    /// Returns the label of the task that was polled last; empty if it has none.
    pub fn last_polled(&self) -> String {
        let label = self.label.load(Ordering::Relaxed) as usize;
        label.checked_sub(1).and_then(|at| self.labels().get(at).cloned()).unwrap_or_default()
    }

    pub(crate) fn label(&self, name: &str) -> Label {
        let mut labels = self.labels();
        let at = labels.iter().position(|known| known == name).unwrap_or_else(|| {
            labels.push(name.to_string());
            labels.len() - 1
        });
        at as Label + 1
    }

    fn labels(&self) -> MutexGuard<'_, Vec<String>> {
        self.labels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn polls(&self, label: Label) {
        self.label.store(label, Ordering::Relaxed);
    }

    /// Begins the next iteration. Only the executor's thread calls this.
    #[inline]
    pub(crate) fn next_iteration(&self) {
        self.iterations
            .store(self.iterations.load(Ordering::Relaxed).wrapping_add(1) | 1, Ordering::Relaxed);
    }

    pub(crate) fn sleeps(&self) {
        self.iterations
            .store(self.iterations.load(Ordering::Relaxed).wrapping_add(1) & !1, Ordering::Relaxed);
    }

    pub(crate) fn wakes(&self) {
        // SeqCst, as the watcher's accesses: the watcher sees this iteration, or this thread sees
        // that the watcher rests, and wakes it.
        self.iterations.store(self.iterations.load(Ordering::Relaxed) | 1, Ordering::SeqCst);
        if let Some(watcher) = self.watcher.get()
            && watcher.rests.load(Ordering::SeqCst)
        {
            watcher.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Executor;
    use crate::testing::waits;

    #[test]
    fn a_pulse_shows_iterations_and_the_last_polled_label() {
        let executor = Executor::new().unwrap();
        let (handle, pulse) = (executor.handle().clone(), executor.handle().pulse().clone());
        let seen = pulse.clone();
        waits::block_on(&executor, async move {
            let first = seen.iteration().expect("the executor is awake");
            assert_eq!(seen.last_polled(), "");
            let (other, inner) = (handle.clone(), seen.clone());
            handle.spawn(async move {
                other.label("disk a");
                assert_eq!(inner.last_polled(), "disk a");
                let inherits = inner.clone();
                other.spawn(async move { assert_eq!(inherits.last_polled(), "disk a") });
            });
            handle.yield_now().await;
            handle.yield_now().await;
            let later = seen.iteration().expect("the executor is awake");
            assert_ne!(first, later, "each iteration has its own number");
            assert_eq!(seen.last_polled(), "");
        })
        .unwrap();
        pulse.sleeps();
        assert_eq!(pulse.iteration(), None);
    }

    #[test]
    fn a_watcher_that_rests_is_woken_once() {
        waits::within("no wake-up is lost", rest_twice);
    }

    fn rest_twice() {
        let watcher = Arc::new(Watcher::default());
        watcher.set_this_thread();
        let pulse = Pulse::default();
        pulse.watched_by(&watcher);
        pulse.sleeps();
        let wakes = || {
            assert_eq!(pulse.iteration(), None);
            // The executor wakes up between the check and the rest, so the rest ends at once.
            pulse.wakes();
            true
        };
        watcher.rest(wakes, None);
        watcher.rest(|| pulse.iteration().is_none(), None);
    }
}
