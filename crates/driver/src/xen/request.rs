//! Entries of a blkif ring as a front end writes them (`xen/include/public/io/blkif.h`), in the
//! layouts of 64-bit and of 32-bit guests. This module checks nothing, because tests write invalid
//! requests too.

use super::PAGE;

pub mod operation {
    pub const READ: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const BARRIER: u8 = 2;
    pub const FLUSH: u8 = 3;
    pub const DISCARD: u8 = 5;
    pub const INDIRECT: u8 = 6;
}

pub mod status {
    pub const OK: i16 = 0;
    pub const ERROR: i16 = -1;
    pub const UNSUPPORTED: i16 = -2;
}

/// Maximum number of segments in a ring entry, and in an indirect request.
pub const DIRECT_SEGMENTS: usize = 11;
pub const INDIRECT_SEGMENTS: usize = 256;
pub const SEGMENT_BYTES: usize = 8;
/// Number of bytes before the first entry of a ring.
pub const HEADER: usize = 64;
/// Size of the longer layout's entry in bytes.
pub const ENTRY_MOST: usize = 112;

/// Layout of a guest's ring entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Abi {
    #[default]
    X86_64,
    X86_32,
}

impl Abi {
    /// Returns the value of the node `protocol`.
    pub fn name(self) -> &'static str {
        match self {
            Abi::X86_64 => "x86_64-abi",
            Abi::X86_32 => "x86_32-abi",
        }
    }

    /// Returns the size of an entry in bytes.
    pub fn entry(self) -> usize {
        match self {
            Abi::X86_64 => ENTRY_MOST,
            Abi::X86_32 => 108,
        }
    }

    /// Returns where a ring entry has the request's id, its first sector, and the fields after
    /// that, as byte offsets.
    pub fn places(self) -> (usize, usize, usize) {
        match self {
            Abi::X86_64 => (8, 16, 24),
            Abi::X86_32 => (4, 12, 20),
        }
    }

    /// Returns the number of entries of a ring of `pages` pages, which is a power of two.
    pub fn entries(self, pages: usize) -> u32 {
        1 << (((pages * PAGE - HEADER) / self.entry()) as u32).ilog2()
    }
}

/// A ring entry.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// The first four bytes. Byte 0: the operation. Bytes 1 to 3 of a direct request: the number of
    /// segments, or a flag. Bytes 1 to 3 of an indirect request: the inner operation, and the
    /// number of segments (16 bits).
    pub head: [u8; 4],
    pub id: u64,
    pub sector: u64,
    /// The fields after the first sector: segments, a number of sectors, or the references of
    /// indirect pages.
    pub rest: &'a [u8],
}

impl Entry<'_> {
    /// Encodes the entry in the layout `abi`. In the shorter layout, the remaining bytes are zero.
    pub fn bytes(&self, abi: Abi) -> [u8; ENTRY_MOST] {
        let (id, sector, rest) = abi.places();
        let mut bytes = [0; ENTRY_MOST];
        bytes[..4].copy_from_slice(&self.head);
        bytes[id..id + 8].copy_from_slice(&self.id.to_le_bytes());
        bytes[sector..sector + 8].copy_from_slice(&self.sector.to_le_bytes());
        bytes[rest..rest + self.rest.len()].copy_from_slice(self.rest);
        bytes
    }
}

/// Encodes a segment: a page's grant reference, and its first and last sector.
pub fn segment(reference: u32, first: u8, last: u8) -> [u8; SEGMENT_BYTES] {
    let [a, b, c, d] = reference.to_le_bytes();
    [a, b, c, d, first, last, 0, 0]
}

/// Encodes the fields after the first sector of an indirect request whose segments are in one page.
pub fn indirect(page: u32) -> [u8; 8] {
    let [a, b, c, d] = page.to_le_bytes();
    [0, 0, 0, 0, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_layout_of_blkif_h() {
        let entry = Entry {
            head: [operation::WRITE, 1, 0, 0],
            id: 0x0102,
            sector: 0x0304,
            rest: &segment(0x0506, 2, 7),
        };
        let (long, short) = (entry.bytes(Abi::X86_64), entry.bytes(Abi::X86_32));
        for (bytes, id, sector, rest) in [(long, 8, 16, 24), (short, 4, 12, 20)] {
            assert_eq!(bytes[..2], [1, 1]);
            assert_eq!(
                (bytes[id..id + 2].to_vec(), bytes[sector..sector + 2].to_vec()),
                (vec![2, 1], vec![4, 3])
            );
            assert_eq!(bytes[rest..rest + 8], [6, 5, 0, 0, 2, 7, 0, 0]);
        }
        for (pages, entries) in [(1, 32), (2, 64), (16, 512)] {
            assert_eq!(
                (Abi::X86_64.entries(pages), Abi::X86_32.entries(pages)),
                (entries, entries)
            );
        }
    }
}
