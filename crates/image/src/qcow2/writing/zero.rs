//! Zeroes, discards and copy-up: changes of entries instead of data where possible.
//!
//! Invariants: discarded data read as zeroes or unchanged, never as the backing file. A host
//! cluster is freed only by changing the entry that named it.

use std::io;
use std::sync::atomic::Ordering;

use blockyard_ring::Segments;

use crate::extent::{BackingLayers, Place};
use crate::sync::pace::yield_once;

use crate::qcow2::encoding::entry::{Cluster, L2Entry, SubclusterBitmap};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::tables::Entry;

/// Number of guest clusters that a long request holds at a time, and number of bytes that are
/// copied up at a time.
const HELD: u64 = 256;
const COPY: u64 = 1 << 20;
/// Maximum number of bytes that the guest freed and that wait for its next flush.
const OWED: u64 = 64 << 20;
/// Number of freed clusters that a request may leave behind before it flushes. With small clusters
/// [`OWED`] bytes are many clusters, and a long request may free many times as much.
const MANY_FREED: u64 = OWED >> 9;
/// Size of written zeroes in bytes.
const ZEROES: u64 = 1 << 20;

/// What a request does to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroRequest {
    /// Zeroes. With `unmap`, host clusters may be freed. With `fast`, fail (Unsupported) instead of
    /// writing zeroes as data.
    Zeroes { unmap: bool, fast: bool },
    /// Returns whether fast zeroes would be Unsupported; changes nothing.
    Probe { unmap: bool },
    /// Zeroes, if that is cheap.
    Discard,
}

impl ZeroRequest {
    /// Returns true if host clusters stay allocated.
    fn keeps(self) -> bool {
        matches!(
            self,
            ZeroRequest::Zeroes { unmap: false, .. } | ZeroRequest::Probe { unmap: false }
        )
    }
}

impl Qcow2 {
    /// Zeroes a range. With `unmap`, host clusters may be freed. Durable after a flush.
    pub async fn write_zeroes<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> io::Result<()> {
        self.wipe(backing, offset, len, ZeroRequest::Zeroes { unmap, fast: false }).await
    }

    /// Like [`Qcow2::write_zeroes`], but returns Unsupported, and changes nothing, if zeroes would
    /// have to be written as data. See [`Qcow2::may_zero_fast`].
    pub async fn write_zeroes_fast<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> io::Result<()> {
        self.may_zero_fast(backing, offset, len, unmap).await?;
        self.wipe(backing, offset, len, ZeroRequest::Zeroes { unmap, fast: true }).await
    }

    /// Returns Unsupported if zeroes would have to be written as data: in a unit (cluster or
    /// subcluster) with data that the range covers only partly; and if the image has no zero
    /// entries (version 2). For a raw external data file only the operation itself shows it.
    pub async fn may_zero_fast<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> io::Result<()> {
        let (end, (whole_start, whole_end)) = (offset + len, self.whole_units(offset, len));
        let some = whole_start < whole_end;
        let edges =
            if some { [offset..whole_start, whole_end..end] } else { [offset..end, end..end] };
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            if !self.is_zero(backing, edge.start, edge.end - edge.start).await? {
                return Err(io::ErrorKind::Unsupported.into());
            }
        }
        let shape = self.shape();
        if some && (shape.layout.version < 3 || shape.layout.extended_l2) {
            self.wipe_units(backing, whole_start, whole_end, ZeroRequest::Probe { unmap }).await?;
        }
        Ok(())
    }

    /// Frees host clusters of whole units (clusters or subclusters).
    pub async fn discard<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.wipe(backing, offset, len, ZeroRequest::Discard).await
    }

    /// Returns true if much freed space waits for a flush, which the guest may not send for long.
    pub fn owes_space(&self) -> bool {
        self.shared.alloc.freed() << self.shape().layout.cluster_bits >= OWED
    }

    /// Returns true if so many clusters are freed that a long request must flush before it goes on.
    pub fn has_many_freed(&self) -> bool {
        self.shared.alloc.freed() >= MANY_FREED
    }

    async fn wipe<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
        wish: ZeroRequest,
    ) -> io::Result<()> {
        let (end, (whole_start, whole_end)) = (offset + len, self.whole_units(offset, len));
        if whole_start >= whole_end {
            return self.zero_edge(backing, offset, len, wish).await;
        }
        // Start with the whole units: the host may refuse to zero them, and nothing is changed yet.
        self.wipe_units(backing, whole_start, whole_end, wish).await?;
        self.zero_edge(backing, offset, whole_start - offset, wish).await?;
        if whole_end < end {
            self.zero_edge(backing, whole_end, end - whole_end, wish).await
        } else {
            Ok(())
        }
    }

    /// Returns start and end of the whole units in a range; empty if start >= end.
    fn whole_units(&self, offset: u64, len: u64) -> (u64, u64) {
        let (unit, end) = (self.shape().unit, offset + len);
        // The last unit of the disk may be partial.
        let whole_end =
            if end == self.size() { end.next_multiple_of(unit) } else { end - end % unit };
        (offset.next_multiple_of(unit), whole_end)
    }

    /// Writes zeroes as data to part of a unit.
    async fn zero_edge<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
        wish: ZeroRequest,
    ) -> io::Result<()> {
        if len == 0 || wish == ZeroRequest::Discard {
            return Ok(());
        }
        let clusters = self.shape().clusters(offset, len);
        if self.is_zero(backing, offset, len).await? {
            let must_flush = self.shared.journal.must_flush();
            return if must_flush { self.settle(backing, clusters).await } else { Ok(()) };
        }
        let hold = self.shared.held.hold(clusters.clone()).await;
        self.zero_held(backing, offset, len).await?;
        drop(hold);
        self.relieve(backing, clusters).await
    }

    async fn wipe_units<B: BackingLayers>(
        &self,
        backing: &B,
        start: u64,
        end: u64,
        wish: ZeroRequest,
    ) -> io::Result<()> {
        let shape = *self.shape();
        let bits = shape.layout.cluster_bits;
        let mut at = start;
        while at < end {
            let first = shape.cluster(at);
            // The range has no L2 table and the image no backing image: skip the whole table.
            if self.shared.l1_entry(shape.table(first)) == 0 && !backing.exists() {
                at = ((shape.table(first) + 1) * shape.table_entries) << bits;
                continue;
            }
            let stop = end.min((first + HELD) << bits);
            let clusters = shape.clusters(at, stop - at);
            let hold = self.shared.held.hold(clusters.clone()).await;
            while at < stop {
                let cluster = shape.cluster(at);
                let here = stop.min((cluster + 1) << bits);
                self.wipe_in_cluster(backing, at, here, wish).await?;
                at = here;
            }
            drop(hold);
            self.relieve(backing, clusters).await?;
            if at < end {
                // This loop never waits if all metadata are cached, and the range may be long. So
                // yield.
                yield_once().await;
            }
        }
        Ok(())
    }

    /// Zeroes whole units of one cluster, which the caller holds.
    async fn wipe_in_cluster<B: BackingLayers>(
        &self,
        backing: &B,
        start: u64,
        end: u64,
        wish: ZeroRequest,
    ) -> io::Result<()> {
        let shape = *self.shape();
        let cluster = shape.cluster(start);
        let size = shape.cluster_size();
        let disk_end = self.size().min((cluster + 1) << shape.layout.cluster_bits);
        let old = self.current_entry(cluster).await?;
        let decoded =
            L2Entry::cached(old.word, old.bitmap, shape.layout).unwrap_or(L2Entry::UNALLOCATED);
        let (real_end, allocated) = (end.min(disk_end), decoded.cluster != Cluster::Unallocated);
        if real_end <= start
            || (!allocated && backing.backing_is_zero(start, real_end - start).await?)
        {
            return Ok(());
        }
        if shape.raw_data_file {
            return self.wipe_raw_data(start, real_end, wish).await;
        }
        let all = end - start == size;
        let Some(new) =
            self.wiped(old, decoded, (start % size, end - start), all, backing.exists(), wish)
        else {
            return match wish {
                ZeroRequest::Discard => Ok(()),
                ZeroRequest::Probe { .. } | ZeroRequest::Zeroes { fast: true, .. } => {
                    Err(io::ErrorKind::Unsupported.into())
                }
                // Do not call `write` here: it would wait for the cluster, which this caller holds.
                ZeroRequest::Zeroes { fast: false, .. } => {
                    self.zero_held(backing, start, real_end - start).await
                }
            };
        };
        if new == old || matches!(wish, ZeroRequest::Probe { .. }) {
            return Ok(());
        }
        self.own_table(shape.table(cluster)).await?;
        self.shared.touched(cluster).fetch_add(1, Ordering::AcqRel);
        self.change(cluster, |_| new).await?;
        let kept =
            L2Entry::decode(new.word, new.bitmap, shape.layout).map(|new| new.cluster.host());
        let is_compressed = matches!(decoded.cluster, Cluster::Compressed { .. });
        if is_compressed || kept != Ok(decoded.cluster.host()) {
            self.let_go(old);
        }
        if shape.layout.data_file && !wish.keeps() {
            self.data_file().discard(start, real_end - start).await?;
        }
        Ok(())
    }

    /// Returns the entry that reads as zeroes. None: the format version has no such entry.
    fn wiped(
        &self,
        old: Entry,
        decoded: L2Entry,
        (inside, len): (u64, u64),
        all: bool,
        has_backing: bool,
        wish: ZeroRequest,
    ) -> Option<Entry> {
        let shape = self.shape();
        let keep = wish.keeps() && decoded.copied && decoded.cluster.host().is_some();
        if shape.layout.extended_l2 {
            return self.wiped_subclusters(old, decoded, (inside, len), all, keep);
        }
        if shape.layout.version < 3 {
            // An entry without a cluster reads as zeroes if there is no backing image.
            return (!has_backing && !keep).then_some(Entry::default());
        }
        let host = if keep { decoded.cluster.host() } else { None };
        let zero = L2Entry { cluster: Cluster::Zero { host }, copied: keep };
        let (word, bitmap) = zero.encode(shape.layout);
        Some(Entry { word, bitmap })
    }

    fn wiped_subclusters(
        &self,
        old: Entry,
        decoded: L2Entry,
        (inside, len): (u64, u64),
        all: bool,
        keep: bool,
    ) -> Option<Entry> {
        if all {
            let word = if keep { old.word } else { 0 };
            return Some(Entry { word, bitmap: SubclusterBitmap::ALL_ZERO.0 });
        }
        if let Cluster::Compressed { .. } = decoded.cluster {
            return None;
        }
        let unit = self.shape().unit;
        let touched = u64::from((u32::MAX >> (32 - len / unit)) << (inside / unit));
        let bitmap = (old.bitmap & !touched) | touched << 32;
        // Without data in any subcluster the host cluster is freed too.
        let word = if bitmap as u32 == 0 && !keep { 0 } else { old.word };
        Some(Entry { word, bitmap })
    }

    /// Zeroes a range of a raw external data file. The file must be valid as a raw image by itself,
    /// so a changed L2 entry does not suffice.
    async fn wipe_raw_data(&self, start: u64, end: u64, wish: ZeroRequest) -> io::Result<()> {
        match (wish, !wish.keeps()) {
            // Only the operation itself shows whether the host supports it.
            (ZeroRequest::Probe { .. }, _) => Ok(()),
            (ZeroRequest::Zeroes { fast: true, .. }, unmap) => {
                self.data_file().write_zeroes_fast(start, end - start, unmap).await
            }
            (_, unmap) => self.data_file().write_zeroes(start, end - start, unmap).await,
        }
    }

    /// Writes zeroes as data in clusters that the caller holds.
    async fn zero_held<B: BackingLayers>(
        &self,
        backing: &B,
        start: u64,
        len: u64,
    ) -> io::Result<()> {
        for at in (start..start + len).step_by(ZEROES as usize) {
            let here = (start + len - at).min(ZEROES);
            let _room = self.shared.buffers.zeroes.acquire_many(here).await;
            self.write_in_hold(backing, &Segments::buffer(here as usize), at).await?;
        }
        Ok(())
    }

    /// Returns true if part of the range is absent here, so that the backing images have it.
    async fn lacks(&self, mut at: u64, stop: u64) -> io::Result<bool> {
        while at < stop {
            match self.try_lookup(at, stop - at) {
                Some(extent) if extent.place == Place::Absent => return Ok(true),
                Some(extent) => at += extent.len,
                None => self.load(at).await?,
            }
        }
        Ok(false)
    }

    /// Copies up what only the backing images have: afterwards this image has the whole range. Data
    /// written meanwhile stay.
    pub async fn populate<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let shape = *self.shape();
        let end = (offset + len).min(self.size());
        let mut at = offset - offset % shape.unit;
        while at < end {
            let stop = end.min(at + COPY);
            // Data that were copied up before need no lock.
            if !self.lacks(at, stop).await? {
                at = stop;
                continue;
            }
            let clusters = shape.clusters(at, stop - at);
            let hold = self.shared.held.hold(clusters.clone()).await;
            while at < stop {
                let Some(extent) = self.try_lookup(at, stop - at) else {
                    self.load(at).await?;
                    continue;
                };
                if extent.place == Place::Absent && !backing.backing_is_zero(at, extent.len).await?
                {
                    let _room = self.shared.buffers.copied_up.acquire_many(extent.len).await;
                    let buffer = Segments::buffer(extent.len as usize);
                    let (buffer, read) = backing.read_backing(buffer, at).await;
                    read?;
                    self.write_in_hold(backing, &buffer, at).await?;
                }
                at += extent.len;
            }
            drop(hold);
            self.relieve(backing, clusters).await?;
        }
        Ok(())
    }
}
