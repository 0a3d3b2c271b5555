//! `Storage`: the I/O interface under images.
//!
//! In: segments, and an offset in bytes. Out: the segments again, and the number of bytes
//! transferred. All implementations promise the same: a write is durable after a later `sync` that
//! returned Ok, or when it completes if it is `durable`. Concurrent writes reach the disk in any
//! order, and a power cut may tear them.

use std::future::Future;
use std::io;
use std::ops::Range;

use blockyard_ring::Segments;
use blockyard_ring::host::Geometry;

/// The file or device under an image. All offsets and lengths are in bytes.
#[expect(clippy::len_without_is_empty, reason = "no caller asks whether a disk is empty")]
pub trait Storage: 'static {
    /// Reads into `segments` from `offset`. Returns fewer bytes than requested only at the end of
    /// the file, and 0 beyond it.
    fn read(
        &self,
        segments: Segments,
        offset: u64,
    ) -> impl Future<Output = (Segments, io::Result<usize>)>;
    /// Writes `segments` at `offset`. `durable`: on stable storage when it completes (FUA).
    fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> impl Future<Output = (Segments, io::Result<usize>)>;
    /// Makes all writes durable that completed before this call (fdatasync).
    fn sync(&self) -> impl Future<Output = io::Result<()>>;
    /// Frees the range's space. The range then reads as zeroes, or as any data if the device does
    /// not promise zeroes.
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>>;
    /// Zeroes the range without transferring data. `unmap`: its space may be freed. Fails with
    /// `Unsupported` if the caller must write zeroes instead.
    fn zero(&self, offset: u64, len: u64, unmap: bool) -> impl Future<Output = io::Result<()>>;
    /// Like [`Storage::zero`], but also fails with `Unsupported` if the storage might have to write
    /// zeroes itself.
    fn zero_fast(
        &self,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> impl Future<Output = io::Result<()>> {
        self.zero(offset, len, unmap)
    }
    /// Allocates space for the range, and extends the file if it is shorter. New bytes read as
    /// zeroes. Fails with `Unsupported` if space cannot be allocated; then the caller may set the
    /// length.
    fn allocate(&self, _offset: u64, _len: u64) -> impl Future<Output = io::Result<()>> {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
    /// Sets the file's length. Fails with `Unsupported` if it cannot change.
    fn set_len(&self, _len: u64) -> impl Future<Output = io::Result<()>> {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
    /// Returns the present length.
    fn len(&self) -> impl Future<Output = io::Result<u64>>;
    /// Returns the first range of data at or after `offset`. None: only holes follow, which read as
    /// zeroes. The range may be shorter than the data. The call may block briefly.
    fn next_data(&self, offset: u64) -> impl Future<Output = io::Result<Option<Range<u64>>>> {
        std::future::ready(Ok(Some(offset..u64::MAX)))
    }
    /// Like [`Storage::next_data`], but looks for data in `range` only. None: the range has none. A
    /// range of data that is returned may begin or end after `range`.
    fn next_data_within(
        &self,
        range: Range<u64>,
    ) -> impl Future<Output = io::Result<Option<Range<u64>>>> {
        self.next_data(range.start)
    }
    /// Returns the bytes that are allocated to the file. None: unknown.
    fn allocated(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }
    /// Returns the reason if writes since the last sync may have been lost without a failed sync.
    /// Later syncs do not report it.
    fn lost(&self) -> Option<io::Error> {
        None
    }
    /// Returns whether a failed sync has lost no write, so that a later sync can make all of them
    /// durable. Only a storage that tracks each loss may return true.
    fn keeps_unsynced(&self) -> bool {
        false
    }
    /// Returns how lookups of where data lie ended on this reactor. Zero for storages without such
    /// lookups.
    fn lookups(&self) -> LookupFigures {
        LookupFigures::default()
    }
    /// Returns the block sizes that the storage prefers or requires.
    fn geometry(&self) -> Geometry {
        Geometry::default()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }
    /// Returns what requests must be multiples of.
    fn alignment(&self) -> Alignment {
        Alignment::of(&self.geometry(), self.capabilities())
    }
}

/// Number of lookups of where data lie, by their result: in the L2 tables of an image, or among the
/// answers of a map. A lookup that misses may be repeated, and then counts as a hit, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupFigures {
    /// Lookups that found the place in memory.
    pub hits: u64,
    /// Lookups that did not, and loaded it or asked for it.
    pub misses: u64,
}

impl LookupFigures {
    /// Adds the figures of `other`.
    pub fn merge(&mut self, other: &LookupFigures) {
        self.hits += other.hits;
        self.misses += other.misses;
    }
}

/// Properties of a storage that decide how an image uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether requests bypass this host's page cache, and must be aligned as [`Geometry`] says.
    pub direct: bool,
    /// Whether the length cannot change, and blocks that were never written may hold any data. This
    /// applies to block devices and NBD exports.
    pub fixed_length: bool,
}

/// What requests must be multiples of, in bytes. 1: no requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    pub memory_align: u32,
    pub offset_align: u32,
}

impl Alignment {
    /// Returns the alignment that O_DIRECT requires. The page cache requires none.
    pub fn of(geometry: &Geometry, capabilities: Capabilities) -> Self {
        if !capabilities.direct {
            return Alignment { memory_align: 1, offset_align: 1 };
        }
        // 0 means that O_DIRECT works but the kernel does not report its alignment. Then use the
        // device's block size, which always works.
        let or = |n: u32| if n == 0 { geometry.logical_block } else { n };
        Alignment {
            memory_align: or(geometry.direct_memory),
            offset_align: or(geometry.direct_offset),
        }
    }
}
