//! Raw images on real files and block devices of the host, through io_uring, compared with a model
//! in memory.
//!
//! The model is a plain vector with the guest's disk. Every case runs with the page cache and with
//! O_DIRECT, on files of unaligned length, with memory that does not meet the O_DIRECT alignment.
//! Only the tests on block devices need root, `losetup` and loop devices.

mod devices;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use blockyard_image::{CacheMode, ImageFile, OpenOptions, Raw, SECTOR};
use blockyard_ring::{Executor, GuestMemory, Region, Segments};
use blockyard_storage::sim::Rng;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::compared::first_difference;
use crate::tools;

/// The guest's memory in bytes: twice the largest request, with room for gaps.
const MEMORY: u64 = 1 << 20;

/// A file that is removed after its test, on the disk of the build or in a given folder.
struct Scratch(PathBuf);

impl Scratch {
    fn new(len: u64) -> Self {
        Self::within(Path::new(env!("CARGO_TARGET_TMPDIR")), len)
    }

    fn within(folder: &Path, len: u64) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("raw-files-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = folder.join(name);
        File::create(&path)
            .and_then(|f| f.set_len(len))
            .unwrap_or_else(|e| panic!("making {}: {e}", path.display()));
        Scratch(path)
    }

    /// Returns the number of bytes that the file occupies on its file system.
    fn allocated(&self) -> u64 {
        fs::metadata(&self.0).unwrap().blocks() * 512
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn open(path: &Path, cache: CacheMode) -> Arc<ImageFile> {
    let file = ImageFile::open(&OpenOptions::new(path, false, cache)).unwrap();
    let hint = "the tests of O_DIRECT need a file system that has it under the target folder";
    assert_eq!(file.direct(), cache.direct(), "{}: {hint}", path.display());
    Arc::new(file)
}

/// Runs `work` on an image, on its own ring.
fn on_image<T: 'static, F: Future<Output = T> + 'static>(
    file: &Arc<ImageFile>,
    work: impl FnOnce(Raw) -> F,
) -> T {
    let executor = Executor::new().unwrap();
    tools::block_on(&executor, work(Raw::open(file, executor.handle()).unwrap()))
}

async fn put(raw: &Raw, offset: u64, bytes: &[u8]) {
    raw.write(Segments::from_bytes(bytes), offset, false).await.1.unwrap();
}

async fn take(raw: &Raw, offset: u64, len: usize) -> Vec<u8> {
    let segments = Segments::buffer(len);
    // Fill the buffer, so that its old contents do not look like data that were read.
    segments.copy_in(0, &vec![0xa5; len]);
    let (segments, result) = raw.read(segments, offset).await;
    result.unwrap();
    let mut bytes = vec![0; len];
    segments.copy_out(0, &mut bytes);
    bytes
}

/// One request, in bytes of the disk; `pieces` is the seed of its memory layout.
#[derive(Clone, Debug)]
enum Ask {
    Read { offset: u64, len: u64, pieces: u64 },
    Write { offset: u64, len: u64, pieces: u64, durable: bool },
    Discard { offset: u64, len: u64 },
    Zero { offset: u64, len: u64, unmap: bool },
    Flush,
}

/// Returns requests inside `capacity`: half of them whole sectors, the others of any length and
/// offset, some at the end.
fn asks(capacity: u64) -> impl Strategy<Value = Vec<Ask>> {
    let longest = 40_000.min(capacity);
    let range =
        (0..capacity, 1..longest, 0..4u8).prop_map(move |(offset, len, style)| match style {
            0 => (offset, len.min(capacity - offset)),
            1 => (capacity - len, len),
            _ => {
                let offset = offset & !(SECTOR - 1);
                (offset, len.next_multiple_of(SECTOR).min(capacity - offset))
            }
        });
    let ask = (range, 0..10u8, any::<u64>(), any::<bool>()).prop_map(
        |((offset, len), what, pieces, flag)| match what {
            0..3 => Ask::Read { offset, len, pieces },
            3..7 => Ask::Write { offset, len, pieces, durable: flag && pieces.is_multiple_of(4) },
            7 => Ask::Discard { offset, len },
            8 => Ask::Zero { offset, len, unmap: flag },
            _ => Ask::Flush,
        },
    );
    proptest::collection::vec(ask, 1..40)
}

/// Returns guest memory for a request: one segment or up to a thousand, aligned or at odd
/// addresses.
fn segments(memory: &Rc<GuestMemory>, len: u64, seed: u64) -> Segments {
    let mut rng = Rng::new(seed);
    let mut segments = Segments::default();
    segments.reset(memory);
    let style = rng.below(5);
    let (mut at, mut left) = (if style < 3 { 0 } else { rng.below(4096) }, len);
    while left > 0 {
        let (piece, gap) = match style {
            0 => (left, 0),
            1 => (left.min(512 * rng.between(1, 16)), 512),
            2 => (left.min(4096), 4096),
            3 => (left.min(rng.between(1, 5000)), 1),
            _ => (left.min(rng.between(40, 60)), 16),
        };
        segments.push_guest(at, piece).expect("the memory is large enough");
        at += piece + gap;
        left -= piece;
    }
    segments
}

/// Sends the requests to the image and to the model, and compares all reads.
async fn follow(raw: Raw, asks: Vec<Ask>, mut model: Vec<u8>) -> Result<Vec<u8>, TestCaseError> {
    let (region, _) = Region::memfd("guest", 0, 0, MEMORY).unwrap();
    let memory = Rc::new(GuestMemory::default().with(region).unwrap());
    for (number, ask) in asks.into_iter().enumerate() {
        let fail =
            |e: std::io::Error| TestCaseError::fail(format!("request {number}, {ask:?}: {e}"));
        let zero = |model: &mut Vec<u8>, offset: u64, len: u64| {
            model[offset as usize..][..len as usize].fill(0)
        };
        match ask {
            Ask::Read { offset, len, pieces } => {
                let (segments, result) = raw.read(segments(&memory, len, pieces), offset).await;
                result.map_err(fail)?;
                let mut found = vec![0; len as usize];
                segments.copy_out(0, &mut found);
                same(
                    &found,
                    &model[offset as usize..][..len as usize],
                    offset,
                    &format!("request {number}, {ask:?}"),
                )?;
            }
            Ask::Write { offset, len, pieces, durable } => {
                let mut data = vec![0; len as usize];
                let mut rng = Rng::new(pieces);
                rng.fill(&mut data);
                let segments = segments(&memory, len, pieces);
                segments.copy_in(0, &data);
                raw.write(segments, offset, durable).await.1.map_err(fail)?;
                model[offset as usize..][..data.len()].copy_from_slice(&data);
            }
            Ask::Discard { offset, len } => {
                raw.discard(offset, len).await.map_err(fail)?;
                // Holes of files read as zeroes.
                zero(&mut model, offset, len);
            }
            Ask::Zero { offset, len, unmap } => {
                raw.write_zeroes(offset, len, unmap).await.map_err(fail)?;
                zero(&mut model, offset, len);
            }
            Ask::Flush => raw.flush().await.map_err(fail)?,
        }
    }
    Ok(model)
}

fn same(found: &[u8], expected: &[u8], offset: u64, when: &str) -> Result<(), TestCaseError> {
    match first_difference(found, expected) {
        None if found.len() == expected.len() => Ok(()),
        None => Err(TestCaseError::fail(format!(
            "{when}: {} bytes, not {}",
            found.len(),
            expected.len()
        ))),
        Some(at) => {
            let (at, byte) = (at as u64 + offset, (found[at], expected[at]));
            Err(TestCaseError::fail(format!(
                "{when}: byte {at} is {:#x}, not {:#x}",
                byte.0, byte.1
            )))
        }
    }
}

/// Runs requests on a file of `size` random bytes; at the end compares the file by the host's own
/// read.
fn matches_the_model(
    scratch: &Scratch,
    cache: CacheMode,
    size: u64,
    asks: Vec<Ask>,
) -> Result<(), TestCaseError> {
    let capacity = size.next_multiple_of(SECTOR) as usize;
    let mut model: Vec<u8> = (0..size).map(|i| (i % 251) as u8 + 1).collect();
    fs::write(&scratch.0, &model).unwrap();
    model.resize(capacity, 0);
    let file = open(&scratch.0, cache);
    let model = on_image(&file, |raw| follow(raw, asks, model))?;
    let mut bytes = fs::read(&scratch.0).unwrap();
    prop_assert!(
        (size as usize..=capacity).contains(&bytes.len()),
        "{size} bytes have become {}",
        bytes.len()
    );
    bytes.resize(capacity, 0);
    same(&bytes, &model, 0, "the file at the end")
}

fn cases(count: u32) -> ProptestConfig {
    ProptestConfig {
        cases: count,
        failure_persistence: None,
        max_shrink_iters: 300,
        ..ProptestConfig::default()
    }
}

/// Returns the length of a file, and requests that fit it.
fn file_and_asks() -> impl Strategy<Value = (u64, Vec<Ask>)> {
    (1u64..200_000).prop_flat_map(|size| (Just(size), asks(size.next_multiple_of(SECTOR))))
}

proptest! {
    #![proptest_config(cases(150))]

    #[test]
    fn a_file_in_the_page_cache_equals_the_model((size, asks) in file_and_asks()) {
        matches_the_model(&Scratch::new(0), CacheMode::Writeback, size, asks)?;
    }

    #[test]
    fn a_file_with_o_direct_equals_the_model((size, asks) in file_and_asks()) {
        matches_the_model(&Scratch::new(0), CacheMode::None, size, asks)?;
    }

    /// The file system has PUNCH_HOLE but not ZERO_RANGE, so zeroes are written as data.
    #[test]
    fn a_file_on_tmpfs_equals_the_model((size, asks) in file_and_asks()) {
        let scratch = Scratch::within(Path::new("/dev/shm"), 0);
        matches_the_model(&scratch, CacheMode::Writeback, size, asks)?;
    }
}

#[test]
fn the_partial_last_sector_reads_as_zeroes_and_grows_when_written() {
    for cache in [CacheMode::Writeback, CacheMode::None] {
        let scratch = Scratch::new(0);
        fs::write(&scratch.0, vec![7; 1000]).unwrap();
        let file = open(&scratch.0, cache);
        let path = scratch.0.clone();
        on_image(&file, |raw| async move {
            let expected: Vec<u8> = [vec![7; 488], vec![0; 24]].concat();
            assert_eq!(take(&raw, 512, 512).await, expected);
            raw.write_zeroes(512, 512, false).await.unwrap();
            assert_eq!(fs::metadata(&path).unwrap().len(), 1000, "zeroes are there already");
            assert_eq!(take(&raw, 512, 512).await, [0; 512]);
            put(&raw, 512, &[9; 512]).await;
            assert_eq!(fs::metadata(&path).unwrap().len(), 1024);
            assert_eq!(take(&raw, 0, 1024).await, [vec![7; 512], vec![9; 512]].concat());
        });
        assert_eq!(file.size(), 1000, "the size is read again only when asked");
        assert_eq!(file.refresh_size().unwrap(), 1024);
    }
}

/// A large unaligned request is copied in pieces of 1 MiB.
#[test]
fn a_request_copied_in_pieces_is_complete() {
    const LEN: usize = (3 << 20) + 1536;
    let scratch = Scratch::new(8 << 20);
    let file = open(&scratch.0, CacheMode::None);
    let mut data = vec![0; LEN];
    let mut rng = Rng::new(1);
    data.chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next_u64().to_le_bytes()[..c.len()]));
    let expected = data.clone();
    let wanted = expected.clone();
    on_image(&file, |raw| async move {
        let (region, _) = Region::memfd("guest", 0, 0, 8 << 20).unwrap();
        let memory = Rc::new(GuestMemory::default().with(region).unwrap());
        let odd = || {
            let mut segments = Segments::default();
            segments.reset(&memory);
            segments.push_guest(1, 1 << 20).unwrap();
            segments.push_guest((2 << 20) + 3, LEN as u64 - (1 << 20)).unwrap();
            segments
        };
        let segments = odd();
        segments.copy_in(0, &data);
        raw.write(segments, 1536, true).await.1.unwrap();
        let (segments, result) = raw.read(odd(), 1536).await;
        result.unwrap();
        segments.copy_out(0, &mut data);
        assert!(data == wanted);
    });
    let bytes = fs::read(&scratch.0).unwrap();
    assert!(
        bytes[1536..1536 + LEN] == expected
            && bytes[..1536] == [0; 1536]
            && bytes[1536 + LEN..][..512] == [0; 512]
    );
}

#[test]
fn discards_deallocate_and_zeroes_without_unmap_keep_space() {
    const LEN: usize = 1 << 20;
    let scratch = Scratch::new(LEN as u64);
    let file = open(&scratch.0, CacheMode::None);
    let path = scratch.0.clone();
    let allocated = move || fs::metadata(&path).unwrap().blocks() * 512;
    on_image(&file, move |raw| async move {
        put(&raw, 0, &vec![1; LEN]).await;
        raw.flush().await.unwrap();
        assert!(allocated() >= LEN as u64);
        raw.write_zeroes(0, LEN as u64, false).await.unwrap();
        assert!(allocated() >= LEN as u64, "zeroes without unmap keep their space");
        assert!(take(&raw, 0, LEN).await.iter().all(|&b| b == 0));
        raw.write_zeroes(0, LEN as u64 / 2, true).await.unwrap();
        assert!(allocated() <= LEN as u64 / 2 + 65536, "zeroes with unmap deallocate");
        raw.discard(LEN as u64 / 2, LEN as u64 / 2).await.unwrap();
        assert!(allocated() <= 65536, "{} bytes are left", allocated());
    });
    assert_eq!(fs::metadata(&scratch.0).unwrap().len(), LEN as u64, "a file keeps its length");
    assert!(scratch.allocated() <= 65536);
}

#[test]
fn a_full_file_system_returns_an_error() {
    let mount = Tmpfs::of("1m");
    let scratch = Scratch::within(&mount.0, 8 << 20);
    let file = open(&scratch.0, CacheMode::Writeback);
    on_image(&file, |raw| async move {
        put(&raw, 0, &vec![1; 256 << 10]).await;
        let (_, result) = raw.write(Segments::buffer(4 << 20), 1 << 20, false).await;
        assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
        let result = raw.write_zeroes(1 << 20, 4 << 20, false).await;
        assert_eq!(
            result.unwrap_err().kind(),
            std::io::ErrorKind::StorageFull,
            "zeroes that must be written"
        );
        assert_eq!(
            take(&raw, 0, 256 << 10).await,
            vec![1; 256 << 10],
            "the old data are still there"
        );
        raw.discard(1 << 20, 4 << 20).await.unwrap();
        put(&raw, 1 << 20, &[2; 4096]).await;
    });
}

/// A file system of a given size, mounted for a test.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn of(size: &str) -> Self {
        need_root("mounting a small file system");
        let folder = Scratch::new(0).0.with_extension("mount");
        fs::create_dir(&folder).unwrap();
        run(
            "mount",
            &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", folder.to_str().unwrap()],
        );
        Tmpfs(folder)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        run("umount", &["--lazy", self.0.to_str().unwrap()]);
        let _ = fs::remove_dir(&self.0);
    }
}

fn need_root(what: &str) {
    assert!(rustix_uid() == 0, "{what} needs root: run this test as root");
}

fn rustix_uid() -> u32 {
    fs::metadata("/proc/self").unwrap().uid()
}

/// Runs a tool of util-linux; returns its first line of output.
fn run(tool: &str, args: &[&str]) -> String {
    let said = tools::good(Command::new(tool).args(args));
    said.lines().next().unwrap_or_default().to_string()
}
