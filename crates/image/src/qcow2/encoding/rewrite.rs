//! Replaces the header's cluster: fields, extensions, and the backing file's name.
//!
//! In: the header in the file, and its replacement. Out: the file with the new header. Invariant:
//! at every power cut the file has one of the two headers. The first sector is written last and
//! alone. The rest of the new header is durable before, in bytes that the old header does not use.

use std::ops::Range;

use super::bytes;
use super::file::flush;
use super::header::{EXTENSION_FEATURE_NAMES, Header, SECTOR_BYTES};
use crate::error::ImageError;
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 header";

/// Replaces `old`, the header in the file, by `new`. On return the change is durable, and `new`
/// equals the header in the file.
pub(in crate::qcow2) async fn rewrite(
    file: &Raw,
    old: &Header,
    new: &mut Header,
) -> Result<(), ImageError> {
    let io = |what| move |e| ImageError::io(STRUCTURE, 0, what, e);
    let cluster = bytes::read(file, 0, old.cluster_size() as usize).await.map_err(io("reading"))?;
    let area = match lay_out(new, &cluster, old) {
        Some(area) => area,
        None => {
            // The feature names are informational: drop them if the rest does not fit.
            new.extensions.retain(|extension| extension.kind != EXTENSION_FEATURE_NAMES);
            lay_out(new, &cluster, old).ok_or_else(|| {
                let what = "its first cluster has no room for an atomic change of the header";
                ImageError::refused(STRUCTURE, what)
            })?
        }
    };
    if new.backing_offset >= SECTOR_BYTES as u64 {
        let length = new.backing.as_ref().map_or(0, String::len);
        let name = new.backing_offset as usize..new.backing_offset as usize + length;
        let (start, end) =
            (name.start & !(SECTOR_BYTES - 1), name.end.next_multiple_of(SECTOR_BYTES));
        bytes::write(file, start as u64, &area[start..end]).await.map_err(io("writing"))?;
        flush(file).await?;
    }
    bytes::write(file, 0, &area[..SECTOR_BYTES]).await.map_err(io("writing"))?;
    flush(file).await?;
    new.extensions = new.current_extensions();
    Ok(())
}

/// Replaces `old` by `new` by one write of the first sector, without a sync. Returns false, and
/// changes nothing, if they differ in more than the first sector or in length, or if the name of
/// the backing file is in the way.
pub(in crate::qcow2) async fn rewrite_first_sector(
    file: &Raw,
    old: &Header,
    new: &Header,
) -> Result<bool, ImageError> {
    let (before, after) = (old.serialize_without_name()?, new.serialize_without_name()?);
    let beyond = |bytes: &[u8]| bytes.get(SECTOR_BYTES..).unwrap_or_default().to_vec();
    // The name may bound the extensions of a crafted header, without the end marker of `after`.
    let is_in_the_way = old.backing.is_some() && old.backing_offset < after.len() as u64;
    if before.len() != after.len() || beyond(&before) != beyond(&after) || is_in_the_way {
        return Ok(false);
    }
    let io = |what| move |e| ImageError::io(STRUCTURE, 0, what, e);
    let mut sector = bytes::read(file, 0, SECTOR_BYTES).await.map_err(io("reading"))?;
    let len = after.len().min(SECTOR_BYTES);
    sector[..len].copy_from_slice(&after[..len]);
    bytes::write(file, 0, &sector).await.map_err(io("writing"))?;
    Ok(true)
}

/// Returns the new cluster. The backing file's name is at an offset where it can be written before
/// the first sector. None: there is no such offset.
fn lay_out(new: &mut Header, cluster: &[u8], old: &Header) -> Option<Vec<u8>> {
    let fixed = new.serialize_without_name().ok()?;
    // Extensions beyond the first sector can stay, but must not change.
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

/// Returns the offset of the backing file's name: behind the extensions, and either in the first
/// sector or in bytes that the old header does not use.
fn place(from: usize, len: usize, cluster: usize, old: &Header) -> Option<usize> {
    if from + len <= SECTOR_BYTES {
        return Some(from);
    }
    let old_name = old.backing.as_ref().map_or(0, String::len);
    let old_name = old.backing_offset as usize..old.backing_offset as usize + old_name;
    let old_extensions = 0..old.serialize_without_name().ok()?.len();
    let starts =
        [SECTOR_BYTES, from, old_extensions.end, old_name.end].map(|at| at.next_multiple_of(8));
    let overlaps = |at: usize, used: &Range<usize>| at < used.end && used.start < at + len;
    let fits = |at: &usize| {
        *at >= from.max(SECTOR_BYTES)
            && at + len <= cluster
            && ![&old_name, &old_extensions].iter().any(|r| overlaps(*at, r))
    };
    starts.into_iter().filter(fits).min()
}
