//! cached: a write-back cache. Writes go to a fast file at once, and to the slow one later.
//!
//! `cached SOCKET SLOW FAST` serves SLOW on a vhost-user socket. FAST is a log of slots: a sector
//! with the log's number, the block's number and a checksum, then the block. A flush syncs it. When
//! it is full, its blocks move to SLOW, which is synced before the log begins again. So a flushed
//! block is in one of the two after a power cut. Requests take turns: no time limit.

use std::{collections::BTreeMap, fs, io, time::Duration};

use blockyard::{Access::Write, *};

pub const BLOCK: u64 = 4096;
const SLOT: u64 = BLOCK + 512;

pub struct Cached(Lock<Log>);

struct Log {
    slow: OwnFile,
    fast: OwnFile,
    /// Slot of the latest copy of each block.
    latest: BTreeMap<u64, u64>,
    next: u64,
    number: u64,
}

/// Returns the header of a slot, with its checksum.
fn header(log: u64, block: u64, data: &[u8]) -> Vec<u8> {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let sum = data.iter().fold(!log ^ block.rotate_left(32), mix);
    [log, block, sum].into_iter().flat_map(u64::to_le_bytes).chain([0; 488]).collect()
}

impl Cached {
    pub async fn open(files: Files) -> io::Result<Self> {
        let [slow, fast] = [0, 1].map(|number| files.own[number].clone());
        let mut log = Log { slow, fast, latest: BTreeMap::new(), next: 0, number: 0 };
        for at in 0..log.fast.len().await? / SLOT {
            let mut slot = [0; SLOT as usize];
            log.fast.read_at(&mut slot, at * SLOT).await?;
            let word = |at: usize| slot[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            log.number = if at > 0 { log.number } else { word(0) };
            if slot[..512] == header(log.number, word(8), &slot[512..]) {
                log.latest.insert(word(8), at);
            }
        }
        log.write_back().await?;
        Ok(Cached(Lock::new(log)))
    }
}

impl Log {
    async fn write_back(&mut self) -> io::Result<()> {
        for (block, slot) in &self.latest {
            let mut data = [0; BLOCK as usize];
            self.fast.read_at(&mut data, slot * SLOT + 512).await?;
            self.slow.write_at(&data, block * BLOCK).await?;
        }
        self.slow.sync().await?;
        // No slot has a header with the next number: the log is empty. Slots wait for that.
        let begun = [&(self.number + 1).to_le_bytes()[..], &[0; 16]].concat();
        self.fast.write_at(&begun, 0).await?;
        self.fast.sync().await?;
        (self.latest, self.next, self.number) = (BTreeMap::new(), 0, self.number + 1);
        Ok(())
    }
}

impl Device for Cached {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let log = self.0.lock().await;
        for (block, data) in (offset / BLOCK..).zip(data.pieces(BLOCK as usize)) {
            let found = log.latest.get(&block).map(|slot| (&log.fast, slot * SLOT + 512));
            let (file, at) = found.unwrap_or((&log.slow, block * BLOCK));
            file.read_into(&data, at).await?;
        }
        Ok(())
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        let mut log = self.0.lock().await;
        for (block, data) in (offset / BLOCK..).zip(data.pieces(BLOCK as usize)) {
            let data = data.to_vec()?; // The guest may change its memory after the checksum.
            if (log.next + 1) * SLOT > log.fast.len().await? {
                log.write_back().await?;
            }
            let (slot, bytes) = (log.next, [header(log.number, block, &data), data].concat());
            log.fast.write_at(&bytes, slot * SLOT).await?;
            log.latest.insert(block, slot);
            log.next = slot + 1;
        }
        Ok(())
    }

    async fn flush(&self) -> io::Result<()> {
        self.0.lock().await.fast.sync().await
    }
}

pub fn target(slow: &str, fast: &str) -> io::Result<Target> {
    let shape = Shape { size: fs::metadata(slow)?.len() / BLOCK * BLOCK, granule: BLOCK };
    let target = Target::device("cached", shape, async |files, _| Cached::open(files).await);
    let target = target.limits(Limits { start: Duration::MAX, answer: Duration::MAX });
    Ok(target.file(slow, Write).file(fast, Write))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [socket, slow, fast] = &names[..] else { return Err("cached SOCKET SLOW FAST".into()) };
    let yard = Yard::start(1)?;
    yard.serve(Disk::target("cached", target(slow, fast)?).vhost_user(socket))?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
