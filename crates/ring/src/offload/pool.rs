//! Bounded pools of threads for work that may block.
//!
//! In: tasks. Out: each task runs once, on a thread of the pool, with that thread's context.
//!
//! What must hold
//! - A pool has at most its number of threads, however many tasks arrive. [`Pool::relieve`] adds a
//!   thread for each one that hangs, up to a second number.
//! - Tasks begin in the order of their arrival, each as soon as a thread is idle.
//! - An idle thread waits some time for more work, so that one thread runs a series of tasks. To
//!   start and end a thread for each would change the address space, which interrupts reactors.
//! - A task that panics ends neither its thread nor the pool.
//! - Idle threads end soon after the pool is dropped.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io};

use crate::offload::threads;

/// Work for a thread with a context of type `C`. The context stays for the thread's next task.
pub type Task<C> = Box<dyn FnOnce(&C) + Send>;

/// A pool of threads. See the module documentation.
pub struct Pool<C = ()>(Arc<Shared<C>>);

/// A task that is not in the pool, because the kernel refuses to start a thread for it.
pub struct Refused<C> {
    pub error: io::Error,
    pub task: Task<C>,
}

struct Shared<C> {
    name: &'static str,
    most: usize,
    linger: Duration,
    queue: Mutex<Queue<C>>,
    comes: Condvar,
}

struct Queue<C> {
    tasks: VecDeque<Task<C>>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    /// When each task that runs began.
    running: Vec<Instant>,
    /// A task that has run for this time hangs. None: [`Pool::relieve`] was never called.
    long: Option<Duration>,
    /// Whether the pool gets no more work.
    is_closed: bool,
}

impl<C> fmt::Debug for Pool<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { name, most, .. } = &*self.0;
        f.debug_struct("Pool").field("name", name).field("most", most).finish_non_exhaustive()
    }
}

impl<C> Drop for Pool<C> {
    fn drop(&mut self) {
        self.0.queue().is_closed = true;
        self.0.comes.notify_all();
    }
}

impl<C: Default + 'static> Pool<C> {
    /// Returns a pool of at most `most` threads named `name`. Each ends after `linger` without
    /// work.
    pub fn new(name: &'static str, most: usize, linger: Duration) -> Self {
        let queue = Queue {
            tasks: VecDeque::new(),
            threads: 0,
            idle: 0,
            running: Vec::new(),
            long: None,
            is_closed: false,
        };
        Pool(Arc::new(Shared {
            name,
            most,
            linger,
            queue: Mutex::new(queue),
            comes: Condvar::new(),
        }))
    }

    /// Runs `task` on a thread of the pool, after earlier tasks.
    pub fn run(&self, task: Task<C>) -> Result<(), Refused<C>> {
        self.begin(task, |threads| threads > 0)
    }

    /// Like [`Pool::run`], for a task that must not wait for the end of others: refuses it if it
    /// needs a new thread and none can start.
    pub fn run_now(&self, task: Task<C>) -> Result<(), Refused<C>> {
        self.begin(task, |_| false)
    }

    /// `may_wait`: whether the task may wait for one of this number of threads.
    fn begin(&self, task: Task<C>, may_wait: impl FnOnce(usize) -> bool) -> Result<(), Refused<C>> {
        let mut queue = self.0.queue();
        queue.tasks.push_back(task);
        if queue.tasks.len() <= queue.idle {
            self.0.comes.notify_one();
            return Ok(());
        }
        // After `relieve` it may have more.
        if queue.threads >= self.0.most {
            return Ok(());
        }
        match self.start_thread(&mut queue) {
            Ok(()) => {}
            // The existing threads do the work.
            Err(_) if may_wait(queue.threads) => {}
            Err(error) => {
                let task = queue.tasks.pop_back().expect("the lock is held since the push");
                return Err(Refused { error, task });
            }
        }
        Ok(())
    }

    fn start_thread(&self, queue: &mut Queue<C>) -> io::Result<()> {
        let shared = self.0.clone();
        let builder = std::thread::Builder::new().name(self.0.name.into());
        threads::spawn(builder, move || shared.work())?;
        queue.threads += 1;
        Ok(())
    }

    /// Starts threads for tasks that wait behind tasks that hang: those that have run for `long`.
    /// The pool has at most `most` threads then, and its usual number again when no task hangs.
    /// Returns whether tasks still wait.
    pub fn relieve(&self, long: Duration, most: usize) -> bool {
        let mut queue = self.0.queue();
        queue.long = Some(long);
        let allowed = (self.0.most + queue.hanging()).min(most);
        let waiting = queue.tasks.len().saturating_sub(queue.idle);
        for _ in 0..waiting.min(allowed.saturating_sub(queue.threads)) {
            // A later call tries again.
            if self.start_thread(&mut queue).is_err() {
                break;
            }
        }
        !queue.tasks.is_empty()
    }
}

impl<C> Queue<C> {
    /// Returns the number of tasks that hang.
    fn hanging(&self) -> usize {
        let hangs = |begun: &&Instant| self.long.is_some_and(|long| begun.elapsed() >= long);
        self.running.iter().filter(hangs).count()
    }
}

impl<C> Shared<C> {
    fn queue(&self) -> MutexGuard<'_, Queue<C>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self)
    where
        C: Default,
    {
        let (context, mut ended) = (C::default(), None);
        while let Some((task, begun)) = self.next(ended) {
            let _ = catch_unwind(AssertUnwindSafe(|| task(&context)));
            ended = Some(begun);
        }
    }

    /// Waits for work. Returns a task and when it begins. None: the thread must end, and is no
    /// longer counted. `ended`: when the thread's last task began.
    fn next(&self, ended: Option<Instant>) -> Option<(Task<C>, Instant)> {
        let (mut queue, now) = (self.queue(), Instant::now());
        let deadline = now + self.linger;
        if let Some(at) = queue.running.iter().position(|begun| Some(*begun) == ended) {
            queue.running.swap_remove(at);
        }
        // `relieve` has started it for a task that hangs no more.
        if queue.threads > self.most && queue.threads > self.most + queue.hanging() {
            queue.threads -= 1;
            return None;
        }
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                let begun = Instant::now();
                queue.running.push(begun);
                return Some((task, begun));
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
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::{ThreadId, current};

    use super::*;
    use crate::testing::waits;

    /// Returns a pool with threads that only end with it.
    fn pool(most: usize) -> Pool {
        Pool::new("test", most, Duration::from_secs(3600))
    }

    fn run(pool: &Pool, task: impl FnOnce() + Send + 'static) {
        assert!(pool.run(Box::new(|()| task())).is_ok());
    }

    /// Waits until this number of threads is idle.
    fn until_idle(pool: &Pool, threads: usize) {
        waits::until("threads are idle", || pool.0.queue().idle == threads);
    }

    /// Returns the thread on which a task has begun.
    fn thread_of(task: &Receiver<ThreadId>) -> ThreadId {
        waits::receive(task, "the task begins")
    }

    /// Runs a task that ends when the sender is dropped. Returns its thread.
    fn begin(pool: &Pool, gate: Receiver<()>) -> Receiver<ThreadId> {
        let (sender, thread) = channel();
        run(pool, move || {
            sender.send(current().id()).unwrap();
            let _ = gate.recv();
        });
        thread
    }

    #[test]
    fn a_series_of_tasks_uses_one_thread() {
        let pool = pool(4);
        let run = || thread_of(&begin(&pool, channel().1));
        let first = run();
        for _ in 0..10 {
            until_idle(&pool, 1);
            assert_eq!(run(), first);
        }
        assert_eq!(pool.0.queue().threads, 1);
    }

    #[test]
    fn tasks_beyond_the_limit_of_threads_wait_and_begin_in_order() {
        let pool = pool(4);
        let (begun, order) = channel();
        let gates: Vec<Sender<()>> = (0..40)
            .map(|number| {
                let (hold, gate) = channel();
                let begun = begun.clone();
                run(&pool, move || {
                    begun.send(number).unwrap();
                    let _ = gate.recv();
                });
                hold
            })
            .collect();
        // The first ones run on different threads, at the same time.
        let next = || waits::receive(&order, "the next task begins");
        let mut first: Vec<_> = (0..4).map(|_| next()).collect();
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2, 3]);
        assert_eq!(pool.0.queue().threads, 4);
        assert!(order.try_recv().is_err(), "the others wait");
        for (number, gate) in gates.into_iter().enumerate() {
            drop(gate);
            if number + 4 < 40 {
                assert_eq!(next(), number + 4);
            }
        }
        until_idle(&pool, 4);
    }

    #[test]
    fn tasks_that_hang_leave_threads_for_others() {
        let pool = pool(2);
        let hang = |pool: &Pool| {
            let (hold, gate) = channel();
            let thread = begin(pool, gate);
            (hold, thread)
        };
        let hanging: Vec<_> = (0..2).map(|_| hang(&pool)).collect();
        for (_, thread) in &hanging {
            thread_of(thread);
        }
        let waiting: Vec<_> = (0..3).map(|_| hang(&pool)).collect();
        assert!(pool.relieve(Duration::from_secs(3600), 9), "no task hangs yet");
        assert_eq!(pool.0.queue().threads, 2);
        // Two tasks hang, so two more threads may run.
        pool.relieve(Duration::ZERO, 9);
        assert_eq!(pool.0.queue().threads, 4);
        for (_, thread) in &waiting[..2] {
            thread_of(thread);
        }
        assert!(pool.relieve(Duration::ZERO, 4), "the pool has its maximum");
        assert!(waiting[2].1.try_recv().is_err());
        assert_eq!(pool.0.queue().threads, 4);
        let more: Vec<_> = (0..10).map(|_| hang(&pool)).collect();
        assert!(pool.relieve(Duration::ZERO, 4));
        assert_eq!(pool.0.queue().threads, 4, "only `relieve` adds threads to the usual number");
        drop(more);
        drop(hanging);
        thread_of(&waiting[2].1);
        drop(waiting);
        // No task hangs.
        waits::until("it has its usual number again", || pool.0.queue().threads == 2);
    }

    #[test]
    fn a_task_that_panics_ends_neither_its_thread_nor_later_tasks() {
        let pool = pool(1);
        let first = thread_of(&begin(&pool, channel().1));
        run(&pool, || panic!("on purpose"));
        assert_eq!(thread_of(&begin(&pool, channel().1)), first);
    }

    #[test]
    fn idle_threads_end_with_the_pool() {
        let pool = pool(2);
        thread_of(&begin(&pool, channel().1));
        until_idle(&pool, 1);
        let shared = Arc::downgrade(&pool.0);
        drop(pool);
        // The thread holds the last reference.
        waits::until("the thread ends", || shared.strong_count() == 0);
    }

    #[test]
    fn a_thread_without_work_ends_after_the_time_of_its_pool() {
        let pool: Pool = Pool::new("test", 2, Duration::from_millis(1));
        thread_of(&begin(&pool, channel().1));
        waits::until("the thread ends", || pool.0.queue().threads == 0);
        thread_of(&begin(&pool, channel().1));
    }
}
