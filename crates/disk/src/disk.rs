//! A disk: what all reactors share of it.
//!
//! It is read on the way of a request, and written only when something goes wrong or a person
//! changes it, and at flushes. What must hold: after a failed flush no write is acknowledged; its
//! image changes only while nothing is in flight (see [`crate::gate`]).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use blockyard_image::CacheMode;
use blockyard_ring::Remote;
use blockyard_sched::{Knobs, Share};

use crate::backend::Source;
use crate::dirty::DirtyMap;
use crate::filter::Filter;
use crate::flush::FlushGroup;
use crate::once_a_second::OnceASecond;
use crate::request::Failure;

/// Bytes in the page cache that a disk with neighbours may leave to be written back: some
/// milliseconds of a device's time.
const MOST_DIRTY: u64 = 8 << 20;

/// What a disk is set up with.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    pub name: String,
    /// What the guest reads as the disk's serial number: at most 20 bytes.
    pub serial: String,
    pub read_only: bool,
    pub cache: CacheMode,
    pub filters: Vec<Filter>,
}

/// One opened disk.
#[derive(Debug)]
pub struct Disk {
    options: DiskOptions,
    /// Of the device that it lies on, and what limits it.
    share: Arc<Share>,
    capacity: AtomicU64,
    pub(crate) flushes: FlushGroup,
    /// Writes go through the host's page cache, which may lose them later.
    pub(crate) cached: bool,
    /// The same of the topmost image of a chain.
    dirties: bool,
    /// It is a block device.
    pub(crate) on_device: bool,
    /// A write was acknowledged that no sync has covered yet.
    pub(crate) unsynced: AtomicBool,
    /// Bytes that were written to the page cache since the last sync.
    pub(crate) dirty: AtomicU64,
    /// Why nothing is written any more: see [`Failure::Poisoned`].
    poisoned: OnceLock<String>,
    /// For control threads, and for reactors when they open the disk: never on the way of a
    /// request.
    serving_state: Mutex<ServingState>,
    /// Whoever works on the image of the disk while it is served: one at a time.
    pub(crate) work: Mutex<()>,
    /// The disk is about to be closed: no work begins, and what is under way ends.
    ended: AtomicBool,
    /// The longest time for which requests were held back, in microseconds.
    held_back: AtomicU64,
    /// Lines about requests that failed.
    pub(crate) failures_told: OnceASecond,
}

/// How a disk is served at the moment.
#[derive(Debug)]
pub(crate) struct ServingState {
    pub source: Source,
    /// What notes where is written, while somebody wants to know.
    pub dirty: Option<Arc<DirtyMap>>,
    /// The reactors that have the disk open.
    pub reactors: Vec<Remote>,
    /// Its gate is closed: a reactor that opens it now lets no request begin.
    pub closed: bool,
}

impl Disk {
    /// A disk that shares nothing and has no limits.
    pub fn new(options: DiskOptions, source: Source) -> Self {
        let share = Arc::new(Share::new(None, None, &Knobs::default()));
        Disk::sharing(options, source, share)
    }

    pub fn sharing(options: DiskOptions, source: Source, share: Arc<Share>) -> Self {
        let capacity = AtomicU64::new(source.capacity());
        let dirties = source
            .chain()
            .map_or_else(|| source.file(), |chain| Some(&chain.top().file))
            .is_some_and(|f| !f.direct());
        let on_device = source.file().is_some_and(|file| file.is_device());
        let cached = source.file().is_some_and(|file| !file.direct());
        let serving_state =
            Mutex::new(ServingState { source, dirty: None, reactors: Vec::new(), closed: false });
        let (flushes, unsynced, dirty, poisoned, work, ended, held_back, failures_told) =
            Default::default();
        Disk {
            options,
            share,
            capacity,
            flushes,
            cached,
            unsynced,
            dirties,
            on_device,
            dirty,
            poisoned,
            serving_state,
            work,
            ended,
            held_back,
            failures_told,
        }
    }

    pub fn options(&self) -> &DiskOptions {
        &self.options
    }

    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Its share of the device, and its limits: may be changed at any time.
    pub fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// What its bytes lie on at the moment.
    pub fn source(&self) -> Source {
        self.serving_state().source.clone()
    }

    pub(crate) fn serving_state(&self) -> MutexGuard<'_, ServingState> {
        self.serving_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the end of the disk, from a thread that is no reactor: no work on its image begins any
    /// more, and what is under way is cancelled and waited for.
    pub fn end_work(&self) {
        self.ended.store(true, Ordering::SeqCst);
        drop(self.work.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// The longest time for which requests were held back while the disk's image was exchanged.
    pub fn longest_held_back(&self) -> Duration {
        Duration::from_micros(self.held_back.load(Ordering::Relaxed))
    }

    pub(crate) fn note_held_back(&self, time: Duration) {
        self.held_back.fetch_max(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// Bytes a guest may address.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Looks at the image's size again; answers the new capacity if it changed.
    pub fn refresh_capacity(&self) -> io::Result<Option<u64>> {
        let source = self.source();
        if let Some(file) = source.file() {
            file.refresh_size()?;
        }
        let new = source.capacity();
        Ok((self.capacity.swap(new, Ordering::Relaxed) != new).then_some(new))
    }

    pub fn poisoned(&self) -> Option<&str> {
        self.poisoned.get().map(String::as_str)
    }

    /// Notes an acknowledged write. Read far more often than written: reactors do not fight over
    /// it.
    #[inline]
    pub(crate) fn note_unsynced(&self) {
        if !self.unsynced.load(Ordering::SeqCst) {
            self.unsynced.store(true, Ordering::SeqCst);
        }
    }

    /// Notes what was written to the page cache. True: so much that the disk is to sync it, for it
    /// has neighbours, and what the kernel writes back later comes before theirs.
    #[inline]
    pub(crate) fn dirties(&self, bytes: u64) -> bool {
        self.dirties
            && self.share.has_neighbours()
            && self.dirty.fetch_add(bytes, Ordering::Relaxed) + bytes > MOST_DIRTY
    }

    /// Whether a durable write past the page cache that failed may have taken other writes with it,
    /// unseen by the next sync: it ends in a flush of the device's cache, and the device tells of a
    /// lost one only once.
    pub(crate) fn taken_along(&self, error: &io::Error) -> bool {
        match Failure::of(error) {
            // Refused before anything was done.
            _ if error.kind() == io::ErrorKind::InvalidInput => false,
            Failure::Unsupported | Failure::NoSpace => false,
            _ => self.unsynced.load(Ordering::SeqCst),
        }
    }

    pub(crate) fn poison(&self, what: &str, error: &io::Error) {
        let reason = format!(
            "{what} failed ({error}): writes acknowledged since the last good flush may be lost, so this disk takes no more \
             writes until its image is opened anew"
        );
        if self.poisoned.set(reason).is_ok() {
            tracing::error!(disk = self.name(), "{}", self.poisoned().unwrap_or_default());
        }
    }
}
