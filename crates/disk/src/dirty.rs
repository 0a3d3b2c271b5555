//! A map of the parts of a disk that were changed while a commit copies them.
//!
//! In: ranges that guests have written, zeroed or discarded, from all reactors. Out: each changed
//! part, once.
//!
//! What must hold: a change is recorded after it was made (or failed half-way) and before it is
//! answered. So if a caller takes parts and copies them, and later finds the map empty while no
//! request is in flight, then it has copied the last state of the disk.

use std::sync::atomic::{AtomicU64, Ordering};

/// Minimum size of a part, in bytes.
const SMALLEST: u64 = 64 << 10;
/// Maximum number of parts.
const MOST: u64 = 1 << 22;

/// A bitmap of the changed parts of a disk; see the module documentation.
#[derive(Debug)]
pub struct DirtyMap {
    /// log2 of a part's size in bytes.
    bits: u32,
    size: u64,
    words: Vec<AtomicU64>,
}

/// A change in progress. Dropping this records it.
pub struct Changing<'a>(&'a DirtyMap, u64, u64);

/// Returns log2 of the size in bytes of the parts of a disk.
pub(crate) fn part_bits(size: u64) -> u32 {
    size.div_ceil(MOST).next_power_of_two().max(SMALLEST).trailing_zeros()
}

/// Returns a word for every 64 parts, without any bit set.
pub(crate) fn no_bits(parts: u64) -> Vec<AtomicU64> {
    (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

impl DirtyMap {
    pub fn new(size: u64) -> Self {
        let bits = part_bits(size);
        DirtyMap { bits, size, words: no_bits(size.div_ceil(1 << bits)) }
    }

    /// Returns a guard that records the range as changed when it is dropped.
    pub fn changing(&self, offset: u64, len: u64) -> Changing<'_> {
        Changing(self, offset, len)
    }

    fn note(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size);
        if len == 0 || offset >= end {
            return;
        }
        for part in offset >> self.bits..=(end - 1) >> self.bits {
            let (word, bit) = (&self.words[part as usize / 64], 1 << (part % 64));
            // Set the bit even if it is set already: another thread may be about to take the part,
            // and may have read it before this change.
            word.fetch_or(bit, Ordering::AcqRel);
        }
    }

    /// Returns the size of all recorded parts, in bytes.
    pub fn bytes(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.load(Ordering::Acquire).count_ones())).sum::<u64>()
            << self.bits
    }

    /// Removes the first recorded part at or after `offset`. Returns its offset and length in
    /// bytes.
    pub fn take(&self, offset: u64) -> Option<(u64, u64)> {
        let first = offset.div_ceil(1 << self.bits);
        for index in first as usize / 64..self.words.len() {
            let start = first.saturating_sub(index as u64 * 64).min(63);
            let found = self.words[index].load(Ordering::Acquire) & (u64::MAX << start);
            if found != 0 {
                let bit = found.trailing_zeros();
                self.words[index].fetch_and(!(1 << bit), Ordering::AcqRel);
                let at = (index as u64 * 64 + u64::from(bit)) << self.bits;
                return Some((at, (1 << self.bits).min(self.size - at)));
            }
        }
        None
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.note(self.1, self.2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_changed_part_is_taken_once() {
        let map = DirtyMap::new((10 << 20) + 512);
        drop(map.changing(65535, 2));
        drop(map.changing(10 << 20, 512));
        drop(map.changing(8 << 20, 0));
        drop(map.changing(u64::MAX - 1, 5));
        assert_eq!(map.bytes(), 3 << 16);
        assert_eq!(map.take(0), Some((0, 65536)));
        assert_eq!(map.take(65536), Some((65536, 65536)));
        assert_eq!(map.take(131072), Some((10 << 20, 512)));
        assert_eq!((map.take(0), map.bytes()), (None, 0));
    }

    #[test]
    fn a_change_is_recorded_when_it_ends() {
        let map = DirtyMap::new(1 << 40);
        let change = map.changing(5, 1);
        assert_eq!(map.bytes(), 0);
        drop(change);
        assert_eq!(map.take(0), Some((0, 256 << 10)), "a large disk has larger parts");
        drop(map.changing((1 << 40) - 1, 1));
        assert_eq!(map.take((1 << 40) - (256 << 10)), Some(((1 << 40) - (256 << 10), 256 << 10)));
    }
}
