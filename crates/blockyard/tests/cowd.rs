//! The example `cowd`: power cuts on simulated disks, and a served disk.

use blockyard::testing::PowerCuts;
use blockyard::{Access, Extent, Map, Question, Shape};

mod common;
#[path = "../examples/cowd.rs"]
#[allow(dead_code)]
mod cowd;

use common::{Guest, Scratch};
use cowd::{BLOCK, Cowd};

/// Number of power cuts: BLOCKYARD_CUTS, or as many as a test has time for.
fn cuts() -> u64 {
    std::env::var("BLOCKYARD_CUTS").map_or(500, |text| text.parse().unwrap())
}

fn base(blocks: u64) -> Vec<u8> {
    (0..blocks * BLOCK).map(|at| (at / 512 * 7 + at % 251) as u8).collect()
}

const BLOCKS: u64 = 6;

fn rig() -> PowerCuts {
    let base = base(BLOCKS);
    PowerCuts::of(Shape { size: BLOCKS * BLOCK, granule: BLOCK })
        .data(base.clone(), Access::Read)
        .data(vec![0x55; base.len()], Access::Write)
        .file(vec![0; BLOCKS as usize * 8])
        .holds(base)
}

/// Breaks a rule of maps on purpose.
struct Wrong {
    map: Cowd,
    /// Persists a new place before its data are written.
    early: bool,
}

impl Map for Wrong {
    async fn locate(&self, asked: Question) -> std::io::Result<Vec<Extent>> {
        let found = self.map.locate(asked).await?;
        if asked.write && self.early {
            let all = asked.offset..asked.offset + asked.len;
            self.map.flush(std::slice::from_ref(&all)).await?;
        }
        Ok(found)
    }

    /// Answers before its table is durable.
    async fn flush(&self, _moved: &[std::ops::Range<u64>]) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_harness_finds_maps_that_break_the_rules() {
    for early in [false, true] {
        let make = async move |files, _| Ok(Wrong { map: Cowd::open(files, BLOCKS).await?, early });
        let broken = rig().run(1, 300, make).unwrap_err().to_string();
        assert!(broken.contains("sector"), "{broken}");
    }
}

#[test]
fn flushed_data_survive_power_cuts() {
    let seed = std::env::var("BLOCKYARD_SEED").map_or(1, |text| text.parse().unwrap());
    let make = async |files, _| Cowd::open(files, BLOCKS).await;
    rig().run(seed, cuts(), make).unwrap();
    println!("seeds {seed} and on: {} cuts", cuts());
}

#[test]
fn a_disk_keeps_what_was_written_and_the_base_stays() {
    let scratch = Scratch::new("cowd");
    let bytes = base(16);
    let paths = [
        scratch.file("base", &bytes),
        scratch.file("store", &vec![0; bytes.len()]),
        scratch.file("table", &[0; 128]),
    ];
    let target = || cowd::target(&paths[0], &paths[1], &paths[2]).unwrap();
    let mut expected = bytes.clone();
    for round in 0..3u8 {
        let yard = blockyard::Yard::start(2).unwrap();
        let socket = scratch.path("socket");
        yard.serve(blockyard::Disk::target("a", target()).vhost_user(&socket)).unwrap();
        let mut guest = Guest::connect(&socket);
        assert!(guest.read(0, expected.len()) == expected, "round {round}");
        for at in [3usize, 130, 131, 700 + usize::from(round) * 300] {
            let data = vec![round + 1; 1536];
            guest.write(at * 512, &data);
            expected[at * 512..][..1536].copy_from_slice(&data);
        }
        guest.flush();
        assert!(guest.read(0, expected.len()) == expected, "round {round}");
        drop(guest);
        let counted = yard.statistics("a").unwrap();
        assert_eq!((counted.write.requests, counted.write.errors), (4, 0));
        assert!(yard.remove("a").unwrap().is_flushed);
    }
    assert!(std::fs::read(&paths[0]).unwrap() == bytes, "the base is never written");
}
