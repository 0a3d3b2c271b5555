//! A virtqueue on the simulated disk and clock. A driver in the same executor has many requests in
//! flight, and the disk completes them in seeded order.
//!
//! In the middle of the load the ring is disabled and enabled, and queues are stopped and started
//! again at their base, with and without a drain. What must hold: each chain is answered once, and
//! after a power cut the disk holds what flushes have promised.

use std::time::{Duration, Instant};

use blockyard_disk::{Backend, Disk, DiskOptions, Source};
use blockyard_driver::ring::RingOptions;
use blockyard_driver::{Data, Memory, PackedRing, Queue as Driver, Ring, SplitRing};
use blockyard_driver::{request, status};
use blockyard_image::{Alignment, CacheMode, Raw};
use blockyard_ring::{Executor, Mapper, NoReply};
use blockyard_sched::{Knobs, Limit, Limits, Share};
use blockyard_storage::sim::{
    FlushToken, Oracle, ReadToken, Rng, SimConfig, SimDisk, SimImage, WriteToken, pattern,
};

use super::*;
use crate::vhost_user::inflight;

const SEEDS: u64 = 60;
const SIZE: u64 = 64 << 10;
const BLOCK: usize = 1024;
const SLOTS: u16 = 48;
const REQUESTS: usize = 400;

/// The running queue of the executor.
#[derive(Default)]
struct Running(RefCell<Option<Rc<Queue>>>);

/// A request that the driver has sent.
enum Sent {
    Write(WriteToken),
    Read(u64, ReadToken),
    Flush(FlushToken),
}

struct Load<R> {
    handle: Handle,
    rng: Rng,
    device: Arc<DeviceState>,
    sim: SimDisk,
    served: Rc<LocalDisk>,
    memory: Memory,
    options: RingOptions,
    driver: Driver<R>,
    packed: bool,
    inflight: Option<InflightRegion>,
    oracle: Oracle,
    slots: Vec<Option<(usize, Sent)>>,
    sent: usize,
    answered: usize,
    /// Number of requests that were answered after a later one.
    overtaken: usize,
    latest: usize,
}

/// Returns a disk in memory. With `iops`, it waits for this limit.
fn disk(iops: Option<u64>) -> Arc<Disk> {
    let options = DiskOptions {
        name: "simulated".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let limit = |rate| Limit { rate, max: None, length: Duration::from_secs(1) };
    let limits = Limits { iops: iops.map(limit), ..Limits::default() };
    let share = Arc::new(Share::new(None, None, &Knobs { limits, ..Knobs::default() }));
    Arc::new(Disk::sharing(options, Source::Null { size: SIZE }, share))
}

impl<R: Ring> Load<R> {
    fn new(handle: &Handle, seed: u64, packed: bool) -> Self {
        let mut rng = Rng::new(seed);
        let disk = disk(rng.one_in(2).then(|| rng.between(500, 20_000)));
        let sim = SimDisk::new(SimImage::zeroed(SIZE), SimConfig::new(seed));
        let raw = Raw::on(sim.clone(), Alignment { memory_align: 1, offset_align: 1 });
        let served = Rc::new(LocalDisk::new(disk.clone(), Backend::Raw(raw), Some(handle.clone())));
        let (event_idx, indirect) = (rng.one_in(2), rng.one_in(2));
        let options = RingOptions { size: 256, slots: SLOTS, event_idx, indirect };
        let mut memory = Memory::new(Driver::<R>::memory_needed(options, BLOCK as u32)).unwrap();
        let driver = Driver::new(&mut memory, 0, options, BLOCK as u32).unwrap();
        let inflight = rng.one_in(2).then(|| {
            let (fd, len) = inflight::allocate(1, options.size, packed).unwrap();
            InflightRegion::map(&Mapper::new(false), fd, (0, len), 1).unwrap()
        });
        Load {
            handle: handle.clone(),
            rng,
            device: Arc::new(DeviceState::new(disk, true)),
            sim,
            served,
            memory,
            options,
            driver,
            packed,
            inflight,
            oracle: Oracle::new(),
            slots: (0..SLOTS).map(|_| None).collect(),
            sent: 0,
            answered: 0,
            overtaken: 0,
            latest: 0,
        }
    }

    fn start(&self, base: u32) {
        let ring = self.driver.setup();
        let parts = ring.addresses;
        let setup = QueueSetup {
            index: 0,
            device: self.device.clone(),
            memory: self.memory.guest().clone(),
            alarm: None,
            size: self.options.size.into(),
            parts: (parts.desc, parts.avail, parts.used),
            base,
            packed: self.packed,
            event_idx: self.options.event_idx,
            inflight: self.inflight.clone(),
            is_base_lost: false,
            is_base_valid: false,
            kick: Some(ring.kick.try_clone().unwrap()),
            in_band: false,
            call: Call::None,
            error: None,
            enabled: true,
            poll: PollMode::Off,
            held: false,
            marks: None,
            peer: None,
        };
        let queue = Queue::start_on(&self.handle, setup, self.served.clone()).unwrap();
        self.handle.local::<Running>().0.replace(Some(queue));
    }

    /// Stops the queue, and starts another one where it has stopped. `suspends`: requests that have
    /// not begun stay in the in-flight region, and the next queue repeats them.
    async fn restart(&mut self, suspends: bool) {
        let stopped = self.handle.remote().ask_later(move |handle, reply| {
            let queue = handle.local::<Running>().0.take().expect("a queue runs");
            queue.stop(reply, suspends);
        });
        let base = loop {
            // The driver goes on meanwhile.
            self.send();
            match stopped.until(Instant::now()) {
                Ok(base) => break base,
                Err(NoReply::Late) => self.handle.sleep(Duration::from_micros(100)).await,
                Err(e) => panic!("{e}"),
            }
            self.reap();
        };
        self.reap();
        let leaves_some = suspends && self.inflight.is_some();
        if !self.packed && !leaves_some {
            assert_eq!(base, self.answered as u32, "each chain that was taken is answered");
        }
        self.start(base);
    }

    /// Sends some requests, if slots are free.
    fn send(&mut self) {
        for _ in 0..self.rng.below(6) {
            let free = self.slots.iter().position(Option::is_none);
            let Some(slot) = free.filter(|_| self.sent < REQUESTS) else { break };
            let offset = self.rng.below(SIZE / 512 - BLOCK as u64 / 512 + 1) * 512;
            let (kind, data, sent) = match self.rng.below(8) {
                0 => (request::FLUSH, Data::None, Sent::Flush(self.oracle.flush_started())),
                1..4 => {
                    let read = Sent::Read(offset, self.oracle.read_started());
                    (request::IN, Data::FromDevice(BLOCK as u32), read)
                }
                _ => {
                    let bytes = pattern(self.sent as u64, offset, BLOCK);
                    self.driver.write_data(slot as u16, &bytes);
                    let write = Sent::Write(self.oracle.write_started(offset, &bytes));
                    (request::OUT, Data::ToDevice(BLOCK as u32), write)
                }
            };
            let sector = if kind == request::FLUSH { 0 } else { offset / 512 };
            self.driver.submit(slot as u16, kind, sector, data);
            self.slots[slot] = Some((self.sent, sent));
            self.sent += 1;
        }
        self.driver.publish().unwrap();
    }

    /// Takes all answers, and checks them. An answer of a slot that waits for none is an error.
    fn reap(&mut self) {
        while let Some((slot, status)) = self.driver.reap().unwrap() {
            let (number, sent) = self.slots[usize::from(slot)].take().expect("it was sent");
            self.answered += 1;
            assert_eq!(status, status::OK);
            match sent {
                Sent::Write(token) => self.oracle.write_answered(token, true, false),
                Sent::Flush(token) => self.oracle.flush_answered(token, true),
                Sent::Read(offset, token) => {
                    let mut bytes = vec![0; BLOCK];
                    self.driver.read_data(slot, &mut bytes);
                    self.oracle.check_read(token, offset, &bytes).unwrap();
                }
            }
            self.overtaken += usize::from(number < self.latest);
            self.latest = self.latest.max(number);
        }
    }

    async fn disable_for_a_while(&mut self) {
        let queue = self.handle.local::<Running>().0.borrow().clone().expect("a queue runs");
        queue.enabled.set(false);
        queue.wake.ring();
        self.handle.sleep(Duration::from_millis(1)).await;
        self.reap();
        let taken = queue.in_flight.get() + queue.core.borrow().unpublished;
        let before = self.answered;
        self.send();
        self.handle.sleep(Duration::from_secs(10)).await;
        self.reap();
        assert!(self.answered - before <= taken as usize, "a disabled ring was read");
        queue.enabled.set(true);
        queue.wake.ring();
    }

    /// Runs the load until `count` requests are answered.
    async fn run(&mut self, count: usize) {
        while self.answered < count {
            self.send();
            match self.rng.below(24) {
                0 => self.restart(false).await,
                1 => self.restart(true).await,
                2 => self.disable_for_a_while().await,
                _ => {}
            }
            for _ in 0..self.rng.below(8) {
                self.handle.yield_now().await;
            }
            if self.rng.one_in(3) {
                let time = Duration::from_micros(self.rng.between(1, 2000));
                self.handle.sleep(time).await;
            }
            self.reap();
        }
    }

    /// Cuts the power, and checks what the disk holds.
    fn cut(&mut self) {
        for _ in 0..3 {
            let left = self.sim.power_cut();
            self.oracle.allows_after_cut(0, &left.bytes()).unwrap();
        }
    }
}

/// Runs the load with each seed, half of them until a power cut in the middle. A failure shows the
/// seed.
fn loads<R: Ring>(packed: bool) {
    let mut overtaken = 0;
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let executor = Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        let load = async move {
            let mut load = Load::<R>::new(&handle, seed, packed);
            load.start(load.driver.ring.fresh_base());
            if seed % 2 == 0 {
                let count = load.rng.between(1, REQUESTS as u64) as usize;
                load.run(count).await;
            } else {
                load.run(REQUESTS).await;
                handle.sleep(Duration::from_secs(60)).await;
                load.reap();
                assert_eq!((load.answered, load.driver.in_flight()), (REQUESTS, 0));
                handle.local::<Running>().0.take();
            }
            load.cut();
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
fn split_chains_are_answered_once_in_any_order() {
    loads::<SplitRing>(false);
}

#[test]
fn packed_chains_are_answered_once_in_any_order() {
    loads::<PackedRing>(true);
}
