//! Snapshot, commit, stream, backup, resize and drain: work on a disk's images while guests use the
//! disk. A control thread starts it.
//!
//! ```text
//!   snapshot   keeps the present image as it is; later writes go to a new overlay
//!   commit     copies the topmost image's data into its backing image, and empties it
//!   stream     copies the data of all backing images into the topmost image, which then needs none
//!   backup     copies the disk, as it is at one moment, into a new image
//!   resize     grows the topmost image
//!   drain      holds requests while an operator works on the host's side
//!   resume     lets requests go on: those of a drain, and those that wait for space
//! ```
//!
//! In: calls from a thread that is no reactor. They block until the work is done. Out: the disk,
//! served from another chain of images, or an error and the disk as it was.
//!
//! What must hold: a guest sees the same disk before and after, except for its size, whatever
//! fails, also after a power cut. Only one such work runs on a disk at a time. The disk is quiesced
//! only to exchange images, for a commit also to begin and to copy the last changes, for a backup
//! to begin and to end, and for a resize to change the image, and as long as it is drained
//! ([`crate::quiesce`]).

mod activation;
mod backup;
mod commit;
#[cfg(test)]
mod cuts;
mod drain;
mod resize;
mod resume;
mod snapshot;
mod stream;
mod why;

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};

use blockyard_image::journal::CrashSafety;
use blockyard_image::tools::Progress;
use blockyard_image::{Chain, ChainError, ImageError};
use blockyard_ring::{Executor, Handle};

use crate::backend::Source;
use crate::disk::Disk;
use crate::local_disk::LocalDisk;
use crate::quiesce_error::QuiesceError;

pub use backup::BackupOptions;
pub use snapshot::{SnapshotOptions, StartRecord};
pub use why::{Unsuitable, Why, WorkError};

/// Progress and cancellation of a commit, stream or backup. The thread that does it and its
/// observers share this.
#[derive(Clone, Debug, Default)]
pub struct Work {
    progress: Arc<Progress>,
    cancelled: Arc<AtomicBool>,
}

impl Work {
    /// Returns the progress in bytes of the disk.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Ends the work soon with [`Why::Cancelled`]. The disk stays as it was. Has no effect once the
    /// images are being exchanged, or once a backup has its name.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    fn check_cancelled(&self, disk: &Disk) -> Result<(), Why> {
        match () {
            _ if disk.has_ended() => Err(Why::Ended),
            _ if self.cancelled.load(Ordering::SeqCst) => Err(Why::Cancelled),
            _ => check_not_poisoned(disk),
        }
    }

    /// Like `check_cancelled`, but returns an [`ImageError`], for callbacks of crate `image`.
    fn check(&self, disk: &Disk) -> Result<(), ImageError> {
        self.check_cancelled(disk).map_err(|why| {
            ImageError::refused("work on the disk", why.to_string()).with_source(why)
        })
    }
}

fn check_not_poisoned(disk: &Disk) -> Result<(), Why> {
    disk.poisoned().map_or(Ok(()), |why| Err(Why::Poisoned(why.clone())))
}

/// Returns an error if no image is open, or if it was lost.
fn check_open(source: &Source) -> Result<(), Why> {
    match source {
        Source::Gone { why, .. } => Err(Why::Lost(why.clone())),
        Source::Inactive(_) => Err(Unsuitable::Inactive.into()),
        _ => Ok(()),
    }
}

/// A kind of work on a disk.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// Whether the work is impossible on a read-only disk.
    is_for_writable: bool,
}

impl Kind {
    /// Returns a kind of work that a read-only disk refuses.
    const fn for_writable(name: &'static str) -> Self {
        Kind { name, is_for_writable: true }
    }

    /// Returns a kind of work that only reads the disk.
    const fn for_any(name: &'static str) -> Self {
        Kind { name, is_for_writable: false }
    }
}

impl Disk {
    /// Runs a snapshot, commit, stream or other work on this thread, with the disk's work lock
    /// held.
    fn work<F: Future<Output = Result<(), Why>> + 'static>(
        self: &Arc<Self>,
        kind: Kind,
        work: impl FnOnce(Worker) -> F,
    ) -> Result<(), WorkError> {
        let name = kind.name;
        let error = |why| WorkError { disk: self.name().into(), work: name, why: Box::new(why) };
        let _lock = self.begin_work().map_err(error)?;
        check_not_poisoned(self).map_err(error)?;
        if kind.is_for_writable && self.options().read_only {
            return Err(error(Unsuitable::ReadOnly.into()));
        }
        self.note_use();
        let no_ring = |e| error(Why::Image(ChainError::Executor(e)));
        let executor = Executor::new().map_err(no_ring)?;
        let worker = Worker { disk: self.clone(), handle: executor.handle().clone() };
        executor.block_on(work(worker)).map_err(no_ring)?.map_err(error)?;
        if let Some(chain) = self.source().chain() {
            tracing::info!(disk = self.name(), "{name} done: serving {}", chain.describe());
        }
        Ok(())
    }

    fn begin_work(&self) -> Result<MutexGuard<'_, ()>, Why> {
        let lock = match self.work.try_lock() {
            // [`Disk::end_work`] may hold the lock.
            Err(TryLockError::WouldBlock) if self.has_ended() => return Err(Why::Ended),
            Err(TryLockError::WouldBlock) => return Err(Why::busy(self)),
            Err(TryLockError::Poisoned(e)) => PoisonError::into_inner(e),
            Ok(lock) => lock,
        };
        // Check with the lock held: [`Disk::end_work`] sets the flag first, and then waits for the
        // lock.
        if self.has_ended() { Err(Why::Ended) } else { Ok(lock) }
    }
}

/// The thread that does the work. It is a reactor of its own, besides those that serve the disk.
#[derive(Clone)]
struct Worker {
    disk: Arc<Disk>,
    handle: Handle,
}

impl Worker {
    /// Returns the disk's chain of images.
    fn chain(&self) -> Result<Arc<Chain>, Why> {
        self.chain_below(CrashSafety::default(), Vec::new())
    }

    /// Like `chain`. `crash_safety` and `folders`: those of an overlay which is put on a raw image.
    fn chain_below(
        &self,
        crash_safety: CrashSafety,
        folders: Vec<PathBuf>,
    ) -> Result<Arc<Chain>, Why> {
        match self.disk.source() {
            Source::Chain(chain) => Ok(chain),
            Source::File(file) => Ok(Arc::new(Chain::of_raw(&file, crash_safety, folders))),
            source => {
                check_open(&source)?;
                Err(Unsuitable::NoImage.into())
            }
        }
    }

    /// Opens the disk on this thread. No guest's requests come to this thread, and a quiesce does
    /// not include the thread.
    fn local_disk(&self, source: &Source) -> Result<Rc<LocalDisk>, Why> {
        let local_disk = LocalDisk::apart(&self.handle, &self.disk, source);
        Ok(Rc::new(local_disk.map_err(|e| Why::Quiesce(QuiesceError::Reactor(e)))?))
    }

    /// Makes the guests' writes durable, also if the disk ignores the guests' own flushes. A
    /// failure poisons the disk, as that of a guest's own flush does.
    async fn flush(&self, local_disk: &LocalDisk) -> Result<(), Why> {
        let settled = local_disk.flush_always().await;
        check_not_poisoned(&self.disk)?;
        settled.map_err(Why::Flush)
    }

    /// Closes the image, during a quiesce.
    async fn close_image(&self, local_disk: &LocalDisk) -> Result<(), Why> {
        let closed = local_disk.close().await;
        check_not_poisoned(&self.disk)?;
        closed.map_err(Why::Close)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use blockyard_image::CacheMode;

    use super::*;
    use crate::DiskOptions;

    #[test]
    fn work_on_a_disk_that_ends_is_not_called_busy() {
        let (name, serial) = ("ending".into(), String::new());
        let (cache, filters) = (CacheMode::None, Vec::new());
        let options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache,
            filters,
            on_enospc: Default::default(),
        };
        let disk = Disk::new(options, Source::Null { size: 4096 });
        let held = disk.work.lock().unwrap();
        assert!(matches!(disk.begin_work(), Err(Why::Busy)));
        std::thread::scope(|scope| {
            let end = scope.spawn(|| disk.end_work());
            let begun = Instant::now();
            while !disk.has_ended() {
                assert!(begun.elapsed() < Duration::from_secs(60), "the end hangs");
                std::thread::yield_now();
            }
            assert!(matches!(disk.begin_work(), Err(Why::Ended)), "the lock is held");
            drop(held);
            end.join().unwrap();
        });
        assert!(matches!(disk.begin_work(), Err(Why::Ended)));
    }
}
