//! A runner for tasks on simulated disks: polls ready tasks one by one, in seeded order.
//!
//! In: futures that wake by their waker. Out: their results, or an error if no task can continue.
//!
//! What must hold: the order depends only on the seed and on the order of wake-ups. There is no
//! thread, no clock and no ring.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use super::Rng;

type TaskId = u64;

struct Task {
    future: Pin<Box<dyn Future<Output = ()>>>,
    waker: Arc<TaskWaker>,
}

struct Inner {
    seed: u64,
    rng: RefCell<Rng>,
    /// All tasks except the one that is being polled.
    tasks: RefCell<BTreeMap<TaskId, Task>>,
    next: Cell<TaskId>,
    ready: Arc<Mutex<Vec<TaskId>>>,
    steps: Cell<u64>,
}

/// The runner. Dropping it drops its tasks.
pub struct Sim {
    handle: SimHandle,
    step_limit: u64,
}

/// A handle to the runner, for its tasks.
#[derive(Clone)]
pub struct SimHandle(Rc<Inner>);

/// The awaited future has not completed, and never will.
#[derive(Clone, Debug, thiserror::Error)]
#[error("seed {seed}: {reason} after {steps} steps, with {tasks} tasks left")]
pub struct Stalled {
    pub seed: u64,
    pub steps: u64,
    pub tasks: usize,
    pub reason: &'static str,
}

impl Sim {
    pub fn new(seed: u64) -> Self {
        let inner = Inner {
            seed,
            rng: RefCell::new(Rng::new(seed)),
            tasks: RefCell::default(),
            next: Cell::new(0),
            ready: Arc::default(),
            steps: Cell::new(0),
        };
        Sim { handle: SimHandle(Rc::new(inner)), step_limit: 50_000_000 }
    }

    /// Sets the number of polls after which a run counts as spinning.
    pub fn step_limit(mut self, steps: u64) -> Self {
        self.step_limit = steps;
        self
    }

    pub fn handle(&self) -> &SimHandle {
        &self.handle
    }

    /// Starts a task; see [`SimHandle::spawn`].
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Join<T> {
        self.handle.spawn(future)
    }

    /// Runs tasks until `future` completes. Returns its result. Other tasks stay for the next call.
    pub fn block_on<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> Result<T, Stalled> {
        let join = self.spawn(future);
        loop {
            if let Some(value) = join.0.value.take() {
                return Ok(value);
            }
            self.step()?;
        }
    }

    /// Polls one task that is ready.
    fn step(&self) -> Result<(), Stalled> {
        let Some(task) = self.next_ready() else {
            return Err(self.stalled("nothing is ready (the power is off, or a wake-up was lost)"));
        };
        let inner = &*self.handle.0;
        if inner.steps.get() >= self.step_limit {
            return Err(self.stalled("the step limit is reached, and tasks still spin"));
        }
        inner.steps.set(inner.steps.get() + 1);
        inner.poll(task);
        Ok(())
    }

    fn next_ready(&self) -> Option<TaskId> {
        let inner = &*self.handle.0;
        let mut ready = inner.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if ready.is_empty() {
            return None;
        }
        let lucky = inner.rng.borrow_mut().below(ready.len() as u64);
        Some(ready.swap_remove(lucky as usize))
    }

    fn stalled(&self, reason: &'static str) -> Stalled {
        let inner = &*self.handle.0;
        Stalled {
            seed: inner.seed,
            steps: inner.steps.get(),
            tasks: inner.tasks.borrow().len(),
            reason,
        }
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // Tasks hold handles, which hold the tasks. Dropping a task may spawn or wake others.
        let tasks = std::mem::take(&mut *self.handle.0.tasks.borrow_mut());
        drop(tasks);
    }
}

impl Inner {
    /// Starts a task. It is not generic, so it is compiled once and not for each future.
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()>>>) {
        let id = self.next.replace(self.next.get() + 1);
        let waker =
            Arc::new(TaskWaker { id, queued: AtomicBool::new(false), ready: self.ready.clone() });
        self.tasks.borrow_mut().insert(id, Task { future, waker: waker.clone() });
        waker.wake();
    }

    fn poll(&self, id: TaskId) {
        let Some(mut task) = self.tasks.borrow_mut().remove(&id) else { return };
        task.waker.queued.store(false, Ordering::Relaxed);
        let waker = Waker::from(task.waker.clone());
        if task.future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            self.tasks.borrow_mut().insert(id, task);
        }
    }
}

impl SimHandle {
    /// Starts a task. It runs even if its result is not awaited.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Join<T> {
        let slot = Rc::new(Slot { value: Cell::new(None), waker: Cell::new(None) });
        let done = slot.clone();
        let future = async move {
            done.value.set(Some(future.await));
            if let Some(waker) = done.waker.take() {
                waker.wake();
            }
        };
        self.0.spawn(Box::pin(future));
        Join(slot)
    }
}

struct Slot<T> {
    value: Cell<Option<T>>,
    waker: Cell<Option<Waker>>,
}

/// Awaits a spawned task's result.
pub struct Join<T>(Rc<Slot<T>>);

impl<T> Future for Join<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match self.0.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                self.0.waker.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

struct TaskWaker {
    id: TaskId,
    queued: AtomicBool,
    ready: Arc<Mutex<Vec<TaskId>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.ready.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
        }
    }
}

/// Lets other ready tasks run first. Works under any executor.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}
