//! Statistics of a disk on one reactor: counted without a lock, merged on read.
//!
//! Queue time (from the queue to the image) and service time (in the image and below) are separate.
//! Limits and neighbours explain the first, the device the second.

use std::time::Duration;

use blockyard_ring::WriteFigures;
use hdrhistogram::Histogram;

use crate::request::Op;

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

/// Statistics of one kind of request. The histograms are in nanoseconds.
#[derive(Clone)]
struct KindStatistics {
    requests: u64,
    merged: u64,
    errors: u64,
    bytes: u64,
    queue: Histogram<u32>,
    service: Histogram<u32>,
}

impl KindStatistics {
    fn new() -> Self {
        // Two significant digits keep values within 1%, and the histogram small enough for the CPU
        // cache.
        let histogram =
            || Histogram::new_with_bounds(1, 60_000_000_000, 2).expect("constant bounds");
        KindStatistics {
            requests: 0,
            merged: 0,
            errors: 0,
            bytes: 0,
            queue: histogram(),
            service: histogram(),
        }
    }
}

/// Statistics of one disk. Kinds of requests that never occurred take no memory.
#[derive(Clone, Default)]
pub struct Statistics {
    kinds: [Option<Box<KindStatistics>>; 5],
    /// Figures of the write policies for the files of the disk.
    pub writes: WriteFigures,
}

impl Statistics {
    /// Counts a request with its time in the queue and its service time. `bytes` are counted only
    /// if the request succeeded (`ok`).
    #[inline]
    pub fn record(&mut self, op: Op, bytes: u64, queue: Duration, service: Duration, ok: bool) {
        let kind = self.kind(op);
        kind.requests += 1;
        kind.errors += u64::from(!ok);
        if ok {
            kind.bytes += bytes;
        }
        kind.queue.saturating_record(queue.as_nanos() as u64);
        kind.service.saturating_record(service.as_nanos() as u64);
    }

    /// Counts a request that was refused at once, without times.
    pub fn record_refused(&mut self, op: Op) {
        let kind = self.kind(op);
        kind.requests += 1;
        kind.errors += 1;
    }

    /// Counts requests, also recorded one by one, that were merged into the operation of another.
    pub fn record_merged(&mut self, op: Op, requests: u64) {
        self.kind(op).merged += requests;
    }

    #[inline]
    fn kind(&mut self, op: Op) -> &mut KindStatistics {
        self.kinds[OpKind::of(op) as usize].get_or_insert_with(|| Box::new(KindStatistics::new()))
    }

    /// Adds the statistics of another reactor.
    pub fn merge(&mut self, other: &Statistics) {
        self.writes.merge(&other.writes);
        for (mine, theirs) in self.kinds.iter_mut().zip(&other.kinds) {
            let Some(theirs) = theirs else { continue };
            let mine = mine.get_or_insert_with(|| Box::new(KindStatistics::new()));
            mine.requests += theirs.requests;
            mine.merged += theirs.merged;
            mine.errors += theirs.errors;
            mine.bytes += theirs.bytes;
            // Adding histograms cannot fail, because all have the same bounds.
            let _ = mine.queue.add(&theirs.queue);
            let _ = mine.service.add(&theirs.service);
        }
    }

    /// Returns a summary of one kind of request. None if no such request was recorded.
    pub fn summary(&self, kind: OpKind) -> Option<Summary> {
        let k = self.kinds[kind as usize].as_ref()?;
        let us = |h: &Histogram<u32>, q: f64| h.value_at_quantile(q) as f64 / 1e3;
        Some(Summary {
            requests: k.requests,
            merged: k.merged,
            errors: k.errors,
            bytes: k.bytes,
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
        b.writes = WriteFigures { inline: 1, blocked: 2, left: 3, noted: 4, refused: 5, paced: 6 };
        a.merge(&b);
        assert_eq!(
            a.writes,
            WriteFigures { inline: 1, blocked: 2, left: 3, noted: 5, refused: 5, paced: 6 }
        );
        let s = a.summary(OpKind::Read).unwrap();
        assert_eq!((s.requests, s.merged, s.errors, s.bytes), (3, 7, 1, 8192));
        assert!(
            (s.queue_us[0] - 1.0).abs() < 0.05 && (s.service_us[2] - 3000.0).abs() < 40.0,
            "{s:?}"
        );
        assert!(a.summary(OpKind::Flush).is_none());
        a.record_refused(Op::Discard);
        let s = a.summary(OpKind::Discard).unwrap();
        assert_eq!((s.requests, s.errors, s.service_us), (1, 1, [0.0; 3]));
    }
}
