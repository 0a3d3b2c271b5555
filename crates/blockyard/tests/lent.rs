//! Devices and the memory of their requests.

use std::cell::RefCell;
use std::io;

use blockyard::{Access, Device, Disk, Lent, OwnFile, Shape, Target, Yard};

mod common;

use common::{Guest, Scratch};

const BLOCK: usize = 4096;
const SIZE: usize = 64 * BLOCK;
const SHAPE: Shape = Shape { size: SIZE as u64, granule: BLOCK as u64 };

/// Passes each block on to its file, and swaps the two halves of the file.
struct Swapped(OwnFile);

impl Swapped {
    fn places(offset: u64) -> impl Iterator<Item = u64> {
        (offset..).step_by(BLOCK).map(|at| (at + SHAPE.size / 2) % SHAPE.size)
    }
}

impl Device for Swapped {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        for (at, block) in Self::places(offset).zip(data.pieces(BLOCK)) {
            self.0.read_into(&block, at).await?;
        }
        Ok(())
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        for (at, block) in Self::places(offset).zip(data.pieces(BLOCK)) {
            self.0.write_from(&block, at).await?;
        }
        Ok(())
    }

    async fn flush(&self) -> io::Result<()> {
        self.0.sync().await
    }
}

#[test]
fn a_device_passes_the_memory_of_a_guest_to_its_file() {
    let scratch = Scratch::new("swapped");
    let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 512 * 7 + at % 251) as u8).collect();
    // The file is too short: what is missing reads as zeroes.
    let path = scratch.file("file", &bytes[..SIZE - 2 * BLOCK]);
    let mut expected = bytes.clone();
    expected[SIZE - 2 * BLOCK..].fill(0);
    expected.rotate_left(SIZE / 2);
    let target =
        Target::device("swapped", SHAPE, async |files, _| Ok(Swapped(files.own[0].clone())));
    let yard = Yard::start(1).unwrap();
    let disk = Disk::target("a", target.file(&path, Access::Write));
    yard.serve(disk.vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    assert!(guest.read(0, SIZE) == expected);
    // Whole blocks, and parts of blocks.
    for (at, len) in [(BLOCK, 5 * BLOCK), (30 * BLOCK, 4 * BLOCK), (40 * BLOCK + 512, 1024)] {
        let data: Vec<u8> = (0..len).map(|byte| (byte % 239) as u8).collect();
        guest.write(at, &data);
        expected[at..at + len].copy_from_slice(&data);
    }
    guest.flush();
    assert!(guest.read(0, SIZE) == expected);
    drop(guest);
    assert!(yard.remove("a").unwrap().is_flushed);
    expected.rotate_right(SIZE / 2);
    let mut found = std::fs::read(&path).unwrap();
    found.resize(SIZE, 0);
    assert!(found == expected);
}

/// Keeps the memory of each request, and changes that of the one before.
#[derive(Default)]
struct Keeper(RefCell<Option<Lent>>);

impl Device for Keeper {
    async fn read(&self, _offset: u64, data: Lent) -> io::Result<()> {
        let byte = match self.0.replace(Some(data.clone())) {
            None => 1,
            Some(earlier) => match earlier.copy_from(0, &[9; BLOCK]) {
                Err(e) if e.kind() == io::ErrorKind::TimedOut => 2,
                _ => 3,
            },
        };
        data.copy_from(0, &vec![byte; data.len()])
    }

    async fn write(&self, _offset: u64, _data: Lent) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_device_cannot_use_the_memory_of_an_answered_request() {
    let scratch = Scratch::new("keeper");
    let target = Target::device("keeper", SHAPE, async |_, _| Ok(Keeper::default()));
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::target("a", target).vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    assert_eq!(guest.read(0, BLOCK), [1; BLOCK]);
    for at in [1, 0] {
        assert_eq!(guest.read(at * BLOCK, BLOCK), [2; BLOCK]);
    }
    drop(guest);
    yard.remove("a").unwrap();
}
