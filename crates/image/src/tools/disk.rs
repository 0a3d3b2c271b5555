//! An open chain on one reactor, with its name for errors.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_ring::{Handle, Segments};

use crate::chain::{Chain, ChainError};
use crate::error::ImageError;
use crate::extent::BlockStatus;
use crate::layers::image::Image;

use super::reactors::on_reactor;
use crate::layers::layout_scan;

const DATA: &str = "the disk";

/// An open chain on one reactor.
pub struct Disk {
    pub image: Image,
    path: PathBuf,
    /// For each layer: whether it has clusters that were never written, so that holes of its file
    /// read as zeroes.
    sparse: Vec<bool>,
}

impl Disk {
    /// Makes one reactor's view of a chain.
    pub async fn of(chain: &Chain, handle: &Handle) -> Result<Self, ChainError> {
        let path = chain.options().path.clone();
        let image = chain.image(handle).map_err(|e| {
            let error = ImageError::io("file", None, "opening it for io_uring", e);
            ChainError::Image { path: path.clone(), error }
        })?;
        Disk::new(image, path).await
    }

    /// Makes a disk of an image; `path` is its name in errors.
    pub async fn new(image: Image, path: impl Into<PathBuf>) -> Result<Self, ChainError> {
        let path = path.into();
        let mut disk = Disk { image, path, sparse: Vec::new() };
        disk.sparse = layout_scan::sparse_layers(disk.image.layers())
            .await
            .map_err(disk.wrong(None, "reading"))?;
        Ok(disk)
    }

    /// Size of the disk in bytes; whole sectors.
    pub fn size(&self) -> u64 {
        self.image.size().next_multiple_of(crate::SECTOR)
    }

    pub(super) fn wrong(
        &self,
        offset: impl Into<Option<u64>>,
        operation: &str,
    ) -> impl Fn(std::io::Error) -> ChainError {
        let offset = offset.into();
        move |e| self.failed(ImageError::io(DATA, offset, operation, e))
    }

    pub(super) fn failed(&self, error: ImageError) -> ChainError {
        ChainError::Image { path: self.path.clone(), error }
    }

    /// Returns the status of the bytes at `offset`, without reading them.
    pub(super) async fn status(&self, offset: u64, len: u64) -> Result<BlockStatus, ChainError> {
        let status = layout_scan::status(self.image.layers(), &self.sparse, offset, len).await;
        status.map_err(self.wrong(offset, "finding"))
    }

    /// Like [`Disk::status`], but `offset` may lie behind the disk's end. There it returns zeroes
    /// that no image has.
    pub(super) async fn known(&self, offset: u64, len: u64) -> Result<BlockStatus, ChainError> {
        match self.size().checked_sub(offset).filter(|&rest| rest > 0) {
            Some(rest) => self.status(offset, len.min(rest)).await,
            None => Ok(BlockStatus::nothing(self.image.layers().len(), len)),
        }
    }

    pub(super) async fn read(
        &self,
        segments: Segments,
        offset: u64,
    ) -> Result<Segments, ChainError> {
        let (segments, result) = self.image.read(segments, offset).await;
        result.map_err(self.wrong(offset, "reading"))?;
        Ok(segments)
    }

    pub(super) async fn write(&self, segments: Segments, offset: u64) -> Result<(), ChainError> {
        self.image.write(segments, offset).await.1.map_err(self.wrong(offset, "writing"))
    }

    pub(super) async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), ChainError> {
        self.image
            .write_zeroes(offset, len, true)
            .await
            .map_err(self.wrong(offset, "writing zeroes"))
    }

    /// Makes the files durable and closes them.
    pub async fn close(&self) -> Result<(), ChainError> {
        self.image.close().await.map_err(self.wrong(None, "closing"))
    }
}

/// Makes a chain's files durable and closes them.
pub fn close(chain: &Arc<Chain>) -> Result<(), ChainError> {
    let chain = chain.clone();
    on_reactor(|handle| async move { Disk::of(&chain, &handle).await?.close().await })
}
