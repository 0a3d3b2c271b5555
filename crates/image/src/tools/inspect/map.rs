//! Lists a disk's extents, as `qemu-img map` does.

use crate::chain::ChainError;
use crate::extent::BlockStatus;

use crate::tools::disk::Disk;

/// Calls `show` for each extent of `range` (clipped to the disk), in order, with its offset and
/// status.
pub async fn map(
    disk: &Disk,
    range: std::ops::Range<u64>,
    mut show: impl FnMut(u64, &BlockStatus),
) -> Result<(), ChainError> {
    let (mut at, end) = (range.start, range.end.min(disk.size()));
    let mut last: Option<(u64, BlockStatus)> = None;
    while at < end {
        let status = disk.status(at, end - at).await?;
        match &mut last {
            Some((_, last)) if last.goes_on(&status) => last.len += status.len,
            _ => {
                if let Some((start, done)) = last.replace((at, status)) {
                    show(start, &done);
                }
            }
        }
        at += status.len;
    }
    if let Some((start, done)) = last {
        show(start, &done);
    }
    Ok(())
}
