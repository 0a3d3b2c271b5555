//! Builds initial images directly from the format's specification, without the crate's code. They
//! have any mix of cluster types, holes with garbage, tables in any order, and a snapshot that
//! shares clusters.

use blockyard_image::qcow2::{Compression, pack};
use blockyard_storage::sim::{Rng, pattern};

use super::format::{COMPRESSED, COPIED, Layout, ZERO, put32, put64};

const MAGIC: u32 = 0x5146_49fb;

/// Parameters of an image.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub layout: Layout,
    /// Size of the disk in bytes, a multiple of the sector size.
    pub size: u64,
    /// Percentage of guest clusters with an entry.
    pub full: u64,
    /// Whether to add a snapshot that shares all clusters.
    pub snapshot: bool,
    pub zstd: bool,
    /// Minimum number of clusters of the L1 table.
    pub l1_clusters: u64,
    /// Name and format of the backing image.
    pub below: Option<(String, &'static str)>,
    pub seed: u64,
}

/// The image's files.
pub struct Built {
    pub file: Vec<u8>,
    pub data: Option<Vec<u8>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Piece {
    Absent,
    Data,
    Zero,
    ZeroKept,
    Compressed,
}

struct Builder {
    recipe: Recipe,
    rng: Rng,
    file: Vec<u8>,
    data: Option<Vec<u8>>,
    counts: Vec<u64>,
    /// Offset of the next compressed cluster, and end of the space for it.
    room: (u64, u64),
}

pub fn build(recipe: &Recipe) -> Built {
    let layout = recipe.layout;
    let data =
        layout.data_file.then(|| vec![0; recipe.size.next_multiple_of(layout.cluster()) as usize]);
    let rng = Rng::new(recipe.seed);
    let mut builder = Builder {
        recipe: recipe.clone(),
        rng,
        file: Vec::new(),
        data,
        counts: Vec::new(),
        room: (0, 0),
    };
    builder.make();
    Built { file: builder.file, data: builder.data }
}

impl Builder {
    fn cluster(&self) -> u64 {
        self.recipe.layout.cluster()
    }

    /// Allocates consecutive clusters; returns their offset. Sometimes leaves a hole with garbage
    /// before them.
    fn allocate(&mut self, count: u64) -> u64 {
        if self.rng.one_in(6) && self.file.len() > 4 * self.cluster() as usize {
            for _ in 0..self.rng.between(1, 3) {
                let rubbish = pattern(self.rng.next_u64(), 0, self.cluster() as usize);
                self.file.extend(rubbish);
                self.counts.push(0);
            }
        }
        let at = self.file.len();
        self.file.resize(at + (count * self.cluster()) as usize, 0);
        self.counts.resize(self.counts.len() + count as usize, 1);
        at as u64
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.file[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn make(&mut self) {
        let layout = self.recipe.layout;
        self.file.resize(self.cluster() as usize, 0);
        self.counts.push(1);
        let l1_least = (self.recipe.l1_clusters * self.cluster() / 8).max(1);
        let l1_size = self.recipe.size.div_ceil(layout.l2_reach()).max(l1_least);
        let l1_at = self.allocate((l1_size * 8).div_ceil(self.cluster()));
        for index in 0..l1_size {
            if let Some(table) = self.table(index) {
                put64(&mut self.file, (l1_at + index * 8) as usize, table | COPIED);
            }
        }
        let snapshots = if self.recipe.snapshot { self.snapshot(l1_at, l1_size) } else { (0, 0) };
        let refcounts = self.refcounts();
        self.header((l1_at, l1_size), refcounts, snapshots);
    }

    /// Makes an L2 table and its clusters. Returns the table's offset, or None if the table would
    /// be empty.
    fn table(&mut self, index: u64) -> Option<u64> {
        let layout = self.recipe.layout;
        let first = index * layout.l2_entries();
        let clusters = self.recipe.size.div_ceil(self.cluster());
        let pieces: Vec<_> = (first..(first + layout.l2_entries()).min(clusters))
            .map(|c| (c, self.piece()))
            .collect();
        if pieces.iter().all(|(_, piece)| *piece == Piece::Absent) {
            return None;
        }
        let early = self.rng.one_in(2);
        let mut table = if early { self.allocate(1) } else { 0 };
        let mut bytes = vec![0; self.cluster() as usize];
        for (cluster, piece) in pieces {
            let (word, bitmap) = self.entry(cluster, piece);
            let at = (cluster - first) as usize * layout.l2_entry();
            put64(&mut bytes, at, word);
            if layout.extended {
                put64(&mut bytes, at + 8, bitmap);
            }
        }
        if !early {
            table = self.allocate(1);
        }
        self.put(table, &bytes);
        Some(table)
    }

    fn piece(&mut self) -> Piece {
        let layout = self.recipe.layout;
        if self.rng.below(100) >= self.recipe.full {
            return Piece::Absent;
        }
        match self.rng.below(10) {
            0 if layout.version > 2 => Piece::Zero,
            1 if layout.version > 2 && !layout.raw_data_file => Piece::ZeroKept,
            2..4 if !layout.data_file => Piece::Compressed,
            _ => Piece::Data,
        }
    }

    fn entry(&mut self, cluster: u64, piece: Piece) -> (u64, u64) {
        let (extended, raw) = (self.recipe.layout.extended, self.recipe.layout.raw_data_file);
        match piece {
            Piece::Absent => (0, 0),
            Piece::Zero if extended => (0, 0xffff_ffff << 32),
            Piece::Zero => (ZERO, 0),
            Piece::ZeroKept if extended => (self.place(cluster) | COPIED, 0xffff_ffff << 32),
            Piece::ZeroKept => (self.place(cluster) | COPIED | ZERO, 0),
            Piece::Compressed => (self.compressed(cluster), 0),
            Piece::Data if extended && !raw => {
                let host = self.place(cluster) | COPIED;
                let (data, zero) = (self.rng.next_u64(), self.rng.next_u64());
                (host, data & 0xffff_ffff | (zero & !data) << 32)
            }
            Piece::Data => (self.place(cluster) | COPIED, if extended { 0xffff_ffff } else { 0 }),
        }
    }

    /// Makes a host cluster with data.
    fn place(&mut self, cluster: u64) -> u64 {
        let (tag, start) = (self.rng.next_u64(), cluster * self.cluster());
        let bytes = pattern(tag, start, self.cluster() as usize);
        match &mut self.data {
            Some(data) => {
                data[start as usize..][..bytes.len()].copy_from_slice(&bytes);
                start
            }
            None => {
                let at = self.allocate(1);
                self.put(at, &bytes);
                at
            }
        }
    }

    /// Makes compressed data. If the refcounts are wide enough, several compressed clusters share a
    /// host cluster.
    fn compressed(&mut self, cluster: u64) -> u64 {
        let size = self.cluster() as usize;
        let mut plain = vec![0; size];
        for (i, sector) in plain.chunks_mut(512).enumerate() {
            sector[..8].copy_from_slice(&self.rng.next_u64().to_le_bytes());
            sector[8..16].copy_from_slice(&(cluster * size as u64 + i as u64 * 512).to_le_bytes());
        }
        let kind = if self.recipe.zstd { Compression::Zstd } else { Compression::Zlib };
        let packed = pack(&plain, kind).unwrap().expect("mostly zeroes");
        let (from, len, bits) = (self.room.0, packed.len() as u64, self.recipe.layout.cluster_bits);
        let full = |count: u64| count * 2 + 2 > self.recipe.layout.largest_count();
        let shares = from % self.cluster() != 0 && !full(self.counts[(from >> bits) as usize]);
        let at = if shares && from + len <= self.room.1 {
            self.counts[(from >> bits) as usize] += 1;
            from
        } else {
            let at = self.allocate(1);
            self.room.1 = at + self.cluster();
            at
        };
        self.put(at, &packed);
        self.room.0 = at + len;
        let sectors = (at % 512 + len).div_ceil(512) - 1;
        COMPRESSED | sectors << (62 - (bits - 8)) | at
    }

    /// Takes a snapshot: every cluster gets one more reference, and no COPIED flag remains.
    fn snapshot(&mut self, l1_at: u64, l1_size: u64) -> (u64, u64) {
        let layout = self.recipe.layout;
        let mut named = Vec::new();
        let word = |bytes: &[u8], at: u64| {
            u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap())
        };
        for index in 0..l1_size {
            let at = l1_at + index * 8;
            let table = word(&self.file, at) & !COPIED;
            put64(&mut self.file, at as usize, table);
            if table == 0 {
                continue;
            }
            named.push(table / self.cluster());
            for entry in (table..table + self.cluster()).step_by(layout.l2_entry()) {
                let bits = word(&self.file, entry) & !COPIED;
                put64(&mut self.file, entry as usize, bits);
                let host = layout.host(bits);
                named.extend(host.start..host.end);
            }
        }
        named.into_iter().for_each(|host| self.counts[host as usize] += 1);
        let copy = self.allocate((l1_size * 8).div_ceil(self.cluster()));
        self.file.copy_within(l1_at as usize..(l1_at + l1_size * 8) as usize, copy as usize);
        let table = self.allocate(1);
        let mut entry = vec![0; 64];
        put64(&mut entry, 0, copy);
        put32(&mut entry, 8, l1_size as u32);
        entry[13] = 1;
        entry[15] = 1;
        put32(&mut entry, 36, 16);
        put64(&mut entry, 48, self.recipe.size);
        entry[56] = b'1';
        entry[57] = b's';
        self.put(table, &entry);
        (1, table)
    }

    /// Makes refcount table and blocks, last of all; returns the table's offset and clusters.
    fn refcounts(&mut self) -> (u64, u64) {
        let layout = self.recipe.layout;
        let (mut blocks, mut table) = (1, 1);
        loop {
            let clusters = self.counts.len() as u64 + blocks + table;
            let (more_blocks, more_table) =
                (clusters.div_ceil(layout.per_block()), (blocks * 8).div_ceil(self.cluster()));
            if more_blocks <= blocks && more_table <= table {
                break;
            }
            (blocks, table) = (more_blocks.max(blocks), more_table.max(table));
        }
        let at = self.file.len() as u64;
        self.file.resize((at + (blocks + table) * self.cluster()) as usize, 0);
        self.counts.resize(self.counts.len() + (blocks + table) as usize, 1);
        for block in 0..blocks {
            let offset = at + (table + block) * self.cluster();
            put64(&mut self.file, (at + block * 8) as usize, offset);
            for n in 0..layout.per_block() {
                let count = self
                    .counts
                    .get((block * layout.per_block() + n) as usize)
                    .copied()
                    .unwrap_or(0);
                layout.set_count(&mut self.file[offset as usize..], n, count);
            }
        }
        (at, table)
    }

    fn header(&mut self, l1: (u64, u64), refcounts: (u64, u64), snapshots: (u64, u64)) {
        let (layout, recipe) = (self.recipe.layout, self.recipe.clone());
        let length = if layout.version == 2 { 72 } else { 112 };
        let mut header = vec![0; length];
        put32(&mut header, 0, MAGIC);
        put32(&mut header, 4, layout.version);
        put32(&mut header, 20, layout.cluster_bits);
        put64(&mut header, 24, recipe.size);
        put32(&mut header, 36, l1.1 as u32);
        put64(&mut header, 40, l1.0);
        put64(&mut header, 48, refcounts.0);
        put32(&mut header, 56, refcounts.1 as u32);
        put32(&mut header, 60, snapshots.0 as u32);
        put64(&mut header, 64, snapshots.1);
        if layout.version > 2 {
            let bits = u64::from(layout.data_file) << 2
                | u64::from(recipe.zstd) << 3
                | u64::from(layout.extended) << 4;
            put64(&mut header, 72, bits);
            put64(&mut header, 88, u64::from(layout.raw_data_file) << 1);
            put32(&mut header, 96, layout.refcount_order);
            put32(&mut header, 100, length as u32);
            header[104] = u8::from(recipe.zstd);
        }
        let mut extension = |kind: u32, text: &str| {
            header.extend(kind.to_be_bytes());
            header.extend((text.len() as u32).to_be_bytes());
            header.extend(text.as_bytes());
            header.resize(header.len().next_multiple_of(8), 0);
        };
        if let Some((_, format)) = &recipe.below {
            extension(0xe279_2aca, format);
        }
        if layout.data_file {
            extension(0x4441_5441, "data");
        }
        header.extend([0; 8]);
        if let Some((name, _)) = &recipe.below {
            let at = header.len() as u64;
            put64(&mut header, 8, at);
            put32(&mut header, 16, name.len() as u32);
            header.extend(name.as_bytes());
        }
        self.put(0, &header);
    }
}
