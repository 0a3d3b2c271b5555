//! The steps of the window that keep the device busy, and those for a latency target.
//!
//! In: the measurements of a control period. Out: the factor for the window.

use super::{InFlightWindow, KEEP_NS, PeriodStats, TESTED_PART};

impl InFlightWindow {
    /// Returns the factor for the window while all disks are over their share. The window grows
    /// until the device's queue is full.
    pub(super) fn step_over_share(&mut self, now: u64, stats: &PeriodStats, rate: f64) -> f64 {
        // The device is saturated and no disk is protected, so its rate is its present capacity.
        self.capacity += (rate - self.capacity) * 0.02;
        // The time of large operations depends on their sizes more than on the queue.
        let is_idle = rate < 0.9 * self.capacity && !stats.over_share_is_large;
        let step = self.grow_step(stats, 1.1);
        if step > 1.0 {
            (self.queued, self.larger) = (None, None);
            return step;
        }
        if self.larger.is_some() || (step == 1.0 && is_idle) {
            return self.test_larger(now, stats);
        }
        if step == 1.0 {
            return step;
        }
        if now < self.keeps_until {
            return 1.0;
        }
        // If a smaller window does not shorten the service times, nothing queues: the device has
        // become slower.
        let each = stats.total_service_ns as f64 / stats.operations.max(1) as f64;
        let (size, longest) = *self.queued.get_or_insert((self.size, each));
        match () {
            () if self.size > TESTED_PART * size => step,
            () if each > (1.0 + TESTED_PART) / 2.0 * longest => {
                self.queued = None;
                self.keeps_until = now + KEEP_NS;
                size / self.size
            }
            () => {
                self.queued = Some((self.size, each));
                step
            }
        }
    }

    /// Returns the factor for the window while operations seem to queue in the device, although it
    /// completes less than it has shown. If a larger window does not lengthen the service times,
    /// nothing queues: the device has become slower, and the expected times are those from before.
    fn test_larger(&mut self, now: u64, stats: &PeriodStats) -> f64 {
        if stats.operations == 0 || now < self.grows_at {
            return 1.0;
        }
        let each = stats.total_service_ns as f64 / stats.operations as f64;
        match self.larger.replace((self.size, each)) {
            Some((size, shortest)) if each > (1.0 + 1.0 / TESTED_PART) / 2.0 * shortest => {
                self.larger = None;
                self.grows_at = now + KEEP_NS;
                size / self.size
            }
            _ => 1.0 / TESTED_PART,
        }
    }

    /// Returns the factor `by`, limited to 1 if operations spend too long in the device's queue.
    pub(super) fn grow_step(&self, stats: &PeriodStats, by: f64) -> f64 {
        let most = stats.total_baseline_ns + stats.operations * self.class.queue_ns;
        // The window that keeps the device busy if nothing queues there: its rate times the time of
        // an operation. The expected times may be those of a device that was faster, so a smaller
        // window might not shorten the queue.
        let each = stats.total_baseline_ns as f64 / stats.operations.max(1) as f64;
        let enough = self.capacity * each;
        match stats.operations {
            0 => 1.0,
            _ if stats.total_service_ns > most + most / 10 => (enough / self.size).clamp(0.93, 1.0),
            _ if stats.total_service_ns > most => 1.0,
            _ => by,
        }
    }
}

/// Returns the factor for the window, from the ratio of a service time to its latency target.
pub(super) fn step_for_target(stats: &PeriodStats, ratio: f64) -> f64 {
    match ratio {
        _ if ratio > 1.0 && stats.over_share_exceeds(0.1 * stats.completed_cost_ns as f64) => {
            1.0 / ratio.clamp(1.05, 1.2)
        }
        _ if ratio > 1.0 => 1.03,
        _ if ratio > 0.9 => 1.0,
        _ => 1.05,
    }
}
