//! Counts references of clusters in bounded memory; unreferenced clusters take none.
//!
//! In: references, one after the other. Out: the count of each cluster. Counts are kept in pages.
//! If they would exceed the limit, the pages of the highest clusters are dropped and the window
//! ends before them: the caller makes another pass for the rest. One pass is enough for any image
//! that was not crafted to need more. Invariant: inside the window every reference is counted.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Number of clusters that a page covers.
pub const PAGE: u64 = 4096;
/// A page with more entries than this becomes an array.
const FEW: usize = 512;
/// Approximate memory of a page without its entries, in bytes.
const PAGE_BYTES: usize = 96;
/// Approximate memory of a count that does not fit its cluster's byte, in bytes.
const MANY_BYTES: usize = 48;

/// Bits of a cluster's byte: its count (or a value that says that `many` has the count), and flags.
const COUNT: u8 = 0x1f;
const EXCLUSIVE: u8 = 0x20;
const OVERLAP: u8 = 0x40;
const STORED_ONE: u8 = 0x80;

/// What was found about a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub references: u64,
    /// Whether the cluster holds metadata that are written in place.
    pub exclusive: bool,
    /// Whether the cluster is exclusive, although something else references it too.
    pub overlap: bool,
    /// Whether the stored refcount is 1.
    pub stored_one: bool,
}

enum Page {
    /// Clusters with references, ascending: index of the cluster in the page, and its byte.
    Few(Vec<(u16, u8)>),
    Array(Box<[u8; PAGE as usize]>),
}

impl Page {
    fn get(&self, at: u16) -> u8 {
        match self {
            Page::Few(entries) => {
                entries.binary_search_by_key(&at, |e| e.0).map_or(0, |i| entries[i].1)
            }
            Page::Array(array) => array[usize::from(at)],
        }
    }

    /// Sets the byte of the cluster with index `at`; returns the bytes by which the page grew.
    fn set(&mut self, at: u16, value: u8) -> usize {
        let entries = match self {
            Page::Array(array) => {
                array[usize::from(at)] = value;
                return 0;
            }
            Page::Few(entries) => entries,
        };
        let before = entries.capacity();
        match entries.binary_search_by_key(&at, |e| e.0) {
            Ok(i) => entries[i].1 = value,
            Err(i) => entries.insert(i, (at, value)),
        }
        let after = entries.capacity();
        if entries.len() <= FEW {
            return (after - before) * size_of::<(u16, u8)>();
        }
        let mut array = Box::new([0; PAGE as usize]);
        entries.iter().for_each(|&(at, value)| array[usize::from(at)] = value);
        *self = Page::Array(array);
        PAGE as usize - before * size_of::<(u16, u8)>()
    }
}

/// Counted references of the clusters in a window.
pub struct Counts {
    window: Range<u64>,
    limit: usize,
    used: usize,
    pages: Vec<(u64, Page)>,
    /// Maps a page number to its index in `pages`.
    index: HashMap<u64, u32>,
    /// The page that was used last. It is cached because references come in runs.
    last: Cell<(u64, u32)>,
    many: BTreeMap<u64, u64>,
}

impl Counts {
    /// Creates counts for the clusters in `window`, with about `limit` bytes of memory. If the
    /// memory does not suffice, the window shrinks while references are added.
    pub fn new(window: Range<u64>, limit: usize) -> Self {
        Counts {
            window,
            limit,
            used: 0,
            pages: Vec::new(),
            index: HashMap::new(),
            last: Cell::new((u64::MAX, 0)),
            many: BTreeMap::new(),
        }
    }

    /// Returns the clusters that are counted.
    pub fn window(&self) -> Range<u64> {
        self.window.clone()
    }

    fn find(&self, page: u64) -> Option<u32> {
        let (last, slot) = self.last.get();
        if last == page {
            return Some(slot);
        }
        let slot = *self.index.get(&page)?;
        self.last.set((page, slot));
        Some(slot)
    }

    fn byte(&self, cluster: u64) -> u8 {
        self.find(cluster / PAGE)
            .map_or(0, |slot| self.pages[slot as usize].1.get((cluster % PAGE) as u16))
    }

    /// Returns the references that were counted for a cluster. The cluster must be in the window of
    /// clusters that this pass counts.
    #[inline]
    pub fn get(&self, cluster: u64) -> Count {
        let byte = self.byte(cluster);
        let references = match byte & COUNT {
            COUNT => self.many.get(&cluster).copied().unwrap_or(0),
            few => few.into(),
        };
        let flag = |flag| byte & flag != 0;
        Count {
            references,
            exclusive: flag(EXCLUSIVE),
            overlap: flag(OVERLAP),
            stored_one: flag(STORED_ONE),
        }
    }

    /// Counts `times` references. `exclusive`: by metadata that are written in place, which nothing
    /// else may share. Returns the count so far, and true if this is the first overlap of the
    /// cluster.
    #[inline]
    pub fn add(&mut self, cluster: u64, times: u64, exclusive: bool) -> (u64, bool) {
        if !self.window.contains(&cluster) {
            return (0, false);
        }
        // Fast path: nearly all references are runs of consecutive clusters.
        if !exclusive
            && let Some(byte) = self.last_array_byte(cluster)
            && *byte & EXCLUSIVE == 0
            && u64::from(*byte & COUNT) + times < u64::from(COUNT)
        {
            *byte += times as u8;
            return (u64::from(*byte & COUNT), false);
        }
        self.add_slow(cluster, times, exclusive)
    }

    /// Returns the byte of a cluster on the page used last, if that page is an array.
    #[inline]
    fn last_array_byte(&mut self, cluster: u64) -> Option<&mut u8> {
        let (last, slot) = self.last.get();
        if last != cluster / PAGE {
            return None;
        }
        match &mut self.pages[slot as usize].1 {
            Page::Array(array) => Some(&mut array[(cluster % PAGE) as usize]),
            Page::Few(_) => None,
        }
    }

    fn add_slow(&mut self, cluster: u64, times: u64, exclusive: bool) -> (u64, bool) {
        let old = self.get(cluster);
        let clash = old.references > 0 && (exclusive || old.exclusive);
        let new = Count {
            references: old.references.saturating_add(times),
            exclusive: old.exclusive || exclusive,
            overlap: old.overlap || clash,
            ..old
        };
        self.put(cluster, new);
        (new.references, clash && !old.overlap)
    }

    /// Fast path: records that the stored refcount of a cluster with one reference is 1. Returns
    /// false, and records nothing, if the cluster has another number of references or is not on the
    /// page that was used last.
    #[inline]
    pub fn agree_on_one(&mut self, cluster: u64) -> bool {
        match self.last_array_byte(cluster) {
            Some(byte) if *byte & COUNT == 1 => {
                *byte |= STORED_ONE;
                true
            }
            _ => false,
        }
    }

    /// Records whether the stored refcount of a counted cluster is 1.
    pub fn set_stored_one(&mut self, cluster: u64, stored_one: bool) {
        let old = self.get(cluster);
        if old.stored_one != stored_one {
            self.put(cluster, Count { stored_one, ..old });
        }
    }

    fn put(&mut self, cluster: u64, count: Count) {
        let mut byte = count.references.min(u64::from(COUNT)) as u8;
        if byte == COUNT && self.many.insert(cluster, count.references).is_none() {
            self.used += MANY_BYTES;
        }
        for (set, flag) in
            [(count.exclusive, EXCLUSIVE), (count.overlap, OVERLAP), (count.stored_one, STORED_ONE)]
        {
            byte |= if set { flag } else { 0 };
        }
        let page = cluster / PAGE;
        let slot = self.find(page).unwrap_or_else(|| {
            let slot = self.pages.len() as u32;
            self.pages.push((page, Page::Few(Vec::new())));
            self.index.insert(page, slot);
            self.used += PAGE_BYTES;
            slot
        });
        self.last.set((page, slot));
        self.used += self.pages[slot as usize].1.set((cluster % PAGE) as u16, byte);
        if self.used > self.limit && self.pages.len() > 1 {
            self.shrink();
        }
    }

    /// Ends the window earlier: drops half of the pages, those of the highest clusters.
    fn shrink(&mut self) {
        let keep = self.pages.len() / 2;
        self.end_before(self.page_numbers()[keep] * PAGE);
    }

    /// Returns the numbers of the pages, ascending. Clusters of other pages have no counts.
    pub fn page_numbers(&self) -> Vec<u64> {
        let mut numbers: Vec<u64> = self.pages.iter().map(|p| p.0).collect();
        numbers.sort_unstable();
        numbers
    }

    fn end_before(&mut self, end: u64) {
        self.window.end = self.window.end.min(end);
        let mut pages = std::mem::take(&mut self.pages);
        pages.retain(|page| page.0 * PAGE < self.window.end);
        self.many.split_off(&self.window.end);
        self.index = pages.iter().zip(0..).map(|(page, slot)| (page.0, slot)).collect();
        let bytes = |page: &Page| match page {
            Page::Few(entries) => entries.capacity() * size_of::<(u16, u8)>(),
            Page::Array(_) => PAGE as usize,
        };
        self.used = self.many.len() * MANY_BYTES
            + pages.iter().map(|p| PAGE_BYTES + bytes(&p.1)).sum::<usize>();
        self.last.set((u64::MAX, 0));
        self.pages = pages;
    }

    /// Takes the larger of two counts of each cluster. The window of `other` begins at the same
    /// cluster.
    pub fn merge_larger(&mut self, other: Counts) {
        self.end_before(other.window.end);
        for cluster in other.clusters() {
            let (mine, theirs) = (self.get(cluster), other.get(cluster));
            if !self.window.contains(&cluster) {
                break;
            }
            let merged = Count {
                references: mine.references.max(theirs.references),
                exclusive: mine.exclusive || theirs.exclusive,
                overlap: mine.overlap || theirs.overlap,
                stored_one: false,
            };
            self.put(cluster, merged);
        }
    }

    /// Returns whether a cluster of a range has counts. The range must lie in one page.
    pub fn has_any(&self, cluster: u64, clusters: u64) -> bool {
        let Some(slot) = self.find(cluster / PAGE) else { return false };
        let first = (cluster % PAGE) as usize;
        let end = first + clusters as usize;
        match &self.pages[slot as usize].1 {
            Page::Few(entries) => {
                let at = entries.partition_point(|e| usize::from(e.0) < first);
                entries.get(at).is_some_and(|e| usize::from(e.0) < end)
            }
            Page::Array(array) => array[first..end].iter().any(|&byte| byte != 0),
        }
    }

    /// Returns the clusters with references, ascending.
    pub fn clusters(&self) -> impl Iterator<Item = u64> + use<'_> {
        let mut slots: Vec<usize> = (0..self.pages.len()).collect();
        slots.sort_unstable_by_key(|&slot| self.pages[slot].0);
        slots.into_iter().flat_map(move |slot| {
            let (number, page) = &self.pages[slot];
            (0..PAGE as u16)
                .filter(|&at| page.get(at) & COUNT != 0)
                .map(move |at| number * PAGE + u64::from(at))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(references: u64) -> Count {
        Count { references, ..Count::default() }
    }

    #[test]
    fn references_of_any_number_add_up() {
        let mut counts = Counts::new(0..u64::MAX, 1 << 20);
        for cluster in [5, 1 << 47, 5, 5] {
            counts.add(cluster, 1, false);
        }
        counts.add(7, 30, false);
        counts.add(7, 1, false);
        counts.add(8, u64::MAX, false);
        counts.add(8, 1, false);
        assert_eq!(
            (counts.get(5), counts.get(1 << 47), counts.get(6)),
            (count(3), count(1), count(0))
        );
        assert_eq!((counts.get(7), counts.get(8)), (count(31), count(u64::MAX)));
        assert_eq!(counts.clusters().collect::<Vec<_>>(), [5, 7, 8, 1 << 47]);
    }

    #[test]
    fn ranges_without_counts_are_found() {
        let mut counts = Counts::new(0..u64::MAX, 1 << 20);
        let clusters = [PAGE + 63, PAGE + 64, 3 * PAGE - 1];
        clusters.iter().for_each(|&cluster| _ = counts.add(cluster, 1, false));
        let with = |counts: &Counts| {
            let ranges = (0..4 * PAGE).step_by(64);
            ranges.filter(|&at| counts.has_any(at, 64)).collect::<Vec<_>>()
        };
        assert_eq!(with(&counts), [PAGE, PAGE + 64, 3 * PAGE - 64]);
        // The second page becomes an array.
        (PAGE + 128..PAGE + 128 + 1024).for_each(|at| _ = counts.add(at, 1, false));
        let filled = (0..18).map(|n| PAGE + 64 * n).chain([3 * PAGE - 64]);
        assert_eq!(with(&counts), filled.collect::<Vec<_>>());
        assert!(!counts.has_any(PAGE + 1152, PAGE - 1152) && counts.has_any(PAGE, PAGE));
    }

    #[test]
    fn a_full_page_counts_as_one_with_few_entries() {
        let mut counts = Counts::new(0..u64::MAX, 1 << 20);
        (0..PAGE).rev().step_by(2).for_each(|cluster| assert!(!counts.add(cluster, 2, false).1));
        assert_eq!(counts.clusters().count() as u64, PAGE / 2);
        assert!((0..PAGE).all(|cluster| counts.get(cluster) == count(cluster % 2 * 2)));
    }

    #[test]
    fn the_fast_path_agrees_with_the_slow_path() {
        let mut counts = Counts::new(0..u64::MAX, 1 << 20);
        (0..PAGE).for_each(|cluster| assert_eq!(counts.add(cluster, 1, cluster == 7), (1, false)));
        assert!(counts.agree_on_one(3) && counts.get(3).stored_one && !counts.get(4).stored_one);
        assert_eq!(
            (2..40).map(|_| counts.add(4, 1, false).0).collect::<Vec<_>>(),
            (2..40).collect::<Vec<_>>()
        );
        assert!(!counts.agree_on_one(4) && !counts.agree_on_one(PAGE));
        assert_eq!((counts.add(7, 1, false), counts.get(3).references), ((2, true), 1));
    }

    #[test]
    fn a_cluster_shared_with_metadata_is_an_overlap() {
        let mut counts = Counts::new(0..u64::MAX, 1 << 20);
        let mut clashes = |cluster, exclusive| counts.add(cluster, 1, exclusive).1;
        assert!(!clashes(1, true) && clashes(1, false) && !clashes(1, false), "told once");
        assert!(!clashes(2, false) && clashes(2, true));
        assert!(!clashes(3, false) && !clashes(3, false));
        assert!(counts.get(1).overlap && counts.get(2).overlap && !counts.get(3).overlap);
    }

    #[test]
    fn small_windows_together_count_the_same_as_one_large_window() {
        let references: Vec<u64> = (0..2000u64).map(|n| n * n * 77 % 1_000_003).collect();
        let mut whole = Counts::new(0..u64::MAX, 1 << 30);
        for &cluster in &references {
            whole.add(cluster, 40, false);
        }
        let (mut start, mut found, mut passes) = (0, Vec::new(), 0);
        while start != u64::MAX {
            let mut counts = Counts::new(start..u64::MAX, 20_000);
            for &cluster in &references {
                counts.add(cluster, 40, false);
            }
            assert!(counts.used <= 20_200, "{}", counts.used);
            found.extend(counts.clusters().map(|cluster| (cluster, counts.get(cluster))));
            start = counts.window().end;
            passes += 1;
        }
        assert!(passes > 3);
        assert_eq!(
            found,
            whole.clusters().map(|cluster| (cluster, whole.get(cluster))).collect::<Vec<_>>()
        );
    }

    #[test]
    fn merging_takes_the_larger_of_two_counts() {
        let mut a = Counts::new(0..u64::MAX, 1 << 20);
        let mut b = Counts::new(0..10_000, 1 << 20);
        for (counts, cluster, times, exclusive) in [(&mut a, 1, 2, false), (&mut b, 1, 1, false)] {
            counts.add(cluster, times, exclusive);
            counts.add(2, 1, true);
        }
        a.add(20_000, 1, false);
        b.add(3, 5, false);
        a.merge_larger(b);
        assert_eq!((a.get(1), a.get(3), a.window()), (count(2), count(5), 0..10_000));
        assert_eq!(a.get(2), Count { exclusive: true, ..count(1) });
        assert_eq!(a.clusters().last(), Some(3));
    }
}
