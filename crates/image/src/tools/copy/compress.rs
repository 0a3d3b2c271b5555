//! Writes whole clusters, compressed.

use blockyard_ring::Segments;

use crate::chain::ChainError;
use crate::error::ImageError;
use crate::qcow2::{self, Qcow2};

use crate::tools::disk::Disk;

/// Writes `bytes` at `offset`. Compresses each cluster if that makes it smaller and the image has
/// no data there yet. `offset` is a multiple of the cluster size; the last cluster may end with the
/// disk.
pub(in crate::tools) async fn write(
    disk: &Disk,
    image: &Qcow2,
    bytes: &Segments,
    offset: u64,
) -> Result<(), ChainError> {
    let (size, compression) =
        (image.shared().shape().cluster_size() as usize, image.shared().header().compression);
    let mut plain = vec![0; size];
    for at in (0..bytes.len()).step_by(size) {
        let (len, offset) = (size.min(bytes.len() - at), offset + at as u64);
        bytes.copy_out(at, &mut plain[..len]);
        // Behind the end of the disk.
        plain[len..].fill(0);
        let failed =
            |e| disk.failed(ImageError::io("the disk", offset, "writing compressed data", e));
        let done = match qcow2::pack(&plain, compression).map_err(failed)? {
            Some(packed) => image.write_compressed(offset, &packed).await.map_err(failed)?,
            None => false,
        };
        if !done {
            disk.write(bytes.slice(at, len), offset).await?;
        }
    }
    Ok(())
}
