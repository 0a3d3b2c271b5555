//! Guest memory: regions of shared mappings, and bounds-checked slices of them.
//!
//! In: file descriptors and the memory layout from a front end. Out: [`SharedSlice`]s (contiguous,
//! checked once, accessed by offset) and, through [`crate::Segments`], iovecs.
//!
//! What must hold
//! - A `GuestMemory` is immutable. Adding or removing a region makes a new one. A request in flight
//!   that holds the old one keeps its mappings alive, so a region can be removed while I/O to it is
//!   in flight.
//! - Another process writes this memory at any time. Every access is volatile or atomic, and two
//!   reads of the same address may differ. So callers copy first, and check the copy.
//! - An access beyond the end of a region's file would raise SIGBUS. A file that is too short is
//!   refused when it is mapped. If a file is truncated later, its guest loses the region for good
//!   (see `fault`).

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::mem::fault::{Guard, MemoryAlarm};
use crate::mem::mapping::{AfterUnmap, Mapping};
use crate::mem::memory_file::MemoryFile;
use crate::mem::quota::{Account, Exceeded};

/// Why guest memory cannot be mapped or accessed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("guest address {addr:#x}+{len:#x} (in bytes) is outside the guest's memory")]
    OutOfRange { addr: u64, len: u64 },
    #[error("guest address {addr:#x} is not aligned to {align} bytes")]
    Misaligned { addr: u64, align: u64 },
    #[error("memory region {guest:#x}+{len:#x} overlaps an existing region")]
    Overlap { guest: u64, len: u64 },
    #[error("memory region {guest:#x}+{len:#x} is not mapped")]
    NoSuchRegion { guest: u64, len: u64 },
    #[error("memory region {guest:#x}+{len:#x} is empty, or its end overflows 64 bits")]
    BadRange { guest: u64, len: u64 },
    #[error("memory region needs {need} bytes of its file, but the file has {have}")]
    FileTooShort { need: u64, have: u64 },
    #[error("cannot map {len} bytes of guest memory")]
    Map { len: u64, source: std::io::Error },
    #[error("cannot map {len} bytes of guest memory: {why}")]
    Exceeded { len: u64, why: Exceeded },
    #[error(
        "guest memory is in {0}: another process may withhold its pages, which would stop all \
         disks of a reactor; use a memfd, or a file on tmpfs or hugetlbfs \
         (--allow-any-memory-file accepts it, with that risk)"
    )]
    File(MemoryFile),
    #[error("guest memory is in a memfd that is sealed against writing; do not seal it")]
    Sealed,
}

impl MemoryError {
    /// Returns whether this process lacks memory, address space or descriptors. All other errors
    /// are faults of what the front end shares.
    pub fn is_lack(&self) -> bool {
        use rustix::io::Errno;
        match self {
            MemoryError::Exceeded { .. } => true,
            MemoryError::Map { source, .. } => matches!(
                Errno::from_io_error(source),
                Some(Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN | Errno::INTR)
            ),
            _ => false,
        }
    }
}

/// A contiguous range of guest-physical addresses, mapped into this process.
pub struct Region {
    mapping: Mapping,
    /// Offset of the region's first byte in `mapping` (a file offset need not be page-aligned).
    skip: usize,
    guest: u64,
    user: u64,
    len: u64,
}

impl Region {
    /// Maps `len` bytes of `fd` from `offset`. `guest` is the guest-physical address. `user` is the
    /// address in the front end's own process, which vhost-user uses for virtqueue addresses.
    pub fn map(
        fd: impl AsFd,
        offset: u64,
        guest: u64,
        user: u64,
        len: u64,
    ) -> Result<Self, MemoryError> {
        Self::map_charged(fd, offset, guest, user, len, None, None)
    }

    /// As [`Region::map`], and charges the mapping to a front end's account. `alarm`: is raised if
    /// the memory is lost.
    pub(crate) fn map_charged(
        fd: impl AsFd,
        offset: u64,
        guest: u64,
        user: u64,
        len: u64,
        account: Option<&Arc<Account>>,
        alarm: Option<&Arc<MemoryAlarm>>,
    ) -> Result<Self, MemoryError> {
        let bad = || MemoryError::BadRange { guest, len };
        if len == 0 || guest.checked_add(len).is_none() || user.checked_add(len).is_none() {
            return Err(bad());
        }
        let need = offset.checked_add(len).ok_or_else(bad)?;
        let io = |e: rustix::io::Errno| MemoryError::Map { len, source: e.into() };
        let stat = rustix::fs::fstat(fd.as_fd()).map_err(io)?;
        let is_file =
            rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile;
        // hugetlbfs and memfd report their true size here too.
        if is_file && (stat.st_size as u64) < need {
            return Err(MemoryError::FileTooShort { need, have: stat.st_size as u64 });
        }
        // hugetlbfs requires offsets that are multiples of its page size, which is st_blksize.
        let align = (stat.st_blksize as u64).clamp(4096, 1 << 30).next_power_of_two();
        let start = offset & !(align - 1);
        let skip = (offset - start) as usize;
        let map_len =
            usize::try_from(len).ok().and_then(|l| l.checked_add(skip)).ok_or_else(bad)?;
        let map_len = map_len
            .checked_next_multiple_of(align as usize)
            .filter(|_| align > 4096)
            .unwrap_or(map_len);
        let charge = account.map(|account| account.charge(map_len as u64)).transpose();
        let charge = charge.map_err(|why| MemoryError::Exceeded { len, why })?;
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let ptr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                map_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                start,
            )
        }
        .map_err(io)?;
        let base = NonNull::new(ptr.cast()).ok_or_else(bad)?;
        crate::mem::resident::release(base, map_len);
        // Unmapped if there is no guard.
        let mut mapping = Mapping { base, map_len, fault: None, charge, release: None };
        let guard = Guard::new(base, map_len, alarm.cloned());
        mapping.fault = Some(guard.map_err(|source| MemoryError::Map { len, source })?);
        Ok(Region { mapping, skip, guest, user, len })
    }

    /// Wraps pages that a Xen guest grants, as one region at guest address 0. The grants stay
    /// mapped until the region is dropped.
    ///
    /// # Safety
    /// `base` and `len` are a mapping that nothing else uses.
    pub(crate) unsafe fn granted(base: NonNull<u8>, len: usize, release: AfterUnmap) -> Self {
        let mapping =
            Mapping { base, map_len: len, fault: None, charge: None, release: Some(release) };
        Region { mapping, skip: 0, guest: 0, user: 0, len: len as u64 }
    }

    /// Creates a region of `len` bytes in a new memfd, which can be sent to another process.
    pub fn memfd(
        name: &str,
        guest: u64,
        user: u64,
        len: u64,
    ) -> Result<(Self, OwnedFd), MemoryError> {
        let io = |e: rustix::io::Errno| MemoryError::Map { len, source: e.into() };
        let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).map_err(io)?;
        rustix::fs::ftruncate(&fd, len).map_err(io)?;
        Ok((Region::map(&fd, 0, guest, user, len)?, fd))
    }

    /// Returns the first guest-physical address.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// Returns the first address in the front end's process.
    pub fn user(&self) -> u64 {
        self.user
    }

    /// Returns the region's length in bytes.
    pub fn size(&self) -> u64 {
        self.len
    }

    /// Treats the region as this process's own memory instead of a guest's; see
    /// [`crate::mem::resident`].
    pub(crate) fn keep_resident(&self) {
        crate::mem::resident::keep(self.mapping.base, self.mapping.map_len);
    }

    /// Allocates all pages of the region now. Call it on another thread before a reactor pins the
    /// region, because pinning would allocate the pages on the reactor.
    pub fn populate(&self) -> std::io::Result<()> {
        self.populate_part(0, self.len)
    }

    /// As [`Region::populate`], for the pages of `len` bytes from `offset`. The caller has checked
    /// that they are in the region.
    pub(crate) fn populate_part(&self, offset: u64, len: u64) -> std::io::Result<()> {
        debug_assert!(offset <= self.len && len <= self.len - offset);
        let (page, first) = (rustix::param::page_size(), self.skip + offset as usize);
        let start = first & !(page - 1);
        // The mapping is a multiple of the file system's preferred page size, so it may be longer
        // than the file. The kernel cannot allocate pages behind the end of the file (EFAULT).
        let end = (first + len as usize).next_multiple_of(page).min(self.mapping.map_len);
        // SAFETY: `start` is at most skip + len, so it lies inside the mapping.
        let base = unsafe { self.mapping.base.add(start) }.as_ptr().cast();
        let advice = rustix::mm::Advice::LinuxPopulateWrite;
        // SAFETY: the range is this mapping's own, and its content does not change. Missing memory
        // is an error here, not a signal.
        unsafe { rustix::mm::madvise(base, end - start, advice) }.map_err(Into::into)
    }

    /// Returns the region's addresses in this process.
    pub(crate) fn span(&self) -> std::ops::Range<usize> {
        let start = self.at(0).as_ptr() as usize;
        start..start + self.len as usize
    }

    /// Returns the host address of `offset` bytes into the region. The caller has checked that
    /// `offset` is at most `len`.
    fn at(&self, offset: u64) -> NonNull<u8> {
        debug_assert!(offset <= self.len);
        // SAFETY: skip + len lies inside the mapping, and offset <= len.
        unsafe { self.mapping.base.add(self.skip + offset as usize) }
    }

    /// Returns the host address of `len` bytes from `offset`, if they lie in the region.
    #[inline]
    pub(crate) fn piece(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| self.at(offset).as_ptr())
    }

    /// Returns the whole region as a slice, which is page-aligned.
    pub fn slice(self: &Arc<Self>) -> SharedSlice {
        SharedSlice { ptr: self.at(0), len: self.len as usize, _region: self.clone() }
    }

    fn end(&self) -> u64 {
        self.guest + self.len
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({:#x}+{:#x})", self.guest, self.len)
    }
}

/// The guest's memory at one time: regions sorted by guest address, without overlaps.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Arc<Region>>,
    /// Addresses of the regions in one array, for fast lookup: each descriptor may be in another
    /// region.
    spans: Vec<Span>,
    /// The indices of the spans by host address.
    by_host: Vec<usize>,
    last: LastHit,
}

/// A region's guest addresses, and the host address of its first byte.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    len: u64,
    host: NonNull<u8>,
}

// SAFETY: a Span is an address inside a mapping that the GuestMemory keeps alive by its Arc of the
// region; see Mapping.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// Returns the host address of an offset into the region. The offset is below its length.
    #[inline]
    fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset < self.len);
        // SAFETY: the offset is below the length, and that many bytes are mapped from `host` on.
        unsafe { self.host.as_ptr().add(offset as usize) }
    }
}

/// Index of the region that was found last: most addresses are in the same region as the one
/// before.
#[derive(Debug, Default)]
struct LastHit(AtomicUsize);

impl Clone for LastHit {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl GuestMemory {
    fn of(regions: Vec<Arc<Region>>) -> Self {
        let spans: Vec<_> =
            regions.iter().map(|r| Span { start: r.guest, len: r.len, host: r.at(0) }).collect();
        let mut by_host: Vec<_> = (0..spans.len()).collect();
        by_host.sort_unstable_by_key(|index| spans[*index].host.as_ptr() as usize);
        GuestMemory { regions, spans, by_host, last: LastHit::default() }
    }

    /// Returns the regions that these host addresses are in.
    pub(crate) fn regions_of(&self, iov: &[libc::iovec]) -> Vec<Arc<Region>> {
        let is_used = |region: &&Arc<Region>| {
            let span = region.span();
            iov.iter().any(|v| {
                let start = v.iov_base as usize;
                start < span.end && span.start < start + v.iov_len
            })
        };
        self.regions.iter().filter(is_used).cloned().collect()
    }

    /// Returns this memory with one more region.
    pub fn with(&self, region: Region) -> Result<Self, MemoryError> {
        let at = self.regions.partition_point(|r| r.guest < region.guest);
        let before = at.checked_sub(1).map(|i| &self.regions[i]);
        let clash = before.is_some_and(|r| r.end() > region.guest)
            || self.regions.get(at).is_some_and(|r| region.end() > r.guest);
        if clash {
            return Err(MemoryError::Overlap { guest: region.guest, len: region.len });
        }
        let mut regions = self.regions.clone();
        regions.insert(at, Arc::new(region));
        Ok(Self::of(regions))
    }

    /// Returns this memory without the region of `len` bytes at `guest`.
    pub fn without(&self, guest: u64, len: u64) -> Result<Self, MemoryError> {
        let at = self.regions.iter().position(|r| r.guest == guest && r.len == len);
        let at = at.ok_or(MemoryError::NoSuchRegion { guest, len })?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(Self::of(regions))
    }

    /// Returns the regions, sorted by guest address.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Returns a contiguous slice inside one region, aligned to `align` (a power of two).
    pub fn slice(&self, addr: u64, len: u64, align: u64) -> Result<SharedSlice, MemoryError> {
        if !addr.is_multiple_of(align) {
            return Err(MemoryError::Misaligned { addr, align });
        }
        let (index, offset) = self.find(addr, len).ok_or(MemoryError::OutOfRange { addr, len })?;
        let region = &self.regions[index];
        if region.len - offset < len {
            return Err(MemoryError::OutOfRange { addr, len });
        }
        let ptr = region.at(offset);
        // If guest address and mapping differ in alignment, the slice cannot hold atomics.
        if !(ptr.as_ptr() as usize).is_multiple_of(align as usize) {
            return Err(MemoryError::Misaligned { addr, align });
        }
        Ok(SharedSlice { ptr, len: len as usize, _region: region.clone() })
    }

    /// Writes one byte (the request status) without the cost of a slice.
    #[inline]
    pub fn write_byte(&self, addr: u64, byte: u8) -> Result<(), MemoryError> {
        let (index, offset) = self.find(addr, 1).ok_or(MemoryError::OutOfRange { addr, len: 1 })?;
        // SAFETY: `find` returned an offset inside the mapped region. The write is volatile because
        // the guest reads the byte.
        unsafe { self.spans[index].at(offset).write_volatile(byte) };
        Ok(())
    }

    /// Translates an address in the front end's process into a guest address (vhost-user names
    /// virtqueues by the former).
    pub fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions
            .iter()
            .find(|r| user >= r.user && user - r.user < r.len)
            .map(|r| r.guest + (user - r.user))
    }

    /// Calls `range` with the guest ranges (address, length) of `len` bytes at a host address in
    /// this memory. Ignores bytes that are not in it.
    pub(crate) fn guest_ranges(
        &self,
        host: *const u8,
        len: usize,
        range: &mut impl FnMut(u64, u64),
    ) {
        let (mut at, end) = (host as usize, host as usize + len);
        while at < end {
            let within =
                |span: &&Span| at.wrapping_sub(span.host.as_ptr() as usize) < span.len as usize;
            let last = self.spans.get(self.last.0.load(Ordering::Relaxed)).filter(within);
            let find = || {
                let before = |index: &usize| self.spans[*index].host.as_ptr() as usize <= at;
                let place = self.by_host.partition_point(before).checked_sub(1)?;
                self.spans.get(self.by_host[place]).filter(within)
            };
            let Some(span) = last.or_else(find) else { return };
            let offset = (at - span.host.as_ptr() as usize) as u64;
            let here = (span.len - offset).min((end - at) as u64);
            range(span.start + offset, here);
            at += here as usize;
        }
    }

    /// Calls `piece` with each host range (address, length) of `addr`+`len`, in order. The range
    /// may cross adjacent regions. A hole is an error; `piece` may have been called before it is
    /// found.
    #[inline]
    pub(crate) fn pieces(
        &self,
        mut addr: u64,
        mut len: u64,
        mut piece: impl FnMut(*mut u8, usize),
    ) -> Result<(), MemoryError> {
        while len > 0 {
            let (index, offset) =
                self.find(addr, len).ok_or(MemoryError::OutOfRange { addr, len })?;
            let span = &self.spans[index];
            let here = len.min(span.len - offset);
            piece(span.at(offset), here as usize);
            addr += here;
            len -= here;
        }
        Ok(())
    }

    /// Returns the index of the region that contains `addr`, and the offset in it.
    #[inline]
    fn find(&self, addr: u64, len: u64) -> Option<(usize, u64)> {
        addr.checked_add(len)?;
        let offset = |index: usize| {
            let span = self.spans.get(index)?;
            Some(addr.wrapping_sub(span.start)).filter(|offset| *offset < span.len)
        };
        let last = self.last.0.load(Ordering::Relaxed);
        if let Some(offset) = offset(last) {
            return Some((last, offset));
        }
        let index = self.spans.partition_point(|span| span.start <= addr).checked_sub(1)?;
        self.last.0.store(index, Ordering::Relaxed);
        Some((index, offset(index)?))
    }
}

/// A checked, contiguous slice of guest memory. Misaligned accesses, and those beyond its end,
/// panic: the caller derives offsets from negotiated sizes, never from what the guest wrote.
#[derive(Clone)]
pub struct SharedSlice {
    ptr: NonNull<u8>,
    len: usize,
    _region: Arc<Region>,
}

// SAFETY: a SharedSlice is an address inside a mapping that its Arc keeps alive; see Mapping.
unsafe impl Send for SharedSlice {}

impl SharedSlice {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn at(&self, offset: usize, len: usize, align: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "slice access {offset}+{len} beyond {}",
            self.len
        );
        // SAFETY: offset <= len of the slice, which lies inside the mapping.
        let ptr = unsafe { self.ptr.as_ptr().add(offset) };
        assert!((ptr as usize) & (align - 1) == 0, "slice access misaligned");
        ptr
    }

    /// Loads a little-endian u16 atomically.
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        let ptr = self.at(offset, 2, 2).cast();
        // SAFETY: in bounds, aligned and alive; the peer too accesses it by single loads and
        // stores.
        u16::from_le(unsafe { AtomicU16::from_ptr(ptr) }.load(order))
    }

    /// Stores a little-endian u16 atomically.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        let ptr = self.at(offset, 2, 2).cast();
        // SAFETY: as in load_u16.
        unsafe { AtomicU16::from_ptr(ptr) }.store(value.to_le(), order);
    }

    /// Loads a little-endian u32 atomically.
    #[inline]
    pub fn load_u32(&self, offset: usize, order: Ordering) -> u32 {
        let ptr = self.at(offset, 4, 4).cast();
        // SAFETY: in bounds, aligned, alive.
        u32::from_le(unsafe { AtomicU32::from_ptr(ptr) }.load(order))
    }

    /// Stores a little-endian u32 atomically.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) {
        let ptr = self.at(offset, 4, 4).cast();
        // SAFETY: as in load_u32.
        unsafe { AtomicU32::from_ptr(ptr) }.store(value.to_le(), order);
    }

    /// Copies `N` bytes out, once. A concurrent write of the guest may or may not be in the copy,
    /// but the copy does not change afterwards.
    #[inline]
    pub fn copy_out<const N: usize>(&self, offset: usize) -> [u8; N] {
        let ptr = self.at(offset, N, 1).cast::<[u8; N]>();
        // SAFETY: in bounds; [u8; N] has alignment 1; volatile, because the guest may write
        // concurrently.
        unsafe { ptr.read_volatile() }
    }

    /// Copies `N` bytes in, once.
    #[inline]
    pub fn copy_in<const N: usize>(&self, offset: usize, bytes: [u8; N]) {
        let ptr = self.at(offset, N, 1).cast::<[u8; N]>();
        // SAFETY: as in copy_out.
        unsafe { ptr.write_volatile(bytes) }
    }

    /// Copies `bytes` into guest memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let ptr = self.at(offset, bytes.len(), 1);
        // SAFETY: in bounds; `bytes` is ours, so the ranges do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), ptr, bytes.len()) }
    }

    /// Copies guest memory into `bytes`.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let ptr = self.at(offset, bytes.len(), 1);
        // SAFETY: in bounds; `bytes` is ours, so the ranges do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(ptr, bytes.as_mut_ptr(), bytes.len()) }
    }
}

impl std::fmt::Debug for SharedSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedSlice({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests;
