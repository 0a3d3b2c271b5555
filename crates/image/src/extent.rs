//! What a layer and a chain know about a range of the guest's disk.

use std::future::Future;
use std::io;

use blockyard_ring::Segments;

use crate::sync::pace::Zeroing;

/// Where a layer has the bytes of a range. Offsets are in the layer's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the layer's file at this offset (qcow2 with an external data file: in that file).
    Data(u64),
    /// Reads as zeroes.
    Zero,
    /// In a compressed cluster; the value is the format's descriptor. The extent lies in that one
    /// cluster.
    Compressed(u64),
    /// Not in this layer: read the backing layer.
    Absent,
}

/// A range with all its bytes in one place: `len` bytes from the requested offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub len: u64,
    pub place: Place,
}

impl Extent {
    /// Returns true if `next` continues this extent: data that follow in the file, or the same kind
    /// of range without data. `next` must begin where this extent ends.
    #[inline]
    pub fn goes_on(&self, next: &Extent) -> bool {
        match (self.place, next.place) {
            (Place::Data(a), Place::Data(b)) => a + self.len == b,
            (Place::Zero, Place::Zero) | (Place::Absent, Place::Absent) => true,
            _ => false,
        }
    }
}

/// Result of a lookup in a chain: the layer, and where the data are in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupResult {
    pub layer: usize,
    pub extent: Extent,
}

impl LookupResult {
    /// Extends this result by `next`, and returns true, if `next` continues it in the same layer.
    /// `next` must begin where this result ends.
    #[inline]
    pub fn take_in(&mut self, next: &LookupResult) -> bool {
        let goes_on = self.layer == next.layer && self.extent.goes_on(&next.extent);
        if goes_on {
            self.extent.len += next.extent.len;
        }
        goes_on
    }
}

/// Status of `len` bytes with equal properties. The fields have the names of `qemu-img map`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    pub len: u64,
    /// Layer that has the range; 0 is the topmost.
    pub depth: usize,
    /// Whether that layer has the range. If false, no layer has it, and it reads as zeroes.
    pub present: bool,
    pub zero: bool,
    pub data: bool,
    pub compressed: bool,
    /// Offset in the layer's file (or data file).
    pub offset: Option<u64>,
}

impl BlockStatus {
    /// Returns the status of `len` bytes of data somewhere in the topmost layer.
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

    /// Returns the status of `len` bytes that none of `depth` layers has.
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

    /// Returns true if `next`, which begins where this ends, has the same status and continues it
    /// in the file.
    pub(crate) fn goes_on(&self, next: &BlockStatus) -> bool {
        let kind = |s: &BlockStatus| (s.depth, s.present, s.zero, s.data, s.compressed);
        kind(self) == kind(next) && self.offset.map(|offset| offset + self.len) == next.offset
    }
}

/// The layers below a layer that is written to. They hold the data that this layer lacks.
pub trait BackingLayers {
    /// Reads from the layers below into `segments`. Bytes behind their end are zeroes.
    fn read_backing(
        &self,
        segments: Segments,
        offset: u64,
    ) -> impl Future<Output = (Segments, io::Result<()>)>;
    /// Returns true if the range is known to read as zeroes, without reading data.
    fn backing_is_zero(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<bool>>;
    /// Returns true if there is a layer below.
    fn exists(&self) -> bool;
    /// Returns true if data may be copied from below later than the write that needs them.
    fn may_defer(&self) -> bool {
        self.exists()
    }
}

/// Backing layers of an image without a backing image. They read as zeroes.
pub struct NoBacking;

impl BackingLayers for NoBacking {
    async fn read_backing(&self, segments: Segments, _: u64) -> (Segments, io::Result<()>) {
        Zeroing::default().zero(&segments).await;
        (segments, Ok(()))
    }

    async fn backing_is_zero(&self, _: u64, _: u64) -> io::Result<bool> {
        Ok(true)
    }

    fn exists(&self) -> bool {
        false
    }
}
