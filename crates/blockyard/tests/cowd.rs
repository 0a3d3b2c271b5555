//! The example `cowd`: power cuts on simulated disks, and a served disk.

use blockyard::testing::PowerCuts;
use blockyard::{Access, Discard, Extent, Map, Place, Question, Shape};

mod common;
#[path = "../examples/cowd.rs"]
#[allow(dead_code)]
mod cowd;

use common::{Guest, Loop, Scratch};
use cowd::{BLOCK, Cowd};

/// Number of power cuts: BLOCKYARD_CUTS, or as many as a test has time for.
fn cuts() -> u64 {
    std::env::var("BLOCKYARD_CUTS").map_or(120, |text| text.parse().unwrap())
}

fn base(blocks: u64) -> Vec<u8> {
    (0..blocks * BLOCK).map(|at| (at / 512 * 7 + at % 251) as u8).collect()
}

const BLOCKS: u64 = 96;

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
    /// Answers a flush before its table is durable.
    late: bool,
    /// Hides errors of its table.
    hides: bool,
}

impl Map for Wrong {
    async fn locate(&self, asked: Question) -> std::io::Result<Vec<Extent>> {
        let found = self.map.locate(asked).await?;
        if asked.write && self.early {
            let blocks = (asked.offset..).step_by(BLOCK as usize).zip(&found);
            let new = blocks.filter(|(_, extent)| matches!(extent.place, Place::New { .. }));
            let new: Vec<_> = new.map(|(at, _)| at..at + BLOCK).collect();
            self.map.flush(&new).await?;
        }
        Ok(found)
    }

    async fn flush(&self, moved: &[std::ops::Range<u64>]) -> std::io::Result<()> {
        if self.late {
            return Ok(());
        }
        let flushed = self.map.flush(moved).await;
        if self.hides { Ok(()) } else { flushed }
    }

    async fn discard(&self, asked: Discard) -> std::io::Result<Vec<Extent>> {
        self.map.discard(asked).await
    }
}

#[test]
fn the_harness_finds_maps_that_break_the_rules() {
    let run = |early, late, hides, errors, cuts| {
        let make = async move |files, _| {
            Ok(Wrong { map: Cowd::open(files, BLOCKS as usize).await?, early, late, hides })
        };
        rig().errors(errors).run(1, cuts, make)
    };
    for (early, late, hides, errors) in
        [(true, false, false, 0), (false, true, false, 0), (false, false, true, 3)]
    {
        let broken = run(early, late, hides, errors, 300).unwrap_err().to_string();
        assert!(broken.contains("sector"), "{broken}");
    }
    // Without errors there is nothing to hide.
    run(false, false, true, 0, 9).unwrap();
}

#[test]
fn flushed_data_survive_power_cuts_and_errors() {
    let seed = std::env::var("BLOCKYARD_SEED").map_or(1, |text| text.parse().unwrap());
    let make = async |files, _| Cowd::open(files, BLOCKS as usize).await;
    for errors in [0, 3] {
        rig().errors(errors).run(seed, cuts(), make).unwrap();
    }
    println!("seeds {seed} and on: {} cuts", 2 * cuts());
}

#[test]
fn discarded_blocks_read_as_zeroes_and_their_places_are_used_again() {
    let scratch = Scratch::new("freed");
    let bytes = base(16);
    // The store has two places.
    let paths = [
        scratch.file("base", &bytes),
        scratch.file("store", &vec![0; 2 * BLOCK as usize]),
        scratch.file("table", &[0; 128]),
    ];
    let target = || cowd::target(&paths[0], &paths[1], &paths[2]).unwrap();
    let block = BLOCK as usize;
    let mut expected = bytes.clone();
    for round in 0..3 {
        let yard = blockyard::Yard::start(1).unwrap();
        let socket = scratch.path("socket");
        yard.serve(blockyard::Disk::target("a", target()).vhost_user(&socket)).unwrap();
        let mut guest = Guest::connect(&socket);
        assert!(guest.read(0, expected.len()) == expected, "round {round}");
        for at in [1, 2].map(|at| (at + round * 2) * block) {
            guest.write(at + 512, &[7; 512]);
        }
        assert_ne!(guest.try_write(15 * block, &[7; 512]), 0, "the store is full");
        let (at, len) = ((1 + round * 2) * block, 2 * block);
        guest.write_zeroes(at, len);
        expected[at..at + len].fill(0);
        assert!(guest.read(0, expected.len()) == expected, "round {round}");
        guest.flush();
        guest.discard(0, block);
        expected[..block].fill(0);
        drop(guest);
        assert!(yard.remove("a").unwrap().is_flushed);
    }
    assert!(std::fs::read(&paths[0]).unwrap() == bytes, "the base is never written");
}

#[test]
fn a_disk_keeps_what_was_written_and_the_base_stays() {
    let scratch = Scratch::new("cowd");
    let paths = [
        scratch.file("base", &base(256)),
        scratch.file("store", &vec![0; base(256).len()]),
        scratch.file("table", &[0; 128]),
    ];
    keeps_what_was_written(&scratch, &paths);
}

#[test]
fn the_base_the_store_and_the_table_may_be_block_devices() {
    let scratch = Scratch::new("devices");
    let devices = [
        (scratch.file("base", &base(256)), 4096),
        (scratch.file("store", &vec![0x55; base(256).len()]), 512),
        (scratch.file("table", &[0; 4096]), 512),
    ];
    let devices = devices.map(|(file, sector)| Loop::new(&file, sector));
    keeps_what_was_written(&scratch, &devices.each_ref().map(|device| device.0.clone()));
}

#[test]
fn space_of_a_sparse_store_is_allocated_ahead() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new("ahead");
    let paths = [
        scratch.file("base", &base(256)),
        scratch.file("store", &[]),
        scratch.file("table", &[0; 128]),
    ];
    let len = 4 << 20;
    std::fs::File::options().write(true).open(&paths[1]).unwrap().set_len(len).unwrap();
    let yard = blockyard::Yard::start(1).unwrap();
    let target = cowd::target(&paths[0], &paths[1], &paths[2]).unwrap();
    yard.serve(blockyard::Disk::target("a", target).vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    let mut write = |block: usize| {
        guest.write(block * BLOCK as usize, &[7; BLOCK as usize]);
        std::fs::metadata(&paths[1]).unwrap().blocks() * 512
    };
    let (first, second) = (write(9), write(3));
    assert!(first < 1 << 20 && second >= 1 << 20 && second < len, "{first}, {second}");
    drop(guest);
    assert!(yard.remove("a").unwrap().is_flushed);
}

/// With a mistyped name of its table the disk would have its old data, and lose the newer ones.
#[test]
fn a_missing_table_and_a_base_of_part_of_a_block_are_refused() {
    let scratch = Scratch::new("refused");
    let [base, store] = ["base", "store"].map(|name| scratch.file(name, &[0; BLOCK as usize]));
    let missing = scratch.path("missing").to_str().unwrap().to_string();
    let odd = [scratch.file("odd", &[1; BLOCK as usize + 512]), scratch.file("table", &[])];
    let yard = blockyard::Yard::start(1).unwrap();
    for (base, table, word) in [(&base, &missing, "missing"), (&odd[0], &odd[1], "granule")] {
        let target = cowd::target(base, &store, table).unwrap();
        let error = yard.serve(blockyard::Disk::target("a", target)).unwrap_err();
        let text = format!("{error}: {:?}", std::error::Error::source(&error));
        assert!(text.contains(word), "{text}");
    }
    assert!(!std::path::Path::new(&missing).exists());
}

/// Serves the base with `base(256)`, the store and the table, and writes, three times.
fn keeps_what_was_written(scratch: &Scratch, paths: &[String; 3]) {
    let bytes = base(256);
    let mut expected = bytes.clone();
    for round in 0..3u8 {
        let yard = blockyard::Yard::start(2).unwrap();
        let socket = scratch.path("socket");
        let target = cowd::target(&paths[0], &paths[1], &paths[2]).unwrap();
        yard.serve(blockyard::Disk::target("a", target).vhost_user(&socket)).unwrap();
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
