//! What a device measures in one control period. In: the disks' counters. Out: the input of
//! [`super::InFlightWindow::adjust`].

/// Measurements of one control period. Costs and times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PeriodStats {
    pub elapsed_ns: u64,
    /// Number of disks that had operations.
    pub busy_disks: u32,
    /// Whether a disk was over its share.
    pub has_excess: bool,
    /// Whether an operation of a disk within its share had to wait.
    pub within_waits: bool,
    /// Whether a disk over its share was within it a short time ago.
    pub protected_waits: bool,
    /// Whether a disk within its share had operations in flight at the end of the period.
    pub within_in_service: bool,
    /// Cost in flight at the end of the period.
    pub in_flight_ns: u64,
    /// Cost of the operations that completed: of all disks, and of the disks over their share.
    pub completed_cost_ns: u64,
    pub over_share_cost_ns: u64,
    /// The same of the disks that get less than their reservation.
    pub behind_cost_ns: u64,
    /// Whether an operation of another disk had to wait.
    pub others_wait: bool,
    /// Whether large operations of the disks over their share completed.
    pub over_share_is_large: bool,
    /// Part of the device that is due to the disks over their share, 0 to 1.
    pub over_share_weight: f64,
    /// Completed operations of disks within their share and without a latency target: their number,
    /// the sum of their service times, and the sum of their baseline service times.
    pub within_operations: u64,
    pub within_service_ns: u64,
    pub within_baseline_ns: u64,
    /// Of these operations, the number without a known baseline.
    pub within_unknown: u64,
    /// Cost that disks within their share had in flight on average.
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

impl PeriodStats {
    /// Returns whether the disks over their share completed more than their part of `all`.
    pub fn over_share_exceeds(&self, all: f64) -> bool {
        self.over_share_cost_ns as f64 > self.over_share_weight * all
    }
}
