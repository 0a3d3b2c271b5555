//! Writes: in place if the image owns the cluster exclusively. If it does not, to new clusters that
//! the L2 entries name afterwards.
//!
//! ```text
//!   in place ─► one write
//!   else:    hold the guest clusters ─► look up again ─► allocate host clusters
//!                  ─► write [copied] data [copied] ─► change the entries
//! ```
//!
//! Invariants: data are written before an entry names them. Guest clusters are held while they are
//! allocated or copied, so that two requests never allocate for the same guest cluster. A write in
//! place never touches a shared cluster.

use std::io;
use std::sync::atomic::Ordering;

use blockyard_ring::Segments;

use crate::extent::{BackingLayers, Place};
use blockyard_ring::join;

use super::partial;
use crate::qcow2::encoding::entry::{COPIED, Cluster, L2Entry, OFFSET_MASK};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::alloc::Run;
use crate::qcow2::state::tables::Entry;

/// Maximum size of guest data that are copied into a bounce buffer, in bytes. The buffer adds the
/// copied-up edges, so that one write suffices.
const COPIED_TOGETHER: usize = 256 << 10;
/// For data shorter than this, one read covers both edges and what lies between.
const READ_ALONG: usize = 32 << 10;
/// Maximum size of the new clusters that one request writes at a time, in bytes.
const FILLED_AT_ONCE: u64 = 2 << 20;
/// Number of pieces of one request in flight.
const PIECES: usize = 8;

/// What a write must do at some offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteStep {
    /// `len` bytes are written to the file directly.
    InPlace { len: u64, host: u64 },
    /// One cluster, allocated and exclusive, in which units of `unit` bytes still lack data: fill
    /// in what the write does not cover.
    Complete { len: u64, host: u64, unit: u64 },
    /// Clusters (of one L2 table) that need host clusters.
    Fill { len: u64, rest: Rest },
    /// The L2 entries are not cached.
    Load,
}

/// Where the bytes of new clusters come from that a write does not cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// From the old clusters, completely. They are shared, or compressed.
    Old,
    /// They read as zeroes. Nothing is copied into subclusters that the write does not touch.
    Zeroes,
    /// From the backing image. They may be copied later (partial.rs).
    Backing,
}

impl Qcow2 {
    /// Writes all of `segments`. Durable after a flush.
    #[inline]
    pub async fn write<B: BackingLayers>(
        &self,
        backing: &B,
        segments: Segments,
        offset: u64,
    ) -> (Segments, io::Result<()>) {
        let len = segments.len() as u64;
        match self.step(offset, len) {
            WriteStep::InPlace { len: all, host } if all == len => {
                let (segments, mut result) = self.data_file().write(segments, host, false).await;
                if result.is_ok() && self.shared.journal.must_flush() {
                    let clusters = self.shape().clusters(offset, len);
                    result = Box::pin(self.settle(backing, clusters)).await;
                }
                (segments, result)
            }
            _ => {
                let result = Box::pin(self.write_in_steps(backing, &segments, offset)).await;
                (segments, result)
            }
        }
    }

    async fn write_in_steps<B: BackingLayers>(
        &self,
        backing: &B,
        segments: &Segments,
        offset: u64,
    ) -> io::Result<()> {
        let (mut at, end) = (offset, offset + segments.len() as u64);
        let mut pieces = Vec::new();
        while at < end {
            match self.step(at, end - at) {
                WriteStep::Load => self.load(at).await?,
                step @ (WriteStep::InPlace { len, .. }
                | WriteStep::Complete { len, .. }
                | WriteStep::Fill { len, .. }) => {
                    pieces.push((at, len, step));
                    at += len;
                }
            }
        }
        let work = pieces.into_iter().map(async |(at, len, step)| {
            let piece = segments.slice((at - offset) as usize, len as usize);
            match step {
                WriteStep::InPlace { host, .. } => {
                    self.data_file().write(piece, host, false).await.1
                }
                WriteStep::Complete { host, unit, .. } if self.is_whole_units(at, len, unit) => {
                    self.write_units(backing, piece, at, host).await
                }
                _ => self.write_held(backing, piece, at).await,
            }
        });
        join::all(PIECES, work).await?;
        self.relieve(backing, self.shape().clusters(offset, segments.len() as u64)).await
    }

    /// Decides what to do at `offset`, and for how many bytes.
    #[inline]
    pub(super) fn step(&self, offset: u64, len: u64) -> WriteStep {
        let shape = self.shape();
        let first = shape.cluster(offset);
        let Some(entry) = self.entry(first) else { return WriteStep::Load };
        let inside = offset & (shape.cluster_size() - 1);
        let here = len.min(shape.cluster_size() - inside);
        let mut step = self.step_in_cluster(entry, inside, here);
        let last = shape.cluster(offset + len - 1);
        // Handle following equal clusters together.
        for cluster in first + 1..=last {
            let Some(entry) = self.entry(cluster) else { break };
            let here =
                (offset + len - (cluster << shape.layout.cluster_bits)).min(shape.cluster_size());
            match (&mut step, self.step_in_cluster(entry, 0, here)) {
                (
                    WriteStep::InPlace { len, host },
                    WriteStep::InPlace { len: more, host: next },
                ) if *host + *len == next => *len += more,
                (WriteStep::Fill { len, rest }, WriteStep::Fill { len: more, rest: next })
                    if *rest == next
                        && *len < FILLED_AT_ONCE
                        && cluster % shape.table_entries != 0 =>
                {
                    *len += more;
                }
                _ => break,
            }
        }
        step
    }

    #[inline]
    fn step_in_cluster(&self, entry: Entry, inside: u64, len: u64) -> WriteStep {
        let shape = self.shape();
        let decoded =
            L2Entry::cached(entry.word, entry.bitmap, shape.layout).unwrap_or(L2Entry::UNALLOCATED);
        let mine = decoded.copied;
        match decoded.cluster {
            Cluster::Standard { host } if mine => WriteStep::InPlace { len, host: host + inside },
            Cluster::Zero { host: Some(host) } if mine => {
                WriteStep::Complete { len, host, unit: shape.unit }
            }
            Cluster::Subclusters { host: Some(host), bitmap } if mine => {
                let (first, last) = (inside / shape.unit, (inside + len - 1) / shape.unit);
                let touched = (u32::MAX >> (31 - (last - first))) << first;
                if bitmap.data() & touched == touched {
                    WriteStep::InPlace { len, host: host + inside }
                } else {
                    WriteStep::Complete { len, host, unit: shape.unit }
                }
            }
            Cluster::Partial { host, parts } => {
                let part = shape.part().unwrap_or(shape.unit);
                let touched = partial::touched(inside / part, (inside + len - 1) / part);
                if parts & touched == touched {
                    WriteStep::InPlace { len, host: host + inside }
                } else {
                    WriteStep::Complete { len, host, unit: part }
                }
            }
            Cluster::Standard { .. }
            | Cluster::Compressed { .. }
            | Cluster::Subclusters { host: Some(_), .. } => {
                WriteStep::Fill { len, rest: Rest::Old }
            }
            Cluster::Zero { .. } => WriteStep::Fill { len, rest: Rest::Zeroes },
            Cluster::Unallocated | Cluster::Subclusters { host: None, .. } => {
                WriteStep::Fill { len, rest: Rest::Backing }
            }
        }
    }

    /// Writes to clusters that may need an allocation: holds the clusters, and looks them up again.
    async fn write_held<B: BackingLayers>(
        &self,
        backing: &B,
        segments: Segments,
        offset: u64,
    ) -> io::Result<()> {
        let shape = self.shape();
        let last = shape.cluster(offset + segments.len() as u64 - 1);
        let hold = self.shared.held.hold(shape.cluster(offset)..last + 1).await;
        // Another request may have allocated the cluster meanwhile. Then this write takes no lock.
        let len = segments.len() as u64;
        match self.step(offset, len) {
            WriteStep::InPlace { len: all, host } if all == len => {
                drop(hold);
                self.data_file().write(segments, host, false).await.1
            }
            WriteStep::Complete { len: all, host, unit }
                if all == len && self.is_whole_units(offset, len, unit) =>
            {
                drop(hold);
                self.write_units(backing, segments, offset, host).await
            }
            _ => self.write_in_hold(backing, &segments, offset).await,
        }
    }

    /// Like [`Qcow2::write_held`], for a caller that holds the clusters.
    pub(super) async fn write_in_hold<B: BackingLayers>(
        &self,
        backing: &B,
        segments: &Segments,
        offset: u64,
    ) -> io::Result<()> {
        let (mut at, end) = (offset, offset + segments.len() as u64);
        while at < end {
            let step = self.step(at, end - at);
            let piece = |len: u64| segments.slice((at - offset) as usize, len as usize);
            at += match step {
                WriteStep::Load => {
                    self.load(at).await?;
                    0
                }
                WriteStep::InPlace { len, host } => {
                    self.data_file().write(piece(len), host, false).await.1?;
                    len
                }
                WriteStep::Complete { len, host, unit } => {
                    self.complete(backing, piece(len), at, host, unit).await?;
                    len
                }
                WriteStep::Fill { len, rest } => self.fill(backing, &piece(len), at, rest).await?,
            };
        }
        Ok(())
    }

    /// Returns whether a range is a number of whole subclusters, or of parts of a partial cluster.
    fn is_whole_units(&self, offset: u64, len: u64, unit: u64) -> bool {
        unit < self.shape().cluster_size() && (offset | len) & (unit - 1) == 0
    }

    /// Writes whole subclusters, or parts, of an exclusive host cluster. Nothing is copied, so it
    /// takes no lock. If another request meanwhile frees the cluster, zeroes it, or fills other
    /// units, the data are written again. So neither the data nor the other request's zeroes are
    /// lost.
    async fn write_units<B: BackingLayers>(
        &self,
        backing: &B,
        segments: Segments,
        offset: u64,
        host: u64,
    ) -> io::Result<()> {
        let shape = self.shape();
        let (cluster, inside) = (shape.cluster(offset), offset & (shape.cluster_size() - 1));
        let len = segments.len() as u64;
        let touched = self.shared.touched(cluster);
        let before = touched.load(Ordering::Acquire);
        let (segments, written) = self.data_file().write(segments, host + inside, false).await;
        written.inspect_err(|_| self.shared.partial.spoil())?;
        let _hold = self.shared.held.hold(cluster..cluster + 1).await;
        let with = |old| self.with_parts(old, host, inside, inside + len - 1);
        let alone = touched.load(Ordering::Acquire) == before;
        if alone && with(self.current_entry(cluster).await?).is_some() {
            self.own_table(shape.table(cluster)).await?;
            self.change(cluster, |old| with(old).unwrap_or(old)).await?;
            return Ok(());
        }
        self.write_in_hold(backing, &segments, offset).await
    }

    /// Returns the entry of a cluster that the caller holds; loads its slice if it was evicted.
    pub(super) async fn current_entry(&self, cluster: u64) -> io::Result<Entry> {
        loop {
            match self.entry(cluster) {
                Some(entry) => return Ok(entry),
                None => self.load(cluster << self.shape().layout.cluster_bits).await?,
            }
        }
    }

    /// Writes into an exclusive host cluster, and fills in what is missing in the touched units.
    async fn complete<B: BackingLayers>(
        &self,
        backing: &B,
        segments: Segments,
        offset: u64,
        host: u64,
        unit: u64,
    ) -> io::Result<()> {
        let shape = self.shape();
        let cluster = shape.cluster(offset);
        self.own_table(shape.table(cluster)).await?;
        let start = cluster << shape.layout.cluster_bits;
        let end = offset + segments.len() as u64;
        // Fill only the units that have no data yet: the data of other units are in the host
        // cluster.
        let old = self.current_entry(cluster).await?;
        let with_data = match L2Entry::cached(old.word, old.bitmap, shape.layout) {
            Ok(L2Entry { cluster: Cluster::Subclusters { bitmap, .. }, .. }) => bitmap.data(),
            Ok(L2Entry { cluster: Cluster::Partial { parts, .. }, .. }) => parts.into(),
            _ => 0,
        };
        let lacks = |at: u64| with_data >> ((at - start) / unit) & 1 == 0;
        let from = if lacks(offset) { offset - offset % unit } else { offset };
        let to = if lacks(end - 1) { end.next_multiple_of(unit) } else { end };
        let written = self
            .write_with_edges(backing, &segments, offset, from..to, host + (from - start), false)
            .await;
        // Notifies writers of whole subclusters, which do not hold the cluster.
        self.shared.touched(cluster).fetch_add(1, Ordering::AcqRel);
        written.inspect_err(|_| self.shared.partial.spoil())?;
        let (first, last) = (offset - start, end - 1 - start);
        let whole = Entry { word: host | COPIED, bitmap: 0 };
        self.change(cluster, |old| self.with_parts(old, host, first, last).unwrap_or(whole))
            .await?;
        Ok(())
    }

    /// Writes to new clusters. Returns the number of bytes written, because fewer consecutive
    /// clusters may be free.
    async fn fill<B: BackingLayers>(
        &self,
        backing: &B,
        segments: &Segments,
        offset: u64,
        rest: Rest,
    ) -> io::Result<u64> {
        let shape = self.shape();
        let bits = shape.layout.cluster_bits;
        let (first, last) =
            (shape.cluster(offset), shape.cluster(offset + segments.len() as u64 - 1));
        self.own_table(shape.table(first)).await?;
        let run = if shape.layout.data_file {
            // External data file: host offset equals guest offset, and the old contents are
            // arbitrary.
            Run { start: first, count: last - first + 1, fresh: false, has_space: false }
        } else {
            self.allocate(last - first + 1).await?
        };
        let end = (offset + segments.len() as u64).min((first + run.count) << bits);
        let whole = rest == Rest::Old;
        let may_defer = rest == Rest::Backing
            && run.fresh
            && run.has_space
            && backing.may_defer()
            && !self.shared.journal.must_flush();
        let part = match shape.part().filter(|_| may_defer) {
            Some(part) => match self.is_zero_around(backing, offset, end).await {
                Ok(true) => None,
                Ok(false) => {
                    Some(part).filter(|_| self.shared.partial.admits(shape.cluster_size()))
                }
                Err(e) => {
                    // Nothing is written yet.
                    self.shared.alloc.put_back(run);
                    return Err(e);
                }
            },
            None => None,
        };
        let unit = if whole { shape.cluster_size() } else { part.unwrap_or(shape.unit) };
        let (from, to) = (offset - offset % unit, end.next_multiple_of(unit));
        let host = (run.start << bits) + (from - (first << bits));
        let piece = segments.slice(0, (end - offset) as usize);
        let written =
            self.write_with_edges(backing, &piece, offset, from..to, host, run.fresh).await;
        if let Err(e) = written {
            // The contents of these clusters are undefined now, and no entry names the clusters.
            self.abandon(run);
            return Err(e);
        }
        for cluster in first..first + run.count {
            let start = cluster << bits;
            let word = ((run.start + cluster - first) << bits) | COPIED;
            let (a, b) =
                (from.max(start) - start, to.min(start + shape.cluster_size()) - 1 - start);
            let bitmap = |old: Entry| match (shape.layout.extended_l2, whole) {
                (false, _) => 0,
                (true, true) => u64::from(u32::MAX),
                (true, false) => self.with_data(old.bitmap, a / shape.unit, b / shape.unit),
            };
            let new = |old: Entry| match part {
                Some(_) => self.first_parts(word & OFFSET_MASK, a, b),
                None => Entry { word, bitmap: bitmap(old) },
            };
            let done = cluster - first;
            let unnamed = Run { start: run.start + done, count: run.count - done, ..run };
            let old = self.change(cluster, new).await.inspect_err(|_| self.abandon(unnamed))?;
            self.let_go(old);
        }
        Ok(end - offset)
    }

    /// Returns whether the rest of the clusters around `offset..end` is known to read as zeroes.
    async fn is_zero_around<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        end: u64,
    ) -> io::Result<bool> {
        let size = self.shape().cluster_size();
        let (start, stop) = (offset - offset % size, end.next_multiple_of(size));
        Ok(self.is_zero(backing, start, offset - start).await?
            && self.is_zero(backing, end, stop - end).await?)
    }

    fn abandon(&self, run: Run) {
        if !self.shape().layout.data_file {
            self.shared.alloc.put_back(Run { fresh: false, ..run });
        }
    }

    /// Returns the bitmap with subclusters `first` to `last` allocated.
    pub(super) fn with_data(&self, bitmap: u64, first: u64, last: u64) -> u64 {
        if !self.shape().layout.extended_l2 {
            return 0;
        }
        let touched = u64::from((u32::MAX >> (31 - (last - first))) << first);
        (bitmap | touched) & !(touched << 32)
    }

    /// Writes `segments` (at the guest's `offset`) and the surrounding data, so that the file has
    /// all of the guest's `range` from `host` on.
    async fn write_with_edges<B: BackingLayers>(
        &self,
        backing: &B,
        segments: &Segments,
        offset: u64,
        range: std::ops::Range<u64>,
        host: u64,
        fresh: bool,
    ) -> io::Result<()> {
        let end = offset + segments.len() as u64;
        let (head, tail) = (offset - range.start, range.end - end);
        let file = self.data_file();
        let at = host + head;
        if head + tail == 0 {
            return file.write(segments.slice(0, segments.len()), at, false).await.1;
        }
        // A new part of the file reads as zeroes, so zero edges need not be written.
        if fresh
            && self.is_zero(backing, range.start, head).await?
            && self.is_zero(backing, end, tail).await?
        {
            return file.write(segments.slice(0, segments.len()), at, false).await.1;
        }
        if segments.len() <= COPIED_TOGETHER {
            let _room = self.shared.buffers.beside.acquire_many(range.end - range.start).await;
            let buffer = Segments::buffer((range.end - range.start) as usize);
            if head > 0 && tail > 0 && segments.len() <= READ_ALONG {
                // One longer read is cheaper than two.
                self.read_current(backing, &buffer, 0, range.start, range.end - range.start)
                    .await?;
            } else {
                self.read_current(backing, &buffer, 0, range.start, head).await?;
                self.read_current(backing, &buffer, (end - range.start) as usize, end, tail)
                    .await?;
            }
            buffer.copy_from(head as usize, segments, 0, segments.len());
            return file.write(buffer, host, false).await.1;
        }
        for (start, len) in [(range.start, head), (end, tail)] {
            if len > 0 {
                let _room = self.shared.buffers.beside.acquire_many(len).await;
                let buffer = Segments::buffer(len as usize);
                self.read_current(backing, &buffer, 0, start, len).await?;
                file.write(buffer, host + (start - range.start), false).await.1?;
            }
        }
        file.write(segments.slice(0, segments.len()), at, false).await.1
    }

    /// Reads `len` bytes of the guest's disk at `offset` into `buffer` from `to` on.
    pub(super) async fn read_current<B: BackingLayers>(
        &self,
        backing: &B,
        buffer: &Segments,
        to: usize,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let Some(extent) = self.try_lookup(at, len - done) else {
                self.load(at).await?;
                continue;
            };
            let piece = buffer.slice(to + done as usize, extent.len as usize);
            match extent.place {
                // New buffers hold zeroes.
                Place::Zero => {}
                Place::Data(host) => self.read_data(piece, host).await.1?,
                Place::Compressed(word) => {
                    self.read_compressed(piece, word, at & (self.shape().cluster_size() - 1))
                        .await
                        .1?;
                }
                Place::Absent => backing.read_backing(piece, at).await.1?,
            }
            done += extent.len;
        }
        Ok(())
    }

    /// Returns true if the range is known to read as zeroes, without reading data.
    pub(super) async fn is_zero<B: BackingLayers>(
        &self,
        backing: &B,
        offset: u64,
        len: u64,
    ) -> io::Result<bool> {
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let Some(extent) = self.try_lookup(at, len - done) else {
                self.load(at).await?;
                continue;
            };
            let zero = match extent.place {
                Place::Zero => true,
                Place::Absent => backing.backing_is_zero(at, extent.len).await?,
                Place::Data(_) | Place::Compressed(_) => false,
            };
            if !zero {
                return Ok(false);
            }
            done += extent.len;
        }
        Ok(true)
    }
}
