//! One reactor's view of an open image: lookup and reading.
//!
//! In: ranges of the guest's disk. Out: extents, and bytes from the image's file or its external
//! data file. Invariant: an entry is checked before it is visible ([`Qcow2::checked`]), so a lookup
//! can trust it.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockyard_ring::{Handle, Segments};

use blockyard_storage::LookupFigures;

use crate::error::ImageError;
use crate::extent::{Extent, Place};
use crate::raw::Raw;
use crate::sync::epoch::Epoch;

use super::decompressed::Decompressed;
use crate::qcow2::encoding::bytes;
use crate::qcow2::encoding::entry::{Cluster, L1Entry, L2Entry};
use crate::qcow2::encoding::header::MAX_OFFSET;
use crate::qcow2::state::shared::{Shape, Shared, lock};
use crate::qcow2::state::tables::{Entry, LocalSlices, Slice, SliceLookup};

/// Number of bytes of an L2 table that are read at once when requests are sequential.
const READ_AHEAD: u64 = 64 << 10;

/// One reactor's view of an image. All views of an image have the same `Shared`.
pub struct Qcow2 {
    pub(in crate::qcow2) shared: Arc<Shared>,
    pub(in crate::qcow2) file: Raw,
    /// The external data file.
    pub(in crate::qcow2) data: Option<Raw>,
    lines: LocalSlices,
    /// Number of slices that this view had to load.
    misses: Cell<u64>,
    pub(super) decompressed: Box<Decompressed>,
}

impl Qcow2 {
    /// Makes the view of another reactor.
    pub fn view(shared: Arc<Shared>, file: Raw, data: Option<Raw>) -> Self {
        let slices = shared
            .size()
            .div_ceil(shared.shape.cluster_size())
            .div_ceil(shared.shape.slice_entries);
        let lines = LocalSlices::new(slices, shared.tables.limit());
        let (file, data) = (file.in_whole_blocks(), data.map(Raw::in_whole_blocks));
        let (misses, decompressed) = (Cell::new(0), Box::new(Decompressed::new(None)));
        Qcow2 { shared, file, data, lines, misses, decompressed }
    }

    /// Lets threads of `reactor` decompress large clusters.
    pub fn computing_on(self, reactor: &Handle) -> Self {
        let decompressed = Box::new(Decompressed::new(Some(reactor.clone())));
        Qcow2 { decompressed, ..self }
    }

    /// Returns how this view's lookups of L2 entries ended.
    pub fn lookups(&self) -> LookupFigures {
        LookupFigures { hits: self.lines.hits(), misses: self.misses.get() }
    }

    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Size of the guest's disk in bytes.
    pub fn size(&self) -> u64 {
        self.shared.size()
    }

    /// Returns the epoch of the image's requests.
    pub(crate) fn epoch(&self) -> Arc<Epoch> {
        self.shared.epoch.clone()
    }

    #[inline]
    pub(in crate::qcow2) fn shape(&self) -> &Shape {
        &self.shared.shape
    }

    pub(crate) fn file(&self) -> &Raw {
        &self.file
    }

    /// Returns the file that holds guest data.
    #[inline]
    pub(crate) fn data_file(&self) -> &Raw {
        self.data.as_ref().unwrap_or(&self.file)
    }

    /// Returns the entry of a guest cluster; None: its slice is not cached.
    #[inline]
    pub(in crate::qcow2) fn entry(&self, cluster: u64) -> Option<Entry> {
        let (number, index) = self.shape().slice(cluster);
        self.lines.with(&self.shared.tables, number, |slice| slice.get(index))
    }

    /// Looks up the bytes at `offset`: an extent of up to `len` bytes. None: call [`Qcow2::load`]
    /// first.
    #[inline]
    pub fn try_lookup(&self, offset: u64, len: u64) -> Option<Extent> {
        let shape = self.shape();
        let (number, mut index) = shape.slice(shape.cluster(offset));
        self.lines.with(&self.shared.tables, number, |slice| {
            let mut extent = self.extent(slice.get(index), offset, len);
            // Merge following entries that continue this extent.
            while extent.len < len && index + 1 < slice.entries() {
                let next = offset + extent.len;
                if next & (shape.cluster_size() - 1) == 0 {
                    index += 1;
                }
                let more = self.extent(slice.get(index), next, len - extent.len);
                if !extent.goes_on(&more) {
                    break;
                }
                extent.len += more.len;
            }
            extent
        })
    }

    /// Returns the number of bytes at `offset`, at most `len`, without an L2 table: they are
    /// absent. None: `offset` has a table. Reads only L1 entries in memory.
    pub(crate) fn without_tables(&self, offset: u64, len: u64) -> Option<u64> {
        let shape = self.shape();
        let reach = shape.table_entries << shape.layout.cluster_bits;
        let (first, end) = (offset / reach, (offset + len).div_ceil(reach));
        let l1 = lock(&self.shared.l1);
        let entries = l1.entries.get(first as usize..)?.iter().take((end - first) as usize);
        let empty = entries.take_while(|word| **word == 0).count() as u64;
        (empty > 0).then(|| len.min((first + empty) * reach - offset))
    }

    /// Returns the host offset of guest offset `offset`, in an allocated or preallocated cluster.
    /// None: no host cluster, or the L2 entry is not cached.
    pub(crate) fn kept(&self, offset: u64) -> Option<u64> {
        let shape = self.shape();
        let entry = self.entry(shape.cluster(offset))?;
        let decoded = L2Entry::decode(entry.word, entry.bitmap, shape.layout).ok()?;
        decoded.cluster.host().map(|host| host + (offset & (shape.cluster_size() - 1)))
    }

    /// Returns the extent at `offset`, inside one cluster.
    #[inline]
    fn extent(&self, entry: Entry, offset: u64, len: u64) -> Extent {
        let shape = self.shape();
        let inside = offset & (shape.cluster_size() - 1);
        let len = len.min(shape.cluster_size() - inside);
        // Entries were checked when their slice was loaded; later ones were written by this
        // program.
        let cluster = L2Entry::cached(entry.word, entry.bitmap, shape.layout)
            .map_or(Cluster::Unallocated, |e| e.cluster);
        let place = match cluster {
            Cluster::Unallocated => Place::Absent,
            Cluster::Zero { .. } => Place::Zero,
            Cluster::Standard { host } => Place::Data(host + inside),
            Cluster::Compressed { .. } => Place::Compressed(entry.word),
            Cluster::Subclusters { host, bitmap } => {
                return self.subclusters(host, bitmap.0, inside, len);
            }
            Cluster::Partial { host, parts } => return self.parts(host, parts, inside, len),
        };
        Extent { len, place }
    }

    /// Returns the extent of equal subclusters.
    #[inline]
    fn subclusters(&self, host: Option<u64>, bitmap: u64, inside: u64, len: u64) -> Extent {
        Self::units(self.shape().unit, host, bitmap, inside, len)
    }

    /// Returns the extent of equal parts of a partial cluster.
    fn parts(&self, host: u64, parts: u16, inside: u64, len: u64) -> Extent {
        let part = self.shape().part().unwrap_or(self.shape().cluster_size());
        Self::units(part, Some(host), u64::from(parts), inside, len)
    }

    /// Returns the extent of equal units. The bitmap is that of subclusters.
    #[inline]
    fn units(unit: u64, host: Option<u64>, bitmap: u64, inside: u64, len: u64) -> Extent {
        let first = inside / unit;
        let last = (inside + len - 1) / unit;
        let kind = |i: u64| (bitmap >> i) & 1 | (bitmap >> (32 + i) & 1) << 1;
        let here = kind(first);
        let end = (first + 1..=last).find(|&i| kind(i) != here).map_or(inside + len, |i| i * unit);
        let place = match (here, host) {
            (1, Some(host)) => Place::Data(host + inside),
            (2, _) => Place::Zero,
            _ => Place::Absent,
        };
        Extent { len: end - inside, place }
    }

    /// Loads the L2 slice of `offset`, and the following ones if requests are sequential.
    pub async fn load(&self, offset: u64) -> io::Result<()> {
        let shape = *self.shape();
        let (number, _) = shape.slice(shape.cluster(offset));
        if let SliceLookup::InMemory = self.shared.tables.find(number).await {
            return Ok(());
        }
        self.misses.set(self.misses.get() + 1);
        let duty = LoadGuard { shared: &self.shared, number: Some(number) };
        self.lines.tidy();
        let per_table = shape.slices_per_table();
        let (index, in_table) = (number / per_table, number % per_table);
        let l1 = L1Entry::decode(self.shared.l1_entry(index), shape.layout).map_err(|what| {
            ImageError::invalid(format!("qcow2 L1 table entry {index}"), None, what)
        })?;
        let bytes = shape.slice_bytes();
        let Some(table) = l1.table else {
            let words = bytes / 8;
            duty.done(Slice::new(number, (0..words).map(|_| 0), shape.layout.extended_l2));
            return Ok(());
        };
        let sequential = number > 0 && self.shared.tables.ready(number - 1).is_some();
        let together =
            if sequential { (READ_AHEAD / bytes).max(1).min(per_table - in_table) } else { 1 };
        let seen = self.shared.tables.evictions();
        let at = table + in_table * bytes;
        let read = bytes::read(&self.file, at, (together * bytes) as usize).await;
        let read =
            read.map_err(|e| ImageError::io(format!("qcow2 L2 table {index}"), at, "reading", e))?;
        for (i, piece) in read.chunks(bytes as usize).enumerate().rev() {
            let place = at + i as u64 * bytes;
            match (self.checked(number + i as u64, piece, place), i) {
                (Ok(slice), 0) => {
                    duty.done(slice);
                    return Ok(());
                }
                (Ok(slice), _) => self.shared.tables.read_along(slice, seen),
                // An error in a slice that was read ahead is reported when a request needs that
                // slice.
                (Err(e), 0) => return Err(e.into()),
                (Err(_), _) => {}
            }
        }
        Ok(())
    }

    /// Decodes a slice and checks every entry: aligned, no reserved bits, inside the format's
    /// limits.
    fn checked(&self, number: u64, bytes: &[u8], place: u64) -> Result<Slice, ImageError> {
        let shape = self.shape();
        let words: Vec<u64> = bytes.chunks_exact(8).map(|b| bytes::be64(b, 0)).collect();
        let slice = Slice::new(number, words.into_iter(), shape.layout.extended_l2);
        for index in 0..slice.entries() {
            let Entry { word, bitmap } = slice.get(index);
            if word | bitmap == 0 {
                continue;
            }
            let cluster = number * shape.slice_entries + index as u64;
            let wrong = |what: String| {
                let at = place + (index as u64) * if shape.layout.extended_l2 { 16 } else { 8 };
                ImageError::invalid(
                    "qcow2 L2 entry",
                    at,
                    format!("(guest cluster {cluster}, {word:#x}) {what}"),
                )
            };
            let entry =
                L2Entry::decode(word, bitmap, shape.layout).map_err(|what| wrong(what.into()))?;
            let host = match entry.cluster {
                Cluster::Compressed { host, len } => Some(host + len),
                other => other.host(),
            };
            if host.is_some_and(|host| host >= MAX_OFFSET) {
                return Err(wrong("lies beyond 2^56 bytes".into()));
            }
            if shape.layout.data_file
                && entry.cluster.host().is_some_and(|h| h != cluster << shape.layout.cluster_bits)
            {
                return Err(wrong(
                    "is not the guest's own offset, as in an external data file it must be".into(),
                ));
            }
        }
        Ok(slice)
    }

    /// Reads data that a lookup found in this image.
    #[inline]
    pub async fn read_data(&self, segments: Segments, host: u64) -> (Segments, io::Result<()>) {
        self.data_file().read(segments, host).await
    }

    /// Loads as many L2 tables as fit into the cache, from the start of the disk.
    pub async fn prime(&self) -> io::Result<()> {
        let shape = *self.shape();
        let slice = shape.slice_entries << shape.layout.cluster_bits;
        let most = self.shared.tables.limit() as u64;
        let (mut offset, mut loaded) = (0, 0);
        while offset < self.size() && loaded < most {
            let cluster = shape.cluster(offset);
            if self.shared.l1_entry(shape.table(cluster)) == 0 {
                offset =
                    ((shape.table(cluster) + 1) * shape.table_entries) << shape.layout.cluster_bits;
                continue;
            }
            if self.try_lookup(offset, 1).is_none() {
                self.load(offset).await?;
            }
            (offset, loaded) = (offset + slice, loaded + 1);
        }
        Ok(())
    }

    /// Returns a counter that changes when cached decompressed clusters may be outdated.
    #[inline]
    pub(in crate::qcow2) fn recompressed(&self) -> u64 {
        self.shared.recompressed.load(Ordering::Acquire)
    }
}

/// Responsibility for loading a slice. On drop without a result, another task takes over.
struct LoadGuard<'a> {
    shared: &'a Shared,
    number: Option<u64>,
}

impl LoadGuard<'_> {
    fn done(mut self, slice: Slice) {
        self.number = None;
        self.shared.tables.loaded(slice);
    }
}

impl Drop for LoadGuard<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.shared.tables.gave_up(number);
        }
    }
}
