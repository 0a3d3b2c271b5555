//! What an executor is at, for a thread that watches it.
//!
//! In: the executor's turns, and the labels of its tasks. Out: whether it is asleep, whether a turn
//! goes on for long, and which task was polled last. What must hold: it costs a turn one store, and
//! a poll another, without a lock; an executor that only sleeps wakes no one.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

/// Names what a task is for: the position in the list of labels, from 1 on. 0: it has no name.
pub(crate) type Label = u32;

/// Wakes the thread that watches, which rests while all executors sleep.
#[derive(Debug, Default)]
pub struct Watcher {
    rests: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Watcher {
    /// The calling thread is the one that watches.
    pub fn is_this_thread(&self) {
        let _ = self.thread.set(std::thread::current());
    }

    /// Rests until [`Watcher::wake`], unless `asleep` says that an executor woke up meanwhile.
    pub fn rest(&self, asleep: impl Fn() -> bool) {
        self.rests.store(true, Ordering::SeqCst);
        if asleep() {
            std::thread::park();
        }
        self.rests.store(false, Ordering::SeqCst);
    }

    /// Wakes the thread that watches, if it rests.
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
    /// Odd while it is awake; another number in each turn.
    iterations: AtomicU64,
    label: AtomicU32,
    labels: Mutex<Vec<String>>,
    watcher: OnceLock<Arc<Watcher>>,
}

impl Pulse {
    /// From now on the executor wakes this watcher when it wakes up.
    pub fn watched_by(&self, watcher: &Arc<Watcher>) {
        let _ = self.watcher.set(watcher.clone());
    }

    /// The number of the turn that it is in. None: it is asleep.
    pub fn iteration(&self) -> Option<u64> {
        Some(self.iterations.load(Ordering::SeqCst)).filter(|number| number % 2 == 1)
    }

    /// What the task is for that was polled last; empty, if it has no label.
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

    /// Only the executor's thread changes the number of turns.
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
        // In one order with the watcher's own: either it sees this turn, or it is woken.
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

    #[test]
    fn an_executor_tells_its_turns_and_what_it_polled_last() {
        let executor = Executor::new().unwrap();
        let (handle, pulse) = (executor.handle().clone(), executor.handle().pulse().clone());
        let seen = pulse.clone();
        executor
            .block_on(async move {
                let first = seen.iteration().expect("it is awake");
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
                let later = seen.iteration().expect("it is awake");
                assert_ne!(first, later, "each turn has a number of its own");
                assert_eq!(seen.last_polled(), "");
            })
            .unwrap();
        pulse.sleeps();
        assert_eq!(pulse.iteration(), None);
    }

    #[test]
    fn a_watcher_that_rests_is_woken_once() {
        let watcher = Arc::new(Watcher::default());
        watcher.is_this_thread();
        let pulse = Pulse::default();
        pulse.watched_by(&watcher);
        pulse.sleeps();
        watcher.rest(|| {
            assert_eq!(pulse.iteration(), None);
            // It wakes up between the look and the rest: the rest ends at once.
            pulse.wakes();
            true
        });
        watcher.rest(|| pulse.iteration().is_none());
    }
}
