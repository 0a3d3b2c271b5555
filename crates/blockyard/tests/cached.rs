//! The example `cached`: power cuts on simulated disks.

use std::io;

use blockyard::testing::PowerCuts;
use blockyard::{Device, Lent, Shape};

#[path = "../examples/cached.rs"]
#[allow(dead_code)]
mod cached;

use cached::{BLOCK, Cached};

const BLOCKS: u64 = 24;
const SLOT: usize = BLOCK as usize + 512;

/// Returns a disk with room for `slots` blocks in its log.
fn rig(slots: usize) -> PowerCuts {
    let slow: Vec<u8> = (0..BLOCKS * BLOCK).map(|at| (at / 512 * 7 + at % 251) as u8).collect();
    PowerCuts::of(Shape { size: BLOCKS * BLOCK, granule: BLOCK })
        .file(slow.clone())
        .file(vec![0x55; slots * SLOT])
        .holds(slow)
}

/// Breaks a rule of devices on purpose.
struct Wrong {
    cached: Cached,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// Answers a flush before anything is durable.
    NoFlush,
    /// Reads the block before the right one.
    OtherBlock,
}

impl Device for Wrong {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let offset = if self.how == How::OtherBlock { offset.max(BLOCK) - BLOCK } else { offset };
        self.cached.read(offset, data).await
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        self.cached.write(offset, data).await
    }

    async fn flush(&self) -> io::Result<()> {
        if self.how == How::NoFlush { Ok(()) } else { self.cached.flush().await }
    }
}

#[test]
fn the_harness_finds_devices_that_break_the_rules() {
    for how in [How::NoFlush, How::OtherBlock] {
        let make = async move |files, _| Ok(Wrong { cached: Cached::open(files).await?, how });
        let broken = rig(40).run_device(1, 300, make).unwrap_err().to_string();
        assert!(broken.contains("sector"), "{how:?}: {broken}");
    }
}

#[test]
fn flushed_blocks_survive_power_cuts() {
    let cuts = std::env::var("BLOCKYARD_CUTS").map_or(200, |text| text.parse().unwrap());
    let seed = std::env::var("BLOCKYARD_SEED").map_or(1, |text| text.parse().unwrap());
    for slots in [5, 40] {
        let make = async |files, _| Cached::open(files).await;
        rig(slots).run_device(seed, cuts, make).unwrap();
    }
}
