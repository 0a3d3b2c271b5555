//! The packed virtqueue (virtio 1.2, section 2.8).

use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use blockyard_ring::{GuestMemory, SharedSlice};

use super::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, Desc, Head, MAX_CHAIN, Part, RingError,
    Written,
};
use super::{fields, indirect_count, passes, push};

const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;

/// A position on the ring: an index, and the wrap counter under which it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub index: u16,
    pub wrap: bool,
}

impl Position {
    fn from_bits(bits: u16) -> Self {
        Position { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    fn advance(&mut self, by: u16, size: u16) {
        self.index += by;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }
}

/// A packed virtqueue.
pub struct PackedRing {
    memory: Rc<GuestMemory>,
    desc: SharedSlice,
    driver_event: SharedSlice,
    device_event: SharedSlice,
    size: u16,
    event_idx: bool,
    avail: Position,
    used: Position,
    /// Number of ring entries of chains that are taken and have no used element yet.
    taken: u16,
    /// The first used descriptor that is not published: its index and its flags. The flags are
    /// written last.
    held: Option<(u16, u16)>,
    /// Number of ring entries pushed since the last call of `wants_signal`.
    unsignalled: u16,
    /// The last popped chain in the ring's format, for the in-flight region.
    raw: Vec<[u8; DESC_LEN]>,
}

impl PackedRing {
    /// `desc`, `driver` and `device` are guest addresses of the ring and of the two event
    /// structures. `base` is the number from VHOST_USER_SET_VRING_BASE: the available position in
    /// its lower half, the used position in its upper half.
    pub fn new(
        memory: Rc<GuestMemory>,
        (desc, driver, device): (u64, u64, u64),
        size: u32,
        base: u32,
        event_idx: bool,
    ) -> Result<Self, RingError> {
        if size == 0 || size > 32768 {
            return Err(RingError::Size(size));
        }
        let table = memory.slice(desc, u64::from(size) * DESC_LEN as u64, 16)?;
        let has_used = |index: u32| {
            table.load_u16(index as usize * DESC_LEN + 14, Ordering::Acquire) & F_USED != 0
        };
        // For a new ring, User Mode Linux sends 0, although the wrap counters begin at 1 (2.8.1). A
        // ring that is not new can also have position 0, under wrap counter 0. Then some descriptor
        // has the used bit. (That need not be the first descriptor, which may be the middle of a
        // chain.)
        let base = if base == 0 && !(0..size).any(has_used) { 0x8000_8000 } else { base };
        let (avail, used) =
            (Position::from_bits(base as u16), Position::from_bits((base >> 16) as u16));
        for place in [avail, used] {
            if u32::from(place.index) >= size {
                return Err(RingError::DescIndex { index: place.index, size: size as u16 });
            }
        }
        Ok(PackedRing {
            desc: table,
            driver_event: memory.slice(driver, 4, 4)?,
            device_event: memory.slice(device, 4, 4)?,
            memory,
            size: size as u16,
            event_idx,
            avail,
            used,
            taken: 0,
            held: None,
            // Makes the first `wants_signal` signal: see `SplitRing`.
            unsignalled: 1,
            raw: Vec::new(),
        })
    }

    pub fn set_memory(&mut self, memory: Rc<GuestMemory>) {
        self.memory = memory;
    }

    #[inline]
    pub fn pop(&mut self, descs: &mut Vec<Desc>) -> Result<Option<Head>, RingError> {
        if !self.is_available(self.avail) {
            return Ok(None);
        }
        let head = self.avail.index;
        let mut place = self.avail;
        let limit = usize::from(self.size).min(MAX_CHAIN);
        let mut count = 0;
        self.raw.clear();
        let id = loop {
            if usize::from(count) == limit {
                return Err(RingError::ChainTooLong { head, max: limit });
            }
            let copy = self.desc.copy_out(usize::from(place.index) * DESC_LEN);
            self.raw.push(copy);
            let (addr, len, id, flags) = fields(copy);
            place.advance(1, self.size);
            count += 1;
            if flags & DESC_F_INDIRECT != 0 {
                if flags & DESC_F_NEXT != 0 || count > 1 {
                    return Err(RingError::Indirect {
                        head,
                        what: "it is one of several descriptors",
                    });
                }
                self.indirect(head, addr, len, descs)?;
                break id;
            }
            push(head, addr, len, flags, descs)?;
            if flags & DESC_F_NEXT == 0 {
                break id;
            }
        };
        if id >= self.size {
            return Err(RingError::Id(id));
        }
        if count > self.size - self.taken {
            return Err(RingError::Overrun { head });
        }
        self.taken += count;
        self.avail = place;
        Ok(Some(Head { id, count }))
    }

    /// Returns the last popped chain in the ring's format.
    pub fn raw(&self) -> &[[u8; DESC_LEN]] {
        &self.raw
    }

    /// Reads a chain that the previous back end had in flight, from its raw descriptors.
    pub fn retake(&self, raw: &[[u8; DESC_LEN]], descs: &mut Vec<Desc>) -> Result<Head, RingError> {
        descs.clear();
        let mut id = self.size;
        for desc in raw {
            let (addr, len, this, flags) = fields(*desc);
            id = this;
            if flags & DESC_F_INDIRECT != 0 {
                self.indirect(id, addr, len, descs)?;
            } else {
                push(id, addr, len, flags, descs)?;
            }
            // The in-flight region is the front end's memory, so a chain in it may contain any
            // number of indirect tables.
            if descs.len() > MAX_CHAIN {
                return Err(RingError::ChainTooLong { head: id, max: MAX_CHAIN });
            }
        }
        if id < self.size {
            Ok(Head { id, count: raw.len() as u16 })
        } else {
            Err(RingError::Id(id))
        }
    }

    /// Continues after a restart. `(index, wrap)`: the used position, from the in-flight region.
    /// `ahead`: number of ring entries after that position that are still in flight.
    pub fn restore(&mut self, (index, wrap): (u16, bool), ahead: u16) -> Result<(), RingError> {
        if index >= self.size {
            return Err(RingError::DescIndex { index, size: self.size });
        }
        if ahead > self.size {
            return Err(RingError::Region("more descriptors are in flight than the ring has"));
        }
        self.used = Position { index, wrap };
        self.taken = ahead;
        // If the previous back end was killed while it published a batch, descriptors after the
        // batch's first one may be marked as used. The guest has not seen these marks, so undo
        // them.
        let mut place = self.used;
        for _ in 0..ahead {
            if self.was_used(place.index, place.wrap) {
                let flags = if place.wrap { F_AVAIL } else { F_USED };
                self.desc.store_u16(
                    usize::from(place.index) * DESC_LEN + 14,
                    flags,
                    Ordering::Release,
                );
            }
            place.advance(1, self.size);
        }
        self.avail = self.used;
        self.avail.advance(ahead, self.size);
        Ok(())
    }

    /// Returns the used position after all pushed elements.
    pub fn used_position(&self) -> (u16, bool) {
        (self.used.index, self.used.wrap)
    }

    /// Returns whether the descriptor at `index` is marked as used under this wrap counter.
    pub fn was_used(&self, index: u16, wrap: bool) -> bool {
        if index >= self.size {
            return false;
        }
        let flags = self.desc.load_u16(usize::from(index) * DESC_LEN + 14, Ordering::Acquire);
        (flags & F_AVAIL != 0) == wrap && (flags & F_USED != 0) == wrap
    }

    fn indirect(
        &self,
        head: u16,
        addr: u64,
        len: u32,
        descs: &mut Vec<Desc>,
    ) -> Result<(), RingError> {
        let count = indirect_count(head, len)?;
        let table = self.memory.slice(addr, u64::from(len), 1)?;
        for index in 0..count {
            let (addr, len, _, flags) = fields(table.copy_out(index * DESC_LEN));
            if flags & DESC_F_INDIRECT != 0 {
                return Err(RingError::Indirect {
                    head,
                    what: "an indirect table inside an indirect table",
                });
            }
            push(head, addr, len, flags, descs)?;
        }
        Ok(())
    }

    #[inline]
    fn is_available(&self, place: Position) -> bool {
        let flags = self.desc.load_u16(usize::from(place.index) * DESC_LEN + 14, Ordering::Acquire);
        (flags & F_AVAIL != 0) == place.wrap && (flags & F_USED != 0) != place.wrap
    }

    #[inline]
    pub fn has_available(&self) -> bool {
        self.is_available(self.avail)
    }

    #[inline]
    pub fn next_used(&self) -> Written {
        Self::descriptor(self.used.index)
    }

    #[inline]
    pub fn publication(&self) -> Option<Written> {
        self.held.map(|(index, _)| Self::descriptor(index))
    }

    fn descriptor(index: u16) -> Written {
        Written { part: Part::Descriptors, offset: usize::from(index) * DESC_LEN, len: DESC_LEN }
    }

    #[inline]
    pub fn kick_setting(&self) -> Written {
        Written { part: Part::Used, offset: 0, len: 4 }
    }

    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        let at = usize::from(self.used.index) * DESC_LEN;
        self.desc.store_u32(at + 8, written, Ordering::Relaxed);
        self.desc.store_u16(at + 12, head.id, Ordering::Relaxed);
        let wrap = if self.used.wrap { F_AVAIL | F_USED } else { 0 };
        let flags = wrap | if written > 0 { DESC_F_WRITE } else { 0 };
        match self.held {
            None => self.held = Some((self.used.index, flags)),
            // The guest stops at the first unpublished descriptor, so the flags of later
            // descriptors can be written at once.
            Some(_) => self.desc.store_u16(at + 14, flags, Ordering::Release),
        }
        self.used.advance(head.count, self.size);
        self.taken -= head.count;
        self.unsignalled = self.unsignalled.saturating_add(head.count);
    }

    #[inline]
    pub fn publish(&mut self) {
        if let Some((index, flags)) = self.held.take() {
            self.desc.store_u16(usize::from(index) * DESC_LEN + 14, flags, Ordering::Release);
        }
    }

    #[inline]
    pub fn wants_signal(&mut self) -> bool {
        let pushed = std::mem::take(&mut self.unsignalled);
        if pushed == 0 {
            return false;
        }
        fence(Ordering::SeqCst);
        match self.driver_event.load_u16(2, Ordering::Acquire) & 3 {
            EVENT_ENABLE => true,
            EVENT_DESC if self.event_idx => {
                let event = Position::from_bits(self.driver_event.load_u16(0, Ordering::Relaxed));
                let new = self.used.index;
                // Convert the event and the old index to the lap of the new index (2.8.10).
                let old = new.wrapping_sub(pushed);
                let at = if event.wrap == self.used.wrap {
                    event.index
                } else {
                    event.index.wrapping_sub(self.size)
                };
                passes(at, new, old)
            }
            EVENT_DISABLE => false,
            _ => true,
        }
    }

    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.event_idx {
            self.device_event.store_u16(0, self.avail.bits(), Ordering::Relaxed);
            self.device_event.store_u16(2, EVENT_DESC, Ordering::Release);
        } else {
            self.device_event.store_u16(2, EVENT_ENABLE, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        !self.has_available()
    }

    #[inline]
    pub fn disable_kicks(&mut self) -> bool {
        self.device_event.store_u16(2, EVENT_DISABLE, Ordering::Relaxed);
        true
    }

    pub fn base(&self) -> u32 {
        u32::from(self.avail.bits()) | u32::from(self.used.bits()) << 16
    }

    pub fn size(&self) -> u16 {
        self.size
    }
}
