//! Requests on a simulated disk that has no space for a while.

use super::*;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_image::{Alignment, CacheMode, Raw};
use blockyard_ring::{Executor, Handle, Segments};
use blockyard_sched::{DeviceProfile, Host, Knobs, Operation, OperationKind, ReactorShare};
use blockyard_storage::sim::{
    Fault, Join, OpKind as SimOp, Phase, Sim, SimConfig, SimDisk, SimHandle, SimImage, yield_now,
};

use crate::current_image::CurrentImage;
use crate::replies::replies;
use crate::request::{Failure, Op, Status};
use crate::throttle::time_of;
use crate::{Backend, Disk, DiskOptions, OnEnospc, OpKind, Source};

const CAPACITY: u64 = 64 << 10;
const WRITE: Op = Op::Write { fua: false };

/// A queue that may end.
#[derive(Default)]
struct Queue {
    ends: Cell<bool>,
    /// Another server repeats what the queue leaves.
    suspends: Cell<bool>,
    taken_back: Cell<u32>,
    answers: RefCell<Vec<Status>>,
}

struct Note(Rc<Queue>);

impl Token for Note {
    fn answer(self, status: Status, _: Segments) {
        self.0.answers.borrow_mut().push(status);
    }

    fn may_wait(&self) -> bool {
        !self.0.ends.get()
    }

    fn is_withdrawn(&self) -> bool {
        self.0.suspends.get()
    }

    fn take_back(self, _: Segments) {
        self.0.taken_back.set(self.0.taken_back.get() + 1);
    }
}

fn options() -> DiskOptions {
    DiskOptions {
        name: "test".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: OnEnospc::Pause,
    }
}

/// A disk without space for writes to its first 4096 bytes.
#[derive(Clone)]
struct Stage {
    sim: SimHandle,
    storage: SimDisk,
    served: Rc<LocalDisk>,
}

impl Stage {
    fn new(sim: &Sim, error: io::ErrorKind) -> Self {
        let storage = SimDisk::new(SimImage::zeroed(CAPACITY), SimConfig::new(1));
        let disk = Arc::new(Disk::new(options(), Source::Null { size: CAPACITY }));
        let raw = Raw::on(storage.clone(), Alignment { memory_align: 1, offset_align: 1 });
        storage.fail(Fault::new(SimOp::Write, error).within(0..4096).always());
        let served = Rc::new(LocalDisk::new(disk, Backend::Raw(raw), None));
        Stage { sim: sim.handle().clone(), storage, served }
    }

    fn request(&self, queue: &Rc<Queue>, offset: u64) -> Request<Note> {
        let segments = Segments::buffer(512);
        Request::new(WRITE, offset, 512, segments, Instant::now(), Note(queue.clone()))
    }

    /// Begins a write of 512 bytes, and waits until it ends or waits.
    async fn begin(&self, queue: &Rc<Queue>, offset: u64) -> Join<()> {
        let (served, request) = (self.served.clone(), self.request(queue, offset));
        let task = self.sim.spawn(async move { served.serve(request).await.answer() });
        settle().await;
        task
    }

    /// Begins a run of four requests. The first two have no space.
    async fn begin_run(&self, queue: &Rc<Queue>) -> Join<()> {
        let requests = [3072, 3584, 4096, 4608].map(|offset| self.request(queue, offset));
        assert_eq!(self.served.neighbours(&requests), 4);
        let served = self.served.clone();
        let task = self.sim.spawn(async move {
            let mut run = Run::default();
            run.fill(requests.into_iter());
            served.serve_run(&mut run).await;
            run.finished().for_each(Finished::answer);
        });
        settle().await;
        task
    }

    fn paused(&self) -> u64 {
        self.served.disk().paused()
    }
}

async fn settle() {
    for _ in 0..100 {
        yield_now().await;
    }
}

fn run<T: 'static, F: Future<Output = T> + 'static>(
    error: io::ErrorKind,
    work: impl FnOnce(Stage) -> F,
) -> T {
    let sim = Sim::new(1);
    let stage = Stage::new(&sim, error);
    sim.block_on(work(stage)).unwrap()
}

#[test]
fn a_write_without_space_waits_until_the_disk_is_resumed() {
    for error in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
        run(error, async |stage| {
            let queue = Rc::new(Queue::default());
            let write = stage.begin(&queue, 0).await;
            assert_eq!((stage.paused(), queue.answers.borrow().len()), (1, 0));
            // Other requests go on.
            stage.begin(&queue, 8192).await.await;
            assert_eq!(queue.answers.take(), [Ok(())]);
            // A resume without space: the request waits again.
            stage.served.pause.resume();
            settle().await;
            assert_eq!((stage.paused(), queue.answers.borrow().len()), (1, 0));
            stage.storage.heal();
            settle().await;
            assert_eq!(stage.paused(), 1, "it does not try again by itself");
            stage.served.pause.resume();
            write.await;
            assert_eq!((stage.paused(), queue.answers.take()), (0, vec![Ok(())]));
            let sums = stage.served.statistics().summary(OpKind::Write).unwrap();
            assert_eq!((sums.requests, sums.errors), (2, 0));
        });
    }
}

#[test]
fn other_errors_do_not_pause_the_disk() {
    for error in [io::ErrorKind::FileTooLarge, io::ErrorKind::Other] {
        run(error, async |stage| {
            let queue = Rc::new(Queue::default());
            stage.begin(&queue, 0).await.await;
            assert!(queue.answers.borrow()[0].is_err());
        });
    }
}

#[test]
fn a_waiting_request_is_not_in_flight_for_a_quiesce() {
    run(io::ErrorKind::StorageFull, async |stage| {
        let queue = Rc::new(Queue::default());
        let write = stage.begin(&queue, 0).await;
        let (replier, drained) = replies();
        stage.served.quiesce.start(Some(replier));
        assert!(matches!(drained.arrived()[..], [Ok(())]), "nothing is in flight");
        stage.storage.heal();
        stage.served.pause.resume();
        settle().await;
        assert_eq!(queue.answers.borrow().len(), 0, "the disk is quiesced");
        stage.served.quiesce.resume();
        write.await;
        assert_eq!(queue.answers.take(), [Ok(())]);
    });
}

#[test]
fn a_queue_that_ends_gets_the_error_of_a_last_attempt() {
    run(io::ErrorKind::StorageFull, async |stage| {
        let (ending, other) = (Rc::new(Queue::default()), Rc::new(Queue::default()));
        let (first, second) = (stage.begin(&ending, 0).await, stage.begin(&other, 512).await);
        ending.ends.set(true);
        stage.served.drain();
        first.await;
        assert_eq!(ending.answers.take(), [Err(Failure::NoSpace)]);
        // A request that fails while its queue ends does not begin to wait.
        stage.begin(&ending, 0).await.await;
        assert_eq!(ending.answers.take(), [Err(Failure::NoSpace)]);
        assert_eq!((stage.paused(), other.answers.borrow().len()), (1, 0), "it waits on");
        stage.storage.heal();
        stage.served.suspend();
        second.await;
        assert_eq!(other.answers.take(), [Ok(())], "the last attempt may succeed");
        stage.served.resume();
    });
}

/// The destination of a migration has the space that this host lacks.
#[test]
fn a_queue_that_leaves_its_requests_gets_back_those_that_wait() {
    run(io::ErrorKind::StorageFull, async |stage| {
        let queue = Rc::new(Queue::default());
        let (alone, run) = (stage.begin(&queue, 2048).await, stage.begin_run(&queue).await);
        assert_eq!(stage.paused(), 3);
        queue.suspends.set(true);
        queue.ends.set(true);
        stage.served.release_paused();
        alone.await;
        run.await;
        // The other two requests of the run had space.
        assert_eq!((queue.taken_back.get(), queue.answers.take()), (3, vec![Ok(()); 2]));
        assert_eq!(stage.paused(), 0);
    });
}

#[test]
fn requests_of_a_run_wait_by_themselves() {
    run(io::ErrorKind::StorageFull, async |stage| {
        let queue = Rc::new(Queue::default());
        let task = stage.begin_run(&queue).await;
        assert_eq!(stage.paused(), 2);
        stage.storage.heal();
        stage.served.pause.resume();
        task.await;
        assert_eq!(queue.answers.take(), [Ok(()); 4]);
        assert_eq!(stage.paused(), 0);
    });
}

/// A disk on a device that it shares, and its neighbour there. Counts the I/O of the image.
struct Shared {
    handle: Handle,
    storage: SimDisk,
    served: Rc<LocalDisk>,
    neighbour: ReactorShare,
}

impl Shared {
    fn new(handle: &Handle) -> Self {
        let storage = SimDisk::new(SimImage::zeroed(CAPACITY), SimConfig::new(1));
        let host = Host::default();
        let share = || host.share(Some(("d", &DeviceProfile::FLASH)), None, &Knobs::default());
        let source = Source::Null { size: CAPACITY };
        let disk = Arc::new(Disk::sharing(options(), source, Arc::clone(&share())));
        let raw = Raw::on(storage.clone(), Alignment { memory_align: 1, offset_align: 1 });
        let full = Fault::new(SimOp::Write, io::ErrorKind::StorageFull).within(0..4096).always();
        storage.fail(full);
        let served = LocalDisk::new(disk, Backend::Null, Some(handle.clone()));
        let counted = storage.clone();
        served.exchange(Rc::new(CurrentImage::counted(Backend::Raw(raw), move || {
            let begun = counted.trace().into_iter().filter(|line| line.phase == Phase::Started);
            begun.fold((0, 0), |(operations, bytes), line| (operations + 1, bytes + line.len))
        })));
        let neighbour = share().on_reactor();
        Shared { handle: handle.clone(), storage, served: Rc::new(served), neighbour }
    }

    /// Returns the cost that the disk was charged so far, in nanoseconds.
    async fn used(&self) -> u64 {
        let before = self.served.disk().share().figures().used_ns;
        // The next control period counts it.
        for _ in 0..20 {
            self.handle.sleep(std::time::Duration::from_millis(100)).await;
            let now = time_of(self.handle.read_clock());
            let read = operation(OperationKind::Read, 512, 1);
            self.neighbour.done(now, self.neighbour.ask(now, &read).expect("the device is idle"));
        }
        let used = self.served.disk().share().figures().used_ns;
        assert!(used > before, "nothing was charged");
        used
    }

    async fn settle(&self) {
        for _ in 0..1000 {
            self.handle.yield_now().await;
        }
    }
}

fn operation(kind: OperationKind, bytes: u64, requests: u32) -> Operation {
    Operation { kind, bytes, sequential: false, requests }
}

/// The scheduler charges a run for what it does after it was resumed: an operation when it is
/// admitted, and the rest of the image's operations when it has ended.
#[test]
fn a_run_that_waited_is_charged_for_all_its_operations_once() {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    let work = async move {
        let stage = Shared::new(&handle);
        let queue = Rc::new(Queue::default());
        let requests = [0, 1, 2].map(|number| {
            let note = Note(queue.clone());
            let (offset, segments) = (512 + 1024 * number, Segments::buffer(1024));
            Request::new(WRITE, offset, 1024, segments, handle.now(), note)
        });
        assert_eq!(stage.served.neighbours(&requests), 3);
        let served = stage.served.clone();
        handle.spawn(async move {
            let mut run = Run::default();
            run.fill(requests.into_iter());
            served.serve_run(&mut run).await;
            run.finished().for_each(Finished::answer);
        });
        stage.settle().await;
        assert_eq!(stage.served.disk().paused(), 3);
        let before = stage.used().await;
        stage.storage.heal();
        stage.served.pause.resume();
        stage.settle().await;
        assert_eq!(queue.answers.take(), [Ok(()); 3]);
        let costs = *stage.neighbour.device().expect("it has a device").costs();
        let charged = stage.used().await - before;
        let admitted = costs.of(&operation(OperationKind::Write, 3 * 1024, 3));
        assert_eq!(charged, admitted + costs.of(&operation(OperationKind::Write, 0, 1)) * 2);
    };
    executor.block_on(work).unwrap();
}
