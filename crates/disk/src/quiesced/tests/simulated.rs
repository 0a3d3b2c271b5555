//! Quiesces and exchanges of a disk on two reactors, on simulated disks and a simulated clock.
//!
//! A seed determines the order of everything: both reactors, the control thread's task and the
//! disks run on this thread.

use std::cell::Cell;
use std::path::PathBuf;

use blockyard_storage::sim::{
    Journal, Phase, Power, Rng, SimConfig, SimDisk, SimFiles, SimImage, Trace,
};

use super::*;

const SEEDS: u64 = 150;
const ROUNDS: u64 = 6;
/// Lanes of each reactor. The last one uses the quiesce without a request.
const LANES: u64 = 4;
const SIZE: u64 = 2 * LANES * SECTOR;
/// Most iterations of a run. One that needs more hangs.
const MOST: u64 = 100_000;

/// A folder with the names of the files. It is removed with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let name = format!("blockyard-quiesced-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        Scratch(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Stage {
    disk: Arc<Disk>,
    files: SimFiles,
    paths: [PathBuf; 2],
    sources: [Source; 2],
    /// The image that the disk has, by its number in the arrays.
    present: Cell<usize>,
    /// What each image holds in each lane's sector, as the answers say.
    model: RefCell<[[u8; 2 * LANES as usize]; 2]>,
    is_stopped: Cell<bool>,
    /// Number of requests that were made, and that were answered.
    asked: Cell<u64>,
    answered: Cell<u64>,
    /// Number of guards that lanes without requests hold.
    guards: Cell<u64>,
    /// Number of times that such a lane was held.
    held: Cell<u64>,
    running: Cell<u64>,
}

impl Stage {
    fn new(scratch: &Scratch, seed: u64) -> Rc<Self> {
        let config = SimConfig { power: Power::on(), ..SimConfig::new(seed) };
        let files = SimFiles::new(config, SimDisk::into);
        let paths = ["first", "second"].map(|name| scratch.0.join(format!("{name}.raw")));
        let sources = paths.each_ref().map(|path| {
            std::fs::File::create(path).unwrap().set_len(SIZE).unwrap();
            files.add(path, SimImage::zeroed(SIZE), None);
            let journal = Some(Journal::simulated(&files));
            let options = ChainOptions { journal, ..ChainOptions::new(path) };
            Source::open(&ChainOptions { cache: CacheMode::Writeback, ..options }).unwrap()
        });
        Rc::new(Stage {
            disk: disk(sources[0].clone()),
            files,
            paths,
            sources,
            present: Cell::new(0),
            model: RefCell::default(),
            is_stopped: Cell::new(false),
            asked: Cell::new(0),
            answered: Cell::new(0),
            guards: Cell::new(0),
            held: Cell::new(0),
            running: Cell::new(0),
        })
    }

    fn trace(&self) -> [Vec<Trace>; 2] {
        self.paths.each_ref().map(|path| self.files.disk(path).expect("it was added").trace())
    }

    /// Begins the lanes of a reactor.
    fn begin(self: &Rc<Self>, handle: &Handle, first: u64, rng: &mut Rng) {
        let served = LocalDisk::local(handle, &self.disk).unwrap();
        for number in first..first + LANES {
            self.running.set(self.running.get() + 1);
            let (stage, served, handle) = (self.clone(), served.clone(), handle.clone());
            let mut rng = rng.fork();
            handle.clone().spawn(async move {
                while !stage.is_stopped.get() {
                    match number % LANES {
                        3 => stage.enter(&served, &handle, &mut rng).await,
                        _ => stage.step(&served, number, &mut rng).await,
                    }
                    pause(&handle, rng.below(8)).await;
                }
                stage.running.set(stage.running.get() - 1);
            });
        }
    }

    /// Writes or reads the sector of a lane.
    async fn step(&self, served: &LocalDisk, number: u64, rng: &mut Rng) {
        self.asked.set(self.asked.get() + 1);
        let (at, lane) = (number * SECTOR, number as usize);
        if rng.one_in(3) {
            let read = ask(served, Op::Read, at, &[0xff; SECTOR as usize]).await;
            let known = self.model.borrow()[self.present.get()][lane];
            assert!(read.iter().all(|byte| *byte == known), "lane {lane} has read another image");
        } else {
            let byte = rng.below(255) as u8;
            ask(served, WRITE, at, &[byte; SECTOR as usize]).await;
            // An exchange comes before the request or after its answer.
            self.model.borrow_mut()[self.present.get()][lane] = byte;
        }
        self.answered.set(self.answered.get() + 1);
    }

    /// Counts as in flight for a while, as a request does.
    async fn enter(&self, served: &LocalDisk, handle: &Handle, rng: &mut Rng) {
        let quiesce = &served.quiesce;
        let guard = match quiesce.try_enter() {
            Some(guard) => guard,
            None if rng.one_in(2) => {
                self.held.set(self.held.get() + 1);
                return quiesce.wait_for_resume().await;
            }
            None => {
                self.held.set(self.held.get() + 1);
                quiesce.enter().await
            }
        };
        self.guards.set(self.guards.get() + 1);
        pause(handle, rng.below(20)).await;
        self.guards.set(self.guards.get() - 1);
        drop(guard);
    }

    /// Runs quiesces, and exchanges the image in some.
    async fn control(self: Rc<Self>, handle: Handle, mut rng: Rng, second: Rc<Cell<bool>>) {
        let opens_late = rng.below(ROUNDS);
        for round in 0..ROUNDS {
            pause(&handle, rng.below(200)).await;
            let quiesced = self.disk.quiesce_on(&handle, "a test").await.unwrap();
            if round == opens_late {
                // A reactor that opens the disk now waits as well.
                second.set(true);
            }
            let (trace, answered) = (self.trace(), self.answered.get());
            for trace in &trace {
                let is_start = |line: &&Trace| line.phase == Phase::Started;
                assert_eq!(2 * trace.iter().filter(is_start).count(), trace.len(), "in flight");
            }
            self.unchanged(&handle, &mut rng, &trace, answered).await;
            if rng.one_in(2) {
                let next = 1 - self.present.get();
                quiesced.exchange(&self.sources[next], None).await.unwrap();
                self.present.set(next);
                self.unchanged(&handle, &mut rng, &trace, answered).await;
            }
            drop(quiesced);
        }
        self.is_stopped.set(true);
        while self.running.get() > 0 {
            handle.yield_now().await;
        }
    }

    /// Checks for a while that the quiesced disk does nothing.
    async fn unchanged(
        &self,
        handle: &Handle,
        rng: &mut Rng,
        trace: &[Vec<Trace>; 2],
        answered: u64,
    ) {
        for _ in 0..rng.between(1, 40) {
            assert_eq!((self.guards.get(), self.answered.get()), (0, answered));
            pause(handle, 1).await;
        }
        let now = self.trace();
        assert_eq!(now.each_ref().map(Vec::len), trace.each_ref().map(Vec::len), "one began");
    }
}

async fn pause(handle: &Handle, iterations: u64) {
    for _ in 0..iterations {
        handle.yield_now().await;
    }
}

#[test]
fn no_request_is_in_flight_during_a_quiesce_and_each_uses_one_image() {
    let scratch = Scratch::new();
    let (mut asked, mut held) = (0, 0);
    for seed in 0..SEEDS {
        let (stage, mut rng) = (Stage::new(&scratch, seed), Rng::new(seed));
        let [first, second] = [(); 2].map(|()| Executor::simulated().unwrap());
        let handles = [&first, &second].map(|executor| executor.handle().clone());
        stage.begin(&handles[0], 0, &mut rng);
        let (has_second, ended) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        let control = stage.clone().control(handles[0].clone(), rng.fork(), has_second.clone());
        let (pumped, is_over, mut of_second) = (stage.clone(), ended.clone(), rng.fork());
        let [handle, other] = handles;
        let on_first = handle.clone();
        handle.spawn(async move {
            let mut has_begun = false;
            for iteration in 0.. {
                assert!(iteration < MOST, "seed {seed}: a request hangs");
                if is_over.get() {
                    break;
                }
                if has_second.get() && !std::mem::replace(&mut has_begun, true) {
                    pumped.begin(&other, LANES, &mut of_second);
                }
                let yielding = other.clone();
                second.block_on(async move { yielding.yield_now().await }).unwrap();
                on_first.yield_now().await;
            }
        });
        first
            .block_on(async move {
                control.await;
                ended.set(true);
            })
            .unwrap();
        assert_eq!(stage.asked.get(), stage.answered.get(), "seed {seed}");
        for (path, known) in stage.paths.iter().zip(stage.model.take()) {
            let contents = stage.files.disk(path).expect("it was added").contents();
            let found: Vec<_> = contents.chunks(SECTOR as usize).map(|sector| sector[0]).collect();
            assert_eq!(found, known, "seed {seed}");
        }
        asked += stage.asked.get();
        held += stage.held.get();
    }
    println!("{asked} requests, {held} times held");
    assert!(asked > 100 * SEEDS && held > SEEDS, "{asked} requests, {held} times held");
}
