//! Reservations at the device.
//!
//! In: the time at which a waiting operation wanted to be woken. Out: the operations that are due by
//! reservation, whatever the window has room for.

use std::sync::atomic::Ordering::Relaxed;

use super::{Advance, Device};
use crate::Time;
use crate::account::Account;

impl Device {
    /// Admits the disk's waiting operations while its reservation is due, even if the window is
    /// full. Ends a probe that is over. Returns when to call this again for the probe.
    pub(crate) fn claim(&self, account: &Account, now: Time) -> Option<Time> {
        let mut state = self.state();
        self.step_probe(&mut state, now);
        let mut keeps_time = true;
        while account.reservation_is_due(now) {
            let Some(waiter) = state.wait_list.pop_of(account.number()) else { break };
            self.admit_one(account, &waiter, now, Advance::Disk);
            waiter.waker.wake();
            keeps_time = false;
        }
        if self.leaves_gaps.load(Relaxed) {
            let waiting = account.waiting.load(Relaxed);
            self.admit_waiters(&mut state, now);
            // It may be the caller that was admitted.
            keeps_time &= account.waiting.load(Relaxed) == waiting;
        }
        if !keeps_time && (state.probe.is_on() || self.leaves_gaps.load(Relaxed)) {
            // The operation that kept the time for the disk's others may have been admitted.
            state.wait_list.wake_first();
        }
        if keeps_time { self.deadline(&state, account, now) } else { None }
    }
}
