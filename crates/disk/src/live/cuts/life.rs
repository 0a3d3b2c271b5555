//! A disk over several boots.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use blockyard_image::qcow2::{self, CreateOptions, Header, Qcow2, Qcow2Options};
use blockyard_image::{Alignment, CacheMode, ChainOptions, Image, Layer, Opener, Raw, Store};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::sim::{
    Journal, Latency, LeftFile, Liar, Oracle, Power, Rng, Sim, SimConfig, SimDisk, SimFiles,
    SimImage, pattern,
};

use super::found::Found;
use super::scratch::Scratch;
use super::stage::{Stage, Target};
use super::{Job, Plan, Tally};
use crate::backend::Source;
use crate::{Disk, DiskOptions};

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into()
}

/// Returns a qcow2 image of a disk with these contents.
fn qcow2_of(contents: &[u8], cluster_size: u64) -> SimImage {
    let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
    let raw = Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
    let (options, contents) =
        (CreateOptions::new(contents.len() as u64), Segments::from_bytes(contents));
    let create = async move {
        let options = CreateOptions { cluster_size, ..options };
        qcow2::create(&raw, None, &options).await.unwrap();
        let header = Header::read(&raw).await.unwrap();
        let image = Qcow2::open(header, raw, None, &Qcow2Options::default()).await.unwrap();
        let image = Image::new(vec![Layer::Qcow2(image)], false);
        image.write(contents, 0).await.1.unwrap();
        image.close().await.unwrap();
    };
    Sim::new(1).block_on(create).unwrap();
    SimImage::from_bytes(&disk.contents())
}

pub struct Life {
    pub plan: Plan,
    rng: Rng,
    scratch: Rc<Scratch>,
    opener: Opener,
    /// For what is read after a power cut.
    reader: Executor,
    /// The files as the last power cut has left them.
    left: Vec<LeftFile>,
    /// Name of the image that a start names.
    start: String,
    contents: Vec<u8>,
    oracle: Rc<RefCell<Oracle>>,
    made: u64,
}

impl Life {
    pub fn new(plan: Plan) -> Self {
        let (rng, scratch) = (Rng::new(plan.seed), Scratch::new());
        let start = if plan.base.is_some() { "base.qcow2" } else { "base.raw" };
        let contents = pattern(plan.seed, 0, plan.size as usize);
        let image = match plan.base {
            None => SimImage::from_bytes(&contents),
            Some(cluster_size) => qcow2_of(&contents, cluster_size),
        };
        let mut oracle = Oracle::new();
        let written = oracle.write_started(0, &contents);
        oracle.write_answered(written, true, true);
        let left = vec![LeftFile { path: scratch.path(start), image, note: None }];
        Life {
            rng,
            scratch,
            opener: Opener::default(),
            reader: Executor::simulated().unwrap(),
            left,
            start: start.into(),
            contents,
            oracle: Rc::new(RefCell::new(oracle)),
            made: 0,
            plan,
        }
    }

    fn config(&mut self, power: Power) -> SimConfig {
        let rng = &mut self.rng;
        // Sometimes a kind of operation is slow, so that others run in between.
        let mut slow = |most| if rng.one_in(5) { 40 } else { most };
        let latency = Latency { read: slow(4), write: slow(6), sync: slow(10), other: slow(6) };
        SimConfig { latency, power, ..SimConfig::new(rng.next_u64()) }
    }

    /// Puts the files into the folder, and their data on simulated disks.
    fn lay_out(
        &self,
        left: &[LeftFile],
        config: SimConfig,
        wrap: impl Fn(SimDisk) -> Store + 'static,
    ) -> SimFiles {
        let files = SimFiles::new(config, wrap);
        for LeftFile { path, image, note } in left {
            // A new file has no record of an earlier boot.
            let _ = std::fs::remove_file(path);
            File::create(path).unwrap().set_len(image.len()).unwrap();
            files.add(path, image.clone(), note.clone());
        }
        files
    }

    fn open(&self, files: &SimFiles, path: &Path) -> Result<Source, String> {
        let options = ChainOptions {
            cache: CacheMode::Writeback,
            journal: Some(Journal::simulated(files)),
            ..ChainOptions::new(path)
        };
        let failed = |e| format!("cannot open {}: {e}", name(path));
        Source::open_by(&self.opener, &options).map_err(failed)
    }

    /// Returns the path that a start finds: it begins at the named image, and follows the records.
    fn top(&self, left: &[LeftFile]) -> PathBuf {
        let mut top = self.scratch.path(&self.start);
        while let Some(overlay) =
            left.iter().find(|file| file.path == top).and_then(|file| file.note.clone())
        {
            top = overlay;
        }
        top
    }

    /// Runs one boot with `jobs`, and cuts the power after `cut_after` events, if the boot has so
    /// many. Returns whether it ended before that.
    pub fn boot(
        &mut self,
        jobs: &[Job],
        cut_after: Option<u64>,
        tally: &mut Tally,
    ) -> Result<bool, String> {
        let plan = self.plan.clone();
        let explain = |e: String| format!("{plan:?}, {jobs:?}, cut after {cut_after:?}: {e}");
        let config = self.config(Power::on());
        let files = match plan.lie {
            Some(lie) => self.lay_out(&self.left, config, move |disk| Liar::new(disk, lie).into()),
            None => self.lay_out(&self.left, config, SimDisk::into),
        };
        let top = self.top(&self.left);
        let source = self.open(&files, &top).map_err(explain)?;
        let stage = self.stage(source, &files);
        let before = files.power().events();
        cut_after.into_iter().for_each(|events| files.power().arm(events));
        let executor = Executor::simulated().unwrap();
        let run = stage.clone().run(executor.handle().clone(), jobs.to_vec());
        let ran = executor.block_on(run).map_err(|e| explain(format!("a task hangs: {e}")))?;
        ran.map_err(explain)?;
        drop(executor);
        let survived = !files.power().is_off();
        self.made = stage.made.get();
        tally.events += files.power().events() - before;
        let job = stage.job.get();
        let (target, counted) = (stage.target.take(), stage.tally.take());
        // The files must be unlocked.
        drop(stage);
        let before = name(&top);
        let found = self.judge(&files, target).map_err(explain)?;
        tally.add(&counted, survived, job, &found, &before);
        Ok(survived)
    }

    fn stage(&mut self, source: Source, files: &SimFiles) -> Rc<Stage> {
        let options = DiskOptions {
            name: "cut".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::Writeback,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        Rc::new(Stage {
            size: self.plan.size,
            plan: self.plan.clone(),
            disk: Arc::new(Disk::new(options, source)),
            files: files.clone(),
            scratch: self.scratch.clone(),
            oracle: self.oracle.clone(),
            model: RefCell::new(self.contents.clone()),
            job: Cell::new(None),
            tally: RefCell::default(),
            made: Cell::new(self.made),
            target: RefCell::new(None),
            rng: RefCell::new(self.rng.fork()),
            is_stopped: Cell::new(false),
            failed: RefCell::new(None),
            running: Cell::new(0),
            iterations: Cell::new(0),
        })
    }

    /// Judges some of the states that a power cut now may leave. The next boot starts with the last
    /// one.
    fn judge(&mut self, files: &SimFiles, target: Option<Target>) -> Result<Found, String> {
        for is_last in [false, true] {
            let mut left = files.power_cut();
            if let Some(target) = &target {
                self.judge_target(target, &left)?;
            }
            let top = self.top(&left);
            let config = SimConfig::new(self.rng.next_u64());
            let copies = self.lay_out(&left, config, SimDisk::into);
            let source = self.open(&copies, &top)?;
            let mut found = Found::of(&self.reader, &source)?;
            found.has_target = target.as_ref().is_some_and(|target| target.is_named);
            let mut oracle = self.oracle.borrow_mut();
            if !is_last {
                oracle.allows_after_cut(0, &found.bytes).map_err(|e| e.to_string())?;
                continue;
            }
            oracle.check_after_cut(0, &found.bytes).map_err(|e| e.to_string())?;
            // The others are in no chain any more.
            left.retain(|file| found.images.contains(&name(&file.path)));
            self.start = found.images[0].clone();
            self.contents.clone_from(&found.bytes);
            self.left = left;
            return Ok(found);
        }
        unreachable!("the last state returns")
    }

    /// A target with a name holds the disk of one moment. One without a name is gone.
    fn judge_target(&self, target: &Target, left: &[LeftFile]) -> Result<(), String> {
        if !target.is_named {
            return Ok(());
        }
        let path = self.scratch.path(&target.name);
        let file = left.iter().find(|file| file.path == path).ok_or("the target is gone")?;
        let file = LeftFile { path: path.clone(), image: file.image.clone(), note: None };
        let copies = self.lay_out(&[file], SimConfig::new(1), SimDisk::into);
        let found = Found::of(&self.reader, &self.open(&copies, &path)?)?;
        match target.moment.as_ref() == Some(&found.bytes) {
            true => Ok(()),
            false => {
                Err(format!("the backup in {:?} is not the disk of its moment", target.format))
            }
        }
    }
}

impl Tally {
    fn add(&mut self, of: &Tally, survived: bool, job: Option<Job>, found: &Found, before: &str) {
        self.survived += u64::from(survived);
        self.writes += of.writes;
        self.flushes += of.flushes;
        self.backups += u64::from(found.has_target);
        (0..4).for_each(|job| self.done[job] += of.done[job]);
        if survived {
            return;
        }
        let Some(job) = job else {
            self.cuts_between += 1;
            return;
        };
        self.cuts_inside[job as usize] += 1;
        let has_switched = match job {
            Job::Snapshot => found.images[0] != before,
            Job::Commit => found.is_top_empty,
            Job::Stream => found.images.len() == 1,
            Job::Backup => found.has_target,
        };
        self.switched[job as usize] += u64::from(has_switched);
    }
}
