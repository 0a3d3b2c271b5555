//! The in-flight region: the chains that a back end has taken and not answered. The region is in
//! memory that outlives the back end. (vhost-user specification, "Inflight I/O tracking".)
//!
//! The front end keeps the region's descriptor. If a back end is killed, the next one gets the
//! region. It repeats the requests in the region, oldest first, before it takes new ones.
//!
//! What must hold: the process can be killed after any instruction. The region and the ring
//! together then show exactly which chains are unanswered. Another process reads the region after
//! this one has ended, so program order is enough, and Release stores keep it. A region may come
//! from another back end. Then its header gives the layout. A region that cannot be read is an
//! error, because its requests would be lost.

use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, compiler_fence};

use blockyard_ring::{GuestMemory, Mapper, MemoryError, Region, SharedSlice};

use super::virtqueue::RingError;

const VERSION: u16 = 1;

/// Maximum number of entries that a queue uses, even if a region has room for more.
const MAX_ENTRIES: usize = 32768;

/// Offsets in the header and in an entry, in bytes, of the two layouts in the specification. Both
/// headers begin with features (8 bytes, 0), a version, and the number of entries.
const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const DESC_NUM: usize = 10;
mod split {
    pub const LAST_BATCH_HEAD: usize = 12;
    pub const USED_IDX: usize = 14;
    pub const HEADER: usize = 16;
    pub const ENTRY: usize = 16;
    pub const NEXT: usize = 6;
    pub const COUNTER: usize = 8;
}
mod packed {
    pub const FREE_HEAD: usize = 12;
    pub const OLD_FREE_HEAD: usize = 14;
    pub const USED_IDX: usize = 16;
    pub const OLD_USED_IDX: usize = 18;
    pub const USED_WRAP: usize = 20;
    pub const OLD_USED_WRAP: usize = 21;
    pub const HEADER: usize = 32;
    pub const ENTRY: usize = 32;
    pub const NEXT: usize = 2;
    pub const LAST: usize = 4;
    pub const NUM: usize = 6;
    pub const COUNTER: usize = 8;
    pub const DESC: usize = 16;
}

/// Converts a packed ring's descriptor (address, length, id, flags) to the order of the region (id,
/// flags, length, address).
fn to_region(ring: [u8; 16]) -> [u8; 16] {
    let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, i0, i1, f0, f1] = ring;
    [i0, i1, f0, f1, l0, l1, l2, l3, a0, a1, a2, a3, a4, a5, a6, a7]
}

fn to_ring(region: [u8; 16]) -> [u8; 16] {
    let [i0, i1, f0, f1, l0, l1, l2, l3, a0, a1, a2, a3, a4, a5, a6, a7] = region;
    [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, i0, i1, f0, f1]
}

/// A descriptor chain of a packed ring, as the back end read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedChain {
    /// First entry of the chain in the in-flight region.
    pub entry: u16,
    /// Descriptors in the ring's format (address, length, id, flags).
    pub raw: Vec<[u8; 16]>,
}

/// Minimum number of entries for each queue. QEMU asks for a region of the configured queue size,
/// but the guest may set up rings of up to this size.
const ENTRIES: u16 = 1024;

/// Returns the bytes in the region for one queue of `size` entries.
pub fn queue_bytes(size: u16, is_packed: bool) -> u64 {
    let (header, entry) = layout(is_packed);
    ((header + entry * usize::from(size)) as u64).next_multiple_of(64)
}

fn layout(is_packed: bool) -> (usize, usize) {
    if is_packed { (packed::HEADER, packed::ENTRY) } else { (split::HEADER, split::ENTRY) }
}

/// Length of this program's notes in bytes. A region that this program made has the notes after the
/// queues' parts. The notes contain settings of the guest that the front end does not repeat. Front
/// ends pass on the whole region, so the next back end gets the notes too.
const NOTES: u64 = 64;
const NOTES_MARK: u64 = u64::from_le_bytes(*b"blkyard1");
const WRITE_BACK: usize = 8;

/// Makes a region for `queues` queues. Returns its descriptor, which the front end keeps, and its
/// length in bytes.
pub fn allocate(queues: u16, size: u16, is_packed: bool) -> Result<(OwnedFd, u64), MemoryError> {
    let parts = queue_bytes(size.max(ENTRIES), is_packed) * u64::from(queues.max(1));
    let len = parts + NOTES;
    let (region, fd) = Region::memfd("blockyard-inflight", 0, 0, len)?;
    GuestMemory::default()
        .with(region)?
        .slice(parts, NOTES, 8)?
        .copy_in(0, NOTES_MARK.to_le_bytes());
    Ok((fd, len))
}

/// The mapped region. Each queue has an equal part.
#[derive(Clone, Debug)]
pub struct InflightRegion {
    memory: GuestMemory,
    queue_bytes: u64,
    queues: u16,
    /// Offset of this program's notes in bytes. `None`: another back end made the region.
    notes: Option<u64>,
}

impl InflightRegion {
    /// Maps `len` bytes at `offset` of the front end's file.
    pub fn map(
        mapper: &Mapper,
        fd: OwnedFd,
        (offset, len): (u64, u64),
        queues: u16,
    ) -> Result<Self, MemoryError> {
        let memory = GuestMemory::default().with(mapper.map(fd, offset, 0, 0, len)?)?;
        // Counters are written with single stores, so the region must be aligned. Refuse any other
        // offset: no front end sends one by accident.
        memory.slice(0, 1, 8)?;
        let notes = len.checked_sub(NOTES).filter(|at| at.is_multiple_of(64));
        let notes = notes.filter(|&at| {
            memory.slice(at, NOTES, 8).is_ok_and(|w| w.copy_out(0) == NOTES_MARK.to_le_bytes())
        });
        let parts = notes.unwrap_or(len);
        Ok(InflightRegion {
            memory,
            queue_bytes: (parts / u64::from(queues.max(1))) & !63,
            queues,
            notes,
        })
    }

    /// Returns the guest's write cache setting from the notes, or `None` if they do not contain it.
    pub fn write_back(&self) -> Option<bool> {
        match self.memory.slice(self.notes?, NOTES, 8).ok()?.copy_out::<1>(WRITE_BACK) {
            [1] => Some(false),
            [2] => Some(true),
            _ => None,
        }
    }

    /// Stores whether the guest sees a volatile write cache, in the back end's own part of the
    /// in-flight region (the notes).
    pub fn note_write_back(&self, write_back: bool) {
        if let Some(slice) = self.notes.and_then(|at| self.memory.slice(at, NOTES, 8).ok()) {
            slice.copy_in(WRITE_BACK, [1 + u8::from(write_back)]);
        }
    }

    /// Forgets all chains. The next ring of each queue formats its part.
    pub fn forget(&self) {
        for index in (0..self.queues).filter(|_| self.queue_bytes > 0) {
            if let Ok(part) = self.memory.slice(u64::from(index) * self.queue_bytes, 64, 8) {
                part.store_u16(VERSION_AT, 0, Ordering::Release);
            }
        }
    }

    /// Returns the part of one queue, or `None` if the region has no part for that queue. Returns
    /// an error if the part cannot be read.
    pub fn queue(&self, index: u16, is_packed: bool) -> Result<Option<Inflight>, RingError> {
        let (header, entry) = layout(is_packed);
        let room = (self.queue_bytes as usize).saturating_sub(header) / entry;
        if index >= self.queues || room == 0 {
            return Ok(None);
        }
        let room = room.min(MAX_ENTRIES);
        let len = (header + entry * room) as u64;
        let slice = self.memory.slice(u64::from(index) * self.queue_bytes, len, 8)?;
        Inflight::new(slice, room as u16, is_packed).map(Some)
    }
}

/// One queue's part of the region.
pub struct Inflight {
    slice: SharedSlice,
    size: u16,
    is_packed: bool,
    counter: u64,
    /// Entries whose used elements are pushed but not yet published.
    batch: Vec<u16>,
}

impl Inflight {
    /// `room`: number of entries for which the part has room.
    fn new(slice: SharedSlice, room: u16, is_packed: bool) -> Result<Self, RingError> {
        let mut inflight = Inflight { slice, size: room, is_packed, counter: 0, batch: Vec::new() };
        let features = u64::from_le_bytes(inflight.slice.copy_out(FEATURES));
        let entries = inflight.load(DESC_NUM);
        match inflight.load(VERSION_AT) {
            0 => inflight.format(),
            VERSION if features != 0 => {
                return Err(RingError::Region("its features are not known"));
            }
            VERSION if entries == 0 || entries > room => {
                return Err(RingError::Region(
                    "its header gives no entries, or more than it has room for",
                ));
            }
            VERSION => inflight.size = entries,
            _ => return Err(RingError::Region("its version is not known")),
        }
        inflight.counter = inflight.entries().map(|e| inflight.counter_of(e)).max().unwrap_or(0);
        Ok(inflight)
    }

    fn format(&mut self) {
        // If the process is killed during formatting, the next back end formats the part again.
        self.store(VERSION_AT, 0);
        compiler_fence(Ordering::SeqCst);
        let zeroes = vec![0; self.slice.len()];
        self.slice.write(0, &zeroes);
        if self.is_packed {
            // The free list: each entry points to the next.
            for entry in 0..self.size {
                self.store(self.at(entry) + packed::NEXT, entry.wrapping_add(1));
            }
            self.slice.copy_in(packed::USED_WRAP, [1]);
            self.slice.copy_in(packed::OLD_USED_WRAP, [1]);
        }
        self.store(DESC_NUM, self.size);
        self.store(VERSION_AT, VERSION);
        self.counter = 0;
    }

    /// Formats the part again, because the ring was stopped after its last request, and the front
    /// end says where the ring continues. Does nothing if an entry is still in flight.
    pub fn format_if_idle(&mut self) {
        if !self.entries().any(|entry| self.is_in_flight(entry)) {
            self.format();
        }
    }

    /// Returns whether this part ever contained a chain. If it did not, the front end's base is
    /// valid.
    pub fn is_used(&self) -> bool {
        self.counter > 0
    }

    /// Returns the number of entries of the queue for which the region was made.
    pub fn size(&self) -> u16 {
        self.size
    }

    // Split rings: a chain's entry is the index of its head.

    /// Records where a ring begins that this part says nothing about. Must be called before the
    /// first chain is taken: the recovery compares this index with that of the ring.
    pub fn begins_split(&mut self, used_index: u16) {
        self.store(split::USED_IDX, used_index);
    }

    /// Records that the chain at `head` is taken.
    pub fn taken_split(&mut self, head: u16) {
        self.counter = self.counter.wrapping_add(1);
        let at = self.at(head);
        self.slice.copy_in(at + split::COUNTER, self.counter.to_le_bytes());
        self.set_inflight(at, true);
    }

    /// Records that the chain's used element is pushed. The next batch publishes it.
    pub fn pushed_split(&mut self, head: u16) {
        let at = self.at(head);
        self.store(at + split::NEXT, self.load(split::LAST_BATCH_HEAD));
        self.store(split::LAST_BATCH_HEAD, head);
        self.batch.push(head);
    }

    /// Records that the batch is published. `used_index` is the ring's used index after that.
    pub fn published_split(&mut self, used_index: u16) {
        self.clear_batch();
        self.store(split::USED_IDX, used_index);
    }

    /// Returns the heads that the previous back end left unanswered, oldest first. `used_index` is
    /// the used index in the ring.
    pub fn recover_split(&mut self, used_index: u16) -> Vec<u16> {
        let mut behind = used_index.wrapping_sub(self.load(split::USED_IDX)).min(self.size);
        let mut head = self.load(split::LAST_BATCH_HEAD);
        while behind > 0 && head < self.size {
            // The element was published, but the process was killed before it cleared the entry.
            let at = self.at(head);
            self.set_inflight(at, false);
            head = self.load(at + split::NEXT);
            behind -= 1;
        }
        self.store(split::USED_IDX, used_index);
        self.unanswered()
    }

    // Packed rings: entries come from a free list. They hold copies of the descriptors, because
    // used elements overwrite the descriptors in the ring.

    /// Records where a ring begins that this part says nothing about. Must be called before the
    /// first chain is taken.
    pub fn begins_packed(&mut self, (index, wrap): (u16, bool)) {
        for (index_at, wrap_at) in
            [(packed::USED_IDX, packed::USED_WRAP), (packed::OLD_USED_IDX, packed::OLD_USED_WRAP)]
        {
            self.store(index_at, index);
            self.slice.copy_in(wrap_at, [u8::from(wrap)]);
        }
    }

    /// Records a chain by its raw descriptors. Returns the chain's first entry.
    pub fn taken_packed(&mut self, raw: &[[u8; 16]]) -> u16 {
        let entry = self.load(packed::OLD_FREE_HEAD);
        if entry >= self.size {
            // The free list is empty, or the front end has damaged it, so the chain cannot be
            // recorded.
            return u16::MAX;
        }
        let first = self.at(entry);
        self.counter = self.counter.wrapping_add(1);
        self.slice.copy_in(first + packed::COUNTER, self.counter.to_le_bytes());
        self.store(first + packed::NUM, raw.len() as u16);
        let mut at = entry;
        let mut last = entry;
        for desc in raw {
            if at >= self.size {
                return u16::MAX;
            }
            self.slice.copy_in(self.at(at) + packed::DESC, to_region(*desc));
            last = at;
            at = self.load(self.at(at) + packed::NEXT);
        }
        self.store(first + packed::LAST, last);
        self.set_inflight(first, true);
        self.store(packed::FREE_HEAD, at);
        self.store(packed::OLD_FREE_HEAD, at);
        entry
    }

    /// Records that the chain's used element is pushed. The next batch publishes it.
    pub fn pushed_packed(&mut self, entry: u16) {
        // The entry becomes free only when its element is published, because until then chains take
        // entries from the same free list.
        if entry < self.size {
            self.batch.push(entry);
        }
    }

    /// Records that a batch is about to be published. `used_index` and `wrap` are the used position
    /// after the batch. Must be called before the ring's flags are written.
    pub fn publishing_packed(&mut self, used_index: u16, wrap: bool) {
        for entry in &self.batch {
            let last = self.load(self.at(*entry) + packed::LAST).min(self.size - 1);
            self.store(self.at(last) + packed::NEXT, self.load(packed::FREE_HEAD));
            self.store(packed::FREE_HEAD, *entry);
        }
        self.store(packed::USED_IDX, used_index);
        self.slice.copy_in(packed::USED_WRAP, [u8::from(wrap)]);
        compiler_fence(Ordering::SeqCst);
    }

    /// Records that the batch is published. Must be called after the ring's flags are written.
    pub fn published_packed(&mut self) {
        compiler_fence(Ordering::SeqCst);
        self.clear_batch();
        self.commit_packed();
    }

    fn commit_packed(&mut self) {
        self.store(packed::OLD_FREE_HEAD, self.load(packed::FREE_HEAD));
        self.store(packed::OLD_USED_IDX, self.load(packed::USED_IDX));
        let [wrap] = self.slice.copy_out::<1>(packed::USED_WRAP);
        self.slice.copy_in(packed::OLD_USED_WRAP, [wrap]);
    }

    /// Returns the chains that the previous back end left unanswered, oldest first, and the used
    /// position (index, wrap counter). `was_used` returns whether the ring's descriptor at an index
    /// is marked as used under a wrap counter.
    pub fn recover_packed(
        &mut self,
        was_used: impl Fn(u16, bool) -> bool,
    ) -> Result<(Vec<PackedChain>, (u16, bool)), RingError> {
        let place = |index, wrap| (self.load(index), self.slice.copy_out::<1>(wrap)[0] != 0);
        let old = place(packed::OLD_USED_IDX, packed::OLD_USED_WRAP);
        // After a batch of the whole ring, the index is unchanged, and the wrap counter is
        // inverted.
        if place(packed::USED_IDX, packed::USED_WRAP) != old && was_used(old.0, old.1) {
            self.commit_packed();
        }
        // The batch was not published, so undo its changes to the free list.
        self.store(packed::FREE_HEAD, self.load(packed::OLD_FREE_HEAD));
        self.store(packed::USED_IDX, self.load(packed::OLD_USED_IDX));
        let [wrap] = self.slice.copy_out::<1>(packed::OLD_USED_WRAP);
        self.slice.copy_in(packed::USED_WRAP, [wrap]);
        let mut free = self.load(packed::FREE_HEAD);
        for _ in 0..self.size {
            if free >= self.size {
                break;
            }
            let at = self.at(free);
            self.set_inflight(at, false);
            free = self.load(at + packed::NEXT);
        }
        // No entry is in two chains, so their total length is at most the number of entries.
        let mut left = self.size;
        let chains = self.unanswered().into_iter().map(|entry| self.packed_chain(entry, &mut left));
        let chains = chains.collect::<Result<_, _>>()?;
        Ok((chains, (self.load(packed::USED_IDX), wrap != 0)))
    }

    fn packed_chain(&self, entry: u16, left: &mut u16) -> Result<PackedChain, RingError> {
        let count = self.load(self.at(entry) + packed::NUM);
        if count == 0 || count > *left {
            return Err(RingError::Region(
                "a chain has no descriptors, or its chains have more than it has room for",
            ));
        }
        *left -= count;
        let mut raw = Vec::with_capacity(count.into());
        let mut at = entry;
        for _ in 0..count {
            if at >= self.size {
                return Err(RingError::Region("a chain leads out of it"));
            }
            raw.push(to_ring(self.slice.copy_out(self.at(at) + packed::DESC)));
            at = self.load(self.at(at) + packed::NEXT);
        }
        Ok(PackedChain { entry, raw })
    }

    // The functions below serve both layouts.

    fn unanswered(&self) -> Vec<u16> {
        let mut entries: Vec<u16> = self.entries().filter(|e| self.is_in_flight(*e)).collect();
        // Each counter is read once: the front end may write to them meanwhile.
        entries.sort_by_cached_key(|e| self.counter_of(*e));
        entries
    }

    fn is_in_flight(&self, entry: u16) -> bool {
        self.slice.copy_out::<1>(self.at(entry)) == [1]
    }

    fn clear_batch(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        for entry in batch.drain(..) {
            let at = self.at(entry);
            self.set_inflight(at, false);
        }
        self.batch = batch;
    }

    fn entries(&self) -> impl Iterator<Item = u16> + use<> {
        0..self.size
    }

    fn at(&self, entry: u16) -> usize {
        let (header, len) = layout(self.is_packed);
        header + usize::from(entry) * len
    }

    fn counter_of(&self, entry: u16) -> u64 {
        // The counter has the same offset in both layouts.
        u64::from_le_bytes(self.slice.copy_out(self.at(entry) + split::COUNTER))
    }

    fn set_inflight(&self, at: usize, yes: bool) {
        compiler_fence(Ordering::SeqCst);
        self.slice.copy_in(at, [u8::from(yes)]);
        compiler_fence(Ordering::SeqCst);
    }

    fn load(&self, at: usize) -> u16 {
        self.slice.load_u16(at, Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u16) {
        self.slice.store_u16(at, value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
