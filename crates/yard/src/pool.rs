//! Threads that run commands: at most a fixed number. They start when there is work. A thread
//! without work ends after [`LINGER`], so that an idle server uses no memory for their stacks.
//!
//! What must hold: a task begins as soon as one of the threads is idle. A series of commands uses
//! one thread: to start and end a thread for each command would change the address space each time,
//! which interrupts the reactors.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_image::Opener;

/// A command to run. The opener belongs to the thread, and is reused for its next command.
pub type Task = Box<dyn FnOnce(&Opener) + Send>;

/// Size of a thread's stack in bytes. Opening an image needs more than a reactor's stack.
const STACK_BYTES: usize = 2 << 20;

/// How long an idle thread waits for more work. Long in tests, which check that threads end for
/// other reasons.
const LINGER: Duration = Duration::from_millis(if cfg!(test) { 3_600_000 } else { 250 });

/// A pool of threads; see the module documentation. Idle threads end when this is dropped.
pub struct Pool {
    shared: Arc<Shared>,
    name: &'static str,
    most: usize,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    comes: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    /// Whether the pool gets no more work.
    is_closed: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let opener = Opener::default();
        while let Some(task) = self.next() {
            task(&opener);
        }
    }

    /// Waits for work. None: the thread must end, and is no longer counted.
    fn next(&self) -> Option<Task> {
        let (mut queue, deadline) = (self.queue(), Instant::now() + LINGER);
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                return Some(task);
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

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.queue().is_closed = true;
        self.shared.comes.notify_all();
    }
}

impl Pool {
    /// Returns a pool of at most `most` threads named `name`.
    pub fn new(name: &'static str, most: usize) -> Self {
        Pool { shared: Arc::default(), name, most }
    }

    /// Runs `task` on a thread of the pool, after earlier tasks. Runs it on this thread if the
    /// kernel refuses to start any thread.
    pub fn run(&self, task: Task) {
        let mut queue = self.shared.queue();
        queue.tasks.push_back(task);
        if queue.tasks.len() <= queue.idle {
            self.shared.comes.notify_one();
            return;
        }
        if queue.threads == self.most {
            return;
        }
        queue.threads += 1;
        drop(queue);
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(self.name.into()).stack_size(STACK_BYTES);
        if let Err(e) = thread.spawn(move || shared.work()) {
            tracing::warn!("cannot start a thread for commands: {e}");
            let mut queue = self.shared.queue();
            queue.threads -= 1;
            let task = if queue.threads == 0 { queue.tasks.pop_front() } else { None };
            drop(queue);
            task.into_iter().for_each(|task| task(&Opener::default()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::{ThreadId, current};

    use super::*;

    /// Waits until this number of threads is idle.
    fn until_idle(pool: &Pool, threads: usize) {
        while pool.shared.queue().idle != threads {
            std::thread::yield_now();
        }
    }

    /// Runs a task that ends when the sender is dropped. Returns its thread.
    fn begin(pool: &Pool, gate: Receiver<()>) -> Receiver<ThreadId> {
        let (sender, thread) = channel();
        pool.run(Box::new(move |_| {
            sender.send(current().id()).unwrap();
            let _ = gate.recv();
        }));
        thread
    }

    #[test]
    fn a_series_of_tasks_uses_one_thread() {
        let pool = Pool::new("test", 4);
        let run = || begin(&pool, channel().1).recv().unwrap();
        let first = run();
        for _ in 0..10 {
            until_idle(&pool, 1);
            assert_eq!(run(), first);
        }
        assert_eq!(pool.shared.queue().threads, 1);
    }

    #[test]
    fn tasks_at_the_same_time_use_threads_up_to_the_limit() {
        let pool = Pool::new("test", 2);
        let (gates, tasks): (Vec<_>, Vec<_>) = (0..3)
            .map(|_| {
                let (hold, gate) = channel();
                (hold, begin(&pool, gate))
            })
            .unzip();
        let running = [&tasks[0], &tasks[1]].map(|task| task.recv().unwrap());
        assert_ne!(running[0], running[1]);
        assert!(tasks[2].try_recv().is_err(), "the third one waits");
        drop(gates);
        assert!(running.contains(&tasks[2].recv().unwrap()));
        until_idle(&pool, 2);
    }

    #[test]
    fn idle_threads_end_with_the_pool() {
        let pool = Pool::new("test", 2);
        begin(&pool, channel().1).recv().unwrap();
        until_idle(&pool, 1);
        let shared = Arc::downgrade(&pool.shared);
        drop(pool);
        // The thread holds the last reference.
        while shared.strong_count() > 0 {
            std::thread::yield_now();
        }
    }
}
