//! What a device decides from time to time, under its lock: which disks are present and what they
//! weigh, the size of the window, and probes.
//!
//! In: the disks' counters. Out: the window, margins and weights that operations read without the
//! lock.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::reserved::{Shortfall, watch_reservations};
use super::{Device, MARGIN, QUIET_NS, State};
use crate::Time;
use crate::account::Account;
use crate::group::Group;
use crate::in_flight_window::{PROTECTION_NS, PeriodStats};
use crate::wait_list::later;

/// A disk that gets this multiple of its share of what completes counts as over its share.
const MUCH: f64 = 1.5;
/// While the window opens for a disk that began to work, up to this many control periods are
/// shorter, by this factor.
const SHORT_PERIODS: u32 = 100;
const SHORT: u64 = 10;

impl Device {
    /// Records that a disk begins to work: its first operation, or the first after a rest. If no
    /// disk was protected until now, the window closes at once, because what is in flight may slow
    /// this disk down.
    #[cold]
    pub(super) fn wake(&self, account: &Account, now: Time) {
        let mut state = self.state();
        let state = &mut *state;
        if self.add_active(state, account) && account.group().is_some() {
            account.set_weight(weight_of(state, account, now), self.virtual_time.0.load(SeqCst));
        }
        let was_absent = state.accounts.wake(account);
        account.busy_at.store(now, Relaxed);
        // What the disk did before its rest says nothing about it now.
        account.is_over_share.store(false, Relaxed);
        account.within_held.store(0, Relaxed);
        account.is_queued.store(account.waiting.load(Relaxed) > 0, Relaxed);
        if was_absent {
            self.update_presence(state, now);
            let present = state.accounts.present().max(1);
            let part = state.window.unprotected_size() / present as f64;
            account.set_margin((part * MARGIN) as u64);
        }
        if self.is_shared() && state.window.protect(now) {
            self.publish_window(state);
            // What the disks did until now says nothing about the window that begins.
            let _ =
                take_stats(state, now, now.saturating_sub(state.period_began), self.max_held_ns);
            state.period_began = now;
            state.short_periods = SHORT_PERIODS;
            let end = now + state.window.period() / SHORT;
            self.next_period_at.fetch_min(end, Relaxed);
        }
    }

    /// Lets control periods visit a disk that has an operation. Not every operation wakes its disk:
    /// a drain and a sync do not.
    #[inline]
    pub(super) fn activate(&self, account: &Account) {
        if !account.is_active.load(Relaxed) {
            self.add_active(&mut self.state(), account);
        }
    }

    /// Adds a disk to the active ones. Returns false if it is one of them.
    #[cold]
    fn add_active(&self, state: &mut State, account: &Account) -> bool {
        let is_new = state.accounts.activate(account);
        if is_new {
            // A disk that has rested has no lead. Its tag may be so old that it compares as ahead.
            account.start_tag.store(self.virtual_time.0.load(SeqCst), Relaxed);
        }
        is_new
    }

    /// Updates which disks are present, and their effective weights.
    fn update_presence(&self, state: &mut State, now: Time) {
        let present = state.accounts.present();
        if present > 1 && !self.is_shared() {
            // Until now only one disk was present, and it competed with no other. So its start tag
            // must not count as a lead.
            let tag = self.virtual_time.0.load(SeqCst);
            state.accounts.active().for_each(|account| account.start_tag.store(tag, Relaxed));
        }
        self.shared.store(present > 1, Relaxed);
        self.update_weights(state, now);
    }

    /// Divides the weight of each group among its busy disks (as blk-iocost flattens its
    /// hierarchy). A disk that is not active gets its weight when it begins to work.
    pub(super) fn update_weights(&self, state: &mut State, now: Time) {
        let quiet = quiet_ns(state);
        let State { accounts, group_weights, .. } = state;
        group_weights.clear();
        for account in accounts.active().filter(|account| account.is_busy(now, quiet)) {
            if let Some(group) = account.group() {
                *group_weights.entry(address(group)).or_default() +=
                    u64::from(account.own_weight());
            }
        }
        let device = self.virtual_time.0.load(SeqCst);
        let mut has_changed = false;
        for account in state.accounts.active() {
            has_changed |= account.set_weight(weight_of(state, account, now), device);
        }
        if has_changed {
            // Operations that wait already have tags of the old weights.
            let State { accounts, wait_list, .. } = state;
            let tag_of = |account: &Arc<Account>| later(account.start_tag.load(Relaxed), device);
            wait_list.lower_tags(|disk| accounts.get(disk).map(tag_of));
        }
    }

    /// Updates the effective weights after a change of knobs, also for operations that wait.
    pub(crate) fn reweigh(&self, now: Time) {
        let mut state = self.state();
        self.update_weights(&mut state, now);
        let device = self.virtual_time.0.load(SeqCst);
        let rest = state.accounts.all().filter(|account| !account.is_active.load(Relaxed));
        for account in rest {
            account.set_weight(weight_of(&state, account, now), device);
        }
        self.admit_waiters(&mut state, now);
    }

    /// Returns the effective weight of a disk, also of one that is not active.
    pub(crate) fn weight_of(&self, account: &Account) -> f64 {
        if account.group().is_none() || account.is_active.load(Relaxed) {
            return account.weight();
        }
        weight_of(&self.state(), account, Time::MAX)
    }

    fn publish_window(&self, state: &State) {
        self.window.0.store(state.window.size(), Relaxed);
        self.room.store(state.window.room(), Relaxed);
        self.usual.store(state.window.usual(), Relaxed);
        self.leaves_gaps.store(state.window.is_too_large(), Relaxed);
        if !state.window.is_too_large() {
            self.gap_lead.store(0, Relaxed);
        }
    }

    /// Ends the control period: adapts the window to its measurements. The first caller after the
    /// end of the period does this.
    #[cold]
    pub(super) fn end_period(&self, now: Time) {
        let shortfall = self.adapt(&mut self.state(), now);
        // Without the lock, because the report may write to a log.
        if let Some(shortfall) = shortfall {
            (self.report)(&shortfall);
        }
    }

    fn adapt(&self, state: &mut State, now: Time) -> Option<Shortfall> {
        if state.probe.is_on() {
            self.step_probe(state, now);
            self.admit_waiters(state, now);
            return None;
        }
        if now < self.next_period_at.load(Relaxed) {
            // Another thread has ended the period.
            return None;
        }
        let elapsed = now.saturating_sub(state.period_began);
        state.period_began = now;
        let is_short = state.short_periods > 0 && state.window.is_opening();
        state.short_periods = state.short_periods.saturating_sub(1);
        let length = state.window.period() / if is_short { SHORT } else { 1 };
        self.next_period_at.store(now + length, Relaxed);
        let tag = self.virtual_time.0.load(SeqCst);
        state.accounts.rest(now, state.window.period(), tag);
        self.update_presence(state, now);
        // The device may have been idle before. Measure at most the last two periods.
        let stats =
            take_stats(state, now, elapsed.min(2 * state.window.period()), self.max_held_ns);
        let quiet = quiet_ns(state);
        state.accounts.retire(now, quiet, self.is_shared().then_some(tag));
        self.was_shared.store(stats.busy_disks > 1, Relaxed);
        let stats = PeriodStats { in_flight_ns: self.in_flight.0.load(Relaxed), ..stats };
        self.watch_stalls(state, now, &stats);
        let may_probe = state.probe.may_begin(now);
        state.window.adjust(now, &stats, may_probe);
        self.publish_window(state);
        if now.saturating_sub(state.aged) > 1_000_000_000 {
            state.aged = now;
            self.baseline.age();
        }
        let wants_probe = state.window.wants_probe(&stats, state.probe.age(now));
        let is_measurable =
            state.accounts.active().any(|a| a.awake.load(Relaxed) && !a.is_over_share());
        if wants_probe && stats.has_excess && is_measurable && state.probe.may_begin(now) {
            self.begin_probe(state, now);
        }
        self.admit_waiters(state, now);
        watch_reservations(&self.name, state, now, &stats)
    }

    /// Holds the disks over their share, so that the others show their service times without them.
    pub(super) fn begin_probe(&self, state: &mut State, now: Time) {
        state.probe.begin(now);
        self.baseline.begin_probe();
        self.stall_at.store(Time::MAX, Relaxed);
        self.quiet_samples.store(0, Relaxed);
        state.probes = state.probes.wrapping_add(1).max(1);
        for account in state.accounts.active() {
            account.held.store(account.is_over_share(), Relaxed);
        }
        let others = state.accounts.active().filter(|a| !a.held.load(Relaxed));
        for account in others.cloned().collect::<Vec<_>>() {
            self.admit_all(state, &account, now);
        }
        self.is_probing.store(true, Relaxed);
        state.wait_list.wake_first();
        self.step_probe(state, now);
    }

    /// Changes the phase of the probe, if that is due.
    pub(super) fn step_probe(&self, state: &mut State, now: Time) {
        let period = state.window.period();
        while state.probe.is_on() {
            let drained = || {
                let held = state.accounts.active().filter(|a| a.held.load(Relaxed));
                // Operations that take no room may last much longer than the device works for them.
                held.map(|a| a.in_flight.get().1).sum::<u64>() == 0
            };
            let (drained, samples) = (drained(), self.quiet_samples.load(Relaxed));
            if !state.probe.step(now, period, drained, samples) {
                let deadline = state.probe.deadline(now, period);
                self.next_period_at.store(deadline.unwrap_or(now), Relaxed);
                return;
            }
            if state.probe.is_on() {
                self.quiet_samples.store(0, Relaxed);
                self.quiet_probe.store(state.probes, Relaxed);
                // The deadline is sooner now.
                state.wait_list.wake_first();
            } else {
                self.after_probe(state, now);
            }
        }
    }

    /// Ends the probe, if one is on.
    pub(super) fn end_probe(&self, state: &mut State, now: Time) {
        if state.probe.is_on() {
            state.probe.end(now, self.quiet_samples.load(Relaxed));
            self.after_probe(state, now);
        }
    }

    fn after_probe(&self, state: &mut State, now: Time) {
        self.is_probing.store(false, Relaxed);
        self.stall_at.store(Time::MAX, Relaxed);
        let shown = self.baseline.end_probe();
        if shown.has_changed {
            state.probe.has_shown_change();
        }
        let is_quick = state.probe.lasted() < state.window.period() / SHORT;
        state.window.probed(&shown, is_quick);
        self.publish_window(state);
        self.quiet_probe.store(0, Relaxed);
        state.accounts.active().for_each(|account| account.held.store(false, Relaxed));
        // The window must not follow what the disks did during the probe.
        let _ = take_stats(state, now, now.saturating_sub(state.period_began), self.max_held_ns);
        state.period_began = now;
        state.short_periods = SHORT_PERIODS;
        self.next_period_at.store(now + state.window.period() / SHORT, Relaxed);
        self.admit_waiters(state, now);
    }
}

/// Returns the effective weight of a disk: its own weight, or its part of the group's weight. An
/// idle disk gets its part as soon as it has operations.
fn weight_of(state: &State, account: &Account, now: Time) -> f64 {
    let own = u64::from(account.own_weight());
    let Some(group) = account.group() else { return own as f64 };
    let busy = state.group_weights.get(&address(group)).copied().unwrap_or(0);
    // The times of two reactors differ a little, so the sum may lack a disk that seems busy.
    let sum = if account.is_busy(now, quiet_ns(state)) { busy.max(own) } else { busy + own };
    f64::from(group.weight()) * own as f64 / sum as f64
}

/// Returns the time in nanoseconds after which a disk without operations leaves its part of its
/// group's weight to the others. A control period notes only at its end which disks were busy, so
/// the time is at least two periods.
fn quiet_ns(state: &State) -> u64 {
    QUIET_NS.max(2 * state.window.period())
}

fn address(group: &Arc<Group>) -> usize {
    Arc::as_ptr(group).addr()
}

/// Collects what the disks have counted since the last period.
pub(super) fn take_stats(state: &State, now: Time, elapsed: u64, max_held: u64) -> PeriodStats {
    let mut stats = PeriodStats { elapsed_ns: elapsed, ..PeriodStats::default() };
    let accounts = || state.accounts.active();
    let capacity = state.window.capacity();
    let counts: Vec<_> = accounts().map(|account| account.take_counts(now, elapsed)).collect();
    let weights: f64 =
        accounts().zip(&counts).filter(|(_, c)| c.busy).map(|(a, _)| a.weight()).sum();
    let completed: u64 = counts.iter().map(|counts| counts.used(elapsed)).sum();
    let any_large = counts.iter().any(|counts| counts.is_large);
    for (account, counts) in accounts().zip(&counts).filter(|(_, c)| c.busy) {
        let due = account.weight() / weights;
        // Without a wait, too, a disk may take so much that it slows others down.
        let takes_much = counts.used(elapsed) as f64 > MUCH * due * completed as f64;
        let is_over_share = counts.mostly_waited || takes_much;
        account.is_over_share.store(is_over_share, Relaxed);
        stats.busy_disks += 1;
        account.is_queued.store(counts.has_waited, Relaxed);
        account.set_due(due, capacity);
        account.note_owed(due * capacity * elapsed as f64, counts.cost_ns);
        account.set_margin((due * state.window.unprotected_size() * MARGIN) as u64);
        stats.completed_cost_ns += counts.cost_ns;
        match account.reservation_is_behind(now) {
            true => stats.behind_cost_ns += counts.cost_ns,
            false => stats.others_wait |= counts.has_waited,
        }
        stats.operations += counts.served;
        stats.total_service_ns += counts.service_ns;
        stats.total_baseline_ns += counts.baseline_ns;
        if is_over_share {
            stats.has_excess = true;
            stats.protected_waits |= account.was_within(now, PROTECTION_NS);
            stats.over_share_cost_ns += counts.cost_ns;
            stats.over_share_is_large |= counts.is_large;
            stats.over_share_weight += due;
            account.within_held.store(0, Relaxed);
            continue;
        }
        account.within_at.store(now, Relaxed);
        stats.within_waits |= counts.has_waited;
        stats.within_in_service |= account.in_flight.get().0 > 0;
        // Little's law: the mean number in flight is the sum of the service times over the time.
        let each = (counts.cost_ns / counts.served.max(1)).min(max_held) as f64;
        let held = (each * counts.service_ns as f64 / elapsed.max(1) as f64) as u64;
        stats.within_in_flight_ns += held;
        // Beside large operations disks take turns, whatever there is room for.
        account.set_part(if any_large { 0 } else { held }, (held / 2).max(max_held));
        // A smaller window would make a disk wait that already does.
        let target = if counts.has_waited { 0 } else { account.latency_target() };
        match target {
            _ if counts.served == 0 => {}
            0 => {
                stats.within_operations += counts.served;
                stats.within_unknown += counts.unknown;
                stats.within_service_ns += counts.service_ns;
                stats.within_baseline_ns += counts.baseline_ns;
            }
            target => {
                let missed = counts.latency_ns as f64 / counts.served as f64 / target as f64;
                stats.target_ratio =
                    Some(stats.target_ratio.map_or(missed, |worst: f64| worst.max(missed)));
            }
        }
    }
    stats
}
