//! Source of a conversion: ranges of disks, concatenated as if they were one disk.

use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::{Handle, Segments};

use crate::chain::{Chain, ChainError};
use crate::extent::BlockStatus;

use crate::tools::disk::Disk;

/// A range of a disk in bytes; it must not exceed the disk.
#[derive(Clone, Debug)]
pub struct Part {
    pub chain: Arc<Chain>,
    pub range: Range<u64>,
}

impl Part {
    /// Returns the range of the whole disk.
    pub fn whole(chain: Arc<Chain>) -> Self {
        let range = 0..chain.size();
        Part { chain, range }
    }
}

/// Returns the sum of the parts' lengths in bytes.
pub fn size_of(parts: &[Part]) -> u64 {
    parts.iter().map(|part| part.range.end - part.range.start).sum()
}

/// One reactor's view of the parts.
pub(super) struct Source(Vec<Placed>);

struct Placed {
    /// Offset of the part in the concatenation.
    at: u64,
    range: Range<u64>,
    disk: Disk,
}

impl Source {
    /// Opens all parts on a reactor.
    pub async fn of(parts: &[Part], handle: &Handle) -> Result<Self, ChainError> {
        let (mut placed, mut at) = (Vec::new(), 0);
        for Part { chain, range } in parts.iter().filter(|part| !part.range.is_empty()) {
            placed.push(Placed { at, range: range.clone(), disk: Disk::of(chain, handle).await? });
            at += range.end - range.start;
        }
        Ok(Source(placed))
    }

    /// Returns the disk of the part that contains `offset`, the offset in that disk, and the bytes
    /// left in the part.
    fn find(&self, offset: u64) -> (&Disk, u64, u64) {
        let part = &self.0[self.0.partition_point(|part| part.at <= offset) - 1];
        let inside = part.range.start + (offset - part.at);
        (&part.disk, inside, part.range.end - inside)
    }

    /// Returns the status of the bytes at `offset`, without reading data. The range ends with its
    /// part at the latest.
    pub async fn status(&self, offset: u64, len: u64) -> Result<BlockStatus, ChainError> {
        let (disk, inside, rest) = self.find(offset);
        disk.status(inside, len.min(rest)).await
    }

    /// Fills the segments with the bytes at `offset`.
    pub async fn read(&self, segments: Segments, offset: u64) -> Result<Segments, ChainError> {
        let mut at = 0;
        while at < segments.len() {
            let (disk, inside, rest) = self.find(offset + at as u64);
            let len = rest.min((segments.len() - at) as u64) as usize;
            disk.read(segments.slice(at, len), inside).await?;
            at += len;
        }
        Ok(segments)
    }
}
