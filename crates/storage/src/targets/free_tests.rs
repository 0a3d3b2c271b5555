//! Tests of maps that free parts, and of maps that wait for invalidations, on simulated disks.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use blockyard_ring::join;

use super::super::map::{Boxed, Fill, Map, Question};
use super::super::shape::{Access, Shape};
use super::super::target::Handle;
use super::super::{Direct, Mapped};
use super::*;
use crate::sim::{Sim, SimConfig, SimDisk, SimImage, yield_now};

const GRANULE: u64 = 512;
const SHAPE: Shape = Shape { size: 20_000 * GRANULE, granule: GRANULE };

/// What becomes of parts that are discarded.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// They stay where they are.
    Stays,
    /// They are free.
    Frees,
    /// The map does not implement it. Each of its flushes waits for an invalidation.
    Silent,
    /// It frees more than the range.
    Lies,
    /// They are free. The map answers a read before, with more than its range, but the answer comes
    /// after.
    Late,
    /// The map implements neither discards nor flushes.
    Unable,
}

/// Every part lies at its own offset of the file, in granules.
struct Same {
    kind: Kind,
    handle: Handle,
    moved: RefCell<std::collections::BTreeSet<u64>>,
    flushes: Rc<Cell<usize>>,
    discards: Rc<RefCell<Vec<Discard>>>,
    has_answered: Cell<bool>,
}

impl Map for Same {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let extent = |at: u64| {
            let offset = at * GRANULE;
            let place = match (asked.write, self.moved.borrow().contains(&at)) {
                (_, true) => Place::At { file: 0, offset },
                (true, false) => Place::New { file: 0, offset, fill: Fill::Zero },
                (false, false) => Place::Zero,
            };
            Extent { len: GRANULE, place }
        };
        let first = asked.offset / GRANULE;
        let more = if self.kind == Kind::Late && !asked.write { 40 } else { 0 };
        let extents = (first..first + asked.len / GRANULE + more).map(extent).collect();
        self.has_answered.set(more > 0);
        for _ in 0..2 * more {
            yield_now().await;
        }
        Ok(extents)
    }

    async fn flush(&self, moved: &[Range<u64>]) -> io::Result<()> {
        self.flushes.set(self.flushes.get() + 1);
        if self.kind == Kind::Unable {
            return Err(io::ErrorKind::Unsupported.into());
        }
        for range in moved {
            self.moved.borrow_mut().extend(range.start / GRANULE..range.end / GRANULE);
        }
        if self.kind == Kind::Silent {
            self.handle.invalidate(0..SHAPE.size).await;
        }
        Ok(())
    }

    async fn discard(&self, asked: Discard) -> io::Result<Vec<Extent>> {
        self.discards.borrow_mut().push(asked);
        // One granule at a time, so that Blockyard asks again.
        let (at, offset) = (asked.offset / GRANULE, asked.offset);
        let place = match self.kind {
            Kind::Silent | Kind::Unable => return Err(io::ErrorKind::Unsupported.into()),
            Kind::Stays => Place::At { file: 0, offset },
            Kind::Frees | Kind::Lies | Kind::Late => {
                while self.kind == Kind::Late && !self.has_answered.get() {
                    yield_now().await;
                }
                self.moved.borrow_mut().remove(&at);
                Place::Zero
            }
        };
        let len = if self.kind == Kind::Lies { asked.len + GRANULE } else { GRANULE };
        Ok(vec![Extent { len, place }])
    }
}

/// The disk of a map, and what the map counts.
struct Rig {
    disk: Rc<Mapped<SimDisk, Direct>>,
    handle: Handle,
    flushes: Rc<Cell<usize>>,
    discards: Rc<RefCell<Vec<Discard>>>,
}

fn with_map<F: Future<Output = ()> + 'static>(kind: Kind, work: impl FnOnce(Rig) -> F + 'static) {
    let image = SimImage::zeroed(SHAPE.size);
    let file = SimDisk::new(image, SimConfig::new(1));
    let (flushes, discards) = (Rc::default(), Rc::default());
    let counts = (Rc::clone(&flushes), Rc::clone(&discards));
    let run = async move {
        let kept = Rc::new(OnceCell::<Handle>::new());
        let keeps = kept.clone();
        let make = async move |handle: Handle| {
            let _ = keeps.set(handle.clone());
            let (flushes, discards) = counts;
            let (moved, has_answered) = Default::default();
            Ok(Direct::new(Same { kind, handle, moved, flushes, discards, has_answered }))
        };
        let disk = Mapped::simulated(SHAPE, vec![(file, Access::Write)], make).await.unwrap();
        let (disk, handle) = (Rc::new(disk), kept.get().unwrap().clone());
        work(Rig { disk, handle, flushes, discards }).await;
    };
    Sim::new(1).step_limit(u64::MAX).block_on(run).unwrap();
}

async fn write(disk: &Mapped<SimDisk, Direct>, offset: u64, bytes: &[u8]) {
    disk.write(Segments::from_bytes(bytes), offset, false).await.1.unwrap();
}

async fn read(disk: &Mapped<SimDisk, Direct>, offset: u64, len: usize) -> Vec<u8> {
    let (segments, result) = disk.read(Segments::buffer(len), offset).await;
    result.unwrap();
    let mut bytes = vec![0; len];
    segments.copy_out(0, &mut bytes);
    bytes
}

#[test]
fn a_map_may_wait_for_an_invalidation_in_each_flush() {
    with_map(Kind::Silent, async |Rig { disk, flushes, .. }| {
        // So many parts that the next write flushes first.
        for part in 0..16384 {
            write(&disk, part * 512, &[1; 512]).await;
        }
        assert_eq!(flushes.get(), 0);
        write(&disk, 16384 * 512, &[2; 512]).await;
        assert_eq!(flushes.get(), 1);
        disk.sync().await.unwrap();
        assert_eq!(flushes.get(), 2);
        assert_eq!(read(&disk, 16383 * 512, 1024).await, [[1; 512], [2; 512]].concat());
    });
}

#[test]
fn a_failed_flush_of_the_engine_is_reported_once_and_for_all() {
    with_map(Kind::Unable, async |Rig { disk, .. }| {
        for part in 0..16384 {
            write(&disk, part * 512, &[1; 512]).await;
        }
        assert!(disk.lost().is_none());
        let written = disk.write(Segments::from_bytes(&[2; 512]), 16384 * 512, false).await.1;
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert!(disk.lost().unwrap().to_string().starts_with("an earlier flush failed"));
    });
}

#[test]
fn freed_parts_read_as_zeroes_and_the_next_flush_reaches_the_map() {
    with_map(Kind::Frees, async |Rig { disk, flushes, discards, .. }| {
        write(&disk, 0, &[7; 4096]).await;
        disk.zero(256, 1024, true).await.unwrap();
        // The new places are durable before the map frees them. What is no whole granule is
        // written.
        assert_eq!(flushes.get(), 1);
        let asked = |offset, len, zero| Discard { offset, len, zero };
        assert_eq!(*discards.borrow(), [asked(512, 512, true)]);
        let mut expected = vec![7; 4096];
        expected[256..1280].fill(0);
        assert_eq!(read(&disk, 0, 4096).await, expected);
        disk.discard(2048, 1536).await.unwrap();
        let asked = [2048, 2560, 3072].map(|at| asked(at, 3584 - at, false));
        assert_eq!(discards.borrow()[1..], asked);
        expected[2048..3584].fill(0);
        assert_eq!(read(&disk, 0, 4096).await, expected);
        disk.sync().await.unwrap();
        disk.sync().await.unwrap();
        assert_eq!(flushes.get(), 2, "nothing has changed since the first flush");
        write(&disk, 2048, &[9; 512]).await;
        expected[2048..2560].fill(9);
        assert_eq!(read(&disk, 0, 4096).await, expected);
        assert_eq!(
            disk.zero_fast(100, 1024, true).await.unwrap_err().kind(),
            io::ErrorKind::Unsupported
        );
        assert_eq!(
            disk.discard(SHAPE.size, 512).await.unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    });
}

#[test]
fn an_invalidation_makes_the_next_flush_reach_the_map() {
    with_map(Kind::Frees, async |Rig { disk, handle, flushes, .. }| {
        write(&disk, 0, &[7; 512]).await;
        for _ in 0..2 {
            disk.sync().await.unwrap();
            assert_eq!(flushes.get(), 1);
        }
        handle.invalidate(4096..8192).await;
        for _ in 0..2 {
            disk.sync().await.unwrap();
            assert_eq!(flushes.get(), 2);
        }
        // A durable write needs that flush, too, although its own place is known.
        handle.invalidate(4096..8192).await;
        for _ in 0..2 {
            disk.write(Segments::from_bytes(&[8; 512]), 0, true).await.1.unwrap();
            assert_eq!(flushes.get(), 3);
        }
    });
}

#[test]
fn parts_that_stay_are_freed_in_their_file() {
    with_map(Kind::Stays, async |Rig { disk, .. }| {
        write(&disk, 0, &[7; 4096]).await;
        disk.zero(512, 1024, false).await.unwrap();
        let mut expected = vec![7; 4096];
        expected[512..1536].fill(0);
        assert_eq!(read(&disk, 0, 4096).await, expected);
        disk.discard(2048, 512).await.unwrap();
        assert_eq!(read(&disk, 2048, 512).await, [0; 512]);
    });
}

#[test]
fn an_answer_from_before_a_discard_hides_no_part_of_it() {
    with_map(Kind::Late, async |Rig { disk, discards, .. }| {
        write(&disk, 5120, &[7; 512]).await;
        disk.sync().await.unwrap();
        let reads = async {
            while discards.borrow().is_empty() {
                yield_now().await;
            }
            disk.read(Segments::buffer(512), 0).await.1.map(|_| ())
        };
        let both: [Boxed<'_, io::Result<()>>; 2] =
            [Box::pin(disk.zero(5120, 512, true)), Box::pin(reads)];
        join::all(2, both).await.unwrap();
        assert_eq!(read(&disk, 5120, 512).await, [0; 512]);
    });
}

#[test]
fn a_map_without_an_answer_is_asked_once() {
    with_map(Kind::Silent, async |Rig { disk, discards, .. }| {
        write(&disk, 0, &[7; 4096]).await;
        for _ in 0..2 {
            let refused = disk.zero(0, 4096, true).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
            assert_eq!(discards.borrow().len(), 1);
        }
        assert_eq!(read(&disk, 0, 4096).await, [7; 4096]);
    });
}

#[test]
fn a_map_that_frees_too_much_is_refused() {
    with_map(Kind::Lies, async |Rig { disk, .. }| {
        let refused = disk.zero(0, 1024, true).await.unwrap_err().to_string();
        assert!(refused.contains("behind the range"), "{refused}");
    });
}
