//! cowd: copy-on-write over any two files or devices. Its table survives power cuts.
//!
//! `cowd BASE STORE TABLE SOCKET` serves BASE on a vhost-user socket, and writes what changes to
//! STORE. TABLE has eight bytes for each block of BASE: 0, or the block's number in STORE plus 1.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::{fs, io};

use blockyard::Access::{Read, Write};
use blockyard::{Disk, Extent, Files, Fill, Map, OwnFile, Place, Question, Shape, Target, Yard};

pub const BLOCK: u64 = 64 << 10;

pub struct Cowd {
    file: OwnFile,
    /// The table as it is in its file, in whole sectors.
    table: RefCell<Vec<u8>>,
    /// Places that are not in the table yet, by block.
    given: RefCell<BTreeMap<u64, u64>>,
    /// Numbers of the places that nothing uses, the next one last.
    free: RefCell<Vec<u64>>,
}

fn slot(table: &[u8], block: u64) -> u64 {
    u64::from_le_bytes(table[block as usize * 8..][..8].try_into().unwrap_or_default())
}

impl Cowd {
    pub async fn open(files: Files, blocks: u64) -> io::Result<Self> {
        let mut table = vec![0; (blocks as usize * 8).next_multiple_of(512)];
        files.own[0].read_at(&mut table, 0).await?;
        let used: BTreeSet<u64> = (0..blocks).map(|block| slot(&table, block)).collect();
        let all = (1..=files.data_len[1] / BLOCK).rev();
        let free = RefCell::new(all.filter(|slot| !used.contains(slot)).collect());
        let (table, given) = (RefCell::new(table), RefCell::default());
        Ok(Cowd { file: files.own[0].clone(), table, given, free })
    }

    /// Returns the place of a block that is about to change: always the same until it is durable.
    fn give(&self, block: u64) -> io::Result<u64> {
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
        let extent = |block: u64| {
            let base = block * BLOCK;
            let place = match slot(&self.table.borrow(), block) {
                0 if !asked.write => Place::At { file: 0, offset: base },
                0 => {
                    let fill = Fill::From { file: 0, offset: base };
                    Place::New { file: 1, offset: (self.give(block)? - 1) * BLOCK, fill }
                }
                slot => Place::At { file: 1, offset: (slot - 1) * BLOCK },
            };
            Ok(Extent { len: BLOCK, place })
        };
        (asked.offset / BLOCK..(asked.offset + asked.len) / BLOCK).map(extent).collect()
    }

    async fn flush(&self, moved: &[Range<u64>]) -> io::Result<()> {
        let mut sectors = BTreeSet::new();
        for block in moved.iter().flat_map(|part| part.start / BLOCK..part.end / BLOCK) {
            let slot = self.given.borrow_mut().remove(&block).unwrap_or_default();
            self.table.borrow_mut()[block as usize * 8..][..8].copy_from_slice(&slot.to_le_bytes());
            sectors.insert(block as usize * 8 / 512 * 512);
        }
        for at in sectors {
            let sector = self.table.borrow()[at..at + 512].to_vec();
            self.file.write_at(&sector, at as u64).await?;
        }
        self.file.sync().await
    }
}

pub fn target(base: &str, store: &str, table: &str) -> io::Result<Target> {
    let blocks = fs::metadata(base)?.len() / BLOCK;
    let shape = Shape { size: blocks * BLOCK, granule: BLOCK };
    let map = async move |files, _| Cowd::open(files, blocks).await;
    Ok(Target::map("cowd", shape, map).data(base, Read).data(store, Write).file(table, Write))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [base, store, table, socket] = &names[..] else { return Err("four names".into()) };
    let make = |path| fs::File::options().append(true).create(true).open(path);
    make(table).and(make(store))?.set_len(fs::metadata(base)?.len())?;
    let yard = Yard::start(1)?;
    yard.serve(Disk::target("cowd", target(base, store, table)?).vhost_user(socket))?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
