//! Reads compressed clusters.
//!
//! In: an L2 entry's descriptor. Out: a cluster's bytes, from the cache or from the file.

use std::io;
use std::rc::Rc;

use blockyard_ring::Segments;

use crate::error::ImageError;
use crate::qcow2::encoding::bytes;
use crate::qcow2::encoding::entry::{Cluster, L2Entry};

use super::view::Qcow2;

impl Qcow2 {
    /// Reads from a compressed cluster into `segments`, beginning `inside` bytes behind its start.
    pub async fn read_compressed(
        &self,
        segments: Segments,
        word: u64,
        inside: u64,
    ) -> (Segments, io::Result<()>) {
        match self.decompressed_cluster(word).await {
            Ok(cluster) => {
                let from = inside as usize;
                segments.copy_in(0, &cluster[from..from + segments.len()]);
                (segments, Ok(()))
            }
            Err(e) => (segments, Err(e)),
        }
    }

    async fn decompressed_cluster(&self, word: u64) -> io::Result<Rc<Vec<u8>>> {
        let now = self.recompressed();
        if let Some(known) = self.decompressed.find(word, now) {
            return Ok(known);
        }
        let layout = self.shape().layout;
        let decoded = L2Entry::decode(word, 0, layout).map(|e| e.cluster);
        let Ok(Cluster::Compressed { host, len }) = decoded else {
            return Err(ImageError::invalid(
                "qcow2 compressed cluster",
                None,
                "its descriptor is invalid",
            )
            .into());
        };
        let _room = self.shared.buffers.packed.acquire_many(len).await;
        let packed = bytes::read(&self.file, host, len as usize).await?;
        let _turn = self.decompressed.turns.acquire().await;
        // Another request may have decompressed the cluster meanwhile.
        if self.recompressed() == now
            && let Some(known) = self.decompressed.find(word, now)
        {
            return Ok(known);
        }
        let size = self.shape().cluster_size() as usize;
        let plain =
            self.decompressed.unpack(packed, self.shared.compression, size).await?.map_err(
                |e| {
                    let what = "qcow2 compressed cluster";
                    ImageError::invalid(what, host, e.to_string()).with_source(e)
                },
            )?;
        let plain = Rc::new(plain);
        self.decompressed.keep(word, now, plain.clone(), size);
        Ok(plain)
    }
}
