//! cached: a write-back cache. Writes go to a fast file at once, and to the slow one later.
//!
//! `cached SOCKET SLOW FAST` serves SLOW on a vhost-user socket. FAST is a log of slots: a sector
//! with the log's number, the block's number and a checksum, then the block. A flush syncs it. When
//! it is full, its blocks move to SLOW, which is synced before the log begins again. Requests take
//! turns, without a time limit. After a failed sync they fail: a slot may have its old block again.

use std::{collections::BTreeMap, fs, io, time::Duration};

use blockyard::{Access::Write, *};

pub const BLOCK: u64 = 4096;
const SLOT: u64 = BLOCK + 512;

pub struct Cached(Lock<Log>);

struct Log {
    files: Vec<OwnFile>,        // SLOW, FAST
    latest: BTreeMap<u64, u64>, // the slot of each block
    next: u64,
    number: u64,
    lost: bool,
}

fn header(log: u64, block: u64, data: &[u8]) -> Vec<u8> {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let sum = data.iter().fold(!log ^ block.rotate_left(32), mix);
    [log, block, sum].into_iter().flat_map(u64::to_le_bytes).chain([0; 488]).collect()
}

impl Cached {
    pub async fn open(files: Files) -> io::Result<Self> {
        let mut log = Log { files: files.own, latest: [].into(), next: 0, number: 0, lost: false };
        for at in 0..log.files[1].len().await? / SLOT {
            let mut slot = [0; SLOT as usize];
            log.files[1].read_at(&mut slot, at * SLOT).await?;
            let word = |at: usize| slot[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            log.number = if at > 0 { log.number } else { word(0) };
            let is_whole = slot[..512] == header(log.number, word(8), &slot[512..]);
            log.latest.extend(is_whole.then(|| (word(8), at)));
        }
        Cached::write_back(&mut log).await?;
        Ok(Cached(Lock::new(log)))
    }

    async fn log(&self) -> io::Result<Locked<'_, Log>> {
        Some(self.0.lock().await).filter(|log| !log.lost).ok_or(io::ErrorKind::Other.into())
    }

    async fn sync(log: &mut Log, file: usize) -> io::Result<()> {
        log.lost = true;
        log.files[file].sync().await.inspect(|()| log.lost = false)
    }

    async fn write_back(log: &mut Log) -> io::Result<()> {
        let mut data = [0; BLOCK as usize];
        for (block, slot) in &log.latest {
            log.files[1].read_at(&mut data, slot * SLOT + 512).await?;
            log.files[0].write_at(&data, block * BLOCK).await?;
        }
        Cached::sync(log, 0).await?;
        let begun = [&(log.number + 1).to_le_bytes()[..], &[0; 16]].concat();
        log.files[1].write_at(&begun, 0).await?; // No slot has the next number: it is empty.
        Cached::sync(log, 1).await?; // Slots wait for that.
        (log.latest, log.next, log.number) = ([].into(), 0, log.number + 1);
        Ok(())
    }
}

impl Device for Cached {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let log = self.log().await?;
        for (block, data) in (offset / BLOCK..).zip(data.pieces(BLOCK as usize)) {
            let found = log.latest.get(&block);
            let (file, at) = found.map_or((0, block * BLOCK), |slot| (1, slot * SLOT + 512));
            log.files[file].read_into(&data, at).await?;
        }
        Ok(())
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        let mut log = self.log().await?;
        for (block, data) in (offset / BLOCK..).zip(data.pieces(BLOCK as usize)) {
            let data = data.to_vec()?; // The guest may change its memory after the checksum.
            if (log.next + 1) * SLOT > log.files[1].len().await? {
                Cached::write_back(&mut log).await?;
            }
            let (slot, bytes) = (log.next, [header(log.number, block, &data), data].concat());
            log.files[1].write_at(&bytes, slot * SLOT).await?;
            log.latest.insert(block, slot);
            log.next = slot + 1;
        }
        Ok(())
    }

    async fn flush(&self) -> io::Result<()> {
        Cached::sync(&mut *self.log().await?, 1).await
    }
}

pub fn target(slow: &str, fast: &str) -> io::Result<Target> {
    let shape = Shape { size: fs::metadata(slow)?.len() / BLOCK * BLOCK, granule: BLOCK };
    let target = Target::device("cached", shape, async |files, _| Cached::open(files).await);
    let limits = Limits { start: Duration::MAX, answer: Duration::MAX };
    Ok(target.limits(limits).file(slow, Write).file(fast, Write))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [socket, slow, fast] = &names[..] else { return Err("cached SOCKET SLOW FAST".into()) };
    let yard = Yard::start(1)?;
    yard.serve(Disk::target("cached", target(slow, fast)?).vhost_user(socket))?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
