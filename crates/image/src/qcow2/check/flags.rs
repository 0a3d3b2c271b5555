//! Checks the active L1 and L2 tables in guest order: COPIED flags, offsets in an external data
//! file, and statistics.
//!
//! In: the tables; the counts with the stored refcounts. Out: flags that contradict the refcounts,
//! corrected if requested. Invariants: a flag is set only if all references are known and there is
//! exactly one. A table that shares its cluster with other metadata is not written.

use std::collections::HashSet;

use super::counts::Counts;
use super::report::{FindingKind, Tally};
use super::walk::{PIECE_ENTRIES, l2_entries};
use crate::error::ImageError;
use crate::qcow2::encoding::bytes::{self, put64};
use crate::qcow2::encoding::entry::{COPIED, Cluster, EntryFormat, L1Entry, L2Entry};
use crate::qcow2::encoding::header::Header;
use crate::raw::Raw;

/// Which flags a repair changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagRepair {
    pub set: bool,
    pub clear: ClearCopied,
}

/// Which COPIED flags a repair clears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClearCopied {
    None,
    /// Flags of clusters with more than one counted reference, whatever the refcount is now.
    Shared,
    /// Flags of clusters with a refcount other than 1.
    Wrong,
}

/// Check of the active tables.
pub struct Flags<'a> {
    pub file: &'a Raw,
    pub header: &'a Header,
    pub layout: EntryFormat,
    pub file_len: u64,
    /// Length of the external data file in bytes.
    pub data_file_len: Option<u64>,
    pub counts: &'a Counts,
    pub tally: &'a mut Tally,
    /// Result of a pass that changed nothing, and what to change. None: only check.
    pub repair: Option<(&'a Tally, FlagRepair)>,
    /// Where the next cluster would lie in an unfragmented file.
    pub next_offset: u64,
}

/// A table in memory, and the range of its changed bytes.
struct TableBuffer {
    at: u64,
    bytes: Vec<u8>,
    changed: Option<(usize, usize)>,
}

impl TableBuffer {
    fn set(&mut self, index: u64, size: u64, word: u64) {
        let byte = (index * size) as usize;
        put64(&mut self.bytes, byte, word);
        let (first, _) = self.changed.unwrap_or((byte, byte));
        self.changed = Some((first, byte));
    }

    /// Writes the changed sectors.
    async fn write(&self, file: &Raw, structure: &str) -> Result<(), ImageError> {
        let Some((first, last)) = self.changed else { return Ok(()) };
        let (start, end) = (first & !511, (last + 8).next_multiple_of(512).min(self.bytes.len()));
        let write = bytes::write(file, self.at + start as u64, &self.bytes[start..end]).await;
        write.map_err(|e| ImageError::io(structure, self.at, "writing", e))
    }
}

impl Flags<'_> {
    /// Checks all entries, and repairs flags if requested.
    pub async fn run(&mut self) -> Result<(), ImageError> {
        let mut seen = HashSet::new();
        let entries = u64::from(self.header.l1_size);
        if self.header.l1_offset.saturating_add(entries * 8)
            >= self.file_len + self.header.cluster_size()
        {
            return Ok(());
        }
        for first in (0..entries).step_by(PIECE_ENTRIES) {
            let (at, len) = (
                self.header.l1_offset + first * 8,
                (entries - first).min(PIECE_ENTRIES as u64) * 8,
            );
            let Some(bytes) = self.read("qcow2 L1 table", at, len).await else { return Ok(()) };
            let mut edit = TableBuffer { at, bytes, changed: None };
            let tables: Vec<(u64, u64)> =
                bytes::words(&edit.bytes).filter(|(_, word)| *word != 0).collect();
            for (i, word) in tables {
                let Ok(entry) = L1Entry::decode(word, self.layout) else { continue };
                let structure = format_args!("qcow2 L1 table entry {}", first + i);
                if entry.table.is_none() && self.lone_flag(structure, at + i * 8) {
                    edit.set(i, 8, 0);
                }
                let Some(table) = entry.table.filter(|&table| table < self.file_len) else {
                    continue;
                };
                if let Some(copied) = self.judge(structure, at + i * 8, table, entry.copied) {
                    edit.set(i, 8, L1Entry { copied, ..entry }.encode());
                }
                if seen.insert(table) {
                    self.l2_table(table, first + i).await?;
                } else {
                    let text = format_args!("another entry points to the same L2 table");
                    self.tally.find(FindingKind::Overlap, structure, at + i * 8, text);
                }
            }
            if self.may_write(self.header.l1_offset, entries * 8) {
                edit.write(self.file, "qcow2 L1 table").await?;
            }
        }
        Ok(())
    }

    async fn read(&mut self, structure: &str, at: u64, len: u64) -> Option<Vec<u8>> {
        let read = bytes::read_data(self.file, at, len as usize).await;
        if let Err(e) = &read
            && !self.tally.incomplete
        {
            // The earlier walk either read this table or reported an error already.
            self.tally.incomplete = true;
            self.tally.find(
                FindingKind::Unreadable,
                format_args!("{structure}"),
                at,
                format_args!("{e}"),
            );
        }
        read.ok()
    }

    fn may_write(&self, at: u64, len: u64) -> bool {
        let bits = self.header.cluster_bits;
        let mut clusters = at >> bits..(at + len).div_ceil(1 << bits);
        self.repair.is_some_and(|(known, _)| clusters.all(|cluster| known.may_write(cluster)))
    }

    /// Compares a flag with the refcount; returns the correct flag.
    fn judge(
        &mut self,
        structure: std::fmt::Arguments<'_>,
        at: u64,
        offset: u64,
        copied: bool,
    ) -> Option<bool> {
        let cluster = offset >> self.header.cluster_bits;
        if !self.counts.window().contains(&cluster) {
            return None;
        }
        let count = self.counts.get(cluster);
        let once = count.references == 1 && count.stored_one;
        if copied == once {
            return None;
        }
        self.tally.report.unset_flags += u64::from(!copied);
        let text = match copied {
            true => format_args!("the COPIED flag is set, but the refcount is not 1"),
            false => format_args!("the COPIED flag is not set, but the refcount is 1"),
        };
        self.tally.find(FindingKind::Copied, structure, at, text);
        let changed = |change: FlagRepair| match (copied, change.clear) {
            (false, _) => change.set,
            (true, ClearCopied::None) => false,
            (true, ClearCopied::Shared) => count.references > 1,
            (true, ClearCopied::Wrong) => true,
        };
        self.repair.is_some_and(|(_, change)| changed(change)).then_some(once)
    }

    /// Reports a COPIED flag of an entry that names no table; returns whether to clear it.
    fn lone_flag(&mut self, structure: std::fmt::Arguments<'_>, at: u64) -> bool {
        let text = format_args!("the COPIED flag is set, but there is no L2 table");
        self.tally.find(FindingKind::Harmless, structure, at, text);
        self.repair.is_some_and(|(_, change)| change.clear == ClearCopied::Wrong)
    }

    async fn l2_table(&mut self, at: u64, l1_index: u64) -> Result<(), ImageError> {
        let Some(bytes) = self.read("qcow2 L2 table", at, self.header.cluster_size()).await else {
            return Ok(());
        };
        let mut edit = TableBuffer { at, bytes, changed: None };
        self.next_offset = 0;
        let size = self.header.l2_entry_size();
        let entries: Vec<_> =
            l2_entries(&edit.bytes, self.layout).filter(|(_, words)| *words != (0, 0)).collect();
        for (i, (word, bitmap)) in entries {
            let Ok(entry) = L2Entry::decode(word, bitmap, self.layout) else { continue };
            let guest = (l1_index * self.header.l2_entries() + i) << self.header.cluster_bits;
            if let Some(copied) = self.l2_entry(at + i * size, i, guest, entry) {
                edit.set(i, size, word & !COPIED | if copied { COPIED } else { 0 });
            }
        }
        if self.may_write(at, 1) { edit.write(self.file, "qcow2 L2 table").await } else { Ok(()) }
    }

    /// Checks one entry; returns the correct flag. None: no change.
    fn l2_entry(&mut self, at: u64, index: u64, guest: u64, entry: L2Entry) -> Option<bool> {
        let figures = !self.tally.later_pass;
        if let Cluster::Compressed { .. } = entry.cluster {
            if figures {
                let report = &mut self.tally.report;
                report.allocated_clusters += 1;
                report.compressed_clusters += 1;
                report.fragmented_clusters += 1;
            }
            return None;
        }
        let host = entry.cluster.host()?;
        if figures {
            let report = &mut self.tally.report;
            report.allocated_clusters += 1;
            report.fragmented_clusters +=
                u64::from(self.next_offset != 0 && self.next_offset != host);
            self.next_offset = host + self.header.cluster_size();
        }
        let structure = format_args!("qcow2 L2 table entry {index}");
        if !self.layout.data_file {
            return self.judge(structure, at, host, entry.copied);
        }
        if host != guest {
            let text = format_args!(
                "its offset in the external data file is {host}, but the guest's is {guest}"
            );
            self.tally.find(FindingKind::BadEntry, structure, at, text);
        } else if self.data_file_len.is_some_and(|len| host >= len) {
            let text = format_args!("offset {host} lies beyond the end of the external data file");
            self.tally.find(FindingKind::OutOfRange, structure, at, text);
        }
        if entry.copied {
            return None;
        }
        self.tally.report.unset_flags += 1;
        let text = format_args!(
            "the COPIED flag is not set, but an external data file's clusters are all used once"
        );
        self.tally.find(FindingKind::Copied, structure, at, text);
        self.repair.is_some_and(|(_, change)| change.set).then_some(true)
    }
}
