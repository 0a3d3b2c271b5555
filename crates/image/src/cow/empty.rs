//! Empties a COW file, after a commit.

use super::check::check_spare_bits;
use super::{BITMAP, bitmap_end, read_header};
use crate::error::ImageError;
use crate::raw::Raw;

/// Clears all bits, so that all reads go to the backing file. Durable on return. If the backing
/// file was changed, the caller must also update size and mtime in the header
/// ([`super::set_backing`]).
pub async fn make_empty(file: &Raw) -> Result<(), ImageError> {
    let header = read_header(file).await?;
    check_spare_bits(file, &header).await?;
    let failed = |operation: &'static str| {
        move |e| ImageError::io(BITMAP, header.bitmap_offset, operation, e)
    };
    super::session::clear_mark(file, &header).await?;
    let (offset, len) = (header.bitmap_offset, bitmap_end(&header));
    file.write_zeroes(offset, len, true).await.map_err(failed("zeroing"))?;
    file.flush().await.map_err(failed("syncing"))?;
    // The discard is only a hint to the host: no bit refers to these data any more.
    let discarded = file.discard(header.data_offset, header.backing_size).await;
    discarded.map_err(|e| ImageError::io("cow data", header.data_offset, "discarding", e))
}
