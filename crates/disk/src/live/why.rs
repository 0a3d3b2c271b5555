//! Why work on a disk in use failed.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use blockyard_image::ChainError;

use crate::backend::SourceError;
use crate::copy_map::LateCopy;
use crate::disk::Disk;
use crate::image_files::PathError;
use crate::poison::{LostImage, Poison};
use crate::quiesce_error::QuiesceError;
use crate::request::Failure;

/// An error of a snapshot, commit, stream or backup: the disk, the work, and the reason with its
/// causes.
#[derive(Debug, thiserror::Error)]
#[error("disk \"{disk}\": {work}: {}", with_causes(why))]
pub struct WorkError {
    pub disk: String,
    pub work: &'static str,
    pub why: Box<Why>,
}

/// Why a snapshot, commit, stream or backup failed.
#[derive(Debug, thiserror::Error)]
pub enum Why {
    #[error("another snapshot, commit, stream, backup, resize or drain of this disk is under way")]
    Busy,
    #[error("the disk is drained: resume it first (`ctl resume`)")]
    Drained,
    #[error("the disk is being closed")]
    Ended,
    #[error("the operator cancelled it")]
    Cancelled,
    #[error(transparent)]
    Poisoned(#[from] Poison),
    #[error(transparent)]
    Lost(#[from] LostImage),
    #[error(transparent)]
    Unsuitable(#[from] Unsuitable),
    #[error("a flush failed")]
    Flush(Failure),
    /// The topmost image could not be flushed after all data were copied into it.
    #[error("a flush failed: {0}")]
    FlushCopy(io::Error),
    #[error("the image could not be closed")]
    Close(Failure),
    #[error("the disk is inactive, but a reactor has not closed the image yet")]
    StillOpen,
    #[error("a call on the target has failed: {0}")]
    Call(io::Error),
    #[error("cannot keep it for the next start: {0}")]
    StartRecord(io::Error),
    #[error("the server does not say which disks it has")]
    UnknownDisks,
    #[error(transparent)]
    Late(#[from] LateCopy),
    #[error(transparent)]
    Quiesce(#[from] QuiesceError),
    #[error(transparent)]
    Path(#[from] PathError),
    #[error(transparent)]
    Image(#[from] ChainError),
    #[error(transparent)]
    Source(#[from] SourceError),
}

/// Why a work does not suit a disk. It would fail again until the operator changes the disk.
#[derive(Debug, thiserror::Error)]
pub enum Unsuitable {
    #[error("the disk is read-only")]
    ReadOnly,
    #[error("no guest runs, so the image is not open")]
    Inactive,
    #[error("the disk has no image")]
    NoImage,
    #[error("image {} has no backing file: it has all data of the disk", image.display())]
    NoBacking { image: PathBuf },
    #[error("its image is not a file of this host: grow it, then refresh")]
    NoFile,
    #[error("its image has {len} bytes already: refresh it")]
    Grown { len: u64 },
    #[error(
        "disk \"{other}\" needs image {} as it is, although no guest uses that disk now: make one \
         of the two disks independent of the image (`ctl stream`), or remove disk \"{other}\" and \
         delete its image",
        image.display()
    )]
    Needed { other: String, image: PathBuf },
}

impl Why {
    /// Returns why other work on a disk prevents this work.
    pub(super) fn busy(disk: &Disk) -> Self {
        if disk.is_drained() { Why::Drained } else { Why::Busy }
    }

    /// Returns whether other work on the disk prevents this work. A drain is such work.
    pub fn is_busy(&self) -> bool {
        matches!(self, Why::Busy | Why::Drained)
    }
}

/// Returns the text of an error and those of its causes.
pub(super) fn with_causes(why: &Why) -> String {
    let causes = std::iter::successors(why.source(), |cause| (*cause).source());
    causes.fold(why.to_string(), |text, cause| format!("{text}: {cause}"))
}
