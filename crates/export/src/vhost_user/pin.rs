//! Guest memory registered with io_uring (`--pin-memory`), on the reactors that serve a session.
//!
//! In: the session's memory, and the reactors that its queues are given to. Out: registrations that
//! live on those reactors. What must hold: they stay while queues stop and start (pinning gigabytes
//! takes its time); memory that is removed, and a session that ends, take theirs away. All of it is
//! sent to a reactor in the order of the session's messages, so that a queue finds its memory
//! registered when it starts.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::{GuestMemory, Registration, Remote};

use super::queue::DeviceState;

/// The registrations of a reactor, by the session's number.
#[derive(Default)]
struct Registrations(RefCell<HashMap<u64, Registration>>);

/// A session's registrations, wherever they are; they end with it.
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

    /// A queue is about to start on `reactor`.
    pub fn join(&mut self, reactor: &Remote, memory: &GuestMemory) {
        if !self.reactors.iter().any(|r| r.is(reactor)) {
            self.reactors.push(reactor.clone());
            self.register(self.reactors.len() - 1, memory);
        }
    }

    /// `memory` takes the place of `old`.
    pub fn replace(&self, old: &GuestMemory, memory: &GuestMemory) {
        for region in
            memory.regions().iter().filter(|r| !old.regions().iter().any(|o| Arc::ptr_eq(o, r)))
        {
            // Here, and not on a reactor, which has others to serve. If it fails, registering will
            // say why.
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
            // One reactor speaks for all, as long as all goes well.
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
