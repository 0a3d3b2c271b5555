//! Error of opening a chain.

use std::path::PathBuf;

use blockyard_storage::OpenError;

use crate::error::ImageError;

/// Error of opening a chain.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("image {}: {error}", path.display())]
    Image { path: PathBuf, error: ImageError },
    #[error(
        "image {}: its name does not give its format: pass --format raw, qcow2 or cow",
        path.display()
    )]
    Format { path: PathBuf },
    /// The image that the caller names cannot be opened by this name.
    #[error("image {}: {what}", path.display())]
    Name { path: PathBuf, what: String },
    #[error("image {}: its backing file {}: {what}", path.display(), backing)]
    Backing { path: PathBuf, backing: String, what: String },
    /// The file exists, but lies outside the folders in which images may name files.
    #[error(
        "image {}: its backing file {backing}: {} lies outside {allowed}: \
         pass --backing-folder to allow its folder",
        path.display(),
        real.display()
    )]
    Outside { path: PathBuf, backing: String, real: PathBuf, allowed: String },
    #[error("starting io_uring")]
    Executor(#[source] std::io::Error),
}
