//! A chain through its boots. What is found after each cut is judged, and is where the next begins.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use blockyard_ring::Storage;
use blockyard_ring::sim::{Latency, Oracle, Power, Rng, Sim, SimConfig, SimDisk};

use super::chain::{self, Disks, Files};
use super::judge::Judge;
use super::load;
use super::plan::Plan;
use super::qemu;

/// Images judged after each cut, of the many that it may leave.
const JUDGED: usize = 3;

/// What has happened, over many boots.
#[derive(Debug, Default)]
pub struct Tally {
    pub cuts: u64,
    pub survived: u64,
    pub flushes: u64,
    pub events: u64,
    pub judged: u64,
    /// Errors told to the guest, and boots that had some.
    pub errors: u64,
    pub troubled: u64,
    /// Images that had leaks.
    pub leaky: u64,
    /// Images judged by QEMU; one in so many is, none if 0.
    pub by_qemu: u64,
    pub one_in: u64,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { cuts, survived, flushes, events, judged, errors, troubled, leaky, by_qemu, .. } = self;
        write!(f, "{cuts} cuts, {survived} whole runs, {flushes} flushes, {events} events, {judged} images judged, ")?;
        write!(f, "{leaky} with leaks, {by_qemu} by QEMU too, {errors} errors in {troubled} runs")
    }
}

/// How a boot ended.
pub struct Boot {
    pub survived: bool,
    pub events: u64,
}

pub struct Life {
    plan: Plan,
    rng: Rng,
    layers: Vec<Files>,
    snapshots: Vec<Vec<u8>>,
    leaks: u64,
    oracle: Rc<RefCell<Oracle>>,
}

impl Life {
    pub fn new(plan: Plan) -> Self {
        let layers = chain::make(&plan);
        let mut oracle = Oracle::new();
        let disk = chain::contents(&layers).expect("an image of our own");
        let token = oracle.write_started(0, &disk);
        oracle.write_answered(token, true, true);
        let findings = chain::check(&layers[0]);
        assert!(findings.corruptions.is_empty() && findings.leaks == 0, "to begin with: {findings:?}\n{plan:?}");
        let snapshots = chain::snapshots(&layers[0]).expect("an image of our own");
        let rng = Rng::new(plan.seed);
        Life { plan, rng, layers, snapshots, leaks: 0, oracle: Rc::new(RefCell::new(oracle)) }
    }

    /// One boot, cut after so many events. The storage is `wrap`'s.
    pub fn boot<S: Storage + Clone>(
        &mut self,
        cut_after: u64,
        wrap: impl Fn(SimDisk) -> S + Copy + 'static,
        tally: &mut Tally,
    ) -> Result<Boot, String> {
        let plan = self.plan.clone();
        self.boot_and_judge(cut_after, wrap, tally)
            .map_err(|e| format!("seed {}, cut after {cut_after} events: {e}\n{plan:?}", plan.seed))
    }

    fn boot_and_judge<S: Storage + Clone>(
        &mut self,
        cut_after: u64,
        wrap: impl Fn(SimDisk) -> S + Copy + 'static,
        tally: &mut Tally,
    ) -> Result<Boot, String> {
        let plan = Rc::new(self.plan.clone());
        let power = Power::cut_after(cut_after);
        let config = self.config(&power);
        let disks = Rc::new(Disks::new(&self.layers, config));
        if let Some(trouble) = &plan.trouble {
            let top = &disks.layers[0];
            let struck = top.1.as_ref().filter(|_| trouble.data_file).unwrap_or(&top.0);
            struck.fail(trouble.fault.clone());
        }
        let judge = Rc::new(Judge::new(&plan, self.oracle.clone(), disks.clone(), power.clone()));
        let sim = Sim::new(self.rng.next_u64()).step_limit(3_000_000);
        let opened = {
            let (disks, plan) = (disks.clone(), plan.clone());
            load::wait(&sim, &judge, async move { disks.open(&plan, wrap).await })?
        };
        let mut closed = false;
        match opened {
            Ok(views) => {
                let views: Vec<_> = views.into_iter().map(Rc::new).collect();
                if load::run(&plan, &judge, &sim, &views, &mut self.rng)? {
                    closed = self.end(&judge, &sim, &views)?;
                }
            }
            Err(_) if power.is_off() || plan.trouble.is_some() => {}
            Err(e) => return Err(format!("it does not open: {e}")),
        }
        let survived = !power.is_off();
        tally.count(&judge, survived);
        self.judge_what_is_left(&judge, closed, tally)?;
        Ok(Boot { survived, events: power.events() })
    }

    /// The load is through: everything is read; then the image is closed, as often as not. True: it was, and well.
    fn end<S: Storage>(
        &mut self,
        judge: &Rc<Judge>,
        sim: &Sim,
        views: &[Rc<blockyard_image::Image<S>>],
    ) -> Result<bool, String> {
        judge.disks.all().for_each(|disk| disk.heal());
        let (of, image, capacity) = (judge.clone(), views[views.len() - 1].clone(), self.plan.capacity);
        load::wait(sim, judge, async move { load::read_all(&of, &image, capacity).await })??;
        if self.rng.one_in(2) || judge.power.is_off() {
            return Ok(false);
        }
        let (image, of) = (views[0].clone(), judge.clone());
        load::wait(sim, judge, async move {
            let token = of.oracle.borrow_mut().flush_started();
            let result = image.close().await;
            let good = result.is_ok();
            of.flushed(token, result).map(|heard| heard && good)
        })?
    }

    fn config(&mut self, power: &Power) -> impl FnMut() -> SimConfig + use<> {
        let (mut rng, discard_zeroes, power) = (self.rng.fork(), self.plan.discard_zeroes, power.clone());
        move || {
            // Now and then operations of a kind take long, so that others come in between.
            let mut slow = |most| if rng.one_in(4) { 40 } else { most };
            let latency = Latency { read: slow(4), write: slow(6), sync: slow(10), other: slow(6) };
            SimConfig { latency, discard_zeroes, power: power.clone(), ..SimConfig::new(rng.next_u64()) }
        }
    }

    /// Some of the images that a cut here may leave; the last is what the next boot finds.
    fn judge_what_is_left(&mut self, judge: &Judge, closed: bool, tally: &mut Tally) -> Result<(), String> {
        for nth in 1..=JUDGED {
            let layers = judge.disks.power_cut();
            let disk = self.judge_image(&layers, closed, tally)?;
            if nth < JUDGED {
                self.oracle.borrow().allows_after_cut(0, &disk).map_err(|e| e.to_string())?;
            } else {
                self.oracle.borrow_mut().check_after_cut(0, &disk).map_err(|e| e.to_string())?;
                self.leaks = chain::check(&layers[0]).leaks;
                self.layers = layers;
            }
        }
        Ok(())
    }

    /// Gives what the guest sees of it.
    fn judge_image(&self, layers: &[Files], closed: bool, tally: &mut Tally) -> Result<Vec<u8>, String> {
        let findings = chain::check(&layers[0]);
        tally.judged += 1;
        tally.leaky += u64::from(findings.leaks > 0);
        if !findings.corruptions.is_empty() {
            return Err(format!("the image is corrupt: {:#?}", findings.corruptions));
        }
        if closed && findings.leaks > self.leaks && self.plan.trouble.is_none() {
            return Err(format!("{} clusters leaked, in an image that was closed", findings.leaks - self.leaks));
        }
        let unchanged = |(now, before): (&Files, &Files)| now.main.bytes() == before.main.bytes();
        if !layers[1..].iter().zip(&self.layers[1..]).all(unchanged) {
            return Err("an image below was changed".into());
        }
        if chain::snapshots(&layers[0])? != self.snapshots {
            return Err("a snapshot was changed".into());
        }
        let disk = chain::contents(layers)?;
        if tally.one_in > 0 && tally.judged.is_multiple_of(tally.one_in) {
            tally.by_qemu += 1;
            qemu::judge(layers, &disk, tally.judged)?;
        }
        Ok(disk)
    }
}

impl Tally {
    fn count(&mut self, judge: &Judge, survived: bool) {
        self.cuts += u64::from(!survived);
        self.survived += u64::from(survived);
        self.flushes += judge.flushes.get();
        self.events += judge.power.events();
        self.errors += judge.errors.get();
        self.troubled += u64::from(judge.errors.get() > 0);
    }
}
