//! The list of a disk's extents, as `qemu-img map` makes it.

use blockyard_ring::Storage;

use crate::chain::ChainError;

use super::disk::Disk;
use crate::survey::BlockStatus;

/// An extent; its fields are those of `qemu-img map --output json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    pub start: u64,
    pub length: u64,
    pub depth: usize,
    pub present: bool,
    pub zero: bool,
    pub data: bool,
    pub compressed: bool,
    pub offset: Option<u64>,
}

impl MapEntry {
    fn new(start: u64, status: BlockStatus) -> Self {
        let BlockStatus { len, depth, present, zero, data, compressed, offset } = status;
        MapEntry { start, length: len, depth, present, zero, data, compressed, offset }
    }

    /// Whether `next`, which begins where this ends, goes on with the same.
    fn goes_on(&self, next: &MapEntry) -> bool {
        let kind = |e: &MapEntry| (e.depth, e.present, e.zero, e.data, e.compressed);
        kind(self) == kind(next) && self.offset.map(|offset| offset + self.length) == next.offset
    }
}

/// Gives the extents of `range` (which is cut to the disk) in order to `show`.
pub async fn map<S: Storage>(
    disk: &Disk<S>,
    range: std::ops::Range<u64>,
    mut show: impl FnMut(&MapEntry),
) -> Result<(), ChainError> {
    let (mut at, end) = (range.start, range.end.min(disk.size()));
    let mut last: Option<MapEntry> = None;
    while at < end {
        let entry = MapEntry::new(at, disk.status(at, end - at).await?);
        at += entry.length;
        match &mut last {
            Some(last) if last.goes_on(&entry) => last.length += entry.length,
            _ => {
                if let Some(done) = last.replace(entry) {
                    show(&done);
                }
            }
        }
    }
    if let Some(done) = last {
        show(&done);
    }
    Ok(())
}
