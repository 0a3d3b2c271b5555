//! Activation: a disk that has its image open only while a guest uses the disk.
//!
//! ```text
//!   inactive ── activate: open, lock, exchange ──► active
//!            ◄── deactivate: flush, close, exchange, unlock ──
//! ```
//! For live migration: the destination's server starts while the source still has the image.
//!
//! In: calls of an export, when its first queue starts and when its last queue has stopped. Out: a
//! disk with or without an open image. What must hold: after `deactivate` all answered writes are
//! durable, the image is closed as at the end of a server, and this process holds no lock on it.
//! After a failed `deactivate` this process may still hold the lock, and the disk is active or
//! inactive. If other work runs, the disk is deactivated when that ends, unless a guest uses it
//! again by then. No request reaches an inactive disk's image, and an inactive disk changes nothing
//! in it.

use std::sync::{Arc, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use blockyard_image::{ChainOptions, ImageFile, Overlaid};
use blockyard_ring::{Executor, LockedFile, threads};

use super::{Kind, Why, WorkError, Worker, check_not_poisoned};
use crate::backend::{InactiveImage, Source, SourceError};
use crate::disk::Disk;
use crate::leaving::Leaving;
use crate::quiesce_error::QuiesceError;

/// Longest wait for an image that another process has locked, and for other work on the disk. The
/// source of a migration releases the image before the destination's guest runs.
const LOCK_TIME: Duration = Duration::from_secs(30);
/// Pause between two attempts to open such an image.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

impl Disk {
    /// Makes this disk, which no reactor has opened, inactive. `options` open its image when the
    /// disk is activated.
    pub fn until_activated(mut self, options: ChainOptions) -> Self {
        self.activation = Some(std::sync::Mutex::new(options));
        let mut serving = self.serving_state();
        let image = InactiveImage::of(&serving.source);
        serving.source = Source::Inactive(Arc::new(image));
        drop(serving);
        self
    }

    /// Returns whether the disk has no open image now, and opens it when a guest uses the disk.
    pub fn is_inactive(&self) -> bool {
        matches!(self.source(), Source::Inactive(_))
    }

    /// Opens the image of an inactive disk. Waits a bounded time if another process has locked it,
    /// or if other work on the disk is under way, as long as `goes_on` returns true. Must not run
    /// on a reactor.
    pub fn activate(self: &Arc<Self>, goes_on: impl Fn() -> bool) -> Result<(), WorkError> {
        let Some(options) = &self.activation else { return Ok(()) };
        let error =
            |why| WorkError { disk: self.name().into(), work: "activation", why: Box::new(why) };
        let deadline = Instant::now() + LOCK_TIME;
        let goes_on = || goes_on() && Instant::now() < deadline;
        self.stay(goes_on).map_err(error)?;
        if !self.is_inactive() {
            return Ok(());
        }
        let _lock = self.wait_for_work(goes_on).map_err(error)?;
        // The work that this has waited for may be another activation.
        if !self.is_inactive() {
            return Ok(());
        }
        check_not_poisoned(self).map_err(error)?;
        let options = options.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let source = self.open_unlocked(&options, goes_on).map_err(|e| error(Why::Source(e)))?;
        // The image may have been resized elsewhere.
        self.set_capacity(source.capacity());
        self.exchange_now(&source).map_err(|e| error(e.into()))?;
        let image = source
            .chain()
            .map_or_else(|| options.path.display().to_string(), |chain| chain.describe());
        tracing::info!(disk = self.name(), "activated: opened {image}");
        Ok(())
    }

    /// Exchanges the image on all reactors.
    fn exchange_now(self: &Arc<Self>, source: &Source) -> Result<(), QuiesceError> {
        let executor = Executor::new().map_err(QuiesceError::Ring)?;
        let (disk, handle) = (self.clone(), executor.handle().clone());
        let source = source.clone();
        let exchanged = executor.block_on(async move {
            let quiesced = disk.quiesce_on(&handle, "activation").await?;
            quiesced.exchange(&source, None).await
        });
        exchanged.map_err(QuiesceError::Ring)?
    }

    fn wait_for_work(&self, goes_on: impl Fn() -> bool) -> Result<MutexGuard<'_, ()>, Why> {
        loop {
            match self.begin_work() {
                Err(why) if why.is_busy() && goes_on() => std::thread::sleep(LOCK_PAUSE),
                begun => return begun,
            }
        }
    }

    fn open_unlocked(
        &self,
        options: &ChainOptions,
        goes_on: impl Fn() -> bool,
    ) -> Result<Source, SourceError> {
        let mut is_known = false;
        loop {
            let opening = tracing::error_span!("opening", disk = self.name()).entered();
            let opened = Source::open(options);
            drop(opening);
            match opened {
                Err(e) if e.is_locked() && goes_on() => {
                    if !std::mem::replace(&mut is_known, true) {
                        tracing::info!(disk = self.name(), "activation waits: {e}");
                    }
                    std::thread::sleep(LOCK_PAUSE);
                }
                opened => return opened,
            }
        }
    }

    /// Flushes and closes the image of an active disk, and releases its lock. The caller has
    /// stopped the disk's queues. Does nothing for disks that are always active. Must not run on a
    /// reactor.
    ///
    /// After an error the disk is active, with two exceptions. If other work is under way, the disk
    /// is deactivated when that work ends. If a reactor does not close the image in time, the disk
    /// is inactive, and the lock is released when that reactor closes it.
    pub fn deactivate(self: &Arc<Self>) -> Result<(), WorkError> {
        if self.activation.is_none() || self.is_inactive() {
            return Ok(());
        }
        let deactivated = self.deactivate_now();
        if deactivated.as_ref().is_err_and(|e| e.why.is_busy()) {
            self.deactivate_later();
        }
        deactivated
    }

    /// Ends the wish to deactivate the disk. Waits for a deactivation that has begun.
    fn stay(&self, goes_on: impl Fn() -> bool) -> Result<(), Why> {
        loop {
            let mut leaving = match self.leaving.try_lock() {
                Ok(leaving) => leaving,
                Err(TryLockError::Poisoned(leaving)) => leaving.into_inner(),
                Err(TryLockError::WouldBlock) if goes_on() => {
                    std::thread::sleep(LOCK_PAUSE);
                    continue;
                }
                Err(TryLockError::WouldBlock) => return Err(Why::Busy),
            };
            leaving.is_wanted = false;
            return Ok(());
        }
    }

    fn leaving(&self) -> MutexGuard<'_, Leaving> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deactivates the disk when the work that runs has ended.
    fn deactivate_later(self: &Arc<Self>) {
        let mut leaving = self.leaving();
        leaving.is_wanted = true;
        if leaving.is_waited_for {
            return;
        }
        let disk = self.clone();
        // The work may last for hours, so its end would use up a pool.
        let thread = Builder::new().name("late release".into());
        let started = threads::spawn(thread, move || {
            while disk.waits_to_leave() {
                drop(disk.work.lock());
            }
        });
        match started {
            Ok(_) => leaving.is_waited_for = true,
            Err(e) => tracing::warn!(disk = self.name(), "no thread waits to close the image: {e}"),
        }
    }

    /// Deactivates the disk if that is still wanted. Returns whether other work is under way again.
    fn waits_to_leave(self: &Arc<Self>) -> bool {
        // An activation waits until this is done.
        let mut leaving = self.leaving();
        if std::mem::take(&mut leaving.is_wanted) {
            match self.deactivate_now() {
                Err(e) if e.why.is_busy() => {
                    leaving.is_wanted = true;
                    return true;
                }
                Err(e) if !matches!(*e.why, Why::Ended) => {
                    tracing::warn!(disk = self.name(), "the image stays open and locked: {e}");
                }
                _ => {}
            }
        }
        leaving.is_waited_for = false;
        false
    }

    fn deactivate_now(self: &Arc<Self>) -> Result<(), WorkError> {
        let files = locked_files(&self.source());
        self.work(Kind::for_writable("deactivation"), |worker| worker.deactivate())?;
        let deadline = Instant::now() + LOCK_TIME;
        while files.iter().any(|file| file.strong_count() > 0) {
            if Instant::now() > deadline {
                let (disk, why) = (self.name().into(), Box::new(Why::StillOpen));
                return Err(WorkError { disk, work: "deactivation", why });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        tracing::info!(disk = self.name(), "deactivated: another server may open the image");
        Ok(())
    }
}

impl Worker {
    async fn deactivate(self) -> Result<(), Why> {
        let source = self.disk.source();
        // Another deactivation may have come first.
        if matches!(source, Source::Inactive(_)) {
            return Ok(());
        }
        let local_disk = self.local_disk(&source)?;
        let quiesced = self.disk.quiesce_on(&self.handle, "deactivation").await?;
        self.flush(&local_disk).await?;
        self.close_image(&local_disk).await?;
        if let Some(options) = &self.disk.activation {
            let mut options = options.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            // An overlay that another server puts on the image from now on is not abandoned.
            options.overlaid = Overlaid::Refuse;
            // A snapshot may have put another image on top since the disk was activated.
            if let Some(chain) = source.chain() {
                options.path = chain.top().file.path().to_path_buf();
                options.format = Some(chain.top().format);
                options.crash_safety = chain.options().crash_safety.clone();
            }
        }
        let image = Source::Inactive(Arc::new(InactiveImage::of(&source)));
        quiesced.exchange(&image, None).await?;
        Ok(())
    }
}

/// Returns the files that are open and locked for writing.
fn locked_files(source: &Source) -> Vec<Weak<LockedFile>> {
    let written: Vec<&Arc<ImageFile>> = match source {
        Source::Chain(chain) => {
            let top = chain.top();
            [Some(&top.file), top.data.as_ref()].into_iter().flatten().collect()
        }
        source => source.file().into_iter().collect(),
    };
    written.into_iter().filter_map(|file| file.fd().map(Arc::downgrade)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::mpsc::channel;

    use blockyard_image::CacheMode;

    use super::*;
    use crate::DiskOptions;

    /// Longest wait. A test that waits longer hangs.
    const HANGS: Duration = Duration::from_secs(60);

    /// Returns a disk of a raw file that is not open, and the file.
    fn inactive(name: &str) -> (Arc<Disk>, PathBuf) {
        let path = std::env::temp_dir().join(format!("blockyard-{name}-{}", std::process::id()));
        std::fs::write(&path, [0; 4096]).unwrap();
        let image = ChainOptions::new(&path);
        let (name, serial) = ("disk".into(), String::new());
        let (cache, filters) = (CacheMode::None, Vec::new());
        let on_enospc = Default::default();
        let options = DiskOptions { name, serial, read_only: false, cache, filters, on_enospc };
        let disk = Disk::new(options, Source::open(&image).unwrap());
        (Arc::new(disk.until_activated(image)), path)
    }

    /// Two sessions may activate a disk at the same time, and other work may hold the lock for a
    /// moment.
    #[test]
    fn activations_wait_for_other_work_and_the_first_one_suffices() {
        let (disk, path) = inactive("activate");
        let held = disk.begin_work().unwrap();
        std::thread::scope(|scope| {
            let activations: Vec<_> = (0..2)
                .map(|_| {
                    let (waits, waiting) = channel();
                    let disk = disk.clone();
                    let activation = scope.spawn(move || {
                        disk.activate(|| {
                            let _ = waits.send(());
                            true
                        })
                    });
                    (activation, waiting)
                })
                .collect();
            let all_wait =
                activations.iter().all(|(_, waiting)| waiting.recv_timeout(HANGS).is_ok());
            drop(held);
            assert!(all_wait, "an activation did not wait");
            for (activation, _) in activations {
                activation.join().unwrap().unwrap();
            }
        });
        assert!(!disk.is_inactive());
        std::fs::remove_file(&path).unwrap();
    }

    /// Waits until no thread waits to deactivate the disk.
    fn wait_for_release(disk: &Disk) {
        let begun = Instant::now();
        while disk.leaving().is_waited_for {
            assert!(begun.elapsed() < HANGS, "the deactivation hangs");
            std::thread::yield_now();
        }
    }

    /// The last ring stops while a snapshot or a drain runs.
    #[test]
    fn a_disk_that_is_left_during_other_work_is_deactivated_after_it() {
        let (disk, path) = inactive("leave");
        let leave_during_work = || {
            disk.activate(|| true).unwrap();
            let held = disk.begin_work().unwrap();
            for _ in 0..2 {
                let error = disk.deactivate().unwrap_err();
                assert!(matches!(*error.why, Why::Busy), "{error}");
            }
            held
        };
        drop(leave_during_work());
        wait_for_release(&disk);
        assert!(disk.is_inactive());
        // A guest uses it again before the work ends.
        let held = leave_during_work();
        disk.activate(|| true).unwrap();
        drop(held);
        wait_for_release(&disk);
        assert!(!disk.is_inactive());
        disk.deactivate().unwrap();
        assert!(disk.is_inactive());
        std::fs::remove_file(&path).unwrap();
    }

    /// The other work does not end, and the session does.
    #[test]
    fn an_activation_that_waits_ends_with_its_session() {
        let (name, serial) = ("disk".into(), String::new());
        let (cache, filters) = (CacheMode::None, Vec::new());
        let on_enospc = Default::default();
        let options = DiskOptions { name, serial, read_only: false, cache, filters, on_enospc };
        let disk = Disk::new(options, Source::Null { size: 4096 });
        let disk = Arc::new(disk.until_activated(ChainOptions::new("/nonexistent")));
        let _held = disk.begin_work().unwrap();
        let error = disk.activate(|| false).unwrap_err();
        assert!(matches!(*error.why, Why::Busy), "{error}");
    }
}
