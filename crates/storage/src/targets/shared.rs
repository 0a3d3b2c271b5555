//! What all reactors share of a target's disk, and the questions to the target's thread.

use std::fmt::Display;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockyard_ring::semaphore::Semaphore;

use super::ahead::Ahead;
use super::ask::Ask;
use super::cache::Cache;
use super::in_use::InUse;
use super::map::{Boxed, Discard, Extent, Question};
use super::patience::Patience;
use super::shape::Shape;
use super::worker::{Living, Worker};
use crate::image_file::ImageFile;
use crate::range_lock::RangeLock;
use crate::storage::Capabilities;
use crate::{Geometry, SECTOR};

/// Bytes of all copies of a device's disk.
pub(super) const COPIED: u64 = 16 << 20;

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

/// Changes of the map's table that are not durable.
#[derive(Debug, Default)]
pub(super) struct Moved {
    /// Parts that were placed anew.
    pub(super) list: Vec<Range<u64>>,
    /// Whether the map has freed or invalidated parts since the last flush.
    pub(super) is_changed: bool,
    /// Whether a flush has taken changes, and has not succeeded.
    pub(super) is_flushing: bool,
}

impl Moved {
    /// Returns whether only a flush of the map makes a write durable.
    pub(super) fn is_pending(&self) -> bool {
        self.is_flushing || self.is_changed || !self.list.is_empty()
    }

    /// Returns what a flush makes durable: new places, and whether there are other changes.
    pub(super) fn take(&mut self) -> (Vec<Range<u64>>, bool) {
        self.is_flushing = self.is_pending();
        (std::mem::take(&mut self.list), std::mem::take(&mut self.is_changed))
    }
}

/// Why acknowledged writes may be lost.
#[derive(Clone, Debug, thiserror::Error)]
#[error("an earlier {call} failed: {why}")]
struct LostError {
    call: String,
    why: String,
}

/// What all reactors share of a target's disk.
pub(super) struct Core {
    pub(super) name: String,
    pub(super) size: AtomicU64,
    pub(super) granule: u64,
    /// What offsets in data files must be multiples of.
    pub(super) unit: u64,
    pub(super) cache: Cache,
    /// For each data file: what is allocated ahead in it.
    pub(super) ahead: Box<[Ahead]>,
    /// Held by the request that asks about a range.
    pub(super) misses_lock: RangeLock,
    /// Held by a discard of the range. Requests that have to ask wait for it.
    pub(super) freeing: RangeLock,
    /// Whether the map has no answer to discards.
    pub(super) frees_nothing: AtomicBool,
    pub(super) in_use: InUse,
    pub(super) settling: Semaphore,
    pub(super) flushing: Semaphore,
    moved: Mutex<Moved>,
    pub(super) copies: Semaphore,
    pub(super) geometry: Geometry,
    pub(super) capabilities: Capabilities,
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    noted: AtomicU32,
    lost: OnceLock<LostError>,
}

impl Core {
    pub(super) fn new(
        name: String,
        shape: Shape,
        unit: u64,
        data: &[ImageFile],
        is_map: bool,
    ) -> Self {
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
        Core::with(name, shape, unit, data.len(), geometry, capabilities)
    }

    pub(super) fn with(
        name: String,
        shape: Shape,
        unit: u64,
        files: usize,
        geometry: Geometry,
        capabilities: Capabilities,
    ) -> Self {
        let (misses_lock, in_use, moved, hits, misses, noted, lost) = Default::default();
        let (freeing, frees_nothing) = Default::default();
        Core {
            name,
            size: shape.size.into(),
            granule: shape.granule,
            unit,
            cache: Cache::new(),
            ahead: (0..files).map(|_| Ahead::new()).collect(),
            misses_lock,
            freeing,
            frees_nothing,
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

    /// Forgets where whole granules lie, except new places that are not durable. Then waits for
    /// the requests that may still use these answers.
    pub(super) async fn let_go(&self, whole: &Range<u64>) {
        let _one = self.settling.acquire().await;
        self.cache.forget(whole);
        self.in_use.settle().await;
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
    pub(super) fn lost(&self) -> Option<io::Error> {
        self.lost.get().cloned().map(io::Error::other)
    }

    pub(super) fn set_lost(&self, call: &str, error: &io::Error) {
        self.lost.get_or_init(|| LostError { call: call.into(), why: error.to_string() });
    }

    /// Logs the first fault of each kind.
    pub(super) fn note(&self, fault: Fault, what: impl Display) {
        let bit = 1 << fault as u32;
        if self.noted.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            tracing::error!("target {}: {what}; later faults like this are not logged", self.name);
        }
    }

    /// Returns whether the log has a fault of this kind.
    #[cfg(test)]
    pub(super) fn has_noted(&self, fault: Fault) -> bool {
        self.noted.load(Ordering::Relaxed) & (1 << fault as u32) != 0
    }

    pub(super) fn note_error(&self, error: &io::Error) {
        let fault = match error.kind() {
            io::ErrorKind::TimedOut => Fault::Late,
            _ => Fault::Error,
        };
        self.note(fault, format_args!("it fails: {error}"));
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
    pub(super) core: Arc<Core>,
    pub(super) worker: Arc<Worker>,
    pub(super) patience: Patience,
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

    async fn discard(&self, asked: Discard) -> io::Result<Option<Vec<Extent>>> {
        let work = move |target| -> Boxed<'static, io::Result<Option<Vec<Extent>>>> {
            Box::pin(async move {
                match target {
                    Living::Map(map) => map.discard(asked).await,
                    Living::Device(_) => Err(io::Error::other("it is no map")),
                }
            })
        };
        limited(&self.core, &self.worker, &self.patience, work).await
    }
}
