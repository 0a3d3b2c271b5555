//! Creates images in existing empty files, which may have no name yet.
//!
//! Invariant: the image is durable on return; after a power cut in the middle the file is no image.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_storage::Storage;

use crate::chain::ChainError;
use crate::chain::OpenedFiles;
use crate::cow;
use crate::error::ImageError;
use crate::qcow2::{self, Preallocation};
use crate::raw::Raw;
use blockyard_storage::CacheMode;
use blockyard_storage::{ImageFile, OpenOptions};

use super::file::{of_file, on_open_file, raw_of};
use super::reactors::on_reactor;

/// An image to create.
#[derive(Clone, Debug)]
pub enum NewImage {
    Raw {
        size: u64,
        preallocation: Preallocation,
    },
    /// `data`: path of the data file that the options name.
    Qcow2 {
        options: qcow2::CreateOptions,
        data: Option<PathBuf>,
    },
    Cow {
        backing: String,
        size: u64,
        mtime: i64,
        version: u32,
        alignment: u32,
    },
}

/// Creates the image in the file at `path`, or in `files`.
pub fn create(path: &Path, files: &OpenedFiles, new: NewImage) -> Result<(), ChainError> {
    let open = |path: &Path, found: &Option<Arc<OwnedFd>>| {
        ImageFile::open(&OpenOptions {
            found: found.clone(),
            ..OpenOptions::new(path, false, CacheMode::Writeback)
        })
    };
    let file = open(path, &files.image)?;
    match new {
        NewImage::Raw { size, preallocation } => {
            on_open_file(file, async move |raw| create_raw(&raw, size, preallocation).await)
        }
        NewImage::Qcow2 { options, data } => {
            let data = data.map(|data| open(&data, &files.data)).transpose()?;
            on_reactor(|handle| async move {
                let main = raw_of(&handle, &file)?;
                let data = data.as_ref().map(|data| raw_of(&handle, data)).transpose()?;
                qcow2::create(&main, data.as_ref(), &options).await.map_err(|e| of_file(&file, e))
            })
        }
        NewImage::Cow { backing, size, mtime, version, alignment } => {
            on_open_file(file, async move |raw| {
                let backing = cow::Backing { name: &backing, size, mtime };
                cow::create(&raw, &cow::CreateOptions { backing, version, alignment })
                    .await
                    .map(|_| ())
            })
        }
    }
}

async fn create_raw(raw: &Raw, size: u64, preallocation: Preallocation) -> Result<(), ImageError> {
    let failed = |operation: &'static str| move |e| ImageError::io("raw image", None, operation, e);
    raw.storage().set_len(size).await.map_err(failed("setting its length"))?;
    take_space(raw, 0, size, preallocation).await?;
    raw.flush().await.map_err(failed("syncing"))
}

/// Allocates the host's space for a range that reads as zeroes.
pub(super) async fn take_space(
    raw: &Raw,
    start: u64,
    end: u64,
    preallocation: Preallocation,
) -> Result<(), ImageError> {
    let failed = |operation: &'static str| move |e| ImageError::io("raw image", None, operation, e);
    match preallocation {
        Preallocation::Off => Ok(()),
        Preallocation::Metadata => {
            Err(ImageError::refused("raw image", "it has no metadata to preallocate"))
        }
        Preallocation::Falloc if start == end => Ok(()),
        Preallocation::Falloc => raw
            .storage()
            .allocate(start, end - start)
            .await
            .map_err(failed("allocating its space (fallocate)")),
        Preallocation::Full => {
            raw.write_zero_bytes(start, end - start).await.map_err(failed("writing zeroes"))
        }
    }
}
