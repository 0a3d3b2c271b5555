//! Where the layers below hold what, found once: in a long chain each layer would be asked anew by every read.
//!
//! In: places that a lookup found. Out: the same, by one look. What must hold: layers below never change, so that what was
//! found stays true; a place is kept for a whole granule only, which lies alike in one layer.

use std::cell::RefCell;

use crate::extent::{Extent, Place};
use crate::layer::Found;

/// Granules remembered by a reactor, at most: 48 bytes each.
const MOST: u64 = 1 << 16;

#[derive(Clone, Copy)]
struct Known {
    /// None: nothing is known here.
    granule: Option<u64>,
    found: Found,
}

pub struct Resolved {
    granule_bits: u32,
    known: RefCell<Vec<Known>>,
}

impl Resolved {
    /// For a disk of `size` bytes whose layers map `granule` bytes (a power of two) alike.
    pub fn new(size: u64, granule: u64) -> Self {
        let places = size.div_ceil(granule).clamp(1, MOST).next_power_of_two();
        let nothing =
            Known { granule: None, found: Found { layer: 0, extent: Extent { len: 0, place: Place::Absent } } };
        Resolved { granule_bits: granule.trailing_zeros(), known: RefCell::new(vec![nothing; places as usize]) }
    }

    /// The granule that holds `offset`, as start and length.
    pub fn granule(&self, offset: u64) -> (u64, u64) {
        (offset >> self.granule_bits << self.granule_bits, 1 << self.granule_bits)
    }

    /// Where the bytes from `offset` on are, inside their granule.
    #[inline]
    pub fn find(&self, offset: u64, len: u64) -> Option<Found> {
        let (number, known) = (offset >> self.granule_bits, self.known.borrow());
        let Known { granule, found } = known[number as usize & (known.len() - 1)];
        if granule != Some(number) {
            return None;
        }
        let inside = offset & ((1 << self.granule_bits) - 1);
        let place = match found.extent.place {
            Place::Data(host) => Place::Data(host + inside),
            place => place,
        };
        let len = len.min((1 << self.granule_bits) - inside);
        Some(Found { extent: Extent { len, place }, ..found })
    }

    /// Keeps what was found for the granule that begins at `start`, if it is all of it.
    pub fn keep(&self, start: u64, found: Found) {
        if found.extent.len >= 1 << self.granule_bits {
            let (number, mut known) = (start >> self.granule_bits, self.known.borrow_mut());
            let at = number as usize & (known.len() - 1);
            known[at] = Known { granule: Some(number), found };
        }
    }
}
