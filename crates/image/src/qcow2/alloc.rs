//! Host clusters: reserved ahead, in runs, and given back when nothing needs them any more.
//!
//! In: requests for clusters; clusters that an entry has let go of. Out: clusters whose refcount is
//! 1 in memory, and will be in the file before an entry that names them (flush.rs). What must hold:
//! a cluster that is given out has refcount 0 in the file, or belongs to nobody there; one that was
//! let go of is used again only when the entry without it is durable, and everybody who looked it
//! up before has left. A power cut leaves reserved clusters as leaks, at most [`LARGEST_RUN`]
//! bytes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::refblock::RefcountWidth;

/// Bytes reserved at once: few at first, so that a small image stays small, then twice as many each
/// time.
const SMALLEST_RUN: u64 = 1 << 20;
const LARGEST_RUN: u64 = 64 << 20;

/// Bytes of refcount blocks kept in memory, beyond those that have changes; with these, twice as
/// many until they are written.
const BLOCKS_KEPT: usize = 8 << 20;

/// The unit in which changes of refcount blocks are written.
pub const SECTION: usize = 4096;

/// Host clusters that lie side by side, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub start: u64,
    pub count: u64,
    /// They have never held anything: they read as zeroes.
    pub fresh: bool,
}

/// Clusters that an entry let go of. They lose one reference each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    pub start: u64,
    pub count: u64,
    /// Compressed data may be known by their place (compressed.rs): it means something else
    /// afterwards.
    pub compressed: bool,
}

#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    dirty: BTreeSet<usize>,
    writing: bool,
}

/// A changed section of a refcount block, as it is to be in the file.
#[derive(Debug)]
pub struct ChangedSection {
    pub block: u64,
    pub section: usize,
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// How a file was made longer.
#[derive(Debug)]
pub struct Grown {
    /// Clusters of the file now.
    pub end: u64,
    /// The refcount table as it is now.
    pub table: Vec<u64>,
    /// Refcount blocks that are new, all zeroes.
    pub blocks: Vec<u64>,
    /// New clusters that hold tables, in order.
    pub used: Vec<std::ops::Range<u64>>,
    /// The new clusters read as zeroes.
    pub fresh: bool,
}

#[derive(Debug)]
pub struct Allocator {
    cluster_bits: u32,
    width: RefcountWidth,
    /// Bytes reserved at once: at first, and at most.
    runs: (u64, u64),
    state: Mutex<AllocatorState>,
}

#[derive(Debug, Default)]
struct AllocatorState {
    /// Reserved, and not given out.
    runs: VecDeque<Run>,
    /// Bytes of the next run.
    next_run: u64,
    /// The refcount table: offsets of blocks, 0 for none.
    table: Vec<u64>,
    blocks: BTreeMap<u64, Block>,
    /// How often blocks were let go of.
    evictions: u64,
    /// No cluster below is free.
    hint: u64,
    /// Clusters of the file. Those beyond have never been used.
    end: u64,
    /// Clusters from here on hold nothing.
    touched: u64,
    /// What entries have let go of in memory; then what is waiting for those who may still use it.
    freed: Vec<Freed>,
    leaving: Vec<Freed>,
}

impl Allocator {
    /// `table`: the refcount table; `end`: clusters of the file; `run`: bytes to reserve at once,
    /// always.
    pub fn new(
        cluster_bits: u32,
        width: RefcountWidth,
        table: Vec<u64>,
        end: u64,
        run: Option<u64>,
    ) -> Self {
        let runs = run.map_or((SMALLEST_RUN, LARGEST_RUN), |run| (run, run));
        let state = AllocatorState { table, end, next_run: runs.0, ..AllocatorState::default() };
        Allocator { cluster_bits, width, runs, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, AllocatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clusters that one refcount block counts.
    pub fn per_block(&self) -> u64 {
        self.width.per_block(1 << self.cluster_bits)
    }

    /// Up to `most` clusters that lie side by side. None: there are none, until somebody reserves
    /// more.
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

    /// Clusters that were taken and not used.
    pub fn put_back(&self, run: Run) {
        if run.count > 0 {
            self.state().runs.push_front(run);
        }
    }

    pub fn has_some(&self) -> bool {
        !self.state().runs.is_empty()
    }

    /// Takes all that is reserved, to be given back to the file.
    pub fn take_reserved(&self) -> Vec<Run> {
        let mut state = self.state();
        state.next_run = self.runs.0;
        state.runs.drain(..).collect()
    }

    /// Bytes to reserve next.
    pub fn next_run(&self) -> u64 {
        let mut state = self.state();
        let now = state.next_run;
        state.next_run = (now * 2).min(self.runs.1);
        now.max(1 << self.cluster_bits)
    }

    /// The refcount block in which a free cluster may be found next, and its offset; None: there is
    /// none below the file's end.
    pub fn block_to_search(&self) -> Option<(u64, u64)> {
        let mut state = self.state();
        let per_block = self.per_block();
        while state.hint < state.end {
            let block = state.hint / per_block;
            match state.table.get(block as usize) {
                Some(&offset) if offset != 0 => return Some((block, offset)),
                // Not counted: nothing is reserved there.
                _ => state.hint = (block + 1) * per_block,
            }
        }
        None
    }

    /// Reserves the first free clusters that `block`, which is in memory, counts: `most` at most.
    /// False: it has none.
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
        runs.push_back(Run { start, count, fresh: false });
        true
    }

    /// Where the file ends, and the refcount blocks that are missing for `count` clusters from
    /// there.
    pub fn beyond_the_end(&self, count: u64) -> (u64, Vec<u64>) {
        let state = self.state();
        let blocks = state.end / self.per_block()..=(state.end + count - 1) / self.per_block();
        let missing = |b: &u64| state.table.get(*b as usize).is_none_or(|&offset| offset == 0);
        (state.end, blocks.filter(missing).collect())
    }

    pub fn table(&self) -> Vec<u64> {
        self.state().table.clone()
    }

    /// The counts of `clusters` in `block`, which is to be new, as they are to be in the file: 1
    /// each, others 0.
    pub fn first_counts(&self, block: u64, clusters: &std::ops::Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; 1 << self.cluster_bits];
        let first = block * self.per_block();
        for cluster in clusters.start.max(first)..clusters.end.min(first + self.per_block()) {
            self.width.set(&mut bytes, (cluster - first) as usize, 1);
        }
        bytes
    }

    /// Counts clusters that are to hold tables, as far as the block `number` counts them, which is
    /// in the file already; gives its bytes and its offset. None: it is not in memory.
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

    /// Nothing was written there, though it lies beyond the end.
    pub fn is_untouched(&self, cluster: u64) -> bool {
        cluster >= self.state().touched
    }

    /// Clusters up to here were written to by a growth that failed.
    pub fn touched(&self, end: u64) {
        let mut state = self.state();
        state.touched = state.touched.max(end);
    }

    /// The file is longer, and new refcount blocks are in it. All of the new clusters are in use
    /// now: those of `used` hold tables, the others are reserved. `Err`: this block is not in
    /// memory, and nothing is done.
    pub fn extended(&self, grown: &Grown) -> Result<(), u64> {
        let mut state = self.state();
        let old_end = state.end;
        let counting = self.block_of(old_end)..=self.block_of(grown.end - 1);
        let known = |b: &u64| state.blocks.contains_key(b) || grown.blocks.contains(b);
        if let Some(absent) = counting.clone().find(|b| !known(b)) {
            return Err(absent);
        }
        state.end = grown.end;
        state.table.clone_from(&grown.table);
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
                state.runs.push_back(Run { start, count: range.start - start, fresh: grown.fresh });
            }
            start = range.end;
        }
        if state.hint >= old_end {
            state.hint = grown.end;
        }
        // Those just added have changes: they stay.
        state.let_blocks_go(self.cluster_bits);
        Ok(())
    }

    pub fn block_of(&self, cluster: u64) -> u64 {
        cluster / self.per_block()
    }

    /// The offset of a refcount block that is not in memory, and what [`Allocator::loaded`] is to
    /// be told; None: it is, or there is none.
    pub fn to_load(&self, block: u64) -> Option<(u64, u64)> {
        let state = self.state();
        if state.blocks.contains_key(&block) {
            return None;
        }
        let offset = state.table.get(block as usize).copied().filter(|&offset| offset != 0)?;
        Some((offset, state.evictions))
    }

    /// The file has such a refcount block.
    pub fn has_block(&self, block: u64) -> bool {
        self.state().table.get(block as usize).is_some_and(|&offset| offset != 0)
    }

    /// A block that was read after [`Allocator::to_load`] said `seen`. If blocks have gone since,
    /// it may have been among them, with changes that what was read has not: then it is to be read
    /// again.
    pub fn loaded(&self, block: u64, bytes: Vec<u8>, seen: u64) {
        let mut state = self.state();
        if state.evictions != seen {
            return;
        }
        state.let_blocks_go(self.cluster_bits);
        state.blocks.entry(block).or_insert(Block {
            bytes,
            dirty: BTreeSet::new(),
            writing: false,
        });
    }

    /// The refcount of a cluster whose block is in memory, or has none.
    pub fn count(&self, cluster: u64) -> Option<u64> {
        let state = self.state();
        let block = state.blocks.get(&self.block_of(cluster))?;
        Some(self.width.get(&block.bytes, (cluster % self.per_block()) as usize))
    }

    /// Adds a reference to a cluster. False: its count is as large as it can be. None: its block is
    /// not in memory.
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

    /// Takes one reference from a cluster: true when none is left. None: its block is not in
    /// memory.
    pub fn release(&self, cluster: u64) -> Option<bool> {
        let mut state = self.state();
        let index = (cluster % self.per_block()) as usize;
        let block = self.block_of(cluster);
        let counts = state.blocks.get_mut(&block)?;
        let count = self.width.get(&counts.bytes, index);
        // 0 already: the image was wrong; it stays as free as it was said to be.
        counts.set(self.width, index, count.saturating_sub(1));
        if count == 1 {
            state.hint = state.hint.min(cluster);
        }
        Some(count == 1)
    }

    /// An entry was changed, and names these no more.
    pub fn let_go(&self, freed: Freed) {
        let mut state = self.state();
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

    /// Clusters let go of, and not yet released.
    pub fn freed(&self) -> u64 {
        let state = self.state();
        state.freed.iter().chain(&state.leaving).map(|freed| freed.count).sum()
    }

    /// What was let go of so far: to be given to [`Allocator::all_durable`] when the entries
    /// without it are durable.
    pub fn take_freed(&self) -> Vec<Freed> {
        std::mem::take(&mut self.state().freed)
    }

    pub fn freed_again(&self, mut freed: Vec<Freed>) {
        self.state().freed.append(&mut freed);
    }

    /// These may be released when those who may use them have left.
    pub fn all_durable(&self, mut freed: Vec<Freed>) {
        self.state().leaving.append(&mut freed);
    }

    pub fn take_leaving(&self) -> Vec<Freed> {
        std::mem::take(&mut self.state().leaving)
    }

    pub fn has_changed_counts(&self) -> bool {
        self.state().blocks.values().any(|b| !b.dirty.is_empty())
    }

    /// Takes copies of the refcounts that have changed. Each comes back by
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
        state.let_blocks_go(self.cluster_bits);
    }

    /// Changed refcount blocks take so much memory that they should be written before more are
    /// changed.
    pub fn is_crowded(&self) -> bool {
        let mut state = self.state();
        let too_many =
            |state: &AllocatorState| state.blocks.len() << self.cluster_bits > 2 * BLOCKS_KEPT;
        if too_many(&state) {
            state.let_blocks_go(self.cluster_bits);
        }
        too_many(&state)
    }

    /// Bytes of refcount blocks in memory.
    #[cfg(test)]
    pub fn block_bytes(&self) -> usize {
        self.state().blocks.len() << self.cluster_bits
    }

    pub fn end(&self) -> u64 {
        self.state().end
    }

    pub fn set_end(&self, end: u64) {
        self.state().end = end;
    }
}

impl AllocatorState {
    /// Where there are many refcount blocks, those go that are in the file as they are. Whoever
    /// needs one more loads it, and looks again whether it is there.
    fn let_blocks_go(&mut self, cluster_bits: u32) {
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
