//! Resize: grows the topmost image, a qcow2 image, while guests use the disk.
//!
//! ```text
//!   flush ─► quiesce: flush, close the image ─► change the closed image ─► open it again ─► resume
//! ```
//!
//! What must hold: the image has the old size or the new one, at every power cut and at every death
//! of the process. While the image is being changed it is closed: it has no journal, and no
//! metadata are in memory only.

use std::sync::Arc;

use blockyard_image::Chain;

use super::{Why, WorkError, Worker};
use crate::backend::Source;
use crate::disk::Disk;
use crate::quiesced::QuiescedDisk;

impl Disk {
    /// Grows the topmost image to `size` bytes. The new part reads as zeroes. Guests see the new
    /// size after [`Disk::refresh_capacity`].
    pub fn grow(self: &Arc<Self>, size: u64) -> Result<(), WorkError> {
        self.work("resize", move |worker| worker.grow(size))
    }
}

impl Worker {
    async fn grow(self, size: u64) -> Result<(), Why> {
        let chain = self.chain()?;
        chain.may_grow(size)?;
        let local_disk = self.local_disk(&self.disk.source())?;
        // A flush now leaves little for the flush during the quiesce.
        self.flush_unsynced(&local_disk).await?;
        let quiesced = self.disk.quiesce("resize")?;
        self.flush_unsynced(&local_disk).await?;
        self.close_image(&local_disk).await?;
        let grown = chain.grow_top(&self.handle, size).await;
        // Also after an error: the change may have taken effect.
        self.open_again(&chain, &quiesced).await?;
        Ok(grown?)
    }

    /// Lets all reactors read the topmost image's metadata again.
    async fn open_again(&self, chain: &Chain, quiesced: &QuiescedDisk) -> Result<(), Why> {
        let opened = match chain.read_again(&self.handle, 0..1).await {
            Ok(new) => quiesced.exchange(&Source::Chain(new), None).map_err(Why::from),
            Err(e) => Err(e.into()),
        };
        opened.inspect_err(|why| {
            tracing::error!(disk = self.disk.name(), "the image cannot be opened again: {why}");
            quiesced.lose(&format!("the image could not be opened again after a resize: {why}"));
        })
    }
}
