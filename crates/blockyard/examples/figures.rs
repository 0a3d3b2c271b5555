//! figures: what a miss and a hit of a map cost, one request at a time.
//!
//! `figures [PROGRAM]` reads 4 KiB blocks of a file in the page cache, each twice, over vhost-user.
//! The first read of a block is a question to the map, the second finds the answer. PROGRAM is an
//! `exec:` map with granules of 4 KiB. Prints medians in microseconds. Use a release build.

use std::ops::Range;
use std::time::{Duration, Instant};
use std::{fs, io};

use blockyard::{Access, CacheMode, Disk, Extent, Map, Place, Question, Shape, Target, Yard};
use blockyard_driver::{Data, Plan, Session, SplitRing, request};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 8192;
const LIMIT: Duration = Duration::from_secs(60);

/// Every block is at its own offset. Knows one block at a time.
struct Same;

impl Map for Same {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        Ok(vec![Extent { len: BLOCK, place: Place::At { file: 0, offset: asked.offset } }])
    }

    async fn flush(&self, _moved: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

/// Reads all blocks in a scattered order. Returns the median time of a read in microseconds.
fn read_all(guest: &mut Session<SplitRing>) -> Result<f64, Box<dyn std::error::Error>> {
    let (mut block, mut times) = (vec![0; BLOCK as usize], Vec::new());
    for number in 0..BLOCKS {
        let sector = number * 4099 % BLOCKS * (BLOCK / 512);
        let (began, data) = (Instant::now(), Data::FromDevice(BLOCK as u32));
        let status = guest.queues[0].call(request::IN, sector, data, &mut block, LIMIT)?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
        if status != 0 {
            return Err(format!("a read failed with status {status}").into());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::temp_dir().join(format!("blockyard-figures-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let (file, socket) = (folder.join("file"), folder.join("socket"));
    fs::write(&file, vec![7; (BLOCK * BLOCKS) as usize])?;
    let yard = Yard::start(1)?;
    let shape = Shape { size: BLOCK * BLOCKS, granule: BLOCK };
    let target = Target::map("same", shape, async |_, _| Ok(Same)).data(&file, Access::Write);
    let mut disks = vec![
        ("raw file", Disk::image("a", &file)),
        ("map in this process", Disk::target("a", target)),
    ];
    let program = std::env::args().nth(1);
    disks
        .extend(program.map(|path| ("map in a program", Disk::image("a", format!("exec:{path}")))));
    for (what, disk) in disks {
        yard.serve(disk.cache(CacheMode::Writeback).vhost_user(&socket))?;
        let mut guest = Session::start(&socket, &Plan::default())?;
        let (first, second) = (read_all(&mut guest)?, read_all(&mut guest)?);
        println!("{what}: first reads {first:.1} us, second reads {second:.1} us");
        drop(guest);
        yard.remove("a")?;
    }
    Ok(fs::remove_dir_all(folder)?)
}
