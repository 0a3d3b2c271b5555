//! Several boots of a COW file and its backing file. The state after each power cut is checked; the
//! next boot begins with it.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use blockyard_image::cow::{self, Backing, Cow, CowOptions, CreateOptions, Header};
use blockyard_image::journal::{CrashSafety, ImageKey, ImageSafety, MemoryStore, SafetyMode};
use blockyard_image::{CopyDown, ErrorKind, Image, ImageError, Layer, Raw, Storage, Store};
use blockyard_ring::Segments;
use blockyard_storage::sim::{
    Latency, OpKind, Oracle, Phase, Power, Rng, SECTOR, Sim, SimConfig, SimDisk, SimHandle,
    SimImage, Trace, pattern,
};

use super::client::{Load, SPOT_SECTORS, Stack, spot_start};
use super::plan::Plan;
use crate::lives::Count;

/// Statistics over many boots.
#[derive(Debug, Default)]
pub struct Tally {
    pub cuts: u64,
    /// Number of cuts that were deaths of the process: what the kernel has stays.
    pub deaths: u64,
    pub survived: u64,
    flushes: u64,
    syncs: u64,
    /// Number of power cuts that left bits in the bitmap which were not there before.
    bits_grew: u64,
    commits_cut: u64,
    rebases_cut: u64,
    /// Number of power cuts during a creation that left no COW file yet, and that left a complete
    /// one.
    unborn: u64,
    born: u64,
    troubled: u64,
    /// Number of recoveries that another death interrupted.
    pub recoveries_cut: u64,
}

impl Tally {
    pub fn saw_everything(&self) -> bool {
        let rare = [self.commits_cut, self.rebases_cut, self.unborn, self.born, self.troubled];
        self.syncs > self.flushes && self.bits_grew > self.cuts / 4 && rare.iter().all(|&n| n > 30)
    }
}

impl Count for Tally {
    fn cuts(&self) -> u64 {
        self.cuts
    }

    fn add(&mut self, other: &Tally) {
        let Tally {
            cuts,
            deaths,
            survived,
            flushes,
            syncs,
            bits_grew,
            commits_cut,
            rebases_cut,
            unborn,
            born,
            troubled,
            recoveries_cut,
        } = other;
        self.cuts += cuts;
        self.deaths += deaths;
        self.survived += survived;
        self.flushes += flushes;
        self.syncs += syncs;
        self.bits_grew += bits_grew;
        self.commits_cut += commits_cut;
        self.rebases_cut += rebases_cut;
        self.unborn += unborn;
        self.born += born;
        self.troubled += troubled;
        self.recoveries_cut += recoveries_cut;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally {
            cuts,
            deaths,
            survived,
            flushes,
            syncs,
            bits_grew,
            commits_cut,
            rebases_cut,
            unborn,
            born,
            troubled,
            recoveries_cut,
        } = self;
        write!(
            f,
            "{cuts} cuts, {deaths} deaths among them, {survived} whole runs, {flushes} flushes, \
             {syncs} syncs of the file, "
        )?;
        write!(
            f,
            "{bits_grew} loads set new bits, {commits_cut} commits and {rebases_cut} rebases cut, "
        )?;
        write!(
            f,
            "{unborn} files cut before they were there and {born} after, {troubled} loads with \
             errors, {recoveries_cut} recoveries cut"
        )
    }
}

/// Returns a backing file's name that fits into the header's first sector, which is written
/// atomically.
fn name(rebases: u64) -> String {
    format!("/golden/{}/{rebases}.img", "n".repeat(100))
}

/// Contents that a guest would read: offsets and bytes.
type Contents = Vec<(u64, Vec<u8>)>;

fn backing_size(plan: &Plan) -> u64 {
    spot_start(plan.spots - 1) + SPOT_SECTORS * SECTOR as u64
}

pub struct Life {
    plan: Plan,
    rng: Rng,
    cow: SimImage,
    base: SimImage,
    oracle: Rc<RefCell<Oracle>>,
    own_sectors: u64,
    rebases: u64,
    /// Journals of the file, which outlive a process.
    journals: MemoryStore,
}

/// Both disks on one power supply.
struct Boot {
    power: Power,
    cow: SimDisk,
    base: SimDisk,
}

impl Life {
    pub fn new(plan: Plan) -> Self {
        let (mut oracle, sim) = (Oracle::new(), Sim::new(plan.seed));
        let empty = SimImage::zeroed(backing_size(&plan)).atomic(plan.atomic);
        let base = SimDisk::new(empty, SimConfig::new(plan.seed));
        for spot in 0..plan.spots {
            let offset = spot_start(spot);
            let data = pattern(1, offset, SPOT_SECTORS as usize * SECTOR);
            let token = oracle.write_started(offset, &data);
            oracle.write_answered(token, true, true);
            let base = base.clone();
            sim.block_on(
                async move { base.write(Segments::from_bytes(&data), offset, true).await.1 },
            )
            .unwrap()
            .unwrap();
        }
        let (rng, oracle) = (Rng::new(plan.seed), Rc::new(RefCell::new(oracle)));
        let cow = SimImage::zeroed(0).atomic(plan.atomic);
        let (base, journals) = (base.power_cut(), MemoryStore::default());
        Life { plan, rng, cow, base, oracle, own_sectors: 0, rebases: 0, journals }
    }

    /// Approximate number of events of a load. A random event number below it is likely to occur.
    pub fn events(&self) -> u64 {
        (self.plan.clients * self.plan.requests) as u64 * 3
    }

    fn explain(&self, cut_after: u64, what: &str) -> impl Fn(String) -> String + use<> {
        let start = format!("seed {}, {what} cut after {cut_after} events", self.plan.seed);
        let plan = format!("{:?}", self.plan);
        move |e| format!("{start}: {e}\n{plan}")
    }

    fn boot(&mut self, cut_after: u64) -> Boot {
        let power = Power::cut_after(cut_after);
        let mut disk = |image: &SimImage| {
            let rng = &mut self.rng;
            // Sometimes operations of one kind are slow, so that others overtake them.
            let mut slow = |most| if rng.one_in(4) { 40 } else { most };
            let latency = Latency { read: slow(4), write: slow(6), sync: slow(10), other: slow(6) };
            let config = SimConfig::new(rng.next_u64());
            let discard_zeroes = self.plan.discard_zeroes;
            SimDisk::new(
                image.clone(),
                SimConfig { latency, discard_zeroes, power: power.clone(), ..config },
            )
        };
        let (cow, base) = (disk(&self.cow), disk(&self.base));
        Boot { power, cow, base }
    }

    /// Runs `work`. Returns None if the power was cut meanwhile.
    fn run<T: 'static, F: Future<Output = T> + 'static>(
        &mut self,
        boot: &Boot,
        work: impl FnOnce(SimHandle) -> F,
    ) -> Result<Option<T>, String> {
        let sim = Sim::new(self.rng.next_u64()).step_limit(2_000_000);
        let mut work = Box::pin(work(sim.handle().clone()));
        let (disks, mut gave_up) = ([boot.cow.clone(), boot.base.clone()], false);
        let watched = std::future::poll_fn(move |cx| {
            if disks[0].is_off() && !std::mem::replace(&mut gave_up, true) {
                disks.iter().for_each(SimDisk::give_up);
            }
            // Poll again at each step, to notice a power cut while another task is polled.
            cx.waker().wake_by_ref();
            work.as_mut().poll(cx)
        });
        let value = sim.block_on(watched).map_err(|e| format!("a request got no answer: {e}"))?;
        Ok((!boot.power.is_off()).then_some(value))
    }

    /// Creates the file, with a power cut after `cut_after` events. Returns true if the creation
    /// ended before the cut. If the file that the cut left does not open, creates it again without
    /// a cut.
    pub fn be_created(&mut self, cut_after: u64, tally: &mut Tally) -> Result<bool, String> {
        let explain = self.explain(cut_after, "making it");
        let survived = self.create(cut_after).map_err(&explain)?;
        tally.count(survived);
        let opened = self.open_left(self.cow.clone()).map_err(&explain)?;
        if survived && !opened {
            return Err(explain("the file was created, but does not open".into()));
        }
        tally.born += u64::from(!survived && opened);
        tally.unborn += u64::from(!survived && !opened);
        if !opened {
            self.cow = SimImage::zeroed(0).atomic(self.plan.atomic);
            self.create(u64::MAX).map_err(&explain)?;
        }
        self.judge(self.cow.clone(), self.base.clone()).map_err(explain)?;
        Ok(survived)
    }

    fn create(&mut self, cut_after: u64) -> Result<bool, String> {
        let boot = self.boot(cut_after);
        let file = Raw::on(boot.cow.clone(), self.plan.shape);
        let (size, version, alignment) =
            (backing_size(&self.plan), self.plan.version, self.plan.alignment);
        let made = self.run(&boot, |_| async move {
            let backing = Backing { name: &name(0), size, mtime: 1 };
            cow::create(&file, &CreateOptions { backing, version, alignment })
                .await
                .map_err(|e| e.to_string())
        })?;
        let survived = made.transpose()?.is_some();
        self.cow = boot.cow.power_cut();
        Ok(survived)
    }

    /// Returns whether a file that a cut during its creation left opens. It must not fail for any
    /// reason but "not a COW file".
    fn open_left(&self, image: SimImage) -> Result<bool, String> {
        let file = Raw::on(SimDisk::new(image, SimConfig::new(1)), self.plan.shape);
        let opened = Sim::new(1)
            .block_on(async move { Cow::open(file, &CowOptions::default()).await.map(|_| ()) });
        match opened.map_err(|e| e.to_string())? {
            Ok(()) => Ok(true),
            Err(e) if e.kind == ErrorKind::Invalid && e.offset == Some(0) => Ok(false),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Runs a guest's load. Returns true if it ended before the power cut. `wrap` creates the
    /// file's storage.
    pub fn load(
        &mut self,
        cut_after: u64,
        wrap: impl Fn(SimDisk) -> Store,
        tally: &mut Tally,
    ) -> Result<bool, String> {
        let dies = self.plan.dies && self.rng.one_in(2);
        let explain = self.explain(cut_after, if dies { "a dying load" } else { "a load" });
        let boot = self.boot(cut_after);
        if let Some((_, fault)) = &self.plan.trouble {
            boot.cow.fail(fault.clone());
            tally.troubled += 1;
        }
        let file = Raw::on(wrap(boot.cow.clone()), self.plan.shape);
        let base = Raw::on(boot.base.clone(), self.plan.shape);
        let (plan, oracle, power, rng) =
            (self.plan.clone(), self.oracle.clone(), boot.power.clone(), self.rng.fork());
        let safety = self.safety();
        let load = Load { plan, safety, dies, oracle, power, rng, flushes: Rc::default() };
        let flushes = load.flushes.clone();
        let result = self
            .run(&boot, |handle| async move { load.run(&handle, file, base).await })
            .map_err(&explain)?;
        result.transpose().map_err(&explain)?;
        let survived = !boot.power.is_off();
        tally.count(survived);
        tally.deaths += u64::from(!survived && dies);
        tally.flushes += flushes.get();
        let synced = |t: &&Trace| t.kind == OpKind::Sync && t.phase == Phase::Answered;
        tally.syncs += boot.cow.trace().iter().filter(synced).count() as u64;
        let own = self.own_sectors;
        if dies {
            self.judge_death(&boot, tally).map_err(explain)?;
        } else {
            self.journals.reboot();
            self.judge_left(&boot).map_err(explain)?;
        }
        tally.bits_grew += u64::from(self.own_sectors > own);
        Ok(survived)
    }

    fn safety(&self) -> ImageSafety {
        let image = ImageKey { device: 0, inode: 1, born: 0 };
        let store = Some(self.journals.clone().into());
        match self.plan.dies {
            true => CrashSafety { mode: SafetyMode::Journal, store }.of(Some(image)),
            false => ImageSafety::default(),
        }
    }

    /// Ends the process, lets the next one recover the file and close it, and checks that it holds
    /// each answered write. Further deaths may interrupt the recovery, which then begins again.
    fn judge_death(&mut self, boot: &Boot, tally: &mut Tally) -> Result<(), String> {
        (self.cow, self.base) = (boot.cow.process_death(), boot.base.process_death());
        loop {
            let cut_after = if self.rng.one_in(2) { self.rng.below(30) } else { u64::MAX };
            let boot = self.boot(cut_after);
            let file = Raw::on(boot.cow.clone(), self.plan.shape);
            let (bitmap_memory, safety) = (self.plan.memory, self.safety());
            let options = CowOptions { bitmap_memory, safety, ..CowOptions::default() };
            let done = self.run(&boot, |_| async move {
                Cow::open(file, &options)
                    .await?
                    .close()
                    .await
                    .map_err(|e| ImageError::io("cow file", None, "closing", e))
            })?;
            (self.cow, self.base) = (boot.cow.process_death(), boot.base.process_death());
            let Some(done) = done else {
                tally.recoveries_cut += 1;
                continue;
            };
            done.map_err(|e| format!("recovery: {e}"))?;
            if !self.journals.is_empty() {
                return Err("a journal is left after a recovery and a clean end".into());
            }
            return self.judge(self.cow.clone(), self.base.clone()).map(|_| ());
        }
    }

    /// Commits the file into its backing file, with a power cut after `cut_after` events. Checks
    /// that the disk's contents stay the same.
    pub fn commit(&mut self, cut_after: u64, tally: &mut Tally) -> Result<bool, String> {
        let explain = self.explain(cut_after, "a commit");
        let boot = self.boot(cut_after);
        let file = Raw::on(boot.cow.clone(), self.plan.shape);
        let base = Raw::on(boot.base.clone(), self.plan.shape);
        let options = CowOptions { bitmap_memory: self.plan.memory, ..CowOptions::default() };
        let committed = self.run(&boot, |_| async move {
            let cow = Cow::open(file.clone(), &options).await?;
            let size = cow.size();
            let (from, into) = (Layer::Cow(cow), Layer::Raw { raw: base, size });
            let (from, into) = (Image::new(vec![from], false), Image::new(vec![into], false));
            CopyDown::new(0..size, 1, Default::default())
                .run(&from, &into, async |_| Ok(()))
                .await?;
            into.close().await.map_err(|e| ImageError::io("backing file", None, "closing", e))?;
            cow::make_empty(&file).await
        });
        let survived =
            committed.map_err(&explain)?.transpose().map_err(|e| explain(e.to_string()))?.is_some();
        tally.count(survived);
        tally.commits_cut += u64::from(!survived);
        self.judge_left(&boot).map_err(&explain)?;
        if survived && self.own_sectors > 0 {
            return Err(explain(format!("{} sectors are left in the file", self.own_sectors)));
        }
        Ok(survived)
    }

    /// Stores another backing file's name, with a power cut after `cut_after` events.
    pub fn rebase(&mut self, cut_after: u64, tally: &mut Tally) -> Result<bool, String> {
        let explain = self.explain(cut_after, "a rebase");
        let boot = self.boot(cut_after);
        let file = Raw::on(boot.cow.clone(), self.plan.shape);
        let (size, next) = (backing_size(&self.plan), self.rebases + 1);
        let rebased = self.run(&boot, |_| async move {
            cow::set_backing(&file, &Backing { name: &name(next), size, mtime: 1 }).await
        });
        let survived =
            rebased.map_err(&explain)?.transpose().map_err(|e| explain(e.to_string()))?.is_some();
        tally.count(survived);
        tally.rebases_cut += u64::from(!survived);
        self.rebases = next;
        let header = self.judge_left(&boot).map_err(&explain)?;
        let old = header.backing == name(next - 1);
        if header.backing != name(next) && (survived || !old) {
            return Err(explain(format!("its backing file is {}", header.backing)));
        }
        self.rebases = if old { next - 1 } else { next };
        Ok(survived)
    }

    /// Checks some of the images that a power cut at this event may leave. The next boot uses the
    /// last one.
    fn judge_left(&mut self, boot: &Boot) -> Result<Header, String> {
        for _ in 0..2 {
            self.look(boot.cow.power_cut(), boot.base.power_cut())?;
        }
        (self.cow, self.base) = (boot.cow.power_cut(), boot.base.power_cut());
        self.judge(self.cow.clone(), self.base.clone())
    }

    /// Checks the images, and takes them as the current state.
    fn judge(&mut self, cow: SimImage, base: SimImage) -> Result<Header, String> {
        let (report, found) = self.look(cow, base)?;
        self.own_sectors = report.own_sectors;
        let mut oracle = self.oracle.borrow_mut();
        for (offset, bytes) in found {
            oracle.check_after_cut(offset, &bytes).map_err(|e| e.to_string())?;
        }
        Ok(report.header)
    }

    /// Checks that the file opens, has no errors, and holds the data that the oracle expects.
    fn look(&self, cow: SimImage, base: SimImage) -> Result<(cow::Report, Contents), String> {
        let file = Raw::on(SimDisk::new(cow, SimConfig::new(1)), self.plan.shape);
        let base = Raw::on(SimDisk::new(base, SimConfig::new(1)), self.plan.shape);
        let spots = self.plan.spots;
        let looked = async move {
            let report = cow::info(&file).await?;
            let options = CowOptions { read_only: true, ..CowOptions::default() };
            let stack = Stack { cow: Cow::open(file, &options).await?, base };
            let mut found = Vec::new();
            for spot in 0..spots {
                found.push((
                    spot_start(spot),
                    stack.read(spot_start(spot), SPOT_SECTORS * SECTOR as u64).await?,
                ));
            }
            Ok::<_, Box<dyn std::error::Error>>((report, found))
        };
        let (report, found) =
            Sim::new(1).block_on(looked).map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        // An O_DIRECT write of a whole block at the file's end may leave the file longer, up to the
        // block's end.
        let block = u64::from(self.plan.shape.offset_align);
        if !report.corruptions.is_empty() || report.leaked >= block {
            return Err(format!("{:?}, {} bytes leaked", report.corruptions, report.leaked));
        }
        let oracle = self.oracle.borrow();
        for (offset, bytes) in &found {
            oracle.allows_after_cut(*offset, bytes).map_err(|e| e.to_string())?;
        }
        Ok((report, found))
    }
}

impl Tally {
    fn count(&mut self, survived: bool) {
        self.cuts += u64::from(!survived);
        self.survived += u64::from(survived);
    }
}
