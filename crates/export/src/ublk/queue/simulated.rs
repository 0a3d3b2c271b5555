//! A queue on the simulated disk and clock. The driver is in this process: it writes descriptors
//! into memory, and completes the queue's commands.
//!
//! What must hold: each request that was given to a server is committed once, also over quiesces
//! and servers that leave. The next server gets the others. After a power cut the disk holds what
//! flushes and durable writes have promised.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blockyard_ring::NoReply;
use blockyard_ring::ublk::abi::{self, Descriptor, DeviceInfo};
use blockyard_ring::ublk::{Done, Driver};
use blockyard_storage::sim::{
    Fault, FlushToken, OpKind, Oracle, ReadToken, Rng, WriteToken, pattern,
};
use rustix::io::Errno;

use super::*;
use crate::simulated::{SIZE, Stage, simulate, took};

const SEEDS: u64 = 40;
const REQUESTS: u64 = 300;
const MOST: u32 = 32 << 10;
/// Time between two looks at what was committed.
const STEP: Duration = Duration::from_micros(100);
/// The same, for limits of one operation in a second.
const LONG_STEP: Duration = Duration::from_millis(10);

/// A device with one queue, and its servers.
struct Server {
    stage: Stage,
    driver: Arc<Driver>,
    device: Device,
    shared: Arc<Shared>,
    /// Number of calls of [`Shared::ended`].
    ended: Arc<AtomicU32>,
}

fn descriptor(op: u8, flags: u32, offset: u64, len: u64) -> Descriptor {
    let op_flags = u32::from(op) | flags;
    Descriptor { op_flags, sectors: (len / 512) as u32, start: offset / 512, addr: 0 }
}

impl Server {
    /// Starts a queue that serves `depth` requests at once.
    fn new(stage: Stage, depth: u16) -> Self {
        let info = DeviceInfo { queues: 1, depth, max_io_bytes: MOST, ..DeviceInfo::default() };
        let (driver, device) = Driver::device(&info).unwrap();
        let ended = Arc::<AtomicU32>::default();
        let calls = ended.clone();
        let shared = Arc::new(Shared {
            disk: stage.disk.clone(),
            durable: AtomicBool::new(false),
            live: AtomicU32::new(0),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            ended: Box::new(move || _ = calls.fetch_add(1, Ordering::SeqCst)),
        });
        let server = Server { stage, driver, device, shared, ended };
        server.start();
        server
    }

    /// Starts the next server's queue.
    fn start(&self) {
        let handle = &self.stage.handle;
        DeviceQueue::make(handle, &self.device, 0, self.shared.clone()).unwrap();
        let queue = DeviceQueues::find(handle, key(&self.shared, 0)).unwrap();
        queue.fetch();
        queue.driver_queue.map().unwrap();
    }

    /// Makes the queue leave. `drains`: requests pass the throttle without waiting.
    fn begin_leave(&self, drains: bool) -> PendingReply<()> {
        let key = key(&self.shared, 0);
        self.stage.handle.remote().ask_later(move |handle, reply| {
            DeviceQueue::reply_at_end(handle, key, reply, |queue| {
                if drains {
                    queue.drain();
                }
                queue.leave();
            });
        })
    }

    fn live(&self) -> u32 {
        self.shared.live.load(Ordering::SeqCst)
    }

    /// Submits requests of 4 KiB with the numbers `numbers`.
    fn send(&self, op: u8, numbers: std::ops::Range<u64>) {
        for number in numbers {
            let at = number * 4096 % SIZE;
            self.driver.submit(0, number, descriptor(op, 0, at, 4096), &[1; 4096]);
        }
    }

    /// Looks each `step`, and waits for `count` commits. Returns the times of them, in their order.
    async fn times(&self, count: usize, step: Duration) -> Vec<Duration> {
        let mut times = Vec::new();
        self.stage.settle().await;
        while times.len() < count {
            let done = self.driver.take_done();
            assert!(done.iter().all(|done| done.result == 4096), "{done:?}");
            times.extend(done.iter().map(|_| self.stage.time()));
            assert!(self.stage.time() < Duration::from_secs(3600), "a request hangs");
            if times.len() < count {
                self.stage.handle.sleep(step).await;
                for _ in 0..50 {
                    self.stage.handle.yield_now().await;
                }
            }
        }
        times
    }
}

/// A request that the driver has.
enum Sent {
    Write(WriteToken, bool),
    Read(u64, u64, ReadToken),
    Flush(FlushToken),
}

/// A load of random requests, with quiesces and servers that leave.
struct Load {
    server: Server,
    rng: Rng,
    oracle: Oracle,
    sent: BTreeMap<u64, (i32, Sent)>,
    next: u64,
    answered: u64,
    /// Number of requests that were committed after a later one.
    overtaken: u64,
    latest: u64,
}

impl Load {
    fn new(handle: &Handle, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let stage = Stage::new(handle, seed, rng.one_in(2).then(|| rng.between(2000, 20_000)));
        let server = Server::new(stage, rng.between(1, 16) as u16);
        let (sent, next, answered, overtaken, latest) = Default::default();
        Load { server, rng, oracle: Oracle::new(), sent, next, answered, overtaken, latest }
    }

    fn send(&mut self) {
        for _ in 0..self.rng.below(6) {
            if self.next < REQUESTS && self.sent.len() < 24 {
                self.submit();
            }
        }
    }

    fn submit(&mut self) {
        let number = self.next;
        let len = self.rng.between(1, u64::from(MOST) / 512) * 512;
        let offset = self.rng.below((SIZE - len) / 512 + 1) * 512;
        let fua = self.rng.one_in(4);
        let flags = if fua { abi::IO_FUA } else { 0 };
        let mut data = Vec::new();
        let (request, result, sent) = match self.rng.below(16) {
            0 => {
                let flush = Sent::Flush(self.oracle.flush_started());
                (descriptor(abi::OP_FLUSH, 0, 0, 0), 0, flush)
            }
            1 => {
                let token = self.oracle.discard_started(offset, len);
                (descriptor(abi::OP_DISCARD, 0, offset, len), 0, Sent::Write(token, false))
            }
            2 => {
                let keep = if self.rng.one_in(2) { abi::IO_NOUNMAP } else { 0 };
                let token = self.oracle.zero_started(offset, len);
                let request = descriptor(abi::OP_WRITE_ZEROES, flags | keep, offset, len);
                (request, 0, Sent::Write(token, fua))
            }
            3..9 => {
                let read = Sent::Read(offset, len, self.oracle.read_started());
                (descriptor(abi::OP_READ, 0, offset, len), len as i32, read)
            }
            _ => {
                data = pattern(number, offset, len as usize);
                let token = self.oracle.write_started(offset, &data);
                let request = descriptor(abi::OP_WRITE, flags, offset, len);
                (request, len as i32, Sent::Write(token, fua))
            }
        };
        self.server.driver.submit(0, number, request, &data);
        self.sent.insert(number, (result, sent));
        self.next += 1;
    }

    /// Takes what was committed, and checks it. A second commit of a request is an error.
    fn reap(&mut self) {
        for Done { number, result, data } in self.server.driver.take_done() {
            let (expected, sent) = self.sent.remove(&number).expect("it was sent, and not done");
            assert_eq!(result, expected);
            self.answered += 1;
            match sent {
                Sent::Write(token, durable) => self.oracle.write_answered(token, true, durable),
                Sent::Flush(token) => self.oracle.flush_answered(token, true),
                Sent::Read(offset, len, token) => {
                    assert_eq!(data.len() as u64, len);
                    self.oracle.check_read(token, offset, &data).unwrap();
                }
            }
            self.overtaken += u64::from(number < self.latest);
            self.latest = self.latest.max(number);
        }
    }

    /// Replaces the server. Requests go on coming.
    async fn replace(&mut self) {
        let left = self.server.begin_leave(self.rng.one_in(2));
        loop {
            self.send();
            match left.until(Instant::now()) {
                Ok(()) => break,
                Err(NoReply::Late) => self.server.stage.handle.sleep(STEP).await,
                Err(e) => panic!("{e}"),
            }
            self.reap();
        }
        let (fetching, given, _) = self.server.driver.counts();
        assert_eq!((fetching, given, self.server.live()), (0, 0, 0), "the server has left");
        self.server.start();
    }

    /// Quiesces the disk for a while. No request begins.
    async fn quiesce(&mut self) {
        let stage = &self.server.stage;
        let quiesced = stage.disk.quiesce_on(&stage.handle, "a test").await.unwrap();
        stage.settle().await;
        self.reap();
        let (begun, ended) = self.server.stage.operations();
        assert_eq!(begun, ended, "an operation is in flight");
        let answered = self.answered;
        for _ in 0..self.rng.between(1, 4) {
            self.send();
            self.server.stage.pass(Duration::from_millis(50)).await;
            self.reap();
        }
        assert_eq!(self.server.stage.operations().0, begun, "an operation began");
        assert_eq!(self.answered, answered, "a request was committed");
        drop(quiesced);
    }

    /// Runs the load until `count` requests are committed.
    async fn run(&mut self, count: u64) {
        let handle = self.server.stage.handle.clone();
        while self.answered < count {
            self.send();
            match self.rng.below(24) {
                0 => self.replace().await,
                1 => self.quiesce().await,
                _ => {}
            }
            for _ in 0..self.rng.below(8) {
                handle.yield_now().await;
            }
            if self.rng.one_in(3) {
                handle.sleep(Duration::from_micros(self.rng.between(1, 2000))).await;
            }
            self.reap();
            assert!(self.server.stage.time() < Duration::from_secs(3600), "a request hangs");
        }
    }
}

#[test]
fn requests_are_committed_once_in_any_order_over_servers_and_quiesces() {
    let mut overtaken = 0;
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let executor = blockyard_ring::Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        let load = async move {
            let mut load = Load::new(&handle, seed);
            if seed % 2 == 0 {
                let count = load.rng.between(1, REQUESTS);
                load.run(count).await;
            } else {
                load.run(REQUESTS).await;
                load.server.driver.stop();
                load.server.stage.settle().await;
                load.reap();
                assert_eq!((load.answered, load.server.live()), (REQUESTS, 0));
                assert_eq!(load.server.shared.requests.load(Ordering::Relaxed), REQUESTS);
            }
            for _ in 0..3 {
                let left = load.server.stage.device.power_cut();
                load.oracle.allows_after_cut(0, &left.bytes()).unwrap();
            }
            load.overtaken
        };
        overtaken += executor.block_on(load).unwrap();
        if seed % 2 == 0 {
            // Without power no request is answered, and none may be dropped.
            std::mem::forget(executor);
        }
    }
    assert!(overtaken > 100, "{overtaken} requests were overtaken: the order is that of arrival");
}

#[test]
fn limits_take_the_time_that_they_say() {
    simulate(3, async |handle, seed| {
        for (op, iops) in [(abi::OP_READ, 100), (abi::OP_WRITE, 1000), (abi::OP_WRITE, 25)] {
            let server = Server::new(Stage::new(&handle, seed, Some(iops)), 32);
            server.stage.settle().await;
            // The last requests wait for a tag.
            server.send(op, 0..40);
            took(&server.times(40, STEP).await, Duration::from_secs(1) / iops as u32, STEP);
            // A flush passes the limit.
            server.driver.submit(0, 40, descriptor(abi::OP_FLUSH, 0, 0, 0), &[]);
            server.stage.settle().await;
            let done = Done { number: 40, result: 0, data: Vec::new() };
            assert_eq!(server.driver.take_done(), [done]);
            server.driver.stop();
            server.stage.settle().await;
            assert_eq!(server.live(), 0);
        }
    });
}

/// With a drain, the requests that were given pass the limit at once. Without, they wait for it.
/// The others belong to the next server.
#[test]
fn a_server_that_leaves_commits_what_it_was_given() {
    simulate(4, async |handle, seed| {
        let drains = seed % 2 == 0;
        let server = Server::new(Stage::new(&handle, seed, Some(1)), 8);
        server.stage.settle().await;
        server.send(abi::OP_WRITE, 0..12);
        assert_eq!(server.times(1, LONG_STEP).await, [Duration::ZERO], "the limit admits one");
        assert_eq!(server.driver.counts(), (0, 8, 3));
        let left = server.begin_leave(drains);
        server.stage.settle().await;
        if drains {
            assert_eq!(left.until(Instant::now()), Ok(()));
            assert_eq!(server.driver.take_done().len(), 8);
        } else {
            assert_eq!(left.until(Instant::now()), Err(NoReply::Late));
            let rest: Vec<_> =
                [Duration::ZERO].into_iter().chain(server.times(8, LONG_STEP).await).collect();
            took(&rest, Duration::from_secs(1), LONG_STEP);
            server.stage.settle().await;
            assert_eq!(left.until(Instant::now()), Ok(()));
        }
        assert_eq!((server.driver.counts(), server.live()), ((0, 0, 3), 0));
        server.stage.pass(Duration::from_secs(20)).await;
        assert!(server.driver.take_done().is_empty(), "no server has the requests");
        server.start();
        assert_eq!(server.times(3, LONG_STEP).await.len(), 3);
        assert_eq!(server.ended.load(Ordering::SeqCst), 0, "the device was not stopped");
    });
}

/// Requests in flight are committed after the stop, and the queue ends with the last one.
#[test]
fn a_stopped_device_ends_after_its_requests_in_a_quiesce() {
    simulate(5, async |handle, seed| {
        let server = Server::new(Stage::new(&handle, seed, None), 8);
        let quiesced = server.stage.disk.quiesce_on(&handle, "a test").await.unwrap();
        server.send(abi::OP_WRITE, 0..5);
        server.stage.settle().await;
        assert_eq!(server.driver.counts(), (3, 5, 0));
        server.driver.stop();
        server.stage.pass(Duration::from_secs(10)).await;
        assert_eq!((server.driver.counts(), server.live()), ((0, 5, 0), 1));
        assert!(server.driver.take_done().is_empty());
        drop(quiesced);
        server.stage.settle().await;
        assert_eq!(server.driver.take_done().len(), 5);
        assert_eq!((server.driver.counts(), server.live()), ((0, 0, 0), 0));
        assert_eq!(server.ended.load(Ordering::SeqCst), 1);
    });
}

/// A command that the driver refuses makes the server leave. It commits its other requests.
#[test]
fn a_refused_command_ends_the_queue_and_loses_no_request() {
    simulate(5, async |handle, seed| {
        let server = Server::new(Stage::new(&handle, seed, Some(1)), 4);
        server.stage.settle().await;
        server.driver.refuse(Errno::INVAL);
        server.send(abi::OP_WRITE, 0..7);
        let times = server.times(4, LONG_STEP).await;
        took(&times, Duration::from_secs(1), LONG_STEP);
        server.stage.settle().await;
        assert_eq!((server.driver.counts(), server.live()), ((0, 0, 3), 0));
        server.start();
        assert_eq!(server.times(3, LONG_STEP).await.len(), 3);
    });
}

/// A failure affects its own request. A write that has changed some of its sectors is an error, and
/// not a short write.
#[test]
fn errors_have_their_number_and_affect_one_request() {
    simulate(5, async |handle, seed| {
        let server = Server::new(Stage::new(&handle, seed, None), 16);
        let device = &server.stage.device;
        let io = std::io::ErrorKind::Other;
        device.fail(Fault::new(OpKind::Write, io).within(0..4096));
        device.fail(Fault::new(OpKind::Read, io).within(8 * 4096..9 * 4096));
        device.fail(Fault::new(OpKind::Discard, std::io::ErrorKind::Unsupported));
        let most = u64::from(MOST);
        let mut expected = Vec::new();
        for (op, offset, len, result) in [
            (abi::OP_WRITE, 0, 2 * 4096, Err(Errno::IO)),
            (abi::OP_WRITE, 2 * 4096, 4096, Ok(4096)),
            (abi::OP_READ, 8 * 4096, most, Err(Errno::IO)),
            (abi::OP_READ, 32 * 4096, most, Ok(most as i32)),
            // A discard promises nothing, so a device that cannot discard is no error.
            (abi::OP_DISCARD, 60 * 4096, 4096, Ok(0)),
            (abi::OP_READ, SIZE - 512, 1024, Err(Errno::IO)),
            (abi::OP_WRITE, 0, most + 512, Err(Errno::INVAL)),
            (abi::OP_READ, u64::MAX, 512, Err(Errno::IO)),
            (77, 0, 0, Err(Errno::OPNOTSUPP)),
            (abi::OP_FLUSH, 0, 0, Ok(0)),
        ] {
            let data = if op == abi::OP_WRITE && len <= most { len as usize } else { 0 };
            let number = expected.len() as u64;
            server.driver.submit(0, number, descriptor(op, 0, offset, len), &vec![7; data]);
            expected.push((number, result.unwrap_or_else(|e: Errno| -e.raw_os_error())));
        }
        server.stage.settle().await;
        let mut done: Vec<_> =
            server.driver.take_done().iter().map(|done| (done.number, done.result)).collect();
        done.sort_unstable();
        assert_eq!(done, expected);
        assert_eq!(device.failures(), 3);
        device.heal();
        server.send(abi::OP_READ, 10..42);
        assert_eq!(server.times(32, LONG_STEP).await.len(), 32);
        assert_eq!(server.ended.load(Ordering::SeqCst), 0);
    });
}
