//! Starting, stopping and changing a queue from the control thread.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::{GuestMemory, Remote};

use super::{LOCAL, Queue, QueueSetup};
use crate::vhost_user::notify::Call;

/// A running queue, as the control thread knows it.
pub struct QueueHandle {
    remote: Remote,
    id: u64,
}

impl QueueHandle {
    /// Starts a queue on a reactor; an error says why the ring cannot be.
    pub fn start(remote: Remote, setup: QueueSetup) -> Result<QueueHandle, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let started = remote.ask(move |handle, reply| reply.send(Queue::start(handle, setup, id)));
        started.unwrap_or_else(|| Err("the reactor has ended".into())).map(|()| QueueHandle { remote, id })
    }

    /// Takes nothing more, waits for what is in flight, and answers the base to go on from.
    pub fn stop(self) -> u32 {
        let id = self.id;
        let base = self.remote.ask(move |_, reply| match LOCAL.with_borrow_mut(|l| l.remove(&id)) {
            Some(queue) => queue.stop(reply),
            None => reply.send(0),
        });
        base.unwrap_or(0)
    }

    pub fn set_enabled(&self, enabled: bool) {
        self.with(move |queue| {
            queue.enabled.set(enabled);
            queue.wake.ring();
        });
    }

    pub fn set_call(&self, call: Call) {
        self.with(move |queue| queue.core.borrow_mut().set_call(call, queue.coalesce));
    }

    pub fn set_error(&self, error: Option<OwnedFd>) {
        self.with(move |queue| queue.core.borrow_mut().error = error);
    }

    pub fn set_memory(&self, memory: GuestMemory) {
        self.with(move |queue| queue.core.borrow_mut().set_memory(Rc::new(memory)));
    }

    /// The front end kicked by a message.
    pub fn kick(&self) {
        self.with(|queue| queue.wake.ring());
    }

    fn with(&self, f: impl FnOnce(&Rc<Queue>) + Send + 'static) {
        let id = self.id;
        self.remote.run(move |_| {
            let queue = LOCAL.with_borrow(|l| l.get(&id).cloned());
            if let Some(queue) = queue {
                f(&queue);
            }
        });
    }
}
