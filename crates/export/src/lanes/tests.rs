use std::sync::Arc;
use std::time::Instant;

use blockyard_disk::{Disk, DiskOptions, Op, Source, Status};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::{Executor, Segments, Signal};

use super::*;

/// The answers so far: the number and the status of each request.
struct Answers {
    all: RefCell<Vec<(u32, Status)>>,
    rung: Signal,
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

/// Calls `work` with a disk of 1 MiB in a file. The disk uses io_uring, so no request is complete
/// when `dispatch` returns.
fn stage(work: impl AsyncFnOnce(&Handle, Rc<LocalDisk>, Rc<Answers>) + 'static) {
    let name = format!("blockyard-lanes-{:?}", std::thread::current().id());
    let path = std::env::temp_dir().join(format!("{name}-{}.raw", std::process::id()));
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let (name, serial) = (String::new(), String::new());
    let options = DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let chain = ChainOptions { cache: CacheMode::None, ..ChainOptions::new(&path) };
    let disk = Arc::new(Disk::new(options, Source::open(&chain).unwrap()));
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let answers = Rc::new(Answers { all: RefCell::default(), rung: Signal::new(&handle) });
    let served = LocalDisk::local(&handle, &disk).unwrap();
    std::fs::remove_file(&path).unwrap();
    executor.block_on(async move { work(&handle, served, answers).await }).unwrap();
}

/// Returns reads of 512 bytes, with `apart` bytes between the starts of two reads.
fn reads(answers: &Rc<Answers>, count: u32, apart: u64) -> Vec<Request<Number>> {
    let read = |number| {
        let segments = Segments::buffer(512);
        Request::new(
            Op::Read,
            u64::from(number) * apart,
            512,
            segments,
            Instant::now(),
            Number(answers.clone(), number),
        )
    };
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

#[test]
fn a_volatile_write_is_synced_if_the_write_cache_is_off_when_it_is_answered() {
    stage(async |handle, served, answers| {
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
        let write = |number| {
            let (segments, token) = (Segments::buffer(512), Number(answers.clone(), number));
            Request::new(Op::Write { fua: false }, 0, 512, segments, Instant::now(), token)
        };
        lanes.dispatch(&mut vec![write(1)]);
        assert_eq!(
            asked.get(),
            0,
            "the write cache is checked at the answer, not when the write begins"
        );
        write_back.set(false);
        assert_eq!(answers.wait(1).await, [1]);
        assert_eq!(asked.get(), 1);
    });
}
