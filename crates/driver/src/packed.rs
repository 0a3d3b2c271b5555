//! The packed virtqueue, driver side (virtio 1.2, section 2.8).
//!
//! The driver writes a chain's descriptors at each submission, because the device overwrites them.
//! The buffer id of a chain is its slot.
//!
//! What must hold: the driver stores the flags of a chain's first descriptor last, with Release. It
//! reads a used descriptor after it has loaded the descriptor's flags with Acquire.

use std::sync::atomic::{Ordering, fence};

use crate::error::{Result, ensure};
use blockyard_ring::SharedSlice;

use super::ring::{
    Buffer, CHAIN_MAX, DESCRIPTOR, INDIRECT, NEXT, Ring, RingAddresses, RingOptions, need_event,
};
use super::{Memory, feature};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Values of the flags of the event suppression structure. The structure's first field is the
/// offset.
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;
const WRAP: u16 = 1 << 15;

#[derive(Clone, Copy, Default)]
struct Chain {
    buffers: [Buffer; CHAIN_MAX],
    count: u8,
    indirect: bool,
}

/// A position in the ring, with its wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    at: u16,
    wrap: bool,
}

impl Cursor {
    const START: Cursor = Cursor { at: 0, wrap: true };

    #[inline]
    fn advance(&mut self, by: u16, size: u16) {
        self.at += by;
        if self.at >= size {
            self.at -= size;
            self.wrap = !self.wrap;
        }
    }

    fn bits(self) -> u16 {
        self.at | if self.wrap { WRAP } else { 0 }
    }
}

/// The driver's side of a packed virtqueue.
pub struct PackedRing {
    /// The parts of the ring that the back end sees. They are public, so that tests can write
    /// anything there.
    pub desc: SharedSlice,
    pub driver_event: SharedSlice,
    pub device_event: SharedSlice,
    addresses: RingAddresses,
    options: RingOptions,
    tables: Option<(u64, SharedSlice)>,
    chains: Vec<Chain>,
    avail: Cursor,
    used: Cursor,
    /// Number of descriptors written since the last `publish`.
    added: u16,
}

impl PackedRing {
    /// Writes the descriptor at `index`, its flags last.
    #[inline]
    pub fn write_descriptor(&self, index: u16, addr: u64, len: u32, id: u16, flags: u16) {
        let at = index as usize * DESCRIPTOR as usize;
        self.desc.copy_in(at, addr.to_le_bytes());
        self.desc.copy_in(at + 8, len.to_le_bytes());
        self.desc.copy_in(at + 12, id.to_le_bytes());
        self.desc.store_u16(at + 14, flags, Ordering::Release);
    }

    /// Returns the number of descriptors that a slot occupies in the ring.
    #[inline]
    fn length(&self, slot: u16) -> u16 {
        let chain = &self.chains[slot as usize];
        if chain.indirect { 1 } else { chain.count.into() }
    }

    /// Returns the flags of the descriptor that the device will use next.
    #[inline]
    fn used_flags(&self) -> u16 {
        self.desc.load_u16(self.used.at as usize * DESCRIPTOR as usize + 14, Ordering::Acquire)
    }
}

impl Ring for PackedRing {
    const FEATURES: u64 = feature::VERSION_1 | feature::RING_PACKED;

    fn new(memory: &mut Memory, options: RingOptions) -> Result<Self> {
        options.check()?;
        let size = options.size;
        ensure!(size <= 1 << 15, Usage, "a packed ring of {size} entries: the limit is 32768");
        let (desc_addr, desc) = memory.piece(DESCRIPTOR * u64::from(size), 4096)?;
        let (avail_addr, driver_event) = memory.piece(4, 4096)?;
        let (used_addr, device_event) = memory.piece(4, 4096)?;
        let room = DESCRIPTOR * CHAIN_MAX as u64 * u64::from(options.slots);
        let tables = if options.indirect { Some(memory.piece(room, 4096)?) } else { None };
        let mut ring = PackedRing {
            desc,
            driver_event,
            device_event,
            addresses: RingAddresses { desc: desc_addr, avail: avail_addr, used: used_addr },
            options,
            tables,
            chains: vec![Chain::default(); options.slots.into()],
            avail: Cursor::START,
            used: Cursor::START,
            added: 0,
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
        let mut laid = Chain { count: chain.len() as u8, ..Chain::default() };
        laid.buffers[..chain.len()].copy_from_slice(chain);
        if let Some((addr, tables)) = &self.tables {
            let table = slot as u64 * DESCRIPTOR * CHAIN_MAX as u64;
            for (at, buffer) in chain.iter().enumerate() {
                let at = table as usize + at * DESCRIPTOR as usize;
                tables.copy_in(at, buffer.addr.to_le_bytes());
                tables.copy_in(at + 8, buffer.len.to_le_bytes());
                // In an indirect table the order of the entries is the chain, and the ring's
                // descriptor has the id. In the table's flags, the device reads only WRITE.
                tables.copy_in(at + 12, (u32::from(buffer.flags()) << 16).to_le_bytes());
            }
            let len = (chain.len() as u64 * DESCRIPTOR) as u32;
            laid.buffers[0] = Buffer { addr: addr + table, len, device_writes: false };
            laid.indirect = true;
        }
        self.chains[slot as usize] = laid;
    }

    #[inline]
    fn submit(&mut self, slot: u16) {
        let chain = self.chains[slot as usize];
        let count = self.length(slot);
        let first = self.avail;
        let mut first_flags = 0;
        for (at, buffer) in chain.buffers[..count as usize].iter().enumerate() {
            let mut flags = if self.avail.wrap { AVAIL } else { USED };
            flags |= if chain.indirect { INDIRECT } else { buffer.flags() };
            flags |= if at + 1 < count as usize { NEXT } else { 0 };
            let place = self.avail.at as usize * DESCRIPTOR as usize;
            self.desc.copy_in(place, buffer.addr.to_le_bytes());
            self.desc.copy_in(place + 8, buffer.len.to_le_bytes());
            self.desc.copy_in(place + 12, slot.to_le_bytes());
            if at == 0 {
                first_flags = flags;
            } else {
                self.desc.store_u16(place + 14, flags, Ordering::Relaxed);
            }
            self.avail.advance(1, self.options.size);
        }
        self.desc.store_u16(
            first.at as usize * DESCRIPTOR as usize + 14,
            first_flags,
            Ordering::Release,
        );
        self.added += count;
    }

    #[inline]
    fn publish(&mut self) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        // The descriptors must be visible before the driver checks whether the device wants a kick.
        // Without the fence, both sides might wait for each other.
        fence(Ordering::SeqCst);
        let event = self.device_event.load_u32(0, Ordering::Relaxed);
        let (offset, flags) = (event as u16, (event >> 16) as u16 & 3);
        if flags != EVENT_DESC || !self.options.event_idx {
            return flags != EVENT_DISABLE;
        }
        let mut at = offset & !WRAP;
        if (offset & WRAP != 0) != self.avail.wrap {
            at = at.wrapping_sub(self.options.size);
        }
        need_event(at, self.avail.at, self.avail.at.wrapping_sub(added))
    }

    #[inline]
    fn reap(&mut self) -> Option<(u32, u32)> {
        if !self.ready() {
            return None;
        }
        let at = self.used.at as usize * DESCRIPTOR as usize;
        let len = u32::from_le_bytes(self.desc.copy_out(at + 8));
        let id = u16::from_le_bytes(self.desc.copy_out(at + 12));
        // The caller reports an id that is not a slot. The ring is unusable after such an id.
        let length = if usize::from(id) < self.chains.len() { self.length(id) } else { 1 };
        self.used.advance(length, self.options.size);
        Some((id.into(), len))
    }

    #[inline]
    fn ready(&self) -> bool {
        let flags = self.used_flags();
        (flags & USED != 0) == self.used.wrap && (flags & AVAIL != 0) == self.used.wrap
    }

    fn arm(&mut self) -> bool {
        let event = if self.options.event_idx {
            u32::from(self.used.bits()) | u32::from(EVENT_DESC) << 16
        } else {
            u32::from(EVENT_ENABLE) << 16
        };
        self.driver_event.store_u32(0, event, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.ready()
    }

    fn disarm(&mut self) {
        self.driver_event.store_u32(0, u32::from(EVENT_DISABLE) << 16, Ordering::Relaxed);
    }

    /// Returns the driver's position among the used descriptors, in both halves of the value. A
    /// packed ring has no index in memory, so the back end takes its own position from the
    /// in-flight buffer. Must be called after `reap` has returned `None`.
    fn base(&self) -> u32 {
        let bits = u32::from(self.used.bits());
        bits | bits << 16
    }

    fn fresh_base(&self) -> u32 {
        let bits = u32::from(Cursor::START.bits());
        bits | bits << 16
    }

    fn reset(&mut self) {
        (self.avail, self.used, self.added) = (Cursor::START, Cursor::START, 0);
        for index in 0..self.options.size {
            self.desc.copy_in(index as usize * DESCRIPTOR as usize, [0u8; DESCRIPTOR as usize]);
        }
        self.device_event.store_u32(0, 0, Ordering::Relaxed);
        self.disarm();
    }
}
