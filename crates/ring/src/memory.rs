//! Guest memory: regions of shared mappings, and bounds-checked slices into them.
//!
//! In: file descriptors and the layout that a front end sent. Out: `SharedSlice`s (contiguous,
//! checked once, read and written by offset) and, through [`crate::Segments`], iovecs.
//!
//! What must hold
//! - A `GuestMemory` is immutable. Hot-adding or removing a region makes a new one; who still holds
//!   the old one (a request in flight) keeps its mappings alive, so a region can go while I/O to it
//!   is on the way.
//! - Another process writes this memory at any time. Every access is a volatile or atomic one, and
//!   nothing read here is ever trusted to read the same twice: callers copy first and check the
//!   copy.
//! - A file that is shorter than its region would turn an access into SIGBUS: it is refused when it
//!   is mapped; one that is cut short later costs its owner the region (see `fault`).

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::fault::Guard;
use crate::mapper::MemoryFile;
use crate::quota::{Account, Charge, Exceeded};
use crate::xen::Release;

#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("guest address {addr:#x}+{len:#x} (bytes) lies outside the guest's memory")]
    OutOfRange { addr: u64, len: u64 },
    #[error("guest address {addr:#x} is not aligned to {align} bytes")]
    Misaligned { addr: u64, align: u64 },
    #[error("memory region {guest:#x}+{len:#x} overlaps a region that is already there")]
    Overlap { guest: u64, len: u64 },
    #[error("memory region {guest:#x}+{len:#x} is not mapped")]
    NoSuchRegion { guest: u64, len: u64 },
    #[error("memory region {guest:#x}+{len:#x}: empty, or its end overflows 64 bits")]
    BadRange { guest: u64, len: u64 },
    #[error("memory region needs {need} bytes of its file, which has {have}")]
    FileTooShort { need: u64, have: u64 },
    #[error("mapping {len} bytes of guest memory")]
    Map { len: u64, source: std::io::Error },
    #[error("mapping {len} bytes of guest memory: {why}")]
    Exceeded { len: u64, why: Exceeded },
    #[error(
        "guest memory in {0}: another process may withhold its pages, which would stop every disk; use a memfd, or a file \
         on tmpfs or hugetlbfs (--allow-any-memory-file accepts it, with that risk)"
    )]
    File(MemoryFile),
    #[error("guest memory in a memfd that is sealed against writing")]
    Sealed,
}

/// One shared mapping. Unmapped on drop.
struct Mapping {
    base: NonNull<u8>,
    map_len: usize,
    fault: Option<Guard>,
    /// Of a front end's memory: its place in the account, until it is unmapped.
    _charge: Option<Charge>,
    /// Of granted pages: dropped, and with it the grants, after the memory is unmapped.
    _release: Option<Release>,
}

// SAFETY: a mapping is plain shared memory; all access goes through volatile or atomic operations
// on bounds that were checked, so moving or sharing the handle between threads adds no access that
// another process could not make anyway.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.fault = None;
        // SAFETY: base and map_len are what mmap returned and was given; nobody holds a pointer
        // into the mapping, because every SharedSlice and Segments holds the Arc<Region> that owns this.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.map_len) };
    }
}

/// A contiguous piece of the guest's physical address space, mapped here.
pub struct Region {
    mapping: Mapping,
    /// Where the region's first byte lies in `mapping` (a file offset need not be page-aligned).
    skip: usize,
    guest: u64,
    user: u64,
    len: u64,
}

impl Region {
    /// Maps `len` bytes of `fd` from `offset`; `guest` is the guest-physical address, `user` the
    /// address in the front end's own process, by which vhost-user names rings.
    pub fn map(
        fd: impl AsFd,
        offset: u64,
        guest: u64,
        user: u64,
        len: u64,
    ) -> Result<Self, MemoryError> {
        Self::map_charged(fd, offset, guest, user, len, None)
    }

    /// The same for a front end's memory, which is accounted for.
    pub(crate) fn map_charged(
        fd: impl AsFd,
        offset: u64,
        guest: u64,
        user: u64,
        len: u64,
        account: Option<&Arc<Account>>,
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
        // Huge-page files want huge-page aligned offsets; st_blksize is their page size.
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
        // SAFETY: a fresh mapping at an address of the kernel's choosing aliases no Rust object.
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
        crate::resident::release(base, map_len);
        let mapping = Mapping {
            base,
            map_len,
            fault: Some(Guard::new(base, map_len)),
            _charge: charge,
            _release: None,
        };
        Ok(Region { mapping, skip, guest, user, len })
    }

    /// Pages that a guest of Xen grants, as one region at guest address 0. They stay as long as
    /// they are mapped.
    ///
    /// # Safety
    /// `base` and `len` are a mapping that belongs to nothing else.
    pub(crate) unsafe fn granted(base: NonNull<u8>, len: usize, release: Release) -> Self {
        let mapping =
            Mapping { base, map_len: len, fault: None, _charge: None, _release: Some(release) };
        Region { mapping, skip: 0, guest: 0, user: 0, len: len as u64 }
    }

    /// Memory of our own for `len` bytes, in a memfd that can be handed to a peer.
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

    pub fn guest(&self) -> u64 {
        self.guest
    }

    pub fn user(&self) -> u64 {
        self.user
    }

    /// The region's length in bytes.
    pub fn size(&self) -> u64 {
        self.len
    }

    /// Treats it as this process's own memory, not a guest's: see [`crate::resident`].
    pub(crate) fn keep_resident(&self) {
        crate::resident::keep(self.mapping.base, self.mapping.map_len);
    }

    /// Gives every page of it its memory, now. For who will pin it on a thread that others wait
    /// for.
    pub fn populate(&self) -> std::io::Result<()> {
        let (base, len) = (self.mapping.base.as_ptr().cast(), self.mapping.map_len);
        // SAFETY: the range is this mapping's own, and its contents stay as they are. What cannot
        // be had is an error here, and no signal.
        unsafe { rustix::mm::madvise(base, len, rustix::mm::Advice::LinuxPopulateWrite) }
            .map_err(Into::into)
    }

    /// Where it lies in this process.
    pub(crate) fn span(&self) -> std::ops::Range<usize> {
        let start = self.at(0).as_ptr() as usize;
        start..start + self.len as usize
    }

    /// The host address of `offset` bytes into the region. Callers have checked `offset` against
    /// `len`.
    fn at(&self, offset: u64) -> NonNull<u8> {
        debug_assert!(offset <= self.len);
        // SAFETY: skip + len lies inside the mapping, and offset <= len.
        unsafe { self.mapping.base.add(self.skip + offset as usize) }
    }

    /// The host address of `len` bytes from `offset`, if they lie in the region.
    #[inline]
    pub(crate) fn piece(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| self.at(offset).as_ptr())
    }

    /// The whole region as a slice, which is aligned to its page.
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

/// The guest's memory as it stands: regions sorted by guest address, none overlapping.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Arc<Region>>,
    /// Where each region lies, close together: a guest can have each descriptor in another region.
    spans: Vec<Span>,
    last: LastHit,
}

/// A region's guest addresses, and the host address of the first.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    len: u64,
    host: NonNull<u8>,
}

// SAFETY: a Span is an address inside a mapping that the GuestMemory's Arc of its region keeps
// alive; see Mapping.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// The host address of an offset into the region, below its length.
    #[inline]
    fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset < self.len);
        // SAFETY: the caller's offset is below the length, and that many bytes are mapped from
        // `host` on.
        unsafe { self.host.as_ptr().add(offset as usize) }
    }
}

/// Index of the region found last: most addresses lie in the same region as the address before.
#[derive(Debug, Default)]
struct LastHit(AtomicUsize);

impl Clone for LastHit {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl GuestMemory {
    fn of(regions: Vec<Arc<Region>>) -> Self {
        let spans =
            regions.iter().map(|r| Span { start: r.guest, len: r.len, host: r.at(0) }).collect();
        GuestMemory { regions, spans, last: LastHit::default() }
    }

    /// This memory and one more region.
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

    /// This memory less the region at `guest` of `len` bytes.
    pub fn without(&self, guest: u64, len: u64) -> Result<Self, MemoryError> {
        let at = self.regions.iter().position(|r| r.guest == guest && r.len == len);
        let at = at.ok_or(MemoryError::NoSuchRegion { guest, len })?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(Self::of(regions))
    }

    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// A contiguous slice, inside one region, aligned to `align` (a power of two).
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
        // A region whose guest address and mapping disagree on alignment cannot hold atomics.
        if !(ptr.as_ptr() as usize).is_multiple_of(align as usize) {
            return Err(MemoryError::Misaligned { addr, align });
        }
        Ok(SharedSlice { ptr, len: len as usize, _region: region.clone() })
    }

    /// Writes one byte (a status) without the cost of a slice.
    #[inline]
    pub fn write_byte(&self, addr: u64, byte: u8) -> Result<(), MemoryError> {
        let (index, offset) = self.find(addr, 1).ok_or(MemoryError::OutOfRange { addr, len: 1 })?;
        // SAFETY: `find` gave an offset inside the region, which is mapped; volatile, because the
        // guest reads it.
        unsafe { self.spans[index].at(offset).write_volatile(byte) };
        Ok(())
    }

    /// Translates an address of the front end's process into a guest address (vhost-user names
    /// rings that way).
    pub fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions
            .iter()
            .find(|r| user >= r.user && user - r.user < r.len)
            .map(|r| r.guest + (user - r.user))
    }

    /// Calls `piece` with each host (address, length) that makes up `addr`+`len`, in order. Regions
    /// that touch are crossed; a hole is an error, and then some pieces may have been given
    /// already.
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

    /// Returns the index of the region that has the address `addr`, and the address's offset into
    /// it.
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

/// A checked, contiguous piece of guest memory. Accesses beyond its end, or misaligned ones, panic:
/// the caller derives offsets from sizes that it negotiated, never from what the guest wrote.
#[derive(Clone)]
pub struct SharedSlice {
    ptr: NonNull<u8>,
    len: usize,
    _region: Arc<Region>,
}

// SAFETY: a SharedSlice is an address inside a mapping that its Arc keeps alive; see Mapping.
unsafe impl Send for SharedSlice {}

impl SharedSlice {
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

    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        let ptr = self.at(offset, 2, 2).cast();
        // SAFETY: in bounds, aligned, alive; the peer accesses it with single stores too.
        u16::from_le(unsafe { AtomicU16::from_ptr(ptr) }.load(order))
    }

    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        let ptr = self.at(offset, 2, 2).cast();
        // SAFETY: as in load_u16.
        unsafe { AtomicU16::from_ptr(ptr) }.store(value.to_le(), order);
    }

    #[inline]
    pub fn load_u32(&self, offset: usize, order: Ordering) -> u32 {
        let ptr = self.at(offset, 4, 4).cast();
        // SAFETY: in bounds, aligned, alive.
        u32::from_le(unsafe { AtomicU32::from_ptr(ptr) }.load(order))
    }

    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) {
        let ptr = self.at(offset, 4, 4).cast();
        // SAFETY: as in load_u32.
        unsafe { AtomicU32::from_ptr(ptr) }.store(value.to_le(), order);
    }

    /// Copies `N` bytes out, once; what the guest writes meanwhile may be in the copy or not, but
    /// the copy is then ours.
    #[inline]
    pub fn copy_out<const N: usize>(&self, offset: usize) -> [u8; N] {
        let ptr = self.at(offset, N, 1).cast::<[u8; N]>();
        // SAFETY: in bounds; [u8; N] has alignment 1; volatile, because the guest may write at the
        // same time.
        unsafe { ptr.read_volatile() }
    }

    #[inline]
    pub fn copy_in<const N: usize>(&self, offset: usize, bytes: [u8; N]) {
        let ptr = self.at(offset, N, 1).cast::<[u8; N]>();
        // SAFETY: as in copy_out.
        unsafe { ptr.write_volatile(bytes) }
    }

    /// Copies a slice in.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let ptr = self.at(offset, bytes.len(), 1);
        // SAFETY: in bounds; `bytes` is ours, so the ranges do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), ptr, bytes.len()) }
    }

    /// Copies a slice out.
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
