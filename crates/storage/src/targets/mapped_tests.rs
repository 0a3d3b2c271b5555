//! Tests of the data path of maps.

use std::rc::Rc;

use super::super::ask::Direct;
use super::super::map::Map;
use super::super::shape::Shape;
use super::*;
use crate::sim::Sim;

#[test]
fn extents_that_follow_one_another_are_one_operation() {
    let at = |file, offset| Extent { len: 4096, place: Place::At { file, offset } };
    let new = |offset, from| {
        let fill = Fill::From { file: 0, offset: from };
        Extent { len: 4096, place: Place::New { file: 1, offset, fill } }
    };
    let zero = Extent { len: 4096, place: Place::Zero };
    let extents = vec![
        at(0, 0),
        at(0, 4096),
        at(1, 8192),
        at(1, 4096),
        zero,
        zero,
        new(0, 8192),
        new(4096, 12288),
        new(8192, 0),
    ];
    let joined = Extent::joined::<()>(extents.into_iter().map(Ok));
    let lens: Vec<_> = joined.unwrap().iter().map(|extent| extent.len / 4096).collect();
    assert_eq!(lens, [2, 1, 1, 2, 2, 1]);
}

/// A data file without data. It counts its durable writes and its syncs.
struct Counted {
    direct: bool,
    counts: Rc<Cell<[usize; 2]>>,
}

impl Counted {
    fn count(&self, writes: usize, syncs: usize) {
        let [all_writes, all_syncs] = self.counts.get();
        self.counts.set([all_writes + writes, all_syncs + syncs]);
    }
}

impl Storage for Counted {
    async fn read(&self, segments: Segments, _: u64) -> (Segments, io::Result<usize>) {
        let len = segments.len();
        (segments, Ok(len))
    }

    async fn write(
        &self,
        segments: Segments,
        _: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        self.count(durable.into(), 0);
        let len = segments.len();
        (segments, Ok(len))
    }

    async fn sync(&self) -> io::Result<()> {
        self.count(0, 1);
        Ok(())
    }

    async fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    async fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Ok(())
    }

    async fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(4096)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { direct: self.direct, fixed_length: true }
    }
}

/// Each granule lies in a file of its own.
struct Apart;

impl Map for Apart {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let file = (asked.offset / 4096) as usize;
        Ok(vec![Extent { len: 4096, place: Place::At { file, offset: 0 } }])
    }

    async fn flush(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_durable_write_to_the_page_cache_shares_the_sync_of_the_disk() {
    let shape = Shape { size: 8192, granule: 4096 };
    let capabilities = Capabilities { direct: true, fixed_length: true };
    let core = Core::with("mixed".into(), shape, 1, 2, Geometry::default(), capabilities);
    let counts: [Rc<Cell<[usize; 2]>>; 2] = Default::default();
    let file = |(direct, counts): (bool, &Rc<Cell<[usize; 2]>>)| Counted {
        direct,
        counts: counts.clone(),
    };
    let files: Vec<_> = [true, false].into_iter().zip(&counts).map(file).collect();
    let disk = Mapped::new(&Arc::new(core), files, &[true; 2], Direct::new(Apart));
    let writes = async move {
        // The map says where the granules lie. Such a write syncs the disk.
        for offset in [0, 4096] {
            disk.write(Segments::buffer(4096), offset, true).await.1.unwrap();
        }
        // Now the places are known.
        for offset in [0, 4096] {
            disk.write(Segments::buffer(4096), offset, true).await.1.unwrap();
        }
    };
    Sim::new(1).block_on(writes).unwrap();
    assert_eq!(counts.each_ref().map(|counts| counts.get()), [[1, 3], [0, 3]]);
}
