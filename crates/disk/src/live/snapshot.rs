//! External snapshot: the disk's later writes go to a new overlay. The present image stays as it
//! is.
//!
//! What must hold: every write that was answered before the snapshot is durable in the old image.
//! Every later write goes to the overlay. A failure or a power cut leaves the old image complete,
//! and at most an empty overlay. Before the first write to the overlay, the old image records which
//! overlay is on it ([`GrownChain::record`]).
//!
//! [`GrownChain::record`]: blockyard_image::GrownChain::record

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_image::qcow2::CreateOptions;

use super::{Why, WorkError, Worker, check_not_poisoned};
use crate::backend::Source;
use crate::disk::Disk;

/// Options of a snapshot.
#[derive(Clone, Debug)]
pub struct SnapshotOptions {
    /// Path of the overlay. The file must not exist yet. The images below must be in its folder, or
    /// in the disk's backing folders.
    pub overlay: PathBuf,
    /// Format options of the overlay. Its size and backing file follow from the disk. None: as
    /// `blockyard image create -b` does it.
    pub shape: Option<CreateOptions>,
    /// Whether to continue if the old image cannot record its overlay (a block device, an NBD
    /// export, a file system without extended attributes). Without the record, a later start that
    /// names the old image may write beneath the overlay.
    pub unrecorded: bool,
}

impl SnapshotOptions {
    pub fn new(overlay: impl Into<PathBuf>) -> Self {
        SnapshotOptions { overlay: overlay.into(), shape: None, unrecorded: false }
    }
}

impl Disk {
    /// Takes a snapshot; see the module documentation. From now on, a start must name the overlay.
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
        // A flush now leaves little for the flush during the quiesce.
        self.flush_unsynced(&local_disk).await?;
        let quiesced = self.disk.quiesce("snapshot")?;
        self.flush_unsynced(&local_disk).await?;
        if local_disk.close().await.is_err() {
            check_not_poisoned(&self.disk)?;
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
