//! An io_uring operation, as the task that awaits it sees it.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::mem::segments::Segments;
use crate::tasks::executor::Handle;
use crate::uring::Action;
use crate::uring::file_slot::FileSlot;

/// An operation in the kernel. If it is dropped early, its memory stays with the ring until its
/// completion.
pub(crate) struct Operation {
    handle: Handle,
    key: Option<u32>,
}

impl Handle {
    /// Starts an operation on a file for the current task.
    pub(crate) fn operation(
        &self,
        action: Action,
        segments: Segments,
        file: Rc<FileSlot<Handle>>,
    ) -> Operation {
        let key = self.uring().start(self.current(), action, segments, Some(file));
        Operation { handle: self.clone(), key: Some(key) }
    }
}

impl Future for Operation {
    type Output = (i32, Segments);

    #[inline]
    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(key) = self.key else {
            return Poll::Ready((-libc::ECANCELED, Segments::default()));
        };
        let done = {
            let mut uring = self.handle.uring();
            let done = uring.take(key);
            if done.is_none() {
                uring.set_task(key, self.handle.current());
            }
            done
        };
        match done {
            Some(done) => {
                self.key = None;
                Poll::Ready(done)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.handle.uring().abandon(key);
        }
    }
}
