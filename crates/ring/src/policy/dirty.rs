//! Delays page-cache writes before the kernel does.
//!
//! If too many pages of the machine are dirty, the kernel makes each task that writes to the page
//! cache sleep, for 10 to 200 ms at a time (`balance_dirty_pages`). The task holds the file's lock
//! meanwhile. So all writes to the file wait, and so does a reactor that writes by itself.
//!
//! This policy keeps the dirty pages below that level. Near the level each write gets a time at
//! which it may begin. The times are spaced by the rate at which the kernel writes pages back. So
//! the writes have the same rate, and each waits for about a millisecond.
//!
//! ```text
//!   dirty pages   0 ── begin ────── aim ────── end ──── ceiling (the kernel delays from here on)
//!   writes        do not wait │ faster than │ slower than write-back
//! ```
//!
//! In: the time in nanoseconds, samples of the kernel's counters, and the pages of each write. Out:
//! when to sample, and for how long a write waits. All reactors share one state.
//!
//! What must hold
//! - No write waits while fewer pages are dirty than `begin`.
//! - No write waits longer than [`LONGEST`].

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

const MS: u64 = 1_000_000;
/// Longest time between two samples while files are written, in nanoseconds.
const INTERVAL: u64 = 20 * MS;
/// Time after which an earlier sample says nothing about the present rate.
const STALE: u64 = 1000 * MS;
/// Time over which the rate of write-back is averaged.
const AVERAGED: u64 = 200 * MS;
/// Longest time that a write waits.
pub(crate) const LONGEST: u64 = 100 * MS;
/// Shortest time that a write waits. A shorter one costs more than it helps.
const SHORTEST: u64 = MS / 5;
/// Writes that come late may begin together, as far as their times lie at most this far back.
const BURST: u64 = MS;
/// Lowest assumed rate of write-back, in pages a second.
const SLOWEST: f64 = 256.0;
/// Most pages that are written between two samples.
const PAGES: u64 = 4096;

/// The kernel's counters of dirty pages, all in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DirtyPages {
    /// Dirty pages, and those under write-back.
    pub dirty: u64,
    /// Pages written back since the machine's start.
    pub written: u64,
    /// Limit of dirty pages, and the number from which on the kernel writes them back.
    pub limit: u64,
    pub background: u64,
}

impl DirtyPages {
    /// Returns the numbers of dirty pages at which writes begin to wait, that the policy aims at,
    /// and at which writes are slowest. The kernel delays writes from half-way between its two
    /// limits on.
    fn levels(&self) -> (u64, u64, u64) {
        let ceiling = self.limit.midpoint(self.background);
        let begin = (ceiling / 20 * 17).max(self.background.midpoint(ceiling)).min(ceiling);
        let room = ceiling - begin;
        (begin, begin + room / 3, begin + room / 5 * 4)
    }
}

/// The latest sample, and the average rate of write-back in pages a second.
#[derive(Debug, Default)]
struct Estimate {
    at: Option<u64>,
    written: u64,
    rate: Option<f64>,
}

/// The state of all page-cache writes of the process.
#[derive(Debug)]
pub(crate) struct DirtyPacing {
    /// When the next sample is due, and the pages written since the last one.
    due: AtomicU64,
    pages: AtomicU64,
    /// Most pages between two samples.
    apart: AtomicU64,
    /// Time between the beginnings of two writes, for each page; 0: writes do not wait.
    spacing: AtomicU64,
    /// When the next write may begin.
    next: AtomicU64,
    estimate: Mutex<Estimate>,
}

impl DirtyPacing {
    pub const fn new() -> Self {
        DirtyPacing {
            due: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            apart: AtomicU64::new(PAGES),
            spacing: AtomicU64::new(0),
            next: AtomicU64::new(0),
            estimate: Mutex::new(Estimate { at: None, written: 0, rate: None }),
        }
    }

    /// Returns whether writes wait at present.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.spacing.load(Relaxed) != 0
    }

    /// Counts `pages` more written pages. Returns whether the caller must call
    /// [`DirtyPacing::sample`]. It returns true to one caller only.
    pub fn is_due(&self, now: u64, pages: u64) -> bool {
        let written = self.pages.fetch_add(pages, Relaxed) + pages;
        let due = self.due.load(Relaxed);
        if now < due && written < self.apart.load(Relaxed) {
            return false;
        }
        let mine = self.due.compare_exchange(due, now + INTERVAL, Relaxed, Relaxed).is_ok();
        if mine {
            self.pages.store(0, Relaxed);
        }
        mine
    }

    /// Takes the kernel's counters at `now`. `None`: they cannot be read, so no write waits.
    pub fn sample(&self, now: u64, pages: Option<DirtyPages>) {
        let Some(pages) = pages else {
            self.spacing.store(0, Relaxed);
            return;
        };
        let mut estimate = self.estimate.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = estimate.take(now, pages.written);
        drop(estimate);
        let (begin, aim, end) = pages.levels();
        self.apart.store((begin / 256).clamp(16, PAGES), Relaxed);
        let spacing = match rate {
            Some(rate) if pages.dirty > begin && end > aim => {
                let above = end.saturating_sub(pages.dirty) as f64 / (end - aim) as f64;
                1e9 / (rate.max(SLOWEST) * above.clamp(0.1, 4.0))
            }
            _ => 0.0,
        };
        self.spacing.store(spacing as u64, Relaxed);
    }

    /// Returns for how many nanoseconds a write of `pages` pages waits.
    pub fn wait(&self, now: u64, pages: u64) -> u64 {
        let spacing = self.spacing.load(Relaxed);
        if spacing == 0 {
            return 0;
        }
        let cost = spacing.saturating_mul(pages);
        let begin = |next: u64| next.max(now.saturating_sub(BURST));
        let after = |next: u64| Some(begin(next).saturating_add(cost).min(now + LONGEST));
        let next = self.next.fetch_update(Relaxed, Relaxed, after).unwrap_or_default();
        let wait = begin(next).saturating_sub(now);
        if wait < SHORTEST { 0 } else { wait.min(LONGEST) }
    }
}

impl Estimate {
    /// Takes the number of pages written back so far. Returns the average rate, if it is known.
    fn take(&mut self, now: u64, written: u64) -> Option<f64> {
        let last = self.at.replace(now).map(|at| now.saturating_sub(at));
        let pages = written.saturating_sub(std::mem::replace(&mut self.written, written));
        self.rate = match last {
            Some(elapsed) if (1..STALE).contains(&elapsed) => {
                let here = pages as f64 * 1e9 / elapsed as f64;
                let weight = elapsed as f64 / (elapsed + AVERAGED) as f64;
                Some(self.rate.map_or(here, |rate| rate + weight * (here - rate)))
            }
            Some(0) => self.rate,
            _ => None,
        };
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that writes `rate` pages a second back while more than `background` are dirty.
    struct Machine {
        pages: DirtyPages,
        rate: f64,
        now: u64,
        owed: f64,
    }

    impl Machine {
        fn new(rate: f64) -> Self {
            let pages = DirtyPages { dirty: 0, written: 0, limit: 1_000_000, background: 500_000 };
            Machine { pages, rate, now: 0, owed: 0.0 }
        }

        fn pass(&mut self, ns: u64) {
            self.now += ns;
            self.owed += self.rate * ns as f64 / 1e9;
            if self.pages.dirty > self.pages.background {
                let done = (self.owed as u64).min(self.pages.dirty);
                self.pages.dirty -= done;
                self.pages.written += done;
                self.owed -= done as f64;
            } else {
                self.owed = 0.0;
            }
        }
    }

    /// Writes pages for `seconds`, `depth` at a time, each of which takes a microsecond to copy.
    /// Returns the pages and the waits of the last quarter.
    fn write(pacing: &DirtyPacing, machine: &mut Machine, seconds: u64) -> (u64, Vec<u64>) {
        const DEPTH: usize = 32;
        let (from, mut ready) = (machine.now, vec![machine.now; DEPTH]);
        let end = from + seconds * 1000 * MS;
        let (mut written, mut waits) = (0, Vec::new());
        while machine.now < end {
            let slot = (0..DEPTH).min_by_key(|slot| ready[*slot]).unwrap();
            machine.pass(ready[slot].saturating_sub(machine.now) + 1000);
            machine.pages.dirty += 1;
            if pacing.is_due(machine.now, 1) {
                pacing.sample(machine.now, Some(machine.pages));
            }
            let wait = pacing.wait(machine.now, 1);
            ready[slot] = machine.now + wait;
            if machine.now > end - (end - from) / 4 {
                written += 1;
                waits.push(wait);
            }
        }
        (written, waits)
    }

    #[test]
    fn writes_stay_below_the_level_at_which_the_kernel_delays_them() {
        for rate in [2e3, 25e3, 200e3] {
            let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(rate));
            // The slower the device, the longer until the policy has reached its aim.
            let seconds = (400e3 / rate).max(8.0) as u64;
            let (written, mut waits) = write(&pacing, &mut machine, seconds);
            let dirty = machine.pages.dirty;
            assert!((637_500..740_000).contains(&dirty), "{rate}: {dirty} dirty pages");
            // The machine is used: writes have the rate of write-back.
            let share = written as f64 / (seconds as f64 / 4.0) / rate;
            assert!((0.9..1.1).contains(&share), "{rate}: {share}");
            waits.sort_unstable();
            let (p99, fair) = (waits[waits.len() / 100 * 99], 32e9 / rate);
            assert!((p99 as f64) < 1.5 * fair + 1e6, "{rate}: {p99} ns of {fair}");
        }
    }

    #[test]
    fn writes_do_not_wait_below_the_level() {
        let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(2e6));
        let (_, waits) = write(&pacing, &mut machine, 2);
        assert!(!pacing.is_active() && waits.iter().all(|wait| *wait == 0));
    }

    #[test]
    fn a_device_that_stops_costs_each_write_a_bounded_time() {
        let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
        write(&pacing, &mut machine, 4);
        machine.rate = 0.0;
        let (_, waits) = write(&pacing, &mut machine, 4);
        assert!(waits.iter().all(|wait| *wait <= LONGEST));
        // It works again.
        machine.rate = 25e3;
        let (written, _) = write(&pacing, &mut machine, 4);
        assert!(written > 20_000, "{written}");
    }

    #[test]
    fn without_counters_no_write_waits() {
        let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
        write(&pacing, &mut machine, 4);
        assert!(pacing.is_active());
        pacing.sample(machine.now, None);
        assert_eq!((pacing.is_active(), pacing.wait(machine.now, 1)), (false, 0));
    }

    #[test]
    fn one_caller_samples() {
        let pacing = DirtyPacing::new();
        assert!(pacing.is_due(5, 1) && !pacing.is_due(5, 1) && !pacing.is_due(INTERVAL, 1));
        assert!(pacing.is_due(5 + INTERVAL, 1));
        assert!(pacing.is_due(6 + INTERVAL, PAGES), "many pages");
    }

    /// All limits give levels in order, also those that an administrator mixes up.
    #[test]
    fn levels_are_in_order() {
        for (limit, background) in [(1000, 500), (1000, 999), (1000, 0), (0, 0), (3, 1)] {
            let pages = DirtyPages { limit, background, ..DirtyPages::default() };
            let (begin, aim, end) = pages.levels();
            assert!(begin <= aim && aim <= end && end <= limit.max(background), "{pages:?}");
            assert!(begin >= background.min(limit), "{pages:?}");
        }
    }
}
