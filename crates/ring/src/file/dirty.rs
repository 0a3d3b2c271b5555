//! Carries out [`crate::policy::dirty`]: reads the kernel's counters, and says how long a
//! page-cache write waits.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::policy::Counters;
use crate::policy::dirty::{DirtyPacing, DirtyPages};

/// Pages that a file writes before it looks at the clock.
const UNCOUNTED: u64 = 64;
const PAGE: usize = 4096;

/// The kernel's limits are those of the machine, so all files share them.
static PACING: DirtyPacing = DirtyPacing::new();
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The page-cache writes of a file on one reactor.
pub(crate) struct CachedWrites {
    /// Pages since the file last looked at the clock.
    pages: Cell<u64>,
    counters: Rc<Counters>,
}

impl CachedWrites {
    pub fn new(counters: Rc<Counters>) -> Self {
        CachedWrites { pages: Cell::new(0), counters }
    }

    /// Returns how long a write of `len` bytes must wait before it begins.
    #[inline]
    pub fn wait(&self, len: usize) -> Option<Duration> {
        let pages = len.div_ceil(PAGE) as u64;
        let total = self.pages.get() + pages;
        if total < UNCOUNTED && !PACING.is_active() {
            self.pages.set(total);
            return None;
        }
        self.pages.set(0);
        self.look(pages, total)
    }

    #[cold]
    fn look(&self, pages: u64, total: u64) -> Option<Duration> {
        let now = START.elapsed().as_nanos() as u64;
        if PACING.is_due(now, total) {
            let counters = std::fs::read_to_string("/proc/vmstat").ok();
            PACING.sample(now, counters.and_then(|text| parse(&text)));
        }
        let wait = Duration::from_nanos(PACING.wait(now, pages));
        if wait.is_zero() {
            return None;
        }
        self.counters.count(|figures| figures.paced += 1);
        Some(wait)
    }
}

/// Parses /proc/vmstat.
fn parse(text: &str) -> Option<DirtyPages> {
    let (mut dirty, mut writeback, mut written) = (None, None, None);
    let (mut limit, mut background) = (None, None);
    for (name, value) in text.lines().filter_map(|line| line.split_once(' ')) {
        let field = match name {
            "nr_dirty" => &mut dirty,
            "nr_writeback" => &mut writeback,
            "nr_written" => &mut written,
            "nr_dirty_threshold" => &mut limit,
            "nr_dirty_background_threshold" => &mut background,
            _ => continue,
        };
        *field = value.parse::<u64>().ok();
    }
    Some(DirtyPages {
        dirty: dirty? + writeback?,
        written: written?,
        limit: limit?,
        background: background?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_read() {
        let pages = parse(&std::fs::read_to_string("/proc/vmstat").unwrap()).unwrap();
        assert!(pages.limit > 0 && pages.background <= pages.limit, "{pages:?}");
        let text = "nr_dirty 5\nnr_writeback 2\nnr_writeback_temp 9\nnr_dirtied 7\nnr_written 11\n\
                    nr_dirty_threshold 100\nnr_dirty_background_threshold 50\n";
        let wanted = DirtyPages { dirty: 7, written: 11, limit: 100, background: 50 };
        assert_eq!(parse(text), Some(wanted));
        assert_eq!(parse(&text.replace("nr_written", "other")), None);
    }
}
