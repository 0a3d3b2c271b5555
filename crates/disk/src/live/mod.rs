//! Work on the image of a disk that is being served: what a control thread asks for while a guest
//! goes on.
//!
//! ```text
//!   snapshot   the image stays as it is from now on; what is written goes into a new overlay
//!   commit     what the topmost image has goes into the one below it, and the topmost one stays, empty
//!   stream     what the images below have is copied into the topmost one, which then stands alone
//! ```
//! In: calls, from a thread that is no reactor: they block it until the work is done. Out: the
//! disk, served from another chain of images, or an error, and the disk as it was. What must hold:
//! a guest sees the same disk before and after, whatever fails in between, also at a power cut; one
//! work at a time on a disk; requests are held back only while images are exchanged
//! ([`crate::quiesce`]), never while data are copied.

mod commit;
mod snapshot;
mod stream;

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};

use blockyard_image::tools::Progress;
use blockyard_image::{Chain, ChainError, ImageError, Store};
use blockyard_ring::{Executor, Handle};

use crate::backend::Source;
use crate::disk::Disk;
use crate::local_disk::LocalDisk;
use crate::quiesced::QuiesceError;

pub use snapshot::SnapshotOptions;

/// A work on a disk, for who wants to know how far it is, or to end it: shared with the thread that
/// does it.
#[derive(Clone, Debug, Default)]
pub struct Work {
    progress: Arc<Progress>,
    cancelled: Arc<AtomicBool>,
}

impl Work {
    /// How much of the disk is done, in bytes.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Ends it soon, with [`Why::Cancelled`]; the disk stays as it was. Once the images are being
    /// exchanged it is too late.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    fn go_on(&self, disk: &Disk) -> Result<(), Why> {
        match () {
            _ if disk.has_ended() => Err(Why::Ended),
            _ if self.cancelled.load(Ordering::SeqCst) => Err(Why::Cancelled),
            _ => still_good(disk),
        }
    }

    /// The same for work on images, which has no words of its own for it.
    fn check(&self, disk: &Disk) -> Result<(), ImageError> {
        self.go_on(disk).map_err(|why| ImageError::refused("work on the disk", why.to_string()))
    }
}

/// Why a work was not done: which disk, what, and why.
#[derive(Debug, thiserror::Error)]
#[error("disk {disk}: {work}: {why}")]
pub struct WorkError {
    pub disk: String,
    pub work: &'static str,
    pub why: Box<Why>,
}

#[derive(Debug, thiserror::Error)]
pub enum Why {
    #[error("another snapshot, commit or stream of this disk is under way")]
    Busy,
    #[error("the disk is being closed")]
    Ended,
    #[error("it was cancelled")]
    Cancelled,
    #[error("{0}")]
    Poisoned(String),
    #[error("{0}")]
    NotPossible(String),
    #[error(transparent)]
    Quiesce(#[from] QuiesceError),
    #[error(transparent)]
    Image(#[from] ChainError),
}

fn still_good(disk: &Disk) -> Result<(), Why> {
    disk.poisoned().map_or(Ok(()), |why| Err(Why::Poisoned(why.into())))
}

impl Disk {
    /// Runs a work on this thread, alone on this disk.
    fn work<F: Future<Output = Result<(), Why>> + 'static>(
        self: &Arc<Self>,
        name: &'static str,
        work: impl FnOnce(Worker) -> F,
    ) -> Result<(), WorkError> {
        let error = |why| WorkError { disk: self.name().into(), work: name, why: Box::new(why) };
        let _turn = self.turn().map_err(error)?;
        still_good(self).map_err(error)?;
        if self.options().read_only {
            return Err(error(Why::NotPossible("the disk is read-only".into())));
        }
        let no_ring = |e| error(Why::Image(ChainError::Executor(e)));
        let executor = Executor::new().map_err(no_ring)?;
        let worker = Worker { disk: self.clone(), handle: executor.handle().clone() };
        executor.block_on(work(worker)).map_err(no_ring)?.map_err(error)?;
        let chain = self.source().chain().map(|chain| chain.describe()).unwrap_or_default();
        tracing::info!(disk = self.name(), "{name} done: serving {chain}");
        Ok(())
    }

    fn turn(&self) -> Result<MutexGuard<'_, ()>, Why> {
        let turn = match self.work.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(Why::Busy),
            Err(TryLockError::Poisoned(e)) => PoisonError::into_inner(e),
            Ok(turn) => turn,
        };
        // Looked at behind the lock: whoever ends the disk sets this first, and then waits for the
        // lock.
        if self.has_ended() { Err(Why::Ended) } else { Ok(turn) }
    }
}

/// The thread that does the work: a reactor of its own, beside those that serve the disk.
#[derive(Clone)]
struct Worker {
    disk: Arc<Disk>,
    handle: Handle,
}

impl Worker {
    /// The disk's images.
    fn chain(&self) -> Result<Arc<Chain>, Why> {
        match self.disk.source() {
            Source::Chain(chain) => Ok(chain),
            Source::File(file) => Ok(Arc::new(Chain::of_raw(&file))),
            Source::Gone { why, .. } => Err(Why::Poisoned(why)),
            Source::Null { .. } | Source::Delay { .. } | Source::Ram(_) => {
                Err(Why::NotPossible("the disk has no image".into()))
            }
        }
    }

    /// The disk on this thread; no guest's requests come here, and it is not asked when the gate is
    /// closed.
    fn local_disk(&self, source: &Source) -> Result<Rc<LocalDisk<Store>>, Why> {
        let local_disk = LocalDisk::apart(&self.handle, &self.disk, source);
        Ok(Rc::new(local_disk.map_err(|e| Why::Quiesce(QuiesceError::Reactor(e)))?))
    }

    /// Makes durable what the guests have written; a failure poisons the disk, as that of a guest's
    /// own flush does.
    async fn settle(&self, local_disk: &LocalDisk<Store>) -> Result<(), Why> {
        let settled = local_disk.settle().await;
        still_good(&self.disk)?;
        settled.map_err(|_| Why::NotPossible("a flush failed".into()))
    }
}
