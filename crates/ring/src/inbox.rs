//! The one way in to an executor for other threads: a bounded ring of slots, many producers, one
//! consumer.
//!
//! In: wake-ups of tasks and calls, from any thread. Out: both, on the executor's thread, once a
//! turn. What must hold:
//! - A wake-up takes no lock, allocates nothing and never waits: librbd's callbacks, worker threads
//!   and other reactors complete requests by it.
//! - A task has at most one wake-up in the ring. If the ring is full, the wake-up stays as a mark
//!   on the task's waker, and the executor looks at all wakers. No wake-up is lost.
//! - Calls are for control. Those that find the ring full are kept in a list behind a lock. Calls
//!   of one thread run in order.
//! - The eventfd is written only when the executor sleeps, once a sleep.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_queue::ArrayQueue;

use crate::executor::Handle;
use crate::uring::TaskId;

/// Slots of the ring.
pub(crate) const SLOTS: usize = 1024;

pub(crate) enum Job {
    Call(Box<dyn FnOnce(&Handle) + Send>),
    Wake(TaskId),
}

pub(crate) struct Inbox {
    ring: ArrayQueue<Job>,
    /// Calls that found the ring full, and their number.
    kept: Mutex<Vec<Job>>,
    kept_len: AtomicUsize,
    /// A wake-up found the ring full: it is a mark on its waker only.
    marked: AtomicBool,
    /// The executor waits for the eventfd, or is about to.
    sleeping: AtomicBool,
    /// The executor has ended, and takes no more jobs.
    closed: AtomicBool,
    pub event: OwnedFd,
}

impl Inbox {
    pub fn new() -> io::Result<Self> {
        Self::with_slots(SLOTS)
    }

    fn with_slots(slots: usize) -> io::Result<Self> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        Ok(Inbox {
            ring: ArrayQueue::new(slots),
            kept: Mutex::default(),
            kept_len: AtomicUsize::new(0),
            marked: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            event: rustix::event::eventfd(0, flags)?,
        })
    }

    /// Wakes a task. `mark` is its waker's: it is set until the executor has seen the wake-up.
    pub fn wake(&self, task: TaskId, mark: &AtomicBool) {
        // A mark that is set already stands for this wake-up, too: the executor clears it before it
        // polls the task.
        if mark.swap(true, SeqCst) {
            return;
        }
        if self.ring.push(Job::Wake(task)).is_err() {
            self.marked.store(true, SeqCst);
        }
        self.notify();
    }

    /// Hands a call in. Dropped if the executor has ended: a caller that waits for its answer
    /// learns that there is none.
    pub fn call(&self, call: Box<dyn FnOnce(&Handle) + Send>) {
        if self.closed.load(SeqCst) {
            return;
        }
        let job = Job::Call(call);
        // A call must not overtake those that are kept.
        let refused =
            if self.kept_len.load(SeqCst) == 0 { self.ring.push(job).err() } else { Some(job) };
        if let Some(job) = refused {
            let mut kept = self.kept();
            kept.push(job);
            self.kept_len.store(kept.len(), SeqCst);
        }
        if self.closed.load(SeqCst) {
            return self.drop_all();
        }
        self.notify();
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Job>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self) {
        if self.sleeping.swap(false, SeqCst) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    pub fn is_empty(&self) -> bool {
        self.ring.is_empty() && self.kept_len.load(SeqCst) == 0 && !self.marked.load(SeqCst)
    }

    /// The executor is about to sleep: from here on producers write the eventfd. False: there are
    /// jobs already, and the executor must not sleep.
    pub fn may_sleep(&self) -> bool {
        self.sleeping.store(true, SeqCst);
        // Either this sees what a producer has handed in, or the producer sees `sleeping`.
        let empty = self.is_empty();
        if !empty {
            self.sleeping.store(false, SeqCst);
        }
        empty
    }

    pub fn awake(&self) {
        self.sleeping.store(false, SeqCst);
    }

    /// The next job, as long as no call is kept.
    pub fn pop(&self) -> Option<Job> {
        self.ring.pop()
    }

    /// Returns the calls that are kept, behind those that were in the ring before them.
    pub fn take_kept(&self) -> Vec<Job> {
        if self.kept_len.load(SeqCst) == 0 {
            return Vec::new();
        }
        let mut kept = self.kept();
        // What a thread put into the ring before another thread's call was kept is in the ring by
        // now.
        let mut jobs = Vec::new();
        while let Some(job) = self.ring.pop() {
            jobs.push(job);
        }
        jobs.append(&mut kept);
        self.kept_len.store(0, SeqCst);
        jobs
    }

    /// Returns whether wakers have marks without a job in the ring, and forgets it.
    pub fn take_marked(&self) -> bool {
        self.marked.load(SeqCst) && self.marked.swap(false, SeqCst)
    }

    /// The executor ends: drops what it has not taken, and all that comes.
    pub fn close(&self) {
        self.closed.store(true, SeqCst);
        self.drop_all();
    }

    fn drop_all(&self) {
        drop(self.take_kept());
        while let Some(job) = self.ring.pop() {
            drop(job);
        }
    }
}

#[cfg(test)]
mod tests;
