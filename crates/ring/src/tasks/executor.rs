//! A single-threaded executor over one io_uring: the reactor.
//!
//! One iteration of the event loop polls the tasks that were ready when it began, submits what they
//! started (one system call), reaps completions and wakes their tasks. It blocks only if no task is
//! ready: until a completion, a timer or work from another thread.
//!
//! Tasks are polled in the order in which they were woken. So a task that the first completion of a
//! batch wakes runs after the tasks of the whole batch. This is how used elements are published and
//! signalled once per batch.
//!
//! What must hold
//! - Tasks live on this thread only.
//! - Nothing here takes a lock. Work from other threads comes through [`crate::Remote`].
//! - A task is woken by its number. Spurious wake-ups are allowed.

use std::cell::{Cell, RefCell, RefMut};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use crate::mem::buffers::Buffers;
use crate::offload::compute::Computations;
use crate::tasks::inbox::{Inbox, Job, SLOTS};
use crate::uring::file_slot::FileTable;

use crate::mem::segments::Segments;
use crate::offload::workers::{LONG, Workers};
use crate::tasks::meter::Meter;
use crate::tasks::pulse::{Label, Pulse};
use crate::uring::{Action, TaskId, Uring};
use locals::Locals;

mod locals;
mod time;

/// The task of operations that wake no task at completion.
pub(crate) const NO_TASK: TaskId = TaskId::MAX;
/// The task number of the internal operation that waits for other threads.
const REMOTE: TaskId = TaskId::MAX - 1;

/// Threads for blocking calls that belong to no file.
const BLOCKING: usize = 16;

type Future_ = Pin<Box<dyn Future<Output = ()>>>;

struct Task {
    future: Option<Future_>,
    waker: Waker,
    /// The object behind `waker`, for access to its mark.
    from_outside: Arc<TaskWaker>,
    ready: bool,
    live: bool,
    label: Label,
}

struct Inner {
    uring: RefCell<Uring<Handle>>,
    tasks: RefCell<Vec<Task>>,
    free: RefCell<Vec<TaskId>>,
    ready: RefCell<VecDeque<TaskId>>,
    /// Tasks that become ready after the next submit-and-reap, behind the tasks that it wakes.
    after: RefCell<Vec<TaskId>>,
    timers: RefCell<BinaryHeap<Reverse<(Instant, TaskId)>>>,
    current: Cell<TaskId>,
    now: Cell<Instant>,
    /// The simulated time. None: the executor uses the real clock.
    simulated: Option<Cell<Instant>>,
    iteration: Cell<u64>,
    inbox: Arc<Inbox<Handle>>,
    remote_rung: Cell<bool>,
    stop: Cell<bool>,
    pulse: Arc<Pulse>,
    /// Number of files that are open for writing on this ring.
    files: Cell<u32>,
    /// Registered files to unregister: an operation was their last user.
    left_files: RefCell<Vec<u32>>,
    locals: Locals,
    /// For blocking calls of this executor that belong to no file.
    workers: Workers,
    computations: Computations,
}

/// The executor. It stays on the thread that created it.
pub struct Executor {
    handle: Handle,
}

/// A handle to an executor, for code that runs on it.
#[derive(Clone)]
pub struct Handle(Rc<Inner>, Option<Rc<Meter>>);

thread_local! {
    /// The executor that runs on this thread: its tasks wake one another without the inbox.
    static RUNS: RefCell<Option<Rc<Inner>>> = const { RefCell::new(None) };
}

impl Executor {
    /// Creates an executor for the calling thread.
    pub fn new() -> io::Result<Self> {
        Self::with_clock(None)
    }

    /// Creates an executor with a simulated clock, for tests. The time stands still while a task is
    /// ready, and is that of the next timer when none is. [`Executor::run`] fails if no task is
    /// ready and no timer is set, because it never waits for other threads or the kernel.
    pub fn simulated() -> io::Result<Self> {
        Self::with_clock(Some(time::simulated_start()))
    }

    fn with_clock(simulated: Option<Instant>) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        let inner = Inner {
            uring: RefCell::new(Uring::new()?),
            tasks: RefCell::default(),
            free: RefCell::default(),
            ready: RefCell::default(),
            after: RefCell::default(),
            timers: RefCell::default(),
            current: Cell::new(NO_TASK),
            now: Cell::new(simulated.unwrap_or_else(Instant::now)),
            simulated: simulated.map(Cell::new),
            iteration: Cell::new(0),
            inbox,
            remote_rung: Cell::new(false),
            stop: Cell::new(false),
            pulse: Arc::default(),
            files: Cell::new(0),
            left_files: RefCell::default(),
            locals: Locals::default(),
            workers: Workers::of(BLOCKING),
            computations: Computations::default(),
        };
        // A policy may wait for some hundred microseconds, and the default timer slack is 50 us.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1_000));
        Ok(Executor { handle: Handle(Rc::new(inner), None) })
    }

    /// Returns the handle for code that runs on this executor.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs until [`Handle::stop`].
    pub fn run(&self) -> io::Result<()> {
        let inner = &*self.handle.0;
        let outer = RUNS.replace(Some(self.handle.0.clone()));
        inner.pulse.wakes();
        let ended = self.event_loop(inner);
        inner.pulse.sleeps();
        RUNS.set(outer);
        ended
    }

    fn event_loop(&self, inner: &Inner) -> io::Result<()> {
        let mut listener = inner.listen();
        let mut ended = Ok(());
        while !inner.stop.get() {
            inner.poll_ready();
            ended = inner.iterate();
            if ended.is_err() {
                break;
            }
            if inner.remote_rung.take() {
                if inner.uring.borrow_mut().take(listener).is_some() {
                    listener = inner.listen();
                }
                let _ = rustix::io::read(&inner.inbox.event, &mut [0u8; 8]);
            }
            if !inner.inbox.is_empty() {
                self.take_in();
            }
        }
        inner.uring.borrow_mut().abandon(listener);
        ended
    }

    /// Runs the jobs of other threads. Jobs that arrive during this call wait for the next
    /// iteration.
    fn take_in(&self) {
        let inner = &*self.handle.0;
        inner.pulse.polls(0);
        for _ in 0..SLOTS {
            let Some(job) = inner.inbox.pop() else { break };
            self.do_job(job);
        }
        for job in inner.inbox.take_kept() {
            self.do_job(job);
        }
        if inner.inbox.take_marked() {
            inner.wake_marked();
        }
    }

    fn do_job(&self, job: Job<Handle>) {
        match job {
            Job::Call(f) => f(&self.handle),
            Job::Wake(task) => self.handle.0.woken_from_outside(task),
        }
    }

    /// Runs until `future` is done, and returns its result.
    pub fn block_on<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> io::Result<T> {
        let result = Rc::new(Cell::new(None));
        let (slot, handle) = (result.clone(), self.handle.clone());
        self.handle.0.stop.set(false);
        self.handle.spawn(async move {
            slot.set(Some(future.await));
            handle.stop();
        });
        self.run()?;
        result.take().ok_or_else(|| {
            io::Error::other("the executor was stopped before its work was complete")
        })
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let inner = &*self.handle.0;
        inner.inbox.close();
        // Drop the tasks first: their futures abandon their operations. Then wait up to 5 s for the
        // completions.
        inner.drop_tasks();
        inner.locals.clear();
        inner.drop_tasks();
        let deadline = Instant::now() + Duration::from_secs(5);
        while inner.uring.borrow().in_flight() > 0 && Instant::now() < deadline {
            let wait = Some(Some(Duration::from_millis(50)));
            if inner.uring.borrow_mut().submit_and_reap(wait, inner.now.get(), |_| ()).is_err() {
                break;
            }
        }
    }
}

impl Inner {
    /// Starts a task. It is not generic, so it is compiled once and not for each future.
    fn spawn(&self, future: Future_) -> TaskId {
        let id = self.free.borrow_mut().pop().unwrap_or(self.tasks.borrow().len() as TaskId);
        let from_outside =
            Arc::new(TaskWaker { id, inbox: self.inbox.clone(), mark: AtomicBool::new(false) });
        let waker = Waker::from(from_outside.clone());
        let mut tasks = self.tasks.borrow_mut();
        // A task inherits the label of the task that spawns it.
        let label = tasks.get(self.current.get() as usize).map_or(0, |task| task.label);
        let task =
            Task { future: Some(future), waker, from_outside, ready: false, live: true, label };
        if id as usize == tasks.len() {
            tasks.push(task);
        } else {
            tasks[id as usize] = task;
        }
        drop(tasks);
        self.wake(id);
        id
    }

    fn listen(&self) -> u32 {
        let action = Action::Poll { fd: self.inbox.event.as_raw_fd() };
        self.uring.borrow_mut().start(REMOTE, action, Segments::default(), None)
    }

    /// Drops all tasks, including those that are spawned while futures are dropped.
    fn drop_tasks(&self) {
        loop {
            // The free list has indices of the table of tasks, which is dropped.
            self.free.borrow_mut().clear();
            let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
            if tasks.is_empty() {
                return;
            }
            drop(tasks);
        }
    }

    fn poll_ready(&self) {
        let batch = self.ready.borrow().len();
        for _ in 0..batch {
            let Some(id) = self.ready.borrow_mut().pop_front() else { break };
            self.poll(id);
        }
    }

    #[inline]
    fn poll(&self, id: TaskId) {
        let (mut future, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            let task = &mut tasks[id as usize];
            task.ready = false;
            let Some(future) = task.future.take() else { return };
            self.pulse.polls(task.label);
            // Cloning the waker would cost an atomic operation per poll, so it is moved out and
            // back.
            (future, std::mem::replace(&mut task.waker, Waker::noop().clone()))
        };
        let outer = self.current.replace(id);
        let done = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        self.current.set(outer);
        if done {
            // Drop the future before its task number is free: the drop may wake or spawn tasks.
            drop(future);
            self.tasks.borrow_mut()[id as usize].live = false;
            self.free.borrow_mut().push(id);
        } else {
            let mut tasks = self.tasks.borrow_mut();
            let task = &mut tasks[id as usize];
            task.future = Some(future);
            task.waker = waker;
        }
    }

    fn iterate(&self) -> io::Result<()> {
        let none_ready = self.ready.borrow().is_empty()
            && self.after.borrow().is_empty()
            && !self.uring.borrow().has_to_clear();
        let idle = none_ready && !self.stop.get() && self.inbox.may_sleep();
        let wait = if idle {
            self.pulse.sleeps();
            Some(self.longest_wait())
        } else {
            None
        };
        let mut uring = self.uring.borrow_mut();
        // Before the thread sleeps, because a file stays open while it is registered.
        self.left_files.borrow_mut().drain(..).for_each(|index| uring.unregister_file(index));
        uring.submit_and_reap(wait, self.now.get(), |task| self.wake(task))?;
        drop(uring);
        if idle {
            self.inbox.awake();
            self.pulse.wakes()
        } else {
            self.pulse.next_iteration()
        }
        for id in self.after.borrow_mut().drain(..) {
            self.wake(id);
        }
        if idle {
            self.advance_simulated()?;
        }
        let now = self.read_clock();
        self.now.set(now);
        self.iteration.set(self.iteration.get() + 1);
        let mut timers = self.timers.borrow_mut();
        while timers.peek().is_some_and(|t| t.0.0 <= now) {
            if let Some(Reverse((_, task))) = timers.pop() {
                self.wake(task);
            }
        }
        Ok(())
    }

    /// Handles a wake-up by another thread. It clears the mark first, so that a later wake-up is
    /// queued again.
    fn woken_from_outside(&self, id: TaskId) {
        if let Some(task) = self.tasks.borrow().get(id as usize) {
            task.from_outside.mark.swap(false, Ordering::SeqCst);
        }
        self.wake(id);
    }

    /// Wakes all tasks whose wakers are marked, because the inbox was full.
    fn wake_marked(&self) {
        let is_marked = |task: &Task| task.from_outside.mark.swap(false, Ordering::SeqCst);
        let marked: Vec<_> = (0..)
            .zip(&*self.tasks.borrow())
            .filter(|(_, task)| is_marked(task))
            .map(|(id, _)| id)
            .collect();
        marked.into_iter().for_each(|id| self.wake(id));
    }

    #[inline]
    fn wake(&self, id: TaskId) {
        match id {
            NO_TASK => {}
            REMOTE => self.remote_rung.set(true),
            _ => {
                let mut tasks = self.tasks.borrow_mut();
                if let Some(task) = tasks.get_mut(id as usize).filter(|t| t.live && !t.ready) {
                    task.ready = true;
                    self.ready.borrow_mut().push_back(id);
                }
            }
        }
    }
}

impl Handle {
    /// Returns a handle to the same executor. `meter` counts the operations of files that are
    /// opened through it.
    pub fn metered(&self, meter: &Rc<Meter>) -> Handle {
        Handle(self.0.clone(), Some(meter.clone()))
    }

    #[inline]
    pub(crate) fn meter(&self) -> Option<&Meter> {
        self.1.as_deref()
    }

    /// Returns the queue through which other threads reach this executor.
    pub(crate) fn inbox(&self) -> &Arc<Inbox<Handle>> {
        &self.0.inbox
    }

    /// Starts a task. The next iteration polls it first.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) -> TaskId {
        self.0.spawn(Box::pin(future))
    }

    /// Labels the current task, and the tasks that it spawns from now on, for
    /// [`Pulse::last_polled`].
    pub fn label(&self, name: &str) {
        let label = self.0.pulse.label(name);
        self.0.pulse.polls(label);
        if let Some(task) = self.0.tasks.borrow_mut().get_mut(self.current() as usize) {
            task.label = label;
        }
    }

    /// Returns the state of this executor for other threads.
    pub fn pulse(&self) -> &Arc<Pulse> {
        &self.0.pulse
    }

    /// Wakes a task of this executor.
    pub fn wake(&self, id: TaskId) {
        self.0.wake(id);
    }

    /// Polls a task inside the calling task, so that its operations are submitted with the
    /// caller's. The task must not be in a poll already.
    #[inline]
    pub fn poll_now(&self, id: TaskId) {
        self.0.poll(id);
    }

    /// Ends [`Executor::run`] after the current iteration.
    pub fn stop(&self) {
        self.0.stop.set(true);
    }

    /// Returns this executor's value of type `T`: state that the queues, connections or disks of
    /// one reactor share.
    pub fn local<T: std::any::Any + Default>(&self) -> Rc<T> {
        self.0.locals.get()
    }

    /// Returns the time, which is read once per iteration.
    #[inline]
    pub fn now(&self) -> Instant {
        self.0.now.get()
    }

    /// Returns the number of the current event-loop iteration. An iteration polls each task at most
    /// once, except by [`Handle::poll_now`].
    #[inline]
    pub fn iteration(&self) -> u64 {
        self.0.iteration.get()
    }

    /// Runs `f`, which may block, on a thread of this executor's pool; see `Workers`. It does not
    /// wait for calls that hang.
    pub async fn blocking<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let workers = self.0.workers.clone();
        workers.call_past(self.current_waker(), LONG, |time| self.sleep(time), f).await
    }

    /// Runs `f`, which produces `bytes` by computation, here or on a thread; see `Computations`.
    pub async fn compute<T: Send + 'static>(
        &self,
        bytes: usize,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let computations = &self.0.computations;
        computations.run(self.iteration(), bytes, || self.current_waker(), f).await
    }

    /// Returns a waker of the current task that any thread may use.
    pub(crate) fn current_waker(&self) -> Option<Waker> {
        let tasks = self.0.tasks.borrow();
        tasks.get(self.current() as usize).map(|task| Waker::from(task.from_outside.clone()))
    }

    pub(crate) fn buffers<T>(
        &self,
        f: impl FnOnce(&mut Buffers, &io_uring::Submitter<'_>) -> T,
    ) -> T {
        let mut uring = self.0.uring.borrow_mut();
        let (buffers, submitter) = uring.buffers();
        f(buffers, &submitter)
    }

    /// Returns the number of the task that is being polled.
    #[inline]
    pub(crate) fn current(&self) -> TaskId {
        self.0.current.get()
    }

    #[inline]
    pub(crate) fn uring(&self) -> RefMut<'_, Uring<Handle>> {
        self.0.uring.borrow_mut()
    }

    /// Returns the number of files that are open for writing on this ring.
    pub(crate) fn files(&self) -> u32 {
        self.0.files.get()
    }
}

impl FileTable for Handle {
    fn register_file(&self, fd: i32) -> Option<u32> {
        self.0.uring.borrow_mut().register_file(fd)
    }

    /// The ring may be borrowed, because an operation has dropped the last reference to its file.
    /// Then the next iteration unregisters it.
    fn unregister_file(&self, index: u32) {
        match self.0.uring.try_borrow_mut() {
            Ok(mut uring) => uring.unregister_file(index),
            Err(_) => self.0.left_files.borrow_mut().push(index),
        }
    }

    fn count_files(&self, by: i32) {
        self.0.files.set(self.0.files.get().wrapping_add_signed(by));
    }
}

/// Wakes a task from any thread: directly from its executor's own thread, else through the inbox.
struct TaskWaker {
    id: TaskId,
    inbox: Arc<Inbox<Handle>>,
    /// Set from a wake-up until the executor has seen it; see [`Inbox::wake`].
    mark: AtomicBool,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let here = RUNS.with_borrow(|runs| match runs {
            Some(inner) if Arc::ptr_eq(&inner.inbox, &self.inbox) => {
                inner.wake(self.id);
                true
            }
            _ => false,
        });
        if !here {
            self.inbox.wake(self.id, &self.mark);
        }
    }
}

#[cfg(test)]
mod tests;
