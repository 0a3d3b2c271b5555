//! Guest memory that is registered with io_uring (`--pin-memory`), on the reactors that serve a
//! session.
//!
//! In: the session's memory, and the reactors that run its queues. Out: registrations on those
//! reactors. What must hold:
//! - Registrations stay while queues stop and start, because pinning gigabytes takes long.
//! - Removed memory, and the memory of a session that ends, is unregistered.
//! - A reactor receives changes in the order of the session's messages, so that a queue's memory is
//!   registered when the queue starts.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::{GuestMemory, Registration, Remote};

use super::device::DeviceState;

/// The registrations of a reactor, by the session's number.
#[derive(Default)]
struct Registrations(RefCell<HashMap<u64, Registration>>);

/// A session's registrations on all its reactors. Drop removes them.
pub struct Pins {
    session: u64,
    device: Arc<DeviceState>,
    reactors: Vec<Remote>,
}

impl Pins {
    pub fn new(device: Arc<DeviceState>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Pins { session: NEXT.fetch_add(1, Ordering::Relaxed), device, reactors: Vec::new() }
    }

    /// Registers `memory` on `reactor`. Must be called before a queue starts on that reactor.
    pub fn join(&mut self, reactor: &Remote, memory: &GuestMemory) {
        if !self.reactors.iter().any(|r| r.is(reactor)) {
            self.reactors.push(reactor.clone());
            self.register(self.reactors.len() - 1, memory);
        }
    }

    /// Replaces `old` by `memory` on all reactors.
    pub fn replace(&self, old: &GuestMemory, memory: &GuestMemory) {
        for region in
            memory.regions().iter().filter(|r| !old.regions().iter().any(|o| Arc::ptr_eq(o, r)))
        {
            // Populate the memory on this thread, because reactors must serve other disks. If that
            // fails, the registration logs the reason.
            let _ = region.populate();
        }
        (0..self.reactors.len()).for_each(|number| self.register(number, memory));
    }

    fn register(&self, number: usize, memory: &GuestMemory) {
        let (session, memory, device) = (self.session, memory.clone(), self.device.clone());
        self.reactors[number].run(move |handle| {
            let outcome = {
                let registrations = handle.local::<Registrations>();
                let mut registrations = registrations.0.borrow_mut();
                let new = || handle.register_memory(&GuestMemory::default());
                let registration = registrations.entry(session).or_insert_with(new);
                registration.replace(&memory);
                registration.outcome()
            };
            // The first reactor logs on behalf of all. Another reactor logs only if its
            // registration fails.
            if number == 0 || outcome.refused.is_some() {
                device.log.info(device.disk.name(), None, format_args!("{outcome}"));
            }
        });
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let session = self.session;
        for reactor in &self.reactors {
            reactor.run(move |handle| {
                let gone = handle.local::<Registrations>().0.borrow_mut().remove(&session);
                drop(gone);
            });
        }
    }
}
