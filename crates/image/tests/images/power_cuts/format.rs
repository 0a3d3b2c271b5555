//! The constants of the format, written a second time, so that the tests do not share an error with
//! the crate.

use std::ops::Range;

pub const COPIED: u64 = 1 << 63;
pub const COMPRESSED: u64 = 1 << 62;
pub const ZERO: u64 = 1;
pub const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

pub fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

pub fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// Header fields on which the meaning of entries and refcounts depends.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub version: u32,
    pub cluster_bits: u32,
    pub refcount_order: u32,
    pub extended: bool,
    pub data_file: bool,
    pub raw_data_file: bool,
}

impl Layout {
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Size of an L2 entry, in bytes.
    pub fn l2_entry(&self) -> usize {
        if self.extended { 16 } else { 8 }
    }

    pub fn l2_entries(&self) -> u64 {
        self.cluster() / self.l2_entry() as u64
    }

    /// Number of bytes of the guest's disk that one L2 table maps.
    pub fn l2_reach(&self) -> u64 {
        self.l2_entries() * self.cluster()
    }

    /// Unit of allocation: a cluster or a subcluster.
    pub fn unit(&self) -> u64 {
        if self.extended { self.cluster() / 32 } else { self.cluster() }
    }

    /// Number of clusters that one refcount block covers.
    pub fn per_block(&self) -> u64 {
        (self.cluster() * 8) >> self.refcount_order
    }

    pub fn largest_count(&self) -> u64 {
        u64::MAX >> (64 - (1 << self.refcount_order))
    }

    pub fn count(&self, block: &[u8], n: u64) -> u64 {
        let bits = 1 << self.refcount_order;
        let first = n as usize * bits;
        if bits >= 8 {
            return block[first / 8..(first + bits) / 8]
                .iter()
                .fold(0, |count, &byte| count << 8 | u64::from(byte));
        }
        u64::from(block[first / 8]) >> (first % 8) & self.largest_count()
    }

    pub fn set_count(&self, block: &mut [u8], n: u64, count: u64) {
        assert!(
            count <= self.largest_count(),
            "a count of {count} in {} bits",
            1 << self.refcount_order
        );
        let bits = 1 << self.refcount_order;
        let first = n as usize * bits;
        if bits >= 8 {
            block[first / 8..(first + bits) / 8]
                .copy_from_slice(&count.to_be_bytes()[8 - bits / 8..]);
        } else {
            block[first / 8] &= !((self.largest_count() as u8) << (first % 8));
            block[first / 8] |= (count as u8) << (first % 8);
        }
    }

    /// Returns the bytes that a compressed entry names, up to its last sector.
    pub fn compressed(&self, word: u64) -> Range<u64> {
        let shift = 62 - (self.cluster_bits - 8);
        let start = word & ((1 << shift) - 1);
        let sectors = ((word & !(COPIED | COMPRESSED)) >> shift) + 1;
        start..(start & !511) + sectors * 512
    }

    /// Returns the host clusters, by number, that an L2 entry names in the image's file.
    pub fn host(&self, word: u64) -> Range<u64> {
        if word & COMPRESSED != 0 {
            let bytes = self.compressed(word);
            return bytes.start / self.cluster()..bytes.end.div_ceil(self.cluster());
        }
        match word & OFFSET {
            0 => 0..0,
            _ if self.data_file => 0..0,
            offset => offset / self.cluster()..offset / self.cluster() + 1,
        }
    }
}
