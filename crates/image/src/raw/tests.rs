use super::*;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use blockyard_ring::{GuestMemory, Region};
use blockyard_storage::sim::{OpKind, Sim, SimConfig, SimDisk, SimImage, yield_now};

const DIRECT: Alignment = Alignment { memory_align: 512, offset_align: 512 };
const BLOCKS: Alignment = Alignment { memory_align: 512, offset_align: 4096 };

/// A file with garbage in its last block behind the file's end, as a device may have. It records
/// the calls.
#[derive(Clone, Default)]
struct Junk {
    bytes: Rc<RefCell<Vec<u8>>>,
    calls: Rc<RefCell<Vec<String>>>,
    whole_blocks: u64,
    resized_to: Rc<Cell<Option<u64>>>,
    /// Whether other tasks may run before the length is read or set.
    has_slow_len: bool,
}

impl Storage for Junk {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let bytes = self.bytes.borrow();
        segments.copy_in(0, &vec![0xee; segments.len()]);
        let n = bytes.len().saturating_sub(offset as usize).min(segments.len());
        segments.copy_in(0, &bytes[(offset as usize).min(bytes.len())..][..n]);
        (segments, Ok(n))
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        self.calls.borrow_mut().push(format!("write {offset}+{} {durable}", segments.len()));
        let mut bytes = self.bytes.borrow_mut();
        let end = offset as usize + segments.len();
        let len = bytes.len().max(end);
        bytes.resize(len, 0);
        segments.copy_out(0, &mut bytes[offset as usize..end]);
        if let Some(len) = self.resized_to.take() {
            bytes.resize(len as usize, 0);
        }
        let n = segments.len();
        (segments, Ok(n))
    }

    async fn sync(&self) -> io::Result<()> {
        self.calls.borrow_mut().push("sync".into());
        Ok(())
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.calls.borrow_mut().push(format!("discard {offset}+{len}"));
        self.demand(offset, len)
    }

    async fn zero(&self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        self.calls.borrow_mut().push(format!("zero {offset}+{len}"));
        self.demand(offset, len)?;
        self.bytes.borrow_mut()[offset as usize..][..len as usize].fill(0);
        Ok(())
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.let_others_run().await;
        self.bytes.borrow_mut().resize(len as usize, 0);
        Ok(())
    }

    async fn len(&self) -> io::Result<u64> {
        self.let_others_run().await;
        Ok(self.bytes.borrow().len() as u64)
    }
}

impl Junk {
    fn of(len: usize) -> Self {
        Junk { bytes: Rc::new(RefCell::new(vec![7; len])), whole_blocks: 1, ..Junk::default() }
    }

    fn demand(&self, offset: u64, len: u64) -> io::Result<()> {
        let whole = (offset | len).is_multiple_of(self.whole_blocks);
        if whole { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    async fn let_others_run(&self) {
        if self.has_slow_len {
            yield_now().await;
        }
    }

    fn calls(&self) -> Vec<String> {
        self.calls.take()
    }
}

fn run<T: 'static>(work: impl Future<Output = T> + 'static) -> T {
    Sim::new(1).block_on(work).unwrap()
}

async fn take(raw: &Raw, offset: u64, len: usize) -> Vec<u8> {
    let (segments, result) = raw.read(Segments::buffer(len), offset).await;
    result.unwrap();
    let mut bytes = vec![0; len];
    segments.copy_out(0, &mut bytes);
    bytes
}

#[test]
fn bytes_behind_the_end_of_a_file_are_never_read_nor_written() {
    for shape in [DIRECT, BLOCKS] {
        let junk = Junk::of(5000);
        let raw = Raw::on(Store::other(junk.clone()), shape);
        run(async move {
            let expected: Vec<u8> = [vec![7; 392], vec![0; 120]].concat();
            assert_eq!(take(&raw, 4608, 512).await, expected, "{shape:?}");
            raw.write(Segments::from_bytes(&[9; 100]), 4608, false).await.1.unwrap();
        });
        let bytes = junk.bytes.take();
        assert!(!bytes.contains(&0xee), "{shape:?}");
        assert_eq!((bytes.len(), bytes[4608], bytes[4708]), (5000, 9, 7), "{shape:?}");
    }
}

#[test]
fn a_whole_block_write_at_the_end_keeps_the_length() {
    let junk = Junk::of(9 * 512);
    let raw = Raw::on(Store::other(junk.clone()), BLOCKS);
    let resized = junk.resized_to.clone();
    run(async move {
        raw.write(Segments::from_bytes(&[9; 512]), 4096, true).await.1.unwrap();
        assert_eq!(raw.storage().len().await.unwrap(), 9 * 512);
        // If another process resizes the file meanwhile, its size wins.
        resized.set(Some(1 << 20));
        raw.write(Segments::from_bytes(&[9; 512]), 4096, true).await.1.unwrap();
        assert_eq!(raw.storage().len().await.unwrap(), 1 << 20);
    });
    assert_eq!(junk.calls(), ["write 4096+4096 true"; 2]);
}

/// A write of part of the last block makes the file longer, and then shorter again.
#[test]
fn a_write_of_the_last_block_does_not_undo_a_growth() {
    for size in [9 * 512 + 512, 8192, 1 << 20] {
        for turns in 0..12 {
            let junk = Junk { has_slow_len: true, ..Junk::of(9 * 512) };
            let (raw, sim) = (Raw::on(Store::other(junk.clone()), BLOCKS), Sim::new(1));
            let writing = raw.clone();
            let write = sim.spawn(async move {
                writing.write(Segments::from_bytes(&[9; 512]), 4096, true).await.1.unwrap()
            });
            let grow = async move {
                for _ in 0..turns {
                    yield_now().await;
                }
                assert_eq!(raw.grow(size).await.unwrap(), size);
                write.await;
            };
            sim.block_on(grow).unwrap();
            assert_eq!(junk.bytes.borrow().len() as u64, size, "after {turns} turns");
            assert_eq!(junk.bytes.borrow()[4096..4608], [9; 512]);
        }
    }
}

#[test]
fn a_longer_file_does_not_become_shorter() {
    let junk = Junk::of(9 * 512);
    let raw = Raw::on(Store::other(junk.clone()), BLOCKS);
    assert_eq!(run(async move { raw.grow(512).await.unwrap() }), 9 * 512);
    assert_eq!(junk.bytes.borrow().len(), 9 * 512);
}

#[test]
fn a_block_device_gets_requests_of_whole_blocks_only() {
    let junk = Junk { whole_blocks: 4096, ..Junk::of(1 << 16) };
    let raw = Raw {
        unit: 4096,
        ..Raw::on(Store::other(junk.clone()), Alignment { memory_align: 1, offset_align: 1 })
    };
    let (calls, check) = (junk.clone(), junk.clone());
    run(async move {
        raw.discard(512, 12288).await.unwrap();
        raw.discard(512, 4096).await.unwrap();
        assert_eq!(calls.calls(), ["discard 4096+8192"]);
        raw.write_zeroes(512, 12288, true).await.unwrap();
        assert_eq!(
            calls.calls(),
            ["zero 4096+8192", "write 512+3584 false", "write 12288+512 false"]
        );
        raw.write_zeroes(20480 + 512, 1024, true).await.unwrap();
        assert_eq!(calls.calls(), ["write 20992+1024 false"]);
    });
    let bytes = check.bytes.take();
    let zeroes: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i] == 0).collect();
    assert_eq!(zeroes, (512..12800).chain(20992..22016).collect::<Vec<_>>());
}

#[test]
fn written_zeroes_come_in_aligned_pieces() {
    let disk = SimDisk::new(SimImage::zeroed(8 << 20), SimConfig::new(1));
    disk.fail(
        blockyard_storage::sim::Fault::new(OpKind::Zero, io::ErrorKind::Unsupported).always(),
    );
    let raw = Raw::on(disk.clone(), BLOCKS);
    run(async move { raw.write_zeroes(4096, 3 << 20, false).await.unwrap() });
    let mut pieces: Vec<_> =
        disk.trace().iter().filter(|t| t.kind == OpKind::Write).map(|t| t.offset).collect();
    pieces.dedup();
    assert_eq!(pieces, [4096, 1 << 20, 2 << 20, 3 << 20]);
}

#[test]
fn a_discard_that_the_storage_does_not_support_is_no_error() {
    for (kind, ignored) in [(io::ErrorKind::Unsupported, true), (io::ErrorKind::Other, false)] {
        let disk = SimDisk::new(SimImage::zeroed(8 << 20), SimConfig::new(1));
        disk.fail(blockyard_storage::sim::Fault::new(OpKind::Discard, kind).always());
        let raw = Raw::on(disk, BLOCKS);
        let done = run(async move { raw.discard(0, 1 << 20).await });
        assert_eq!(done.is_ok(), ignored, "{done:?}");
    }
}

#[test]
fn fast_zeroes_are_never_written_as_data() {
    let disk = SimDisk::new(SimImage::zeroed(8 << 20), SimConfig::new(1));
    disk.fail(
        blockyard_storage::sim::Fault::new(OpKind::Zero, io::ErrorKind::Unsupported).always(),
    );
    let raw = Raw::on(disk.clone(), BLOCKS);
    run(async move {
        for (offset, len) in [(4096, 3 << 20), (512, 1 << 20)] {
            let refused = raw.write_zeroes_fast(offset, len, true).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        }
    });
    assert!(disk.trace().iter().all(|t| t.kind != OpKind::Write));
    // On a device, ranges smaller than its block.
    let junk = Junk { whole_blocks: 4096, ..Junk::of(1 << 16) };
    let raw = Raw {
        unit: 4096,
        ..Raw::on(Store::other(junk.clone()), Alignment { memory_align: 1, offset_align: 1 })
    };
    run(async move {
        raw.write_zeroes_fast(4096, 8192, true).await.unwrap();
        assert_eq!(junk.calls(), ["zero 4096+8192"]);
        for (offset, len) in [(512, 12288 - 512), (4096, 8192 + 512), (20480 + 512, 1024)] {
            assert!(raw.write_zeroes_fast(offset, len, true).await.is_err());
            assert_eq!(junk.calls(), [""; 0]);
        }
    });
}

#[test]
fn fits_checks_the_o_direct_alignment() {
    let (region, _) = Region::memfd("guest", 0, 0, 1 << 16).unwrap();
    let memory = Rc::new(GuestMemory::default().with(region).unwrap());
    let of = |pieces: &[(u64, u64)]| {
        let mut segments = Segments::default();
        segments.reset(&memory);
        pieces.iter().for_each(|&(at, len)| segments.push_guest(at, len).unwrap());
        segments
    };
    let shape = |memory_align, offset_align| {
        Raw::on(Store::other(Junk::default()), Alignment { memory_align, offset_align })
    };
    let odd = [(1, 512), (1024, 512)];
    let torn = [(0, 256), (1024, 768)];
    assert!(shape(1, 1).fits(&of(&odd), 3));
    assert!(!shape(512, 512).fits(&of(&odd), 0) && shape(1, 512).fits(&of(&odd), 0));
    assert!(!shape(4, 512).fits(&of(&torn), 0), "each segment must have whole blocks");
    assert!(shape(4, 512).fits(&of(&[(4, 512), (1028, 512)]), 512));
    assert!(
        !shape(1, 512).fits(&of(&[(0, 512)]), 100),
        "the offset must be aligned even if memory need not be"
    );
    assert!(!shape(512, 4096).fits(&of(&[(0, 512)]), 0));
}

/// Each read captures its bytes at once and completes some polls later. Concurrent operations
/// therefore fall between the read and the write of a read-modify-write.
#[derive(Clone)]
struct SlowReads(Junk);

impl Storage for SlowReads {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let answer = self.0.read(segments, offset).await;
        for _ in 0..20 {
            yield_now().await;
        }
        answer
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        self.0.write(segments, offset, durable).await
    }

    async fn sync(&self) -> io::Result<()> {
        self.0.sync().await
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.zero(offset, len, true).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.0.zero(offset, len, unmap).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len).await
    }

    async fn len(&self) -> io::Result<u64> {
        self.0.len().await
    }
}

#[test]
fn a_write_never_undoes_zeroes_in_the_rest_of_the_sector() {
    #[derive(Clone, Copy, Debug)]
    enum How {
        Zero,
        FastZero,
        Discard,
    }
    for how in [How::Zero, How::FastZero, How::Discard] {
        // The zeroed range begins, ends, or lies inside the sector that is written.
        for (offset, len) in [(100, 50), (100, 2000), (512 - 50, 600 + 50)] {
            let junk = Junk::of(1 << 16);
            let raw = Raw::on(Store::other(SlowReads(junk.clone())), DIRECT);
            let sim = Sim::new(1);
            let write = {
                let (raw, at) = (raw.clone(), if offset > 400 { 1100 + 20 } else { 10 });
                sim.spawn(async move {
                    raw.write(Segments::from_bytes(&[9; 30]), at, false).await.1.unwrap()
                })
            };
            let zero = async move {
                yield_now().await;
                match how {
                    How::Zero => raw.write_zeroes(offset, len, true).await,
                    How::FastZero => raw.write_zeroes_fast(offset, len, true).await,
                    How::Discard => raw.discard(offset, len).await,
                }
                .unwrap();
                write.await;
            };
            sim.block_on(zero).unwrap();
            let bytes = junk.bytes.take();
            let zeroes = &bytes[offset as usize..(offset + len) as usize];
            assert_eq!(
                zeroes.iter().position(|&b| b != 0),
                None,
                "{how:?} of {len} bytes at {offset}"
            );
        }
    }
}
