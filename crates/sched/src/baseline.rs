//! Baseline service times: what an operation takes while its disk has the device to itself. The
//! effect of neighbours is measured against them.
//!
//! In: service times, and whether other disks had operations in flight. Out: the expected service
//! time of an operation by type, size, and queue depth of its own disk. Only service times without
//! neighbours, or in a probe, give and raise the expected time. Service times with neighbours only
//! lower it, if their mean over a batch is shorter, because neighbours make nothing faster. So the
//! order in which disks arrive does not matter: until a quiet moment shows the expected time of a
//! class, it is unknown.

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
    /// Lowest expected time of each kind and size at any depth. While none is known: the lowest
    /// mean of a batch with neighbours. 0: unknown.
    lowest: Vec<AtomicU64>,
}

#[derive(Debug, Default)]
struct Cell {
    expected: AtomicU64,
    /// Number of service times that the expected time is made of, up to [`MEMORY`].
    samples: AtomicU64,
    /// Sum and number of the service times with neighbours in the present batch of [`BATCH`].
    sum: AtomicU64,
    count: AtomicU64,
    /// The same of the last probe.
    probe_sum: AtomicU64,
    probe_count: AtomicU64,
}

/// Number of service times with neighbours in a batch. Only the mean of a batch lowers the expected
/// time, because a single short service time may be chance.
const BATCH: u64 = 256;
/// The same, if the mean is much shorter.
const SMALL_BATCH: u64 = 32;

/// The expected time is the mean of about this many recent service times.
const MEMORY: u64 = 32;
/// If the service times of a probe differ from the expected ones by this factor, the device has
/// become faster or slower.
const MUCH: f64 = 1.4;
/// The same, if the expected times are made of few service times.
const MUCH_OF_FEW: f64 = 2.0;
/// A single service time raises the expected time as if it was at most this multiple of it. A
/// device that stalls for a second is not slow from then on.
const MAX_OUTLIER: u64 = 4;

/// What a probe has shown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    /// Whether the device has become faster or slower.
    pub has_changed: bool,
    /// Factor by which the probe has changed the expected times of the operations that it measured.
    pub correction: f64,
    /// Whether these expected times are still made of few service times.
    pub is_vague: bool,
}

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

impl Cell {
    /// Adds the service times of the last probe to the few that are known.
    fn learn_from_probe(&self) {
        let (sum, count) = (self.probe_sum.load(Relaxed), self.probe_count.load(Relaxed));
        if count > 0 {
            let samples = self.samples.load(Relaxed);
            let known = self.expected.load(Relaxed) * samples;
            self.expected.store(((known + sum) / (samples + count)).max(1), Relaxed);
            self.samples.store((samples + count).min(MEMORY), Relaxed);
        }
    }
}

impl Baseline {
    /// Starts with the values of a calibration. If the measured service time of a 4 KiB operation
    /// exceeds its cost, the device works on several operations in parallel. Then the expected time
    /// of any size is its cost times that ratio, or the cost of all operations in flight if that is
    /// more.
    pub fn new(calibration: &Calibration) -> Self {
        let baseline = Baseline {
            cells: (0..KINDS * SIZES * DEPTHS).map(|_| Cell::default()).collect(),
            lowest: (0..KINDS * SIZES).map(|_| AtomicU64::default()).collect(),
        };
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
                cell.samples.store(if known == 0 { 0 } else { MEMORY }, Relaxed);
            }
        }
        baseline.update_lowest();
        baseline
    }

    /// Returns the expected service time in nanoseconds. 0: unknown.
    #[inline]
    pub fn expected(&self, class: OperationClass) -> u64 {
        self.cells[usize::from(class.0)].expected.load(Relaxed)
    }

    /// Returns the lowest expected service time of the operation's kind and size at any depth, in
    /// nanoseconds. 0: unknown.
    #[inline]
    pub fn at_least(&self, class: OperationClass) -> u64 {
        self.lowest[usize::from(class.0) / DEPTHS].load(Relaxed)
    }

    /// Forgets the service times of the last probe.
    pub fn begin_probe(&self) {
        for cell in &self.cells {
            cell.probe_sum.store(0, Relaxed);
            cell.probe_count.store(0, Relaxed);
        }
    }

    /// Records a service time that a probe measured, in nanoseconds.
    pub fn learn_in_probe(&self, class: OperationClass, service: u64) {
        let cell = &self.cells[usize::from(class.0)];
        let service = match cell.expected.load(Relaxed) {
            0 => service,
            // A device that stalls is not slow from then on.
            expected => service.min(expected.saturating_mul(MAX_OUTLIER)),
        };
        cell.probe_sum.fetch_add(service, Relaxed);
        cell.probe_count.fetch_add(1, Relaxed);
    }

    /// Adapts the expected times of all classes to the last probe. If its service times differ much
    /// from the expected ones, the device has become faster or slower. Small differences are mostly
    /// chance, because a probe is short.
    pub fn end_probe(&self) -> Shown {
        let (mut service, mut expected, mut much) = (0, 0, MUCH);
        for cell in self.cells.iter().filter(|cell| cell.expected.load(Relaxed) > 0) {
            let count = cell.probe_count.load(Relaxed);
            service += cell.probe_sum.load(Relaxed);
            expected += count * cell.expected.load(Relaxed);
            if count > 0 && cell.samples.load(Relaxed) < MEMORY {
                much = MUCH_OF_FEW;
            }
        }
        let ratio = if expected == 0 { 1.0 } else { service as f64 / expected as f64 };
        let has_changed = !(1.0 / much..=much).contains(&ratio);
        let by = if has_changed { ratio } else { 1.0 + (ratio - 1.0) / 8.0 };
        for cell in &self.cells {
            let known = cell.expected.load(Relaxed);
            let is_new = known == 0 || (!has_changed && cell.samples.load(Relaxed) < MEMORY);
            if is_new {
                cell.learn_from_probe();
            } else {
                cell.expected.store((known as f64 * by).ceil() as u64, Relaxed);
            }
            if has_changed {
                // The batch has service times of the device as it was.
                cell.sum.store(0, Relaxed);
                cell.count.store(0, Relaxed);
            }
        }
        self.update_lowest();
        let probed = || self.cells.iter().filter(|cell| cell.probe_count.load(Relaxed) > 0);
        let now = probed().map(|cell| cell.probe_count.load(Relaxed) * cell.expected.load(Relaxed));
        let correction =
            if expected == 0 { 1.0 } else { now.sum::<u64>() as f64 / expected as f64 };
        let samples = probed().map(|cell| cell.samples.load(Relaxed)).max();
        Shown { has_changed, correction, is_vague: samples.is_some_and(|count| count < MEMORY) }
    }

    /// Updates the expected time with a measured service time in nanoseconds. `was_quiet`: no disk
    /// over its share had an operation in flight.
    #[inline]
    pub fn learn(&self, class: OperationClass, service: u64, was_quiet: bool) {
        let cell = &self.cells[usize::from(class.0)];
        let known = cell.expected.load(Relaxed);
        // Concurrent updates may overwrite each other. That loses single samples, which does not
        // matter.
        match (known, was_quiet) {
            (0, true) => {
                cell.expected.store(service.max(1), Relaxed);
                cell.samples.store(1, Relaxed);
                let lowest = &self.lowest[usize::from(class.0) / DEPTHS];
                if lowest.load(Relaxed) == 0 {
                    lowest.store(service.max(1), Relaxed);
                }
            }
            (_, true) => {
                let samples = (cell.samples.load(Relaxed) + 1).min(MEMORY);
                let service = service.min(known.saturating_mul(MAX_OUTLIER));
                let expected = match samples {
                    // The usual case has no division.
                    MEMORY => known - known / MEMORY + service / MEMORY,
                    _ => known - known / samples + service / samples,
                };
                cell.expected.store(expected.max(1), Relaxed);
                cell.samples.store(samples, Relaxed);
            }
            (0, false) => {
                let sum = cell.sum.load(Relaxed) + service;
                let count = cell.count.load(Relaxed) + 1;
                let full = count >= SMALL_BATCH;
                if full {
                    let lowest = &self.lowest[usize::from(class.0) / DEPTHS];
                    let known = lowest.load(Relaxed);
                    let mean = (sum / count).max(1);
                    lowest.store(if known == 0 { mean } else { known.min(mean) }, Relaxed);
                }
                cell.sum.store(if full { 0 } else { sum }, Relaxed);
                cell.count.store(if full { 0 } else { count }, Relaxed);
            }
            _ => {
                let sum = cell.sum.load(Relaxed) + service;
                let count = cell.count.load(Relaxed) + 1;
                let shorter = known.saturating_sub(sum / count);
                let full = count >= BATCH || (count >= SMALL_BATCH && shorter > known / 4);
                if full && shorter > 0 {
                    let all = shorter > known / 10;
                    let expected = known - if all { shorter } else { shorter / 8 };
                    cell.expected.store(expected.max(1), Relaxed);
                }
                cell.sum.store(if full { 0 } else { sum }, Relaxed);
                cell.count.store(if full { 0 } else { count }, Relaxed);
            }
        }
    }

    /// Raises the expected times slightly, and updates the lowest ones. Call it once a second.
    /// Without this, the expected times would stay too short on a device that has become slower.
    /// The device would then always seem to have neighbours.
    pub fn age(&self) {
        for cell in &self.cells {
            let known = cell.expected.load(Relaxed);
            cell.expected.store(known + known / 512, Relaxed);
        }
        self.update_lowest();
    }

    fn update_lowest(&self) {
        for (lowest, cells) in self.lowest.iter().zip(self.cells.chunks(DEPTHS)) {
            let known = cells.iter().map(|cell| cell.expected.load(Relaxed)).filter(|t| *t > 0);
            if let Some(known) = known.min() {
                lowest.store(known, Relaxed);
            }
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
    fn neighbours_do_not_give_a_first_value() {
        let baseline = Baseline::new(&Calibration::of(Costs::FLASH));
        let class = OperationClass::of(OperationKind::Write, 65_536, 3);
        for _ in 0..20_000 {
            baseline.learn(class, 5_000_000, false);
        }
        assert_eq!(baseline.expected(class), 0);
        baseline.learn(class, 80_000, true);
        assert_eq!(baseline.expected(class), 80_000);
    }

    #[test]
    fn a_stall_of_the_device_changes_little() {
        let baseline = Baseline::new(&Calibration::of(Costs::FLASH));
        let class = OperationClass::of(OperationKind::Read, 4096, 0);
        (0..100).for_each(|_| baseline.learn(class, 100_000, true));
        baseline.learn(class, 2_000_000_000, true);
        assert!(baseline.expected(class) < 112_000, "{}", baseline.expected(class));
    }

    #[test]
    fn expected_times_grow_as_they_age() {
        let baseline = Baseline::new(&Calibration::of(Costs::FLASH));
        let class = OperationClass::of(OperationKind::Read, 4096, 0);
        baseline.learn(class, 512_000, true);
        baseline.age();
        assert_eq!((baseline.expected(class), baseline.at_least(class)), (513_000, 513_000));
    }

    /// Ends a probe with 8 service times in nanoseconds.
    fn probe(baseline: &Baseline, class: OperationClass, service: u64) -> Shown {
        baseline.begin_probe();
        (0..8).for_each(|_| baseline.learn_in_probe(class, service));
        baseline.end_probe()
    }

    #[test]
    fn a_probe_shows_a_change_of_the_device() {
        let baseline = Baseline::new(&Calibration::of(Costs::FLASH));
        let class = OperationClass::of(OperationKind::Read, 4096, 0);
        let probe = |service| probe(&baseline, class, service).has_changed;
        assert!(!probe(100_000), "the first one");
        assert_eq!(baseline.expected(class), 100_000);
        // Times with neighbours, of the device as it was.
        (0..200).for_each(|_| baseline.learn(class, 100_000, false));
        assert!(probe(300_000), "of few known times, too");
        (0..100).for_each(|_| baseline.learn(class, 300_000, false));
        assert_eq!(baseline.expected(class), 300_000);
        assert!(probe(100_000));
        assert_eq!(baseline.expected(class), 100_000);
        assert!(!probe(180_000), "few times differ by chance");
    }

    #[test]
    fn the_first_probes_correct_what_few_service_times_have_given() {
        let baseline = Baseline::new(&Calibration::of(Costs::FLASH));
        let class = OperationClass::of(OperationKind::Read, 4096, 0);
        let probe = |service| probe(&baseline, class, service);
        let first = probe(90_000);
        assert!(first.is_vague && first.correction == 1.0, "{first:?}");
        let second = probe(110_000);
        assert!(second.is_vague && !second.has_changed, "{second:?}");
        assert!((second.correction - 10.0 / 9.0).abs() < 0.001, "{second:?}");
        assert!(probe(100_000).is_vague);
        assert!(!probe(100_000).is_vague, "32 service times are enough");
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
