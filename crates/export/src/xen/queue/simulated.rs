//! A queue on the simulated disk and clock. The front end is a domain of a simulated machine in the
//! same executor: it writes a real ring in granted pages, and notifies over an event channel.
//!
//! What must hold: each request is answered once, also over stops and quiesces. After a power cut
//! the disk holds what flushes and barriers have promised. After a stop nothing is mapped.

use std::time::{Duration, Instant};

use blockyard_driver::xen::{Abi as FrontAbi, FrontRing, PAGE, Queue as Driver, QueueOptions};
use blockyard_driver::xen::{operation, status};
use blockyard_ring::xen::machine::Domain;
use blockyard_ring::xen::{Host, Machine};
use blockyard_ring::{NoReply, PendingReply};
use blockyard_storage::sim::{
    Fault, FlushToken, OpKind, Oracle, ReadToken, Rng, WriteToken, pattern,
};

use super::*;
use crate::simulated::{SIZE, Stage, simulate, took};

const SEEDS: u64 = 40;
const REQUESTS: usize = 300;
const DOMAIN: u16 = 3;
/// Key of the only queue of an executor.
const ID: u64 = 1 << 60;
const DATA: [Data; 3] = [Data::Mapped, Data::Persistent, Data::Copied];
/// Time between two looks of the front end.
const STEP: Duration = Duration::from_micros(100);
/// The same, for limits of one operation in a second.
const LONG_STEP: Duration = Duration::from_millis(10);
const PAGE_BYTES: u32 = PAGE as u32;

/// A request that the front end has sent.
enum Sent {
    Write(WriteToken),
    Barrier(WriteToken, FlushToken),
    Read(u64, usize, ReadToken),
    Flush(FlushToken),
}

/// A front end with its ring, and the queue.
struct Guest {
    stage: Stage,
    machine: Arc<Machine>,
    domain: Arc<Domain>,
    driver: Driver,
    /// Grants of the ring's pages.
    ring: Vec<u32>,
    abi: Abi,
    data: Data,
}

impl Guest {
    /// Starts a queue with a ring of `pages` pages. Each entry has a slot with `segments` pages.
    fn new(stage: Stage, data: Data, abi: Abi, pages: usize, segments: u32) -> Self {
        let slots = abi.entries(pages) as u16;
        let persistent = data == Data::Persistent;
        let options = QueueOptions { slots, data_len: segments * PAGE_BYTES, persistent };
        let machine = Machine::new();
        let domain = machine.add(DOMAIN, pages + options.pages()).unwrap();
        let front_abi = if abi == Abi::X86_64 { FrontAbi::X86_64 } else { FrontAbi::X86_32 };
        let channel = domain.channel().unwrap();
        let front = FrontRing::new(domain.memory(), 0, pages, front_abi, channel).unwrap();
        let driver = Driver::new(domain.clone(), front, 0, pages, options).unwrap();
        let ring = (0..pages).map(|page| domain.grant(page, false)).collect();
        let guest = Guest { stage, machine, domain, driver, ring, abi, data };
        guest.start();
        guest
    }

    fn start(&self) {
        let host = Host::Machine(self.machine.clone());
        let grants = || host.grants(DOMAIN).unwrap();
        let disk = self.stage.disk.clone();
        let setup = QueueSetup {
            index: 0,
            shared: Arc::new(Shared { disk, log: Log::default(), counts: Counts::default() }),
            ring: grants().map(&self.ring, true).unwrap(),
            abi: self.abi,
            channel: host.channel(DOMAIN, self.driver.ring.channel.port).unwrap(),
            grants: grants(),
            data: self.data,
            fua: false,
            record: None,
            settled: true,
        };
        Queue::start(&self.stage.handle, setup, ID).unwrap();
    }

    fn begin_stop(&self) -> PendingReply<()> {
        self.stage.handle.remote().ask_later(|handle, reply| {
            let queue = handle.local::<Queues>().0.borrow_mut().remove(&ID);
            queue.expect("a queue runs").stop(reply);
        })
    }

    /// Sends requests of one page, one for each slot in `slots`. They are not adjacent, so none is
    /// a part of a larger operation.
    fn send(&mut self, operation: u8, slots: std::ops::Range<u16>) {
        for slot in slots {
            let sector = u64::from(slot) * 16 % (SIZE / 512);
            self.driver.submit(slot, operation, sector, PAGE_BYTES);
        }
        self.driver.publish();
    }

    /// Takes all answers: slots with their status.
    fn answers(&mut self) -> Vec<(u16, i16)> {
        std::iter::from_fn(|| self.driver.reap().unwrap()).collect()
    }

    /// Looks each `step`, and waits for `count` answers. Returns the times of them, in their order.
    async fn times(&mut self, count: usize, step: Duration) -> Vec<Duration> {
        let mut times = Vec::new();
        self.stage.settle().await;
        while times.len() < count {
            let answers = self.answers();
            assert!(answers.iter().all(|(_, status)| *status == status::OK), "{answers:?}");
            times.extend(answers.iter().map(|_| self.stage.time()));
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

    /// Stops the queue while nothing holds its requests.
    async fn stop(&self) {
        let stopped = self.begin_stop();
        self.stage.settle().await;
        assert_eq!(stopped.until(Instant::now()), Ok(()));
        assert_eq!(self.domain.mapped(), 0, "a page is mapped after the stop");
    }
}

/// A load of random requests with stops and quiesces.
struct Load {
    guest: Guest,
    rng: Rng,
    oracle: Oracle,
    slots: Vec<Option<(usize, Sent)>>,
    segments: u64,
    sent: usize,
    answered: usize,
    /// Number of requests that were answered after a later one.
    overtaken: usize,
    latest: usize,
    /// Number of times that the ring was full.
    full: usize,
}

impl Load {
    fn new(handle: &Handle, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let stage = Stage::new(handle, seed, rng.one_in(2).then(|| rng.between(2000, 20_000)));
        // 11 segments fit into an entry. 16 and 32 need a page of their own.
        let segments = *rng.pick(&[11, 16, 32]);
        let abi = *rng.pick(&[Abi::X86_64, Abi::X86_32]);
        let pages = rng.between(1, 2) as usize;
        let guest = Guest::new(stage, *rng.pick(&DATA), abi, pages, segments);
        let slots = (0..abi.entries(pages)).map(|_| None).collect();
        let (sent, answered, overtaken, latest, full) = Default::default();
        let (oracle, segments) = (Oracle::new(), segments.into());
        Load { guest, rng, oracle, slots, segments, sent, answered, overtaken, latest, full }
    }

    /// Sends some requests, if slots are free. Sometimes it fills the ring.
    fn send(&mut self) {
        let most = if self.rng.one_in(8) { 100 } else { 6 };
        for _ in 0..self.rng.below(most) {
            if self.sent == REQUESTS {
                break;
            }
            let Some(slot) = self.slots.iter().position(Option::is_none) else {
                self.full += 1;
                break;
            };
            let sent = self.submit(slot as u16);
            self.slots[slot] = Some((self.sent, sent));
            self.sent += 1;
        }
        self.guest.driver.publish();
    }

    fn submit(&mut self, slot: u16) -> Sent {
        let (rng, driver) = (&mut self.rng, &mut self.guest.driver);
        let len = rng.between(1, self.segments * 8) * 512;
        let offset = rng.below((SIZE - len) / 512 + 1) * 512;
        let mut data = |len: u64| {
            let bytes = pattern(self.sent as u64, offset, len as usize);
            driver.write_data(slot, &bytes);
            self.oracle.write_started(offset, &bytes)
        };
        let (operation, len, sent) = match rng.below(16) {
            0 => (operation::FLUSH, 0, Sent::Flush(self.oracle.flush_started())),
            1 => {
                let discarded = Sent::Write(self.oracle.discard_started(offset, len));
                driver.discard(slot, offset / 512, len / 512);
                return discarded;
            }
            2 => {
                // A barrier has no more segments than fit into an entry.
                let len = len.min(11 * PAGE as u64);
                let write = data(len);
                let flush = self.oracle.flush_started();
                (operation::BARRIER, len, Sent::Barrier(write, flush))
            }
            3..9 => {
                let token = self.oracle.read_started();
                (operation::READ, len, Sent::Read(offset, len as usize, token))
            }
            _ => (operation::WRITE, len, Sent::Write(data(len))),
        };
        let sector = if operation == operation::FLUSH { 0 } else { offset / 512 };
        driver.submit(slot, operation, sector, len as u32);
        sent
    }

    /// Takes all answers, and checks them. An answer of a slot that waits for none is an error.
    fn reap(&mut self) {
        for (slot, status) in self.guest.answers() {
            assert_eq!(status, status::OK);
            let (number, sent) = self.slots[usize::from(slot)].take().expect("it was sent");
            self.answered += 1;
            match sent {
                Sent::Write(token) => self.oracle.write_answered(token, true, false),
                Sent::Barrier(write, flush) => {
                    self.oracle.flush_answered(flush, true);
                    self.oracle.write_answered(write, true, true);
                }
                Sent::Flush(token) => self.oracle.flush_answered(token, true),
                Sent::Read(offset, len, token) => {
                    let mut bytes = vec![0; len];
                    self.guest.driver.read_data(slot, &mut bytes);
                    self.oracle.check_read(token, offset, &bytes).unwrap();
                }
            }
            self.overtaken += usize::from(number < self.latest);
            self.latest = self.latest.max(number);
        }
        assert_eq!(self.guest.driver.still_mapped, 0, "a page was mapped after its answer");
    }

    /// Stops the queue, and starts another one on the same ring.
    async fn restart(&mut self) {
        let stopped = self.guest.begin_stop();
        loop {
            // The front end goes on meanwhile.
            self.send();
            match stopped.until(Instant::now()) {
                Ok(()) => break,
                Err(NoReply::Late) => self.guest.stage.handle.sleep(STEP).await,
                Err(e) => panic!("{e}"),
            }
            self.reap();
        }
        assert_eq!(self.guest.domain.mapped(), 0, "a page is mapped after the stop");
        self.guest.start();
    }

    /// Quiesces the disk for a while. The queue goes on taking requests, and none begins.
    async fn quiesce(&mut self) {
        let stage = &self.guest.stage;
        let quiesced = stage.disk.quiesce_on(&stage.handle, "a test").await.unwrap();
        stage.settle().await;
        self.reap();
        let (begun, ended) = self.guest.stage.operations();
        assert_eq!(begun, ended, "an operation is in flight");
        let answered = self.answered;
        for _ in 0..self.rng.between(1, 4) {
            self.send();
            self.guest.stage.pass(Duration::from_millis(50)).await;
            self.reap();
        }
        assert_eq!(self.guest.stage.operations().0, begun, "an operation began");
        assert_eq!(self.answered, answered, "a request was answered");
        drop(quiesced);
    }

    /// Runs the load until `count` requests are answered.
    async fn run(&mut self, count: usize) {
        let handle = self.guest.stage.handle.clone();
        while self.answered < count {
            self.send();
            match self.rng.below(24) {
                0 => self.restart().await,
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
            assert!(self.guest.stage.time() < Duration::from_secs(3600), "a request hangs");
        }
    }
}

#[test]
fn requests_are_answered_once_in_any_order_over_stops_and_quiesces() {
    let (mut overtaken, mut full) = (0, 0);
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let executor = blockyard_ring::Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        let load = async move {
            let mut load = Load::new(&handle, seed);
            if seed % 2 == 0 {
                let count = load.rng.between(1, REQUESTS as u64) as usize;
                load.run(count).await;
            } else {
                load.run(REQUESTS).await;
                load.guest.stop().await;
                load.reap();
                assert_eq!((load.answered, load.sent), (REQUESTS, REQUESTS));
            }
            for _ in 0..3 {
                let left = load.guest.stage.device.power_cut();
                load.oracle.allows_after_cut(0, &left.bytes()).unwrap();
            }
            (load.overtaken, load.full)
        };
        let (later, often) = executor.block_on(load).unwrap();
        (overtaken, full) = (overtaken + later, full + often);
        if seed % 2 == 0 {
            // Without power no request is answered, and none may be dropped.
            std::mem::forget(executor);
        }
    }
    assert!(overtaken > 100, "{overtaken} requests were overtaken: the order is that of arrival");
    assert!(full > 10, "the ring was full {full} times");
}

#[test]
fn limits_take_the_time_that_they_say() {
    simulate(3, async |handle, seed| {
        for (data, iops) in DATA.into_iter().zip([100, 1000, 25]) {
            let stage = Stage::new(&handle, seed, Some(iops));
            let mut guest = Guest::new(stage, data, Abi::X86_64, 1, 1);
            guest.stage.settle().await;
            guest.send(if seed % 2 == 0 { operation::WRITE } else { operation::READ }, 0..32);
            took(&guest.times(32, STEP).await, Duration::from_secs(1) / iops as u32, STEP);
            // A flush passes the limit.
            guest.driver.submit(0, operation::FLUSH, 0, 0);
            guest.driver.publish();
            let before = guest.stage.time();
            assert_eq!(guest.times(1, LONG_STEP).await, [before]);
            guest.stop().await;
        }
    });
}

/// A stop admits the requests that wait for a limit at once, and takes no further request.
#[test]
fn a_stop_answers_what_the_queue_has_taken_and_leaves_the_rest_in_the_ring() {
    simulate(5, async |handle, seed| {
        let data = DATA[seed as usize % DATA.len()];
        let mut guest = Guest::new(Stage::new(&handle, seed, Some(1)), data, Abi::X86_64, 1, 1);
        guest.stage.settle().await;
        guest.send(operation::WRITE, 0..20);
        guest.stage.settle().await;
        assert_eq!(guest.answers().len(), 1, "the limit admits one");
        let (before, stopped) = (guest.stage.time(), guest.begin_stop());
        guest.send(operation::WRITE, 20..30);
        guest.stage.settle().await;
        assert_eq!(stopped.until(Instant::now()), Ok(()));
        assert_eq!((guest.answers().len(), guest.stage.time()), (19, before));
        assert_eq!(guest.domain.mapped(), 0);
        guest.stage.pass(Duration::from_secs(5)).await;
        assert!(guest.answers().is_empty(), "no queue serves the ring");
        guest.start();
        assert_eq!(guest.times(10, LONG_STEP).await.len(), 10);
        // The next queue waits for the debt of the first one, at one operation in a second.
        assert!(guest.stage.time() > Duration::from_secs(19), "{:?}", guest.stage.time());
        guest.stop().await;
    });
}

/// The stop waits for requests that the quiesce holds. The quiesce loses none.
#[test]
fn a_stop_in_a_quiesce_ends_after_it() {
    simulate(5, async |handle, seed| {
        let data = DATA[seed as usize % DATA.len()];
        let mut guest = Guest::new(Stage::new(&handle, seed, None), data, Abi::X86_32, 1, 1);
        let quiesced = guest.stage.disk.quiesce_on(&handle, "a test").await.unwrap();
        guest.send(operation::READ, 0..16);
        guest.stage.pass(Duration::from_secs(10)).await;
        let stopped = guest.begin_stop();
        guest.stage.pass(Duration::from_secs(10)).await;
        assert_eq!(stopped.until(Instant::now()), Err(NoReply::Late));
        assert!(guest.answers().is_empty());
        assert_eq!(guest.stage.operations(), (0, 0));
        drop(quiesced);
        guest.stage.settle().await;
        assert_eq!(stopped.until(Instant::now()), Ok(()));
        assert_eq!((guest.answers().len(), guest.domain.mapped()), (16, 0));
    });
}

#[test]
fn a_producer_index_beyond_the_ring_stops_only_the_taking_of_requests() {
    simulate(5, async |handle, seed| {
        let data = DATA[seed as usize % DATA.len()];
        let mut guest = Guest::new(Stage::new(&handle, seed, Some(1)), data, Abi::X86_64, 1, 1);
        guest.stage.settle().await;
        guest.send(operation::WRITE, 0..8);
        guest.stage.settle().await;
        assert_eq!(guest.answers().len(), 1, "the limit admits one");
        let index = *Rng::new(seed).pick(&[1 + 33, 1000, u32::MAX]);
        guest.driver.ring.store_producer(index);
        // The requests in flight keep their limit.
        let rest: Vec<_> =
            [Duration::ZERO].into_iter().chain(guest.times(7, LONG_STEP).await).collect();
        took(&rest, Duration::from_secs(1), LONG_STEP);
        let begun = guest.stage.operations();
        guest.driver.ring.store_producer(8);
        guest.send(operation::WRITE, 8..10);
        guest.stage.pass(Duration::from_secs(60)).await;
        assert!(guest.answers().is_empty(), "the queue took a request of a broken ring");
        assert_eq!(guest.stage.operations(), begun);
        guest.stop().await;
    });
}

/// A failure affects its own request. Each has the status that the front end knows.
#[test]
fn errors_have_their_status_and_affect_one_request() {
    simulate(6, async |handle, seed| {
        let data = DATA[seed as usize % DATA.len()];
        let mut guest = Guest::new(Stage::new(&handle, seed, None), data, Abi::X86_64, 1, 16);
        let device = guest.stage.device.clone();
        let io = std::io::ErrorKind::Other;
        device.fail(Fault::new(OpKind::Write, io).within(0..4096));
        device.fail(Fault::new(OpKind::Read, io).within(8 * 4096..9 * 4096));
        device.fail(Fault::new(OpKind::Discard, std::io::ErrorKind::Unsupported));
        let long = 16 * PAGE_BYTES;
        let driver = &mut guest.driver;
        driver.submit(0, operation::WRITE, 0, PAGE_BYTES);
        // Not adjacent to another request, so that it is no part of a larger one.
        driver.submit(1, operation::WRITE, 16, PAGE_BYTES);
        driver.submit(2, operation::READ, 8 * 8, long);
        driver.submit(3, operation::READ, 32 * 8, long);
        // A discard promises nothing, so a device that cannot discard is no error.
        driver.discard(4, 8 * 60, 8);
        driver.submit(5, operation::READ, SIZE / 512 - 1, PAGE_BYTES);
        driver.submit(6, operation::WRITE, u64::MAX, PAGE_BYTES);
        driver.submit(7, 77, 0, 0);
        driver.submit(8, operation::READ, 0, 0);
        driver.submit(9, operation::FLUSH, 0, 0);
        driver.publish();
        guest.stage.settle().await;
        let mut answers = guest.answers();
        answers.sort_unstable();
        let (ok, error, unsupported) = (status::OK, status::ERROR, status::UNSUPPORTED);
        let expected = [error, ok, error, ok, ok, error, error, unsupported, error, ok];
        assert_eq!(answers, (0..).zip(expected).collect::<Vec<_>>(), "{data:?}");
        assert_eq!((device.failures(), guest.driver.still_mapped), (3, 0));
        device.heal();
        guest.send(operation::WRITE, 0..32);
        assert_eq!(guest.times(32, LONG_STEP).await.len(), 32);
        guest.stop().await;
    });
}
