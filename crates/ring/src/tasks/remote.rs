//! Submits work to an executor's thread from other threads.
//!
//! In: closures from any thread. Out: they run on the executor's thread, in order. They go through
//! the `Inbox`.

use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use crate::tasks::executor::{Executor, Handle};
use crate::tasks::inbox::Inbox;

/// A handle to an executor that any thread may use.
#[derive(Clone)]
pub struct Remote {
    inbox: Arc<Inbox<Handle>>,
}

impl Executor {
    /// Returns a handle for other threads.
    pub fn remote(&self) -> Remote {
        self.handle().remote()
    }
}

impl Handle {
    /// Returns a handle to this executor for other threads.
    pub fn remote(&self) -> Remote {
        Remote { inbox: self.inbox().clone() }
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").finish_non_exhaustive()
    }
}

impl Remote {
    /// Returns whether both refer to the same executor.
    pub fn is(&self, other: &Remote) -> bool {
        Arc::ptr_eq(&self.inbox, &other.inbox)
    }

    /// Runs `f` on the executor's thread, asynchronously. Does not run it if the executor has
    /// ended.
    pub fn run(&self, f: impl FnOnce(&Handle) + Send + 'static) {
        self.inbox.call(Box::new(f));
    }

    /// Runs `f` on the executor's thread and waits for its reply. `None`: the executor ended
    /// without a reply.
    pub fn ask<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Handle, Reply<T>) + Send + 'static,
    ) -> Option<T> {
        self.ask_later(f).wait()
    }

    /// Runs `f` on the executor's thread, and returns without waiting for its reply.
    pub fn ask_later<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Handle, Reply<T>) + Send + 'static,
    ) -> PendingReply<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.run(move |handle| f(handle, Reply(sender)));
        PendingReply(receiver)
    }
}

/// A reply that has not arrived yet.
#[must_use = "the executor may not have done it yet"]
pub struct PendingReply<T>(mpsc::Receiver<T>);

/// Why there is no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoReply {
    #[error("its reactor has ended")]
    Ended,
    #[error("its reactor has not answered in time")]
    Late,
}

impl<T> PendingReply<T> {
    /// Waits for the reply. `None`: the executor ended without a reply.
    pub fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }

    /// Waits for the reply until `deadline`.
    pub fn until(&self, deadline: Instant) -> Result<T, NoReply> {
        self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|e| match e
        {
            mpsc::RecvTimeoutError::Timeout => NoReply::Late,
            mpsc::RecvTimeoutError::Disconnected => NoReply::Ended,
        })
    }
}

/// Sends the reply to [`Remote::ask`]. It may be moved into a task and used later.
pub struct Reply<T>(mpsc::SyncSender<T>);

impl<T> Reply<T> {
    /// Sends the reply. A caller that no longer waits is ignored.
    pub fn send(self, value: T) {
        let _ = self.0.send(value);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use crate::testing::waits;
    use crate::{Executor, NoReply};

    #[test]
    fn a_reply_arrives_only_after_the_executor_ran_the_call() {
        let executor = Executor::new().unwrap();
        let remote = executor.remote();
        let answer = remote.ask_later(|handle, reply| {
            reply.send(3);
            handle.stop();
        });
        // The call has not run yet.
        assert_eq!(answer.until(Instant::now()), Err(NoReply::Late));
        waits::run(&executor).unwrap();
        assert_eq!(answer.until(Instant::now() + waits::LIMIT), Ok(3));
        drop(executor);
        let answer = remote.ask_later(|_, reply| reply.send(3));
        assert_eq!(answer.until(Instant::now() + waits::LIMIT), Err(NoReply::Ended));
    }

    #[test]
    fn a_call_to_an_executor_that_has_ended_does_not_wait() {
        let executor = Executor::new().unwrap();
        let remote = executor.remote();
        // The call is submitted while the executor lives, but it never runs.
        let asking = std::thread::spawn({
            let remote = remote.clone();
            move || remote.ask(|_, reply| reply.send(1))
        });
        waits::until("the call is submitted", || !remote.inbox.is_empty());
        drop(executor);
        assert_eq!(waits::join(asking, "the call returns"), None);
        let later = move || remote.ask(|_, reply| reply.send(2));
        assert_eq!(waits::within("a later call returns", later), None);
    }
}
