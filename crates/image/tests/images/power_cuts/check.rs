//! Reference implementation of check and read, slow and simple: references are counted one by one.

use std::borrow::Cow;
use std::collections::BTreeMap;

use blockyard_image::qcow2::{Compression, unpack};

use super::format::{COMPRESSED, COPIED, Layout, OFFSET, ZERO};

/// Decoded header of an image.
pub struct Parsed<'a> {
    bytes: &'a [u8],
    pub layout: Layout,
    pub size: u64,
    zstd: bool,
    l1: Table,
    refcounts: Table,
    pub snapshots: Vec<Snapshot>,
    snapshot_table: Option<Table>,
}

pub struct Snapshot {
    l1: Table,
    pub name: String,
    /// Size of the disk when the snapshot was taken, in bytes.
    size: u64,
}

#[derive(Clone, Copy)]
struct Table {
    offset: u64,
    /// Length in bytes.
    len: u64,
}

/// Findings of a check.
#[derive(Debug, Default)]
pub struct Findings {
    pub corruptions: Vec<String>,
    /// Number of COPIED flags that are clear but could be set. They are harmless: a write copies
    /// more than necessary.
    pub careful: u64,
    /// Number of clusters with a refcount above the number of their references.
    pub leaks: u64,
}

/// Returns `N` bytes at `at`. Bytes behind the end of the file are zeroes.
fn piece<const N: usize>(bytes: &[u8], at: u64) -> [u8; N] {
    bytes.get(at as usize..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn be32(bytes: &[u8], at: u64) -> u32 {
    u32::from_be_bytes(piece(bytes, at))
}

fn be64(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(piece(bytes, at))
}

/// Returns `len` bytes at `offset`. Bytes behind the end of the file are zeroes.
fn part(bytes: &[u8], offset: u64, len: u64) -> Cow<'_, [u8]> {
    let from = bytes.len().min(offset as usize);
    let here = &bytes[from..bytes.len().min((offset + len) as usize)];
    let mut part = Cow::from(here);
    if here.len() as u64 != len {
        part.to_mut().resize(len as usize, 0);
    }
    part
}

/// Returns the offsets of the pieces of 64 bytes that are not zeroes. Most of a table is zeroes,
/// and comparing 64 bytes is quicker than each entry in them.
fn used(table: &[u8]) -> impl Iterator<Item = u64> {
    table.chunks(64).zip((0..).step_by(64)).filter(|(piece, _)| *piece != [0; 64]).map(|(_, at)| at)
}

impl<'a> Parsed<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        let version = be32(bytes, 4);
        let v3 = |at| if version > 2 { be64(bytes, at) } else { 0 };
        let layout = Layout {
            version,
            cluster_bits: be32(bytes, 20),
            refcount_order: if version > 2 { be32(bytes, 96) } else { 4 },
            extended: v3(72) & 16 != 0,
            data_file: v3(72) & 4 != 0,
            raw_data_file: v3(88) & 2 != 0,
        };
        let table = |at, len: u64| Table { offset: be64(bytes, at), len };
        let (mut snapshots, mut at) = (Vec::new(), be64(bytes, 64));
        let first = at;
        for _ in 0..be32(bytes, 60) {
            let l1 = Table { offset: be64(bytes, at), len: u64::from(be32(bytes, at + 8)) * 8 };
            let (id, name) =
                (u64::from(be32(bytes, at + 12) >> 16), u64::from(be32(bytes, at + 12) & 0xffff));
            let more = u64::from(be32(bytes, at + 36));
            let size = if more < 16 { be64(bytes, 24) } else { be64(bytes, at + 48) };
            let text = (at + 40 + more + id) as usize..(at + 40 + more + id + name) as usize;
            let name_text =
                String::from_utf8_lossy(bytes.get(text).unwrap_or_default()).into_owned();
            snapshots.push(Snapshot { l1, name: name_text, size });
            at += (40 + more + id + name).next_multiple_of(8);
        }
        Parsed {
            bytes,
            layout,
            size: be64(bytes, 24),
            zstd: v3(72) & 8 != 0,
            l1: table(40, u64::from(be32(bytes, 36)) * 8),
            refcounts: table(48, u64::from(be32(bytes, 56)) << layout.cluster_bits),
            snapshot_table: (at > first).then_some(Table { offset: first, len: at - first }),
            snapshots,
        }
    }

    fn words(&self, table: Table) -> impl Iterator<Item = u64> {
        (table.offset..table.offset + table.len).step_by(8).map(|at| be64(self.bytes, at))
    }

    /// Reads a cluster; bytes behind the end of the file are zeroes.
    fn cluster(&self, offset: u64) -> Cow<'_, [u8]> {
        part(self.bytes, offset, self.layout.cluster())
    }

    pub fn check(&self) -> Findings {
        let mut count =
            Counter { image: self, named: BTreeMap::new(), findings: Findings::default() };
        count.run();
        count.findings
    }

    /// Returns the stored refcounts of all clusters that a refcount block covers.
    fn counts(&self) -> BTreeMap<u64, u64> {
        let mut counts = BTreeMap::new();
        for (number, block) in
            self.words(self.refcounts).enumerate().filter(|(_, block)| *block != 0)
        {
            let bytes = self.cluster(block);
            let in_64_bytes = 512 >> self.layout.refcount_order;
            for n in used(&bytes).flat_map(|at| at / 64 * in_64_bytes..(at / 64 + 1) * in_64_bytes)
            {
                let count = self.layout.count(&bytes, n);
                if count > 0 {
                    counts.insert(number as u64 * self.layout.per_block() + n, count);
                }
            }
        }
        counts
    }

    /// Returns the disk's contents in the active state or in a snapshot. `below`: contents of the
    /// backing images.
    pub fn read(
        &self,
        snapshot: Option<usize>,
        data: Option<&[u8]>,
        below: &[u8],
    ) -> Result<Vec<u8>, String> {
        let (l1, size) = snapshot
            .map_or((self.l1, self.size), |n| (self.snapshots[n].l1, self.snapshots[n].size));
        let tables: Vec<u64> = self.words(l1).map(|word| word & OFFSET).collect();
        let mut disk = vec![0; size as usize];
        let shared = disk.len().min(below.len());
        disk[..shared].copy_from_slice(&below[..shared]);
        let (layout, step) = (self.layout, self.layout.cluster() as usize);
        for (number, out) in disk.chunks_mut(step).enumerate() {
            let (index, inside) =
                (number as u64 / layout.l2_entries(), number as u64 % layout.l2_entries());
            let Some(table) = tables.get(index as usize).filter(|table| **table != 0) else {
                continue;
            };
            let table = self.cluster(*table);
            let at = inside * layout.l2_entry() as u64;
            let bitmap = if layout.extended { be64(&table, at + 8) } else { 0 };
            self.read_cluster(
                be64(&table, at),
                bitmap,
                number as u64 * layout.cluster(),
                data,
                out,
            )?;
        }
        Ok(disk)
    }

    fn read_cluster(
        &self,
        word: u64,
        bitmap: u64,
        guest: u64,
        data: Option<&[u8]>,
        out: &mut [u8],
    ) -> Result<(), String> {
        let layout = self.layout;
        if word & COMPRESSED != 0 {
            let place = layout.compressed(word);
            let end = self.bytes.len().min(place.end as usize);
            let packed = self
                .bytes
                .get(place.start as usize..end)
                .ok_or("compressed data beyond the end")?;
            let kind = if self.zstd { Compression::Zstd } else { Compression::Zlib };
            let plain =
                unpack(packed, kind, layout.cluster() as usize).map_err(|e| e.to_string())?;
            out.copy_from_slice(&plain[..out.len()]);
            return Ok(());
        }
        let host = match data {
            Some(data) => part(data, guest, layout.cluster()),
            None => self.cluster(word & OFFSET),
        };
        let has_host = word & OFFSET != 0 || (layout.data_file && word & COPIED != 0);
        for (n, out) in out.chunks_mut(layout.unit() as usize).enumerate() {
            let (has_data, zero) = match layout.extended {
                true => (bitmap >> n & 1 == 1, bitmap >> (32 + n) & 1 == 1),
                false => (has_host && word & ZERO == 0, word & ZERO != 0),
            };
            if has_data {
                out.copy_from_slice(&host[n * layout.unit() as usize..][..out.len()]);
            } else if zero {
                out.fill(0);
            }
        }
        Ok(())
    }
}

struct Counter<'a> {
    image: &'a Parsed<'a>,
    named: BTreeMap<u64, u64>,
    findings: Findings,
}

impl Counter<'_> {
    fn run(&mut self) {
        let image = self.image;
        self.name("header", 0, image.layout.cluster());
        self.name("L1 table", image.l1.offset, image.l1.len);
        self.name("refcount table", image.refcounts.offset, image.refcounts.len);
        if let Some(table) = image.snapshot_table {
            self.name("snapshot table", table.offset, table.len);
        }
        for block in image.words(image.refcounts).filter(|block| *block != 0) {
            self.name("refcount block", block, image.layout.cluster());
        }
        for snapshot in &image.snapshots {
            self.name("a snapshot's L1 table", snapshot.l1.offset, snapshot.l1.len);
            self.tables(snapshot.l1, None);
        }
        let counts = image.counts();
        self.tables(image.l1, Some(&counts));
        self.compare(&counts);
    }

    fn wrong(&mut self, what: String) {
        self.findings.corruptions.push(what);
    }

    /// Counts references to a range.
    fn name(&mut self, what: &str, offset: u64, len: u64) {
        let cluster = self.image.layout.cluster();
        if !offset.is_multiple_of(cluster) {
            self.wrong(format!("{what} at {offset:#x} is not aligned"));
        }
        if offset >= self.image.bytes.len() as u64 {
            self.wrong(format!("{what} at {offset:#x} lies beyond the end of the file"));
        }
        for number in offset / cluster..(offset + len).div_ceil(cluster) {
            *self.named.entry(number).or_default() += 1;
        }
    }

    /// Counts the L2 tables of an L1 table. `counts`: given for the active table, where COPIED
    /// flags must be right.
    fn tables(&mut self, l1: Table, counts: Option<&BTreeMap<u64, u64>>) {
        let (image, layout) = (self.image, self.image.layout);
        for (index, word) in image.words(l1).enumerate().filter(|(_, word)| *word != 0) {
            let table = word & OFFSET;
            if word & !(OFFSET | COPIED) != 0 {
                self.wrong(format!("L1 entry {index}: {word:#x} has reserved bits"));
            }
            self.name("L2 table", table, layout.cluster());
            self.copied(&format!("L1 entry {index}"), word, table / layout.cluster(), counts);
            let bytes = image.cluster(table);
            let entries = |at| (at..at + 64).step_by(layout.l2_entry());
            for at in used(&bytes).flat_map(entries) {
                let bitmap = if layout.extended { be64(&bytes, at + 8) } else { 0 };
                let guest = index as u64 * layout.l2_entries() + at / layout.l2_entry() as u64;
                self.entry(guest, be64(&bytes, at), bitmap, counts);
            }
        }
    }

    fn entry(&mut self, guest: u64, word: u64, bitmap: u64, counts: Option<&BTreeMap<u64, u64>>) {
        let layout = self.image.layout;
        let what = format!("L2 entry of guest cluster {guest} ({word:#x}, {bitmap:#x})");
        let (data, zero) = (bitmap as u32, (bitmap >> 32) as u32);
        if word & COMPRESSED != 0 {
            if word & COPIED != 0 || bitmap != 0 {
                self.wrong(format!("{what}: compressed, with flags"));
            }
            for cluster in layout.host(word) {
                self.name(&what, cluster * layout.cluster(), 1);
            }
            return;
        }
        let allowed =
            OFFSET | COPIED | if layout.version > 2 && !layout.extended { ZERO } else { 0 };
        if word & !allowed != 0 || data & zero != 0 {
            self.wrong(format!("{what}: bits that must not be set"));
        }
        let offset = word & OFFSET;
        if layout.data_file {
            let named = offset != 0 || word & COPIED != 0;
            if named && offset != guest * layout.cluster() || !named && data != 0 {
                self.wrong(format!("{what}: not the guest's own offset"));
            }
            return;
        }
        if offset == 0 {
            if data != 0 || word & COPIED != 0 {
                self.wrong(format!("{what}: data nowhere"));
            }
            return;
        }
        self.name(&what, offset, layout.cluster());
        self.copied(&what, word, offset / layout.cluster(), counts);
    }

    fn copied(&mut self, what: &str, word: u64, cluster: u64, counts: Option<&BTreeMap<u64, u64>>) {
        let Some(counts) = counts else { return };
        let count = counts.get(&cluster).copied().unwrap_or(0);
        if word & COPIED == 0 {
            self.findings.careful += u64::from(count == 1);
        } else if count != 1 {
            self.wrong(format!("{what}: the COPIED flag is wrong, for the count is {count}"));
        }
    }

    fn compare(&mut self, counts: &BTreeMap<u64, u64>) {
        let named = std::mem::take(&mut self.named);
        for (&cluster, &references) in &named {
            let count = counts.get(&cluster).copied().unwrap_or(0);
            if count < references {
                let at = cluster * self.image.layout.cluster();
                self.wrong(format!(
                    "the cluster at {at:#x} has {references} references, and counts {count}"
                ));
            }
        }
        let more = |(cluster, count): (&u64, &u64)| {
            named.get(cluster).is_none_or(|references| references < count)
        };
        self.findings.leaks = counts.iter().filter(|&entry| more(entry)).count() as u64;
    }
}
