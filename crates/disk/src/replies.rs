//! The replies of a disk's reactors to a question of a control thread.
//!
//! In: a [`Replier`] for each reactor, from any thread. Out: one result, when all have replied.
//!
//! What must hold: the control thread waits as a task of its own reactor, so a test runs it and the
//! reactors that reply on one thread. A reactor that ends drops its replier, which counts as a
//! reply.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use blockyard_ring::Handle;

use crate::quiesce_error::QuiesceError;

/// Reply of one reactor.
pub(crate) type Reply = io::Result<()>;

/// The task that waits.
type Waiting = Arc<Mutex<Option<Waker>>>;

/// Sends a reply. Its clones can send further ones. Wakes the task that waits when it is dropped.
#[derive(Clone)]
pub(crate) struct Replier {
    /// None: it is being dropped.
    sender: Option<mpsc::Sender<Reply>>,
    waiting: Waiting,
}

/// The replies that arrive.
pub(crate) struct Replies {
    receiver: mpsc::Receiver<Reply>,
    waiting: Waiting,
    failed: Option<io::Error>,
}

/// Returns a replier, and what receives its replies and those of its clones.
pub(crate) fn replies() -> (Replier, Replies) {
    let (sender, receiver) = mpsc::channel();
    let waiting = Waiting::default();
    let replier = Replier { sender: Some(sender), waiting: waiting.clone() };
    (replier, Replies { receiver, waiting, failed: None })
}

impl Replier {
    pub fn send(self, reply: Reply) {
        if let Some(sender) = &self.sender {
            // A caller that waits no longer needs no reply.
            let _ = sender.send(reply);
        }
    }
}

impl Drop for Replier {
    fn drop(&mut self) {
        // The task must find the channel as it is without this sender.
        drop(self.sender.take());
        let waker = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Replies {
    /// Waits until all repliers are dropped, at most for `time`. Returns the first error.
    pub async fn all(mut self, handle: &Handle, time: Duration) -> Result<(), QuiesceError> {
        let mut late = pin!(handle.sleep(time));
        poll_fn(|cx| {
            if self.are_complete(cx) {
                let failed = self.failed.take();
                return Poll::Ready(failed.map_or(Ok(()), |e| Err(QuiesceError::Reactor(e))));
            }
            match late.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(QuiesceError::Patience)),
                Poll::Pending => Poll::Pending,
            }
        })
        .await
    }

    /// Returns the replies that have arrived.
    #[cfg(test)]
    pub fn arrived(&self) -> Vec<Reply> {
        self.receiver.try_iter().collect()
    }

    /// Takes the replies that have arrived. Returns whether there can be no further one.
    fn are_complete(&mut self, cx: &mut Context<'_>) -> bool {
        // Before the channel, so that a reply after the look at the channel wakes the task.
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        *waiting = Some(cx.waker().clone());
        drop(waiting);
        loop {
            match self.receiver.try_recv() {
                Ok(reply) => self.failed = self.failed.take().or(reply.err()),
                Err(error) => return error == TryRecvError::Disconnected,
            }
        }
    }
}
