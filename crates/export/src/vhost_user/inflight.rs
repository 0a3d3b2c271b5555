//! The in-flight region: what a back end has taken and not answered, in memory that outlives it.
//!
//! vhost-user specification, "Inflight I/O tracking". The front end keeps the region's descriptor; after our death it hands
//! it to our successor, who takes the same requests again, oldest first, before anything new.
//! What must hold: at every instruction at which we may be killed, the region and the ring together tell exactly which
//! chains are unanswered. Kernel-visible order is program order here, so stores need only be kept in it (Release).

use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, compiler_fence};

use blockyard_ring::{GuestMemory, MemoryError, Region, Window};

use super::virtqueue::RingError;

const VERSION: u16 = 1;

/// Entries of a queue that are made use of, however large a region is.
const ENTRIES_MOST: usize = 32768;

/// Offsets in the header and in an entry, in bytes, of the two layouts that the specification gives.
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

/// A packed ring's chain as it was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedChain {
    /// The entry in the region.
    pub entry: u16,
    /// Raw descriptors in ring format (address, length, id, flags).
    pub raw: Vec<[u8; 16]>,
}

/// Entries that each queue gets at least: QEMU asks for a region by the size its user gave, and then lets the guest set up
/// rings of up to this many.
const ENTRIES: u16 = 1024;

/// Bytes that one queue of `size` entries takes in the region.
pub fn queue_bytes(size: u16, is_packed: bool) -> u64 {
    let (header, entry) = layout(is_packed);
    ((header + entry * usize::from(size)) as u64).next_multiple_of(64)
}

fn layout(is_packed: bool) -> (usize, usize) {
    if is_packed { (packed::HEADER, packed::ENTRY) } else { (split::HEADER, split::ENTRY) }
}

/// Behind the queues' parts of a region that we made: what the guest set while it ran and its front end will not repeat.
/// Front ends hand a region on as a whole, so it finds its way to our successor.
const NOTES: u64 = 64;
const NOTES_MARK: u64 = u64::from_le_bytes(*b"blkyard1");
const WRITE_BACK: usize = 8;

/// A fresh region for `queues` queues: its descriptor, to be kept by the front end, and its length in bytes.
pub fn allocate(queues: u16, size: u16, is_packed: bool) -> Result<(OwnedFd, u64), MemoryError> {
    let parts = queue_bytes(size.max(ENTRIES), is_packed) * u64::from(queues.max(1));
    let len = parts + NOTES;
    let (region, fd) = Region::memfd("blockyard-inflight", 0, 0, len)?;
    GuestMemory::default().with(region)?.window(parts, NOTES, 8)?.copy_in(0, NOTES_MARK.to_le_bytes());
    Ok((fd, len))
}

/// The region as it is mapped here: each queue has an equal part.
#[derive(Clone, Debug)]
pub struct InflightRegion {
    memory: GuestMemory,
    queue_bytes: u64,
    queues: u16,
    /// Where our notes are; other back ends' regions have none.
    notes: Option<u64>,
}

impl InflightRegion {
    pub fn map(fd: OwnedFd, offset: u64, len: u64, queues: u16) -> Result<Self, MemoryError> {
        let memory = GuestMemory::default().with(Region::map(fd, offset, 0, 0, len)?)?;
        // Counters are written whole: an offset that no front end makes up by accident is refused here.
        memory.window(0, 1, 8)?;
        let notes = len.checked_sub(NOTES).filter(|at| at.is_multiple_of(64));
        let notes =
            notes.filter(|&at| memory.window(at, NOTES, 8).is_ok_and(|w| w.copy_out(0) == NOTES_MARK.to_le_bytes()));
        let parts = notes.unwrap_or(len);
        Ok(InflightRegion { memory, queue_bytes: (parts / u64::from(queues.max(1))) & !63, queues, notes })
    }

    /// What was last noted of the guest's write cache; None: nothing was.
    pub fn write_back(&self) -> Option<bool> {
        match self.memory.window(self.notes?, NOTES, 8).ok()?.copy_out::<1>(WRITE_BACK) {
            [1] => Some(false),
            [2] => Some(true),
            _ => None,
        }
    }

    /// Notes whether the guest sees a volatile write cache.
    pub fn note_write_back(&self, write_back: bool) {
        if let Some(window) = self.notes.and_then(|at| self.memory.window(at, NOTES, 8).ok()) {
            window.copy_in(WRITE_BACK, [1 + u8::from(write_back)]);
        }
    }

    /// The part of one queue; None when the region has none for it.
    pub fn queue(&self, index: u16, is_packed: bool) -> Option<Inflight> {
        let (header, entry) = layout(is_packed);
        let size = ((self.queue_bytes as usize).checked_sub(header)? / entry).min(ENTRIES_MOST);
        if index >= self.queues || size == 0 {
            return None;
        }
        let len = (header + entry * size) as u64;
        let window = self.memory.window(u64::from(index) * self.queue_bytes, len, 8).ok()?;
        Some(Inflight::new(window, size as u16, is_packed))
    }
}

/// One queue's part of the region.
pub struct Inflight {
    window: Window,
    size: u16,
    is_packed: bool,
    counter: u64,
    /// Entries pushed to the used ring and not yet published.
    batch: Vec<u16>,
}

impl Inflight {
    fn new(window: Window, size: u16, is_packed: bool) -> Self {
        let mut inflight = Inflight { window, size, is_packed, counter: 0, batch: Vec::new() };
        if inflight.load(8) != VERSION || inflight.load(10) != size {
            inflight.format();
        }
        inflight.counter = inflight.entries().map(|e| inflight.counter_of(e)).max().unwrap_or(0);
        inflight
    }

    fn format(&mut self) {
        let zeroes = vec![0; self.window.len()];
        self.window.write(0, &zeroes);
        if self.is_packed {
            // The free list: every entry names the next.
            for entry in 0..self.size {
                self.store(self.at(entry) + packed::NEXT, entry.wrapping_add(1));
            }
            self.window.copy_in(packed::USED_WRAP, [1]);
            self.window.copy_in(packed::OLD_USED_WRAP, [1]);
        }
        self.store(10, self.size);
        self.store(8, VERSION);
    }

    /// Whether anything was ever noted here: else the base that the front end tells is the truth.
    pub fn is_used(&self) -> bool {
        self.counter > 0
    }

    /// Entries of the queue that the region was made for.
    pub fn size(&self) -> u16 {
        self.size
    }

    // Split rings: an entry is the chain's head.

    pub fn taken_split(&mut self, head: u16) {
        self.counter = self.counter.wrapping_add(1);
        let at = self.at(head);
        self.window.copy_in(at + split::COUNTER, self.counter.to_le_bytes());
        self.set_inflight(at, true);
    }

    pub fn pushed_split(&mut self, head: u16) {
        let at = self.at(head);
        self.store(at + split::NEXT, self.load(split::LAST_BATCH_HEAD));
        self.store(split::LAST_BATCH_HEAD, head);
        self.batch.push(head);
    }

    pub fn published_split(&mut self, used_index: u16) {
        self.clear_batch();
        self.store(split::USED_IDX, used_index);
    }

    /// Heads that a predecessor left unanswered, oldest first; `used_index` is what the guest sees.
    pub fn recover_split(&mut self, used_index: u16) -> Vec<u16> {
        let mut behind = used_index.wrapping_sub(self.load(split::USED_IDX)).min(self.size);
        let mut head = self.load(split::LAST_BATCH_HEAD);
        while behind > 0 && head < self.size {
            // Published, and killed before it was noted.
            let at = self.at(head);
            self.set_inflight(at, false);
            head = self.load(at + split::NEXT);
            behind -= 1;
        }
        self.store(split::USED_IDX, used_index);
        self.unanswered()
    }

    // Packed rings: an entry is taken from a free list, and holds the descriptors, which the ring forgets.

    /// Notes a chain by its raw descriptors; the answer is its entry.
    pub fn taken_packed(&mut self, raw: &[[u8; 16]]) -> u16 {
        let entry = self.load(packed::OLD_FREE_HEAD);
        if entry >= self.size {
            // The list is full, or was damaged by the front end that holds it: nothing can be noted any more.
            return u16::MAX;
        }
        let first = self.at(entry);
        self.counter = self.counter.wrapping_add(1);
        self.window.copy_in(first + packed::COUNTER, self.counter.to_le_bytes());
        self.store(first + packed::NUM, raw.len() as u16);
        let mut at = entry;
        let mut last = entry;
        for desc in raw {
            if at >= self.size {
                return u16::MAX;
            }
            self.window.copy_in(self.at(at) + packed::DESC, *desc);
            last = at;
            at = self.load(self.at(at) + packed::NEXT);
        }
        self.store(first + packed::LAST, last);
        self.set_inflight(first, true);
        self.store(packed::FREE_HEAD, at);
        self.store(packed::OLD_FREE_HEAD, at);
        entry
    }

    pub fn pushed_packed(&mut self, entry: u16) {
        // Freed only when it is published: until then chains are taken from the same free list.
        if entry < self.size {
            self.batch.push(entry);
        }
    }

    /// Before the ring's flags are written: where the used place will be.
    pub fn publishing_packed(&mut self, used_index: u16, wrap: bool) {
        for entry in &self.batch {
            let last = self.load(self.at(*entry) + packed::LAST).min(self.size - 1);
            self.store(self.at(last) + packed::NEXT, self.load(packed::FREE_HEAD));
            self.store(packed::FREE_HEAD, *entry);
        }
        self.store(packed::USED_IDX, used_index);
        self.window.copy_in(packed::USED_WRAP, [u8::from(wrap)]);
        compiler_fence(Ordering::SeqCst);
    }

    /// After them.
    pub fn published_packed(&mut self) {
        compiler_fence(Ordering::SeqCst);
        self.clear_batch();
        self.commit_packed();
    }

    fn commit_packed(&mut self) {
        self.store(packed::OLD_FREE_HEAD, self.load(packed::FREE_HEAD));
        self.store(packed::OLD_USED_IDX, self.load(packed::USED_IDX));
        let [wrap] = self.window.copy_out::<1>(packed::USED_WRAP);
        self.window.copy_in(packed::OLD_USED_WRAP, [wrap]);
    }

    /// Chains that a predecessor left unanswered, oldest first, and the used place (index, wrap). `was_used` looks at the
    /// ring: has the descriptor at this place been marked used under this wrap counter?
    pub fn recover_packed(
        &mut self,
        was_used: impl Fn(u16, bool) -> bool,
    ) -> Result<(Vec<PackedChain>, (u16, bool)), RingError> {
        let place = |index, wrap| (self.load(index), self.window.copy_out::<1>(wrap)[0] != 0);
        let old = place(packed::OLD_USED_IDX, packed::OLD_USED_WRAP);
        // A batch of the whole ring comes back to the same index, under the other wrap counter.
        if place(packed::USED_IDX, packed::USED_WRAP) != old && was_used(old.0, old.1) {
            self.commit_packed();
        }
        // What was begun and not shown to the guest is undone.
        self.store(packed::FREE_HEAD, self.load(packed::OLD_FREE_HEAD));
        self.store(packed::USED_IDX, self.load(packed::OLD_USED_IDX));
        let [wrap] = self.window.copy_out::<1>(packed::OLD_USED_WRAP);
        self.window.copy_in(packed::USED_WRAP, [wrap]);
        let mut free = self.load(packed::FREE_HEAD);
        for _ in 0..self.size {
            if free >= self.size {
                break;
            }
            let at = self.at(free);
            self.set_inflight(at, false);
            free = self.load(at + packed::NEXT);
        }
        // No entry is in two chains, so all of them together are bounded.
        let mut left = self.size;
        let chains = self.unanswered().into_iter().map(|entry| self.packed_chain(entry, &mut left));
        let chains = chains.collect::<Result<_, _>>()?;
        Ok((chains, (self.load(packed::USED_IDX), wrap != 0)))
    }

    fn packed_chain(&self, entry: u16, left: &mut u16) -> Result<PackedChain, RingError> {
        let count = self.load(self.at(entry) + packed::NUM);
        if count == 0 || count > *left {
            return Err(RingError::Region("its chains have more descriptors than it has room for, or none"));
        }
        *left -= count;
        let mut raw = Vec::with_capacity(count.into());
        let mut at = entry;
        for _ in 0..count {
            if at >= self.size {
                return Err(RingError::Region("a chain leads out of it"));
            }
            raw.push(self.window.copy_out(self.at(at) + packed::DESC));
            at = self.load(self.at(at) + packed::NEXT);
        }
        Ok(PackedChain { entry, raw })
    }

    // Both.

    fn unanswered(&self) -> Vec<u16> {
        let mut entries: Vec<u16> = self.entries().filter(|e| self.window.copy_out::<1>(self.at(*e)) == [1]).collect();
        entries.sort_by_key(|e| self.counter_of(*e));
        entries
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
        // The counter has the same place in both layouts.
        u64::from_le_bytes(self.window.copy_out(self.at(entry) + split::COUNTER))
    }

    fn set_inflight(&self, at: usize, yes: bool) {
        compiler_fence(Ordering::SeqCst);
        self.window.copy_in(at, [u8::from(yes)]);
        compiler_fence(Ordering::SeqCst);
    }

    fn load(&self, at: usize) -> u16 {
        self.window.load_u16(at, Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u16) {
        self.window.store_u16(at, value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(size: u16, is_packed: bool) -> InflightRegion {
        let (fd, len) = allocate(1, size, is_packed).unwrap();
        InflightRegion::map(fd, 0, len, 1).unwrap()
    }

    #[test]
    fn split_tells_what_is_unanswered_in_order() {
        let region = region(8, false);
        let mut queue = region.queue(0, false).unwrap();
        for head in [5, 2, 7, 0] {
            queue.taken_split(head);
        }
        queue.pushed_split(2);
        queue.published_split(1);
        queue.pushed_split(0);
        // Killed here: published or not, the ring's index decides.
        assert_eq!(region.queue(0, false).unwrap().recover_split(1), [5, 7, 0]);
        let region2 = region.clone();
        let mut queue = region2.queue(0, false).unwrap();
        queue.pushed_split(0);
        assert_eq!(region.queue(0, false).unwrap().recover_split(2), [5, 7]);
        assert!(region.queue(1, false).is_none());
    }

    #[test]
    fn packed_keeps_the_descriptors() {
        let region = region(8, true);
        let mut queue = region.queue(0, true).unwrap();
        let raw = |n: u8| [n; 16];
        let a = queue.taken_packed(&[raw(1), raw(2)]);
        let b = queue.taken_packed(&[raw(3)]);
        let c = queue.taken_packed(&[raw(4), raw(5), raw(6)]);
        queue.pushed_packed(b);
        queue.publishing_packed(1, true);
        queue.published_packed();
        queue.pushed_packed(a);
        queue.publishing_packed(3, true);
        // Killed before the ring's flags were written: `a` is still unanswered.
        let (chains, used) = region.queue(0, true).unwrap().recover_packed(|_, _| false).unwrap();
        assert_eq!(used, (1, true));
        assert_eq!(chains.iter().map(|c| c.entry).collect::<Vec<_>>(), [a, c]);
        assert_eq!(chains[0].raw, [raw(1), raw(2)]);
        // Killed after it: only `c` is.
        let mut queue = region.queue(0, true).unwrap();
        queue.pushed_packed(a);
        queue.publishing_packed(3, true);
        let (chains, used) = region.queue(0, true).unwrap().recover_packed(|_, _| true).unwrap();
        assert_eq!((used, chains.len()), ((3, true), 1));
        assert_eq!(chains[0].raw, [raw(4), raw(5), raw(6)]);
    }

    #[test]
    fn a_damaged_region_is_said_to_be() {
        let damaged = |entry: usize, at: usize, value: u16| {
            let region = region(64, true);
            let mut queue = region.queue(0, true).unwrap();
            queue.taken_packed(&[[1; 16], [2; 16]]);
            queue.window.store_u16(packed::HEADER + entry * packed::ENTRY + at, value, Ordering::Relaxed);
            region.queue(0, true).unwrap().recover_packed(|_, _| false)
        };
        assert_eq!(damaged(5, packed::NUM, 9).unwrap().0.len(), 1, "an entry that nobody is at");
        for (entry, at, value) in [(0, packed::NUM, 0), (0, packed::NUM, u16::MAX), (0, packed::NEXT, u16::MAX)] {
            assert!(matches!(damaged(entry, at, value), Err(RingError::Region(_))), "{entry} {at} {value}");
        }
        // Many chains that are each as long as the region: no more is read than there is.
        let region = region(64, true);
        let mut queue = region.queue(0, true).unwrap();
        for entry in 0..usize::from(queue.size()) {
            assert_eq!(usize::from(queue.taken_packed(&[[1; 16]])), entry);
            queue.window.store_u16(packed::HEADER + entry * packed::ENTRY + packed::NUM, 900, Ordering::Relaxed);
        }
        assert!(region.queue(0, true).unwrap().recover_packed(|_, _| false).is_err());
    }

    #[test]
    fn counters_at_their_end_and_regions_without_end_are_borne() {
        let region = region(8, false);
        let mut queue = region.queue(0, false).unwrap();
        queue.taken_split(3);
        queue.window.copy_in(split::HEADER + 3 * split::ENTRY + split::COUNTER, u64::MAX.to_le_bytes());
        let mut queue = region.queue(0, false).unwrap();
        queue.taken_split(4);
        assert_eq!(queue.recover_split(0).len(), 2);
        // Sparse, and it stays so: only the entries that may be used are touched.
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 40).unwrap();
        let vast = InflightRegion::map(fd.try_clone().unwrap(), 0, 1 << 40, 1).unwrap();
        for is_packed in [false, true] {
            assert_eq!(vast.queue(0, is_packed).unwrap().size(), 32768);
        }
        assert!(rustix::fs::fstat(&fd).unwrap().st_blocks * 512 < 2 << 20);
        assert!(InflightRegion::map(fd, 3, 4096, 1).is_err(), "counters would lie across words");
    }

    /// Every interleaving of taking, using and publishing leaves every entry free in the end.
    #[test]
    fn entries_taken_between_use_and_publication_are_not_lost() {
        let region = region(8, true);
        let mut queue = region.queue(0, true).unwrap();
        for round in 0..2000u16 {
            let a = queue.taken_packed(&[[1; 16]; 3]);
            queue.pushed_packed(a);
            let b = queue.taken_packed(&[[2; 16]; 2]);
            assert!(a < queue.size() && b < queue.size() && a != b, "round {round}: {a} {b}");
            queue.publishing_packed(1 + round % 7, true);
            queue.published_packed();
            queue.pushed_packed(b);
            queue.publishing_packed(round % 7, false);
            queue.published_packed();
        }
        assert_eq!(region.queue(0, true).unwrap().recover_packed(|_, _| false).unwrap().0, []);
    }
}
