//! External snapshot: the disk's later writes go to a new overlay. The present image stays as it
//! is.
//!
//! What must hold: every write that was answered before the snapshot is durable in the old image.
//! The path that the overlay stores leads to the old image.
//! Every later write goes to the overlay. A failure or a power cut leaves the old image complete,
//! and at most an empty overlay. Before the first write to the overlay, the old image records which
//! overlay is on it ([`GrownChain::record`]).
//!
//! What a later start reads ([`StartRecord`]) names the overlay before the old image records it,
//! because the old image can no longer be opened then. The old image is closed at that moment, so
//! the overlay can be opened. After a failure, the start record names the old image again before
//! the overlay is removed. So at each death of the server it names an image that a start can open.
//!
//! [`GrownChain::record`]: blockyard_image::GrownChain::record

use std::path::PathBuf;
use std::sync::Arc;
use std::{fmt, io};

use blockyard_image::journal::CrashSafety;
use blockyard_image::qcow2::CreateOptions;
use blockyard_image::{Chain, GrownChain};

use super::{Kind, Why, WorkError, Worker};
use crate::backend::Source;
use crate::disk::Disk;
use crate::quiesced::QuiescedDisk;

/// What a later start reads to find the image of a disk. Its calls run on the thread of the
/// snapshot, and may block for a short time, while requests are held.
pub trait StartRecord: fmt::Debug + Send + Sync {
    /// Names the overlay, durably.
    fn name_overlay(&self) -> io::Result<()>;

    /// Names the old image again, durably, also after an error of `name_overlay`.
    fn name_old_image(&self) -> io::Result<()>;

    /// The snapshot has ended. `is_taken`: the disk has the overlay. Is called once, last.
    fn ended(&self, is_taken: bool);
}

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
    /// How the changed metadata of an overlay on a raw image survive a death of the process. A
    /// chain of images keeps its own setting.
    pub crash_safety: CrashSafety,
    /// Folders that may contain the backing files of an overlay on a raw image; empty: the folder
    /// of the overlay. A chain of images keeps its own setting.
    pub folders: Vec<PathBuf>,
    /// What a later start reads, if it shall name the overlay.
    pub start_record: Option<Arc<dyn StartRecord>>,
}

impl SnapshotOptions {
    pub fn new(overlay: impl Into<PathBuf>) -> Self {
        let (shape, start_record, crash_safety, folders) = Default::default();
        let (overlay, unrecorded) = (overlay.into(), false);
        SnapshotOptions { overlay, shape, unrecorded, crash_safety, folders, start_record }
    }
}

impl Disk {
    /// Takes a snapshot; see the module documentation. From now on, a start must name the overlay.
    pub fn snapshot(self: &Arc<Self>, options: &SnapshotOptions) -> Result<(), WorkError> {
        let (options, start_record) = (options.clone(), options.start_record.clone());
        let taken = self.work(Kind::for_writable("snapshot"), |worker| worker.snapshot(options));
        start_record.iter().for_each(|record| record.ended(taken.is_ok()));
        taken
    }
}

impl Worker {
    pub(super) async fn snapshot(self, options: SnapshotOptions) -> Result<(), Why> {
        let old = self.chain_below(options.crash_safety.clone(), options.folders.clone())?;
        // The overlay stores a path, and the disk's data are in the open file.
        let paths = self.disk.source().paths();
        paths.check()?;
        let mut new = old.grow(&self.handle, &options.overlay, options.shape.as_ref()).await?;
        // The path may have changed while the overlay was made.
        paths.check()?;
        let local_disk = self.local_disk(&self.disk.source())?;
        // A flush now leaves little for the flush during the quiesce.
        self.flush(&local_disk).await?;
        let quiesced = self.disk.quiesce_on(&self.handle, "snapshot").await?;
        self.flush(&local_disk).await?;
        self.close_image(&local_disk).await?;
        if let Err(why) = self.put_on(&mut new, &options, &quiesced).await {
            self.stay(new, &old, &options, &quiesced).await;
            return Err(why);
        }
        new.keep();
        Ok(())
    }

    /// Lets the disk go on with the old image, which was closed, after a failure.
    async fn stay(
        &self,
        mut new: GrownChain,
        old: &Chain,
        options: &SnapshotOptions,
        quiesced: &QuiescedDisk,
    ) {
        let disk = self.disk.name();
        new.take_record_back();
        let named = options.start_record.as_ref().map_or(Ok(()), |record| record.name_old_image());
        if let Err(e) = named {
            let overlay = options.overlay.display();
            tracing::error!(
                disk,
                "the next start opens {overlay}, although the snapshot failed: cannot name the old \
                 image again: {e}"
            );
            new.leave();
        } else {
            drop(new);
        }
        // A raw file has nothing to read again.
        if !matches!(self.disk.source(), Source::Chain(_)) {
            return;
        }
        // The journal of a closed image has ended. Without a new one, the disk would flush its
        // metadata before each answer.
        if let Err(why) = self.exchange_top(old, quiesced).await {
            tracing::warn!(
                disk,
                "the image cannot be opened again after the snapshot failed: changed metadata are \
                 flushed before each answer, which is slow, until the disk is opened again: {why}"
            );
        }
    }

    /// Puts the overlay on the disk, which has no request in flight.
    async fn put_on(
        &self,
        new: &mut GrownChain,
        options: &SnapshotOptions,
        quiesced: &QuiescedDisk,
    ) -> Result<(), Why> {
        if let Some(start_record) = &options.start_record {
            start_record.name_overlay().map_err(Why::StartRecord)?;
        }
        match new.record() {
            Err(e) if options.unrecorded => {
                tracing::warn!(disk = self.disk.name(), "snapshot: {e}")
            }
            recorded => recorded?,
        }
        quiesced.exchange(&Source::Chain(new.chain().clone()), None).await?;
        Ok(())
    }
}
