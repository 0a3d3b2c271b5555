//! An io_uring operation, as the task that awaits it sees it.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::executor::Handle;
use crate::segments::Segments;

/// An operation in the kernel. If it is dropped early, its memory stays with the ring until its
/// completion.
pub(crate) struct Operation {
    pub handle: Handle,
    pub key: Option<u32>,
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
