//! What was mapped: a table of answers that all reactors of a disk share.
//!
//! In: checked extents. Out: where a range lies, for the price of a lookup. The table is split by
//! regions of the disk, so that reactors rarely wait for one another.
//!
//! What must hold: an entry is in one region. A part that was placed anew stays until it is
//! durable, because the map does not know yet that it moved. The number of other entries is
//! bounded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::map::Place;

/// Size of a region in bytes, at least that of the largest granule.
pub(super) const REGION: u64 = 4 << 20;
const SHARDS: usize = 64;
/// Most entries of a shard, without those that are not durable. All shards: 262144.
const MOST: usize = 4096;
/// Number of entries that a full shard forgets at a time.
const FORGOTTEN: usize = 512;

/// Where the first bytes of a range lie: `At` or `Zero`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) len: u64,
    pub(super) place: Place,
}

#[derive(Clone, Copy)]
struct Entry {
    len: u64,
    place: Place,
    writable: bool,
    /// Placed anew, and not durable yet.
    moved: bool,
}

#[derive(Default)]
struct Shard {
    entries: BTreeMap<u64, Entry>,
    moved: usize,
    /// Where the next eviction begins.
    hand: u64,
}

pub(super) struct Cache {
    shards: Box<[Mutex<Shard>]>,
    /// Number of invalidations.
    invalidations: AtomicU64,
    /// Number of parts that moved to new places.
    moves: AtomicU64,
}

/// The state of the table when Blockyard asked a map.
#[derive(Clone, Copy)]
pub(super) struct Stamp {
    invalidations: u64,
    moves: u64,
}

impl Place {
    /// Returns the place `by` bytes further on.
    pub(super) fn skip(self, by: u64) -> Place {
        match self {
            Place::Zero => Place::Zero,
            Place::At { file, offset } => Place::At { file, offset: offset + by },
            Place::New { file, offset, fill } => {
                Place::New { file, offset: offset + by, fill: fill.skip(by) }
            }
        }
    }
}

impl super::Fill {
    pub(super) fn skip(self, by: u64) -> Self {
        match self {
            super::Fill::Zero => self,
            super::Fill::From { file, offset } => super::Fill::From { file, offset: offset + by },
        }
    }
}

impl Cache {
    pub(super) fn new() -> Self {
        Cache {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            invalidations: AtomicU64::new(0),
            moves: AtomicU64::new(0),
        }
    }

    fn shard(&self, offset: u64) -> MutexGuard<'_, Shard> {
        let at = (offset / REGION) as usize % SHARDS;
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns where the bytes at `offset` lie, for at most `len` bytes.
    #[inline]
    pub(super) fn find(&self, offset: u64, len: u64, write: bool) -> Option<Known> {
        let shard = self.shard(offset);
        let (start, entry) = shard.entries.range(..=offset).next_back()?;
        let inside = offset - start;
        if inside >= entry.len || write && !entry.writable {
            return None;
        }
        Some(Known { len: len.min(entry.len - inside), place: entry.place.skip(inside) })
    }

    pub(super) fn stamp(&self) -> Stamp {
        Stamp {
            invalidations: self.invalidations.load(Ordering::SeqCst),
            moves: self.moves.load(Ordering::SeqCst),
        }
    }

    /// Keeps the answer to a question of `stamp`, as far as nothing has changed since. The
    /// caller holds `held`, in which nothing moves.
    pub(super) fn keep(
        &self,
        mut offset: u64,
        known: Known,
        writable: bool,
        held: &Range<u64>,
        stamp: Stamp,
    ) {
        let (end, mut place) = (offset + known.len, known.place);
        // An answer may be as long as the disk: keep what lies in the regions of the request.
        let end = end.min(held.end.next_multiple_of(REGION));
        while offset < end {
            let region_end = (offset / REGION + 1) * REGION;
            let mut piece_end = end.min(region_end);
            let mut shard = self.shard(offset);
            if self.invalidations.load(Ordering::SeqCst) != stamp.invalidations {
                return;
            }
            if self.moves.load(Ordering::SeqCst) != stamp.moves {
                if offset >= held.end {
                    return;
                }
                piece_end = piece_end.min(held.end);
            }
            let entry = Entry { len: piece_end - offset, place, writable, moved: false };
            shard.insert(offset, entry, false);
            drop(shard);
            place = place.skip(piece_end - offset);
            offset = piece_end;
        }
    }

    /// Notes that a part was written at a new place. The part is in one region.
    pub(super) fn moved(&self, offset: u64, known: Known) {
        let mut shard = self.shard(offset);
        self.moves.fetch_add(1, Ordering::SeqCst);
        let entry = Entry { len: known.len, place: known.place, writable: true, moved: true };
        shard.insert(offset, entry, true);
    }

    /// Notes that the parts of a range that were placed anew are durable.
    pub(super) fn durable(&self, range: &Range<u64>) {
        // The map may have answered with the old places before it heard of this. Until now the
        // entries were safe from such answers.
        self.moves.fetch_add(1, Ordering::SeqCst);
        self.each_shard(range, |shard, range| {
            let mut now_durable = 0;
            for (_, entry) in shard.entries.range_mut(range) {
                now_durable += usize::from(std::mem::take(&mut entry.moved));
            }
            shard.moved -= now_durable;
        });
    }

    /// Forgets a range, except what is not durable yet.
    pub(super) fn forget(&self, range: &Range<u64>) {
        self.invalidations.fetch_add(1, Ordering::SeqCst);
        self.each_shard(range, |shard, range| shard.cut(&range, false));
    }

    /// Forgets a range, and what was placed anew in it: its data may be lost.
    pub(super) fn give_up(&self, range: &Range<u64>) {
        self.invalidations.fetch_add(1, Ordering::SeqCst);
        self.each_shard(range, |shard, range| shard.cut(&range, true));
    }

    fn each_shard(&self, range: &Range<u64>, mut work: impl FnMut(&mut Shard, Range<u64>)) {
        if range.end - range.start > REGION * SHARDS as u64 {
            // All shards: faster than each region of a large disk.
            for shard in &self.shards {
                work(&mut shard.lock().unwrap_or_else(PoisonError::into_inner), range.clone());
            }
            return;
        }
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min((at / REGION + 1) * REGION);
            work(&mut self.shard(at), at..end);
            at = end;
        }
    }

    /// Returns the start of the first part in the range that is not durable, or the range's end.
    pub(super) fn next_moved(&self, range: &Range<u64>) -> u64 {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min((at / REGION + 1) * REGION);
            let shard = self.shard(at);
            let moved = |(start, entry): (&u64, &Entry)| entry.moved.then_some(*start);
            if shard.moved > 0
                && let Some(start) = shard.entries.range(at..end).find_map(moved)
            {
                return start;
            }
            at = end;
        }
        range.end
    }

    /// Returns whether any part of the range was placed anew and is not durable.
    pub(super) fn has_moved(&self, range: &Range<u64>) -> bool {
        let before = {
            let shard = self.shard(range.start);
            let before = shard.entries.range(..range.start).next_back();
            before.is_some_and(|(at, entry)| entry.moved && at + entry.len > range.start)
        };
        before || self.next_moved(range) < range.end
    }

    /// Returns the number of entries.
    pub(super) fn len(&self) -> usize {
        let count = |shard: &Mutex<Shard>| {
            shard.lock().unwrap_or_else(PoisonError::into_inner).entries.len()
        };
        self.shards.iter().map(count).sum()
    }
}

impl Shard {
    /// Removes what overlaps the range, except parts that are not durable, if `all` is false.
    fn cut(&mut self, range: &Range<u64>, all: bool) {
        let first =
            self.entries.range(..=range.start).next_back().map_or(range.start, |(at, _)| *at);
        let overlap: Vec<u64> = self
            .entries
            .range(first..range.end)
            .filter(|(at, entry)| *at + entry.len > range.start && (all || !entry.moved))
            .map(|(at, _)| *at)
            .collect();
        for at in overlap {
            let Some(entry) = self.entries.remove(&at) else { continue };
            self.moved -= usize::from(entry.moved);
            let end = at + entry.len;
            if at < range.start {
                self.put(at, Entry { len: range.start - at, ..entry });
            }
            if end > range.end {
                let place = entry.place.skip(range.end - at);
                self.put(range.end, Entry { len: end - range.end, place, ..entry });
            }
        }
    }

    fn put(&mut self, at: u64, entry: Entry) {
        self.moved += usize::from(entry.moved);
        self.entries.insert(at, entry);
    }

    /// Inserts an entry in place of what it overlaps. Parts that are not durable stay, unless `all`
    /// is true.
    fn insert(&mut self, offset: u64, entry: Entry, all: bool) {
        if self.entries.len() - self.moved >= MOST {
            self.evict();
        }
        let range = offset..offset + entry.len;
        self.cut(&range, all);
        let kept: Vec<Range<u64>> = self
            .entries
            .range(..range.end)
            .rev()
            .map(|(at, kept)| *at..at + kept.len)
            .take_while(|kept| kept.end > range.start)
            .collect();
        let mut at = range.start;
        for gap_end in kept.iter().rev().map(Some).chain([None]) {
            let end = gap_end.map_or(range.end, |kept| kept.start.max(at));
            if at < end {
                let place = entry.place.skip(at - range.start);
                self.put(at, Entry { len: end - at, place, ..entry });
            }
            at = gap_end.map_or(at, |kept| kept.end.max(at));
        }
    }

    fn evict(&mut self) {
        let hand = self.hand;
        let durable = |(at, entry): (&u64, &Entry)| (!entry.moved).then_some(*at);
        let behind = self.entries.range(hand..).filter_map(durable);
        let before = self.entries.range(..hand).filter_map(durable);
        let forgotten: Vec<u64> = behind.chain(before).take(FORGOTTEN).collect();
        self.hand = forgotten.last().map_or(0, |at| at + 1);
        for at in forgotten {
            self.entries.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u64) -> Place {
        Place::At { file: 0, offset }
    }

    fn keep(cache: &Cache, range: Range<u64>, place: Place, stamp: Stamp) {
        let known = Known { len: range.end - range.start, place };
        cache.keep(range.start, known, false, &range, stamp);
    }

    #[test]
    fn an_answer_is_found_until_it_is_forgotten() {
        let cache = Cache::new();
        keep(&cache, 0..REGION * 2, at(100 << 20), cache.stamp());
        let found = cache.find(REGION + 512, 1024, false).unwrap();
        assert_eq!(found, Known { len: 1024, place: at((100 << 20) + REGION + 512) });
        assert_eq!(cache.find(0, 512, true), None, "it is not an answer for a write");
        cache.forget(&(4096..8192));
        assert_eq!(cache.find(0, 8192, false).unwrap().len, 4096);
        assert_eq!(cache.find(4096, 512, false), None);
        assert_eq!(cache.find(8192, 512, false).unwrap().place, at((100 << 20) + 8192));
    }

    #[test]
    fn a_late_answer_hides_neither_an_invalidation_nor_a_move() {
        let cache = Cache::new();
        let stamp = cache.stamp();
        cache.forget(&(0..4096));
        keep(&cache, 0..4096, at(0), stamp);
        assert_eq!(cache.find(0, 512, false), None);
        let stamp = cache.stamp();
        cache.moved(8192, Known { len: 4096, place: at(1 << 20) });
        let known = Known { len: 16384, place: at(0) };
        cache.keep(0, known, false, &(0..4096), stamp);
        assert_eq!(cache.find(0, 512, false).unwrap().place, at(0), "the held range is safe");
        assert_eq!(cache.find(4096, 512, false), None);
        assert_eq!(cache.find(8192, 512, true).unwrap().place, at(1 << 20));
        // The map answered before it heard that the part is durable.
        let stamp = cache.stamp();
        cache.durable(&(8192..12288));
        cache.keep(0, known, false, &(0..4096), stamp);
        assert_eq!(cache.find(8192, 512, true).unwrap().place, at(1 << 20));
    }

    #[test]
    fn what_is_not_durable_is_neither_evicted_nor_forgotten() {
        let cache = Cache::new();
        cache.moved(4096, Known { len: 4096, place: at(7 << 20) });
        cache.forget(&(0..REGION));
        for _ in 0..3 {
            for at_granule in 0..2 * MOST as u64 {
                let offset = at_granule * 512;
                keep(&cache, offset..offset + 512, at(offset), cache.stamp());
            }
        }
        assert_eq!(cache.find(4608, 512, true).unwrap().place, at((7 << 20) + 512));
        assert!(cache.len() <= MOST + 1, "{}", cache.len());
        cache.durable(&(4096..8192));
        cache.forget(&(0..REGION));
        assert_eq!(cache.find(4608, 512, true), None);
        assert_eq!(cache.len(), 0);
    }

    #[test]
    fn an_answer_fills_the_gaps_around_what_is_not_durable() {
        let cache = Cache::new();
        cache.moved(4096, Known { len: 4096, place: at(7 << 20) });
        keep(&cache, 0..16384, at(0), cache.stamp());
        assert_eq!(cache.find(0, 16384, false).unwrap(), Known { len: 4096, place: at(0) });
        assert_eq!(cache.find(4096, 512, false).unwrap().place, at(7 << 20));
        assert_eq!(cache.find(8192, 512, false).unwrap().place, at(8192));
    }
}
