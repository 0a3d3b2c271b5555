//! Caches lookups in the backing layers. Without the cache every read of a long chain would search
//! each layer again.
//!
//! In: results of lookups. Out: the same results in one step. Invariants: backing layers never
//! change, so results stay valid. An entry describes a whole granule, whose bytes are all in one
//! `Place`.

use std::cell::RefCell;

use crate::extent::{Extent, LookupResult, Place};

/// Maximum number of granules that a reactor caches. Each entry takes 48 bytes.
const MOST: u64 = 1 << 16;

#[derive(Clone, Copy)]
struct CachedLookup {
    /// Number of the granule that this entry caches. None: the entry is empty.
    granule: Option<u64>,
    found: LookupResult,
}

/// Direct-mapped cache of lookups, one for each reactor.
pub struct LookupCache {
    granule_bits: u32,
    entries: RefCell<Vec<CachedLookup>>,
}

impl LookupCache {
    /// Creates a cache for a disk of `size` bytes. The disk's layers map granules of `granule`
    /// bytes (a power of two).
    pub fn new(size: u64, granule: u64) -> Self {
        let places = size.div_ceil(granule).clamp(1, MOST).next_power_of_two();
        let nothing = CachedLookup {
            granule: None,
            found: LookupResult { layer: 0, extent: Extent { len: 0, place: Place::Absent } },
        };
        LookupCache {
            granule_bits: granule.trailing_zeros(),
            entries: RefCell::new(vec![nothing; places as usize]),
        }
    }

    /// Returns start and length of the granule that contains `offset`.
    pub fn granule(&self, offset: u64) -> (u64, u64) {
        (offset >> self.granule_bits << self.granule_bits, 1 << self.granule_bits)
    }

    /// Looks up the bytes at `offset`. Merges consecutive cached granules that are contiguous in
    /// the file.
    #[inline]
    pub fn find(&self, offset: u64, len: u64) -> Option<LookupResult> {
        let entries = self.entries.borrow();
        let mut found = self.in_granule(&entries, offset, len)?;
        while found.extent.len < len {
            let done = found.extent.len;
            match self.in_granule(&entries, offset + done, len - done) {
                Some(next) if found.take_in(&next) => {}
                _ => break,
            }
        }
        Some(found)
    }

    /// Looks up the bytes at `offset`, inside their granule.
    #[inline]
    fn in_granule(&self, entries: &[CachedLookup], offset: u64, len: u64) -> Option<LookupResult> {
        let number = offset >> self.granule_bits;
        let CachedLookup { granule, found } = entries[number as usize & (entries.len() - 1)];
        if granule != Some(number) {
            return None;
        }
        let inside = offset & ((1 << self.granule_bits) - 1);
        let place = match found.extent.place {
            Place::Data(host) => Place::Data(host + inside),
            place => place,
        };
        let len = len.min((1 << self.granule_bits) - inside);
        Some(LookupResult { extent: Extent { len, place }, ..found })
    }

    /// Caches the result for the granule at `start`, if the result covers the granule.
    pub fn keep(&self, start: u64, found: LookupResult) {
        if found.extent.len >= 1 << self.granule_bits {
            let (number, mut entries) = (start >> self.granule_bits, self.entries.borrow_mut());
            let at = number as usize & (entries.len() - 1);
            entries[at] = CachedLookup { granule: Some(number), found };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_granules_are_merged() {
        const GRANULE: u64 = 2048;
        let lookup_cache = LookupCache::new(1 << 20, GRANULE);
        let keep = |granule: u64, layer: usize, place: Place| {
            lookup_cache.keep(
                granule * GRANULE,
                LookupResult { layer, extent: Extent { len: GRANULE, place } },
            );
        };
        (0..100).for_each(|n| keep(n, 1, Place::Data((1 << 20) + n * GRANULE)));
        keep(100, 2, Place::Data((1 << 20) + 100 * GRANULE));
        (101..104).for_each(|n| keep(n, 2, Place::Zero));
        keep(104, 2, Place::Compressed(7));
        keep(105, 2, Place::Compressed(7));
        let find = |offset, len| {
            lookup_cache.find(offset, len).map(|found| (found.layer, found.extent.len))
        };
        assert_eq!(find(512, 4096), Some((1, 4096)));
        assert_eq!(
            find(512, 1 << 20),
            Some((1, 100 * GRANULE - 512)),
            "granules of different layers are not merged"
        );
        assert_eq!(find(101 * GRANULE, 1 << 20), Some((2, 3 * GRANULE)));
        assert_eq!(find(104 * GRANULE, 2 * GRANULE), Some((2, GRANULE)));
        assert_eq!(find(106 * GRANULE, 512), None);
    }
}
