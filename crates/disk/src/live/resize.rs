//! Resize: grows the topmost image, a raw file or a qcow2 image, while guests use the disk.
//!
//! If the path of the image leads to another file by now, nothing grows: the later start would open
//! that file. A raw file grows without a pause, by the descriptor that the disk has. A qcow2 image:
//!
//! ```text
//!   flush ─► quiesce: flush, close the image ─► change the closed image ─► open it again ─► resume
//! ```
//!
//! What must hold: the image has the old size or the new one, at every power cut and at every death
//! of the process. While the image is being changed it is closed: it has no journal, and no
//! metadata are in memory only.

use std::sync::Arc;

use blockyard_image::{Chain, ChainError, ImageError, ImageFile, Raw};

use super::{Kind, Unsuitable, Why, WorkError, Worker};
use crate::backend::Source;
use crate::disk::Disk;
use crate::poison::LostImage;
use crate::quiesced::QuiescedDisk;

impl Disk {
    /// Grows the topmost image to `size` bytes. The new part reads as zeroes. Guests see the new
    /// size after [`Disk::refresh_capacity`].
    pub fn grow(self: &Arc<Self>, size: u64) -> Result<(), WorkError> {
        self.work(Kind::for_writable("resize"), move |worker| worker.grow(size))
    }
}

impl Worker {
    async fn grow(self, size: u64) -> Result<(), Why> {
        self.disk.source().top_paths().check()?;
        if let Source::File(file) = self.disk.source() {
            return self.grow_file(&file, size).await;
        }
        let chain = self.chain()?;
        chain.may_grow(size)?;
        let local_disk = self.local_disk(&self.disk.source())?;
        // A flush now leaves little for the flush during the quiesce.
        self.flush(&local_disk).await?;
        let quiesced = self.disk.quiesce_on(&self.handle, "resize").await?;
        self.flush(&local_disk).await?;
        self.close_image(&local_disk).await?;
        let grown = chain.grow_top(&self.handle, size).await;
        // Also after an error: the change may have taken effect.
        self.open_again(&chain, &quiesced).await?;
        Ok(grown?)
    }

    async fn grow_file(&self, file: &ImageFile, size: u64) -> Result<(), Why> {
        if file.fd().is_none() || file.is_device() {
            return Err(Unsuitable::NoFile.into());
        }
        let failed = |error| {
            let error = ImageError::io("image", None, "growing it", error);
            Why::Image(ChainError::Image { path: file.path().into(), error })
        };
        let raw = Raw::open(file, &self.handle).map_err(failed)?;
        // Another program may have grown the file. It must not become shorter.
        let len = raw.grow(size).await.map_err(failed)?;
        if len > size {
            return Err(Unsuitable::Grown { len }.into());
        }
        Ok(())
    }

    /// Lets all reactors read the topmost image's metadata again, after it was closed.
    pub(super) async fn exchange_top(
        &self,
        chain: &Chain,
        quiesced: &QuiescedDisk,
    ) -> Result<(), Why> {
        let new = chain.read_again(&self.handle, 0..1).await?;
        Ok(quiesced.exchange(&Source::Chain(new), None).await?)
    }

    /// Like `exchange_top`. After an error no image is left to serve.
    async fn open_again(&self, chain: &Chain, quiesced: &QuiescedDisk) -> Result<(), Why> {
        let opened = self.exchange_top(chain, quiesced).await;
        if let Err(why) = &opened {
            tracing::error!(disk = self.disk.name(), "the image cannot be opened again: {why}");
            quiesced.lose(LostImage { work: "resize", why: why.to_string() }).await;
        }
        opened
    }
}
