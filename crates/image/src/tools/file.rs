//! Opens one image's file, for work on its format's structures instead of the disk.

use std::path::Path;

use blockyard_ring::Handle;

use crate::chain::ChainError;
use crate::error::ImageError;
use crate::raw::Raw;
use blockyard_storage::CacheMode;
use blockyard_storage::{ImageFile, OpenOptions};

use super::reactors::on_reactor;

/// Opens and locks a file, with the page cache.
pub fn open_file(path: &Path, read_only: bool) -> Result<ImageFile, ChainError> {
    Ok(ImageFile::open(&OpenOptions::new(path, read_only, CacheMode::Writeback))?)
}

/// Opens the file for raw access on a reactor.
pub(super) fn raw_of(handle: &Handle, file: &ImageFile) -> Result<Raw, ChainError> {
    Raw::open(file, handle)
        .map_err(|e| of_file(file, ImageError::io("file", None, "opening it for io_uring", e)))
}

/// Adds the file's path to an error.
pub(super) fn of_file(file: &ImageFile, error: ImageError) -> ChainError {
    ChainError::Image { path: file.path().into(), error }
}

/// Opens and locks the file, and runs `work` on it.
pub fn on_file<T: 'static>(
    path: &Path,
    read_only: bool,
    work: impl AsyncFnOnce(Raw) -> Result<T, ImageError> + 'static,
) -> Result<T, ChainError> {
    on_open_file(open_file(path, read_only)?, work)
}

pub(super) fn on_open_file<T: 'static>(
    file: ImageFile,
    work: impl AsyncFnOnce(Raw) -> Result<T, ImageError> + 'static,
) -> Result<T, ChainError> {
    on_reactor(|handle| async move {
        work(raw_of(&handle, &file)?).await.map_err(|e| of_file(&file, e))
    })
}
