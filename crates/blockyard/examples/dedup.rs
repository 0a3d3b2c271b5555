//! dedup: read-only bases that share one store of blocks.
//!
//! `dedup pack IMAGE INDEX STORE` adds the blocks of an image to the store, each different block
//! once; its last block must be whole. `dedup serve SOCKET INDEX STORE` serves such an image on a
//! vhost-user socket. Several servers, or several disks of one, read the same store. INDEX has
//! eight bytes for each block: 0 for zeroes, or the block's number in STORE plus 1.

use std::collections::HashMap;
use std::io::{self, BufRead, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::{fs, path::Path};

use blockyard::{Access, Disk, Extent, Map, Place, Question, Shape, Target, Yard};

pub const BLOCK: usize = 4096;

pub struct Index(Vec<u8>);

impl Index {
    fn place(&self, block: usize) -> Place {
        match u64::from_le_bytes(self.0[block * 8..][..8].try_into().unwrap_or_default()) {
            0 => Place::Zero,
            number => Place::At { file: 0, offset: (number - 1) * BLOCK as u64 },
        }
    }
}

impl Map for Index {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        if asked.write {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let blocks = asked.offset as usize / BLOCK..(asked.offset + asked.len) as usize / BLOCK;
        Ok(blocks.map(|block| Extent { len: BLOCK as u64, place: self.place(block) }).collect())
    }

    async fn flush(&self, _moved: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

/// Adds an image to the store. Returns the number of blocks that the store did not have.
pub fn pack(image: &Path, index: &Path, store: &Path) -> io::Result<u64> {
    let store = fs::File::options().read(true).append(true).create(true).open(store)?;
    store.lock()?; // Another `pack` would give its blocks the same numbers.
    let (mut block, mut known) = (vec![0; BLOCK], HashMap::<Vec<u8>, u64>::new());
    let before = store.metadata()?.len() / BLOCK as u64;
    store.set_len(before * BLOCK as u64)?; // An earlier run may have been cut off in a block.
    let mut count = before;
    for number in 0..before {
        store.read_exact_at(&mut block, number * BLOCK as u64)?;
        known.insert(block.clone(), number + 1);
    }
    let (mut image, mut entries) = (io::BufReader::new(fs::File::open(image)?), Vec::new());
    while !image.fill_buf()?.is_empty() {
        image.read_exact(&mut block)?;
        let number = match block.iter().all(|byte| *byte == 0) {
            true => 0,
            false => *known.entry(block.clone()).or_insert(count + 1),
        };
        if number > count {
            (&store).write_all(&block)?;
            count += 1;
        }
        entries.extend_from_slice(&number.to_le_bytes());
    }
    store.sync_all()?;
    // The index is there as a whole or not at all.
    let new = format!("{}.new", index.display());
    fs::write(&new, entries)?;
    fs::File::open(&new)?.sync_all()?;
    fs::rename(&new, index)?;
    Ok(count - before)
}

pub fn disk(name: &str, index: &Path, store: &Path) -> io::Result<Disk> {
    let entries = fs::read(index)?;
    let shape = Shape { size: (entries.len() / 8 * BLOCK) as u64, granule: BLOCK as u64 };
    let target = Target::map(name, shape, async move |_, _| Ok(Index(entries)));
    Ok(Disk::target(name, target.data(store, Access::Read)).read_only())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["pack", image, index, store] => {
            pack(image.as_ref(), index.as_ref(), store.as_ref())?;
        }
        ["serve", socket, index, store] => {
            let yard = Yard::start(1)?;
            yard.serve(disk("dedup", index.as_ref(), store.as_ref())?.vhost_user(socket))?;
            io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
        }
        _ => return Err("dedup pack IMAGE INDEX STORE, or dedup serve SOCKET INDEX STORE".into()),
    }
    Ok(())
}
