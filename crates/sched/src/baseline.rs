//! Baseline service times: what an operation takes while its disk has the device to itself. The
//! effect of neighbours is measured against them.
//!
//! In: service times, and whether other disks had operations in flight. Out: the expected service
//! time of an operation by type, size, and queue depth of its own disk. The expected time follows
//! service times without neighbours. Service times with neighbours only lower it, if their mean
//! over a batch is shorter, because neighbours make nothing faster.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::cost::{Calibration, Operation, OperationKind};

const KINDS: usize = 5;
/// Size classes: up to 4 KiB, up to 8 KiB, ... up to 16 MiB and more.
const SIZES: usize = 13;
/// Depth classes: 0, 1, 2-3, 4-7, 8-15, or 16 and more other operations of the same disk in flight.
const DEPTHS: usize = 6;

#[derive(Debug)]
pub(crate) struct Baseline {
    cells: Vec<Cell>,
}

#[derive(Debug, Default)]
struct Cell {
    expected: AtomicU64,
    /// Sum and number of the service times with neighbours in the present batch of [`BATCH`].
    sum: AtomicU64,
    count: AtomicU64,
}

/// Number of service times with neighbours in a batch. Only the mean of a batch lowers the expected
/// time, because a single short service time may be chance.
const BATCH: u64 = 256;

/// A class of operations that have the same expected service time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OperationClass(u16);

impl OperationClass {
    /// Returns the class of an operation. `others`: other operations of the same disk in flight.
    #[inline]
    pub fn of(kind: OperationKind, bytes: u64, others: u64) -> Self {
        let size = ((bytes.max(4096) - 1) >> 12)
            .checked_ilog2()
            .map_or(0, |log| log as usize + 1)
            .min(SIZES - 1);
        let depth = others.checked_ilog2().map_or(0, |log| log as usize + 1).min(DEPTHS - 1);
        OperationClass(((kind as usize * SIZES + size) * DEPTHS + depth) as u16)
    }
}

impl Baseline {
    /// Starts with the values of a calibration. If the measured service time of a 4 KiB operation
    /// exceeds its cost, the device works on several operations in parallel. Then the expected time
    /// of any size is its cost times that ratio, or the cost of all operations in flight if that is
    /// more.
    pub fn new(calibration: &Calibration) -> Self {
        let baseline =
            Baseline { cells: (0..KINDS * SIZES * DEPTHS).map(|_| Cell::default()).collect() };
        for (kind, known) in [
            (OperationKind::Read, calibration.baseline_read_ns),
            (OperationKind::Write, calibration.baseline_write_ns),
        ] {
            let cost = |bytes| {
                calibration.costs.of(&Operation { kind, bytes, sequential: false, requests: 1 })
            };
            for (size, depth) in
                (0..SIZES).flat_map(|size| (0..DEPTHS).map(move |depth| (size, depth)))
            {
                let (bytes, others) = (4096 << size, (1 << depth) >> 1);
                let time = u128::from(cost(bytes)) * u128::from(known) / u128::from(cost(4096));
                let time = u64::try_from(time).unwrap_or(u64::MAX).max((others + 1) * cost(bytes));
                let cell = &baseline.cells[usize::from(OperationClass::of(kind, bytes, others).0)];
                cell.expected.store(if known == 0 { 0 } else { time }, Relaxed);
            }
        }
        baseline
    }

    /// Returns the expected service time in nanoseconds. 0: unknown.
    #[inline]
    pub fn expected(&self, class: OperationClass) -> u64 {
        self.cells[usize::from(class.0)].expected.load(Relaxed)
    }

    /// Updates the expected time with a measured service time in nanoseconds. `was_alone`: no other
    /// disk had an operation in flight.
    #[inline]
    pub fn learn(&self, class: OperationClass, service: u64, was_alone: bool) {
        let cell = &self.cells[usize::from(class.0)];
        let known = cell.expected.load(Relaxed);
        // Concurrent updates may overwrite each other. That loses single samples, which does not
        // matter.
        match (known, was_alone) {
            (0, _) => cell.expected.store(service.max(1), Relaxed),
            (_, true) => cell.expected.store(known - known / 32 + service / 32, Relaxed),
            _ => {
                let sum = cell.sum.load(Relaxed) + service;
                let count = cell.count.load(Relaxed) + 1;
                let full = count >= BATCH;
                let shorter = known.saturating_sub(sum / count);
                if full && shorter > 0 {
                    let all = shorter > known / 10;
                    cell.expected.store(known - if all { shorter } else { shorter / 8 }, Relaxed);
                }
                cell.sum.store(if full { 0 } else { sum }, Relaxed);
                cell.count.store(if full { 0 } else { count }, Relaxed);
            }
        }
    }

    /// Raises the expected times slightly. Call it once a second. Without this, the expected times
    /// would stay too short on a device that has become slower. The device would then always seem
    /// to have neighbours.
    pub fn age(&self) {
        for cell in &self.cells {
            let known = cell.expected.load(Relaxed);
            cell.expected.store(known + known / 512, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Costs;

    #[test]
    fn neighbours_do_not_change_what_is_expected() {
        let baseline = Baseline::new(&Calibration::of(Costs::FLASH));
        let class = OperationClass::of(OperationKind::Read, 4096, 0);
        for _ in 0..200 {
            baseline.learn(class, 100_000, true);
        }
        assert!(baseline.expected(class).abs_diff(100_000) < 2_000);
        for _ in 0..10_000 {
            baseline.learn(class, 5_000_000, false);
        }
        assert!(baseline.expected(class).abs_diff(100_000) < 2_000);
        for _ in 0..200 {
            baseline.learn(class, 300_000, true);
        }
        assert!(baseline.expected(class).abs_diff(300_000) < 6_000);
    }

    #[test]
    fn a_first_value_measured_with_neighbours_decreases() {
        let baseline = Baseline::new(&Calibration::of(Costs::FLASH));
        let class = OperationClass::of(OperationKind::Write, 65_536, 3);
        baseline.learn(class, 5_000_000, false);
        for _ in 0..20_000 {
            baseline.learn(class, 80_000, false);
        }
        assert!(baseline.expected(class) < 90_000);
    }

    #[test]
    fn a_calibration_applies_to_other_sizes_and_depths() {
        let costs = Costs { read: 10_000, read_per_mib: 256_000, ..Costs::FLASH };
        // A read costs 11 us and takes 110 us alone, so the device works on ten at a time.
        let baseline =
            Baseline::new(&Calibration { baseline_read_ns: 110_000, ..Calibration::of(costs) });
        let expected = |bytes, others| {
            baseline.expected(OperationClass::of(OperationKind::Read, bytes, others))
        };
        assert_eq!((expected(4096, 0), expected(4096, 7)), (110_000, 110_000));
        assert_eq!(expected(4096, 16), 17 * 11_000);
        assert_eq!(expected(1 << 20, 0), 2_660_000);
        assert_eq!(baseline.expected(OperationClass::of(OperationKind::Write, 4096, 0)), 0);
    }

    #[test]
    fn sizes_and_depths_map_to_classes() {
        let of = |bytes, others| OperationClass::of(OperationKind::Read, bytes, others);
        assert_eq!(of(0, 0), of(4096, 0));
        assert_ne!(of(4097, 0), of(4096, 0));
        assert_eq!(of(4097, 0), of(8192, 0));
        assert_ne!(of(4096, 1), of(4096, 0));
        assert_eq!(of(4096, 2), of(4096, 3));
        assert_eq!(
            OperationClass::of(OperationKind::WriteZeroes, u64::MAX, u64::MAX).0 as usize,
            KINDS * SIZES * DEPTHS - 1
        );
    }
}
