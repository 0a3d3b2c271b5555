//! Computes the size of a new image, as `qemu-img measure` does.
//!
//! In: the new image's options, and the disk that it will hold, if any. Out: bytes of its file.
//! Invariant: the results equal QEMU's (`qcow2_measure` and `raw_measure`), because scripts compare
//! them.

use std::sync::Arc;

use crate::chain::{Chain, ChainError};
use crate::qcow2::bitmap_directory;
use crate::qcow2::{CreateOptions, Preallocation};

use super::details::details;
use super::map::map;
use crate::tools::create::NewImage;
use crate::tools::disk::Disk;
use crate::tools::reactors::on_reactor;

const L1_ENTRY: u64 = 8;
const REFTABLE_ENTRY: u64 = 8;
const BITMAP_TABLE_ENTRY: u64 = 8;

/// Sizes of a new image's file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// Size with the source's data, or without data if there is no source.
    pub required: u64,
    /// Size with every cluster allocated.
    pub fully_allocated: u64,
    /// Bytes that a copy of the source's persistent bitmaps adds. None: source or target format has
    /// no bitmaps.
    pub bitmaps: Option<u64>,
}

/// Measures the image `new` with the disk of `source`.
pub fn measure(new: &NewImage, source: Option<&Arc<Chain>>) -> Result<Measure, ChainError> {
    match new {
        NewImage::Raw { size, .. } => {
            Ok(Measure { required: *size, fully_allocated: *size, bitmaps: None })
        }
        NewImage::Qcow2 { options, .. } => measure_qcow2(options, source),
        NewImage::Cow { backing, size, mtime, version, alignment } => {
            let backing = crate::cow::Backing { name: backing, size: *size, mtime: *mtime };
            let header = crate::cow::Header::new(*version, *alignment, &backing)
                .map_err(|error| ChainError::Image { path: "new image".into(), error })?;
            // The data are a sparse file of the disk's size behind the bitmap.
            Ok(Measure {
                required: header.data_offset,
                fully_allocated: header.file_len(),
                bitmaps: None,
            })
        }
    }
}

fn measure_qcow2(
    options: &CreateOptions,
    source: Option<&Arc<Chain>>,
) -> Result<Measure, ChainError> {
    let checked = options.check(options.data_file.is_some());
    checked.map_err(|error| ChainError::Image { path: "new image".into(), error })?;
    let cluster = options.cluster_size;
    let disk = options.size.next_multiple_of(cluster);
    let metadata = metadata_bytes(options, disk);
    let all = matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full);
    let data = match source {
        _ if all => disk,
        None => 0,
        // It is unknown how much the source shares with the new backing file: assume nothing.
        Some(_) if options.backing.is_some() => disk,
        Some(source) => data_bytes(source, cluster)?,
    };
    let bitmaps = match source {
        Some(source) if options.version >= 3 => bitmap_bytes(source, cluster)?,
        _ => None,
    };
    Ok(Measure { required: metadata + data, fully_allocated: metadata + disk, bitmaps })
}

/// Returns the bytes of the clusters in which the source has data.
fn data_bytes(source: &Arc<Chain>, cluster: u64) -> Result<u64, ChainError> {
    let chain = source.clone();
    on_reactor(|handle| async move {
        // End of the last cluster that was counted.
        let (mut bytes, mut counted) = (0, 0);
        let disk = Disk::of(&chain, &handle).await?;
        map(&disk, 0..u64::MAX, |start, status| {
            if status.data && !status.zero {
                let from = (start / cluster * cluster).max(counted);
                counted = (start + status.len).next_multiple_of(cluster).max(counted);
                bytes += counted - from;
            }
        })
        .await?;
        Ok(bytes)
    })
}

/// Returns the size of header, L1 and L2 tables and refcounts of an image with all clusters
/// allocated, in bytes.
fn metadata_bytes(options: &CreateOptions, disk: u64) -> u64 {
    let cluster = options.cluster_size;
    let l2_entry = if options.extended_l2 { 16 } else { 8 };
    let l2 = (disk / cluster).next_multiple_of(cluster / l2_entry) * l2_entry;
    let l1 = (l2 / cluster).next_multiple_of(cluster / L1_ENTRY) * L1_ENTRY;
    let metadata = cluster + l2 + l1;
    metadata + refcount_bytes((metadata + disk) / cluster, cluster, options.refcount_bits)
}

/// Returns the size in bytes of refcount table and blocks. They have refcounts too, which the size
/// includes.
fn refcount_bytes(clusters: u64, cluster: u64, bits: u32) -> u64 {
    let a_block = cluster * 8 / u64::from(bits);
    let (mut blocks, mut table) = (0u64, 0u64);
    loop {
        let before = (blocks, table);
        blocks = (clusters + table + blocks).div_ceil(a_block);
        table = blocks.div_ceil(cluster / REFTABLE_ENTRY);
        if (blocks, table) == before {
            return (blocks + table) * cluster;
        }
    }
}

/// Bytes of data, tables and directory of the source's bitmaps. None: its format has no bitmaps.
fn bitmap_bytes(source: &Arc<Chain>, cluster: u64) -> Result<Option<u64>, ChainError> {
    if source.top().qcow2().is_none_or(|image| image.header().version < 3) {
        return Ok(None);
    }
    let Some(top) = details(source)?.into_iter().next() else { return Ok(None) };
    let (mut bytes, mut entries) = (0, 0);
    for bitmap in &top.bitmaps {
        let bits = source.size().div_ceil(1 << bitmap.granularity_bits.min(63));
        let clusters = bits.div_ceil(8).div_ceil(cluster);
        bytes += clusters * cluster + (clusters * BITMAP_TABLE_ENTRY).next_multiple_of(cluster);
        entries += bitmap_directory::entry_bytes(bitmap.name.len(), 0);
    }
    Ok(Some(bytes + entries.next_multiple_of(cluster)))
}
