//! Virtqueues from the device's side: split (virtio 1.2, section 2.7) and packed (2.8).
//!
//! In: what the guest wrote, at any time, true or false. Out: chains of descriptors, copied once
//! and checked; used elements, published a batch at a time. What must hold: a descriptor is read
//! once and judged by the copy; every walk is bounded; an index or length that cannot be is a
//! [`RingError`], which stops this queue and no other.

mod packed;
mod split;

pub use packed::PackedRing;
pub use split::SplitRing;

use std::rc::Rc;

use blockyard_ring::{GuestMemory, MemoryError};

/// Longest chain taken, in descriptors: what one operation of the kernel can carry (IOV_MAX),
/// header and status beside.
pub const MAX_CHAIN: usize = 1026;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;
const DESC_LEN: usize = 16;

/// One descriptor of a chain, as copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Desc {
    pub addr: u64,
    pub len: u32,
    pub writable: bool,
}

/// A chain's name on its ring, and how many ring entries it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Split: index of the first descriptor. Packed: the buffer id.
    pub id: u16,
    pub count: u16,
}

/// What a guest (or its memory's owner) did that no driver may.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    #[error(
        "ring size {0} (a split ring's is a power of two, a packed one's any number, at most 32768)"
    )]
    Size(u32),
    #[error("ring size {ring}, and the in-flight region has room for {region}")]
    Inflight { ring: u32, region: u16 },
    #[error("available index {index} is more than the ring's size ahead of {next}")]
    AvailIndex { index: u16, next: u16 },
    #[error("descriptor index {index} is beyond the table of {size}")]
    DescIndex { index: u16, size: u16 },
    #[error("buffer id {0} is beyond the ring, or is in flight already")]
    Id(u16),
    #[error("descriptor chain at {head} has more than {max} descriptors, or loops")]
    ChainTooLong { head: u16, max: usize },
    #[error("indirect descriptor at {head}: {what}")]
    Indirect { head: u16, what: &'static str },
    #[error("the descriptors at {head} are available anew, and not used yet")]
    Overrun { head: u16 },
    #[error("the in-flight region cannot be read: {0}")]
    Region(&'static str),
    #[error("descriptor chain at {head}: a readable descriptor follows a writable one")]
    Order { head: u16 },
    #[error("descriptor chain at {head}: {what}")]
    Request { head: u16, what: &'static str },
    #[error("a request's data is in more than {0} pieces of memory")]
    Pieces(usize),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A virtqueue of either kind.
pub enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

impl Ring {
    /// The guest's memory has changed: indirect tables are looked for in this one. The ring itself
    /// stays where it is.
    pub fn set_memory(&mut self, memory: Rc<GuestMemory>) {
        match self {
            Ring::Split(ring) => ring.set_memory(memory),
            Ring::Packed(ring) => ring.set_memory(memory),
        }
    }

    /// Takes the next available chain into `descs` (emptied first).
    #[inline]
    pub fn pop(&mut self, descs: &mut Vec<Desc>) -> Result<Option<Head>, RingError> {
        descs.clear();
        match self {
            Ring::Split(ring) => ring.pop(descs),
            Ring::Packed(ring) => ring.pop(descs),
        }
    }

    /// Whether a chain waits to be taken.
    #[inline]
    pub fn has_available(&self) -> bool {
        match self {
            Ring::Split(ring) => ring.has_available(),
            Ring::Packed(ring) => ring.has_available(),
        }
    }

    /// Gives a chain back; `written`: bytes the device wrote into it. Seen by the guest at the next
    /// `publish`.
    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        match self {
            Ring::Split(ring) => ring.push_used(head, written),
            Ring::Packed(ring) => ring.push_used(head, written),
        }
    }

    /// Shows the guest everything pushed so far.
    #[inline]
    pub fn publish(&mut self) {
        match self {
            Ring::Split(ring) => ring.publish(),
            Ring::Packed(ring) => ring.publish(),
        }
    }

    /// Whether the guest asked to be told of what was published since the last call that said yes.
    #[inline]
    pub fn wants_signal(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.wants_signal(),
            Ring::Packed(ring) => ring.wants_signal(),
        }
    }

    /// Asks to be kicked at the next chain; false when one is there already (then do not sleep).
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.enable_kicks(),
            Ring::Packed(ring) => ring.enable_kicks(),
        }
    }

    /// Asks not to be kicked.
    #[inline]
    pub fn disable_kicks(&mut self) {
        match self {
            Ring::Split(ring) => ring.disable_kicks(),
            Ring::Packed(ring) => ring.disable_kicks(),
        }
    }

    /// Where to go on after a hand-over: VHOST_USER_GET_VRING_BASE's number.
    pub fn base(&self) -> u32 {
        match self {
            Ring::Split(ring) => ring.base(),
            Ring::Packed(ring) => ring.base(),
        }
    }

    /// Entries of the ring.
    pub fn size(&self) -> u16 {
        match self {
            Ring::Split(ring) => ring.size(),
            Ring::Packed(ring) => ring.size(),
        }
    }
}

/// virtio 1.2, 2.7.7.2: does an index that went from `old` to `new` pass `event`?
#[inline]
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A raw descriptor's fields: split (addr, len, flags, next) and packed (addr, len, id, flags)
/// differ in the last two.
#[inline]
fn fields(bytes: [u8; DESC_LEN]) -> (u64, u32, u16, u16) {
    let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, x0, x1, y0, y1] = bytes;
    (
        u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
        u32::from_le_bytes([l0, l1, l2, l3]),
        u16::from_le_bytes([x0, x1]),
        u16::from_le_bytes([y0, y1]),
    )
}

/// How many descriptors an indirect table of `len` bytes holds.
fn indirect_count(head: u16, len: u32) -> Result<usize, RingError> {
    let count = len as usize / DESC_LEN;
    if len == 0 || !(len as usize).is_multiple_of(DESC_LEN) {
        return Err(RingError::Indirect { head, what: "its length is no multiple of 16 bytes" });
    }
    if count > MAX_CHAIN {
        return Err(RingError::ChainTooLong { head, max: MAX_CHAIN });
    }
    Ok(count)
}

/// Appends a descriptor to a chain: the device-readable ones come first (2.7.4.2).
#[inline]
fn push(
    head: u16,
    addr: u64,
    len: u32,
    flags: u16,
    descs: &mut Vec<Desc>,
) -> Result<(), RingError> {
    let writable = flags & DESC_F_WRITE != 0;
    if !writable && descs.last().is_some_and(|d| d.writable) {
        return Err(RingError::Order { head });
    }
    descs.push(Desc { addr, len, writable });
    Ok(())
}
