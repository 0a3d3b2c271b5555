//! Virtqueues from the device's side: split (virtio 1.2, section 2.7) and packed (2.8).
//!
//! In: guest memory, which the guest may change at any time, and which may hold any bytes. Out:
//! chains of descriptors, copied and checked; used elements, published in batches. What must hold:
//! - The queue reads each descriptor once, and checks and uses only the copy.
//! - Every loop over guest data is bounded.
//! - An impossible index or length is a [`RingError`], which stops only the affected queue.

mod packed;
mod split;

pub use packed::PackedRing;
pub use split::SplitRing;

use std::rc::Rc;

use blockyard_ring::{GuestMemory, MemoryError};

/// Maximum number of descriptors of a chain: as many as one kernel operation can carry (IOV_MAX),
/// plus header and status.
pub const MAX_CHAIN: usize = 1026;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;
/// Length of a descriptor in bytes.
pub const DESC_LEN: usize = 16;

/// A copy of one descriptor of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Desc {
    pub addr: u64,
    pub len: u32,
    pub writable: bool,
}

/// Identifies a chain on its ring, and counts the ring entries that the chain takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Split: index of the first descriptor. Packed: the buffer id.
    pub id: u16,
    pub count: u16,
}

/// A part of a ring that the device writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The used ring (packed: the device's event suppression structure).
    Used,
    /// The descriptors, which the device of a packed ring marks as used.
    Descriptors,
}

/// Bytes of a ring that the device writes: offset and length in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    pub part: Part,
    pub offset: usize,
    pub len: usize,
}

/// Errors in a ring, caused by the guest or by the owner of the guest's memory.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    #[error("ring size {0} (must be 1 to 32768, and for a split ring a power of two)")]
    Size(u32),
    #[error("ring size {ring}, but the in-flight region has room for {region} entries")]
    Inflight { ring: u32, region: u16 },
    #[error("available index {index} is more than the ring's size ahead of index {next}")]
    AvailIndex { index: u16, next: u16 },
    #[error("descriptor index {index} is beyond the table of {size}")]
    DescIndex { index: u16, size: u16 },
    #[error("buffer id {0} is beyond the ring, or is in flight already")]
    Id(u16),
    #[error("descriptor chain at {head} has more than {max} descriptors, or loops")]
    ChainTooLong { head: u16, max: usize },
    #[error("indirect descriptor at {head}: {what}")]
    Indirect { head: u16, what: &'static str },
    #[error("the descriptors at {head} are made available again before they are used")]
    Overrun { head: u16 },
    #[error("the in-flight region cannot be read: {0}")]
    Region(&'static str),
    #[error("descriptor chain at {head}: a readable descriptor follows a writable one")]
    Order { head: u16 },
    #[error("descriptor chain at {head}: {what}")]
    Request { head: u16, what: &'static str },
    #[error("a request's data has more than {0} segments")]
    Segments(usize),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A split or packed virtqueue.
pub enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

impl Ring {
    /// Replaces the guest memory, which indirect tables use. The ring itself stays at its address.
    pub fn set_memory(&mut self, memory: Rc<GuestMemory>) {
        match self {
            Ring::Split(ring) => ring.set_memory(memory),
            Ring::Packed(ring) => ring.set_memory(memory),
        }
    }

    /// Takes the next available chain into `descs`, which is cleared first.
    #[inline]
    pub fn pop(&mut self, descs: &mut Vec<Desc>) -> Result<Option<Head>, RingError> {
        descs.clear();
        match self {
            Ring::Split(ring) => ring.pop(descs),
            Ring::Packed(ring) => ring.pop(descs),
        }
    }

    /// Returns whether a chain is available.
    #[inline]
    pub fn has_available(&self) -> bool {
        match self {
            Ring::Split(ring) => ring.has_available(),
            Ring::Packed(ring) => ring.has_available(),
        }
    }

    /// Returns where the next `push_used` writes.
    #[inline]
    pub fn next_used(&self) -> Written {
        match self {
            Ring::Split(ring) => ring.next_used(),
            Ring::Packed(ring) => ring.next_used(),
        }
    }

    /// Returns where `publish` writes. `None`: nothing is pushed.
    #[inline]
    pub fn publication(&self) -> Option<Written> {
        match self {
            Ring::Split(ring) => Some(ring.publication()),
            Ring::Packed(ring) => ring.publication(),
        }
    }

    /// Returns where `enable_kicks` and `disable_kicks` write.
    #[inline]
    pub fn kick_setting(&self) -> Written {
        match self {
            Ring::Split(ring) => ring.kick_setting(),
            Ring::Packed(ring) => ring.kick_setting(),
        }
    }

    /// Pushes a used element. `written`: bytes that the device wrote into the chain's buffers. The
    /// guest sees the element at the next `publish`.
    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        match self {
            Ring::Split(ring) => ring.push_used(head, written),
            Ring::Packed(ring) => ring.push_used(head, written),
        }
    }

    /// Publishes all used elements pushed so far.
    #[inline]
    pub fn publish(&mut self) {
        match self {
            Ring::Split(ring) => ring.publish(),
            Ring::Packed(ring) => ring.publish(),
        }
    }

    /// Returns whether the guest wants a notification of the elements published since the last
    /// call.
    #[inline]
    pub fn wants_signal(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.wants_signal(),
            Ring::Packed(ring) => ring.wants_signal(),
        }
    }

    /// Asks the guest for a kick when the next chain is available. Returns false if a chain is
    /// available already, so that the queue must not sleep.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.enable_kicks(),
            Ring::Packed(ring) => ring.enable_kicks(),
        }
    }

    /// Asks the guest to send no kicks. Returns whether this wrote to the ring.
    #[inline]
    pub fn disable_kicks(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.disable_kicks(),
            Ring::Packed(ring) => ring.disable_kicks(),
        }
    }

    /// Returns the position from which another back end can continue (VHOST_USER_GET_VRING_BASE).
    pub fn base(&self) -> u32 {
        match self {
            Ring::Split(ring) => ring.base(),
            Ring::Packed(ring) => ring.base(),
        }
    }

    /// Returns the number of entries of the ring.
    pub fn size(&self) -> u16 {
        match self {
            Ring::Split(ring) => ring.size(),
            Ring::Packed(ring) => ring.size(),
        }
    }
}

/// Returns the number of bytes of the used ring (packed: of the device's event suppression
/// structure).
pub fn used_bytes(size: u32, is_packed: bool, event_idx: bool) -> u64 {
    if is_packed { 4 } else { 4 + u64::from(size) * 8 + if event_idx { 2 } else { 0 } }
}

/// Returns whether an index that went from `old` to `new` has passed `event` (virtio 1.2, 2.7.7.2).
#[inline]
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Splits a raw descriptor into its fields. Split (addr, len, flags, next) and packed descriptors
/// (addr, len, id, flags) differ in the last two.
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

/// Returns the number of descriptors in an indirect table of `len` bytes.
fn indirect_count(head: u16, len: u32) -> Result<usize, RingError> {
    let count = len as usize / DESC_LEN;
    if len == 0 || !(len as usize).is_multiple_of(DESC_LEN) {
        return Err(RingError::Indirect { head, what: "its length is not a multiple of 16 bytes" });
    }
    if count > MAX_CHAIN {
        return Err(RingError::ChainTooLong { head, max: MAX_CHAIN });
    }
    Ok(count)
}

/// Appends a descriptor to a chain. Device-readable ones must come first (2.7.4.2).
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

#[cfg(test)]
mod tests;
