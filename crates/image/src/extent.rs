//! What one layer of a chain says about a range of the guest's disk, and what a chain tells of it.

use std::future::Future;
use std::io;

use blockyard_ring::Segments;

/// Where a range's bytes are, as far as one layer knows. Offsets are bytes of the layer's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the layer's file, from this offset on. (qcow2 with an external data file: in that.)
    Data(u64),
    /// They read as zeroes.
    Zero,
    /// In a compressed cluster; the descriptor is the format's own. The extent lies in that one
    /// cluster.
    Compressed(u64),
    /// The layer below knows.
    Absent,
}

/// A range whose bytes lie in one place: `len` bytes from the offset that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub len: u64,
    pub place: Place,
}

impl Extent {
    /// Whether `next`, which begins where this ends, has its bytes where this one's go on.
    #[inline]
    pub fn goes_on(&self, next: &Extent) -> bool {
        match (self.place, next.place) {
            (Place::Data(a), Place::Data(b)) => a + self.len == b,
            (Place::Zero, Place::Zero) | (Place::Absent, Place::Absent) => true,
            _ => false,
        }
    }
}

/// `len` bytes that are alike. The names are QEMU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    pub len: u64,
    /// The layer that decided: 0 is the topmost.
    pub depth: usize,
    /// That layer has the range; else nothing has, and it reads as zeroes.
    pub present: bool,
    pub zero: bool,
    pub data: bool,
    pub compressed: bool,
    /// In the layer's file (or data file).
    pub offset: Option<u64>,
}

impl BlockStatus {
    /// `len` bytes of data, somewhere in the topmost layer.
    pub fn data(len: u64) -> Self {
        BlockStatus {
            len,
            depth: 0,
            present: true,
            zero: false,
            data: true,
            compressed: false,
            offset: None,
        }
    }

    /// `len` bytes that none of `depth` layers has.
    pub(crate) fn nothing(depth: usize, len: u64) -> Self {
        BlockStatus {
            len,
            depth,
            present: false,
            zero: true,
            data: false,
            compressed: false,
            offset: None,
        }
    }

    /// Whether `next`, which begins where this ends, is the same, and goes on in the file.
    pub(crate) fn goes_on(&self, next: &BlockStatus) -> bool {
        let kind = |s: &BlockStatus| (s.depth, s.present, s.zero, s.data, s.compressed);
        kind(self) == kind(next) && self.offset.map(|offset| offset + self.len) == next.offset
    }
}

/// The layers below one that writes: where it finds what it has not.
pub trait BackingLayers {
    /// Fills `segments` with what the layers below hold from `offset` on; beyond their end there
    /// are zeroes.
    fn read_backing(
        &self,
        segments: Segments,
        offset: u64,
    ) -> impl Future<Output = (Segments, io::Result<()>)>;
    /// Whether that is known to be zeroes, without reading data.
    fn backing_is_zero(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<bool>>;
    /// There is something below.
    fn exists(&self) -> bool;
}

/// Nothing is below: zeroes.
pub struct NoBacking;

impl BackingLayers for NoBacking {
    async fn read_backing(&self, segments: Segments, _: u64) -> (Segments, io::Result<()>) {
        segments.zero(0, segments.len());
        (segments, Ok(()))
    }

    async fn backing_is_zero(&self, _: u64, _: u64) -> io::Result<bool> {
        Ok(true)
    }

    fn exists(&self) -> bool {
        false
    }
}
