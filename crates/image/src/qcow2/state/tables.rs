//! Cache of L2 tables, in slices. Lookups take no lock.
//!
//! ```text
//!   guest offset ──► slice number ──► this reactor's LocalSlices
//!   ──► the shared map ──► the file (view.rs, load)
//! ```
//!
//! A slice is 4 KiB of an L2 table (or a whole table, if clusters are smaller). All reactors share
//! it: its words are atomic. Any thread may read them at any time; writes happen under the lock of
//! the map.
//!
//! Invariants: a dirty slice stays in the map until its changes are in the file. An entry becomes
//! visible to readers only after its data have been written. Words are kept in native byte order
//! and converted when they are written.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::journal::{Journal, Key, Record};

use crate::qcow2::encoding::entry::is_partial;

/// Size of a slice in bytes, if a table is that large.
pub const SLICE_BYTES: u64 = 4096;

/// Minimum number of slices that the cache keeps, and maximum number of slices that one eviction
/// examines.
const FEWEST: usize = 8;
const AT_ONCE: usize = 64;
/// Number of lines of a reactor's cache that one load looks through for evicted slices.
const TIDIED: usize = 64;

/// An L2 entry, and with extended L2 entries its subcluster bitmap (else 0).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    pub word: u64,
    pub bitmap: u64,
}

/// A cached slice of an L2 table.
#[derive(Debug)]
pub struct Slice {
    pub number: u64,
    words: Box<[AtomicU64]>,
    extended: bool,
    /// Number of partial entries. The slice stays dirty as long as it has any.
    partial: AtomicUsize,
    /// Sequence counter of changes to extended entries; odd while a change is in progress.
    changes: AtomicU64,
    /// Whether the slice differs from the file. Then it is in the list of dirty slices.
    dirty: AtomicBool,
    /// Whether it differs in more than partial entries, which no write-back puts into the file.
    /// Changed under the lock of the map.
    unwritten: AtomicBool,
    /// Whether a copy of the slice is being written to the file.
    writing: AtomicBool,
    /// Whether the slice was evicted from the map. A reactor that still has it must look in the map
    /// again.
    retired: AtomicBool,
    used: AtomicBool,
}

impl Slice {
    pub fn new(number: u64, words: impl Iterator<Item = u64>, extended: bool) -> Self {
        let words = words.map(AtomicU64::new).collect();
        let no = || AtomicBool::new(false);
        let (changes, used) = (AtomicU64::new(0), AtomicBool::new(true));
        let partial = AtomicUsize::new(0);
        Slice {
            number,
            words,
            extended,
            partial,
            changes,
            dirty: no(),
            unwritten: no(),
            writing: no(),
            retired: no(),
            used,
        }
    }

    /// Returns the `index`-th entry. The two words of an extended entry are consistent: a read that
    /// overlaps a change is repeated.
    #[inline]
    pub fn get(&self, index: usize) -> Entry {
        if !self.extended {
            return Entry { word: self.words[index].load(Ordering::Acquire), bitmap: 0 };
        }
        let (word, bitmap) = (&self.words[2 * index], &self.words[2 * index + 1]);
        let mut looks = 0u32;
        loop {
            let before = self.changes.load(Ordering::Acquire);
            let entry = Entry {
                word: word.load(Ordering::Acquire),
                bitmap: bitmap.load(Ordering::Acquire),
            };
            if before.is_multiple_of(2) && self.changes.load(Ordering::Relaxed) == before {
                return entry;
            }
            looks += 1;
            // The writer may be preempted between its two stores, so yield at times.
            if looks.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// Sets an entry. The caller holds the map's lock. A reader that sees one of the new words also
    /// sees an odd counter, or the next even one.
    fn set(&self, index: usize, entry: Entry) {
        if !self.extended {
            let old = self.words[index].swap(entry.word, Ordering::AcqRel);
            match (is_partial(old), is_partial(entry.word)) {
                (false, true) => self.partial.fetch_add(1, Ordering::Relaxed),
                (true, false) => self.partial.fetch_sub(1, Ordering::Relaxed),
                _ => 0,
            };
            return;
        }
        let before = self.changes.load(Ordering::Relaxed);
        self.changes.store(before.wrapping_add(1), Ordering::Relaxed);
        self.words[2 * index].store(entry.word, Ordering::Release);
        self.words[2 * index + 1].store(entry.bitmap, Ordering::Release);
        self.changes.store(before.wrapping_add(2), Ordering::Release);
    }

    /// Returns the contents in the file's byte order. A partial entry is unallocated in the file.
    fn bytes(&self) -> Vec<u8> {
        let word = |word: &AtomicU64| match word.load(Ordering::Acquire) {
            word if !self.extended && is_partial(word) => 0,
            word => word,
        };
        self.words.iter().flat_map(|w| word(w).to_be_bytes()).collect()
    }

    /// Returns an entry as a write-back puts it into the file.
    fn in_file(&self, entry: Entry) -> Entry {
        if !self.extended && is_partial(entry.word) { Entry::default() } else { entry }
    }

    fn has_partial(&self) -> bool {
        self.partial.load(Ordering::Relaxed) > 0
    }

    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.words.len() >> usize::from(self.extended)
    }
}

#[derive(Debug)]
enum Slot {
    Ready(Arc<Slice>),
    /// One task reads the slice from the file; the tasks of these wakers wait for it.
    Loading(Vec<Waker>),
}

#[derive(Debug, Default)]
struct CacheState {
    map: HashMap<u64, Slot>,
    /// Second-chance replacement: the order in which slices are examined.
    clock: VecDeque<u64>,
    dirty: Vec<Arc<Slice>>,
    evictions: u64,
}

/// The L2 slices of one image, shared by all reactors.
#[derive(Debug)]
pub struct L2SliceCache {
    state: Mutex<CacheState>,
    /// Maximum number of cached slices. Dirty slices may exceed it.
    limit: AtomicUsize,
    /// Records changed entries, under the lock of the map.
    journal: Arc<Journal>,
}

/// Copy of a slice, to be written to the file.
pub struct SliceCopy {
    pub slice: Arc<Slice>,
    pub bytes: Vec<u8>,
}

/// Result of a search in the map.
pub enum SliceLookup {
    InMemory,
    /// The caller must load it, and call [`L2SliceCache::loaded`] or [`L2SliceCache::gave_up`].
    MustLoad,
}

impl L2SliceCache {
    pub fn new(limit: usize, journal: Arc<Journal>) -> Self {
        let limit = AtomicUsize::new(limit.max(FEWEST));
        L2SliceCache { state: Mutex::default(), limit, journal }
    }

    /// Returns the maximum number of cached slices.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets the limit. Evicts clean slices above it at once.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit.max(FEWEST), Ordering::Relaxed);
        let mut state = self.state();
        // Twice around the clock, because used slices have a second chance.
        for _ in 0..2 * state.clock.len() / AT_ONCE + 1 {
            state.evict(self.limit());
        }
    }

    fn state(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the slice, if it is cached.
    pub fn ready(&self, number: u64) -> Option<Arc<Slice>> {
        match self.state().map.get(&number) {
            Some(Slot::Ready(slice)) => Some(slice.clone()),
            _ => None,
        }
    }

    /// Finds a slice, or makes the caller responsible for loading it. Waits while another task
    /// loads it.
    pub async fn find(&self, number: u64) -> SliceLookup {
        poll_fn(|cx| {
            let mut state = self.state();
            match state.map.get_mut(&number) {
                Some(Slot::Ready(_)) => Poll::Ready(SliceLookup::InMemory),
                Some(Slot::Loading(waiting)) => {
                    waiting.push(cx.waker().clone());
                    Poll::Pending
                }
                None => {
                    state.map.insert(number, Slot::Loading(Vec::new()));
                    Poll::Ready(SliceLookup::MustLoad)
                }
            }
        })
        .await
    }

    /// Inserts the slice that the caller had to load, and wakes the waiters.
    pub fn loaded(&self, slice: Slice) {
        let mut state = self.state();
        let number = slice.number;
        if let Some(Slot::Loading(waiting)) = state.map.insert(number, Slot::Ready(Arc::new(slice)))
        {
            waiting.into_iter().for_each(Waker::wake);
        }
        // Evict before this slice is added to the clock: the task that loaded the slice must find
        // it, even if all other slices are dirty.
        state.evict(self.limit());
        state.clock.push_back(number);
    }

    /// Inserts a slice that was read ahead. `seen`: what [`L2SliceCache::evictions`] returned
    /// before the read. If a slice was evicted since, it may have been this slice after a change.
    /// Then the stale copy is dropped.
    pub fn read_along(&self, slice: Slice, seen: u64) {
        let mut state = self.state();
        let number = slice.number;
        if state.evictions == seen
            && state.map.len() < self.limit()
            && !state.map.contains_key(&number)
        {
            state.map.insert(number, Slot::Ready(Arc::new(slice)));
            state.clock.push_back(number);
        }
    }

    /// Number of evictions so far.
    pub fn evictions(&self) -> u64 {
        self.state().evictions
    }

    /// Reports a failed load: wakes the waiters, and each of them tries to load the slice itself.
    pub fn gave_up(&self, number: u64) {
        let mut state = self.state();
        if let Some(Slot::Loading(_)) = state.map.get(&number)
            && let Some(Slot::Loading(waiting)) = state.map.remove(&number)
        {
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Changes an entry and marks the slice dirty; returns the old entry. None: the slice is not
    /// cached.
    pub fn update(
        &self,
        number: u64,
        index: usize,
        change: impl Fn(Entry) -> Entry,
    ) -> Option<(Entry, Entry)> {
        let mut seen = None;
        self.update_run(number, index..index + 1, |_, old| {
            let new = change(old);
            seen = Some((old, new));
            new
        });
        seen
    }

    /// Changes entries of one slice; `change` gets the index in `run`, from 0. Returns false if the
    /// slice is not cached.
    pub fn update_run(
        &self,
        number: u64,
        run: Range<usize>,
        mut change: impl FnMut(u64, Entry) -> Entry,
    ) -> bool {
        let mut state = self.state();
        let Some(Slot::Ready(slice)) = state.map.get(&number) else { return false };
        let slice = slice.clone();
        let mut changed = false;
        for (at, index) in run.enumerate() {
            let old = slice.get(index);
            let new = change(at as u64, old);
            if new != old {
                // A request that sees the entry is answered without a record of its own, so the
                // record comes first.
                self.record(&slice, index, new);
                slice.set(index, new);
                changed = true;
                if slice.in_file(old) != slice.in_file(new) {
                    slice.unwritten.store(true, Ordering::Relaxed);
                }
            }
        }
        if changed && !slice.dirty.swap(true, Ordering::AcqRel) {
            state.dirty.push(slice);
        }
        true
    }

    #[inline]
    fn record(&self, slice: &Slice, index: usize, entry: Entry) {
        self.journal.record(record_of(slice, index, entry));
    }

    /// Number of dirty slices.
    pub fn dirty(&self) -> usize {
        self.state().dirty.len()
    }

    /// Returns whether the file lacks changes of a slice, apart from partial entries. The caller
    /// excludes a write-back in progress.
    pub fn is_unwritten(&self, number: u64) -> bool {
        match self.state().map.get(&number) {
            Some(Slot::Ready(slice)) => slice.unwritten.load(Ordering::Relaxed),
            _ => false,
        }
    }

    /// Copies all dirty slices. The caller returns the copies with [`L2SliceCache::written`].
    pub fn take_changes(&self) -> Vec<SliceCopy> {
        let mut state = self.state();
        let taken = std::mem::take(&mut state.dirty);
        let copy = |slice: Arc<Slice>| {
            slice.writing.store(true, Ordering::Release);
            slice.unwritten.store(false, Ordering::Relaxed);
            slice.dirty.store(slice.has_partial(), Ordering::Release);
            if slice.has_partial() {
                self.record_partial(&slice);
                state.dirty.push(slice.clone());
            }
            SliceCopy { bytes: slice.bytes(), slice }
        };
        taken.into_iter().map(copy).collect()
    }

    /// Records the partial entries again: they are not in the copy, and the records of before are
    /// dropped after the write-back.
    fn record_partial(&self, slice: &Slice) {
        for index in 0..slice.entries() {
            let entry = slice.get(index);
            if is_partial(entry.word) {
                self.journal.repeat(record_of(slice, index, entry));
            }
        }
    }

    /// Takes the copies back; if the write failed, their slices are dirty again.
    pub fn written(&self, copies: &[SliceCopy], ok: bool) {
        let mut state = self.state();
        for SliceCopy { slice, .. } in copies {
            slice.writing.store(false, Ordering::Release);
            if ok {
                continue;
            }
            slice.unwritten.store(true, Ordering::Relaxed);
            if !slice.dirty.swap(true, Ordering::AcqRel) {
                state.dirty.push(slice.clone());
            }
        }
        state.evict(self.limit());
    }

    /// Number of cached slices.
    pub fn len(&self) -> usize {
        self.state().map.len()
    }
}

impl CacheState {
    /// Evicts clean slices that were not used for a while; examines a bounded number.
    fn evict(&mut self, limit: usize) {
        for _ in 0..AT_ONCE {
            if self.map.len() <= limit {
                return;
            }
            let Some(number) = self.clock.pop_front() else { return };
            let Some(Slot::Ready(slice)) = self.map.get(&number) else { continue };
            let busy = slice.dirty.load(Ordering::Acquire) || slice.writing.load(Ordering::Acquire);
            if busy || slice.used.swap(false, Ordering::Relaxed) {
                self.clock.push_back(number);
                continue;
            }
            slice.retired.store(true, Ordering::Release);
            self.evictions += 1;
            self.map.remove(&number);
        }
    }
}

#[inline]
fn record_of(slice: &Slice, index: usize, entry: Entry) -> Record {
    let cluster = slice.number * slice.entries() as u64 + index as u64;
    Record { key: Key::Cluster(cluster), value: [entry.word, entry.bitmap] }
}

/// One reactor's direct-mapped cache of slices: a lookup takes no lock.
pub struct LocalSlices {
    lines: RefCell<Vec<Option<Arc<Slice>>>>,
    /// Number of lookups that found their slice in memory.
    hits: Cell<u64>,
    /// The line after those that were tidied last.
    tidied: Cell<usize>,
}

impl LocalSlices {
    /// Creates the cache. `slices`: number of slices of the image; `limit`: maximum number of
    /// cached slices.
    pub fn new(slices: u64, limit: usize) -> Self {
        let lines = slices.clamp(1, limit as u64).next_power_of_two() as usize;
        LocalSlices {
            lines: RefCell::new(vec![None; lines]),
            hits: Cell::new(0),
            tidied: Cell::new(0),
        }
    }

    /// Returns the number of lookups that found their slice in memory.
    pub fn hits(&self) -> u64 {
        self.hits.get()
    }

    /// Calls `f` with the slice, if it is cached.
    #[inline]
    pub fn with<T>(
        &self,
        tables: &L2SliceCache,
        number: u64,
        f: impl FnOnce(&Slice) -> T,
    ) -> Option<T> {
        let mut lines = self.lines.borrow_mut();
        let at = number as usize & (lines.len() - 1);
        if let Some(slice) = &lines[at]
            && slice.number == number
            && !slice.retired.load(Ordering::Acquire)
        {
            // Store only a changed value, which is once for each round of the clock. If every
            // lookup stored it, reactors would contend for the cache line.
            if !slice.used.load(Ordering::Relaxed) {
                slice.used.store(true, Ordering::Relaxed);
            }
            self.hits.set(self.hits.get() + 1);
            return Some(f(slice));
        }
        let slice = tables.ready(number)?;
        self.hits.set(self.hits.get() + 1);
        slice.used.store(true, Ordering::Relaxed);
        let result = f(&slice);
        lines[at] = Some(slice);
        Some(result)
    }

    /// Drops slices that were evicted from the map. Looks through a part of the cache, and the next
    /// calls through the others: each load calls this, and evicts about one slice.
    pub fn tidy(&self) {
        let mut lines = self.lines.borrow_mut();
        let first = self.tidied.get() % lines.len();
        let end = (first + TIDIED).min(lines.len());
        self.tidied.set(end);
        for line in &mut lines[first..end] {
            if line.as_ref().is_some_and(|slice| slice.retired.load(Ordering::Acquire)) {
                *line = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::qcow2::encoding::entry::{COMPRESSED, COPIED, Cluster, EntryFormat, L2Entry};

    /// Only memory has such an entry. The file's says that the cluster is unallocated.
    #[test]
    fn a_slice_with_a_partial_cluster_stays_in_memory() {
        let format =
            EntryFormat { cluster_bits: 16, version: 3, extended_l2: false, data_file: false };
        let cache = L2SliceCache::new(FEWEST, Journal::new(Default::default(), None));
        let load = |number| cache.loaded(Slice::new(number, [0; 4].into_iter(), false));
        let pass = |from: u64| (from..from + 8 * FEWEST as u64).for_each(load);
        let set = |cluster| {
            let (word, bitmap) = L2Entry { cluster, copied: true }.encode(format);
            cache.update(0, 1, |_| Entry { word, bitmap }).unwrap();
            cache.written(&cache.take_changes(), true);
        };
        load(0);
        set(Cluster::Partial { host: 1 << 16, parts: 1 });
        pass(1);
        assert!(cache.ready(0).is_some(), "the file has an older entry");
        set(Cluster::Standard { host: 1 << 16 });
        // It was dirty until it was complete, and is written now.
        cache.written(&cache.take_changes(), true);
        pass(1000);
        assert!(cache.ready(0).is_none(), "the file has the entry");
    }

    /// A write to a compressed cluster makes all its subclusters allocated; a discard makes them
    /// zeroes. Half of either change would be an unallocated cluster, which exposes the backing
    /// file. The test sees so many changes of one entry that an unsynchronized reader would see
    /// half a change. If the two threads rarely run at once, it sees fewer changes in more reads.
    #[test]
    fn both_words_of_an_extended_entry_change_together() {
        const CHANGES: u32 = 200_000;
        const READS: u32 = 10_000_000;
        let before = Entry { word: COMPRESSED | 0x1234, bitmap: 0 };
        let written = Entry { word: COPIED | 0x50000, bitmap: 0xffff_ffff };
        let discarded = Entry { word: 0, bitmap: 0xffff_ffff << 32 };
        for after in [written, discarded] {
            let slice = Slice::new(0, [before.word, before.bitmap].into_iter(), true);
            let done = AtomicBool::new(false);
            let found = std::thread::scope(|threads| {
                threads.spawn(|| {
                    for change in 0.. {
                        if done.load(Ordering::Relaxed) {
                            return;
                        }
                        slice.set(0, if change % 2 == 0 { after } else { before });
                        // The pauses vary, so that readers come at all moments and also succeed.
                        (0..change % 7).for_each(|_| std::hint::spin_loop());
                    }
                });
                let (mut last, mut changes) = (before, 0);
                let mut reads = (0..READS).map(|_| slice.get(0)).take_while(|now| {
                    changes += u32::from(std::mem::replace(&mut last, *now) != *now);
                    changes < CHANGES
                });
                let found = reads.find(|now| *now != before && *now != after);
                done.store(true, Ordering::Relaxed);
                found
            });
            assert_eq!(found, None, "half of a change to {after:x?}");
        }
    }
}
