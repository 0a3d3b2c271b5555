//! A target before it is opened, and an open one.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::Duration;

use blockyard_ring::parcel::Parcel;
use blockyard_ring::{Handle as RingHandle, UringFile};

use super::ask::Ask;
use super::cache::REGION;
use super::device::Device;
use super::file::{Files, OwnFile};
use super::map::{Boxed, Map};
use super::mapped::Mapped;
use super::passed::Passed;
use super::patience::Patience;
use super::shape::{Access, Shape};
use super::shared::{AskWorker, Core};
use super::worker::{Living, Make, NotStarted, TargetEnd, Worker};
use crate::boxed::AnyStore;
use crate::cache::CacheMode;
use crate::error::{ErrorKind, StorageError};
use crate::file::HostFile;
use crate::image_file::ImageFile;
use crate::opened::{OpenError, OpenOptions, Opened, Program};
use crate::storage::{Capabilities, Storage};
use crate::store::Store;
use crate::{Geometry, SECTOR};

/// Longest time in which the thread of a program gives it up. It does not wait for the program.
const LEAVE: Duration = Duration::from_secs(30);

/// Largest size of a disk in bytes.
const MOST_SIZE: u64 = 1 << 62;

/// How long Blockyard waits for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest time for the start of the target. Then the disk is not served, and the target is
    /// dropped as soon as its start waits for something or returns.
    pub start: Duration,
    /// Longest time for an answer. Then the request fails. The target goes on. `Duration::MAX`: no
    /// limit.
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
    end: Mutex<Option<TargetEnd>>,
}

impl TargetError {
    pub(super) fn new(kind: TargetErrorKind, name: &str, what: impl Into<String>) -> Self {
        let (name, what) = (name.into(), what.into());
        TargetError { kind, name, what, source: None, end: Mutex::new(None) }
    }

    fn of_file(name: &str, error: OpenError) -> Self {
        let wrong = TargetError::new(TargetErrorKind::File, name, error.to_string());
        TargetError { source: Some(error.into()), ..wrong }
    }

    fn of_start(name: &str, NotStarted { why, end }: NotStarted) -> Self {
        let what = format!("it cannot start: {why}");
        let wrong = TargetError::new(TargetErrorKind::Start, name, what);
        TargetError { source: Some(why.into()), end: Mutex::new(end), ..wrong }
    }

    /// Returns what waits for the end of a target that has not started, once. It is public for
    /// `Yard::serve` only, because a [`TargetEnd`] is no part of the library.
    #[doc(hidden)]
    pub fn end(&self) -> Option<TargetEnd> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl From<TargetError> for StorageError {
    fn from(error: TargetError) -> Self {
        StorageError::new(ErrorKind::Refused, error)
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
    program: Option<ProgramCalls>,
}

/// What a target's thread does with its map in another program.
#[derive(Clone, Copy)]
pub(super) struct ProgramCalls {
    /// Stops the conversation with the program, and packs it for another server.
    pub(super) hand_over: fn() -> Boxed<'static, io::Result<Parcel>>,
    /// Makes this server the program's owner.
    pub(super) own: fn(),
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
        calls: ProgramCalls,
        make: impl FnOnce(&RingHandle, Handle) -> io::Result<M> + Send + 'static,
    ) -> Self {
        let make = |ring: &RingHandle, _, handle| -> Boxed<'static, io::Result<Living>> {
            let made = make(ring, handle);
            Box::pin(async { Ok(Living::Map(Rc::new(made?))) })
        };
        Target { program: Some(calls), ..Target::of(name, shape, Box::new(make), true) }
    }

    fn of(name: String, shape: Shape, make: MakeWith, is_map: bool) -> Self {
        let (data, own, limits) = Default::default();
        Target { name, shape, data, own, limits, make, is_map, program: None }
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
        let wrong = |what: String| Err(TargetError::new(TargetErrorKind::Shape, &self.name, what));
        if !granule.is_power_of_two() || !(SECTOR..=REGION).contains(&granule) {
            return wrong(format!(
                "its granule of {granule} bytes is no power of two from 512 to 4194304"
            ));
        }
        match size {
            0 => wrong("its size is 0 bytes".into()),
            _ if size > MOST_SIZE => {
                wrong(format!("its size of {size} bytes is more than {MOST_SIZE} bytes"))
            }
            _ if !size.is_multiple_of(granule) => wrong(format!(
                "its size of {size} bytes is no multiple of its granule of {granule} bytes"
            )),
            _ => Ok(()),
        }
    }

    /// Opens the files and starts the target. `cache`: how data files are opened. It is public for
    /// `Yard::serve` only, because an [`OpenTarget`] is no part of the library.
    #[doc(hidden)]
    pub fn open(self, cache: CacheMode) -> Result<Arc<OpenTarget>, TargetError> {
        self.check()?;
        let name = self.name.clone();
        let open = |path: &Path, access, cache| {
            let options = OpenOptions::new(path, access == Access::Read, cache);
            ImageFile::open_file(&options).map_err(|e| TargetError::of_file(&name, e))
        };
        let data = self.data.iter().map(|(path, access)| open(path, *access, cache));
        let data: Vec<_> = data.collect::<Result<_, _>>()?;
        let own = self.own.iter().map(|(path, access)| open(path, *access, CacheMode::Writeback));
        let own: Arc<[_]> = own.collect::<Result<_, _>>()?;
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
        let used = own.clone();
        let make: Make = Box::new(move |ring| {
            let files = used.iter().map(|file| {
                let fd = file.fd().cloned().ok_or(io::ErrorKind::NotFound)?;
                Ok(OwnFile::host(file.path().into(), UringFile::new(ring, fd)?))
            });
            match files.collect::<io::Result<Vec<_>>>() {
                Ok(own) => make(ring, Files { own, data_len }, handle),
                Err(e) => Box::pin(async { Err(e) }),
            }
        });
        let worker = Worker::start(make, self.limits.start);
        let worker = Arc::new(worker.map_err(|e| TargetError::of_start(&name, e))?);
        let Target { limits, is_map, program, .. } = self;
        Ok(Arc::new(OpenTarget { core, worker, data, own, limits, is_map, program }))
    }
}

/// An open target. Each reactor opens its disk through it.
pub struct OpenTarget {
    core: Arc<Core>,
    // Closed before the end of the thread: another process opens the files after it.
    data: Vec<ImageFile>,
    own: Arc<[ImageFile]>,
    worker: Arc<Worker>,
    limits: Limits,
    is_map: bool,
    /// Set if the map is another program.
    program: Option<ProgramCalls>,
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

    /// Returns what waits for the end of the target after its disk has ended, once.
    pub fn end(&self) -> Option<TargetEnd> {
        self.worker.end()
    }
}

impl Opened for OpenTarget {
    fn storage(self: Arc<Self>, handle: &RingHandle) -> io::Result<AnyStore> {
        let (core, worker) = (self.core.clone(), self.worker.clone());
        let patience = Patience::new(handle, self.limits.answer);
        if !self.is_map {
            return Ok(Rc::new(Passed { core, worker, patience }));
        }
        let files = self.data.iter().map(|file| match file.storage(handle)? {
            Store::File(file) => Ok(file),
            _ => Err(io::Error::other("a data file is no file of this host")),
        });
        let files: Vec<HostFile> = files.collect::<io::Result<_>>()?;
        let writable: Vec<bool> = self.data.iter().map(|file| !file.read_only()).collect();
        let ask = AskWorker { core, worker, patience };
        Ok(Rc::new(Mapped::new(&self.core, files, &writable, ask)))
    }

    fn name(&self) -> String {
        self.core.name.clone()
    }

    fn kind(&self) -> &'static str {
        "target"
    }

    fn is_target(&self) -> bool {
        true
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

    /// The data of a map never enter this process, those of a device do.
    fn has_files(&self) -> bool {
        self.is_map
    }

    fn program(&self) -> Option<Program> {
        let files = || self.data.iter().map(|file| file.path().into()).collect();
        self.program.map(|_| Program { image: self.core.name.clone(), files: files() })
    }

    fn hand_over(&self) -> io::Result<Option<Parcel>> {
        let Some(ProgramCalls { hand_over, .. }) = self.program else { return Ok(None) };
        let (sender, receiver) = mpsc::sync_channel(1);
        let _answer = self.worker.call_always(move |_| {
            Box::pin(async move {
                let _ = sender.send(hand_over().await);
                Ok(())
            })
        });
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "its thread does not leave it");
        receiver.recv_timeout(LEAVE).map_err(late)?.map(Some)
    }

    fn own_program(&self) {
        let Some(ProgramCalls { own, .. }) = self.program else { return };
        // If its thread has ended, there is no program.
        let _ = self.worker.call_always(move |_| {
            own();
            Box::pin(async { Ok(()) })
        });
    }

    /// Returns the device of the first data file that is written, or else of the first one. A
    /// target without data files has its own files instead.
    fn device(&self) -> io::Result<Option<(String, bool)>> {
        let files = if self.data.is_empty() { &self.own[..] } else { &self.data[..] };
        let written = files.iter().find(|file| !file.read_only());
        written.or(files.first()).map_or(Ok(None), ImageFile::device)
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
    /// answer any more. Change the map first. Parts that are new and not durable stay where they
    /// are.
    ///
    /// The next flush of the disk calls [`Map::flush`], also if no part has a new place. So a map
    /// may write the change to its table there. The map may use the old place for something else
    /// after this call and when its table is durable. Until then a power cut brings back the old
    /// table.
    ///
    /// A map must not wait for this in [`Map::locate`], because the request that it waits for may
    /// wait for that answer. It may wait in [`Map::flush`] and [`Map::discard`], if it answers
    /// questions meanwhile.
    pub async fn invalidate(&self, range: Range<u64>) {
        let Some(core) = self.0.upgrade() else { return };
        // The table has whole granules.
        let (granule, end) = (core.granule, range.end.min(MOST_SIZE));
        let whole = range.start & !(granule - 1)..end.next_multiple_of(granule);
        if whole.is_empty() {
            return;
        }
        // A flush that begins during the wait covers the change that the map has made.
        core.moved().is_changed = true;
        core.let_go(&whole).await;
        // It does not cover a change that the map makes when this returns.
        core.moved().is_changed = true;
    }

    /// Changes the size of the disk, in bytes: a multiple of the granule. The program that serves
    /// the disk then adopts it. Returns false, and changes nothing, for other sizes.
    ///
    /// A disk that grows has its new space before this call. A disk that becomes smaller gives its
    /// space up after it: requests that begin later do not go beyond the new end, but those that
    /// began before may reach the target, or use its answers, until they end. So first call this,
    /// then wait for [`Handle::invalidate`] of the rest (a map), or for the methods that run (a
    /// device), and then give up the space.
    pub fn set_size(&self, size: u64) -> bool {
        let Some(core) = self.0.upgrade() else { return false };
        let fits = size > 0 && size.is_multiple_of(core.granule) && size <= MOST_SIZE;
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
    /// files, and whether each may be written. `make` gets the handle to the disk.
    pub async fn simulated(
        shape: Shape,
        files: Vec<(S, Access)>,
        make: impl AsyncFnOnce(Handle) -> io::Result<A>,
    ) -> io::Result<Self> {
        let geometry = Geometry::default();
        let (name, capabilities) = ("simulated".into(), Capabilities::default());
        let core = Core::with(name, shape, 1, files.len(), geometry, capabilities);
        let core = Arc::new(core);
        let ask = make(Handle(Arc::downgrade(&core))).await?;
        let writable: Vec<_> = files.iter().map(|(_, access)| *access == Access::Write).collect();
        let files = files.into_iter().map(|(file, _)| file).collect();
        Ok(Mapped::new(&core, files, &writable, ask))
    }
}
