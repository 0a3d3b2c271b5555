//! Carries out [`crate::policy::dirty`]: reads the kernel's counters, and says how long a
//! page-cache write waits.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rustix::fs::FileType;

use crate::policy::dirty::{DirtyPacing, DirtyPages, Pace};
use crate::policy::{Counters, Latest};

/// Pages that a file writes before it looks at the clock.
const UNCOUNTED: u64 = 64;
const PAGE: usize = 4096;
/// Bytes of /proc/vmstat that are read. The counters are in the first half of them.
const TEXT: usize = 4 << 10;
/// File systems that never write back (tmpfs, ramfs, hugetlbfs), or over a network or another
/// program at a rate of their own (NFS, 9p, FUSE). Their numbers are in `linux/magic.h`.
const UNPACED: [u32; 6] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6, 0x6969, 0x0102_1997, 0x6573_5546];

/// The kernel's limits are those of the machine, so all files share them.
static PACING: DirtyPacing = DirtyPacing::new();
static START: LazyLock<Instant> = LazyLock::new(Instant::now);
static COUNTERS: LazyLock<Option<File>> = LazyLock::new(|| File::open("/proc/vmstat").ok());

/// The page-cache writes of a file on one reactor.
pub(crate) struct CachedWrites {
    /// Pages since the file last looked at the clock.
    pages: Cell<u64>,
    pace: Pace,
    counters: Rc<Counters>,
}

impl CachedWrites {
    /// Returns `None` if the kernel does not write the file's pages back to a device.
    pub fn new(fd: BorrowedFd<'_>, counters: Rc<Counters>) -> Option<Self> {
        let is_device =
            FileType::from_raw_mode(rustix::fs::fstat(fd).ok()?.st_mode) == FileType::BlockDevice;
        let file_system = rustix::fs::fstatfs(fd).ok()?.f_type as u32;
        // The file system of a block device's node says nothing about the device.
        (is_device || !UNPACED.contains(&file_system)).then(|| CachedWrites {
            pages: Cell::new(0),
            pace: Pace::default(),
            counters,
        })
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
        if let Some(own) = PACING.is_due(now, total) {
            PACING.sample(now, counters(), own);
        }
        let wait = Duration::from_nanos(PACING.wait(&self.pace, now, pages));
        if wait.is_zero() {
            return None;
        }
        self.counters.count(|figures| {
            figures.paced += 1;
            let at = *START + Duration::from_nanos(now);
            figures.last_paced = Some(Latest { at, value: wait });
        });
        Some(wait)
    }
}

/// Returns the rate at which the kernel writes pages back, as the last sample shows it, in bytes a
/// second. 0: no page-cache write has needed it yet.
pub fn write_back_rate() -> u64 {
    PACING.written_rate().saturating_mul(PAGE as u64)
}

/// Reads the kernel's counters.
fn counters() -> Option<DirtyPages> {
    let mut text = [0; TEXT];
    let len = COUNTERS.as_ref()?.read_at(&mut text, 0).ok()?;
    parse(std::str::from_utf8(&text[..len]).ok()?)
}

/// Parses /proc/vmstat.
fn parse(text: &str) -> Option<DirtyPages> {
    let (mut dirty, mut writeback, mut dirtied) = (None, None, None);
    let (mut written, mut limit, mut background) = (None, None, None);
    for (name, value) in text.lines().filter_map(|line| line.split_once(' ')) {
        let field = match name {
            "nr_dirty" => &mut dirty,
            "nr_writeback" => &mut writeback,
            "nr_dirtied" => &mut dirtied,
            "nr_written" => &mut written,
            "nr_dirty_threshold" => &mut limit,
            "nr_dirty_background_threshold" => &mut background,
            _ => continue,
        };
        *field = value.parse::<u64>().ok();
    }
    Some(DirtyPages {
        dirty: dirty? + writeback?,
        dirtied: dirtied?,
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
        let pages = counters().unwrap();
        assert!(pages.limit > 0 && pages.background <= pages.limit, "{pages:?}");
        let text = "nr_dirty 5\nnr_writeback 2\nnr_writeback_temp 9\nnr_dirtied 7\nnr_written 11\n\
                    nr_dirty_threshold 100\nnr_dirty_background_threshold 50\n";
        let wanted = DirtyPages { dirty: 7, dirtied: 7, written: 11, limit: 100, background: 50 };
        assert_eq!(parse(text), Some(wanted));
        assert_eq!(parse(&text.replace("nr_written", "other")), None);
    }
}
