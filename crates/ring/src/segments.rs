//! What one I/O moves: an iovec, and the owner that keeps its memory alive.
//!
//! In: pieces of guest memory (checked by [`GuestMemory`]) or a buffer of our own. Out: an iovec
//! for the kernel. What must hold: every entry points into memory that `owner` keeps alive, so a
//! `Segments` that travels into an operation and back makes that operation sound whoever is dropped
//! meanwhile. The vector is reused from request to request (`clear`), so the steady state allocates
//! nothing. Data that the kernel keeps to itself (ublk's zero copy) have entries that count from 0
//! and are never followed here: only their owner copies them.

mod heap;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

pub use heap::AlignedBuf;

use crate::memory::{GuestMemory, MemoryError, Region};
use crate::ublk::RequestData;

#[derive(Clone, Default)]
enum Owner {
    #[default]
    Nobody,
    Guest(Rc<GuestMemory>),
    /// Regions that were mapped for this request, or for several.
    Regions(Vec<Arc<Region>>),
    Heap(Rc<AlignedBuf>),
    /// With the kernel: the entries are offsets in it.
    Request(Rc<RequestData>),
    /// Of pieces that were gathered.
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
            _ => false,
        }
    }

    /// Keeps what `other` keeps as well.
    fn join(&mut self, other: &Owner) {
        match (&mut *self, other) {
            (_, Owner::Nobody) => {}
            (Owner::Nobody, _) => *self = other.clone(),
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

/// An iovec of bounded length with its memory's owner. See the module's page.
#[derive(Default)]
pub struct Segments {
    iov: Vec<libc::iovec>,
    len: usize,
    owner: Owner,
}

impl Segments {
    /// A zeroed buffer of our own, aligned for O_DIRECT.
    pub fn buffer(len: usize) -> Self {
        Self::of(AlignedBuf::zeroed(len))
    }

    /// A buffer as [`Segments::buffer`] makes it, whose pages take memory only from their first use
    /// on.
    pub fn mapped_buffer(len: usize) -> io::Result<Self> {
        AlignedBuf::mapped(len).map(Self::of)
    }

    fn of(buf: AlignedBuf) -> Self {
        let len = buf.len;
        let iov = vec![libc::iovec { iov_base: buf.ptr.as_ptr().cast(), iov_len: len }];
        Segments { iov, len, owner: Owner::Heap(Rc::new(buf)) }
    }

    /// A buffer of our own that holds `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let segments = Self::buffer(bytes.len());
        segments.copy_in(0, bytes);
        segments
    }

    /// For a buffer of our own that nobody else has any more: makes it one piece of `len` bytes
    /// again, which hold anything. False, and nothing is changed: it is none, or it is shorter.
    #[must_use]
    pub fn refit(&mut self, len: usize) -> bool {
        let Owner::Heap(buf) = &self.owner else { return false };
        if Rc::strong_count(buf) > 1 || buf.len < len {
            return false;
        }
        self.iov.clear();
        self.iov.push(libc::iovec { iov_base: buf.ptr.as_ptr().cast(), iov_len: len });
        self.len = len;
        true
    }

    /// Empties it for a request in `memory`, keeping the vector's room.
    #[inline]
    pub fn reset(&mut self, memory: &Rc<GuestMemory>) {
        self.iov.clear();
        self.len = 0;
        self.owner = Owner::Guest(memory.clone());
    }

    /// Empties it for a request in memory of regions, keeping the room of the vectors.
    #[inline]
    pub fn reset_regions(&mut self) {
        self.iov.clear();
        self.len = 0;
        match &mut self.owner {
            Owner::Regions(regions) => regions.clear(),
            owner => *owner = Owner::Regions(Vec::new()),
        }
    }

    /// Appends `len` bytes of `region` from `offset`, after [`Segments::reset_regions`].
    #[inline]
    pub fn push_region(
        &mut self,
        region: &Arc<Region>,
        offset: u64,
        len: u64,
    ) -> Result<(), MemoryError> {
        let out_of_range = MemoryError::OutOfRange { addr: offset, len };
        let (Owner::Regions(regions), Some(base)) = (&mut self.owner, region.piece(offset, len))
        else {
            return Err(out_of_range);
        };
        if !regions.last().is_some_and(|last| Arc::ptr_eq(last, region)) {
            regions.push(region.clone());
        }
        push(&mut self.iov, base, len as usize);
        self.len += len as usize;
        Ok(())
    }

    /// Makes it the first `len` bytes of data that the kernel keeps, keeping the vector's room.
    #[inline]
    pub(crate) fn reset_request(&mut self, data: &Rc<RequestData>, len: usize) {
        self.iov.clear();
        self.iov.push(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: len });
        self.len = len;
        self.owner = Owner::Request(data.clone());
    }

    /// Whether they are a block device's request, whose memory no process of ours sees.
    pub fn is_request(&self) -> bool {
        self.request().is_some()
    }

    /// Data that the kernel keeps: only operations of io_uring can name them.
    #[inline]
    pub(crate) fn request(&self) -> Option<&Rc<RequestData>> {
        match &self.owner {
            Owner::Request(data) => Some(data),
            _ => None,
        }
    }

    /// Lets go of the memory, keeping the vector's room.
    #[inline]
    pub fn release(&mut self) {
        self.iov.clear();
        self.len = 0;
        self.owner = Owner::Nobody;
    }

    /// Appends guest memory. Pieces that touch on the host become one entry. On an error the
    /// segments are unusable until the next `reset`.
    #[inline]
    pub fn push_guest(&mut self, addr: u64, len: u64) -> Result<(), MemoryError> {
        let Owner::Guest(memory) = &self.owner else {
            return Err(MemoryError::OutOfRange { addr, len });
        };
        let (iov, total) = (&mut self.iov, &mut self.len);
        memory.pieces(addr, len, |base, len| {
            *total += len;
            push(iov, base, len);
        })
    }

    /// Appends all of `other`, which may go before these do. False, and nothing is changed: its
    /// memory is another owner's.
    #[must_use]
    pub fn append(&mut self, other: &Segments) -> bool {
        match (&mut self.owner, &other.owner) {
            // Nobody's segments are empty.
            (mine @ Owner::Nobody, owner) => *mine = owner.clone(),
            (Owner::Regions(mine), Owner::Regions(theirs)) => mine.extend(theirs.iter().cloned()),
            (Owner::Guest(mine), Owner::Guest(theirs)) if Rc::ptr_eq(mine, theirs) => {}
            (Owner::Heap(mine), Owner::Heap(theirs)) if Rc::ptr_eq(mine, theirs) => {}
            _ => return false,
        }
        for v in &other.iov {
            push(&mut self.iov, v.iov_base.cast(), v.iov_len);
        }
        self.len += other.len;
        true
    }

    /// Appends `len` bytes of `other` from `offset`, whoever owns them: for what goes out as one,
    /// in order.
    pub fn gather(&mut self, other: &Segments, offset: usize, len: usize) {
        if other.request().is_some() {
            // Its entries mean nothing beside others'.
            let copy = Segments::buffer(len);
            copy.copy_from(0, other, offset, len);
            return self.gather(&copy, 0, len);
        }
        assert!(self.request().is_none(), "a request's entries mean nothing beside others'");
        let iov = &mut self.iov;
        other.each(offset, len, |base, len| push(iov, base, len));
        self.owner.join(&other.owner);
        self.len += len;
    }

    /// Bytes in all.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes of a buffer of our own, however little of it is in use. 0 for other memory.
    pub fn capacity(&self) -> usize {
        match &self.owner {
            Owner::Heap(buf) => buf.len,
            _ => 0,
        }
    }

    /// Entries of the iovec.
    pub fn count(&self) -> usize {
        self.iov.len()
    }

    /// Whether every entry's address and length are multiples of these powers of two: O_DIRECT's
    /// demand.
    #[inline]
    pub fn is_aligned(&self, address: usize, length: usize) -> bool {
        self.iov
            .iter()
            .all(|v| v.iov_base as usize & (address - 1) == 0 && v.iov_len & (length - 1) == 0)
    }

    /// The `len` bytes from `offset`, as segments of their own that share the owner.
    pub fn slice(&self, offset: usize, len: usize) -> Segments {
        let mut iov = Vec::new();
        self.each(offset, len, |base, len| {
            iov.push(libc::iovec { iov_base: base.cast(), iov_len: len })
        });
        Segments { iov, len, owner: self.owner.clone() }
    }

    /// Copies `bytes` in from `offset`.
    pub fn copy_in(&self, offset: usize, mut bytes: &[u8]) {
        self.each(offset, bytes.len(), |base, len| {
            let (now, later) = bytes.split_at(len);
            bytes = later;
            if let Some(data) = self.request() {
                // SAFETY: a Rust slice of ours.
                return unsafe { data.write(base as usize, now.as_ptr(), len) };
            }
            // SAFETY: `each` gives ranges inside memory the owner keeps alive; `bytes` is a Rust
            // slice of ours, which never lies in guest memory or in an AlignedBuf (those are only
            // reached through Segments).
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), base, len) };
        });
    }

    /// Copies out to `bytes` from `offset`.
    pub fn copy_out(&self, offset: usize, mut bytes: &mut [u8]) {
        self.each(offset, bytes.len(), |base, len| {
            let (now, later) = std::mem::take(&mut bytes).split_at_mut(len);
            bytes = later;
            if let Some(data) = self.request() {
                // SAFETY: a Rust slice of ours.
                return unsafe { data.read(base as usize, now.as_mut_ptr(), len) };
            }
            // SAFETY: as in copy_in.
            unsafe { std::ptr::copy_nonoverlapping(base, now.as_mut_ptr(), len) };
        });
    }

    /// Copies `len` bytes from `other` at `from` into `self` at `to`.
    pub fn copy_from(&self, to: usize, other: &Segments, from: usize, len: usize) {
        match (self.request(), other.request()) {
            // SAFETY: both ranges are alive; they may overlap when a guest names the same memory
            // twice, so `copy`.
            (None, None) => self.each_pair(to, other, from, len, |dst, src, len| unsafe {
                std::ptr::copy(src, dst, len);
            }),
            // SAFETY: memory that the other's owner keeps alive; the kernel only reads it.
            (Some(data), None) => self.each_pair(to, other, from, len, |dst, src, len| unsafe {
                data.write(dst as usize, src, len);
            }),
            // SAFETY: memory that our owner keeps alive.
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

    /// Calls `piece` with the ranges of `self` from `to` and those of `other` from `from`, `len`
    /// bytes, side by side.
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
        // SAFETY: `each` gives ranges inside memory the owner keeps alive.
        self.each(offset, len, |base, len| unsafe { base.write_bytes(0, len) });
    }

    /// Where the first byte that is not zero lies in `len` bytes from `offset`, counted from there.
    /// Looks at copies: an operation, or a guest, may change the memory at the same time.
    pub fn find_nonzero(&self, offset: usize, len: usize) -> Option<usize> {
        let mut copy = [0; COPIED];
        (0..len).step_by(COPIED).find_map(|at| {
            let here = &mut copy[..COPIED.min(len - at)];
            self.copy_out(offset + at, here);
            find_nonzero(here).map(|found| at + found)
        })
    }

    /// Where `len` bytes from `offset` first differ from those of `other` from `from`, counted from
    /// there. Looks at copies, too.
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

    /// The address of `len` bytes from `offset`, which are one piece of memory of this process.
    /// Panics if they are not: lengths are our own sums.
    pub(crate) fn contiguous(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(self.request().is_none(), "a request's data have no address");
        let mut found = None;
        self.each(offset, len, |base, here| found = (here == len).then_some(base));
        found.expect("a buffer is one piece")
    }

    /// Calls `piece` with the ranges that make up `offset`+`len`. Panics beyond the end: lengths
    /// are our own sums.
    fn each(&self, mut offset: usize, mut len: usize, mut piece: impl FnMut(*mut u8, usize)) {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "segments: {offset}+{len} beyond {}",
            self.len
        );
        for v in &self.iov {
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
        &self.iov
    }
}

/// Adds an entry, or lengthens the last one where the two touch.
#[inline]
fn push(iov: &mut Vec<libc::iovec>, base: *mut u8, len: usize) {
    match iov.last_mut() {
        Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
            last.iov_len += len
        }
        _ => iov.push(libc::iovec { iov_base: base.cast(), iov_len: len }),
    }
}

/// Bytes looked at together.
const BLOCK: usize = 256;
/// Bytes copied together before a look at them.
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
        write!(f, "Segments({} bytes in {})", self.len, self.iov.len())
    }
}

#[cfg(test)]
mod tests;
