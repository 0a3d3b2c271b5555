//! The memory of one I/O: an iovec, and the owner that keeps its memory alive.
//!
//! In: ranges of guest memory (checked by [`GuestMemory`]), or a buffer of this process. Out: an
//! iovec for the kernel.
//!
//! What must hold
//! - Every entry points into memory that `owner` keeps alive. An operation owns its `Segments`
//!   until its completion, so its memory stays valid whatever is dropped meanwhile.
//! - The vector is reused from request to request, so the steady state allocates nothing.
//! - With ublk zero copy the data stay in the kernel: the entries are offsets from 0, never
//!   addresses. Only their owner copies them.

mod cursor;
mod heap;
mod lent;
mod loan;
mod request_data;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

pub use cursor::Cursor;
pub use heap::AlignedBuf;
pub use lent::Lent;
pub use loan::Loan;
pub(crate) use request_data::RequestData;

use crate::mem::memory::{GuestMemory, MemoryError, Region};

impl Loan {
    /// Returns what the other thread gets.
    pub fn lent(&self) -> Lent {
        Lent::new(self.shared.clone(), self.own.len())
    }
}

#[derive(Clone, Default)]
enum Owner {
    #[default]
    None,
    Guest(Rc<GuestMemory>),
    /// Regions that were mapped for this request, or for several.
    Regions(Vec<Arc<Region>>),
    Heap(Rc<AlignedBuf>),
    /// Data in the kernel (ublk zero copy): the entries are offsets in it.
    Request(Rc<RequestData>),
    /// Memory of another thread's request.
    Lent(Rc<loan::Use>),
    /// If the segments come from several sources: the owners of their memory.
    Several(Vec<Owner>),
}

impl Owner {
    fn is(&self, other: &Owner) -> bool {
        match (self, other) {
            (Owner::Guest(mine), Owner::Guest(theirs)) => Rc::ptr_eq(mine, theirs),
            (Owner::Regions(mine), Owner::Regions(theirs)) => {
                mine.len() == theirs.len()
                    && mine.iter().zip(theirs).all(|(a, b)| Arc::ptr_eq(a, b))
            }
            (Owner::Heap(mine), Owner::Heap(theirs)) => Rc::ptr_eq(mine, theirs),
            (Owner::Request(mine), Owner::Request(theirs)) => Rc::ptr_eq(mine, theirs),
            (Owner::Lent(mine), Owner::Lent(theirs)) => Rc::ptr_eq(mine, theirs),
            _ => false,
        }
    }

    /// Makes this owner also keep alive the memory that `other` keeps alive.
    fn join(&mut self, other: &Owner) {
        match (&mut *self, other) {
            (_, Owner::None) => {}
            (Owner::None, _) => *self = other.clone(),
            (Owner::Several(all), Owner::Several(more)) => all.extend(more.iter().cloned()),
            (Owner::Several(all), one) if all.last().is_some_and(|last| last.is(one)) => {}
            (Owner::Several(all), one) => all.push(one.clone()),
            (one, other) if one.is(other) => {}
            (one, other) => {
                let mut all = vec![std::mem::take(one)];
                match other {
                    Owner::Several(more) => all.extend(more.iter().cloned()),
                    other => all.push(other.clone()),
                }
                *self = Owner::Several(all);
            }
        }
    }
}

/// An iovec, and the owner of its memory; see the module documentation. Segments move many times on
/// the way of a request, so they are one pointer. `Segments::default()` allocates nothing.
#[derive(Default)]
pub struct Segments(Option<Box<Parts>>);

#[derive(Default)]
struct Parts {
    iov: Vec<libc::iovec>,
    len: usize,
    owner: Owner,
}

/// The parts of segments that have none.
struct NoParts(Parts);

// SAFETY: the parts have no owner and no entry, and nothing changes them.
unsafe impl Sync for NoParts {}

static NO_PARTS: NoParts = NoParts(Parts { iov: Vec::new(), len: 0, owner: Owner::None });

impl Segments {
    fn new(iov: Vec<libc::iovec>, len: usize, owner: Owner) -> Self {
        Segments(Some(Box::new(Parts { iov, len, owner })))
    }

    #[inline]
    fn parts(&self) -> &Parts {
        self.0.as_deref().unwrap_or(&NO_PARTS.0)
    }

    #[inline]
    fn parts_mut(&mut self) -> &mut Parts {
        self.0.get_or_insert_default()
    }

    /// Returns a zeroed buffer of this process, aligned for O_DIRECT.
    pub fn buffer(len: usize) -> Self {
        Self::of(AlignedBuf::zeroed(len))
    }

    /// As [`Segments::buffer`], but the kernel allocates the pages at their first use.
    pub fn mapped_buffer(len: usize) -> io::Result<Self> {
        AlignedBuf::mapped(len).map(Self::of)
    }

    fn of(buf: AlignedBuf) -> Self {
        let len = buf.len;
        let iov = vec![libc::iovec { iov_base: buf.ptr.as_ptr().cast(), iov_len: len }];
        Segments::new(iov, len, Owner::Heap(Rc::new(buf)))
    }

    /// Returns a buffer of this process with the content `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let segments = Self::buffer(bytes.len());
        segments.copy_in(0, bytes);
        segments
    }

    /// Reuses a buffer of this process that has no other owner: makes it one entry of `len` bytes
    /// with undefined content. Returns false, and changes nothing, if the segments are no such
    /// buffer or the buffer is too short.
    #[must_use]
    pub fn refit(&mut self, len: usize) -> bool {
        let Some(parts) = &mut self.0 else { return false };
        let Owner::Heap(buf) = &parts.owner else { return false };
        if Rc::strong_count(buf) > 1 || buf.len < len {
            return false;
        }
        parts.iov.clear();
        parts.iov.push(libc::iovec { iov_base: buf.ptr.as_ptr().cast(), iov_len: len });
        parts.len = len;
        true
    }

    /// Empties the segments for a request in `memory`. Keeps the vector's capacity.
    #[inline]
    pub fn reset(&mut self, memory: &Rc<GuestMemory>) {
        let parts = self.parts_mut();
        parts.iov.clear();
        parts.len = 0;
        parts.owner = Owner::Guest(memory.clone());
    }

    /// Empties the segments for a request in regions. Keeps the vectors' capacity.
    #[inline]
    pub fn reset_regions(&mut self) {
        let parts = self.parts_mut();
        parts.iov.clear();
        parts.len = 0;
        match &mut parts.owner {
            Owner::Regions(regions) => regions.clear(),
            owner => *owner = Owner::Regions(Vec::new()),
        }
    }

    /// Appends `len` bytes of `region` from `offset`. Must follow [`Segments::reset_regions`].
    #[inline]
    pub fn push_region(
        &mut self,
        region: &Arc<Region>,
        offset: u64,
        len: u64,
    ) -> Result<(), MemoryError> {
        let out_of_range = MemoryError::OutOfRange { addr: offset, len };
        let parts = self.parts_mut();
        let (Owner::Regions(regions), Some(base)) = (&mut parts.owner, region.piece(offset, len))
        else {
            return Err(out_of_range);
        };
        if !regions.last().is_some_and(|last| Arc::ptr_eq(last, region)) {
            regions.push(region.clone());
        }
        push(&mut parts.iov, base, len as usize);
        parts.len += len as usize;
        Ok(())
    }

    /// Makes the segments the first `len` bytes of data in the kernel. Keeps the vector's capacity.
    #[inline]
    pub(crate) fn reset_request(&mut self, data: &Rc<RequestData>, len: usize) {
        let parts = self.parts_mut();
        parts.iov.clear();
        parts.iov.push(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: len });
        parts.len = len;
        parts.owner = Owner::Request(data.clone());
    }

    /// Returns whether the data are in the kernel (ublk zero copy), where this process cannot see
    /// them.
    pub fn is_request(&self) -> bool {
        self.request().is_some()
    }

    /// Returns the data in the kernel: only io_uring operations can refer to them.
    #[inline]
    pub(crate) fn request(&self) -> Option<&Rc<RequestData>> {
        match &self.parts().owner {
            Owner::Request(data) => Some(data),
            _ => None,
        }
    }

    /// Releases the memory. Keeps the vector's capacity.
    #[inline]
    pub fn release(&mut self) {
        let Some(parts) = &mut self.0 else { return };
        parts.iov.clear();
        parts.len = 0;
        parts.owner = Owner::None;
    }

    /// Appends guest memory. Ranges that are adjacent on the host become one entry. After an error
    /// the segments are unusable until the next `reset`.
    #[inline]
    pub fn push_guest(&mut self, addr: u64, len: u64) -> Result<(), MemoryError> {
        let Parts { iov, len: total, owner } = self.parts_mut();
        let Owner::Guest(memory) = owner else {
            return Err(MemoryError::OutOfRange { addr, len });
        };
        memory.pieces(addr, len, |base, len| {
            *total += len;
            push(iov, base, len);
        })
    }

    /// Appends all of `other`, which may be dropped earlier. Returns false, and changes nothing, if
    /// the memory has another owner.
    #[must_use]
    pub fn append(&mut self, other: &Segments) -> bool {
        let (parts, other) = (self.parts_mut(), other.parts());
        match (&mut parts.owner, &other.owner) {
            // Segments without an owner are empty.
            (mine @ Owner::None, owner) => *mine = owner.clone(),
            (Owner::Regions(mine), Owner::Regions(theirs)) => mine.extend(theirs.iter().cloned()),
            (Owner::Guest(mine), Owner::Guest(theirs)) if Rc::ptr_eq(mine, theirs) => {}
            (Owner::Heap(mine), Owner::Heap(theirs)) if Rc::ptr_eq(mine, theirs) => {}
            _ => return false,
        }
        for v in &other.iov {
            push(&mut parts.iov, v.iov_base.cast(), v.iov_len);
        }
        parts.len += other.len;
        true
    }

    /// Appends `len` bytes of `other` from `offset`, of any owner. For data that is sent as one
    /// message.
    pub fn gather(&mut self, other: &Segments, offset: usize, len: usize) {
        if other.request().is_some() {
            // The entries of `other` are offsets, which cannot be mixed with addresses.
            let copy = Segments::buffer(len);
            copy.copy_from(0, other, offset, len);
            return self.gather(&copy, 0, len);
        }
        assert!(
            self.request().is_none(),
            "entries of zero-copy data cannot be mixed with addresses"
        );
        let parts = self.parts_mut();
        other.each(offset, len, |base, len| push(&mut parts.iov, base, len));
        parts.owner.join(&other.parts().owner);
        parts.len += len;
    }

    /// Calls `range` with each range of guest memory (guest address, length) in these segments.
    /// Returns false if they are not in one guest's memory.
    pub fn guest_ranges(&self, mut range: impl FnMut(u64, u64)) -> bool {
        let Owner::Guest(memory) = &self.parts().owner else { return false };
        for v in &self.parts().iov {
            memory.guest_ranges(v.iov_base.cast(), v.iov_len, &mut range);
        }
        true
    }

    /// Returns the total length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.parts().len
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.parts().len == 0
    }

    /// Returns the size in bytes of a buffer of this process, even if only a part is in use; 0 for
    /// other memory.
    pub fn capacity(&self) -> usize {
        match &self.parts().owner {
            Owner::Heap(buf) => buf.len,
            _ => 0,
        }
    }

    /// Returns the number of entries of the iovec.
    pub fn count(&self) -> usize {
        self.parts().iov.len()
    }

    /// Returns whether every entry's address and length are multiples of these powers of two, as
    /// O_DIRECT requires.
    #[inline]
    pub fn is_aligned(&self, address: usize, length: usize) -> bool {
        self.parts()
            .iov
            .iter()
            .all(|v| v.iov_base as usize & (address - 1) == 0 && v.iov_len & (length - 1) == 0)
    }

    /// Returns the `len` bytes from `offset` as segments that share the owner.
    pub fn slice(&self, offset: usize, len: usize) -> Segments {
        let mut iov = Vec::new();
        self.each(offset, len, |base, len| {
            iov.push(libc::iovec { iov_base: base.cast(), iov_len: len })
        });
        Segments::new(iov, len, self.parts().owner.clone())
    }

    /// Returns a cursor at the first byte.
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor { segments: self, entry: 0, inside: 0 }
    }

    /// Copies `bytes` in, at `offset`.
    pub fn copy_in(&self, offset: usize, mut bytes: &[u8]) {
        self.each(offset, bytes.len(), |base, len| {
            let (now, later) = bytes.split_at(len);
            bytes = later;
            if let Some(data) = self.request() {
                // SAFETY: the pointer is to a Rust slice of `len` bytes.
                return unsafe { data.write(base as usize, now.as_ptr(), len) };
            }
            // SAFETY: `each` returns ranges inside memory that the owner keeps alive. `bytes` is a
            // Rust slice, which never overlaps guest memory or an AlignedBuf: those are reached
            // through Segments only.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), base, len) };
        });
    }

    /// Copies out to `bytes`, from `offset`.
    pub fn copy_out(&self, offset: usize, mut bytes: &mut [u8]) {
        self.each(offset, bytes.len(), |base, len| {
            let (now, later) = std::mem::take(&mut bytes).split_at_mut(len);
            bytes = later;
            if let Some(data) = self.request() {
                // SAFETY: the pointer is to a Rust slice of `len` bytes.
                return unsafe { data.read(base as usize, now.as_mut_ptr(), len) };
            }
            // SAFETY: as in copy_in.
            unsafe { std::ptr::copy_nonoverlapping(base, now.as_mut_ptr(), len) };
        });
    }

    /// Copies `len` bytes from `other` at `from` into `self` at `to`.
    pub fn copy_from(&self, to: usize, other: &Segments, from: usize, len: usize) {
        match (self.request(), other.request()) {
            // SAFETY: both ranges are alive. They may overlap if a guest names the same memory
            // twice, so `copy`.
            (None, None) => self.each_pair(to, other, from, len, |dst, src, len| unsafe {
                std::ptr::copy(src, dst, len);
            }),
            // SAFETY: the owner of `other` keeps the memory alive; the kernel only reads it.
            (Some(data), None) => self.each_pair(to, other, from, len, |dst, src, len| unsafe {
                data.write(dst as usize, src, len);
            }),
            // SAFETY: the owner of `self` keeps the memory alive.
            (None, Some(data)) => self.each_pair(to, other, from, len, |dst, src, len| unsafe {
                data.read(src as usize, dst, len);
            }),
            (Some(_), Some(_)) => {
                let copy = Segments::buffer(len);
                copy.copy_from(0, other, from, len);
                self.copy_from(to, &copy, 0, len);
            }
        }
    }

    /// Calls `piece` with pairs of equally long ranges: of `self` from `to`, and of `other` from
    /// `from`, `len` bytes in all.
    fn each_pair(
        &self,
        to: usize,
        other: &Segments,
        from: usize,
        len: usize,
        mut piece: impl FnMut(*mut u8, *mut u8, usize),
    ) {
        let mut at = from;
        self.each(to, len, |dst, len| {
            let mut dst = dst;
            other.each(at, len, |src, len| {
                piece(dst, src, len);
                dst = dst.wrapping_add(len);
            });
            at += len;
        });
    }

    /// Zeroes `len` bytes from `offset`.
    pub fn zero(&self, offset: usize, len: usize) {
        if let Some(data) = self.request() {
            return self.each(offset, len, |base, len| data.zero(base as usize, len));
        }
        // SAFETY: `each` returns ranges inside memory that the owner keeps alive.
        self.each(offset, len, |base, len| unsafe { base.write_bytes(0, len) });
    }

    /// Returns the position of the first byte that is not zero in the `len` bytes from `offset`,
    /// relative to `offset`. It checks copies, because an operation or a guest may change the
    /// memory meanwhile.
    pub fn find_nonzero(&self, offset: usize, len: usize) -> Option<usize> {
        let mut copy = [0; COPIED];
        (0..len).step_by(COPIED).find_map(|at| {
            let here = &mut copy[..COPIED.min(len - at)];
            self.copy_out(offset + at, here);
            find_nonzero(here).map(|found| at + found)
        })
    }

    /// Compares `len` bytes from `offset` with the bytes of `other` from `from`. Returns the index
    /// of the first difference, counted from `offset`.
    pub fn find_difference(
        &self,
        offset: usize,
        other: &Segments,
        from: usize,
        len: usize,
    ) -> Option<usize> {
        let (mut mine, mut theirs) = ([0; COPIED], [0; COPIED]);
        (0..len).step_by(COPIED).find_map(|at| {
            let here = COPIED.min(len - at);
            self.copy_out(offset + at, &mut mine[..here]);
            other.copy_out(from + at, &mut theirs[..here]);
            find_difference(&mine[..here], &theirs[..here]).map(|found| at + found)
        })
    }

    /// Returns the address of `len` bytes from `offset`. Panics if these bytes are not contiguous
    /// in this process: callers pass lengths that they computed, never a guest's.
    pub(crate) fn contiguous(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(self.request().is_none(), "zero-copy data have no address");
        let mut found = None;
        self.each(offset, len, |base, here| found = (here == len).then_some(base));
        found.expect("the range is contiguous")
    }

    /// Calls `piece` with the ranges of `offset`+`len`. Panics beyond the end: callers pass lengths
    /// that they computed, never a guest's.
    fn each(&self, mut offset: usize, mut len: usize, mut piece: impl FnMut(*mut u8, usize)) {
        let parts = self.parts();
        assert!(
            offset <= parts.len && len <= parts.len - offset,
            "segments: {offset}+{len} beyond {}",
            parts.len
        );
        for v in &parts.iov {
            if len == 0 {
                return;
            }
            if offset >= v.iov_len {
                offset -= v.iov_len;
                continue;
            }
            let here = len.min(v.iov_len - offset);
            piece(v.iov_base.cast::<u8>().wrapping_add(offset), here);
            offset = 0;
            len -= here;
        }
    }

    pub(crate) fn iovecs(&self) -> &[libc::iovec] {
        &self.parts().iov
    }
}

/// Adds an entry, or extends the last one if both are adjacent.
#[inline]
fn push(iov: &mut Vec<libc::iovec>, base: *mut u8, len: usize) {
    match iov.last_mut() {
        Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
            last.iov_len += len
        }
        _ => iov.push(libc::iovec { iov_base: base.cast(), iov_len: len }),
    }
}

/// Bytes that are compared at once.
const BLOCK: usize = 256;
/// Bytes that are copied before they are compared.
const COPIED: usize = 4096;

fn find_nonzero(bytes: &[u8]) -> Option<usize> {
    let zero = |block: &&[u8]| block.iter().fold(0, |all, byte| all | byte) == 0;
    let zeroes: usize = bytes.chunks(BLOCK).take_while(zero).map(<[u8]>::len).sum();
    bytes[zeroes..].iter().position(|byte| *byte != 0).map(|at| zeroes + at)
}

fn find_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let mut blocks = a.chunks(BLOCK).zip(b.chunks(BLOCK));
    let at = blocks.position(|(a, b)| a != b)? * BLOCK;
    a[at..].iter().zip(&b[at..]).position(|(a, b)| a != b).map(|here| at + here)
}

impl std::fmt::Debug for Segments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Segments({} bytes in {})", self.len(), self.count())
    }
}

#[cfg(test)]
mod tests;
