//! The L2 tables in memory, in slices: what guest clusters map to, looked up without a lock.
//!
//! ```text
//!   guest offset ──► slice number ──► this reactor's own lines ──► the shared map ──► the file (flush.rs, load)
//! ```
//! A slice is 4 KiB of an L2 table (or a whole table, where clusters are smaller). Reactors share
//! it: its words are atomic, are read by anybody at any time, and written under the lock of the map
//! only.
//!
//! What must hold: a slice that was changed stays in the map until its change is in the file; an
//! entry is shown to readers only when its data have been written. Words are kept in the machine's
//! order, and turned round on their way to the file.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Bytes of a slice, where a table has as many.
pub const SLICE_BYTES: u64 = 4096;

/// Slices kept at least, and looked at when some have to go.
const FEWEST: usize = 8;
const AT_ONCE: usize = 64;

/// An L2 entry and, with extended L2 entries, its subcluster bitmap (else 0).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    pub word: u64,
    pub bitmap: u64,
}

#[derive(Debug)]
pub struct Slice {
    pub number: u64,
    words: Box<[AtomicU64]>,
    extended: bool,
    /// With extended entries: of changes begun and ended; odd while one is being made.
    changes: AtomicU64,
    /// It differs from the file, and is in the list of those that do.
    dirty: AtomicBool,
    /// A copy of it is on its way to the file.
    writing: AtomicBool,
    /// It is in the map no more: who finds it so looks there again.
    retired: AtomicBool,
    used: AtomicBool,
}

impl Slice {
    pub fn new(number: u64, words: impl Iterator<Item = u64>, extended: bool) -> Self {
        let words = words.map(AtomicU64::new).collect();
        let no = || AtomicBool::new(false);
        let (changes, used) = (AtomicU64::new(0), AtomicBool::new(true));
        Slice { number, words, extended, changes, dirty: no(), writing: no(), retired: no(), used }
    }

    /// The `index`-th entry. With extended entries the two words belong together: read while they
    /// change, they are read again.
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
            // Whoever is between the two stores may not be running.
            if looks.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// Under the map's lock only. Whoever sees one of the new words sees an odd number of changes
    /// too, or the next one.
    fn set(&self, index: usize, entry: Entry) {
        if !self.extended {
            self.words[index].store(entry.word, Ordering::Release);
            return;
        }
        let before = self.changes.load(Ordering::Relaxed);
        self.changes.store(before.wrapping_add(1), Ordering::Relaxed);
        self.words[2 * index].store(entry.word, Ordering::Release);
        self.words[2 * index + 1].store(entry.bitmap, Ordering::Release);
        self.changes.store(before.wrapping_add(2), Ordering::Release);
    }

    /// As in the file.
    fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|w| w.load(Ordering::Acquire).to_be_bytes()).collect()
    }

    pub fn entries(&self) -> usize {
        self.words.len() >> usize::from(self.extended)
    }
}

#[derive(Debug)]
enum Slot {
    Ready(Arc<Slice>),
    /// Somebody reads it; these wait.
    Loading(Vec<Waker>),
}

#[derive(Debug, Default)]
struct CacheState {
    map: HashMap<u64, Slot>,
    /// Second chance: the order in which slices are looked at when one has to go.
    clock: VecDeque<u64>,
    dirty: Vec<Arc<Slice>>,
    evictions: u64,
}

/// The slices of one image, shared by all reactors.
#[derive(Debug)]
pub struct L2SliceCache {
    state: Mutex<CacheState>,
    /// Slices kept, at most; more only while more have changes to be written.
    limit: AtomicUsize,
}

/// A slice as it is to be in the file.
pub struct SliceCopy {
    pub slice: Arc<Slice>,
    pub bytes: Vec<u8>,
}

/// What a search of the map found.
pub enum SliceLookup {
    InMemory,
    /// The caller is to load it, and to end by [`L2SliceCache::loaded`] or [`L2SliceCache::gave_up`].
    MustLoad,
}

impl L2SliceCache {
    pub fn new(limit: usize) -> Self {
        L2SliceCache { state: Mutex::default(), limit: AtomicUsize::new(limit.max(FEWEST)) }
    }

    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// From now on; what is too much goes at once, as far as it has no changes.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit.max(FEWEST), Ordering::Relaxed);
        let mut state = self.state();
        // Twice around the clock: those that were used have a second chance.
        for _ in 0..2 * state.clock.len() / AT_ONCE + 1 {
            state.make_room(self.limit());
        }
    }

    fn state(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slice, if it is here.
    pub fn ready(&self, number: u64) -> Option<Arc<Slice>> {
        match self.state().map.get(&number) {
            Some(Slot::Ready(slice)) => Some(slice.clone()),
            _ => None,
        }
    }

    /// The slice, or the duty to load it; waits while another loads it.
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

    /// The slice that the caller was to load.
    pub fn loaded(&self, slice: Slice) {
        let mut state = self.state();
        let number = slice.number;
        if let Some(Slot::Loading(waiting)) = state.map.insert(number, Slot::Ready(Arc::new(slice)))
        {
            waiting.into_iter().for_each(Waker::wake);
        }
        // Not itself: whoever loaded it is to find it, also where all others have changes and stay.
        state.make_room(self.limit());
        state.clock.push_back(number);
    }

    /// A slice that was read along. `seen`: what [`L2SliceCache::evictions`] said before it was read; if
    /// one has gone since, it may have been this one, with changes that what was read has not.
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

    pub fn evictions(&self) -> u64 {
        self.state().evictions
    }

    /// It could not be loaded: whoever waits tries for itself.
    pub fn gave_up(&self, number: u64) {
        let mut state = self.state();
        if let Some(Slot::Loading(_)) = state.map.get(&number)
            && let Some(Slot::Loading(waiting)) = state.map.remove(&number)
        {
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Changes an entry and notes that the file is to follow; gives what was there. None: the slice
    /// is not here.
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

    /// Changes entries of one slice; `change` gets the number of each in `run`, from 0 on. False:
    /// the slice is not in memory.
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
                slice.set(index, new);
                changed = true;
            }
        }
        if changed && !slice.dirty.swap(true, Ordering::AcqRel) {
            state.dirty.push(slice);
        }
        true
    }

    /// How many slices have changes that the file has not.
    pub fn dirty(&self) -> usize {
        self.state().dirty.len()
    }

    /// Takes copies of all that have changed. Each is to come back by [`L2SliceCache::written`].
    pub fn take_changes(&self) -> Vec<SliceCopy> {
        let mut state = self.state();
        let taken = std::mem::take(&mut state.dirty);
        let copy = |slice: Arc<Slice>| {
            slice.writing.store(true, Ordering::Release);
            slice.dirty.store(false, Ordering::Release);
            SliceCopy { bytes: slice.bytes(), slice }
        };
        taken.into_iter().map(copy).collect()
    }

    /// Copies are in the file; or are not, and their slices count as changed again.
    pub fn written(&self, copies: &[SliceCopy], ok: bool) {
        let mut state = self.state();
        for SliceCopy { slice, .. } in copies {
            slice.writing.store(false, Ordering::Release);
            if !ok && !slice.dirty.swap(true, Ordering::AcqRel) {
                state.dirty.push(slice.clone());
            }
        }
        state.make_room(self.limit());
    }

    /// Slices in memory.
    pub fn len(&self) -> usize {
        self.state().map.len()
    }
}

impl CacheState {
    /// Lets slices go that were not used for a while; bounded, and those with changes stay.
    fn make_room(&mut self, limit: usize) {
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

/// One reactor's way to the slices it used last: a lookup takes no lock.
pub struct LocalSlices {
    lines: RefCell<Vec<Option<Arc<Slice>>>>,
}

impl LocalSlices {
    /// `slices`: as many as the image has, or may keep.
    pub fn new(slices: u64, limit: usize) -> Self {
        let lines = slices.clamp(1, limit as u64).next_power_of_two() as usize;
        LocalSlices { lines: RefCell::new(vec![None; lines]) }
    }

    /// Gives the slice to `f`, if it is in memory.
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
            // Written once a turn of the clock, not at each use: reactors do not fight over it.
            if !slice.used.load(Ordering::Relaxed) {
                slice.used.store(true, Ordering::Relaxed);
            }
            return Some(f(slice));
        }
        let slice = tables.ready(number)?;
        slice.used.store(true, Ordering::Relaxed);
        let result = f(&slice);
        lines[at] = Some(slice);
        Some(result)
    }

    /// Lets go of slices that are in the map no more.
    pub fn tidy(&self) {
        for line in self.lines.borrow_mut().iter_mut() {
            if line.as_ref().is_some_and(|slice| slice.retired.load(Ordering::Acquire)) {
                *line = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    use crate::qcow2::entry::{COMPRESSED, COPIED};

    /// A compressed cluster that is written to becomes one with data in all subclusters; discarded,
    /// one of zeroes. Half of either would be a cluster without anything, which shows what lies
    /// below. One entry goes to and fro for so long that a reader who is not careful sees half a
    /// change, also where the two threads seldom run at once.
    #[test]
    fn the_words_of_an_extended_entry_change_together() {
        const LONG: Duration = Duration::from_millis(1200);
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
                        // The pauses differ, so that readers come at all moments, and come through.
                        (0..change % 7).for_each(|_| std::hint::spin_loop());
                    }
                });
                let (begun, mut found) = (Instant::now(), None);
                while found.is_none() && begun.elapsed() < LONG {
                    found =
                        (0..1000).map(|_| slice.get(0)).find(|now| *now != before && *now != after);
                }
                done.store(true, Ordering::Relaxed);
                found
            });
            assert_eq!(found, None, "half of a change to {after:x?}");
        }
    }
}
