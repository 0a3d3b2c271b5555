//! Reserves clusters: free ones of the file, or new ones beyond its end.
//!
//! Invariant: a refcount block is durable before the refcount table names it, and a refcount table
//! before the header names it.

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use blockyard_storage::Storage;

use crate::error::{ImageError, is_full};

use crate::qcow2::encoding::bytes::{self, LastHole};
use crate::qcow2::encoding::header::MAX_OFFSET;
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::alloc::{Allocator, Grown, Run};
use crate::qcow2::state::shared::lock;

/// Maximum number of refcount blocks that are searched for free clusters before the file is
/// extended.
const SEARCHED: usize = 4;

/// Maximum size of one write of new refcount blocks, in bytes.
const WRITTEN_TOGETHER: usize = 1 << 20;

const UNSUPPORTED: io::ErrorKind = io::ErrorKind::Unsupported;

/// Size of the refcounts for the clusters of one reservation ahead, in bytes.
const COUNTED_AHEAD: u64 = 4 << 20;

/// Maximum size of a refcount table in bytes. QEMU refuses larger tables.
const LARGEST_TABLE: u64 = 8 << 20;

impl Qcow2 {
    /// Allocates up to `most` consecutive clusters, at least one.
    pub(in crate::qcow2) async fn allocate(&self, most: u64) -> io::Result<Run> {
        loop {
            if let Some(run) = self.shared.alloc.take(most) {
                return Ok(run);
            }
            let _permit = self.shared.reserving.acquire().await;
            if !self.shared.alloc.has_some() {
                self.reserve().await?;
            }
        }
    }

    async fn reserve(&self) -> io::Result<()> {
        let alloc = &self.shared.alloc;
        let bytes = alloc.next_run();
        let most = bytes >> self.shape().layout.cluster_bits;
        if self.reserve_free(most).await? {
            return Ok(());
        }
        match self.extend(most, true).await {
            // The host has little space left: try one cluster.
            Err(e) if is_full(&e) && most > 1 => self.extend(1, true).await,
            done => done,
        }
    }

    /// Reserves up to `wanted` clusters, unless some are reserved already. The host does not
    /// allocate their space yet. One call reserves at most the clusters whose refcounts take
    /// [`COUNTED_AHEAD`] bytes. That is many, so that few extensions, each with a sync, are needed.
    pub(super) async fn reserve_ahead(&self, wanted: u64) -> io::Result<()> {
        let alloc = &self.shared.alloc;
        let _permit = self.shared.reserving.acquire().await;
        let blocks = (COUNTED_AHEAD >> self.shape().layout.cluster_bits).max(1);
        let most = wanted.min(blocks * alloc.per_block());
        if alloc.has_some() || self.reserve_free(most).await? {
            return Ok(());
        }
        match self.extend(most, false).await {
            // The host has no space for so many clusters. Reserve none ahead: the allocation
            // reserves fewer.
            Err(e) if is_full(&e) => Ok(()),
            done => done,
        }
    }

    /// Reserves free clusters of the file. Returns false if it found none.
    async fn reserve_free(&self, most: u64) -> io::Result<bool> {
        let alloc = &self.shared.alloc;
        for _ in 0..SEARCHED {
            let Some((block, _)) = alloc.block_to_search() else { break };
            self.load_counts(block).await?;
            if alloc.reserve_in(block, most) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Loads a refcount block into the cache.
    pub(super) async fn load_counts(&self, block: u64) -> io::Result<()> {
        while let Some((offset, seen)) = self.shared.alloc.to_load(block) {
            let read = bytes::read(&self.file, offset, self.shape().cluster_size() as usize).await;
            let read =
                read.map_err(|e| ImageError::io("qcow2 refcount block", offset, "reading", e))?;
            self.shared.alloc.loaded(block, read, seen);
        }
        Ok(())
    }

    /// Calls `look` with the cached refcount block of a cluster. If the block was evicted meanwhile
    /// (`look` returns None), loads the block again. Returns None if no block covers the cluster.
    async fn with_counts<T>(
        &self,
        block: u64,
        look: impl Fn(&Allocator) -> Option<T>,
    ) -> io::Result<Option<T>> {
        let alloc = &self.shared.alloc;
        loop {
            match look(alloc) {
                Some(seen) => return Ok(Some(seen)),
                None if !alloc.has_block(block) => return Ok(None),
                None => self.load_counts(block).await?,
            }
        }
    }

    /// Returns the refcount of a cluster.
    pub(in crate::qcow2) async fn count(&self, cluster: u64) -> io::Result<u64> {
        let count = self
            .with_counts(self.shared.alloc.block_of(cluster), |alloc| alloc.count(cluster))
            .await?;
        Ok(count.unwrap_or(0))
    }

    /// See [`Allocator::adopt`].
    pub(super) async fn adopt_count(&self, cluster: u64) -> io::Result<()> {
        let block = self.shared.alloc.block_of(cluster);
        let adopted = self.with_counts(block, |alloc| alloc.adopt(cluster)).await?;
        adopted.ok_or_else(|| io::Error::other(format!("cluster {cluster} has no refcount block")))
    }

    /// Adds a reference to a cluster. Returns false if its refcount is at the maximum.
    pub(in crate::qcow2) async fn retain(&self, cluster: u64) -> io::Result<bool> {
        let done = self
            .with_counts(self.shared.alloc.block_of(cluster), |alloc| alloc.retain(cluster))
            .await?;
        Ok(done.unwrap_or(false))
    }

    /// Drops a reference of a cluster.
    pub(super) async fn release_count(&self, cluster: u64) -> io::Result<()> {
        self.with_counts(self.shared.alloc.block_of(cluster), |alloc| alloc.release(cluster))
            .await?;
        Ok(())
    }

    /// Returns true if at least `wanted` clusters of the file are in use.
    pub(crate) async fn has_clusters(&self, wanted: u64) -> io::Result<bool> {
        let (alloc, table) = (&self.shared.alloc, self.shared.alloc.table());
        let (mut cluster, mut used, mut seen) = (0, 0, HashSet::new());
        let mut hole = LastHole::default();
        let (cluster_size, file_len) =
            (self.shape().cluster_size(), alloc.end() << self.shape().layout.cluster_bits);
        // No cluster behind the last refcount block is in use, however long a sparse file is.
        let end = alloc.end().min((table.len() as u64).saturating_mul(alloc.per_block()));
        while cluster < end && used < wanted {
            let block = alloc.block_of(cluster);
            // A table that names one block a million times describes no sound image.
            let offset = table.get(block as usize).copied().unwrap_or(0);
            let is_new = offset != 0 && seen.insert(offset);
            // All refcounts of a block that is a hole are 0, unless the cache has newer ones.
            if !is_new
                || alloc.to_load(block).is_some()
                    && hole.covers(&self.file, offset, cluster_size, file_len).await
            {
                cluster = (block + 1) * alloc.per_block();
                continue;
            }
            self.load_counts(block).await?;
            let next = ((block + 1) * alloc.per_block()).min(end);
            used += (cluster..next)
                .filter(|&c| alloc.count(c).is_some_and(|count| count > 0))
                .count() as u64;
            cluster = next;
        }
        Ok(used >= wanted)
    }

    /// Extends the file by up to `most` clusters and the refcount structures for them. With
    /// `keep_space` the host allocates their space.
    async fn extend(&self, most: u64, keep_space: bool) -> io::Result<()> {
        let (bits, alloc) = (self.shape().layout.cluster_bits, &self.shared.alloc);
        let mut plan = self.plan_growth(most)?;
        let (start, end) = (alloc.end(), plan.grown.end);
        plan.grown.fresh = !self.file.is_device() && alloc.is_untouched(start);
        if end << bits >= MAX_OFFSET {
            return Err(ImageError::refused(
                "qcow2 file",
                "it has reached the format's largest size, 64 PiB",
            )
            .into());
        }
        plan.grown.has_space = self.lengthen(start << bits, end << bits, keep_space).await?;
        if plan.blocks.is_empty() {
            return self.adopt(&plan).await;
        }
        self.write_new_counts(&plan).await.inspect_err(|_| alloc.touched(end))?;
        // From here on the file may name the new tables, even if an error is returned. So their
        // clusters are never allocated for another use.
        let adopted = async {
            self.publish(&plan).await?;
            self.adopt(&plan).await
        };
        adopted.await.inspect_err(|e| self.shared.lose(e))
    }

    /// Makes the new clusters available for allocation.
    async fn adopt(&self, plan: &Growth) -> io::Result<()> {
        let alloc = &self.shared.alloc;
        // Existing refcount blocks are loaded one by one; loading one may evict another.
        let patience = 2 * (alloc.block_of(plan.grown.end) - alloc.block_of(alloc.end())) + 16;
        for _ in 0..patience {
            match alloc.extended(&plan.grown) {
                Ok(()) => return Ok(()),
                Err(absent) => self.load_counts(absent).await?,
            }
        }
        Err(io::Error::other(
            "the cache of refcount blocks is too small: blocks are evicted before they are used",
        ))
    }

    /// Plans an extension of the file: a new refcount table if the old one is full, new refcount
    /// blocks, and clusters. Fails if the table would be too large, before it takes memory: a
    /// crafted image can be a sparse file of any length.
    fn plan_growth(&self, most: u64) -> io::Result<Growth> {
        let alloc = &self.shared.alloc;
        let (start, mut table) = (alloc.end(), alloc.table());
        let cluster = self.shape().cluster_size();
        let largest = LARGEST_TABLE / cluster;
        let (mut used, mut new_table) = (Vec::new(), None);
        let mut end = start + most;
        // Each round may need more refcount blocks, for the blocks of the previous round. The
        // rounds end, because a block covers more than one cluster.
        loop {
            let (_, missing) = alloc.beyond_the_end(end - start);
            let entries = missing.last().map_or(0, |last| last + 1);
            if entries as usize > table.len() {
                let clusters = (entries * 3 / 2 * 8).div_ceil(cluster).min(largest);
                if entries > clusters * cluster / 8 {
                    let what = "the file is too large for a refcount table of 8 MiB";
                    return Err(ImageError::refused("qcow2 refcount table", what).into());
                }
                table.resize((clusters * cluster / 8) as usize, 0);
                new_table = Some(clusters);
            }
            let wanted = start + most + missing.len() as u64 + new_table.unwrap_or(0);
            if wanted <= end {
                return Ok(Growth::lay_out(
                    start,
                    end,
                    table,
                    missing,
                    new_table,
                    &mut used,
                    self.shape().layout.cluster_bits,
                ));
            }
            end = wanted;
        }
    }

    /// Extends the file to `end` (bytes). Returns whether the host has allocated the new space.
    async fn lengthen(&self, start: u64, end: u64, keep_space: bool) -> io::Result<bool> {
        let storage = self.file.storage();
        if self.file.is_device() {
            let enough = storage.len().await? >= end;
            return if enough { Ok(true) } else { Err(io::ErrorKind::StorageFull.into()) };
        }
        let taken = if keep_space {
            storage.allocate(start, end - start).await
        } else {
            Err(UNSUPPORTED.into())
        };
        match taken {
            Err(e) if e.kind() == UNSUPPORTED => {
                if storage.len().await? < end {
                    storage.set_len(end).await?;
                }
                Ok(false)
            }
            done => done.map(|()| true),
        }
    }

    /// Writes new refcount blocks and tables, which nothing names yet, durably. The blocks have the
    /// refcounts of these new structures. The refcounts of the reserved clusters follow with a
    /// flush, before any entry that needs them.
    async fn write_new_counts(&self, plan: &Growth) -> io::Result<()> {
        let (bits, alloc) = (self.shape().layout.cluster_bits, &self.shared.alloc);
        let Some(tables) = plan.grown.used.first() else { return Ok(()) };
        // The new refcount blocks are contiguous.
        for some in plan.blocks.chunks((WRITTEN_TOGETHER >> bits).max(1)) {
            let counts: Vec<u8> =
                some.iter().flat_map(|&(block, _)| alloc.first_counts(block, tables)).collect();
            bytes::write(&self.file, some[0].1 << bits, &counts).await?;
        }
        for block in alloc.block_of(tables.start)..=alloc.block_of(tables.end - 1) {
            if !plan.grown.blocks.contains(&block) {
                self.write_counts_of_tables(block, tables).await?;
            }
        }
        if let Some((first, _)) = plan.table_at {
            bytes::write(&self.file, first << bits, &plan.table_bytes()).await?;
        }
        self.barrier_metadata().await
    }

    /// Sets the refcounts of new tables in a refcount block that is in the file already, and writes
    /// the block.
    async fn write_counts_of_tables(&self, block: u64, tables: &Range<u64>) -> io::Result<()> {
        // Exclude a write-back: an older copy of the block must not reach the file later.
        let _permit = self.shared.writing_back.acquire().await;
        let counted = self.with_counts(block, |alloc| alloc.count_tables(block, tables)).await?;
        let (offset, counts) = counted.ok_or_else(|| {
            io::Error::other("a refcount block left the cache while it was in use")
        })?;
        bytes::write(&self.file, offset, &counts).await
    }

    /// Switches the file to the new refcount table, or adds the new blocks to its table.
    async fn publish(&self, plan: &Growth) -> io::Result<()> {
        if let Some((first, clusters)) = plan.table_at {
            return self
                .switch_refcount_table(first << self.shape().layout.cluster_bits, clusters)
                .await;
        }
        let (offset, table) = (lock(&self.shared.header).refcount_table_offset, plan.table_bytes());
        // Write from the first new block's entry to the last one's. Other entries in between are
        // unchanged.
        let (Some(&(first, _)), Some(&(last, _))) = (plan.blocks.first(), plan.blocks.last())
        else {
            return Ok(());
        };
        let (from, to) = (first as usize * 8, (last as usize + 1) * 8);
        bytes::write(&self.file, offset + from as u64, &table[from..to]).await
    }

    /// Writes the header that names the new table. The new table's clusters count as used; those of
    /// the old table are free when that is durable.
    async fn switch_refcount_table(&self, offset: u64, clusters: u64) -> io::Result<()> {
        let _permit = self.shared.changing_header.acquire().await;
        let mut header = self.shared.header();
        let bits = self.shape().layout.cluster_bits;
        let (old, count) =
            (header.refcount_table_offset >> bits, u64::from(header.refcount_table_clusters));
        header.refcount_table_offset = offset;
        header.refcount_table_clusters = clusters as u32;
        header.write_fixed(&self.file).await?;
        self.barrier_metadata().await?;
        *lock(&self.shared.header) = header;
        self.shared.alloc.let_go(crate::qcow2::state::alloc::Freed {
            start: old,
            count,
            compressed: false,
        });
        Ok(())
    }
}

struct Growth {
    grown: Grown,
    /// Numbers of new refcount blocks, and their clusters.
    blocks: Vec<(u64, u64)>,
    /// First cluster and number of clusters of a new refcount table.
    table_at: Option<(u64, u64)>,
}

impl Growth {
    /// Returns the bytes of the refcount table after the extension.
    fn table_bytes(&self) -> Vec<u8> {
        self.grown.table.iter().flat_map(|offset| offset.to_be_bytes()).collect()
    }

    /// Lays out the new part of the file: metadata first, then the clusters to allocate.
    fn lay_out(
        start: u64,
        end: u64,
        mut table: Vec<u64>,
        missing: Vec<u64>,
        new_table: Option<u64>,
        used: &mut Vec<Range<u64>>,
        bits: u32,
    ) -> Self {
        let mut next = start;
        let table_at = new_table.map(|clusters| {
            next += clusters;
            (start, clusters)
        });
        let blocks: Vec<_> =
            missing.iter().zip(next..).map(|(&block, cluster)| (block, cluster)).collect();
        next += blocks.len() as u64;
        for &(block, cluster) in &blocks {
            table[block as usize] = cluster << bits;
        }
        if next > start {
            used.push(start..next);
        }
        let grown = Grown {
            end,
            table,
            blocks: missing,
            used: std::mem::take(used),
            fresh: false,
            has_space: false,
        };
        Growth { grown, blocks, table_at }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_ring::Segments;
    use blockyard_storage::sim::{Sim, SimConfig, SimDisk, SimImage};

    use super::*;
    use crate::extent::NoBacking;
    use crate::qcow2::{CreateOptions, Header, Qcow2Options, create};
    use crate::{Alignment, Raw};

    /// Its refcount table would take terabytes.
    #[test]
    fn a_crafted_file_of_great_length_does_not_grow() {
        const LENGTH: u64 = 1 << 54;
        let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
        let test = async move {
            let raw = || Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
            let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(1 << 20) };
            create(&raw(), None, &options).await.unwrap();
            raw().storage().set_len(LENGTH).await.unwrap();
            let header = Header::read(&raw()).await.unwrap();
            let image = Qcow2::open(header, raw(), None, &Qcow2Options::default()).await.unwrap();
            // One refcount block has room for 256 clusters.
            let bytes = Segments::from_bytes(&[1; 256 * 512]);
            let error = image.write(&NoBacking, bytes, 0).await.1.unwrap_err().to_string();
            assert!(error.contains("too large for a refcount table"), "{error}");
            assert_eq!(raw().storage().len().await.unwrap(), LENGTH);
        };
        Sim::new(1).block_on(test).unwrap();
    }
}
