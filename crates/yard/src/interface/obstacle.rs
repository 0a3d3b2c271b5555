//! Why a disk cannot be handed over to another server.

use std::path::PathBuf;

use blockyard_disk::{PathError, Poison, SourceError};

/// Why a disk cannot be handed over now.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    #[error("writes may be lost, so it must be reopened: {0}")]
    WritesMayBeLost(Poison),
    #[error("its data are in the memory of this server")]
    DataInMemory,
    #[error("its target has started before its rings: use --activation start")]
    ProgramBeforeRings,
    /// Such a device may send requests before this server is sure to leave.
    #[error("a target cannot be handed over with a ublk or Xen device")]
    ProgramWithDevice,
    #[error("since a snapshot its image is {}", .0.display())]
    Snapshot(PathBuf),
    #[error("a job works on it: wait for its end, or cancel it")]
    Job,
    #[error("it is drained: run `blockyard ctl resume`")]
    Drained,
    /// The end of the exports would answer the requests with an error.
    #[error("requests wait for space: make some, and run `blockyard ctl resume`")]
    WaitsForSpace,
    #[error(transparent)]
    Image(#[from] PathError),
    /// An image that is not open now.
    #[error("its image cannot be opened again: {0}")]
    NotOpened(Box<SourceError>),
    #[error(transparent)]
    Export(#[from] blockyard_export::Obstacle),
    #[error("a flush failed")]
    FlushFailed,
}
