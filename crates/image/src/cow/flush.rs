//! The order on the disk: data, a sync, bits, a sync.
//!
//! A write's data is in the file (not yet durable) before its bits are set in memory. A flush takes
//! copies of the pages that have new bits, syncs, so that all data they speak of is durable, writes
//! them, and syncs again. Bits that are set meanwhile are not in the copies: they wait for the next
//! flush. So a bit never gets ahead of its data: read after a power cut, that would be whatever lay
//! there, in place of what the backing file has.
//!
//! What must hold: one flush at a time; after a sync that failed no write and no flush answers Ok
//! any more, as Linux reports a failed write-back once only, and the sync may have been one that
//! nobody asked for.

use std::io;
use std::sync::atomic::Ordering;

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use super::bitmap::Taken;
use super::{BITMAP, Cow, Shared, bitmap_end};
use crate::error::ImageError;
use blockyard_ring::join;

/// Writes of the bitmap in flight.
const WRITES: usize = 16;

impl<S: Storage> Cow<S> {
    /// All writes answered before are on stable storage.
    pub async fn flush(&self) -> io::Result<()> {
        let _permit = self.shared.flushing.acquire().await;
        self.flush_with_permit().await
    }

    /// A last flush.
    pub async fn close(&self) -> io::Result<()> {
        if self.shared.options.read_only { Ok(()) } else { self.flush().await }
    }

    /// Writes dirty pages before a guest has asked for it, unless somebody else just has.
    pub(super) async fn write_back(&self) -> io::Result<()> {
        let _permit = self.shared.flushing.acquire().await;
        if self.shared.bitmap.dirty_pages() == 0 { Ok(()) } else { self.flush_with_permit().await }
    }

    /// Called after bits were set.
    pub(super) async fn bound_dirty(&self) -> io::Result<()> {
        while self.shared.bitmap.is_too_dirty() {
            self.write_back().await?;
        }
        Ok(())
    }

    async fn flush_with_permit(&self) -> io::Result<()> {
        self.shared.still_trusted()?;
        let taken = self.shared.bitmap.take_dirty();
        self.sync().await?;
        if !taken.is_empty() {
            self.write_bits(&taken).await?;
            self.sync().await?;
        }
        taken.done();
        Ok(())
    }

    async fn write_bits(&self, taken: &Taken<'_>) -> io::Result<()> {
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
    /// Why nothing that is written can be promised any more.
    pub fn lost(&self) -> Option<io::Error> {
        self.still_trusted().err()
    }

    pub(super) fn still_trusted(&self) -> io::Result<()> {
        if self.failed.load(Ordering::Relaxed) {
            let what = "an earlier sync of the file has failed, and what was written before may be lost: open it again";
            return Err(io::Error::other(what));
        }
        Ok(())
    }
}
