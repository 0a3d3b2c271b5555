//! Stalls of the device: for a time nothing completes.
//!
//! Operations that are in flight during a stall take as long as it. Neighbours do not cause that,
//! so a smaller window would not help.
//!
//! In: whether operations complete. Out: the time when the last stall ended. Operations that began
//! before it do not count as slowed down, and give no baseline.

use std::sync::atomic::Ordering::Relaxed;

use super::period::take_stats;
use super::{Device, State};
use crate::Time;
use crate::in_flight_window::PeriodStats;

/// Shortest stall, in control periods, and as a multiple of the service time without neighbours.
const PERIODS: u64 = 3;
const SERVICES: u64 = 4;

impl Device {
    /// Sets the time from which on a completion shows a stall, at the end of a control period.
    pub(super) fn watch_stalls(&self, state: &State, now: Time, stats: &PeriodStats) {
        let is_watching = self.stall_at.load(Relaxed) < Time::MAX;
        match stats.in_flight_ns {
            0 => self.stall_at.store(Time::MAX, Relaxed),
            _ if stats.operations == 0 && is_watching => {}
            _ => self.stall_at.store(now + PERIODS * state.window.period(), Relaxed),
        }
    }

    /// Ends a stall, if there was one: `now` an operation completes after a long time without
    /// completions. `expected`: its lowest known service time, in nanoseconds.
    #[cold]
    pub(super) fn end_stall(&self, now: Time, expected: u64) {
        let mut state = self.state();
        let at = self.stall_at.swap(Time::MAX, Relaxed);
        let period = state.window.period();
        let lasted = now.saturating_sub(at).saturating_add(PERIODS * period);
        if now < at || state.probe.is_on() || expected == 0 || lasted < SERVICES * expected {
            return;
        }
        self.stalled_until.store(now, Relaxed);
        // What the disks did during the stall says nothing about the window.
        let elapsed = now.saturating_sub(state.period_began);
        let _ = take_stats(&state, now, elapsed, self.max_held_ns);
        state.period_began = now;
        self.next_period_at.store(now + period, Relaxed);
    }
}
