//! What holds a disk's data: an image file, a chain of images, memory, or nothing.
//!
//! ```text
//!   schemes   the names of images that are no paths; opens an image by its name
//!   source    an open back end before a reactor uses it
//!   delay     a modelled device
//!   ram       a disk in memory
//!   size      parses sizes
//! ```

use std::io;
use std::sync::Arc;
use std::time::Instant;

use blockyard_image::{BlockStatus, Image, ImageFile, Raw};
use blockyard_ring::{Handle, Segments};
use blockyard_storage::{LookupFigures, Storage};

use crate::request::Op;
use crate::statistics::OpKind;

mod delay;
mod ram;
mod schemes;
mod source;

pub use delay::{Delay, Model};
pub use ram::Ram;
pub use source::{InactiveImage, Source, SourceError};

/// A back end on one reactor. Rare operations have boxed futures, so that those of reads and writes
/// stay small.
pub enum Backend {
    Raw(Raw),
    Image(Image),
    Null,
    Delay(Delay),
    Ram(Ram),
    /// See [`Source::Gone`].
    Gone(String),
}

impl Backend {
    /// Opens the back end on one reactor.
    pub fn open(handle: &Handle, source: &Source) -> io::Result<Self> {
        let raw = |file: &Arc<ImageFile>| Raw::open(file, handle);
        Ok(match source {
            Source::File(file) => Backend::Raw(raw(file)?),
            Source::Chain(chain) => Backend::Image(chain.image(handle)?),
            Source::Null { .. } => Backend::Null,
            Source::Delay { model, file, .. } => {
                Backend::Delay(Delay::new(handle, model, file.as_ref().map(raw).transpose()?))
            }
            Source::Ram(memory) => Backend::Ram(Ram::new(handle, memory)),
            Source::Inactive(_) => Backend::Gone("no guest uses the disk".into()),
            Source::Gone { why, .. } => Backend::Gone(why.to_string()),
        })
    }
}

fn gone<T>(why: &str) -> io::Result<T> {
    Err(io::Error::other(why.to_string()))
}

impl Backend {
    /// Reads `segments.len()` bytes from `offset`. Returns the segments.
    #[inline]
    pub async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        match self {
            Backend::Raw(raw) => raw.read(segments, offset).await,
            Backend::Image(image) => image.read(segments, offset).await,
            Backend::Null => (segments, Ok(())),
            Backend::Delay(delay) => Box::pin(delay.read(segments, offset)).await,
            Backend::Gone(why) => (segments, gone(why)),
            Backend::Ram(ram) => {
                let copy = |ram: &Segments, at| segments.copy_from(at, ram, 0, ram.len());
                let result = ram.in_pieces(offset, segments.len(), copy).await;
                (segments, result)
            }
        }
    }

    /// Writes at `offset`. `durable`: the data are on stable storage before the call returns.
    /// Images ignore this, because their metadata need a flush; see [`Backend::flushes_whole`].
    #[inline]
    pub async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        match self {
            Backend::Raw(raw) => raw.write(segments, offset, durable).await,
            Backend::Image(image) => image.write(segments, offset).await,
            Backend::Null => (segments, Ok(())),
            Backend::Delay(delay) => Box::pin(delay.write(segments, offset, durable)).await,
            Backend::Gone(why) => (segments, gone(why)),
            Backend::Ram(ram) => {
                let copy = |ram: &Segments, at| ram.copy_from(0, &segments, at, ram.len());
                let result = ram.in_pieces(offset, segments.len(), copy).await;
                (segments, result)
            }
        }
    }

    /// Returns whether only a flush makes a write durable. It does for images, because a flush
    /// writes in order the metadata that lead to the data.
    #[inline]
    pub fn flushes_whole(&self) -> bool {
        matches!(self, Backend::Image(_))
    }

    /// Returns the error if a sync has failed that the image made on its own, and not for a flush
    /// of the disk. Earlier writes may then be lost.
    pub fn lost(&self) -> Option<io::Error> {
        match self {
            Backend::Raw(raw) => raw.storage().lost(),
            Backend::Image(image) => image.lost(),
            _ => None,
        }
    }

    /// Returns whether the image still has all metadata that a failed flush could not write, and no
    /// sync of it has failed. Then a later flush can make all writes durable.
    pub fn keeps_metadata(&self) -> bool {
        matches!(self, Backend::Image(image) if image.keeps_metadata())
    }

    /// Returns whether a failed flush has lost no write, so that a later flush can make all of them
    /// durable. This holds for a raw image on an NBD server: the client tracks each loss.
    pub(crate) fn keeps_unsynced(&self) -> bool {
        matches!(self, Backend::Raw(raw) if raw.storage().keeps_unsynced())
    }

    /// Returns whether there is no image: it is not open, or it was lost.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Backend::Gone(_))
    }

    /// Returns whether an operation may last much longer than the device works for it, because it
    /// changes many entries of an image.
    #[inline]
    pub(crate) fn is_long(&self, op: Op, len: u64) -> bool {
        match (self, op) {
            (Backend::Image(image), Op::Discard | Op::WriteZeroes { .. }) => image.is_long(len),
            _ => false,
        }
    }

    /// Stops the discards in progress; see [`Image::stop_discards`].
    pub(crate) fn stop_discards(&self) {
        if let Backend::Image(image) = self {
            image.stop_discards();
        }
    }

    /// See [`Image::end_long_requests`].
    pub(crate) fn end_long_requests(&self, at: Option<Instant>) {
        if let Backend::Image(image) = self {
            image.end_long_requests(at);
        }
    }

    /// Returns how lookups of where data lie ended: of L2 entries, or of a map's answers.
    pub fn lookups(&self) -> LookupFigures {
        match self {
            Backend::Image(image) => image.lookups(),
            Backend::Raw(raw) => raw.storage().lookups(),
            _ => LookupFigures::default(),
        }
    }

    /// Makes all writes durable that completed before this call.
    pub async fn flush(&self) -> io::Result<()> {
        match self {
            Backend::Raw(raw) => raw.flush().await,
            Backend::Image(image) => Box::pin(image.flush()).await,
            Backend::Null | Backend::Ram(_) => Ok(()),
            Backend::Delay(delay) => {
                Box::pin(delay.other(OpKind::Flush, async |raw| raw.flush().await)).await
            }
            Backend::Gone(why) => gone(why),
        }
    }

    /// Flushes, and leaves the image marked as cleanly closed. Call it when the disk is closed, on
    /// one reactor, after the last request has ended.
    pub async fn close(&self) -> io::Result<()> {
        match self {
            Backend::Image(image) => image.close().await,
            _ => Ok(()),
        }
    }

    /// Like [`Backend::close`], for an image that another process of this host opens next.
    pub async fn leave(&self) -> io::Result<()> {
        match self {
            Backend::Image(image) => image.leave().await,
            _ => Ok(()),
        }
    }

    /// Discards a range. Offset and length are in bytes.
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Backend::Raw(raw) => raw.discard(offset, len).await,
            Backend::Image(image) => Box::pin(image.discard(offset, len)).await,
            Backend::Null => Ok(()),
            Backend::Delay(delay) => {
                Box::pin(delay.other(OpKind::Discard, async |raw| raw.discard(offset, len).await))
                    .await
            }
            Backend::Gone(why) => gone(why),
            Backend::Ram(ram) => ram.zero(offset, len as usize).await,
        }
    }

    /// Zeroes a range; durable after a flush. `fast`: fails with Unsupported if zeroes would have
    /// to be written.
    pub async fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        unmap: bool,
        fast: bool,
    ) -> io::Result<()> {
        match self {
            Backend::Raw(raw) if fast => raw.write_zeroes_fast(offset, len, unmap).await,
            Backend::Raw(raw) => raw.write_zeroes(offset, len, unmap).await,
            Backend::Image(image) if fast => {
                Box::pin(image.write_zeroes_fast(offset, len, unmap)).await
            }
            Backend::Image(image) => Box::pin(image.write_zeroes(offset, len, unmap)).await,
            Backend::Null => Ok(()),
            Backend::Delay(delay) => {
                let below = async |raw: &Raw| match fast {
                    true => raw.write_zeroes_fast(offset, len, unmap).await,
                    false => raw.write_zeroes(offset, len, unmap).await,
                };
                Box::pin(delay.other(OpKind::WriteZeroes, below)).await
            }
            Backend::Gone(why) => gone(why),
            Backend::Ram(ram) => ram.zero(offset, len as usize).await,
        }
    }

    /// Returns Unsupported if fast zeroes would fail, as far as this can be known without writing
    /// zeroes.
    pub async fn may_zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self {
            Backend::Raw(raw) => raw.may_zero_fast(offset, len),
            Backend::Image(image) => Box::pin(image.may_zero_fast(offset, len, unmap)).await,
            Backend::Null | Backend::Ram(_) | Backend::Delay(_) | Backend::Gone(_) => Ok(()),
        }
    }

    /// Returns the block status from `offset` on: the longest range of one status within `len`
    /// bytes. Reads no data.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        match self {
            Backend::Raw(raw) => raw.status(offset, len).await,
            Backend::Image(image) => image.status(offset, len).await,
            Backend::Null | Backend::Ram(_) | Backend::Delay(_) => Ok(BlockStatus::data(len)),
            Backend::Gone(why) => gone(why),
        }
    }
}
