//! `Storage`: the I/O that images are written against.
//!
//! In: segments, an offset in bytes. Out: the segments again, with the number of bytes moved. All
//! implementations promise the same, and no more: a write is durable after a later `sync` that
//! answered Ok, or at once when it was asked to be `durable`; writes in flight together land in any
//! order, and a power cut may tear them.

use std::future::Future;
use std::io;
use std::ops::Range;

use blockyard_ring::Segments;
use blockyard_ring::host::Geometry;

/// What an image needs of the file (or device) under it. All offsets and lengths are bytes.
#[expect(clippy::len_without_is_empty, reason = "no caller asks whether a disk is empty")]
pub trait Storage: 'static {
    /// Reads into `segments` from `offset`; fewer bytes than asked only at the end of the file (or
    /// 0: beyond it).
    fn read(
        &self,
        segments: Segments,
        offset: u64,
    ) -> impl Future<Output = (Segments, io::Result<usize>)>;
    /// Writes `segments` at `offset`; `durable`: on stable storage before the answer (FUA).
    fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> impl Future<Output = (Segments, io::Result<usize>)>;
    /// All writes answered before this call are on stable storage when it answers (fdatasync).
    fn sync(&self) -> impl Future<Output = io::Result<()>>;
    /// Gives the range's space back to the host; it reads as zeroes, or as anything where the
    /// device says so.
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>>;
    /// Zeroes the range without moving data; `unmap`: space may be given back. `Unsupported`: the
    /// caller writes zeroes.
    fn zero(&self, offset: u64, len: u64, unmap: bool) -> impl Future<Output = io::Result<()>>;
    /// The same, at once; `Unsupported` also where whoever has the storage might write zeroes
    /// itself.
    fn zero_fast(
        &self,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> impl Future<Output = io::Result<()>> {
        self.zero(offset, len, unmap)
    }
    /// Takes space for the range ahead, and makes the file as long where it was shorter; what was
    /// not there reads as zeroes. `Unsupported`: there is nothing to take, and the caller may set
    /// the length.
    fn allocate(&self, _offset: u64, _len: u64) -> impl Future<Output = io::Result<()>> {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
    /// Sets the file's length.
    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>>;
    /// The length now.
    fn len(&self) -> impl Future<Output = io::Result<u64>>;
    /// Where the first data at or behind `offset` begin and end; None: there are holes only, up to
    /// the end. What lies in a hole reads as zeroes. Less may be told than there is; and it may
    /// block for a moment, which is no matter where this is asked.
    fn next_data(&self, offset: u64) -> impl Future<Output = io::Result<Option<Range<u64>>>> {
        std::future::ready(Ok(Some(offset..u64::MAX)))
    }
    /// Bytes that the file takes on its disk; None: that is not known.
    fn allocated(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }
    /// What was written since the last sync may be gone, without any sync having said so: why. A
    /// later one will not say it.
    fn lost(&self) -> Option<io::Error> {
        None
    }
    /// Sizes of blocks, as the storage prefers or demands them.
    fn geometry(&self) -> Geometry {
        Geometry::default()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }
    /// What requests must be multiples of.
    fn alignment(&self) -> Alignment {
        Alignment::of(&self.geometry(), self.capabilities())
    }
}

/// What a storage is, where it decides how an image uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Requests bypass the page cache of this host, and must be aligned as [`Geometry`] says.
    pub direct: bool,
    /// The length cannot change, and blocks that were never written hold any bytes: a device, or an
    /// export.
    pub fixed_length: bool,
}

/// What requests must be multiples of, in bytes (1: no demand).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    pub memory_align: u32,
    pub offset_align: u32,
}

impl Alignment {
    /// O_DIRECT has demands, the page cache has none.
    pub fn of(geometry: &Geometry, capabilities: Capabilities) -> Self {
        if !capabilities.direct {
            return Alignment { memory_align: 1, offset_align: 1 };
        }
        // 0 is "O_DIRECT opens, but is not told how": the device's block is then what works.
        let or = |n: u32| if n == 0 { geometry.logical_block } else { n };
        Alignment {
            memory_align: or(geometry.direct_memory),
            offset_align: or(geometry.direct_offset),
        }
    }
}
