//! Gaps after large operations of the disks in the queue.
//!
//! An operation of 1 MiB keeps a device that serves one operation after another busy for as long as
//! dozens of small ones, and nothing can interrupt it. At its minimum, the window admits one such
//! operation at a time. Even this slows a disk within its share down. Then a disk in the queue
//! begins no other operation while a large one is in flight, and none in the gap after it. The gap
//! ends when the disk's share of the device covers the time that the operation took. So the disks
//! take turns in time, and a cost that is too low gives no disk more than its share.
//!
//! In: admitted operations of disks in the queue, or over their share. Out: whether a disk is in a
//! gap, and when its first waiting operation must ask again. What must hold: while operations wait
//! in a gap, the first one of the disk knows when the gap ends.

use std::sync::atomic::Ordering::Relaxed;

use super::{Device, Grant, State};
use crate::Time;
use crate::account::Account;
use crate::cost::Operation;
use crate::wait_list::WaitList;

/// Longest gap, in nanoseconds. After an operation that took longer, the gap is at most as long as
/// the operation.
const LONGEST_NS: u64 = 100_000_000;
/// Longest time in nanoseconds for which a disk waits for the end of its large operation.
const LONGEST_TURN_NS: u64 = 10_000_000_000;

impl Device {
    /// Returns whether a disk in the queue must wait although there is room, because of its last
    /// large operation.
    #[inline]
    pub(super) fn is_in_gap(&self, account: &Account, now: Time) -> bool {
        self.leaves_gaps.load(Relaxed) && now < account.gap_until.load(Relaxed)
    }

    /// Begins the turn of a large operation of a disk in the queue. [`Device::end_turn`] says when
    /// the next operation may begin.
    #[inline]
    pub(super) fn begin_turn(
        &self,
        account: &Account,
        now: Time,
        cost: u64,
        operation: &Operation,
    ) {
        if self.is_large(cost, operation) && self.leaves_gaps.load(Relaxed) {
            account.gap_until.store(now + LONGEST_TURN_NS, Relaxed);
            self.gap_lead.fetch_max(account.virtual_cost(cost), Relaxed);
        }
    }

    /// Ends a large operation. For a disk that takes turns, charges the time that it took longer
    /// than its cost says. After the last one in flight there is a gap, until the disk has had the
    /// device for its part of the time.
    #[inline]
    pub(super) fn end_turn(&self, account: &Account, now: Time, grant: &Grant) {
        if !grant.is_large {
            return;
        }
        let is_last = account.large_in_flight.fetch_sub(1, Relaxed) == 1;
        // What the image answered is no work of the device.
        account.had_large.fetch_or(!grant.is_idle, Relaxed);
        let takes_turns = grant.is_queued || account.is_over_share.load(Relaxed);
        let mut gap = 0;
        if self.leaves_gaps.load(Relaxed) && takes_turns && !grant.is_idle {
            let service = now.saturating_sub(grant.began);
            let more = service.saturating_sub(grant.cost_ns);
            account.start_tag.fetch_add(account.virtual_cost(more), Relaxed);
            account.costs_more(more);
            let rest = account.turn_of(service).saturating_sub(service);
            gap = rest.min(LONGEST_NS.max(service));
        }
        if is_last {
            // The turn ends also if turns have ended meanwhile: they may begin again.
            account.gap_until.store(now + gap, Relaxed);
        }
    }

    /// Counts an operation that begins as in flight, if it is large. Returns whether it is.
    /// [`Device::end_turn`] ends it.
    #[inline]
    pub(super) fn count_large(&self, account: &Account, cost: u64, operation: &Operation) -> bool {
        let is_large = self.is_large(cost, operation);
        if is_large {
            account.large_in_flight.fetch_add(1, Relaxed);
        }
        is_large
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
