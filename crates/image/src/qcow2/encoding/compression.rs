//! Compression of clusters. The output is bounded by the cluster size, whatever the data claim.

use std::io::{self, Read};

use super::header::Compression;

/// Largest zstd window (log2). QEMU and zstd refuse larger ones by default; a cluster has at most
/// 2^21 bytes.
const ZSTD_WINDOW_LOG: u32 = 27;

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
