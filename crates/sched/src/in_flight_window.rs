//! Adapts how much cost may be in flight on a device (the in-flight window, in nanoseconds of
//! cost), and estimates the device's capacity.
//!
//! In: measurements of the last period. Out: the window for the next period.
//!
//! A disk is within its share if few of its operations had to wait; otherwise it is over its share.
//! The window follows three goals. The first has the highest priority:
//! 1. A disk with a latency target that is within its share meets the target, at any cost to its
//!    neighbours, except for a tenth of their share.
//! 2. Any other disk within its share is served within [`MAX_SLOWDOWN`] of its service time without
//!    neighbours, as long as the disks over their share get at least their share of the completed
//!    cost. It is served within [`NO_SLOWDOWN`] as long as they get their share of the device's
//!    capacity.
//! 3. The device stays busy: the window grows until operations spend [`DeviceClass::queue`] in the
//!    device's queue.

/// Largest accepted slowdown of a disk within its share: its service time over that without
/// neighbours.
pub(crate) const MAX_SLOWDOWN: f64 = 1.5;
/// A slowdown up to this counts as none.
pub(crate) const NO_SLOWDOWN: f64 = 1.03;

/// Fewest operations that count as a sample.
const MIN_SAMPLES: u64 = 8;
const CERTAIN_SAMPLES: u64 = 100;
const CERTAIN_NS: u64 = 400_000_000;
/// Time after the last operation of a disk within its share when the window no longer protects it,
/// in nanoseconds.
const GONE_NS: u64 = 1_000_000_000;
const MIN_SIZE_NS: f64 = 1_000.0;

/// Class of a device: how it is controlled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceClass {
    /// Time that operations may spend in the device's own queue while all disks are over their
    /// share, in nanoseconds.
    pub queue: u64,
    /// Length of a control period, in nanoseconds.
    pub period: u64,
}

impl DeviceClass {
    pub const FLASH: DeviceClass = DeviceClass { queue: 1_000_000, period: 20_000_000 };
    pub const ROTATIONAL: DeviceClass = DeviceClass { queue: 40_000_000, period: 100_000_000 };
}

/// Measurements of one control period. Costs and times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PeriodStats {
    pub elapsed: u64,
    /// Number of disks that had operations.
    pub busy_disks: u32,
    /// An operation waited for the device.
    pub had_waiters: bool,
    /// Cost of the operations that completed: of all disks, and of the disks over their share.
    pub completed: u64,
    pub over_share: u64,
    /// Part of the device that is due to the disks over their share, 0 to 1.
    pub over_share_weight: f64,
    /// Completed operations of disks within their share and without a latency target: their number,
    /// the sum of their service times, and the sum of their baseline service times.
    pub within: u64,
    pub within_service: u64,
    pub within_alone: u64,
    /// Cost that disks within their share have in flight now.
    pub within_held: u64,
    /// Highest ratio of mean service time to latency target, of the disks within their share that
    /// have a target.
    pub target_ratio: Option<f64>,
    /// All completed operations: their number, the sum of their service times, and the sum of their
    /// baseline service times.
    pub operations: u64,
    pub total_service: u64,
    pub total_alone: u64,
}

#[derive(Debug)]
pub(crate) struct InFlightWindow {
    class: DeviceClass,
    size: f64,
    /// The initial size.
    usual: f64,
    /// Capacity that the device has shown, in nanoseconds of cost a nanosecond: 1 if the cost model
    /// is right.
    capacity: f64,
    /// Completed cost of the recent periods, and their length, both in nanoseconds.
    recent: (f64, f64),
    /// Operations of disks within their share, until there are enough for a sample.
    within: WithinShare,
    /// Time when the last of them completed.
    within_at: Option<u64>,
    /// Most cost that they have had in flight lately. A smaller window would make them wait for
    /// themselves.
    held: f64,
    /// Window size at the last slowdown. The window grows slowly when it is near this size.
    knee: f64,
}

#[derive(Debug, Default)]
struct WithinShare {
    operations: u64,
    service: u64,
    alone: u64,
    time: u64,
}

impl InFlightWindow {
    /// `size`: the window that a calibration found.
    pub fn new(class: DeviceClass, size: Option<u64>) -> Self {
        let size = size.map_or(class.queue as f64 / 2.0, |size| size as f64);
        InFlightWindow {
            class,
            size,
            usual: size,
            capacity: 1.0,
            recent: (0.0, 0.0),
            within: WithinShare::default(),
            within_at: None,
            knee: f64::MAX,
            held: 0.0,
        }
    }

    pub fn period(&self) -> u64 {
        self.class.period
    }

    pub fn size(&self) -> u64 {
        self.size as u64
    }

    /// Returns the size without disks to protect: the initial size, or the current one if that is
    /// larger.
    pub fn unprotected_size(&self) -> f64 {
        self.usual.max(self.size)
    }

    pub fn capacity(&self) -> f64 {
        self.capacity
    }

    pub fn adjust(&mut self, now: u64, stats: &PeriodStats) {
        if stats.elapsed == 0 {
            return;
        }
        let rate = self.rate(stats);
        if !stats.had_waiters {
            return;
        }
        if stats.within > 0 || stats.target_ratio.is_some() {
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
            (None, None) if self.within_at.is_some_and(|at| now < at.saturating_add(GONE_NS)) => {
                // Their operations are too rare for a sample so far.
                if stats.over_share_exceeds(self.capacity * stats.elapsed as f64) {
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
        self.held = (self.held * 0.98).max(stats.within_held as f64);
        let most = 8.0 * self.class.queue as f64;
        self.size = (self.size * step).clamp((self.held + MIN_SIZE_NS).min(most), most);
    }

    /// Returns the rate of completed cost. It is averaged over several periods, because operations
    /// complete in bursts.
    fn rate(&mut self, stats: &PeriodStats) -> f64 {
        let (delivered, elapsed) =
            (self.recent.0 + stats.completed as f64, self.recent.1 + stats.elapsed as f64);
        let keep = if elapsed > 10.0 * self.class.period as f64 { 0.8 } else { 1.0 };
        self.recent = (delivered * keep, elapsed * keep);
        let rate = delivered / elapsed;
        if elapsed > 7.0 * self.class.period as f64 {
            self.capacity = self.capacity.max(rate);
        }
        rate
    }

    /// Returns the slowdown of the disks within their share, once there are enough operations.
    fn slowdown(&mut self, stats: &PeriodStats) -> Option<f64> {
        let WithinShare { operations, service, alone, time } = &mut self.within;
        *operations += stats.within;
        *service += stats.within_service;
        *alone += stats.within_alone;
        *time += stats.elapsed;
        let slowdown = *service as f64 / (*alone).max(1) as f64;
        let enough = if slowdown > MAX_SLOWDOWN || *time >= CERTAIN_NS {
            MIN_SAMPLES
        } else {
            CERTAIN_SAMPLES
        };
        (*operations >= enough).then(|| {
            self.within = WithinShare::default();
            slowdown
        })
    }

    fn step_within_share(&mut self, stats: &PeriodStats, slowdown: f64) -> f64 {
        let full = stats.over_share_exceeds(self.capacity * stats.elapsed as f64);
        let fair = stats.over_share_exceeds(stats.completed as f64);
        if slowdown > NO_SLOWDOWN && full {
            self.knee = self.size;
        }
        // Raise the limit again, because the device may have become faster.
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

    /// All disks are over their share: returns the step towards a full device queue.
    fn step_over_share(&mut self, stats: &PeriodStats, rate: f64) -> f64 {
        // The device is saturated and no disk is protected, so its rate is its present capacity.
        self.capacity += (rate - self.capacity) * 0.02;
        self.grow_step(stats, 1.1)
    }

    fn grow_step(&self, stats: &PeriodStats, by: f64) -> f64 {
        let most = stats.total_alone + stats.operations * self.class.queue;
        match stats.operations {
            0 => 1.0,
            _ if stats.total_service > most + most / 10 => 0.93,
            _ if stats.total_service > most => 1.0,
            _ => by,
        }
    }
}

fn step_for_target(stats: &PeriodStats, ratio: f64) -> f64 {
    match ratio {
        _ if ratio > 1.0 && stats.over_share_exceeds(0.1 * stats.completed as f64) => {
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
        self.over_share as f64 > self.over_share_weight * all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> PeriodStats {
        let (elapsed, had_waiters, over_share_weight) = (20_000_000, true, 0.5);
        PeriodStats { elapsed, had_waiters, over_share_weight, ..PeriodStats::default() }
    }

    fn after(window: &mut InFlightWindow, stats: &PeriodStats, periods: u64) -> u64 {
        (0..periods).for_each(|n| window.adjust(n * 20_000_000, stats));
        window.size()
    }

    #[test]
    fn the_window_grows_until_the_device_queue_is_full_and_then_shrinks() {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        let busy = PeriodStats {
            completed: 20_000_000,
            over_share: 20_000_000,
            over_share_weight: 1.0,
            operations: 100,
            total_alone: 5_000_000,
            ..stats()
        };
        assert!(
            after(&mut window, &PeriodStats { total_service: 50_000_000, ..busy }, 20) > 2_000_000
        );
        assert!(
            after(&mut window, &PeriodStats { total_service: 500_000_000, ..busy }, 60) < 200_000
        );
    }

    #[test]
    fn disks_within_their_share_are_protected_up_to_the_share_of_the_others() {
        let polite = PeriodStats {
            within: 100,
            within_alone: 4_000_000,
            within_service: 20_000_000,
            operations: 200,
            ..stats()
        };
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        let more = PeriodStats { completed: 10_000_000, over_share: 8_000_000, ..polite };
        assert!(
            after(&mut window, &more, 20) < 100_000,
            "they get more than their half of what is delivered"
        );
        let less = PeriodStats { completed: 10_000_000, over_share: 4_000_000, ..polite };
        let before = window.size();
        assert!(after(&mut window, &less, 20) > before, "they get less than their half of it");
        // The slowdown is small, and the others get their half of the device's capacity: reduce it
        // further.
        let slightly = PeriodStats {
            within_service: 4_300_000,
            completed: 14_000_000,
            over_share: 12_000_000,
            ..polite
        };
        let before = window.size();
        assert!(after(&mut window, &slightly, 20) < before);
    }

    #[test]
    fn a_latency_target_precedes_shares_but_starves_no_disk() {
        let polite = PeriodStats {
            target_ratio: Some(2.0),
            completed: 10_000_000,
            over_share: 2_000_000,
            ..stats()
        };
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        assert!(after(&mut window, &polite, 30) < 50_000);
        let before = window.size();
        assert!(after(&mut window, &PeriodStats { over_share: 100_000, ..polite }, 30) >= before);
        assert!(
            after(&mut window, &PeriodStats { target_ratio: Some(0.5), ..polite }, 30) > before
        );
    }

    #[test]
    fn it_waits_step_within_share_their_share_to_come_back_for_a_second() {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
        let polite = PeriodStats {
            within: 100,
            within_alone: 4_000_000,
            within_service: 8_000_000,
            over_share: 30_000_000,
            ..stats()
        };
        window.adjust(0, &polite);
        let size = window.size();
        let busy = PeriodStats {
            completed: 30_000_000,
            over_share: 30_000_000,
            over_share_weight: 0.9,
            operations: 100,
            ..stats()
        };
        window.adjust(500_000_000, &busy);
        assert_eq!(window.size(), size);
        window.adjust(600_000_000, &PeriodStats { over_share: 15_000_000, ..busy });
        assert!(
            window.size() > size && window.size() < size * 21 / 20,
            "unless others get less than they might"
        );
        let size = window.size();
        window.adjust(1_500_000_000, &busy);
        assert!(window.size() > size);
    }
}
