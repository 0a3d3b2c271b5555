//! What the connections of a disk do, on one reactor, while none of them has a request: sleep, or
//! look for a while.
//!
//! In: requests that come and go. Out: the reactor stays awake for as long as that proves to pay
//! ([`PollingPolicy`]), and takes the next bytes without a wake-up. What must hold: what the disk
//! has is waited for asleep, however many look; and one connection looks at a time, for all.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use blockyard_disk::Disk;
use blockyard_ring::Handle;

use super::exported::Exported;
use crate::policy::Counters;
use crate::policy::polling::PollingPolicy;

pub struct Idle {
    handle: Handle,
    disk: Arc<Disk>,
    /// Requests that are here, but those whose payload is yet to come.
    open: Cell<u32>,
    /// Requests since ever.
    came: Cell<u64>,
    polling: RefCell<PollingPolicy>,
    is_polling: Cell<bool>,
}

/// Those of a reactor, one for each disk.
#[derive(Default)]
struct Idles(RefCell<Vec<Weak<Idle>>>);

impl Idle {
    /// The reactor's for that disk.
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
            let polling =
                RefCell::new(PollingPolicy::for_clients(exported.poll, handle.now(), counters));
            let (open, came, is_polling) = Default::default();
            let idle = Idle {
                handle: handle.clone(),
                disk: exported.disk.clone(),
                open,
                came,
                polling,
                is_polling,
            };
            let idle = Rc::new(idle);
            all.push(Rc::downgrade(&idle));
            idle
        })
    }

    /// A request has come.
    #[inline]
    pub fn came(&self) {
        self.came.set(self.came.get() + 1);
        self.polling.borrow_mut().requests_arrived(self.handle.now());
        self.enter();
    }

    /// It is here: it has its payload, if it is to have one.
    #[inline]
    pub fn enter(&self) {
        self.open.set(self.open.get() + 1);
    }

    /// It is answered, or waits for its payload.
    #[inline]
    pub fn leave(&self) {
        self.open.set(self.open.get() - 1);
    }

    /// A connection has nothing to do, as long as `idle` says so: it is_polling, if it is the last
    /// one, and if that pays.
    pub async fn busy_poll(&self, idle: impl Fn() -> bool) {
        if self.open.get() > 0 || self.is_polling.get() {
            return;
        }
        let Some(limit) = self.polling.borrow_mut().went_empty(self.handle.now(), self.came.get())
        else {
            return;
        };
        let until = self.handle.now() + limit;
        self.is_polling.set(true);
        while self.open.get() == 0 && idle() && self.handle.now() < until {
            self.handle.yield_now().await;
        }
        self.is_polling.set(false);
    }
}
