//! What misses and hits of a map cost: `cargo bench -p blockyard --bench maps`.
//!
//! Reads of 4 KiB from a file in the page cache, in a scattered order, over vhost-user: of the raw
//! file, of a map in this process, and of the same map in a program (python3). A miss reads a block
//! for the first time, a hit does not. First one read at a time, then 32. Each measurement has a
//! new disk. The disks take turns in `ROUNDS` rounds (5). Prints medians, as Markdown.
//!
//! Then the table of answers alone: reads from a file that answers at once, on one thread, without
//! a guest. Prints the least of the rounds, because other programs can only add to it.

use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use std::{fs, io};

use blockyard::{
    Access, CacheMode, Disk, Extent, Handle, Map, Place, Question, Shape, Target, Yard,
};
use blockyard_driver::{Data, Plan, Queue, Session, SplitRing, request};
use blockyard_ring::Segments;
use blockyard_storage::Storage;
use blockyard_storage::targets::{Direct, Mapped};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1 << 15;
/// Blocks that are known before the measurement, if there are hits.
const KNOWN: u64 = 1 << 10;
/// Reads of a measurement. At most as many as there are blocks that are not known.
const READS: u64 = 30_000;
const DEPTH: u16 = 32;
const LIMIT: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

/// Every block is at its own offset.
struct Same;

impl Map for Same {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        Ok(vec![Extent { len: asked.len, place: Place::At { file: 0, offset: asked.offset } }])
    }

    async fn flush(&self, _moved: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

/// The same map as a program.
const PROGRAM: &str = "#!/usr/bin/env python3
import sys
print('blockyard-map 1\\nsize SIZE\\ngranule 4096\\ndata w FILE\\nready', flush=True)
for line in sys.stdin:
    word, number, *asked = line.split()
    extent = f' {asked[2]} at 0 {asked[1]}' if word == 'locate' else ''
    print(f'ok {number}{extent}', flush=True)
";

#[derive(Clone, Copy)]
enum Kind {
    Raw,
    Map,
    Program,
}

/// The disks, in the order of the table.
const KINDS: [(Kind, &str); 3] = [
    (Kind::Raw, "raw file"),
    (Kind::Map, "map in the process"),
    (Kind::Program, "map in a program (Python)"),
];

/// What is measured: reads in flight, and misses in 100 reads.
const MEASURED: [(u16, u64); 5] = [(1, 100), (1, 0), (DEPTH, 0), (DEPTH, 1), (DEPTH, 100)];

/// A folder with the file and the program, and the disks over them.
struct Bench {
    folder: PathBuf,
    yard: Yard,
}

impl Bench {
    fn new() -> Result<Self, Failure> {
        let folder = std::env::temp_dir().join(format!("blockyard-maps-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let bench = Bench { folder, yard: Yard::start(1)? };
        let (file, program) = (bench.path("file"), bench.path("map"));
        fs::write(&file, vec![7; (BLOCK * BLOCKS) as usize])?;
        let text = PROGRAM.replace("SIZE", &(BLOCK * BLOCKS).to_string());
        fs::write(&program, text.replace("FILE", &file.display().to_string()))?;
        fs::set_permissions(program, fs::Permissions::from_mode(0o755))?;
        Ok(bench)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Serves a new disk. Returns a handle to it, if it is a map in this process.
    fn serve(&self, kind: Kind) -> Result<Option<Handle>, Failure> {
        let (file, shape) = (self.path("file"), Shape { size: BLOCK * BLOCKS, granule: BLOCK });
        let (sender, receiver) = sync_channel(1);
        let disk = match kind {
            Kind::Raw => Disk::image("a", file),
            Kind::Program => Disk::image("a", format!("exec:{}", self.path("map").display())),
            Kind::Map => {
                let target = Target::map("same", shape, async move |_, handle| {
                    let _ = sender.send(handle);
                    Ok(Same)
                });
                Disk::target("a", target.data(file, Access::Write))
            }
        };
        self.yard.serve(disk.cache(CacheMode::Writeback).vhost_user(self.path("socket")))?;
        Ok(receiver.try_recv().ok())
    }

    /// Reads from a new disk. Returns nanoseconds for each read.
    fn measure(&self, kind: Kind, depth: u16, misses: u64) -> Result<f64, Failure> {
        let handle = self.serve(kind)?;
        let mut guest = Session::start(&self.path("socket"), &Plan::default())?;
        let queue = &mut guest.queues[0];
        read(queue, 1, &mut (0..KNOWN))?;
        let asked = |handle: &Option<Handle>| handle.as_ref().map(|handle| handle.figures().misses);
        let (before, begin) = (asked(&handle), Instant::now());
        let mut missed = 0;
        let mut blocks = (0..READS).map(|number| {
            let is_hit = number * misses / 100 == (number + 1) * misses / 100;
            missed += u64::from(!is_hit);
            if is_hit {
                scattered(number, KNOWN)
            } else {
                KNOWN + scattered(missed, BLOCKS - KNOWN)
            }
        });
        read(queue, depth, &mut blocks)?;
        let took = begin.elapsed();
        if let (Some(before), Some(after)) = (before, asked(&handle)) {
            assert_eq!(after - before, READS * misses / 100, "questions to the map");
        }
        drop(guest);
        self.yard.remove("a")?;
        Ok(took.as_nanos() as f64 / READS as f64)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns a block of `0..blocks`. `blocks` numbers in a row are different blocks, and no
/// neighbours.
fn scattered(number: u64, blocks: u64) -> u64 {
    number * 4099 % blocks
}

/// Reads these blocks, `depth` at a time.
fn read(
    queue: &mut Queue<SplitRing>,
    depth: u16,
    blocks: &mut dyn Iterator<Item = u64>,
) -> Result<(), Failure> {
    let mut free = Vec::from_iter(0..depth);
    loop {
        while let Some(slot) = free.pop() {
            let Some(block) = blocks.next() else {
                free.push(slot);
                break;
            };
            let data = Data::FromDevice(BLOCK as u32);
            queue.submit(slot, request::IN, block * (BLOCK / 512), data);
        }
        if free.len() == usize::from(depth) {
            return Ok(());
        }
        queue.publish()?;
        let before = free.len();
        while let Some((slot, status)) = queue.reap()? {
            if status != 0 {
                return Err(format!("a read failed with status {status}").into());
            }
            free.push(slot);
        }
        if free.len() == before {
            queue.sleep(Some(LIMIT))?;
        }
    }
}

/// A file that answers at once, and has no data.
struct Nothing;

impl Storage for Nothing {
    async fn read(&self, segments: Segments, _: u64) -> (Segments, io::Result<usize>) {
        let len = segments.len();
        (segments, Ok(len))
    }

    async fn write(&self, segments: Segments, _: u64, _: bool) -> (Segments, io::Result<usize>) {
        let len = segments.len();
        (segments, Ok(len))
    }

    async fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    async fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Ok(())
    }

    async fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(BLOCK * BLOCKS)
    }
}

/// Reads every block once. Returns nanoseconds for each read.
fn read_all(disk: &impl Storage) -> f64 {
    let mut segments = Segments::buffer(BLOCK as usize);
    let began = Instant::now();
    for number in 0..BLOCKS {
        let (same, result) =
            blockyard::testing::wait(disk.read(segments, scattered(number, BLOCKS) * BLOCK));
        result.expect("the storage does not fail");
        segments = same;
    }
    began.elapsed().as_nanos() as f64 / BLOCKS as f64
}

/// Returns nanoseconds of a read without a table, of a hit and of a miss.
fn table() -> [f64; 3] {
    let shape = Shape { size: BLOCK * BLOCKS, granule: BLOCK };
    let (mut handle, files) = (Handle::none(), vec![(Nothing, Access::Write)]);
    let made = Mapped::simulated(shape, files, async |given| {
        handle = given;
        Ok(Direct::new(Same))
    });
    let disk = blockyard::testing::wait(made).expect("the map opens");
    let (alone, miss, hit) = (read_all(&Nothing), read_all(&disk), read_all(&disk));
    let figures = handle.figures();
    assert_eq!((figures.misses, figures.hits, figures.known), (BLOCKS, BLOCKS, BLOCKS));
    [alone, hit, miss]
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn main() -> Result<(), Failure> {
    let rounds = std::env::var("ROUNDS").map_or(Ok(5), |text| text.parse())?;
    let bench = Bench::new()?;
    let mut figures = vec![[const { Vec::new() }; MEASURED.len()]; KINDS.len()];
    for round in 0..rounds {
        for (what, (depth, misses)) in MEASURED.into_iter().enumerate() {
            for number in (0..KINDS.len()).map(|number| (number + round) % KINDS.len()) {
                let took = bench.measure(KINDS[number].0, depth, misses)?;
                figures[number][what].push(took);
            }
        }
    }
    println!("| disk | miss, ns | hit, ns | reads/s, 0% misses | 1% | 100% |");
    println!("|---|--:|--:|--:|--:|--:|");
    for ((_, name), figures) in KINDS.iter().zip(figures) {
        let [miss, hit, none, one, all] = figures.map(median);
        let [none, one, all] = [none, one, all].map(|ns| 1e9 / ns);
        println!("| {name} | {miss:.0} | {hit:.0} | {none:.0} | {one:.0} | {all:.0} |");
    }
    let tables: Vec<_> = (0..rounds).map(|_| table()).collect();
    let least = |what: usize| tables.iter().map(|figures| figures[what]).fold(f64::MAX, f64::min);
    let [alone, hit, miss] = [0, 1, 2].map(least);
    println!("\nThe table alone, with {BLOCKS} entries: a read without it {alone:.0} ns,");
    println!("a hit {hit:.0} ns, a miss and a question on the same thread {miss:.0} ns.");
    Ok(())
}
