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

use super::{Device, Grant, State};
use crate::Time;
use crate::account::Account;
use crate::cost::Operation;
use crate::wait_list::WaitList;

/// Longest gap, in nanoseconds. After an operation that took longer, the gap is at most as long as
/// the operation.
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
    pub(super) fn begin_gap(&self, account: &Account, now: Time, cost: u64, operation: &Operation) {
        if self.is_large(cost, operation) && self.leaves_gaps.load(Relaxed) {
            let gap = account.time_of(cost).min(LONGEST_NS);
            // An operation that begins late does not delay the next one.
            let from = account.gap_until.load(Relaxed).max(now.saturating_sub(gap)).min(now);
            account.gap_until.store(from + gap, Relaxed);
            self.gap_lead.fetch_max(account.virtual_cost(cost), Relaxed);
        }
    }

    /// Ends a large operation. If it took longer than its cost says, so does the gap: the disk
    /// pauses until it has had the device for its part of the time.
    #[inline]
    pub(super) fn stretch_gap(&self, account: &Account, now: Time, grant: &Grant) {
        if grant.is_large && self.leaves_gaps.load(Relaxed) {
            let service = now.saturating_sub(grant.began);
            let rest = account.turn_of(service).saturating_sub(service);
            account.gap_until.fetch_max(now + rest.min(LONGEST_NS.max(service)), Relaxed);
        }
    }

    /// Returns whether gaps follow an operation of this cost.
    #[inline]
    pub(super) fn is_large(&self, cost: u64, operation: &Operation) -> bool {
        cost > self.max_held_ns || operation.is_of_unknown_time()
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
