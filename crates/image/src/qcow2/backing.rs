//! Another backing file's name in an image's header.
//!
//! In: an open header, a name and its format. Out: the header's cluster with them. What must hold: at every power cut the
//! image names the old file with its format, or the new one with its own. The first sector is written last and alone; what
//! it points to in the rest of the cluster (the name; extensions) is durable before, in bytes that the old header does not
//! use.

use std::ops::Range;

use blockyard_ring::Storage;

use super::bytes;
use super::check::flush;
use super::header::{AUTOCLEAR_KNOWN, EXTENSION_FEATURE_NAMES, Header, MAX_BACKING_NAME, SECTOR_BYTES};
use super::shared::lock;
use super::view::Qcow2;
use crate::error::ImageError;
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 backing file name";

/// Writes another backing file's name and format, or that there is none. What the guest sees is the caller's business.
/// Durable when it answers; `header` is what is in the file then.
pub async fn set_backing<S: Storage>(
    file: &Raw<S>,
    header: &mut Header,
    backing: Option<(&str, &str)>,
) -> Result<(), ImageError> {
    let mut new = header.clone();
    new.autoclear &= AUTOCLEAR_KNOWN;
    new.backing = backing.map(|(name, _)| name.into());
    new.backing_format = backing.map(|(_, format)| format.into());
    if new.raw_data_file() && backing.is_some() {
        return Err(ImageError::refused(
            STRUCTURE,
            "an image with a raw external data file cannot have a backing file",
        ));
    }
    let length = backing.map(|(name, _)| name.len());
    if length.is_some_and(|len| len == 0 || len > MAX_BACKING_NAME) {
        return Err(ImageError::refused(STRUCTURE, "a name must have 1 to 1023 bytes"));
    }
    let io = |what| move |e| ImageError::io("qcow2 header", 0, what, e);
    let cluster = bytes::read(file, 0, header.cluster_size() as usize).await.map_err(io("reading"))?;
    let area = match lay_out(&mut new, &cluster, header) {
        Some(area) => area,
        None => {
            // The names of features are for people; they make way if there is no other.
            new.extensions.retain(|extension| extension.kind != EXTENSION_FEATURE_NAMES);
            lay_out(&mut new, &cluster, header).ok_or_else(|| {
                let what = "there is no room for it in the header's cluster that could be written at once";
                ImageError::refused(STRUCTURE, what)
            })?
        }
    };
    if new.backing_offset >= SECTOR_BYTES as u64 {
        let name = new.backing_offset as usize..new.backing_offset as usize + length.unwrap_or(0);
        let (start, end) = (name.start & !(SECTOR_BYTES - 1), name.end.next_multiple_of(SECTOR_BYTES));
        bytes::write(file, start as u64, &area[start..end]).await.map_err(io("writing"))?;
        flush(file).await?;
    }
    bytes::write(file, 0, &area[..SECTOR_BYTES]).await.map_err(io("writing"))?;
    flush(file).await?;
    new.extensions = new.current_extensions();
    *header = new;
    Ok(())
}

impl<S: Storage> Qcow2<S> {
    /// The open image names no backing file any more. Nothing is in flight, and it has all of the disk.
    pub(crate) async fn forget_backing(&self) -> Result<(), ImageError> {
        let _turn = self.shared.writing_back.take().await;
        let mut header = self.shared.header();
        let done = set_backing(&self.file, &mut header, None).await;
        // Half-way, the file's header is not the one in memory.
        if let Err(ImageError { source: Some(e), .. }) = &done {
            self.shared.lose(e);
        }
        done?;
        *lock(&self.shared.header) = header;
        Ok(())
    }
}

/// The cluster as it is to be, with the name in a place that can be written before the first sector is; None: there is none.
fn lay_out(new: &mut Header, cluster: &[u8], old: &Header) -> Option<Vec<u8>> {
    let fixed = new.serialize_without_name().ok()?;
    // Extensions beyond the first sector can stay, but not change.
    let beyond = fixed.get(SECTOR_BYTES..).unwrap_or_default();
    if beyond != cluster.get(SECTOR_BYTES..SECTOR_BYTES + beyond.len())? {
        return None;
    }
    let mut area = cluster.to_vec();
    area[..SECTOR_BYTES.min(cluster.len())].fill(0);
    new.backing_offset = 0;
    if let Some(name) = new.backing.clone() {
        let at = place(fixed.len(), name.len(), cluster.len(), old)?;
        new.backing_offset = at as u64;
        area[at..at + name.len()].copy_from_slice(name.as_bytes());
    }
    let fixed = new.serialize_without_name().ok()?;
    area[..fixed.len()].copy_from_slice(&fixed);
    Some(area)
}

/// Where the name goes: behind the extensions, and either in the first sector or in bytes that the old header does not use.
fn place(from: usize, len: usize, cluster: usize, old: &Header) -> Option<usize> {
    if from + len <= SECTOR_BYTES {
        return Some(from);
    }
    let old_name = old.backing.as_ref().map_or(0, String::len);
    let old_name = old.backing_offset as usize..old.backing_offset as usize + old_name;
    let old_extensions = 0..old.serialize_without_name().ok()?.len();
    let starts = [SECTOR_BYTES, from, old_extensions.end, old_name.end].map(|at| at.next_multiple_of(8));
    let overlaps = |at: usize, used: &Range<usize>| at < used.end && used.start < at + len;
    let fits = |at: &usize| {
        *at >= from.max(SECTOR_BYTES)
            && at + len <= cluster
            && ![&old_name, &old_extensions].iter().any(|r| overlaps(*at, r))
    };
    starts.into_iter().filter(fits).min()
}
