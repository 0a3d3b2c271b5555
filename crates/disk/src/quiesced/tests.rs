//! Quiesces a disk under load: on simulated disks for many seeds, and on threads for what only
//! threads can show, the order of memory accesses.

use super::*;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::{Remote, Segments};

use crate::{DiskOptions, Op, Request, Status, Token};

mod simulated;

const SECTOR: u64 = 512;
/// Lanes of the load on threads.
const LANES: usize = 6;
const WRITE: Op = Op::Write { fua: false };
/// Longest wait. A test that waits longer hangs.
const HANGS: Duration = Duration::from_secs(60);

fn disk(source: Source) -> Arc<Disk> {
    let options = DiskOptions {
        name: "quiesced".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::Writeback,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    Arc::new(Disk::new(options, source))
}

fn ram(size: u64) -> Source {
    Source::open(&ChainOptions::new(format!("ram:{size}"))).unwrap()
}

struct Answered(Rc<RefCell<Option<Vec<u8>>>>);

impl Token for Answered {
    fn answer(self, status: Status, segments: Segments) {
        assert_eq!(status, Ok(()));
        let mut bytes = vec![0; segments.len()];
        segments.copy_out(0, &mut bytes);
        assert!(self.0.borrow_mut().replace(bytes).is_none(), "a request was answered twice");
    }

    fn may_wait(&self) -> bool {
        true
    }
}

async fn ask(served: &LocalDisk, op: Op, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let (segments, answer) = (Segments::from_bytes(bytes), Rc::new(RefCell::default()));
    let (len, arrived) = (bytes.len() as u64, Instant::now());
    let request = Request::new(op, offset, len, segments, arrived, Answered(answer.clone()));
    served.serve(request).await.answer();
    answer.take().expect("a request that was served is answered")
}

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

    fn open(&self, disk: &Arc<Disk>) {
        let disk = disk.clone();
        let opened = self.remote.ask_later(move |handle, reply| {
            LocalDisk::local(handle, &disk).unwrap();
            reply.send(())
        });
        opened.until(Instant::now() + HANGS).unwrap();
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

/// Runs a control thread's work on this thread.
fn control<T: 'static>(work: impl AsyncFnOnce(Handle) -> T + 'static) -> T {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { work(handle).await }).unwrap()
}

/// What one lane has written last, and what was answered. The accesses order nothing.
#[derive(Default)]
struct Lane {
    asked: AtomicU64,
    answered: AtomicU64,
}

/// Writes growing numbers to the lane's sector until told to stop. The channel is closed then.
fn load(
    reactor: &Reactor,
    disk: &Arc<Disk>,
    number: u64,
    lane: Arc<Lane>,
    stop: Arc<AtomicBool>,
) -> mpsc::Receiver<()> {
    let (disk, (sender, ended)) = (disk.clone(), mpsc::channel());
    reactor.remote.run(move |handle| {
        let served = LocalDisk::local(handle, &disk).unwrap();
        let handle_ = handle.clone();
        handle.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let next = lane.asked.load(Ordering::Relaxed) + 1;
                lane.asked.store(next, Ordering::Relaxed);
                let mut bytes = [0; SECTOR as usize];
                bytes[..8].copy_from_slice(&next.to_le_bytes());
                ask(&served, WRITE, number * SECTOR, &bytes).await;
                lane.answered.store(next, Ordering::Relaxed);
                handle_.yield_now().await;
            }
            drop(sender);
        });
    });
    ended
}

/// Returns the numbers in the sectors of a disk in memory.
fn numbers(source: &Source) -> [u64; LANES] {
    let Source::Ram(memory) = source else { unreachable!() };
    let mut segments = Segments::default();
    segments.reset(&Rc::new((**memory).clone()));
    segments.push_guest(0, LANES as u64 * SECTOR).unwrap();
    let mut bytes = [0; LANES * SECTOR as usize];
    segments.copy_out(0, &mut bytes);
    let sector = |lane: usize| &bytes[lane * SECTOR as usize..][..8];
    std::array::from_fn(|lane| u64::from_le_bytes(sector(lane).try_into().unwrap()))
}

/// The control thread reads and replaces the memory that the reactors write, without any lock. Only
/// the quiesce orders the accesses.
#[test]
fn the_thread_that_quiesces_sees_all_that_the_reactors_have_done() {
    let (reactors, images) = ([Reactor::start(), Reactor::start()], [(); 2].map(|()| ram(1 << 20)));
    let disk = disk(images[0].clone());
    let (lanes, stop) = ([(); LANES].map(|()| Arc::new(Lane::default())), Arc::default());
    let begin = |(number, lane): (u64, &Arc<Lane>)| {
        let reactor = &reactors[number as usize % 2];
        load(reactor, &disk, number, lane.clone(), Arc::clone(&stop))
    };
    let ends: Vec<_> = (0..).zip(&lanes).map(begin).collect();
    let answered = |lane: &Arc<Lane>| lane.answered.load(Ordering::Relaxed);
    let mut before = [0; LANES];
    for round in 0..100 {
        let until = Instant::now() + HANGS;
        while lanes.each_ref().map(answered).iter().zip(before).any(|(now, was)| *now <= was) {
            assert!(Instant::now() < until, "the load makes no progress");
            std::thread::yield_now();
        }
        let (disk, images, lanes) = (disk.clone(), images.clone(), lanes.clone());
        before = control(async move |handle| {
            let quiesced = disk.quiesce_on(&handle, "a test").await.unwrap();
            let found = numbers(&images[round % 2]);
            for (lane, found) in lanes.iter().zip(found) {
                // A lane notes an answer after its request has left the quiesce.
                let noted = answered(lane);
                assert!(found == noted || found == noted + 1, "{found}, noted {noted}");
            }
            quiesced.exchange(&images[(round + 1) % 2], None).await.unwrap();
            assert_eq!(numbers(&images[round % 2]), found, "a request began: round {round}");
            found
        });
    }
    stop.store(true, Ordering::Relaxed);
    for end in ends {
        assert_eq!(end.recv_timeout(HANGS), Err(mpsc::RecvTimeoutError::Disconnected));
    }
    assert!(disk.longest_held_back() > Duration::ZERO);
}

#[test]
fn a_quiesce_does_not_wait_for_a_reactor_that_has_ended() {
    let (reactors, disk) = ([Reactor::start(), Reactor::start()], disk(ram(1 << 20)));
    reactors.iter().for_each(|reactor| reactor.open(&disk));
    let [first, second] = reactors;
    drop(first);
    control(async move |handle| {
        let quiesced = disk.quiesce_on(&handle, "a test").await.unwrap();
        drop(second);
        drop(quiesced);
        let quiesced = disk.quiesce_on(&handle, "a test").await.unwrap();
        quiesced.exchange(&ram(1 << 20), None).await.unwrap();
    });
}
