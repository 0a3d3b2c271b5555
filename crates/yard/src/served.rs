//! One disk with its exports, and what commands do with it. All of this runs on a thread of the
//! pool.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_disk::{
    Carried, Disk, DiskOptions, LocalDisk, OnEnospc, PathError, Source, Statistics, Why, WorkError,
    sched_time,
};
use blockyard_export::{Client, Export, Handed, PolicyFigures, Reactors, STOP_TIME};
use blockyard_image::journal::{CrashSafety, SafetyMode};
use blockyard_image::{ChainOptions, Opener};
use blockyard_ring::parcel::Parcel;
use blockyard_sched::{Knobs, Share};

use crate::context::Context;
use crate::exports::Exports;
use crate::interface::error::YardError;
use crate::interface::observer::{Event, Resized};
use crate::interface::obstacle::Obstacle;
use crate::interface::settings::{Activation, DiskSettings};
use crate::openings::Starting;

/// Length of a serial number in bytes (virtio 1.2, section 5.2.6.1).
const SERIAL_BYTES: usize = 20;

/// The state and statistics of a disk.
pub struct Report {
    pub name: String,
    /// Each client that is connected.
    pub clients: Vec<Client>,
    /// The block device of this host that an export has made.
    pub device: Option<PathBuf>,
    pub statistics: Statistics,
    pub policies: PolicyFigures,
    pub share: Arc<Share>,
}

/// The last statistics of a disk that is no longer served.
pub struct Ended {
    pub name: String,
    pub statistics: Statistics,
    pub policies: PolicyFigures,
    pub share: Arc<Share>,
    /// Whether all acknowledged writes are durable and the image was closed.
    pub is_flushed: bool,
}

/// A disk that is closed here, and that another server continues.
pub struct HandedDisk {
    pub settings: DiskSettings,
    pub exports: Vec<Handed>,
    pub ended: Ended,
    /// What the next server continues with. None: the disk could not be flushed, and has ended.
    pub carried: Option<Carried>,
    /// The program of an `exec:` image.
    pub program: io::Result<Option<Parcel>>,
    /// When this server stopped to take requests.
    pub since: Instant,
}

/// Changes to a disk while clients are connected. None: no change.
#[derive(Clone, Debug, Default)]
pub struct Change {
    pub knobs: Option<Knobs>,
    /// Names in the certificates of the clients that may connect. An empty list admits no client.
    /// `Some(None)`: every client may connect.
    pub clients: Option<Option<Vec<String>>>,
    pub on_enospc: Option<OnEnospc>,
}

pub(crate) struct ServedDisk {
    pub settings: DiskSettings,
    pub disk: Arc<Disk>,
    pub exports: Exports,
}

impl Exports {
    /// Returns the clients and the statistics of the disk that has these exports.
    pub fn report(&self, disk: &Arc<Disk>, reactors: &Reactors) -> Report {
        let (statistics, policies) = statistics(disk, reactors);
        let exports = self.all();
        Report {
            name: disk.name().into(),
            clients: exports.iter().flat_map(|export| export.clients()).collect(),
            device: exports.iter().find_map(|export| export.device()),
            statistics,
            policies,
            share: disk.share().clone(),
        }
    }
}

impl ServedDisk {
    /// Opens the image and starts the exports, as soon as no hand-over runs. After an error no
    /// export and no lock on the image remains.
    pub fn open(
        mut settings: DiskSettings,
        context: &Context,
        opener: &Opener,
    ) -> Result<(Self, Starting), YardError> {
        let Context { shares, images, .. } = context;
        settings.image.shared = Some(images.clone());
        let first = first_options(&settings);
        // Lines about the images name the disk.
        let opening = tracing::error_span!("opening", disk = settings.name).entered();
        let source = Source::open_by(opener, &first).map_err(YardError::Open)?;
        drop(opening);
        let share = shares.open(&settings, &source)?;
        let disk = Disk::sharing(options(&settings), source, share);
        let disk = Arc::new(match settings.activation {
            Activation::Start => disk,
            Activation::Rings => disk.until_activated(settings.image.clone()),
        });
        if let Some(carried) = settings.carried.take() {
            if let Some(why) = disk.differs_from(&carried) {
                return Err(YardError::Differs { disk: settings.name, why });
            }
            disk.continue_from(&carried);
        }
        activate_for_clients(&settings, &disk)?;
        let starting = context.openings.begin().ok_or(YardError::Closing)?;
        let ways: Vec<_> = settings.ways.iter().map(|way| way.describe()).collect();
        if let Some(observer) = &context.observer {
            disk.observe(observer.clone());
            context.report(Event::Added {
                name: settings.name.clone(),
                // No handle that keeps the image open.
                disk: Arc::downgrade(&disk),
                size: disk.capacity(),
                images: describe_image(&settings, &disk),
                ways: ways.clone(),
            });
        }
        let exports = start(&settings, &disk, context)?;
        tracing::info!(
            disk = settings.name,
            bytes = disk.capacity(),
            cache = %settings.image.cache,
            "serving {} on {}",
            describe_image(&settings, &disk),
            ways.join(" and ")
        );
        let exports = Exports::new(exports);
        Ok((ServedDisk { settings, disk, exports }, starting))
    }

    /// Ends the jobs and the exports, then flushes and closes the image.
    pub fn close(self, context: &Context) -> Ended {
        let exports = std::mem::take(&mut *self.exports.all());
        let ended = self.end(context, exports, blockyard_export::close);
        let (disk, is_flushed) = (ended.name.clone(), ended.is_flushed);
        context.report(Event::Removed { disk, is_flushed, error: None });
        ended
    }

    fn end(
        self,
        context: &Context,
        mut exports: Vec<Box<dyn Export>>,
        close: fn(&Arc<Disk>, &Reactors) -> bool,
    ) -> Ended {
        let reactors = &context.reactors;
        context.jobs.end(&self.disk);
        // The storage may have answered the requests of an earlier export late.
        exports.iter_mut().for_each(|export| export.stop(Instant::now() + STOP_TIME));
        let (statistics, policies) = statistics(&self.disk, reactors);
        let is_flushed = close(&self.disk, reactors);
        Ended {
            name: self.settings.name,
            statistics,
            policies,
            share: self.disk.share().clone(),
            is_flushed,
        }
    }

    /// Returns why the images cannot be opened by their paths again. The disk would be lost.
    fn images_are_gone(&self, opener: &Opener) -> Option<Obstacle> {
        let source = self.disk.source();
        if let Source::Inactive(_) = source {
            let is_file = Source::scheme_of(&self.settings.image.path).is_none();
            let opened = is_file.then(|| Source::open_by(opener, &first_options(&self.settings)));
            return opened?.err().map(|e| Obstacle::NotOpened(Box::new(e)));
        }
        if let Err(why) = source.paths().check() {
            return Some(why.into());
        }
        let file = source.chain().map(|chain| &chain.top().file).or(source.file())?;
        file.id()?;
        let image = file.path().to_path_buf();
        let opened = File::options().read(true).write(!self.settings.image.read_only).open(&image);
        opened.err().map(|error| PathError::NotFound { image, error }.into())
    }

    /// Returns why another server cannot continue the disk now.
    pub fn obstacle(&self, context: &Context, opener: &Opener) -> Option<Obstacle> {
        if let Some(why) = self.disk.poisoned() {
            return Some(Obstacle::WritesMayBeLost(why.clone()));
        }
        let image = &self.settings.image.path;
        let scheme = Source::scheme_of(image).filter(|_| self.settings.image.given.is_none());
        if scheme.is_some_and(|(scheme, _)| scheme.is_volatile()) {
            return Some(Obstacle::DataInMemory);
        }
        if let Some(why) = self.obstacle_of_target() {
            return Some(why);
        }
        let source = self.disk.source();
        let top = match &source {
            Source::Chain(chain) => Some(chain.path()),
            Source::Inactive(_) if scheme.is_none() => source.path(),
            _ => None,
        };
        if let Some(top) = top.filter(|top| top != image) {
            return Some(Obstacle::Snapshot(top.into()));
        }
        if context.jobs.are_running(&self.settings.name) {
            return Some(Obstacle::Job);
        }
        if self.disk.is_drained() {
            return Some(Obstacle::Drained);
        }
        if self.disk.paused() > 0 {
            return Some(Obstacle::WaitsForSpace);
        }
        if let Some(why) = self.images_are_gone(opener) {
            return Some(why);
        }
        let obstacle = self.exports.all().iter().find_map(|export| export.obstacle());
        obstacle.map(Obstacle::Export).or_else(|| self.sync_for_close(context))
    }

    /// Returns why another server cannot continue a disk of a target.
    fn obstacle_of_target(&self) -> Option<Obstacle> {
        let source = self.disk.source();
        source.file()?.opened().filter(|opened| opened.is_target())?;
        if self.settings.activation != Activation::Start {
            return Some(Obstacle::ProgramBeforeRings);
        }
        // The next server must not ask the target before this one is sure to leave.
        let waits = self.exports.all().iter().all(|export| export.waits_for_owner());
        (!waits).then_some(Obstacle::ProgramWithDevice)
    }

    /// Syncs while requests still run, because the guest does not wait for this part. The second
    /// sync leaves little for the close. Returns an obstacle if that fails.
    fn sync_for_close(&self, context: &Context) -> Option<Obstacle> {
        self.disk.source().chain()?;
        let is_synced = (0..2).all(|_| blockyard_export::sync(&self.disk, &context.reactors));
        (!is_synced).then_some(Obstacle::FlushFailed)
    }

    /// Ends the exports so that another server can continue them, and leaves the image to it.
    pub fn hand_over(self, context: &Context) -> HandedDisk {
        let mut all = std::mem::take(&mut *self.exports.all());
        let is_used = all.iter().any(|e| !e.clients().is_empty() || e.device().is_some());
        let (settings, since) = (self.settings.clone(), Instant::now());
        let exports = all.iter_mut().filter_map(|export| export.hand_over()).collect();
        let disk = self.disk.clone();
        let ended = self.end(context, all, blockyard_export::leave);
        // Nothing is in flight any more.
        let carried = ended.is_flushed.then(|| {
            let carried = disk.hand_over(&ended.statistics);
            // Clients that connect later may find another disk.
            Carried { shown: carried.shown.filter(|_| is_used), ..carried }
        });
        let source = disk.source();
        // A disk that is not flushed has no next server, and its program ends with it.
        let opened = source.file().filter(|_| ended.is_flushed).and_then(|file| file.opened());
        let program = opened.map_or(Ok(None), |opened| opened.hand_over());
        HandedDisk { settings, exports, ended, carried, program, since }
    }

    /// Returns an error if an export has a limit for the time that its requests are held, and
    /// `what` may hold them longer. `limit`: for how long, if that is known.
    pub fn check_hold(&self, what: &'static str, limit: Option<Duration>) -> Result<(), YardError> {
        let exports = self.exports.all();
        let holds = exports.iter().filter_map(|export| export.longest_hold());
        match holds.min_by_key(|hold| hold.time) {
            Some(longest) if limit.is_none_or(|limit| limit > longest.time) => {
                Err(YardError::Holds { disk: self.settings.name.clone(), what, longest })
            }
            _ => Ok(()),
        }
    }

    /// Changes the knobs, the clients that may connect, or what happens without space.
    pub fn change(&mut self, change: &Change) -> Result<(), YardError> {
        if change.on_enospc == Some(OnEnospc::Pause) {
            self.check_hold("on-enospc = \"pause\"", None)?;
        }
        if let Some(on_enospc) = change.on_enospc {
            self.disk.set_on_enospc(on_enospc);
            self.settings.on_enospc = on_enospc;
        }
        if let Some(knobs) = &change.knobs {
            self.disk.share().set(knobs, sched_time());
            self.settings.knobs = knobs.clone();
        }
        if let Some(clients) = &change.clients {
            self.exports.all().iter_mut().for_each(|export| export.allow(clients.as_deref()));
        }
        Ok(())
    }

    /// Makes all answered writes durable, in every cache mode.
    pub fn flush(&self, reactors: &Reactors) -> Result<(), YardError> {
        // A drained disk has no write that is not durable, and a sync would wait for its end.
        let is_durable = self.disk.is_drained() && self.disk.poisoned().is_none();
        let is_flushed = is_durable || blockyard_export::sync_always(&self.disk, reactors);
        if is_flushed {
            return Ok(());
        }
        let disk = self.settings.name.clone();
        Err(match self.disk.poisoned() {
            Some(_) => YardError::Flush { disk },
            None if self.disk.paused() > 0 => {
                let remedy =
                    "Its requests wait for space on the host: free some, then `ctl resume`";
                YardError::NotFlushed { disk, remedy }
            }
            None => YardError::NotFlushed { disk, remedy: "The log has why" },
        })
    }

    /// Grows the topmost image, and notifies clients.
    pub fn grow(&mut self, size: u64, context: &Context) -> Result<Option<Resized>, YardError> {
        let disk = || self.settings.name.clone();
        context.report(Event::GrowthBegun { disk: disk(), size });
        let grown = self.disk.grow(size);
        let error = grown.as_ref().err().map(ToString::to_string);
        context.report(Event::GrowthEnded { disk: disk(), error });
        // The image may have its new size although the growth failed.
        let refreshed = self.refresh(context);
        grown?;
        refreshed
    }

    /// Adopts the present size of the image. Notifies clients if it has changed.
    pub fn refresh(&mut self, context: &Context) -> Result<Option<Resized>, YardError> {
        let old = self.disk.capacity();
        let failed = |source| YardError::Size { disk: self.settings.name.clone(), source };
        let Some(new) = self.disk.refresh_capacity().map_err(failed)? else { return Ok(None) };
        self.exports.all().iter_mut().for_each(|export| export.resize());
        let size = Resized { old, new };
        context.report(Event::Resized { disk: self.settings.name.clone(), size });
        Ok(Some(size))
    }
}

/// Opens the image of an inactive disk that clients of an earlier server use at once. An error says
/// whether another process has locked the image, before anything reports the disk.
fn activate_for_clients(settings: &DiskSettings, disk: &Arc<Disk>) -> Result<(), YardError> {
    if !settings.ways.iter().any(|way| way.continues_rings(&settings.name)) {
        return Ok(());
    }
    // The caller tries again, for as long as the clients may wait.
    let activated = disk.activate(|| false);
    activated.map_err(|WorkError { disk, work, why }| match *why {
        Why::Source(e) => YardError::Open(e),
        why => YardError::Work(WorkError { disk, work, why: Box::new(why) }),
    })
}

/// Starts the exports of a disk. After an error the disk is closed.
fn start(
    settings: &DiskSettings,
    disk: &Arc<Disk>,
    context: &Context,
) -> Result<Vec<Box<dyn Export>>, YardError> {
    let mut exports = Vec::new();
    for way in &settings.ways {
        match way.start(disk, &context.reactors) {
            Ok(export) => exports.push(export),
            Err(source) => {
                exports.clear();
                // A client may have connected already. Then a reactor has the image open.
                let is_flushed = blockyard_export::close(disk, &context.reactors);
                let (disk, error) = (settings.name.clone(), Some(source.to_string()));
                context.report(Event::Removed { disk: disk.clone(), is_flushed, error });
                return Err(YardError::Export { disk, source });
            }
        }
    }
    Ok(exports)
}

/// Describes the images that a disk consists of at the moment.
pub(crate) fn describe_image(settings: &DiskSettings, disk: &Disk) -> String {
    let source = disk.source();
    source
        .chain()
        .map_or_else(|| settings.image.path.display().to_string(), |chain| chain.describe())
}

/// Returns the options with which the image is opened at the start. An image that is activated
/// later is only looked at, without a lock, because another server may write to it.
fn first_options(settings: &DiskSettings) -> ChainOptions {
    let left = settings.carried.as_ref().and_then(|carried| carried.left);
    let image = ChainOptions { left, ..settings.image.clone() };
    match settings.activation {
        Activation::Start => image,
        Activation::Rings => ChainOptions {
            read_only: true,
            force_share: true,
            prime: false,
            copy_on_read: false,
            shared: None,
            crash_safety: CrashSafety { mode: SafetyMode::Unread, store: None },
            ..image
        },
    }
}

fn options(settings: &DiskSettings) -> DiskOptions {
    let mut serial = settings.serial.clone();
    while serial.len() > SERIAL_BYTES {
        serial.pop();
    }
    DiskOptions {
        name: settings.name.clone(),
        serial,
        read_only: settings.image.read_only,
        cache: settings.image.cache,
        filters: settings.filters.clone(),
        on_enospc: settings.on_enospc,
    }
}

/// Returns the sum of the statistics of all reactors, and of earlier servers.
fn statistics(disk: &Arc<Disk>, reactors: &Reactors) -> (Statistics, PolicyFigures) {
    let mut all = disk.counted_before().cloned().unwrap_or_default();
    let mut policies = PolicyFigures::default();
    if !disk.was_used() {
        return (all, policies);
    }
    for reactor in reactors.all() {
        let disk = disk.clone();
        let part = reactor.ask(move |handle, reply| {
            let statistics = LocalDisk::known(handle, &disk).map(|served| served.statistics());
            reply.send((statistics, PolicyFigures::known(handle, &disk)));
        });
        let Some((statistics, chosen)) = part else { continue };
        policies.merge(&chosen);
        if let Some(statistics) = statistics {
            all.merge(&statistics);
        }
    }
    (all, policies)
}

#[cfg(test)]
mod tests;
