//! Gaps after large operations of the disks in the queue.
//!
//! An operation of 1 MiB keeps a device that serves one operation after another busy for as long as
//! dozens of small ones, and it cannot be interrupted. So even one such operation at a time, the
//! smallest window, slows a disk within its share down. Then each large operation is followed by a
//! gap, in which its disk begins no other: until the disk's share of the device covers the
//! operation. So the disks take turns in time.
//!
//! In: admitted operations of disks in the queue. Out: whether a disk is in a gap, and when its
//! first waiting operation must ask again. What must hold: while operations wait in a gap, the
//! first one of the disk knows when the gap ends.

use std::sync::atomic::Ordering::Relaxed;

use super::{Device, State};
use crate::Time;
use crate::account::Account;
use crate::wait_list::WaitList;

/// Longest gap, in nanoseconds.
const LONGEST_NS: u64 = 100_000_000;

impl Device {
    /// Returns whether a disk in the queue must wait although there is room, because it has just
    /// begun a large operation.
    #[inline]
    pub(super) fn is_in_gap(&self, account: &Account, now: Time) -> bool {
        self.leaves_gaps.load(Relaxed) && now < account.gap_until.load(Relaxed)
    }

    /// Begins a gap after a large operation of a disk in the queue: until its share of the device
    /// covers the operation.
    #[inline]
    pub(super) fn begin_gap(&self, account: &Account, now: Time, cost: u64) {
        if cost > self.max_held_ns && self.leaves_gaps.load(Relaxed) {
            let gap = account.time_of(cost).min(LONGEST_NS);
            // An operation that begins late does not delay the next one.
            let from = account.gap_until.load(Relaxed).max(now.saturating_sub(gap)).min(now);
            account.gap_until.store(from + gap, Relaxed);
            self.gap_lead.fetch_max(account.virtual_cost(cost), Relaxed);
        }
    }

    /// Ends a large operation, which began at `began`. If it took longer than its cost says, so
    /// does the gap.
    #[inline]
    pub(super) fn stretch_gap(&self, account: &Account, began: Time, now: Time, cost: u64) {
        if cost > self.max_held_ns && self.leaves_gaps.load(Relaxed) {
            let turn = account.turn_of(now.saturating_sub(began)).min(LONGEST_NS);
            account.gap_until.fetch_max(began + turn, Relaxed);
        }
    }

    /// Wakes the first waiting operation of a disk in a gap, if no operation keeps the time of the
    /// gap's end yet.
    pub(super) fn time_gap(&self, wait_list: &WaitList, account: &Account) {
        if account.gap_timed.load(Relaxed) != account.gap_until.load(Relaxed) {
            wait_list.wake_first_of(account.number());
        }
    }

    /// Returns when the disk's first waiting operation must call [`Device::claim`].
    pub(super) fn deadline(&self, state: &State, account: &Account, now: Time) -> Option<Time> {
        let gap = self.is_in_gap(account, now).then(|| account.gap_until.load(Relaxed));
        account.gap_timed.store(gap.unwrap_or_default(), Relaxed);
        state.probe.deadline(now, state.window.period()).into_iter().chain(gap).min()
    }
}
