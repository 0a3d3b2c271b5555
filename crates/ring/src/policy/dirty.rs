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
//! The files that are written share the rate equally, so a file with few writes does not wait for
//! one with many. The policy gives up where it cannot help: if others dirty pages too, slower
//! writes of this process would only make room for theirs.
//!
//! In: the time in nanoseconds, samples of the kernel's counters, and the pages of each write. Out:
//! when to sample, and for how long a write waits. All reactors share one [`DirtyPacing`]; each
//! file has a [`Pace`] on each reactor.
//!
//! What must hold
//! - No write waits while fewer pages are dirty than `begin`.
//! - No write waits longer than [`LONGEST`].
//! - No write waits if more than a quarter of the pages that became dirty are not from writes of
//!   this process.
//! - Writes do not wait for longer than [`IN_VAIN`] if that does not keep the dirty pages below the
//!   ceiling. The next try comes after [`PAUSE`].

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

const MS: u64 = 1_000_000;
/// Longest time between two samples while files are written, in nanoseconds, and the shortest.
const INTERVAL: u64 = 20 * MS;
const SHORTEST_INTERVAL: u64 = MS;
/// Time after which an earlier sample says nothing about the present rates.
const STALE: u64 = 1000 * MS;
/// Time over which the rates are averaged.
const AVERAGED: u64 = 200 * MS;
/// Longest time that a write waits.
pub(crate) const LONGEST: u64 = 100 * MS;
/// Shortest time that a write waits. A shorter one costs more than it helps.
const SHORTEST: u64 = MS / 5;
/// Writes that come late may begin together, as far as their times lie at most this far back.
const BURST: u64 = MS;
/// How far the time of a file's next write may lie ahead. Writes that would have to wait for longer
/// than [`LONGEST`] leave the rest to later ones.
const DEBT: u64 = 1000 * MS;
/// A file shares the rate in each period in which it is written, and in the next one.
const PERIOD: u64 = 50 * MS;
/// Longest time for which writes wait although the dirty pages stay above the ceiling, and the time
/// for which they do not wait then.
const IN_VAIN: u64 = 500 * MS;
const PAUSE: u64 = 1000 * MS;
/// Lowest assumed rate of write-back, in pages a second.
const SLOWEST: f64 = 256.0;
/// Most pages that are written between two samples.
const PAGES: u64 = 4096;

/// The kernel's counters of dirty pages, all in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DirtyPages {
    /// Dirty pages, and those under write-back.
    pub dirty: u64,
    /// Pages that became dirty since the machine's start, and pages written back.
    pub dirtied: u64,
    pub written: u64,
    /// Limit of dirty pages, and the number from which on the kernel writes them back.
    pub limit: u64,
    pub background: u64,
}

impl DirtyPages {
    /// Returns the number of dirty pages from which on the kernel delays writes: half-way between
    /// its two limits.
    fn ceiling(&self) -> u64 {
        self.limit.midpoint(self.background)
    }

    /// Returns the numbers of dirty pages at which writes begin to wait, that the policy aims at,
    /// and at which writes are slowest.
    fn levels(&self) -> (u64, u64, u64) {
        let ceiling = self.ceiling();
        let begin = (ceiling / 20 * 17).max(self.background.midpoint(ceiling)).min(ceiling);
        let room = ceiling - begin;
        (begin, begin + room / 3, begin + room / 5 * 4)
    }
}

/// The latest sample, and averages in pages a second.
#[derive(Debug, Default)]
struct Estimate {
    at: Option<u64>,
    last: DirtyPages,
    rates: Option<Rates>,
    /// Since when writes wait in vain.
    in_vain: Option<u64>,
    /// Until when writes do not wait.
    pause: u64,
}

#[derive(Clone, Copy, Debug)]
struct Rates {
    written: f64,
    dirtied: f64,
    /// Pages that this process wrote. Those that were dirty before count, too.
    own: f64,
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
    /// Average rate of write-back at the last sample, in pages a second; 0: unknown.
    written_rate: AtomicU64,
    /// The files that were written in the present period and in the one before.
    active: [AtomicU64; 2],
    /// Number of the present period.
    period: AtomicU64,
    estimate: Mutex<Estimate>,
}

/// The page-cache writes of one file on one reactor.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// When the next write may begin.
    next: Cell<u64>,
    /// The last period, plus one, in which the file was counted.
    counted: Cell<u64>,
}

impl DirtyPacing {
    pub const fn new() -> Self {
        DirtyPacing {
            due: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            apart: AtomicU64::new(PAGES),
            spacing: AtomicU64::new(0),
            written_rate: AtomicU64::new(0),
            active: [const { AtomicU64::new(0) }; 2],
            period: AtomicU64::new(0),
            estimate: Mutex::new(Estimate::new()),
        }
    }

    /// Returns whether writes wait at present.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.spacing.load(Relaxed) != 0
    }

    /// Returns the average rate of write-back at the last sample, in pages a second. 0: unknown.
    pub fn written_rate(&self) -> u64 {
        self.written_rate.load(Relaxed)
    }

    /// Counts `pages` more written pages. Returns the pages since the last sample if the caller
    /// must call [`DirtyPacing::sample`] with them. It returns them to one caller only.
    pub fn is_due(&self, now: u64, pages: u64) -> Option<u64> {
        let written = self.pages.fetch_add(pages, Relaxed) + pages;
        let due = self.due.load(Relaxed);
        let has_many = written >= self.apart.load(Relaxed)
            && now.saturating_add(INTERVAL - SHORTEST_INTERVAL) >= due;
        if now < due && !has_many {
            return None;
        }
        self.due.compare_exchange(due, now + INTERVAL, Relaxed, Relaxed).ok()?;
        Some(self.pages.swap(0, Relaxed))
    }

    /// Takes the kernel's counters at `now`, and the pages that this process wrote since the last
    /// sample. `None`: they cannot be read, so no write waits.
    pub fn sample(&self, now: u64, pages: Option<DirtyPages>, own: u64) {
        let Some(pages) = pages else {
            self.spacing.store(0, Relaxed);
            self.written_rate.store(0, Relaxed);
            return;
        };
        let mut estimate = self.estimate.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = estimate.take(now, pages, own);
        self.written_rate.store(rate.unwrap_or(0.0) as u64, Relaxed);
        let (begin, aim, end) = pages.levels();
        self.apart.store((begin / 256).clamp(16, PAGES), Relaxed);
        let spacing = match rate {
            Some(rate) if pages.dirty > begin && end > aim => {
                let above = end.saturating_sub(pages.dirty) as f64 / (end - aim) as f64;
                1e9 / (rate.max(SLOWEST) * above.clamp(0.1, 4.0))
            }
            _ => 0.0,
        };
        let spacing = if estimate.helps(now, &pages, spacing > 0.0) { spacing } else { 0.0 };
        self.spacing.store(spacing as u64, Relaxed);
    }

    /// Returns for how many nanoseconds a write of `pages` pages waits.
    pub fn wait(&self, pace: &Pace, now: u64, pages: u64) -> u64 {
        let spacing = self.spacing.load(Relaxed);
        if spacing == 0 {
            return 0;
        }
        let cost = spacing.saturating_mul(pages).saturating_mul(self.files(pace, now));
        let begin = pace.next.get().max(now.saturating_sub(BURST));
        pace.next.set(begin.saturating_add(cost).min(now + DEBT));
        let wait = begin.saturating_sub(now);
        if wait < SHORTEST { 0 } else { wait.min(LONGEST) }
    }

    /// Counts the file in the present period. Returns the number of files that share the rate.
    fn files(&self, pace: &Pace, now: u64) -> u64 {
        let period = now / PERIOD;
        let old = self.period.load(Relaxed);
        if period > old && self.period.compare_exchange(old, period, Relaxed, Relaxed).is_ok() {
            self.active[period as usize % 2].store(0, Relaxed);
            if period > old + 1 {
                self.active[(period as usize + 1) % 2].store(0, Relaxed);
            }
        }
        if pace.counted.replace(period + 1) != period + 1 {
            self.active[period as usize % 2].fetch_add(1, Relaxed);
        }
        self.active.iter().map(|files| files.load(Relaxed)).max().unwrap_or_default().max(1)
    }
}

impl Estimate {
    const fn new() -> Self {
        let last = DirtyPages { dirty: 0, dirtied: 0, written: 0, limit: 0, background: 0 };
        Estimate { at: None, last, rates: None, in_vain: None, pause: 0 }
    }

    /// Takes a sample. Returns the average rate of write-back, if it is known.
    fn take(&mut self, now: u64, pages: DirtyPages, own: u64) -> Option<f64> {
        let elapsed = self.at.replace(now).map(|at| now.saturating_sub(at));
        let last = std::mem::replace(&mut self.last, pages);
        self.rates = match elapsed {
            Some(elapsed) if (1..STALE).contains(&elapsed) => {
                let per_second = |pages: u64| pages as f64 * 1e9 / elapsed as f64;
                let here = Rates {
                    written: per_second(pages.written.saturating_sub(last.written)),
                    dirtied: per_second(pages.dirtied.saturating_sub(last.dirtied)),
                    own: per_second(own),
                };
                let weight = elapsed as f64 / (elapsed + AVERAGED) as f64;
                Some(self.rates.map_or(here, |rates| rates.towards(&here, weight)))
            }
            Some(0) => self.rates,
            _ => None,
        };
        self.rates.map(|rates| rates.written)
    }

    /// Returns whether it helps to delay writes. `delays`: whether they would wait.
    fn helps(&mut self, now: u64, pages: &DirtyPages, delays: bool) -> bool {
        let is_ours = self.rates.is_some_and(|rates| rates.own * 4.0 >= rates.dirtied * 3.0);
        if !delays || !is_ours || pages.dirty < pages.ceiling() || now < self.pause {
            self.in_vain = None;
            return is_ours && now >= self.pause;
        }
        let since = *self.in_vain.get_or_insert(now);
        if now.saturating_sub(since) < IN_VAIN {
            return true;
        }
        self.pause = now + PAUSE;
        false
    }
}

impl Rates {
    fn towards(&self, other: &Rates, weight: f64) -> Rates {
        let mix = |old: f64, new: f64| old + weight * (new - old);
        Rates {
            written: mix(self.written, other.written),
            dirtied: mix(self.dirtied, other.dirtied),
            own: mix(self.own, other.own),
        }
    }
}

#[cfg(test)]
mod tests;
