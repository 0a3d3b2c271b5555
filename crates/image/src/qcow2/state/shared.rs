//! State of an open qcow2 image that all reactors share.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::journal::Journal;
use crate::sync::clusters_held::ClustersHeld;
use crate::sync::epoch::Epoch;
use blockyard_ring::semaphore::Semaphore;

use super::alloc::{Allocator, Freed};
use super::buffers::Buffers;
use super::packing::Packing;
use super::partial::PartialClusters;
use super::tables::{L2SliceCache, SLICE_BYTES};
use crate::qcow2::encoding::entry::{self, EntryFormat};
use crate::qcow2::encoding::header::{Compression, Header};

/// Smallest size of a part in bytes. It also leaves bits 0 to 15 of an entry free for the parts,
/// because clusters are at least 16 times as large.
const SMALLEST: u64 = 4096;

/// Sizes derived from the header.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layout: EntryFormat,
    /// Number of entries of an L2 table; and number of entries of a slice.
    pub table_entries: u64,
    pub slice_entries: u64,
    /// Unit of allocation in bytes: a subcluster or a cluster.
    pub unit: u64,
    pub raw_data_file: bool,
}

impl Shape {
    pub fn of(header: &Header) -> Self {
        let layout = EntryFormat::of(header);
        let entry = if layout.extended_l2 { 16 } else { 8 };
        let cluster = 1u64 << layout.cluster_bits;
        let unit =
            if layout.extended_l2 { cluster / u64::from(entry::SUBCLUSTERS) } else { cluster };
        Shape {
            layout,
            table_entries: cluster / entry,
            slice_entries: cluster.min(SLICE_BYTES) / entry,
            unit,
            raw_data_file: header.raw_data_file(),
        }
    }

    /// Size of a cluster in bytes.
    #[inline]
    pub fn cluster_size(&self) -> u64 {
        1 << self.layout.cluster_bits
    }

    /// Returns the number of the guest cluster that contains `offset`.
    #[inline]
    pub fn cluster(&self, offset: u64) -> u64 {
        offset >> self.layout.cluster_bits
    }

    /// Returns the guest clusters of a range of the disk. `len` is more than 0.
    #[inline]
    pub fn clusters(&self, offset: u64, len: u64) -> Range<u64> {
        self.cluster(offset)..self.cluster(offset + len - 1) + 1
    }

    /// Returns the slice that maps a guest cluster, and the index of the cluster's entry in the
    /// slice.
    #[inline]
    pub fn slice(&self, cluster: u64) -> (u64, usize) {
        (cluster / self.slice_entries, (cluster % self.slice_entries) as usize)
    }

    /// Returns the L1 index of a guest cluster.
    #[inline]
    pub fn table(&self, cluster: u64) -> u64 {
        cluster / self.table_entries
    }

    pub fn slices_per_table(&self) -> u64 {
        self.table_entries / self.slice_entries
    }

    /// Size of a slice in bytes.
    pub fn slice_bytes(&self) -> u64 {
        self.cluster_size().min(SLICE_BYTES)
    }

    /// Size of a part of a partial cluster in bytes. `None`: the image has no partial clusters.
    #[inline]
    pub fn part(&self) -> Option<u64> {
        let part = self.cluster_size() / u64::from(entry::PARTS);
        let plain = !self.layout.extended_l2 && !self.layout.data_file;
        (plain && part >= SMALLEST).then_some(part)
    }
}

/// The active L1 table.
#[derive(Debug)]
pub struct L1 {
    pub offset: u64,
    pub entries: Vec<u64>,
    /// Indexes of the entries that differ from the file.
    pub dirty: BTreeSet<usize>,
}

/// An open image. Each reactor has a view of it ([`Qcow2`](crate::qcow2::Qcow2)).
#[derive(Debug)]
pub struct Shared {
    pub(in crate::qcow2) shape: Shape,
    pub(in crate::qcow2) size: AtomicU64,
    pub(in crate::qcow2) read_only: bool,
    /// See [`crate::qcow2::Qcow2Options::unfinished`].
    pub(in crate::qcow2) unfinished: bool,
    pub(in crate::qcow2) header: Mutex<Header>,
    pub(in crate::qcow2) l1: Mutex<L1>,
    pub(in crate::qcow2) tables: L2SliceCache,
    pub(in crate::qcow2) alloc: Allocator,
    pub(in crate::qcow2) held: ClustersHeld,
    pub(in crate::qcow2) epoch: Arc<Epoch>,
    /// Number of times that clusters were completed or zeroed by the holder of their lock; several
    /// clusters share a counter.
    pub(in crate::qcow2) touched: [AtomicU64; 64],
    /// Each admits one task at a time: to reserve clusters, to allocate L2 tables, and to write
    /// back metadata.
    pub(in crate::qcow2) reserving: Semaphore,
    pub(in crate::qcow2) new_tables: Semaphore,
    pub(in crate::qcow2) writing_back: Semaphore,
    /// Admits one sync of the files at a time, because the kernel reports a failed write-back to
    /// only one of concurrent syncs.
    pub(in crate::qcow2) syncing: Semaphore,
    /// Admits one change of the header at a time: its copy, the write, and the new one in memory.
    pub(in crate::qcow2) changing_header: Semaphore,
    pub(in crate::qcow2) journal: Arc<Journal>,
    /// Error of the first failed sync, or of a failed write of metadata that the image depends on.
    pub(in crate::qcow2) lost: OnceLock<(io::ErrorKind, String)>,
    /// Counter that advances when a host offset of compressed data may hold other data.
    pub(in crate::qcow2) recompressed: AtomicU64,
    pub(in crate::qcow2) compression: Compression,
    /// Clusters to release when the requests that entered before the last epoch change have left.
    pub(in crate::qcow2) leaving: Mutex<Vec<Freed>>,
    pub(in crate::qcow2) packing: Packing,
    pub(in crate::qcow2) partial: PartialClusters,
    pub(in crate::qcow2) buffers: Buffers,
}

impl Shared {
    /// Returns the size of the guest's disk in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Returns a copy of the header.
    pub fn header(&self) -> Header {
        lock(&self.header).clone()
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the bytes of cached L2 tables, and their limit (which dirty tables may exceed).
    pub fn cache_bytes(&self) -> (u64, u64) {
        let slice = self.shape.slice_bytes();
        (self.tables.len() as u64 * slice, self.tables.limit() as u64 * slice)
    }

    /// Returns the bytes of all L2 tables of the disk.
    pub fn table_bytes(&self) -> u64 {
        let slices =
            self.size().div_ceil(self.shape.cluster_size()).div_ceil(self.shape.slice_entries);
        slices.saturating_mul(self.shape.slice_bytes())
    }

    /// Limits the cached L2 tables to `bytes` from now on. Views that are made later size their own
    /// caches by it.
    pub(crate) fn limit_cache(&self, bytes: u64) {
        self.tables.set_limit((bytes / self.shape.slice_bytes()) as usize);
    }

    /// Returns whether metadata in memory differ from the file, or the image has a journal.
    pub(crate) fn has_changes(&self) -> bool {
        self.has_unwritten() || self.alloc.has_some() || self.journal.has_log()
    }

    /// Returns whether metadata in memory differ from the file.
    pub(crate) fn has_unwritten(&self) -> bool {
        self.tables.dirty() > 0
            || !lock(&self.l1).dirty.is_empty()
            || self.alloc.has_changed_counts()
    }

    /// Returns the reason if earlier writes may be lost: a failed sync, or a failed write of
    /// metadata that the image depends on.
    pub fn lost(&self) -> Option<io::Error> {
        self.lost.get().map(|(kind, what)| {
            io::Error::new(*kind, format!("an earlier operation on the image failed: {what}"))
        })
    }

    /// Records a failure after which the file's contents are unknown; all later writes and flushes
    /// fail.
    pub(in crate::qcow2) fn lose(&self, e: &io::Error) {
        drop(self.lost.set((e.kind(), e.to_string())));
    }

    pub(in crate::qcow2) fn touched(&self, cluster: u64) -> &AtomicU64 {
        &self.touched[cluster as usize % self.touched.len()]
    }

    /// Returns the L1 entry with this index.
    pub(in crate::qcow2) fn l1_entry(&self, index: u64) -> u64 {
        lock(&self.l1).entries.get(index as usize).copied().unwrap_or(0)
    }
}

/// Locks a mutex, even if a thread panicked while it held the mutex.
pub(in crate::qcow2) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
