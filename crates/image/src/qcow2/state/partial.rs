//! The partial clusters of an open image, and how many there may be (`writing/partial.rs`).
//!
//! To complete a cluster takes more operations than to copy its rest at once. So clusters are
//! partial only if that pays: many are written between two flushes, or later writes add parts.
//!
//! A cluster that could not be completed is **stuck**. Each flush tries it again. Requests do not,
//! because each attempt may take long, except requests that need this cluster.
//!
//! Invariants
//! - At most [`DEFERRED`] bytes of clusters are partial, and none becomes partial during a flush.
//! - A cluster is noted here before any other request can see its partial entry. So a flush misses
//!   no cluster with answered writes.

use std::collections::BTreeSet;
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum size of all partial clusters in bytes, above which requests complete some.
const DEFERRED: u64 = 1 << 30;
/// The same while it is unknown how fast clusters are completed.
const DEFERRED_AT_FIRST: u64 = 256 << 20;
/// A flush is to complete the clusters within about this time. So a slow device has fewer.
const FLUSH_TIME: Duration = Duration::from_millis(500);
/// Smallest number of partial clusters above which requests complete some.
const FEWEST: u64 = 64;
/// So many new clusters between two flushes may all be partial.
const MANY: u64 = 256;
/// If fewer parts than this were added for each new cluster, it did not pay: a quarter.
const ADDED: u64 = 4;
/// Number of flushes after which it is tried again.
const PAUSE: u64 = 16;

/// The partial clusters of an image, by guest cluster.
#[derive(Debug, Default)]
pub struct PartialClusters {
    clusters: Mutex<State>,
    /// Number of them, for callers without the lock.
    count: AtomicUsize,
    /// Number of tasks that complete all of them.
    completing: AtomicUsize,
    /// New clusters, and writes that added parts, since the last flush.
    new: AtomicU64,
    added: AtomicU64,
    /// Number of flushes until clusters may be partial again; 0: they may be.
    pause: AtomicU64,
    /// Number of clusters that are completed within [`FLUSH_TIME`]; 0: unknown.
    in_time: AtomicU64,
    /// Whether a write into a partial cluster has failed. Parts without data may then be no zeroes.
    spoiled: AtomicBool,
    /// See `Qcow2Options::always_partial`.
    always: bool,
}

/// A task completes all partial clusters.
pub struct Completing<'a>(&'a PartialClusters);

impl Drop for Completing<'_> {
    fn drop(&mut self) {
        self.0.completing.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct State {
    /// Partial clusters that are not stuck.
    clusters: BTreeSet<u64>,
    stuck: BTreeSet<u64>,
    /// Requests complete the clusters from here on, in the order of the disk.
    next: u64,
}

impl PartialClusters {
    pub fn new(always: bool) -> Self {
        PartialClusters { always, ..PartialClusters::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a cluster will be partial at once, or is no longer. The caller holds the cluster.
    /// While a cluster has a partial entry, it is among these.
    pub fn set(&self, cluster: u64, is_partial: bool) {
        let mut state = self.state();
        state.stuck.remove(&cluster);
        if is_partial {
            state.clusters.insert(cluster);
        } else {
            state.clusters.remove(&cluster);
        }
        self.count.store(state.clusters.len() + state.stuck.len(), Ordering::Release);
    }

    /// Notes that a cluster could not be completed.
    pub fn set_stuck(&self, cluster: u64) {
        let mut state = self.state();
        if state.clusters.remove(&cluster) {
            state.stuck.insert(cluster);
        }
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Counts a new cluster. Returns whether it may be partial: not if requests could not complete
    /// those that there are, of which each takes up to `size` bytes.
    pub fn admits(&self, size: u64) -> bool {
        let new = self.new.fetch_add(1, Ordering::Relaxed) + 1;
        let pays = self.always || self.pause.load(Ordering::Relaxed) == 0 || new > MANY;
        let has_room = self.count() as u64 <= 2 * self.most(size);
        pays && has_room && !self.is_completing()
    }

    /// Returns the number of partial clusters of `size` bytes above which requests complete some.
    pub fn most(&self, size: u64) -> u64 {
        match self.in_time.load(Ordering::Relaxed) {
            0 => DEFERRED_AT_FIRST / size,
            in_time => in_time.clamp(FEWEST, (DEFERRED / size).max(FEWEST)),
        }
    }

    /// Notes that `count` clusters were completed in `time`.
    pub fn completed(&self, count: usize, time: Duration) {
        if count as u64 >= FEWEST {
            let in_time = FLUSH_TIME.as_secs_f64() / time.as_secs_f64() * count as f64;
            self.in_time.store(in_time.max(1.0) as u64, Ordering::Relaxed);
        }
    }

    pub fn is_completing(&self) -> bool {
        self.completing.load(Ordering::Relaxed) > 0
    }

    /// Notes that a write into a partial cluster has failed.
    pub fn spoil(&self) {
        self.spoiled.store(true, Ordering::Release);
    }

    /// Returns whether a write into a partial cluster has failed.
    pub fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Acquire)
    }

    /// Counts a write that added parts to a partial cluster.
    pub fn added(&self) {
        self.added.fetch_add(1, Ordering::Relaxed);
    }

    /// Decides at a flush whether clusters may be partial until the next one.
    pub fn flushed(&self) {
        let new = self.new.swap(0, Ordering::Relaxed);
        let added = self.added.swap(0, Ordering::Relaxed);
        let pause = match self.pause.load(Ordering::Relaxed) {
            _ if new > MANY => 0,
            0 if new > 0 && added * ADDED < new => PAUSE,
            pause => pause.saturating_sub(1),
        };
        self.pause.store(pause, Ordering::Relaxed);
    }

    pub fn completing(&self) -> Completing<'_> {
        self.completing.fetch_add(1, Ordering::Relaxed);
        Completing(self)
    }

    pub fn all(&self) -> Vec<u64> {
        let state = self.state();
        state.clusters.union(&state.stuck).copied().collect()
    }

    /// Returns the clusters that are not stuck.
    pub fn not_stuck(&self) -> Vec<u64> {
        self.state().clusters.iter().copied().collect()
    }

    /// Returns the partial clusters of a range, also those that are stuck.
    pub fn within(&self, range: Range<u64>) -> Vec<u64> {
        let state = self.state();
        let sets = [&state.clusters, &state.stuck];
        sets.into_iter().flat_map(|set| set.range(range.clone())).copied().collect()
    }

    /// Returns the next clusters that a request completes.
    pub fn next(&self, most: usize) -> Vec<u64> {
        let mut state = self.state();
        let from = (Bound::Included(state.next), Bound::Unbounded);
        let mut next: Vec<u64> = state.clusters.range(from).take(most).copied().collect();
        if next.is_empty() {
            next = state.clusters.iter().take(most).copied().collect();
        }
        state.next = next.last().map_or(0, |last| last + 1);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 64 << 10;

    #[test]
    fn clusters_are_completed_in_turn() {
        let partial = PartialClusters::default();
        [7, 3, 9, 5].into_iter().for_each(|cluster| partial.set(cluster, true));
        assert_eq!(
            (partial.next(2), partial.next(2), partial.next(2)),
            (vec![3, 5], vec![7, 9], vec![3, 5])
        );
        partial.set(7, false);
        assert_eq!((partial.next(2), partial.count(), partial.all()), (vec![9], 3, vec![3, 5, 9]));
    }

    #[test]
    fn requests_leave_out_stuck_clusters_that_they_do_not_need() {
        let partial = PartialClusters::default();
        [3, 5, 7].into_iter().for_each(|cluster| partial.set(cluster, true));
        // Cluster 4 was completed meanwhile.
        [4, 5].into_iter().for_each(|cluster| partial.set_stuck(cluster));
        assert_eq!((partial.next(9), partial.not_stuck()), (vec![3, 7], vec![3, 7]));
        assert_eq!((partial.all(), partial.count()), (vec![3, 5, 7], 3), "a flush tries all");
        assert_eq!((partial.within(4..7), partial.within(8..9)), (vec![5], vec![]));
        partial.set(5, false);
        assert_eq!((partial.all(), partial.count()), (vec![3, 7], 2));
        partial.set(5, true);
        assert_eq!(partial.not_stuck(), [3, 5, 7], "it is partial again");
    }

    /// Returns how many of `new` clusters may be partial before a flush.
    fn period(partial: &PartialClusters, new: u64, added: u64) -> usize {
        let admitted = (0..new).filter(|_| partial.admits(SIZE)).count();
        (0..added).for_each(|_| partial.added());
        partial.flushed();
        admitted
    }

    #[test]
    fn clusters_are_partial_only_if_that_pays() {
        let partial = PartialClusters::default();
        // Later writes add parts.
        assert_eq!([period(&partial, 8, 8), period(&partial, 8, 8)], [8, 8]);
        // They do not, and flushes follow each other: it is tried again after some flushes.
        assert_eq!([period(&partial, 32, 0), period(&partial, 32, 0)], [32, 0]);
        let tried = (0..33).filter(|_| period(&partial, 32, 0) > 0).count();
        assert_eq!(tried, 2);
        // Many clusters before the next flush.
        assert!(period(&partial, 10 * MANY, 0) >= 9 * MANY as usize);
        assert_eq!(period(&partial, 32, 32), 32);
    }

    #[test]
    fn a_slow_device_has_fewer_partial_clusters() {
        let partial = PartialClusters::default();
        assert_eq!(partial.most(SIZE), 4096);
        partial.completed(10, Duration::from_secs(10));
        assert_eq!(partial.most(SIZE), 4096, "too few to tell");
        partial.completed(1000, Duration::from_secs(5));
        assert_eq!(partial.most(SIZE), 100);
        partial.completed(100_000, Duration::from_millis(1));
        assert_eq!(partial.most(SIZE), 16_384);
        partial.completed(100, Duration::from_secs(50));
        assert_eq!(partial.most(SIZE), 64);
        // Requests could not complete them.
        (0..129).for_each(|cluster| partial.set(cluster, true));
        assert!(!partial.admits(SIZE));
    }

    #[test]
    fn no_cluster_becomes_partial_during_a_flush() {
        let partial = PartialClusters::default();
        let completing = partial.completing();
        assert!(!partial.admits(SIZE));
        drop(completing);
        assert!(partial.admits(SIZE));
    }
}
