//! Lanes on the simulated disk and clock.

use std::sync::Arc;

use blockyard_disk::{Backend, Disk, DiskOptions, Op, Source, Status};
use blockyard_image::{Alignment, CacheMode, Raw};
use blockyard_ring::{Executor, Segments, Signal};
use blockyard_storage::sim::{Rng, SimConfig, SimDisk, SimImage, pattern};

use super::*;

/// The answers so far: the number and the status of each request.
struct Answers {
    all: RefCell<Vec<(u32, Status)>>,
    rung: Signal,
    handle: Handle,
}

impl Answers {
    async fn wait(&self, count: usize) -> Vec<u32> {
        while self.all.borrow().len() < count {
            self.rung.wait().await;
        }
        let mut all = self.all.take();
        assert!(all.iter().all(|(_, status)| status.is_ok()), "{all:?}");
        all.sort_by_key(|(number, _)| *number);
        all.into_iter().map(|(number, _)| number).collect()
    }
}

struct Number(Rc<Answers>, u32);

impl Token for Number {
    fn answer(self, status: Status, _: Segments) {
        self.0.all.borrow_mut().push((self.1, status));
        self.0.rung.ring();
    }

    fn may_wait(&self) -> bool {
        true
    }
}

/// Length of the disk in bytes.
const SIZE: u64 = 1 << 20;

/// Calls `work` with a simulated disk, on the simulated clock. No request is complete when
/// `dispatch` returns, and requests end in an order that `seed` determines.
fn stage_of(
    seed: u64,
    work: impl AsyncFnOnce(&Handle, Rc<LocalDisk>, Rc<Answers>, SimDisk) + 'static,
) {
    println!("seed {seed}");
    let (name, serial) = (String::new(), String::new());
    let options = DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Arc::new(Disk::new(options, Source::Null { size: SIZE }));
    let sim = SimDisk::new(SimImage::zeroed(SIZE), SimConfig::new(seed));
    let raw = Raw::on(sim.clone(), Alignment { memory_align: 1, offset_align: 1 });
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    let answers = Rc::new(Answers {
        all: RefCell::default(),
        rung: Signal::new(&handle),
        handle: handle.clone(),
    });
    let served = Rc::new(LocalDisk::new(disk, Backend::Raw(raw), Some(handle.clone())));
    executor.block_on(async move { work(&handle, served, answers, sim).await }).unwrap();
}

/// Calls `work` with several simulated disks, one after another.
fn stage(work: impl AsyncFnOnce(&Handle, Rc<LocalDisk>, Rc<Answers>) + Copy + 'static) {
    for seed in 0..20 {
        stage_of(seed, async move |handle, served, answers, _| work(handle, served, answers).await);
    }
}

/// Returns a request without data, or with a buffer of its length.
fn request(answers: &Rc<Answers>, number: u32, op: Op, offset: u64, len: u64) -> Request<Number> {
    let buffer = matches!(op, Op::Read | Op::Write { .. });
    let segments = if buffer { Segments::buffer(len as usize) } else { Segments::default() };
    let now = answers.handle.now();
    Request::new(op, offset, len, segments, now, Number(answers.clone(), number))
}

/// Returns reads of 512 bytes, with `apart` bytes between the starts of two reads.
fn reads(answers: &Rc<Answers>, count: u32, apart: u64) -> Vec<Request<Number>> {
    let read = |number| request(answers, number, Op::Read, u64::from(number) * apart, 512);
    (0..count).map(read).collect()
}

#[test]
fn each_request_has_a_lane_and_lanes_are_reused() {
    stage(async |handle, served, answers| {
        let lanes = Lanes::new(handle, served, || true);
        for _ in 0..3 {
            let mut batch = reads(&answers, 8, 8192);
            lanes.dispatch(&mut batch);
            assert!(batch.is_empty());
            assert_eq!(
                (lanes.idle.borrow().len(), answers.all.borrow().len()),
                (0, 0),
                "the disk works on all of them"
            );
            assert_eq!(answers.wait(8).await, [0, 1, 2, 3, 4, 5, 6, 7]);
            handle.yield_now().await;
            assert_eq!(lanes.idle.borrow().len(), 8);
        }
        // Fewer requests use some of the lanes. The other lanes stay idle.
        lanes.dispatch(&mut reads(&answers, 3, 8192));
        assert_eq!(lanes.idle.borrow().len(), 5);
        answers.wait(3).await;
    });
}

#[test]
fn a_run_of_adjacent_requests_has_one_lane_and_its_vector_is_reused() {
    stage(async |handle, served, answers| {
        let lanes = Lanes::new(handle, served, || true);
        for _ in 0..3 {
            lanes.dispatch(&mut reads(&answers, 8, 512));
            assert_eq!(answers.wait(8).await, [0, 1, 2, 3, 4, 5, 6, 7]);
            handle.yield_now().await;
            assert_eq!((lanes.idle.borrow().len(), lanes.runs.borrow().len()), (1, 1));
        }
    });
}

/// A queue ends while the disk handles a request. The request is answered, and no task remains.
#[test]
fn requests_in_flight_are_answered_after_their_queue_has_ended() {
    stage(async |handle, served, answers| {
        let users = Rc::strong_count(&served);
        let lanes = Lanes::new(handle, served.clone(), || true);
        lanes.dispatch(&mut reads(&answers, 2, 8192));
        answers.wait(2).await;
        handle.yield_now().await;
        lanes.dispatch(&mut reads(&answers, 1, 8192));
        lanes.close();
        drop(lanes);
        assert_eq!(answers.wait(1).await, [0]);
        handle.yield_now().await;
        assert_eq!(Rc::strong_count(&served), users, "a lane keeps the disk");
    });
}

/// If the write cache is off at the answer, a power cut after the answer leaves the written data.
#[test]
fn a_volatile_write_is_synced_if_the_write_cache_is_off_when_it_is_answered() {
    for seed in 0..20 {
        stage_of(seed, async |handle, served, answers, sim| {
            let write_back = Rc::new(Cell::new(true));
            let cache = write_back.clone();
            let asked = Rc::new(Cell::new(0));
            let count = asked.clone();
            let lanes = Lanes::new(handle, served, move || {
                count.set(count.get() + 1);
                cache.get()
            });
            lanes.dispatch(&mut reads(&answers, 1, 8192));
            answers.wait(1).await;
            assert_eq!(asked.get(), 0, "a read promises nothing");
            let data = pattern(1, 0, 8192);
            let (segments, token) = (Segments::from_bytes(&data), Number(answers.clone(), 1));
            let (op, now) = (Op::Write { fua: false }, handle.now());
            lanes.dispatch(&mut vec![Request::new(op, 0, 8192, segments, now, token)]);
            assert_eq!(
                asked.get(),
                0,
                "the write cache is checked at the answer, not when the write begins"
            );
            write_back.set(false);
            assert_eq!(answers.wait(1).await, [1]);
            assert_eq!(asked.get(), 1);
            for _ in 0..3 {
                assert!(sim.power_cut().bytes()[..8192] == data, "an answered write is lost");
            }
        });
    }
}

/// Batches of all kinds arrive while earlier requests are in the disk. In between, the lanes of the
/// queue close, and other lanes serve the next queue.
#[test]
fn each_request_of_many_batches_is_answered_once() {
    const BATCHES: u64 = 60;
    for seed in 0..40 {
        stage_of(seed, async move |handle, served, answers, _| {
            let mut rng = Rng::new(seed);
            let users = Rc::strong_count(&served);
            let mut lanes = Lanes::new(handle, served.clone(), || true);
            let (mut sent, mut most) = (0, 0);
            for _ in 0..BATCHES {
                let mut batch = Vec::new();
                let mut offset = rng.below(SIZE / 8192) * 4096;
                for _ in 0..rng.below(12) {
                    let (op, len) = match rng.below(8) {
                        0 => (Op::Flush, 0),
                        1..4 => (Op::Write { fua: rng.one_in(4) }, 512),
                        _ => (Op::Read, 512),
                    };
                    let at = if op == Op::Flush { 0 } else { offset };
                    batch.push(request(&answers, sent, op, at, len));
                    sent += 1;
                    // A run of adjacent requests goes on, or ends.
                    offset += if rng.one_in(3) { 4096 } else { 512 };
                }
                lanes.dispatch(&mut batch);
                assert!(batch.is_empty());
                most = most.max(sent as usize - answers.all.borrow().len());
                for _ in 0..rng.below(6) {
                    handle.yield_now().await;
                }
                if rng.one_in(10) {
                    lanes.close();
                    lanes = Lanes::new(handle, served.clone(), || true);
                }
            }
            assert!(most > 12, "{most} requests were in the disk at most");
            assert!(answers.wait(sent as usize).await.into_iter().eq(0..sent));
            lanes.close();
            drop(lanes);
            // Tasks of closed lanes end in the next iteration.
            handle.yield_now().await;
            handle.yield_now().await;
            assert_eq!(Rc::strong_count(&served), users, "a lane keeps the disk");
        });
    }
}
