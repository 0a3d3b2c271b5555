//! Blocking calls. An executor awaits their results.
//!
//! In: a closure that may block. Out: its result, on the executor that awaits it. The threads are
//! those of a [`Pool`].
//!
//! What must hold
//! - A call is skipped if its future is dropped before it begins.
//! - A call that panics returns an error to its caller, which is woken.
//! - Calls that hang keep no other call waiting for long, if the caller asks for that
//!   ([`Workers::call_past`]).

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::offload::pool::{Pool, Task};

/// Threads of one file on one executor.
pub(crate) const MOST: usize = 4;
/// A call that has run for this time hangs.
pub(crate) const LONG: Duration = Duration::from_secs(1);
/// Threads of a pool with calls that hang. Each call has a limit of its own.
const MOST_BESIDE: usize = 256;
/// How long an idle thread waits for more calls.
const LINGER: Duration = Duration::from_secs(2);

/// The threads for the calls of one file, or of one executor. They end soon after the last clone is
/// dropped.
#[derive(Clone)]
pub(crate) struct Workers(Arc<Pool>);

impl Default for Workers {
    fn default() -> Self {
        Workers::of(MOST)
    }
}

impl Workers {
    /// Returns at most `most` threads.
    pub fn of(most: usize) -> Self {
        Workers(Arc::new(Pool::new("blocking", most, LINGER)))
    }

    /// Runs `f` on one of the threads. `waker`: that of the task that awaits the result, for any
    /// thread.
    pub async fn call<T: Send + 'static>(
        &self,
        waker: Option<Waker>,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (task, result) = prepare(waker, f);
        self.0.run(task).map_err(|refused| refused.error)?;
        result.wait().await
    }

    /// Like [`Workers::call`], but waits for no call that has run for `long`: a thread more begins
    /// then. `sleep` waits for a time.
    pub async fn call_past<T: Send + 'static>(
        &self,
        waker: Option<Waker>,
        long: Duration,
        sleep: impl AsyncFn(Duration),
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let mut call = pin!(self.call(waker, f));
        loop {
            let mut pause = pin!(sleep(long));
            let result = poll_fn(|cx| match (call.as_mut().poll(cx), pause.as_mut().poll(cx)) {
                (Poll::Ready(result), _) => Poll::Ready(Some(result)),
                (Poll::Pending, Poll::Ready(())) => Poll::Ready(None),
                (Poll::Pending, Poll::Pending) => Poll::Pending,
            });
            match result.await {
                Some(result) => return result,
                None => drop(self.0.relieve(long, MOST_BESIDE)),
            }
        }
    }

    /// Like [`Workers::call`]. If the kernel refuses to start a thread, the caller runs `f` itself.
    pub async fn call_or_run<T: Send + 'static>(
        &self,
        waker: Option<Waker>,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (task, result) = prepare(waker, f);
        if let Err(refused) = self.0.run(task) {
            (refused.task)(&());
        }
        result.wait().await
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
    waker: Option<Waker>,
    f: impl FnOnce() -> T + Send + 'static,
) -> (Task<()>, Outcome<T>) {
    let (sender, receiver) = sync_channel(1);
    let wanted = Arc::new(());
    let alive = Arc::downgrade(&wanted);
    let wakes = Wakes(waker);
    let task = move |(): &()| {
        // Dropped after the sender, so that the woken task finds the result or the disconnection.
        let _wakes = wakes;
        let sender = sender;
        if alive.strong_count() > 0 {
            let _ = sender.send(f());
        }
    };
    (Box::new(task), Outcome(receiver, wanted))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, mpsc};

    use super::*;
    use crate::testing::waits;
    use crate::{Executor, Handle};

    fn run(work: impl AsyncFnOnce(Handle) + 'static) {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        waits::block_on(&executor, async move { work(handle).await }).unwrap();
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
                    let mut call = Box::pin(workers.call(handle.current_waker(), move || {
                        gate.lock().unwrap().recv().unwrap()
                    }));
                    (std::task::Context::from_waker(std::task::Waker::noop()), &mut call).poll();
                    call
                })
                .collect();
            let begun = Arc::new(AtomicUsize::new(0));
            let note = begun.clone();
            let mut dropped = Box::pin(
                workers.call(handle.current_waker(), move || note.fetch_add(1, Ordering::Relaxed)),
            );
            (std::task::Context::from_waker(std::task::Waker::noop()), &mut dropped).poll();
            drop(dropped);
            (0..MOST).for_each(|_| open.send(()).unwrap());
            for call in blocked {
                call.await.unwrap();
            }
            workers.call(handle.current_waker(), || ()).await.unwrap();
            assert_eq!(begun.load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn calls_that_hang_keep_no_other_call_waiting() {
        run(async |handle| {
            let (workers, long) = (Workers::of(2), Duration::from_millis(1));
            let sleep = |time| handle.sleep(time);
            let (open, gate) = mpsc::channel::<()>();
            let gate = Arc::new(Mutex::new(gate));
            let hung: Vec<_> = (0..3)
                .map(|_| {
                    let (gate, waker) = (gate.clone(), handle.current_waker());
                    let mut call = Box::pin(workers.call_past(waker, long, sleep, move || {
                        let _ = gate.lock().unwrap().recv();
                    }));
                    (std::task::Context::from_waker(std::task::Waker::noop()), &mut call).poll();
                    call
                })
                .collect();
            let waker = handle.current_waker();
            assert_eq!(workers.call_past(waker, long, sleep, || 7).await.unwrap(), 7);
            drop(open);
            for call in hung {
                call.await.unwrap();
            }
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
                let error = workers
                    .call(handle.current_waker(), || panic!("on purpose"))
                    .await
                    .unwrap_err();
                assert_eq!(error.to_string(), "the worker thread panicked");
            }
            let error = handle.blocking(|| panic!("on purpose")).await.unwrap_err();
            assert_eq!(error.to_string(), "the worker thread panicked");
            assert_eq!(
                workers.call(handle.current_waker(), || 7).await.unwrap(),
                7,
                "the thread survives the panic"
            );
        });
    }
}
