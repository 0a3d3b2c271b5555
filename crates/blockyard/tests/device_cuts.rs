//! Devices on simulated disks, with power cuts and errors of their files: the examples `cached` and
//! `mirror`, and devices that break the rules. (The example `dedup` writes nothing while it serves,
//! so a power cut changes nothing.)

use std::cell::Cell;
use std::io;

use blockyard::testing::{PowerCuts, Rule};
use blockyard::{Device, Files, Lent, OwnFile, Shape};

#[path = "../examples/cached.rs"]
#[allow(dead_code)]
mod cached;
#[path = "../examples/mirror.rs"]
#[allow(dead_code)]
mod mirror;

use cached::{BLOCK, Cached};
use mirror::Mirror;

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

/// Number of power cuts: BLOCKYARD_CUTS, or as many as a test has time for.
fn cuts(usual: u64) -> u64 {
    std::env::var("BLOCKYARD_CUTS").map_or(usual, |text| text.parse().unwrap())
}

fn seed() -> u64 {
    std::env::var("BLOCKYARD_SEED").map_or(1, |text| text.parse().unwrap())
}

#[test]
fn flushed_blocks_of_the_cache_survive_power_cuts_and_errors() {
    for (slots, errors) in [(5, 0), (40, 0), (5, 3), (40, 3)] {
        let make = async |files, _| Cached::open(files).await;
        rig(slots).errors(errors).run_device(seed(), cuts(24), make).unwrap();
    }
    println!("seeds {} and on: {} cuts", seed(), 4 * cuts(24));
}

/// Opens a mirror, after the repair that follows a power cut.
async fn mirror(files: Files) -> io::Result<Mirror> {
    let [one, other, note] = &files.own[..] else { panic!("a mirror has three files") };
    let mut noted = [0];
    note.read_at(&mut noted, 0).await?;
    if noted == [0] {
        let mut bytes = vec![0; one.len().await? as usize];
        one.read_at(&mut bytes, 0).await?;
        other.write_at(&bytes, 0).await?;
    }
    Mirror::open(files).await
}

fn mirrored() -> PowerCuts {
    let half = vec![0x55; (BLOCKS * BLOCK) as usize];
    let cuts = PowerCuts::of(Shape { size: BLOCKS * BLOCK, granule: BLOCK }).holds(half.clone());
    cuts.file(half.clone()).file(half).file(vec![0; 512])
}

#[test]
fn flushed_blocks_of_the_mirror_survive_power_cuts_and_errors_of_its_halves() {
    for errors in [0, 1, 4] {
        let make = async |files, _| mirror(files).await;
        mirrored().errors(errors).run_device(seed(), cuts(24), make).unwrap();
    }
    println!("seeds {} and on: {} cuts", seed(), 3 * cuts(24));
}

/// A file, which answers "done" although the file has failed.
struct InFile {
    file: OwnFile,
    lie: Lie,
    /// Whether a read or write of the file has failed.
    has_failed: Cell<bool>,
    is_flushing: Cell<bool>,
}

impl InFile {
    fn new(mut files: Files, lie: Lie) -> Self {
        let (has_failed, is_flushing) = Default::default();
        InFile { file: files.own.remove(0), lie, has_failed, is_flushing }
    }

    fn note(&self, done: &io::Result<()>) {
        self.has_failed.set(self.has_failed.get() || done.is_err());
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    None,
    Read,
    Write,
    Flush,
    /// Tries a failed flush again: the kernel then reports success for data that it has lost.
    FlushAgain,
    /// After a failed write it damages the block behind it.
    Spill,
    /// Fails without an error of the file.
    NoReason,
    /// After a failed read or write it returns wrong data while a flush runs.
    WhileFlushing,
}

impl Device for InFile {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let read = self.file.read_into(&data, offset).await;
        self.note(&read);
        match self.lie {
            Lie::Read => Ok(()),
            Lie::WhileFlushing if self.has_failed.get() && self.is_flushing.get() => {
                data.copy_from(0, &vec![0xee; data.len()])
            }
            _ => read,
        }
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        let written = self.file.write_from(&data, offset).await;
        self.note(&written);
        match (written, self.lie) {
            (Ok(()), Lie::NoReason) if offset == 7 * BLOCK => Err(io::ErrorKind::Other.into()),
            (Err(_), Lie::Write) => Ok(()),
            (Err(e), Lie::Spill) => {
                let next = (offset + data.len() as u64) % (BLOCKS * BLOCK);
                self.file.write_at(&[0xee; 512], next).await.and(Err(e))
            }
            (written, _) => written,
        }
    }

    async fn flush(&self) -> io::Result<()> {
        self.is_flushing.set(true);
        let synced = self.file.sync().await;
        self.is_flushing.set(false);
        match self.lie {
            Lie::Flush => Ok(()),
            Lie::FlushAgain if synced.is_err() => self.file.sync().await,
            _ => synced,
        }
    }
}

#[test]
fn the_harness_finds_devices_that_answer_done_although_their_file_has_failed() {
    let run = |lie, errors, cuts| {
        let rig = PowerCuts::of(Shape { size: BLOCKS * BLOCK, granule: BLOCK });
        let rig = rig.file(vec![0; (BLOCKS * BLOCK) as usize]).errors(errors);
        let make = async move |files, _| Ok(InFile::new(files, lie));
        rig.run_device(1, cuts, make)
    };
    // Some of its reads overlap a flush that fails, and find what it has lost.
    run(Lie::None, 3, 90).unwrap();
    // Reads are checked while a flush runs in which nothing has failed.
    for lie in [Lie::Read, Lie::Write, Lie::Flush, Lie::FlushAgain, Lie::Spill, Lie::WhileFlushing]
    {
        let broken = run(lie, 2, 300).map(|()| lie).unwrap_err();
        assert!(matches!(broken.rule, Rule::Reads | Rule::SurvivesCuts), "{lie:?}: {broken:?}");
        assert!(broken.to_string().contains("sector"), "{lie:?}: {broken}");
        run(lie, 0, 9).unwrap();
    }
    let broken = run(Lie::NoReason, 2, 300).unwrap_err();
    assert_eq!(broken.rule, Rule::Succeeds, "{broken}");
    assert!(broken.to_string().contains("no operation of a file has"), "{broken}");
}

/// Has nothing to lose: each write is refused, and each read finds zeroes.
struct Zeroes;

impl Device for Zeroes {
    async fn read(&self, _offset: u64, data: Lent) -> io::Result<()> {
        data.copy_from(0, &vec![0; data.len()])
    }

    async fn write(&self, _offset: u64, _data: Lent) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_harness_takes_devices_without_files_and_refuses_impossible_shapes() {
    let shape = Shape { size: 8192, granule: 4096 };
    let zeroes = async |_, _| Ok(Zeroes);
    let broken = PowerCuts::of(shape).errors(3).run_device(1, 3, zeroes).unwrap_err();
    assert!(broken.to_string().contains("no operation of a file has"), "{broken}");
    for (size, granule) in [(0, 4096), (1000, 4096), (8192, 3000), (8192, 256), (8 << 20, 8 << 20)]
    {
        let shape = Shape { size, granule };
        assert!(std::panic::catch_unwind(|| PowerCuts::of(shape)).is_err(), "{shape:?}");
    }
}
