//! Flush order: data, sync, bits, sync.
//!
//! A write puts data into the file (not yet durable) before it sets the bits in memory. A flush
//! copies the pages with new bits and syncs, which makes their data durable. Then it writes the
//! pages and syncs again. Bits that are set meanwhile are not in the copies; the next flush writes
//! them. So no bit becomes durable before its data. If a bit did, the guest would read stale blocks
//! after a power cut, in place of the backing file's data.

use std::io;
use std::sync::atomic::Ordering;

use blockyard_ring::Segments;

use super::bitmap::FlushBatch;
use super::{BITMAP, Cow, Shared, bitmap_end};
use crate::error::ImageError;
use blockyard_ring::join;

/// Number of bitmap writes in flight.
const WRITES: usize = 16;

impl Cow {
    /// Waits until all writes that completed before the call are durable.
    pub async fn flush(&self) -> io::Result<()> {
        let _permit = self.shared.flushing.acquire().await;
        self.write_pages(true).await
    }

    /// Flushes, unless the file is read-only.
    pub async fn close(&self) -> io::Result<()> {
        if self.shared.options.read_only {
            return Ok(());
        }
        self.flush().await?;
        Ok(self.end_journal().await?)
    }

    /// Like [`Cow::close`], but what was not flushed need not be durable. It is in the file for the
    /// next process that opens it. One sync at most, because a guest waits for this.
    pub async fn leave(&self) -> io::Result<()> {
        if self.shared.options.read_only {
            return Ok(());
        }
        let permit = self.shared.flushing.acquire().await;
        if self.shared.bitmap.dirty_pages() > 0 {
            self.write_pages(false).await?;
        }
        drop(permit);
        Ok(self.end_journal().await?)
    }

    /// Writes dirty pages without a request of the guest, unless another task has just done so.
    pub(super) async fn write_back(&self) -> io::Result<()> {
        let _permit = self.shared.flushing.acquire().await;
        if self.shared.bitmap.dirty_pages() == 0 { Ok(()) } else { self.write_pages(true).await }
    }

    /// Writes back if too many pages are dirty. Called after bits were set.
    pub(super) async fn bound_dirty(&self) -> io::Result<()> {
        if self.shared.journal.is_long() || self.shared.journal.must_flush() {
            self.write_back().await?;
        }
        while self.shared.bitmap.is_too_dirty() {
            self.write_back().await?;
        }
        Ok(())
    }

    /// Writes the dirty pages. With `durable` they are durable at the end. The caller holds the
    /// permit of `flushing`.
    async fn write_pages(&self, durable: bool) -> io::Result<()> {
        self.shared.still_trusted()?;
        // Before the pages are taken: see `SectorBitmap::set`.
        let records = self.shared.journal.begin_write_back();
        let taken = self.shared.bitmap.take_dirty();
        let written = self.write_taken(&taken, durable).await;
        if written.is_ok() {
            taken.done();
        }
        // Bits are only set, so an older record that is left does no harm.
        let _ = self.shared.journal.end_write_back(records, written.is_ok());
        written
    }

    async fn write_taken(&self, taken: &FlushBatch<'_>, durable: bool) -> io::Result<()> {
        self.sync().await?;
        if !taken.is_empty() {
            self.write_bits(taken).await?;
            if durable {
                self.sync().await?;
            }
        }
        Ok(())
    }

    async fn write_bits(&self, taken: &FlushBatch<'_>) -> io::Result<()> {
        let (start, end) = (self.shared.header.bitmap_offset, bitmap_end(self.header()));
        let write = async |(at, bytes): (u64, &[u8])| {
            let bytes = &bytes[..bytes.len().min((end - at) as usize)];
            let (_, result) = self.file.write(Segments::from_bytes(bytes), start + at, false).await;
            result.map_err(|e| ImageError::io(BITMAP, start + at, "writing", e).into())
        };
        join::all(WRITES, taken.writes().map(write)).await
    }

    async fn sync(&self) -> io::Result<()> {
        let result = self.file.flush().await;
        if result.is_err() {
            self.shared.failed.store(true, Ordering::Relaxed);
        }
        result
    }
}

impl Shared {
    /// Returns an error if a sync has failed: earlier writes may be lost, and later ones cannot be
    /// guaranteed.
    pub fn lost(&self) -> Option<io::Error> {
        self.still_trusted().err()
    }

    /// Fails if a sync has failed.
    pub(super) fn still_trusted(&self) -> io::Result<()> {
        if self.failed.load(Ordering::Relaxed) {
            let what = "an earlier sync of the file failed, and earlier writes may be lost: open \
                the file again";
            return Err(io::Error::other(what));
        }
        Ok(())
    }
}
