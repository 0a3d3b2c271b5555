//! Lists snapshots and persistent bitmaps of images.

use std::sync::Arc;

use crate::chain::{Chain, ChainError};
use crate::qcow2::bitmap_directory::{self, BitmapEntry};
use crate::qcow2::snapshot_table::{self, Snapshot};

use crate::tools::file::{of_file, raw_of};
use crate::tools::reactors::on_reactor;

/// Snapshots and bitmaps of one image.
#[derive(Debug, Default)]
pub struct Details {
    pub snapshots: Vec<Snapshot>,
    pub bitmaps: Vec<BitmapEntry>,
}

/// Returns the details of each image of the chain.
pub fn details(chain: &Arc<Chain>) -> Result<Vec<Details>, ChainError> {
    let chain = chain.clone();
    on_reactor(|handle| async move {
        let mut all = Vec::new();
        for layer in chain.layers() {
            let mut details = Details::default();
            if let Some(shared) = layer.qcow2() {
                let (file, header) = (raw_of(&handle, &layer.file)?, shared.header());
                let wrong = |error| of_file(&layer.file, error);
                details.snapshots = snapshot_table::read(&file, &header).await.map_err(wrong)?.0;
                if let Some(extension) = &header.bitmaps {
                    details.bitmaps =
                        bitmap_directory::read(&file, extension).await.map_err(wrong)?.1;
                }
            }
            all.push(details);
        }
        Ok(all)
    })
}
