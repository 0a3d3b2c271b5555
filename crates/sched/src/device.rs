//! A backing device that disks share: start-time fair queueing with a bounded in-flight window.
//!
//! ```text
//!   ask ── room in the window, or disk within its share, or reservation due ──► grant
//!    └──── else ► wait ► wait list, lowest start tag first ── done makes room ► grant ► done
//! ```
//!
//! In: operations of the device's disks, and the current time. Out: when each operation may begin.
//!
//! Each disk has a start tag: the virtual time at which its next operation begins. An operation
//! advances it by cost / weight. The device's virtual time is the start tag of the last operation
//! that was admitted in order. A disk is within its share if its start tag exceeds the device's
//! virtual time by at most a margin. Its operations never wait and take no lock. An idle disk saves
//! up no credit: its next operation begins at the device's virtual time. What must hold: every
//! operation that waits is admitted when there is room. For this, `wait` counts an operation before
//! it checks the window again, and `done` makes room before it checks for waiting operations. An
//! idle device always admits a waiter.
//!
//! Source: P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996.

mod accounts;
mod complete;
mod drained;
mod gaps;
mod period;
mod reserved;
mod stalls;

use std::collections::HashMap;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use accounts::Accounts;
use reserved::Watch;
pub use reserved::{Shortfall, Unmet};

use crate::Time;
use crate::account::{Account, Counters, InFlight};
use crate::baseline::{Baseline, OperationClass};
use crate::cost::{Calibration, Costs, Operation, OperationKind};
use crate::in_flight_window::{DeviceClass, InFlightWindow};
use crate::probe::Probe;
use crate::wait_list::{WaitList, WaitToken, Waiter, before, later};

/// A disk without operations for this long (nanoseconds) is absent: it is not a neighbour, and a
/// disk that remains has the device to itself.
const ABSENT_NS: u64 = 10_000_000_000;
/// A disk without operations for this long (nanoseconds), and for two control periods, leaves its
/// part of its group's weight to the others.
const QUIET_NS: u64 = 100_000_000;
/// Largest cost, in nanoseconds, by which a reservation may let a disk exceed its share.
const MAX_RESERVATION_LEAD_NS: u64 = 10_000_000;

/// Margin by which a disk may exceed its share before it waits, as a fraction of its part of the
/// window. The margin is necessary because operations arrive in bursts.
const MARGIN: f64 = 1.0;

/// Largest part of the window that one operation takes, as a multiple of the cost of a 4 KiB read
/// ([`SMALL`]).
const MAX_HELD_FACTOR: u64 = 4;
const SMALL: Operation =
    Operation { kind: OperationKind::Read, bytes: 4096, sequential: false, requests: 1 };

/// A value on cache lines that hold nothing else.
#[repr(align(128))]
#[derive(Debug, Default)]
struct CacheAligned<T>(T);

/// A backing device; see the module documentation.
#[derive(Debug)]
pub struct Device {
    name: String,
    /// Called if the device gives less than what is reserved on it.
    report: fn(&Shortfall),
    costs: Costs,
    /// Largest part of the window that one operation takes, in nanoseconds of cost.
    max_held_ns: u64,
    pub(crate) baseline: Baseline,
    /// Virtual time: start tag of the last operation that was admitted in order.
    virtual_time: CacheAligned<AtomicU64>,
    /// Cost in flight, in nanoseconds: of all disks, and of the disks that are in the queue.
    in_flight: CacheAligned<AtomicU64>,
    queued_in_flight: AtomicU64,
    /// Number of operations in flight that take no room of the window; see `drained`.
    forced: AtomicU64,
    /// Size of the in-flight window, and the part of it for disks in the queue, in nanoseconds.
    /// These fields and the next ones change rarely.
    window: CacheAligned<AtomicU64>,
    room: AtomicU64,
    /// Cost that disks within their share may have in flight without taking room, in nanoseconds.
    usual: AtomicU64,
    waiting: AtomicUsize,
    /// Whether the disks in the queue leave gaps after large operations.
    leaves_gaps: AtomicBool,
    /// Virtual time by which the disks within their share may be ahead, because the large
    /// operations take as much in one step.
    gap_lead: AtomicU64,
    /// Whether more than one disk had operations in the last [`ABSENT_NS`].
    shared: AtomicBool,
    /// Whether the device is rotational: its heads seek.
    rotational: bool,
    /// Whether more than one disk was busy in the last control period.
    was_shared: AtomicBool,
    /// Whether a probe is on.
    is_probing: AtomicBool,
    /// Number of the probe that is in its quiet phase. 0: none.
    quiet_probe: AtomicU32,
    /// Number of operations that began and completed in this quiet phase.
    quiet_samples: AtomicU64,
    next_period_at: AtomicU64,
    /// Time from which on a completion shows that the device has stalled.
    stall_at: AtomicU64,
    /// Time when the device's last stall ended. Operations that began before it say nothing about
    /// neighbours.
    stalled_until: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    wait_list: WaitList,
    accounts: Accounts,
    /// Sum of the weights of the busy disks of each group, by the group's address.
    group_weights: HashMap<usize, u64>,
    window: InFlightWindow,
    period_began: Time,
    /// Number of short control periods that still follow.
    short_periods: u32,
    probe: Probe,
    reserved: Watch,
    /// Number of probes so far.
    probes: u32,
    aged: Time,
}

/// An admitted operation: what it takes of the window until [`crate::ReactorShare::done`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Grant {
    pub(crate) cost_ns: u64,
    /// Time when the operation arrived, and when it was admitted.
    arrived: Time,
    began: Time,
    class: OperationClass,
    /// Whether no other disk had an operation in flight when this one began.
    was_alone: bool,
    /// Number of the probe that was in its quiet phase when the operation began. 0: none.
    probe: u32,
    /// Whether the operation counts in the window.
    is_queued: bool,
    /// Whether the operation takes no room of the window.
    pub(crate) is_forced: bool,
    /// Whether the device has not worked for the operation.
    is_idle: bool,
    /// Whether a gap follows the operation.
    is_large: bool,
    /// Whether a drain has admitted the operation before the limits did.
    pub(crate) owes_limits: bool,
    /// Whether its cost is a part of the disk's debt to the device.
    pub(crate) owes_device: bool,
}

impl Grant {
    /// The device has not worked for the operation: its duration says nothing about the device.
    pub fn set_idle(&mut self) {
        self.is_idle = true;
    }
}

/// What an admitted operation advances: the device's virtual time and its disk's start tag
/// (`Device`), or only the disk's start tag (`Disk`), if it was admitted out of order.
#[derive(Clone, Copy, PartialEq)]
enum Advance {
    Device,
    Disk,
}

impl Device {
    pub fn new(
        name: &str,
        class: DeviceClass,
        calibration: &Calibration,
        report: fn(&Shortfall),
    ) -> Self {
        let window = InFlightWindow::new(class, calibration.window_ns);
        let state = State {
            wait_list: WaitList::default(),
            accounts: Accounts::default(),
            group_weights: HashMap::new(),
            window,
            period_began: 0,
            short_periods: 0,
            probe: Probe::default(),
            reserved: Watch::default(),
            probes: 0,
            aged: 0,
        };
        Device {
            name: name.to_string(),
            report,
            costs: calibration.costs,
            max_held_ns: (calibration.costs.of(&SMALL) * MAX_HELD_FACTOR)
                .min(InFlight::MAX_COST_NS),
            baseline: Baseline::new(calibration),
            virtual_time: CacheAligned::default(),
            in_flight: CacheAligned::default(),
            queued_in_flight: AtomicU64::new(0),
            forced: AtomicU64::new(0),
            window: CacheAligned(AtomicU64::new(state.window.size())),
            room: AtomicU64::new(state.window.room()),
            usual: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            leaves_gaps: AtomicBool::new(false),
            gap_lead: AtomicU64::new(0),
            shared: AtomicBool::new(false),
            rotational: class == DeviceClass::ROTATIONAL,
            was_shared: AtomicBool::new(false),
            is_probing: AtomicBool::new(false),
            quiet_probe: AtomicU32::new(0),
            quiet_samples: AtomicU64::new(0),
            next_period_at: AtomicU64::new(0),
            stall_at: AtomicU64::new(u64::MAX),
            stalled_until: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Returns the size of the in-flight window, in nanoseconds of cost.
    pub fn window(&self) -> u64 {
        self.window.0.load(Relaxed)
    }

    /// Returns the device's capacity relative to its cost model. 1: the model is right.
    pub fn capacity(&self) -> f64 {
        self.state().window.capacity()
    }

    #[inline]
    pub(crate) fn is_rotational(&self) -> bool {
        self.rotational
    }

    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.load(Relaxed)
    }

    /// Returns what an operation takes of the window. A large operation keeps the device busy for
    /// longer, but most devices work on several operations at a time, whatever their size. So the
    /// result is limited.
    #[inline]
    fn held(&self, cost: u64) -> u64 {
        cost.min(self.max_held_ns)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a disk. Returns its number on the device.
    pub(crate) fn join(&self, account: &Arc<Account>) -> usize {
        let mut state = self.state();
        account.start_tag.store(self.virtual_time.0.load(SeqCst), Relaxed);
        state.accounts.join(account)
    }

    /// Removes a disk.
    pub(crate) fn leave(&self, number: usize) {
        let mut state = self.state();
        // Operations that were cancelled may still be in the wait list.
        while state.wait_list.pop_of(number).is_some() {
            self.waiting.fetch_sub(1, SeqCst);
        }
        let left = state.accounts.leave(number);
        let now = self.next_period_at.load(Relaxed);
        // Only the disks of one group divide a weight.
        if left.is_some_and(|account| account.group().is_some()) {
            self.update_weights(&mut state, now);
        }
        // The disk may have held the probe's timer.
        self.end_probe(&mut state, now);
    }

    /// Admits an operation, or returns None if it must [`Device::wait`]. Takes a lock only for the
    /// first operation of a disk and once a control period.
    #[inline]
    pub(crate) fn ask(
        &self,
        (account, counters): (&Account, &Counters),
        now: Time,
        operation: &Operation,
    ) -> Option<Grant> {
        if now >= self.next_period_at.load(Relaxed) {
            self.end_period(now);
        }
        if !account.awake.load(Relaxed) {
            self.wake(account, now);
        }
        let cost = self.costs.of_request(operation);
        if self.shared.load(Relaxed) {
            let tag = self.virtual_time.0.load(SeqCst);
            let has_room = self.waiting.load(SeqCst) == 0
                && self.has_room(account)
                && !account.held.load(Relaxed);
            let lead = self.gap_lead.load(Relaxed);
            let is_admitted = ((has_room || account.is_within_share(tag.wrapping_add(lead)))
                && !self.is_in_gap(account, now))
                || account.reservation_is_due(now)
                || (self.is_probing.load(Relaxed) && !account.held.load(Relaxed));
            if !is_admitted {
                return None;
            }
            counters.began();
            let advance = if has_room { Advance::Device } else { Advance::Disk };
            self.charge(account, now, cost, operation, advance);
            if account.is_queued.load(Relaxed) {
                self.begin_turn(account, now, cost, operation);
            }
        } else {
            counters.began();
        }
        Some(self.grant(account, now, cost, operation))
    }

    /// Returns whether the window has room for an operation of the disk. The operations of other
    /// disks within their share take no room from a disk in the queue. So the disks in the queue do
    /// not fill the gaps between them, which would make the next one wait.
    #[inline]
    fn has_room(&self, account: &Account) -> bool {
        if account.takes_room() {
            self.queued_in_flight.load(SeqCst) < self.room.load(Relaxed)
        } else if account.is_queued.load(Relaxed) {
            true
        } else {
            self.in_flight.0.load(SeqCst) < self.window.0.load(Relaxed)
        }
    }

    /// Returns the class of an operation that counts as in flight already.
    fn class_of(&self, account: &Account, operation: &Operation) -> OperationClass {
        let others_of_disk = account.in_flight.get().0.saturating_sub(1);
        OperationClass::of(operation.kind, operation.bytes, others_of_disk)
    }

    /// Begins a sync that is charged to the disk.
    pub(crate) fn sync(&self, account: &Account, now: Time) -> Grant {
        let sync =
            Operation { kind: OperationKind::Flush, bytes: 0, sequential: false, requests: 0 };
        let cost = self.costs.of(&sync);
        self.activate(account);
        account.began();
        self.charge(account, now, cost, &sync, Advance::Disk);
        self.grant(account, now, cost, &sync)
    }

    #[inline]
    fn grant(&self, account: &Account, now: Time, cost: u64, operation: &Operation) -> Grant {
        let held = self.held(cost);
        let others = self.in_flight.0.fetch_add(held, SeqCst);
        let is_queued = account.takes_room();
        let (others_of_disk, own) = account.in_flight.add(held);
        if is_queued {
            self.queued_in_flight.fetch_add(held, SeqCst);
        }
        Grant {
            is_queued,
            is_large: self.count_large(account, cost, operation),
            cost_ns: cost,
            arrived: now,
            began: now,
            class: OperationClass::of(operation.kind, operation.bytes, others_of_disk),
            was_alone: others <= own
                && self.forced.load(Relaxed) == 0
                && !self.was_shared.load(Relaxed),
            probe: self.quiet_probe.load(Relaxed),
            ..Grant::default()
        }
    }

    /// Advances the disk's start tag by the operation's cost. Also advances the device's virtual
    /// time, if `advance` says so.
    fn charge(
        &self,
        account: &Account,
        now: Time,
        cost: u64,
        operation: &Operation,
        advance: Advance,
    ) {
        let device = self.virtual_time.0.load(SeqCst);
        let step = account.virtual_cost(cost);
        // A reservation lets a disk exceed its share. Bound the excess, so that the disk does not
        // wait long for its share afterwards.
        let max_tag = account
            .has_reservation()
            .then(|| device.wrapping_add(account.virtual_cost(cost.max(MAX_RESERVATION_LEAD_NS))));
        let advanced = |own| {
            let next = later(own, device).wrapping_add(step);
            Some(max_tag.filter(|most| before(*most, next)).unwrap_or(next))
        };
        // Several reactors may advance the tag at the same time.
        let own = account.start_tag.fetch_update(Relaxed, Relaxed, advanced).unwrap_or(device);
        let begins = later(own, device);
        if advance == Advance::Device && before(device, begins) {
            let _ = self
                .virtual_time
                .0
                .fetch_update(SeqCst, Relaxed, |tag| before(tag, begins).then_some(begins));
        }
        account.charge_reservation(now, operation.reserved());
    }

    /// Adds an operation to the wait list. The token reports when it is admitted, which may be at
    /// once. Returns when to [`Device::claim`], if a probe is on.
    pub(crate) fn wait(
        &self,
        account: &Account,
        now: Time,
        operation: &Operation,
        token: &Arc<WaitToken>,
        waker: &Waker,
    ) -> Option<Time> {
        token.start();
        let waiter = Waiter {
            token: token.clone(),
            waker: waker.clone(),
            cost_ns: self.costs.of_request(operation),
            operation: *operation,
        };
        let mut state = self.state();
        let tag = later(account.start_tag.load(Relaxed), self.virtual_time.0.load(SeqCst));
        state.wait_list.push(account.number(), tag, waiter);
        account.is_queued.store(true, Relaxed);
        account.waiting.fetch_add(1, Relaxed);
        account.waits.fetch_add(1, Relaxed);
        // A `done` after this line sees the waiting operation.
        self.waiting.fetch_add(1, SeqCst);
        // A `done` before the line above has made room in the window, which this call sees.
        self.admit_waiters(&mut state, now);
        // The disk's first waiting operation keeps the time for all.
        let is_first = account.waiting.load(Relaxed) == 1;
        if is_first { self.deadline(&state, account, now) } else { None }
    }

    /// Returns the grant of an operation that was admitted after a wait.
    pub(crate) fn granted(
        &self,
        account: &Account,
        arrived: Time,
        now: Time,
        operation: &Operation,
        token: &WaitToken,
    ) -> Grant {
        let (class, is_forced) = (self.class_of(account, operation), token.is_forced());
        let cost = self.costs.of_request(operation);
        Grant {
            cost_ns: cost,
            is_large: self.count_large(account, cost, operation),
            arrived,
            began: now,
            class,
            is_queued: token.takes_room(),
            is_forced,
            owes_device: is_forced && token.owes_device(),
            probe: self.quiet_probe.load(Relaxed),
            ..Grant::default()
        }
    }

    /// Admits waiting operations while the window has room.
    fn admit_waiters(&self, state: &mut State, now: Time) {
        if state.probe.is_on() {
            return;
        }
        let State { wait_list, accounts, .. } = state;
        let mut in_gap = Vec::new();
        while self.waiting.load(SeqCst) > 0 {
            let in_flight = self.in_flight.0.load(SeqCst);
            // A disk that has the device to itself never waits. That includes operations that began
            // to wait while it had neighbours.
            let queued = self.queued_in_flight.load(SeqCst);
            // Disks within their share may have more in flight than usual.
            let others = in_flight.saturating_sub(queued);
            let excess = others.saturating_sub(self.usual.load(Relaxed));
            let is_full = queued + excess >= self.room.load(Relaxed);
            let head = wait_list.head().and_then(|disk| accounts.get(disk));
            let is_full = is_full && !head.is_some_and(|head| head.has_part_left());
            if in_flight > 0 && is_full && self.is_shared() {
                self.admit_idle(wait_list, accounts, now);
                break;
            }
            let Some((disk, tag)) = wait_list.pop_head() else { break };
            let Some(account) = accounts.get(disk) else { continue };
            let own = account.start_tag.load(Relaxed);
            if before(tag, own) {
                // Another operation of the disk has begun since the tag was stored, so the disk's
                // tag has advanced.
                wait_list.push_head(disk, own);
                continue;
            }
            if self.is_in_gap(account, now) {
                self.time_gap(wait_list, account);
                in_gap.push((disk, tag));
                continue;
            }
            if let Some(waiter) = wait_list.take(disk) {
                if self.admit_one(account, &waiter, now, Advance::Device) {
                    self.begin_turn(account, now, waiter.cost_ns, &waiter.operation);
                }
                waiter.waker.wake();
            }
            wait_list.push_head(
                disk,
                later(account.start_tag.load(Relaxed), self.virtual_time.0.load(SeqCst)),
            );
        }
        in_gap.into_iter().for_each(|(disk, tag)| wait_list.push_head(disk, tag));
    }

    /// Admits one waiting operation. Returns false if it was cancelled; then it costs nothing.
    fn admit_one(&self, account: &Account, waiter: &Waiter, now: Time, advance: Advance) -> bool {
        self.waiting.fetch_sub(1, SeqCst);
        account.waiting.fetch_sub(1, Relaxed);
        // The operation may have kept the time of a gap.
        account.gap_timed.store(0, Relaxed);
        waiter.token.set_takes_room(account.takes_room() && !waiter.token.is_forced());
        let waits = waiter.token.grant();
        if waits {
            account.began();
            self.charge(account, now, waiter.cost_ns, &waiter.operation, advance);
            if waiter.token.is_forced() {
                self.began_forced(account);
                return true;
            }
            let held = self.held(waiter.cost_ns);
            self.in_flight.0.fetch_add(held, SeqCst);
            if waiter.token.takes_room() {
                self.queued_in_flight.fetch_add(held, SeqCst);
            }
            account.in_flight.add(held);
        }
        waits
    }

    /// Records that an operation no longer waits, although it was not admitted. It may have held
    /// the probe's timer, so the probe ends.
    pub(crate) fn withdraw(&self, now: Time) {
        let mut state = self.state();
        self.end_probe(&mut state, now);
        self.admit_waiters(&mut state, now);
        // The operation may have kept the time for others.
        state.wait_list.wake_first();
    }

    /// Admits all waiting operations of the disk. Returns their cost.
    fn admit_all(&self, state: &mut State, account: &Account, now: Time) -> u64 {
        let mut cost = 0u64;
        while let Some(waiter) = state.wait_list.pop_of(account.number()) {
            if self.admit_one(account, &waiter, now, Advance::Disk) {
                cost = cost.saturating_add(waiter.cost_ns);
            }
            waiter.waker.wake();
        }
        cost
    }

    /// Returns the time in which the disk's share of the device covers an operation, in
    /// nanoseconds.
    pub(crate) fn duration_of(&self, account: &Account, operation: &Operation) -> u64 {
        if self.is_shared() { account.time_of(self.costs.of_request(operation)) } else { 0 }
    }
}

#[cfg(test)]
mod tests;
