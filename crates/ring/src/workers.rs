//! Bounded pools of threads for blocking calls.
//!
//! In: a closure that may block. Out: its result, on the executor that awaits it.
//!
//! What must hold
//! - A file has at most [`MOST`] such threads, however many requests a guest makes.
//! - Calls begin in the order of their arrival.
//! - An idle thread waits for more work for [`LINGER`], so that one thread makes a series of calls.
//! - A call is skipped if its future is dropped before it begins.
//! - A call that panics returns an error to its caller, which is woken.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crate::executor::Handle;

/// Threads of one file on one executor.
pub(crate) const MOST: usize = 4;
/// How long an idle thread waits for more work. Long in tests, which check that threads end for
/// other reasons.
const LINGER: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 2 });

type Work = Box<dyn FnOnce() + Send>;

/// A pool of threads. They end after some time without work, and soon after the last clone of this
/// is dropped.
#[derive(Clone)]
pub(crate) struct Workers(Arc<Owner>);

struct Owner(Arc<Pool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.queue().is_closed = true;
        self.0.comes.notify_all();
    }
}

struct Pool {
    most: usize,
    queue: Mutex<Queue>,
    comes: Condvar,
}

#[derive(Default)]
struct Queue {
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    waiting: VecDeque<Work>,
    /// Whether the pool is closed: it gets no more work.
    is_closed: bool,
}

impl Default for Workers {
    fn default() -> Self {
        Workers::of(MOST)
    }
}

impl Workers {
    /// Creates a pool of at most `most` threads.
    pub fn of(most: usize) -> Self {
        let pool = Pool { most, queue: Mutex::default(), comes: Condvar::new() };
        Workers(Arc::new(Owner(Arc::new(pool))))
    }

    /// Runs `f` on one of the threads.
    pub async fn call<T: Send + 'static>(
        &self,
        handle: &Handle,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (work, result) = prepare(handle, f);
        self.begin(work)?;
        result.wait().await
    }

    fn begin(&self, work: Work) -> io::Result<()> {
        let mut queue = self.queue();
        queue.waiting.push_back(work);
        if queue.waiting.len() <= queue.idle {
            self.pool().comes.notify_one();
            return Ok(());
        }
        if queue.threads == self.pool().most {
            return Ok(());
        }
        let pool = self.pool().clone();
        let builder = std::thread::Builder::new().name("blocking".into());
        match crate::threads::spawn(builder, move || pool.work()) {
            Ok(_) => queue.threads += 1,
            // No thread could be started. The existing threads do the work.
            Err(_) if queue.threads > 0 => {}
            Err(e) => {
                queue.waiting.pop_back();
                return Err(e);
            }
        }
        Ok(())
    }

    fn pool(&self) -> &Arc<Pool> {
        &self.0.0
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.pool().queue()
    }
}

impl Pool {
    fn work(&self) {
        while let Some(work) = self.next() {
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }

    /// Waits for work. `None`: the thread must end, and is no longer counted.
    fn next(&self) -> Option<Work> {
        let mut queue = self.queue();
        let deadline = Instant::now() + LINGER;
        loop {
            if let Some(work) = queue.waiting.pop_front() {
                return Some(work);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || queue.is_closed {
                queue.threads -= 1;
                return None;
            }
            queue.idle += 1;
            queue = self.comes.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
            queue.idle -= 1;
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of a call. If it is dropped early, the call is skipped.
struct Outcome<T>(
    Receiver<T>,
    #[expect(dead_code, reason = "it keeps the call wanted while the result is awaited")] Arc<()>,
);

impl<T> Outcome<T> {
    async fn wait(self) -> io::Result<T> {
        poll_fn(|_| match self.0.try_recv() {
            Ok(value) => Poll::Ready(Ok(value)),
            Err(TryRecvError::Empty) => Poll::Pending,
            Err(TryRecvError::Disconnected) => {
                Poll::Ready(Err(io::Error::other("the worker thread panicked")))
            }
        })
        .await
    }
}

/// Wakes the waiting task, even if the call panics.
struct Wakes(Option<Waker>);

impl Drop for Wakes {
    fn drop(&mut self) {
        if let Some(waker) = self.0.take() {
            waker.wake();
        }
    }
}

fn prepare<T: Send + 'static>(
    handle: &Handle,
    f: impl FnOnce() -> T + Send + 'static,
) -> (Work, Outcome<T>) {
    let (sender, receiver) = sync_channel(1);
    let wanted = Arc::new(());
    let alive = Arc::downgrade(&wanted);
    let wakes = Wakes(handle.current_waker());
    let work = move || {
        // Dropped after the sender, so that the woken task finds the result or the disconnection.
        let _wakes = wakes;
        let sender = sender;
        if alive.strong_count() > 0 {
            let _ = sender.send(f());
        }
    };
    (Box::new(work), Outcome(receiver, wanted))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;
    use crate::Executor;

    fn run(work: impl AsyncFnOnce(Handle) + 'static) {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        executor.block_on(async move { work(handle).await }).unwrap();
    }

    #[test]
    fn calls_beyond_the_limit_of_threads_wait_and_begin_in_order() {
        run(async |handle| {
            let workers = Workers::default();
            let (begun, order) = mpsc::channel();
            let ended = Arc::new(AtomicUsize::new(0));
            let gates: Vec<_> = (0..40)
                .map(|number| {
                    let (open, gate) = mpsc::channel::<()>();
                    let (begun, ended, workers, calls) =
                        (begun.clone(), ended.clone(), workers.clone(), handle.clone());
                    handle.spawn(async move {
                        let call = move || {
                            begun.send(number).unwrap();
                            gate.recv().unwrap();
                        };
                        workers.call(&calls, call).await.unwrap();
                        ended.fetch_add(1, Ordering::Relaxed);
                    });
                    open
                })
                .collect();
            for _ in 0..10 {
                handle.yield_now().await;
            }
            let mut first: Vec<_> = (0..MOST).map(|_| order.recv().unwrap()).collect();
            first.sort_unstable();
            assert_eq!(first, (0..MOST).collect::<Vec<_>>());
            assert_eq!(workers.queue().threads, MOST);
            assert!(order.try_recv().is_err(), "the others wait");
            for (number, gate) in gates.iter().enumerate() {
                gate.send(()).unwrap();
                if number + MOST < gates.len() {
                    assert_eq!(order.recv().unwrap(), number + MOST);
                }
            }
            while ended.load(Ordering::Relaxed) < gates.len() {
                handle.sleep(std::time::Duration::from_millis(1)).await;
            }
        });
    }

    #[test]
    fn idle_threads_end_with_the_last_user_of_their_pool() {
        run(async |handle| {
            let workers = Workers::default();
            let other = workers.clone();
            workers.call(&handle, || ()).await.unwrap();
            let pool = Arc::downgrade(workers.pool());
            drop(workers);
            other.call(&handle, || ()).await.unwrap();
            let start = Instant::now();
            drop(other);
            // The thread holds the last reference to the pool, and drops it when it ends.
            while pool.strong_count() > 0 {
                assert!(start.elapsed() < LINGER / 60, "the thread waits for more work");
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn one_thread_makes_successive_calls() {
        run(async |handle| {
            let workers = Workers::default();
            let first = workers.call(&handle, || std::thread::current().id()).await.unwrap();
            // Wait, because the result arrives before its thread is idle again.
            while workers.queue().idle == 0 {
                handle.yield_now().await;
            }
            let second = workers.call(&handle, || std::thread::current().id()).await.unwrap();
            assert_eq!(first, second);
        });
    }

    #[test]
    fn a_pool_has_at_most_its_limit_of_threads() {
        run(async |handle| {
            let workers = Workers::of(2);
            let (ends, gate) = mpsc::channel::<()>();
            let gate = Arc::new(Mutex::new(gate));
            let calls: Vec<_> = (0..10)
                .map(|_| {
                    let gate = gate.clone();
                    let mut call = Box::pin(
                        workers.call(&handle, move || gate.lock().unwrap().recv().unwrap()),
                    );
                    (std::task::Context::from_waker(std::task::Waker::noop()), &mut call).poll();
                    call
                })
                .collect();
            assert_eq!(workers.queue().threads, 2);
            (0..10).for_each(|_| ends.send(()).unwrap());
            for call in calls {
                call.await.unwrap();
            }
            assert!(workers.queue().threads <= 2);
        });
    }

    #[test]
    fn a_call_whose_future_is_dropped_does_not_begin() {
        run(async |handle| {
            let workers = Workers::default();
            let (open, gate) = mpsc::channel::<()>();
            let gate = Arc::new(Mutex::new(gate));
            let blocked: Vec<_> = (0..MOST)
                .map(|_| {
                    let gate = gate.clone();
                    let mut call = Box::pin(
                        workers.call(&handle, move || gate.lock().unwrap().recv().unwrap()),
                    );
                    (std::task::Context::from_waker(std::task::Waker::noop()), &mut call).poll();
                    call
                })
                .collect();
            let begun = Arc::new(AtomicUsize::new(0));
            let note = begun.clone();
            let mut dropped =
                Box::pin(workers.call(&handle, move || note.fetch_add(1, Ordering::Relaxed)));
            (std::task::Context::from_waker(std::task::Waker::noop()), &mut dropped).poll();
            drop(dropped);
            (0..MOST).for_each(|_| open.send(()).unwrap());
            for call in blocked {
                call.await.unwrap();
            }
            workers.call(&handle, || ()).await.unwrap();
            assert_eq!(begun.load(Ordering::Relaxed), 0);
        });
    }

    /// Polls a future once, and asserts that it is pending.
    trait Poll1 {
        fn poll(self);
    }

    impl<F: Future + Unpin> Poll1 for (std::task::Context<'_>, &mut F) {
        fn poll(mut self) {
            assert!(std::pin::Pin::new(self.1).poll(&mut self.0).is_pending());
        }
    }

    #[test]
    fn a_call_that_panics_is_an_error_and_wakes_its_caller() {
        run(async |handle| {
            let workers = Workers::default();
            for _ in 0..2 * MOST {
                let error = workers.call(&handle, || panic!("on purpose")).await.unwrap_err();
                assert_eq!(error.to_string(), "the worker thread panicked");
            }
            let error = handle.blocking(|| panic!("on purpose")).await.unwrap_err();
            assert_eq!(error.to_string(), "the worker thread panicked");
            assert_eq!(
                workers.call(&handle, || 7).await.unwrap(),
                7,
                "the thread survives the panic"
            );
        });
    }
}
