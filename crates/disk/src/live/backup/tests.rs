//! Backups of which the target or the source fails, or the target hangs: on a simulated clock, and
//! of a disk on several threads.

use super::*;
use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Instant;

use blockyard_image::{Alignment, CacheMode, ChainOptions, Image, Layer, Raw, Storage, Store};
use blockyard_ring::{Executor, Handle, PendingReply, Remote, Segments};
use blockyard_sched::{Knobs, Limit, Limits, Share};
use blockyard_storage::sim::{Fault, OpKind as SimOp, SimConfig, SimDisk, SimImage};

use crate::backend::{Backend, Source};
use crate::current_image::CurrentImage;
use crate::local_disk::LocalDisk;
use crate::{DiskOptions, Finished, Op, Request, Run, Status, Token};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
/// Number of bytes that a backup can have in memory.
const IN_MEMORY: u64 = COPIES as u64 * MIB;
const PART: usize = 64 << 10;
/// Longest wait on the real clock. A test that waits longer hangs.
const HANGS: Duration = Duration::from_secs(60);
const WRITE: Op = Op::Write { fua: false };
const OK: Option<Status> = Some(Ok(()));

fn options() -> DiskOptions {
    DiskOptions {
        name: "test".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::Writeback,
        filters: Vec::new(),
        on_enospc: Default::default(),
    }
}

/// Returns the contents of a disk with data in each part.
fn contents() -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    (1..).zip(bytes.chunks_mut(PART)).for_each(|(part, bytes): (u16, _)| {
        bytes[..2].copy_from_slice(&part.to_le_bytes());
    });
    bytes
}

/// A target of which the writes wait until it is opened.
#[derive(Clone)]
struct Gated {
    disk: SimDisk,
    is_open: Rc<Cell<bool>>,
    waiting: Rc<RefCell<Vec<Waker>>>,
}

impl Gated {
    fn new() -> Self {
        let disk = SimDisk::new(SimImage::zeroed(SIZE), SimConfig::new(1));
        Gated { disk, is_open: Rc::default(), waiting: Rc::default() }
    }

    fn open(&self) {
        self.is_open.set(true);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }
}

impl Storage for Gated {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        self.disk.read(segments, offset).await
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        poll_fn(|cx| {
            if self.is_open.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        self.disk.write(segments, offset, durable).await
    }

    async fn sync(&self) -> io::Result<()> {
        self.disk.sync().await
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.discard(offset, len).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.disk.zero(offset, len, unmap).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.set_len(len).await
    }

    async fn len(&self) -> io::Result<u64> {
        self.disk.len().await
    }
}

fn raw(store: impl Into<Store>) -> Raw {
    Raw::on(store, Alignment { memory_align: 1, offset_align: 1 })
}

fn image(raw: Raw) -> Image {
    Image::new(vec![Layer::Raw { raw, size: SIZE }], false)
}

struct Note(Box<dyn FnOnce(Status)>);

impl Token for Note {
    fn answer(self, status: Status, _: Segments) {
        self.0(status);
    }

    fn may_wait(&self) -> bool {
        true
    }
}

/// Returns a request that calls `answered` with its status. A write writes bytes 0xee.
fn request(
    handle: &Handle,
    (op, offset, len): (Op, u64, u64),
    answered: impl FnOnce(Status) + 'static,
) -> Request<Note> {
    let segments = match op {
        Op::Read | Op::Write { .. } => Segments::from_bytes(&vec![0xee; len as usize]),
        _ => Segments::default(),
    };
    let note = Note(Box::new(answered));
    Request::new(op, offset, len, segments, handle.now(), note)
}

/// Begins a request of 512 bytes.
fn begin(
    handle: &Handle,
    served: &Rc<LocalDisk>,
    (op, offset): (Op, u64),
    answered: impl FnOnce(Status) + 'static,
) {
    let (served, request) = (served.clone(), request(handle, (op, offset, 512), answered));
    handle.spawn(async move { served.serve(request).await.answer() });
}

type Ended = Rc<RefCell<Option<Result<(), Why>>>>;

/// A backup and its guest on one reactor, on a simulated clock.
struct Stage {
    handle: Handle,
    source: SimDisk,
    target: Gated,
    map: Arc<CopyMap>,
    worker: Worker,
    served: Rc<LocalDisk>,
    work: Work,
}

impl Stage {
    fn new(handle: &Handle) -> Self {
        Self::with(handle, &Knobs::default())
    }

    fn with(handle: &Handle, knobs: &Knobs) -> Self {
        let source = SimDisk::new(SimImage::from_bytes(&contents()), SimConfig::new(2));
        let share = Arc::new(Share::new(None, None, knobs));
        let disk = Arc::new(Disk::sharing(options(), Source::Null { size: SIZE }, share));
        let map = Arc::new(CopyMap::new(SIZE, Path::new("copy.raw"), LIMIT));
        let served = LocalDisk::new(disk.clone(), Backend::Null, Some(handle.clone()));
        let mut image = CurrentImage::unmetered(Backend::Raw(raw(source.clone())));
        image.tracker = Some(Tracker::Copy(map.clone()));
        served.exchange(Rc::new(image));
        Stage {
            handle: handle.clone(),
            source,
            target: Gated::new(),
            map,
            worker: Worker { disk, handle: handle.clone() },
            served: Rc::new(served),
            work: Work::default(),
        }
    }

    /// Begins the copy, and waits until it can do no more.
    async fn begin_copy(&self) -> Ended {
        let source = (image(raw(self.source.clone())), "disk.raw".into());
        let target = (image(raw(Store::other(self.target.clone()))), "copy.raw".into());
        let copy = BackupCopy::new(source, target, self.work.progress.clone());
        let (worker, map, work) = (self.worker.clone(), self.map.clone(), self.work.clone());
        let ended = Ended::default();
        let end = ended.clone();
        self.handle.spawn(async move {
            let copied = worker.copy_all(&copy, &map, &work).await;
            end.replace(Some(copied));
        });
        self.settle().await;
        ended
    }

    fn ask(&self, op: Op, offset: u64) -> Rc<Cell<Option<Status>>> {
        let answer = Rc::new(Cell::new(None));
        let note = answer.clone();
        begin(&self.handle, &self.served, (op, offset), move |status| note.set(Some(status)));
        answer
    }

    /// Begins a run of two adjacent writes of 512 bytes.
    fn ask_run(&self, offset: u64) -> [Rc<Cell<Option<Status>>>; 2] {
        let answers: [Rc<Cell<Option<Status>>>; 2] = Default::default();
        let requests = [0, 1].map(|number| {
            let (note, at) = (answers[number].clone(), offset + 512 * number as u64);
            request(&self.handle, (WRITE, at, 512), move |status| note.set(Some(status)))
        });
        assert_eq!(self.served.neighbours(&requests), 2);
        let (served, mut run) = (self.served.clone(), Run::default());
        run.fill(requests.into_iter());
        self.handle.spawn(async move {
            served.serve_run(&mut run).await;
            run.finished().for_each(Finished::answer);
        });
        answers
    }

    /// Waits until nothing can go on before the clock does.
    async fn settle(&self) {
        self.handle.sleep(Duration::from_millis(1)).await;
    }
}

fn run(work: impl AsyncFnOnce(Handle) + 'static) {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { work(handle).await }).unwrap();
}

#[test]
fn requests_wait_until_their_part_is_in_memory_and_the_copy_is_as_before_them() {
    run(async |handle| {
        let stage = Stage::new(&handle);
        let ended = stage.begin_copy().await;
        let in_memory = stage.ask(WRITE, IN_MEMORY - 512);
        let zero = Op::WriteZeroes { unmap: true, fua: false, fast: false };
        let waiting = [(WRITE, 12 * MIB), (zero, 14 * MIB)];
        let waiting = waiting.map(|(op, offset)| stage.ask(op, offset));
        // Only the first of these parts is copied.
        let discards = [0, 13 * MIB].map(|offset| stage.ask(Op::Discard, offset));
        let read = stage.ask(Op::Read, 12 * MIB);
        stage.settle().await;
        assert_eq!((in_memory.get(), read.get()), (OK, OK));
        assert_eq!(discards.each_ref().map(|request| request.get()), [OK; 2]);
        assert_eq!(waiting.each_ref().map(|request| request.get()), [None; 2]);
        assert!(ended.borrow().is_none());
        stage.target.open();
        stage.settle().await;
        assert_eq!(waiting.each_ref().map(|request| request.get()), [OK; 2]);
        assert!(matches!(*ended.borrow(), Some(Ok(()))));
        let mut expected = contents();
        assert!(stage.target.disk.contents() == expected, "the copy differs");
        // The discard of the part that was not copied has had no effect.
        for (at, byte) in [(0, 0), (IN_MEMORY - 512, 0xee), (12 * MIB, 0xee), (14 * MIB, 0)] {
            expected[at as usize..][..512].fill(byte);
        }
        assert!(stage.source.contents() == expected, "the disk differs");
        let progress = stage.work.progress();
        assert_eq!((progress.done(), progress.total()), (SIZE, SIZE));
    });
}

/// A run is one operation. The throttle admits the requests of a disk with limits.
#[test]
fn runs_and_requests_of_a_disk_with_limits_wait_for_the_copy_too() {
    let bps = Some(Limit { rate: 1 << 40, max: None, length: Duration::from_secs(1) });
    let limited = Knobs { limits: Limits { bps, ..Limits::default() }, ..Knobs::default() };
    for knobs in [Knobs::default(), limited] {
        run(async move |handle| {
            let stage = Stage::with(&handle, &knobs);
            let ended = stage.begin_copy().await;
            // On both sides of the end of a part.
            let [first, second] = stage.ask_run(12 * MIB + PART as u64 - 512);
            let all = [first, second, stage.ask(WRITE, 14 * MIB)];
            stage.settle().await;
            assert_eq!(all.each_ref().map(|request| request.get()), [None; 3]);
            stage.target.open();
            stage.settle().await;
            assert_eq!(all.each_ref().map(|request| request.get()), [OK; 3]);
            assert!(matches!(*ended.borrow(), Some(Ok(()))));
            assert!(stage.target.disk.contents() == contents(), "the copy differs");
        });
    }
}

#[test]
fn a_target_that_hangs_ends_the_backup_and_holds_no_request_for_long() {
    run(async |handle| {
        let stage = Stage::new(&handle);
        let ended = stage.begin_copy().await;
        let write = stage.ask(WRITE, 12 * MIB);
        handle.sleep(LIMIT - Duration::from_millis(1)).await;
        assert_eq!(write.get(), None);
        handle.sleep(Duration::from_millis(2)).await;
        assert_eq!(write.get(), OK);
        handle.sleep(LOOK).await;
        let error = ended.take().expect("the backup has ended").unwrap_err();
        assert!(matches!(error, Why::Late(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("5 s") && text.contains("copy.raw"), "{text}");
        assert!(text.contains(&format!("offset {}", 12 * MIB)), "{text}");
        let later = stage.ask(WRITE, 15 * MIB);
        stage.settle().await;
        assert_eq!(later.get(), OK);
    });
}

#[test]
fn an_error_of_the_source_or_the_target_ends_the_backup_only() {
    let full = "image copy.raw: backup at offset 10485760: writing: No space left on device";
    let broken = "image disk.raw: the disk at offset 10485760: reading: Input/output error";
    for (is_of_target, error) in [(true, full), (false, broken)] {
        run(async move |handle| {
            let stage = Stage::new(&handle);
            let range = 10 * MIB..11 * MIB;
            match is_of_target {
                true => stage.target.disk.fail(Fault::new(SimOp::Write, 28).within(range)),
                false => stage.source.fail(Fault::new(SimOp::Read, 5).within(range)),
            }
            let ended = stage.begin_copy().await;
            let waiting = stage.ask(WRITE, 15 * MIB);
            stage.settle().await;
            assert_eq!(waiting.get(), None);
            stage.target.open();
            stage.settle().await;
            let why = ended.take().expect("the backup has ended").unwrap_err();
            assert!(why.to_string().starts_with(error), "{why}");
            let later = [0, 10 * MIB, SIZE - 512].map(|offset| stage.ask(WRITE, offset));
            stage.settle().await;
            assert_eq!(waiting.get(), OK);
            assert_eq!(later.map(|request| request.get()), [OK; 3]);
        });
    }
}

#[test]
fn a_backup_ends_soon_when_it_must_although_its_target_hangs() {
    type End = fn(&Stage);
    type IsExpected = fn(&Why) -> bool;
    let ends: [(End, IsExpected); 3] = [
        (|stage| stage.work.cancel(), |why| matches!(why, Why::Cancelled)),
        (|stage| stage.worker.disk.end_work(), |why| matches!(why, Why::Ended)),
        (
            |stage| stage.worker.disk.poison("a test", &io::Error::other("on purpose")),
            |why| matches!(why, Why::Poisoned(_)),
        ),
    ];
    for (end, is_expected) in ends {
        run(async move |handle| {
            let stage = Stage::new(&handle);
            let ended = stage.begin_copy().await;
            let waiting = stage.ask(WRITE, 12 * MIB);
            stage.settle().await;
            assert_eq!((waiting.get(), ended.borrow().is_none()), (None, true));
            end(&stage);
            handle.sleep(LOOK).await;
            let why = ended.take().expect("the backup has ended").unwrap_err();
            assert!(is_expected(&why), "{why}");
            assert!(waiting.get().is_some(), "the request still waits");
        });
    }
}

/// A reactor on a thread of its own.
struct Reactor {
    remote: Remote,
    thread: Option<JoinHandle<()>>,
}

impl Reactor {
    fn start() -> Self {
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let executor = Executor::new().unwrap();
            sender.send(executor.remote()).unwrap();
            executor.run().unwrap();
        });
        Reactor { remote: receiver.recv().unwrap(), thread: Some(thread) }
    }

    /// Begins a write of 512 bytes.
    fn write(&self, disk: &Arc<Disk>, offset: u64) -> PendingReply<Status> {
        let disk = disk.clone();
        self.remote.ask_later(move |handle, reply| {
            let served = LocalDisk::local(handle, &disk).unwrap();
            begin(handle, &served, (WRITE, offset), move |status| reply.send(status));
        })
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.remote.run(|handle| handle.stop());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Begins a backup to a target that hangs. Waits until it has read all that it can have in memory:
/// it reads nothing after that.
fn begin_hanging(
    disk: &Arc<Disk>,
    limit: Duration,
) -> (Arc<CopyMap>, JoinHandle<Result<(), WorkError>>) {
    let (work, map) = (Work::default(), CopyMap::new(SIZE, Path::new("copy.raw"), limit));
    let map = Arc::new(map);
    let (disk, copied) = (disk.clone(), map.clone());
    let job = std::thread::spawn(move || {
        disk.work(Kind::for_any("backup"), |worker| async move {
            let source = worker.chain()?;
            let source = (source.image(&worker.handle).unwrap(), "disk.raw".into());
            let target = (image(raw(Store::other(Gated::new()))), "copy.raw".into());
            let copy = BackupCopy::new(source, target, work.progress.clone());
            worker.copy_moment(&copy, &copied, &work).await
        })
    });
    let begun = Instant::now();
    while !map.allows(0, IN_MEMORY) {
        assert!(begun.elapsed() < HANGS, "the backup hangs");
        assert!(!job.is_finished(), "it ended before it copied anything");
        std::thread::yield_now();
    }
    (map, job)
}

/// Waits for the end of a job, and returns its result.
fn result(job: JoinHandle<Result<(), WorkError>>) -> Result<(), WorkError> {
    let begun = Instant::now();
    while !job.is_finished() {
        assert!(begun.elapsed() < HANGS, "the backup does not end");
        std::thread::yield_now();
    }
    job.join().unwrap()
}

#[test]
fn a_disk_with_a_backup_that_hangs_goes_on_and_can_be_closed() {
    let name = format!("blockyard-hanging-backup-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, contents()).unwrap();
    let chain = ChainOptions {
        cache: CacheMode::Writeback,
        format: Some(Format::Raw),
        ..ChainOptions::new(&path)
    };
    let disk = Arc::new(Disk::new(options(), Source::open(&chain).unwrap()));
    let reactors = [Reactor::start(), Reactor::start()];
    let answer =
        |reply: PendingReply<Status>| reply.until(Instant::now() + HANGS).expect("the guest hangs");
    for reactor in &reactors {
        assert_eq!(answer(reactor.write(&disk, 0)), Ok(()));
    }
    let has_map = || disk.serving_state().tracker.is_some();
    // The request itself ends the backup.
    let (_, job) = begin_hanging(&disk, Duration::from_millis(20));
    assert!(has_map());
    let writes = reactors.each_ref().map(|reactor| reactor.write(&disk, IN_MEMORY + MIB));
    assert_eq!(writes.map(answer), [Ok(()); 2]);
    let error = result(job).unwrap_err();
    assert!(matches!(*error.why, Why::Late(_)), "{error}");
    assert!(!has_map());
    // The end of the disk ends it.
    let (map, job) = begin_hanging(&disk, Duration::from_secs(600));
    let writes = reactors.each_ref().map(|reactor| reactor.write(&disk, SIZE - 512));
    let begun = Instant::now();
    while map.waiting() < writes.len() {
        assert!(begun.elapsed() < HANGS, "the writes hang");
        std::thread::yield_now();
    }
    disk.end_work();
    assert_eq!(writes.map(answer), [Ok(()); 2]);
    let error = result(job).unwrap_err();
    assert!(matches!(*error.why, Why::Ended), "{error}");
    assert!(!has_map());
    std::fs::remove_file(&path).unwrap();
}
