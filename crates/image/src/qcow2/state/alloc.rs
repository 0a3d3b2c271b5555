//! Allocates host clusters. Clusters are reserved ahead in runs, and released when nothing needs
//! them any more.
//!
//! In: requests for clusters; clusters that an L2 entry no longer names. Out: clusters with
//! refcount 1 in memory, which becomes 1 in the file before an entry names them (flush.rs).
//!
//! Invariants: an allocated cluster has refcount 0 in the file, or is a leak there. A freed cluster
//! is reused only after two events: the entry without it is durable, and all requests that may have
//! looked it up have left their epoch. A power cut leaves reserved clusters as leaks, at most
//! [`LARGEST_RUN`] bytes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::qcow2::encoding::refblock::RefcountWidth;

/// Size of the first reservation of clusters, and of the largest one, in bytes. The first one is
/// small, to keep small images small. Each next one is twice as large.
const SMALLEST_RUN: u64 = 1 << 20;
const LARGEST_RUN: u64 = 64 << 20;

/// Maximum size of the cached clean refcount blocks, in bytes. Dirty blocks are written back when
/// all cached blocks together take more than twice this size.
const BLOCKS_KEPT: usize = 8 << 20;

/// Unit in which changes of refcount blocks are written, in bytes.
pub const SECTION: usize = 4096;

/// Consecutive host clusters, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub start: u64,
    pub count: u64,
    /// Whether the clusters were never written, so that they read as zeroes.
    pub fresh: bool,
    /// Whether the host has allocated the space of the clusters since they were reserved.
    pub has_space: bool,
}

/// Clusters that an entry no longer names. Each loses one reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    pub start: u64,
    pub count: u64,
    /// Whether the clusters held compressed data. Caches of decompressed clusters use the host
    /// offset as key, so their entries become invalid.
    pub compressed: bool,
}

#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    dirty: BTreeSet<usize>,
    writing: bool,
}

/// Copy of a changed section of a refcount block, to be written to the file.
#[derive(Debug)]
pub struct ChangedSection {
    pub block: u64,
    pub section: usize,
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// Result of extending the file.
#[derive(Debug)]
pub struct Grown {
    /// Number of clusters of the file after the extension.
    pub end: u64,
    /// The refcount table after the extension.
    pub table: Vec<u64>,
    /// New refcount blocks, all zeroes.
    pub blocks: Vec<u64>,
    /// New clusters that hold metadata, ascending.
    pub used: Vec<std::ops::Range<u64>>,
    /// Whether the new clusters read as zeroes.
    pub fresh: bool,
    /// Whether the host has allocated their space.
    pub has_space: bool,
}

/// Allocator of host clusters, shared by all reactors.
#[derive(Debug)]
pub struct Allocator {
    cluster_bits: u32,
    width: RefcountWidth,
    /// Size of the first reservation and of the largest one, in bytes.
    runs: (u64, u64),
    state: Mutex<AllocatorState>,
}

#[derive(Debug, Default)]
struct AllocatorState {
    /// Clusters that are reserved and not yet allocated.
    runs: VecDeque<Run>,
    /// Size of the next reservation, in bytes.
    next_run: u64,
    /// The refcount table: offsets of the blocks, 0 for none. Ends behind the last block; most
    /// tables have room for thousands of blocks that do not exist.
    table: Vec<u64>,
    /// Number of entries of the table in the file.
    table_len: usize,
    blocks: BTreeMap<u64, Block>,
    /// Number of times that blocks were evicted.
    evictions: u64,
    /// No cluster below this number is free.
    hint: u64,
    /// Number of clusters of the file. Clusters beyond it have never been used.
    end: u64,
    /// Clusters from this number on have never been written, not even by an extension that failed.
    touched: u64,
    /// `freed`: clusters that entries in memory no longer name. `leaving`: clusters whose changed
    /// entries are durable, and which wait for the epoch of their readers.
    freed: Vec<Freed>,
    leaving: Vec<Freed>,
    /// Number of clusters in both.
    freed_clusters: u64,
}

impl Allocator {
    /// Creates the allocator. `table`: the refcount table; `end`: number of clusters of the file;
    /// `run`: bytes to reserve each time (None: growing runs).
    pub fn new(
        cluster_bits: u32,
        width: RefcountWidth,
        table: Vec<u64>,
        end: u64,
        run: Option<u64>,
    ) -> Self {
        let runs = run.map_or((SMALLEST_RUN, LARGEST_RUN), |run| (run, run));
        let mut state = AllocatorState { end, next_run: runs.0, ..AllocatorState::default() };
        state.set_table(&table);
        Allocator { cluster_bits, width, runs, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, AllocatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of clusters that one refcount block covers.
    pub fn per_block(&self) -> u64 {
        self.width.per_block(1 << self.cluster_bits)
    }

    /// Allocates up to `most` consecutive clusters. None: reserve more first.
    pub fn take(&self, most: u64) -> Option<Run> {
        let mut state = self.state();
        let run = state.runs.front_mut()?;
        let taken = Run { count: run.count.min(most), ..*run };
        run.start += taken.count;
        run.count -= taken.count;
        if run.count == 0 {
            state.runs.pop_front();
        }
        Some(taken)
    }

    /// Makes clusters available again that were allocated but not used.
    pub fn put_back(&self, run: Run) {
        if run.count > 0 {
            self.state().runs.push_front(run);
        }
    }

    /// Returns true if clusters are reserved.
    pub fn has_some(&self) -> bool {
        !self.state().runs.is_empty()
    }

    /// Takes all reserved clusters, to release them.
    pub fn take_reserved(&self) -> Vec<Run> {
        let mut state = self.state();
        state.next_run = self.runs.0;
        state.runs.drain(..).collect()
    }

    /// Returns the number of bytes to reserve next.
    pub fn next_run(&self) -> u64 {
        let mut state = self.state();
        let now = state.next_run;
        state.next_run = (now * 2).min(self.runs.1);
        now.max(1 << self.cluster_bits)
    }

    /// Returns number and offset of the next refcount block that may have free clusters. None: no
    /// such block exists below the file's end.
    pub fn block_to_search(&self) -> Option<(u64, u64)> {
        let mut state = self.state();
        let per_block = self.per_block();
        while state.hint < state.end {
            let block = state.hint / per_block;
            match state.table.get(block as usize) {
                Some(&offset) if offset != 0 => return Some((block, offset)),
                // This range has no refcount block: skip it.
                Some(_) => state.hint = (block + 1) * per_block,
                // No later range has one, however long a sparse file is.
                None => state.hint = state.end,
            }
        }
        None
    }

    /// Reserves the first run of free clusters that the refcount block `block` covers, at most
    /// `most` clusters. Returns false if the block has no free cluster, or is not cached.
    pub fn reserve_in(&self, block: u64, most: u64) -> bool {
        let mut state = self.state();
        let (first, per_block) = (block * self.per_block(), self.per_block());
        let last = (first + per_block).min(state.end);
        let AllocatorState { hint, blocks, runs, .. } = &mut *state;
        let Some(counts) = blocks.get_mut(&block) else { return false };
        let from = (*hint).max(first);
        let free =
            |bytes: &[u8], cluster: u64| self.width.get(bytes, (cluster - first) as usize) == 0;
        let Some(start) = (from..last).find(|&c| free(&counts.bytes, c)) else {
            *hint = (*hint).max(first + per_block);
            return false;
        };
        let count =
            (start..last).take(most as usize).take_while(|&c| free(&counts.bytes, c)).count()
                as u64;
        for cluster in start..start + count {
            counts.set(self.width, (cluster - first) as usize, 1);
        }
        *hint = start + count;
        runs.push_back(Run { start, count, fresh: false, has_space: false });
        true
    }

    /// Returns the file's end in clusters, and the numbers of the refcount blocks that are missing
    /// for the `count` clusters behind that end.
    pub fn beyond_the_end(&self, count: u64) -> (u64, Vec<u64>) {
        let state = self.state();
        let blocks = state.end / self.per_block()..=(state.end + count - 1) / self.per_block();
        let missing = |b: &u64| state.table.get(*b as usize).is_none_or(|&offset| offset == 0);
        (state.end, blocks.filter(missing).collect())
    }

    /// Returns the refcount table: offsets of the blocks, 0 for none.
    pub fn table(&self) -> Vec<u64> {
        let state = self.state();
        let mut table = state.table.clone();
        table.resize(state.table_len, 0);
        table
    }

    /// Returns the contents of the new refcount block `block`: 1 for each of `clusters`, 0 for
    /// others.
    pub fn first_counts(&self, block: u64, clusters: &std::ops::Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; 1 << self.cluster_bits];
        let first = block * self.per_block();
        for cluster in clusters.start.max(first)..clusters.end.min(first + self.per_block()) {
            self.width.set(&mut bytes, (cluster - first) as usize, 1);
        }
        bytes
    }

    /// Sets the refcounts of the clusters of new tables to 1 in refcount block `number`, which is
    /// in the file already. Returns the block's offset and bytes. None: the block is not cached.
    pub fn count_tables(
        &self,
        number: u64,
        clusters: &std::ops::Range<u64>,
    ) -> Option<(u64, Vec<u8>)> {
        let mut state = self.state();
        let offset = state.table.get(number as usize).copied()?;
        let block = state.blocks.get_mut(&number)?;
        let first = number * self.per_block();
        for cluster in clusters.start.max(first)..clusters.end.min(first + self.per_block()) {
            block.set(self.width, (cluster - first) as usize, 1);
        }
        Some((offset, block.bytes.clone()))
    }

    /// Returns true if the cluster was never written, not even by an extension that failed.
    pub fn is_untouched(&self, cluster: u64) -> bool {
        cluster >= self.state().touched
    }

    /// Records that a failed extension may have written clusters up to `end`.
    pub fn touched(&self, end: u64) {
        let mut state = self.state();
        state.touched = state.touched.max(end);
    }

    /// Takes over a finished extension of the file. All new clusters are in use now: those of
    /// `used` hold tables, the others are reserved. `Err`: the refcount block with this number must
    /// be loaded first; nothing was changed.
    pub fn extended(&self, grown: &Grown) -> Result<(), u64> {
        let mut state = self.state();
        let old_end = state.end;
        let counting = self.block_of(old_end)..=self.block_of(grown.end - 1);
        let known = |b: &u64| state.blocks.contains_key(b) || grown.blocks.contains(b);
        if let Some(absent) = counting.clone().find(|b| !known(b)) {
            return Err(absent);
        }
        state.end = grown.end;
        state.set_table(&grown.table);
        for &block in &grown.blocks {
            let bytes = vec![0; 1 << self.cluster_bits];
            state.blocks.insert(block, Block { bytes, dirty: BTreeSet::new(), writing: false });
        }
        for cluster in old_end..grown.end {
            let (block, index) = (self.block_of(cluster), (cluster % self.per_block()) as usize);
            if let Some(block) = state.blocks.get_mut(&block) {
                block.set(self.width, index, 1);
            }
        }
        let mut start = old_end;
        for range in grown.used.iter().cloned().chain(std::iter::once(grown.end..grown.end)) {
            if range.start > start {
                let (count, &Grown { fresh, has_space, .. }) = (range.start - start, grown);
                state.runs.push_back(Run { start, count, fresh, has_space });
            }
            start = range.end;
        }
        if state.hint >= old_end {
            state.hint = grown.end;
        }
        // The new refcount blocks are dirty, so they are not evicted.
        state.evict_blocks(self.cluster_bits);
        Ok(())
    }

    /// Returns the number of the refcount block that covers a cluster.
    pub fn block_of(&self, cluster: u64) -> u64 {
        cluster / self.per_block()
    }

    /// Returns the offset of a refcount block that is not cached, and the `seen` value for
    /// [`Allocator::loaded`]. None: the block is cached, or does not exist.
    pub fn to_load(&self, block: u64) -> Option<(u64, u64)> {
        let state = self.state();
        if state.blocks.contains_key(&block) {
            return None;
        }
        let offset = state.table.get(block as usize).copied().filter(|&offset| offset != 0)?;
        Some((offset, state.evictions))
    }

    /// Returns true if the file has this refcount block.
    pub fn has_block(&self, block: u64) -> bool {
        self.state().table.get(block as usize).is_some_and(|&offset| offset != 0)
    }

    /// Inserts a block that was read after [`Allocator::to_load`] returned `seen`. If blocks were
    /// evicted since, this block may have been changed, written and evicted meanwhile. Then the
    /// stale copy is dropped, and the caller reads again.
    pub fn loaded(&self, block: u64, bytes: Vec<u8>, seen: u64) {
        let mut state = self.state();
        if state.evictions != seen {
            return;
        }
        state.evict_blocks(self.cluster_bits);
        state.blocks.entry(block).or_insert(Block {
            bytes,
            dirty: BTreeSet::new(),
            writing: false,
        });
    }

    /// Counts a cluster that a journal names as used, and that the file counts as free. None: its
    /// block is not cached.
    pub fn adopt(&self, cluster: u64) -> Option<()> {
        let mut state = self.state();
        let index = (cluster % self.per_block()) as usize;
        let block = self.block_of(cluster);
        let counts = state.blocks.get_mut(&block)?;
        if self.width.get(&counts.bytes, index) == 0 {
            counts.set(self.width, index, 1);
        }
        Some(())
    }

    /// Raises the number of clusters of the file to at least `end`.
    pub fn reach(&self, end: u64) {
        let mut state = self.state();
        state.end = state.end.max(end);
    }

    /// Returns the refcount of a cluster. None: its block is not cached or does not exist.
    pub fn count(&self, cluster: u64) -> Option<u64> {
        let state = self.state();
        let block = state.blocks.get(&self.block_of(cluster))?;
        Some(self.width.get(&block.bytes, (cluster % self.per_block()) as usize))
    }

    /// Adds a reference to a cluster. Returns false if its refcount is at the maximum. None: its
    /// block is not cached.
    pub fn retain(&self, cluster: u64) -> Option<bool> {
        let mut state = self.state();
        let index = (cluster % self.per_block()) as usize;
        let block = self.block_of(cluster);
        let counts = state.blocks.get_mut(&block)?;
        let count = self.width.get(&counts.bytes, index);
        if count < self.width.max() {
            counts.set(self.width, index, count + 1);
        }
        Some(count < self.width.max())
    }

    /// Drops one reference of a cluster; returns true if none is left. None: its block is not
    /// cached.
    pub fn release(&self, cluster: u64) -> Option<bool> {
        let mut state = self.state();
        let index = (cluster % self.per_block()) as usize;
        let block = self.block_of(cluster);
        let counts = state.blocks.get_mut(&block)?;
        let count = self.width.get(&counts.bytes, index);
        // A refcount of 0 here is a corruption; it stays 0.
        counts.set(self.width, index, count.saturating_sub(1));
        if count == 1 {
            state.hint = state.hint.min(cluster);
        }
        Some(count == 1)
    }

    /// Records clusters that an entry no longer names.
    pub fn let_go(&self, freed: Freed) {
        let mut state = self.state();
        state.freed_clusters += freed.count;
        match state.freed.last_mut() {
            Some(last)
                if last.start + last.count == freed.start
                    && last.compressed == freed.compressed =>
            {
                last.count += freed.count;
            }
            _ => state.freed.push(freed),
        }
    }

    /// Returns the number of clusters freed and not yet released.
    pub fn freed(&self) -> u64 {
        self.state().freed_clusters
    }

    /// Takes the freed clusters. The caller gives them to [`Allocator::all_durable`] when the
    /// entries without them are durable.
    pub fn take_freed(&self) -> Vec<Freed> {
        let mut state = self.state();
        let taken = std::mem::take(&mut state.freed);
        state.freed_clusters -= clusters_of(&taken);
        taken
    }

    /// Takes back clusters that [`Allocator::take_freed`] took, because the entries without them
    /// are not durable.
    pub fn freed_again(&self, mut freed: Vec<Freed>) {
        let mut state = self.state();
        state.freed_clusters += clusters_of(&freed);
        state.freed.append(&mut freed);
    }

    /// Lets these clusters be released after their readers' epoch.
    pub fn all_durable(&self, mut freed: Vec<Freed>) {
        let mut state = self.state();
        state.freed_clusters += clusters_of(&freed);
        state.leaving.append(&mut freed);
    }

    /// Takes the clusters that wait for their readers' epoch.
    pub fn take_leaving(&self) -> Vec<Freed> {
        let mut state = self.state();
        let taken = std::mem::take(&mut state.leaving);
        state.freed_clusters -= clusters_of(&taken);
        taken
    }

    /// Returns true if freed clusters are not released yet.
    pub fn has_freed(&self) -> bool {
        let state = self.state();
        !state.freed.is_empty() || !state.leaving.is_empty()
    }

    /// Returns true if some refcounts in memory differ from the file.
    pub fn has_changed_counts(&self) -> bool {
        self.state().blocks.values().any(|b| !b.dirty.is_empty())
    }

    /// Copies all changed refcounts. The caller returns the copies with
    /// [`Allocator::counts_written`].
    pub fn take_changed_counts(&self) -> Vec<ChangedSection> {
        let mut state = self.state();
        let AllocatorState { table, blocks, .. } = &mut *state;
        let mut changed = Vec::new();
        for (&number, block) in blocks.iter_mut().filter(|(_, b)| !b.dirty.is_empty()) {
            let Some(&offset) = table.get(number as usize) else { continue };
            for section in std::mem::take(&mut block.dirty) {
                let at = section * SECTION;
                let bytes = block.bytes[at..(at + SECTION).min(block.bytes.len())].to_vec();
                changed.push(ChangedSection {
                    block: number,
                    section,
                    offset: offset + at as u64,
                    bytes,
                });
            }
            block.writing = true;
        }
        changed
    }

    /// Takes copies back from a write-back; if it failed, their refcounts are dirty again.
    pub fn counts_written(&self, sections: &[ChangedSection], ok: bool) {
        let mut state = self.state();
        for ChangedSection { block, section, .. } in sections {
            if let Some(block) = state.blocks.get_mut(block) {
                block.writing = false;
                if !ok {
                    block.dirty.insert(*section);
                }
            }
        }
        state.evict_blocks(self.cluster_bits);
    }

    /// Returns true if the dirty refcount blocks take so much memory that they must be written
    /// before more are changed.
    pub fn is_crowded(&self) -> bool {
        let mut state = self.state();
        let too_many =
            |state: &AllocatorState| state.blocks.len() << self.cluster_bits > 2 * BLOCKS_KEPT;
        if too_many(&state) {
            state.evict_blocks(self.cluster_bits);
        }
        too_many(&state)
    }

    /// Returns the number of bytes of cached refcount blocks.
    #[cfg(test)]
    pub fn block_bytes(&self) -> usize {
        self.state().blocks.len() << self.cluster_bits
    }

    /// Returns the number of clusters of the file.
    pub fn end(&self) -> u64 {
        self.state().end
    }

    /// Sets the number of clusters, after the file was truncated.
    pub fn set_end(&self, end: u64) {
        self.state().end = end;
    }
}

fn clusters_of(freed: &[Freed]) -> u64 {
    freed.iter().map(|freed| freed.count).sum()
}

impl AllocatorState {
    /// Stores the table of the file.
    fn set_table(&mut self, table: &[u64]) {
        let used = table.iter().rposition(|offset| *offset != 0).map_or(0, |last| last + 1);
        (self.table, self.table_len) = (table[..used].to_vec(), table.len());
    }

    /// Evicts clean refcount blocks if there are too many. A later user loads them again.
    fn evict_blocks(&mut self, cluster_bits: u32) {
        let before = self.blocks.len();
        if before << cluster_bits > BLOCKS_KEPT {
            self.blocks.retain(|_, b| !b.dirty.is_empty() || b.writing);
            self.evictions += u64::from(self.blocks.len() < before);
        }
    }
}

impl Block {
    fn set(&mut self, width: RefcountWidth, index: usize, count: u64) {
        width.set(&mut self.bytes, index, count);
        self.dirty.insert((index * width.bits() as usize / 8) / SECTION);
    }
}

#[cfg(test)]
mod tests;
