//! Yields and timers of tasks, and the clock that they use: the real or a simulated one.

use std::cmp::Reverse;
use std::io;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::{Handle, Inner, NO_TASK};

/// Returns the time at which a simulated clock begins. It is later than each time that the process
/// has read from the real clock, because some code measures from the first time that it read.
pub(super) fn simulated_start() -> Instant {
    Instant::now() + Duration::from_secs(24 * 3600)
}

impl Inner {
    #[inline]
    pub(super) fn read_clock(&self) -> Instant {
        self.simulated.as_ref().map_or_else(Instant::now, |time| time.get())
    }

    /// Returns how long the thread may sleep. None: until something happens.
    pub(super) fn longest_wait(&self) -> Option<Duration> {
        if self.simulated.is_some() {
            return Some(Duration::ZERO);
        }
        let next = self.timers.borrow().peek().map(|timer| timer.0.0);
        next.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Sets a simulated clock to the next timer, if nothing is ready.
    pub(super) fn advance_simulated(&self) -> io::Result<()> {
        let Some(time) = &self.simulated else { return Ok(()) };
        let has_news = self.remote_rung.get() || !self.inbox.is_empty();
        if has_news || !self.ready.borrow().is_empty() {
            return Ok(());
        }
        let next = self.timers.borrow().peek().map(|timer| timer.0.0);
        let next = next.ok_or_else(|| io::Error::other("no task is ready, and no timer is set"))?;
        time.set(time.get().max(next));
        Ok(())
    }
}

impl Handle {
    /// Reads the clock; see also [`Handle::now`].
    #[inline]
    pub fn read_clock(&self) -> Instant {
        self.0.read_clock()
    }

    /// Yields to all ready tasks, to one submit-and-reap, and to the tasks that it wakes.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|_| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            self.0.after.borrow_mut().push(self.0.current.get());
            Poll::Pending
        })
        .await
    }

    /// Waits for `time`.
    pub async fn sleep(&self, time: Duration) {
        self.sleep_until(self.read_clock() + time).await
    }

    /// Waits until `at`.
    pub async fn sleep_until(&self, at: Instant) {
        let mut sleeper = NO_TASK;
        std::future::poll_fn(|_| {
            if self.read_clock() >= at {
                return Poll::Ready(());
            }
            // Register one timer only, even if the task is polled several times before `at`.
            let task = self.0.current.get();
            if std::mem::replace(&mut sleeper, task) != task {
                self.0.timers.borrow_mut().push(Reverse((at, task)));
            }
            Poll::Pending
        })
        .await
    }

    /// Wakes the current task at `at`. Other events may wake it earlier.
    pub fn wake_at(&self, at: Instant) {
        self.0.timers.borrow_mut().push(Reverse((at, self.0.current.get())));
    }
}
