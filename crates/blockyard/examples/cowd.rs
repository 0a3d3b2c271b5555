//! cowd: copy-on-write over any two files or devices. Its table survives power cuts.
//!
//! `cowd BASE STORE TABLE SOCKET` serves BASE on a vhost-user socket, and writes what changes to
//! STORE. TABLE has eight bytes for each block of BASE: 0, or the block's number in STORE plus 1.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;

use blockyard::{
    Access, Disk, Extent, Files, Fill, Map, OwnFile, Place, Question, Shape, Target, Yard,
};

pub const BLOCK: u64 = 64 << 10;
const ENTRIES: usize = 512 / 8;

pub struct Cowd {
    table: OwnFile,
    /// The table as it is in its file.
    slots: RefCell<Vec<u64>>,
    /// Places that are not in the table yet.
    given: RefCell<BTreeMap<usize, u64>>,
    /// Numbers of the places that the table does not use, the next one last.
    free: RefCell<Vec<u64>>,
}

impl Cowd {
    pub async fn open(files: Files, blocks: usize) -> io::Result<Self> {
        let (table, mut bytes) = (files.own[0].clone(), vec![0; blocks * 8]);
        table.read_at(&mut bytes, 0).await?;
        let entry = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let slots: Vec<u64> = bytes.chunks(8).map(entry).collect();
        let used: BTreeSet<u64> = slots.iter().copied().collect();
        let all = (1..=files.data_len[1] / BLOCK).rev();
        let free = RefCell::new(all.filter(|slot| !used.contains(slot)).collect());
        Ok(Cowd { table, slots: RefCell::new(slots), given: RefCell::default(), free })
    }

    /// Returns the place of a block that is about to change: always the same until it is durable.
    fn give(&self, block: usize) -> io::Result<u64> {
        if let Some(slot) = self.given.borrow().get(&block) {
            return Ok(*slot);
        }
        let slot = self.free.borrow_mut().pop().ok_or(io::ErrorKind::StorageFull)?;
        self.given.borrow_mut().insert(block, slot);
        Ok(slot)
    }
}

impl Map for Cowd {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let blocks = asked.offset / BLOCK..(asked.offset + asked.len) / BLOCK;
        let extent = |block: u64| {
            let base = block * BLOCK;
            let place = match self.slots.borrow()[block as usize] {
                0 if !asked.write => Place::At { file: 0, offset: base },
                0 => {
                    let offset = (self.give(block as usize)? - 1) * BLOCK;
                    Place::New { file: 1, offset, fill: Fill::From { file: 0, offset: base } }
                }
                slot => Place::At { file: 1, offset: (slot - 1) * BLOCK },
            };
            Ok(Extent { len: BLOCK, place })
        };
        blocks.map(extent).collect()
    }

    async fn flush(&self, moved: &[Range<u64>]) -> io::Result<()> {
        let mut sectors = BTreeSet::new();
        for block in moved.iter().flat_map(|part| part.start / BLOCK..part.end / BLOCK) {
            let slot = self.given.borrow_mut().remove(&(block as usize)).unwrap_or_default();
            self.slots.borrow_mut()[block as usize] = slot;
            sectors.insert(block as usize / ENTRIES);
        }
        for sector in sectors {
            let entries = self
                .slots
                .borrow()
                .iter()
                .skip(sector * ENTRIES)
                .take(ENTRIES)
                .copied()
                .flat_map(u64::to_le_bytes)
                .collect::<Vec<u8>>();
            self.table.write_at(&entries, sector as u64 * 512).await?;
        }
        self.table.sync().await
    }
}

pub fn target(base: &str, store: &str, table: &str) -> io::Result<Target> {
    let blocks = std::fs::metadata(base)?.len() / BLOCK;
    let shape = Shape { size: blocks * BLOCK, granule: BLOCK };
    let target =
        Target::map("cowd", shape, async move |files, _| Cowd::open(files, blocks as usize).await);
    Ok(target.data(base, Access::Read).data(store, Access::Write).file(table, Access::Write))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [base, store, table, socket] = &words[..] else {
        return Err("cowd BASE STORE TABLE SOCKET".into());
    };
    let size = std::fs::metadata(base)?.len();
    for (path, len) in [(store, size), (table, size / BLOCK * 8)] {
        std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?
            .set_len(len)?;
    }
    let yard = Yard::start(1)?;
    yard.serve(Disk::target("cowd", target(base, store, table)?).vhost_user(socket))?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
