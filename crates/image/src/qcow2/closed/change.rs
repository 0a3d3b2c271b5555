//! Changes a closed image atomically. Snapshots, resizes, bitmaps and emptied images use this
//! module.
//!
//! In: a consistent image, new tables in free clusters, and a header that names them. Out: the
//! image with that header, and with matching refcounts and COPIED flags. One write of the header's
//! sector is the switch.
//!
//! ```text
//!   version 3:  tables -> flush -> header with the dirty bit -> flush
//!   -> recount -> flush -> dirty bit cleared
//!   version 2:  tables -> flush -> flags cleared, refcounts raised for both states
//!   -> flush -> header -> flush -> recount
//! ```
//!
//! Invariant: after a power cut the image is in the old state or in the new one. In version 3 the
//! next open recounts, because of the dirty bit. Version 2 has no dirty bit: a power cut may leave
//! refcounts that are too high (leaks), and COPIED flags that are clear although they could be set
//! (the next write copies once more than necessary).

use blockyard_storage::Storage;

use crate::error::ImageError;
use crate::qcow2::check::stored::Refcounts;
use crate::qcow2::check::{
    FindingKind, Tally, clear_bits, cover, inspect, rebuild_refcounts, recount,
};
use crate::qcow2::encoding::bytes::{self, LastHole};
use crate::qcow2::encoding::file::{flush, length, read_l1};
use crate::qcow2::encoding::header::{AUTOCLEAR_KNOWN, Header, INCOMPATIBLE_DIRTY, SECTOR_BYTES};
use crate::qcow2::encoding::rewrite::rewrite;
use crate::raw::Raw;

/// A closed image that is being changed, held exclusively.
pub struct OfflineChange<'a> {
    pub file: &'a Raw,
    /// The header before the change.
    pub old: Header,
    /// The first cluster behind all used ones.
    end: u64,
}

impl<'a> OfflineChange<'a> {
    /// Checks the whole image first; refuses to change an inconsistent one.
    pub async fn begin(file: &'a Raw) -> Result<Self, ImageError> {
        // Make the data that are read below durable first: a power cut must not undo what later
        // writes rely on.
        flush(file).await?;
        let mut old = Header::read(file).await?;
        if old.has_corrupt() {
            let what = "it is marked as corrupt; `blockyard image check --repair all` may help";
            return Err(ImageError::invalid("qcow2 header", None, what));
        }
        if old.has_dirty() {
            old = rebuild_refcounts(file).await?;
        }
        let mut found = inspect(file, &old).await?;
        if found.report.is_safe() && found.report.unset_flags > 0 {
            // An interrupted change of a version 2 image leaves COPIED flags clear.
            old = rebuild_refcounts(file).await?;
            found = inspect(file, &old).await?;
        }
        let corrupt = found
            .report
            .findings
            .iter()
            .find(|f| !matches!(f.kind, FindingKind::Leak | FindingKind::Harmless));
        if let Some(finding) = corrupt {
            let what = format!("{}; run `blockyard image check --repair all` first", finding.text);
            return Err(ImageError::invalid(finding.structure.clone(), finding.offset, what));
        }
        let end =
            if file.is_device() { found.report.image_end_offset } else { length(file).await? };
        let end = end.div_ceil(old.cluster_size());
        Ok(OfflineChange { file, old, end })
    }

    /// Returns an image without checking it. Its tables can be read. It has no free clusters.
    pub fn unchecked(file: &'a Raw, old: Header) -> Self {
        OfflineChange { file, old, end: 0 }
    }

    /// Returns the offset of `count` consecutive free clusters.
    pub async fn find_free(&self, count: u64) -> Result<u64, ImageError> {
        let (header, bits) = (&self.old, self.old.cluster_bits);
        let refcounts = Refcounts::load(self.file, header, &mut Tally::default()).await?;
        let (mut start, mut hole) = (0, LastHole::default());
        for (index, block) in refcounts.blocks() {
            // Clusters without a refcount block have refcount 0: they are free.
            let first = index * refcounts.per_block();
            if first >= self.end || first.saturating_sub(start) >= count {
                break;
            }
            let last = (first + refcounts.per_block()).min(self.end);
            // All clusters of a block that is a hole are free.
            if hole.covers(self.file, block, 1 << bits, self.end << bits).await {
                if last - start >= count {
                    return Ok(start << bits);
                }
                continue;
            }
            let counts = refcounts.read_block(self.file, block).await?;
            for cluster in first..last {
                if refcounts.width.get(&counts, (cluster - first) as usize) != 0 {
                    start = cluster + 1;
                } else if cluster + 1 - start >= count {
                    return Ok(start << bits);
                }
            }
        }
        if self.file.is_device() && (start + count) << bits > length(self.file).await? {
            return Err(ImageError::refused("qcow2 image", "its device has no free space left"));
        }
        Ok(start << bits)
    }

    /// Writes a new table, padded to whole sectors.
    pub async fn write(
        &self,
        structure: &str,
        offset: u64,
        table: &[u8],
    ) -> Result<(), ImageError> {
        let mut padded = table.to_vec();
        padded.resize(padded.len().next_multiple_of(SECTOR_BYTES), 0);
        bytes::write(self.file, offset, &padded)
            .await
            .map_err(|e| ImageError::io(structure, offset, "writing", e))
    }

    /// Reads the active L1 table.
    pub async fn l1(&self) -> Result<Vec<u8>, ImageError> {
        read_l1(self.file, self.old.l1_offset, self.old.l1_size.into()).await
    }

    /// Makes `new` the image's header. Returns the header as written, and the offset of the image's
    /// end.
    pub async fn switch(self, mut new: Header) -> Result<(Header, u64), ImageError> {
        flush(self.file).await?;
        new.autoclear &= AUTOCLEAR_KNOWN;
        let mut found = inspect(self.file, &new).await?;
        if new.version < 3 {
            let mut headers = [self.old, new];
            cover(self.file, &mut headers).await?;
            let [old, covered] = headers;
            new = covered;
            put_header(self.file, &old, &mut new).await?;
            found = inspect(self.file, &new).await?;
        } else {
            new.incompatible |= INCOMPATIBLE_DIRTY;
            put_header(self.file, &self.old, &mut new).await?;
        }
        let mut headers = [new];
        let end = recount(self.file, &mut headers, &found, true).await?;
        let [mut new] = headers;
        clear_bits(self.file, &mut new, INCOMPATIBLE_DIRTY).await?;
        Ok((new, end))
    }
}

/// Replaces the header, atomically and durably.
async fn put_header(file: &Raw, old: &Header, new: &mut Header) -> Result<(), ImageError> {
    if new.current_extensions() != old.current_extensions() {
        return rewrite(file, old, new).await;
    }
    new.write_fixed(file).await?;
    flush(file).await
}

/// Truncates the file behind the last cluster in use.
pub async fn trim(file: &Raw, end: u64) -> Result<(), ImageError> {
    if file.is_device() || length(file).await? <= end {
        return Ok(());
    }
    let io = |e| ImageError::io("qcow2 file", None, "truncating free clusters at its end", e);
    file.storage().set_len(end).await.map_err(io)?;
    flush(file).await
}

#[cfg(test)]
mod tests {
    use blockyard_storage::sim::{Sim, SimConfig, SimDisk, SimImage};

    use super::*;
    use crate::Alignment;

    #[test]
    fn a_trim_shortens_a_file_and_never_extends_it() {
        let disk = SimDisk::new(SimImage::zeroed(8192), SimConfig::new(1));
        let file = Raw::on(disk, Alignment { memory_align: 1, offset_align: 1 });
        let test = async move {
            for (end, expected) in [(16_384, 8192), (8192, 8192), (4096, 4096)] {
                trim(&file, end).await.unwrap();
                assert_eq!(length(&file).await.unwrap(), expected);
            }
        };
        Sim::new(1).block_on(test).unwrap();
    }
}
