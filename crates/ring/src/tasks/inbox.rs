//! The queue through which other threads reach an executor: a bounded ring of slots,
//! multi-producer, single-consumer.
//!
//! In: wake-ups of tasks, and calls, from any thread. Out: both, on the executor's thread, once per
//! iteration.
//!
//! What must hold
//! - A wake-up takes no lock, allocates nothing and never blocks: librbd's callbacks, worker
//!   threads and other reactors complete requests with it.
//! - A task has at most one wake-up in the ring. If the ring is full, the wake-up remains as a mark
//!   on the task's waker, and the executor checks all wakers. No wake-up is lost.
//! - Calls are for control operations. If the ring is full, they are kept in a list behind a lock.
//!   Calls of one thread run in order.
//! - The eventfd is written only while the executor sleeps, once per sleep.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_queue::ArrayQueue;

use crate::uring::TaskId;

/// Number of slots of the ring.
pub(crate) const SLOTS: usize = 1024;

/// A call on the executor's thread. It gets the handle `H` of the executor.
pub(crate) type Call<H> = Box<dyn FnOnce(&H) + Send>;

pub(crate) enum Job<H> {
    Call(Call<H>),
    Wake(TaskId),
}

/// The queue of one executor. `H`: handle of the executor.
pub(crate) struct Inbox<H> {
    ring: ArrayQueue<Job<H>>,
    /// Calls that did not fit into the ring, and their number.
    kept: Mutex<Vec<Job<H>>>,
    kept_len: AtomicUsize,
    /// Whether a wake-up did not fit into the ring. Only the mark on its waker records such a
    /// wake-up.
    marked: AtomicBool,
    /// Whether the executor waits for the eventfd, or is about to.
    sleeping: AtomicBool,
    /// Whether the executor has ended, and takes no more jobs.
    closed: AtomicBool,
    pub event: OwnedFd,
}

impl<H> Inbox<H> {
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

    /// Wakes a task. `mark` belongs to its waker: it stays set until the executor has seen the
    /// wake-up.
    pub fn wake(&self, task: TaskId, mark: &AtomicBool) {
        // If the mark is set already, the queued wake-up covers this one too: the executor clears
        // the mark before it polls the task.
        if mark.swap(true, SeqCst) {
            return;
        }
        if self.ring.push(Job::Wake(task)).is_err() {
            self.marked.store(true, SeqCst);
        }
        self.notify();
    }

    /// Submits a call. If the executor has ended, drops it: a caller that waits for the reply then
    /// receives an error.
    pub fn call(&self, call: Call<H>) {
        if self.closed.load(SeqCst) {
            return;
        }
        let job = Job::Call(call);
        // A call must not overtake calls in the list.
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

    fn kept(&self) -> MutexGuard<'_, Vec<Job<H>>> {
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

    /// Announces that the executor is about to sleep: from here on producers write the eventfd.
    /// Returns false if there are jobs already, so that the executor must not sleep.
    pub fn may_sleep(&self) -> bool {
        self.sleeping.store(true, SeqCst);
        // Either this thread sees a producer's job, or the producer sees `sleeping`.
        let empty = self.is_empty();
        if !empty {
            self.sleeping.store(false, SeqCst);
        }
        empty
    }

    pub fn awake(&self) {
        self.sleeping.store(false, SeqCst);
    }

    /// Returns the next job of the ring.
    pub fn pop(&self) -> Option<Job<H>> {
        self.ring.pop()
    }

    /// Takes all jobs: first those in the ring, then the calls in the overflow list. Takes none if
    /// the list is empty.
    pub fn take_kept(&self) -> Vec<Job<H>> {
        if self.kept_len.load(SeqCst) == 0 {
            return Vec::new();
        }
        let mut kept = self.kept();
        // If a thread put a job into the ring before another thread's call went to the list, that
        // job is in the ring by now. It must run first.
        let mut jobs = Vec::new();
        while let Some(job) = self.ring.pop() {
            jobs.push(job);
        }
        jobs.append(&mut kept);
        self.kept_len.store(0, SeqCst);
        jobs
    }

    /// Returns and clears whether some wakers have marks without a job in the ring.
    pub fn take_marked(&self) -> bool {
        self.marked.load(SeqCst) && self.marked.swap(false, SeqCst)
    }

    /// Closes the inbox: drops the jobs in it, and all that arrive later.
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
