//! Adapts how much cost may be in flight on a device (the in-flight window, in nanoseconds of
//! cost), and estimates the device's capacity.
//!
//! In: measurements of the last period. Out: the window for the next period.
//!
//! A disk is within its share if few of its operations had to wait, and over its share if more had
//! to wait. The window follows three goals. The first has the highest priority:
//! 1. A disk with a latency target that is within its share meets the target, at any cost to its
//!    neighbours, except for a tenth of their share.
//! 2. Any other disk within its share is served within [`MAX_SLOWDOWN`] of its service time without
//!    neighbours, as long as the disks over their share get at least their share of the completed
//!    cost. It is served within [`NO_SLOWDOWN`] as long as they get their share of the device's
//!    capacity.
//! 3. The device stays busy: the window grows until operations spend [`DeviceClass::queue`] in the
//!    device's queue.

/// Largest accepted slowdown of a disk within its share. A slowdown is the service time divided by
/// the service time without neighbours.
pub(crate) const MAX_SLOWDOWN: f64 = 1.5;
/// A slowdown up to this ratio counts as no slowdown.
pub(crate) const NO_SLOWDOWN: f64 = 1.03;

/// Number of operations over which a slowdown above [`MAX_SLOWDOWN`] is averaged.
const MIN_SAMPLES: u64 = 8;
/// Number of operations over which a smaller slowdown is averaged. After [`CERTAIN_NS`]
/// nanoseconds [`MIN_SAMPLES`] operations are enough for it too.
const CERTAIN_SAMPLES: u64 = 100;
const CERTAIN_NS: u64 = 400_000_000;
/// Time for which the window still protects disks within their share after their last operation, in
/// nanoseconds.
const PROTECTION_NS: u64 = 1_000_000_000;
/// Part of the window that the disks over their share always keep, in nanoseconds of cost. It is
/// added to what the protected disks have in flight.
const MIN_SIZE_NS: f64 = 1_000.0;

/// Class of a device: how it is controlled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceClass {
    /// Time that operations may spend in the device's own queue while all disks are over their
    /// share, in nanoseconds.
    pub queue_ns: u64,
    /// Length of a control period, in nanoseconds.
    pub period_ns: u64,
}

impl DeviceClass {
    /// Settings for flash devices.
    pub const FLASH: DeviceClass = DeviceClass { queue_ns: 1_000_000, period_ns: 20_000_000 };
    /// Settings for rotational devices.
    pub const ROTATIONAL: DeviceClass =
        DeviceClass { queue_ns: 40_000_000, period_ns: 100_000_000 };
}

/// Measurements of one control period. Costs and times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PeriodStats {
    pub elapsed_ns: u64,
    /// Number of disks that had operations.
    pub busy_disks: u32,
    /// Whether an operation waited for the device.
    pub had_waiters: bool,
    /// Cost of the operations that completed: of all disks, and of the disks over their share.
    pub completed_cost_ns: u64,
    pub over_share_cost_ns: u64,
    /// Part of the device that is due to the disks over their share, 0 to 1.
    pub over_share_weight: f64,
    /// Completed operations of disks within their share and without a latency target: their number,
    /// the sum of their service times, and the sum of their baseline service times.
    pub within_operations: u64,
    pub within_service_ns: u64,
    pub within_baseline_ns: u64,
    /// Cost that disks within their share have in flight now.
    pub within_in_flight_ns: u64,
    /// Highest ratio of mean service time to latency target, of the disks within their share that
    /// have a target.
    pub target_ratio: Option<f64>,
    /// All completed operations: their number, the sum of their service times, and the sum of their
    /// baseline service times.
    pub operations: u64,
    pub total_service_ns: u64,
    pub total_baseline_ns: u64,
}

/// The in-flight window of a device. Its size is in nanoseconds of cost.
#[derive(Debug)]
pub(crate) struct InFlightWindow {
    class: DeviceClass,
    size: f64,
    /// Initial size of the window, in nanoseconds of cost.
    initial: f64,
    /// Capacity that the device has shown, in nanoseconds of cost a nanosecond: 1 if the cost model
    /// is right.
    capacity: f64,
    /// Completed cost of the recent periods, and their length, both in nanoseconds.
    recent: (f64, f64),
    /// Sums over completed operations of disks within their share, until there are enough of them
    /// to compute a slowdown.
    within: WithinShare,
    /// Time when an operation of a disk within its share last completed, in nanoseconds.
    within_at: Option<u64>,
    /// Highest total cost that the disks within their share recently had in flight, in
    /// nanoseconds. With a smaller window, operations of a single disk would wait for each other.
    held: f64,
    /// Window size at the last slowdown. The window grows slowly when it is near this size.
    knee: f64,
}

/// Number and summed times of completed operations of disks within their share. The fields have the
/// same meaning as the `within_*` fields of [`PeriodStats`].
#[derive(Debug, Default)]
struct WithinShare {
    operations: u64,
    service_ns: u64,
    baseline_ns: u64,
    elapsed_ns: u64,
}

impl InFlightWindow {
    /// Creates the window of a device. `size`: the window that a calibration found.
    pub fn new(class: DeviceClass, size: Option<u64>) -> Self {
        let size = size.map_or(class.queue_ns as f64 / 2.0, |size| size as f64);
        InFlightWindow {
            class,
            size,
            initial: size,
            capacity: 1.0,
            recent: (0.0, 0.0),
            within: WithinShare::default(),
            within_at: None,
            knee: f64::MAX,
            held: 0.0,
        }
    }

    pub fn period(&self) -> u64 {
        self.class.period_ns
    }

    pub fn size(&self) -> u64 {
        self.size as u64
    }

    /// Returns the size of the window while no disk needs protection: the initial size, or the
    /// current one if that is larger.
    pub fn unprotected_size(&self) -> f64 {
        self.initial.max(self.size)
    }

    /// Returns the estimated capacity, in nanoseconds of cost a nanosecond.
    pub fn capacity(&self) -> f64 {
        self.capacity
    }

    /// Ends a control period: adapts the window to its measurements. `now` in nanoseconds.
    pub fn adjust(&mut self, now: u64, stats: &PeriodStats) {
        if stats.elapsed_ns == 0 {
            return;
        }
        let rate = self.rate(stats);
        if !stats.had_waiters {
            return;
        }
        if stats.within_operations > 0 || stats.target_ratio.is_some() {
            self.within_at = Some(now);
        }
        let slowdown = self.slowdown(stats);
        let step_for_target = stats.target_ratio.map(|ratio| step_for_target(stats, ratio));
        let step = match (
            step_for_target,
            slowdown.map(|slowdown| self.step_within_share(stats, slowdown)),
        ) {
            (Some(one), Some(other)) => one.min(other),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None)
                if self.within_at.is_some_and(|at| now < at.saturating_add(PROTECTION_NS)) =>
            {
                // The disks within their share have completed too few operations so far to compute
                // a slowdown.
                if stats.over_share_exceeds(self.capacity * stats.elapsed_ns as f64) {
                    1.0
                } else {
                    self.grow_step(stats, 1.02)
                }
            }
            (None, None) => {
                self.within = WithinShare::default();
                self.knee = f64::MAX;
                self.step_over_share(stats, rate)
            }
        };
        self.held = (self.held * 0.98).max(stats.within_in_flight_ns as f64);
        let most = 8.0 * self.class.queue_ns as f64;
        self.size = (self.size * step).clamp((self.held + MIN_SIZE_NS).min(most), most);
    }

    /// Returns the rate of completed cost. It is averaged over several periods, because operations
    /// complete in bursts.
    fn rate(&mut self, stats: &PeriodStats) -> f64 {
        let (completed, elapsed) = (
            self.recent.0 + stats.completed_cost_ns as f64,
            self.recent.1 + stats.elapsed_ns as f64,
        );
        let keep = if elapsed > 10.0 * self.class.period_ns as f64 { 0.8 } else { 1.0 };
        self.recent = (completed * keep, elapsed * keep);
        let rate = completed / elapsed;
        if elapsed > 7.0 * self.class.period_ns as f64 {
            self.capacity = self.capacity.max(rate);
        }
        rate
    }

    /// Returns the slowdown of the disks within their share, once there are enough operations.
    fn slowdown(&mut self, stats: &PeriodStats) -> Option<f64> {
        let WithinShare { operations, service_ns, baseline_ns, elapsed_ns } = &mut self.within;
        *operations += stats.within_operations;
        *service_ns += stats.within_service_ns;
        *baseline_ns += stats.within_baseline_ns;
        *elapsed_ns += stats.elapsed_ns;
        let slowdown = *service_ns as f64 / (*baseline_ns).max(1) as f64;
        let enough = if slowdown > MAX_SLOWDOWN || *elapsed_ns >= CERTAIN_NS {
            MIN_SAMPLES
        } else {
            CERTAIN_SAMPLES
        };
        (*operations >= enough).then(|| {
            self.within = WithinShare::default();
            slowdown
        })
    }

    /// Returns the factor for the window that protects disks within their share from `slowdown`.
    fn step_within_share(&mut self, stats: &PeriodStats, slowdown: f64) -> f64 {
        let full = stats.over_share_exceeds(self.capacity * stats.elapsed_ns as f64);
        let fair = stats.over_share_exceeds(stats.completed_cost_ns as f64);
        if slowdown > NO_SLOWDOWN && full {
            self.knee = self.size;
        }
        // Raise the knee again, because the device may have become faster.
        self.knee *= 1.001;
        let by = if self.size * 1.08 > self.knee { 1.002 } else { 1.05 };
        match () {
            () if slowdown > MAX_SLOWDOWN && fair => {
                1.0 / (slowdown / MAX_SLOWDOWN).clamp(1.03, 1.2)
            }
            () if slowdown > NO_SLOWDOWN && full => 1.0 / (slowdown / NO_SLOWDOWN).clamp(1.01, 1.1),
            () if slowdown < NO_SLOWDOWN => self.grow_step(stats, by),
            () if !fair || (slowdown < MAX_SLOWDOWN * 0.95 && !full) => self.grow_step(stats, 1.03),
            () => 1.0,
        }
    }

    /// Returns the factor for the window while all disks are over their share. The window grows
    /// until the device's queue is full.
    fn step_over_share(&mut self, stats: &PeriodStats, rate: f64) -> f64 {
        // The device is saturated and no disk is protected, so its rate is its present capacity.
        self.capacity += (rate - self.capacity) * 0.02;
        self.grow_step(stats, 1.1)
    }

    /// Returns the factor `by`, limited to 1 if operations spend too long in the device's queue.
    fn grow_step(&self, stats: &PeriodStats, by: f64) -> f64 {
        let most = stats.total_baseline_ns + stats.operations * self.class.queue_ns;
        match stats.operations {
            0 => 1.0,
            _ if stats.total_service_ns > most + most / 10 => 0.93,
            _ if stats.total_service_ns > most => 1.0,
            _ => by,
        }
    }
}

/// Returns the factor for the window, from the ratio of a service time to its latency target.
fn step_for_target(stats: &PeriodStats, ratio: f64) -> f64 {
    match ratio {
        _ if ratio > 1.0 && stats.over_share_exceeds(0.1 * stats.completed_cost_ns as f64) => {
            1.0 / ratio.clamp(1.05, 1.2)
        }
        _ if ratio > 1.0 => 1.03,
        _ if ratio > 0.9 => 1.0,
        _ => 1.05,
    }
}

impl PeriodStats {
    /// Returns whether the disks over their share completed more than their part of `all`.
    fn over_share_exceeds(&self, all: f64) -> bool {
        self.over_share_cost_ns as f64 > self.over_share_weight * all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> PeriodStats {
        let (elapsed_ns, had_waiters, over_share_weight) = (20_000_000, true, 0.5);
        PeriodStats { elapsed_ns, had_waiters, over_share_weight, ..PeriodStats::default() }
    }

    fn after(window: &mut InFlightWindow, stats: &PeriodStats, periods: u64) -> u64 {
        (0..periods).for_each(|n| window.adjust(n * 20_000_000, stats));
        window.size()
    }

    #[test]
    fn the_window_grows_until_the_device_queue_is_full_and_then_shrinks() {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        let busy = PeriodStats {
            completed_cost_ns: 20_000_000,
            over_share_cost_ns: 20_000_000,
            over_share_weight: 1.0,
            operations: 100,
            total_baseline_ns: 5_000_000,
            ..stats()
        };
        assert!(
            after(&mut window, &PeriodStats { total_service_ns: 50_000_000, ..busy }, 20)
                > 2_000_000
        );
        assert!(
            after(&mut window, &PeriodStats { total_service_ns: 500_000_000, ..busy }, 60)
                < 200_000
        );
    }

    #[test]
    fn disks_within_their_share_are_protected_up_to_the_share_of_the_others() {
        let polite = PeriodStats {
            within_operations: 100,
            within_baseline_ns: 4_000_000,
            within_service_ns: 20_000_000,
            operations: 200,
            ..stats()
        };
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        let more =
            PeriodStats { completed_cost_ns: 10_000_000, over_share_cost_ns: 8_000_000, ..polite };
        assert!(
            after(&mut window, &more, 20) < 100_000,
            "they get more than their half of what is completed"
        );
        let less =
            PeriodStats { completed_cost_ns: 10_000_000, over_share_cost_ns: 4_000_000, ..polite };
        let before = window.size();
        assert!(after(&mut window, &less, 20) > before, "they get less than their half of it");
        // The slowdown is small, and the others get their half of the device's capacity. So the
        // window shrinks further.
        let slightly = PeriodStats {
            within_service_ns: 4_300_000,
            completed_cost_ns: 14_000_000,
            over_share_cost_ns: 12_000_000,
            ..polite
        };
        let before = window.size();
        assert!(after(&mut window, &slightly, 20) < before);
    }

    #[test]
    fn a_latency_target_precedes_shares_but_starves_no_disk() {
        let polite = PeriodStats {
            target_ratio: Some(2.0),
            completed_cost_ns: 10_000_000,
            over_share_cost_ns: 2_000_000,
            ..stats()
        };
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        assert!(after(&mut window, &polite, 30) < 50_000);
        let before = window.size();
        assert!(
            after(&mut window, &PeriodStats { over_share_cost_ns: 100_000, ..polite }, 30)
                >= before
        );
        assert!(
            after(&mut window, &PeriodStats { target_ratio: Some(0.5), ..polite }, 30) > before
        );
    }

    #[test]
    fn the_window_stays_for_a_second_after_the_last_protected_operation() {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        let polite = PeriodStats {
            within_operations: 100,
            within_baseline_ns: 4_000_000,
            within_service_ns: 8_000_000,
            over_share_cost_ns: 30_000_000,
            ..stats()
        };
        window.adjust(0, &polite);
        let size = window.size();
        let busy = PeriodStats {
            completed_cost_ns: 30_000_000,
            over_share_cost_ns: 30_000_000,
            over_share_weight: 0.9,
            operations: 100,
            ..stats()
        };
        window.adjust(500_000_000, &busy);
        assert_eq!(window.size(), size);
        window.adjust(600_000_000, &PeriodStats { over_share_cost_ns: 15_000_000, ..busy });
        assert!(
            window.size() > size && window.size() < size * 21 / 20,
            "unless others get less than they might"
        );
        let size = window.size();
        window.adjust(1_500_000_000, &busy);
        assert!(window.size() > size);
    }
}
