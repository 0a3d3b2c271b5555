//! The header: fields, extensions and the backing file's name, all in the first cluster.
//!
//! In: the first bytes of the file. Out: a [`Header`] with all fields checked, or an error that
//! names the wrong field. In the other direction: the header's bytes. Unknown extensions and fields
//! of later versions are preserved.
//!
//! Invariant: the fields lie in the first sector, and [`Header::write_fixed`] writes only that
//! sector. So a power cut leaves the old fields or the new ones. Every switch to new structures
//! uses it.

mod parse;
mod tests;

use blockyard_storage::Storage;

use super::bytes::{self, put32, put64};
use super::refblock::RefcountWidth;
use crate::error::ImageError;
use crate::raw::Raw;

pub const MAGIC: u32 = 0x5146_49fb;
pub const MIN_CLUSTER_BITS: u32 = 9;
pub const MAX_CLUSTER_BITS: u32 = 21;
/// Minimum of `cluster_bits` with extended L2 entries: each of the 32 subclusters must be at least
/// a sector.
pub const MIN_EXTENDED_CLUSTER_BITS: u32 = 14;
pub const MAX_L1_BYTES: u64 = 32 << 20;
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
pub const MAX_SNAPSHOTS: u32 = 65536;
pub const MAX_SNAPSHOT_TABLE_BYTES: u64 = 64 << 20;
pub const MAX_BITMAPS: u32 = 65535;
pub const MAX_BITMAP_DIRECTORY_BYTES: u64 = 64 << 20;
pub const MAX_BACKING_NAME: usize = 1023;
/// No table or cluster lies at or beyond this offset.
pub const MAX_OFFSET: u64 = 1 << 56;

pub const INCOMPATIBLE_DIRTY: u64 = 1;
pub const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
pub const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
pub const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
pub const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
pub const INCOMPATIBLE_KNOWN: u64 = (1 << 5) - 1;
pub const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1;
pub const AUTOCLEAR_BITMAPS: u64 = 1;
pub const AUTOCLEAR_RAW_DATA: u64 = 1 << 1;
pub const AUTOCLEAR_KNOWN: u64 = (1 << 2) - 1;
/// The extension of type [`EXTENSION_JOURNAL`] names a valid journal (`session.rs`). Not in the
/// specification: other programs clear it when they open the image for writing.
pub const AUTOCLEAR_JOURNAL: u64 = 1 << 57;

pub const EXTENSION_END: u32 = 0;
pub const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
pub const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
pub const EXTENSION_BITMAPS: u32 = 0x2385_2875;
pub const EXTENSION_ENCRYPTION: u32 = 0x0537_be77;
pub const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
/// "BLKJ": session of the last journal (`session.rs`). Not in the specification.
pub const EXTENSION_JOURNAL: u32 = 0x424c_4b4a;

pub const SECTOR_BYTES: usize = 512;
/// Size in bytes of most images' clusters.
const USUAL_CLUSTER: u64 = 64 << 10;
const V2_LENGTH: u32 = 72;
pub const V3_LENGTH: u32 = 104;
const COMPRESSION_AT: usize = 104;
const STRUCTURE: &str = "qcow2 header";

/// Compression method of compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    Zlib,
    Zstd,
}

/// Contents of the bitmaps extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    pub count: u32,
    pub directory_size: u64,
    pub directory_offset: u64,
}

/// A header extension: type and data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    pub kind: u32,
    pub data: Vec<u8>,
}

/// Header of a qcow2 image (specification, "Header").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub version: u32,
    pub cluster_bits: u32,
    /// Size of the virtual disk in bytes. QEMU shows it rounded to sectors.
    pub size: u64,
    /// Number of L1 entries. May exceed what `size` needs, because VM state is stored behind the
    /// disk.
    pub l1_size: u32,
    pub l1_offset: u64,
    pub refcount_table_offset: u64,
    pub refcount_table_clusters: u32,
    pub snapshot_count: u32,
    pub snapshots_offset: u64,
    pub incompatible: u64,
    pub compatible: u64,
    pub autoclear: u64,
    pub refcount_order: u32,
    pub header_length: u32,
    pub compression: Compression,
    pub backing: Option<String>,
    /// Offset of the backing file's name; 0: none.
    pub backing_offset: u64,
    pub backing_format: Option<String>,
    pub data_file: Option<String>,
    /// `Some` only while the autoclear bit says that the bitmaps are consistent.
    pub bitmaps: Option<BitmapsExtension>,
    /// All extensions in order. Known extensions are written from the fields above. If a field is
    /// missing, the extension of a backing format or data file is omitted, and that of bitmaps
    /// keeps its bytes.
    pub extensions: Vec<Extension>,
    /// Header bytes behind the compression type, if the header is longer than this program knows.
    pub unknown_fields: Vec<u8>,
}

impl Header {
    /// Reads and checks the header of an image.
    pub async fn read(file: &Raw) -> Result<Header, ImageError> {
        let (bytes, len) = Self::read_cluster(file).await?;
        Self::parse(&bytes, len)
    }

    /// Like [`read`](Self::read), for a check; see [`parse_for_check`](Self::parse_for_check).
    pub async fn read_for_check(file: &Raw) -> Result<Header, ImageError> {
        let (bytes, _) = Self::read_cluster(file).await?;
        Self::parse_for_check(&bytes)
    }

    /// Reads the first cluster (as far as the file has it), and the file's length.
    async fn read_cluster(file: &Raw) -> Result<(Vec<u8>, u64), ImageError> {
        let io = |e| ImageError::io(STRUCTURE, 0, "reading", e);
        let len = file.storage().len().await.map_err(io)?;
        let mut first = bytes::read(file, 0, len.min(USUAL_CLUSTER) as usize).await.map_err(io)?;
        let cluster_bits = parse::cluster_bits(&first)?;
        let cluster = len.min(1 << cluster_bits) as usize;
        if cluster <= first.len() {
            first.truncate(cluster);
            return Ok((first, len));
        }
        Ok((bytes::read(file, 0, cluster).await.map_err(io)?, len))
    }

    /// Returns the header area, at most a cluster: fields, extensions and then the backing file's
    /// name.
    pub fn serialize(&self) -> Result<Vec<u8>, ImageError> {
        let mut placed = self.clone();
        let mut bytes = self.serialize_without_name()?;
        placed.backing_offset = 0;
        if let Some(name) = &self.backing {
            placed.backing_offset = bytes.len() as u64;
            bytes.extend_from_slice(name.as_bytes());
        }
        self.fits(bytes.len())?;
        placed.put_fields(&mut bytes);
        Ok(bytes)
    }

    /// Returns the fields and the extensions.
    pub fn serialize_without_name(&self) -> Result<Vec<u8>, ImageError> {
        let mut bytes = vec![0; self.header_length as usize];
        for extension in &self.current_extensions() {
            bytes.extend_from_slice(&extension.kind.to_be_bytes());
            bytes.extend_from_slice(&(extension.data.len() as u32).to_be_bytes());
            bytes.extend_from_slice(&extension.data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        bytes.extend_from_slice(&[0; 8]);
        self.fits(bytes.len())?;
        self.put_fields(&mut bytes);
        Ok(bytes)
    }

    fn fits(&self, len: usize) -> Result<(), ImageError> {
        if len as u64 <= self.cluster_size() {
            return Ok(());
        }
        let what = format!(
            "its extensions and the backing file's name take {len} bytes, and a cluster has {}",
            self.cluster_size()
        );
        Err(ImageError::refused(STRUCTURE, what))
    }

    /// Returns the extensions, updated from the fields.
    pub(in crate::qcow2) fn current_extensions(&self) -> Vec<Extension> {
        let mut rest = self.extensions.clone();
        let mut first = Vec::new();
        let strings = [
            (EXTENSION_BACKING_FORMAT, &self.backing_format),
            (EXTENSION_DATA_FILE, &self.data_file),
        ]
        .map(|(k, s)| (k, s));
        for (kind, string) in strings {
            match (string, rest.iter_mut().find(|e| e.kind == kind)) {
                (Some(string), Some(old)) => old.data = string.clone().into_bytes(),
                (Some(string), None) => {
                    first.push(Extension { kind, data: string.clone().into_bytes() })
                }
                (None, _) => rest.retain(|e| e.kind != kind),
            }
        }
        if let Some(bitmaps) = self.bitmaps {
            let mut data = vec![0; 24];
            put32(&mut data, 0, bitmaps.count);
            put64(&mut data, 8, bitmaps.directory_size);
            put64(&mut data, 16, bitmaps.directory_offset);
            match rest.iter_mut().find(|e| e.kind == EXTENSION_BITMAPS) {
                Some(old) => old.data = data,
                None => first.push(Extension { kind: EXTENSION_BITMAPS, data }),
            }
        }
        first.append(&mut rest);
        first
    }

    /// Puts the fields into the first bytes of the file, as far as `bytes` reaches.
    fn put_fields(&self, bytes: &mut [u8]) {
        let mut fields = vec![0; self.header_length as usize];
        put32(&mut fields, 0, MAGIC);
        put32(&mut fields, 4, self.version);
        put64(&mut fields, 8, self.backing_offset);
        put32(&mut fields, 16, self.backing.as_ref().map_or(0, |name| name.len() as u32));
        put32(&mut fields, 20, self.cluster_bits);
        put64(&mut fields, 24, self.size);
        put32(&mut fields, 36, self.l1_size);
        put64(&mut fields, 40, self.l1_offset);
        put64(&mut fields, 48, self.refcount_table_offset);
        put32(&mut fields, 56, self.refcount_table_clusters);
        put32(&mut fields, 60, self.snapshot_count);
        put64(&mut fields, 64, self.snapshots_offset);
        if self.version >= 3 {
            put64(&mut fields, 72, self.incompatible);
            put64(&mut fields, 80, self.compatible);
            put64(&mut fields, 88, self.autoclear);
            put32(&mut fields, 96, self.refcount_order);
            put32(&mut fields, 100, self.header_length);
        }
        if let Some(compression) = fields.get_mut(COMPRESSION_AT) {
            *compression = u8::from(self.compression == Compression::Zstd);
            let rest = &mut fields[COMPRESSION_AT + 1..];
            let known = rest.len().min(self.unknown_fields.len());
            rest[..known].copy_from_slice(&self.unknown_fields[..known]);
        }
        let len = fields.len().min(bytes.len());
        bytes[..len].copy_from_slice(&fields[..len]);
    }

    /// Writes the fields (not the extensions, not the name) with one write of one sector. Durable
    /// after a flush.
    pub async fn write_fixed(&self, file: &Raw) -> Result<(), ImageError> {
        let mut sector = bytes::read(file, 0, SECTOR_BYTES)
            .await
            .map_err(|e| ImageError::io(STRUCTURE, 0, "reading", e))?;
        self.put_fields(&mut sector);
        bytes::write(file, 0, &sector).await.map_err(|e| ImageError::io(STRUCTURE, 0, "writing", e))
    }

    /// Size of a cluster in bytes.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns true if refcounts may be outdated.
    pub fn has_dirty(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DIRTY != 0
    }

    /// Returns true if the image is marked as corrupt.
    pub fn has_corrupt(&self) -> bool {
        self.incompatible & INCOMPATIBLE_CORRUPT != 0
    }

    /// Returns true if L2 entries have subcluster bitmaps.
    pub fn extended_l2(&self) -> bool {
        self.incompatible & INCOMPATIBLE_EXTENDED_L2 != 0
    }

    /// Returns true if guest data are in an external data file.
    pub fn has_data_file(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DATA_FILE != 0
    }

    /// Returns true if the external data file must be valid as a raw image of the whole disk.
    pub fn raw_data_file(&self) -> bool {
        self.autoclear & AUTOCLEAR_RAW_DATA != 0
    }

    pub fn lazy_refcounts(&self) -> bool {
        self.compatible & COMPATIBLE_LAZY_REFCOUNTS != 0
    }

    pub fn refcount_width(&self) -> RefcountWidth {
        RefcountWidth::new(self.refcount_order)
    }

    pub fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// Size of an L2 entry in bytes.
    pub fn l2_entry_size(&self) -> u64 {
        if self.extended_l2() { 16 } else { 8 }
    }

    /// Number of entries of one L2 table.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_size() / self.l2_entry_size()
    }

    /// Returns the number of bytes of the virtual disk that one L1 entry maps.
    pub fn l2_reach(&self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// Number of L1 entries for a virtual disk of `size` bytes.
    pub fn l1_needed(&self, size: u64) -> u64 {
        size.div_ceil(self.l2_reach())
    }

    /// Unit of allocation in bytes: a subcluster, or a cluster without extended L2 entries.
    pub fn subcluster_size(&self) -> u64 {
        if self.extended_l2() { self.cluster_size() / 32 } else { self.cluster_size() }
    }
}
