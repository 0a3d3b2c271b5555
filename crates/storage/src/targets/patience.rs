//! Ends the waits of one reactor for a target that is silent.
//!
//! What must hold: an answer in time costs a push and a pop of a queue, no timer of its own.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_ring::Handle;

use super::promise::Expires;

/// How often deadlines are checked.
const TICK: Duration = Duration::from_millis(250);
/// Number of waits that are over and may stay in the queue.
const OVER: usize = 1024;

/// The waits of one reactor, the earliest deadline first.
#[derive(Clone)]
pub(super) struct Patience(Rc<Inner>);

struct Inner {
    handle: Handle,
    limit: Duration,
    waits: RefCell<VecDeque<(Instant, Arc<dyn Expires>)>>,
    watches: Cell<bool>,
    live: Cell<usize>,
}

impl Patience {
    pub(super) fn new(handle: &Handle, limit: Duration) -> Self {
        Patience(Rc::new(Inner {
            handle: handle.clone(),
            limit,
            waits: RefCell::default(),
            watches: Cell::new(false),
            live: Cell::new(0),
        }))
    }

    /// Ends this wait after the limit.
    pub(super) fn watch(&self, wait: Arc<dyn Expires>) {
        let inner = &*self.0;
        // A limit that no clock reaches is none.
        let Some(deadline) = inner.handle.read_clock().checked_add(inner.limit) else { return };
        let mut waits = inner.waits.borrow_mut();
        while waits.front().is_some_and(|(_, wait)| wait.is_over()) {
            waits.pop_front();
        }
        if waits.len() > OVER.max(2 * inner.live.get()) {
            waits.retain(|(_, wait)| !wait.is_over());
            inner.live.set(waits.len());
        }
        waits.push_back((deadline, wait));
        if !inner.watches.replace(true) {
            let weak = Rc::downgrade(&self.0);
            let handle = inner.handle.clone();
            inner.handle.spawn(async move {
                loop {
                    handle.sleep(TICK).await;
                    let Some(inner) = weak.upgrade() else { return };
                    if !inner.expire() {
                        return;
                    }
                }
            });
        }
    }
}

impl Inner {
    /// Ends the waits that have reached their deadline. Returns false if none is left.
    fn expire(&self) -> bool {
        let now = self.handle.read_clock();
        let mut waits = self.waits.borrow_mut();
        while waits.front().is_some_and(|(at, wait)| *at <= now || wait.is_over()) {
            if let Some((_, wait)) = waits.pop_front() {
                wait.expire();
            }
        }
        self.watches.set(!waits.is_empty());
        !waits.is_empty()
    }
}

#[cfg(test)]
#[path = "late_tests.rs"]
mod tests;
