//! Divides the memory for L2 tables among the images of a chain.
//!
//! In: the limit in bytes, and what each image needs to cache all of its tables. Out: each image's
//! share. Invariant: the sum is within the limit, or each share is at most [`LEAST`]. Every image
//! gets [`LEAST`] bytes, if it needs them. The topmost image takes what it needs of the rest, but
//! at most half of the rest if an image below needs more. The reason: a lookup that finds nothing
//! in one image continues in the next.

use std::sync::Arc;

use super::member::ChainLayer;
use crate::qcow2::L2_CACHE_LIMIT;

/// Number of bytes that every image may cache, if it needs them. With clusters of 64 KiB, L2 tables
/// of this size map 256 MiB.
const LEAST: u64 = 32 << 10;

/// Sets the cache limits of a chain's images (topmost first). `limit` is in bytes. None: the limit
/// is the size of all L2 tables, but at most [`L2_CACHE_LIMIT`].
pub fn apply(layers: &[Arc<ChainLayer>], limit: Option<u64>) {
    let images: Vec<_> =
        layers.iter().filter_map(|layer| layer.qcow2().map(|image| (layer, image))).collect();
    let needs: Vec<u64> = images.iter().map(|(_, image)| image.table_bytes()).collect();
    let shares = share_out(limit.unwrap_or(L2_CACHE_LIMIT), &needs);
    for ((layer, image), share) in images.into_iter().zip(shares) {
        // A shared image has the largest share that one of its chains gives it.
        let least = if layer.sharing.is_some() { image.cache_bytes().1 } else { 0 };
        image.limit_cache(share.max(least));
    }
}

fn share_out(limit: u64, needs: &[u64]) -> Vec<u64> {
    let mut shares: Vec<u64> = needs.iter().map(|&need| need.min(LEAST)).collect();
    let mut rest = limit.saturating_sub(shares.iter().sum());
    for image in 0..needs.len() {
        let others = (image + 1..needs.len()).any(|below| needs[below] > shares[below]);
        let more = (needs[image] - shares[image]).min(if others { rest / 2 } else { rest });
        shares[image] += more;
        rest -= more;
    }
    // Distribute what the images below do not need.
    for (share, need) in shares.iter_mut().zip(needs) {
        let more = rest.min(need - *share);
        *share += more;
        rest -= more;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    #[test]
    fn upper_images_come_first_and_every_image_gets_the_least_share() {
        for (limit, needs, shares) in [
            (32 * M, vec![5 * M], vec![5 * M]),
            (32 * M, vec![128 * M], vec![32 * M]),
            (32 * M, vec![4 * M, 4 * M, 8 * M], vec![4 * M, 4 * M, 8 * M]),
            (32 * M, vec![4 * M, 128 * M], vec![4 * M, 28 * M]),
            (32 * M, vec![128 * M, 4 * M], vec![28 * M, 4 * M]),
            (32 * M, vec![100 * M, 4096], vec![32 * M - 4096, 4096]),
            (0, vec![100 * M, 4096], vec![LEAST, 4096]),
            (2 * M, vec![], vec![]),
        ] {
            assert_eq!(share_out(limit, &needs), shares, "{limit} bytes for {needs:?}");
        }
        let three = share_out(32 * M, &[128 * M; 3]);
        assert_eq!(three.iter().sum::<u64>(), 32 * M);
        assert!(three[0] >= 15 * M && three[1] >= 7 * M && three[2] >= 7 * M, "{three:?}");
        let deep = share_out(32 * M, &[128 * M; 200]);
        assert!(
            deep.iter().sum::<u64>() <= 32 * M
                && deep[0] > 12 * M
                && deep.iter().all(|&s| s >= LEAST),
            "{deep:?}"
        );
    }
}
