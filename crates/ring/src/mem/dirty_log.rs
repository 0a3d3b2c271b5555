//! A log of changed guest memory: one bit for each page, in memory that a front end shares.
//!
//! In: guest addresses that this process, or the kernel for it, has written. Out: bits in the
//! front end's bitmap, which it sends to another host with the pages (vhost-user, "Migration").
//!
//! What must hold
//! - A bit is set after the write that it stands for. The front end clears a bit before it reads
//!   the page, so a bit that is set too early may be cleared before the write.
//! - A bit is set by an atomic operation, even if it is set already: the operation also orders the
//!   write before it. The front end and other threads change the same bytes.
//! - The front end may truncate the log's file. Then it loses its log (see `fault`), nothing else.
//! - The front end chooses the length of its log. This process allocates only the pages with the
//!   bits of memory that it may write ([`DirtyLog::populate`]).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::mem::mapper::Mapper;
use crate::mem::memory::{MemoryError, Region};

/// Size in bytes of the pages that a log has bits for (VHOST_LOG_PAGE).
pub const LOG_PAGE: u64 = 4096;

/// A mapped log.
#[derive(Debug)]
pub struct DirtyLog {
    region: Arc<Region>,
    /// Number of pages that the log has bits for.
    pages: u64,
}

impl DirtyLog {
    /// Maps a log of `len` bytes at `offset` of a front end's file.
    pub fn map(mapper: &Mapper, fd: impl AsFd, offset: u64, len: u64) -> Result<Self, MemoryError> {
        let region = mapper.map(fd, offset, 0, 0, len)?;
        Ok(DirtyLog { region: Arc::new(region), pages: len.saturating_mul(8) })
    }

    /// Allocates the log's pages with the bits of `len` bytes at guest address `addr`, so that no
    /// bit is lost because the host has no memory for it. Ignores what the log has no bits for.
    /// Must not be called on a reactor, because allocating pages takes time.
    pub fn populate(&self, addr: u64, len: u64) -> Result<(), MemoryError> {
        const COVERED: u64 = LOG_PAGE * 8;
        let Some(last) = len.checked_sub(1) else { return Ok(()) };
        let first = addr / COVERED;
        let end = (addr.saturating_add(last) / COVERED + 1).min(self.region.size());
        let Some(len) = end.checked_sub(first).filter(|len| *len > 0) else { return Ok(()) };
        let populated = self.region.populate_part(first, len);
        populated.map_err(|source| MemoryError::Map { len, source })
    }

    /// Returns whether the log has a bit for each page of `len` bytes at guest address `addr`.
    pub fn covers(&self, addr: u64, len: u64) -> bool {
        covers(self.pages, addr, len)
    }

    /// Sets the bits of the pages of `len` bytes at guest address `addr`, which were written.
    /// Returns false if the log has no bit for one of them.
    #[inline]
    pub fn mark(&self, addr: u64, len: u64) -> bool {
        let Some(last) = len.checked_sub(1) else { return true };
        let (first, last) = (addr / LOG_PAGE, addr.saturating_add(last) / LOG_PAGE);
        let end = last.saturating_add(1).min(self.pages);
        let mut page = first;
        while page < end {
            let byte = page / 8;
            let next = (byte * 8 + 8).min(end);
            // The bits from `page` on, as many as `next` leaves in this byte.
            let bits = (0xffu16 << (page % 8) & (0xffu16 >> (byte * 8 + 8 - next))) as u8;
            if let Some(at) = self.region.piece(byte, 1) {
                // SAFETY: `piece` returned an address inside the mapping, which the region keeps.
                // The front end changes the byte atomically, too.
                unsafe { AtomicU8::from_ptr(at) }.fetch_or(bits, Ordering::SeqCst);
            }
            page = next;
        }
        last < self.pages
    }
}

/// Returns whether a log of `pages` bits has a bit for each page of `len` bytes at `addr`.
fn covers(pages: u64, addr: u64, len: u64) -> bool {
    len == 0 || addr.checked_add(len - 1).is_some_and(|last| last / LOG_PAGE < pages)
}

/// Returns whether a log of `log_len` bytes has a bit for each page of `len` bytes at `addr`.
pub fn log_covers(log_len: u64, addr: u64, len: u64) -> bool {
    covers(log_len.saturating_mul(8), addr, len)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn log(len: u64) -> (DirtyLog, OwnedFd) {
        let fd = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len + 64).unwrap();
        (DirtyLog::map(&Mapper::new(false), &fd, 64, len).unwrap(), fd)
    }

    /// Returns the numbers of the marked pages.
    fn marked(fd: &OwnedFd) -> Vec<u64> {
        let mut bytes = [0; 4096];
        let got = rustix::io::pread(fd, &mut bytes, 64).unwrap();
        (0..got as u64 * 8)
            .filter(|page| bytes[*page as usize / 8] >> (page % 8) & 1 == 1)
            .collect()
    }

    #[test]
    fn each_touched_page_is_marked_and_no_other() {
        for (addr, len, pages) in [
            (0, 1, 0..1),
            (4095, 2, 0..2),
            (4096, 4096, 1..2),
            (8 * 4096, 8 * 4096, 8..16),
            (3 * 4096 + 17, 20 * 4096, 3..24),
            (5 * 4096, 0, 0..0),
            (63 * 4096, 4096, 63..64),
        ] {
            let (log, fd) = log(8);
            assert!(log.mark(addr, len), "{addr}+{len}");
            assert_eq!(marked(&fd), pages.collect::<Vec<_>>(), "{addr}+{len}");
        }
    }

    #[test]
    fn marks_in_the_same_byte_stay() {
        let (log, fd) = log(1);
        for page in [0, 5, 2, 7] {
            assert!(log.mark(page * 4096, 1));
        }
        assert_eq!(marked(&fd), [0, 2, 5, 7]);
    }

    #[test]
    fn a_log_has_memory_only_for_populated_addresses() {
        const LEN: u64 = 64 << 20;
        let (log, fd) = log(LEN);
        let allocated = || rustix::fs::fstat(&fd).unwrap().st_blocks as u64 * 512;
        let end = LEN * 8 * LOG_PAGE;
        assert_eq!(allocated(), 0);
        for (addr, len) in [(0, 0), (end, 1), (u64::MAX, 1), (u64::MAX - 5, 5000)] {
            log.populate(addr, len).unwrap();
            assert_eq!(allocated(), 0, "{addr:#x}+{len:#x}");
        }
        // The bits of 256 MiB are in 8 KiB. The host may allocate huge pages.
        for at in [0, end / 2, end - (256 << 20)] {
            let before = allocated();
            log.populate(at, 256 << 20).unwrap();
            let more = allocated() - before;
            assert!((8 << 10..=8 << 20).contains(&more), "{more} bytes at {at:#x}");
            log.populate(at, 256 << 20).unwrap();
            assert_eq!(allocated(), before + more);
        }
        log.populate(0, u64::MAX).unwrap();
        assert!(allocated() >= LEN);
    }

    #[test]
    fn pages_beyond_the_log_are_reported_and_not_marked() {
        let (log, fd) = log(1);
        for (addr, len) in [(8 * 4096, 1), (u64::MAX, 1), (u64::MAX - 5, 5000), (1 << 60, 1 << 63)]
        {
            assert!(!log.mark(addr, len) && !log.covers(addr, len), "{addr:#x}+{len:#x}");
        }
        assert_eq!(marked(&fd), Vec::<u64>::new());
        assert!(!log.mark(7 * 4096, 4097));
        assert_eq!(marked(&fd), [7]);
        assert!(log.covers(0, 8 * 4096) && !log.covers(0, 8 * 4096 + 1));
        assert!(!log_covers(u64::MAX, u64::MAX, 2) && log_covers(1, 8 * 4096 - 1, 1));
    }

    #[test]
    fn a_log_whose_file_is_truncated_takes_marks_without_effect() {
        let (log, fd) = log(100);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        assert!(log.mark(0, 100 * 8 * 4096));
    }

    #[test]
    fn a_log_beyond_the_end_of_its_file_is_refused() {
        let (_, fd) = log(100);
        for (offset, len) in [(0, 10_000), (100, 100), (u64::MAX - 1, 4), (0, 0)] {
            assert!(
                DirtyLog::map(&Mapper::new(false), &fd, offset, len).is_err(),
                "{offset} {len}"
            );
        }
    }
}
