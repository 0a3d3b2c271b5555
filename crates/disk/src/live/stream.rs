//! Stream: copies the data of the backing images into the topmost image, which then needs none.
//!
//! What must hold: the image names its backing file until it durably holds all data of the disk.
//! Until then this is copy-up, as guests' writes cause it: a power cut or cancelling leaves the
//! same chain, with more data in the topmost image.

use std::sync::Arc;

use blockyard_image::{ChainError, copy_up};

use super::{Kind, Unsuitable, Why, Work, WorkError, Worker};
use crate::backend::Source;
use crate::disk::Disk;
use crate::quiesce_error::QuiesceError;

impl Disk {
    /// Streams the disk (the term of QEMU; others call it flatten); see the module documentation.
    pub fn stream(self: &Arc<Self>, work: &Work) -> Result<(), WorkError> {
        let work = work.clone();
        self.work(Kind::for_writable("stream"), |worker| worker.stream(work))
    }
}

impl Worker {
    pub(super) async fn stream(self, work: Work) -> Result<(), Why> {
        let chain = self.chain()?;
        if let [alone] = chain.layers() {
            return Err(Unsuitable::NoBacking { image: alone.file.path().into() }.into());
        }
        let local_disk = self.local_disk(&self.disk.source())?;
        let image =
            chain.image(&self.handle).map_err(|e| Why::Quiesce(QuiesceError::Reactor(e)))?;
        let copied = copy_up(&image, &work.progress, async |_| work.check(&self.disk)).await;
        local_disk.poison_if_writes_lost();
        work.check_cancelled(&self.disk)?;
        copied.map_err(|error| ChainError::Image { path: chain.options().path.clone(), error })?;
        self.flush(&local_disk).await?;
        let quiesced = self.disk.quiesce_on(&self.handle, "stream").await?;
        self.flush(&local_disk).await?;
        // The disk must hold all its data before it has no backing file.
        let flushed = image.flush().await;
        local_disk.poison_if_writes_lost();
        flushed.map_err(Why::FlushCopy)?;
        let alone = chain.alone(&self.handle).await;
        local_disk.poison_if_writes_lost();
        let alone = Source::Chain(alone?);
        // The file names no backing file any more. Reactors that keep the old chain read nothing
        // from below, but later work on the disk must know of the new one.
        let exchanged = quiesced.exchange(&alone, None).await;
        exchanged.inspect_err(|_| quiesced.continue_from(alone.clone()))?;
        Ok(())
    }
}
