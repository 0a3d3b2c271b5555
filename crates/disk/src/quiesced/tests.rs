//! Quiesces a disk under load from reactors on several threads.

use super::*;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;

use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::{Executor, Remote, Segments};

use crate::dirty::DirtyMap;
use crate::{DiskOptions, Op, OpKind, Request, Status, Token};

const SIZE: u64 = 1 << 20;

fn disk(filters: &[&str]) -> Arc<Disk> {
    let filters = filters.iter().map(|f| f.parse().unwrap()).collect();
    let (name, serial) = ("quiesced".into(), String::new());
    let options = DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters,
        on_enospc: Default::default(),
    };
    Arc::new(Disk::new(options, ram()))
}

fn ram() -> Source {
    Source::open(&ChainOptions::new(format!("ram:{SIZE}"))).unwrap()
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
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.remote.run(|handle| handle.stop());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

struct Answered(Rc<RefCell<Vec<u8>>>);

impl Token for Answered {
    fn answer(self, status: Status, segments: Segments) {
        assert_eq!(status, Ok(()));
        let mut bytes = vec![0; segments.len()];
        segments.copy_out(0, &mut bytes);
        *self.0.borrow_mut() = bytes;
    }

    fn may_wait(&self) -> bool {
        true
    }
}

async fn ask(served: &LocalDisk, op: Op, bytes: &[u8]) -> Vec<u8> {
    let (segments, answer) = (Segments::buffer(bytes.len()), Rc::new(RefCell::default()));
    segments.copy_in(0, bytes);
    let request =
        Request::new(op, 0, bytes.len() as u64, segments, Instant::now(), Answered(answer.clone()));
    served.serve(request).await.answer();
    answer.take()
}

/// Makes a request on a reactor, and returns the first byte of its memory when it is answered.
fn ask_on(reactor: &Reactor, disk: &Arc<Disk>, op: Op, byte: u8) -> Option<u8> {
    let disk = disk.clone();
    reactor.remote.ask(move |handle, reply| {
        let served = LocalDisk::local(handle, &disk).unwrap();
        handle.spawn(async move { reply.send(ask(&served, op, &[byte; 512]).await[0]) });
    })
}

const WRITE: Op = Op::Write { fua: false };

#[derive(Default)]
struct Load {
    asked: AtomicU64,
    answered: AtomicU64,
    stop: AtomicBool,
}

/// Keeps `lanes` requests in flight until told to stop. Counts each request when it begins and when
/// it is answered.
fn load(reactor: &Reactor, disk: &Arc<Disk>, load: &Arc<Load>, lanes: usize) -> mpsc::Receiver<()> {
    let (sender, done) = mpsc::channel();
    for _ in 0..lanes {
        let (disk, load, sender) = (disk.clone(), load.clone(), sender.clone());
        reactor.remote.run(move |handle| {
            let served = LocalDisk::local(handle, &disk).unwrap();
            let handle_ = handle.clone();
            handle.spawn(async move {
                while !load.stop.load(SeqCst) {
                    load.asked.fetch_add(1, SeqCst);
                    ask(&served, WRITE, &[1; 512]).await;
                    load.answered.fetch_add(1, SeqCst);
                    handle_.yield_now().await;
                }
                drop(sender);
            });
        });
    }
    done
}

fn wait_for(what: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !what() {
        assert!(Instant::now() < until, "waited in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of writes that a reactor has done.
fn served(reactor: &Reactor, disk: &Arc<Disk>) -> Option<u64> {
    let disk = disk.clone();
    let done =
        move |served: Rc<LocalDisk>| Some(served.statistics().summary(OpKind::Write)?.requests);
    reactor
        .remote
        .ask(move |handle, reply| reply.send(LocalDisk::known(handle, &disk).and_then(done)))
        .flatten()
}

#[test]
fn no_request_is_in_flight_during_a_quiesce_and_all_continue_after_it() {
    let reactors = [Reactor::start(), Reactor::start()];
    let [disk, slower] = ["delay:write=1ms", "delay:write=2ms"].map(|filter| disk(&[filter]));
    let all = Arc::new(Load::default());
    let ends = reactors.each_ref().map(|reactor| load(reactor, &disk, &all, 8));
    for round in 0..50u64 {
        wait_for(|| all.answered.load(SeqCst) > 32 * round);
        let quiesced = disk.quiesce("a test").unwrap();
        let before = reactors.each_ref().map(|reactor| served(reactor, &disk));
        // Requests that came before would be answered before these.
        for reactor in &reactors {
            assert_eq!(ask_on(reactor, &slower, WRITE, 1), Some(1));
        }
        let after = reactors.each_ref().map(|reactor| served(reactor, &disk));
        assert_eq!(after, before, "served while quiesced");
        drop(quiesced);
    }
    all.stop.store(true, SeqCst);
    for end in ends {
        assert!(end.recv().is_err(), "every request is answered, and every task ends");
    }
    assert_eq!(all.asked.load(SeqCst), all.answered.load(SeqCst));
    assert!(disk.longest_held_back() > Duration::ZERO);
}

#[test]
fn all_reactors_use_the_exchanged_image() {
    let (reactors, disk, new) = ([Reactor::start(), Reactor::start()], disk(&[]), ram());
    let on = |reactor: &Reactor, op: Op, byte: u8| ask_on(reactor, &disk, op, byte);
    on(&reactors[0], WRITE, 7).unwrap();
    assert_eq!(on(&reactors[1], Op::Read, 0), Some(7));
    let dirty = Arc::new(DirtyMap::new(SIZE));
    let tracker = Tracker::Dirty(dirty.clone());
    disk.quiesce("a test").unwrap().exchange(&new, Some(&tracker)).unwrap();
    let read: Vec<_> = reactors.iter().map(|r| on(r, Op::Read, 9)).collect();
    assert_eq!(read, [Some(0), Some(0)], "both reactors read the new image");
    assert_eq!(dirty.bytes(), 0);
    on(&reactors[1], WRITE, 8).unwrap();
    assert_eq!((on(&reactors[0], Op::Read, 0), dirty.bytes()), (Some(8), 64 << 10));
    // A reactor that opens the disk only now uses the new image, too.
    let late = Reactor::start();
    assert_eq!(on(&late, Op::Read, 0), Some(8));
}

#[test]
fn a_reactor_that_opens_the_disk_during_a_quiesce_waits_as_well() {
    let (reactor, disk, new) = (Reactor::start(), disk(&[]), ram());
    let quiesced = disk.quiesce("a test").unwrap();
    let (all, other) = (Arc::new(Load::default()), disk.clone());
    let end = load(&reactor, &disk, &all, 1);
    wait_for(|| all.asked.load(SeqCst) == 1);
    quiesced.exchange(&new, None).unwrap();
    assert_eq!(all.answered.load(SeqCst), 0);
    drop(quiesced);
    wait_for(|| all.answered.load(SeqCst) > 1);
    all.stop.store(true, SeqCst);
    assert!(end.recv().is_err());
    let Source::Ram(memory) = new else { unreachable!() };
    let mut written = Segments::default();
    written.reset(&Rc::new((*memory).clone()));
    written.push_guest(0, 1).unwrap();
    let mut byte = [0];
    written.copy_out(0, &mut byte);
    assert_eq!(byte, [1], "it opened the old image, and writes to the new one");
    drop(other);
}

#[test]
fn a_quiesce_does_not_wait_for_a_reactor_that_has_ended() {
    let (reactors, disk) = ([Reactor::start(), Reactor::start()], disk(&[]));
    for reactor in &reactors {
        let disk = disk.clone();
        reactor.remote.ask(move |handle, reply| {
            LocalDisk::local(handle, &disk).unwrap();
            reply.send(())
        });
    }
    let [first, second] = reactors;
    drop(first);
    let quiesced = disk.quiesce("a test").unwrap();
    drop(second);
    drop(quiesced);
    disk.quiesce("a test").unwrap().exchange(&ram(), None).unwrap();
}
