//! Threads that run commands: at most a fixed number. They start when there is work and end when
//! there is none, so that an idle server uses no memory for their stacks.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_image::Opener;

/// A command to run. The opener belongs to the thread, and is reused for its next command.
pub type Task = Box<dyn FnOnce(&Opener) + Send>;

/// Size of a thread's stack in bytes. Opening an image needs more than a reactor's stack.
const STACK_BYTES: usize = 2 << 20;

/// A pool of threads; see the module documentation.
pub struct Pool {
    queue: Arc<Mutex<Queue>>,
    name: &'static str,
    most: usize,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    threads: usize,
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Works until no task is left.
fn work(queue: &Mutex<Queue>) {
    let opener = Opener::default();
    loop {
        let mut locked = lock(queue);
        let Some(task) = locked.tasks.pop_front() else {
            locked.threads -= 1;
            return;
        };
        drop(locked);
        task(&opener);
    }
}

impl Pool {
    /// Returns a pool of at most `most` threads named `name`.
    pub fn new(name: &'static str, most: usize) -> Self {
        Pool { queue: Arc::default(), name, most }
    }

    /// Runs `task` on a thread of the pool, after earlier tasks. Runs it on this thread if the
    /// kernel refuses to start any thread.
    pub fn run(&self, task: Task) {
        let mut locked = lock(&self.queue);
        locked.tasks.push_back(task);
        if locked.threads == self.most {
            return;
        }
        locked.threads += 1;
        drop(locked);
        let queue = self.queue.clone();
        let thread = std::thread::Builder::new().name(self.name.into()).stack_size(STACK_BYTES);
        if let Err(e) = thread.spawn(move || work(&queue)) {
            tracing::warn!("cannot start a thread for commands: {e}");
            let mut locked = lock(&self.queue);
            locked.threads -= 1;
            let task = if locked.threads == 0 { locked.tasks.pop_front() } else { None };
            drop(locked);
            task.into_iter().for_each(|task| task(&Opener::default()));
        }
    }
}
