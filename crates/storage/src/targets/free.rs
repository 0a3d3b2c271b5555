//! Discards and zeroes of a map's disk.
//!
//! In: a range that a guest discards or zeroes. Out: a question to the map for its whole granules,
//! and operations on data files for what stays in place.
//!
//! What must hold
//! - When the map hears of it, no request uses an answer about the range, and none asks before the
//!   end. So the map can give the old place to another part.
//! - No part of the range has a new place that the map does not count as moved yet.
//! - No flush runs meanwhile, so that each flush covers a discard completely or not at all.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use blockyard_ring::Segments;

use super::answer::Use;
use super::ask::Ask;
use super::cache::Known;
use super::map::{Discard, Extent, Place};
use super::mapped::{Free, Mapped};
use super::promise::is_late;
use crate::storage::Storage;

/// Bytes of zeroes that are written at a time.
const PIECE: u64 = 1 << 20;

impl<S: Storage, A: Ask> Mapped<S, A> {
    /// Discards or zeroes a range. Returns Unsupported, and changes nothing, if the caller must
    /// write zeroes instead.
    pub(super) async fn free(&self, offset: u64, len: u64, how: Free) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|end| *end <= self.core.size());
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        let granule = self.core.granule;
        let whole = offset.next_multiple_of(granule)..end & !(granule - 1);
        let in_part = whole != (offset..end) && matches!(how, Free::Zero { fast: true, .. });
        if whole.start >= whole.end || in_part || self.core.frees_nothing.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Box::pin(self.free_whole(whole.clone(), how)).await?;
        if how != Free::Discard {
            self.write_zeroes(offset..whole.start).await?;
            self.write_zeroes(whole.end..end).await?;
        }
        Ok(())
    }

    async fn free_whole(&self, whole: Range<u64>, how: Free) -> io::Result<()> {
        let _one = self.core.flushing.acquire().await;
        let _held = self.core.freeing.hold(whole.clone()).await;
        // Requests that have asked already may still place parts anew.
        self.core.let_go(&whole).await;
        if self.core.cache.has_moved(&whole) {
            self.sync_alone().await?;
        }
        self.core.let_go(&whole).await;
        let mut freed = Vec::new();
        let result = self.ask_to_free(&whole, how, &mut freed).await;
        // Before the discard, the map may have answered other questions with more than their range,
        // and with the old places. No request uses such an answer from here on.
        self.core.let_go(&whole).await;
        let stamp = self.core.cache.stamp();
        for (at, len) in freed {
            self.core.cache.keep(at, Known { len, place: Place::Zero }, false, &whole, stamp);
        }
        result
    }

    /// Asks the map to free whole granules. Adds the offset and length of each part that is free.
    async fn ask_to_free(
        &self,
        whole: &Range<u64>,
        how: Free,
        freed: &mut Vec<(u64, u64)>,
    ) -> io::Result<()> {
        let mut at = whole.start;
        while at < whole.end {
            let asked = Discard { offset: at, len: whole.end - at, zero: how != Free::Discard };
            let answer = self.ask.discard(asked).await;
            let answer = answer.inspect_err(|e| {
                self.core.note_error(e);
                // The map may still free places, and a flush must not run at the same time.
                if is_late(e) {
                    self.core.set_lost("discard", e);
                }
            });
            let Some(extents) = answer? else {
                self.core.frees_nothing.store(true, Ordering::Relaxed);
                return Err(io::ErrorKind::Unsupported.into());
            };
            self.check(&(at..whole.end), Use::Discard, &extents).await?;
            for Extent { len, place } in extents {
                match place {
                    Place::At { file, offset } => {
                        self.free_in_file(file, offset, len, how, at == whole.start).await?;
                    }
                    Place::Zero | Place::New { .. } => {
                        self.core.moved().is_changed = true;
                        freed.push((at, len));
                    }
                }
                at += len;
            }
        }
        Ok(())
    }

    /// `is_first`: nothing was changed yet.
    async fn free_in_file(
        &self,
        file: usize,
        offset: u64,
        len: u64,
        how: Free,
        is_first: bool,
    ) -> io::Result<()> {
        let storage = &self.files[file];
        let done = match how {
            Free::Discard => storage.discard(offset, len).await,
            Free::Zero { unmap, fast: false } => storage.zero(offset, len, unmap).await,
            Free::Zero { unmap, fast: true } => storage.zero_fast(offset, len, unmap).await,
        };
        match (done, how) {
            (Err(e), _) if e.kind() != io::ErrorKind::Unsupported => Err(e),
            (Ok(()), _) | (Err(_), Free::Discard) => Ok(()),
            (Err(e), Free::Zero { fast: true, .. }) if is_first => Err(e),
            (Err(_), Free::Zero { .. }) => {
                for at in (0..len).step_by(PIECE as usize) {
                    let len = PIECE.min(len - at);
                    let _permit = self.core.copies.acquire_many(len).await;
                    let zeroes = Segments::buffer(len as usize);
                    self.write_all(zeroes, file, offset + at, false).await.1?;
                }
                Ok(())
            }
        }
    }

    /// Writes zeroes as a guest would.
    async fn write_zeroes(&self, range: Range<u64>) -> io::Result<()> {
        for at in range.clone().step_by(PIECE as usize) {
            let len = PIECE.min(range.end - at);
            self.write(Segments::buffer(len as usize), at, false).await.1?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "free_tests.rs"]
mod tests;
