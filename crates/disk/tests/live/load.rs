//! Reactors, and a verified load that continues while the images are exchanged.
//!
//! Sectors are assigned to lanes in stripes. Lanes share clusters, but not sectors. So each lane
//! knows the contents of its own sectors, and checks every read.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, LocalDisk, Op, Request, Status, Token};
use blockyard_ring::{Executor, Remote, Segments};
use blockyard_storage::sim::Rng;

pub const SECTOR: u64 = 512;
/// Longest wait. A test that waits longer hangs.
pub const HANGS: Duration = Duration::from_secs(60);
const LANES: u64 = 8;
/// Sectors of a stripe, in the half of the disk with small stripes, and in the other half.
const STRIPES: [u64; 2] = [3, 205];

/// Waits for the end of a thread, and returns its result.
#[track_caller]
pub fn result<T>(thread: JoinHandle<T>) -> T {
    let begun = Instant::now();
    while !thread.is_finished() {
        assert!(begun.elapsed() < HANGS, "the work hangs");
        std::thread::yield_now();
    }
    thread.join().unwrap()
}

pub struct Reactor {
    pub remote: Remote,
    thread: Option<JoinHandle<()>>,
}

impl Reactor {
    pub fn start() -> Self {
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let executor = Executor::new().unwrap();
            sender.send(executor.remote()).unwrap();
            executor.run().unwrap();
        });
        Reactor { remote: receiver.recv().unwrap(), thread: Some(thread) }
    }

    /// Runs `work` with the disk on this reactor.
    pub fn on<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        disk: &Arc<Disk>,
        work: impl FnOnce(Rc<LocalDisk>) -> F + Send + 'static,
    ) -> T {
        let disk = disk.clone();
        let answer = self.remote.ask_later(move |handle, reply| {
            let work = work(LocalDisk::local(handle, &disk).unwrap());
            handle.spawn(async move { reply.send(work.await) });
        });
        answer.until(Instant::now() + HANGS).expect("the reactor has died or hangs")
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.remote.run(|handle| handle.stop());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(std::thread::panicking() || ended.is_ok(), "a reactor has panicked");
        }
    }
}

/// Ends the disk as the server does: flushes it, closes it on all reactors, and closes its image.
pub fn close(disk: &Arc<Disk>, reactors: &[Reactor]) {
    disk.end_work();
    for reactor in reactors {
        assert_eq!(reactor.on(disk, async |served| served.flush_unsynced().await), Ok(()));
    }
    for reactor in &reactors[1..] {
        let disk = disk.clone();
        reactor.remote.ask(move |handle, reply| {
            LocalDisk::forget(handle, &disk);
            reply.send(());
        });
    }
    assert_eq!(reactors[0].on(disk, async |served| served.close().await), Ok(()));
    let disk = disk.clone();
    reactors[0].remote.ask(move |handle, reply| {
        LocalDisk::forget(handle, &disk);
        reply.send(());
    });
}

type Answered = (Status, Vec<u8>);

struct Answer(Rc<RefCell<Vec<Answered>>>);

impl Token for Answer {
    fn answer(self, status: Status, segments: Segments) {
        let mut bytes = vec![0; segments.len()];
        segments.copy_out(0, &mut bytes);
        self.0.borrow_mut().push((status, bytes));
    }

    fn may_wait(&self) -> bool {
        true
    }
}

/// Serves one request. For a read `bytes` are the initial contents of the buffer.
pub async fn ask(served: &LocalDisk, op: Op, at: u64, bytes: Vec<u8>) -> Answered {
    let answer = Rc::new(RefCell::default());
    let (len, segments) = (bytes.len() as u64, Segments::from_bytes(&bytes));
    let segments =
        if matches!(op, Op::Read | Op::Write { .. }) { segments } else { Segments::default() };
    let request = Request::new(op, at, len, segments, Instant::now(), Answer(answer.clone()));
    served.serve(request).await.answer();
    answer.take().pop().expect("answered")
}

pub const WRITE: Op = Op::Write { fua: false };

/// The contents of the disk as a lane knows them. Only those of its own sectors are valid.
struct Known {
    before: Arc<Vec<u8>>,
    since: HashMap<u64, Vec<u8>>,
}

impl Known {
    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = self.before[at as usize..at as usize + len].to_vec();
        for (sector, bytes) in (at / SECTOR..).zip(bytes.chunks_mut(SECTOR as usize)) {
            if let Some(since) = self.since.get(&sector) {
                bytes.copy_from_slice(since);
            }
        }
        bytes
    }

    fn set(&mut self, at: u64, bytes: &[u8]) {
        self.since.extend((at / SECTOR..).zip(bytes.chunks(SECTOR as usize).map(<[u8]>::to_vec)));
    }
}

struct Lane {
    number: u64,
    lanes: u64,
    served: Rc<LocalDisk>,
    known: Known,
    rng: Rng,
}

impl Lane {
    fn owns(&self, sector: u64) -> bool {
        let coarse = sector >= self.known.before.len() as u64 / SECTOR / 2;
        sector / STRIPES[usize::from(coarse)] % self.lanes == self.number
    }

    /// Returns a random range of the lane's own sectors.
    fn range(&mut self) -> (u64, usize) {
        let sectors = self.known.before.len() as u64 / SECTOR;
        let mut start = self.rng.below(sectors);
        while !self.owns(start) {
            start = (start + 1) % sectors;
        }
        let most = if self.rng.one_in(2) { 8 } else { 205 };
        let longest = (start..sectors).take(most).take_while(|&s| self.owns(s)).count() as u64;
        (start * SECTOR, (self.rng.between(1, longest) * SECTOR) as usize)
    }

    async fn done(&self, op: Op, at: u64, bytes: Vec<u8>) -> Vec<u8> {
        let (status, bytes) = ask(&self.served, op, at, bytes).await;
        assert_eq!(status, Ok(()), "lane {}: {op:?} at {at}", self.number);
        bytes
    }

    async fn step(&mut self) {
        let (at, len) = self.range();
        let unmap = self.rng.one_in(2);
        match self.rng.below(16) {
            0 => {
                self.done(Op::WriteZeroes { unmap, fua: unmap, fast: false }, at, vec![0; len])
                    .await;
                self.known.set(at, &vec![0; len]);
            }
            1 => {
                self.done(Op::Discard, at, vec![0; len]).await;
                let now = self.done(Op::Read, at, vec![0xee; len]).await;
                let was = self.known.bytes(at, len);
                assert!(
                    now.iter().zip(was).all(|(now, was)| *now == 0 || *now == was),
                    "a discarded sector holds neither zeroes nor its old data"
                );
                self.known.set(at, &now);
            }
            2 => drop(self.done(Op::Flush, 0, Vec::new()).await),
            3..9 => self.check(at, len).await,
            _ => {
                let mut bytes = vec![0; len];
                self.rng.fill(&mut bytes);
                self.known.set(at, &bytes);
                let fua = self.rng.one_in(8);
                self.done(Op::Write { fua }, at, bytes).await;
            }
        }
    }

    async fn check(&self, at: u64, len: usize) {
        let found = self.done(Op::Read, at, vec![0xee; len]).await;
        let expected = self.known.bytes(at, len);
        if let Some(wrong) = found.chunks(512).zip(expected.chunks(512)).position(|(a, b)| a != b) {
            panic!(
                "lane {}: sector {} does not hold what was written",
                self.number,
                at as usize / 512 + wrong
            );
        }
    }
}

/// A load that runs until it is ended.
pub struct Load {
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
    lanes: u64,
    before: Arc<Vec<u8>>,
    ended: mpsc::Receiver<HashMap<u64, Vec<u8>>>,
}

impl Load {
    /// Starts the load. `known`: the present contents of the disk.
    pub fn start(reactors: &[Reactor], disk: &Arc<Disk>, seed: u64, known: &[u8]) -> Self {
        let (sender, ended) = mpsc::channel();
        let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (lanes, before) = (reactors.len() as u64 * LANES, Arc::new(known.to_vec()));
        for number in 0..lanes {
            let (disk, sender) = (disk.clone(), sender.clone());
            let known = Known { before: before.clone(), since: HashMap::new() };
            let (stop, steps) = (stop.clone(), steps.clone());
            reactors[(number / LANES) as usize].remote.run(move |handle| {
                let served = LocalDisk::local(handle, &disk).unwrap();
                let rng = Rng::new(seed << 8 | number);
                let mut lane = Lane { number, lanes, served, known, rng };
                handle.spawn(async move {
                    while !stop.load(Ordering::SeqCst) {
                        lane.step().await;
                        steps.fetch_add(1, Ordering::SeqCst);
                    }
                    let _ = sender.send(lane.known.since);
                });
            });
        }
        Load { stop, steps, lanes, before, ended }
    }

    /// Waits until the load has done `steps` more requests.
    pub fn go_on(&self, steps: u64) {
        let (from, begun) = (self.steps.load(Ordering::SeqCst), Instant::now());
        while self.steps.load(Ordering::SeqCst) < from + steps {
            assert!(begun.elapsed() < HANGS, "the load makes no progress");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the load. Returns the contents of the disk.
    pub fn end(self) -> Vec<u8> {
        self.stop.store(true, Ordering::SeqCst);
        let mut disk = self.before.to_vec();
        for _ in 0..self.lanes {
            for (sector, bytes) in
                self.ended.recv_timeout(HANGS).expect("a lane has failed or hangs")
            {
                disk[(sector * SECTOR) as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
        }
        disk
    }
}
