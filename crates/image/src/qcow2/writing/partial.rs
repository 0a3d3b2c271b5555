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
//! Invariants
//! - The file has the entry from before the first write ("unallocated") until the cluster is
//!   complete. So a power cut leaves what a power cut before the first write leaves, and no other
//!   program ever sees a partial cluster.
//! - A partial cluster is new: no other entry names it, the host has allocated its space, and parts
//!   without data read as zeroes. So completing it needs no space.
//! - A flush completes all clusters that are partial when it begins. There are not too many
//!   (`state/partial.rs`), and none becomes partial during a flush. So a flush ends soon, also if
//!   other clients write all the time.
//! - A cluster that cannot be completed stays partial, and loses nothing. The flush fails with
//!   [`IncompleteCluster`] after it has made everything else durable. Other requests go on. A write
//!   to the cluster itself fails too if only memory has the cluster's entry, because the image has
//!   no journal (any more).
//! - The missing parts come from the layers below this image. An image is opened without them only
//!   when no cluster is partial.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use blockyard_ring::Segments;
use blockyard_ring::join;

use crate::error::ImageError;
use crate::extent::BackingLayers;

use crate::qcow2::encoding::entry::{Cluster, EntryFormat, L2Entry, PARTS};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::partial::PartialClusters;
use crate::qcow2::state::tables::Entry;

/// Structure that errors name.
const JOURNAL: &str = "journal of the image";
/// Number of clusters that are completed at a time.
const AT_A_TIME: usize = 32;
/// Number of clusters that a request completes if there are too many.
const PER_REQUEST: usize = 2;
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

impl Qcow2 {
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
        self.shared.partial.flushed();
        self.complete_listed(backing, PartialClusters::all).await
    }

    /// Like [`Qcow2::complete_all`], without the clusters that could not be completed since the
    /// last flush.
    pub(super) async fn complete_not_stuck<B: BackingLayers>(&self, backing: &B) -> io::Result<()> {
        self.complete_listed(backing, PartialClusters::not_stuck).await
    }

    /// Like [`Qcow2::complete_all`], for the partial clusters of a range.
    pub(super) async fn complete_within<B: BackingLayers>(
        &self,
        backing: &B,
        clusters: Range<u64>,
    ) -> io::Result<()> {
        self.complete_listed(backing, |partial| partial.within(clusters)).await
    }

    async fn complete_listed<B: BackingLayers>(
        &self,
        backing: &B,
        list: impl FnOnce(&PartialClusters) -> Vec<u64>,
    ) -> io::Result<()> {
        let partial = &self.shared.partial;
        if partial.count() == 0 {
            return Ok(());
        }
        let _completing = partial.completing();
        let (all, began) = (list(partial), Instant::now());
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
        completed.map_err(|source| {
            self.shared.partial.set_stuck(cluster);
            io::Error::new(source.kind(), IncompleteCluster { cluster, source })
        })
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
        let is_spoiled = self.shared.partial.is_spoiled();
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

    /// Takes over partial clusters of the journal: their host clusters are in use, and their
    /// entries are in memory. The next flush completes them.
    pub(in crate::qcow2) async fn adopt_partial(
        &self,
        partial: &[(u64, Entry)],
    ) -> Result<(), ImageError> {
        let bits = self.shape().layout.cluster_bits;
        let failed = |e| ImageError::io(JOURNAL, None, "taking over partially written clusters", e);
        let host = |entry: &Entry| {
            let decoded = L2Entry::cached(entry.word, entry.bitmap, self.shape().layout);
            decoded.ok().and_then(|entry| entry.cluster.host()).map(|host| host >> bits)
        };
        for cluster in partial.iter().filter_map(|(_, entry)| host(entry)) {
            self.shared.alloc.reach(cluster + 1);
            self.adopt_count(cluster).await.map_err(failed)?;
        }
        for (number, entry) in partial {
            self.change(*number, |_| *entry).await.map_err(failed)?;
        }
        // A write into one of them may have been in flight when the server died. So their parts
        // without data need not be zeroes.
        self.shared.partial.spoil();
        Ok(())
    }
}

/// Returns the bits of parts `first` to `last`.
pub(in crate::qcow2) fn touched(first: u64, last: u64) -> u16 {
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
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use blockyard_storage::Storage;
    use blockyard_storage::sim::{Sim, SimConfig, SimDisk, SimImage};

    use super::*;
    use crate::qcow2::{CreateOptions, Header, Qcow2Options, create};
    use crate::{Alignment, Raw};

    /// Backing layers of which not even the extents can be read.
    struct Unreadable;

    impl BackingLayers for Unreadable {
        async fn read_backing(&self, segments: Segments, _: u64) -> (Segments, io::Result<()>) {
            (segments, Err(io::ErrorKind::InvalidData.into()))
        }

        async fn backing_is_zero(&self, _: u64, _: u64) -> io::Result<bool> {
            Err(io::ErrorKind::InvalidData.into())
        }

        fn exists(&self) -> bool {
            true
        }
    }

    /// A guest may repeat a failed write for ever.
    #[test]
    fn writes_that_fail_take_no_clusters() {
        let config = SimConfig { allocates: true, ..SimConfig::new(1) };
        let disk = SimDisk::new(SimImage::zeroed(0), config);
        let test = async move {
            let raw = || Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
            create(&raw(), None, &CreateOptions::new(16 << 20)).await.unwrap();
            let header = Header::read(&raw()).await.unwrap();
            let image = Qcow2::open(header, raw(), None, &Qcow2Options::default()).await.unwrap();
            let mut lengths = Vec::new();
            for _ in 0..64 {
                let written = image.write(&Unreadable, Segments::from_bytes(&[1; 4096]), 0).await;
                assert_eq!(written.1.unwrap_err().kind(), io::ErrorKind::InvalidData);
                lengths.push(raw().storage().len().await.unwrap());
            }
            lengths.dedup();
            assert_eq!(lengths.len(), 1, "the file grows: {lengths:?}");
        };
        Sim::new(1).block_on(test).unwrap();
    }

    /// Another reactor that sees the entry may answer a write, and a flush of it.
    #[test]
    fn a_cluster_is_noted_before_its_partial_entry_is_visible() {
        const CLUSTERS: u64 = 8192;
        let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
        let test = async move {
            let raw = || Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
            create(&raw(), None, &CreateOptions::new(CLUSTERS << 16)).await.unwrap();
            let header = Header::read(&raw()).await.unwrap();
            let image = Qcow2::open(header, raw(), None, &Qcow2Options::default()).await.unwrap();
            image.own_table(0).await.unwrap();
            for cluster in 0..CLUSTERS {
                image.current_entry(cluster).await.unwrap();
            }
            let (shared, turn) = (image.shared.clone(), Arc::new(AtomicU64::new(0)));
            let other = std::thread::spawn({
                let turn = turn.clone();
                move || {
                    for cluster in 0..CLUSTERS {
                        let (number, index) = shared.shape().slice(cluster);
                        let slice = shared.tables.ready(number).unwrap();
                        turn.store(cluster + 1, Ordering::Release);
                        let mut looks = 0u32;
                        while slice.get(index) == Entry::default() {
                            looks += 1;
                            match looks.is_multiple_of(4096) {
                                true => std::thread::yield_now(),
                                false => std::hint::spin_loop(),
                            }
                        }
                        assert_eq!(shared.partial.within(cluster..cluster + 1), [cluster]);
                    }
                }
            });
            for cluster in 0..CLUSTERS {
                while turn.load(Ordering::Acquire) <= cluster && !other.is_finished() {
                    std::thread::yield_now();
                }
                image.change(cluster, |_| image.first_parts(1 << 20, 0, 0)).await.unwrap();
            }
            other.join().unwrap();
        };
        Sim::new(1).block_on(test).unwrap();
    }

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
}
