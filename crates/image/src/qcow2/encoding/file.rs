//! Reads and syncs of an image's file, with errors that name the structure.

use blockyard_storage::Storage;

use super::bytes;
use crate::error::ImageError;
use crate::raw::Raw;

/// Makes all earlier writes durable.
pub async fn flush(file: &Raw) -> Result<(), ImageError> {
    file.flush().await.map_err(|e| ImageError::io("qcow2 image", None, "flushing", e))
}

/// Returns the length of the file in bytes.
pub async fn length(file: &Raw) -> Result<u64, ImageError> {
    file.storage()
        .len()
        .await
        .map_err(|e| ImageError::io("qcow2 file", None, "finding its length", e))
}

/// Reads an L1 table of `entries` entries.
pub async fn read_l1(file: &Raw, offset: u64, entries: u64) -> Result<Vec<u8>, ImageError> {
    let read = bytes::read(file, offset, entries as usize * 8).await;
    read.map_err(|e| ImageError::io("qcow2 L1 table", offset, "reading", e))
}
