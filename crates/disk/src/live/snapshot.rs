//! External snapshot: from now on the disk is written to a new overlay, and its image of today
//! stays as it is.
//!
//! What must hold: every write that was answered before is in the old image, and durable there;
//! every later one goes to the overlay. A failure, or a power cut, leaves the old image, complete,
//! and at most an overlay with nothing in it. Before the first write to the overlay the old image
//! records which overlay lies on it ([`GrownChain::record`]).
//!
//! [`GrownChain::record`]: blockyard_image::GrownChain::record

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_image::qcow2::CreateOptions;

use super::{Why, WorkError, Worker, still_good};
use crate::backend::Source;
use crate::disk::Disk;

/// The overlay to be.
#[derive(Clone, Debug)]
pub struct SnapshotOptions {
    /// Where: there may be no such file yet. The images below must lie in its folder, or in the
    /// disk's backing folders.
    pub overlay: PathBuf,
    /// How it is laid out; its size and backing file follow from the disk. None: as `blockyard
    /// image create -b` does it.
    pub shape: Option<CreateOptions>,
    /// Go on if the image below cannot record its overlay (a block device, an NBD export, a file
    /// system without extended attributes). Nothing then stops a later start that names that image
    /// from writing beneath the overlay.
    pub unrecorded: bool,
}

impl SnapshotOptions {
    pub fn new(overlay: impl Into<PathBuf>) -> Self {
        SnapshotOptions { overlay: overlay.into(), shape: None, unrecorded: false }
    }
}

impl Disk {
    /// See the module's page. Whoever opens the disk anew from here on must open the overlay.
    pub fn snapshot(self: &Arc<Self>, options: &SnapshotOptions) -> Result<(), WorkError> {
        let options = options.clone();
        self.work("snapshot", |worker| worker.snapshot(options))
    }
}

impl Worker {
    async fn snapshot(self, options: SnapshotOptions) -> Result<(), Why> {
        let old = self.chain()?;
        let mut new = old.grow(&self.handle, &options.overlay, options.shape.as_ref()).await?;
        let local_disk = self.local_disk(&self.disk.source())?;
        // So that little is left to do behind the gate.
        self.settle(&local_disk).await?;
        let quiesced = self.disk.quiesce("snapshot")?;
        self.settle(&local_disk).await?;
        if local_disk.close().await.is_err() {
            still_good(&self.disk)?;
        }
        match new.record() {
            Err(e) if options.unrecorded => {
                tracing::warn!(disk = self.disk.name(), "snapshot: {e}")
            }
            recorded => recorded?,
        }
        quiesced.exchange(&Source::Chain(new.chain().clone()), None)?;
        new.keep();
        Ok(())
    }
}
