//! Answers of a disk to single requests: on a simulated disk with injected errors, and on a file
//! that is resized.

mod images;

use super::*;
use crate::backend::Source;
use std::cell::Cell;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::AtomicU64;
use std::task::Poll;

use blockyard_image::{Alignment, CacheMode, ImageFile, OpenOptions, Raw, Storage, Store};
use blockyard_ring::Executor;
use blockyard_storage::sim::{Fault, OpKind as SimOp, Phase, Sim, SimConfig, SimDisk, SimImage};

use crate::{DiskOptions, throttle};

const CAPACITY: u64 = 64 << 10;

struct Note(Rc<Cell<Option<Status>>>);

impl Token for Note {
    fn answer(self, status: Status, _: Segments) {
        assert!(self.0.replace(Some(status)).is_none());
    }

    fn may_wait(&self) -> bool {
        true
    }
}

async fn ask(served: &LocalDisk, op: Op, offset: u64, len: u64) -> Status {
    let segments = match op {
        Op::Read | Op::Write { .. } => Segments::buffer(len as usize),
        _ => Segments::default(),
    };
    let note = Rc::new(Cell::new(None));
    let request = Request::new(op, offset, len, segments, Instant::now(), Note(note.clone()));
    served.serve(request).await.answer();
    note.take().unwrap()
}

fn options() -> DiskOptions {
    let (name, serial) = ("test".into(), String::new());
    DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    }
}

fn simulated(options: DiskOptions) -> (SimDisk, LocalDisk) {
    let sim = SimDisk::new(SimImage::zeroed(CAPACITY), SimConfig::new(1));
    let disk = Arc::new(Disk::new(options, Source::Null { size: CAPACITY }));
    let raw = Raw::on(sim.clone(), Alignment { memory_align: 1, offset_align: 1 });
    (sim, LocalDisk::new(disk, Backend::Raw(raw), None))
}

fn run<T: 'static>(work: impl Future<Output = T> + 'static) -> T {
    Sim::new(1).block_on(work).unwrap()
}

const WRITE: Op = Op::Write { fua: false };
const DURABLE: Op = Op::Write { fua: true };
const POISONED: Status = Err(Failure::Poisoned);

#[test]
fn ranges_end_at_the_capacity_and_do_not_wrap() {
    let (sim, served) = simulated(options());
    run(async move {
        for op in
            [Op::Read, WRITE, Op::Discard, Op::WriteZeroes { unmap: true, fua: false, fast: false }]
        {
            assert_eq!(ask(&served, op, CAPACITY - 512, 512).await, Ok(()));
            let before = sim.trace().len();
            for offset in [CAPACITY - 511, CAPACITY, u64::MAX - 511, u64::MAX] {
                assert_eq!(
                    ask(&served, op, offset, 512).await,
                    Err(Failure::OutOfRange),
                    "{op:?} {offset}"
                );
            }
            assert_eq!(
                ask(&served, op, CAPACITY, 0).await,
                Ok(()),
                "a request of no bytes at the end succeeds"
            );
            assert_eq!(sim.trace().len(), before);
        }
    });
}

#[test]
fn a_read_only_disk_accepts_only_reads_and_flushes() {
    let (sim, served) = simulated(DiskOptions { read_only: true, ..options() });
    run(async move {
        for op in
            [WRITE, DURABLE, Op::Discard, Op::WriteZeroes { unmap: false, fua: true, fast: false }]
        {
            assert_eq!(ask(&served, op, 0, 512).await, Err(Failure::ReadOnly));
        }
        assert_eq!(ask(&served, Op::Flush, 0, 0).await, Ok(()));
        assert_eq!(ask(&served, Op::Read, 0, 512).await, Ok(()));
        assert!(sim.trace().iter().all(|t| t.kind == SimOp::Read));
    });
}

#[test]
fn cache_mode_unsafe_never_syncs() {
    let (sim, served) = simulated(DiskOptions { cache: CacheMode::Unsafe, ..options() });
    sim.fail(Fault::new(SimOp::Sync, io::ErrorKind::Other).always());
    run(async move {
        for op in [DURABLE, Op::WriteZeroes { unmap: false, fua: true, fast: false }, Op::Flush] {
            assert_eq!(ask(&served, op, 0, if op == Op::Flush { 0 } else { 512 }).await, Ok(()));
        }
        assert_eq!(served.flush_unsynced().await, Ok(()));
    });
}

#[test]
fn a_failed_sync_poisons_the_disk() {
    for op in [Op::Flush, Op::WriteZeroes { unmap: false, fua: true, fast: false }] {
        let (sim, served) = simulated(options());
        sim.fail(Fault::new(SimOp::Sync, 5));
        run(async move {
            assert_eq!(ask(&served, WRITE, 0, 512).await, Ok(()));
            assert_eq!(
                ask(&served, op, 0, if op == Op::Flush { 0 } else { 512 }).await,
                POISONED,
                "{op:?}"
            );
            for later in [WRITE, DURABLE, Op::Discard, op] {
                assert_eq!(ask(&served, later, 0, 512).await, POISONED, "{later:?} after {op:?}");
            }
            assert_eq!(ask(&served, Op::Read, 0, 512).await, Ok(()));
            assert_eq!(served.flush_unsynced().await, POISONED);
            assert!(served.disk().poisoned().unwrap().to_string().contains("Input/output error"));
        });
    }
}

/// A disk without an open image has nothing to lose. Its flushes fail, but it may be activated.
#[test]
fn a_flush_without_an_image_fails_and_does_not_poison_the_disk() {
    let disk = Arc::new(Disk::new(options(), Source::Null { size: CAPACITY }));
    let served = LocalDisk::new(disk, Backend::Gone("closed".into()), None);
    run(async move {
        for unsynced in [false, true] {
            served.disk().unsynced.store(unsynced, Ordering::SeqCst);
            assert_eq!(ask(&served, Op::Flush, 0, 0).await, Err(Failure::Io));
            assert_eq!(served.flush_always().await, Err(Failure::Io));
            assert!(served.disk().poisoned().is_none());
            assert_eq!(served.disk().unsynced.load(Ordering::SeqCst), unsynced);
        }
    });
}

/// A storage with syncs that a test holds back.
struct Odd {
    disk: SimDisk,
    /// It cannot be reached now and then, and loses nothing then.
    keeps_unsynced: bool,
    may_sync: Rc<Cell<bool>>,
}

impl Storage for Odd {
    fn read(
        &self,
        segments: Segments,
        offset: u64,
    ) -> impl Future<Output = (Segments, io::Result<usize>)> {
        self.disk.read(segments, offset)
    }
    fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> impl Future<Output = (Segments, io::Result<usize>)> {
        self.disk.write(segments, offset, durable)
    }
    async fn sync(&self) -> io::Result<()> {
        until(|| self.may_sync.get()).await;
        self.disk.sync().await
    }
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> {
        self.disk.discard(offset, len)
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool) -> impl Future<Output = io::Result<()>> {
        self.disk.zero(offset, len, unmap)
    }
    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> {
        self.disk.set_len(len)
    }
    fn len(&self) -> impl Future<Output = io::Result<u64>> {
        self.disk.len()
    }
    fn keeps_unsynced(&self) -> bool {
        self.keeps_unsynced
    }
}

/// Returns a disk on a simulated one, and what holds its syncs back.
fn odd(keeps_unsynced: bool) -> (SimDisk, LocalDisk, Rc<Cell<bool>>) {
    let sim = SimDisk::new(SimImage::zeroed(CAPACITY), SimConfig::new(1));
    let disk = Arc::new(Disk::new(options(), Source::Null { size: CAPACITY }));
    let may_sync = Rc::new(Cell::new(true));
    let storage = Odd { disk: sim.clone(), keeps_unsynced, may_sync: may_sync.clone() };
    let raw = Raw::on(Store::other(storage), Alignment { memory_align: 1, offset_align: 1 });
    (sim, LocalDisk::new(disk, Backend::Raw(raw), None), may_sync)
}

/// Other tasks run until the condition is true.
async fn until(condition: impl Fn() -> bool) {
    std::future::poll_fn(|context| {
        if condition() {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// An image on an NBD server in an outage: the flush fails, and a later one succeeds.
#[test]
fn a_failed_flush_that_loses_nothing_does_not_poison_the_disk() {
    let (sim, served, _) = odd(true);
    run(async move {
        assert_eq!(ask(&served, WRITE, 0, 512).await, Ok(()));
        sim.fail(Fault::new(SimOp::Sync, 5));
        assert_eq!(ask(&served, Op::Flush, 0, 0).await, Err(Failure::Io));
        assert!(served.disk().unsynced.load(Ordering::SeqCst));
        sim.fail(Fault::new(SimOp::Write, 5));
        assert_eq!(ask(&served, DURABLE, 512, 512).await, Err(Failure::Io));
        assert!(served.disk().poisoned().is_none());
        assert_eq!(ask(&served, WRITE, 512, 512).await, Ok(()));
        assert_eq!(ask(&served, Op::Flush, 0, 0).await, Ok(()));
        assert!(!served.disk().unsynced.load(Ordering::SeqCst));
    });
}

/// A durable write ends in a flush of the device. That flush may report the loss of other writes,
/// and the device reports it only once.
#[test]
fn a_failed_durable_write_poisons_the_disk_if_other_writes_may_be_lost() {
    let cases = [
        // Each case: the request before, the error, and the answer of a later flush.
        (None, 5, Ok(())),
        (Some(WRITE), 5, POISONED),
        (Some(DURABLE), 5, Ok(())),
        (Some(Op::WriteZeroes { unmap: true, fua: false, fast: false }), 5, POISONED),
        (Some(Op::WriteZeroes { unmap: true, fua: true, fast: false }), 5, Ok(())),
        (Some(WRITE), 28, Ok(())),
        (Some(WRITE), 22, Ok(())),
    ];
    for (before, errno, later) in cases {
        let (sim, served) = simulated(options());
        run(async move {
            if let Some(op) = before {
                assert_eq!(ask(&served, op, 0, 512).await, Ok(()));
            }
            sim.fail(Fault::new(SimOp::Write, errno));
            assert!(ask(&served, DURABLE, 512, 512).await.is_err());
            assert_eq!(
                ask(&served, Op::Flush, 0, 0).await,
                later,
                "{before:?}, then error {errno}"
            );
        });
    }
    // A later error does not affect flushed writes.
    let (sim, served) = simulated(options());
    run(async move {
        assert_eq!(ask(&served, WRITE, 0, 512).await, Ok(()));
        assert_eq!(ask(&served, Op::Flush, 0, 0).await, Ok(()));
        sim.fail(Fault::new(SimOp::Write, 5));
        assert_eq!(ask(&served, DURABLE, 512, 512).await, Err(Failure::Io));
        assert_eq!(ask(&served, WRITE, 512, 512).await, Ok(()));
    });
}

/// The device may report to the write what it has lost of the flush.
#[test]
fn a_durable_write_that_fails_beside_a_flush_fails_the_flush() {
    let (disk, served, may_sync) = odd(false);
    let (served, sim) = (Rc::new(served), Sim::new(1));
    may_sync.set(false);
    let flusher = served.clone();
    let flush = sim.spawn(async move {
        assert_eq!(ask(&flusher, WRITE, 0, 512).await, Ok(()));
        ask(&flusher, Op::Flush, 0, 0).await
    });
    let answers = sim.block_on(async move {
        until(|| served.disk().is_syncing.load(Ordering::SeqCst)).await;
        disk.fail(Fault::new(SimOp::Write, 5));
        let written = ask(&served, DURABLE, 512, 512).await;
        may_sync.set(true);
        (written, flush.await, ask(&served, WRITE, 512, 512).await)
    });
    assert_eq!(answers.unwrap(), (POISONED, POISONED, POISONED));
}

/// The kernel may have lost the data of a write that it has not finished yet.
#[test]
fn no_request_in_flight_is_acknowledged_when_the_disk_is_poisoned() {
    let is_pending = async |request: &mut std::pin::Pin<&mut dyn Future<Output = Status>>| {
        std::future::poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx).is_pending())).await
    };
    let (_, served, may_sync) = odd(false);
    run(async move {
        let mut write = pin!(ask(&served, WRITE, 0, 512));
        assert!(is_pending(&mut (write.as_mut() as _)).await);
        may_sync.set(false);
        // An operator's flush, and that of a client that disconnects, have no other check.
        let mut flush = pin!(served.flush_always());
        assert!(is_pending(&mut (flush.as_mut() as _)).await);
        served.disk().poison("a test", &io::Error::other("lost"));
        may_sync.set(true);
        assert_eq!((write.await, flush.await), (POISONED, POISONED));
    });
}

/// In the page cache durable writes share syncs, and no two syncs run at the same time: the kernel
/// reports a lost page only once.
#[test]
fn in_the_page_cache_durable_writes_share_one_sync_and_its_failure() {
    // Each case: the fault, the answer of the writes, and the answer of a later flush.
    let cases = [
        (None, Ok(()), Ok(())),
        (Some(Fault::new(SimOp::Sync, 5)), POISONED, POISONED),
        (Some(Fault::new(SimOp::Write, 28).always()), Err(Failure::NoSpace), Ok(())),
    ];
    for (fault, answer, later) in cases {
        let (path, source) = cached_file(CAPACITY);
        let disk = SimDisk::new(SimImage::zeroed(CAPACITY), SimConfig::new(1));
        fault.into_iter().for_each(|fault| disk.fail(fault));
        let raw = Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
        let served = Rc::new(LocalDisk::new(
            Arc::new(Disk::new(options(), source)),
            Backend::Raw(raw),
            None,
        ));
        let sim = Sim::new(1);
        let writes: Vec<_> = (0..8)
            .map(|sector| {
                let served = served.clone();
                sim.spawn(async move { ask(&served, DURABLE, sector * 512, 512).await })
            })
            .collect();
        let answers = sim.block_on(async move {
            let mut answers = Vec::new();
            for write in writes {
                answers.push(write.await);
            }
            answers.push(ask(&served, Op::Flush, 0, 0).await);
            answers
        });
        assert_eq!(answers.unwrap(), [vec![answer; 8], vec![later]].concat());
        let syncs = disk
            .trace()
            .iter()
            .filter(|t| t.kind == SimOp::Sync && t.phase == Phase::Started)
            .count();
        assert!(syncs < 8, "{syncs} syncs for 8 writes and a flush");
        std::fs::remove_file(&path).unwrap();
    }
}

/// Returns a file opened without O_DIRECT: its path, and a source for it.
fn cached_file(len: u64) -> (PathBuf, Source) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name =
        format!("blockyard-served-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    let open = OpenOptions::new(&path, false, CacheMode::Writeback);
    (path, Source::File(Arc::new(ImageFile::open(&open).unwrap())))
}

/// A failed write that is not durable is an error, but does not poison the disk.
#[test]
fn host_errors_map_to_failures_of_the_protocols() {
    let (sim, served) = simulated(options());
    run(async move {
        let cases = [(SimOp::Read, Op::Read), (SimOp::Write, WRITE), (SimOp::Discard, Op::Discard)];
        for (kind, op) in cases {
            for (errno, failure) in
                [(5, Failure::Io), (28, Failure::NoSpace), (122, Failure::NoSpace)]
            {
                sim.fail(Fault::new(kind, errno));
                assert_eq!(ask(&served, op, 0, 512).await, Err(failure), "{op:?}, error {errno}");
                assert_eq!(ask(&served, op, 0, 512).await, Ok(()));
            }
        }
        // A discard that the device does not support succeeds. Zeroes that it does not support are
        // written.
        sim.fail(Fault::new(SimOp::Discard, io::ErrorKind::Unsupported));
        sim.fail(Fault::new(SimOp::Zero, io::ErrorKind::Unsupported));
        assert_eq!(ask(&served, Op::Discard, 0, 512).await, Ok(()));
        assert_eq!(
            ask(&served, Op::WriteZeroes { unmap: true, fua: true, fast: false }, 0, 512).await,
            Ok(())
        );
        let sums = served.statistics();
        assert_eq!(
            sums.summary(OpKind::Write).map(|s| (s.requests, s.errors, s.bytes)),
            Some((6, 3, 1536))
        );
    });
}

#[test]
fn a_resized_file_is_a_resized_disk() {
    let (path, source) = cached_file(1000);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let disk = Arc::new(Disk::new(options(), source));
    assert_eq!(disk.capacity(), 1024, "a guest sees whole sectors");
    let executor = Executor::new().unwrap();
    let (handle, shared) = (executor.handle().clone(), disk.clone());
    executor
        .block_on(async move {
            let served = LocalDisk::local(&handle, &shared).unwrap();
            assert_eq!(ask(&served, WRITE, 512, 512).await, Ok(()));
            assert_eq!(
                shared.refresh_capacity().unwrap(),
                None,
                "the file has grown to its sector, the disk has not"
            );
            file.set_len(4097).unwrap();
            assert_eq!(ask(&served, Op::Read, 1024, 512).await, Err(Failure::OutOfRange));
            assert_eq!(shared.refresh_capacity().unwrap(), Some(4608));
            assert_eq!(ask(&served, Op::Read, 4096, 512).await, Ok(()));
            file.set_len(512).unwrap();
            assert_eq!(shared.refresh_capacity().unwrap(), Some(512));
            assert_eq!(ask(&served, WRITE, 512, 512).await, Err(Failure::OutOfRange));
        })
        .unwrap();
    std::fs::remove_file(&path).unwrap();
}

/// A file system that cannot zero a range writes the zeroes. They cost the same, whatever was
/// discarded before.
#[test]
fn discards_are_no_credit_for_later_work() {
    const LEN: u64 = 64 << 20;
    const ZEROES: u64 = 8 << 20;
    for discards in [0, 1, 10] {
        // tmpfs supports holes, but not FALLOC_FL_ZERO_RANGE.
        let path =
            PathBuf::from(format!("/dev/shm/blockyard-served-{}-{discards}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
        let open = OpenOptions::new(&path, false, CacheMode::Writeback);
        let source = Source::File(Arc::new(ImageFile::open(&open).unwrap()));
        let host = blockyard_sched::Host::default();
        let share = || {
            host.share(
                Some(("d", &blockyard_sched::DeviceProfile::FLASH)),
                None,
                &blockyard_sched::Knobs::default(),
            )
        };
        let (disk, neighbour) = (Arc::new(Disk::sharing(options(), source, share())), share());
        let executor = Executor::new().unwrap();
        let (handle, shared) = (executor.handle().clone(), disk.clone());
        executor
            .block_on(async move {
                let served = LocalDisk::local(&handle, &shared).unwrap();
                for _ in 0..discards {
                    assert_eq!(ask(&served, Op::Discard, 0, LEN).await, Ok(()));
                }
                let zeroes = Op::WriteZeroes { unmap: false, fua: false, fast: false };
                assert_eq!(ask(&served, zeroes, 0, ZEROES).await, Ok(()));
            })
            .unwrap();
        let written =
            std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap()) * 512;
        std::fs::remove_file(&path).unwrap();
        assert!(
            written >= ZEROES,
            "this file system zeroes without writing: {written} bytes are allocated"
        );
        // An operation much later ends the control period, which updates the statistics.
        let read = blockyard_sched::Operation {
            kind: blockyard_sched::OperationKind::Read,
            bytes: 0,
            sequential: false,
            requests: 1,
        };
        neighbour.on_reactor().ask(throttle::sched_time() + 60_000_000_000, &read).unwrap();
        let cost = neighbour.device().unwrap().costs().write_per_mib * (ZEROES >> 20);
        let used = disk.share().figures().used_ns;
        assert!(
            used >= cost,
            "after {discards} discards {ZEROES} bytes of zeroes cost {used} ns, of {cost}"
        );
    }
}

#[test]
fn a_request_beyond_the_limit_waits() {
    use blockyard_sched::{Knobs, Limit, Limits, Share};

    let bps = Some(Limit { rate: 1, max: None, length: Duration::from_secs(1) });
    let knobs = Knobs { limits: Limits { bps, ..Limits::default() }, ..Knobs::default() };
    let share = Arc::new(Share::new(None, None, &knobs));
    let disk = Arc::new(Disk::sharing(options(), Source::Null { size: CAPACITY }, share));
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let test = async move {
        let served = LocalDisk::local(&handle, &disk).unwrap();
        assert_eq!(ask(&served, WRITE, 0, 512).await, Ok(()), "the limit admits one");
        let mut second = Box::pin(ask(&served, WRITE, 0, 512));
        let waits = std::future::poll_fn(|cx| {
            std::task::Poll::Ready(second.as_mut().poll(cx).is_pending())
        });
        assert!(waits.await, "the limit admits no second one");
        served.suspend();
        assert_eq!(second.await, Ok(()));
    };
    executor.block_on(test).unwrap();
}

#[test]
fn a_disk_with_neighbours_syncs_when_much_is_dirty() {
    let host = blockyard_sched::Host::default();
    let device = Some(("d", &blockyard_sched::DeviceProfile::FLASH));
    let share = || host.share(device, None, &blockyard_sched::Knobs::default());
    let (path, source) = cached_file(CAPACITY);
    let (disk, neighbour) = (Disk::sharing(options(), source, share()), share());
    assert!(!disk.dirties(1 << 30), "it has no neighbour");
    let kind = blockyard_sched::OperationKind::Read;
    let read = blockyard_sched::Operation { kind, bytes: 512, sequential: false, requests: 1 };
    for share in [disk.share(), &neighbour] {
        share.on_reactor().ask(1, &read).unwrap();
    }
    assert!(!disk.dirties(8 << 20), "as much as may be dirty");
    assert!(disk.dirties(512));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn the_capacity_that_is_set_bounds_the_requests() {
    let (_, served) = simulated(options());
    run(async move {
        served.disk().set_capacity(CAPACITY / 2);
        assert_eq!(ask(&served, Op::Read, CAPACITY / 2 - 512, 512).await, Ok(()));
        assert_eq!(ask(&served, Op::Read, CAPACITY / 2, 512).await, Err(Failure::OutOfRange));
        served.disk().set_capacity(CAPACITY);
        assert_eq!(ask(&served, Op::Read, CAPACITY / 2, 512).await, Ok(()));
    });
}
