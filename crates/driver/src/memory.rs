//! The guest's memory: one shared region with a bump allocator.
//!
//! In: sizes and alignments. Out: guest addresses, and slices to read and write the memory at these
//! addresses. The allocator never frees memory.

use std::os::fd::{AsRawFd, OwnedFd};

use crate::error::{Error, ErrorKind, Result};
use blockyard_ring::{GuestMemory, Region, SharedSlice};
use vhost::VhostUserMemoryRegionInfo;

/// Guest-physical address of the region, and the region's address in the front end's process, as
/// sent to the back end. The two differ, and neither is zero, so that a back end that confuses them
/// fails.
const GUEST_BASE: u64 = 0x1_0000_0000;
const USER_BASE: u64 = 0x7f00_0000_0000;

/// The shared region, and the number of its bytes that are allocated.
pub struct Memory {
    guest: GuestMemory,
    fd: OwnedFd,
    len: u64,
    taken: u64,
}

impl Memory {
    /// Creates a zeroed region of `len` bytes, rounded up to pages.
    pub fn new(len: u64) -> Result<Self> {
        let len = len.next_multiple_of(4096).max(4096);
        let (region, fd) = Region::memfd("blockyard-bench", GUEST_BASE, USER_BASE, len)?;
        Ok(Memory { guest: GuestMemory::default().with(region)?, fd, len, taken: 0 })
    }

    /// Allocates `len` bytes, aligned to `align` (a power of two). Returns the guest address.
    pub fn take(&mut self, len: u64, align: u64) -> Result<u64> {
        let start = self.taken.next_multiple_of(align);
        let end = start.checked_add(len).filter(|end| *end <= self.len);
        let full = || {
            let what =
                format!("the guest's memory of {} bytes has no room for {len} more", self.len);
            Error::new(ErrorKind::Usage, what)
        };
        self.taken = end.ok_or_else(full)?;
        Ok(GUEST_BASE + start)
    }

    /// Returns the memory as a device in the same process uses it.
    pub fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    /// Returns a slice of `len` bytes at the guest address `addr`.
    pub fn slice(&self, addr: u64, len: u64, align: u64) -> Result<SharedSlice> {
        Ok(self.guest.slice(addr, len, align)?)
    }

    /// Allocates `len` bytes. Returns the guest address and the slice.
    pub fn piece(&mut self, len: u64, align: u64) -> Result<(u64, SharedSlice)> {
        let addr = self.take(len, align)?;
        Ok((addr, self.slice(addr, len, align.min(4096))?))
    }

    /// Returns the address of a guest address in the front end's process. vhost-user uses such
    /// addresses for rings.
    pub fn user_address(&self, guest: u64) -> u64 {
        guest.wrapping_sub(GUEST_BASE).wrapping_add(USER_BASE)
    }

    /// Returns the region's first guest address and its length in bytes.
    pub fn range(&self) -> (u64, u64) {
        (GUEST_BASE, self.len)
    }

    /// Returns the region as SET_MEM_TABLE describes it.
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
