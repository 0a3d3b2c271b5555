//! Follows all references from the header on: each L1 table once and each L2 table once, however
//! often they are referenced.
//!
//! In: an image's tables. Out: counts, and findings about invalid entries and offsets. Invariant:
//! the file's size bounds reads and memory. Of L1 and bitmap tables that overlap, only one is
//! followed. Those that are followed take at most [`MAX_TABLE_BYTES`]. At most `tables_at_once` L2
//! tables are collected at a time; the others wait for the next round.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;

use super::counts::Counts;
use super::report::{FindingKind, Tally};
use super::stored::Refcounts;
use crate::error::{ErrorKind, ImageError};
use crate::qcow2::encoding::bitmap_directory;
use crate::qcow2::encoding::bytes::{self, LastHole, be64};
use crate::qcow2::encoding::entry::{
    COMPRESSED, COPIED, Cluster, EntryFormat, L1Entry, L2Entry, OFFSET_MASK,
};
use crate::qcow2::encoding::header::Header;
use crate::qcow2::encoding::snapshot_table;
use crate::raw::Raw;

/// Number of entries of an L1 or bitmap table that are read at a time.
pub const PIECE_ENTRIES: usize = 1 << 17;
/// Maximum size in bytes of all L1 and bitmap tables together. A crafted image can name 2 TiB of
/// them in one hole. To count their clusters of 512 bytes would take minutes.
const MAX_TABLE_BYTES: u64 = 16 << 30;

/// A reference: its structure's name and its offset in the file.
#[derive(Clone, Copy)]
struct Site<'a> {
    structure: fmt::Arguments<'a>,
    at: u64,
}

/// A contiguous table that another structure refers to.
struct TableReference {
    offset: u64,
    entries: u64,
    /// Number of references to the table.
    times: u64,
    name: String,
    /// Name that the second reference gives to the table; empty if there is none.
    second_name: String,
}

impl TableReference {
    fn new(offset: u64, entries: u64, name: String) -> Self {
        TableReference { offset, entries, times: 1, name, second_name: String::new() }
    }

    fn len(&self) -> u64 {
        self.entries * 8
    }

    /// Returns the offset behind the table. It may lie beyond the end of the file.
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len())
    }
}

/// Tables to follow; no two overlap.
#[derive(Default)]
struct DistinctTables {
    list: Vec<TableReference>,
    /// Maps a table's offset to the table's end and its index in `list`.
    places: BTreeMap<u64, (u64, usize)>,
    /// Size in bytes of all tables with counted clusters, also of those that overlap others.
    counted_bytes: u64,
}

/// Relation of a table to the tables to follow.
enum Relation {
    /// It overlaps none of them.
    New,
    /// It is the table with this index.
    Same(usize),
    Overlaps,
}

impl DistinctTables {
    fn relation(&self, table: &TableReference) -> Relation {
        let (start, end) = (table.offset, table.end());
        let before = self.places.range((Bound::Unbounded, Bound::Excluded(end))).next_back();
        match before {
            Some((&other, &(other_end, index))) if (other, other_end) == (start, end) => {
                Relation::Same(index)
            }
            Some((_, &(other_end, _))) if other_end > start => Relation::Overlaps,
            _ => Relation::New,
        }
    }

    /// Adds a table that overlaps none.
    fn add(&mut self, table: TableReference) {
        self.places.insert(table.offset, (table.end(), self.list.len()));
        self.list.push(table);
    }
}

/// Walk over all tables of an image.
pub struct Walk<'a> {
    pub file: &'a Raw,
    pub header: &'a Header,
    pub layout: EntryFormat,
    pub file_len: u64,
    pub counts: &'a mut Counts,
    pub tally: &'a mut Tally,
    /// Maximum number of L2 tables that are collected at a time.
    pub tables_at_once: usize,
    pub hole: LastHole,
}

impl Walk<'_> {
    /// Counts all references; `refcounts`: those of the refcount structures too.
    pub async fn count(&mut self, refcounts: Option<&Refcounts>) {
        self.metadata(Site { structure: format_args!("qcow2 header"), at: 0 }, 0, 1);
        let mut l1_tables = DistinctTables::default();
        let (offset, entries) = (self.header.l1_offset, self.header.l1_size.into());
        let active = TableReference::new(offset, entries, "qcow2 L1 table".into());
        self.table(active, &mut l1_tables);
        self.snapshots(&mut l1_tables).await;
        if let Some(refcounts) = refcounts {
            self.refcount_structures(refcounts);
        }
        // Tables of bitmaps must not overlap L1 tables either.
        let first_bitmap = l1_tables.list.len();
        self.bitmaps(&mut l1_tables).await;
        self.further_references(&l1_tables.list);
        let mut bitmaps = l1_tables.list.split_off(first_bitmap);
        for table in &mut bitmaps {
            self.bitmap_table(table).await;
        }
        let mut from = Some(0);
        while let Some(start) = from {
            let (l2_tables, next) = self.gather(&l1_tables.list, start).await;
            for (&offset, &times) in &l2_tables {
                self.l2_table(offset, times).await;
            }
            from = next;
        }
    }

    /// Reports something that cannot be followed, so that its references are unknown.
    fn lost(&mut self, kind: FindingKind, site: Site<'_>, text: fmt::Arguments<'_>) {
        self.tally.incomplete = true;
        self.tally.find(kind, site.structure, site.at, text);
    }

    /// Reports a violation of the format that hides no reference.
    fn odd(&mut self, site: Site<'_>, text: fmt::Arguments<'_>) {
        self.tally.find(FindingKind::Harmless, site.structure, site.at, text);
    }

    /// Counts the clusters of `len` bytes at `offset`. Returns false, and counts nothing, if they
    /// lie beyond the end of the file.
    fn reference(
        &mut self,
        site: Site<'_>,
        offset: u64,
        len: u64,
        times: u64,
        exclusive: bool,
    ) -> bool {
        let bits = self.header.cluster_bits;
        let end = offset.saturating_add(len);
        // The last cluster may be partial.
        if end >= self.file_len.saturating_add(1 << bits) {
            self.tally.beyond = self.tally.beyond.max(end);
            let text = format_args!(
                "offset {offset} lies beyond the end of the file at {}",
                self.file_len
            );
            self.tally.find(FindingKind::OutOfRange, site.structure, site.at, text);
            return false;
        }
        for cluster in offset >> bits..end.div_ceil(1 << bits) {
            let (references, overlap) = self.counts.add(cluster, times, exclusive);
            self.tally.most = self.tally.most.max(references);
            if overlap {
                self.tally.overlap(cluster);
                let text = format_args!(
                    "the cluster at {} is shared with other metadata",
                    cluster << bits
                );
                self.tally.find(FindingKind::Overlap, site.structure, site.at, text);
            }
        }
        true
    }

    /// Counts metadata that are written in place.
    fn metadata(&mut self, site: Site<'_>, offset: u64, len: u64) -> bool {
        let inside = self.reference(site, offset, len, 1, true);
        self.tally.incomplete |= !inside;
        inside
    }

    /// Counts a table's own clusters, and adds the table to the tables to follow. The same table
    /// again is only noted: [`Walk::further_references`] counts it.
    fn table(&mut self, table: TableReference, tables: &mut DistinctTables) {
        if table.entries == 0 {
            return;
        }
        let relation = tables.relation(&table);
        if let Relation::Same(index) = relation {
            let same = &mut tables.list[index];
            if same.times == 1 {
                same.second_name = table.name;
            }
            same.times += 1;
            return;
        }
        let name = table.name.clone();
        let site = Site { structure: format_args!("{name}"), at: table.offset };
        let counted_bytes = tables.counted_bytes + table.len();
        if counted_bytes > MAX_TABLE_BYTES {
            self.lost(
                FindingKind::BadTable,
                site,
                format_args!(
                    "it is not followed: all tables together may take {MAX_TABLE_BYTES} bytes"
                ),
            );
            return;
        }
        if !self.metadata(site, table.offset, table.len()) {
            return;
        }
        tables.counted_bytes = counted_bytes;
        match relation {
            Relation::New => tables.add(table),
            _ => self.lost(
                FindingKind::BadTable,
                site,
                format_args!("it overlaps another table, and is not followed"),
            ),
        }
    }

    /// Counts the references to tables except the first one to each. They are counted together,
    /// because a crafted image can name a table 65,536 times.
    fn further_references(&mut self, tables: &[TableReference]) {
        for table in tables.iter().filter(|table| table.times > 1) {
            let site = Site { structure: format_args!("{}", table.second_name), at: table.offset };
            self.reference(site, table.offset, table.len(), table.times - 1, true);
        }
    }

    fn bad_table(&mut self, structure: &str, at: u64, e: &ImageError) {
        let kind =
            if e.kind == ErrorKind::Io { FindingKind::Unreadable } else { FindingKind::BadTable };
        self.lost(kind, Site { structure: format_args!("{structure}"), at }, format_args!("{e}"));
    }

    async fn snapshots(&mut self, tables: &mut DistinctTables) {
        let header = self.header;
        if header.snapshot_count == 0 {
            return;
        }
        let (structure, at) = ("qcow2 snapshot table", header.snapshots_offset);
        let (snapshots, len) = match snapshot_table::read(self.file, header).await {
            Ok(read) => read,
            Err(e) => return self.bad_table(structure, at, &e),
        };
        self.metadata(Site { structure: format_args!("{structure}"), at }, at, len);
        for (index, snapshot) in snapshots.iter().enumerate() {
            // An example are the zero entries that appear when the snapshot count is raised.
            if header.version >= 3 && snapshot.disk_size.is_none() {
                let site = Site { structure: format_args!("{structure} entry {index}"), at };
                self.odd(
                    site,
                    format_args!("it does not store the disk's size, which version 3 requires"),
                );
            }
            let (offset, entries) = (snapshot.l1_offset, u64::from(snapshot.l1_size));
            let name = format!("qcow2 L1 table of snapshot \"{}\"", short(&snapshot.name()));
            match snapshot.l1_fault(header) {
                Some(fault) => {
                    let site = Site { structure: format_args!("{name}"), at: offset };
                    self.lost(FindingKind::BadTable, site, format_args!("{fault}"));
                }
                None => self.table(TableReference::new(offset, entries, name), tables),
            }
        }
    }

    fn refcount_structures(&mut self, refcounts: &Refcounts) {
        let at = self.header.refcount_table_offset;
        let site = Site { structure: format_args!("qcow2 refcount table"), at };
        self.reference(site, at, refcounts.table_len(), 1, true);
        for (index, block) in refcounts.blocks() {
            let site = Site {
                structure: format_args!("qcow2 refcount table entry {index}"),
                at: at + index * 8,
            };
            self.reference(site, block, self.header.cluster_size(), 1, true);
        }
    }

    async fn bitmaps(&mut self, tables: &mut DistinctTables) {
        let header = self.header;
        let Some(extension) = &header.bitmaps else { return };
        let (structure, at) = ("qcow2 bitmap directory", extension.directory_offset);
        let bitmaps = match bitmap_directory::read(self.file, extension).await {
            Ok((_, bitmaps)) => bitmaps,
            Err(e) => return self.bad_table(structure, at, &e),
        };
        self.metadata(
            Site { structure: format_args!("{structure}"), at },
            at,
            extension.directory_size,
        );
        let (end, size) = (
            bitmaps.last().map_or(0, |bitmap| bitmap.at as u64 + bitmap.len),
            extension.directory_size,
        );
        if end != size {
            let site = Site { structure: format_args!("{structure}"), at };
            self.odd(site, format_args!("its entries take {end} bytes, but it has {size}"));
        }
        for bitmap in &bitmaps {
            let (offset, entries) = (bitmap.table_offset, u64::from(bitmap.table_size));
            let name = format!("qcow2 table of bitmap \"{}\"", short(&bitmap.name));
            match bitmap.table_fault(header) {
                Some(fault) => {
                    let site = Site { structure: format_args!("{name}"), at: offset };
                    self.lost(FindingKind::BadTable, site, format_args!("{fault}"));
                }
                None => {
                    if let Some(what) = bitmap.odd(header) {
                        let structure =
                            format_args!("{structure} entry of bitmap \"{}\"", short(&bitmap.name));
                        self.odd(
                            Site { structure, at: at + bitmap.at as u64 },
                            format_args!("{what}"),
                        );
                    }
                    self.table(TableReference::new(offset, entries, name), tables);
                }
            }
        }
    }

    async fn bitmap_table(&mut self, table: &TableReference) {
        for first in (0..table.entries).step_by(PIECE_ENTRIES) {
            let Some(piece) = self.piece(table, first).await else { return };
            for (i, word) in bytes::words(&piece).filter(|(_, word)| *word > 1) {
                let (index, offset) = (first + i, word & OFFSET_MASK);
                let structure = format_args!("{} entry {index}", table.name);
                let site = Site { structure, at: table.offset + index * 8 };
                if word != offset || !offset.is_multiple_of(self.header.cluster_size()) {
                    self.lost(
                        FindingKind::BadEntry,
                        site,
                        format_args!("{word:#x} is not the offset of a cluster"),
                    );
                } else {
                    self.reference(site, offset, self.header.cluster_size(), 1, true);
                }
            }
        }
    }

    /// Reads the piece of a table that begins with entry `first`. Returns no bytes if it is a hole:
    /// its entries are 0.
    async fn piece(&mut self, table: &TableReference, first: u64) -> Option<Vec<u8>> {
        let entries = (table.entries - first).min(PIECE_ENTRIES as u64);
        let (at, len) = (table.offset + first * 8, entries * 8);
        let read = self.hole.read_data(self.file, at, len as usize, self.file_len).await;
        let site = Site { structure: format_args!("{}", table.name), at };
        read.inspect_err(|e| self.lost(FindingKind::Unreadable, site, format_args!("reading: {e}")))
            .ok()
    }

    /// Collects the L2 tables at offset `from` and beyond, with the number of references to each.
    /// Also returns the offset at which the next call must begin.
    async fn gather(
        &mut self,
        l1_tables: &[TableReference],
        from: u64,
    ) -> (BTreeMap<u64, u64>, Option<u64>) {
        let (mut l2_tables, mut next) = (BTreeMap::new(), None);
        for (number, table) in l1_tables.iter().enumerate() {
            for first in (0..table.entries).step_by(PIECE_ENTRIES) {
                let Some(piece) = self.piece(table, first).await else { break };
                for (i, word) in bytes::words(&piece).filter(|(_, word)| *word != 0) {
                    // The flags of the active table are checked in `flags`.
                    if word == COPIED && number > 0 && from == 0 {
                        let structure = format_args!("{} entry {}", table.name, first + i);
                        let site = Site { structure, at: table.offset + (first + i) * 8 };
                        self.odd(
                            site,
                            format_args!("the COPIED flag is set, but there is no L2 table"),
                        );
                    }
                    let offset = self.l1_entry(table, first + i, word, from == 0);
                    let wanted = offset.filter(|&o| o >= from && next.is_none_or(|next| o < next));
                    let Some(offset) = wanted else { continue };
                    *l2_tables.entry(offset).or_insert(0) += table.times;
                    if l2_tables.len() > self.tables_at_once {
                        next = l2_tables.pop_last().map(|(offset, _)| offset);
                    }
                }
            }
        }
        (l2_tables, next)
    }

    /// Returns the L2 table of an L1 entry, if it can be followed. `count`: this is the first visit
    /// of the entry.
    fn l1_entry(
        &mut self,
        table: &TableReference,
        index: u64,
        word: u64,
        count: bool,
    ) -> Option<u64> {
        let site = Site {
            structure: format_args!("{} entry {index}", table.name),
            at: table.offset + index * 8,
        };
        match L1Entry::decode(word, self.layout) {
            Ok(entry) => {
                let offset = entry.table?;
                let inside = match count {
                    true => {
                        self.reference(site, offset, self.header.cluster_size(), table.times, false)
                    }
                    false => offset < self.file_len,
                };
                self.tally.incomplete |= !inside;
                inside.then_some(offset)
            }
            Err(what) if count => {
                self.lost(FindingKind::BadEntry, site, format_args!("{word:#x}: {what}"));
                None
            }
            Err(_) => None,
        }
    }

    async fn l2_table(&mut self, offset: u64, times: u64) {
        let len = self.header.cluster_size() as usize;
        let bytes = match self.hole.read_data(self.file, offset, len, self.file_len).await {
            Ok(bytes) => bytes,
            Err(e) => {
                let site = Site { structure: format_args!("qcow2 L2 table"), at: offset };
                return self.lost(FindingKind::Unreadable, site, format_args!("reading: {e}"));
            }
        };
        for (index, words) in l2_entries(&bytes, self.layout).filter(|(_, words)| *words != (0, 0))
        {
            self.l2_entry(offset, index, words, times);
        }
    }

    fn l2_entry(&mut self, table: u64, index: u64, (word, bitmap): (u64, u64), times: u64) {
        let at = table + index * self.header.l2_entry_size();
        let site = Site { structure: format_args!("qcow2 L2 table entry {index}"), at };
        let cluster_size = self.header.cluster_size();
        match L2Entry::decode(word, bitmap, self.layout).map(|entry| entry.cluster) {
            Ok(Cluster::Compressed { host, len }) => {
                let start = host & !511;
                self.reference(site, start, host + len - start, times, false);
            }
            // Clusters of an external data file have no refcounts.
            Ok(_) if self.layout.data_file => {}
            Ok(cluster) => {
                if let Some(host) = cluster.host() {
                    self.reference(site, host, cluster_size, times, false);
                }
            }
            Err(what) => {
                self.lost(FindingKind::BadEntry, site, format_args!("{word:#x}: {what}"));
                // The entry is damaged, but probably refers to this cluster: keep it in use.
                let host = word & OFFSET_MASK;
                let plausible = word & COMPRESSED == 0 && !self.layout.data_file && host != 0;
                if plausible && host < self.file_len {
                    self.reference(site, host, cluster_size, times, false);
                }
            }
        }
    }
}

/// Returns the entries of an L2 table, numbered: word and subcluster bitmap.
pub fn l2_entries(bytes: &[u8], layout: EntryFormat) -> impl Iterator<Item = (u64, (u64, u64))> {
    let size = if layout.extended_l2 { 16 } else { 8 };
    let entries = bytes
        .chunks_exact(size)
        .map(move |entry| (be64(entry, 0), if size == 16 { be64(entry, 8) } else { 0 }));
    (0..).zip(entries)
}

/// Shortens and escapes a name for output.
fn short(name: &str) -> String {
    name.chars().take(64).collect::<String>().escape_debug().to_string()
}
