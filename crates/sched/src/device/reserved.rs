//! Reservations at the device.
//!
//! In: the time at which a waiting operation wanted to be woken, and the figures of each control
//! period. Out: the operations that are due by reservation, whatever the window has room for; and a
//! report if the device gives less than what is reserved on it.
//!
//! A depth that is too small, or a guest that wants less, also leaves a reservation unmet. So the
//! report needs more: the disks that miss their reservations have nearly all of what the device
//! completes, and other disks wait.

use std::fmt::{self, Display, Formatter};
use std::sync::atomic::Ordering::Relaxed;

use super::{Advance, Device, State};
use crate::Time;
use crate::account::Account;
use crate::in_flight_window::PeriodStats;
use crate::reserve::Reserve;

/// Time in nanoseconds for which the device must give too little, and the pause after a report.
const SHOWN_NS: u64 = 3_000_000_000;
const PAUSE_NS: u64 = 60_000_000_000;
/// Time in nanoseconds for which it may seem to give enough meanwhile, because no other disk waits.
const GAP_NS: u64 = 500_000_000;
/// Part of what completes that the disks which miss their reservations must have, and part of the
/// time in which that must be so. (A disk that comes back from a rest seems to miss its reservation
/// for a moment.)
const MOST: f64 = 0.8;
/// Part of its reservation that a disk or group gets at most if the reservation is not met.
const GOT: f64 = 0.95;
/// Largest number of reservations that a report names.
const NAMED: usize = 8;

/// A device gives less than what is reserved on it, and other disks wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Shortfall {
    pub device: String,
    /// Operations a second that the device has completed for all disks.
    pub operations: u64,
    /// Time in seconds over which this was measured.
    pub seconds: u64,
    /// Some of the reservations that are not met.
    pub unmet: Vec<Unmet>,
}

/// A reservation that is not met.
#[derive(Clone, Debug, PartialEq)]
pub struct Unmet {
    /// Name of the disk or of the group.
    pub name: String,
    pub is_group: bool,
    /// Whether the reservation is of bytes, not of operations.
    pub is_bytes: bool,
    /// The reserved units a second, and those that the disk or group got.
    pub reserved: u64,
    pub got: u64,
}

impl Display for Shortfall {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let Shortfall { device, operations, seconds, unmet } = self;
        write!(
            f,
            "device {device} gives less than what is reserved on it, and other disks wait: "
        )?;
        for Unmet { name, is_group, is_bytes, reserved, got } in unmet {
            let kind = if *is_group { "group" } else { "disk" };
            let (key, unit) = if *is_bytes { ("bps", "bytes") } else { ("iops", "requests") };
            write!(f, "{kind} {name} has reserve-{key} = {reserved} and gets {got} {unit}/s; ")?;
        }
        write!(
            f,
            "all disks get {operations} requests/s (mean of {seconds} s); reserve less than the \
             device can do"
        )
    }
}

/// What shows that a device gives less than what is reserved on it.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Time since which it does, and when it last did. None: it does not.
    since: Option<Time>,
    last_at: Time,
    /// Operations that completed since then, and the length of the control periods in nanoseconds.
    operations: u64,
    elapsed_ns: u64,
    /// Time of the next report at the earliest.
    next_at: Time,
}

/// Ends a control period. Returns a report if the device has given less than what is reserved on it
/// for [`SHOWN_NS`].
pub(super) fn watch_reservations(
    device: &str,
    state: &mut State,
    now: Time,
    stats: &PeriodStats,
) -> Option<Shortfall> {
    let State { reserved: watch, accounts, .. } = state;
    let is_short = stats.others_wait
        && stats.behind_cost_ns > 0
        && stats.behind_cost_ns as f64 >= MOST * stats.completed_cost_ns as f64;
    if !is_short {
        watch.since = watch.since.filter(|_| now < watch.last_at.saturating_add(GAP_NS));
        return None;
    }
    watch.last_at = now;
    let Some(since) = watch.since else {
        (watch.since, watch.operations, watch.elapsed_ns) = (Some(now), 0, 0);
        for account in accounts.active() {
            account.reserve.mark();
            account.group().inspect(|group| group.reserve.mark());
        }
        return None;
    };
    watch.operations += stats.operations;
    watch.elapsed_ns += stats.elapsed_ns;
    let lasted = now.saturating_sub(since);
    if lasted < SHOWN_NS || now < watch.next_at {
        return None;
    }
    watch.since = None;
    if (watch.elapsed_ns as f64) < MOST * lasted as f64 {
        return None;
    }
    let rate = |count: u64, time: u64| (count as f64 * 1e9 / time.max(1) as f64) as u64;
    let mut unmet = Vec::new();
    let mut add = |name: &str, is_group, reserve: &Reserve| {
        let is_known = unmet.iter().any(|u: &Unmet| u.is_group && is_group && u.name == name);
        let missed = reserve.missed(now).filter(|_| !is_known).map(|missed| Unmet {
            name: name.to_string(),
            is_group,
            is_bytes: missed.is_bytes,
            reserved: missed.rate,
            got: rate(missed.admitted, lasted),
        });
        let is_unmet = |unmet: &Unmet| (unmet.got as f64) < GOT * unmet.reserved as f64;
        unmet.extend(missed.filter(is_unmet).collect::<Vec<_>>());
    };
    for account in accounts.active() {
        add(account.name.get().map_or("", String::as_str), false, &account.reserve);
        account.group().inspect(|group| add(group.name(), true, &group.reserve));
    }
    if unmet.is_empty() {
        return None;
    }
    watch.next_at = now + PAUSE_NS;
    unmet.truncate(NAMED);
    Some(Shortfall {
        device: device.to_string(),
        operations: rate(watch.operations, watch.elapsed_ns),
        seconds: (lasted as f64 / 1e9).round() as u64,
        unmet,
    })
}

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
