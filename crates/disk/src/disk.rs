//! A disk: the state that all reactors share.
//!
//! Requests read it. It is written only by flushes, after errors, and by control threads.
//!
//! What must hold: after a failed flush no write is acknowledged. The image is exchanged only while
//! no request is in flight (see [`crate::quiesce`]).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_image::{CacheMode, ChainOptions, is_full};
use blockyard_ring::Remote;
use blockyard_sched::{Knobs, Share};

use crate::backend::Source;
use crate::client_counts::ClientCounts;
use crate::drain::Drain;
use crate::filter::Filter;
use crate::flush::{FlushFigures, FlushGroup};
use crate::leaving::Leaving;
use crate::observer::{DiskObserver, Observed};
use crate::on_enospc::OnEnospc;
use crate::once_a_second::OnceASecond;
use crate::poison::{Poison, Unusable};
use crate::request::Failure;
use crate::statistics::Statistics;
use crate::tracker::Tracker;

/// Maximum number of unsynced bytes that a disk with neighbours leaves in the page cache. Writing
/// them takes a few milliseconds of device time.
const MOST_DIRTY: u64 = 8 << 20;

/// Settings of a disk.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    pub name: String,
    /// Serial number that the guest reads, at most 20 bytes.
    pub serial: String,
    pub read_only: bool,
    pub cache: CacheMode,
    pub filters: Vec<Filter>,
    pub on_enospc: OnEnospc,
}

/// An open disk.
#[derive(Debug)]
pub struct Disk {
    options: DiskOptions,
    /// The disk's share of the device that holds the image, and the disk's limits.
    share: Arc<Share>,
    capacity: AtomicU64,
    pub(crate) flushes: FlushGroup,
    /// Whether the image is a raw file whose writes go through the host's page cache, which may
    /// lose them later.
    pub(crate) cached: bool,
    /// Whether writes to the raw file, or to the topmost image of a chain, go through the host's
    /// page cache.
    dirties: bool,
    /// Whether the image is a block device.
    pub(crate) on_device: bool,
    /// Whether a write was acknowledged that no sync has covered yet.
    pub(crate) unsynced: AtomicBool,
    /// Whether a sync runs, which may cover such writes, and how many have begun or ended.
    pub(crate) is_syncing: AtomicBool,
    syncs: AtomicU64,
    /// Number of bytes written to the page cache since the last sync.
    pub(crate) dirty: AtomicU64,
    /// Reason why writes fail; see [`Failure::Poisoned`].
    poisoned: OnceLock<Poison>,
    /// The image and its reactors. Control threads use this, and reactors when they open the disk;
    /// no request does.
    serving_state: Mutex<ServingState>,
    /// Options that open the image when the disk is activated. None: the disk is always active.
    pub(crate) activation: Option<Mutex<ChainOptions>>,
    /// A deactivation that waits for other work on the disk.
    pub(crate) leaving: Mutex<Leaving>,
    /// Whether an operator holds the requests back.
    pub(crate) drain: Drain,
    /// Whether reactors read the backing image with metadata from before a commit that failed.
    pub(crate) has_stale_backing: AtomicBool,
    /// Held by the snapshot, commit, stream or backup that runs: one at a time.
    pub(crate) work: Mutex<()>,
    /// Whether the disk is being closed. If so, no snapshot, commit, stream or backup begins, and a
    /// running one ends.
    ended: AtomicBool,
    /// Whether a reactor or a job has opened the image since the disk was opened.
    used: AtomicBool,
    pub(crate) clients: ClientCounts,
    /// Longest time that a quiesce has held requests back, in microseconds.
    held_back: AtomicU64,
    /// Number of requests that wait for space, on all reactors; see [`crate::pause`].
    pub(crate) paused: AtomicU64,
    /// Limits the log lines about failed requests.
    pub(crate) failure_log: OnceASecond,
    /// Whether requests without space on the host wait; see [`crate::pause`].
    pub(crate) pauses: AtomicBool,
    pub(crate) observed: OnceLock<Observed>,
    /// What earlier servers have counted, if this one has taken the disk over.
    pub(crate) before: OnceLock<Statistics>,
}

/// The present image of a disk, and the reactors that serve it.
#[derive(Debug)]
pub(crate) struct ServingState {
    pub source: Source,
    /// What the job that runs has to know of requests that change the disk.
    pub tracker: Option<Tracker>,
    /// The reactors that have the disk open.
    pub reactors: Vec<Remote>,
    /// Whether the disk is quiesced. If so, a reactor that opens the disk now lets no request
    /// begin.
    pub quiesced: bool,
}

impl Disk {
    /// Returns a disk without limits that shares no device.
    pub fn new(options: DiskOptions, source: Source) -> Self {
        let share = Arc::new(Share::new(None, None, &Knobs::default()));
        Disk::sharing(options, source, share)
    }

    /// Returns a disk with a share of a device, and limits.
    pub fn sharing(options: DiskOptions, source: Source, share: Arc<Share>) -> Self {
        let capacity = AtomicU64::new(source.capacity());
        let dirties = source
            .chain()
            .map_or_else(|| source.file(), |chain| Some(&chain.top().file))
            .is_some_and(|f| !f.direct());
        let on_device = source.file().is_some_and(|file| file.is_device());
        let cached = source.file().is_some_and(|file| !file.direct());
        let (tracker, reactors, quiesced) = (None, Vec::new(), false);
        let serving_state = Mutex::new(ServingState { source, tracker, reactors, quiesced });
        let (
            flushes,
            unsynced,
            dirty,
            poisoned,
            work,
            ended,
            used,
            clients,
            held_back,
            paused,
            failure_log,
            observed,
        ) = Default::default();
        let before = OnceLock::new();
        let pauses = (options.on_enospc == OnEnospc::Pause).into();
        Disk {
            options,
            share,
            capacity,
            flushes,
            cached,
            unsynced,
            is_syncing: AtomicBool::new(false),
            syncs: AtomicU64::new(0),
            dirties,
            on_device,
            dirty,
            poisoned,
            serving_state,
            activation: None,
            leaving: Mutex::default(),
            drain: Drain::default(),
            has_stale_backing: AtomicBool::new(false),
            work,
            ended,
            used,
            clients,
            held_back,
            paused,
            failure_log,
            pauses,
            observed,
            before,
        }
    }

    /// Returns the options with which the disk was opened.
    pub fn options(&self) -> &DiskOptions {
        &self.options
    }

    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Returns the disk's share of the device, with its limits. Both may be changed at any time.
    pub fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Returns the disk's present image.
    pub fn source(&self) -> Source {
        self.serving_state().source.clone()
    }

    pub(crate) fn serving_state(&self) -> MutexGuard<'_, ServingState> {
        self.serving_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cancels a running snapshot, commit, stream or backup, waits for its end, and lets no other
    /// begin. Call it before the disk is closed, from a thread that is no reactor.
    pub fn end_work(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.drain.resume();
        drop(self.work.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    pub(crate) fn note_use(&self) {
        self.used.store(true, Ordering::SeqCst);
    }

    /// Returns whether a reactor or a job has opened the image. If not, no request has written to
    /// it.
    pub fn was_used(&self) -> bool {
        self.used.load(Ordering::SeqCst)
    }

    /// Returns the longest time for which a quiesce has held requests back.
    pub fn longest_held_back(&self) -> Duration {
        Duration::from_micros(self.held_back.load(Ordering::Relaxed))
    }

    pub(crate) fn note_held_back(&self, time: Duration) {
        self.held_back.fetch_max(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// Returns the number of flushes, and of the syncs that they shared.
    pub fn flushes(&self) -> FlushFigures {
        self.flushes.counted()
    }

    /// Returns the number of bytes that a guest may address.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    pub(crate) fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Ordering::Relaxed);
    }

    /// Reads the image's size again. Returns the new capacity in bytes if it changed.
    pub fn refresh_capacity(&self) -> io::Result<Option<u64>> {
        let source = self.source();
        if let Some(file) = source.file() {
            file.refresh_size()?;
        }
        let new = source.capacity();
        Ok((self.capacity.swap(new, Ordering::Relaxed) != new).then_some(new))
    }

    pub fn poisoned(&self) -> Option<&Poison> {
        self.poisoned.get()
    }

    /// Returns why the disk accepts no writes, or no requests, until its image is opened again: it
    /// is poisoned, or a resize has lost the image.
    pub fn unusable(&self) -> Option<Unusable> {
        let lost = || match self.source() {
            Source::Gone { why, .. } => Some(why.into()),
            _ => None,
        };
        self.poisoned().cloned().map(Unusable::from).or_else(lost)
    }

    /// Records an acknowledged write. Writes the flag only if it is not set yet, so that reactors
    /// do not contend for its cache line.
    #[inline]
    pub(crate) fn note_unsynced(&self) {
        if !self.unsynced.load(Ordering::SeqCst) {
            self.unsynced.store(true, Ordering::SeqCst);
        }
    }

    /// Notes that a sync begins. Returns whether acknowledged writes were not synced. The sync may
    /// not cover writes that are acknowledged from here on.
    pub(crate) fn begin_sync(&self) -> bool {
        self.is_syncing.store(true, Ordering::SeqCst);
        self.syncs.fetch_add(1, Ordering::SeqCst);
        self.unsynced.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn end_sync(&self) {
        self.syncs.fetch_add(1, Ordering::SeqCst);
        self.is_syncing.store(false, Ordering::SeqCst);
    }

    /// Returns how many syncs have begun, and how many have ended, together.
    #[inline]
    pub(crate) fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }

    /// Counts a write to the page cache. Returns true if the disk must sync now: it has neighbours,
    /// and a later write-back by the kernel would delay their operations.
    #[inline]
    pub(crate) fn dirties(&self, bytes: u64) -> bool {
        self.dirties
            && self.share.has_neighbours()
            && self.dirty.fetch_add(bytes, Ordering::Relaxed) + bytes > MOST_DIRTY
    }

    /// Returns whether a failed durable write that bypasses the page cache may have lost other
    /// writes, too, without a later sync reporting it. Such a write ends in a flush of the device's
    /// cache, and the device reports the loss of a write only once. `syncs`: [`Disk::syncs`] before
    /// the write began.
    pub(crate) fn lost_others_with(&self, error: &io::Error, syncs: u64) -> bool {
        match Failure::of(error) {
            // The kernel refused the write before it did anything.
            _ if error.kind() == io::ErrorKind::InvalidInput => false,
            Failure::Unsupported | Failure::NoSpace => false,
            // The order: a sync sets the others before it resets the first.
            _ => {
                self.unsynced.load(Ordering::SeqCst)
                    || self.is_syncing.load(Ordering::SeqCst)
                    || self.syncs() != syncs
            }
        }
    }

    /// Returns the number of requests that wait for space on the host, until the disk is resumed.
    pub fn paused(&self) -> u64 {
        self.paused.load(Ordering::SeqCst)
    }

    /// Returns whether a request that failed with this error waits for space.
    pub(crate) fn pauses_at(&self, error: &io::Error) -> bool {
        self.pauses.load(Ordering::SeqCst) && is_full(error) && self.poisoned().is_none()
    }

    /// Logs that requests begin to wait for space. Guests cause this, so the log has at most one
    /// line a second.
    pub(crate) fn note_paused(&self, what: &str, offset: u64, error: &io::Error) {
        if self.paused() == 0 && self.failure_log.admits(Instant::now()) {
            tracing::warn!(
                disk = self.name(),
                offset,
                "{what} failed: {error}: requests that need space wait now; free some, then run \
                 `blockyard ctl resume`"
            );
        }
    }

    pub(crate) fn poison(&self, what: &'static str, error: &io::Error) {
        let poison = Poison::new(what, error);
        if self.poisoned.set(poison.clone()).is_ok() {
            tracing::error!(disk = self.name(), "{poison}");
            self.report_change();
        }
    }

    /// Reports to `observer` from now on. A disk has one observer: a second call does nothing.
    pub fn observe(&self, observer: Arc<dyn DiskObserver>) {
        let _ = self.observed.set(Observed::new(observer, self.name()));
    }

    /// Reports that the disk's state may have changed.
    pub(crate) fn report_change(&self) {
        self.observed.get().into_iter().for_each(Observed::report_change);
    }

    /// Lets the next change of the state be reported. Call it before the state is read.
    pub fn handled(&self) {
        self.observed.get().into_iter().for_each(Observed::handled);
    }
}
