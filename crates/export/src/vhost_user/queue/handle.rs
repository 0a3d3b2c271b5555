//! The control thread's handle of a queue: starts, stops and changes it.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use blockyard_ring::{Clock, GuestMemory, PendingReply, Remote, park};

use super::{DeviceState, Marks, Queue, QueueSetup, Queues};
use crate::Reactors;
use crate::start::StartError;
use crate::vhost_user::notify::Call;

/// Handle of a running queue.
pub struct QueueHandle {
    remote: Remote,
    id: u64,
    held: bool,
}

impl QueueHandle {
    /// Starts a queue on a reactor. The error says why the ring cannot be served. Counts the time
    /// that the reactor needed, in both cases.
    pub fn start(remote: Remote, setup: QueueSetup) -> Result<QueueHandle, StartError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (id, held) = (NEXT.fetch_add(1, Ordering::Relaxed), setup.held);
        let device = setup.device.clone();
        let started = remote.ask(move |handle, reply| {
            let before = Clock::Thread.read();
            let started = Queue::start(handle, setup, id);
            reply.send((started, Clock::Thread.read().saturating_sub(before)));
        });
        let Some((started, took)) = started else { return Err(StartError::ended()) };
        device.count_start(Instant::now(), took);
        started.map(|()| QueueHandle { remote, id, held })
    }

    /// Makes the queue take nothing more, waits for its requests in flight, and returns the ring's
    /// base. Returns `None` if the reactor has ended. `suspends`: requests that have not begun stay
    /// in the in-flight region, if there is one.
    pub fn stop(self, suspends: bool) -> Option<u32> {
        let id = self.id;
        self.remote.ask(move |handle, reply| {
            // If the queue does not exist, the reply is dropped.
            let queue = handle.local::<Queues>().0.borrow_mut().remove(&id);
            if let Some(queue) = queue {
                queue.stop(reply, suspends);
            }
        })
    }

    /// Stops all queues of a device without its session, if that session is blocked.
    pub fn stop_all(device: &Arc<DeviceState>, reactors: &Reactors) {
        for remote in reactors.all() {
            let device = device.clone();
            let ids = remote.ask(move |handle, reply| {
                let is_its = |queue: &Queue| Arc::ptr_eq(&queue.device, &device);
                let queues = handle.local::<Queues>();
                reply.send(
                    queues
                        .0
                        .borrow()
                        .iter()
                        .filter(|(_, q)| is_its(q))
                        .map(|(id, _)| *id)
                        .collect(),
                )
            });
            let ids: Vec<u64> = ids.unwrap_or_default();
            for id in ids {
                QueueHandle { remote: remote.clone(), id, held: false }.stop(false);
            }
        }
    }

    /// Lets a held queue take requests.
    pub fn release(&mut self) {
        if std::mem::take(&mut self.held) {
            drop(self.with(|queue| {
                queue.held.set(false);
                queue.wake.ring();
            }));
        }
    }

    /// Enables or disables the ring.
    pub fn set_enabled(&self, enabled: bool) -> PendingReply<()> {
        self.with(move |queue| {
            queue.enabled.set(enabled);
            queue.wake.ring();
        })
    }

    /// Replaces the call descriptor.
    pub fn set_call(&self, call: Call) -> PendingReply<()> {
        self.with(move |queue| queue.core.borrow_mut().set_call(call))
    }

    /// Replaces the error descriptor.
    pub fn set_error(&self, error: Option<OwnedFd>) -> PendingReply<()> {
        self.with(move |queue| queue.core.borrow_mut().error = error)
    }

    /// Replaces the guest's memory.
    pub fn set_memory(&self, memory: GuestMemory) -> PendingReply<()> {
        self.with(move |queue| queue.core.borrow_mut().set_memory(Rc::new(memory)))
    }

    /// Replaces what the queue marks for live migration.
    pub fn set_marks(&self, marks: Option<Marks>) -> PendingReply<()> {
        self.with(move |queue| queue.core.borrow_mut().set_marks(marks))
    }

    /// Reports an in-band kick, without waiting until the queue has handled it.
    pub fn kick(&self) {
        drop(self.with(|queue| queue.wake.ring()));
    }

    /// Calls `f` with the queue on its reactor. The returned reply arrives after `f` has returned.
    fn with(&self, f: impl FnOnce(&Rc<Queue>) + Send + 'static) -> PendingReply<()> {
        let id = self.id;
        self.remote.ask_later(move |handle, reply| {
            let queue = handle.local::<Queues>().0.borrow().get(&id).cloned();
            if let Some(queue) = queue {
                f(&queue);
            }
            reply.send(());
        })
    }
}

impl Queue {
    /// Waits until the queue is not held, or must stop.
    pub(super) async fn released(&self) {
        while self.held.get() && self.stopping.borrow().is_none() {
            self.wake.clear();
            if !self.wake.arm() {
                park().await;
            }
        }
    }
}
