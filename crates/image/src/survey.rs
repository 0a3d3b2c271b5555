//! Where the bytes of a chain are, without reading them: the answer that `qemu-img map` gives.
//!
//! In: a range. Out: a [`BlockStatus`], for as much of the range as is alike. What reads as zeroes is known by the image's
//! tables, by the length of the images below, or by holes in raw files.

use std::io;

use blockyard_ring::Storage;

use crate::SECTOR;
use crate::extent::Place;
use crate::layer::Layer;
use crate::raw::Raw;

/// `len` bytes that are alike. The names are QEMU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    pub len: u64,
    /// The layer that decided: 0 is the topmost.
    pub depth: usize,
    /// That layer has the range; else nothing has, and it reads as zeroes.
    pub present: bool,
    pub zero: bool,
    pub data: bool,
    pub compressed: bool,
    /// In the layer's file (or data file).
    pub offset: Option<u64>,
}

impl BlockStatus {
    /// `len` bytes of data, somewhere in the topmost layer.
    pub fn data(len: u64) -> Self {
        BlockStatus { len, depth: 0, present: true, zero: false, data: true, compressed: false, offset: None }
    }

    /// `len` bytes that none of `depth` layers has.
    pub(crate) fn nothing(depth: usize, len: u64) -> Self {
        BlockStatus { len, depth, present: false, zero: true, data: false, compressed: false, offset: None }
    }
}

/// Which layers may name data that were never written: they take less of the disk than their refcounts say. As QEMU
/// finds out whether metadata were preallocated.
pub(crate) async fn sparse_layers<S: Storage>(layers: &[Layer<S>]) -> io::Result<Vec<bool>> {
    let mut sparse = Vec::new();
    for layer in layers {
        let Layer::Qcow2(image) = layer else {
            sparse.push(false);
            continue;
        };
        let cluster = image.shared().shape().cluster_size();
        sparse.push(match image.file().storage().allocated()? {
            Some(bytes) => {
                let real = bytes / cluster;
                image.has_clusters((real * 10 / 9).max(real + 2)).await?
            }
            None => false,
        });
    }
    Ok(sparse)
}

/// What is known of the bytes from `offset` on, which lie inside the disk. `sparse`: see [`sparse_layers`]; empty: none of them.
pub(crate) async fn status<S: Storage>(
    layers: &[Layer<S>],
    sparse: &[bool],
    offset: u64,
    mut len: u64,
) -> io::Result<BlockStatus> {
    let mut depth = 0;
    loop {
        let layer = &layers[depth];
        // The disk may end in the middle of its last sector.
        let extent = layer.lookup(offset, len.min(layer.size().next_multiple_of(SECTOR) - offset)).await?;
        len = extent.len;
        let found = BlockStatus { len, depth, present: true, zero: false, data: true, compressed: false, offset: None };
        return match (layer, extent.place) {
            (_, Place::Absent) => {
                if layers.get(depth + 1).is_some_and(|below| offset < below.size()) {
                    depth += 1;
                    continue;
                }
                let kept = kept(layer, offset, found);
                Ok(BlockStatus { present: false, zero: true, data: false, ..kept })
            }
            (_, Place::Zero) => Ok(BlockStatus { zero: true, data: false, ..kept(layer, offset, found) }),
            (_, Place::Compressed(_)) => Ok(BlockStatus { compressed: true, ..found }),
            (Layer::Raw { raw, .. }, Place::Data(host)) => {
                let (data, len) = data_or_hole(raw, host, len).await?;
                Ok(BlockStatus { len, data, zero: !data, offset: Some(host), ..found })
            }
            (Layer::Qcow2(image), Place::Data(host)) if sparse.get(depth) == Some(&true) => {
                let (data, len) = data_or_hole(image.data_file(), host, len).await?;
                Ok(BlockStatus { len, zero: !data, offset: Some(host), ..found })
            }
            (_, Place::Data(host)) => Ok(BlockStatus { offset: Some(host), ..found }),
        };
    }
}

/// A host cluster that is kept although nothing is read from it is told too.
fn kept<S: Storage>(layer: &Layer<S>, offset: u64, found: BlockStatus) -> BlockStatus {
    let Layer::Qcow2(image) = layer else { return found };
    let cluster = image.shared().shape().cluster_size();
    let (here, host) = (found.len.min(cluster - offset % cluster), image.kept(offset));
    if host.is_some() {
        return BlockStatus { len: here, offset: host, ..found };
    }
    // As far as nothing is kept.
    let mut len = here;
    while len < found.len && image.kept(offset + len).is_none() {
        len = found.len.min(len + cluster);
    }
    BlockStatus { len, ..found }
}

pub(crate) async fn data_or_hole<S: Storage>(file: &Raw<S>, host: u64, len: u64) -> io::Result<(bool, u64)> {
    Ok(match file.storage().next_data(host).await? {
        None => (false, len),
        Some(data) if data.start > host => (false, len.min(data.start - host)),
        Some(data) => (true, len.min(data.end - host)),
    })
}
