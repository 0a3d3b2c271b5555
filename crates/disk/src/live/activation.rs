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
//! durable, the image is closed as at the end of a server, and this process holds no lock on it. A
//! failed `deactivate` leaves the disk active, with the lock. No request reaches an inactive disk's
//! image, and an inactive disk changes nothing in it.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use blockyard_image::{ChainOptions, ImageFile};
use blockyard_ring::LockedFile;

use super::{Why, WorkError, Worker, check_not_poisoned};
use crate::backend::{InactiveImage, Source, SourceError};
use crate::disk::Disk;

/// Longest wait for an image that another process has locked. The source of a migration releases
/// it before the destination's guest runs.
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
    /// as long as `goes_on` returns true. Must not run on a reactor.
    pub fn activate(self: &Arc<Self>, goes_on: impl Fn() -> bool) -> Result<(), WorkError> {
        let Some(options) = self.activation.as_ref().filter(|_| self.is_inactive()) else {
            return Ok(());
        };
        let error =
            |why| WorkError { disk: self.name().into(), work: "activation", why: Box::new(why) };
        let _lock = self.begin_work().map_err(error)?;
        check_not_poisoned(self).map_err(error)?;
        let options = options.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let source = self.open_unlocked(&options, goes_on).map_err(|e| error(Why::Source(e)))?;
        // The image may have been resized elsewhere.
        self.set_capacity(source.capacity());
        let quiesced = self.quiesce("activation").map_err(|e| error(e.into()))?;
        quiesced.exchange(&source, None).map_err(|e| error(e.into()))?;
        drop(quiesced);
        let image = source
            .chain()
            .map_or_else(|| options.path.display().to_string(), |chain| chain.describe());
        tracing::info!(disk = self.name(), "activated: opened {image}");
        Ok(())
    }

    fn open_unlocked(
        &self,
        options: &ChainOptions,
        goes_on: impl Fn() -> bool,
    ) -> Result<Source, SourceError> {
        let deadline = Instant::now() + LOCK_TIME;
        let mut is_known = false;
        loop {
            let opening = tracing::error_span!("opening", disk = self.name()).entered();
            let opened = Source::open(options);
            drop(opening);
            match opened {
                Err(e) if e.is_locked() && goes_on() && Instant::now() < deadline => {
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
    pub fn deactivate(self: &Arc<Self>) -> Result<(), WorkError> {
        if self.activation.is_none() || self.is_inactive() {
            return Ok(());
        }
        let files = locked_files(&self.source());
        self.work("deactivation", |worker| worker.deactivate())?;
        let deadline = Instant::now() + LOCK_TIME;
        while files.iter().any(|file| file.strong_count() > 0) {
            if Instant::now() > deadline {
                let why = Why::NotPossible("a reactor still has the image open".into());
                let (disk, why) = (self.name().into(), Box::new(why));
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
        let local_disk = self.local_disk(&source)?;
        let quiesced = self.disk.quiesce("deactivation")?;
        self.flush_unsynced(&local_disk).await?;
        self.close_image(&local_disk).await?;
        // A snapshot may have put another image on top since the disk was activated.
        if let (Some(chain), Some(options)) = (source.chain(), &self.disk.activation) {
            let mut options = options.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            options.path = chain.top().file.path().to_path_buf();
            options.format = Some(chain.top().format);
        }
        let image = Source::Inactive(Arc::new(InactiveImage::of(&source)));
        quiesced.exchange(&image, None)?;
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
