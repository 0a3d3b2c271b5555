//! Cache of bitmap pages, shared by all reactors, bounded by a memory budget.
//!
//! In: pages as the file has them; sectors that were written. Out: which sectors are stored in the
//! overlay; which bytes a flush must write.
//!
//! Invariants: a set bit stays in memory until it is durable (dirty pages are not evicted). A
//! lookup takes no lock and never returns bits of another page.
//!
//! The cache is set-associative: a page belongs to one set of [`WAYS`] frames. A frame's stamp is a
//! sequence lock: page number plus a counter of reuses. A lookup reads the stamp, the bits, and the
//! stamp again. A change of a set (its bits or its pages) holds the set's lock.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::journal::{Journal, Key, Record};

/// Size of a page in bytes, and the number of sectors that it describes (16 MiB of the disk).
pub(super) const PAGE: usize = 4096;
pub(super) const PAGE_SECTORS: u64 = PAGE as u64 * 8;

/// Unit of bitmap writes, in bytes; dirtiness is tracked in this unit.
const PART: usize = 512;
const WORDS: usize = PAGE / 8;
const PART_WORDS: usize = PART / 8;

const WAYS: usize = 8;

/// Maximum number of dirty pages before a write-back. It bounds the time of a flush, and the memory
/// of the copies that the flush makes.
const DIRTY_PAGES: usize = 4096;

/// Mask of a stamp's page number plus one; 0: the frame is empty.
const STAMP_PAGE: u64 = u32::MAX as u64;

type Words = [AtomicU64; WORDS];

#[derive(Default)]
struct CacheSet {
    stamps: [AtomicU64; WAYS],
    /// The bits of each frame, allocated when the frame is first used.
    words: [OnceLock<Box<Words>>; WAYS],
    /// Reference bits of the clock (second-chance) replacement.
    used: [AtomicBool; WAYS],
    state: Mutex<SetState>,
}

#[derive(Default)]
struct SetState {
    frames: [FrameState; WAYS],
    hand: usize,
}

/// One bit for each 512-byte part of the page.
#[derive(Clone, Copy, Default)]
struct FrameState {
    /// Parts with set bits that no flush has taken yet.
    dirty: u8,
    /// Parts that a flush is writing.
    writing: u8,
}

/// The cache of a COW file's bitmap.
pub(super) struct SectorBitmap {
    sets: Box<[CacheSet]>,
    /// Whether all pages of the bitmap fit into the cache.
    all: bool,
    /// Numbers of the pages with dirty parts. `dirty_count` is the size of this set, because each
    /// write reads that size.
    dirty: Mutex<BTreeSet<u64>>,
    dirty_count: AtomicUsize,
    /// Records set bits.
    journal: Arc<Journal>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SectorBitmap {
    /// Creates a cache of about `budget` bytes, for a bitmap of `len` bytes.
    pub fn new(len: u64, budget: u64, journal: Arc<Journal>) -> Self {
        let pages = len.min(budget.max(1)).div_ceil(PAGE as u64);
        let sets = pages.div_ceil(WAYS as u64).max(1);
        let all = len.div_ceil(PAGE as u64) <= pages;
        let sets = (0..sets).map(|_| CacheSet::default()).collect();
        let (dirty, dirty_count) = (Mutex::default(), AtomicUsize::new(0));
        SectorBitmap { sets, all, dirty, dirty_count, journal }
    }

    /// Returns the number of pages that fit into the cache.
    pub fn frames(&self) -> usize {
        self.sets.len() * WAYS
    }

    /// Returns true if a write-back is due: too many pages are dirty, and dirty pages cannot be
    /// evicted.
    pub fn is_too_dirty(&self) -> bool {
        let most = if self.all { DIRTY_PAGES } else { DIRTY_PAGES.min(self.frames() / 2) };
        self.dirty_pages() > most
    }

    /// Returns the number of pages with changes that no flush has begun to write.
    pub fn dirty_pages(&self) -> usize {
        self.dirty_count.load(Ordering::Relaxed)
    }

    fn set_of(&self, page: u64) -> &CacheSet {
        &self.sets[(page % self.sets.len() as u64) as usize]
    }

    /// Returns whether sector `first` is stored in the overlay, and the length of the run of equal
    /// bits that begins there. The run is bounded by `count` and by the page's end. None: the page
    /// is not cached.
    pub fn run(&self, first: u64, count: u64) -> Option<(bool, u64)> {
        let (page, at) = (first / PAGE_SECTORS, (first % PAGE_SECTORS) as usize);
        let end = (at as u64).saturating_add(count).min(PAGE_SECTORS) as usize;
        let set = self.set_of(page);
        for way in 0..WAYS {
            let stamp = set.stamps[way].load(Ordering::Acquire);
            if stamp & STAMP_PAGE != page + 1 {
                continue;
            }
            let run = run_in(set.words[way].get()?, at, end);
            fence(Ordering::Acquire);
            if set.stamps[way].load(Ordering::Relaxed) != stamp {
                return None;
            }
            if !set.used[way].load(Ordering::Relaxed) {
                set.used[way].store(true, Ordering::Relaxed);
            }
            return Some(run);
        }
        None
    }

    /// Returns true if the page is cached.
    pub fn has(&self, page: u64) -> bool {
        self.set_of(page).way_of(page).is_some()
    }

    /// Sets the bits of these sectors, all of one page. Returns false if the page is not cached.
    pub fn set(&self, first: u64, count: u64) -> bool {
        if count == 0 || self.run(first, count) == Some((true, count)) {
            return true;
        }
        let page = first / PAGE_SECTORS;
        let set = self.set_of(page);
        let mut state = lock(&set.state);
        let Some((way, words)) =
            set.way_of(page).and_then(|way| Some((way, set.words[way].get()?)))
        else {
            return false;
        };
        let at = (first % PAGE_SECTORS) as usize;
        let changed = missing_in(words, at, count as usize);
        self.add_dirty(page, &mut state.frames[way], changed);
        if changed != 0 {
            // After the page is dirty: a flush switches the journal's halves before it takes the
            // dirty pages, so that each record is in a half that outlives its page's write.
            self.journal.record(Record { key: Key::Sector(first), value: [count, 0] });
            // After the record: a request that sees a bit is answered without a record of its own.
            set_in(words, at, count as usize);
        }
        true
    }

    fn add_dirty(&self, page: u64, frame: &mut FrameState, parts: u8) {
        if parts != 0 && frame.dirty == 0 {
            let mut dirty = lock(&self.dirty);
            dirty.insert(page);
            self.dirty_count.store(dirty.len(), Ordering::Relaxed);
        }
        frame.dirty |= parts;
    }

    /// Inserts a page as the file has it. Returns false if all frames of its set are dirty: write
    /// back first. The caller excludes concurrent loads of a page.
    pub fn insert(&self, page: u64, bytes: &[u8]) -> bool {
        let set = self.set_of(page);
        let mut state = lock(&set.state);
        let Some(way) = set.victim(&mut state) else { return false };
        let words = set.words[way].get_or_init(|| Box::new([const { AtomicU64::new(0) }; WORDS]));
        let old = set.stamps[way].swap(0, Ordering::Relaxed);
        fence(Ordering::Release);
        let mut chunks = bytes.chunks(8);
        for word in words.iter() {
            let mut le = [0; 8];
            let chunk = chunks.next().unwrap_or_default();
            le[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
        let reuses = (old >> 32).wrapping_add(1) as u32;
        set.publish(way, u64::from(reuses) << 32 | (page + 1));
        true
    }

    /// Returns true if a page can be inserted without evicting another.
    pub fn has_room(&self, page: u64) -> bool {
        let set = self.set_of(page);
        set.stamps.iter().any(|stamp| stamp.load(Ordering::Relaxed) & STAMP_PAGE == 0)
    }

    /// Copies all dirty pages for a flush; one flush at a time. If the batch is dropped before
    /// [`FlushBatch::done`], its pages are dirty again.
    pub fn take_dirty(&self) -> FlushBatch<'_> {
        let pages = {
            let mut dirty = lock(&self.dirty);
            self.dirty_count.store(0, Ordering::Relaxed);
            std::mem::take(&mut *dirty)
        };
        let take = |page: u64| {
            let set = self.set_of(page);
            let mut state = lock(&set.state);
            let way = set.way_of(page)?;
            let words = set.words[way].get()?;
            let frame = &mut state.frames[way];
            frame.writing = std::mem::take(&mut frame.dirty);
            Some(PageCopy { page, parts: frame.writing, bytes: bytes_of(words) })
        };
        FlushBatch {
            bitmap: self,
            copies: pages.into_iter().filter_map(take).collect(),
            done: false,
        }
    }
}

impl CacheSet {
    fn way_of(&self, page: u64) -> Option<usize> {
        self.stamps.iter().position(|stamp| stamp.load(Ordering::Acquire) & STAMP_PAGE == page + 1)
    }

    /// Chooses a frame to reuse: an empty one, or a clean one by second chance.
    fn victim(&self, state: &mut SetState) -> Option<usize> {
        let empty = |stamp: &AtomicU64| stamp.load(Ordering::Relaxed) & STAMP_PAGE == 0;
        if let Some(way) = self.stamps.iter().position(empty) {
            return Some(way);
        }
        let mut clean = None;
        for _ in 0..WAYS {
            let way = state.hand;
            state.hand = (way + 1) % WAYS;
            if state.frames[way].dirty | state.frames[way].writing != 0 {
                continue;
            }
            if !self.used[way].swap(false, Ordering::Relaxed) {
                return Some(way);
            }
            clean.get_or_insert(way);
        }
        clean
    }

    fn publish(&self, way: usize, stamp: u64) {
        self.used[way].store(true, Ordering::Relaxed);
        self.stamps[way].store(stamp, Ordering::Release);
    }
}

/// Returns the bit at `at`, and the length of the run of equal bits, up to `end`. Other threads may
/// set bits meanwhile.
fn run_in(words: &Words, at: usize, end: usize) -> (bool, u64) {
    // Load the first word once: if a bit changed between two loads, the run could have length 0.
    let first = words[at / 64].load(Ordering::Relaxed);
    let bit = first >> (at % 64) & 1 == 1;
    let flip = if bit { u64::MAX } else { 0 };
    let (mut now, mut word) = (at, first);
    loop {
        let differs = (word ^ flip) >> (now % 64);
        if differs != 0 {
            now += differs.trailing_zeros() as usize;
            break;
        }
        now = (now / 64 + 1) * 64;
        if now >= end {
            break;
        }
        word = words[now / 64].load(Ordering::Relaxed);
    }
    (bit, (now.min(end) - at) as u64)
}

/// Calls `visit` with each word that has some of these bits, and with the mask of the bits.
fn each_word(first: usize, count: usize, mut visit: impl FnMut(usize, u64)) {
    let mut at = first;
    while at < first + count {
        let stop = (first + count).min((at / 64 + 1) * 64);
        visit(at / 64, (u64::MAX >> (64 - (stop - at))) << (at % 64));
        at = stop;
    }
}

/// Returns a mask of the parts in which some of these bits are not set.
fn missing_in(words: &Words, first: usize, count: usize) -> u8 {
    let mut parts = 0;
    each_word(first, count, |word, mask| {
        if words[word].load(Ordering::Relaxed) & mask != mask {
            parts |= 1 << (word / PART_WORDS);
        }
    });
    parts
}

fn set_in(words: &Words, first: usize, count: usize) {
    each_word(first, count, |word, mask| {
        // Release: a thread that sees the bit also sees the write of the sector's data.
        words[word].fetch_or(mask, Ordering::Release);
    });
}

fn bytes_of(words: &Words) -> Box<[u8]> {
    words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
}

/// Copy of a dirty page, taken by a flush.
struct PageCopy {
    page: u64,
    parts: u8,
    bytes: Box<[u8]>,
}

/// Pages that a flush writes.
pub(super) struct FlushBatch<'a> {
    bitmap: &'a SectorBitmap,
    copies: Vec<PageCopy>,
    done: bool,
}

impl FlushBatch<'_> {
    /// Returns true if there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.copies.is_empty()
    }

    /// Returns the offset (in the bitmap) and the bytes of each page, from the page's first dirty
    /// part to its last. Clean parts in between are rewritten unchanged.
    pub fn writes(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.copies.iter().map(|copy| {
            let first = copy.parts.trailing_zeros() as usize * PART;
            let end = PAGE - copy.parts.leading_zeros() as usize * PART;
            (copy.page * PAGE as u64 + first as u64, &copy.bytes[first..end])
        })
    }

    /// Marks all pages of the batch as durable.
    pub fn done(mut self) {
        self.done = true;
    }
}

impl Drop for FlushBatch<'_> {
    fn drop(&mut self) {
        for copy in &self.copies {
            let set = self.bitmap.set_of(copy.page);
            let mut state = lock(&set.state);
            // The page is still cached: pages that are being written are not evicted.
            let Some(way) = set.way_of(copy.page) else { continue };
            let frame = &mut state.frames[way];
            frame.writing = 0;
            if !self.done {
                self.bitmap.add_dirty(copy.page, frame, copy.parts);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_storage::sim::Rng;

    fn no_journal() -> Arc<Journal> {
        Journal::new(Default::default(), None)
    }

    fn loaded(pages: u64) -> SectorBitmap {
        let bitmap = SectorBitmap::new(pages * PAGE as u64, u64::MAX, no_journal());
        (0..pages).for_each(|page| assert!(bitmap.insert(page, &[0; PAGE])));
        bitmap
    }

    #[test]
    fn runs_match_a_plain_vector() {
        let bitmap = loaded(3);
        let mut model = vec![false; 3 * PAGE_SECTORS as usize];
        let mut rng = Rng::new(7);
        for _ in 0..300 {
            let first = rng.below(model.len() as u64);
            let longest = if rng.one_in(8) { PAGE_SECTORS } else { 100 };
            let count = rng.between(1, longest).min(PAGE_SECTORS - first % PAGE_SECTORS);
            assert!(bitmap.set(first, count));
            model[first as usize..(first + count) as usize].fill(true);
            for _ in 0..20 {
                let at = rng.below(model.len() as u64);
                let count = rng.between(1, PAGE_SECTORS);
                let rest = (PAGE_SECTORS - at % PAGE_SECTORS).min(count) as usize;
                let bits = &model[at as usize..][..rest];
                let expected = bits.iter().take_while(|b| **b == bits[0]).count() as u64;
                assert_eq!(bitmap.run(at, count), Some((bits[0], expected)));
            }
        }
        let mut bytes = vec![0; 3 * PAGE];
        bitmap
            .take_dirty()
            .writes()
            .for_each(|(at, part)| bytes[at as usize..][..part.len()].copy_from_slice(part));
        let bits: Vec<_> = (0..model.len()).map(|i| bytes[i / 8] >> (i % 8) & 1 == 1).collect();
        assert_eq!(bits, model, "the lowest bit of a byte is the first sector");
    }

    #[test]
    fn only_changed_parts_are_written_and_failed_writes_are_retried() {
        let bitmap = loaded(2);
        let taken = |bitmap: &SectorBitmap| {
            bitmap.take_dirty().writes().map(|(at, b)| (at, b.len())).collect::<Vec<_>>()
        };
        assert!(bitmap.take_dirty().is_empty());
        for sector in [0, 4095, 4096, 5 * 4096, PAGE_SECTORS + 7 * 4096] {
            assert!(bitmap.set(sector, 1));
        }
        let parts = [(0, 6 * 512), (4096 + 7 * 512, 512)];
        assert_eq!(taken(&bitmap), parts);
        assert_eq!(taken(&bitmap), parts, "the dropped batch is dirty again");
        let flush = bitmap.take_dirty();
        assert!(
            bitmap.set(1, 1) && bitmap.set(0, 1),
            "a new bit in a page that is being written, and a bit that is set already"
        );
        flush.done();
        assert_eq!((taken(&bitmap), bitmap.dirty_pages()), (vec![(0, 512)], 1));
        bitmap.take_dirty().done();
        assert!(bitmap.set(0, 2) && bitmap.set(4095, 2));
        assert_eq!(bitmap.dirty_pages(), 0, "all bits were set already");
    }

    #[test]
    fn dirty_pages_are_not_evicted() {
        let bitmap = SectorBitmap::new(1 << 20, 1, no_journal());
        assert_eq!(bitmap.frames(), WAYS);
        (0..8).for_each(|page| assert!(bitmap.insert(page, &[0; PAGE])));
        (0..7).for_each(|page| assert!(bitmap.set(page * PAGE_SECTORS, 1)));
        assert!(!bitmap.set(8 * PAGE_SECTORS, 1) && !bitmap.has_room(8));
        assert!(bitmap.insert(8, &[0xff; PAGE]));
        assert_eq!(
            (bitmap.run(7 * PAGE_SECTORS, 1), bitmap.run(8 * PAGE_SECTORS, 9)),
            (None, Some((true, 9)))
        );
        assert!(bitmap.set(8 * PAGE_SECTORS, 1));
        assert!(bitmap.insert(9, &[0; PAGE]) && bitmap.set(9 * PAGE_SECTORS, 1));
        let taken = bitmap.take_dirty();
        assert!(!bitmap.insert(10, &[0; PAGE]), "all are being written");
        taken.done();
        assert!(bitmap.insert(10, &[0; PAGE]));
    }

    #[test]
    fn a_lookup_never_returns_bits_of_another_page() {
        let bitmap = SectorBitmap::new(1 << 30, 1, no_journal());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..2 {
                let (bitmap, stop) = (&bitmap, &stop);
                scope.spawn(move || {
                    let mut rng = Rng::new(seed);
                    while !stop.load(Ordering::Relaxed) {
                        let page = rng.below(16);
                        let run = bitmap.run(page * PAGE_SECTORS + rng.below(64), u64::MAX);
                        assert!(
                            run.is_none_or(|(bit, _)| bit == (page % 2 == 1)),
                            "page {page}: {run:?}"
                        );
                    }
                });
            }
            let mut rng = Rng::new(99);
            for _ in 0..40_000 {
                let page = rng.below(16);
                if !bitmap.has(page) {
                    assert!(bitmap.insert(page, &[if page % 2 == 1 { 0xff } else { 0 }; PAGE]));
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
