//! Changes options of a closed image in place.
//!
//! In: a closed image, held exclusively. Out: the same disk with other options. Invariant: the
//! header is replaced atomically (`encoding::rewrite`), so a power cut leaves the old options or
//! the new ones.

use super::change::OfflineChange;
use crate::error::ImageError;
use crate::qcow2::encoding::file::flush;
use crate::qcow2::encoding::header::{
    AUTOCLEAR_KNOWN, COMPATIBLE_LAZY_REFCOUNTS, Header, V3_LENGTH,
};
use crate::qcow2::encoding::rewrite::rewrite;
use crate::qcow2::encoding::snapshot_table;
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 options";

/// Options to change; None: unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Amend {
    /// Version of the format: 2 or 3.
    pub version: Option<u32>,
    pub lazy_refcounts: Option<bool>,
}

/// Changes the options. Durable when it returns.
pub async fn amend(file: &Raw, wanted: Amend) -> Result<(), ImageError> {
    // Repairs an image that is marked dirty. Afterwards, without lazy refcounts or in version 2,
    // nothing would demand that repair.
    let change = OfflineChange::begin(file).await?;
    let (old, mut new) = (&change.old, change.old.clone());
    new.autoclear &= AUTOCLEAR_KNOWN;
    if let Some(version) = wanted.version {
        set_version(&mut new, version)?;
        let (snapshots, _) = snapshot_table::read(file, old).await?;
        if new.version != old.version
            && snapshots.iter().any(|snapshot| snapshot.disk_size.is_none())
        {
            let what = "a snapshot of version 2 does not store the disk's size, which version 3 \
                requires: delete it first";
            return Err(ImageError::refused(STRUCTURE, what));
        }
    }
    if let Some(lazy) = wanted.lazy_refcounts {
        if lazy && new.version < 3 {
            return Err(ImageError::refused(
                STRUCTURE,
                "lazy refcounts need version 3: pass compat=1.1 too",
            ));
        }
        let others = new.compatible & !COMPATIBLE_LAZY_REFCOUNTS;
        new.compatible = others | if lazy { COMPATIBLE_LAZY_REFCOUNTS } else { 0 };
    }
    if new.version != old.version {
        return rewrite(file, old, &mut new).await;
    }
    new.write_fixed(file).await?;
    flush(file).await
}

fn set_version(header: &mut Header, version: u32) -> Result<(), ImageError> {
    match (header.version, version) {
        (have, wanted) if have == wanted => Ok(()),
        (2, 3) => {
            header.version = 3;
            header.header_length = V3_LENGTH;
            Ok(())
        }
        // Version 2 has no zero clusters: they would have to be written as data.
        _ => Err(ImageError::refused(
            STRUCTURE,
            "the version cannot be lowered in place: run `image convert -o compat=0.10`",
        )),
    }
}
