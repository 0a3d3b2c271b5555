//! The split virtqueue, driver side (virtio 1.2, section 2.7).
//!
//! The descriptor table contains the head descriptors first (one per slot, so a chain's id is its
//! slot), then the second descriptors of the slots, then the third ones.
//!
//! What must hold: the driver writes descriptors, headers and entries of the available ring before
//! it stores the index that publishes them, with Release. It reads a used entry after it has loaded
//! the used index with Acquire.

use std::sync::atomic::{Ordering, fence};

use crate::error::{Result, ensure};
use blockyard_ring::SharedSlice;

use super::ring::{
    Buffer, CHAIN_MAX, DESCRIPTOR, INDIRECT, NEXT, Ring, RingAddresses, RingOptions, need_event,
};
use super::{Memory, feature};

const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;
/// Offsets of the index and of the first entry in the available ring and in the used ring.
const INDEX: usize = 2;
const ENTRIES: usize = 4;

/// The driver's side of a split virtqueue.
pub struct SplitRing {
    /// The parts of the ring that the back end sees. They are public, so that tests can write
    /// anything there.
    pub desc: SharedSlice,
    pub avail: SharedSlice,
    pub used: SharedSlice,
    addresses: RingAddresses,
    options: RingOptions,
    mask: u16,
    tables: Option<(u64, SharedSlice)>,
    next_avail: u16,
    published: u16,
    last_used: u16,
    seen_used: u16,
}

impl SplitRing {
    /// Writes a descriptor with any content.
    pub fn write_descriptor(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.desc.copy_in(index as usize * DESCRIPTOR as usize, descriptor(addr, len, flags, next));
    }

    /// Adds a chain's head to the available ring. The next `publish` makes it visible.
    #[inline]
    pub fn push_available(&mut self, head: u16) {
        let entry = ENTRIES + 2 * (self.next_avail & self.mask) as usize;
        self.avail.store_u16(entry, head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Offset of the index at which the driver wants a call (EVENT_IDX).
    fn used_event(&self) -> usize {
        ENTRIES + 2 * self.options.size as usize
    }

    /// Offset of the index at which the device wants a kick (EVENT_IDX).
    fn avail_event(&self) -> usize {
        ENTRIES + 8 * self.options.size as usize
    }

    /// Returns the index of a slot's descriptor number `position`.
    fn index(&self, slot: u16, position: usize) -> u16 {
        slot + position as u16 * self.options.slots
    }
}

fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

impl Ring for SplitRing {
    const FEATURES: u64 = feature::VERSION_1;

    fn new(memory: &mut Memory, options: RingOptions) -> Result<Self> {
        options.check()?;
        let size = options.size;
        ensure!(
            size.is_power_of_two() && size <= 1 << 15,
            Usage,
            "a split ring of {size} entries: it must be a power of two up to 32768"
        );
        // Parts that are written by different sides are on different pages.
        let (desc_addr, desc) = memory.piece(DESCRIPTOR * u64::from(size), 4096)?;
        let (avail_addr, avail) = memory.piece(6 + 2 * u64::from(size), 4096)?;
        let (used_addr, used) = memory.piece(6 + 8 * u64::from(size), 4096)?;
        let room = DESCRIPTOR * CHAIN_MAX as u64 * u64::from(options.slots);
        let tables = if options.indirect { Some(memory.piece(room, 4096)?) } else { None };
        let mut ring = SplitRing {
            desc,
            avail,
            used,
            addresses: RingAddresses { desc: desc_addr, avail: avail_addr, used: used_addr },
            mask: size - 1,
            options,
            tables,
            next_avail: 0,
            published: 0,
            last_used: 0,
            seen_used: 0,
        };
        ring.disarm();
        Ok(ring)
    }

    fn addresses(&self) -> RingAddresses {
        self.addresses
    }

    fn size(&self) -> u16 {
        self.options.size
    }

    fn lay(&mut self, slot: u16, chain: &[Buffer]) {
        let last = chain.len() - 1;
        let more = |at: usize| if at < last { NEXT } else { 0 };
        let Some((addr, tables)) = &self.tables else {
            for (at, buffer) in chain.iter().enumerate() {
                let next = if at < last { self.index(slot, at + 1) } else { 0 };
                let index = self.index(slot, at);
                self.write_descriptor(
                    index,
                    buffer.addr,
                    buffer.len,
                    buffer.flags() | more(at),
                    next,
                );
            }
            return;
        };
        let table = slot as u64 * DESCRIPTOR * CHAIN_MAX as u64;
        for (at, buffer) in chain.iter().enumerate() {
            let bytes =
                descriptor(buffer.addr, buffer.len, buffer.flags() | more(at), at as u16 + 1);
            tables.copy_in(table as usize + at * DESCRIPTOR as usize, bytes);
        }
        self.write_descriptor(
            slot,
            addr + table,
            (chain.len() as u64 * DESCRIPTOR) as u32,
            INDIRECT,
            0,
        );
    }

    #[inline]
    fn submit(&mut self, slot: u16) {
        self.push_available(slot);
    }

    #[inline]
    fn publish(&mut self) -> bool {
        let (new, old) = (self.next_avail, self.published);
        if new == old {
            return false;
        }
        self.published = new;
        self.avail.store_u16(INDEX, new, Ordering::Release);
        // The index must be visible before the driver checks whether the device wants a kick.
        // Without the fence, both sides might wait for each other.
        fence(Ordering::SeqCst);
        if self.options.event_idx {
            need_event(self.used.load_u16(self.avail_event(), Ordering::Relaxed), new, old)
        } else {
            self.used.load_u16(0, Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    #[inline]
    fn reap(&mut self) -> Option<(u32, u32)> {
        if self.last_used == self.seen_used {
            self.seen_used = self.used.load_u16(INDEX, Ordering::Acquire);
            if self.last_used == self.seen_used {
                return None;
            }
        }
        let at = ENTRIES + 8 * (self.last_used & self.mask) as usize;
        let entry = u64::from_le_bytes(self.used.copy_out(at));
        self.last_used = self.last_used.wrapping_add(1);
        Some((entry as u32, (entry >> 32) as u32))
    }

    #[inline]
    fn ready(&self) -> bool {
        self.used.load_u16(INDEX, Ordering::Relaxed) != self.last_used
    }

    fn arm(&mut self) -> bool {
        if self.options.event_idx {
            self.avail.store_u16(self.used_event(), self.last_used, Ordering::Relaxed);
        } else {
            self.avail.store_u16(0, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.ready()
    }

    fn disarm(&mut self) {
        if self.options.event_idx {
            // If the event index was just passed, the used index reaches it again only after 65536
            // chains.
            self.avail.store_u16(
                self.used_event(),
                self.last_used.wrapping_sub(1),
                Ordering::Relaxed,
            );
        } else {
            self.avail.store_u16(0, NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    /// Returns the used index in the ring. QEMU restores the base in the same way if it cannot
    /// query a crashed back end.
    fn base(&self) -> u32 {
        self.used.load_u16(INDEX, Ordering::Acquire).into()
    }

    fn fresh_base(&self) -> u32 {
        0
    }

    fn reset(&mut self) {
        (self.next_avail, self.published, self.last_used, self.seen_used) = (0, 0, 0, 0);
        self.avail.store_u16(INDEX, 0, Ordering::Relaxed);
        self.used.store_u16(0, 0, Ordering::Relaxed);
        self.used.store_u16(INDEX, 0, Ordering::Relaxed);
        if self.options.event_idx {
            self.used.store_u16(self.avail_event(), 0, Ordering::Relaxed);
        }
        self.disarm();
    }
}
