//! The example program `cowd.py` with power cuts, which end it. Its data lie on simulated disks.
//! Its table is a real file. A prelude of the program notes each write and each sync of the table.
//! Before Blockyard gets an answer, this test repeats them on a simulated file, one by one.
//!
//! So a power cut leaves of the table what a disk may leave:
//!
//! - What the program wrote before its last sync is there.
//! - Of the later writes each sector has all up to some write, or none. Another sector may have
//!   more of them or fewer.
//! - If the power fails during a sync, the sync may have kept any of the writes before it.
//! - The length of a table that grows is that of any write since the last sync.
//!
//! A write or sync of the simulated file may fail. Such an error would end the program, so this
//! test ends it.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use blockyard::testing::{PowerCuts, wait};
use blockyard::{Access, Discard, Extent, Files, Fill, Lock, Map, OwnFile, Place, Question, Shape};
use blockyard_storage::sim::{Fault, OpKind, SimConfig, SimDisk, SimImage};

mod common;

use common::{LIMIT, Scratch};

/// Bytes that `cowd.py` moves at a time.
const BLOCK: u64 = 64 << 10;
const BLOCKS: u64 = 6;

/// Makes the example note its calls in the file CALLS: a line `OFFSET BYTES` for each write, with
/// the bytes in hexadecimal, and a line `sync` for each sync. With LIES it notes no syncs.
const PRELUDE: &str = "
import os, sys

def note(text):
    with open(os.environ['CALLS'], 'a') as calls:
        calls.write(text + '\\n')

def pwrite(file, data, offset, call=os.pwrite):
    written = call(file, data, offset)
    note(f'{offset} {data[:written].hex()}')
    return written

def fdatasync(file, call=os.fdatasync):
    call(file)
    if 'LIES' not in os.environ:
        note('sync')

os.pwrite, os.fdatasync = pwrite, fdatasync
exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))
";

/// A call of the program for its table.
enum Call {
    Write(u64, Vec<u8>),
    Sync,
}

impl Call {
    /// Parses a line of the file CALLS.
    fn parse(line: &str) -> Self {
        let Some((offset, hex)) = line.split_once(' ') else {
            assert_eq!(line, "sync");
            return Call::Sync;
        };
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        Call::Write(offset.parse().unwrap(), (0..hex.len()).step_by(2).map(byte).collect())
    }

    /// Repeats the call on a simulated file.
    async fn repeat(&self, file: &OwnFile) -> io::Result<()> {
        match self {
            Call::Write(offset, bytes) => file.write_at(bytes, *offset).await,
            Call::Sync => file.sync().await,
        }
    }
}

/// The program, and the simulated file of its table.
struct Program {
    process: Child,
    lines: BufReader<UnixStream>,
    folder: PathBuf,
    table: OwnFile,
    /// What the table holds after the calls that were repeated.
    bytes: Vec<u8>,
    /// Number of these calls.
    calls: usize,
    number: u64,
}

impl Program {
    /// Starts the program with the table that the simulated file has.
    async fn start(folder: &Path, table: OwnFile, lies: bool) -> io::Result<Self> {
        let mut bytes = vec![0; table.len().await? as usize];
        table.read_at(&mut bytes, 0).await?;
        std::fs::write(folder.join("table"), &bytes)?;
        std::fs::write(folder.join("calls"), [])?;
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/exec/cowd.py");
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(LIMIT))?;
        let mut command = Command::new("python3");
        command
            .args(["-S", "-c"])
            .arg(PRELUDE)
            .arg(example)
            .stdin(OwnedFd::from(theirs.try_clone()?));
        command.stdout(OwnedFd::from(theirs));
        for (name, file) in [("BASE", "base"), ("STORE", "base"), ("TABLE", "table")] {
            command.env(name, folder.join(file));
        }
        command.env("CALLS", folder.join("calls")).envs(lies.then_some(("LIES", "1")));
        let process = command.spawn()?;
        drop(command); // It has the other ends.
        let (folder, lines) = (folder.into(), BufReader::new(ours));
        let mut program = Program { process, lines, folder, table, bytes, calls: 0, number: 0 };
        while program.line()? != "ready" {}
        program.repeat().await?;
        Ok(program)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(line.trim_end().into()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                panic!("the program has not answered within {LIMIT:?}")
            }
            Err(e) => Err(e),
        }
    }

    /// Asks, and returns the answer without its number.
    async fn ask(&mut self, word: &str, rest: &str) -> io::Result<String> {
        self.number += 1;
        let number = self.number;
        writeln!(self.lines.get_mut(), "{word} {number} {rest}")?;
        let line = self.line()?;
        let answer = line.strip_prefix(&format!("ok {number}")).map(|rest| rest.trim().into());
        self.repeat().await?;
        answer.ok_or_else(|| io::Error::other(line))
    }

    /// Repeats on the simulated file what the program has done with its table, in its order.
    async fn repeat(&mut self) -> io::Result<()> {
        let calls = std::fs::read_to_string(self.folder.join("calls"))?;
        let new: Vec<_> = calls.lines().skip(self.calls).map(Call::parse).collect();
        self.calls += new.len();
        for call in &new {
            if let Call::Write(offset, bytes) = call {
                let range = *offset as usize..*offset as usize + bytes.len();
                self.bytes.resize(self.bytes.len().max(range.end), 0);
                self.bytes[range].copy_from_slice(bytes);
            }
        }
        let table = std::fs::read(self.folder.join("table"))?;
        assert!(table == self.bytes, "the prelude has not noted each write of the table");
        for call in new {
            if let Err(e) = call.repeat(&self.table).await {
                self.process.kill()?;
                return Err(e);
            }
        }
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Parses the extents of an answer.
fn extents(list: &str) -> Vec<Extent> {
    let extent = |text: &str| {
        let words: Vec<_> = text.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let file = |at: usize| number(at) as usize;
        let place = match words[1..] {
            ["zero"] => Place::Zero,
            ["at", ..] => Place::At { file: file(2), offset: number(3) },
            ["new", _, _, "zero"] => {
                Place::New { file: file(2), offset: number(3), fill: Fill::Zero }
            }
            _ => {
                let fill = Fill::From { file: file(5), offset: number(6) };
                Place::New { file: file(2), offset: number(3), fill }
            }
        };
        Extent { len: number(0), place }
    };
    list.split(", ").map(extent).collect()
}

/// The map in the program. It gets one question at a time.
struct Asked(Lock<Program>);

impl Map for Asked {
    async fn locate(&self, Question { offset, len, write }: Question) -> io::Result<Vec<Extent>> {
        let how = if write { "w" } else { "r" };
        let answer = self.0.lock().await.ask("locate", &format!("{how} {offset} {len}")).await?;
        Ok(extents(&answer))
    }

    async fn flush(&self, moved: &[Range<u64>]) -> io::Result<()> {
        let parts = moved.iter().map(|part| format!("{} {}", part.start, part.end - part.start));
        let parts = Vec::from_iter(parts).join(", ");
        self.0.lock().await.ask("flush", &parts).await.map(drop)
    }

    async fn discard(&self, Discard { offset, len, zero }: Discard) -> io::Result<Vec<Extent>> {
        let word = if zero { "zero" } else { "discard" };
        let answer = self.0.lock().await.ask(word, &format!("{offset} {len}")).await?;
        Ok(extents(&answer))
    }
}

fn base(scratch: &Scratch) -> Vec<u8> {
    let base: Vec<u8> = (0..BLOCKS * BLOCK).map(|at| (at / 512 * 7 + at % 251) as u8).collect();
    scratch.file("base", &base);
    base
}

fn run(scratch: &Scratch, lies: bool, errors: u64, seed: u64, cuts: u64) -> Result<(), String> {
    let base = base(scratch);
    let rig = PowerCuts::of(Shape { size: BLOCKS * BLOCK, granule: BLOCK })
        .data(base.clone(), Access::Read)
        .data(vec![0x55; base.len()], Access::Write)
        .file(Vec::new())
        .errors(errors)
        .requests(8)
        .holds(base);
    let folder = scratch.path("");
    let make = async move |files: Files, _| {
        let program = Program::start(&folder, files.own[0].clone(), lies).await?;
        Ok(Asked(Lock::new(program)))
    };
    rig.run(seed, cuts, make).map_err(|broken| broken.to_string())
}

#[test]
fn what_the_python_example_has_flushed_survives_power_cuts() {
    let scratch = Scratch::new("python-cuts");
    let number = |name| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let seed = number("BLOCKYARD_SEED").unwrap_or(1);
    let cuts = number("BLOCKYARD_CUTS").unwrap_or(3);
    for errors in [0, 2] {
        run(&scratch, false, errors, seed, cuts).unwrap();
    }
    println!("seeds {seed} and on: {} cuts", 2 * cuts);
}

#[test]
fn a_program_that_does_not_sync_its_table_is_found() {
    let scratch = Scratch::new("python-lies");
    let broken = run(&scratch, true, 0, 1, 60).unwrap_err();
    assert!(broken.contains("sector"), "{broken}");
}

/// Returns what different power cuts leave of a file after these calls: the bytes at 0, 1 and 512.
fn left_after(calls: &[Call]) -> BTreeSet<[u8; 3]> {
    let disk = SimDisk::new(SimImage::zeroed(1024), SimConfig::new(1));
    let file = OwnFile::simulated(disk.clone());
    wait(async {
        for call in calls {
            call.repeat(&file).await.unwrap();
        }
    });
    let left = (0..1000).map(|_| disk.power_cut().bytes());
    left.map(|bytes| [bytes[0], bytes[1], bytes[512]]).collect()
}

#[test]
fn a_cut_leaves_what_was_synced_and_any_of_the_later_writes_of_a_sector_in_their_order() {
    let write = |offset, byte| Call::Write(offset, vec![byte]);
    let all = |left: &[[u8; 3]]| left.iter().copied().collect::<BTreeSet<_>>();
    // A sync covers no write that comes after it.
    let left = left_after(&[write(0, 1), Call::Sync, write(0, 2)]);
    assert_eq!(left, all(&[[1, 0, 0], [2, 0, 0]]));
    // Two sectors have no order.
    let left = left_after(&[write(0, 1), write(1, 2), write(512, 3)]);
    let of_one_sector = [[0, 0, 0], [1, 0, 0], [1, 2, 0]];
    assert_eq!(left, &all(&of_one_sector) | &all(&of_one_sector.map(|[a, b, _]| [a, b, 3])));
    let left = left_after(&[write(0, 1), write(512, 3), Call::Sync]);
    assert_eq!(left, all(&[[1, 0, 3]]));
}

/// The process before may have died after a sync that failed. The kernel then shows it the entries
/// that are lost.
#[test]
fn the_python_example_makes_the_table_durable_that_it_finds() {
    let scratch = Scratch::new("python-found");
    base(&scratch);
    // Block 2 is at place 5.
    let entries: Vec<u8> =
        (0..BLOCKS).flat_map(|block| (u64::from(block == 2) * 5).to_le_bytes()).collect();
    let table = |seed| {
        let disk = SimDisk::new(SimImage::zeroed(BLOCKS * 8), SimConfig::new(seed));
        disk.fail(Fault::new(OpKind::Sync, io::ErrorKind::Other));
        let file = OwnFile::simulated(disk.clone());
        wait(Call::Write(0, entries.clone()).repeat(&file)).unwrap();
        wait(Call::Sync.repeat(&file)).unwrap_err();
        (disk, file)
    };
    // A failed sync may also have kept them, or show that they are lost.
    let is_shown_and_lost = |seed: &u64| {
        let disk = table(*seed).0;
        disk.contents() == entries && disk.power_cut().bytes() != entries
    };
    let (disk, file) = table((1..100).find(is_shown_and_lost).unwrap());
    let program = wait(Program::start(&scratch.path(""), file, false)).unwrap();
    for _ in 0..20 {
        assert!(disk.power_cut().bytes() == entries);
    }
    drop(program);
}
