//! Partial clusters: the first write to a new cluster leaves the rest of the cluster in the backing
//! image, and a flush copies it.
//!
//! ```text
//!   first write:  allocate ─► write the touched parts ─► partial entry (in memory only)
//!   later writes: to parts with data in place; other parts are added
//!   flush:        copy the missing parts ─► complete entry ─► write-back (flush.rs)
//! ```
//!
//! So small writes that follow each other copy nothing, and a burst of small writes does not wait
//! for copies. Images with extended L2 entries need none of this, because their file has
//! subclusters.
//!
//! To complete a cluster takes more operations than to copy its rest at once. So clusters are
//! partial only if that pays: many are written between two flushes, or later writes add parts.
//!
//! Invariants
//! - The file has the entry from before the first write ("unallocated") until the cluster is
//!   complete. So a power cut leaves what a power cut before the first write leaves, and no other
//!   program ever sees a partial cluster.
//! - A partial cluster is new: no other entry names it, the host has allocated its space, and parts
//!   without data read as zeroes. So completing it needs no space.
//! - A flush completes all clusters that are partial when it begins. At most [`DEFERRED`] bytes of
//!   clusters are partial, and none becomes partial during a flush. So a flush ends soon, also if
//!   other clients write all the time.
//! - A cluster that cannot be completed stays partial, and loses nothing. The flush fails with
//!   [`IncompleteCluster`] after it has made everything else durable.
//! - The missing parts come from the layers below this image. An image is opened without them only
//!   when no cluster is partial.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_ring::Segments;
use blockyard_ring::join;
use blockyard_storage::Storage;

use crate::extent::BackingLayers;

use super::entry::{Cluster, EntryFormat, L2Entry, PARTS};
use super::shared::Shape;
use super::tables::Entry;
use super::view::Qcow2;

/// Maximum size of all partial clusters in bytes, above which requests complete some.
const DEFERRED: u64 = 1 << 30;
/// The same while it is unknown how fast clusters are completed.
const DEFERRED_AT_FIRST: u64 = 256 << 20;
/// A flush is to complete the clusters within about this time. So a slow device has fewer.
const FLUSH_TIME: Duration = Duration::from_millis(500);
/// Smallest number of partial clusters above which requests complete some.
const FEWEST: u64 = 64;
/// Number of clusters that are completed at a time.
const AT_A_TIME: usize = 32;
/// Number of clusters that a request completes if there are too many.
const PER_REQUEST: usize = 2;
/// So many new clusters between two flushes may all be partial.
const MANY: u64 = 256;
/// If fewer parts than this were added for each new cluster, it did not pay: a quarter.
const ADDED: u64 = 4;
/// Number of flushes after which it is tried again.
const PAUSE: u64 = 16;
/// Smallest size of a part in bytes. It also leaves bits 0 to 15 of an entry free for the parts,
/// because clusters are at least 16 times as large.
const SMALLEST: u64 = 4096;

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
    /// See [`super::Qcow2Options::always_partial`].
    always: bool,
}

/// The error of a partial cluster that could not be completed. The cluster is as it was.
#[derive(Debug)]
pub struct IncompleteCluster {
    /// Number of the guest cluster.
    pub cluster: u64,
    source: io::Error,
}

impl IncompleteCluster {
    /// Returns whether this is what an operation failed with.
    pub fn is_in(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<IncompleteCluster>())
    }
}

impl std::fmt::Display for IncompleteCluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let IncompleteCluster { cluster, source } = self;
        write!(f, "copying the rest of guest cluster {cluster} from the backing image: {source}")
    }
}

impl std::error::Error for IncompleteCluster {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// A task completes all partial clusters.
struct Completing<'a>(&'a PartialClusters);

impl Drop for Completing<'_> {
    fn drop(&mut self) {
        self.0.completing.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct State {
    clusters: BTreeSet<u64>,
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

    /// Notes that a cluster is partial now, or no longer.
    pub fn set(&self, cluster: u64, is_partial: bool) {
        let mut state = self.state();
        if is_partial {
            state.clusters.insert(cluster);
        } else {
            state.clusters.remove(&cluster);
        }
        self.count.store(state.clusters.len(), Ordering::Release);
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
    fn most(&self, size: u64) -> u64 {
        match self.in_time.load(Ordering::Relaxed) {
            0 => DEFERRED_AT_FIRST / size,
            in_time => in_time.clamp(FEWEST, (DEFERRED / size).max(FEWEST)),
        }
    }

    /// Notes that `count` clusters were completed in `time`.
    fn completed(&self, count: usize, time: Duration) {
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

    /// Counts a write that added parts to a partial cluster.
    pub fn added(&self) {
        self.added.fetch_add(1, Ordering::Relaxed);
    }

    /// Decides at a flush whether clusters may be partial until the next one.
    fn flushed(&self) {
        let new = self.new.swap(0, Ordering::Relaxed);
        let added = self.added.swap(0, Ordering::Relaxed);
        let pause = match self.pause.load(Ordering::Relaxed) {
            _ if new > MANY => 0,
            0 if new > 0 && added * ADDED < new => PAUSE,
            pause => pause.saturating_sub(1),
        };
        self.pause.store(pause, Ordering::Relaxed);
    }

    fn completing(&self) -> Completing<'_> {
        self.completing.fetch_add(1, Ordering::Relaxed);
        Completing(self)
    }

    fn all(&self) -> Vec<u64> {
        self.state().clusters.iter().copied().collect()
    }

    /// Returns the next clusters that a request completes.
    fn next(&self, most: usize) -> Vec<u64> {
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

impl Shape {
    /// Size of a part of a partial cluster in bytes. `None`: the image has no partial clusters.
    #[inline]
    pub fn part(&self) -> Option<u64> {
        let part = self.cluster_size() / u64::from(PARTS);
        let plain = !self.layout.extended_l2 && !self.layout.data_file;
        (plain && part >= SMALLEST).then_some(part)
    }
}

/// Returns the ranges of parts that have no data, in parts.
fn missing(parts: u16) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for part in (0..PARTS).filter(|part| parts >> part & 1 == 0) {
        match ranges.last_mut() {
            Some(last) if last.end == part => last.end += 1,
            _ => ranges.push(part..part + 1),
        }
    }
    ranges
}

impl<S: Storage> Qcow2<S> {
    /// Returns the entry with data in bytes `first` to `last` of the cluster too. `None`: the entry
    /// does not name this host cluster, or has no parts.
    pub(super) fn with_parts(&self, old: Entry, host: u64, first: u64, last: u64) -> Option<Entry> {
        let shape = self.shape();
        let entry = L2Entry::cached(old.word, old.bitmap, shape.layout).ok()?;
        match entry.cluster {
            Cluster::Subclusters { host: Some(at), .. } if at == host && entry.copied => {
                let bitmap = self.with_data(old.bitmap, first / shape.unit, last / shape.unit);
                Some(Entry { word: old.word, bitmap })
            }
            Cluster::Partial { host: at, parts } if at == host => {
                let part = shape.part()?;
                Some(partial_entry(host, parts | touched(first / part, last / part), shape.layout))
            }
            _ => None,
        }
    }

    /// Returns the entry of a new cluster with data in bytes `first` to `last` only.
    pub(super) fn first_parts(&self, host: u64, first: u64, last: u64) -> Entry {
        let shape = self.shape();
        let part = shape.part().unwrap_or(shape.cluster_size());
        partial_entry(host, touched(first / part, last / part), shape.layout)
    }

    /// Completes all clusters that are partial now. Returns the first error, after all others are
    /// completed. The caller holds no cluster, and no permit of `writing_back`.
    pub(super) async fn complete_all<B: BackingLayers>(&self, backing: &B) -> io::Result<()> {
        let partial = &self.shared.partial;
        partial.flushed();
        if partial.count() == 0 {
            return Ok(());
        }
        let _completing = partial.completing();
        let (all, began) = (partial.all(), Instant::now());
        let (count, failed) = (all.len(), RefCell::new(None));
        let each = all.into_iter().map(async |cluster| {
            if let Err(e) = self.complete_one(backing, cluster).await {
                failed.borrow_mut().get_or_insert(e);
            }
            io::Result::Ok(())
        });
        join::all(AT_A_TIME, each).await?;
        if let Some(e) = failed.into_inner() {
            return Err(e);
        }
        partial.completed(count, began.elapsed());
        Ok(())
    }

    /// Completes some clusters if too many are partial. The caller holds no cluster.
    pub(super) async fn complete_some<B: BackingLayers>(&self, backing: &B) -> io::Result<()> {
        let most = self.shared.partial.most(self.shape().cluster_size());
        if self.shared.partial.count() as u64 <= most {
            return Ok(());
        }
        for cluster in self.shared.partial.next(PER_REQUEST) {
            self.complete_one(backing, cluster).await?;
        }
        Ok(())
    }

    async fn complete_one<B: BackingLayers>(&self, backing: &B, cluster: u64) -> io::Result<()> {
        let completed = self.complete_held(backing, cluster).await;
        completed
            .map_err(|source| io::Error::new(source.kind(), IncompleteCluster { cluster, source }))
    }

    async fn complete_held<B: BackingLayers>(&self, backing: &B, cluster: u64) -> io::Result<()> {
        let _hold = self.shared.held.hold(cluster..cluster + 1).await;
        let (old, layout) = (self.current_entry(cluster).await?, self.shape().layout);
        let entry = L2Entry::cached(old.word, old.bitmap, layout).map(|entry| entry.cluster);
        let Ok(Cluster::Partial { host, parts }) = entry else {
            return Ok(());
        };
        if !backing.exists() {
            return Err(io::Error::other("it is not open"));
        }
        let copied = self.copy_missing(backing, cluster, host, parts).await;
        // Notifies writers of whole parts, which do not hold the cluster.
        self.shared.touched(cluster).fetch_add(1, Ordering::AcqRel);
        copied?;
        self.change(cluster, |_| partial_entry(host, u16::MAX, layout)).await?;
        Ok(())
    }

    /// Copies the parts without data from the backing image. Parts that read as zeroes there are in
    /// the new host cluster already.
    async fn copy_missing<B: BackingLayers>(
        &self,
        backing: &B,
        cluster: u64,
        host: u64,
        parts: u16,
    ) -> io::Result<()> {
        let Some(part) = self.shape().part() else { return Ok(()) };
        let start = cluster << self.shape().layout.cluster_bits;
        let is_spoiled = self.shared.partial.spoiled.load(Ordering::Acquire);
        let mut ranges = Vec::new();
        for range in missing(parts) {
            let (from, to) = (u64::from(range.start) * part, u64::from(range.end) * part);
            if is_spoiled || !backing.backing_is_zero(start + from, to - from).await? {
                ranges.push(from..to);
            }
        }
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return Ok(()) };
        let whole = first.start..last.end;
        let _room = self.shared.buffers.beside.acquire_many(whole.end - whole.start).await;
        let buffer = Segments::buffer((whole.end - whole.start) as usize);
        let piece = |range: &Range<u64>| {
            let (from, len) = (range.start - whole.start, range.end - range.start);
            buffer.slice(from as usize, len as usize)
        };
        // One longer read is cheaper than several. If it fails, parts that have data may be the
        // reason.
        if let (_, Err(_)) =
            backing.read_backing(buffer.slice(0, buffer.len()), start + whole.start).await
        {
            for range in &ranges {
                backing.read_backing(piece(range), start + range.start).await.1?;
            }
        }
        let writes = ranges.iter().map(async |range| {
            self.data_file().write(piece(range), host + range.start, false).await.1
        });
        let written = join::all(ranges.len(), writes).await;
        written.inspect_err(|_| self.shared.partial.spoil())
    }
}

/// Returns the bits of parts `first` to `last`.
pub(super) fn touched(first: u64, last: u64) -> u16 {
    (u16::MAX >> (u64::from(PARTS) - 1 - (last - first))) << first
}

/// Returns the entry of a cluster with data in these parts.
fn partial_entry(host: u64, parts: u16, layout: EntryFormat) -> Entry {
    let cluster = match parts {
        u16::MAX => Cluster::Standard { host },
        _ => Cluster::Partial { host, parts },
    };
    let (word, bitmap) = L2Entry { cluster, copied: true }.encode(layout);
    Entry { word, bitmap }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 64 << 10;

    #[test]
    fn missing_parts_are_the_others() {
        let missing = |parts| {
            missing(parts).into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(missing(0), [(0, 16)]);
        assert_eq!(missing(u16::MAX), []);
        assert_eq!(missing(touched(3, 4)), [(0, 3), (5, 16)]);
        assert_eq!(missing(touched(0, 0) | touched(15, 15)), [(1, 15)]);
        assert_eq!((touched(0, 15), touched(15, 15)), (u16::MAX, 1 << 15));
    }

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
