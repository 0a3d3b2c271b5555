//! A small guest: its memory and its ring, made of the fuzzer's bytes.

use std::cell::RefCell;
use std::rc::Rc;

use blockyard_export::vhost_user::parts::{PackedRing, Ring, RingError, SplitRing};
use blockyard_ring::{GuestMemory, Region};

/// The regions (guest address, bytes): two that touch, a hole, a third.
const REGIONS: [(u64, u64); 3] = [(0, 0x4000), (0x4000, 0x2000), (0x8000, 0x1000)];

/// Where the ring lies: descriptors, available (or driver's events), used (or device's events).
pub const PARTS: (u64, u64, u64) = (0, 0x600, 0x800);

/// The bytes, taken from the front.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }
}

/// What a ring is set up with: the first bytes of an input.
pub struct Shape {
    pub packed: bool,
    pub event_idx: bool,
    pub size: u16,
    pub base: u32,
}

impl Shape {
    pub fn of(bytes: &mut Bytes<'_>) -> Self {
        let flags = bytes.u8();
        let size = bytes.u8();
        let packed = flags & 1 != 0;
        let size = if packed { u16::from(size) % 65 } else { 1 << (size % 7) };
        // A base that is near the ring's own: others are tried, but rarely.
        let base = if flags & 4 != 0 { bytes.u32() } else { u32::from(packed) * 0x8000_8000 };
        Shape { packed, event_idx: flags & 2 != 0, size, base }
    }

    #[allow(dead_code)]
    pub fn ring(&self, memory: &Rc<GuestMemory>) -> Result<Ring, RingError> {
        let (memory, size) = (memory.clone(), self.size.into());
        if self.packed {
            PackedRing::new(memory, PARTS, size, self.base, self.event_idx).map(Ring::Packed)
        } else {
            SplitRing::new(memory, PARTS, size, self.base as u16, self.event_idx).map(Ring::Split)
        }
    }
}

/// The guest's memory, made once and filled anew: the bytes fill it from the start.
pub fn memory(content: &[u8]) -> GuestMemory {
    thread_local! {
        static MEMORY: RefCell<Option<GuestMemory>> = const { RefCell::new(None) };
    }
    let memory = MEMORY.with_borrow_mut(|m| {
        m.get_or_insert_with(|| {
            let region = |(at, len)| Region::memfd("fuzz", at, at + (1 << 40), len).unwrap().0;
            REGIONS.into_iter().fold(GuestMemory::default(), |m, r| m.with(region(r)).unwrap())
        })
        .clone()
    });
    let mut content = content;
    for (at, len) in REGIONS {
        let mut page = vec![0; len as usize];
        let here = content.len().min(page.len());
        let (now, later) = content.split_at(here);
        page[..here].copy_from_slice(now);
        memory.slice(at, len, 1).unwrap().write(0, &page);
        content = later;
    }
    memory
}

/// Changes a few bytes of it, as a guest does while its ring is in use.
#[allow(dead_code)]
pub fn change(memory: &GuestMemory, at: u16, byte: u8) {
    let _ = memory.write_byte(u64::from(at % 0x6000), byte);
}
