//! Statistics of a disk on one reactor: counted without a lock, merged on read.
//!
//! Queue time (from the queue to the image) and service time (in the image and below) are separate.
//! Limits and neighbours explain the first, the device the second.

use std::time::Duration;

use blockyard_ring::WriteFigures;
use blockyard_storage::LookupFigures;
use hdrhistogram::Histogram;

use crate::request::Op;

mod latencies;
mod state;

pub use latencies::Latencies;
pub use state::StatisticsState;

/// The kind of a request, without its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl OpKind {
    pub const ALL: [OpKind; 5] =
        [OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Discard, OpKind::WriteZeroes];

    pub fn of(op: Op) -> Self {
        match op {
            Op::Read => OpKind::Read,
            Op::Write { .. } => OpKind::Write,
            Op::Flush => OpKind::Flush,
            Op::Discard => OpKind::Discard,
            Op::WriteZeroes { .. } => OpKind::WriteZeroes,
        }
    }

    /// Returns the kind's name in text forms and statistics.
    pub fn name(self) -> &'static str {
        match self {
            OpKind::Read => "read",
            OpKind::Write => "write",
            OpKind::Flush => "flush",
            OpKind::Discard => "discard",
            OpKind::WriteZeroes => "write-zeroes",
        }
    }
}

/// Counts of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub requests: u64,
    /// Number of requests that were merged into the operation of another.
    pub merged: u64,
    pub errors: u64,
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    pub queue: Latencies,
    pub service: Latencies,
}

impl Counts {
    fn merge(&mut self, other: &Counts) {
        self.requests += other.requests;
        self.merged += other.merged;
        self.errors += other.errors;
        self.bytes += other.bytes;
        self.queue.merge(&other.queue);
        self.service.merge(&other.service);
    }
}

/// Statistics of one kind of request. The histograms are in nanoseconds. They are far larger than
/// the counts and have exact percentiles.
#[derive(Clone, Debug)]
struct KindStatistics {
    counts: Counts,
    queue: Histogram<u64>,
    service: Histogram<u64>,
}

impl KindStatistics {
    fn new() -> Self {
        // Two significant digits keep values within 1%, and the histogram small enough for the CPU
        // cache.
        let histogram =
            || Histogram::new_with_bounds(1, 60_000_000_000, 2).expect("constant bounds");
        KindStatistics { counts: Counts::default(), queue: histogram(), service: histogram() }
    }
}

/// What a disk has counted on a reactor, without percentiles: small enough to be copied often.
/// [`DiskCounts::merge`] adds the counts of several reactors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskCounts {
    /// The counts of each kind, indexed by [`OpKind`]. None: no such request was recorded.
    kinds: [Option<Box<Counts>>; 5],
    pub writes: WriteFigures,
    pub lookups: LookupFigures,
    /// Number of requests that have arrived and have no result yet.
    pub in_flight: u64,
    /// Time since the arrival of the oldest of them.
    pub oldest: Option<Duration>,
}

impl DiskCounts {
    pub fn of(&self, kind: OpKind) -> Option<&Counts> {
        self.kinds[kind as usize].as_deref()
    }

    pub fn merge(&mut self, other: DiskCounts) {
        for (mine, theirs) in self.kinds.iter_mut().zip(other.kinds) {
            match (mine, theirs) {
                (_, None) => {}
                (mine @ None, theirs) => *mine = theirs,
                (Some(mine), Some(theirs)) => mine.merge(&theirs),
            }
        }
        self.writes.merge(&other.writes);
        self.lookups.merge(&other.lookups);
        self.in_flight += other.in_flight;
        self.oldest = self.oldest.max(other.oldest);
    }
}

/// Statistics of one disk. Kinds of requests that never occurred take no memory.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    kinds: [Option<Box<KindStatistics>>; 5],
    /// Figures of the write policies for the files of the disk.
    pub writes: WriteFigures,
    /// Lookups of L2 entries.
    pub lookups: LookupFigures,
}

impl Statistics {
    /// Counts a request with its time in the queue and its service time. `bytes` are counted only
    /// if the request succeeded (`ok`).
    #[inline]
    pub fn record(&mut self, op: Op, bytes: u64, queue: Duration, service: Duration, ok: bool) {
        let KindStatistics { counts, queue: queue_times, service: service_times } = self.kind(op);
        let (queue, service) = (queue.as_nanos() as u64, service.as_nanos() as u64);
        counts.requests += 1;
        counts.errors += u64::from(!ok);
        if ok {
            counts.bytes += bytes;
        }
        counts.queue.record(queue);
        counts.service.record(service);
        queue_times.saturating_record(queue);
        service_times.saturating_record(service);
    }

    /// Counts a request that was refused at once, without times.
    pub fn record_refused(&mut self, op: Op) {
        let counts = &mut self.kind(op).counts;
        counts.requests += 1;
        counts.errors += 1;
    }

    /// Counts requests, also recorded one by one, that were merged into the operation of another.
    pub fn record_merged(&mut self, op: Op, requests: u64) {
        self.kind(op).counts.merged += requests;
    }

    #[inline]
    fn kind(&mut self, op: Op) -> &mut KindStatistics {
        self.kinds[OpKind::of(op) as usize].get_or_insert_with(|| Box::new(KindStatistics::new()))
    }

    /// Adds the statistics of another reactor.
    pub fn merge(&mut self, other: &Statistics) {
        self.writes.merge(&other.writes);
        self.lookups.merge(&other.lookups);
        for (mine, theirs) in self.kinds.iter_mut().zip(&other.kinds) {
            let Some(theirs) = theirs else { continue };
            let mine = mine.get_or_insert_with(|| Box::new(KindStatistics::new()));
            mine.counts.merge(&theirs.counts);
            // Adding histograms cannot fail, because all have the same bounds.
            let _ = mine.queue.add(&theirs.queue);
            let _ = mine.service.add(&theirs.service);
        }
    }

    /// Returns what was counted, without requests in flight.
    pub fn counts(&self) -> DiskCounts {
        let kinds = self.kinds.each_ref();
        DiskCounts {
            kinds: kinds.map(|kind| kind.as_ref().map(|kind| Box::new(kind.counts.clone()))),
            writes: self.writes,
            lookups: self.lookups,
            in_flight: 0,
            oldest: None,
        }
    }

    /// Returns a summary of one kind of request. None if no such request was recorded.
    pub fn summary(&self, kind: OpKind) -> Option<Summary> {
        let k = self.kinds[kind as usize].as_ref()?;
        let us = |h: &Histogram<u64>, q: f64| h.value_at_quantile(q) as f64 / 1e3;
        Some(Summary {
            requests: k.counts.requests,
            merged: k.counts.merged,
            errors: k.counts.errors,
            bytes: k.counts.bytes,
            queue_us: [us(&k.queue, 0.5), us(&k.queue, 0.99), us(&k.queue, 1.0)],
            service_us: [us(&k.service, 0.5), us(&k.service, 0.99), us(&k.service, 1.0)],
        })
    }
}

/// Summary of one kind of request. Times are in microseconds: [median, 99th percentile, maximum].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub requests: u64,
    /// Number of requests that were merged into the operation of another.
    pub merged: u64,
    pub errors: u64,
    pub bytes: u64,
    pub queue_us: [f64; 3],
    pub service_us: [f64; 3],
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use blockyard_ring::Latest;

    use super::*;

    #[test]
    fn merged_figures_are_the_sum() {
        let (mut a, mut b) = (Statistics::default(), Statistics::default());
        let (us, ms) = (Duration::from_micros(1), Duration::from_millis(1));
        a.record(Op::Read, 4096, us, ms, true);
        b.record(Op::Read, 4096, us, ms * 3, true);
        b.record(Op::Read, 4096, us, ms, false);
        a.record_merged(Op::Read, 3);
        b.record_merged(Op::Read, 4);
        a.writes.noted = 1;
        let last = |value| Some(Latest { at: Instant::now(), value });
        (a.writes.last_blocked, a.writes.last_paced) = (last(us), last(us));
        b.writes = WriteFigures {
            inline: 1,
            blocked: 2,
            left: 3,
            noted: 4,
            refused: 5,
            off: 7,
            paced: 6,
            last_blocked: last(ms),
            last_paced: None,
        };
        let last_paced = a.writes.last_paced;
        a.merge(&b);
        assert_eq!(a.writes, WriteFigures { noted: 5, last_paced, ..b.writes });
        let s = a.summary(OpKind::Read).unwrap();
        assert_eq!((s.requests, s.merged, s.errors, s.bytes), (3, 7, 1, 8192));
        let counts = a.counts();
        let reads = counts.of(OpKind::Read).unwrap();
        assert_eq!((reads.requests, reads.bytes, reads.service.sum()), (3, 8192, ms * 5));
        assert_eq!(reads.queue.buckets()[0], 3);
        assert!(
            (s.queue_us[0] - 1.0).abs() < 0.05 && (s.service_us[2] - 3000.0).abs() < 40.0,
            "{s:?}"
        );
        assert!(a.summary(OpKind::Flush).is_none());
        a.record_refused(Op::Discard);
        let s = a.summary(OpKind::Discard).unwrap();
        assert_eq!((s.requests, s.errors, s.service_us), (1, 1, [0.0; 3]));
    }

    /// A request that no limit delays has a queue time of 0, so one value may occur most often.
    #[test]
    fn percentiles_count_more_than_four_billion_requests_of_one_time() {
        let mut statistics = Statistics::default();
        let ms = Duration::from_millis(1);
        statistics.record(Op::Read, 4096, ms, ms, true);
        let reads = statistics.kind(Op::Read);
        reads.queue.saturating_record_n(1, 1 << 34);
        reads.queue.saturating_record_n(5_000_000, 1 << 33);
        let [median, p99, most] = statistics.summary(OpKind::Read).unwrap().queue_us;
        assert!(median < 0.1 && p99 > 4_900.0 && most > 4_900.0, "{median}, {p99}, {most}");
    }

    #[test]
    fn counts_of_reactors_are_added() {
        let mut statistics = Statistics::default();
        statistics.record(Op::Read, 4096, Duration::ZERO, Duration::from_micros(7), true);
        let (mut all, one) = (DiskCounts::default(), statistics.counts());
        let seconds = Duration::from_secs;
        all.merge(DiskCounts { in_flight: 2, oldest: Some(seconds(3)), ..one.clone() });
        all.merge(DiskCounts { in_flight: 1, oldest: Some(seconds(4)), ..one.clone() });
        all.merge(DiskCounts::default());
        assert_eq!((all.in_flight, all.oldest), (3, Some(seconds(4))));
        let reads = all.of(OpKind::Read).unwrap();
        assert_eq!((reads.requests, reads.service.buckets()[5]), (2, 2));
        assert!(all.of(OpKind::Write).is_none());
    }
}
