//! The thread on which a target runs.
//!
//! In: calls from any thread. Out: their results. What must hold: every call ends with a result or
//! an error; a panic of the target ends the target, not the thread of a caller; an error has no
//! code of the target, because its caller formats and drops it; the number of calls that a silent
//! target leaves unanswered is bounded.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::Poll;
use std::thread::Builder;
use std::time::Duration;

use blockyard_ring::{Executor, Handle, Remote, threads};

use super::device::AnyDevice;
use super::map::{AnyMap, Boxed};
use super::promise::{Answer, promise};

/// Most calls that a target may leave unanswered.
const MOST_CALLS: usize = 16384;

/// A target on its thread.
#[derive(Clone)]
pub(super) enum Living {
    Map(Rc<dyn AnyMap>),
    Device(Rc<dyn AnyDevice>),
}

/// Makes a target on its thread.
pub(super) type Make = Box<dyn FnOnce(&Handle) -> Boxed<'static, io::Result<Living>> + Send>;

/// The thread of a target. Dropping it ends the target.
#[derive(Debug)]
pub(super) struct Worker {
    remote: Remote,
    calls: Arc<AtomicUsize>,
    end: Mutex<Option<TargetEnd>>,
}

/// Why a target has not started.
#[derive(Debug)]
pub(super) struct NotStarted {
    pub(super) why: io::Error,
    /// The end of its thread, which may still have the target's files. None: there is no thread.
    pub(super) end: Option<TargetEnd>,
}

/// The end of a target's thread.
#[derive(Debug)]
pub struct TargetEnd(mpsc::Receiver<()>);

impl TargetEnd {
    /// Waits until the target is dropped, and its thread has closed the target's files. Returns
    /// whether that is so.
    pub fn wait(&self, limit: Duration) -> bool {
        self.0.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Disconnected)
    }
}

thread_local! {
    static TARGET: RefCell<Option<Living>> = const { RefCell::new(None) };
}

/// Counts a call until it ends.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Worker {
    /// Starts the thread, and waits until the target is made. If that takes too long, the thread
    /// ends as soon as the target's start waits for something or returns.
    pub(super) fn start(make: Make, limit: Duration) -> Result<Self, NotStarted> {
        let (begun, begins) = mpsc::sync_channel(1);
        let (made, is_made) = mpsc::sync_channel(1);
        let (alive, end) = mpsc::sync_channel(0);
        let end = TargetEnd(end);
        // A reactor's thread may call this in a sandbox, and cannot start threads itself.
        let started = threads::spawn(Builder::new().name("target".into()), move || {
            live(make, &begun, made);
            // The files of the target are closed.
            drop(alive);
        });
        if let Err(why) = started {
            return Err(NotStarted { why, end: None });
        }
        match ready(&begins, &is_made, limit) {
            Ok(remote) => Ok(Worker { remote, calls: Arc::default(), end: Mutex::new(Some(end)) }),
            Err(why) => Err(NotStarted { why, end: Some(end) }),
        }
    }

    /// Returns the end of the thread, once.
    pub(super) fn end(&self) -> Option<TargetEnd> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Runs `work` on the target's thread.
    pub(super) fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(Living) -> Boxed<'static, io::Result<T>> + Send + 'static,
    ) -> io::Result<Arc<Answer<io::Result<T>>>> {
        let calls = self.calls.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.calls.clone());
        if calls >= MOST_CALLS {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the target leaves too many questions unanswered",
            ));
        }
        Ok(self.run(Some(counted), work))
    }

    /// Like `call`, for the server's own work: however many calls have no answer.
    pub(super) fn call_always<T: Send + 'static>(
        &self,
        work: impl FnOnce(Living) -> Boxed<'static, io::Result<T>> + Send + 'static,
    ) -> Arc<Answer<io::Result<T>>> {
        self.run(None, work)
    }

    fn run<T: Send + 'static>(
        &self,
        counted: Option<Counted>,
        work: impl FnOnce(Living) -> Boxed<'static, io::Result<T>> + Send + 'static,
    ) -> Arc<Answer<io::Result<T>>> {
        let (promise, answer) = promise();
        self.remote.run(move |handle| {
            let _counted = &counted;
            let Some(target) = TARGET.with_borrow(Option::clone) else { return };
            handle.spawn(async move {
                let _counted = counted;
                let work = || -> Boxed<'static, io::Result<T>> {
                    let work = work(target);
                    Box::pin(async move { work.await.map_err(plain) })
                };
                match caught(work).await {
                    Some(value) => promise.keep(value),
                    None => {
                        promise.keep(Err(panicked()));
                        // Its state is unknown now.
                        end_target();
                    }
                }
            });
        });
        answer
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.remote.run(|handle| {
            end_target();
            handle.stop();
        });
    }
}

/// Makes a target on this thread, and runs its calls until it ends. Reports the executor, and then
/// whether the target is made.
fn live(
    make: Make,
    begun: &mpsc::SyncSender<io::Result<Remote>>,
    made: mpsc::SyncSender<io::Result<()>>,
) {
    let executor = match Executor::new() {
        Ok(executor) => executor,
        Err(e) => return drop(begun.send(Err(e))),
    };
    let handle = executor.handle().clone();
    executor.handle().spawn(async move {
        let target = caught(|| make(&handle)).await.unwrap_or_else(|| Err(panicked()));
        let result = target.map(|target| TARGET.set(Some(target)));
        let failed = result.is_err();
        // If it took too long, the caller has gone.
        let unwanted = made.send(result).is_err();
        if failed || unwanted {
            handle.stop();
        }
    });
    let _ = begun.send(Ok(executor.remote()));
    if let Err(e) = executor.run() {
        tracing::error!("a target's thread has ended: {e}");
    }
    end_target();
}

/// Waits until the target of a thread is made. If that takes longer than `limit`, ends the thread.
fn ready(
    begins: &mpsc::Receiver<io::Result<Remote>>,
    is_made: &mpsc::Receiver<io::Result<()>>,
    limit: Duration,
) -> io::Result<Remote> {
    let ended = || io::Error::other("its thread has ended");
    let remote = begins.recv().map_err(|_| ended())??;
    match is_made.recv_timeout(limit) {
        Ok(made) => made.map(|()| remote),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(ended()),
        Err(mpsc::RecvTimeoutError::Timeout) => {
            remote.run(|handle| handle.stop());
            Err(io::Error::new(io::ErrorKind::TimedOut, "it was not ready in time"))
        }
    }
}

/// Returns an error with the same kind and text, and without a type of the target.
fn plain(error: io::Error) -> io::Error {
    match error.get_ref() {
        Some(_) => io::Error::new(error.kind(), error.to_string()),
        None => error,
    }
}

fn panicked() -> io::Error {
    io::Error::other("the target has panicked")
}

/// Drops the target of this thread. Its destructor may panic, too.
fn end_target() {
    let target = TARGET.with_borrow_mut(Option::take);
    let _ = catch_unwind(AssertUnwindSafe(|| drop(target)));
}

/// Runs a future of a target's code. None: it has panicked.
async fn caught<T>(make: impl FnOnce() -> Boxed<'static, T>) -> Option<T> {
    let mut future: Pin<Box<dyn Future<Output = T>>> = catch_unwind(AssertUnwindSafe(make)).ok()?;
    let result = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(value)) => Poll::Ready(Some(value)),
        Err(_) => Poll::Ready(None),
    })
    .await;
    let _ = catch_unwind(AssertUnwindSafe(|| drop(future)));
    result
}
