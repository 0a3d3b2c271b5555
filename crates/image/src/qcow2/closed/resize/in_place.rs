//! Grows a disk by a write of the header alone. Reads one L2 table, however many the image has.
//!
//! The last cluster of the L1 table has room for more entries: with clusters of 64 KiB, for each
//! begun 4 TiB of the disk. So most growths move no table.
//!
//! In: an image that this process has used and closed. Its metadata are as consistent as they were
//! when it was opened, so this does not inspect them, unlike [`super::resize`]. Out: the larger
//! disk, durably, or the image as it was if more than the header would have to change.
//!
//! Invariant: every entry that the header adds to the L1 table is zero before the header has it.
//! The size and the number of entries are in one sector.

use super::tables::ResizeTables;
use super::{Resize, may_be_resized};
use crate::error::ImageError;
use crate::qcow2::closed::change::OfflineChange;
use crate::qcow2::encoding::bytes;
use crate::qcow2::encoding::file::{flush, length};
use crate::qcow2::encoding::header::{AUTOCLEAR_BITMAPS, AUTOCLEAR_KNOWN, Header};
use crate::raw::Raw;

/// Grows the disk. Returns false if more than the header has to change.
pub async fn grow_in_place(file: &Raw, wanted: Resize) -> Result<bool, ImageError> {
    flush(file).await?;
    let old = Header::read(file).await?;
    if !has_simple_end(&old, wanted) {
        return Ok(false);
    }
    may_be_resized(&old, false, wanted)?;
    let (had, needed) = (u64::from(old.l1_size), old.l1_needed(wanted.size));
    let room = (had * 8).next_multiple_of(old.cluster_size()) / 8;
    if needed > room {
        return Ok(false);
    }
    let (needed_before, mut new) = (old.l1_needed(old.size), old.clone());
    if needed > had {
        // The file may end in the table's last cluster. A table must lie in the file.
        if length(file).await? < old.l1_offset + needed * 8 {
            return Ok(false);
        }
        let at = old.l1_offset + had * 8;
        let behind = bytes::read(file, at, ((needed - had) * 8) as usize).await;
        let behind = behind.map_err(|e| ImageError::io("qcow2 L1 table", at, "reading", e))?;
        // Another program may have left something in the rest of the cluster.
        if behind.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        new.l1_size = needed as u32;
    }
    let change = OfflineChange::unchecked(file, old);
    let tables = ResizeTables::of(&change).await?;
    if tables.has_entries_from(needed_before)
        || tables.last_without_rest(change.old.size).await?.is_some()
    {
        return Ok(false);
    }
    new.size = wanted.size;
    new.autoclear &= AUTOCLEAR_KNOWN;
    new.write_fixed(file).await?;
    flush(file).await?;
    Ok(true)
}

/// Returns whether the disk ends at the end of a cluster, and nothing behind it has to be hidden.
fn has_simple_end(old: &Header, wanted: Resize) -> bool {
    let is_sound = old.version >= 3 && !old.has_dirty() && !old.has_corrupt();
    let others = old.has_data_file() || old.autoclear & AUTOCLEAR_BITMAPS != 0;
    let shows = wanted.below > old.size;
    is_sound
        && !others
        && !shows
        && wanted.size > old.size
        && old.size.is_multiple_of(old.cluster_size())
}
