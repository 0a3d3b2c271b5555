//! Tests of the simulated disk: single cases (`cases`), and random work that the oracle checks
//! (`work`).

use std::io;

use super::*;
use crate::{Storage, Store};
use blockyard_ring::Segments;

mod cases;
mod work;

const DISK: u64 = 32 * SECTOR as u64;

fn disk(seed: u64) -> SimDisk {
    SimDisk::new(SimImage::zeroed(DISK), SimConfig::new(seed))
}

async fn put(disk: &impl Storage, offset: u64, bytes: &[u8], durable: bool) -> io::Result<usize> {
    disk.write(Segments::from_bytes(bytes), offset, durable).await.1
}

async fn take(disk: &impl Storage, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let (segments, n) = disk.read(Segments::buffer(len), offset).await;
    let mut bytes = vec![0; n?];
    segments.copy_out(0, &mut bytes);
    Ok(bytes)
}

/// Runs `work` on a disk with seed `seed`, and cuts the power when it is done.
fn then_cut<F: Future<Output = ()> + 'static>(
    seed: u64,
    work: impl FnOnce(SimDisk) -> F,
) -> SimImage {
    let disk = disk(seed);
    Sim::new(seed).block_on(work(disk.clone())).unwrap();
    disk.power_cut()
}
