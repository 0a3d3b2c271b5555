//! Backup: copies a disk in use, as it is at one moment, into a new image.
//!
//! ```text
//!   create the target ─► flush ─► quiesce: flush, put the map on all reactors ─► resume
//!      ─► copy all parts; first those that a guest is about to change
//!      ─► quiesce: remove the map ─► make the target durable ─► give it its name
//! ```
//!
//! The end of the first quiesce is the moment of the backup. From then on, a request that changes a
//! part waits until the backup has read the part ([`CopyMap`]). The part is in memory then, so the
//! request does not wait until it is written. Reads never wait. Discards do not wait either: those
//! of parts that are not copied yet have no effect.
//!
//! What must hold:
//! - The target has its name only if it is complete and durable ([`BackupTarget`]). A backup that
//!   fails, is cancelled or dies with the process leaves nothing under that name.
//! - The source is only read, so a power cut at any time leaves the disk as without a backup.
//! - No request waits for long, whatever the storage of the target does. The request itself ends
//!   the map ([`crate::copy_map::LIMIT`]). The backup's thread finds that, even if the target never
//!   answers: calls that may block on the target run on other threads, and [`Worker::unless`] does
//!   not wait for them. A map that has ended and could not be removed holds no request back.
//! - The disk can be closed at any time, for the same reason.

use std::cell::RefCell;
use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::time::Duration;

use blockyard_image::tools::{BackupCopy, BackupTarget, Lookup};
use blockyard_image::{ChainError, Format, ImageFile, join_all};
use blockyard_ring::pool::Pool;

use super::{Kind, Why, Work, WorkError, Worker};
use crate::copy_map::{CopyMap, LIMIT};
use crate::disk::Disk;
use crate::tracker::Tracker;

/// Number of copies in flight, of up to 1 MiB each. It bounds the memory of a backup.
const COPIES: usize = 8;
/// Time between two looks at whether the backup has to end, while nothing of it is completed.
const LOOK: Duration = Duration::from_millis(100);

/// Number of threads that close the files of failed backups, for all disks, and the longest wait
/// for them. The storage may never answer.
const CLOSERS: usize = 4;
const CLOSE_TIME: Duration = Duration::from_secs(2);
static CLOSING: LazyLock<Pool> =
    LazyLock::new(|| Pool::new("backup close", CLOSERS, Duration::from_millis(250)));

/// Options of a backup.
#[derive(Clone, Debug)]
pub struct BackupOptions {
    /// Path of the new image. No file may exist there.
    pub target: PathBuf,
    /// Format of the new image: raw or qcow2. It has no backing file.
    pub format: Format,
}

impl BackupOptions {
    pub fn new(target: impl Into<PathBuf>, format: Format) -> Self {
        BackupOptions { target: target.into(), format }
    }
}

impl Disk {
    /// Copies the disk, as it is now, into a new image; see the module documentation. Guests go on.
    /// A read-only disk can be copied, too.
    pub fn backup(self: &Arc<Self>, options: &BackupOptions, work: &Work) -> Result<(), WorkError> {
        let (options, work) = (options.clone(), work.clone());
        let left = Rc::<RefCell<Option<BackupTarget>>>::default();
        let target = left.clone();
        let done =
            self.work(Kind::for_any("backup"), |worker| worker.backup(options, work, target));
        // No more operations of this thread use the file.
        left.take().into_iter().for_each(close);
        done
    }
}

/// Closes the file of a failed backup. Waits for that at most for [`CLOSE_TIME`].
fn close(target: BackupTarget) {
    let (sender, closed) = sync_channel(1);
    let closing = move |(): &()| {
        drop(target);
        let _ = sender.send(());
    };
    match CLOSING.run(Box::new(closing)) {
        Ok(()) => drop(closed.recv_timeout(CLOSE_TIME)),
        // No thread can start, so this one closes it.
        Err(refused) => drop(refused),
    }
}

impl Worker {
    /// `target`: holds the new image until it has its name.
    async fn backup(
        self,
        options: BackupOptions,
        work: Work,
        target: Rc<RefCell<Option<BackupTarget>>>,
    ) -> Result<(), Why> {
        work.check_cancelled(&self.disk)?;
        let BackupOptions { target: path, format } = options;
        let source = self.chain()?;
        let (size, ended) = (source.size(), || work.check_cancelled(&self.disk));
        let at = path.clone();
        let create = move || BackupTarget::create(&at, format, size);
        let new = self.unless(ended, self.call(create)).await?;
        let copy = BackupCopy::of(&source, new.chain(), &self.handle, work.progress.clone());
        target.replace(Some(new));
        let copy = copy?;
        let map = Arc::new(CopyMap::new(size, &path, LIMIT));
        self.copy_whole(&copy, &map, &work).await?;
        drop(copy);
        if let Some(new) = target.take() {
            self.publish(new, source.top().file.clone(), ended).await?;
        }
        let (disk, path) = (self.disk.name(), path.display());
        tracing::info!(disk, "backup: {path} is complete, with {size} bytes");
        Ok(())
    }

    /// Copies the disk as it is at one moment of this call, and makes the target durable.
    pub(super) async fn copy_whole(
        &self,
        copy: &BackupCopy,
        map: &Arc<CopyMap>,
        work: &Work,
    ) -> Result<(), Why> {
        self.copy_moment(copy, map, work).await?;
        let ended = || work.check_cancelled(&self.disk);
        self.unless(ended, async { Ok(copy.finish().await?) }).await
    }

    /// Copies the disk as it is at one moment of this call.
    async fn copy_moment(
        &self,
        copy: &BackupCopy,
        map: &Arc<CopyMap>,
        work: &Work,
    ) -> Result<(), Why> {
        // Nothing changes a read-only disk.
        if self.disk.options().read_only {
            return self.copy_all(copy, map, work).await;
        }
        let source = self.disk.source();
        let local_disk = self.local_disk(&source)?;
        // A flush now leaves little for the flush during the quiesce.
        self.flush(&local_disk).await?;
        let quiesced = self.disk.quiesce_on(&self.handle, "backup begins").await?;
        self.flush(&local_disk).await?;
        quiesced.exchange(&source, Some(&Tracker::Copy(map.clone()))).await?;
        drop((quiesced, local_disk));
        let copied = self.copy_all(copy, map, work).await;
        self.remove_map().await;
        copied
    }

    /// Removes the map, which has ended, from all reactors. If that is impossible, requests go on
    /// as well.
    async fn remove_map(&self) {
        let removed = async {
            let quiesced = self.disk.quiesce_on(&self.handle, "backup ends").await?;
            quiesced.exchange(&self.disk.source(), None).await
        };
        if let Err(e) = removed.await {
            let disk = self.disk.name();
            tracing::warn!(disk, "backup: its map of parts stays in memory, without effect: {e}");
        }
    }

    /// Copies all parts of the map. The reads do not count for the disk's share and limits, as
    /// those of a stream do not: a request that waits for a copy must not also wait for the share.
    async fn copy_all(&self, copy: &BackupCopy, map: &CopyMap, work: &Work) -> Result<(), Why> {
        // Jobs show the size only from now on: it says that the moment of the backup is past.
        copy.expect(map.size());
        let failed = RefCell::new(None::<Why>);
        let copies = (0..COPIES).map(|_| async {
            let buffer = BackupCopy::buffer();
            while let Some(run) = map.next_run() {
                let copied = async {
                    work.check_cancelled(&self.disk)?;
                    let lookup = run.may_skip().then_some(match run.is_urgent {
                        true => Lookup::Urgent,
                        false => Lookup::InOrder,
                    });
                    let has_read = || map.copied(&run);
                    Ok(copy.copy(run.range.clone(), lookup, &buffer, has_read).await?)
                };
                if let Err(why) = copied.await {
                    // The other copies end, and requests go on at once.
                    map.end();
                    failed.borrow_mut().get_or_insert(why);
                }
            }
            Ok(())
        });
        let ended = || {
            failed.take().map_or(Ok(()), Err)?;
            map.check()?;
            work.check_cancelled(&self.disk)
        };
        let copied = self.unless(ended, join_all(COPIES, copies)).await;
        // Requests go on also if the copy has failed or was cancelled.
        map.end();
        copied?;
        ended()
    }

    /// Gives the target its name.
    async fn publish(
        &self,
        target: BackupTarget,
        base: Arc<ImageFile>,
        ended: impl Fn() -> Result<(), Why>,
    ) -> Result<(), Why> {
        let decided = Arc::new(AtomicBool::new(false));
        let theirs = decided.clone();
        let publish = move || target.publish(&base, &theirs);
        match self.unless(ended, self.call(publish)).await {
            // The target had its name before the work was cancelled.
            Err(_) if decided.swap(true, Ordering::SeqCst) => Ok(()),
            published => published,
        }
    }

    /// Runs a call that may block on a thread of its own.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, ChainError> + Send + 'static,
    ) -> Result<T, Why> {
        let called = self.handle.blocking(call).await;
        Ok(called.map_err(Why::Call)??)
    }

    /// Waits for a future, unless `ended` returns an error meanwhile. The future may wait for
    /// storage that never answers. Dropping it gives up its operations.
    async fn unless<T>(
        &self,
        ended: impl Fn() -> Result<(), Why>,
        future: impl Future<Output = Result<T, Why>>,
    ) -> Result<T, Why> {
        let mut future = pin!(future);
        loop {
            let mut look = pin!(self.handle.sleep(LOOK));
            let done = poll_fn(|cx| match future.as_mut().poll(cx) {
                Poll::Ready(result) => Poll::Ready(Some(result)),
                Poll::Pending => look.as_mut().poll(cx).map(|()| None),
            });
            if let Some(result) = done.await {
                return result;
            }
            ended()?;
        }
    }
}

#[cfg(test)]
mod tests;
