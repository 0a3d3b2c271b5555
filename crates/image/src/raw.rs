//! Raw images: the guest's offset is the file's offset.
//!
//! In: segments and offsets in bytes, inside `capacity`. Out: one operation on the storage for each
//! request that meets O_DIRECT's demands; others go through a buffer of our own. What must hold: a
//! file whose length is no multiple of a sector reads as zeroes up to the end of its last sector,
//! and grows to it when that sector is written (as QEMU does), never further; a write of part of a
//! block never undoes what was written to, or zeroed in, the rest of the block. (Requests that
//! overlap and are in flight at once are in no order.) What a power cut may do until a flush, and
//! only to such files: tear the last sector where the file ended; leave the file as long as the
//! last whole block of O_DIRECT's, where that is larger than a sector.

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

/// Zeroes are written in pieces of this many bytes where the host has no cheaper way. Those for the
/// page cache are copied there, and they stay in the processor's cache meanwhile.
const ZERO_CHUNK: u64 = 1 << 20;
const CACHED_ZERO_CHUNK: u64 = 256 << 10;

/// Requests that do not suit O_DIRECT are copied in pieces of at most this many bytes, so many
/// pieces at a time: whatever a guest asks for, its copies take 16 MiB of memory, and the zeroes
/// that are written for it no more.
const COPY: u64 = 1 << 20;
const COPIES: u64 = 16;

/// Writes of single sectors need read-modify-write.
fn splits_sectors(alignment: &Alignment) -> bool {
    u64::from(alignment.offset_align) > SECTOR
}

fn copies_semaphore() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(COPIES))
}

/// A raw image on one reactor. Clones, and those made of one file, are the same image: they share
/// the lock.
#[derive(Clone)]
pub struct Raw<S> {
    storage: S,
    alignment: Alignment,
    /// What zeroing and discarding are to be multiples of: a block device refuses parts of its
    /// logical blocks.
    unit: u64,
    /// The file's length is to stay what the guest made it.
    exact: bool,
    lock: Arc<RangeLock>,
    copies: Arc<Semaphore>,
    zeroes: Arc<Semaphore>,
}

impl Raw<Store> {
    /// The raw image that a file is, or that a format lies in, on one reactor.
    pub fn open(file: &ImageFile, handle: &Handle) -> io::Result<Self> {
        Ok(Raw::new(file.storage(handle)?, file.range_lock().clone()))
    }
}

impl<S: Storage> Raw<S> {
    /// The image on `storage`. All reactors that use the same open file share the lock.
    pub fn new(storage: S, lock: Arc<RangeLock>) -> Self {
        let unit = if storage.capabilities().fixed_length {
            u64::from(storage.geometry().logical_block)
        } else {
            1
        };
        let alignment = storage.alignment();
        Raw { unit, lock, ..Raw::on(storage, alignment) }
    }

    /// An image on storage that does not say what it demands.
    pub fn on(storage: S, alignment: Alignment) -> Self {
        Raw {
            storage,
            alignment,
            unit: 1,
            exact: true,
            lock: Arc::default(),
            copies: copies_semaphore(),
            zeroes: copies_semaphore(),
        }
    }

    /// The same file, which may end with a whole block of O_DIRECT's: its length means nothing.
    /// (Taking the rest of a block back would undo what makes the file longer meanwhile.)
    pub fn in_whole_blocks(self) -> Self {
        Raw { exact: false, ..self }
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

    /// Gives space back to the host; a hint, so a host that cannot is no error.
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

    /// Zeroes; `unmap`: the host may have the space back. Durable after a flush, like a write.
    pub async fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self.zero_units(offset, len, unmap, false).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                self.write_zero_bytes(offset, len).await
            }
            done => done,
        }
    }

    /// As [`Raw::write_zeroes`]; Unsupported, and nothing done, where they would have to be
    /// written.
    pub async fn write_zeroes_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.may_zero_fast(offset, len)?;
        self.zero_units(offset, len, unmap, true).await
    }

    /// Unsupported where zeroes would have to be written for certain: in part of a device's block.
    /// Else the host is asked, when it is done.
    pub fn may_zero_fast(&self, offset: u64, len: u64) -> io::Result<()> {
        let whole = self.whole_units(offset, len) == (offset, offset + len);
        if whole { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    /// Unsupported: nothing is done.
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

    /// Whether the bytes from `offset` on are data or a hole, as far as they are alike. Behind the
    /// file's end is a hole.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        let (data, len) = self.data_or_hole(offset, len).await?;
        Ok(BlockStatus { zero: !data, data, offset: Some(offset), ..BlockStatus::data(len) })
    }

    /// Whether the bytes from `host` on are data, as far as they are alike.
    pub(crate) async fn data_or_hole(&self, host: u64, len: u64) -> io::Result<(bool, u64)> {
        Ok(match self.storage.next_data(host).await? {
            None => (false, len),
            Some(data) if data.start > host => (false, len.min(data.start - host)),
            Some(data) => (true, len.min(data.end - host)),
        })
    }

    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// A block device, whose length is what it is, and whose blocks hold anything.
    pub fn is_device(&self) -> bool {
        self.unit > 1
    }

    #[inline]
    fn fits(&self, segments: &Segments, offset: u64) -> bool {
        let Alignment { memory_align, offset_align } = self.alignment;
        (offset | segments.len() as u64) & (u64::from(offset_align) - 1) == 0
            // Kernels before 6.18 want each piece's length, not only the sum, to be whole blocks.
            && (memory_align == 1 || segments.is_aligned(memory_align as usize, offset_align as usize))
    }

    /// `offset`+`len` widened to whole blocks.
    fn widen(&self, offset: u64, len: u64) -> (u64, u64) {
        let align = u64::from(self.alignment.offset_align).max(SECTOR);
        let start = offset & !(align - 1);
        (start, (offset + len).next_multiple_of(align) - start)
    }

    /// The part of a range that consists of whole units, as start and end; none when the start is
    /// not below the end.
    fn whole_units(&self, offset: u64, len: u64) -> (u64, u64) {
        (offset.next_multiple_of(self.unit), (offset + len) & !(self.unit - 1))
    }

    /// Holds the range's blocks if a read-modify-write of the same blocks could undo what the
    /// caller does: if sectors share a block, or if the range has part of a block.
    async fn hold_parts(&self, offset: u64, len: u64) -> Option<RangeGuard<'_>> {
        let whole_blocks = (offset | len).is_multiple_of(self.alignment.offset_align.into());
        if !splits_sectors(&self.alignment) && whole_blocks {
            return None;
        }
        let (start, len) = self.widen(offset, len);
        Some(self.lock.hold(start..start + len).await)
    }

    /// Fills a buffer from `start`; what lies beyond the end of the file is zeroes.
    async fn read_blocks(&self, start: u64, len: usize) -> io::Result<Segments> {
        let (buffer, result) = self.storage.read(Segments::buffer(len), start).await;
        let n = result?;
        // A direct read of the last block may bring what the device holds behind the end.
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

    /// Where the piece that begins at `at` ends: pieces meet at multiples of a block.
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

    /// Writes copies, piece by piece; the caller holds what is not written whole.
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

    /// Read-modify-write of the blocks that hold `part` of a write at `offset`; the caller holds
    /// them.
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

    /// A whole block written at the end of the file has made it `grown` bytes long: the guest's
    /// disk is to stay as it is.
    async fn take_back(&self, end: u64, grown: u64) {
        let result = match self.storage.len().await {
            Ok(len) if len == grown => self.storage.set_len(end).await,
            // Somebody resized it meanwhile: theirs holds.
            other => other.map(|_| ()),
        };
        if let Err(e) = result {
            tracing::warn!("the image stays {} bytes longer than it was: {e}", grown - end);
        }
    }

    /// Writes zeroes as data, so that the host takes space for them.
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
