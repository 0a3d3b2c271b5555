//! Raw images: the guest's offset is the file's offset.
//!
//! In: segments and byte offsets inside `capacity`. Out: one storage operation for each request
//! that meets the O_DIRECT alignment; other requests go through a bounce buffer.
//!
//! Invariants:
//! - If a file's length is not a multiple of the sector size, it reads as zeroes up to the end of
//!   its last sector. It grows to that end when the sector is written (as with QEMU), never
//!   further.
//! - A write of part of a block never undoes a write or zeroing of the rest of the block.
//!   Overlapping requests in flight at once have no order.
//!
//! A power cut before a flush may do two things, only to such files: tear the last sector where the
//! file ended; and leave the file longer, up to the end of the last O_DIRECT block, if that is
//! larger than a sector.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::semaphore::Semaphore;
use blockyard_ring::{Handle, Segments};
use blockyard_storage::{Alignment, ImageFile, RangeGuard, RangeLock, Storage, Store};

use crate::SECTOR;
use crate::extent::BlockStatus;

#[cfg(test)]
mod tests;

/// Size in bytes of written zeroes, if the host has no cheaper way. The smaller size is for the
/// page cache: the source stays in the processor's cache.
const ZERO_CHUNK: u64 = 1 << 20;
const CACHED_ZERO_CHUNK: u64 = 256 << 10;

/// Bounce buffer of requests that do not meet the O_DIRECT alignment: size of a piece in bytes, and
/// number of pieces at a time. This bounds the memory of one guest's copies to 16 MiB, and that of
/// written zeroes to the same.
const COPY: u64 = 1 << 20;
const COPIES: u64 = 16;

/// Returns true if the block size exceeds a sector: single sectors need read-modify-write.
fn splits_sectors(alignment: &Alignment) -> bool {
    u64::from(alignment.offset_align) > SECTOR
}

fn copies_semaphore() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(COPIES))
}

/// A raw image on one reactor. Clones, and handles made from one file, share the range lock.
#[derive(Clone)]
pub struct Raw {
    storage: Store,
    alignment: Alignment,
    /// Alignment of zeroing and discarding in bytes. A block device refuses parts of its logical
    /// blocks.
    unit: u64,
    /// Whether to keep the file's exact length, even if O_DIRECT writes whole blocks at its end.
    exact: bool,
    lock: Arc<RangeLock>,
    copies: Arc<Semaphore>,
    zeroes: Arc<Semaphore>,
}

impl Raw {
    /// Opens a raw image, or the raw file of another format, on one reactor.
    pub fn open(file: &ImageFile, handle: &Handle) -> io::Result<Self> {
        Ok(Raw::new(file.storage(handle)?, file.range_lock().clone()))
    }

    /// Makes the image on `storage`. All reactors with the same open file share `lock`.
    pub fn new(storage: Store, lock: Arc<RangeLock>) -> Self {
        let unit = if storage.capabilities().fixed_length {
            u64::from(storage.geometry().logical_block)
        } else {
            1
        };
        let alignment = storage.alignment();
        Raw { unit, lock, ..Raw::on(storage, alignment) }
    }

    /// Makes an image on storage that does not report its alignment.
    pub fn on(storage: impl Into<Store>, alignment: Alignment) -> Self {
        Raw {
            storage: storage.into(),
            alignment,
            unit: 1,
            exact: true,
            lock: Arc::default(),
            copies: copies_semaphore(),
            zeroes: copies_semaphore(),
        }
    }

    /// For a file whose length has no meaning, such as that of a qcow2 image: lets the file end
    /// with a whole O_DIRECT block. To truncate it again could undo a concurrent extension.
    pub fn in_whole_blocks(self) -> Self {
        Raw { exact: false, ..self }
    }

    /// Reads `segments.len()` bytes at `offset`; bytes behind the end of the file read as zeroes.
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

    /// Writes all of `segments` at `offset`. With `durable` the data are on stable storage on
    /// return.
    #[inline]
    pub async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        if splits_sectors(&self.alignment) || !self.fits(&segments, offset) {
            return self.write_with_care(segments, offset, durable).await;
        }
        let (segments, result) = self.storage.write(segments, offset, durable).await;
        (segments, result.map(|_| ()))
    }

    pub async fn flush(&self) -> io::Result<()> {
        self.storage.sync().await
    }

    /// Makes the file `size` bytes long, durably, unless it is longer. Returns its length.
    pub async fn grow(&self, size: u64) -> io::Result<u64> {
        {
            let _guard = self.hold_tail().await?;
            let len = self.storage.len().await?;
            if len > size {
                return Ok(len);
            }
            self.storage.set_len(size).await?;
        }
        self.storage.sync().await?;
        if self.storage.len().await? < size {
            return Err(io::Error::other("another program has made it shorter"));
        }
        Ok(size)
    }

    /// Locks the file's last block, because a write of part of it may make the file longer for a
    /// moment, and then truncates the file.
    async fn hold_tail(&self) -> io::Result<RangeGuard<'_>> {
        loop {
            let last = self.storage.len().await?.saturating_sub(1);
            let (start, len) = self.widen(last, 1);
            let guard = self.lock.hold(start..start + len).await;
            let last = self.storage.len().await?.saturating_sub(1);
            if (start..start + len).contains(&last) {
                return Ok(guard);
            }
        }
    }

    /// Deallocates a range in the host: a hint, so a host without support is no error.
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let (start, end) = self.whole_units(offset, len);
        if start >= end {
            return Ok(());
        }
        let _guard = self.hold_parts(start, end - start).await;
        match self.storage.discard(start, end - start).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => Ok(()),
            done => done,
        }
    }

    /// Zeroes a range. With `unmap` the host may deallocate it. Durable after a flush, like a
    /// write.
    pub async fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self.zero_units(offset, len, unmap, false).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                self.write_zero_bytes(offset, len).await
            }
            done => done,
        }
    }

    /// Like [`Raw::write_zeroes`], but returns Unsupported, and changes nothing, if zeroes would
    /// have to be written as data.
    pub async fn write_zeroes_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.may_zero_fast(offset, len)?;
        self.zero_units(offset, len, unmap, true).await
    }

    /// Returns Unsupported if zeroes would certainly have to be written as data: in part of a
    /// device's block. For other ranges only the operation itself shows whether the host supports
    /// it.
    pub fn may_zero_fast(&self, offset: u64, len: u64) -> io::Result<()> {
        let whole = self.whole_units(offset, len) == (offset, offset + len);
        if whole { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    /// Zeroes whole units by the host's means. If it returns Unsupported, nothing was changed.
    async fn zero_units(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        let (start, end) = self.whole_units(offset, len);
        if start >= end {
            return if len == 0 { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) };
        }
        let zeroed = {
            let _guard = self.hold_parts(start, end - start).await;
            match fast {
                true => self.storage.zero_fast(start, end - start, unmap).await,
                false => self.storage.zero(start, end - start, unmap).await,
            }
        };
        zeroed?;
        self.write_zero_bytes(offset, start - offset).await?;
        self.write_zero_bytes(end, offset + len - end).await
    }

    /// Returns whether the bytes at `offset` are data or a hole, and for how many bytes that holds.
    /// Behind the file's end is a hole.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        let (data, len) = self.data_or_hole(offset, len).await?;
        Ok(BlockStatus { zero: !data, data, offset: Some(offset), ..BlockStatus::data(len) })
    }

    /// Returns true for data, false for a hole, and the number of bytes for which that holds.
    pub(crate) async fn data_or_hole(&self, host: u64, len: u64) -> io::Result<(bool, u64)> {
        Ok(match self.storage.next_data_within(host..host.saturating_add(len)).await? {
            None => (false, len),
            Some(data) if data.start > host => (false, len.min(data.start - host)),
            Some(data) => (true, len.min(data.end - host)),
        })
    }

    pub fn storage(&self) -> &Store {
        &self.storage
    }

    /// Returns true for a block device. Its length is fixed, and unwritten blocks have arbitrary
    /// contents.
    pub fn is_device(&self) -> bool {
        self.unit > 1
    }

    #[inline]
    fn fits(&self, segments: &Segments, offset: u64) -> bool {
        let Alignment { memory_align, offset_align } = self.alignment;
        let (memory_align, blocks) = (memory_align as usize, offset_align as usize);
        (offset | segments.len() as u64) & (u64::from(offset_align) - 1) == 0
            // Kernels before 6.18 require whole blocks in each segment, not only in the sum.
            && (memory_align == 1 || segments.is_aligned(memory_align, blocks))
    }

    /// Widens a range to whole blocks; returns start and length.
    fn widen(&self, offset: u64, len: u64) -> (u64, u64) {
        let align = u64::from(self.alignment.offset_align).max(SECTOR);
        let start = offset & !(align - 1);
        (start, (offset + len).next_multiple_of(align) - start)
    }

    /// Returns start and end of the whole units in a range; empty if start >= end.
    fn whole_units(&self, offset: u64, len: u64) -> (u64, u64) {
        (offset.next_multiple_of(self.unit), (offset + len) & !(self.unit - 1))
    }

    /// Locks the range's blocks if a read-modify-write could undo what the caller does: if a block
    /// has several sectors, or if the range covers part of a block.
    async fn hold_parts(&self, offset: u64, len: u64) -> Option<RangeGuard<'_>> {
        let whole_blocks = (offset | len).is_multiple_of(self.alignment.offset_align.into());
        if !splits_sectors(&self.alignment) && whole_blocks {
            return None;
        }
        let (start, len) = self.widen(offset, len);
        Some(self.lock.hold(start..start + len).await)
    }

    /// Reads whole blocks into a new buffer; bytes behind the end of the file are zeroes.
    async fn read_blocks(&self, start: u64, len: usize) -> io::Result<Segments> {
        let (buffer, result) = self.storage.read(Segments::buffer(len), start).await;
        let n = result?;
        // A direct read of the last block may return the device's bytes behind the end.
        buffer.zero(n, len - n);
        Ok(buffer)
    }

    async fn read_through_buffer(
        &self,
        segments: Segments,
        offset: u64,
    ) -> (Segments, io::Result<()>) {
        let (mut at, end) = (offset, offset + segments.len() as u64);
        while at < end {
            let stop = self.copy_end(at, end);
            let _permit = self.copies.acquire().await;
            let (start, len) = self.widen(at, stop - at);
            match self.read_blocks(start, len as usize).await {
                Ok(buffer) => segments.copy_from(
                    (at - offset) as usize,
                    &buffer,
                    (at - start) as usize,
                    (stop - at) as usize,
                ),
                Err(e) => return (segments, Err(e)),
            }
            at = stop;
        }
        (segments, Ok(()))
    }

    /// Returns the end of the piece at `at`: pieces are split at multiples of a block.
    fn copy_end(&self, at: u64, end: u64) -> u64 {
        let piece = COPY.max(self.alignment.offset_align.into());
        end.min((at / piece + 1) * piece)
    }

    async fn write_with_care(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        let (start, len) = self.widen(offset, segments.len() as u64);
        let care = splits_sectors(&self.alignment) || len != segments.len() as u64;
        let _guard = if care { Some(self.lock.hold(start..start + len).await) } else { None };
        if self.fits(&segments, offset) {
            let (segments, result) = self.storage.write(segments, offset, durable).await;
            return (segments, result.map(|_| ()));
        }
        let result = self.write_through_buffer(&segments, offset, durable).await;
        (segments, result)
    }

    /// Writes through the bounce buffer, piece by piece. The caller holds the lock of partial
    /// blocks.
    async fn write_through_buffer(
        &self,
        segments: &Segments,
        offset: u64,
        durable: bool,
    ) -> io::Result<()> {
        let (mut at, end) = (offset, offset + segments.len() as u64);
        while at < end {
            let stop = self.copy_end(at, end);
            let _permit = self.copies.acquire().await;
            let (start, len) = self.widen(at, stop - at);
            if len == stop - at {
                let buffer = Segments::buffer(len as usize);
                buffer.copy_from(0, segments, (at - offset) as usize, len as usize);
                self.storage.write(buffer, start, durable).await.1?;
            } else {
                self.modify(segments, offset, at..stop, durable).await?;
            }
            at = stop;
        }
        Ok(())
    }

    /// Reads, modifies and writes the blocks of `part` of a write at `offset`. The caller holds
    /// their lock.
    async fn modify(
        &self,
        segments: &Segments,
        offset: u64,
        part: Range<u64>,
        durable: bool,
    ) -> io::Result<()> {
        let part_len = part.end - part.start;
        let (start, len) = self.widen(part.start, part_len);
        let (file_end, block_end) = (self.storage.len().await?, start + len);
        let buffer = self.read_blocks(start, len as usize).await?;
        let (to, from) = ((part.start - start) as usize, (part.start - offset) as usize);
        buffer.copy_from(to, segments, from, part_len as usize);
        self.storage.write(buffer, start, durable).await.1?;
        let end = file_end.max(part.end);
        if self.exact && end < block_end {
            self.take_back(end, block_end).await;
        }
        Ok(())
    }

    /// Truncates the file to `end` again, after a whole-block write made it `grown` bytes long. So
    /// the guest's disk keeps its size.
    async fn take_back(&self, end: u64, grown: u64) {
        let result = match self.storage.len().await {
            Ok(len) if len == grown => self.storage.set_len(end).await,
            // If the file was resized meanwhile, keep its new size.
            other => other.map(|_| ()),
        };
        if let Err(e) = result {
            tracing::warn!(
                "cannot truncate the image's last block: it stays {} bytes too long: {e}",
                grown - end
            );
        }
    }

    /// Writes zeroes as data, so that the host allocates space.
    pub(crate) async fn write_zero_bytes(&self, mut offset: u64, mut len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _permit = self.zeroes.acquire().await;
        let mut zeroes = Segments::default();
        let chunk = if self.alignment.offset_align == 1 { CACHED_ZERO_CHUNK } else { ZERO_CHUNK };
        while len > 0 {
            let here = len.min(chunk - offset % chunk);
            if zeroes.len() as u64 != here {
                zeroes = Segments::buffer(here as usize);
            }
            let result;
            (zeroes, result) = self.write(zeroes, offset, false).await;
            result?;
            offset += here;
            len -= here;
        }
        Ok(())
    }
}
