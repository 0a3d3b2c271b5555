//! cached: a write-back cache. Writes go to a fast file at once, and to the slow one later.
//!
//! `cached SOCKET SLOW FAST` serves SLOW on a vhost-user socket. FAST is a log of slots: a sector
//! with the log's number, the block's number and a checksum, then the block. A flush syncs it. When
//! it is full, its blocks move to SLOW, which is synced before the log begins again. So a flushed
//! block is in one of the two after a power cut. No method waits, so each has the log to itself.

use std::cell::{Cell, RefCell};
use std::{collections::BTreeMap, fs, io, os::unix::fs::FileExt};

use blockyard::{Device, Disk, Shape, Target, Yard};

pub const BLOCK: u64 = 4096;
const SLOT: u64 = BLOCK + 512;

pub struct Cached {
    slow: fs::File,
    fast: fs::File,
    /// Slot of the latest copy of each block in the log.
    log: RefCell<BTreeMap<u64, u64>>,
    next: Cell<u64>,
    number: Cell<u64>,
}

/// Returns the header of a slot, with its checksum.
fn header(log: u64, block: u64, data: &[u8]) -> Vec<u8> {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let sum = data.iter().fold(!log ^ block.rotate_left(32), mix);
    [log, block, sum].into_iter().flat_map(u64::to_le_bytes).collect()
}

impl Cached {
    pub fn open(slow: fs::File, fast: fs::File) -> io::Result<Self> {
        let (log, next, number) = Default::default();
        let cached = Cached { slow, fast, log, next, number };
        let mut slot = [0; SLOT as usize];
        for at in 0..cached.fast.metadata()?.len() / SLOT {
            cached.fast.read_exact_at(&mut slot, at * SLOT)?;
            let word = |at: usize| slot[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            let number = if at > 0 { cached.number.get() } else { word(0) };
            cached.number.set(number);
            if slot[..24] != header(number, word(8), &slot[512..]) {
                break;
            }
            cached.log.borrow_mut().insert(word(8), at);
        }
        cached.write_back().map(|()| cached)
    }

    fn write_back(&self) -> io::Result<()> {
        for block in self.log.borrow().keys() {
            let mut data = [0; BLOCK as usize];
            self.get(*block, &mut data)?;
            self.slow.write_all_at(&data, block * BLOCK)?;
        }
        self.slow.sync_data()?;
        // The checksum of the first slot is wrong from now on: the log is empty.
        self.number.set(self.number.get() + 1);
        self.fast.write_all_at(&[self.number.get().to_le_bytes(), [0; 8], [0; 8]].concat(), 0)?;
        self.log.borrow_mut().clear();
        self.next.set(0);
        self.fast.sync_data()
    }

    fn get(&self, block: u64, data: &mut [u8]) -> io::Result<()> {
        match self.log.borrow().get(&block) {
            Some(slot) => self.fast.read_exact_at(data, slot * SLOT + 512),
            None => self.slow.read_exact_at(data, block * BLOCK),
        }
    }
}

impl Device for Cached {
    async fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut blocks = (offset / BLOCK..).zip(data.chunks_mut(BLOCK as usize));
        blocks.try_for_each(|(block, data)| self.get(block, data))
    }

    async fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        for (block, data) in (offset / BLOCK..).zip(data.chunks(BLOCK as usize)) {
            if (self.next.get() + 1) * SLOT > self.fast.metadata()?.len() {
                self.write_back()?;
            }
            let slot = self.next.get();
            self.fast.write_all_at(&header(self.number.get(), block, data), slot * SLOT)?;
            self.fast.write_all_at(data, slot * SLOT + 512)?;
            self.log.borrow_mut().insert(block, slot);
            self.next.set(slot + 1);
        }
        Ok(())
    }

    async fn flush(&self) -> io::Result<()> {
        self.fast.sync_data()
    }
}

pub fn target(slow: &str, fast: &str) -> io::Result<Target> {
    let open = |path| fs::File::options().read(true).write(true).open(path);
    let (slow, fast) = (open(slow)?, open(fast)?);
    let shape = Shape { size: slow.metadata()?.len() / BLOCK * BLOCK, granule: BLOCK };
    Ok(Target::device("cached", shape, async move |_, _| Cached::open(slow, fast)))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [socket, slow, fast] = &names[..] else { return Err("cached SOCKET SLOW FAST".into()) };
    let yard = Yard::start(1)?;
    yard.serve(Disk::target("cached", target(slow, fast)?).vhost_user(socket))?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
