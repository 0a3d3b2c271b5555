//! Memory of L2 tables in chains.

use blockyard_image::{Chain, ChainOptions};
use blockyard_ring::{Executor, Segments};

use super::peer::{Scratch, qemu_img};
use crate::tools;

const M: u64 = 1 << 20;
const DEPTH: usize = 8;
/// The L2 tables of an image of this size take 128 MiB.
const SIZE: &str = "1T";

/// Returns cached bytes and limit of each image, and of all together.
fn kept(chain: &Chain) -> (Vec<(u64, u64)>, (u64, u64)) {
    let each: Vec<_> =
        chain.layers().iter().filter_map(|layer| Some(layer.qcow2()?.cache_bytes())).collect();
    let all = each.iter().fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    (each, all)
}

fn chain(scratch: &Scratch) -> ChainOptions {
    qemu_img(&["create", "-q", "-f", "qcow2", scratch.name("0.qcow2"), SIZE]);
    for n in 1..DEPTH {
        let below = format!("{}.qcow2", n - 1);
        let path = scratch.name(&format!("{n}.qcow2"));
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &below, path, SIZE]);
    }
    ChainOptions::new(scratch.path(&format!("{}.qcow2", DEPTH - 1)))
}

#[test]
fn the_images_of_a_chain_share_one_limit() {
    let scratch = Scratch::new("caches");
    let options = chain(&scratch);
    for (l2_cache, limit) in
        [(None, 32 * M), (Some(2 * M), 2 * M), (Some(0), DEPTH as u64 * (32 << 10))]
    {
        let chain = Chain::open(&ChainOptions { l2_cache, ..options.clone() }).unwrap();
        let (each, all) = kept(&chain);
        assert_eq!(each.len(), DEPTH);
        assert!(all.1 <= limit && all.1 + 64 * 1024 > limit, "{l2_cache:?}: {each:?}");
        assert!(
            each.is_sorted_by(|above, below| above.1 >= below.1) && each[DEPTH - 1].1 >= 32 << 10,
            "{each:?}"
        );
    }
}

/// The caches of a chain use the limit fully and do not exceed it. An overlay on top reduces the
/// part of each image.
#[test]
fn reads_all_over_the_disk_stay_within_the_limit() {
    const LIMIT: u64 = M;
    let scratch = Scratch::new("caches");
    let options = ChainOptions { l2_cache: Some(LIMIT), ..chain(&scratch) };
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let work = async move {
        let chain = Chain::open(&options).unwrap();
        let image = chain.image(&handle).unwrap();
        for n in 0..1000 {
            image.read(Segments::buffer(512), n << 30).await.1.unwrap();
        }
        let (each, all) = kept(&chain);
        assert!(all.0 <= LIMIT && all.0 + M / 4 > LIMIT, "{each:?}");
        let before = each;
        let grown = chain.grow(&handle, &scratch.path("new.qcow2"), None).await.unwrap();
        let (each, all) = kept(grown.chain());
        assert!(each.len() == DEPTH + 1 && each[0].1 >= LIMIT / 4, "{each:?}");
        assert!(all.0 <= LIMIT && all.1 <= LIMIT, "{each:?}");
        drop(grown);
        let limits = |each: &[(u64, u64)]| each.iter().map(|one| one.1).collect::<Vec<_>>();
        assert_eq!(limits(&kept(&chain).0), limits(&before), "the overlay was dropped");
    };
    tools::block_on(&executor, work);
}
