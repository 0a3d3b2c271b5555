//! The harness runs maps that move parts and use the old places again.

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
