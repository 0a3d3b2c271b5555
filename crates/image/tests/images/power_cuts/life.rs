//! Several boots of a chain, with commands on the closed image in between. The state after each
//! power cut is checked; the next boot begins with it.

use std::cell::RefCell;
use std::rc::Rc;

use blockyard_image::journal::{CrashSafety, ImageKey, ImageSafety, MemoryStore, SafetyMode};
use blockyard_image::{Image, Store};
use blockyard_storage::sim::{Latency, OpKind, Oracle, Power, Rng, Sim, SimConfig, SimDisk};

use super::chain::{self, Disks, Files, View};
use super::check::Parsed;
use super::judge::Judge;
use super::load;
use super::operation::{Done, Operation, Outcome};
use super::plan::Plan;
use super::qemu;
use super::tally::Tally;

/// Number of images that are checked after each power cut. A cut can leave many different ones.
const JUDGED: usize = 3;

/// Result of a boot or of a command.
pub struct Boot {
    pub survived: bool,
    pub events: u64,
}

/// The images of a plan before the first boot. Lives of one plan share them, because building and
/// reading them takes longer than a boot.
pub struct Start {
    plan: Plan,
    layers: Vec<Files>,
    below: Rc<Vec<u8>>,
    view: View,
}

impl Start {
    pub fn new(plan: Plan) -> Self {
        let layers = chain::make(&plan);
        let below = chain::contents(&layers[1..]).expect("images of our own");
        let bytes = layers[0].main.bytes();
        let parsed = Parsed::new(&bytes);
        let view = chain::view(&parsed, layers[0].data.as_ref(), &below).expect("our own image");
        let findings = parsed.check();
        let sound = findings.corruptions.is_empty() && findings.careful == 0 && findings.leaks == 0;
        assert!(sound, "to begin with: {findings:?}\n{plan:?}");
        Start { plan, layers, below: Rc::new(below), view }
    }

    /// Begins a life. Each one of a plan has the same random numbers.
    pub fn life(&self) -> Life {
        let plan = self.plan.clone();
        let life = Life {
            rng: Rng::new(plan.seed),
            layers: self.layers.clone(),
            below: self.below.clone(),
            view: self.view.clone(),
            leaks: 0,
            dirty: false,
            careful: false,
            oracle: Rc::new(RefCell::new(Oracle::new())),
            journals: plan.room.map_or_else(MemoryStore::default, MemoryStore::with_room),
            plan,
        };
        life.tell_oracle(0);
        life
    }
}

/// What [`Life::judge_image`] found in an image without corruption.
struct Judged {
    view: View,
    /// Number of leaked clusters after the repair that the dirty bit demands.
    leaks: u64,
    /// Whether the dirty bit is set.
    dirty: bool,
}

impl Judged {
    /// Returns the number of leaked clusters of the image as it was left, without a repair.
    fn leaks_of(&self, left: &Files) -> u64 {
        if self.dirty { chain::check(left).leaks } else { self.leaks }
    }
}

pub struct Life {
    plan: Plan,
    rng: Rng,
    layers: Vec<Files>,
    /// Contents of the images below the topmost one. [`Life::are_unchanged`] guards them.
    below: Rc<Vec<u8>>,
    view: View,
    leaks: u64,
    /// Whether an interrupted command may have left the dirty bit set, until the next open for
    /// writing. In version 2, which has no dirty bit, it may have left clear COPIED flags.
    dirty: bool,
    careful: bool,
    oracle: Rc<RefCell<Oracle>>,
    /// Journals of the topmost image, which outlive a process.
    journals: MemoryStore,
}

impl Life {
    /// Returns offset and clusters of the topmost image's refcount table.
    pub fn refcount_table(&self) -> (u64, u32) {
        let bytes = self.layers[0].main.bytes();
        let header = chain::header(&bytes).expect("an image that was judged");
        (header.refcount_table_offset, header.refcount_table_clusters)
    }

    /// Makes the current disk the oracle's durable contents. If the disk had more bytes before
    /// (`before`), the oracle expects zeroes behind the disk's end.
    fn tell_oracle(&self, before: usize) {
        let (mut oracle, mut disk) = (self.oracle.borrow_mut(), self.view.disk.clone());
        disk.resize(disk.len().max(before), 0);
        let token = oracle.write_started(0, &disk);
        oracle.write_answered(token, true, true);
    }

    /// Runs one boot, with a power cut after `cut_after` events. `wrap` creates the storage.
    pub fn boot(
        &mut self,
        cut_after: u64,
        wrap: impl Fn(SimDisk) -> Store + Copy + 'static,
        tally: &mut Tally,
    ) -> Result<Boot, String> {
        let plan = self.plan.clone();
        self.boot_and_judge(cut_after, wrap, tally)
            .map_err(|e| format!("seed {}, cut after {cut_after} events: {e}\n{plan:?}", plan.seed))
    }

    fn boot_and_judge(
        &mut self,
        cut_after: u64,
        wrap: impl Fn(SimDisk) -> Store + Copy + 'static,
        tally: &mut Tally,
    ) -> Result<Boot, String> {
        let plan = Rc::new(self.plan.clone());
        let power = Power::cut_after(cut_after);
        let config = self.config(&power);
        // A failed sync loses what was written before it, also if the process dies.
        let loses = plan.trouble.as_ref().is_some_and(|trouble| trouble.kind == OpKind::Sync);
        let dies = plan.dies && self.rng.one_in(2) && !loses;
        self.journals.fail_creations(plan.late);
        let disks = Rc::new(Disks { safety: self.safety(), ..Disks::new(&self.layers, config) });
        if let Some(trouble) = &plan.trouble {
            trouble.strike(&disks);
        }
        let judge =
            Rc::new(Judge::new(&plan, self.oracle.clone(), disks.clone(), power.clone(), dies));
        let sim = Sim::new(self.rng.next_u64()).step_limit(3_000_000);
        let opened = {
            let (disks, plan) = (disks.clone(), plan.clone());
            load::wait(&sim, &power, &judge.disks, async move { disks.open(&plan, 0, wrap).await })?
        };
        let (mut closed, was_opened) = (false, opened.is_ok());
        match opened {
            Ok(views) => {
                let views: Vec<_> = views.into_iter().map(Rc::new).collect();
                if load::run(
                    &plan,
                    self.view.disk.len() as u64,
                    &judge,
                    &sim,
                    &views,
                    &mut self.rng,
                )? {
                    closed = self.end(&judge, &sim, &views)?;
                }
            }
            Err(_) if power.is_off() || plan.trouble.is_some() => {}
            Err(e) => return Err(format!("it does not open: {e}")),
        }
        if was_opened {
            (self.dirty, self.careful) = (false, false);
        }
        let survived = !power.is_off();
        tally.count(&judge, survived);
        if dies {
            self.judge_death(&judge, closed, wrap, tally)?;
        } else {
            self.journals.reboot();
            self.judge_boot(&judge, closed, tally)?;
        }
        Ok(Boot { survived, events: power.events() })
    }

    /// After the load: reads everything, then sometimes closes the image, or leaves it to the next
    /// process. Returns true if nothing may be lost or leaked any more.
    fn end(&mut self, judge: &Rc<Judge>, sim: &Sim, views: &[Rc<Image>]) -> Result<bool, String> {
        judge.disks.all().for_each(|disk| disk.heal());
        let (of, image, capacity) =
            (judge.clone(), views[views.len() - 1].clone(), self.view.disk.len() as u64);
        let (power, disks) = (&judge.power, &judge.disks);
        load::wait(sim, power, disks, async move { load::read_all(&of, &image, capacity).await })??;
        if self.rng.one_in(2) || judge.power.is_off() {
            return Ok(false);
        }
        let (image, of) = (views[0].clone(), judge.clone());
        // Not drawn: seeds that have failed once stay what they were.
        if self.plan.seed.is_multiple_of(4) {
            let left = load::wait(sim, power, disks, async move { image.leave().await })?;
            return Ok(left.is_ok() && judge.dies);
        }
        load::wait(sim, power, disks, async move {
            let token = of.oracle.borrow_mut().flush_started();
            let result = image.close().await;
            let good = result.is_ok();
            of.flushed(token, result).map(|heard| heard && good)
        })?
    }

    fn config(&mut self, power: &Power) -> impl FnMut() -> SimConfig + use<> {
        let (mut rng, discard_zeroes, power) =
            (self.rng.fork(), self.plan.discard_zeroes, power.clone());
        let (slowest, allocates) = (self.plan.slow, self.plan.allocates);
        move || {
            // Sometimes operations of one kind are slow, so that others overtake them.
            let mut slow = |most| if rng.one_in(4) { slowest } else { most };
            let latency = Latency { read: slow(4), write: slow(6), sync: slow(10), other: slow(6) };
            SimConfig {
                latency,
                discard_zeroes,
                allocates,
                power: power.clone(),
                ..SimConfig::new(rng.next_u64())
            }
        }
    }

    fn safety(&self) -> ImageSafety {
        let image = ImageKey { device: 0, inode: 1, born: 0 };
        let store = Some(self.journals.clone().into());
        // Version 2 has no place for a journal's mark.
        let mode = match self.plan.top().layout.version {
            2 => SafetyMode::Flush,
            _ => SafetyMode::Journal,
        };
        match self.plan.dies {
            true => CrashSafety { mode, store }.of(Some(image)),
            false => ImageSafety::default(),
        }
    }

    /// Ends the process, lets the next one recover the image and close it, and checks that it holds
    /// each answered write.
    fn judge_death(
        &mut self,
        judge: &Judge,
        closed: bool,
        wrap: impl Fn(SimDisk) -> Store + Copy + 'static,
        tally: &mut Tally,
    ) -> Result<(), String> {
        if closed && !self.journals.is_empty() {
            return Err("a journal is left after a clean end".into());
        }
        let layers = self.recovered(judge.disks.process_death(), wrap, tally)?;
        self.are_unchanged(&layers, 1)?;
        let judged = self.judge_image(&layers, &self.below, true, tally)?;
        if judged.view.snapshots != self.view.snapshots {
            return Err("a snapshot was changed".into());
        }
        let leaks = judged.leaks_of(&layers[0]);
        if leaks > self.leaks {
            return Err(format!("{} clusters leaked after a recovery", leaks - self.leaks));
        }
        self.oracle
            .borrow_mut()
            .check_after_cut(0, &judged.view.disk)
            .map_err(|e| e.to_string())?;
        (self.leaks, self.layers, self.view) = (leaks, layers, judged.view);
        Ok(())
    }

    /// Opens the image for writing and closes it, as often as it takes until no further death
    /// interrupts that. Returns the durable state.
    fn recovered(
        &mut self,
        mut layers: Vec<Files>,
        wrap: impl Fn(SimDisk) -> Store + Copy + 'static,
        tally: &mut Tally,
    ) -> Result<Vec<Files>, String> {
        let plan = Rc::new(self.plan.clone());
        loop {
            let power = match self.rng.one_in(2) {
                true => Power::cut_after(self.rng.below(40)),
                false => Power::on(),
            };
            let config = self.config(&power);
            let disks = Rc::new(Disks { safety: self.safety(), ..Disks::new(&layers, config) });
            let sim = Sim::new(self.rng.next_u64()).step_limit(3_000_000);
            let ended = {
                let (disks, plan) = (disks.clone(), plan.clone());
                load::wait(&sim, &power, &disks.clone(), async move {
                    disks.open(&plan, 0, wrap).await?[0].close().await
                })?
            };
            if !power.is_off() {
                ended.map_err(|e| format!("recovery: {e}"))?;
                if !self.journals.is_empty() {
                    return Err("a journal is left after a recovery and a clean end".into());
                }
                // All is durable. The process ends, and the host goes on.
                return Ok(disks.process_death());
            }
            tally.recoveries_cut += 1;
            layers = disks.process_death();
        }
    }

    /// Checks some of the images that a power cut at this event may leave. The next boot uses the
    /// last one.
    fn judge_boot(&mut self, judge: &Judge, closed: bool, tally: &mut Tally) -> Result<(), String> {
        for nth in 1..=JUDGED {
            let layers = judge.disks.power_cut();
            self.are_unchanged(&layers, 1)?;
            let judged = self.judge_image(&layers, &self.below, nth == 1, tally)?;
            if judged.view.snapshots != self.view.snapshots {
                return Err("a snapshot was changed".into());
            }
            let (leaks, view) = (judged.leaks_of(&layers[0]), judged.view);
            if closed && leaks > self.leaks && self.plan.trouble.is_none() {
                return Err(format!(
                    "{} clusters leaked, in an image that was closed",
                    leaks - self.leaks
                ));
            }
            if nth < JUDGED {
                self.oracle.borrow().allows_after_cut(0, &view.disk).map_err(|e| e.to_string())?;
            } else {
                self.oracle
                    .borrow_mut()
                    .check_after_cut(0, &view.disk)
                    .map_err(|e| e.to_string())?;
                (self.leaks, self.layers, self.view) = (leaks, layers, view);
            }
        }
        Ok(())
    }

    /// Checks that the images from the `first` on are unchanged.
    fn are_unchanged(&self, layers: &[Files], first: usize) -> Result<(), String> {
        let unchanged = |(now, before): (&Files, &Files)| now.main.same_as(&before.main);
        match layers.iter().zip(&self.layers).skip(first).all(unchanged) {
            true => Ok(()),
            false => Err("an image below was changed".into()),
        }
    }

    /// Checks that the image opens and is consistent. `below`: contents of the images below it.
    fn judge_image(
        &self,
        layers: &[Files],
        below: &[u8],
        ours: bool,
        tally: &mut Tally,
    ) -> Result<Judged, String> {
        let (mut top, data) = (layers[0].clone(), layers[0].data.as_ref());
        let mut bytes = top.main.bytes();
        let view = chain::view(&Parsed::new(&bytes), data, below)?;
        let dirty = chain::is_dirty(&bytes);
        if dirty && !self.dirty {
            return Err("the dirty bit is set".into());
        }
        if dirty {
            top = chain::counted(&top)?;
            bytes = top.main.bytes();
            if chain::view(&Parsed::new(&bytes), data, below)? != view {
                return Err("counting anew has changed what it shows".into());
            }
        }
        let findings = Parsed::new(&bytes).check();
        tally.judged += 1;
        tally.leaky += u64::from(findings.leaks > 0);
        if !findings.corruptions.is_empty() || findings.careful > 0 && !self.careful {
            return Err(format!("the image is corrupt: {findings:#?}"));
        }
        if ours {
            let report = chain::our_check(&top)?;
            // The crate's check does not count clusters beyond the end of the file as leaks.
            let same = report.corruptions == findings.careful && report.leaks <= findings.leaks;
            if !same || report.check_errors > 0 {
                return Err(format!(
                    "the crate's check differs from the reference check, {findings:?}: {report:#?}"
                ));
            }
        }
        if tally.one_in > 0 && tally.judged.is_multiple_of(tally.one_in) && findings.careful == 0 {
            tally.by_qemu += 1;
            qemu::judge(&[&[top][..], &layers[1..]].concat(), &view.disk)?;
        }
        Ok(Judged { view, leaks: findings.leaks, dirty })
    }

    /// Runs a command on the closed chain, once completely and once with a cut. Continues with the
    /// state after the cut.
    pub fn operate(&mut self, tally: &mut Tally) -> Result<(), String> {
        let operation = self.next_operation();
        let whole = self.operate_once(&operation, u64::MAX, false, tally)?;
        let cut_after = self.rng.below(whole.events + 1);
        self.operate_once(&operation, cut_after, true, tally).map(|_| ())
    }

    pub fn next_operation(&mut self) -> Operation {
        Operation::random(&mut self.rng, &self.plan, &self.view)
    }

    /// Runs the command with a power cut after `cut_after` events. `keep`: continue with the state
    /// after the command.
    pub fn operate_once(
        &mut self,
        operation: &Operation,
        cut_after: u64,
        keep: bool,
        tally: &mut Tally,
    ) -> Result<Boot, String> {
        let plan = self.plan.clone();
        let explain = |e| {
            format!("seed {}, {operation:?} cut after {cut_after} events: {e}\n{plan:?}", plan.seed)
        };
        let power = Power::cut_after(cut_after);
        let config = self.config(&power);
        let disks = Disks::new(&self.layers, config);
        let seed = self.rng.next_u64();
        let outcome = operation.run(&plan, &self.view, disks, &power, seed).map_err(explain)?;
        let survived = !power.is_off();
        tally.operated(operation, &outcome, survived);
        let (dirty, careful) = (self.dirty, self.careful);
        self.judge_operation(operation, &outcome, keep, tally).map_err(explain)?;
        if !keep {
            (self.dirty, self.careful) = (dirty, careful);
        }
        Ok(Boot { survived, events: outcome.events })
    }

    fn judge_operation(
        &mut self,
        operation: &Operation,
        outcome: &Outcome,
        keep: bool,
        tally: &mut Tally,
    ) -> Result<(), String> {
        let after = operation.after(&self.view);
        let done = outcome.done == Some(Done::Well);
        if done {
            (self.dirty, self.careful) = (false, false);
        } else {
            let version = self.plan.top().layout.version;
            (self.dirty, self.careful) = (self.dirty || version > 2, self.careful || version == 2);
        }
        // A completed command is durable, so all possible images are equal.
        let images = if done { 1 } else { JUDGED };
        for nth in 1..=images {
            let layers = outcome.disks.power_cut();
            self.are_unchanged(&layers, operation.changes())?;
            let below = match operation.changes() {
                1 => self.below.clone(),
                _ => Rc::new(chain::contents(&layers[1..])?),
            };
            let Judged { view, leaks, .. } = self.judge_image(&layers, &below, nth == 1, tally)?;
            if *operation == Operation::Commit {
                judge_commit(&layers[1], &below, &view.disk, done)?;
            }
            let (old, new) = (view == self.view, view == after);
            if !(new && outcome.done != Some(Done::Refused) || old && !done) {
                let (old, new) = (view.differs(&self.view), view.differs(&after));
                let ended = format!(
                    "{:?}; it differs from what it was: {old}; from what it was to be: {new}",
                    outcome.done
                );
                return Err(format!("neither what it was nor what it was to be; {ended}"));
            }
            tally.states[usize::from(new)] += 1;
            if nth == images && keep {
                let before = self.view.disk.len();
                (self.layers, self.below, self.view) = (layers, below, view);
                self.leaks = leaks;
                self.tell_oracle(before);
            }
        }
        Ok(())
    }
}

/// Checks that the backing image is consistent at each moment, and that it shows the disk after the
/// commit. `below`: what it shows.
fn judge_commit(backing: &Files, below: &[u8], disk: &[u8], done: bool) -> Result<(), String> {
    if backing.qcow2 {
        let findings = chain::counted_check(backing)?;
        if !findings.corruptions.is_empty() {
            return Err(format!("the image below is corrupt: {findings:#?}"));
        }
    }
    match done && !below.starts_with(disk) {
        true => Err("the image below does not hold the disk".into()),
        false => Ok(()),
    }
}
