//! Entries of the L1 table, of L2 tables and of the refcount table (qcow2 specification, "Cluster
//! mapping" and "Host cluster management").
//!
//! In: words of the file. Out: their meaning, or what is wrong with them (the caller adds where
//! they lie). Invariant: a decoded offset is aligned to a cluster and below 2^56; that of a
//! compressed cluster is only below 2^56.

use super::header::{Header, MAX_OFFSET};

/// The cluster's refcount is exactly one (accurate in the active tables only).
pub const COPIED: u64 = 1 << 63;
/// The entry describes a compressed cluster.
pub const COMPRESSED: u64 = 1 << 62;
/// Parts of the cluster have data, and the others are in the backing image (`partial.rs`). Bits 0
/// to 15 name the parts with data. In memory only: the file has no such entries.
const PARTIAL: u64 = 1 << 61;
/// The cluster reads as zeroes (version 3, standard L2 entries).
pub const ZERO: u64 = 1;
/// Bits 9 to 55: the offset of an L2 table or of a cluster.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Reserved bits of an L1 entry.
pub const L1_RESERVED: u64 = !(COPIED | OFFSET_MASK);
/// Reserved bits of an uncompressed L2 entry.
pub const L2_RESERVED: u64 = !(COPIED | COMPRESSED | ZERO | OFFSET_MASK);
/// Bits 9 to 63: the offset of a refcount block.
pub const REFCOUNT_TABLE_OFFSET_MASK: u64 = !REFCOUNT_TABLE_RESERVED;
/// Reserved bits of a refcount table entry.
pub const REFCOUNT_TABLE_RESERVED: u64 = 0x1ff;
/// Subclusters of a cluster with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;
/// Parts of a partial cluster.
pub const PARTS: u32 = 16;
/// Bits of an entry that name the parts with data.
const PARTS_MASK: u64 = (1 << PARTS) - 1;

/// What is wrong with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("reserved bits are set")]
    Reserved,
    #[error("the offset is not aligned to a cluster")]
    Unaligned,
    #[error("the offset lies beyond 2^56")]
    BeyondLimit,
    #[error("it lies beyond the end of the file")]
    BeyondFile,
    #[error("another entry points to the same block")]
    Repeated,
    #[error("a zero cluster in an image of version 2")]
    ZeroInVersion2,
    #[error("the zero bit is set in an extended entry, which has its own for each subcluster")]
    ZeroInExtended,
    #[error("a subcluster is both allocated and zero")]
    AllocatedAndZero,
    #[error("a subcluster is allocated, but the cluster has no offset")]
    NoOffset,
    #[error("a compressed cluster with the COPIED flag")]
    CompressedCopied,
    #[error("a compressed cluster with subclusters")]
    CompressedSubclusters,
    #[error("a compressed cluster in an image with an external data file")]
    CompressedDataFile,
}

impl From<EntryError> for String {
    fn from(error: EntryError) -> Self {
        error.to_string()
    }
}

/// The header's fields on which the meaning of entries depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryFormat {
    pub cluster_bits: u32,
    pub version: u32,
    pub extended_l2: bool,
    pub data_file: bool,
}

impl EntryFormat {
    pub fn of(header: &Header) -> Self {
        EntryFormat {
            cluster_bits: header.cluster_bits,
            version: header.version,
            extended_l2: header.extended_l2(),
            data_file: header.has_data_file(),
        }
    }

    fn aligned(self, offset: u64) -> bool {
        offset & ((1 << self.cluster_bits) - 1) == 0
    }

    /// Lowest bit of the sector count in a compressed descriptor.
    fn compressed_shift(self) -> u32 {
        62 - (self.cluster_bits - 8)
    }
}

/// An L1 entry: offset of the L2 table. None: all clusters that it would map are unallocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L1Entry {
    pub table: Option<u64>,
    pub copied: bool,
}

impl L1Entry {
    #[inline]
    pub fn decode(word: u64, layout: EntryFormat) -> Result<Self, EntryError> {
        let offset = word & OFFSET_MASK;
        if word & L1_RESERVED != 0 {
            return Err(EntryError::Reserved);
        }
        if !layout.aligned(offset) {
            return Err(EntryError::Unaligned);
        }
        Ok(L1Entry { table: (offset != 0).then_some(offset), copied: word & COPIED != 0 })
    }

    pub fn encode(self) -> u64 {
        self.table.unwrap_or(0) | if self.copied { COPIED } else { 0 }
    }
}

/// Decodes a refcount table entry: offset of the refcount block. None: all its refcounts are 0.
pub fn refcount_block(word: u64, layout: EntryFormat) -> Result<Option<u64>, EntryError> {
    if word & REFCOUNT_TABLE_RESERVED != 0 {
        return Err(EntryError::Reserved);
    }
    if !layout.aligned(word) {
        return Err(EntryError::Unaligned);
    }
    if word >= MAX_OFFSET {
        return Err(EntryError::BeyondLimit);
    }
    Ok((word != 0).then_some(word))
}

/// Which of 32 subclusters are allocated (bits 0 to 31) and which read as zeroes (bits 32 to 63);
/// never both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubclusterBitmap(pub u64);

impl SubclusterBitmap {
    pub const ALL_DATA: SubclusterBitmap = SubclusterBitmap(0xffff_ffff);
    pub const ALL_ZERO: SubclusterBitmap = SubclusterBitmap(0xffff_ffff << 32);

    pub fn data(self) -> u32 {
        self.0 as u32
    }

    pub fn zero(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Meaning of an L2 entry for one guest cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// Reads go to the backing file. With extended entries: all subclusters are unallocated, and no
    /// host cluster is preallocated.
    Unallocated,
    /// Reads as zeroes; `host` is a preallocated cluster. Standard entries only.
    Zero { host: Option<u64> },
    /// The cluster's data are at `host`. Standard entries only.
    Standard { host: u64 },
    /// `len`: maximum number of bytes that the compressed data occupy from `host` on.
    Compressed { host: u64, len: u64 },
    /// Extended entries only. Allocated subclusters have their data in the cluster `host`.
    Subclusters { host: Option<u64>, bitmap: SubclusterBitmap },
    /// In memory only (`partial.rs`). `parts`: which sixteenths of the cluster have data.
    Partial { host: u64, parts: u16 },
}

impl Cluster {
    /// Returns the aligned host cluster of the entry, with data or preallocated.
    pub fn host(self) -> Option<u64> {
        match self {
            Cluster::Standard { host } | Cluster::Partial { host, .. } => Some(host),
            Cluster::Zero { host } | Cluster::Subclusters { host, .. } => host,
            Cluster::Unallocated | Cluster::Compressed { .. } => None,
        }
    }
}

/// An L2 entry: its meaning, and its COPIED flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L2Entry {
    pub cluster: Cluster,
    pub copied: bool,
}

impl L2Entry {
    pub const UNALLOCATED: L2Entry = L2Entry { cluster: Cluster::Unallocated, copied: false };

    /// Decodes an entry. `bitmap`: the second word of an extended entry, else 0.
    #[inline]
    pub fn decode(word: u64, bitmap: u64, layout: EntryFormat) -> Result<Self, EntryError> {
        let copied = word & COPIED != 0;
        if word & COMPRESSED != 0 {
            return Self::decode_compressed(word, bitmap, layout);
        }
        if word & L2_RESERVED != 0 {
            return Err(EntryError::Reserved);
        }
        let offset = word & OFFSET_MASK;
        if !layout.aligned(offset) {
            return Err(EntryError::Unaligned);
        }
        // Offset 0 is the header's cluster, so it means "none". In an external data file it is the
        // first cluster.
        let host = (offset != 0 || (copied && layout.data_file)).then_some(offset);
        let zero = word & ZERO != 0;
        let cluster = match (layout.extended_l2, host) {
            (true, _) => Self::decode_subclusters(host, SubclusterBitmap(bitmap), zero)?,
            (false, _) if zero && layout.version < 3 => {
                return Err(EntryError::ZeroInVersion2);
            }
            (false, host) if zero => Cluster::Zero { host },
            (false, Some(host)) => Cluster::Standard { host },
            (false, None) => Cluster::Unallocated,
        };
        Ok(L2Entry { cluster, copied })
    }

    /// Decodes an entry of the cache, which may be partial.
    #[inline]
    pub fn cached(word: u64, bitmap: u64, layout: EntryFormat) -> Result<Self, EntryError> {
        if is_partial(word) && !layout.extended_l2 {
            let host = word & OFFSET_MASK & !PARTS_MASK;
            let cluster = Cluster::Partial { host, parts: word as u16 };
            return Ok(L2Entry { cluster, copied: true });
        }
        Self::decode(word, bitmap, layout)
    }

    fn decode_subclusters(
        host: Option<u64>,
        bitmap: SubclusterBitmap,
        zero: bool,
    ) -> Result<Cluster, EntryError> {
        if zero {
            return Err(EntryError::ZeroInExtended);
        }
        if bitmap.data() & bitmap.zero() != 0 {
            return Err(EntryError::AllocatedAndZero);
        }
        if host.is_none() && bitmap.data() != 0 {
            return Err(EntryError::NoOffset);
        }
        if host.is_none() && bitmap.0 == 0 {
            return Ok(Cluster::Unallocated);
        }
        Ok(Cluster::Subclusters { host, bitmap })
    }

    fn decode_compressed(word: u64, bitmap: u64, layout: EntryFormat) -> Result<Self, EntryError> {
        let shift = layout.compressed_shift();
        let host = word & ((1 << shift) - 1);
        let sectors = ((word & !(COPIED | COMPRESSED)) >> shift) + 1;
        if word & COPIED != 0 {
            return Err(EntryError::CompressedCopied);
        }
        if host >= MAX_OFFSET {
            return Err(EntryError::Reserved);
        }
        if bitmap != 0 {
            return Err(EntryError::CompressedSubclusters);
        }
        if layout.data_file {
            return Err(EntryError::CompressedDataFile);
        }
        Ok(L2Entry {
            cluster: Cluster::Compressed { host, len: sectors * 512 - host % 512 },
            copied: false,
        })
    }

    /// Encodes the entry. The second word is used by extended L2 entries only. The fields of a
    /// compressed descriptor must fit their bits.
    pub fn encode(self, layout: EntryFormat) -> (u64, u64) {
        let copied = if self.copied { COPIED } else { 0 };
        match self.cluster {
            Cluster::Unallocated => (0, 0),
            Cluster::Zero { host } => (host.unwrap_or(0) | copied | ZERO, 0),
            Cluster::Standard { host } => (host | copied, 0),
            Cluster::Partial { host, parts } => (host | copied | PARTIAL | u64::from(parts), 0),
            Cluster::Subclusters { host, bitmap } => (host.unwrap_or(0) | copied, bitmap.0),
            Cluster::Compressed { host, len } => {
                let sectors = (host % 512 + len).div_ceil(512) - 1;
                (COMPRESSED | sectors << layout.compressed_shift() | host, 0)
            }
        }
    }
}

/// Returns whether a standard L2 entry of the cache is partial.
#[inline]
pub fn is_partial(word: u64) -> bool {
    word & (PARTIAL | COMPRESSED) == PARTIAL
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: EntryFormat =
        EntryFormat { cluster_bits: 16, version: 3, extended_l2: false, data_file: false };
    const EXTENDED: EntryFormat = EntryFormat { extended_l2: true, ..PLAIN };
    const DATA_FILE: EntryFormat = EntryFormat { data_file: true, ..PLAIN };

    fn l2(word: u64, layout: EntryFormat) -> Result<L2Entry, EntryError> {
        L2Entry::decode(word, 0, layout)
    }

    #[test]
    fn standard_entries() {
        let entry = |cluster, copied| Ok(L2Entry { cluster, copied });
        assert_eq!(l2(0, PLAIN), entry(Cluster::Unallocated, false));
        assert_eq!(l2(COPIED | 0x50000, PLAIN), entry(Cluster::Standard { host: 0x50000 }, true));
        assert_eq!(l2(ZERO, PLAIN), entry(Cluster::Zero { host: None }, false));
        assert_eq!(l2(0x50001, PLAIN), entry(Cluster::Zero { host: Some(0x50000) }, false));
        assert_eq!(l2(COPIED, DATA_FILE), entry(Cluster::Standard { host: 0 }, true));
        assert_eq!(l2(0, DATA_FILE), entry(Cluster::Unallocated, false));
    }

    #[test]
    fn invalid_entries_are_refused() {
        let old = EntryFormat { version: 2, ..PLAIN };
        assert!(l2(0x50001, old).is_err());
        assert!(l2(0x50200, PLAIN).is_err(), "unaligned");
        assert!(
            l2(0x50002, PLAIN).is_err() && l2(1 << 56 | 0x50000, PLAIN).is_err(),
            "reserved bits"
        );
        assert!(l2(0x50001, EXTENDED).is_err(), "bit 0 of an extended entry");
        assert!(l2(COPIED | COMPRESSED | 0x50000, PLAIN).is_err());
        assert!(l2(COMPRESSED | 0x50000, DATA_FILE).is_err());
        assert!(L2Entry::decode(COMPRESSED | 0x50000, 1, EXTENDED).is_err());
        assert!(L2Entry::decode(0x50000, 1 << 32 | 1, EXTENDED).is_err());
        assert!(L2Entry::decode(0, 1, EXTENDED).is_err());
        let small = EntryFormat { cluster_bits: 9, ..PLAIN };
        assert!(
            l2(COMPRESSED | 1 << 56, small).is_err(),
            "bits above 55 of a small cluster's descriptor"
        );
        for word in [0x50001, 1 << 56 | 0x50000, 0x50200] {
            assert!(L1Entry::decode(word, PLAIN).is_err(), "{word:#x}");
            assert!(refcount_block(word, PLAIN).is_err(), "{word:#x}");
        }
    }

    #[test]
    fn encoded_entries_decode_to_the_same_meaning() {
        let bitmap = SubclusterBitmap(0xffff_0000_0000_ffff);
        let clusters = [
            (PLAIN, Cluster::Unallocated),
            (PLAIN, Cluster::Zero { host: Some(0x70000) }),
            (PLAIN, Cluster::Standard { host: OFFSET_MASK & !0xffff }),
            (PLAIN, Cluster::Compressed { host: 0x12345, len: 512 * 3 - 0x145 }),
            (
                EntryFormat { cluster_bits: 21, ..PLAIN },
                Cluster::Compressed { host: 512, len: 2 << 20 },
            ),
            (
                EntryFormat { cluster_bits: 9, ..PLAIN },
                Cluster::Compressed { host: MAX_OFFSET - 1, len: 1 },
            ),
            (EXTENDED, Cluster::Subclusters { host: Some(0x70000), bitmap }),
            (EXTENDED, Cluster::Subclusters { host: None, bitmap: SubclusterBitmap::ALL_ZERO }),
        ];
        for (layout, cluster) in clusters {
            let entry = L2Entry { cluster, copied: false };
            let (word, second) = entry.encode(layout);
            assert_eq!(L2Entry::decode(word, second, layout), Ok(entry));
        }
        let entry = L1Entry { table: Some(0x30000), copied: true };
        assert_eq!(L1Entry::decode(entry.encode(), PLAIN), Ok(entry));
        assert_eq!(refcount_block(0x30000, PLAIN), Ok(Some(0x30000)));
        assert_eq!(refcount_block(0, PLAIN), Ok(None));
    }
}
