//! Maps memory files of front ends: checks which files are acceptable, and how much is mapped.
//!
//! In: descriptors that a front end sent. Out: regions.
//!
//! What must hold
//! - No other process provides the pages of an accepted file. It could withhold one, and a page
//!   fault would stop the reactor and every disk on it.
//! - Mappings are limited ([`crate::mem::quota`]).
//!
//! Accepted are memory file systems (tmpfs and with it memfd, hugetlbfs, ramfs), and file systems
//! on a disk of this host (ext4, XFS, Btrfs, F2FS). Only root mounts the latter, so a page fault
//! there waits for a disk, as it would for swap. User Mode Linux has its memory in such a file if
//! /dev/shm is not a tmpfs.
//!
//! Not prevented: a fault in a range of a memory file that a process punches
//! (`fallocate(FALLOC_FL_PUNCH_HOLE)`) waits until the kernel is done. A process of low priority
//! makes that last. No seal forbids it and allows a shared mapping for writing.
//!
//! Refused are FUSE, network file systems (NFS, CIFS, 9p), overlayfs (unprivileged users can use
//! FUSE as its upper layer), device files, and everything unknown.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::SealFlags;

use crate::mem::fault::MemoryAlarm;
use crate::mem::memory::{MemoryError, Region};
use crate::mem::memory_file::MemoryFile;
use crate::mem::quota::{Account, Quota};

/// Maps one front end's memory, within the limits on the memory that front ends may map.
#[derive(Clone)]
pub struct Mapper {
    account: Arc<Account>,
    any_file: bool,
    alarm: Option<Arc<MemoryAlarm>>,
}

impl Mapper {
    /// Creates a mapper. `any_file`: accept files even if another process can withhold their pages.
    pub fn new(any_file: bool) -> Mapper {
        Mapper { account: Quota::of_process().account(), any_file, alarm: None }
    }

    /// Returns a mapper of the same front end. Raises `alarm` if memory that it has mapped is lost.
    pub fn with_alarm(&self, alarm: Arc<MemoryAlarm>) -> Mapper {
        Mapper { alarm: Some(alarm), ..self.clone() }
    }

    /// Maps `len` bytes of `fd`; see [`Region::map`].
    pub fn map(
        &self,
        fd: impl AsFd,
        offset: u64,
        guest: u64,
        user: u64,
        len: u64,
    ) -> Result<Region, MemoryError> {
        self.accept(fd.as_fd(), len)?;
        let alarm = self.alarm.as_ref();
        Region::map_charged(fd, offset, guest, user, len, Some(&self.account), alarm)
    }

    fn accept(&self, fd: BorrowedFd<'_>, len: u64) -> Result<(), MemoryError> {
        let file = MemoryFile::of(fd).map_err(|source| MemoryError::Map { len, source })?;
        if !self.any_file && matches!(file, MemoryFile::Other(..) | MemoryFile::NotRegular) {
            return Err(MemoryError::File(file));
        }
        // The call fails for files that do not support seals.
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(MemoryError::Sealed);
        }
        Ok(())
    }
}

impl std::fmt::Debug for Mapper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapper").field("any_file", &self.any_file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::waits;

    #[test]
    fn only_memory_files_are_mapped_unless_any_file_is_allowed() {
        let memfd =
            rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memfd, 4096).unwrap();
        let mapper = Mapper::new(false);
        mapper.map(&memfd, 0, 0, 0, 4096).unwrap();
        // A procfs file: the kernel generates its content.
        let other =
            std::fs::File::options().read(true).write(true).open("/proc/self/comm").unwrap();
        let refused = mapper.map(&other, 0, 0, 0, 4096).unwrap_err();
        assert!(
            matches!(refused, MemoryError::File(MemoryFile::Other("unknown", 0x9fa0))),
            "{refused}"
        );
        assert!(refused.to_string().contains("--allow-any-memory-file"), "{refused}");
        let zero = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap();
        let device = mapper.map(&zero, 0, 0, 0, 4096).unwrap_err();
        assert!(matches!(device, MemoryError::File(MemoryFile::NotRegular)), "{device}");
        let any = Mapper::new(true);
        assert!(!matches!(any.map(&other, 0, 0, 0, 4096), Err(MemoryError::File(_))));
        any.map(&zero, 0, 0, 0, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::FUTURE_WRITE).unwrap();
        assert!(matches!(mapper.map(&memfd, 0, 0, 0, 4096), Err(MemoryError::Sealed)));
    }

    #[test]
    fn mappings_that_requests_hold_count_until_they_are_unmapped() {
        let quota = Quota::new(
            crate::mem::quota::Amount { bytes: 1 << 20, mappings: 100 },
            crate::mem::quota::Amount { bytes: 3 * 4096, mappings: 10 },
        );
        let mapper = Mapper { account: quota.account(), any_file: false, alarm: None };
        let memfd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memfd, 8192).unwrap();
        let page = |guest| mapper.map(&memfd, 0, guest, guest, 4096);
        let mut memory = crate::GuestMemory::default();
        for guest in [0, 4096] {
            memory = memory.with(page(guest).unwrap()).unwrap();
        }
        let slice = memory.slice(0, 8, 8).unwrap();
        memory = memory.without(0, 4096).unwrap();
        // The slice still holds the removed page: a third page fits into the limit, a fourth does
        // not.
        let third = page(8192).unwrap();
        assert!(matches!(page(12288), Err(MemoryError::Exceeded { .. })));
        drop(slice);
        let mapped = |len| {
            waits::until("another thread unmaps", || mapper.map(&memfd, 0, 0, 0, len).is_ok());
        };
        mapped(4096);
        drop((memory, third));
        mapped(8192);
    }
}
