//! Yields and timers of tasks.

use std::cmp::Reverse;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::{Handle, NO_TASK};

impl Handle {
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
        self.sleep_until(Instant::now() + time).await
    }

    /// Waits until `at`.
    pub async fn sleep_until(&self, at: Instant) {
        let mut sleeper = NO_TASK;
        std::future::poll_fn(|_| {
            if Instant::now() >= at {
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
