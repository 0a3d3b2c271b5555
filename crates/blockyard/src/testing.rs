//! Runs a target on simulated disks, cuts their power at random moments, and checks what is left.
//!
//! The rules that it checks are those of the guide (`docs/own-target.md`):
//!
//! - The target opens, at first and after each power cut.
//! - A read returns what was written last, or what is written meanwhile. Each request has an
//!   answer, and succeeds.
//! - After a power cut each sector holds its last flushed or durable write, or a later one.
//! - Zeroes are a write of zeroes. A discarded sector holds zeroes or what it held before, also
//!   after a flush.
//!
//! With [`PowerCuts::errors`] operations of the files fail, too:
//!
//! - A request may fail if an operation of a file has failed since the disk is served.
//! - A write that fails leaves each of its sectors old or new, and no other sector.
//! - A flush that fails promises nothing: each sector that no flush covers is old or new.
//! - A sync of a file that fails loses data before the target hears of it. A read that overlaps
//!   the flush, or the change, in which the sync fails may find either. Only such reads are not
//!   checked.
//! - The disk is served again after errors, without a power cut and with one. It holds all that was
//!   durable before, and what later flushes cover.
//!
//! The simulated disks tear, reorder and lose writes that are not synced. A run depends only on its
//! seed.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use blockyard_ring::Segments;
use blockyard_storage::Storage;
use blockyard_storage::sim::{
    OpKind, Oracle, Phase, Power, Rng, Sim, SimConfig, SimDisk, SimHandle, SimImage, Trace, pattern,
};
use blockyard_storage::targets::{Direct, Mapped};

use crate::{Access, Device, Files, Handle, Map, OwnFile, Shape};

mod device;
mod errors;

/// Size of a sector in bytes.
const SECTOR: u64 = 512;
/// Most sectors of a request.
const MOST_SECTORS: u64 = 48;
/// Number of power cuts that a target survives in one run.
const ROUNDS: u64 = 3;

/// A target's files and size, for [`PowerCuts::run`] and [`PowerCuts::run_device`].
#[derive(Clone, Debug)]
#[must_use = "call `run`"]
pub struct PowerCuts {
    shape: Shape,
    data: Vec<(Vec<u8>, Access)>,
    own: Vec<Vec<u8>>,
    contents: Vec<u8>,
    requests: u64,
    errors: u64,
}

/// The rules that [`PowerCuts`] checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rule {
    /// The target opens.
    Opens,
    /// Each request has an answer.
    Answers,
    /// No request fails, unless an operation of the files has failed.
    Succeeds,
    /// A read returns what was written last, or what is written meanwhile.
    Reads,
    /// After a power cut each sector holds its last flushed or durable write, or a later one.
    SurvivesCuts,
}

/// A rule that a target broke.
#[derive(Clone, Debug, thiserror::Error)]
#[error("seed {seed}, round {round}: {what}")]
pub struct Broken {
    /// The seed that shows the fault again.
    pub seed: u64,
    /// Number of power cuts before.
    pub round: u64,
    /// The rule.
    pub rule: Rule,
    what: String,
}

impl PowerCuts {
    /// Begins with a disk of this shape that holds zeroes, and no files. All of it is in memory.
    /// Panics if no disk has this shape.
    pub fn of(shape: Shape) -> Self {
        let Shape { size, granule } = shape;
        let is_unit = granule.is_power_of_two() && (SECTOR..=4 << 20).contains(&granule);
        assert!(is_unit && size > 0 && size.is_multiple_of(granule), "no disk has {shape:?}");
        let contents = vec![0; shape.size as usize];
        PowerCuts { shape, data: Vec::new(), own: Vec::new(), contents, requests: 24, errors: 0 }
    }

    /// Adds a data file of a map with these contents.
    pub fn data(mut self, contents: Vec<u8>, access: Access) -> Self {
        self.data.push((contents, access));
        self
    }

    /// Adds a file of the target's own with these contents.
    pub fn file(mut self, contents: Vec<u8>) -> Self {
        self.own.push(contents);
        self
    }

    /// Sets what the disk holds at the start, of the disk's size.
    pub fn holds(mut self, contents: Vec<u8>) -> Self {
        assert_eq!(contents.len() as u64, self.shape.size, "these are the contents of the disk");
        self.contents = contents;
        self
    }

    /// Sets the number of requests of each of three concurrent clients between two power cuts.
    pub fn requests(mut self, requests: u64) -> Self {
        self.requests = requests;
        self
    }

    /// Lets up to `most` operations of the files fail between two power cuts: reads, writes and
    /// syncs with an I/O error, and writes for want of space. A write that fails may be torn. A
    /// sync that fails loses data, and the next one succeeds all the same, as on Linux.
    pub fn errors(mut self, most: u64) -> Self {
        self.errors = most;
        self
    }

    /// Cuts the power `cuts` times, in runs with the seeds from `seed` on. `make` opens the map, as
    /// for [`Target::map`](crate::Target::map).
    pub fn run<M: Map>(
        &self,
        seed: u64,
        cuts: u64,
        make: impl AsyncFn(Files, Handle) -> io::Result<M> + Clone + 'static,
    ) -> Result<(), Broken> {
        let shape = self.shape;
        self.run_all(seed, cuts, SECTOR, async move |files, data| {
            let map = async |handle| Ok(Direct::new(make(files, handle).await?));
            Mapped::simulated(shape, data, map).await
        })
    }

    /// As [`PowerCuts::run`], for a device. Its requests are whole granules.
    pub fn run_device<D: Device>(
        &self,
        seed: u64,
        cuts: u64,
        make: impl AsyncFn(Files, Handle) -> io::Result<D> + Clone + 'static,
    ) -> Result<(), Broken> {
        let size = self.shape.size;
        self.run_all(seed, cuts, self.shape.granule, async move |files, _| {
            Ok(device::Simulated::new(make(files, Handle::none()).await?, size))
        })
    }

    /// Makes the runs. `unit`: what requests are multiples of.
    fn run_all<S: Storage>(
        &self,
        seed: u64,
        cuts: u64,
        unit: u64,
        open: impl AsyncFn(Files, DataFiles) -> io::Result<S> + Clone + 'static,
    ) -> Result<(), Broken> {
        for run in 0..cuts.div_ceil(ROUNDS) {
            self.run_one(seed + run, unit, &open)?;
        }
        Ok(())
    }

    fn run_one<S: Storage>(
        &self,
        seed: u64,
        unit: u64,
        open: &(impl AsyncFn(Files, DataFiles) -> io::Result<S> + Clone + 'static),
    ) -> Result<(), Broken> {
        let mut rng = Rng::new(seed);
        let image = |bytes: &Vec<u8>| SimImage::from_bytes(bytes);
        let data = self.data.iter().map(|(bytes, _)| image(bytes));
        let mut images: Vec<SimImage> = data.chain(self.own.iter().map(image)).collect();
        let oracle = Rc::new(RefCell::new(Oracle::new()));
        {
            let mut oracle = oracle.borrow_mut();
            let token = oracle.write_started(0, &self.contents);
            oracle.write_answered(token, true, true);
        }
        let tag = Rc::new(Cell::new(1));
        for round in 0..=ROUNDS {
            let broken = |rule, what: String| Broken { seed, round, rule, what };
            let sim = Sim::new(rng.next_u64());
            // A request is some ten events, so that most cuts come in the middle of a run.
            let power = match round {
                ROUNDS => Power::on(),
                _ => Power::cut_after(rng.below(self.requests * 24)),
            };
            let disks: Vec<SimDisk> = images
                .drain(..)
                .map(|image| {
                    let config =
                        SimConfig { power: power.clone(), ..SimConfig::new(rng.next_u64()) };
                    SimDisk::new(image, config)
                })
                .collect();
            // The last time nothing fails, so the disk must work whatever happened before.
            let errors = if round == ROUNDS { 0 } else { self.errors };
            let rig = Rig {
                cuts: PowerCuts { errors, ..self.clone() },
                unit,
                disks: disks.clone(),
                oracle: oracle.clone(),
                tag: tag.clone(),
                found: Rc::default(),
                after_cut: Cell::new(round > 0),
                forgiven: Cell::new(0),
                is_lost: Cell::new(false),
                changes: RefCell::default(),
                losses: Cell::new(0),
                syncs: Cell::new((0, 0)),
            };
            let (found, open, handle, client) =
                (rig.found.clone(), open.clone(), sim.handle().clone(), rng.fork());
            let ran = sim.block_on(async move { rig.round(open, handle, client).await });
            if let Some((rule, what)) = found.take() {
                return Err(broken(rule, what));
            }
            match ran {
                Ok(Ok(())) => {}
                // Without power nothing goes on.
                _ if power.is_off() => {}
                Ok(Err(e)) => return Err(broken(Rule::Opens, e.to_string())),
                Err(stalled) => return Err(broken(Rule::Answers, stalled.to_string())),
            }
            images = disks.iter().map(SimDisk::power_cut).collect();
        }
        Ok(())
    }
}

/// The data files of a map.
type DataFiles = Vec<(SimDisk, Access)>;

/// One time with power.
struct Rig {
    cuts: PowerCuts,
    /// What requests are multiples of, in bytes.
    unit: u64,
    disks: Vec<SimDisk>,
    oracle: Rc<RefCell<Oracle>>,
    /// Number of the next write.
    tag: Rc<Cell<u64>>,
    /// The first broken rule.
    found: Rc<RefCell<Option<(Rule, String)>>>,
    /// Whether a power cut was before, and the disk is not checked yet.
    after_cut: Cell<bool>,
    /// Number of operations that failed before the disk was served again.
    forgiven: Cell<u64>,
    /// Whether the oracle knows that a flush of the disk has failed.
    is_lost: Cell<bool>,
    /// The requests in flight that may sync a file: how many syncs had failed when each one began.
    changes: RefCell<Vec<u64>>,
    /// Number of such requests in which a sync failed, and after which the disk went on.
    losses: Cell<u64>,
    /// Number of operations that have failed, and how many of them are syncs.
    syncs: Cell<(u64, u64)>,
}

impl Rig {
    /// Serves the disk to clients; once more if an operation of a file has failed.
    async fn round<S: Storage>(
        self,
        open: impl AsyncFn(Files, DataFiles) -> io::Result<S>,
        sim: SimHandle,
        mut rng: Rng,
    ) -> io::Result<()> {
        let rig = Rc::new(self);
        let errors = (rig.cuts.errors > 0).then(|| rng.fork());
        let ended = rig.session(&open, &sim, &mut rng, errors).await;
        if !rig.has_failed() || rig.is_off() {
            return ended;
        }
        // The disk is served again, and now nothing fails.
        rig.disks.iter().for_each(SimDisk::heal);
        rig.forgiven.set(rig.failures());
        rig.session(&open, &sim, &mut rng, None).await
    }

    /// Opens the target, checks the disk, and runs the clients. `errors`: operations of the files
    /// fail.
    async fn session<S: Storage>(
        self: &Rc<Self>,
        open: &impl AsyncFn(Files, DataFiles) -> io::Result<S>,
        sim: &SimHandle,
        rng: &mut Rng,
        mut errors: Option<Rng>,
    ) -> io::Result<()> {
        let (most, requests) = (self.cuts.errors, self.cuts.requests);
        // Some of them come at the target's start.
        if let Some(rng) = errors.take_if(|rng| rng.one_in(4)) {
            errors::plan(&self.disks, most, requests, rng);
        }
        let disk = self.open(open).await?;
        let token = self.oracle.borrow_mut().read_started();
        self.is_lost.set(false);
        let bytes = self.answered(&*disk, read(&*disk, 0, self.cuts.shape.size).await)?;
        // The read may fail by an error of a file. Then the disk is served again.
        let Some(bytes) = bytes else { return Ok(()) };
        let (rule, checked) = match self.after_cut.take() {
            true => (Rule::SurvivesCuts, self.oracle.borrow_mut().check_after_cut(0, &bytes)),
            false => (Rule::Reads, self.oracle.borrow_mut().check_read(token, 0, &bytes)),
        };
        self.note(rule, checked);
        if let Some(rng) = errors {
            errors::plan(&self.disks, most, requests, rng);
        }
        let clients: Vec<_> = (0..3)
            .map(|_| {
                let (rig, disk, rng) = (self.clone(), disk.clone(), rng.fork());
                sim.spawn(async move { rig.client(&*disk, rng).await })
            })
            .collect();
        for client in clients {
            client.await?;
        }
        if self.has_failed() { self.flush(&*disk).await } else { Ok(()) }
    }

    async fn open<S: Storage>(
        &self,
        open: &impl AsyncFn(Files, DataFiles) -> io::Result<S>,
    ) -> io::Result<Rc<S>> {
        let (data, own) = self.disks.split_at(self.cuts.data.len());
        let data_len = self.cuts.data.iter().map(|(bytes, _)| bytes.len() as u64).collect();
        let own = own.iter().cloned().map(OwnFile::simulated).collect();
        let access = self.cuts.data.iter().map(|(_, access)| *access);
        let data = data.iter().cloned().zip(access).collect();
        Ok(Rc::new(open(Files { own, data_len }, data).await?))
    }

    async fn client(&self, disk: &impl Storage, mut rng: Rng) -> io::Result<()> {
        let units = self.cuts.shape.size / self.unit;
        let most = (MOST_SECTORS * SECTOR / self.unit).max(2);
        for _ in 0..self.cuts.requests {
            let len = rng.between(1, most.min(units));
            let offset = rng.below(units - len + 1) * self.unit;
            let len = len * self.unit;
            match rng.below(9) {
                // After a failed flush a yard accepts no changes and no flushes.
                _ if disk.lost().is_some() => self.read(disk, offset, len).await?,
                0..4 => self.write(disk, offset, len, rng.one_in(6)).await?,
                4..7 => self.read(disk, offset, len).await?,
                7 => self.flush(disk).await?,
                _ => self.free(disk, &mut rng, offset, len).await?,
            }
        }
        Ok(())
    }

    async fn write(&self, disk: &impl Storage, at: u64, len: u64, durable: bool) -> io::Result<()> {
        let tag = self.tag.replace(self.tag.get() + 1);
        let data = pattern(tag, at, len as usize);
        let token = self.oracle.borrow_mut().write_started(at, &data);
        let write = disk.write(Segments::from_bytes(&data), at, durable);
        let written = self.change(disk, write).await.1;
        let is_ok = self.answered(disk, written)?.is_some();
        self.oracle.borrow_mut().write_answered(token, is_ok, durable);
        Ok(())
    }

    async fn read(&self, disk: &impl Storage, offset: u64, len: u64) -> io::Result<()> {
        let token = self.oracle.borrow_mut().read_started();
        let losses = self.losses.get();
        let bytes = read(disk, offset, len).await;
        let bytes = self.answered(disk, bytes)?.filter(|_| !self.may_be_either(disk, losses));
        let mut oracle = self.oracle.borrow_mut();
        match bytes {
            Some(bytes) => self.note(Rule::Reads, oracle.check_read(token, offset, &bytes)),
            None => oracle.read_withdrawn(token),
        }
        Ok(())
    }

    async fn flush(&self, disk: &impl Storage) -> io::Result<()> {
        let token = self.oracle.borrow_mut().flush_started();
        let flushed = self.change(disk, disk.sync()).await;
        let is_ok = self.answered(disk, flushed)?.is_some();
        self.oracle.borrow_mut().flush_answered(token, is_ok);
        Ok(())
    }

    /// Runs a request that may sync a file.
    async fn change<T>(&self, disk: &impl Storage, request: impl Future<Output = T>) -> T {
        let before = self.failed_syncs();
        self.changes.borrow_mut().push(before);
        let done = request.await;
        let mut changes = self.changes.borrow_mut();
        if let Some(at) = changes.iter().position(|begun| *begun == before) {
            changes.swap_remove(at);
        }
        // If the disk has ended, the oracle knows what may be lost.
        if self.failed_syncs() > before && disk.lost().is_none() {
            self.losses.set(self.losses.get() + 1);
        }
        done
    }

    /// Returns whether a read that ends now may lack data that a failed sync has lost, and the
    /// oracle does not know of the loss. Then a request that was in flight when the sync failed is
    /// still in flight. Or it has ended since the start of the read, and the disk goes on, as that
    /// of a mirror does. Only the target knows which request has made the sync. `losses`: their
    /// number at the start of the read.
    fn may_be_either(&self, disk: &impl Storage, losses: u64) -> bool {
        let failed = self.failed_syncs();
        let in_flight = || self.changes.borrow().iter().any(|begun| *begun < failed);
        self.losses.get() != losses || disk.lost().is_none() && in_flight()
    }

    /// Returns the number of syncs of files that have failed.
    fn failed_syncs(&self) -> u64 {
        let failures = self.failures();
        let (known, syncs) = self.syncs.get();
        if known == failures {
            return syncs;
        }
        let is_one = |trace: &Trace| trace.kind == OpKind::Sync && trace.phase == Phase::Failed;
        let of_disk = |disk: &SimDisk| disk.trace().iter().filter(|trace| is_one(trace)).count();
        let syncs = self.disks.iter().map(of_disk).sum::<usize>() as u64;
        self.syncs.set((failures, syncs));
        syncs
    }

    /// Discards or zeroes a range. Zeroes are written if the target does not free it.
    async fn free(&self, disk: &impl Storage, rng: &mut Rng, at: u64, len: u64) -> io::Result<()> {
        let granule = self.cuts.shape.granule;
        // Most ranges have a whole granule.
        let end = (at + len + granule).min(self.cuts.shape.size);
        let range = at..if rng.one_in(4) { at + len } else { end };
        let (len, discards) = (range.end - range.start, rng.one_in(2));
        let token = match discards {
            true => self.oracle.borrow_mut().discard_started(at, len),
            false => self.oracle.borrow_mut().zero_started(at, len),
        };
        let unmap = !discards && rng.one_in(2);
        let free = async {
            let done = match discards {
                true => disk.discard(at, len).await,
                false => disk.zero(at, len, unmap).await,
            };
            match done {
                Err(e) if e.kind() == io::ErrorKind::Unsupported && discards => Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                    disk.write(Segments::buffer(len as usize), at, false).await.1.map(drop)
                }
                done => done,
            }
        };
        let done = self.change(disk, free).await;
        let is_ok = self.answered(disk, done)?.is_some();
        self.oracle.borrow_mut().write_answered(token, is_ok, false);
        Ok(())
    }

    fn failures(&self) -> u64 {
        self.disks.iter().map(SimDisk::failures).sum()
    }

    /// Returns whether an operation of a file has failed since the disk is served.
    fn has_failed(&self) -> bool {
        self.failures() > self.forgiven.get()
    }

    fn is_off(&self) -> bool {
        self.disks.iter().any(SimDisk::is_off)
    }

    /// Returns the result of a request, or None if it has failed and may fail.
    fn answered<T>(&self, disk: &impl Storage, result: io::Result<T>) -> io::Result<Option<T>> {
        // A flush has failed, whichever request made it.
        if disk.lost().is_some() && !self.is_lost.replace(true) {
            let mut oracle = self.oracle.borrow_mut();
            let flush = oracle.flush_started();
            oracle.flush_answered(flush, false);
        }
        match result {
            // Without power there are no answers.
            _ if self.is_off() => Err(io::ErrorKind::NotConnected.into()),
            Ok(value) => Ok(Some(value)),
            Err(_) if self.has_failed() => Ok(None),
            Err(e) => {
                let what = format!("a request fails, and no operation of a file has: {e}");
                self.found.borrow_mut().get_or_insert((Rule::Succeeds, what));
                Err(e)
            }
        }
    }

    fn note(&self, rule: Rule, checked: Result<(), blockyard_storage::sim::Mismatch>) {
        if let Err(e) = checked {
            self.found.borrow_mut().get_or_insert_with(|| (rule, e.to_string()));
        }
    }
}

async fn read(disk: &impl Storage, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let (segments, result) = disk.read(Segments::buffer(len as usize), offset).await;
    result?;
    let mut bytes = vec![0; len as usize];
    segments.copy_out(0, &mut bytes);
    Ok(bytes)
}

/// Runs a future of this crate on the calling thread until it is done.
pub fn wait<T>(future: impl Future<Output = T>) -> T {
    struct Thread(std::thread::Thread);
    impl std::task::Wake for Thread {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Thread(std::thread::current())).into();
    let (mut future, mut cx) = (std::pin::pin!(future), std::task::Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut cx) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}
