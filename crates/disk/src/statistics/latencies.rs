//! Latencies in buckets. All disks and reactors have the same bounds of buckets.
//!
//! Between two powers of two there are two buckets: 1, 2, 3, 4, 6, 8, 12, 16 us ... 8.4 s. A value
//! costs one count and one addition.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::carried::MAX_COUNT;

/// Number of buckets. The last one has no upper bound.
const BUCKETS: usize = 47;

/// Latencies of requests, counted in buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    buckets: [u64; BUCKETS],
    sum_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { buckets: [0; BUCKETS], sum_ns: 0 }
    }
}

/// [`Latencies`] as data for the next server. Other bounds of the buckets need another name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct LatenciesState {
    buckets: Vec<u64>,
    sum_ns: u64,
}

impl From<&Latencies> for LatenciesState {
    fn from(from: &Latencies) -> Self {
        LatenciesState { buckets: from.buckets.to_vec(), sum_ns: from.sum_ns }
    }
}

impl From<&LatenciesState> for Latencies {
    fn from(from: &LatenciesState) -> Self {
        let mut new = Latencies { sum_ns: from.sum_ns.min(MAX_COUNT), ..Latencies::default() };
        for (bucket, count) in new.buckets.iter_mut().zip(&from.buckets) {
            *bucket = (*count).min(MAX_COUNT);
        }
        new
    }
}

impl Latencies {
    #[inline]
    pub(super) fn record(&mut self, nanos: u64) {
        self.buckets[bucket(nanos)] += 1;
        self.sum_ns += nanos;
    }

    pub(super) fn merge(&mut self, other: &Latencies) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(mine, theirs)| *mine += theirs);
        self.sum_ns += other.sum_ns;
    }

    /// Returns the inclusive upper bound of each bucket except the last one, in microseconds.
    pub fn bounds_us() -> impl Iterator<Item = u64> {
        (0..BUCKETS - 1).map(bound_us)
    }

    /// Returns the number of values in each bucket. The last bucket has no upper bound.
    pub fn buckets(&self) -> &[u64] {
        &self.buckets
    }

    /// Returns the sum of all values.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }
}

#[inline]
fn bucket(nanos: u64) -> usize {
    let us = nanos.div_ceil(1000);
    if us <= 2 {
        return us.saturating_sub(1) as usize;
    }
    let exponent = 63 - (us - 1).leading_zeros();
    let is_upper_half = (us - 1) >> (exponent - 1) & 1;
    (2 * exponent as usize + is_upper_half as usize).min(BUCKETS - 1)
}

/// Returns the inclusive upper bound of a bucket.
fn bound_us(bucket: usize) -> u64 {
    match (bucket / 2, bucket % 2) {
        (0, odd) => 1 + odd as u64,
        (exponent, 0) => 3 << (exponent - 1),
        (exponent, _) => 2 << exponent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_in_the_first_bucket_whose_bound_is_not_below_it() {
        let bounds: Vec<_> = Latencies::bounds_us().collect();
        assert_eq!(bounds[..8], [1, 2, 3, 4, 6, 8, 12, 16]);
        assert_eq!(bounds[BUCKETS - 2], 1 << 23);
        for (at, bound) in bounds.iter().map(|bound| bound * 1000).enumerate() {
            assert_eq!(bucket(bound), at, "{bound} ns");
            assert_eq!(bucket(bound + 1), at + 1, "{bound} ns and one");
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BUCKETS - 1));
    }

    #[test]
    fn merged_latencies_are_the_sum() {
        let (mut a, mut b) = (Latencies::default(), Latencies::default());
        a.record(1500);
        b.record(2000);
        b.record(2001);
        a.merge(&b);
        assert_eq!(a.buckets()[..4], [0, 2, 1, 0]);
        assert_eq!(a.sum(), Duration::from_nanos(5501));
    }
}
