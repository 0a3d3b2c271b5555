//! Raw images: the guest's offset is the file's offset.
//!
//! In: segments and offsets in bytes, inside `capacity`. Out: one operation on the storage for each request that meets
//! O_DIRECT's demands; others go through a buffer of our own.
//! What must hold: a file whose length is no multiple of a sector reads as zeroes up to the end of its last sector, and
//! grows to it when that sector is written (as QEMU does); a write of part of a block never undoes another write.

use std::io;
use std::sync::Arc;

use blockyard_ring::{Segments, Storage};

use crate::SECTOR;
use crate::open::ImageFile;
use crate::range_lock::RangeLock;

/// Zeroes are written in pieces of this many bytes where the host has no cheaper way.
const ZERO_CHUNK: u64 = 1 << 20;

/// What O_DIRECT demands, in bytes (1: nothing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawShape {
    pub memory_align: u32,
    pub offset_align: u32,
}

impl RawShape {
    pub fn of(file: &ImageFile) -> Self {
        let geometry = file.geometry();
        if !file.direct() {
            return RawShape { memory_align: 1, offset_align: 1 };
        }
        // 0 is "O_DIRECT opens, but is not told how": the device's block is then what works.
        let or = |n: u32| if n == 0 { geometry.logical_block } else { n };
        RawShape { memory_align: or(geometry.direct_memory), offset_align: or(geometry.direct_offset) }
    }

    /// Writes of single sectors need read-modify-write.
    fn splits_sectors(&self) -> bool {
        u64::from(self.offset_align) > SECTOR
    }
}

/// A raw image on one reactor.
pub struct Raw<S> {
    storage: S,
    shape: RawShape,
    file: Option<Arc<ImageFile>>,
    own_lock: RangeLock,
}

impl<S: Storage> Raw<S> {
    /// The image in `file`, whose descriptor `storage` wraps.
    pub fn new(storage: S, file: Arc<ImageFile>) -> Self {
        Raw { storage, shape: RawShape::of(&file), file: Some(file), own_lock: RangeLock::default() }
    }

    /// An image on storage that is no host file.
    pub fn on(storage: S, shape: RawShape) -> Self {
        Raw { storage, shape, file: None, own_lock: RangeLock::default() }
    }

    /// Reads all of `segments` from `offset`; what lies beyond the end of the file is zeroes.
    #[inline]
    pub async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        if !self.fits(&segments, offset) {
            return self.read_through_buffer(segments, offset).await;
        }
        let (segments, result) = self.storage.read(segments, offset).await;
        let result = result.map(|n| {
            if n < segments.len() {
                segments.zero(n, segments.len() - n);
            }
        });
        (segments, result)
    }

    /// Writes all of `segments` at `offset`; `durable`: on stable storage before the answer.
    #[inline]
    pub async fn write(&self, segments: Segments, offset: u64, durable: bool) -> (Segments, io::Result<()>) {
        if self.shape.splits_sectors() || !self.fits(&segments, offset) {
            return self.write_with_care(segments, offset, durable).await;
        }
        let (segments, result) = self.storage.write(segments, offset, durable).await;
        (segments, result.map(|_| ()))
    }

    pub async fn flush(&self) -> io::Result<()> {
        self.storage.sync().await
    }

    /// Gives space back to the host; a hint, so a host that cannot is no error.
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.storage.discard(offset, len).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => Ok(()),
            done => done,
        }
    }

    /// Zeroes; `unmap`: the host may have the space back.
    pub async fn write_zeroes(&self, offset: u64, len: u64, unmap: bool, durable: bool) -> io::Result<()> {
        match self.storage.zero(offset, len, unmap).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => self.write_zero_bytes(offset, len, durable).await,
            // A range handed to the file system is metadata: only a sync makes it durable.
            Ok(()) if durable => self.storage.sync().await,
            done => done,
        }
    }

    pub fn storage(&self) -> &S {
        &self.storage
    }

    #[inline]
    fn fits(&self, segments: &Segments, offset: u64) -> bool {
        let shape = self.shape;
        shape.memory_align == 1
            || ((offset | segments.len() as u64) & (u64::from(shape.offset_align) - 1) == 0
                && segments.is_aligned(shape.memory_align as usize))
    }

    fn lock(&self) -> &RangeLock {
        self.file.as_ref().map_or(&self.own_lock, |f| &f.range_lock)
    }

    /// `offset`+`len` widened to whole blocks.
    fn widen(&self, offset: u64, len: usize) -> (u64, usize) {
        let align = u64::from(self.shape.offset_align.max(SECTOR as u32));
        let start = offset & !(align - 1);
        let end = (offset + len as u64).next_multiple_of(align);
        (start, (end - start) as usize)
    }

    async fn read_through_buffer(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let (start, len) = self.widen(offset, segments.len());
        let (buffer, result) = self.storage.read(Segments::buffer(len), start).await;
        if result.is_ok() {
            // The buffer came zeroed: what the file did not have stays so.
            segments.copy_from(0, &buffer, (offset - start) as usize, segments.len());
        }
        (segments, result.map(|_| ()))
    }

    async fn write_with_care(&self, segments: Segments, offset: u64, durable: bool) -> (Segments, io::Result<()>) {
        let (start, len) = self.widen(offset, segments.len());
        let _guard =
            if self.shape.splits_sectors() { Some(self.lock().hold(start..start + len as u64).await) } else { None };
        if self.fits(&segments, offset) {
            let (segments, result) = self.storage.write(segments, offset, durable).await;
            return (segments, result.map(|_| ()));
        }
        let result = self.write_through_buffer(&segments, offset, (start, len), durable).await;
        (segments, result)
    }

    async fn write_through_buffer(
        &self,
        segments: &Segments,
        offset: u64,
        (start, len): (u64, usize),
        durable: bool,
    ) -> io::Result<()> {
        let mut buffer = Segments::buffer(len);
        if len != segments.len() {
            let result;
            (buffer, result) = self.storage.read(buffer, start).await;
            result?;
        }
        buffer.copy_from((offset - start) as usize, segments, 0, segments.len());
        let (_, result) = self.storage.write(buffer, start, durable).await;
        result.map(|_| ())
    }

    async fn write_zero_bytes(&self, mut offset: u64, mut len: u64, durable: bool) -> io::Result<()> {
        let mut zeroes = Segments::buffer(len.min(ZERO_CHUNK) as usize);
        while len > 0 {
            let here = len.min(ZERO_CHUNK);
            if here < zeroes.len() as u64 {
                zeroes = zeroes.slice(0, here as usize);
            }
            let result;
            (zeroes, result) = self.write(zeroes, offset, durable).await;
            result?;
            offset += here;
            len -= here;
        }
        Ok(())
    }
}
