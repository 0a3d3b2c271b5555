//! The run: lanes of requests on one or two reactors, until they end or the power is cut.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_disk::{Backend, Disk, DiskOptions, LocalDisk, Op, Request, Source, Status, Token};
use blockyard_image::{CacheMode, Raw, Store};
use blockyard_ring::{GuestMemory, Region, Segments};
use blockyard_storage::sim::{
    Latency, OpKind, Oracle, Phase, Power, Rng, SECTOR, Sim, SimConfig, SimDisk, SimImage, pattern,
    yield_now,
};

use super::judge::Judge;
use super::plan::Plan;

/// Guest memory of each lane.
const WINDOW: u64 = 1 << 16;
/// The largest request in sectors. It spans several 4096-byte blocks.
const LARGEST: u64 = 24;

/// Counts of events over many boots.
#[derive(Debug, Default)]
pub struct Tally {
    pub cuts: u64,
    pub survived: u64,
    pub flushes: u64,
    pub syncs: u64,
    pub poisoned: u64,
    /// Flushes that failed because another one's sync failed.
    pub waiters_failed: u64,
    /// Number of files that were longer at the end.
    pub grew: u64,
    /// Length of the longest file at the end of a run.
    pub longest: u64,
}

impl Tally {
    /// Returns whether waiting flushes shared syncs.
    pub fn shared_syncs(&self) -> bool {
        self.syncs < self.flushes
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { cuts, survived, flushes, syncs, poisoned, waiters_failed, grew, longest } =
            self;
        write!(f, "{cuts} cuts, {survived} whole runs, {flushes} flushes by {syncs} syncs, ")?;
        write!(
            f,
            "{poisoned} poisoned, {waiters_failed} more flushes failed, {grew} files grew, \
             to {longest} bytes"
        )
    }
}

/// A disk over several boots. The test checks the contents after each power cut, and the next boot
/// starts with them.
pub struct Life {
    plan: Plan,
    rng: Rng,
    image: SimImage,
    oracle: Rc<RefCell<Oracle>>,
    memory: Rc<GuestMemory>,
}

impl Life {
    pub fn new(plan: Plan) -> Self {
        let image = SimImage::zeroed(plan.capacity - plan.missing).atomic(plan.atomic);
        let rng = Rng::new(plan.seed);
        Life { plan, rng, image, oracle: Rc::default(), memory: guest_memory() }
    }

    /// Runs one boot and cuts the power after `cut_after` events. Returns whether the load ended
    /// before that. `wrap` may replace the storage.
    pub fn boot(
        &mut self,
        cut_after: u64,
        wrap: impl Fn(SimDisk) -> Store,
        tally: &mut Tally,
    ) -> Result<bool, String> {
        let plan = self.plan.clone();
        let explain =
            |e: String| format!("seed {}, cut after {cut_after} events: {e}\n{plan:?}", plan.seed);
        let sim_disk = SimDisk::new(self.image.clone(), self.config(cut_after));
        if let Some(trouble) = &plan.trouble {
            sim_disk.fail(trouble.fault.clone());
        }
        let disk = Arc::new(Disk::new(options(), Source::Null { size: plan.capacity }));
        let judge = Rc::new(Judge::new(&plan, self.oracle.clone(), sim_disk.clone(), disk.clone()));
        let raw = Raw::on(wrap(sim_disk.clone()), plan.shape);
        let served = |_| Rc::new(LocalDisk::new(disk.clone(), Backend::Raw(raw.clone()), None));
        let served: Vec<_> = (0..plan.reactors).map(served).collect();
        self.load(&judge, &served).map_err(explain)?;
        judge.flushes_are_true().map_err(explain)?;
        tally.count(&judge, self.image.len());
        let survived = judge.survived();
        self.judge_what_is_left(&sim_disk).map_err(explain)?;
        Ok(survived)
    }

    fn config(&mut self, cut_after: u64) -> SimConfig {
        let rng = &mut self.rng;
        // Sometimes a kind of operation is slow, so that others run in between.
        let mut slow = |most| if rng.one_in(4) { 40 } else { most };
        let latency = Latency { read: slow(4), write: slow(6), sync: slow(10), other: slow(6) };
        let power = Power::cut_after(cut_after);
        SimConfig {
            latency,
            discard_zeroes: self.plan.discard_zeroes,
            power,
            ..SimConfig::new(rng.next_u64())
        }
    }

    /// Runs the lanes to their end. After a power cut they end, too, and their answers are ignored.
    fn load(&mut self, judge: &Rc<Judge>, served: &[Rc<LocalDisk>]) -> Result<(), String> {
        let sim = Sim::new(self.rng.next_u64()).step_limit(1_000_000);
        let failed = Rc::new(RefCell::new(None));
        let running = Rc::new(Cell::new(self.plan.lanes));
        for index in 0..self.plan.lanes {
            let lane = Lane {
                judge: judge.clone(),
                served: served[index % served.len()].clone(),
                memory: self.memory.clone(),
                base: index as u64 * WINDOW,
                capacity: self.plan.capacity,
                writethrough: self.plan.writethrough,
                rng: self.rng.fork(),
            };
            let (requests, failed, running) = (self.plan.requests, failed.clone(), running.clone());
            sim.spawn(async move {
                if let Err(e) = lane.run(requests).await {
                    failed.borrow_mut().get_or_insert(e);
                }
                running.set(running.get() - 1);
            });
        }
        let through = async move {
            while running.get() > 0 {
                yield_now().await;
            }
        };
        self.wait(&sim, judge, through)?;
        if let Some(e) = failed.take() {
            return Err(e);
        }
        if judge.sim.is_off() {
            return Ok(());
        }
        let (judge, served, capacity) = (judge.clone(), served[0].clone(), self.plan.capacity);
        sim.block_on(async move { read_all(&judge, &served, capacity).await })
            .map_err(|e| e.to_string())?
    }
}

impl Life {
    /// Waits for the lanes. A disk without power fails all pending operations.
    fn wait(
        &self,
        sim: &Sim,
        judge: &Judge,
        through: impl Future<Output = ()> + 'static,
    ) -> Result<(), String> {
        let sim_disk = judge.sim.clone();
        let watch = async move {
            let mut through = Box::pin(through);
            let mut gave_up = false;
            std::future::poll_fn(|cx| {
                if sim_disk.is_off() && !std::mem::replace(&mut gave_up, true) {
                    sim_disk.give_up();
                }
                through.as_mut().poll(cx)
            })
            .await
        };
        sim.block_on(watch).map_err(|e| format!("requests are left without an answer: {e}"))
    }

    /// Judges some of the images that a power cut now may leave. The next boot starts with the last
    /// one.
    fn judge_what_is_left(&mut self, sim_disk: &SimDisk) -> Result<(), String> {
        for _ in 0..2 {
            let bytes = self.found(&sim_disk.power_cut())?;
            self.oracle.borrow().allows_after_cut(0, &bytes).map_err(|e| e.to_string())?;
        }
        let image = sim_disk.power_cut();
        let mut bytes = self.found(&image)?;
        self.oracle.borrow_mut().check_after_cut(0, &bytes).map_err(|e| e.to_string())?;
        bytes.resize(image.len() as usize, 0);
        self.image = SimImage::from_bytes(&bytes).atomic(self.plan.atomic);
        Ok(())
    }

    /// Returns what the guest sees of an image, in whole sectors.
    ///
    /// If the file ends within its last sector, that sector may be torn there: a write to it is
    /// kept, but the growth of the file is not. It holds nothing durable then, and counts as never
    /// written.
    fn found(&self, image: &SimImage) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; self.plan.capacity as usize];
        image.read(0, &mut bytes);
        if image.len() < self.plan.capacity {
            let last = bytes.len() - SECTOR;
            bytes[last..].fill(0);
            self.oracle
                .borrow()
                .allows_after_cut(last as u64, &bytes[last..])
                .map_err(|e| e.to_string())?;
        }
        Ok(bytes)
    }
}

impl Tally {
    fn count(&mut self, judge: &Judge, len_before: u64) {
        let survived = judge.survived();
        self.cuts += u64::from(!survived);
        self.survived += u64::from(survived);
        let (good, bad) = judge.flushes();
        let trace = judge.sim.trace();
        let syncs =
            trace.iter().filter(|t| t.kind == OpKind::Sync && t.phase == Phase::Answered).count();
        self.flushes += good;
        self.syncs += syncs as u64;
        self.poisoned += u64::from(judge.saw_poison());
        self.waiters_failed += bad.saturating_sub(1);
        let len = judge.sim.contents().len() as u64;
        self.grew += u64::from(len > len_before);
        if survived {
            self.longest = self.longest.max(len);
        }
    }
}

impl Judge {
    fn survived(&self) -> bool {
        !self.sim.is_off()
    }
}

fn guest_memory() -> Rc<GuestMemory> {
    thread_local! {
        static MEMORY: Rc<GuestMemory> = {
            let (region, _) = Region::memfd("guest", 0, 0, 16 * WINDOW).unwrap();
            Rc::new(GuestMemory::default().with(region).unwrap())
        };
    }
    MEMORY.with(Rc::clone)
}

fn options() -> DiskOptions {
    let (name, serial) = ("test".to_string(), String::new());
    DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    }
}

type Answer = (Status, Segments);

/// The export's data of a request.
struct Slot(Rc<Cell<Option<Answer>>>);

impl Token for Slot {
    fn answer(self, status: Status, segments: Segments) {
        assert!(self.0.replace(Some((status, segments))).is_none(), "a request was answered twice");
    }

    fn may_wait(&self) -> bool {
        true
    }
}

async fn ask(served: &LocalDisk, op: Op, (offset, len): (u64, u64), segments: Segments) -> Answer {
    let slot = Rc::new(Cell::new(None));
    let request = Request::new(op, offset, len, segments, Instant::now(), Slot(slot.clone()));
    served.serve(request).await.answer();
    slot.take().expect("a request that was served is answered")
}

/// Reads the whole disk, without concurrent requests.
async fn read_all(judge: &Judge, served: &LocalDisk, capacity: u64) -> Result<(), String> {
    for offset in (0..capacity).step_by(SECTOR) {
        let token = judge.oracle.borrow_mut().read_started();
        let (status, segments) =
            ask(served, Op::Read, (offset, SECTOR as u64), Segments::buffer(SECTOR)).await;
        if status.is_ok() {
            check(judge, token, offset, &segments)?;
        }
    }
    Ok(())
}

fn check(
    judge: &Judge,
    token: blockyard_storage::sim::ReadToken,
    offset: u64,
    segments: &Segments,
) -> Result<(), String> {
    let mut content = vec![0; segments.len()];
    segments.copy_out(0, &mut content);
    judge.oracle.borrow_mut().check_read(token, offset, &content).map_err(|e| e.to_string())
}

/// One client of a queue. It always has one request in flight.
struct Lane {
    judge: Rc<Judge>,
    served: Rc<LocalDisk>,
    memory: Rc<GuestMemory>,
    base: u64,
    capacity: u64,
    writethrough: bool,
    rng: Rng,
}

impl Lane {
    async fn run(mut self, requests: usize) -> Result<(), String> {
        for _ in 0..requests {
            let range = self.range();
            let heard = match self.rng.below(16) {
                0..7 => self.write(range).await?,
                7..10 => self.flush().await?,
                10..12 => self.zero(range).await?,
                12 => self.discard(range).await?,
                _ => self.read(range).await?,
            };
            if !heard {
                break;
            }
        }
        Ok(())
    }

    /// Returns a random offset and length in bytes, in whole sectors. Most are short.
    fn range(&mut self) -> (u64, u64) {
        let sectors = self.capacity / SECTOR as u64;
        let longest = if self.rng.one_in(4) { LARGEST } else { 6 };
        let first = self.rng.below(sectors);
        let count = self.rng.between(1, longest).min(sectors - first);
        (first * SECTOR as u64, count * SECTOR as u64)
    }

    /// Returns guest memory for a request: one piece, pieces of whole sectors, or pieces that
    /// O_DIRECT does not accept.
    fn segments(&mut self, len: u64) -> Segments {
        let mut segments = Segments::default();
        segments.reset(&self.memory);
        let style = self.rng.below(3);
        let (mut at, mut left) = (self.base + if style == 2 { 1 } else { 0 }, len);
        while left > 0 {
            let (piece, gap) = match style {
                0 => (left, 0),
                1 => (512 * self.rng.between(1, left / 512), 512 * self.rng.below(2)),
                _ => (self.rng.between(1, left), self.rng.below(8)),
            };
            segments
                .push_guest(at, piece)
                .expect("a window holds the largest request and its gaps");
            at += piece + gap;
            left -= piece;
        }
        segments
    }

    fn fua(&mut self) -> bool {
        self.writethrough || self.rng.one_in(4)
    }

    async fn write(&mut self, range: (u64, u64)) -> Result<bool, String> {
        let (segments, fua) = (self.segments(range.1), self.fua());
        let data = pattern(self.rng.next_u64(), range.0, range.1 as usize);
        segments.copy_in(0, &data);
        let op = Op::Write { fua };
        let asked = self.judge.asked(op);
        let token = self.judge.oracle.borrow_mut().write_started(range.0, &data);
        let (status, _) = ask(&self.served, op, range, segments).await;
        self.changed(asked, status, token, fua)
    }

    async fn zero(&mut self, range: (u64, u64)) -> Result<bool, String> {
        let fua = self.fua();
        let op = Op::WriteZeroes { unmap: self.rng.one_in(2), fua, fast: false };
        let asked = self.judge.asked(op);
        let token = self.judge.oracle.borrow_mut().zero_started(range.0, range.1);
        let (status, _) = ask(&self.served, op, range, Segments::default()).await;
        self.changed(asked, status, token, fua)
    }

    async fn discard(&mut self, range: (u64, u64)) -> Result<bool, String> {
        let asked = self.judge.asked(Op::Discard);
        let token = self.judge.oracle.borrow_mut().discard_started(range.0, range.1);
        let (status, _) = ask(&self.served, Op::Discard, range, Segments::default()).await;
        self.changed(asked, status, token, false)
    }

    fn changed(
        &self,
        asked: super::judge::Asked,
        status: Status,
        token: blockyard_storage::sim::WriteToken,
        durable: bool,
    ) -> Result<bool, String> {
        let heard = self.judge.answered(asked, status)?;
        if heard {
            self.judge.oracle.borrow_mut().write_answered(token, status.is_ok(), durable);
        }
        Ok(heard)
    }

    async fn flush(&mut self) -> Result<bool, String> {
        let asked = self.judge.asked(Op::Flush);
        let token = self.judge.oracle.borrow_mut().flush_started();
        let (status, _) = ask(&self.served, Op::Flush, (0, 0), Segments::default()).await;
        let heard = self.judge.answered(asked, status)?;
        if heard {
            self.judge.oracle.borrow_mut().flush_answered(token, status.is_ok());
        }
        Ok(heard)
    }

    async fn read(&mut self, range: (u64, u64)) -> Result<bool, String> {
        let segments = self.segments(range.1);
        let asked = self.judge.asked(Op::Read);
        let token = self.judge.oracle.borrow_mut().read_started();
        let (status, segments) = ask(&self.served, Op::Read, range, segments).await;
        let heard = self.judge.answered(asked, status)?;
        if heard && status.is_ok() {
            check(&self.judge, token, range.0, &segments)?;
        }
        Ok(heard)
    }
}
