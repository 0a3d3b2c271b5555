//! `merge`: writes a COW file and its backing file into a new raw image.

use std::ops::Range;

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use super::Cow;
use crate::error::ImageError;
use crate::extent::Place;
use crate::raw::Raw;
use blockyard_ring::join;

/// Size of the copied pieces in bytes, and number of copies in flight.
const PIECE: u64 = 1 << 20;
const COPIES: usize = 4;

/// Granularity in bytes in which zeroes are left out of the merged image.
const HOLE: usize = 4096;

/// Writes the guest's disk into an empty file, without blocks of zeroes.
pub async fn merge(
    cow: &Cow,
    backing: &Raw,
    target: &Raw,
    progress: impl Fn(u64),
) -> Result<(), ImageError> {
    let failed =
        |operation: &'static str| move |e| ImageError::io("merged image", None, operation, e);
    let len = target.storage().len().await.map_err(failed("finding its length"))?;
    if len != 0 {
        return Err(ImageError::refused(
            "merged image",
            format!("the file has {len} bytes already: it must be empty"),
        ));
    }
    target.storage().set_len(cow.size()).await.map_err(failed("setting its length"))?;
    copy(cow, progress, async |piece| {
        let buffer = match piece.place {
            Place::Data(host) => read(&cow.file, "cow data", host, piece.len).await?,
            _ => read(backing, "backing file", piece.offset, piece.len).await?,
        };
        write_sparse(target, &buffer, piece.offset).await
    })
    .await?;
    target.flush().await.map_err(failed("syncing"))
}

/// Range of the disk with contiguous bytes in one file.
struct DiskExtent {
    offset: u64,
    len: u64,
    place: Place,
}

/// Runs `work` for all extents of the disk.
async fn copy<F: Future<Output = Result<(), ImageError>>>(
    cow: &Cow,
    progress: impl Fn(u64),
    work: impl Fn(DiskExtent) -> F,
) -> Result<(), ImageError> {
    let mut at = 0;
    while at < cow.size() {
        // Collect extents until one needs a bitmap page that is not cached.
        let mut pieces = Vec::new();
        while at < cow.size() && pieces.len() < 4 * COPIES {
            let Some(extent) = cow.try_lookup(at, PIECE) else { break };
            pieces.push(DiskExtent { offset: at, len: extent.len, place: extent.place });
            at += extent.len;
        }
        if pieces.is_empty() {
            cow.load(at).await.map_err(|e| ImageError::io(super::BITMAP, None, "reading", e))?;
        }
        join::all(COPIES, pieces.into_iter().map(&work)).await?;
        progress(at);
    }
    Ok(())
}

async fn read(file: &Raw, what: &str, offset: u64, len: u64) -> Result<Segments, ImageError> {
    let (buffer, result) = file.read(Segments::buffer(len as usize), offset).await;
    result.map_err(|e| ImageError::io(what, offset, "reading", e))?;
    Ok(buffer)
}

/// Writes the runs of blocks that are not all zeroes.
async fn write_sparse(file: &Raw, buffer: &Segments, offset: u64) -> Result<(), ImageError> {
    let mut bytes = vec![0; buffer.len()];
    buffer.copy_out(0, &mut bytes);
    let blocks = blocks(offset, bytes.len());
    let is_hole = |block: &Range<usize>| bytes[block.clone()].iter().all(|&b| b == 0);
    for run in blocks.chunk_by(|a, b| is_hole(a) == is_hole(b)) {
        let (start, end) = (run[0].start, run[run.len() - 1].end);
        if is_hole(&run[0]) {
            continue;
        }
        let (_, result) =
            file.write(buffer.slice(start, end - start), offset + start as u64, false).await;
        result.map_err(|e| ImageError::io("merged image", offset + start as u64, "writing", e))?;
    }
    Ok(())
}

/// Splits `len` bytes at `offset` of the file at multiples of [`HOLE`]; returns ranges of these
/// bytes.
fn blocks(offset: u64, len: usize) -> Vec<Range<usize>> {
    let (mut blocks, mut at) = (Vec::new(), 0);
    while at < len {
        let into = (offset + at as u64) as usize % HOLE;
        let end = len.min(at + HOLE - into);
        blocks.push(at..end);
        at = end;
    }
    blocks
}
