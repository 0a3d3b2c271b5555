//! Persistent bitmaps: what a writer owes to those that it does not keep up to date.
//!
//! In: an image that is about to be written to. Out: one whose bitmaps say of themselves whether
//! they can be trusted. What must hold: a bitmap that is to record every write is marked as in use
//! before the first one, for none is recorded here. The directory is changed in place, so for that
//! while the image says that its bitmaps are not consistent: a power cut then costs the bitmaps,
//! which is what they are for, and no data.

pub mod directory;
pub mod edit;

use blockyard_storage::Storage;

use self::directory::{AUTO, BitmapEntry, IN_USE};
use super::bytes::{self, put32};
use super::check::flush;
use super::header::{AUTOCLEAR_BITMAPS, AUTOCLEAR_KNOWN, Header};
use crate::error::ImageError;
use crate::raw::Raw;

/// Where a directory entry has its flags.
const FLAGS: usize = 12;

/// To be called before the first write to an open image; durable when it answers. Nothing is
/// written if nothing is owed.
///
/// Autoclear bits that are not known here are cleared. The raw external data bit stays: writes keep
/// its promise.
pub async fn prepare_for_writing<S: Storage>(
    file: &Raw<S>,
    header: &mut Header,
) -> Result<(), ImageError> {
    drop_unknown_autoclear(file, header).await?;
    let Some(extension) = header.bitmaps else { return Ok(()) };
    let (mut directory, bitmaps) = directory::read(file, &extension).await?;
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

/// Clears the autoclear bits that are not known here; durable when it returns.
pub async fn drop_unknown_autoclear<S: Storage>(
    file: &Raw<S>,
    header: &mut Header,
) -> Result<(), ImageError> {
    if header.autoclear & !AUTOCLEAR_KNOWN == 0 {
        return Ok(());
    }
    header.autoclear &= AUTOCLEAR_KNOWN;
    header.write_fixed(file).await?;
    flush(file).await
}

async fn set_consistent<S: Storage>(
    file: &Raw<S>,
    header: &mut Header,
    consistent: bool,
) -> Result<(), ImageError> {
    header.autoclear =
        header.autoclear & !AUTOCLEAR_BITMAPS | if consistent { AUTOCLEAR_BITMAPS } else { 0 };
    header.write_fixed(file).await?;
    flush(file).await
}

/// The names of an image's bitmaps, for those who cannot go on with any.
pub async fn names<S: Storage>(file: &Raw<S>, header: &Header) -> Result<Vec<String>, ImageError> {
    match &header.bitmaps {
        Some(extension) => {
            Ok(directory::read(file, extension).await?.1.into_iter().map(|b| b.name).collect())
        }
        None => Ok(Vec::new()),
    }
}
