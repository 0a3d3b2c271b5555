//! The guest's memory: one shared region, handed out from its start.
//!
//! In: sizes and alignments. Out: guest addresses, and slices to read and write there. Nothing is
//! ever given back.

use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use blockyard_ring::{GuestMemory, Region, SharedSlice};
use vhost::VhostUserMemoryRegionInfo;

/// Where the region lies for the guest, and in the front end's process as it tells the back end:
/// two different numbers, and neither zero, so that a back end which mixes them up does not get
/// away with it.
const GUEST_BASE: u64 = 0x1_0000_0000;
const USER_BASE: u64 = 0x7f00_0000_0000;

pub struct Memory {
    guest: GuestMemory,
    fd: OwnedFd,
    len: u64,
    taken: u64,
}

impl Memory {
    /// A region of `len` bytes (rounded up to pages), zeroed.
    pub fn new(len: u64) -> Result<Self> {
        let len = len.next_multiple_of(4096).max(4096);
        let (region, fd) = Region::memfd("blockyard-bench", GUEST_BASE, USER_BASE, len)?;
        Ok(Memory { guest: GuestMemory::default().with(region)?, fd, len, taken: 0 })
    }

    /// The guest address of `len` bytes nobody else has, aligned to `align` (a power of two).
    pub fn take(&mut self, len: u64, align: u64) -> Result<u64> {
        let start = self.taken.next_multiple_of(align);
        let end = start.checked_add(len).filter(|end| *end <= self.len);
        self.taken = end.with_context(|| {
            format!("{len} bytes more than the {} of the guest's memory are needed", self.len)
        })?;
        Ok(GUEST_BASE + start)
    }

    /// A slice on `len` bytes at the guest address `addr`.
    pub fn slice(&self, addr: u64, len: u64, align: u64) -> Result<SharedSlice> {
        Ok(self.guest.slice(addr, len, align)?)
    }

    /// A new piece and its slice.
    pub fn piece(&mut self, len: u64, align: u64) -> Result<(u64, SharedSlice)> {
        let addr = self.take(len, align)?;
        Ok((addr, self.slice(addr, len, align.min(4096))?))
    }

    /// The address by which vhost-user names a ring.
    pub fn user_address(&self, guest: u64) -> u64 {
        guest.wrapping_sub(GUEST_BASE).wrapping_add(USER_BASE)
    }

    /// First guest address and length in bytes.
    pub fn range(&self) -> (u64, u64) {
        (GUEST_BASE, self.len)
    }

    /// The region as SET_MEM_TABLE names it.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: self.len,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.fd.as_raw_fd(),
        }
    }
}
