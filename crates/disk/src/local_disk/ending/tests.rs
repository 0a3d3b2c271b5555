//! Long requests at the end of a queue and of an export, on an image of many small clusters.

use std::cell::Cell;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Context, Waker};

use blockyard_image::qcow2::CreateOptions;
use blockyard_image::tools::{NewImage, create};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::{Executor, Handle, Segments};

use super::*;
use crate::backend::Source;
use crate::{Disk, DiskOptions, Failure, Op, Request, Status, Token};

/// 8192 clusters: many pieces of a long request.
const SIZE: u64 = 4 << 20;
/// Longest wait. A test that waits longer hangs.
const HANGS: Duration = Duration::from_secs(60);
const ZEROES: Op = Op::WriteZeroes { unmap: true, fua: false, fast: false };

struct Image(PathBuf);

impl Image {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockyard-ending-{}-{number}.qcow2", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::File::create(&path).unwrap();
        let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) };
        create(&path, &Default::default(), NewImage::Qcow2 { options, data: None }).unwrap();
        Image(path)
    }

    fn disk(&self) -> Arc<Disk> {
        let (name, serial) = ("ending".into(), String::new());
        let options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache: CacheMode::Unsafe,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        Arc::new(Disk::new(options, Source::open(&ChainOptions::new(&self.0)).unwrap()))
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

struct Note {
    status: Rc<Cell<Option<Status>>>,
    is_repeated: bool,
}

impl Token for Note {
    fn answer(self, status: Status, _: Segments) {
        self.status.set(Some(status));
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn is_repeated_later(&self) -> bool {
        self.is_repeated
    }

    fn take_back(self, _: Segments) {}
}

async fn ask(served: &LocalDisk, op: Op) -> Status {
    ask_by(served, op, false).await.unwrap()
}

/// Returns the answer, if there is one.
async fn ask_by(served: &LocalDisk, op: Op, is_repeated: bool) -> Option<Status> {
    let status = Rc::new(Cell::new(None));
    let note = Note { status: status.clone(), is_repeated };
    let request = Request::new(op, 0, SIZE, Segments::default(), Instant::now(), note);
    served.serve(request).await.answer();
    status.take()
}

/// Fills the disk with data.
async fn fill(served: &LocalDisk) {
    let image = served.image.borrow().clone();
    let data = Segments::from_bytes(&vec![7; SIZE as usize]);
    image.backend.write(data, 0, false).await.1.unwrap();
    assert_eq!(ends(served).await, (7, 7));
}

/// Returns the first and the last byte of the disk.
async fn ends(served: &LocalDisk) -> (u8, u8) {
    let image = served.image.borrow().clone();
    let (segments, result) = image.backend.read(Segments::buffer(SIZE as usize), 0).await;
    result.unwrap();
    let mut bytes = vec![0; SIZE as usize];
    segments.copy_out(0, &mut bytes);
    (bytes[0], bytes[SIZE as usize - 1])
}

/// Begins a request, which then has done a part.
fn begin<'a>(served: &'a LocalDisk, op: Op) -> Pin<Box<dyn Future<Output = Status> + 'a>> {
    let mut request: Pin<Box<dyn Future<Output = Status> + 'a>> = Box::pin(ask(served, op));
    assert!(request.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    request
}

fn run(test: impl AsyncFnOnce(Handle, Rc<LocalDisk>) + 'static) {
    let image = Image::new();
    let disk = image.disk();
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let test = async move {
        let served = LocalDisk::local(&handle, &disk).unwrap();
        fill(&served).await;
        test(handle, served).await;
    };
    executor.block_on(test).unwrap();
}

#[test]
fn discards_stop_while_an_export_ends_and_count_as_done() {
    run(async |_, served| {
        let discard = begin(&served, Op::Discard);
        served.suspend();
        assert_eq!(discard.await, Ok(()));
        assert_eq!(ends(&served).await, (0, 7));
        assert_eq!(ask(&served, Op::Discard).await, Ok(()));
        assert_eq!(ends(&served).await, (0, 7), "a later discard does not begin");
        served.resume();
        assert_eq!(ask(&served, Op::Discard).await, Ok(()));
        assert_eq!(ends(&served).await, (0, 0));
    });
}

#[test]
fn a_drain_stops_the_discards_that_are_in_progress() {
    run(async |_, served| {
        let discard = begin(&served, Op::Discard);
        served.drain();
        assert_eq!(discard.await, Ok(()));
        assert_eq!(ends(&served).await, (0, 7));
        assert_eq!(ask(&served, Op::Discard).await, Ok(()));
        assert_eq!(ends(&served).await, (0, 0), "a later discard is done");
    });
}

#[test]
fn zeroes_fail_when_the_end_of_an_export_has_waited_for_them() {
    run(async |_, served| {
        let zeroes = begin(&served, ZEROES);
        served.end_long_requests(Some(Instant::now()));
        assert_eq!(zeroes.await, Err(Failure::Io));
        assert_eq!(ends(&served).await, (0, 7));
        let much_later = Instant::now() + Duration::from_secs(3600);
        served.end_long_requests(Some(much_later));
        assert_eq!(ask(&served, ZEROES).await, Ok(()));
        assert_eq!(ends(&served).await, (0, 0));
    });
}

/// The guest of a front end with an in-flight region sees no error.
#[test]
fn zeroes_that_the_next_server_repeats_stay_unanswered_at_the_end_of_an_export() {
    run(async |_, served| {
        served.end_long_requests(Some(Instant::now()));
        assert_eq!(ask_by(&served, ZEROES, true).await, None);
        assert_eq!(ends(&served).await, (7, 7));
        served.end_long_requests(None);
        assert_eq!(ask_by(&served, ZEROES, true).await, Some(Ok(())));
        assert_eq!(ends(&served).await, (0, 0));
    });
}

/// The discard goes on only after the quiesce has begun.
#[test]
fn a_quiesce_does_not_wait_for_a_whole_discard() {
    let image = Image::new();
    let (disk, (begun, begins)) = (image.disk(), mpsc::channel());
    let served_disk = disk.clone();
    let reactor = std::thread::spawn(move || {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let test = async move {
            let served = LocalDisk::local(&handle, &served_disk).unwrap();
            fill(&served).await;
            let discard = begin(&served, Op::Discard);
            begun.send(()).unwrap();
            let until = Instant::now() + HANGS;
            while served.quiesce.try_enter().is_some() {
                assert!(Instant::now() < until, "no quiesce begins");
                handle.yield_now().await;
            }
            assert_eq!(discard.await, Ok(()));
            assert_eq!(ends(&served).await, (0, 7));
            // The quiesce ends on this reactor.
            while served.quiesce.try_enter().is_none() {
                assert!(Instant::now() < until, "the quiesce does not end");
                handle.yield_now().await;
            }
        };
        executor.block_on(test).unwrap();
    });
    begins.recv_timeout(HANGS).unwrap();
    drop(disk.quiesce("a test").unwrap());
    reactor.join().unwrap();
}
