//! cached: a write-back cache. Writes go to a fast file at once, and to the slow one later.
//!
//! `cached SOCKET SLOW FAST` serves SLOW on a vhost-user socket. FAST is a log of slots: a sector
//! with the log's number, the block's number and a checksum, then the block; the first slot has no
//! block. A flush syncs it. When it is full, its blocks move to SLOW, which is synced before the
//! log begins again. Requests take turns, without a time limit. After a failed sync they fail: a
//! slot may have its old block again. They also fail if FAST is damaged.

use std::{collections::BTreeMap, fs, io, time::Duration};

use blockyard::{Access::Write, *};

pub const BLOCK: u64 = 4096;
const SLOT: u64 = BLOCK + 512;

pub struct Cached(Lock<Log>);

struct Log {
    files: Vec<OwnFile>,        // SLOW, FAST
    latest: BTreeMap<u64, u64>, // where the slot of each block is
    next: u64,
    number: u64, // 0: unknown
    lost: bool,
}

fn slot(log: u64, block: u64, data: &[u8]) -> Vec<u8> {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let sum = data.iter().fold(!log ^ block.rotate_left(32), mix);
    [&[log, block, sum].map(u64::to_le_bytes).concat()[..], &[0; 488], data].concat()
}

impl Cached {
    pub async fn open(files: Files) -> io::Result<Self> {
        let (latest, next) = ([].into(), files.own[1].len().await? / SLOT);
        let mut log = Log { files: files.own, latest, next, number: 0, lost: false };
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
        let (opens, mut bytes) = (log.latest.is_empty(), [0; SLOT as usize]);
        for at in 0..log.next {
            log.files[1].read_at(&mut bytes, at * SLOT).await?;
            let word = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            let is_whole = bytes[..] == slot(word(0), word(8), &bytes[512..]);
            log.number = if at == 0 && opens && is_whole { word(0) } else { log.number };
            let is_ours = is_whole && word(0) == log.number;
            // A power cut may tear slots that are not flushed, and no sector.
            log.lost = !opens && !is_ours || is_whole && log.number == 0;
            (!log.lost).then_some(()).ok_or_else(|| io::Error::other("FAST is damaged"))?;
            if is_ours && at > 0 && log.latest.get(&word(8)).is_none_or(|old| *old == at * SLOT) {
                log.files[0].write_at(&bytes[512..], word(8) * BLOCK).await?;
            }
        }
        Cached::sync(log, 0).await?;
        log.files[1].write_at(&slot(log.number + 1, 0, &[0; BLOCK as usize]), 0).await?;
        Cached::sync(log, 1).await?; // No slot has the new number. Slots wait for that.
        (log.latest, log.next, log.number) = ([].into(), 1, log.number + 1);
        Ok(())
    }
}

impl Device for Cached {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let log = self.log().await?;
        for (block, data) in (offset / BLOCK..).zip(data.pieces(BLOCK as usize)) {
            let (file, at) = log.latest.get(&block).map_or((0, block * BLOCK), |at| (1, at + 512));
            log.files[file].read_into(&data, at).await?;
        }
        Ok(())
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        let log = &mut *self.log().await?;
        for (block, data) in (offset / BLOCK..).zip(data.pieces(BLOCK as usize)) {
            if (log.next + 1) * SLOT > log.files[1].len().await? {
                Cached::write_back(log).await?;
            }
            let data = data.to_vec()?; // The guest may change its memory after the checksum.
            log.files[1].write_at(&slot(log.number, block, &data), log.next * SLOT).await?;
            log.latest.insert(block, log.next * SLOT);
            log.next += 1;
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
