//! Resizes a disk.
//!
//! In: a closed image, held exclusively. Out: the same image with a larger or smaller disk; the new
//! part reads as zeroes. Invariant: stale data behind the old end (in its last cluster, or in a
//! longer backing file) never show, because they are zeroed before the header gets the new size.
//! For power cuts see `super::change`.

mod in_place;
mod tables;
mod tail;

use std::ops::Range;

use blockyard_storage::Storage;

pub use self::in_place::grow_in_place;
use self::tables::ResizeTables;
use super::bitmap;
use super::change::{OfflineChange, trim};
use crate::SECTOR;
use crate::error::ImageError;
use crate::qcow2::encoding::file::{flush, length};
use crate::qcow2::encoding::header::{AUTOCLEAR_BITMAPS, AUTOCLEAR_KNOWN, Header, MAX_L1_BYTES};
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 image to be resized";
const DATA_FILE: &str = "qcow2 external data file";

/// Parameters of a resize.
#[derive(Clone, Copy, Debug)]
pub struct Resize {
    /// New size of the guest's disk in bytes; whole sectors.
    pub size: u64,
    /// Whether to permit a smaller size. A smaller disk loses the data that lie beyond it.
    pub shrink: bool,
    /// Size of the backing disk in bytes; 0: no backing file.
    pub below: u64,
}

/// Resizes an image; `data` is its external data file. Durable on return.
pub async fn resize(file: &Raw, data: Option<&Raw>, wanted: Resize) -> Result<(), ImageError> {
    let change = OfflineChange::begin(file).await?;
    let (old, size) = (&change.old, wanted.size);
    if size == old.size {
        return Ok(());
    }
    may_be_resized(old, data.is_some(), wanted)?;
    let bitmaps = bitmap::edit::BitmapSet::resized(file, old, size).await?;
    if bitmaps.is_empty() {
        return if size < old.size {
            shrink(change, data, size).await
        } else {
            grow(change, data, wanted).await
        };
    }
    // The image has no bitmaps while the size changes: a power cut then loses the bitmaps, and no
    // data.
    let mut without = old.clone();
    without.autoclear &= !AUTOCLEAR_BITMAPS;
    without.write_fixed(file).await?;
    flush(file).await?;
    let (change, old_size) = (OfflineChange::begin(file).await?, change.old.size);
    let done = if size < old_size {
        shrink(change, data, size).await
    } else {
        grow(change, data, wanted).await
    };
    match done {
        Ok(()) => bitmaps.store(OfflineChange::begin(file).await?).await,
        Err(error) => {
            bitmaps_as_they_were(file, old_size).await?;
            Err(error)
        }
    }
}

/// Restores the bitmaps after a failed resize, unless the disk has its new size already.
async fn bitmaps_as_they_were(file: &Raw, old_size: u64) -> Result<(), ImageError> {
    let mut header = Header::read(file).await?;
    if header.size != old_size || header.has_dirty() {
        return Ok(());
    }
    header.autoclear |= AUTOCLEAR_BITMAPS;
    header.write_fixed(file).await?;
    flush(file).await
}

fn may_be_resized(old: &Header, has_data: bool, wanted: Resize) -> Result<(), ImageError> {
    let refuse = |what: String| Err(ImageError::refused(STRUCTURE, what));
    if !wanted.size.is_multiple_of(SECTOR) {
        return refuse(format!("{} bytes are not whole sectors", wanted.size));
    }
    if old.has_data_file() != has_data {
        return refuse("its external data file must be open, and no other".into());
    }
    let smaller = wanted.size < old.size;
    if smaller && !wanted.shrink {
        return refuse(
            "a smaller disk loses what lies beyond its end: pass --shrink to permit that".into(),
        );
    }
    if old.snapshot_count > 0 && smaller {
        return refuse("an image with snapshots cannot become smaller: delete them first".into());
    }
    if old.snapshot_count > 0 && old.version < 3 {
        return refuse(
            "snapshots of version 2 do not store the disk's size: delete them first".into(),
        );
    }
    if old.l1_needed(wanted.size) * 8 > MAX_L1_BYTES {
        return refuse(format!("{} bytes need an L1 table larger than 32 MiB", wanted.size));
    }
    Ok(())
}

async fn shrink(
    change: OfflineChange<'_>,
    data: Option<&Raw>,
    size: u64,
) -> Result<(), ImageError> {
    let (file, mut new) = (change.file, change.old.clone());
    new.size = size;
    let mut tables = ResizeTables::of(&change).await?;
    let boundary = tables.last_without_rest(size).await?;
    tables.set_entries(new.l1_needed(size), new.l1_needed(size).max(1));
    let replaced = boundary.as_ref().map_or(0..0, |(index, _)| *index..*index + 1);
    tables.place(&mut new, replaced, 0).await?;
    if let Some((index, table)) = &boundary {
        tables.write(*index, table).await?;
    }
    tables.finish(&new).await?;
    let (_, end) = change.switch(new).await?;
    if let Some(data) = data.filter(|data| !data.is_device()) {
        let cut = data.storage().set_len(size).await;
        cut.map_err(|e| ImageError::io(DATA_FILE, None, "setting its length", e))?;
        flush(data).await?;
    }
    trim(file, end).await
}

async fn grow(
    change: OfflineChange<'_>,
    data: Option<&Raw>,
    wanted: Resize,
) -> Result<(), ImageError> {
    let (old, mut new) = (change.old.clone(), change.old.clone());
    new.size = wanted.size;
    let (needed_before, needed) = (old.l1_needed(old.size), old.l1_needed(wanted.size));
    let mut tables = ResizeTables::of(&change).await?;
    // A longer backing file would show behind the old end.
    let hidden = old.size.next_multiple_of(old.cluster_size())..wanted.below.min(wanted.size);
    if !hidden.is_empty() && old.version < 3 {
        let what = "its backing file is larger than it is, and version 2 has no zero clusters to \
            hide the rest: convert the image to version 3 first";
        return Err(ImageError::refused(STRUCTURE, what));
    }
    let tail = tail::of(&tables, data, wanted.below).await?;
    let boundary = tables.last_without_rest(old.size).await?;
    if let Some(data) = data {
        lengthen_data(data, &old, wanted.size).await?;
    }
    let replaced = replaced(&old, boundary.is_some() || tail.changes_entry(), &hidden);
    if replaced.is_empty()
        && !tables.has_entries_from(needed_before)
        && needed <= u64::from(old.l1_size)
    {
        flush(change.file).await?;
        new.autoclear &= AUTOCLEAR_KNOWN;
        new.write_fixed(change.file).await?;
        return flush(change.file).await;
    }
    tables.set_entries(needed_before, needed.max(1));
    let moved = tables.place(&mut new, replaced.clone(), u64::from(tail.moves())).await?;
    for index in replaced {
        let mut table = match &boundary {
            Some((at, table)) if *at == index => table.clone(),
            _ => tables.read(index).await?,
        };
        if index + 1 == needed_before {
            tail.put(&tables, &mut table, moved).await?;
        }
        tables.hide(&mut table, index, &hidden);
        tables.write(index, &table).await?;
    }
    tables.finish(&new).await?;
    change.switch(new).await.map(|_| ())
}

/// Returns the L2 tables to replace: the table of the old end, if that table changes, and the
/// tables that hide the backing file.
fn replaced(old: &Header, boundary_changes: bool, hidden: &Range<u64>) -> Range<u64> {
    let hiding = if hidden.is_empty() {
        0..0
    } else {
        hidden.start / old.l2_reach()..hidden.end.div_ceil(old.l2_reach())
    };
    match old.l1_needed(old.size).checked_sub(1) {
        Some(boundary) if boundary_changes => boundary..hiding.end.max(boundary + 1),
        _ => hiding,
    }
}

/// Extends the data file to the disk's size, with zeroes behind the old end.
async fn lengthen_data(data: &Raw, old: &Header, size: u64) -> Result<(), ImageError> {
    let io = |what| move |e| ImageError::io(DATA_FILE, None, what, e);
    let len = length(data).await?;
    if old.raw_data_file() && len > old.size {
        data.write_zeroes(old.size, len.min(size) - old.size, true)
            .await
            .map_err(io("zeroing the new part"))?;
    }
    if len < size {
        if data.is_device() {
            return Err(ImageError::refused(DATA_FILE, "its device is too small"));
        }
        data.storage().set_len(size).await.map_err(io("setting its length"))?;
    }
    flush(data).await
}
