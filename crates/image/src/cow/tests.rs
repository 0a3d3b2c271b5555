//! Compares the COW layer with a plain vector on the simulated disk: all header versions, all
//! O_DIRECT alignments, several tasks on two reactors, and a bitmap cache that holds only part of
//! the bitmap.

use std::cell::RefCell;
use std::rc::Rc;

use blockyard_storage::sim::{
    Fault, OpKind, Oracle, Phase, Rng, Sim, SimConfig, SimDisk, SimImage, pattern,
};
use proptest::prelude::*;

use super::*;
use blockyard_storage::Alignment;

pub(super) const SHAPES: [Alignment; 3] = [
    Alignment { memory_align: 1, offset_align: 1 },
    Alignment { memory_align: 512, offset_align: 512 },
    Alignment { memory_align: 512, offset_align: 4096 },
];

/// Returns the size in bytes of a disk with `pages` bitmap pages, the last one partial.
pub(super) fn size_of(pages: u64) -> u64 {
    (pages - 1) * PAGE_SECTORS * SECTOR + (64 << 10)
}

pub(super) fn backing(size: u64) -> Backing<'static> {
    Backing { name: "/base/root.img", size, mtime: 1_100_000_000 }
}

/// A COW file on an empty simulated disk.
pub(super) struct Bench {
    pub disk: SimDisk,
    /// Reactors use clones of it: clones share the range lock of partial-block writes.
    raw: Raw,
}

impl Bench {
    pub fn new(seed: u64, shape: Alignment) -> Self {
        let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(seed));
        Bench { raw: Raw::on(disk.clone(), shape), disk }
    }

    pub fn raw(&self) -> Raw {
        self.raw.clone()
    }

    pub async fn create(&self, version: u32, size: u64) -> Header {
        let alignment = if version == 3 { 4096 } else { 512 };
        create(&self.raw(), &CreateOptions { backing: backing(size), version, alignment })
            .await
            .unwrap()
    }

    pub async fn open(&self, bitmap_memory: u64) -> Cow {
        Cow::open(self.raw(), &CowOptions { bitmap_memory, ..CowOptions::default() }).await.unwrap()
    }

    pub fn run<T: 'static, F: Future<Output = T> + 'static>(
        self,
        seed: u64,
        work: impl FnOnce(Bench) -> F,
    ) -> T {
        Sim::new(seed).step_limit(3_000_000).block_on(work(self)).unwrap()
    }
}

/// Reads from the COW file. Sectors that it does not store read as pattern 0, which stands for the
/// backing file.
pub(super) async fn read(cow: &Cow, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < len {
        let at = offset + bytes.len() as u64;
        let Some(extent) = cow.try_lookup(at, offset + len - at) else {
            cow.load(at).await?;
            continue;
        };
        assert!(extent.len > 0 && extent.len <= offset + len - at, "{extent:?}");
        let mut part = match extent.place {
            Place::Data(host) => {
                let (segments, result) =
                    cow.read(Segments::buffer(extent.len as usize), host).await;
                result?;
                let mut part = vec![0; segments.len()];
                segments.copy_out(0, &mut part);
                part
            }
            Place::Absent => pattern(0, at, extent.len as usize),
            other => panic!("{other:?}"),
        };
        bytes.append(&mut part);
    }
    Ok(bytes)
}

pub(super) async fn write(cow: &Cow, offset: u64, bytes: &[u8]) -> io::Result<()> {
    cow.write(Segments::from_bytes(bytes), offset).await.1
}

#[test]
fn written_data_are_read_back_also_after_reopening() {
    for (version, shape) in [1, 2, 3].into_iter().flat_map(|v| SHAPES.map(|s| (v, s))) {
        Bench::new(1, shape).run(1, |bench| async move {
            let size = size_of(2);
            bench.create(version, size).await;
            let cow = bench.open(u64::MAX).await;
            assert_eq!((cow.size(), cow.header().version()), (size, version));
            let at = PAGE_SECTORS * SECTOR - 1024;
            assert_eq!(read(&cow, at, 4096).await.unwrap(), pattern(0, at, 4096));
            write(&cow, at, &pattern(1, at, 2048)).await.unwrap();
            cow.write_zeroes(at + 3072, 512, true).await.unwrap();
            cow.flush().await.unwrap();
            let expected = [
                pattern(1, at, 2048),
                pattern(0, at + 2048, 1024),
                vec![0; 512],
                pattern(0, at + 3584, 512),
            ];
            for cow in [cow, bench.open(u64::MAX).await] {
                assert_eq!(
                    read(&cow, at, 4096).await.unwrap(),
                    expected.concat(),
                    "version {version}, {shape:?}"
                );
                assert_eq!(cow.header().backing, "/base/root.img");
            }
        });
    }
}

#[test]
fn fast_zeroes_are_refused_where_the_host_lacks_them() {
    Bench::new(2, SHAPES[0]).run(2, |bench| async move {
        bench.create(2, 1 << 20).await;
        let cow = bench.open(u64::MAX).await;
        cow.write_zeroes_fast(4096, 8192, true).await.unwrap();
        assert_eq!(read(&cow, 4096, 8192).await.unwrap(), vec![0; 8192]);
        bench.disk.fail(Fault::new(OpKind::Zero, io::ErrorKind::Unsupported).always());
        let before = bench.disk.trace().len();
        let refused = cow.write_zeroes_fast(65536, 8192, true).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        assert!(bench.disk.trace()[before..].iter().all(|t| t.kind != OpKind::Write));
        assert_eq!(
            read(&cow, 65536, 8192).await.unwrap(),
            pattern(0, 65536, 8192),
            "its bits were set"
        );
        cow.write_zeroes(65536, 8192, true).await.unwrap();
        assert_eq!(read(&cow, 65536, 8192).await.unwrap(), vec![0; 8192]);
    });
}

#[test]
fn partial_sectors_and_ranges_beyond_the_disk_are_refused() {
    Bench::new(2, SHAPES[0]).run(2, |bench| async move {
        bench.create(3, 10 * 512 + 7).await;
        let cow = bench.open(u64::MAX).await;
        assert_eq!(cow.size(), 11 * 512);
        for (offset, len) in [(1, 512), (512, 100), (10 * 512, 1024), (u64::MAX - 511, 512)] {
            let error = cow.write(Segments::buffer(len), offset).await.1.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{offset}+{len}");
            assert!(cow.discard(offset, len as u64).await.is_err());
            assert!(cow.write_zeroes(offset, len as u64, false).await.is_err());
        }
        write(&cow, 10 * 512, &[9; 512]).await.unwrap();
        assert_eq!(cow.try_lookup(20 * 512, 512), Some(Extent { len: 512, place: Place::Zero }));
        let options = CowOptions { read_only: true, ..CowOptions::default() };
        let cow = Cow::open(bench.raw(), &options).await.unwrap();
        assert_eq!(
            write(&cow, 0, &[1; 512]).await.unwrap_err().kind(),
            io::ErrorKind::ReadOnlyFilesystem
        );
        cow.close().await.unwrap();
        assert!(!bench.disk.trace().is_empty());
    });
}

#[test]
fn a_discard_never_exposes_the_backing_file() {
    Bench::new(3, SHAPES[0]).run(3, |bench| async move {
        bench.create(3, 1 << 20).await;
        let cow = bench.open(u64::MAX).await;
        write(&cow, 4096, &pattern(1, 4096, 4096)).await.unwrap();
        cow.discard(0, 1 << 20).await.unwrap();
        let discards = bench.disk.trace().iter().filter(|t| t.kind == OpKind::Discard).count();
        assert_eq!(
            discards, 2,
            "one run is stored in the file; the trace has its start and its answer"
        );
        let expected = [pattern(0, 0, 4096), vec![0; 4096], pattern(0, 8192, 4096)].concat();
        assert_eq!(read(&cow, 0, 12288).await.unwrap(), expected);
    });
}

#[test]
fn a_flush_syncs_once_or_before_and_after_writing_new_bits() {
    Bench::new(4, SHAPES[0]).run(4, |bench| async move {
        let header = bench.create(3, 1 << 20).await;
        let cow = bench.open(u64::MAX).await;
        let since = |from: usize| {
            let trace = bench.disk.trace();
            let started = trace[from..]
                .iter()
                .filter(|t| t.phase == Phase::Started && t.kind != OpKind::Read);
            started.map(|t| (t.kind, t.offset, t.len)).collect::<Vec<_>>()
        };
        let from = bench.disk.trace().len();
        cow.flush().await.unwrap();
        assert_eq!(since(from), [(OpKind::Sync, 0, 0)]);
        write(&cow, 0, &[1; 1024]).await.unwrap();
        let from = bench.disk.trace().len();
        cow.flush().await.unwrap();
        let bits = (OpKind::Write, header.bitmap_offset, 512);
        assert_eq!(since(from), [(OpKind::Sync, 0, 0), bits, (OpKind::Sync, 0, 0)]);
        write(&cow, 512, &[2; 512]).await.unwrap();
        let from = bench.disk.trace().len();
        cow.flush().await.unwrap();
        assert_eq!(
            since(from),
            [(OpKind::Sync, 0, 0)],
            "the sector was stored in the file already"
        );
    });
}

#[test]
fn after_a_failed_sync_all_fails_and_a_failed_bitmap_write_is_retried() {
    Bench::new(5, SHAPES[0]).run(5, |bench| async move {
        let header = bench.create(3, 1 << 20).await;
        let cow = bench.open(u64::MAX).await;
        write(&cow, 0, &[1; 512]).await.unwrap();
        let bits = header.bitmap_offset..header.data_offset;
        bench.disk.fail(Fault::new(OpKind::Write, io::ErrorKind::StorageFull).within(bits));
        let error = cow.flush().await.unwrap_err();
        assert!(error.to_string().starts_with("cow bitmap at offset 8192: writing"), "{error}");
        cow.flush().await.unwrap();
        assert_eq!(read(&bench.open(u64::MAX).await, 0, 512).await.unwrap(), [1; 512]);

        write(&cow, 4096, &[2; 512]).await.unwrap();
        bench.disk.fail(Fault::new(OpKind::Sync, io::ErrorKind::Other));
        cow.flush().await.unwrap_err();
        for _ in 0..2 {
            assert!(
                cow.flush()
                    .await
                    .unwrap_err()
                    .to_string()
                    .contains("an earlier sync of the file failed")
            );
        }
        assert!(write(&cow, 0, &[3; 512]).await.is_err());
        assert_eq!(read(&cow, 0, 512).await.unwrap(), [1; 512], "reads still work");
    });
}

#[test]
fn memory_is_bounded_and_dirty_pages_are_written_back_early() {
    Bench::new(6, SHAPES[0]).run(6, |bench| async move {
        let pages = 40;
        bench.create(3, size_of(pages)).await;
        let cow = bench.open(1).await;
        assert_eq!(cow.shared.bitmap.frames(), 8);
        for page in 0..pages {
            let at = page * PAGE_SECTORS * SECTOR;
            write(&cow, at, &pattern(page + 1, at, 512)).await.unwrap();
            assert!(cow.shared.bitmap.dirty_pages() <= 4);
        }
        cow.prime().await.unwrap();
        for page in 0..pages {
            let at = page * PAGE_SECTORS * SECTOR;
            assert_eq!(read(&cow, at, 512).await.unwrap(), pattern(page + 1, at, 512));
        }
        // With room for the whole bitmap, every page is cached after `prime`.
        cow.flush().await.unwrap();
        let cow = bench.open(u64::MAX).await;
        cow.prime().await.unwrap();
        let reads = bench.disk.trace().len();
        for page in 0..pages {
            let extent = cow.try_lookup(page * PAGE_SECTORS * SECTOR, 4096).unwrap();
            assert!(matches!(extent, Extent { len: 512, place: Place::Data(_) }), "{extent:?}");
        }
        assert_eq!(bench.disk.trace().len(), reads);
    });
}

#[test]
fn a_failed_page_read_names_the_page() {
    Bench::new(7, SHAPES[0]).run(7, |bench| async move {
        let header = bench.create(3, size_of(3)).await;
        let second = header.bitmap_offset + PAGE as u64;
        bench.disk.fail(Fault::new(OpKind::Read, io::ErrorKind::Other).within(second..second + 1));
        let cow = bench.open(u64::MAX).await;
        let at = PAGE_SECTORS * SECTOR;
        let error = write(&cow, at, &[1; 512]).await.unwrap_err();
        assert!(error.to_string().starts_with("cow bitmap at offset 12288: reading"), "{error}");
        assert_eq!(
            read(&cow, at, 512).await.unwrap(),
            pattern(0, at, 512),
            "the write was not acknowledged"
        );
    });
}

#[test]
fn broken_files_are_refused_and_not_changed() {
    Bench::new(8, SHAPES[0]).run(8, |bench| async move {
        let header = bench.create(3, 1 << 20).await;
        let events = bench.disk.events();
        let open = async || {
            Cow::open(bench.raw(), &CowOptions::default()).await.err().unwrap().to_string()
        };
        bench.disk.set_len(header.file_len() - 1).await.unwrap();
        assert!(open().await.starts_with(
            "cow header at offset 1060863: the file ends after 1060863 bytes, and should"
        ));
        bench.disk.set_len(100).await.unwrap();
        assert_eq!(open().await, "cow header at offset 0: the file ends after 100 bytes");
        assert_eq!(bench.disk.events(), events + 4, "only the two changes of the length");
        let error = create(&bench.raw(), &CreateOptions::new(backing(1 << 20))).await.unwrap_err();
        assert!(error.to_string().contains("a new one must be empty"), "{error}");
    });
    Bench::new(9, SHAPES[0]).run(9, |bench| async move {
        // An old file with a bitmap that is one byte too short.
        bench.create(2, 4096).await;
        let mut bytes = bench.disk.contents();
        bytes[4108..4116].copy_from_slice(&(4096u64 + 1024).to_be_bytes());
        bench.disk.write(Segments::from_bytes(&bytes), 0, false).await.1.unwrap();
        bench.disk.set_len(1 << 20).await.unwrap();
        let error = Cow::open(bench.raw(), &CowOptions::default()).await.err().unwrap().to_string();
        assert!(error.contains("has no bits for the last 2 sectors"), "{error}");
        let options = CowOptions { read_only: true, ..CowOptions::default() };
        let cow = Cow::open(bench.raw(), &options).await.unwrap();
        assert_eq!(read(&cow, 0, 5120).await.unwrap(), pattern(0, 0, 5120));
    });
}

#[test]
fn a_changed_backing_file_is_detected_or_accepted() {
    Bench::new(10, SHAPES[0]).run(10, |bench| async move {
        bench.create(3, 1 << 20).await;
        let cow = bench.open(u64::MAX).await;
        cow.check_backing(1 << 20, 1_100_000_000).unwrap();
        let error = cow.check_backing(1 << 20, 1_100_000_009).unwrap_err().to_string();
        assert!(
            error.contains(
                "was last written at 1100000009 (seconds since 1970), and had been at 1100000000"
            ),
            "{error}"
        );
        assert!(error.contains("blockyard image rebase --unsafe -b /base/root.img"), "{error}");
        let both = cow.check_backing(5, 5).unwrap_err().to_string();
        assert!(both.contains("has 5 bytes, and had 1048576; it was last written at 5 "), "{both}");
        let options = CowOptions { accept_changed_backing: true, ..CowOptions::default() };
        Cow::open(bench.raw(), &options).await.unwrap().check_backing(5, 5).unwrap();

        write(&cow, 0, &[1; 512]).await.unwrap();
        cow.close().await.unwrap();
        set_backing(&bench.raw(), &Backing { name: "new.img", size: (1 << 20) - 3, mtime: 77 })
            .await
            .unwrap();
        let cow = bench.open(u64::MAX).await;
        cow.check_backing((1 << 20) - 3, 77).unwrap();
        assert_eq!(
            (cow.header().backing.as_str(), read(&cow, 0, 512).await.unwrap()),
            ("new.img", vec![1; 512])
        );
    });
}

/// A request of the property test, near a hot spot: the beginning or end of a bitmap page.
#[derive(Clone, Debug)]
enum Request {
    Write(Spot),
    Zero(Spot, bool),
    Discard(Spot),
    Read(Spot),
    Flush,
}

#[derive(Clone, Copy, Debug)]
struct Spot {
    offset: u64,
    len: u64,
}

const PAGES: u64 = 11;

fn spots() -> impl Strategy<Value = Spot> {
    (0..PAGES, 0..40u64, 1..20u64).prop_map(|(page, sector, sectors)| {
        let offset = (page * PAGE_SECTORS * SECTOR + sector * SECTOR).saturating_sub(20 * SECTOR);
        Spot { offset, len: sectors * SECTOR }
    })
}

fn requests() -> impl Strategy<Value = Request> {
    prop_oneof![
        6 => spots().prop_map(Request::Write),
        1 => (spots(), any::<bool>()).prop_map(|(spot, unmap)| Request::Zero(spot, unmap)),
        1 => spots().prop_map(Request::Discard),
        5 => spots().prop_map(Request::Read),
        1 => Just(Request::Flush),
    ]
}

/// Sends requests as one task. The oracle records each of them.
async fn task(cow: Cow, oracle: Rc<RefCell<Oracle>>, requests: Vec<(u64, Request)>) {
    for (tag, request) in requests {
        match request {
            Request::Write(Spot { offset, len }) => {
                let data = pattern(tag, offset, len as usize);
                let token = oracle.borrow_mut().write_started(offset, &data);
                write(&cow, offset, &data).await.unwrap();
                oracle.borrow_mut().write_answered(token, true, false);
            }
            Request::Zero(Spot { offset, len }, unmap) => {
                let token = oracle.borrow_mut().zero_started(offset, len);
                cow.write_zeroes(offset, len, unmap).await.unwrap();
                oracle.borrow_mut().write_answered(token, true, false);
            }
            Request::Discard(Spot { offset, len }) => {
                let token = oracle.borrow_mut().discard_started(offset, len);
                cow.discard(offset, len).await.unwrap();
                oracle.borrow_mut().write_answered(token, true, false);
            }
            Request::Read(Spot { offset, len }) => {
                let token = oracle.borrow_mut().read_started();
                let found = read(&cow, offset, len).await.unwrap();
                oracle.borrow_mut().check_read(token, offset, &found).unwrap();
            }
            Request::Flush => cow.flush().await.unwrap(),
        }
    }
}

/// Reads all ranges that the requests may have touched, and compares them with the oracle.
async fn judge(cow: &Cow, oracle: &RefCell<Oracle>) {
    for page in 0..PAGES {
        let offset = (page * PAGE_SECTORS * SECTOR).saturating_sub(20 * SECTOR);
        let found = read(cow, offset, 60 * SECTOR).await.unwrap();
        oracle.borrow_mut().check_now(offset, &found).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn several_tasks_on_two_reactors_see_one_disk(
        seed in any::<u64>(),
        version in 1..=3u32,
        shape in 0..3usize,
        room in prop_oneof![Just(1), Just(u64::MAX)],
        lists in prop::collection::vec(prop::collection::vec(requests(), 1..25), 1..6),
    ) {
        Bench::new(seed, SHAPES[shape]).run(seed, move |bench| async move {
            bench.create(version, size_of(PAGES) + (1 << 20)).await;
            let oracle = Rc::new(RefCell::new(Oracle::new()));
            for page in 0..PAGES {
                let offset = (page * PAGE_SECTORS * SECTOR).saturating_sub(20 * SECTOR);
                let old = pattern(0, offset, 60 * 512);
                let token = oracle.borrow_mut().write_started(offset, &old);
                oracle.borrow_mut().write_answered(token, true, true);
            }
            let first = bench.open(room).await;
            let second = Cow::view(first.shared().clone(), bench.raw());
            let mut rng = Rng::new(seed);
            let sim = Sim::new(seed);
            let tasks: Vec<_> = lists.into_iter().enumerate().map(|(i, list)| {
                let cow = if i % 2 == 0 { &first } else { &second };
                let cow = Cow::view(cow.shared().clone(), cow.file.clone());
                let list = list.into_iter().map(|request| (rng.next_u64() | 1, request)).collect();
                sim.spawn(task(cow, oracle.clone(), list))
            }).collect();
            sim.block_on(async move {
                for task in tasks {
                    task.await;
                }
            }).unwrap();
            judge(&second, &oracle).await;
            first.close().await.unwrap();
            judge(&bench.open(room).await, &oracle).await;
        });
    }
}
