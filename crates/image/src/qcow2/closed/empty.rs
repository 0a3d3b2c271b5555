//! Empties an image: an overlay after its commit.

use super::bitmap;
use super::change::{OfflineChange, trim};
use crate::error::ImageError;
use crate::qcow2::encoding::header::AUTOCLEAR_KNOWN;
use crate::raw::Raw;

/// Drops all clusters of the disk atomically, so that it reads as its backing file, or as zeroes.
/// Snapshots stay. Durable on return.
pub async fn make_empty(file: &Raw) -> Result<(), ImageError> {
    let change = OfflineChange::begin(file).await?;
    let mut new = change.old.clone();
    if new.raw_data_file() {
        let what = "its raw external data file would still have the contents";
        return Err(ImageError::refused("qcow2 image to be emptied", what));
    }
    let entries = new.l1_needed(new.size).max(1);
    new.l1_size = entries as u32;
    new.l1_offset = change.find_free((entries * 8).div_ceil(new.cluster_size())).await?;
    change.write("qcow2 L1 table", new.l1_offset, &vec![0; entries as usize * 8]).await?;
    // Mark the bitmaps: the guest's data may change without a write that a bitmap could record.
    let mut marked = change.old.clone();
    bitmap::prepare_for_writing(file, &mut marked, AUTOCLEAR_KNOWN).await?;
    let (_, end) = change.switch(new).await?;
    trim(file, end).await
}
