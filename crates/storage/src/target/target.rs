//! A target before it is opened, and an open one.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use blockyard_ring::semaphore::Semaphore;
use blockyard_ring::{Handle as RingHandle, UringFile};

use super::cache::{Cache, REGION};
use super::device::Device;
use super::file::{Files, OwnFile};
use super::in_use::InUse;
use super::map::{Boxed, Extent, Map, Question};
use super::mapped::{Ask, Mapped};
use super::passed::{COPIED, Passed};
use super::patience::Patience;
use super::worker::{Living, Make, Worker};
use crate::cache::CacheMode;
use crate::file::HostFile;
use crate::open::{ImageFile, OpenError, OpenOptions, Opened};
use crate::range_lock::RangeLock;
use crate::schemes::Store;
use crate::storage::{Capabilities, Storage};
use crate::{Geometry, SECTOR};

/// The size of a disk, and the unit in which it is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Size in bytes, a multiple of the granule.
    pub size: u64,
    /// Unit in bytes: a power of two from 512 to 4 MiB. Blockyard asks a map for whole granules,
    /// and sends a device requests of whole granules.
    pub granule: u64,
}

/// Whether a file is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading. Other disks may read it, too.
    Read,
    /// For reading and writing. No other disk or program of Blockyard may use it.
    Write,
}

/// How long Blockyard waits for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest time for the start of the target.
    pub start: Duration,
    /// Longest time for an answer. Then the request fails. The target goes on.
    pub answer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { start: Duration::from_secs(30), answer: Duration::from_secs(30) }
    }
}

/// Counts of a target's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Number of requests that found their place in the table of answers.
    pub hits: u64,
    /// Number of questions to the map.
    pub misses: u64,
    /// Number of places that are known now.
    pub known: u64,
}

/// Kinds of errors of opening a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TargetErrorKind {
    /// The size or the granule is not possible.
    Shape,
    /// A file cannot be opened, or is not suitable.
    File,
    /// The target has failed at its start.
    Start,
}

/// Why a target cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("target {name}: {what}")]
pub struct TargetError {
    /// The kind of error.
    pub kind: TargetErrorKind,
    name: String,
    what: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl TargetError {
    pub(super) fn new(kind: TargetErrorKind, name: &str, what: impl Into<String>) -> Self {
        TargetError { kind, name: name.into(), what: what.into(), source: None }
    }

    fn of_file(name: &str, error: OpenError) -> Self {
        let what = error.to_string();
        TargetError {
            kind: TargetErrorKind::File,
            name: name.into(),
            what,
            source: Some(error.into()),
        }
    }
}

/// Makes a target on its thread, from its files.
type MakeWith =
    Box<dyn FnOnce(&RingHandle, Files, Handle) -> Boxed<'static, io::Result<Living>> + Send>;

/// A target before it is opened.
pub struct Target {
    name: String,
    shape: Shape,
    data: Vec<(PathBuf, Access)>,
    own: Vec<(PathBuf, Access)>,
    limits: Limits,
    make: MakeWith,
    is_map: bool,
}

impl Target {
    /// Makes a target of a map. `make` runs on the target's thread when the target is opened.
    pub fn map<M: Map>(
        name: impl Into<String>,
        shape: Shape,
        make: impl AsyncFnOnce(Files, Handle) -> io::Result<M> + Send + 'static,
    ) -> Self {
        let make = |_: &RingHandle, files, handle| -> Boxed<'static, io::Result<Living>> {
            Box::pin(async move { Ok(Living::Map(Rc::new(make(files, handle).await?))) })
        };
        Target::of(name.into(), shape, Box::new(make), true)
    }

    /// Makes a target of a device. `make` runs on the target's thread when the target is opened.
    pub fn device<D: Device>(
        name: impl Into<String>,
        shape: Shape,
        make: impl AsyncFnOnce(Files, Handle) -> io::Result<D> + Send + 'static,
    ) -> Self {
        let make = |_: &RingHandle, files, handle| -> Boxed<'static, io::Result<Living>> {
            Box::pin(async move { Ok(Living::Device(Rc::new(make(files, handle).await?))) })
        };
        Target::of(name.into(), shape, Box::new(make), false)
    }

    /// Makes a target of a map in another program.
    pub(super) fn of_program<M: Map>(
        name: String,
        shape: Shape,
        make: impl FnOnce(&RingHandle, Handle) -> io::Result<M> + Send + 'static,
    ) -> Self {
        let make = |ring: &RingHandle, _, handle| -> Boxed<'static, io::Result<Living>> {
            let made = make(ring, handle);
            Box::pin(async { Ok(Living::Map(Rc::new(made?))) })
        };
        Target::of(name, shape, Box::new(make), true)
    }

    fn of(name: String, shape: Shape, make: MakeWith, is_map: bool) -> Self {
        let (data, own, limits) = Default::default();
        Target { name, shape, data, own, limits, make, is_map }
    }

    /// Adds a data file or block device, to which the answers of a map refer. The first one has
    /// number 0.
    pub fn data(mut self, path: impl Into<PathBuf>, access: Access) -> Self {
        self.data.push((path.into(), access));
        self
    }

    /// Adds a file that the target uses itself; see [`Files::own`].
    pub fn file(mut self, path: impl Into<PathBuf>, access: Access) -> Self {
        self.own.push((path.into(), access));
        self
    }

    /// Sets how long Blockyard waits for the target.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Returns the target's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn check(&self) -> Result<(), TargetError> {
        let Shape { size, granule } = self.shape;
        let wrong = |what| Err(TargetError::new(TargetErrorKind::Shape, &self.name, what));
        if !granule.is_power_of_two() || !(SECTOR..=REGION).contains(&granule) {
            return wrong(format!(
                "its granule of {granule} bytes is no power of two from 512 to 4194304"
            ));
        }
        if size == 0 || !size.is_multiple_of(granule) || size > 1 << 62 {
            return wrong(format!(
                "its size of {size} bytes is no multiple of its granule of {granule} bytes"
            ));
        }
        Ok(())
    }

    /// Opens the files and starts the target. `cache`: how data files are opened.
    pub fn open(self, cache: CacheMode) -> Result<Arc<OpenTarget>, TargetError> {
        self.check()?;
        let name = self.name.clone();
        let open = |path: &Path, access, cache| {
            let options = OpenOptions::new(path, access == Access::Read, cache);
            let file = ImageFile::open(&options).map_err(|e| TargetError::of_file(&name, e))?;
            if file.fd().is_none() {
                let what = format!("{} is no file or device of this host", path.display());
                return Err(TargetError::new(TargetErrorKind::File, &name, what));
            }
            Ok(file)
        };
        let data = self.data.iter().map(|(path, access)| open(path, *access, cache));
        let data: Vec<_> = data.collect::<Result<_, _>>()?;
        let own = self.own.iter().map(|(path, access)| open(path, *access, CacheMode::Writeback));
        let own: Vec<_> = own.collect::<Result<_, _>>()?;
        let unit = match self.is_map {
            true => data.iter().map(|f| u64::from(f.alignment().offset_align)).max().unwrap_or(1),
            // The raw image above a device cuts requests into whole granules.
            false => self.shape.granule,
        };
        if unit > self.shape.granule {
            let what = format!(
                "its granule of {} bytes is smaller than the blocks of {unit} bytes of its files",
                self.shape.granule
            );
            return Err(TargetError::new(TargetErrorKind::Shape, &name, what));
        }
        let core = Arc::new(Core::new(name.clone(), self.shape, unit, &data, self.is_map));
        let handle = Handle(Arc::downgrade(&core));
        let (make, data_len) = (self.make, data.iter().map(ImageFile::size).collect());
        let make: Make = Box::new(move |ring| {
            let files = own.iter().map(|file| {
                let fd = file.fd().cloned().ok_or(io::ErrorKind::NotFound)?;
                Ok(OwnFile::host(file.path().into(), UringFile::new(ring, fd)?))
            });
            match files.collect::<io::Result<Vec<_>>>() {
                Ok(own) => make(ring, Files { own, data_len }, handle),
                Err(e) => Box::pin(async { Err(e) }),
            }
        });
        let worker = Worker::start(make, self.limits.start).map_err(|e| TargetError {
            what: format!("it cannot start: {e}"),
            source: Some(e.into()),
            ..TargetError::new(TargetErrorKind::Start, &name, "")
        })?;
        let worker = Arc::new(worker);
        Ok(Arc::new(OpenTarget { core, worker, data, limits: self.limits, is_map: self.is_map }))
    }
}

/// Kinds of faults of a target. The log has one line for each.
#[derive(Clone, Copy)]
pub(super) enum Fault {
    /// An answer is wrong.
    Answer,
    /// It has returned an error.
    Error,
    /// It is silent.
    Late,
}

/// Parts that were placed anew and are not durable.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub(super) list: Vec<Range<u64>>,
    /// Whether a flush has taken parts, and has not succeeded.
    pub(super) is_flushing: bool,
}

impl Moved {
    pub(super) fn is_pending(&self) -> bool {
        self.is_flushing || !self.list.is_empty()
    }

    pub(super) fn take(&mut self) -> Vec<Range<u64>> {
        self.is_flushing |= !self.list.is_empty();
        std::mem::take(&mut self.list)
    }
}

/// What all reactors share of a target's disk.
pub(super) struct Core {
    name: String,
    size: AtomicU64,
    pub(super) granule: u64,
    /// What offsets in data files must be multiples of.
    pub(super) unit: u64,
    pub(super) cache: Cache,
    /// Held by the request that asks about a range.
    pub(super) misses_lock: RangeLock,
    pub(super) in_use: InUse,
    settling: Semaphore,
    pub(super) flushing: Semaphore,
    moved: Mutex<Moved>,
    pub(super) copies: Semaphore,
    pub(super) geometry: Geometry,
    pub(super) capabilities: Capabilities,
    hits: AtomicU64,
    misses: AtomicU64,
    noted: AtomicU32,
    lost: OnceLock<String>,
}

impl Core {
    fn new(name: String, shape: Shape, unit: u64, data: &[ImageFile], is_map: bool) -> Self {
        let direct = !is_map || data.iter().any(ImageFile::direct);
        let largest = |of: fn(&Geometry) -> u32| {
            data.iter().map(|file| of(&file.geometry())).max().unwrap_or(1)
        };
        let geometry = Geometry {
            logical_block: (unit as u32).clamp(SECTOR as u32, 4096),
            minimum_io: (shape.granule as u32).max(4096),
            direct_memory: largest(|g| g.direct_memory),
            direct_offset: unit as u32,
            rotational: data.iter().any(|file| file.geometry().rotational),
            ..Geometry::default()
        };
        let capabilities = Capabilities { direct, fixed_length: true };
        Core::with(name, shape, unit, geometry, capabilities)
    }

    fn with(
        name: String,
        shape: Shape,
        unit: u64,
        geometry: Geometry,
        capabilities: Capabilities,
    ) -> Self {
        let (misses_lock, in_use, moved, hits, misses, noted, lost) = Default::default();
        Core {
            name,
            size: shape.size.into(),
            granule: shape.granule,
            unit,
            cache: Cache::new(),
            misses_lock,
            in_use,
            settling: Semaphore::new(1),
            flushing: Semaphore::new(1),
            moved,
            copies: Semaphore::new(COPIED),
            geometry,
            capabilities,
            hits,
            misses,
            noted,
            lost,
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    pub(super) fn moved(&self) -> MutexGuard<'_, Moved> {
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn hits(&self) {
        self.hits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn misses(&self) {
        self.misses.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns why acknowledged writes may be lost.
    pub(super) fn lost(&self) -> Option<String> {
        self.lost.get().cloned()
    }

    pub(super) fn set_lost(&self, error: &io::Error) {
        let _ = self.lost.set(format!("an earlier flush failed: {error}"));
    }

    /// Logs the first fault of each kind.
    pub(super) fn note(&self, fault: Fault, what: &str) {
        let bit = 1 << fault as u32;
        if self.noted.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            tracing::error!("target {}: {what}; later faults like this are not logged", self.name);
        }
    }

    pub(super) fn note_error(&self, error: &io::Error) {
        let fault = match error.kind() {
            io::ErrorKind::TimedOut => Fault::Late,
            _ => Fault::Error,
        };
        self.note(fault, &format!("it fails: {error}"));
    }
}

/// Calls a target, and waits as long as its limit allows.
pub(super) async fn limited<T: Send + 'static>(
    core: &Core,
    worker: &Worker,
    patience: &Patience,
    work: impl FnOnce(Living) -> Boxed<'static, io::Result<T>> + Send + 'static,
) -> io::Result<T> {
    let called = async {
        let answer = worker.call(work)?;
        patience.watch(answer.clone());
        answer.wait().await?
    };
    called.await.inspect_err(|e| core.note_error(e))
}

/// Asks the map of a worker.
pub struct AskWorker {
    core: Arc<Core>,
    worker: Arc<Worker>,
    patience: Patience,
}

impl Ask for AskWorker {
    async fn locate(&self, question: Question) -> io::Result<Vec<Extent>> {
        let work = move |target| -> Boxed<'static, io::Result<Vec<Extent>>> {
            Box::pin(async move {
                match target {
                    Living::Map(map) => map.locate(question).await,
                    Living::Device(_) => Err(io::Error::other("it is no map")),
                }
            })
        };
        limited(&self.core, &self.worker, &self.patience, work).await
    }

    async fn flush(&self, moved: Vec<Range<u64>>) -> io::Result<()> {
        let work = move |target| -> Boxed<'static, io::Result<()>> {
            Box::pin(async move {
                match target {
                    Living::Map(map) => map.flush(&moved).await,
                    Living::Device(_) => Err(io::Error::other("it is no map")),
                }
            })
        };
        limited(&self.core, &self.worker, &self.patience, work).await
    }
}

/// An open target. Each reactor opens its disk through it.
pub struct OpenTarget {
    core: Arc<Core>,
    worker: Arc<Worker>,
    data: Vec<ImageFile>,
    limits: Limits,
    is_map: bool,
}

impl std::fmt::Debug for OpenTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenTarget").field("name", &self.core.name).finish_non_exhaustive()
    }
}

impl OpenTarget {
    /// Returns a handle to the disk.
    pub fn handle(&self) -> Handle {
        Handle(Arc::downgrade(&self.core))
    }
}

impl Opened for OpenTarget {
    fn storage(self: Arc<Self>, handle: &RingHandle) -> io::Result<Store> {
        let (core, worker) = (self.core.clone(), self.worker.clone());
        let patience = Patience::new(handle, self.limits.answer);
        if !self.is_map {
            return Ok(Store::Passed(Passed { core, worker, patience }));
        }
        let files = self.data.iter().map(|file| match file.storage(handle)? {
            Store::File(file) => Ok(file),
            _ => Err(io::Error::other("a data file is no file of this host")),
        });
        let files: Vec<HostFile> = files.collect::<io::Result<_>>()?;
        let writable: Vec<bool> = self.data.iter().map(|file| !file.read_only()).collect();
        let ask = AskWorker { core, worker, patience };
        Ok(Store::Mapped(Rc::new(Mapped::new(&self.core, files, &writable, ask))))
    }

    fn name(&self) -> String {
        self.core.name.clone()
    }

    fn kind(&self) -> &'static str {
        "target"
    }

    fn size(&self) -> u64 {
        self.core.size()
    }

    fn geometry(&self) -> Geometry {
        self.core.geometry
    }

    fn capabilities(&self) -> Capabilities {
        self.core.capabilities
    }

    /// Returns the device of the first data file that is written, or else of the first one.
    fn device(&self) -> io::Result<Option<(String, bool)>> {
        let written = self.data.iter().find(|file| !file.read_only());
        written.or(self.data.first()).map_or(Ok(None), ImageFile::device)
    }
}

/// A handle to the disk of a target, for the target itself and for the program that serves it.
#[derive(Clone, Debug)]
pub struct Handle(Weak<Core>);

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Handle {
    /// Forgets where the granules of a range lie. When it returns, no request uses an earlier
    /// answer any more, and the map may use the old place for something else. Change the map first.
    /// Parts that are new and not durable stay where they are.
    ///
    /// A map must not wait for this in [`Map::locate`] or [`Map::flush`], because the request may
    /// wait for that answer. A map that moves parts calls this from a task or thread of its own.
    pub async fn invalidate(&self, range: Range<u64>) {
        let Some(core) = self.0.upgrade() else { return };
        let _one = core.settling.acquire().await;
        // The table has whole granules.
        let (granule, end) = (core.granule, range.end.min(1 << 62));
        let whole = range.start & !(granule - 1)..end.next_multiple_of(granule);
        if whole.is_empty() {
            return;
        }
        core.cache.forget(&whole);
        core.in_use.settle().await;
    }

    /// Changes the size of the disk, in bytes: a multiple of the granule. The program that serves
    /// the disk then adopts it. Returns false, and changes nothing, for other sizes.
    pub fn set_size(&self, size: u64) -> bool {
        let Some(core) = self.0.upgrade() else { return false };
        let fits = size > 0 && size.is_multiple_of(core.granule) && size <= 1 << 62;
        if fits {
            core.size.store(size, Ordering::Relaxed);
        }
        fits
    }

    /// Returns the counts of the disk.
    pub fn figures(&self) -> Figures {
        let Some(core) = self.0.upgrade() else { return Figures::default() };
        let (hits, misses) = (&core.hits, &core.misses);
        let (hits, misses) = (hits.load(Ordering::Relaxed), misses.load(Ordering::Relaxed));
        Figures { hits, misses, known: core.cache.len() as u64 }
    }

    /// Returns a handle to no disk.
    pub fn none() -> Self {
        Handle(Weak::new())
    }
}

impl<S: Storage, A: Ask> Mapped<S, A> {
    /// Makes a disk of a map without a thread: for tests on simulated disks. `files`: the data
    /// files, and whether each may be written.
    pub fn simulated(
        shape: Shape,
        files: Vec<(S, Access)>,
        make: impl FnOnce(Handle) -> A,
    ) -> Self {
        let geometry = Geometry::default();
        let core = Core::with("simulated".into(), shape, 1, geometry, Capabilities::default());
        let core = Arc::new(core);
        let ask = make(Handle(Arc::downgrade(&core)));
        let writable: Vec<_> = files.iter().map(|(_, access)| *access == Access::Write).collect();
        let files = files.into_iter().map(|(file, _)| file).collect();
        Mapped::new(&core, files, &writable, ask)
    }
}
