//! Replaces the backing file's name in an image's header.
//!
//! In: a header, a name and its format. Out: the header's cluster with this name and format.
//! Invariant: at every power cut the image names the old file with its format, or the new one with
//! its format (`encoding::rewrite`).

use crate::error::ImageError;
use crate::qcow2::encoding::header::{
    AUTOCLEAR_JOURNAL, AUTOCLEAR_KNOWN, Header, MAX_BACKING_NAME,
};
use crate::qcow2::encoding::rewrite::rewrite;
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::shared::lock;
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 backing file name";

/// Stores another backing file's name and format, or that there is no backing file. The caller must
/// keep the guest's data unchanged. On return the change is durable, and `header` equals the header
/// in the file.
pub async fn set_backing(
    file: &Raw,
    header: &mut Header,
    backing: Option<(&str, &str)>,
) -> Result<(), ImageError> {
    replace_backing(file, header, backing, AUTOCLEAR_KNOWN).await
}

/// `kept`: the autoclear bits that stay.
async fn replace_backing(
    file: &Raw,
    header: &mut Header,
    backing: Option<(&str, &str)>,
    kept: u64,
) -> Result<(), ImageError> {
    let mut new = header.clone();
    new.autoclear &= kept;
    new.backing = backing.map(|(name, _)| name.into());
    new.backing_format = backing.map(|(_, format)| format.into());
    if new.raw_data_file() && backing.is_some() {
        return Err(ImageError::refused(
            STRUCTURE,
            "an image with a raw external data file cannot have a backing file",
        ));
    }
    if backing.is_some_and(|(name, _)| name.is_empty() || name.len() > MAX_BACKING_NAME) {
        return Err(ImageError::refused(STRUCTURE, "a name must have 1 to 1023 bytes"));
    }
    rewrite(file, header, &mut new).await?;
    *header = new;
    Ok(())
}

impl Qcow2 {
    /// Removes the backing file's name from the open image. The image must hold the whole disk, and
    /// no request may be in flight. The image keeps the mark of its journal, which goes on.
    pub(crate) async fn forget_backing(&self) -> Result<(), ImageError> {
        let _permit = self.shared.writing_back.acquire().await;
        let _header = self.shared.changing_header.acquire().await;
        let mut header = self.shared.header();
        let kept = AUTOCLEAR_KNOWN | AUTOCLEAR_JOURNAL;
        let done = replace_backing(&self.file, &mut header, None, kept).await;
        // After a failure in the middle the file's header may differ from the one in memory.
        if let Err(error) = &done
            && let Some(e) = error.io_source()
        {
            self.shared.lose(e);
        }
        done?;
        *lock(&self.shared.header) = header;
        Ok(())
    }
}
