//! The split virtqueue (virtio 1.2, section 2.7).

use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use blockyard_ring::{GuestMemory, SharedSlice};

use super::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_LEN, Desc, Head, MAX_CHAIN, Part, RingError, Written,
};
use super::{fields, indirect_count, passes, push};

const AVAIL_F_NO_INTERRUPT: u16 = 1;
const USED_F_NO_NOTIFY: u16 = 1;

/// A split virtqueue.
pub struct SplitRing {
    memory: Rc<GuestMemory>,
    desc: SharedSlice,
    avail: SharedSlice,
    used: SharedSlice,
    size: u16,
    event_idx: bool,
    next_avail: u16,
    /// The guest's available index as the queue read it last.
    seen_avail: u16,
    /// The used index, including elements that are not published yet.
    next_used: u16,
    /// The used index at the last call of `wants_signal`.
    signalled_used: u16,
}

impl SplitRing {
    /// `desc`, `avail`, `used` are guest addresses. `base` is the available index to start at.
    pub fn new(
        memory: Rc<GuestMemory>,
        (desc, avail, used): (u64, u64, u64),
        size: u32,
        base: u16,
        event_idx: bool,
    ) -> Result<Self, RingError> {
        if size == 0 || size > 32768 || !size.is_power_of_two() {
            return Err(RingError::Size(size));
        }
        let event = if event_idx { 2 } else { 0 };
        let desc = memory.slice(desc, u64::from(size) * DESC_LEN as u64, 16)?;
        let avail = memory.slice(avail, 4 + u64::from(size) * 2 + event, 2)?;
        let used = memory.slice(used, 4 + u64::from(size) * 8 + event, 4)?;
        let next_used = used.load_u16(2, Ordering::Acquire);
        Ok(SplitRing {
            memory,
            desc,
            avail,
            used,
            size: size as u16,
            event_idx,
            next_avail: base,
            seen_avail: base,
            next_used,
            // The previous back end may have been killed after it published used elements and
            // before it signalled. Signal again.
            signalled_used: next_used.wrapping_sub(1),
        })
    }

    pub fn set_memory(&mut self, memory: Rc<GuestMemory>) {
        self.memory = memory;
    }

    /// Continues `ahead` chains after the used index, because the previous back end had these
    /// chains in flight.
    pub fn restore(&mut self, ahead: u16) {
        self.next_avail = self.next_used.wrapping_add(ahead);
        self.seen_avail = self.next_avail;
    }

    /// Returns the used index as published in the ring.
    pub fn used_index(&self) -> u16 {
        self.used.load_u16(2, Ordering::Acquire)
    }

    #[inline]
    pub fn pop(&mut self, descs: &mut Vec<Desc>) -> Result<Option<Head>, RingError> {
        if self.seen_avail == self.next_avail {
            self.seen_avail = self.avail.load_u16(2, Ordering::Acquire);
            let ahead = self.seen_avail.wrapping_sub(self.next_avail);
            if ahead == 0 {
                return Ok(None);
            }
            if ahead > self.size {
                return Err(RingError::AvailIndex {
                    index: self.seen_avail,
                    next: self.next_avail,
                });
            }
        }
        let at = 4 + usize::from(self.next_avail % self.size) * 2;
        let head = self.avail.load_u16(at, Ordering::Relaxed);
        self.chain(head, descs)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(Head { id: head, count: 1 }))
    }

    /// Copies the chain at `head`. Also used for chains that the previous back end had in flight.
    #[inline]
    pub fn chain(&self, head: u16, descs: &mut Vec<Desc>) -> Result<(), RingError> {
        let mut index = head;
        let limit = usize::from(self.size).min(MAX_CHAIN);
        loop {
            if index >= self.size {
                return Err(RingError::DescIndex { index, size: self.size });
            }
            let (addr, len, flags, next) =
                fields(self.desc.copy_out(usize::from(index) * DESC_LEN));
            if flags & DESC_F_INDIRECT != 0 {
                if flags & DESC_F_NEXT != 0 {
                    return Err(RingError::Indirect { head, what: "it has a next descriptor" });
                }
                return self.indirect(head, addr, len, descs);
            }
            if descs.len() == limit {
                return Err(RingError::ChainTooLong { head, max: limit });
            }
            push(head, addr, len, flags, descs)?;
            if flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = next;
        }
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
        let mut index = 0;
        for _ in 0..count {
            let (addr, len, flags, next) = fields(table.copy_out(index * DESC_LEN));
            if flags & DESC_F_INDIRECT != 0 {
                return Err(RingError::Indirect {
                    head,
                    what: "an indirect table inside an indirect table",
                });
            }
            push(head, addr, len, flags, descs)?;
            if flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = usize::from(next);
            if index >= count {
                return Err(RingError::DescIndex { index: next, size: count as u16 });
            }
        }
        Err(RingError::ChainTooLong { head, max: count })
    }

    #[inline]
    pub fn has_available(&self) -> bool {
        self.avail.load_u16(2, Ordering::Acquire) != self.next_avail
    }

    #[inline]
    pub fn next_used(&self) -> Written {
        let offset = 4 + usize::from(self.next_used % self.size) * 8;
        Written { part: Part::Used, offset, len: 8 }
    }

    #[inline]
    pub fn publication(&self) -> Written {
        Written { part: Part::Used, offset: 2, len: 2 }
    }

    #[inline]
    pub fn kick_setting(&self) -> Written {
        let offset = if self.event_idx { 4 + usize::from(self.size) * 8 } else { 0 };
        Written { part: Part::Used, offset, len: 2 }
    }

    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        let at = 4 + usize::from(self.next_used % self.size) * 8;
        let [i0, i1, i2, i3] = u32::from(head.id).to_le_bytes();
        let [w0, w1, w2, w3] = written.to_le_bytes();
        self.used.copy_in(at, [i0, i1, i2, i3, w0, w1, w2, w3]);
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    pub fn publish(&mut self) {
        self.used.store_u16(2, self.next_used, Ordering::Release);
    }

    #[inline]
    pub fn wants_signal(&mut self) -> bool {
        let (old, new) = (self.signalled_used, self.next_used);
        if old == new {
            return false;
        }
        // The used index must be visible before the guest's event index is read (2.7.7.2). Without
        // the fence, both sides may sleep.
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            passes(self.avail.load_u16(4 + usize::from(self.size) * 2, Ordering::Relaxed), new, old)
        } else {
            self.avail.load_u16(0, Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0
        };
        self.signalled_used = new;
        wanted
    }

    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.event_idx {
            self.used.store_u16(4 + usize::from(self.size) * 8, self.next_avail, Ordering::Relaxed);
        } else {
            self.used.store_u16(0, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        !self.has_available()
    }

    #[inline]
    pub fn disable_kicks(&mut self) -> bool {
        // With EVENT_IDX, an event index that is not updated already suppresses kicks.
        if !self.event_idx {
            self.used.store_u16(0, USED_F_NO_NOTIFY, Ordering::Relaxed);
        }
        !self.event_idx
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next_avail)
    }

    pub fn size(&self) -> u16 {
        self.size
    }
}
