//! Why a chain cannot be opened.

use std::path::PathBuf;

use blockyard_storage::OpenError;

use crate::error::ImageError;

/// Why a chain cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("image {}: {error}", path.display())]
    Image { path: PathBuf, error: ImageError },
    #[error("image {}: its format is not known by its name: say --format raw, qcow2 or cow", path.display())]
    Format { path: PathBuf },
    #[error("image {}: its backing file {}: {what}", path.display(), backing)]
    Backing { path: PathBuf, backing: String, what: String },
    /// The file exists, and lies where no image may name files.
    #[error("image {}: its backing file {backing}: {} lies outside {allowed}: say --backing-folder to allow its folder", path.display(), real.display())]
    Outside { path: PathBuf, backing: String, real: PathBuf, allowed: String },
    #[error("starting io_uring")]
    Executor(#[source] std::io::Error),
}
