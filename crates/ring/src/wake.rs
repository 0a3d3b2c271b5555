//! What wakes a task: a descriptor that somebody else rings, or another task of the same executor.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::task::Poll;

use crate::executor::{Handle, NOBODY};
use crate::segments::Segments;
use crate::uring::{Action, TaskId};

/// A descriptor that is rung by somebody else. The poll is multishot and edge-triggered: an eventfd's counter is never
/// read, so a ring of it costs this side no system call.
pub struct Watch {
    handle: Handle,
    fd: OwnedFd,
    key: Option<u32>,
}

impl Watch {
    pub(crate) fn new(handle: &Handle, fd: OwnedFd) -> Self {
        Watch { handle: handle.clone(), fd, key: None }
    }

    /// Makes sure rings are noted from here on; the current task is woken by each (and may be woken for nothing).
    pub fn arm(&mut self) {
        let task = self.handle.current();
        let mut uring = self.handle.uring();
        if let Some(key) = self.key {
            // None: still armed. Some: the kernel ended the multishot (its queue was full, or an error): arm anew.
            match uring.take(key) {
                None => return uring.set_task(key, task),
                Some(_) => self.key = None,
            }
        }
        let action = Action::Poll { fd: self.fd.as_raw_fd() };
        self.key = Some(uring.start(task, action, Segments::default(), None));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.handle.uring().abandon(key);
        }
    }
}

/// Tells one waiting task of this executor that something changed. Rings before the wait are kept (one).
#[derive(Clone)]
pub struct Signal(Rc<SignalInner>);

struct SignalInner {
    handle: Handle,
    rung: Cell<bool>,
    task: Cell<TaskId>,
}

impl Signal {
    pub fn new(handle: &Handle) -> Self {
        Signal(Rc::new(SignalInner { handle: handle.clone(), rung: Cell::new(false), task: Cell::new(NOBODY) }))
    }

    #[inline]
    pub fn ring(&self) {
        if !self.0.rung.replace(true) {
            self.0.handle.wake(self.0.task.get());
        }
    }

    /// Waits for a ring, and takes it.
    pub async fn wait(&self) {
        std::future::poll_fn(|_| self.poll_wait()).await
    }

    /// Forgets rings so far: the caller is about to look at everything they could mean.
    #[inline]
    pub fn clear(&self) {
        self.0.rung.set(false);
    }

    /// From here on rings wake the current task, which is about to [`park`]. True: it was rung since `clear`, do not park.
    #[inline]
    pub fn arm(&self) -> bool {
        self.0.task.set(self.0.handle.current());
        self.0.rung.get()
    }

    #[inline]
    fn poll_wait(&self) -> Poll<()> {
        if self.0.rung.take() {
            return Poll::Ready(());
        }
        self.0.task.set(self.0.handle.current());
        Poll::Pending
    }
}

/// Sleeps until woken by anything (a watch, a signal, a timer): the caller has armed its sources, and checks them all after.
pub async fn park() {
    let mut polled = false;
    std::future::poll_fn(|_| if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }).await
}
