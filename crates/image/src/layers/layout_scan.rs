//! Finds where the bytes of a chain are, without reading data: what `qemu-img map` prints.
//!
//! In: a range. Out: a [`BlockStatus`] of its first part with equal status. Zeroes are known from
//! the images' tables, from the length of backing images, and from holes in raw files.

use std::io;

use blockyard_storage::Storage;

use super::layer::Layer;
use crate::SECTOR;
use crate::extent::{BlockStatus, Place};

/// Returns which layers may map clusters that were never written: their files occupy less space
/// than their refcounts say. QEMU uses the same test to detect preallocated metadata.
pub(crate) async fn sparse_layers(layers: &[Layer]) -> io::Result<Vec<bool>> {
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

/// Returns the status of the bytes at `offset`, which must be inside the disk. `sparse`: see
/// [`sparse_layers`]; empty: no layer.
pub(crate) async fn status(
    layers: &[Layer],
    sparse: &[bool],
    offset: u64,
    mut len: u64,
) -> io::Result<BlockStatus> {
    let mut depth = 0;
    loop {
        let layer = &layers[depth];
        // The disk may end inside its last sector.
        let extent =
            layer.lookup(offset, len.min(layer.size().next_multiple_of(SECTOR) - offset)).await?;
        len = extent.len;
        let found = BlockStatus {
            len,
            depth,
            present: true,
            zero: false,
            data: true,
            compressed: false,
            offset: None,
        };
        return match (layer, extent.place) {
            (_, Place::Absent) => {
                if layers.get(depth + 1).is_some_and(|backing| offset < backing.size()) {
                    depth += 1;
                    continue;
                }
                let kept = kept(layer, offset, found);
                Ok(BlockStatus { present: false, zero: true, data: false, ..kept })
            }
            (_, Place::Zero) => {
                Ok(BlockStatus { zero: true, data: false, ..kept(layer, offset, found) })
            }
            (_, Place::Compressed(_)) => Ok(BlockStatus { compressed: true, ..found }),
            (Layer::Raw { raw, .. }, Place::Data(host)) => {
                let (data, len) = raw.data_or_hole(host, len).await?;
                Ok(BlockStatus { len, data, zero: !data, offset: Some(host), ..found })
            }
            (Layer::Qcow2(image), Place::Data(host)) if sparse.get(depth) == Some(&true) => {
                let (data, len) = image.data_file().data_or_hole(host, len).await?;
                Ok(BlockStatus { len, zero: !data, offset: Some(host), ..found })
            }
            (_, Place::Data(host)) => Ok(BlockStatus { offset: Some(host), ..found }),
        };
    }
}

/// Adds to `found` the offset of the host cluster that is preallocated there, if any. Reads of the
/// guest do not use that cluster.
fn kept(layer: &Layer, offset: u64, found: BlockStatus) -> BlockStatus {
    let Layer::Qcow2(image) = layer else { return found };
    if image.without_tables(offset, found.len) == Some(found.len) {
        return found;
    }
    let cluster = image.shared().shape().cluster_size();
    let (here, host) = (found.len.min(cluster - offset % cluster), image.kept(offset));
    if host.is_some() {
        return BlockStatus { len: here, offset: host, ..found };
    }
    // Extend the range up to the next preallocated cluster.
    let mut len = here;
    while len < found.len && image.kept(offset + len).is_none() {
        len = found.len.min(len + cluster);
    }
    BlockStatus { len, ..found }
}
