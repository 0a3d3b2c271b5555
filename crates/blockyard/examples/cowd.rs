//! cowd: copy-on-write over any two files or devices. Its table survives power cuts.
//!
//! `cowd BASE STORE TABLE SOCKET` serves BASE by vhost-user (SOCKET is `ublk`: by ublk). Changes go
//! to STORE. TABLE (empty at first) has for each block: 0, its number in STORE plus 1, or FREED.

use std::{cell::RefCell, collections::*, fs, io, io::Seek, ops::Range};

use blockyard::{Access::*, *};

pub const BLOCK: u64 = 4 << 10;
const FREED: u64 = u64::MAX;

const SLOTS: usize = 64; // of a sector of the table

pub struct Cowd {
    file: OwnFile,
    table: RefCell<Vec<u64>>,
    /// Numbers of the sectors of the table that are newer than its file.
    changed: RefCell<BTreeSet<usize>>,
    /// For each block: the number of its place that is not in the table yet, or 0.
    given: RefCell<Vec<u64>>,
    /// Numbers of the places that nothing uses, the next one last.
    free: RefCell<Vec<u64>>,
    /// Places that nothing uses after the next flush, by the block that had it.
    freed: RefCell<BTreeMap<u64, u64>>,
}

impl Cowd {
    pub async fn open(files: Files, blocks: usize) -> io::Result<Self> {
        let (file, mut bytes) = (files.own[0].clone(), vec![0; blocks * 8]);
        file.read_at(&mut bytes, 0).await?;
        file.write_at(&bytes, 0).await?; // Now, not in a flush, the host may be full.
        file.sync().await?; // What it calls free may be used at once.
        let table: Vec<_> = bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let used: BTreeSet<&u64> = table.iter().collect();
        let free = (1..=files.data_len[1] / BLOCK).rev().filter(|slot| !used.contains(slot));
        let (free, (changed, freed)) = (RefCell::new(free.collect()), Default::default());
        Ok(Cowd { file, table: table.into(), changed, given: vec![0; blocks].into(), free, freed })
    }

    /// Returns the place of a block that is about to change: always the same until it is durable.
    fn give(&self, block: u64, fill: Fill) -> io::Result<Place> {
        let at = &mut self.given.borrow_mut()[block as usize];
        let old = Some(*at).filter(|at| *at > 0).or_else(|| self.freed.borrow_mut().remove(&block));
        *at = old.or_else(|| self.free.borrow_mut().pop()).ok_or(io::ErrorKind::StorageFull)?;
        Ok(Place::New { file: 1, offset: (*at - 1) * BLOCK, fill })
    }

    fn set(&self, block: u64, slot: u64) -> u64 {
        self.changed.borrow_mut().insert(block as usize / SLOTS);
        std::mem::replace(&mut self.table.borrow_mut()[block as usize], slot)
    }
}

impl Map for Cowd {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let extent = |block: u64| {
            let (base, slot) = (block * BLOCK, self.table.borrow()[block as usize]);
            let place = match slot {
                0 if asked.write => self.give(block, Fill::From { file: 0, offset: base })?,
                0 => Place::At { file: 0, offset: base },
                FREED if asked.write => self.give(block, Fill::Zero)?,
                FREED => Place::Zero,
                slot => Place::At { file: 1, offset: (slot - 1) * BLOCK },
            };
            Ok(Extent { len: BLOCK, place })
        };
        let count = asked.len / BLOCK + if asked.write { 0 } else { 256 }; // read ahead
        let blocks = asked.offset / BLOCK..self.table.borrow().len() as u64;
        Extent::joined(blocks.take(count as usize).map(extent))
    }

    async fn flush(&self, moved: &[Range<u64>]) -> io::Result<()> {
        for block in moved.iter().flat_map(|part| part.start / BLOCK..part.end / BLOCK) {
            self.set(block, std::mem::take(&mut self.given.borrow_mut()[block as usize]));
        }
        for run in Vec::from_iter(self.changed.take()).chunk_by(|a, b| a + 1 == *b) {
            let (from, len) = (run[0] * SLOTS, run.len() * SLOTS);
            let slots: Vec<_> = self.table.borrow().iter().skip(from).take(len).copied().collect();
            let bytes: Vec<u8> = slots.into_iter().flat_map(u64::to_le_bytes).collect();
            self.file.write_at(&bytes, from as u64 * 8).await?;
        }
        self.file.sync().await?;
        self.free.borrow_mut().extend(self.freed.take().into_values());
        Ok(())
    }

    async fn discard(&self, asked: Discard) -> io::Result<Vec<Extent>> {
        for block in asked.offset / BLOCK..(asked.offset + asked.len) / BLOCK {
            let old = Some(self.set(block, FREED)).filter(|old| ![0, FREED].contains(old));
            self.freed.borrow_mut().extend(old.map(|old| (block, old)));
        }
        Ok(vec![Extent { len: asked.len, place: Place::Zero }])
    }
}

pub fn target(base: &str, store: &str, table: &str) -> io::Result<Target> {
    let size = fs::File::open(base)?.seek(io::SeekFrom::End(0))?;
    let shape = Shape { size, granule: BLOCK };
    let map = async move |files, _| Cowd::open(files, (size / BLOCK) as usize).await;
    Ok(Target::map("cowd", shape, map).data(base, Read).data(store, Write).file(table, Write))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [base, store, table, socket] = &names[..] else { return Err("four names".into()) };
    let yard = Yard::start(1)?;
    let disk = Disk::target("cowd", target(base, store, table)?);
    yard.serve(if socket == "ublk" { disk.ublk(None) } else { disk.vhost_user(socket) })?;
    println!("{}", yard.device("cowd")?.unwrap_or_else(|| socket.into()).display());
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
