//! Parses a header and checks every field before its use.

use blockyard_ring::text::is_deceptive;

use super::*;
use crate::qcow2::encoding::bytes::{be32, be64};

const BACKING_NAME: &str = "qcow2 backing file name";
/// Offset of the header field that gives the L1 table's offset.
const L1_FIELD: u64 = 40;

/// Returns the cluster bits, checked, from the first sector of a file.
pub fn cluster_bits(bytes: &[u8]) -> Result<u32, ImageError> {
    if bytes.len() < 4 || be32(bytes, 0) != MAGIC {
        return Err(ImageError::invalid(
            STRUCTURE,
            0,
            "this is not a qcow2 image: it lacks the magic bytes",
        ));
    }
    if bytes.len() < V2_LENGTH as usize {
        return Err(ImageError::invalid(
            STRUCTURE,
            0,
            format!("the file ends after {} bytes", bytes.len()),
        ));
    }
    let bits = be32(bytes, 20);
    if !(MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&bits) {
        return Err(ImageError::invalid(
            STRUCTURE,
            20,
            format!("{bits} cluster bits: only 9 to 21 are allowed"),
        ));
    }
    Ok(bits)
}

impl Header {
    /// Parses and checks the header of an image to open. `bytes`: the file's first cluster, as far
    /// as it exists. `file_len`: end of the file, beyond which no table may lie.
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<Header, ImageError> {
        let header = Self::parse_for_check(bytes)?;
        if header.refcount_table_clusters == 0 {
            let what =
                "there is no refcount table; `blockyard image check --repair all` builds one";
            return Err(ImageError::invalid(STRUCTURE, 56, what));
        }
        header.check_places(file_len)?;
        Ok(header)
    }

    /// Like [`parse`](Self::parse), without the errors that a check reports by itself and may
    /// repair: a missing refcount table, and tables that overlap or lie beyond the end of the file.
    pub fn parse_for_check(bytes: &[u8]) -> Result<Header, ImageError> {
        let cluster_bits = cluster_bits(bytes)?;
        let bytes = &bytes[..bytes.len().min(1 << cluster_bits)];
        let mut header = fields(bytes, cluster_bits)?;
        header.check_fields()?;
        header.parse_extensions(bytes)?;
        header.check_features(bytes)?;
        header.parse_backing_name(bytes)?;
        header.check_tables()?;
        Ok(header)
    }

    fn check_fields(&self) -> Result<(), ImageError> {
        let bad = |at: u64, what: String| Err(ImageError::invalid(STRUCTURE, at, what));
        if self.extended_l2() && self.cluster_bits < MIN_EXTENDED_CLUSTER_BITS {
            return bad(
                20,
                format!("{} cluster bits: extended L2 entries need at least 14", self.cluster_bits),
            );
        }
        if self.refcount_order > 6 {
            return bad(
                96,
                format!("refcount order {}: at most 6 is allowed", self.refcount_order),
            );
        }
        if self.raw_data_file() && !self.has_data_file() {
            return bad(
                88,
                "the raw external data bit is set without an external data file".into(),
            );
        }
        if self.has_data_file() && self.snapshot_count > 0 {
            return bad(60, "internal snapshots in an image with an external data file".into());
        }
        Ok(())
    }

    fn parse_extensions(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        // The backing file's name follows the extensions and bounds them.
        let end = match self.backing_offset {
            0 => bytes.len(),
            offset => bytes.len().min(usize::try_from(offset).unwrap_or(usize::MAX)),
        };
        let mut at = self.header_length as usize;
        while at + 8 <= end {
            let (kind, len) = (be32(bytes, at), be32(bytes, at + 4) as usize);
            if len > end - at - 8 {
                let what = format!(
                    "extension {kind:#010x} has {len} bytes, more than fit into the first cluster"
                );
                return Err(ImageError::invalid("qcow2 header extension", at as u64, what));
            }
            if kind == EXTENSION_END {
                break;
            }
            self.take_extension(kind, &bytes[at + 8..at + 8 + len], at as u64)?;
            at += 8 + len.next_multiple_of(8);
        }
        if self.autoclear & AUTOCLEAR_BITMAPS != 0 && self.bitmaps.is_none() {
            return Err(ImageError::invalid(
                STRUCTURE,
                88,
                "the bitmaps bit is set without the bitmaps extension",
            ));
        }
        Ok(())
    }

    fn take_extension(&mut self, kind: u32, data: &[u8], at: u64) -> Result<(), ImageError> {
        let structure = "qcow2 header extension";
        let known = [
            EXTENSION_BACKING_FORMAT,
            EXTENSION_BITMAPS,
            EXTENSION_DATA_FILE,
            EXTENSION_FEATURE_NAMES,
        ];
        if known.contains(&kind) && self.extensions.iter().any(|e| e.kind == kind) {
            return Err(ImageError::invalid(
                structure,
                at,
                format!("extension {kind:#010x} exists twice"),
            ));
        }
        match kind {
            EXTENSION_BACKING_FORMAT => {
                self.backing_format = Some(string("qcow2 backing format", at, data)?)
            }
            EXTENSION_DATA_FILE => {
                self.data_file = Some(string("qcow2 external data file name", at, data)?)
            }
            EXTENSION_ENCRYPTION => {
                return Err(ImageError::unsupported(STRUCTURE, "the image is encrypted (LUKS)"));
            }
            EXTENSION_BITMAPS if self.autoclear & AUTOCLEAR_BITMAPS != 0 => {
                self.bitmaps = Some(bitmaps(data, at, self.cluster_bits)?);
            }
            _ => {}
        }
        self.extensions.push(Extension { kind, data: data.to_vec() });
        Ok(())
    }

    fn check_features(&self, bytes: &[u8]) -> Result<(), ImageError> {
        match be32(bytes, 32) {
            0 => {}
            1 => return Err(ImageError::unsupported(STRUCTURE, "the image is encrypted (AES)")),
            2 => return Err(ImageError::unsupported(STRUCTURE, "the image is encrypted (LUKS)")),
            other => {
                return Err(ImageError::invalid(
                    STRUCTURE,
                    32,
                    format!("encryption method {other} is not known"),
                ));
            }
        }
        let unknown = self.incompatible & !INCOMPATIBLE_KNOWN;
        if unknown != 0 {
            let names: Vec<_> = (0..64)
                .filter(|bit| unknown >> bit & 1 == 1)
                .map(|bit| self.feature_name(bit))
                .collect();
            let what = format!("the image needs unknown features: {}", names.join(", "));
            return Err(ImageError::unsupported(STRUCTURE, what));
        }
        let kind = bytes
            .get(COMPRESSION_AT)
            .copied()
            .filter(|_| self.header_length as usize > COMPRESSION_AT)
            .unwrap_or(0);
        match (self.incompatible & INCOMPATIBLE_COMPRESSION != 0, kind) {
            (false, 0) | (true, 1) => Ok(()),
            (true, 2..) => Err(ImageError::unsupported(
                STRUCTURE,
                format!("compression type {kind} is not known"),
            )),
            _ => {
                let what = format!(
                    "compression type {kind} and the compression type bit contradict each other"
                );
                Err(ImageError::invalid(STRUCTURE, COMPRESSION_AT as u64, what))
            }
        }
    }

    /// Returns the name of an incompatible feature from the image's own table.
    fn feature_name(&self, bit: u32) -> String {
        let table = self.extensions.iter().find(|e| e.kind == EXTENSION_FEATURE_NAMES);
        let entry = table
            .and_then(|t| t.data.chunks_exact(48).find(|e| e[0] == 0 && u32::from(e[1]) == bit));
        let Some(entry) = entry else { return format!("incompatible feature bit {bit}") };
        let name = String::from_utf8_lossy(&entry[2..]);
        // The name is printed: drop control characters of a hostile image.
        let name: String =
            name.trim_end_matches('\0').chars().filter(|c| !is_deceptive(*c)).collect();
        format!("\"{name}\" (incompatible feature bit {bit})")
    }

    fn parse_backing_name(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        let len = be32(bytes, 16) as usize;
        if self.backing_offset == 0 {
            return Ok(());
        }
        if self.raw_data_file() {
            return Err(ImageError::invalid(
                STRUCTURE,
                8,
                "a backing file under a raw external data file",
            ));
        }
        if len > MAX_BACKING_NAME {
            return Err(ImageError::invalid(
                BACKING_NAME,
                16,
                format!("{len} bytes long: at most 1023 are allowed"),
            ));
        }
        let start = usize::try_from(self.backing_offset).unwrap_or(usize::MAX);
        let name = start
            .checked_add(len)
            .and_then(|end| bytes.get(start..end))
            .filter(|_| start >= self.header_length as usize);
        let Some(name) = name else {
            return Err(ImageError::invalid(
                BACKING_NAME,
                self.backing_offset,
                "it lies outside of the first cluster's free part",
            ));
        };
        self.backing =
            if len == 0 { None } else { Some(string(BACKING_NAME, self.backing_offset, name)?) };
        Ok(())
    }

    /// Checks size and alignment of the tables.
    fn check_tables(&self) -> Result<(), ImageError> {
        let bad = |at: u64, what: String| Err(ImageError::invalid(STRUCTURE, at, what));
        let needed = self.l1_needed(self.size);
        if u64::from(self.l1_size) * 8 > MAX_L1_BYTES || needed * 8 > MAX_L1_BYTES {
            let what = format!(
                "an L1 table of {} entries, {needed} needed: at most 32 MiB are allowed",
                self.l1_size
            );
            return bad(36, what);
        }
        if u64::from(self.l1_size) < needed {
            let what = format!(
                "the L1 table has {} entries, and {} bytes need {needed}",
                self.l1_size, self.size
            );
            return bad(36, what);
        }
        if u64::from(self.refcount_table_clusters) << self.cluster_bits > MAX_REFCOUNT_TABLE_BYTES {
            let what = format!(
                "a refcount table of {} clusters: at most 8 MiB are allowed",
                self.refcount_table_clusters
            );
            return bad(56, what);
        }
        if self.snapshot_count > MAX_SNAPSHOTS {
            return bad(
                60,
                format!("{} snapshots: at most {MAX_SNAPSHOTS} are allowed", self.snapshot_count),
            );
        }
        for table in self.tables() {
            if !table.offset.is_multiple_of(self.cluster_size()) {
                let what = format!("offset {} is not aligned to a cluster", table.offset);
                return Err(ImageError::invalid(table.name, table.field, what));
            }
            if table.offset >= MAX_OFFSET {
                let what = format!("offset {} lies beyond 2^56", table.offset);
                return Err(ImageError::invalid(table.name, table.field, what));
            }
        }
        Ok(())
    }

    /// Checks that no table overlaps another or the header, or lies beyond the end of the file. The
    /// last cluster of the file may be partial. Only the L1 table must lie in the file as a whole.
    fn check_places(&self, file_len: u64) -> Result<(), ImageError> {
        let last_end = file_len.checked_next_multiple_of(self.cluster_size()).unwrap_or(u64::MAX);
        let mut tables = self.tables();
        tables.sort_by_key(|table| table.offset);
        let mut before = ("qcow2 header", self.cluster_size());
        for table in tables.iter().filter(|table| table.len > 0) {
            let end = table.offset + table.len;
            if table.offset < before.1 {
                let what = format!("it overlaps the {}", before.0.trim_start_matches("qcow2 "));
                return Err(ImageError::invalid(table.name, table.offset, what));
            }
            let most = if table.field == L1_FIELD { file_len } else { last_end };
            if end > most {
                let what = format!(
                    "it ends at {end}, beyond the end of the file at {file_len}: the file is \
                     truncated"
                );
                return Err(ImageError::invalid(table.name, table.offset, what));
            }
            before = (table.name, end.next_multiple_of(self.cluster_size()));
        }
        Ok(())
    }

    /// Returns the tables that the header points to, empty ones too: QEMU checks the offset of an
    /// empty table. The snapshot table has its minimum length here, because only its entries give
    /// its length.
    fn tables(&self) -> Vec<TableField> {
        let bitmaps = self.bitmaps.map_or((0, 0), |b| (b.directory_offset, b.directory_size));
        let refcounts = u64::from(self.refcount_table_clusters) << self.cluster_bits;
        let table = |name, field, offset, len| TableField { name, field, offset, len };
        vec![
            table("qcow2 L1 table", L1_FIELD, self.l1_offset, u64::from(self.l1_size) * 8),
            table("qcow2 refcount table", 48, self.refcount_table_offset, refcounts),
            table(
                "qcow2 snapshot table",
                64,
                self.snapshots_offset,
                u64::from(self.snapshot_count) * 40,
            ),
            table("qcow2 bitmap directory", self.header_length.into(), bitmaps.0, bitmaps.1),
        ]
    }
}

struct TableField {
    name: &'static str,
    /// Offset of the header field that gives the table's offset.
    field: u64,
    offset: u64,
    len: u64,
}

/// Decodes the fields. `bytes` has at least the length of a version 2 header.
fn fields(bytes: &[u8], cluster_bits: u32) -> Result<Header, ImageError> {
    let version = be32(bytes, 4);
    let length = match version {
        2 => V2_LENGTH,
        3 if bytes.len() >= V3_LENGTH as usize => be32(bytes, 100),
        3 => {
            return Err(ImageError::invalid(
                STRUCTURE,
                0,
                format!("the file ends after {} bytes", bytes.len()),
            ));
        }
        1 => {
            return Err(ImageError::unsupported(
                STRUCTURE,
                "version 1 (qcow) is not supported: convert it with `qemu-img convert`",
            ));
        }
        other => {
            return Err(ImageError::unsupported(
                STRUCTURE,
                format!("version {other}: only 2 and 3 are known"),
            ));
        }
    };
    if version == 3
        && (length < V3_LENGTH || !length.is_multiple_of(8) || length as usize > bytes.len())
    {
        let what = format!(
            "header length {length}: a multiple of 8 from 104 to the end of the first cluster is \
             allowed"
        );
        return Err(ImageError::invalid(STRUCTURE, 100, what));
    }
    let v3 = |at| if version >= 3 { be64(bytes, at) } else { 0 };
    let zstd = length as usize > COMPRESSION_AT && bytes[COMPRESSION_AT] != 0;
    Ok(Header {
        version,
        cluster_bits,
        size: be64(bytes, 24),
        l1_size: be32(bytes, 36),
        l1_offset: be64(bytes, 40),
        refcount_table_offset: be64(bytes, 48),
        refcount_table_clusters: be32(bytes, 56),
        snapshot_count: be32(bytes, 60),
        snapshots_offset: be64(bytes, 64),
        incompatible: v3(72),
        compatible: v3(80),
        autoclear: v3(88),
        refcount_order: if version >= 3 { be32(bytes, 96) } else { 4 },
        header_length: length,
        compression: if zstd { Compression::Zstd } else { Compression::Zlib },
        backing: None,
        backing_offset: be64(bytes, 8),
        backing_format: None,
        data_file: None,
        bitmaps: None,
        extensions: Vec::new(),
        unknown_fields: bytes.get(COMPRESSION_AT + 1..length as usize).unwrap_or_default().to_vec(),
    })
}

fn bitmaps(data: &[u8], at: u64, cluster_bits: u32) -> Result<BitmapsExtension, ImageError> {
    let bad = |what: String| Err(ImageError::invalid("qcow2 bitmaps extension", at, what));
    if data.len() != 24 {
        return bad(format!("it has {} bytes, not 24", data.len()));
    }
    let (count, size, offset) = (be32(data, 0), be64(data, 8), be64(data, 16));
    if count == 0 || count > MAX_BITMAPS {
        return bad(format!("{count} bitmaps: 1 to {MAX_BITMAPS} are allowed"));
    }
    if be32(data, 4) != 0 {
        return bad("its reserved field is not zero".into());
    }
    // An entry has at least 24 bytes.
    if size < u64::from(count) * 24 || size > MAX_BITMAP_DIRECTORY_BYTES {
        return bad(format!(
            "a directory of {size} bytes for {count} bitmaps: at most 64 MiB are allowed"
        ));
    }
    if offset == 0 || !offset.is_multiple_of(1 << cluster_bits) {
        return bad(format!("the directory's offset {offset} is not aligned to a cluster"));
    }
    Ok(BitmapsExtension { count, directory_size: size, directory_offset: offset })
}

fn string(structure: &str, at: u64, data: &[u8]) -> Result<String, ImageError> {
    match std::str::from_utf8(data) {
        Ok(s) if !s.contains('\0') => Ok(s.to_owned()),
        Ok(_) => Err(ImageError::invalid(structure, at, "it has a zero byte in it")),
        Err(_) => Err(ImageError::invalid(structure, at, "it is not UTF-8")),
    }
}
