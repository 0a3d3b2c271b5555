//! Commit: copies the topmost image's data into its backing image. The topmost image stays, empty.
//!
//! ```text
//!   record writes ─► copy all ─► copy what was written meanwhile, until little is left
//!      ─► quiesce: copy the rest ─► flush the backing image ─► empty the topmost one
//!                  ─► open both again ─► resume
//! ```
//!
//! What must hold, also at a power cut: the topmost image hides the changes below it. It is emptied
//! only when all its data are durable in the backing image. A failure before that leaves the disk
//! as it was. Until reactors have opened the backing image again, they read it with the metadata
//! from before the commit. So clusters that the commit frees stay reserved until then. If reactors
//! could not open it again, the next commit first lets them do so, because it releases the clusters
//! that no entry names any more.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_image::{Chain, ChainError, CopyDown, Image, ImageError, WritableBacking, join_all};

use super::{Kind, Unsuitable, Why, Work, WorkError, Worker};
use crate::backend::Source;
use crate::dirty::DirtyMap;
use crate::disk::Disk;
use crate::local_disk::LocalDisk;
use crate::poison::LostImage;
use crate::quiesce_error::QuiesceError;
use crate::quiesced::QuiescedDisk;
use crate::tracker::Tracker;

/// Maximum number of passes that copy, while the guest continues, what it wrote during the pass
/// before.
const MAX_PASSES: usize = 6;
/// Number of bytes that may be left to copy while the disk is quiesced.
const FEW_BYTES: u64 = 4 << 20;
/// Time of one quiesce. A guest that writes faster than the copy is held back repeatedly, with
/// pauses that become shorter.
const QUIESCE_TIME: Duration = Duration::from_millis(50);
/// Number of concurrent copies of ranges that the guest wrote during the commit.
const CONCURRENT_COPIES: usize = 8;

impl Disk {
    /// Commits the topmost image; see the module documentation. No other overlay may use the
    /// backing image, because its contents change.
    pub fn commit(self: &Arc<Self>, work: &Work) -> Result<(), WorkError> {
        self.commit_among(work, || Some(Vec::new()))
    }

    /// Like [`Disk::commit`]. `others` returns the other disks of the caller. None fails the
    /// commit. It also fails if it would change one of them that has no image open
    /// ([`Source::Inactive`]): no lock shows that such a disk needs the backing image.
    pub fn commit_among(
        self: &Arc<Self>,
        work: &Work,
        others: impl FnOnce() -> Option<Vec<Arc<Disk>>> + 'static,
    ) -> Result<(), WorkError> {
        let work = work.clone();
        self.work(Kind::for_writable("commit"), |worker| worker.commit(work, others))
    }
}

/// State of one commit.
struct Commit<'a> {
    worker: &'a Worker,
    work: &'a Work,
    /// The disk's chain during the commit, the disk on this thread, and its topmost image.
    chain: Arc<Chain>,
    local_disk: Rc<LocalDisk>,
    from: Image,
    into: &'a Image,
    dirty: Arc<DirtyMap>,
}

impl Worker {
    pub(super) async fn commit(
        self,
        work: Work,
        others: impl FnOnce() -> Option<Vec<Arc<Disk>>>,
    ) -> Result<(), Why> {
        self.refresh_backing().await?;
        let backing = self.chain()?.open_backing(&self.handle).await?;
        // This process has the backing image alone now. No disk can open it before the end of the
        // commit, so a disk that has it is inactive.
        self.check_others(&others().ok_or(Why::UnknownDisks)?)?;
        let into = backing.image(&self.handle)?;
        let hold = into.hold_freed();
        // The disk may have adopted another size than the image has.
        let dirty = Arc::new(DirtyMap::new(self.chain()?.size()));
        // Opening the backing image for writing may have repaired it, so readers must open it
        // again.
        let chain = self.chain()?.read_again(&self.handle, 1..2).await?;
        let from = chain.image(&self.handle).map_err(|e| Why::Quiesce(QuiesceError::Reactor(e)))?;
        let source = Source::Chain(chain.clone());
        let local_disk = self.local_disk(&source)?;
        let tracker = Tracker::Dirty(dirty.clone());
        let quiesced = self.disk.quiesce_on(&self.handle, "commit begins").await?;
        quiesced.exchange(&source, Some(&tracker)).await?;
        drop(quiesced);
        let commit =
            Commit { worker: &self, work: &work, local_disk, chain, from, into: &into, dirty };
        let done = commit.run().await;
        drop(commit);
        drop(hold);
        self.close_backing(&backing, &into, done.reopened).await;
        done.result
    }

    /// Returns an error if the commit would change one of these disks.
    fn check_others(&self, others: &[Arc<Disk>]) -> Result<(), Why> {
        let chain = self.chain()?;
        let changes = |other: &&Arc<Disk>| {
            !Arc::ptr_eq(&self.disk, other) && other.source().layer_files().show_backing_of(&chain)
        };
        let Some(other) = others.iter().find(changes) else { return Ok(()) };
        let (other, image) = (other.name().into(), chain.layers()[1].file.path().into());
        Err(Unsuitable::Needed { other, image }.into())
    }

    /// Lets all reactors read the metadata of the backing image again, if they could not after a
    /// commit that failed.
    async fn refresh_backing(&self) -> Result<(), Why> {
        if !self.disk.has_stale_backing.load(Ordering::SeqCst) {
            return Ok(());
        }
        let chain = self.chain()?;
        let chain = chain.read_again(&self.handle, 1..2).await?;
        let quiesced = self.disk.quiesce_on(&self.handle, "commit begins").await?;
        quiesced.exchange(&Source::Chain(chain), None).await?;
        drop(quiesced);
        self.disk.has_stale_backing.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Closes the backing image. A failure here only wastes space: clusters that no entry refers
    /// to.
    async fn close_backing(&self, backing: &WritableBacking, into: &Image, reopened: bool) {
        if !reopened {
            return;
        }
        if let Err(e) = into.close().await {
            let path = backing.chain().options().path.display();
            tracing::warn!(disk = self.disk.name(), "commit: closing image {path}: {e}");
        }
    }
}

/// Outcome of a commit.
struct Done {
    result: Result<(), Why>,
    /// Whether all reactors have opened the backing image again, so that clusters freed in it may
    /// be used.
    reopened: bool,
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
            Ok(chain) => quiesced.exchange(&Source::Chain(chain), None).await.map_err(Why::from),
            Err(e) => Err(e.into()),
        };
        if let Err(why) = &opened {
            // The reactors' metadata of the topmost image is no longer valid.
            tracing::error!(disk = disk.name(), "commit: the image cannot be opened again: {why}");
            quiesced.lose(LostImage { work: "commit", why: why.to_string() }).await;
        }
        Done { reopened: opened.is_ok(), result: opened.and(emptied.map_err(Why::from)) }
    }

    /// Copies everything. Returns the quiesced disk, when nothing is left to be copied.
    async fn copy(&self) -> Result<QuiescedDisk, Why> {
        self.copy_down(0, self.chain.size()).await?;
        for _ in 0..MAX_PASSES {
            if self.dirty.bytes() <= FEW_BYTES {
                break;
            }
            self.copy_dirty(None).await?;
        }
        // A flush now leaves little for the flush during the quiesce.
        self.flush_backing().await?;
        self.worker.flush(&self.local_disk).await?;
        let mut pause = QUIESCE_TIME;
        loop {
            let quiesced = self.quiesce("commit").await?;
            let until = self.worker.handle.read_clock() + QUIESCE_TIME;
            self.copy_dirty(Some(until)).await?;
            if self.dirty.bytes() == 0 {
                return Ok(quiesced);
            }
            drop(quiesced);
            self.worker.handle.sleep(pause).await;
            pause /= 2;
        }
    }

    async fn quiesce(&self, purpose: &'static str) -> Result<QuiescedDisk, QuiesceError> {
        self.worker.disk.quiesce_on(&self.worker.handle, purpose).await
    }

    async fn copy_down(&self, at: u64, len: u64) -> Result<(), Why> {
        let copy = CopyDown::new(at..at + len, 1, self.work.progress.clone());
        let copied =
            copy.run(&self.from, self.into, async |_| self.work.check(&self.worker.disk)).await;
        self.work.check_cancelled(&self.worker.disk)?;
        Ok(copied.map_err(|error| self.wrong(error))?)
    }

    /// Copies what was written since the last pass, or a part of it until the time `until`.
    async fn copy_dirty(&self, until: Option<Instant>) -> Result<(), Why> {
        let mut next = 0;
        let parts = std::iter::from_fn(|| {
            if until.is_some_and(|until| self.worker.handle.read_clock() >= until) {
                return None;
            }
            let (at, len) = self.dirty.take(next)?;
            next = at + len;
            Some(async move { self.copy_down(at, len).await })
        });
        join_all(CONCURRENT_COPIES, parts).await
    }

    fn wrong(&self, error: ImageError) -> ChainError {
        ChainError::Image { path: self.chain.options().path.clone(), error }
    }

    async fn flush_backing(&self) -> Result<(), Why> {
        let flushed = self.into.flush().await;
        Ok(flushed
            .map_err(|e| self.wrong(ImageError::io("backing image", None, "flushing it", e)))?)
    }

    /// Makes both images durable during the quiesce: first the backing image, then the topmost one.
    async fn make_durable(&self) -> Result<(), Why> {
        self.work.check_cancelled(&self.worker.disk)?;
        self.flush_backing().await?;
        self.worker.flush(&self.local_disk).await?;
        self.worker.close_image(&self.local_disk).await
    }

    /// Ends a failed commit. The disk stays as it was, because the topmost image hides what was
    /// copied.
    async fn give_up(&self, why: Why, quiesced: Option<QuiescedDisk>) -> Done {
        let name = self.worker.disk.name();
        let exchanged = async {
            self.flush_backing().await?;
            let chain = self.chain.read_again(&self.worker.handle, 1..2).await?;
            let quiesced = match quiesced {
                Some(quiesced) => quiesced,
                None => self.quiesce("commit ends").await?,
            };
            Ok::<_, Why>(quiesced.exchange(&Source::Chain(chain), None).await?)
        };
        let exchanged = exchanged.await;
        if let Err(e) = &exchanged {
            self.worker.disk.has_stale_backing.store(true, Ordering::SeqCst);
            tracing::warn!(
                disk = name,
                "commit failed, and the disk's backing image cannot be opened again: {e}"
            );
        }
        Done { result: Err(why), reopened: exchanged.is_ok() }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_image::tools::{NewOverlay, OverlayBase};
    use blockyard_image::{CacheMode, ChainOptions, Format};

    use super::*;
    use crate::DiskOptions;

    /// No lock shows that an inactive disk needs the backing image.
    #[test]
    fn a_commit_does_not_change_an_inactive_disk() {
        let folder = std::env::temp_dir().join(format!("blockyard-commit-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("base.raw"), vec![7; 1 << 20]).unwrap();
        for (name, base, format) in [
            ("a", "base.raw", Format::Raw),
            ("beside", "base.raw", Format::Raw),
            ("over", "a", Format::Qcow2),
        ] {
            let (path, nbd) = (folder.join(base), Default::default());
            let base = OverlayBase { path, format, size: 1 << 20, nbd };
            let mut overlay = NewOverlay::create(&folder.join(name), &base, &[]).unwrap();
            overlay.publish().unwrap();
            overlay.keep();
        }
        let options = |name: &str| {
            let image = ChainOptions { format: Some(Format::Qcow2), ..ChainOptions::new("") };
            ChainOptions { path: folder.join(name), ..image }
        };
        let disk = |name: &str, options: &ChainOptions| {
            let source = Source::open(options).unwrap();
            let (serial, filters, on_enospc) = Default::default();
            let (read_only, cache) = (false, CacheMode::None);
            let name = name.into();
            Disk::new(DiskOptions { name, serial, read_only, cache, filters, on_enospc }, source)
        };
        let inactive = |name: &str| {
            let seen = ChainOptions { read_only: true, force_share: true, ..options(name) };
            Arc::new(disk(name, &seen).until_activated(options(name)))
        };
        let disks = [inactive("beside"), inactive("over")];
        let a = Arc::new(disk("a", &options("a")));
        let commit = |others: &[&Arc<Disk>]| {
            let others: Vec<_> = others.iter().map(|disk| (*disk).clone()).collect();
            a.commit_among(&Work::default(), || Some(others))
        };
        let why = commit(&[&a, &disks[1], &disks[0]]).unwrap_err().to_string();
        assert!(why.contains("disk \"beside\" needs image") && why.contains("base.raw"), "{why}");
        // The image that is committed hides the change from this disk.
        commit(&[&a, &disks[1]]).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
