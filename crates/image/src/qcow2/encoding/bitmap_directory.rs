//! The bitmap directory: one entry of variable length for each persistent bitmap.

use blockyard_storage::Storage;

use super::bytes::{self, be16, be32, be64, put32, put64};
use super::header::{BitmapsExtension, Header};
use crate::SECTOR;
use crate::error::ImageError;
use crate::raw::Raw;

const FIXED: usize = 24;
/// The only type of bitmap that the format has.
pub const DIRTY_TRACKING: u8 = 1;
/// Maximum size of a bitmap's data that QEMU accepts, in bytes.
pub const MAX_BITMAP_BYTES: u64 = 512 << 20;

/// Flag: the last writer did not save the bitmap, so its bits may be outdated.
pub const IN_USE: u32 = 1;
/// Flag: every write to the image must be recorded in the bitmap.
pub const AUTO: u32 = 1 << 1;
/// Allowed values of log2 of the number of disk bytes that a bit stands for: 512 bytes to 2 GiB.
pub const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// Maximum length of a name, in bytes.
pub const MAX_NAME: usize = 1023;

/// What is wrong with the table of a bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableFault {
    #[error("its table has {0} entries: at most 512 MiB of data are allowed")]
    TooLong(u32),
    #[error("its table's offset {0} is not aligned to a cluster")]
    Unaligned(u64),
}

/// Why QEMU or this program does not accept a bitmap, although its table can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OddBitmap {
    #[error("it has no table")]
    NoTable,
    #[error("its type {0} is not known")]
    Kind(u8),
    #[error("its flags {0:#x} are not known")]
    Flags(u32),
    #[error("its granularity is 2^{0}: 2^9 to 2^31 are allowed")]
    Granularity(u8),
    #[error("its name must have 1 to 1023 bytes")]
    NameLength,
    #[error("its name is not UTF-8")]
    NotUtf8,
    #[error("it has {0} bytes of extra data, which are unknown")]
    Extra(u32),
    #[error("its table has {entries} entries, and the disk's size needs {needed}")]
    TableSize { entries: u32, needed: u64 },
}

/// A directory entry: where the bitmap's table lies, and its flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapEntry {
    /// Offset of the entry in the directory, in bytes.
    pub at: usize,
    /// Length of the entry with padding, in bytes.
    pub len: u64,
    pub table_offset: u64,
    /// Number of entries of the table.
    pub table_size: u32,
    pub flags: u32,
    pub kind: u8,
    pub granularity_bits: u8,
    /// Length of unknown extra data between the fields and the name, in bytes.
    pub extra_len: u32,
    pub name: String,
}

impl BitmapEntry {
    /// Returns what is wrong with the offset or size of the bitmap's table.
    pub fn table_fault(&self, header: &Header) -> Option<TableFault> {
        if u64::from(self.table_size) << header.cluster_bits > MAX_BITMAP_BYTES {
            return Some(TableFault::TooLong(self.table_size));
        }
        if !self.table_offset.is_multiple_of(header.cluster_size()) {
            return Some(TableFault::Unaligned(self.table_offset));
        }
        None
    }

    /// Returns why QEMU would reject the bitmap, although its table can be read.
    pub fn odd(&self, header: &Header) -> Option<OddBitmap> {
        let pieces = whole_sectors(header.size).div_ceil(1 << self.granularity_bits.min(63));
        let needed = pieces.div_ceil(8).div_ceil(header.cluster_size());
        Some(match self {
            _ if self.table_size == 0 || self.table_offset == 0 => OddBitmap::NoTable,
            _ if self.kind != DIRTY_TRACKING => OddBitmap::Kind(self.kind),
            _ if self.flags & !(IN_USE | AUTO) != 0 => OddBitmap::Flags(self.flags),
            _ if !GRANULARITY_BITS.contains(&self.granularity_bits) => {
                OddBitmap::Granularity(self.granularity_bits)
            }
            _ if self.name.is_empty() || self.name.len() > MAX_NAME => OddBitmap::NameLength,
            _ if self.extra_len > 0 => OddBitmap::Extra(self.extra_len),
            _ if self.flags & IN_USE == 0 && u64::from(self.table_size) != needed => {
                OddBitmap::TableSize { entries: self.table_size, needed }
            }
            _ => return None,
        })
    }
}

/// Returns the part of a disk that its bitmaps describe. QEMU counts whole sectors only.
pub fn whole_sectors(size: u64) -> u64 {
    size - size % SECTOR
}

/// Encodes a directory of these bitmaps, without extra data. Ignores their offsets in the old
/// directory.
pub fn encode(bitmaps: &[BitmapEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for bitmap in bitmaps {
        let at = bytes.len();
        bytes.resize(at + FIXED, 0);
        put64(&mut bytes, at, bitmap.table_offset);
        put32(&mut bytes, at + 8, bitmap.table_size);
        put32(&mut bytes, at + 12, bitmap.flags);
        bytes[at + 16] = DIRTY_TRACKING;
        bytes[at + 17] = bitmap.granularity_bits;
        bytes[at + 18..at + 20].copy_from_slice(&(bitmap.name.len() as u16).to_be_bytes());
        bytes.extend_from_slice(bitmap.name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes
}

/// Returns the length of a directory entry in bytes.
pub fn entry_bytes(name_len: usize, extra_len: usize) -> u64 {
    (FIXED + extra_len + name_len).next_multiple_of(8) as u64
}

/// Reads the directory: its bytes and its entries.
pub async fn read(
    file: &Raw,
    extension: &BitmapsExtension,
) -> Result<(Vec<u8>, Vec<BitmapEntry>), ImageError> {
    let (offset, size) = (extension.directory_offset, extension.directory_size);
    let io = |e| ImageError::io("qcow2 bitmap directory", offset, "reading", e);
    if offset.saturating_add(size) > file.storage().len().await.map_err(io)? {
        return Err(ImageError::invalid(
            "qcow2 bitmap directory",
            offset,
            "it ends beyond the end of the file",
        ));
    }
    let bytes = bytes::read(file, offset, size as usize).await.map_err(io)?;
    let bitmaps = entries(&bytes, extension.count, offset)?;
    Ok((bytes, bitmaps))
}

fn entries(bytes: &[u8], count: u32, offset: u64) -> Result<Vec<BitmapEntry>, ImageError> {
    let (mut at, mut bitmaps) = (0, Vec::new());
    for index in 0..count {
        let bad = |what: &str| {
            ImageError::invalid(
                format!("qcow2 bitmap directory entry {index}"),
                offset + at as u64,
                what,
            )
        };
        let rest = bytes.get(at..).unwrap_or_default();
        let fixed = rest.get(..FIXED).ok_or_else(|| bad("it lies beyond the directory's end"))?;
        let (name_len, extra_len) = (usize::from(be16(fixed, 18)), be32(fixed, 20) as usize);
        let end = FIXED.checked_add(extra_len).and_then(|n| n.checked_add(name_len));
        let end = end
            .filter(|&end| end <= rest.len())
            .ok_or_else(|| bad("it goes on beyond the directory's end"))?;
        let name = String::from_utf8_lossy(&rest[end - name_len..end]).into_owned();
        bitmaps.push(BitmapEntry {
            at,
            len: end.next_multiple_of(8) as u64,
            table_offset: be64(fixed, 0),
            table_size: be32(fixed, 8),
            flags: be32(fixed, 12),
            kind: fixed[16],
            granularity_bits: fixed[17],
            extra_len: be32(fixed, 20),
            name,
        });
        at += end.next_multiple_of(8);
    }
    Ok(bitmaps)
}
