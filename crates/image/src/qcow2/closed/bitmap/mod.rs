//! Persistent bitmaps: what a writer that does not update them must do.
//!
//! In: an image before its first write. Out: the same image; its bitmaps are marked if they can no
//! longer be trusted. Invariant: a bitmap with the auto flag is marked in-use before the first
//! write, because this program does not record writes. The directory is changed in place, and the
//! image's bitmaps autoclear bit is off meanwhile. A power cut then invalidates the bitmaps, and
//! costs no data.

pub mod edit;

use crate::error::ImageError;
use crate::qcow2::encoding::bitmap_directory::{self, AUTO, BitmapEntry, IN_USE};
use crate::qcow2::encoding::bytes::{self, put32};
use crate::qcow2::encoding::file::flush;
use crate::qcow2::encoding::header::{AUTOCLEAR_BITMAPS, Header};
use crate::raw::Raw;

/// Offset of the flags in a directory entry.
const FLAGS: usize = 12;

/// Marks bitmaps in-use. Call it before the first write to an open image. Durable on return. Writes
/// nothing if no bitmap needs it.
///
/// Clears autoclear bits other than `known`. Keeps the bit of a raw external data file, because
/// writes keep that file raw.
pub async fn prepare_for_writing(
    file: &Raw,
    header: &mut Header,
    known: u64,
) -> Result<(), ImageError> {
    drop_unknown_autoclear(file, header, known).await?;
    let Some(extension) = header.bitmaps else { return Ok(()) };
    let (mut directory, bitmaps) = bitmap_directory::read(file, &extension).await?;
    let recording: Vec<&BitmapEntry> =
        bitmaps.iter().filter(|b| b.flags & (AUTO | IN_USE) == AUTO).collect();
    if recording.is_empty() {
        return Ok(());
    }
    for bitmap in recording {
        put32(&mut directory, bitmap.at + FLAGS, bitmap.flags | IN_USE);
    }
    set_consistent(file, header, false).await?;
    let offset = extension.directory_offset;
    let written = bytes::write(file, offset, &directory).await;
    written.map_err(|e| ImageError::io("qcow2 bitmap directory", offset, "writing", e))?;
    flush(file).await?;
    set_consistent(file, header, true).await
}

/// Clears autoclear bits other than `known`. Durable on return.
pub async fn drop_unknown_autoclear(
    file: &Raw,
    header: &mut Header,
    known: u64,
) -> Result<(), ImageError> {
    if header.autoclear & !known == 0 {
        return Ok(());
    }
    header.autoclear &= known;
    header.write_fixed(file).await?;
    flush(file).await
}

async fn set_consistent(
    file: &Raw,
    header: &mut Header,
    consistent: bool,
) -> Result<(), ImageError> {
    header.autoclear =
        header.autoclear & !AUTOCLEAR_BITMAPS | if consistent { AUTOCLEAR_BITMAPS } else { 0 };
    header.write_fixed(file).await?;
    flush(file).await
}

/// Returns the names of an image's bitmaps, for operations that refuse images with bitmaps.
pub async fn names(file: &Raw, header: &Header) -> Result<Vec<String>, ImageError> {
    match &header.bitmaps {
        Some(extension) => Ok(bitmap_directory::read(file, extension)
            .await?
            .1
            .into_iter()
            .map(|b| b.name)
            .collect()),
        None => Ok(Vec::new()),
    }
}
