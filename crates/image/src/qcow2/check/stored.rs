//! Compares the stored refcounts with the counted references.
//!
//! In: the refcount table and its blocks; the counts. Out: refcounts that are too low, and leaks,
//! repaired in place if requested. Invariant: a refcount is never lowered below the counted
//! references.

use std::collections::HashSet;
use std::ops::Range;

use blockyard_storage::Storage;

use super::counts::{Counts, PAGE};
use super::report::{FindingKind, Tally};
use crate::error::ImageError;
use crate::qcow2::encoding::bytes::{self, LastHole};
use crate::qcow2::encoding::entry::{self, EntryError, EntryFormat};
use crate::qcow2::encoding::header::Header;
use crate::qcow2::encoding::refblock::RefcountWidth;
use crate::raw::Raw;

/// Maximum number of ranges of freed clusters that are deallocated in the host, for one refcount
/// block.
const FREED: usize = 1 << 16;
/// Number of clusters that are skipped at once if they have neither refcounts nor references. It
/// divides [`PAGE`].
const STEP: u64 = 64;

/// The usable refcount blocks.
pub struct Refcounts {
    pub width: RefcountWidth,
    cluster_bits: u32,
    table_len: u64,
    blocks: Vec<Option<u64>>,
}

impl Refcounts {
    /// Reads the refcount table. Reports unusable entries, and ignores them.
    pub async fn load(file: &Raw, header: &Header, tally: &mut Tally) -> Result<Self, ImageError> {
        let structure = "qcow2 refcount table";
        let at = header.refcount_table_offset;
        let file_len =
            file.storage().len().await.map_err(|e| ImageError::io(structure, at, "reading", e))?;
        let table_len = u64::from(header.refcount_table_clusters) << header.cluster_bits;
        let (width, cluster_bits) = (header.refcount_width(), header.cluster_bits);
        let mut refcounts = Refcounts { width, cluster_bits, table_len, blocks: Vec::new() };
        if table_len == 0 || at == 0 || at + table_len >= file_len + header.cluster_size() {
            refcounts.table_len = 0;
            tally.rebuild = true;
            let text = format_args!("there is none in the file");
            tally.find(FindingKind::RefcountStructure, format_args!("{structure}"), at, text);
            return Ok(refcounts);
        }
        let table = bytes::read(file, at, table_len as usize).await;
        let table = table.map_err(|e| ImageError::io(structure, at, "reading", e))?;
        let mut seen = HashSet::new();
        let layout = EntryFormat::of(header);
        // Most tables have room for thousands of blocks that do not exist.
        for (index, word) in bytes::words(bytes::used_words(&table)) {
            let block = match entry::refcount_block(word, layout) {
                Ok(Some(block)) if block >= file_len => Err(EntryError::BeyondFile),
                Ok(Some(block)) if !seen.insert(block) => Err(EntryError::Repeated),
                other => other,
            };
            if let Err(what) = block {
                tally.rebuild = true;
                let (structure, text) =
                    (format_args!("{structure} entry {index}"), format_args!("{word:#x}: {what}"));
                tally.find(FindingKind::RefcountStructure, structure, at + index * 8, text);
            }
            refcounts.blocks.push(block.unwrap_or(None));
        }
        Ok(refcounts)
    }

    pub fn cluster_bits(&self) -> u32 {
        self.cluster_bits
    }

    pub fn table_len(&self) -> u64 {
        self.table_len
    }

    /// Returns the usable blocks and their numbers.
    pub fn blocks(&self) -> impl Iterator<Item = (u64, u64)> {
        (0..).zip(&self.blocks).filter_map(|(index, block)| Some((index, (*block)?)))
    }

    /// Number of clusters that one refcount block covers.
    pub fn per_block(&self) -> u64 {
        self.width.per_block(1 << self.cluster_bits)
    }

    /// Returns the offset of the block that holds a cluster's refcount.
    pub fn block_of(&self, cluster: u64) -> Option<u64> {
        *self.blocks.get(usize::try_from(cluster / self.per_block()).ok()?)?
    }

    /// Reads a refcount block at an offset.
    pub async fn read_block(&self, file: &Raw, block: u64) -> Result<Vec<u8>, ImageError> {
        let read = bytes::read(file, block, 1 << self.cluster_bits).await;
        read.map_err(|e| ImageError::io("qcow2 refcount block", block, "reading", e))
    }
}

/// Comparison of the stored refcounts with the counted references. Repairs refcounts in place if
/// requested.
pub struct Compare<'a> {
    pub file: &'a Raw,
    pub refcounts: &'a Refcounts,
    pub counts: &'a mut Counts,
    pub tally: &'a mut Tally,
    pub file_len: u64,
    /// None: only check.
    pub repair: Option<RefcountRepair>,
    pub hole: LastHole,
}

/// Which refcounts a repair changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefcountRepair {
    pub raise: bool,
    pub lower: bool,
    /// Whether the host deallocates clusters if their refcount becomes 0.
    pub deallocate: bool,
}

impl Compare<'_> {
    /// Compares all refcounts of the clusters that the counts cover (their window).
    pub async fn run(&mut self) -> Result<(), ImageError> {
        let (window, per_block) = (self.counts.window(), self.refcounts.per_block());
        let pages = self.counts.page_numbers();
        for (index, block) in self.refcounts.blocks() {
            let range = index * per_block..(index + 1) * per_block;
            self.tally.rebuild |= self.counts.get(block >> self.refcounts.cluster_bits).overlap;
            if range.start < window.end && window.start < range.end {
                self.block(
                    block,
                    range.start.max(window.start)..range.end.min(window.end),
                    range.start,
                    &pages,
                )
                .await?;
            }
        }
        self.without_block();
        Ok(())
    }

    fn clusters(&self) -> u64 {
        self.file_len.div_ceil(1 << self.refcounts.cluster_bits)
    }

    /// Compares the clusters of one block. `pages`: see [`Counts::page_numbers`].
    async fn block(
        &mut self,
        at: u64,
        range: Range<u64>,
        base: u64,
        pages: &[u64],
    ) -> Result<(), ImageError> {
        // Refcounts beyond the file's end matter only when the file grows: only a repair needs
        // them.
        if self.repair.is_none() && range.start > self.clusters() {
            return Ok(());
        }
        // A crafted image can name a million blocks that are holes. All refcounts of a hole are 0.
        let len: u64 = 1 << self.refcounts.cluster_bits;
        let is_hole = self.hole.covers(self.file, at, len, self.file_len).await;
        if is_hole && !has_page(pages, &range) {
            return Ok(());
        }
        let read = match is_hole {
            true => Ok(vec![0; len as usize]),
            false => self.refcounts.read_block(self.file, at).await,
        };
        let mut block = match read {
            Ok(block) => block,
            Err(e) => {
                self.tally.incomplete = true;
                let structure = format_args!("qcow2 refcount block");
                self.tally.find(FindingKind::Unreadable, structure, at, format_args!("{e}"));
                return Ok(());
            }
        };
        let (width, mut dirty, mut freed) = (self.refcounts.width, None, Vec::new());
        let mut cluster = range.start;
        while cluster < range.end {
            let step = (STEP - cluster % STEP).min(range.end - cluster);
            let n = (cluster - base) as usize;
            let bits = (n << width.order(), (n + step as usize) << width.order());
            let quiet = block[bits.0 / 8..bits.1.div_ceil(8)].iter().all(|&byte| byte == 0);
            if quiet && !self.counts.has_any(cluster, step) {
                cluster += step;
                continue;
            }
            for here in cluster..cluster + step {
                let n = (here - base) as usize;
                let stored = width.get(&block, n);
                if stored == 1 && self.counts.agree_on_one(here) {
                    self.tally.end_at((here + 1) << self.refcounts.cluster_bits);
                } else if let Some(new) = self.cluster(here, stored) {
                    width.set(&mut block, n, new);
                    let byte = (n << width.order()) / 8;
                    let (first, _) = *dirty.get_or_insert((byte, byte));
                    dirty = Some((first, byte));
                    if new == 0 && self.repair.is_some_and(|repair| repair.deallocate) {
                        note_freed(&mut freed, here);
                    }
                }
            }
            cluster += step;
        }
        if let Some((first, last)) = dirty {
            let (start, end) = (first & !511, (last + 1).next_multiple_of(512));
            let write = bytes::write(self.file, at + start as u64, &block[start..end]).await;
            write.map_err(|e| ImageError::io("qcow2 refcount block", at, "writing", e))?;
        }
        self.give_back(&freed).await
    }

    /// Compares one cluster; returns its correct refcount. None: no change.
    fn cluster(&mut self, cluster: u64, stored: u64) -> Option<u64> {
        let count = self.counts.get(cluster).references;
        if stored == 0 && count == 0 {
            return None;
        }
        let bits = self.refcounts.cluster_bits;
        let inside = cluster < self.clusters() || count > 0;
        let structure = format_args!("qcow2 refcount of cluster {cluster}");
        let text = format_args!("it is {stored}, and {count} references were counted");
        let change = if stored < count {
            self.tally.find(FindingKind::RefcountTooLow, structure, cluster << bits, text);
            self.repair.is_some_and(|change| change.raise && count <= self.refcounts.width.max())
        } else {
            if stored > count && inside {
                self.tally.find(FindingKind::Leak, structure, cluster << bits, text);
            }
            stored > count && self.repair.is_some_and(|change| change.lower)
        };
        let new = if change { count } else { stored };
        if inside && (count > 0 || new > 0) {
            self.tally.end_at((cluster + 1) << bits);
        }
        if count > 0 {
            self.counts.set_stored_one(cluster, new == 1);
        }
        change.then_some(new)
    }

    /// Reports referenced clusters without a refcount block.
    fn without_block(&mut self) {
        let mut end = 0;
        for cluster in
            self.counts.clusters().filter(|&cluster| self.refcounts.block_of(cluster).is_none())
        {
            let references = self.counts.get(cluster).references;
            self.tally.rebuild = true;
            let structure = format_args!("qcow2 refcount of cluster {cluster}");
            let text =
                format_args!("it has no refcount block, and {references} references were counted");
            let at = cluster << self.refcounts.cluster_bits;
            self.tally.find(FindingKind::RefcountTooLow, structure, at, text);
            end = (cluster + 1) << self.refcounts.cluster_bits;
        }
        self.tally.end_at(end);
    }

    /// Deallocates freed clusters in the host.
    async fn give_back(&self, freed: &[(u64, u64)]) -> Result<(), ImageError> {
        let bits = self.refcounts.cluster_bits;
        for &(first, end) in freed {
            let discarded = self.file.discard(first << bits, (end - first) << bits).await;
            discarded.map_err(|e| {
                ImageError::io("qcow2 freed clusters", first << bits, "discarding", e)
            })?;
        }
        Ok(())
    }
}

/// Returns whether one of the ascending `pages` has clusters of `range`.
fn has_page(pages: &[u64], range: &Range<u64>) -> bool {
    let at = pages.partition_point(|&page| page < range.start / PAGE);
    pages.get(at).is_some_and(|&page| page * PAGE < range.end)
}

/// Adds a cluster to the ranges of freed clusters, unless there are too many ranges.
fn note_freed(freed: &mut Vec<(u64, u64)>, cluster: u64) {
    let room = freed.len() < FREED;
    match freed.last_mut() {
        Some((_, end)) if *end == cluster => *end += 1,
        _ if room => freed.push((cluster, cluster + 1)),
        _ => {}
    }
}
