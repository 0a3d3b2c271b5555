//! New COW files, and files that get another backing file. Both want the file for themselves.
//!
//! What must hold: what `uml_mkcow` would make is made, bit by bit; after a power cut in the middle
//! a new file is none yet, and one that existed has its old backing file or its new one. (Two names
//! longer than 479 bytes may be mixed up: a header of which more than one sector changes is not
//! changed at once.)

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use super::header::{Backing, HEADER, Header};
use super::read_header;
use crate::error::ImageError;
use crate::raw::Raw;

#[derive(Clone, Copy, Debug)]
pub struct CreateOptions<'a> {
    pub backing: Backing<'a>,
    /// 1, 2 or 3.
    pub version: u32,
    /// Of bitmap and data, in bytes: version 3 only, the others have 512.
    pub alignment: u32,
}

impl<'a> CreateOptions<'a> {
    /// As the kernel and `uml_mkcow` do it.
    pub fn new(backing: Backing<'a>) -> Self {
        CreateOptions { backing, version: 3, alignment: 4096 }
    }
}

/// Makes an empty file a COW file that has no sector of its own yet.
pub async fn create<S: Storage>(
    file: &Raw<S>,
    options: &CreateOptions<'_>,
) -> Result<Header, ImageError> {
    let header = Header::new(options.version, options.alignment, &options.backing)?;
    let failed = |operation: &'static str| move |e| ImageError::io(HEADER, None, operation, e);
    let len = file.storage().len().await.map_err(failed("finding the file's length"))?;
    if len != 0 {
        return Err(ImageError::refused(
            HEADER,
            format!("the file has {len} bytes already: a new one must be empty"),
        ));
    }
    // The length reads as zeroes, and so does the bitmap in it.
    file.storage().set_len(header.file_len()).await.map_err(failed("setting the file's length"))?;
    file.flush().await.map_err(failed("syncing"))?;
    write_header(file, &header).await?;
    Ok(header)
}

/// Writes another backing file into the header: what `rebase --unsafe` does. The sectors of the
/// file stay as they are.
pub async fn set_backing<S: Storage>(
    file: &Raw<S>,
    backing: &Backing<'_>,
) -> Result<Header, ImageError> {
    let header = read_header(file).await?.over(backing)?;
    write_header(file, &header).await?;
    Ok(header)
}

/// The first sector, which has the magic number, comes last.
async fn write_header<S: Storage>(file: &Raw<S>, header: &Header) -> Result<(), ImageError> {
    let bytes = header.encode();
    let (head, tail) = bytes.split_at(bytes.len().min(512));
    for (at, part) in [(head.len() as u64, tail), (0, head)] {
        if part.is_empty() {
            continue;
        }
        let (_, result) = file.write(Segments::from_bytes(part), at, false).await;
        result.map_err(|e| ImageError::io(HEADER, at, "writing", e))?;
        file.flush().await.map_err(|e| ImageError::io(HEADER, at, "syncing", e))?;
    }
    Ok(())
}
