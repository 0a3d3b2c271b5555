//! Drain: holds a disk's requests during work on the host's side, such as a snapshot of a volume or
//! of the host's file system.
//!
//! ```text
//!   flush ─► quiesce: flush ─► answer the caller ─► wait for a call, a time or the end ─► resume
//! ```
//!
//! What must hold: when [`Disk::drain`] returns, no request is in flight and all answered writes
//! are durable. The requests go on at the latest when the time limit has passed, so that a caller
//! that dies leaves no disk that hangs.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use blockyard_image::ChainError;
use blockyard_ring::threads;

use super::{Why, WorkError, Worker};
use crate::disk::Disk;

#[derive(Debug, Default)]
pub(crate) struct Drain {
    is_drained: Mutex<bool>,
    changed: Condvar,
}

impl Drain {
    fn is_drained(&self) -> MutexGuard<'_, bool> {
        self.is_drained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the requests go on. Returns whether they were held.
    pub fn resume(&self) -> bool {
        let was_drained = std::mem::replace(&mut *self.is_drained(), false);
        self.changed.notify_all();
        was_drained
    }

    /// Waits for [`Drain::resume`]. Returns false if `limit` has passed without it.
    fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut is_drained = self.is_drained();
        while *is_drained {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                *is_drained = false;
                return false;
            }
            let waited = self.changed.wait_timeout(is_drained, left);
            is_drained = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Disk {
    /// Waits until no request is in flight and all answered writes are durable. Holds requests
    /// from then on, until [`Disk::resume`], until the disk ends, or for `limit`.
    pub fn drain(self: &Arc<Self>, limit: Duration) -> Result<(), WorkError> {
        let (sender, drained) = sync_channel(1);
        let disk = self.clone();
        let started = threads::spawn(Builder::new().name("drain".into()), move || {
            let answer = sender.clone();
            if let Err(e) = disk.work("drain", move |worker| worker.drain(limit, answer)) {
                // The caller has its answer already if the drain has begun.
                let _ = sender.try_send(Err(e));
            }
        });
        let error = |why| WorkError { disk: self.name().into(), work: "drain", why: Box::new(why) };
        started.map_err(|e| error(Why::Image(ChainError::Executor(e))))?;
        drained.recv().unwrap_or_else(|_| Err(error(Why::Ended)))
    }

    /// Returns whether requests are held because of [`Disk::drain`].
    pub fn is_drained(&self) -> bool {
        *self.drain.is_drained()
    }
}

impl Worker {
    async fn drain(
        self,
        limit: Duration,
        answer: SyncSender<Result<(), WorkError>>,
    ) -> Result<(), Why> {
        let local_disk = self.local_disk(&self.disk.source())?;
        // A flush now leaves little for the flush during the quiesce.
        self.flush_unsynced(&local_disk).await?;
        let quiesced = self.disk.quiesce("drain")?;
        self.flush_unsynced(&local_disk).await?;
        let (name, seconds) = (self.disk.name(), limit.as_secs());
        tracing::info!(disk = name, "drained: requests wait for `ctl resume`, at most {seconds} s");
        *self.disk.drain.is_drained() = true;
        // The end of the disk comes before or after this check. After it, it finds the flag.
        if self.disk.has_ended() {
            self.disk.drain.resume();
            return Err(Why::Ended);
        }
        let _ = answer.try_send(Ok(()));
        if !self.disk.drain.wait(limit) {
            tracing::warn!(disk = name, "requests go on: no call resumed the disk in {seconds} s");
        }
        drop(quiesced);
        Ok(())
    }
}
