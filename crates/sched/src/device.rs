//! A backing device that disks share: start-time fair queueing with a bounded window.
//!
//! ```text
//!   ask ── fewer than the window on the way, or the disk inside its share, or its reservation due ──► grant
//!    └──── else ► wait ► the board, lowest tag first ── done makes room ────────────────────────────► grant ► done
//! ```
//! In: operations of its disks, and when. Out: when each may begin. Each disk has a tag, the
//! virtual time at which its next operation begins; an operation moves it on by cost / weight. The
//! device's virtual time is the tag of what began last in turn. A disk whose tag is ahead of it by
//! no more than a margin has had no more than its share: it never waits, and takes no lock. Nothing
//! is saved up: who comes back begins at the device's virtual time. What must hold: whoever waits
//! is let in when room is made (a wait is counted before the window is looked at once more, and
//! `done` makes room before it looks for waits); with nothing on the way, somebody goes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use crate::Time;
use crate::baseline::{Baseline, OperationClass};
use crate::cost::{Calibration, Costs, Operation, OperationKind};
use crate::group::Group;
use crate::in_flight_window::{DeviceClass, InFlightWindow, PeriodStats};
use crate::share::Account;
use crate::wait_list::{WaitList, WaitToken, Waiter, before, later};

/// A disk that has asked for nothing for so long is not counted on: the others have the device to
/// themselves.
const ABSENT_NS: u64 = 10_000_000_000;
/// And for so long: its part of a group's weight is the others'.
const QUIET_NS: u64 = 100_000_000;
/// What a disk that is ahead of its share by its reservation may owe: so much of the device's time.
const MAX_RESERVATION_LEAD_NS: u64 = 10_000_000;

/// How far a disk may get ahead of its share before it waits, in parts of its part of the window:
/// operations do not come evenly.
const MARGIN: f64 = 1.0;

/// An operation holds no more of the window than so many small ones.
const MAX_HELD_FACTOR: u64 = 4;
const SMALL: Operation =
    Operation { kind: OperationKind::Read, bytes: 4096, sequential: false, requests: 1 };

/// On a line of the cache of its own.
#[repr(align(128))]
#[derive(Debug, Default)]
struct CacheAligned<T>(T);

#[derive(Debug)]
pub struct Device {
    name: String,
    costs: Costs,
    /// What one operation holds of the window, at most.
    most_held: u64,
    pub(crate) baseline: Baseline,
    /// Virtual time: what began last began at this tag.
    virtual_time: CacheAligned<AtomicU64>,
    /// Cost of what is on the way, nanoseconds.
    in_flight: CacheAligned<AtomicU64>,
    /// What changes rarely.
    window: CacheAligned<AtomicU64>,
    waiting: AtomicUsize,
    /// More than one disk is here.
    shared: AtomicBool,
    /// Its heads have one place at a time.
    rotational: bool,
    /// More than one of them was busy when it was looked at last.
    was_shared: AtomicBool,
    next_period_at: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    wait_list: WaitList,
    accounts: Vec<Option<Arc<Account>>>,
    window: InFlightWindow,
    period_began: Time,
    aged: Time,
}

/// What an operation that may begin holds, until it is done ([`crate::Share::done`]).
#[derive(Clone, Copy, Debug, Default)]
pub struct Grant {
    pub(crate) cost: u64,
    /// When it was asked for, and when it began.
    asked: Time,
    at: Time,
    class: OperationClass,
    /// Nobody else's operations were on the device when it began.
    was_alone: bool,
}

/// What an operation that begins moves on: the device's virtual time, or, out of turn, only its own
/// disk's tag.
#[derive(Clone, Copy, PartialEq)]
enum Moves {
    Time,
    Itself,
}

impl Device {
    pub fn new(name: &str, class: DeviceClass, calibration: &Calibration) -> Self {
        let window = InFlightWindow::new(class, calibration.window);
        let state = State {
            wait_list: WaitList::default(),
            accounts: Vec::new(),
            window,
            period_began: 0,
            aged: 0,
        };
        Device {
            name: name.to_string(),
            costs: calibration.costs,
            most_held: calibration.costs.of(&SMALL) * MAX_HELD_FACTOR,
            baseline: Baseline::new(calibration),
            virtual_time: CacheAligned::default(),
            in_flight: CacheAligned::default(),
            window: CacheAligned(AtomicU64::new(state.window.size())),
            waiting: AtomicUsize::new(0),
            shared: AtomicBool::new(false),
            rotational: class == DeviceClass::ROTATIONAL,
            was_shared: AtomicBool::new(false),
            next_period_at: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Cost that may be on the way at the moment, nanoseconds.
    pub fn window(&self) -> u64 {
        self.window.0.load(Relaxed)
    }

    /// Of the capacity that its costs promise, so much the device has shown: 1 is all of it.
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

    /// What an operation of a cost holds of the window. A large one keeps a device busy for longer,
    /// but not more of it: most devices work on several at a time, whatever their size.
    #[inline]
    fn held(&self, cost: u64) -> u64 {
        cost.min(self.most_held)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn join(&self, account: &Arc<Account>) -> usize {
        let mut state = self.state();
        account.start_tag.store(self.virtual_time.0.load(SeqCst), Relaxed);
        let free = state.accounts.iter().position(Option::is_none);
        let number = free.unwrap_or(state.accounts.len());
        match free {
            Some(at) => state.accounts[at] = Some(account.clone()),
            None => state.accounts.push(Some(account.clone())),
        }
        number
    }

    pub(crate) fn leave(&self, number: usize) {
        let mut state = self.state();
        // Those who have gone may have left their places behind.
        while state.wait_list.pop_of(number).is_some() {
            self.waiting.fetch_sub(1, SeqCst);
        }
        state.accounts[number] = None;
        self.update_weights(&state, self.next_period_at.load(Relaxed));
    }

    /// Whether the operation may begin now; None: it is to [`Device::wait`]. Takes no lock, but the
    /// first time a disk comes and once a look.
    #[inline]
    pub(crate) fn ask(&self, account: &Account, now: Time, operation: &Operation) -> Option<Grant> {
        if now >= self.next_period_at.load(Relaxed) {
            self.end_period(now);
        }
        if !account.present.load(Relaxed) {
            self.arrives(account, now);
        }
        let cost = self.costs.of_request(operation);
        if self.shared.load(Relaxed) {
            let tag = self.virtual_time.0.load(SeqCst);
            let room = self.waiting.load(SeqCst) == 0
                && self.in_flight.0.load(SeqCst) < self.window.0.load(Relaxed);
            if !room && !account.is_within_share(tag) && !account.reservation_is_due(now) {
                return None;
            }
            let moves = if room { Moves::Time } else { Moves::Itself };
            self.charge(account, now, cost, (operation.requests, operation.bytes), moves);
        } else {
            account.began();
        }
        Some(self.grant(account, now, cost, operation))
    }

    /// Lets an operation begin that cannot wait.
    pub(crate) fn force(&self, account: &Account, now: Time, operation: &Operation) -> Grant {
        let cost = self.costs.of_request(operation);
        self.charge(account, now, cost, (operation.requests, operation.bytes), Moves::Itself);
        self.grant(account, now, cost, operation)
    }

    /// Begins a sync that is charged to the disk.
    pub(crate) fn sync(&self, account: &Account, now: Time) -> Grant {
        let sync =
            Operation { kind: OperationKind::Flush, bytes: 0, sequential: false, requests: 0 };
        let cost = self.costs.of(&sync);
        self.charge(account, now, cost, (0, 0), Moves::Itself);
        self.grant(account, now, cost, &sync)
    }

    #[inline]
    fn grant(&self, account: &Account, now: Time, cost: u64, operation: &Operation) -> Grant {
        let held = self.held(cost);
        let others = self.in_flight.0.fetch_add(held, SeqCst);
        let own = account.in_flight.fetch_add(held, Relaxed);
        let beside = account.operations.fetch_add(1, Relaxed);
        Grant {
            cost,
            asked: now,
            at: now,
            class: OperationClass::of(operation.kind, operation.bytes, beside),
            was_alone: others <= own && !self.was_shared.load(Relaxed),
        }
    }

    /// The disk's tag goes on by what the operation costs it, and the device's with it.
    fn charge(
        &self,
        account: &Account,
        now: Time,
        cost: u64,
        (requests, bytes): (u32, u64),
        moves: Moves,
    ) {
        let device = self.virtual_time.0.load(SeqCst);
        let step = account.virtual_cost(cost);
        // By its reservation a disk gets ahead of its share; it is not to pay for that longer than
        // a moment.
        let debt = account
            .has_reservation()
            .then(|| device.wrapping_add(account.virtual_cost(cost.max(MAX_RESERVATION_LEAD_NS))));
        let goes_on = |own| {
            let next = later(own, device).wrapping_add(step);
            Some(debt.filter(|most| before(*most, next)).unwrap_or(next))
        };
        // Several reactors at a time: each moves it on from where the other has.
        let own = account.start_tag.fetch_update(Relaxed, Relaxed, goes_on).unwrap_or(device);
        let begins = later(own, device);
        if moves == Moves::Time && before(device, begins) {
            let _ = self
                .virtual_time
                .0
                .fetch_update(SeqCst, Relaxed, |tag| before(tag, begins).then_some(begins));
        }
        account.charge_reservation(now, requests, bytes);
        account.began();
    }

    /// The operation takes its place among those that wait; the slot tells when it is let in, which
    /// may be at once.
    pub(crate) fn wait(
        &self,
        account: &Account,
        now: Time,
        operation: &Operation,
        token: &Arc<WaitToken>,
        waker: &Waker,
    ) {
        token.start();
        let (cost, bytes, requests) =
            (self.costs.of_request(operation), operation.bytes, operation.requests);
        let waiter = Waiter { token: token.clone(), waker: waker.clone(), cost, bytes, requests };
        let mut state = self.state();
        let tag = later(account.start_tag.load(Relaxed), self.virtual_time.0.load(SeqCst));
        state.wait_list.push(account.number(), tag, waiter);
        account.waiting.fetch_add(1, Relaxed);
        account.waits.fetch_add(1, Relaxed);
        // From here on whoever is done looks for it...
        self.waiting.fetch_add(1, SeqCst);
        // ...and who was done before has made the room that is looked for now.
        self.admit_waiters(&mut state, now);
    }

    /// For an operation that was let in after a wait.
    pub(crate) fn granted(
        &self,
        account: &Account,
        asked: Time,
        now: Time,
        operation: &Operation,
    ) -> Grant {
        let beside = account.operations.load(Relaxed).saturating_sub(1);
        let class = OperationClass::of(operation.kind, operation.bytes, beside);
        Grant { cost: self.costs.of_request(operation), asked, at: now, class, was_alone: false }
    }

    /// Lets in as many as there is room for.
    fn admit_waiters(&self, state: &mut State, now: Time) {
        while self.waiting.load(SeqCst) > 0 {
            let in_flight = self.in_flight.0.load(SeqCst);
            // Who has the device to itself waits for nobody, nor do those who waited until a moment
            // ago.
            if in_flight > 0 && in_flight >= self.window.0.load(Relaxed) && self.is_shared() {
                break;
            }
            let Some((disk, tag)) = state.wait_list.pop_head() else { break };
            let Some(account) = state.accounts[disk].clone() else { continue };
            let own = account.start_tag.load(Relaxed);
            if before(tag, own) {
                // Something of it began meanwhile: its turn is later.
                state.wait_list.push_head(disk, own);
                continue;
            }
            if let Some(waiter) = state.wait_list.take(disk) {
                self.admit_one(&account, &waiter, now, Moves::Time);
                waiter.waker.wake();
            }
            state.wait_list.push_head(
                disk,
                later(account.start_tag.load(Relaxed), self.virtual_time.0.load(SeqCst)),
            );
        }
    }

    /// Returns false if the operation was dropped meanwhile: it costs nothing.
    fn admit_one(&self, account: &Account, waiter: &Waiter, now: Time, moves: Moves) -> bool {
        self.waiting.fetch_sub(1, SeqCst);
        account.waiting.fetch_sub(1, Relaxed);
        let waits = waiter.token.grant();
        if waits {
            self.charge(account, now, waiter.cost, (waiter.requests, waiter.bytes), moves);
            let held = self.held(waiter.cost);
            self.in_flight.0.fetch_add(held, SeqCst);
            account.in_flight.fetch_add(held, Relaxed);
            account.operations.fetch_add(1, Relaxed);
        }
        waits
    }

    /// Lets in those of the disk whose reservation is due, whatever else is on the way.
    pub(crate) fn claim(&self, account: &Account, now: Time) {
        let mut state = self.state();
        while account.reservation_is_due(now) {
            let Some(waiter) = state.wait_list.pop_of(account.number()) else { break };
            self.admit_one(account, &waiter, now, Moves::Itself);
            waiter.waker.wake();
        }
    }

    /// Lets in all operations of the disk that wait, because a queue of it is drained. Returns
    /// their cost.
    pub(crate) fn release(&self, account: &Account, now: Time) -> u64 {
        let mut state = self.state();
        let mut cost = 0u64;
        while let Some(waiter) = state.wait_list.pop_of(account.number()) {
            if self.admit_one(account, &waiter, now, Moves::Itself) {
                cost = cost.saturating_add(waiter.cost);
            }
            waiter.waker.wake();
        }
        cost
    }

    /// Whether the disk is ahead of its share while another one waits for the device.
    pub(crate) fn is_ahead(&self, account: &Account) -> bool {
        let waits = self.waiting.load(SeqCst) as u64 > account.waiting.load(Relaxed);
        waits && self.is_shared() && !account.is_within_share(self.virtual_time.0.load(SeqCst))
    }

    /// Time that the disk's share of the device takes for `cost`, in nanoseconds.
    pub(crate) fn time_of(&self, account: &Account, cost: u64) -> u64 {
        if self.is_shared() { account.time_of(cost) } else { 0 }
    }

    pub(crate) fn duration_of(&self, account: &Account, operation: &Operation) -> u64 {
        self.time_of(account, self.costs.of_request(operation))
    }

    /// The operation has ended: there is room for another.
    #[inline]
    pub(crate) fn done(&self, account: &Account, now: Time, grant: Grant) {
        let service = now.saturating_sub(grant.at);
        let others = self.in_flight.0.load(Relaxed) > account.in_flight.load(Relaxed);
        self.baseline.learn(grant.class, service, grant.was_alone && !others);
        account.served(
            grant.cost,
            service,
            now.saturating_sub(grant.asked),
            self.baseline.expected(grant.class).max(1),
        );
        self.release_grant(account, now, &grant);
    }

    /// Gives back what an operation held.
    #[inline]
    pub(crate) fn release_grant(&self, account: &Account, now: Time, grant: &Grant) {
        let held = self.held(grant.cost);
        account.in_flight.fetch_sub(held, Relaxed);
        account.operations.fetch_sub(1, Relaxed);
        self.in_flight.0.fetch_sub(held, SeqCst);
        if self.waiting.load(SeqCst) > 0 {
            let mut state = self.state();
            self.admit_waiters(&mut state, now);
        }
    }

    /// A disk asks for the first time, or after it was absent.
    #[cold]
    fn arrives(&self, account: &Account, now: Time) {
        let state = self.state();
        account.present.store(true, Relaxed);
        account.busy_at.store(now, Relaxed);
        self.update_presence(&state, now);
    }

    /// Who is here, and what each one's weight comes to.
    fn update_presence(&self, state: &State, now: Time) {
        let present = state.accounts.iter().flatten().filter(|a| a.present.load(Relaxed)).count();
        if present > 1 && !self.is_shared() {
            // Nobody was ahead of anybody: what was done alone is no lead.
            let tag = self.virtual_time.0.load(SeqCst);
            state
                .accounts
                .iter()
                .flatten()
                .for_each(|account| account.start_tag.store(tag, Relaxed));
        }
        self.shared.store(present > 1, Relaxed);
        self.update_weights(state, now);
    }

    /// Weights of groups are divided among those of their disks that are busy (as blk-iocost
    /// flattens its tree).
    fn update_weights(&self, state: &State, now: Time) {
        let accounts = || state.accounts.iter().flatten();
        let mut sums: HashMap<*const Group, u64> = HashMap::new();
        for account in accounts().filter(|a| a.is_busy(now, QUIET_NS)) {
            if let Some(group) = account.group() {
                *sums.entry(Arc::as_ptr(group)).or_default() += u64::from(account.own_weight());
            }
        }
        for account in accounts() {
            let own = u64::from(account.own_weight());
            let weight = match account.group() {
                None => own as f64,
                Some(group) => {
                    let busy = sums.get(&Arc::as_ptr(group)).copied().unwrap_or(0);
                    // One that is quiet is to have its part when it comes.
                    let sum = if account.is_busy(now, QUIET_NS) { busy } else { busy + own };
                    f64::from(group.weight()) * own as f64 / sum as f64
                }
            };
            account.set_weight(weight);
        }
    }

    /// Knobs have changed.
    pub(crate) fn reweigh(&self, now: Time) {
        self.update_weights(&self.state(), now);
    }

    /// What is seen since the last time decides on the window; by whoever comes first when it is
    /// due.
    #[cold]
    fn end_period(&self, now: Time) {
        let mut state = self.state();
        let elapsed = now.saturating_sub(state.period_began);
        if elapsed < state.window.period() && state.period_began > 0 {
            return;
        }
        state.period_began = now;
        self.next_period_at.store(now + state.window.period(), Relaxed);
        let tag = self.virtual_time.0.load(SeqCst);
        for account in state.accounts.iter().flatten() {
            // Tags wrap: none is left so far behind that it would seem to be ahead.
            let _ = account
                .start_tag
                .fetch_update(Relaxed, Relaxed, |own| before(own, tag).then_some(tag));
            if account.present.load(Relaxed)
                && !account.is_busy(now, ABSENT_NS)
                && account.is_idle()
            {
                account.present.store(false, Relaxed);
            }
        }
        self.update_presence(&state, now);
        // After a rest only the last of it counts.
        let stats = take_stats(&state, now, elapsed.min(2 * state.window.period()));
        self.was_shared.store(stats.busy_disks > 1, Relaxed);
        state.window.adjust(now, &stats);
        self.window.0.store(state.window.size(), Relaxed);
        if now.saturating_sub(state.aged) > 1_000_000_000 {
            state.aged = now;
            self.baseline.age();
        }
        self.admit_waiters(&mut state, now);
    }
}

/// Takes what the disks have counted since the last look.
fn take_stats(state: &State, now: Time, elapsed: u64) -> PeriodStats {
    let mut stats = PeriodStats { elapsed, ..PeriodStats::default() };
    let accounts = || state.accounts.iter().flatten();
    let capacity = state.window.capacity();
    let counts: Vec<_> = accounts().map(|account| account.take_counts(now)).collect();
    let weights: f64 =
        accounts().zip(&counts).filter(|(_, c)| c.busy).map(|(a, _)| a.weight()).sum();
    for (account, counts) in accounts().zip(&counts).filter(|(_, c)| c.busy) {
        let due = account.weight() / weights;
        stats.busy_disks += 1;
        account.set_rate(due * capacity);
        account.note_owed(due * capacity * elapsed as f64, counts.cost);
        account.set_margin((due * state.window.unprotected_size() * MARGIN) as u64);
        stats.completed += counts.cost;
        stats.operations += counts.served;
        stats.total_service += counts.service;
        stats.total_alone += counts.alone;
        if counts.is_over_share {
            stats.had_waiters = true;
            stats.over_share += counts.cost;
            stats.over_share_weight += due;
            continue;
        }
        stats.within_held += account.in_flight.load(Relaxed);
        match account.latency_target() {
            _ if counts.served == 0 => {}
            0 => {
                stats.within += counts.served;
                stats.within_service += counts.lived;
                stats.within_alone += counts.alone;
            }
            target => {
                let missed = counts.lived as f64 / counts.served as f64 / target as f64;
                stats.target_ratio =
                    Some(stats.target_ratio.map_or(missed, |worst: f64| worst.max(missed)));
            }
        }
    }
    stats
}
