//! Computes costs from measured rates.
//!
//! In: the time of each kind of operation on a busy device. Out: the linear model of
//! [`blockyard_sched::Costs`]. What must hold: the model yields the measured times at 4 KiB and at
//! 1 MiB.

use blockyard_sched::Costs;

/// Nanoseconds that one operation of each kind takes on a busy device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// 4 KiB at random offsets.
    pub random: f64,
    /// 4 KiB, sequential.
    pub sequential: f64,
    /// 1 MiB, sequential.
    pub stream: f64,
    /// Latency of 4 KiB at random offsets, with nothing else in flight.
    pub alone: f64,
}

/// Linear cost model of reads or of writes, in nanoseconds: base cost at a random offset, base cost
/// of a sequential operation, and cost of a MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCost {
    pub random: u64,
    pub sequential: u64,
    pub per_mib: u64,
}

/// Fraction of a MiB in 4 KiB.
const PART: f64 = 1.0 / 256.0;

impl Times {
    /// Returns the linear model that yields the measured times of sequential operations of both
    /// sizes. If the kernel merges small operations, such an operation can take less time than its
    /// 4 KiB cost in the model. So a base cost is at least a hundredth of the measured time.
    pub fn linear_cost(&self) -> LinearCost {
        let per_mib = ((self.stream - self.sequential) / (1.0 - PART)).max(0.0);
        let base = |time: f64| (time - per_mib * PART).max(time / 100.0).max(1.0).round() as u64;
        LinearCost {
            random: base(self.random),
            sequential: base(self.sequential),
            per_mib: per_mib.round() as u64,
        }
    }
}

/// Rates in one round of the flush measurement: reads alone, reads while pairs of a write and a
/// flush run, and those pairs.
#[derive(Clone, Copy, Debug)]
pub struct Displaced {
    pub reads_alone: f64,
    pub reads: f64,
    pub pairs: f64,
}

impl Displaced {
    /// Returns the device time of a pair in nanoseconds: the time of the reads that it displaced.
    pub fn pair(&self) -> f64 {
        if self.pairs <= 0.0 || self.reads_alone <= 0.0 {
            return 0.0;
        }
        (1.0 - self.reads / self.reads_alone).max(0.0) * 1e9 / self.pairs
    }
}

/// Returns the cost of a flush in nanoseconds: the cost of the pair minus that of the write of
/// 16 KiB. The cost is at least that of a small write, because a flush is never free. It is at most
/// the latency of a flush, `takes`.
pub fn flush(pair: f64, write: &LinearCost, takes: f64) -> u64 {
    let written = write.random as f64 + write.per_mib as f64 / 64.0;
    let least = write.random as f64;
    (pair - written).clamp(least, takes.max(least)).round() as u64
}

/// Returns the smallest queue depth with at least 98% of the highest rate. `rates`: queue depths in
/// ascending order, each with its rate.
pub fn enough(rates: &[(u16, f64)]) -> u16 {
    let most = rates.iter().map(|r| r.1).fold(0.0, f64::max);
    rates.iter().find(|r| r.1 >= 0.98 * most).map_or(1, |r| r.0)
}

/// Returns the default cost of an operation that was not measured, scaled by the ratio of the
/// measured cost of a read to its default cost.
pub fn in_proportion(reads: &LinearCost, of: impl Fn(&Costs) -> u64) -> u64 {
    let ratio = of(&Costs::FLASH) as f64 / Costs::FLASH.read as f64;
    (reads.random as f64 * ratio).round().max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_sched::{Operation, OperationKind};

    fn operation(bytes: u64, sequential: bool) -> Operation {
        Operation { kind: OperationKind::Read, bytes, sequential, requests: 1 }
    }

    #[test]
    fn the_model_gives_back_what_was_measured() {
        let times =
            Times { random: 12_500.0, sequential: 9_000.0, stream: 1_009_000.0, alone: 200_000.0 };
        let line = times.linear_cost();
        let costs = Costs {
            read: line.random,
            read_sequential: line.sequential,
            read_per_mib: line.per_mib,
            ..Costs::FLASH
        };
        for (bytes, sequential, time) in
            [(4096, false, 12_500), (4096, true, 9_000), (1 << 20, true, 1_009_000)]
        {
            let cost = costs.of(&operation(bytes, sequential));
            assert!(cost.abs_diff(time) <= 2, "{bytes} {sequential}: {cost}, measured {time}");
        }
    }

    #[test]
    fn no_cost_is_nothing() {
        let merged =
            Times { random: 3_000.0, sequential: 2_000.0, stream: 1_000_000.0, alone: 1.0 };
        let line = merged.linear_cost();
        assert_eq!((line.random, line.sequential), (30, 20));
        let odd = Times { stream: 1_000.0, ..merged };
        assert_eq!(odd.linear_cost(), LinearCost { random: 3_000, sequential: 2_000, per_mib: 0 });
    }

    #[test]
    fn a_flush_costs_the_reads_that_it_displaces() {
        // The pairs displace a tenth of the reads. So 100 pairs take 100 ms of device time.
        let displaced = Displaced { reads_alone: 80_000.0, reads: 72_000.0, pairs: 100.0 };
        assert!((displaced.pair() - 1e6).abs() < 1.0, "{}", displaced.pair());
        let write = LinearCost { random: 10_000, sequential: 10_000, per_mib: 640_000 };
        assert_eq!(flush(displaced.pair(), &write, 2e6), 980_000);
        assert_eq!(flush(displaced.pair(), &write, 3e5), 300_000, "not more than it takes");
        assert_eq!(flush(0.0, &write, 3e5), 10_000, "never nothing");
        assert_eq!(flush(0.0, &write, 0.0), 10_000);
        assert_eq!(Displaced { reads: 90_000.0, ..displaced }.pair(), 0.0);
    }

    #[test]
    fn the_first_depth_that_is_enough() {
        assert_eq!(enough(&[(1, 5.0), (2, 9.0), (4, 99.0), (8, 100.0), (16, 98.0)]), 4);
        assert_eq!(enough(&[(1, 50.0), (2, 100.0), (4, 60.0)]), 2);
        assert_eq!(enough(&[]), 1);
    }
}
