//! Writes metadata back, in an order that is safe at every power cut.
//!
//! ```text
//!   copy changed L2 entries ─► write refcounts
//!   ─► sync: data and refcounts of the copied entries are durable
//!   ─► write L2 slices and L1 entries
//!   ─► sync: the entries are durable
//!   ─► release freed clusters
//! ```
//!
//! Invariants: an entry is in the file only after the data it names and their refcounts are
//! durable. A cluster is free only after no durable entry names it. So a power cut leaves leaks and
//! old or new contents, nothing else. A flush without changed metadata is one sync.
//!
//! A file without a name (`Qcow2Options::unfinished`) is lost at a power cut anyway. There
//! the syncs between are skipped, and a flush is one sync at its end.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use blockyard_storage::Storage;

use crate::error::ImageError;
use crate::extent::BackingLayers;
use crate::raw::Raw;
use crate::sync::pace::Pace;
use blockyard_ring::join;

use crate::qcow2::encoding::bytes;
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::alloc::{ChangedSection, Freed};
use crate::qcow2::state::shared::lock;
use crate::qcow2::state::tables::SliceCopy;

/// Number of metadata writes in flight.
const AT_A_TIME: usize = 16;
/// How often a flush writes back before it fails because the journal has no space for clusters that
/// other requests leave partial meanwhile.
const ATTEMPTS: usize = 16;
/// Unit in which L1 entries are written, in bytes.
const L1_SECTOR: usize = 512;

/// L1 entries to write: index of the first, bytes, offset in the file.
struct L1Piece {
    first: usize,
    bytes: Vec<u8>,
    offset: u64,
}

/// Metadata written between the two syncs, and clusters that may be released after the second.
struct PendingWriteBack {
    slices: Vec<SliceCopy>,
    l1: Vec<L1Piece>,
    l1_dirty: Vec<usize>,
    freed: Vec<Freed>,
}

impl Qcow2 {
    /// Waits until all writes that completed before the call are durable. If only partial clusters
    /// could not be completed ([`IncompleteCluster`]), nothing is lost: all other writes are
    /// durable, and a later flush tries again.
    ///
    /// [`IncompleteCluster`]: crate::qcow2::IncompleteCluster
    pub async fn flush<B: BackingLayers>(&self, backing: &B) -> io::Result<()> {
        // If the journal is full, other requests may leave partial clusters between the two steps.
        for _ in 0..ATTEMPTS {
            let completed = self.complete_all(backing).await;
            let _permit = self.shared.writing_back.acquire().await;
            if self.write_back_once(true).await? || completed.is_err() {
                self.sync_unfinished().await?;
                return completed;
            }
        }
        Err(no_space())
    }

    /// Completes partial clusters if there are too many, and then does
    /// [`Qcow2::relieve_metadata`]. If no journal has the changes, it does [`Qcow2::protect`]
    /// instead. `clusters`: those of the request. The caller must hold no guest cluster.
    pub(super) async fn relieve<B: BackingLayers>(
        &self,
        backing: &B,
        clusters: Range<u64>,
    ) -> io::Result<()> {
        if self.shared.journal.must_flush() {
            return self.protect(backing, clusters).await;
        }
        // If a cluster cannot be completed, that is no error of this request. The next flush
        // reports it.
        let _ = self.complete_some(backing).await;
        if self.is_relieved() {
            return Ok(());
        }
        // A slice with a partial cluster stays dirty.
        if self.is_dirty() && !self.shared.partial.is_completing() {
            let _ = self.complete_not_stuck(backing).await;
        }
        // The journal may have become full meanwhile.
        match self.relieve_recorded().await? {
            true => Ok(()),
            false => self.protect(backing, clusters).await,
        }
    }

    /// Makes the entries of a request's clusters outlive the process, because the image has no
    /// journal, or the journal lacks changes. Fails if one of these clusters stays partial and no
    /// journal has its entry. If another cluster stays partial, only the next flush fails. The
    /// caller must hold no guest cluster.
    async fn protect<B: BackingLayers>(&self, backing: &B, clusters: Range<u64>) -> io::Result<()> {
        let (journal, partial) = (&self.shared.journal, &self.shared.partial);
        for attempt in 0..ATTEMPTS {
            // A stuck cluster delays the request only if the journal has no space for its entry.
            let others = match attempt {
                0 => self.complete_not_stuck(backing).await,
                _ => self.complete_all(backing).await,
            };
            let own = self.complete_within(backing, clusters.clone()).await;
            let _permit = self.shared.writing_back.acquire().await;
            // A cluster that is completed from now on may be too late for this write-back.
            let is_partial = !partial.within(clusters.clone()).is_empty();
            let survives = self.write_back_once(true).await?;
            // If no flush is needed now, the journal has the entries of all partial clusters.
            if survives && (!is_partial || !journal.must_flush()) {
                return Ok(());
            }
            match own {
                // There is no journal, or it has been removed.
                Err(e) if survives && !journal.is_incomplete() => return Err(e),
                _ if !survives && attempt > 0 && others.is_err() => break,
                _ => {}
            }
        }
        Err(no_space())
    }

    /// Does [`Qcow2::protect`] for a request that has changed no entry, unless the file has the
    /// entries of its clusters. Another request may have changed them and may not have put them
    /// into the file yet. The caller must hold no guest cluster.
    #[cold]
    pub(super) async fn settle<B: BackingLayers>(
        &self,
        backing: &B,
        clusters: Range<u64>,
    ) -> io::Result<()> {
        // A write-back that runs may have taken the changes, and may fail.
        let permit = self.shared.writing_back.acquire().await;
        let is_settled = !self.shared.journal.is_incomplete() && self.is_in_file(clusters.clone());
        drop(permit);
        if is_settled { Ok(()) } else { self.protect(backing, clusters).await }
    }

    /// Returns whether the file has the entries of guest clusters. The caller holds the permit of
    /// `writing_back`.
    fn is_in_file(&self, clusters: Range<u64>) -> bool {
        let (shape, last) = (self.shape(), clusters.end - 1);
        let mut slices = shape.slice(clusters.start).0..=shape.slice(last).0;
        let tables = shape.table(clusters.start) as usize..=shape.table(last) as usize;
        self.shared.partial.within(clusters).is_empty()
            && lock(&self.shared.l1).dirty.range(tables).next().is_none()
            && !slices.any(|number| self.shared.tables.is_unwritten(number))
    }

    /// Writes metadata back if so much is dirty that too little can be evicted. The written
    /// metadata are not durable on return. The caller must hold no guest cluster.
    pub(super) async fn relieve_metadata(&self) -> io::Result<()> {
        if self.relieve_recorded().await? {
            return Ok(());
        }
        let _permit = self.shared.writing_back.acquire().await;
        self.write_back(true).await
    }

    /// Like [`Qcow2::relieve_metadata`], but only if a journal has the changes. Returns false if
    /// they must be durable before an answer instead.
    async fn relieve_recorded(&self) -> io::Result<bool> {
        if self.is_relieved() {
            return Ok(true);
        }
        let _permit = self.shared.writing_back.acquire().await;
        let (journal, alloc) = (&self.shared.journal, &self.shared.alloc);
        if journal.must_flush() {
            return Ok(false);
        }
        let many = self.shared.tables.dirty() > self.dirty_limit() || alloc.is_crowded();
        if many || journal.is_long() { self.write_back_once(false).await } else { Ok(true) }
    }

    fn is_relieved(&self) -> bool {
        let journal = &self.shared.journal;
        !self.is_dirty()
            && !self.shared.alloc.is_crowded()
            && !journal.is_long()
            && !journal.must_flush()
    }

    fn is_dirty(&self) -> bool {
        self.shared.tables.dirty() > 2 * self.dirty_limit()
    }

    /// Maximum number of L2 slices that stay dirty until the guest flushes.
    fn dirty_limit(&self) -> usize {
        (self.shared.tables.limit() / 2).max(4)
    }

    /// Writes changed metadata to the file. With `durable` it ends with [`Qcow2::barrier_metadata`]
    /// and releases freed clusters. The caller holds the permit of `writing_back`.
    async fn write_back(&self, durable: bool) -> io::Result<()> {
        if self.write_back_once(durable).await? { Ok(()) } else { Err(no_space()) }
    }

    /// Like [`Qcow2::write_back`]. Returns whether the changes survive a death of the process. If
    /// a replay may name a freed cluster, the cluster is not released.
    async fn write_back_once(&self, durable: bool) -> io::Result<bool> {
        let journal = &self.shared.journal;
        let records = journal.begin_write_back();
        let changes = self.take_changes();
        if changes.is_empty() && !self.shared.alloc.has_changed_counts() {
            let synced = self.barrier().await;
            let ended = journal.end_write_back(records, synced.is_ok());
            // An earlier write-back that was not durable may have written the changed entries of
            // the freed clusters. This sync makes those entries durable.
            match ended.may_release {
                true => self.shared.alloc.all_durable(changes.freed),
                false => self.shared.alloc.freed_again(changes.freed),
            }
            synced?;
            if ended.may_release {
                self.release().await?;
            }
            return Ok(ended.survives);
        }
        let done = self.write_changes(&changes, durable).await;
        self.shared.tables.written(&changes.slices, done.is_ok());
        let ended = journal.end_write_back(records, done.is_ok());
        match done {
            Ok(()) if durable && ended.may_release => self.shared.alloc.all_durable(changes.freed),
            // The entries are not durable yet, or the journal has older ones. The next flush
            // releases the clusters.
            Ok(()) => self.shared.alloc.freed_again(changes.freed),
            Err(e) => {
                self.shared.alloc.freed_again(changes.freed);
                lock(&self.shared.l1).dirty.extend(changes.l1_dirty);
                return Err(e);
            }
        }
        if durable && ended.may_release {
            self.release().await?;
        }
        Ok(ended.survives)
    }

    fn take_changes(&self) -> PendingWriteBack {
        // Take the freed clusters first, and copy the slices after that. The copies then have the
        // changed entries of all clusters that were taken.
        let freed = self.shared.alloc.take_freed();
        let slices = self.shared.tables.take_changes();
        let mut l1 = lock(&self.shared.l1);
        let l1_dirty: Vec<usize> = std::mem::take(&mut l1.dirty).into_iter().collect();
        let per_sector = L1_SECTOR / 8;
        let mut sectors: Vec<usize> = l1_dirty.iter().map(|index| index / per_sector).collect();
        sectors.dedup();
        let piece = |sector: usize| {
            let first = sector * per_sector;
            let end = (first + per_sector).min(l1.entries.len());
            let bytes = l1.entries[first..end].iter().flat_map(|word| word.to_be_bytes()).collect();
            L1Piece { first, bytes, offset: l1.offset + first as u64 * 8 }
        };
        let l1 = sectors.into_iter().map(piece).collect();
        PendingWriteBack { slices, l1, l1_dirty, freed }
    }

    async fn write_changes(&self, changes: &PendingWriteBack, durable: bool) -> io::Result<()> {
        let counts = self.write_changed_counts().await?;
        if changes.is_empty() {
            return self.barrier().await;
        }
        self.barrier().await.inspect_err(|_| self.shared.alloc.counts_written(&counts, false))?;
        let slices = changes.slices.iter().map(|copied| self.write_slice(copied));
        join::all(AT_A_TIME, slices).await?;
        join::all(AT_A_TIME, changes.l1.iter().map(|piece| self.write_l1(piece))).await?;
        if durable { self.barrier_metadata().await } else { Ok(()) }
    }

    /// Writes changed refcounts; returns what was written. The caller holds the permit of
    /// `writing_back`.
    async fn write_changed_counts(&self) -> io::Result<Vec<ChangedSection>> {
        let counts = self.shared.alloc.take_changed_counts();
        let sections = counts
            .iter()
            .map(|section| self.write_at("qcow2 refcount block", section.offset, &section.bytes));
        let written = join::all(AT_A_TIME, sections).await;
        self.shared.alloc.counts_written(&counts, written.is_ok());
        written.map(|()| counts)
    }

    async fn write_l1(&self, piece: &L1Piece) -> io::Result<()> {
        self.write_at(
            &format!("qcow2 L1 table from entry {}", piece.first),
            piece.offset,
            &piece.bytes,
        )
        .await
    }

    async fn write_at(&self, structure: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let written = bytes::write(&self.file, offset, bytes).await;
        written.map_err(|e| ImageError::io(structure, offset, "writing", e).into())
    }

    async fn write_slice(&self, copied: &SliceCopy) -> io::Result<()> {
        let shape = self.shape();
        let per_table = shape.slices_per_table();
        let (index, in_table) = (copied.slice.number / per_table, copied.slice.number % per_table);
        let table = self.shared.l1_entry(index) & crate::qcow2::encoding::entry::OFFSET_MASK;
        debug_assert!(table != 0, "a changed slice has a table");
        let at = table + in_table * shape.slice_bytes();
        self.write_at(&format!("qcow2 L2 table {index}"), at, &copied.bytes).await
    }

    /// Orders writes: earlier writes become durable before later writes start. Does not sync an
    /// unfinished image, because a power cut loses it anyway.
    async fn barrier(&self) -> io::Result<()> {
        if self.shared.unfinished {
            return self.not_lost();
        }
        self.sync().await
    }

    /// Like [`Qcow2::barrier`], but for the image's own file only.
    pub(super) async fn barrier_metadata(&self) -> io::Result<()> {
        if self.shared.unfinished {
            return self.not_lost();
        }
        self.sync_file(&self.file).await
    }

    /// Does the one sync that replaces the barriers that an unfinished image skipped.
    async fn sync_unfinished(&self) -> io::Result<()> {
        if self.shared.unfinished { self.sync().await } else { Ok(()) }
    }

    async fn sync(&self) -> io::Result<()> {
        if let Some(data) = &self.data {
            self.sync_file(data).await?;
        }
        self.sync_file(&self.file).await
    }

    fn not_lost(&self) -> io::Result<()> {
        self.shared.lost().map_or(Ok(()), Err)
    }

    /// Syncs one file. After a failed sync it fails at once: the kernel has forgotten the failed
    /// write-back and would report success.
    async fn sync_file(&self, file: &Raw) -> io::Result<()> {
        let _permit = self.shared.syncing.acquire().await;
        self.not_lost()?;
        file.flush().await.inspect_err(|e| self.shared.lose(e))
    }

    /// Releases clusters after their entries are durably gone and the epoch of requests that may
    /// still use them has ended. If that epoch has not ended, this flush does not wait: a later
    /// flush releases the clusters.
    async fn release(&self) -> io::Result<()> {
        let (alloc, epoch) = (&self.shared.alloc, &self.shared.epoch);
        let mut leaving = std::mem::take(&mut *lock(&self.shared.leaving));
        if !leaving.is_empty() {
            if !epoch.previous_is_empty() {
                *lock(&self.shared.leaving) = leaving;
                return Ok(());
            }
            self.release_all(std::mem::take(&mut leaving)).await?;
        }
        let freed = alloc.take_leaving();
        if freed.is_empty() {
            return Ok(());
        }
        if !epoch.try_advance() {
            alloc.all_durable(freed);
        } else if epoch.previous_is_empty() {
            self.release_all(freed).await?;
        } else {
            *lock(&self.shared.leaving) = freed;
        }
        Ok(())
    }

    async fn release_all(&self, freed: Vec<Freed>) -> io::Result<()> {
        let (mut empty, mut pace) = (BTreeSet::new(), Pace::default());
        for range in freed {
            if range.compressed {
                self.shared.recompressed.fetch_add(1, Ordering::AcqRel);
            }
            for cluster in range.start..range.start + range.count {
                if self.count(cluster).await? != 1 || !empty.insert(cluster) {
                    self.release_one(cluster).await?;
                }
                pace.step().await;
            }
        }
        let empty: Vec<u64> = empty.into_iter().collect();
        self.punch(&empty).await;
        for cluster in empty {
            self.release_one(cluster).await?;
            pace.step().await;
        }
        Ok(())
    }

    /// Releases one cluster. The caller holds the permit of `writing_back`. The entries without the
    /// cluster are durable, so its refcount may be written at any time.
    async fn release_one(&self, cluster: u64) -> io::Result<()> {
        self.release_count(cluster).await?;
        if self.shared.alloc.is_crowded() {
            self.write_changed_counts().await?;
        }
        Ok(())
    }

    /// Deallocates the clusters in the host before they can be reused. This is a hint: a failure
    /// costs only space.
    async fn punch(&self, clusters: &[u64]) {
        let bits = self.shape().layout.cluster_bits;
        for run in clusters.chunk_by(|a, b| a + 1 == *b) {
            let _ = self.file.discard(run[0] << bits, (run.len() as u64) << bits).await;
        }
    }

    /// Flushes and releases reserved clusters. Call it at the end, with no request in flight.
    pub async fn close<B: BackingLayers>(&self, backing: &B) -> io::Result<()> {
        self.end(backing, true).await
    }

    /// Like [`Qcow2::close`], but what was not flushed need not be durable. It is in the file for
    /// the next process that opens it. One sync at most, because a guest waits for this.
    pub async fn leave<B: BackingLayers>(&self, backing: &B) -> io::Result<()> {
        self.end(backing, false).await
    }

    async fn end<B: BackingLayers>(&self, backing: &B, durable: bool) -> io::Result<()> {
        if self.shared.read_only {
            return Ok(());
        }
        let completed = self.complete_all(backing).await;
        let _permit = self.shared.writing_back.acquire().await;
        // No entry names reserved clusters, so the first write-back can lower their refcounts too.
        let end = self.release_reserved().await?;
        // Freed clusters are released only after a sync of the entries without them.
        if durable || self.has_freed() || self.shared.unfinished {
            self.write_back(true).await?;
        } else if self.shared.has_unwritten() {
            self.write_back(false).await?;
        }
        // The first write-back released the freed clusters, because no request uses them any more.
        // It leaves those of a request that ended meanwhile.
        if self.has_freed() {
            self.write_back(true).await?;
        }
        if self.shared.alloc.has_changed_counts() {
            self.write_back(durable).await?;
        }
        self.cut(end).await?;
        self.sync_unfinished().await?;
        completed?;
        Ok(self.end_journal().await?)
    }

    /// Returns whether clusters are freed and not yet released.
    fn has_freed(&self) -> bool {
        self.shared.alloc.has_freed() || !lock(&self.shared.leaving).is_empty()
    }

    /// Releases reserved clusters. Returns the cluster at which the file can end.
    async fn release_reserved(&self) -> io::Result<u64> {
        let alloc = &self.shared.alloc;
        self.end_packing();
        let mut end = alloc.end();
        let mut reserved = alloc.take_reserved();
        reserved.sort_unstable_by_key(|run| run.start);
        for run in reserved.iter().rev() {
            for cluster in run.start..run.start + run.count {
                self.release_one(cluster).await?;
            }
            if run.start + run.count == end {
                end = run.start;
            }
        }
        Ok(end)
    }

    /// Makes the file shorter, if its last clusters are free. Their refcounts are durable: a file
    /// that ends before a cluster with a refcount is corrupt. A file that ends behind it is not, so
    /// the new length needs no sync.
    async fn cut(&self, end: u64) -> io::Result<()> {
        let (alloc, bits) = (&self.shared.alloc, self.shape().layout.cluster_bits);
        if end < alloc.end() && !self.file.is_device() {
            self.file.storage().set_len(end << bits).await?;
            alloc.set_end(end);
        }
        Ok(())
    }
}

/// Returns the error of changes that would not survive a death of the process.
fn no_space() -> io::Error {
    let what = "the journal of changed metadata has no space for clusters that are not complete: \
        free some in the state folder";
    io::Error::new(io::ErrorKind::StorageFull, what)
}

impl PendingWriteBack {
    fn is_empty(&self) -> bool {
        self.slices.is_empty() && self.l1.is_empty()
    }
}
