//! Wakes a task: by a descriptor that another process signals, or from another task of the
//! executor.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::task::Poll;

use crate::mem::segments::Segments;
use crate::tasks::executor::{Handle, NO_TASK};
use crate::uring::{Action, TaskId};

/// An eventfd (or pipe, or socket) that another process signals. The poll is multishot and
/// edge-triggered: the eventfd's counter is never read, so a signal costs this process no system
/// call.
pub struct Watch {
    handle: Handle,
    fd: OwnedFd,
    key: Option<u32>,
}

impl Handle {
    /// Watches an eventfd, pipe or socket; see [`Watch`].
    pub fn watch(&self, fd: OwnedFd) -> Watch {
        Watch { handle: self.clone(), fd, key: None }
    }
}

impl Watch {
    /// Lets each signal from here on wake the current task. Spurious wake-ups are possible.
    pub fn arm(&mut self) {
        let task = self.handle.current();
        let mut uring = self.handle.uring();
        if let Some(key) = self.key {
            // `None`: still armed. `Some`: the kernel ended the multishot poll (its queue was full,
            // or an error); arm it again.
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

/// Wakes one waiting task of this executor. One ring before the wait is kept.
#[derive(Clone)]
pub struct Signal(Rc<SignalInner>);

struct SignalInner {
    handle: Handle,
    rung: Cell<bool>,
    task: Cell<TaskId>,
}

impl Signal {
    /// Creates a signal for tasks of the executor of `handle`.
    pub fn new(handle: &Handle) -> Self {
        Signal(Rc::new(SignalInner {
            handle: handle.clone(),
            rung: Cell::new(false),
            task: Cell::new(NO_TASK),
        }))
    }

    /// Rings the signal: wakes the waiting task.
    #[inline]
    pub fn ring(&self) {
        if !self.0.rung.replace(true) {
            self.0.handle.wake(self.0.task.get());
        }
    }

    /// Waits until the signal is rung, and clears the ring.
    pub async fn wait(&self) {
        std::future::poll_fn(|_| self.poll_wait()).await
    }

    /// Clears earlier rings: the caller is about to check everything that they could mean.
    #[inline]
    pub fn clear(&self) {
        self.0.rung.set(false);
    }

    /// Lets rings wake the current task, which is about to [`park`]. Returns true if the signal was
    /// rung since `clear`: then the task must not park.
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

/// Sleeps until any wake-up (a watch, a signal, a timer). The caller has armed its sources, and
/// checks them all afterwards.
pub async fn park() {
    let mut polled = false;
    std::future::poll_fn(|_| {
        if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::EventfdFlags;

    use super::*;
    use crate::Executor;
    use crate::testing::waits;

    fn work(f: impl AsyncFnOnce(Handle) + 'static) {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        waits::block_on(&executor, async move { f(handle).await }).unwrap();
    }

    /// Spawns a task that counts its polls. Returns the count.
    fn counts(handle: &Handle, mut arm: impl FnMut() + 'static) -> Rc<Cell<u32>> {
        let polls = Rc::new(Cell::new(0));
        let count = polls.clone();
        handle.spawn(std::future::poll_fn(move |_| {
            arm();
            count.set(count.get() + 1);
            Poll::Pending
        }));
        polls
    }

    #[test]
    fn a_watch_wakes_its_task_at_each_signal_without_a_read() {
        work(async |handle| {
            let ours = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            let theirs = ours.as_fd().try_clone_to_owned().unwrap();
            let mut watch = handle.watch(ours);
            for round in 1..=100u64 {
                watch.arm();
                rustix::io::write(&theirs, &1u64.to_ne_bytes()).unwrap();
                // Without a wake-up the test would not end.
                park().await;
                let mut counter = [0; 8];
                if round == 100 {
                    rustix::io::read(&theirs, &mut counter).unwrap();
                    assert_eq!(u64::from_ne_bytes(counter), 100, "the watch has read the counter");
                }
            }
        });
    }

    #[test]
    fn a_watch_wakes_the_task_that_armed_it_last_and_none_after_its_drop() {
        work(async |handle| {
            let ours = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            let theirs = ours.as_fd().try_clone_to_owned().unwrap();
            let ring = || rustix::io::write(&theirs, &1u64.to_ne_bytes()).unwrap();
            let watch = Rc::new(std::cell::RefCell::new(Some(handle.watch(ours))));
            let armed = watch.clone();
            let first = counts(&handle, move || {
                armed.borrow_mut().as_mut().into_iter().for_each(Watch::arm)
            });
            handle.yield_now().await;
            assert_eq!(first.get(), 1);
            watch.borrow_mut().as_mut().unwrap().arm();
            ring();
            park().await;
            assert_eq!(first.get(), 1, "the first task is not woken any more");
            drop(watch.take());
            handle.yield_now().await;
            ring();
            handle.yield_now().await;
            handle.yield_now().await;
            assert_eq!(first.get(), 1);
            assert_eq!(handle.uring().in_flight(), 1, "only the executor's own poll is left");
        });
    }

    #[test]
    fn one_ring_before_the_wait_is_kept() {
        work(async |handle| {
            let signal = Signal::new(&handle);
            signal.ring();
            signal.ring();
            signal.wait().await;
            let waits = signal.clone();
            let polls = counts(&handle, move || {
                assert!(waits.poll_wait().is_pending(), "two rings were kept")
            });
            handle.yield_now().await;
            assert_eq!(polls.get(), 1);
        });
    }

    #[test]
    fn a_ring_wakes_the_waiting_task_once() {
        work(async |handle| {
            let signal = Signal::new(&handle);
            let armed = signal.clone();
            let polls = counts(&handle, move || {
                armed.clear();
                assert!(!armed.arm());
            });
            handle.yield_now().await;
            for round in 2..10 {
                signal.ring();
                signal.ring();
                assert!(signal.0.rung.get(), "the ring is kept until it is cleared");
                handle.yield_now().await;
                assert_eq!(polls.get(), round);
            }
            // If the signal is rung between `clear` and `arm`, the task must not park.
            signal.clear();
            signal.ring();
            assert!(signal.arm());
        });
    }
}
