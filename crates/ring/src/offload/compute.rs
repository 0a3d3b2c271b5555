//! Long computations of tasks, such as decompression, which must not stop the reactor's other
//! tasks.
//!
//! In: a closure that owns what it needs, and the size of its work. Out: its result. A small
//! computation runs on the reactor, because a change of threads would cost more. All others run on
//! a few threads.
//!
//! What must hold
//! - In one iteration the reactor computes at most [`PER_ITERATION`] itself, for all its tasks.
//! - A computation is skipped if its future is dropped before it begins.

use std::cell::Cell;
use std::io;
use std::task::Waker;

use crate::offload::workers::Workers;

/// Number of bytes that computations of one iteration may produce on the reactor itself.
const PER_ITERATION: usize = 64 << 10;
/// Threads of one executor for computations. They compete with reactors for the processors, so
/// there are few of them.
pub const THREADS: usize = 2;

/// The computations of one executor.
pub(crate) struct Computations {
    workers: Workers,
    /// The iteration that computed last, and the bytes that it produced.
    iteration: Cell<u64>,
    produced: Cell<usize>,
}

impl Default for Computations {
    fn default() -> Self {
        let (iteration, produced) = Default::default();
        Computations { workers: Workers::of(THREADS), iteration, produced }
    }
}

impl Computations {
    /// Returns whether the reactor may produce `bytes` in this iteration, and counts them if so.
    fn admits(&self, iteration: u64, bytes: usize) -> bool {
        if self.iteration.replace(iteration) != iteration {
            self.produced.set(0);
        }
        let produced = self.produced.get().saturating_add(bytes);
        let admits = produced <= PER_ITERATION;
        if admits {
            self.produced.set(produced);
        }
        admits
    }

    /// Runs `f`, which produces `bytes` by computation, here or on a thread. `waker` returns the
    /// waker of the task that awaits the result, for any thread.
    pub async fn run<T: Send + 'static>(
        &self,
        iteration: u64,
        bytes: usize,
        waker: impl FnOnce() -> Option<Waker>,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        if self.admits(iteration, bytes) {
            return Ok(f());
        }
        self.workers.call_or_run(waker(), f).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex, mpsc};
    use std::thread::{ThreadId, current};

    use super::*;
    use crate::testing::waits;
    use crate::{Executor, Handle};

    fn run(work: impl AsyncFnOnce(Handle) + 'static) {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        waits::block_on(&executor, async move { work(handle).await }).unwrap();
    }

    async fn thread_of(handle: &Handle, bytes: usize) -> ThreadId {
        handle.compute(bytes, || current().id()).await.unwrap()
    }

    #[test]
    fn the_reactor_computes_a_bounded_amount_in_each_iteration() {
        run(async |handle| {
            let here = current().id();
            for _ in 0..3 {
                assert_eq!(thread_of(&handle, PER_ITERATION / 2).await, here);
                assert_eq!(thread_of(&handle, PER_ITERATION / 2).await, here);
                assert_ne!(thread_of(&handle, 1).await, here, "the iteration has had its part");
                handle.yield_now().await;
                assert_ne!(thread_of(&handle, PER_ITERATION + 1).await, here);
                assert_ne!(thread_of(&handle, usize::MAX).await, here);
                handle.yield_now().await;
            }
        });
    }

    #[test]
    fn computations_have_few_threads_and_are_skipped_if_nothing_waits_for_them() {
        run(async |handle| {
            let (open, gate) = mpsc::channel::<()>();
            let gate = Arc::new(Mutex::new(gate));
            let waits = |gate: &Arc<Mutex<mpsc::Receiver<()>>>| {
                let (gate, handle) = (gate.clone(), handle.clone());
                Box::pin(async move {
                    handle.compute(usize::MAX, move || gate.lock().unwrap().recv().unwrap()).await
                })
            };
            let mut begun: Vec<_> = (0..THREADS).map(|_| waits(&gate)).collect();
            let noop = &mut std::task::Context::from_waker(std::task::Waker::noop());
            begun.iter_mut().for_each(|one| assert!(one.as_mut().poll(noop).is_pending()));
            let ran = Arc::new(AtomicBool::new(false));
            let note = ran.clone();
            let mut dropped =
                Box::pin(handle.compute(usize::MAX, move || note.store(true, Ordering::SeqCst)));
            assert!(dropped.as_mut().poll(noop).is_pending(), "all threads are busy");
            drop(dropped);
            (0..THREADS).for_each(|_| open.send(()).unwrap());
            for one in begun {
                one.await.unwrap();
            }
            // Threads begin tasks in order, so the dropped one had its turn before this one.
            handle.compute(usize::MAX, || ()).await.unwrap();
            assert!(!ran.load(Ordering::SeqCst));
        });
    }
}
