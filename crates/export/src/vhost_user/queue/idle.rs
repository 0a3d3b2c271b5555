//! What a queue does while it takes no request: busy-polls, gathers, sleeps, or waits for a
//! throttle.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use blockyard_ring::park;

use super::Queue;
use crate::{budget, placement};

/// The time from which queues without kicks count their looks, the same one for all.
pub(super) static START: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Queue {
    /// Waits before the requests of the previous back end, which count as new ones for a throttle
    /// that is still in debt. If the queue drains, it waits for these requests too, because the
    /// in-flight region contains them. If the export ends, they wait no longer.
    pub(super) async fn until_paid(&self) {
        let waits = || !self.suspends.get() && !self.served.is_suspended();
        while let Some(time) = self.held_back(waits()) {
            self.handle.sleep(time).await;
        }
    }

    /// Returns how long the queue must not take requests. It must pause if drained queues have used
    /// more than the disk's limits and share allow.
    #[inline]
    pub(super) fn held_back(&self, takes: bool) -> Option<Duration> {
        if takes { self.served.queue_pause(self.in_flight.get() == 0) } else { None }
    }

    /// Returns how long to busy-poll the empty ring.
    pub(super) fn went_empty(&self) -> Option<Duration> {
        let mut core = self.core.borrow_mut();
        let core = &mut *core;
        if self.in_flight.get() > 0 {
            return core.polling.waits_in_flight(self.handle.now(), self.done.get());
        }
        let busy_poll = core.polling.went_empty(self.handle.now(), self.done.get());
        // All queues and connections of this reactor run on this thread. So the thread moves to a
        // guest's processors only if the reactor has one queue.
        let moves = core.polling.co_located() && budget::is_alone(&self.handle);
        if let Some(processors) = core.placement.moves(moves, placement::is_away()) {
            placement::move_to(processors);
        }
        busy_poll
    }

    #[inline]
    pub(super) fn requests_arrived(&self) {
        let now = self.handle.now();
        self.core.borrow_mut().polling.requests_arrived(now);
        if let Some(looks) = &self.looks {
            looks.has_worked(now);
        }
    }

    pub(super) fn gathers(&self) -> Option<Duration> {
        self.core.borrow().polling.gather()
    }

    /// Busy-polls the ring for at most `limit`. Returns true if a chain is available, if the queue
    /// must stop or publish, or if the ring is disabled.
    pub(super) async fn busy_poll(&self, limit: Duration) -> bool {
        let until = self.handle.read_clock() + limit;
        self.core.borrow_mut().disable_kicks();
        let goes_on = || self.enabled.get() && self.stopping.borrow().is_none();
        while self.core.borrow().unpublished == 0 && goes_on() {
            if self.core.borrow_mut().ring.has_available() {
                return true;
            }
            if self.handle.read_clock() >= until {
                return false;
            }
            // Another thread may wait for this processor, perhaps a thread of the guest.
            rustix::thread::sched_yield();
            self.handle.yield_now().await;
        }
        true
    }

    /// Sleeps until an event. `takes`: requests that the guest offers are an event.
    pub(super) async fn sleep(&self, takes: bool) {
        if let Some(looks) = &self.looks
            && takes
        {
            self.handle.wake_at(looks.next(self.handle.read_clock()));
        }
        park().await;
    }
}
