//! Counts of a load: operations, latencies, and figures of each slice of its time.

use anyhow::Result;
use hdrhistogram::Histogram;

/// Counts of the measured part.
pub struct Tally {
    /// Nanoseconds from submission until this thread sees the completion.
    pub latency: Histogram<u64>,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    pub discards: u64,
    /// Bytes read and written.
    pub bytes: u64,
    pub elapsed_ns: u64,
    /// Counts of each whole [`SLICE`] of the measured time. Empty if a number of operations limits
    /// the run.
    pub slices: Vec<Slice>,
    /// Number of completions in each [`STEP`] since the load began, warm-up included. Empty unless
    /// the caller wants them ([`Load::with_steps`](super::load::Load::with_steps)).
    pub steps: Vec<u64>,
    pub kicks: u64,
    pub signals: u64,
    /// CPU time of the load's thread in nanoseconds. 0: not measured.
    pub cpu_ns: u64,
    /// Number of requests with an error in the whole run, and the first error.
    pub errors: u64,
    pub first_error: Option<String>,
    pub verified: u64,
    pub longest_stall_ns: u64,
}

impl Tally {
    /// Creates an empty tally. It records latencies from 1 ns to 5 minutes, to three digits.
    pub fn new() -> Result<Self> {
        Ok(Tally {
            latency: Histogram::new_with_bounds(1, 300_000_000_000, 3)?,
            reads: 0,
            writes: 0,
            flushes: 0,
            discards: 0,
            bytes: 0,
            elapsed_ns: 0,
            slices: Vec::new(),
            steps: Vec::new(),
            kicks: 0,
            signals: 0,
            cpu_ns: 0,
            errors: 0,
            first_error: None,
            verified: 0,
            longest_stall_ns: 0,
        })
    }

    /// Adds another queue's tally.
    pub fn merge(&mut self, other: Tally) -> Result<()> {
        self.latency.add(&other.latency)?;
        self.reads += other.reads;
        self.writes += other.writes;
        self.flushes += other.flushes;
        self.discards += other.discards;
        self.bytes += other.bytes;
        self.elapsed_ns = self.elapsed_ns.max(other.elapsed_ns);
        self.slices.resize(self.slices.len().max(other.slices.len()), Slice::default());
        for (slice, other) in self.slices.iter_mut().zip(&other.slices) {
            slice.operations += other.operations;
            slice.bytes += other.bytes;
            slice.latency_ns += other.latency_ns;
        }
        self.steps.resize(self.steps.len().max(other.steps.len()), 0);
        self.steps.iter_mut().zip(&other.steps).for_each(|(step, other)| *step += other);
        self.kicks += other.kicks;
        self.signals += other.signals;
        self.cpu_ns += other.cpu_ns;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.verified += other.verified;
        self.longest_stall_ns = self.longest_stall_ns.max(other.longest_stall_ns);
        Ok(())
    }
}

/// Length of a slice in nanoseconds.
pub const SLICE: u64 = 100_000_000;
/// Length of a step in nanoseconds. It shows how a load begins.
pub const STEP: u64 = 10_000_000;

/// Operations that completed in one slice of the measured time. Pauses are no part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slice {
    pub operations: u64,
    pub bytes: u64,
    /// Sum of the completions' latencies in nanoseconds.
    pub latency_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_merged_tally_has_the_sums_and_the_longest_times() {
        let slice = |operations| Slice { operations, bytes: 2 * operations, latency_ns: 3 };
        let tally = |reads: u64, latency, elapsed_ns, stall, error: Option<&str>| {
            let mut tally = Tally::new().unwrap();
            (tally.reads, tally.writes, tally.bytes) = (reads, 2 * reads, 100 * reads);
            tally.latency.record_n(latency, reads).unwrap();
            (tally.elapsed_ns, tally.longest_stall_ns) = (elapsed_ns, stall);
            (tally.errors, tally.first_error) = (error.is_some().into(), error.map(String::from));
            tally
        };
        let mut sum = tally(10, 1_000, 500, 70, None);
        sum.slices = vec![slice(1)];
        sum.steps = vec![1, 2, 3];
        let mut other = tally(30, 5_000, 400, 90, Some("of the second"));
        other.slices = vec![slice(4), slice(5)];
        other.steps = vec![10];
        sum.merge(other).unwrap();
        sum.merge(tally(0, 1, 1, 1, Some("of the third"))).unwrap();
        assert_eq!((sum.reads, sum.writes, sum.bytes), (40, 80, 4000));
        assert_eq!((sum.elapsed_ns, sum.longest_stall_ns), (500, 90));
        assert_eq!((sum.errors, sum.first_error.as_deref()), (2, Some("of the second")));
        let both = Slice { operations: 5, bytes: 10, latency_ns: 6 };
        assert!(sum.slices == [both, slice(5)]);
        assert_eq!(sum.steps, [11, 2, 3]);
        // A quarter of the operations took a microsecond, and the others took five.
        let at = |q| sum.latency.value_at_quantile(q);
        assert_eq!((sum.latency.len(), at(0.25) / 10, at(0.26) / 10), (40, 100, 500));
        assert_eq!(at(0.99) / 10, 500);
    }
}
