//! Reads compressed clusters; the output is bounded by the cluster size, whatever the data claim.
//!
//! In: an L2 entry's descriptor. Out: a cluster's bytes. Some decompressed clusters are cached,
//! because small requests often follow one another in a cluster.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::rc::Rc;

use blockyard_ring::semaphore::Semaphore;
use blockyard_ring::{COMPUTING_THREADS, Handle, Segments};

use blockyard_storage::Storage;

use crate::error::ImageError;

use super::bytes;
use super::entry::{Cluster, L2Entry};
use super::header::Compression;
use super::view::Qcow2;

/// Maximum size of the decompressed clusters that a reactor caches for an image, in bytes.
const KEPT: usize = 2 << 20;

/// Largest zstd window (log2). QEMU and zstd refuse larger ones by default; a cluster has at most
/// 2^21 bytes.
const ZSTD_WINDOW_LOG: u32 = 27;

/// Number of clusters of an image that a reactor decompresses at a time: for each thread one, and
/// one that waits for it. So many requests for one image do not delay those for another.
const AT_A_TIME: u64 = 2 * COMPUTING_THREADS as u64;

/// Cache of the clusters that were read last.
pub struct Decompressed {
    cache: RefCell<DecompressedClusters>,
    /// Bounds the clusters that are decompressed at a time, and so the memory of the results.
    turns: Semaphore,
    /// The reactor. Its threads decompress. None: the task itself does, as in simulations.
    reactor: Option<Handle>,
}

/// Cached clusters by descriptor, valid for one value of [`Qcow2::recompressed`].
#[derive(Default)]
struct DecompressedClusters {
    number: u64,
    clusters: VecDeque<(u64, Rc<Vec<u8>>)>,
}

impl<S: Storage> Qcow2<S> {
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
                |e| ImageError::invalid("qcow2 compressed cluster", host, e.to_string()),
            )?;
        let plain = Rc::new(plain);
        self.decompressed.keep(word, now, plain.clone(), size);
        Ok(plain)
    }
}

impl Decompressed {
    /// Returns an empty cache. Threads of `reactor` decompress large clusters.
    pub fn new(reactor: Option<Handle>) -> Self {
        Decompressed { cache: RefCell::default(), turns: Semaphore::new(AT_A_TIME), reactor }
    }

    /// Decompresses a cluster. The data move to the thread that does it, and back.
    async fn unpack(
        &self,
        packed: Vec<u8>,
        compression: Compression,
        size: usize,
    ) -> io::Result<Result<Vec<u8>, BrokenData>> {
        let unpack = move || unpack(&packed, compression, size);
        match &self.reactor {
            Some(reactor) => reactor.compute(size, unpack).await,
            None => Ok(unpack()),
        }
    }

    /// Returns the cluster if it is cached. `now`: the present value of [`Qcow2::recompressed`].
    fn find(&self, word: u64, now: u64) -> Option<Rc<Vec<u8>>> {
        let mut kept = self.cache.borrow_mut();
        if kept.number != now {
            *kept = DecompressedClusters { number: now, clusters: VecDeque::new() };
        }
        kept.clusters.iter().find(|(known, _)| *known == word).map(|(_, cluster)| cluster.clone())
    }

    fn keep(&self, word: u64, now: u64, cluster: Rc<Vec<u8>>, size: usize) {
        let mut kept = self.cache.borrow_mut();
        if kept.number != now {
            return;
        }
        while (kept.clusters.len() + 1) * size > KEPT && !kept.clusters.is_empty() {
            kept.clusters.pop_front();
        }
        kept.clusters.push_back((word, cluster));
    }
}

/// Compressed data that cannot be decompressed.
#[derive(Debug, thiserror::Error)]
#[error("its {bytes} bytes of compressed data are broken: {source}")]
pub struct BrokenData {
    pub bytes: usize,
    pub source: io::Error,
}

/// Decompresses one cluster of `size` bytes. Bytes in `packed` behind the cluster's data belong to
/// other clusters.
pub fn unpack(packed: &[u8], compression: Compression, size: usize) -> Result<Vec<u8>, BrokenData> {
    let mut plain = vec![0; size];
    let result = match compression {
        Compression::Zlib => flate2::read::DeflateDecoder::new(packed).read_exact(&mut plain),
        Compression::Zstd => unpack_zstd(packed, &mut plain),
    };
    result.map_err(|source| BrokenData { bytes: packed.len(), source })?;
    Ok(plain)
}

fn unpack_zstd(packed: &[u8], plain: &mut [u8]) -> io::Result<()> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
    decoder.window_log_max(ZSTD_WINDOW_LOG)?;
    decoder.read_exact(plain)
}

/// Compresses a cluster. None: the result would not be smaller.
pub fn pack(plain: &[u8], compression: Compression) -> io::Result<Option<Vec<u8>>> {
    let packed = match compression {
        // QEMU decompresses with a window of 4 KiB (windowBits -12), so compressed data must not
        // refer back further.
        Compression::Zlib => pack_zlib(plain)?,
        Compression::Zstd => zstd::bulk::compress(plain, 3)?,
    };
    Ok((packed.len() < plain.len()).then_some(packed))
}

fn pack_zlib(plain: &[u8]) -> io::Result<Vec<u8>> {
    let mut compress =
        flate2::Compress::new_with_window_bits(flate2::Compression::default(), false, 12);
    let mut packed = Vec::with_capacity(plain.len() + plain.len() / 8 + 64);
    let status = compress
        .compress_vec(plain, &mut packed, flate2::FlushCompress::Finish)
        .map_err(io::Error::other)?;
    match status {
        flate2::Status::StreamEnd => Ok(packed),
        // The output does not fit: the cluster does not get smaller.
        _ => Ok(vec![0; plain.len()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpack_returns_what_pack_was_given_and_ignores_the_rest() {
        let plain: Vec<u8> = (0..65536u32).map(|i| (i / 100) as u8).collect();
        for compression in [Compression::Zlib, Compression::Zstd] {
            let mut packed = pack(&plain, compression).unwrap().unwrap();
            assert!(packed.len() < 8192);
            packed.extend_from_slice(b"another cluster's");
            assert_eq!(unpack(&packed, compression, plain.len()).unwrap(), plain);
            assert!(unpack(&packed[..100], compression, plain.len()).is_err());
            let noise: Vec<u8> =
                (0..4096u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
            assert!(pack(&noise, compression).unwrap().is_none_or(|p| p.len() < noise.len()));
        }
    }
}
