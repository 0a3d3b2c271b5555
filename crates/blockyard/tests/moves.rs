//! The harness runs maps that move parts and use the old places again, and maps that move parts
//! without a write.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::task::{Context, Waker};

use blockyard::testing::PowerCuts;
use blockyard::{Access, Extent, Files, Fill, Handle, Map, OwnFile, Place, Question, Shape};

/// Size of a sector, so that no part keeps anything of its old place.
const BLOCK: u64 = 512;
const BLOCKS: u64 = 32;
const SIZE: u64 = BLOCKS * BLOCK;

/// Gives each part a new place after each flush. The data file has two places for each part.
struct Moving {
    handle: Handle,
    file: OwnFile,
    /// The place of each part.
    table: RefCell<Vec<u64>>,
    /// For each part: its place that is not in the table yet.
    given: RefCell<Vec<Option<u64>>>,
    /// Places that nothing uses.
    free: RefCell<Vec<u64>>,
    waits: bool,
}

impl Moving {
    async fn open(files: Files, handle: Handle, waits: bool) -> io::Result<Self> {
        let (file, mut bytes) = (files.own[0].clone(), vec![0; BLOCKS as usize * 8]);
        file.read_at(&mut bytes, 0).await?;
        let table: Vec<_> = bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let free = (0..2 * BLOCKS).filter(|place| !table.contains(place)).collect();
        let given = vec![None; BLOCKS as usize].into();
        Ok(Moving { handle, file, table: table.into(), given, free: RefCell::new(free), waits })
    }

    fn place(&self, block: usize, write: bool) -> io::Result<Place> {
        let at = |place: u64| (0, place * BLOCK);
        let (file, offset) = at(self.table.borrow()[block]);
        if !write {
            return Ok(Place::At { file, offset });
        }
        let given = &mut self.given.borrow_mut()[block];
        let new = given.or_else(|| self.free.borrow_mut().pop());
        *given = new;
        let (to, at) = at(new.ok_or(io::ErrorKind::StorageFull)?);
        Ok(Place::New { file: to, offset: at, fill: Fill::From { file, offset } })
    }
}

impl Map for Moving {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let blocks = asked.offset / BLOCK..(asked.offset + asked.len) / BLOCK;
        let extent =
            |block: u64| Ok(Extent { len: BLOCK, place: self.place(block as usize, asked.write)? });
        blocks.map(extent).collect()
    }

    async fn flush(&self, moved: &[Range<u64>]) -> io::Result<()> {
        let mut old = Vec::new();
        for block in moved.iter().flat_map(|part| part.start / BLOCK..part.end / BLOCK) {
            let new = self.given.borrow_mut()[block as usize].take();
            let entry = &mut self.table.borrow_mut()[block as usize];
            old.extend(new.map(|new| std::mem::replace(entry, new)));
        }
        let bytes: Vec<u8> = self.table.borrow().iter().flat_map(|at| at.to_le_bytes()).collect();
        self.file.write_at(&bytes, 0).await?;
        self.file.sync().await?;
        let mut forgotten = pin!(self.handle.invalidate(0..SIZE));
        if self.waits {
            forgotten.await;
        } else {
            // It has begun: later requests ask again. Earlier ones may still use old answers.
            let _ = forgotten.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        self.free.borrow_mut().extend(old);
        Ok(())
    }
}

fn rig() -> PowerCuts {
    let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 512 * 7 + at % 251) as u8).collect();
    let table = (0..BLOCKS).flat_map(u64::to_le_bytes).chain([0; 256]).collect();
    PowerCuts::of(Shape { size: SIZE, granule: BLOCK })
        .data([bytes.clone(), vec![0x55; SIZE as usize]].concat(), Access::Write)
        .file(table)
        .holds(bytes)
}

#[test]
fn a_map_that_waits_for_its_invalidations_may_use_old_places_again() {
    let make = async |files, handle| Moving::open(files, handle, true).await;
    rig().run(1, 300, make).unwrap();
}

#[test]
fn a_map_that_does_not_wait_for_its_invalidations_is_found() {
    let make = async |files, handle| Moving::open(files, handle, false).await;
    let broken = rig().run(1, 600, make).unwrap_err().to_string();
    assert!(broken.contains("sector"), "{broken}");
}

/// Gives a place to all parts that have none when it opens. Its table says so after a flush.
struct Placing {
    file: OwnFile,
    /// Number of starts, and then the place of each part. 0: it has none, and is all zeroes.
    table: RefCell<Vec<u64>>,
}

impl Placing {
    async fn open(files: Files, handle: Handle, invalidates: bool) -> io::Result<Self> {
        let (file, mut bytes) = (files.own[0].clone(), vec![0; (BLOCKS as usize + 1) * 8]);
        file.read_at(&mut bytes, 0).await?;
        let mut table: Vec<_> =
            bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        // A place that was lost with the table may have data. Each start has places of its own.
        table[0] += 1;
        let placing = Placing { file, table: table.clone().into() };
        placing.keep().await?;
        let first = table[0] * BLOCKS;
        for (place, new) in table[1..].iter_mut().zip(first..) {
            if *place == 0 {
                *place = new;
            }
        }
        *placing.table.borrow_mut() = table;
        if invalidates {
            handle.invalidate(0..SIZE).await;
        }
        Ok(placing)
    }

    /// Makes the table durable.
    async fn keep(&self) -> io::Result<()> {
        let bytes: Vec<u8> = self.table.borrow().iter().flat_map(|at| at.to_le_bytes()).collect();
        self.file.write_at(&bytes, 0).await?;
        self.file.sync().await
    }
}

impl Map for Placing {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let blocks = asked.offset / BLOCK..(asked.offset + asked.len) / BLOCK;
        let extent = |block: u64| {
            let offset = self.table.borrow()[block as usize + 1] * BLOCK;
            Extent { len: BLOCK, place: Place::At { file: 0, offset } }
        };
        Ok(blocks.map(extent).collect())
    }

    async fn flush(&self, _moved: &[Range<u64>]) -> io::Result<()> {
        self.keep().await
    }
}

fn placing() -> PowerCuts {
    // More places than a run has starts.
    PowerCuts::of(Shape { size: SIZE, granule: BLOCK })
        .data(vec![0; 8 * SIZE as usize], Access::Write)
        .file(vec![0; 512])
}

#[test]
fn a_map_that_moves_parts_and_invalidates_them_loses_no_flushed_write() {
    let make = async |files, handle| Placing::open(files, handle, true).await;
    placing().run(1, 300, make).unwrap();
}

#[test]
fn a_map_that_moves_parts_without_an_invalidation_is_found() {
    let make = async |files, handle| Placing::open(files, handle, false).await;
    let broken = placing().run(1, 300, make).unwrap_err().to_string();
    assert!(broken.contains("sector"), "{broken}");
}
