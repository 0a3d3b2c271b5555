//! Disks with limits on the simulated disk and clock: requests go through [`LocalDisk`], and the
//! time of each answer is what the limits' arithmetic says.
//!
//! The simulated disk answers in seeded order and takes no time of the clock. So all time that
//! passes is time that requests wait in the throttle. A disk has two [`LocalDisk`]s, as on two
//! reactors. What must hold in each test: every request is answered once.

use std::time::Instant;

use blockyard_image::{Alignment, CacheMode, Raw};
use blockyard_ring::Segments;
use blockyard_storage::sim::{OpKind as SimOp, Phase, Rng, SimConfig, SimDisk, SimImage, Trace};

use super::*;
use crate::backend::{Backend, Source};
use crate::disk::{Disk, DiskOptions};
use crate::local_disk::LocalDisk;
use crate::replies::replies;
use crate::request::{Request, Status, Token};

const SEEDS: u64 = 5;
const SIZE: u64 = 8 << 20;
const MIB: u64 = 1 << 20;
const WRITE_OP: Op = Op::Write { fua: false };
/// Size of a limit's bucket without a burst.
const HOLDS: Duration = Duration::from_millis(10);

/// A disk on a simulated device, open on two reactors.
struct Stage {
    handle: Handle,
    device: SimDisk,
    disk: Arc<Disk>,
    reactors: [Rc<LocalDisk>; 2],
    begun: Instant,
    /// Number of requests that were submitted.
    submitted: Cell<usize>,
    /// The requests that were answered, and when.
    answered: Rc<RefCell<Vec<(usize, Duration)>>>,
}

struct Note {
    number: usize,
    handle: Handle,
    begun: Instant,
    answered: Rc<RefCell<Vec<(usize, Duration)>>>,
}

impl Token for Note {
    fn answer(self, status: Status, _: Segments) {
        assert_eq!(status, Ok(()));
        self.answered.borrow_mut().push((self.number, self.handle.read_clock() - self.begun));
    }

    fn may_wait(&self) -> bool {
        true
    }
}

impl Stage {
    fn new(handle: &Handle, seed: u64, limits: Limits) -> Self {
        let knobs = Knobs { limits, ..Knobs::default() };
        Self::sharing(handle, seed, Arc::new(Share::new(None, None, &knobs)))
    }

    fn sharing(handle: &Handle, seed: u64, share: Arc<Share>) -> Self {
        let options = DiskOptions {
            name: "limited".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let device = SimDisk::new(SimImage::zeroed(SIZE), SimConfig::new(seed));
        let disk = Arc::new(Disk::sharing(options, Source::Null { size: SIZE }, share));
        let reactors = [(); 2].map(|()| {
            let raw = Raw::on(device.clone(), Alignment { memory_align: 1, offset_align: 1 });
            Rc::new(LocalDisk::new(disk.clone(), Backend::Raw(raw), Some(handle.clone())))
        });
        Stage {
            handle: handle.clone(),
            device,
            disk,
            reactors,
            begun: handle.read_clock(),
            submitted: Cell::new(0),
            answered: Rc::default(),
        }
    }

    /// Submits a request to a reactor. Returns its number.
    fn submit(&self, reactor: usize, op: Op, offset: u64, len: u64) -> usize {
        let segments = match op {
            Op::Read => Segments::buffer(len as usize),
            Op::Write { .. } => Segments::from_bytes(&vec![mark(offset / 512); len as usize]),
            _ => Segments::default(),
        };
        let number = self.submitted.replace(self.submitted.get() + 1);
        let (handle, begun, answered) = (self.handle.clone(), self.begun, self.answered.clone());
        let token = Note { number, handle, begun, answered };
        let request = Request::new(op, offset, len, segments, self.handle.read_clock(), token);
        let served = self.reactors[reactor].clone();
        self.handle.spawn(async move { served.serve(request).await.answer() });
        number
    }

    /// Submits `count` requests of `len` bytes, at seeded places of both reactors.
    fn submit_many(&self, rng: &mut Rng, count: usize, len: u64) {
        for _ in 0..count {
            let op = if rng.one_in(2) { Op::Read } else { WRITE_OP };
            self.submit(rng.below(2) as usize, op, rng.below(SIZE / len) * len, len);
        }
    }

    /// Waits until all requests are answered. Returns the time of the last answer.
    async fn all(&self) -> Duration {
        while self.answered.borrow().len() < self.submitted.get() {
            self.handle.sleep(Duration::from_millis(1)).await;
        }
        self.once();
        self.answered.borrow().iter().map(|(_, at)| *at).max().unwrap()
    }

    /// Checks that no request is answered twice.
    fn once(&self) {
        let mut numbers: Vec<usize> = self.answered.borrow().iter().map(|(n, _)| *n).collect();
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "answered twice: {numbers:?}");
    }

    fn answered_at(&self, number: usize) -> Option<Duration> {
        self.answered.borrow().iter().find(|(n, _)| *n == number).map(|(_, at)| *at)
    }

    /// Lets `time` pass.
    async fn pass(&self, time: Duration) {
        self.handle.sleep(time).await;
        self.settle().await;
    }

    /// Runs all tasks that need no time.
    async fn settle(&self) {
        let now = self.handle.read_clock();
        for _ in 0..2000 {
            self.handle.yield_now().await;
        }
        assert_eq!(self.handle.read_clock(), now, "time has passed");
    }

    fn set(&self, limits: Limits) {
        let knobs = Knobs { limits, ..Knobs::default() };
        self.disk.share().set(&knobs, time_of(self.handle.read_clock()));
    }

    /// Returns how many operations of the device have begun.
    fn begun_operations(&self) -> usize {
        self.device.trace().iter().filter(|trace| trace.phase == Phase::Started).count()
    }
}

/// Runs `work` with each seed, on a clock that begins anew. A failure shows the seed.
fn simulate(work: impl AsyncFn(Handle, u64, Rng) + Copy + 'static) {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let executor = Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        executor.block_on(async move { work(handle, seed, Rng::new(seed)).await }).unwrap();
    }
}

/// Returns the byte that a write puts in a sector.
fn mark(sector: u64) -> u8 {
    (sector % 251) as u8 + 1
}

fn limit(rate: u64) -> Option<Limit> {
    Some(Limit { rate, max: None, length: Duration::from_secs(1) })
}

fn iops(rate: u64) -> Limits {
    Limits { iops: limit(rate), ..Limits::default() }
}

fn bps(rate: u64) -> Limits {
    Limits { bps: limit(rate), ..Limits::default() }
}

/// Checks the time of the last of `count` operations that came at once. Each takes `cost` of a
/// bucket that was full. The throttle may wake the request later by [`COALESCE`], once for each of
/// the disk's two reactors.
#[track_caller]
fn took(last: Duration, count: u32, cost: Duration) {
    let slack = HOLDS.saturating_sub(cost).max(HOLDS / 2);
    let least = (cost * (count - 1)).saturating_sub(slack);
    let most = least + 2 * COALESCE;
    assert!(last >= least && last <= most, "{last:?} is not within {least:?} and {most:?}");
}

#[test]
fn limits_of_several_disks_take_the_time_that_they_say() {
    simulate(async |handle, seed, mut rng| {
        let rates = [100, 1000, 7000];
        let disks = rates.map(|rate| Stage::new(&handle, seed ^ rate, iops(rate)));
        let bytes = Stage::new(&handle, seed, bps(MIB));
        disks.iter().for_each(|disk| disk.submit_many(&mut rng, 300, 4096));
        bytes.submit_many(&mut rng, 300, 16 << 10);
        for (disk, rate) in disks.iter().zip(rates) {
            took(disk.all().await, 300, Duration::from_secs(1) / rate as u32);
        }
        took(bytes.all().await, 300, Duration::from_secs(1) / 64);
    });
}

/// The burst has the operations that `max` admits beyond the rate in `length`: 2,000 of them.
#[test]
fn a_burst_ends_when_its_bucket_is_empty() {
    simulate(async |handle, seed, mut rng| {
        let burst = Limit { rate: 500, max: Some(2500), length: Duration::from_secs(1) };
        let stage = Stage::new(&handle, seed, Limits { iops: Some(burst), ..Limits::default() });
        stage.submit_many(&mut rng, 4000, 512);
        let last = stage.all().await;
        let within =
            |time: Duration| stage.answered.borrow().iter().filter(|(_, at)| *at <= time).count();
        // 2,500 operations in the first second, then 500 a second. The short bucket of 10 ms and
        // the burst's bucket admit some more at the beginning.
        let first = within(Duration::from_secs(1));
        assert!((2475..=2530).contains(&first), "{first} operations in the first second");
        let second = within(Duration::from_secs(2)) - first;
        assert!((475..=525).contains(&second), "{second} operations in the second one");
        let (least, most) = (Duration::from_millis(3940), Duration::from_millis(4010));
        assert!((least..=most).contains(&last), "{last:?}");
    });
}

#[test]
fn a_flush_passes_the_requests_that_wait_for_limits() {
    simulate(async |handle, seed, _| {
        let stage = Stage::new(&handle, seed, iops(1));
        let writes: Vec<usize> = (0..4).map(|n| stage.submit(0, WRITE_OP, n * 512, 512)).collect();
        stage.settle().await;
        let flush = stage.submit(0, Op::Flush, 0, 0);
        stage.settle().await;
        assert_eq!(stage.answered_at(flush), Some(Duration::ZERO));
        assert_eq!(stage.answered_at(writes[0]), Some(Duration::ZERO), "the limit admits one");
        assert!(writes[1..].iter().all(|write| stage.answered_at(*write).is_none()));
        took(stage.all().await, 4, Duration::from_secs(1));
    });
}

/// A request of 4 MiB takes four seconds of its limit. The bucket has 10 ms.
#[test]
fn a_request_larger_than_the_bucket_is_admitted() {
    simulate(async |handle, seed, _| {
        let stage = Stage::new(&handle, seed, bps(MIB));
        let requests = [WRITE_OP, Op::Read, WRITE_OP]
            .map(|op| stage.submit(0, op, 4 * MIB * u64::from(op == Op::Read), 4 * MIB));
        took(stage.all().await, 3, Duration::from_secs(4));
        assert_eq!(stage.answered_at(requests[0]), Some(Duration::ZERO));
    });
}

#[test]
fn new_limits_apply_to_requests_that_wait() {
    simulate(async |handle, seed, mut rng| {
        // Two operations take a second each. Then the third one waits at a rate of 1,000.
        let stage = Stage::new(&handle, seed, iops(1));
        stage.submit_many(&mut rng, 100, 4096);
        stage.pass(Duration::from_millis(1100)).await;
        assert_eq!(stage.answered.borrow().len(), 2);
        stage.set(iops(1000));
        let last = stage.all().await - Duration::from_millis(1100);
        // A waiting request looks at the limits every 20 ms.
        let least = Duration::from_millis(98 - 10);
        assert!((least..=least + MAX_SLEEP + 3 * HOLDS).contains(&last), "{last:?}");

        // A lower limit holds the rest back, and none admits it.
        let stage = Stage::new(&handle, seed, iops(1000));
        stage.submit_many(&mut rng, 100, 4096);
        stage.pass(Duration::from_millis(30)).await;
        let before = stage.answered.borrow().len();
        assert!((38..=42).contains(&before), "{before} of 1,000 a second in 30 ms, and 10 at once");
        stage.set(iops(1));
        stage.pass(Duration::from_secs(10)).await;
        let now = stage.answered.borrow().len();
        assert!((before + 9..=before + 11).contains(&now), "{now} after {before}, in 10 s");
        stage.set(Limits::default());
        stage.pass(MAX_SLEEP).await;
        assert_eq!(stage.answered.borrow().len(), 100);
        stage.once();
    });
}

/// Requests wait in the throttle while the disk is quiesced: none begins, and all are answered when
/// it goes on. The limit's time passes meanwhile.
#[test]
fn a_quiesce_holds_the_requests_that_the_throttle_admits() {
    simulate(async |handle, seed, mut rng| {
        let stage = Stage::new(&handle, seed, iops(100));
        stage.submit_many(&mut rng, 200, 4096);
        for _ in 0..5 {
            stage.pass(Duration::from_millis(rng.between(1, 150))).await;
            let (reply, drained) = replies();
            stage.reactors.iter().for_each(|on| on.quiesce.start(Some(reply.clone())));
            stage.settle().await;
            assert_eq!(drained.arrived().len(), 2, "nothing is in flight");
            let (begun, answered) = (stage.begun_operations(), stage.answered.borrow().len());
            stage.submit_many(&mut rng, 3, 4096);
            stage.pass(Duration::from_millis(rng.between(1, 150))).await;
            assert_eq!(stage.begun_operations(), begun, "an operation began in the quiesce");
            assert_eq!(stage.answered.borrow().len(), answered);
            stage.reactors.iter().for_each(|on| on.quiesce.resume());
        }
        let last = stage.all().await;
        // The limit counts what begins: 215 operations take at least their time.
        assert!(last >= Duration::from_millis(2140 - 10), "{last:?}");
        assert_eq!(stage.begun_operations(), 215);
    });
}

/// Drains a disk with requests that wait for its limit, beside a disk on the same device. Returns
/// what the disk owes to the device: during the quiesce, if there is one, and after the answers.
async fn device_debts(handle: &Handle, seed: u64, is_quiesced: bool) -> [Option<Time>; 2] {
    let host = Host::default();
    let share = || host.share(Some(("d", &DeviceProfile::FLASH)), None, &Knobs::default());
    let (stage, neighbour) = (Stage::sharing(handle, seed, share()), share().on_reactor());
    let now = time_of(handle.read_clock());
    let debt = || stage.disk.share().paused_until(now).map(|paid| paid - now);
    neighbour.done(now, neighbour.ask(now, &READ).unwrap());
    stage.set(iops(1));
    (0..10).for_each(|n| {
        stage.submit(0, WRITE_OP, n * MIB / 2, MIB / 2);
    });
    stage.settle().await;
    assert_eq!(stage.answered.borrow().len(), 1, "the others wait for the limit");
    if is_quiesced {
        stage.reactors.iter().for_each(|on| on.quiesce.start(None));
    }
    stage.reactors.iter().for_each(|on| on.drain());
    stage.settle().await;
    assert_eq!(stage.answered.borrow().len(), if is_quiesced { 1 } else { 10 });
    // What is left is the debt to the device.
    stage.set(Limits::default());
    let during = debt();
    stage.reactors.iter().for_each(|on| on.quiesce.resume());
    stage.all().await;
    [during, debt()]
}

/// Requests that a drain admits during a quiesce begin after it.
#[test]
fn requests_that_a_drain_admits_during_a_quiesce_are_owed_once() {
    simulate(async |handle, seed, _| {
        let [_, usual] = device_debts(&handle, seed, false).await;
        assert!(usual.is_some());
        assert_eq!(device_debts(&handle, seed, true).await, [None, usual]);
    });
}

/// Drains and quiesces at seeded times: every request is answered once, with its own data.
#[test]
fn drains_and_quiesces_lose_and_repeat_no_request() {
    simulate(async |handle, seed, mut rng| {
        let stage = Stage::new(&handle, seed, iops(50));
        let (mut next, mut flushes) = (0, 0);
        for _ in 0..40 {
            for _ in 0..rng.below(12) {
                let on = rng.below(2) as usize;
                if rng.one_in(6) {
                    stage.submit(on, Op::Flush, 0, 0);
                    flushes += 1;
                } else {
                    stage.submit(on, WRITE_OP, next * 512, 512);
                    next += 1;
                }
            }
            stage.pass(Duration::from_micros(rng.between(1, 30_000))).await;
            let on = &stage.reactors[rng.below(2) as usize];
            match rng.below(4) {
                0 => {
                    stage.reactors.iter().for_each(|on| on.drain());
                    stage.settle().await;
                    assert_eq!(stage.answered.borrow().len(), stage.submitted.get());
                }
                1 => on.drain(),
                2 => {
                    stage.reactors.iter().for_each(|on| on.quiesce.start(None));
                    stage.pass(Duration::from_micros(rng.between(1, 30_000))).await;
                    stage.reactors.iter().for_each(|on| on.quiesce.resume());
                }
                _ => {}
            }
        }
        stage.all().await;
        assert_eq!(stage.answered.borrow().len(), next as usize + flushes);
        let contents = stage.device.contents();
        for (sector, found) in contents.chunks(512).enumerate().take(next as usize) {
            assert!(found.iter().all(|byte| *byte == mark(sector as u64)), "sector {sector}");
        }
        let is_write = |trace: &Trace| trace.kind == SimOp::Write && trace.phase == Phase::Started;
        let writes = stage.device.trace().into_iter().filter(is_write).count();
        assert_eq!(writes, next as usize, "each write is made once");
    });
}

/// The guest of one disk of a group is reset with many requests waiting.
#[test]
fn a_drain_delays_the_other_disk_of_its_group_for_a_moment_and_is_paid_while_the_guest_is_idle() {
    simulate(async |handle, seed, mut rng| {
        let group = Knobs { limits: bps(MIB), ..Knobs::default() };
        let host = Host::default();
        let share = || host.share(None, Some(("g", &group)), &Knobs::default());
        let (one, other) = (share(), share());
        host.set_group("g", &group, time_of(handle.read_clock()));
        let stages = [one, other].map(|share| Stage::sharing(&handle, seed, share));
        let [one, other] = &stages;
        one.submit_many(&mut rng, 10, MIB);
        one.settle().await;
        one.reactors.iter().for_each(|reactor| reactor.drain());
        one.all().await;
        let owed = handle.read_clock();
        // The other disk wants a sixteenth of the rate.
        for _ in 0..16 {
            let begun = handle.read_clock();
            other.submit(0, WRITE_OP, 0, MIB / 64);
            other.all().await;
            let waited = handle.read_clock() - begun;
            assert!(waited < Duration::from_millis(100), "{waited:?}");
            other.pass(Duration::from_millis(250) - waited).await;
        }
        // It takes 10 s. The guest sends nothing, so only time can pay.
        one.pass(Duration::from_secs(9) - (handle.read_clock() - owed)).await;
        assert!(one.disk.share().owes_group());
        one.pass(Duration::from_secs(3)).await;
        assert!(!one.disk.share().owes_group());
        let begun = handle.read_clock();
        one.submit(0, WRITE_OP, 0, MIB / 1024);
        one.all().await;
        assert!(handle.read_clock() - begun < Duration::from_millis(40));
    });
}
