//! Adapts how much cost may be in flight on a device (the in-flight window, in nanoseconds of
//! cost), and estimates the device's capacity.
//!
//! In: measurements of the last period. Out: the window for the next period.
//!
//! A disk is over its share if most of its operations had to wait, or if it gets much more than its
//! share of what completes. Other disks are within their share. The window follows three goals. The
//! first has the highest priority:
//! 1. A disk with a latency target that is within its share meets the target, at any cost to its
//!    neighbours, except for a tenth of their share.
//! 2. Any other disk within its share is served within [`DeviceClass::max_slowdown`] of its service
//!    time without neighbours, as long as the disks over their share get at least their share of
//!    the completed cost. It is served within [`DeviceClass::ignored_slowdown`] as long as they get
//!    their share of the device's capacity.
//! 3. The device stays busy: the window grows until operations spend [`DeviceClass::queue_ns`] in
//!    the device's queue.

mod stats;
mod steps;

pub(crate) use stats::PeriodStats;

use crate::baseline::Shown;
use steps::step_for_target;

/// Number of operations over which a slowdown above [`DeviceClass::max_slowdown`] is averaged. A
/// smaller one is averaged over twice as many.
const MIN_SAMPLES: u64 = 8;
/// The same if the disks over their share get their share of the device, so that a larger window
/// gains little. After [`CERTAIN_NS`] nanoseconds fewer operations are enough for it too.
const CERTAIN_SAMPLES: u64 = 100;
const CERTAIN_NS: u64 = 400_000_000;
/// Standard deviation of a service time, as a part of its mean. A slowdown below its uncertainty
/// counts as none.
const UNCERTAINTY: f64 = 0.1;
/// Number of operations that show whether most baselines are unknown, and in a control period
/// whether a probe would have enough samples.
const MIN_UNKNOWN: u64 = 4;
/// Time for which the window still protects disks within their share after their last operation, in
/// nanoseconds.
pub(crate) const PROTECTION_NS: u64 = 1_000_000_000;
/// Part of the window that the disks over their share always keep, in nanoseconds of cost. It is
/// added to what the protected disks have in flight.
const MIN_SIZE_NS: f64 = 1_000.0;
/// The window closes to this part of its initial size if no better size is known.
const CLOSED_PART: f64 = 8.0;
/// Smallest factor for the window in one step.
const MAX_SHRINK: f64 = 0.4;
/// Slowdown beside large operations that closes the window whatever the operations cost.
const CLEAR_SLOWDOWN: f64 = 4.0;
/// Factor by which the caution after a slowdown decreases with each measurement without one. The
/// second factor applies while the disks over their share get their share of the device, so that a
/// larger window gains little.
const CAUTION_DECAY: f64 = 0.96;
const SLOW_CAUTION_DECAY: f64 = 0.99;
/// The window has become smaller by this factor when its effect on the service times is tested, and
/// the time in nanoseconds for which it stays larger if there is none.
const TESTED_PART: f64 = 0.85;
const KEEP_NS: u64 = 1_000_000_000;
/// Age in nanoseconds from which a baseline may be out of date: if it shows a small slowdown, and
/// if it shows one above [`DeviceClass::max_slowdown`].
const STALE_NS: u64 = 1_000_000_000;
const DOUBTFUL_NS: u64 = 300_000_000;
/// A probe that raises the baselines by more than this factor makes earlier slowdowns doubtful.
const CORRECTED: f64 = 1.02;

/// Class of a device: how it is controlled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceClass {
    /// Time that operations may spend in the device's own queue while all disks are over their
    /// share, in nanoseconds.
    pub queue_ns: u64,
    /// Length of a control period, in nanoseconds.
    pub period_ns: u64,
    /// Largest accepted slowdown of a disk within its share. A slowdown is the service time divided
    /// by the service time without neighbours.
    pub max_slowdown: f64,
    /// A slowdown up to this ratio counts as none. Larger values of both let neighbours do more, at
    /// the cost of disks within their share (`cargo run -p blockyard-bench --example frontier`).
    pub ignored_slowdown: f64,
}

impl DeviceClass {
    /// Settings for flash devices.
    pub const FLASH: DeviceClass = DeviceClass {
        queue_ns: 1_000_000,
        period_ns: 20_000_000,
        max_slowdown: 1.5,
        ignored_slowdown: 1.03,
    };
    /// Settings for rotational devices.
    pub const ROTATIONAL: DeviceClass =
        DeviceClass { queue_ns: 40_000_000, period_ns: 100_000_000, ..DeviceClass::FLASH };
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
    /// Counts operations of disks within their share since the last comparison: those without a
    /// known baseline, and all.
    unknown: (u64, u64),
    /// Time when an operation of a disk within its share last completed, in nanoseconds.
    within_at: Option<u64>,
    /// Size at the end of the last adjustment that protected a disk.
    protected: Option<f64>,
    /// Whether the window has closed for a disk that began to work, and opens quickly while it
    /// proves harmless.
    is_opening: bool,
    /// Whether much more was in flight than the window allows, because it had just closed.
    was_full: bool,
    /// The least that was in flight since the window closed, in nanoseconds of cost.
    least_in_flight: u64,
    /// Slowdown of the disks within their share when it was last computed.
    slowdown: f64,
    /// Window size at the last slowdown. The window grows slowly when it is near this size and the
    /// slowdown was recent.
    knee: f64,
    /// Total cost that the disks within their share have in flight, on average over some periods,
    /// in nanoseconds.
    usually_held: f64,
    /// Whether disks within their share had operations in the last period.
    has_protected: bool,
    /// Whether the window is at its smallest, and disks within their share are still slowed down.
    is_too_large: bool,
    /// Until when it counts as too large, although nothing is slowed down: the gaps may be why.
    too_large_until: u64,
    /// The same when disks were last protected.
    was_too_large: bool,
    /// Whether the last step was a smaller window because of a slowdown.
    is_shrinking: bool,
    /// 1 at a slowdown; decreases to 0 with the measurements after it.
    caution: f64,
    /// Size of the window when it last slowed no disk within its share down. 0: unknown.
    harmless: f64,
    /// Whether the device itself may have become slower, because the window has proved harmless.
    is_suspect: bool,
    /// Factor by which the window becomes smaller, unless a probe shows that the device is slower.
    deferred: Option<f64>,
    /// Size of the window and mean service time in nanoseconds, when the window began to shrink
    /// because the device's queue seemed too long.
    queued: Option<(f64, f64)>,
    /// The window does not shrink for the queue before this time, in nanoseconds.
    keeps_until: u64,
    /// The same when the window began to grow although the device's queue seemed too long, and the
    /// time before which it does not try that again.
    larger: Option<(f64, f64)>,
    grows_at: u64,
    /// Whether the baselines that the last probe measured are still made of few service times.
    is_vague: bool,
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
            unknown: (0, 0),
            within_at: None,
            knee: f64::MAX,
            caution: 0.0,
            usually_held: 0.0,
            has_protected: false,
            is_too_large: false,
            too_large_until: 0,
            was_too_large: false,
            is_shrinking: false,
            protected: None,
            is_opening: false,
            was_full: false,
            least_in_flight: u64::MAX,
            slowdown: 1.0,
            harmless: 0.0,
            is_suspect: false,
            deferred: None,
            queued: None,
            keeps_until: 0,
            larger: None,
            grows_at: 0,
            is_vague: false,
        }
    }

    pub fn period(&self) -> u64 {
        self.class.period_ns
    }

    pub fn size(&self) -> u64 {
        self.size as u64
    }

    /// Returns the part of the window that the disks in the queue may fill. The rest is for the
    /// disks within their share, even when they have nothing in flight for a moment.
    pub fn room(&self) -> u64 {
        (self.size - self.held()).max(MIN_SIZE_NS) as u64
    }

    /// Returns the cost that disks within their share may have in flight without taking room from
    /// the disks in the queue: twice the average, because their operations come in bursts.
    pub fn usual(&self) -> u64 {
        (2.0 * self.held()) as u64
    }

    /// Returns the cost that the protected disks have in flight. They keep this part of the window
    /// while they wait.
    fn held(&self) -> f64 {
        if self.has_protected { self.usually_held } else { 0.0 }
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

    /// Begins to protect a disk that begins to work, if no disk is protected yet: the window closes
    /// to the size that protected disks last, and opens again if that is smaller than necessary.
    /// Returns whether protection begins. `now` in nanoseconds.
    pub fn protect(&mut self, now: u64) -> bool {
        if self.is_protecting(now) {
            return false;
        }
        self.within_at = Some(now);
        let closed = self.protected.unwrap_or(self.initial / CLOSED_PART).min(self.initial);
        self.size = self.size.min(closed).max(MIN_SIZE_NS);
        self.within = WithinShare::default();
        self.is_opening = true;
        self.larger = None;
        self.least_in_flight = u64::MAX;
        (self.is_too_large, self.too_large_until) = (self.was_too_large, now + KEEP_NS);
        true
    }

    /// Returns whether the window opens after it has closed for a disk.
    pub fn is_opening(&self) -> bool {
        self.is_opening
    }

    /// Returns whether even one operation at a time of the disks in the queue slows the others
    /// down, because it takes long. Then the disks in the queue must leave gaps.
    pub fn is_too_large(&self) -> bool {
        self.is_too_large
    }

    fn is_protecting(&self, now: u64) -> bool {
        self.within_at.is_some_and(|at| now < at.saturating_add(PROTECTION_NS))
    }

    /// Returns whether a probe would help: the baseline of most operations of disks within their
    /// share is unknown or made of few service times, or these operations are slow and the last
    /// probe was `age` nanoseconds ago.
    pub fn wants_probe(&mut self, stats: &PeriodStats, age: u64) -> bool {
        self.unknown.0 += stats.within_unknown;
        self.unknown.1 += stats.within_operations;
        let (unknown, all) = self.unknown;
        if all >= MIN_UNKNOWN {
            self.unknown = (0, 0);
        }
        let is_stale = match self.slowdown {
            slowdown if slowdown > self.class.max_slowdown => age > DOUBTFUL_NS,
            slowdown => slowdown > self.class.ignored_slowdown && age > STALE_NS,
        };
        let is_stale = is_stale || self.is_vague;
        // A probe of a disk that does little would be long.
        let is_stale = is_stale && stats.within_operations >= MIN_UNKNOWN;
        let is_stale = is_stale || self.is_suspect;
        stats.within_operations > 0 && ((all >= MIN_UNKNOWN && unknown * 2 > all) || is_stale)
    }

    /// Continues after a probe. If the device has become slower or faster, neighbours did not cause
    /// the slowdown, and the window becomes as large as it was before. `is_quick`: the probe had
    /// its samples in less than a short control period.
    pub fn probed(&mut self, shown: &Shown, is_quick: bool) {
        if shown.has_changed && self.harmless > 0.0 {
            self.size = self.size.max(self.harmless);
            self.protected = Some(self.size);
            self.is_shrinking = false;
            self.caution = 0.0;
            self.slowdown = 1.0;
            self.deferred = None;
        }
        self.shrink_as_deferred();
        if !shown.has_changed && self.is_suspect {
            self.harmless = 0.0;
        }
        self.is_suspect = false;
        self.is_vague = shown.is_vague;
        if !shown.has_changed && shown.correction > CORRECTED {
            // What seemed to be a slowdown may have been the error of the expected times.
            self.knee = f64::MAX;
            self.caution = 0.0;
            self.slowdown = 1.0;
            self.is_shrinking = false;
        }
        self.within = WithinShare::default();
        // One short period has enough operations for a decision, but they meet what all disks begin
        // when the probe ends.
        self.was_full = is_quick;
    }

    /// Ends a control period: adapts the window to its measurements. `now` in nanoseconds.
    /// `may_probe`: a probe may begin now.
    pub fn adjust(&mut self, now: u64, stats: &PeriodStats, may_probe: bool) {
        if stats.elapsed_ns == 0 {
            return;
        }
        let rate = self.rate(stats);
        // The probe did not begin.
        self.shrink_as_deferred();
        if !stats.has_excess {
            self.is_too_large &= now < self.too_large_until;
            return;
        }
        if stats.within_operations > 0 || stats.target_ratio.is_some() {
            self.within_at = Some(now);
        }
        let slowdown = self.slowdown(stats);
        let slowdown = if self.is_draining(stats) { None } else { slowdown };
        let step_for_target = stats.target_ratio.map(|ratio| step_for_target(stats, ratio));
        self.has_protected = stats.within_operations > 0 || stats.target_ratio.is_some();
        if self.has_protected {
            self.usually_held += (stats.within_in_flight_ns as f64 - self.usually_held) * 0.5;
        }
        let step = match (
            step_for_target,
            slowdown.map(|slowdown| self.step_within_share(stats, slowdown, may_probe)),
        ) {
            (Some(one), Some(other)) => one.min(other),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) if self.is_protecting(now) => {
                // The disks within their share have completed too few operations so far to compute
                // a slowdown.
                let is_full = stats.over_share_exceeds(self.capacity * stats.elapsed_ns as f64);
                // The window is so small that the protected disks wait, too.
                let is_too_small = stats.within_operations == 0
                    && stats.protected_waits
                    && !stats.within_in_service;
                let is_unknown = stats.within_unknown * 2 > stats.within_operations;
                match () {
                    () if is_too_small && self.is_opening => self.grow_step(stats, 2.0),
                    () if is_unknown || (is_full && !is_too_small) => 1.0,
                    () if self.is_opening => self.grow_step(stats, 1.1),
                    () if self.slowdown > self.class.ignored_slowdown && !is_too_small => 1.0,
                    () if self.is_far_below_knee() => self.grow_step(stats, 1.25),
                    () => self.grow_step(stats, 1.03),
                }
            }
            (None, None) => {
                self.within = WithinShare::default();
                self.knee = f64::MAX;
                self.slowdown = 1.0;
                self.step_over_share(now, stats, rate)
            }
        };
        let most = 8.0 * self.class.queue_ns as f64;
        if step < 1.0 {
            // A window that is larger than what is in flight limits nothing.
            // What the disks within their share hold counts also if they have just stopped. Beside
            // large operations they hold no part.
            let has_stopped = !stats.within_in_service && !stats.over_share_is_large;
            let missing = if has_stopped { self.held() } else { 0.0 };
            self.size = self.size.min(stats.in_flight_ns as f64 + missing);
        }
        self.size = (self.size * step).clamp((self.held() + MIN_SIZE_NS).min(most), most);
        if self.is_protecting(now) {
            self.protected = Some(self.size);
        }
        self.note_too_large(now, slowdown.is_some());
    }

    /// Records whether the window is too large even at its smallest. `is_known`: the slowdown was
    /// computed just now.
    fn note_too_large(&mut self, now: u64, is_known: bool) {
        if !self.is_protecting(now) {
            self.is_too_large = false;
        } else if is_known {
            let is_smallest = self.is_too_large || self.size < self.held() + 2.0 * MIN_SIZE_NS;
            let DeviceClass { ignored_slowdown, max_slowdown, .. } = self.class;
            let accepted = if self.is_too_large { ignored_slowdown } else { max_slowdown };
            if is_smallest && self.slowdown > accepted {
                (self.is_too_large, self.too_large_until) = (true, now + KEEP_NS);
            }
            self.is_too_large &= now < self.too_large_until;
            self.was_too_large = self.is_too_large;
        }
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
        let is_full = stats.over_share_exceeds(self.capacity * stats.elapsed_ns as f64);
        let WithinShare { operations, service_ns, baseline_ns, elapsed_ns } = &mut self.within;
        *operations += stats.within_operations - stats.within_unknown;
        *service_ns += stats.within_service_ns;
        *baseline_ns += stats.within_baseline_ns;
        *elapsed_ns += stats.elapsed_ns;
        let slowdown = *service_ns as f64 / (*baseline_ns).max(1) as f64;
        let uncertain = UNCERTAINTY * if is_full { 1.0 } else { 3.0 } / (*operations as f64).sqrt();
        let enough = match () {
            () if slowdown > 2.0 * CLEAR_SLOWDOWN && stats.over_share_is_large => 2,
            () if slowdown > self.class.max_slowdown => MIN_SAMPLES,
            // The slowdown is clear already.
            () if slowdown > self.class.ignored_slowdown + 3.0 * uncertain => 2 * MIN_SAMPLES,
            () if is_full && *elapsed_ns < CERTAIN_NS => CERTAIN_SAMPLES,
            () => 2 * MIN_SAMPLES,
        };
        (*operations >= enough).then(|| {
            self.within = WithinShare::default();
            let is_slowed = slowdown > self.class.ignored_slowdown + uncertain;
            if is_slowed { slowdown } else { 1.0 }
        })
    }

    /// Returns whether the operations of this period may have met what the device had in flight
    /// before the window closed. They do not show whether the window is small enough.
    fn is_draining(&mut self, stats: &PeriodStats) -> bool {
        let is_full = self.is_opening
            && stats.in_flight_ns as f64 > 2.0 * self.size
            && stats.in_flight_ns < self.least_in_flight;
        self.least_in_flight = self.least_in_flight.min(stats.in_flight_ns);
        let is_draining = std::mem::replace(&mut self.was_full, is_full) || is_full;
        if is_draining {
            self.within = WithinShare::default();
        }
        is_draining
    }

    /// Returns the factor for the window that protects disks within their share from `slowdown`.
    fn step_within_share(&mut self, stats: &PeriodStats, slowdown: f64, may_probe: bool) -> f64 {
        let full = stats.over_share_exceeds(self.capacity * stats.elapsed_ns as f64);
        let fair = stats.over_share_exceeds(stats.completed_cost_ns as f64);
        self.slowdown = slowdown;
        self.is_suspect = false;
        if slowdown <= self.class.ignored_slowdown {
            self.harmless = self.size;
            let by = match () {
                () if self.is_opening => 1.5,
                () if self.is_far_below_knee() => 1.25,
                // A disk that uses exactly its share waits if the window is too small.
                () if stats.within_waits => 1.1,
                () => 1.1 - 0.096 * self.caution,
            };
            self.is_shrinking = false;
            // The device may have become faster, or may only have stalled.
            self.caution *= if full { SLOW_CAUTION_DECAY } else { CAUTION_DECAY };
            return self.grow_step(stats, by);
        }
        self.is_opening = false;
        // Less was in flight than before, and did no harm then. A probe shows whether the device
        // has become slower.
        let was_harmless = self.size <= 1.15 * self.harmless;
        self.is_suspect = was_harmless
            && may_probe
            && slowdown > self.class.max_slowdown
            && stats.within_operations >= MIN_UNKNOWN;
        let step = match () {
            // At the minimum of the window, disks take turns by measured time, and not by cost.
            () if slowdown > CLEAR_SLOWDOWN && stats.over_share_is_large => MAX_SHRINK,
            () if slowdown > self.class.max_slowdown && fair => self.shrink_step(stats, slowdown),
            // A smaller window would make these disks wait even more.
            () if full && stats.within_waits => 1.0,
            () if full => 1.0 / (slowdown / self.class.ignored_slowdown).clamp(1.01, 1.1),
            () if !fair || slowdown < self.class.max_slowdown * 0.95 => self.grow_step(stats, 1.03),
            () => 1.0,
        };
        if step < 1.0 && !self.is_shrinking {
            let is_low = self.is_far_below_knee();
            self.knee = if is_low { self.knee * 0.8 } else { self.size };
            self.caution = 1.0;
        }
        self.is_shrinking = step < 1.0;
        if self.is_suspect && step < 1.0 {
            self.deferred = Some(step);
            return 1.0;
        }
        step
    }

    /// Makes the window smaller as decided before a probe.
    fn shrink_as_deferred(&mut self) {
        if let Some(step) = self.deferred.take() {
            self.size = (self.size * step).max(self.held() + MIN_SIZE_NS);
        }
    }

    /// Returns whether the window was much larger before it shrank because of a slowdown.
    fn is_far_below_knee(&self) -> bool {
        self.knee < f64::MAX && self.size < 0.7 * self.knee
    }

    /// Returns the factor for the window that reduces a slowdown that is not accepted. The time
    /// that an operation takes longer is proportional to what the disks over their share have in
    /// flight. These keep their share of the completed cost.
    fn shrink_step(&self, stats: &PeriodStats, slowdown: f64) -> f64 {
        let for_slowdown = (self.class.max_slowdown - 1.0) / (slowdown - 1.0);
        let part = stats.over_share_cost_ns as f64 / stats.completed_cost_ns.max(1) as f64;
        let due = stats.over_share_weight;
        let for_share = due * (1.0 - part) / (part * (1.0 - due)).max(f64::MIN_POSITIVE);
        let step = for_slowdown.max(for_share).clamp(MAX_SHRINK, 0.97);
        1.0 - (1.0 - step) * self.room() as f64 / self.size
    }
}

#[cfg(test)]
mod tests;
