//! Commit: what the topmost image holds goes into the one below it, and the topmost one, empty,
//! stays on top.
//!
//! ```text
//!   mark what is written ─► copy all ─► copy what was written meanwhile, until little is left
//!      (gate)                             ─► copy the rest ─► flush below ─► empty the top ─► open both anew
//!                                              └──────────────── behind the gate ───────────────────┘
//! ```
//! What must hold, also at a power cut: the topmost image hides what was changed below, and is
//! emptied only when all that it had is durable there. Whatever fails before leaves the disk as it
//! was. Reactors read the image below by what they knew of it before the commit: what that freed is
//! kept for them until they have opened it anew.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_image::{
    Chain, ChainError, CopyDown, Image, ImageError, Store, WritableBacking, join_all,
};

use super::{Why, Work, WorkError, Worker, still_good};
use crate::backend::Source;
use crate::dirty::DirtyMap;
use crate::disk::Disk;
use crate::local_disk::LocalDisk;
use crate::quiesced::{QuiesceError, QuiescedDisk};

/// Passes over what was written meanwhile, while the guest goes on; and how many bytes may be left
/// for behind the gate.
const PASSES: usize = 6;
const LITTLE: u64 = 4 << 20;
/// A guest that writes faster than can be copied is held back for so long at a time, with pauses
/// that become shorter.
const HELD_BACK: Duration = Duration::from_millis(50);
/// Copies of what was written meanwhile in flight at a time.
const AT_A_TIME: usize = 8;

impl Disk {
    /// See the module's page. Nobody else may have the image below open: other overlays on it would
    /// see it change.
    pub fn commit(self: &Arc<Self>, work: &Work) -> Result<(), WorkError> {
        let work = work.clone();
        self.work("commit", |worker| worker.commit(work))
    }
}

/// What one commit works with.
struct Commit<'a> {
    worker: &'a Worker,
    work: &'a Work,
    /// The disk as it is served meanwhile, and as this thread reads it.
    chain: Arc<Chain>,
    local_disk: Rc<LocalDisk<Store>>,
    from: Image<Store>,
    into: &'a Image<Store>,
    dirty: Arc<DirtyMap>,
}

impl Worker {
    async fn commit(self, work: Work) -> Result<(), Why> {
        let backing = self.chain()?.open_backing(&self.handle).await?;
        let into = backing.image(&self.handle)?;
        let hold = into.hold_freed();
        let dirty = Arc::new(DirtyMap::new(self.disk.capacity()));
        // Opened for writing, the image below may have been mended: who reads it looks at it anew.
        let chain = self.chain()?.read_again(&self.handle, 1..2).await?;
        let from = chain.image(&self.handle).map_err(|e| Why::Quiesce(QuiesceError::Reactor(e)))?;
        let source = Source::Chain(chain.clone());
        let local_disk = self.local_disk(&source)?;
        self.disk.quiesce("commit begins")?.exchange(&source, Some(&dirty))?;
        let commit =
            Commit { worker: &self, work: &work, local_disk, chain, from, into: &into, dirty };
        let done = commit.run().await;
        drop(commit);
        drop(hold);
        self.close_backing(&backing, &into, done.read_anew).await;
        done.result
    }

    /// The image below is left as it is to be found. What fails here costs space only: clusters
    /// that nothing names.
    async fn close_backing(&self, backing: &WritableBacking, into: &Image<Store>, read_anew: bool) {
        if !read_anew {
            return;
        }
        if let Err(e) = into.close().await {
            let path = backing.chain().options().path.display();
            tracing::warn!(disk = self.disk.name(), "commit: closing image {path}: {e}");
        }
    }
}

/// How a commit has ended.
struct Done {
    result: Result<(), Why>,
    /// All reactors have looked at the image below anew, so that what was freed there may be used.
    read_anew: bool,
}

impl Commit<'_> {
    async fn run(&self) -> Done {
        let quiesced = match self.copy().await {
            Ok(quiesced) => quiesced,
            Err(why) => return self.give_up(why, None).await,
        };
        if let Err(why) = self.make_durable().await {
            return self.give_up(why, Some(quiesced)).await;
        }
        let (handle, disk) = (&self.worker.handle, &self.worker.disk);
        let emptied = self.chain.empty_top(handle).await;
        let opened = match self.chain.read_again(handle, 0..2).await {
            Ok(chain) => quiesced.exchange(&Source::Chain(chain), None).map_err(Why::from),
            Err(e) => Err(e.into()),
        };
        if let Err(why) = &opened {
            // What reactors know of the topmost image is not true any more.
            tracing::error!(disk = disk.name(), "commit: the image cannot be opened again: {why}");
            quiesced.lose(&format!("after a commit the image could not be opened again: {why}"));
        }
        Done { read_anew: opened.is_ok(), result: opened.and(emptied.map_err(Why::from)) }
    }

    /// Copies everything; gives the closed gate, behind which nothing is left to be copied.
    async fn copy(&self) -> Result<QuiescedDisk, Why> {
        self.copy_down(0, self.worker.disk.capacity()).await?;
        for _ in 0..PASSES {
            if self.dirty.bytes() <= LITTLE {
                break;
            }
            self.copy_dirty(None).await?;
        }
        // So that little is left to be written behind the gate.
        self.flush_lower().await?;
        self.worker.settle(&self.local_disk).await?;
        let mut pause = HELD_BACK;
        loop {
            let quiesced = self.worker.disk.quiesce("commit")?;
            self.copy_dirty(Some(Instant::now() + HELD_BACK)).await?;
            if self.dirty.bytes() == 0 {
                return Ok(quiesced);
            }
            drop(quiesced);
            self.worker.handle.sleep(pause).await;
            pause /= 2;
        }
    }

    async fn copy_down(&self, at: u64, len: u64) -> Result<(), Why> {
        let copy = CopyDown::new(at..at + len, 1, self.work.progress.clone());
        let copied =
            copy.run(&self.from, self.into, async |_| self.work.check(&self.worker.disk)).await;
        self.work.go_on(&self.worker.disk)?;
        Ok(copied.map_err(|error| self.wrong(error))?)
    }

    /// One pass over what was written since the last one; or a part of it, if that takes longer
    /// than `until`.
    async fn copy_dirty(&self, until: Option<Instant>) -> Result<(), Why> {
        let mut next = 0;
        let parts = std::iter::from_fn(|| {
            if until.is_some_and(|until| Instant::now() >= until) {
                return None;
            }
            let (at, len) = self.dirty.take(next)?;
            next = at + len;
            Some(async move { self.copy_down(at, len).await })
        });
        join_all(AT_A_TIME, parts).await
    }

    fn wrong(&self, error: ImageError) -> ChainError {
        ChainError::Image { path: self.chain.options().path.clone(), error }
    }

    async fn flush_lower(&self) -> Result<(), Why> {
        let flushed = self.into.flush().await;
        Ok(flushed
            .map_err(|e| self.wrong(ImageError::io("image below", None, "flushing it", e)))?)
    }

    /// Behind the gate: first what is below, then what lies on top, so that either alone has
    /// everything.
    async fn make_durable(&self) -> Result<(), Why> {
        self.work.go_on(&self.worker.disk)?;
        self.flush_lower().await?;
        self.worker.settle(&self.local_disk).await?;
        if self.local_disk.close().await.is_err() {
            still_good(&self.worker.disk)?;
        }
        Ok(())
    }

    /// The disk goes on as it was: what was copied is hidden by the topmost image.
    async fn give_up(&self, why: Why, quiesced: Option<QuiescedDisk>) -> Done {
        let name = self.worker.disk.name();
        let exchanged = async {
            self.flush_lower().await?;
            let chain = self.chain.read_again(&self.worker.handle, 1..2).await?;
            let quiesced = quiesced.map_or_else(|| self.worker.disk.quiesce("commit ends"), Ok)?;
            Ok::<_, Why>(quiesced.exchange(&Source::Chain(chain), None)?)
        };
        let exchanged = exchanged.await;
        if let Err(e) = &exchanged {
            tracing::warn!(
                disk = name,
                "commit: looking at the image below anew, after it was given up: {e}"
            );
        }
        Done { result: Err(why), read_anew: exchanged.is_ok() }
    }
}
