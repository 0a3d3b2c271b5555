//! Tables of a resized image: a new L1 table, and L2 tables that replace others.

use std::ops::Range;

use crate::error::ImageError;
use crate::qcow2::closed::change::OfflineChange;
use crate::qcow2::encoding::bytes::{self, be64, put64};
use crate::qcow2::encoding::entry::{Cluster, EntryFormat, L1Entry, L2Entry, SubclusterBitmap};
use crate::qcow2::encoding::header::Header;

/// L1 and L2 tables of a resize.
pub struct ResizeTables<'a> {
    pub change: &'a OfflineChange<'a>,
    pub layout: EntryFormat,
    /// The new L1 table.
    l1: Vec<u8>,
    /// Range of L2 tables (by L1 index) that are replaced, and offset of the first new one.
    replaced: Range<u64>,
    at: u64,
}

impl<'a> ResizeTables<'a> {
    pub async fn of(change: &'a OfflineChange<'a>) -> Result<Self, ImageError> {
        let (layout, l1) = (EntryFormat::of(&change.old), change.l1().await?);
        Ok(ResizeTables { change, layout, l1, replaced: 0..0, at: 0 })
    }

    fn cluster_size(&self) -> u64 {
        1 << self.layout.cluster_bits
    }

    /// Returns true if an L1 entry from index `first` on names a table.
    pub fn has_entries_from(&self, first: u64) -> bool {
        self.l1.chunks_exact(8).skip(first as usize).any(|word| be64(word, 0) != 0)
    }

    /// Keeps the first `kept` L1 entries, and sets their number to `all`.
    pub fn set_entries(&mut self, kept: u64, all: u64) {
        self.l1.truncate(kept as usize * 8);
        self.l1.resize(all as usize * 8, 0);
    }

    /// Reads an L2 table; all zeroes if there is none.
    pub async fn read(&self, index: u64) -> Result<Vec<u8>, ImageError> {
        let len = self.cluster_size() as usize;
        let word = self
            .l1
            .get(index as usize * 8..)
            .filter(|rest| rest.len() >= 8)
            .map_or(0, |rest| be64(rest, 0));
        let entry = L1Entry::decode(word, self.layout);
        let offset = self.change.old.l1_offset + index * 8;
        match entry.map_err(|what| ImageError::invalid("qcow2 L1 table entry", offset, what))?.table
        {
            Some(at) => {
                let read = bytes::read(self.change.file, at, len).await;
                read.map_err(|e| ImageError::io("qcow2 L2 table", at, "reading", e))
            }
            None => Ok(vec![0; len]),
        }
    }

    /// Returns the offset of a guest cluster's entry in its table.
    fn place_of(&self, cluster: u64) -> usize {
        let size = if self.layout.extended_l2 { 16 } else { 8 };
        (cluster % (self.cluster_size() / size) * size) as usize
    }

    /// Decodes a guest cluster's entry in its table.
    pub fn entry(&self, table: &[u8], cluster: u64) -> Result<L2Entry, ImageError> {
        let at = self.place_of(cluster);
        let bitmap = if self.layout.extended_l2 { be64(table, at + 8) } else { 0 };
        let entry = L2Entry::decode(be64(table, at), bitmap, self.layout);
        entry.map_err(|what| ImageError::invalid("qcow2 L2 table entry", None, what))
    }

    /// Encodes a guest cluster's entry into its table.
    pub fn put(&self, table: &mut [u8], cluster: u64, entry: L2Entry) {
        let (at, (word, bitmap)) = (self.place_of(cluster), entry.encode(self.layout));
        put64(table, at, word);
        if self.layout.extended_l2 {
            put64(table, at + 8, bitmap);
        }
    }

    /// Returns the L2 table that holds the last cluster of a disk of `size` bytes, with the entries
    /// behind that cluster set to zero. None: these entries are zero already.
    pub async fn last_without_rest(&self, size: u64) -> Result<Option<(u64, Vec<u8>)>, ImageError> {
        let Some(index) = self.change.old.l1_needed(size).checked_sub(1) else { return Ok(None) };
        let (clusters, mut table) = (size.div_ceil(self.cluster_size()), self.read(index).await?);
        if clusters.is_multiple_of(self.change.old.l2_entries()) {
            return Ok(None);
        }
        let rest = &mut table[self.place_of(clusters)..];
        if rest.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        rest.fill(0);
        Ok(Some((index, table)))
    }

    /// Finds free clusters for the L1 table, the replaced L2 tables, and `extra` clusters. Returns
    /// the offset of the `extra` clusters.
    pub async fn place(
        &mut self,
        new: &mut Header,
        replaced: Range<u64>,
        extra: u64,
    ) -> Result<u64, ImageError> {
        let l1_clusters = (self.l1.len() as u64).div_ceil(self.cluster_size());
        let tables = replaced.end - replaced.start;
        new.l1_offset = self.change.find_free(l1_clusters + tables + extra).await?;
        new.l1_size = (self.l1.len() / 8) as u32;
        self.at = new.l1_offset + l1_clusters * self.cluster_size();
        self.replaced = replaced;
        Ok(self.at + tables * self.cluster_size())
    }

    /// Writes a replaced table.
    pub async fn write(&mut self, index: u64, table: &[u8]) -> Result<(), ImageError> {
        let at = self.at + (index - self.replaced.start) * self.cluster_size();
        put64(&mut self.l1, index as usize * 8, L1Entry { table: Some(at), copied: true }.encode());
        self.change.write("qcow2 L2 table", at, table).await
    }

    /// Writes the L1 table.
    pub async fn finish(&self, new: &Header) -> Result<(), ImageError> {
        self.change.write("qcow2 L1 table", new.l1_offset, &self.l1).await
    }

    /// Makes clusters of a table in a range of the disk read as zeroes. These clusters are
    /// unallocated.
    pub fn hide(&self, table: &mut [u8], index: u64, hidden: &Range<u64>) {
        let (bits, entries) = (self.layout.cluster_bits, self.change.old.l2_entries());
        let clusters = hidden.start >> bits..hidden.end.div_ceil(1 << bits);
        let cluster = match self.layout.extended_l2 {
            false => Cluster::Zero { host: None },
            true => Cluster::Subclusters { host: None, bitmap: SubclusterBitmap::ALL_ZERO },
        };
        for here in clusters.start.max(index * entries)..clusters.end.min((index + 1) * entries) {
            self.put(table, here, L2Entry { cluster, copied: false });
        }
    }
}
