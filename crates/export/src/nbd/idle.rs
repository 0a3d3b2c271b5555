//! What the connections of one disk on one reactor do while none of them has a request: they sleep,
//! or busy-poll for a limited time.
//!
//! In: requests that begin and end. Out: the reactor stays awake for as long as [`PollingPolicy`]
//! says, and then reads the next bytes without a wake-up. What must hold: while the disk works on a
//! request, the reactor sleeps. Only one connection busy-polls at a time, on behalf of all
//! connections of the disk.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use blockyard_disk::Disk;
use blockyard_ring::{Handle, SlowCallCounters};

use super::exported::Exported;
use crate::policy::Counters;
use crate::policy::polling::PollingPolicy;

/// The state of one disk on one reactor.
pub struct Idle {
    handle: Handle,
    disk: Arc<Disk>,
    /// Number of requests in progress. A request that still waits for its payload does not count.
    in_progress: Cell<u32>,
    /// Number of requests that have arrived so far.
    arrived: Cell<u64>,
    polling: RefCell<PollingPolicy>,
    is_polling: Cell<bool>,
    /// Slow calls on the connections.
    pub slow_calls: Rc<SlowCallCounters>,
}

/// The instances of a reactor, one for each disk.
#[derive(Default)]
struct Idles(RefCell<Vec<Weak<Idle>>>);

impl Idle {
    /// Returns the reactor's instance for the disk.
    pub fn local(handle: &Handle, exported: &Exported) -> Rc<Self> {
        let all = handle.local::<Idles>();
        let mut all = all.0.borrow_mut();
        all.retain(|idle| idle.strong_count() > 0);
        let known = all
            .iter()
            .filter_map(Weak::upgrade)
            .find(|idle| Arc::ptr_eq(&idle.disk, &exported.disk));
        known.unwrap_or_else(|| {
            let counters = Counters::local(handle, &exported.disk);
            let slow_calls = counters.slow_calls.clone();
            let polling =
                RefCell::new(PollingPolicy::for_clients(exported.poll, handle.now(), counters));
            let (in_progress, arrived, is_polling) = Default::default();
            let idle = Idle {
                handle: handle.clone(),
                disk: exported.disk.clone(),
                in_progress,
                arrived,
                polling,
                is_polling,
                slow_calls,
            };
            let idle = Rc::new(idle);
            all.push(Rc::downgrade(&idle));
            idle
        })
    }

    /// Counts a request that has arrived.
    #[inline]
    pub fn arrived(&self) {
        self.arrived.set(self.arrived.get() + 1);
        self.polling.borrow_mut().requests_arrived(self.handle.now());
        self.enter();
    }

    /// Counts a request as in progress, because its payload is complete or it has none.
    #[inline]
    pub fn enter(&self) {
        self.in_progress.set(self.in_progress.get() + 1);
    }

    /// Counts a request as no longer in progress, because it is answered or waits for its payload.
    #[inline]
    pub fn leave(&self) {
        self.in_progress.set(self.in_progress.get() - 1);
    }

    /// Busy-polls if the policy says so, while no connection of the disk has a request and `idle`
    /// returns true.
    pub async fn busy_poll(&self, idle: impl Fn() -> bool) {
        if self.in_progress.get() > 0 || self.is_polling.get() {
            return;
        }
        let Some(limit) =
            self.polling.borrow_mut().went_empty(self.handle.now(), self.arrived.get())
        else {
            return;
        };
        let until = self.handle.now() + limit;
        self.is_polling.set(true);
        while self.in_progress.get() == 0 && idle() && self.handle.now() < until {
            self.handle.yield_now().await;
        }
        self.is_polling.set(false);
    }
}
