//! Creates COW files and replaces their backing file. Both need the file exclusively.
//!
//! Invariants: the result equals that of `uml_mkcow`, byte for byte. If a power cut interrupts a
//! creation, the file is no COW file or a complete one. If it interrupts a replacement, the file
//! names its old or its new backing file. Exception: if both names are longer than 479 bytes, they
//! may be mixed, because the header's change spans two sectors.

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use super::header::{Backing, HEADER, Header};
use super::read_header;
use crate::error::ImageError;
use crate::raw::Raw;

/// Parameters of a new COW file.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions<'a> {
    pub backing: Backing<'a>,
    /// Version of the header: 1, 2 or 3.
    pub version: u32,
    /// Alignment of bitmap and data, in bytes. Only version 3 has a choice; the others use 512.
    pub alignment: u32,
}

impl<'a> CreateOptions<'a> {
    /// Returns the default options, which are those of the UML kernel and of `uml_mkcow`.
    pub fn new(backing: Backing<'a>) -> Self {
        CreateOptions { backing, version: 3, alignment: 4096 }
    }
}

/// Makes an empty file a COW file that stores no sectors.
pub async fn create(file: &Raw, options: &CreateOptions<'_>) -> Result<Header, ImageError> {
    let header = Header::new(options.version, options.alignment, &options.backing)?;
    let failed = |operation: &'static str| move |e| ImageError::io(HEADER, None, operation, e);
    let len = file.storage().len().await.map_err(failed("finding the file's length"))?;
    if len != 0 {
        return Err(ImageError::refused(
            HEADER,
            format!("the file has {len} bytes already: a new one must be empty"),
        ));
    }
    // A file extended by `set_len` reads as zeroes: the bitmap is clear.
    file.storage().set_len(header.file_len()).await.map_err(failed("setting the file's length"))?;
    file.flush().await.map_err(failed("syncing"))?;
    write_header(file, &header).await?;
    Ok(header)
}

/// Replaces the backing file in the header, as `rebase --unsafe` does. The file's sectors stay
/// unchanged.
pub async fn set_backing(file: &Raw, backing: &Backing<'_>) -> Result<Header, ImageError> {
    let header = read_header(file).await?.over(backing)?;
    write_header(file, &header).await?;
    Ok(header)
}

/// Writes the first sector last, because it has the magic number.
async fn write_header(file: &Raw, header: &Header) -> Result<(), ImageError> {
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
