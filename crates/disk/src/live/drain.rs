//! Drain: holds a disk's requests during work on the host's side, such as a snapshot of a volume or
//! of the host's file system.
//!
//! ```text
//!   flush ─► quiesce: flush ─► answer the caller ─► wait for a call, a time or the end ─► resume
//! ```
//!
//! What must hold: when [`Disk::drain`] returns, no request is in flight and all answered writes
//! are durable. A read-only disk has no such writes. The requests go on at the latest when the time
//! limit has passed, so that a caller that dies leaves no disk that hangs.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::Builder;
use std::time::Duration;

use blockyard_image::ChainError;
use blockyard_ring::threads;

use super::{Kind, Why, WorkError, Worker, check_open};
use crate::disk::Disk;
use crate::drain::DrainState;

/// The right to the disk's only thread for drains. Drop gives it back.
///
/// No pool can hold these threads, because a drain waits for an operator. All disks may be drained
/// at a time, for a snapshot of the host. So the bound is one thread for each disk.
struct Permit(Arc<Disk>);

impl Permit {
    fn take(disk: &Arc<Disk>) -> Result<Self, Why> {
        if !disk.drain.take_thread() {
            return Err(if disk.has_ended() { Why::Ended } else { Why::busy(disk) });
        }
        Ok(Permit(disk.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.drain.give_thread_back();
    }
}

impl Disk {
    /// Waits until no request is in flight and all answered writes are durable. Holds requests
    /// from then on, until [`Disk::resume`], until the disk ends, or for `limit`.
    pub fn drain(self: &Arc<Self>, limit: Duration) -> Result<(), WorkError> {
        let error = |why| WorkError { disk: self.name().into(), work: "drain", why: Box::new(why) };
        let permit = Permit::take(self).map_err(error)?;
        let (sender, drained) = sync_channel(1);
        let started = threads::spawn(Builder::new().name("drain".into()), move || {
            let answer = sender.clone();
            let work =
                permit.0.work(Kind::for_any("drain"), move |worker| worker.drain(limit, answer));
            // The caller may drain the disk again as soon as it has an answer.
            drop(permit);
            if let Err(e) = work {
                // The caller has its answer already if the drain has begun.
                let _ = sender.try_send(Err(e));
            }
        });
        started.map_err(|e| error(Why::Image(ChainError::Executor(e))))?;
        drained.recv().unwrap_or_else(|_| Err(error(Why::Ended)))
    }

    /// Returns whether requests are held because of [`Disk::drain`].
    pub fn is_drained(&self) -> bool {
        self.drain_state().is_drained
    }

    pub fn drain_state(&self) -> DrainState {
        self.drain.state()
    }
}

impl Worker {
    async fn drain(
        self,
        limit: Duration,
        answer: SyncSender<Result<(), WorkError>>,
    ) -> Result<(), Why> {
        let source = self.disk.source();
        check_open(&source)?;
        let local_disk = self.local_disk(&source)?;
        // A flush now leaves little for the flush during the quiesce.
        self.flush(&local_disk).await?;
        let quiesced = self.disk.quiesce_on(&self.handle, "drain").await?;
        self.flush(&local_disk).await?;
        let (name, seconds) = (self.disk.name(), limit.as_secs());
        tracing::info!(disk = name, "drained: requests wait for `ctl resume`, at most {seconds} s");
        self.disk.drain.begin(limit);
        // The end of the disk comes before or after this check. After it, it finds the flag.
        if self.disk.has_ended() {
            self.disk.drain.resume();
            return Err(Why::Ended);
        }
        self.disk.report_change();
        let _ = answer.try_send(Ok(()));
        if !self.disk.drain.wait() {
            tracing::warn!(disk = name, "requests go on: no call resumed the disk in {seconds} s");
        }
        drop(quiesced);
        self.disk.report_change();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use blockyard_image::CacheMode;

    use super::*;
    use crate::{DiskOptions, Source};

    fn disk(name: &str) -> Arc<Disk> {
        let options = DiskOptions {
            name: name.into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        Arc::new(Disk::new(options, Source::Null { size: 4096 }))
    }

    #[test]
    fn a_disk_has_one_thread_for_drains() {
        let (disk, other) = (disk("a"), disk("b"));
        let first = Permit::take(&disk).unwrap();
        let error = disk.drain(Duration::ZERO).unwrap_err();
        assert!(matches!(*error.why, Why::Busy), "{error}");
        assert!(Permit::take(&other).is_ok(), "each disk has its own");
        drop(first);
        assert!(Permit::take(&disk).is_ok());
    }

    #[test]
    fn a_disk_that_was_resumed_can_be_drained_at_once() {
        let disk = disk("a");
        for _ in 0..200 {
            let permit = Permit::take(&disk).unwrap();
            disk.drain.begin(Duration::from_secs(600));
            let drain = std::thread::spawn(move || {
                let resumed = permit.0.drain.wait();
                std::thread::yield_now();
                drop(permit);
                resumed
            });
            assert!(disk.resume().0);
            drop(Permit::take(&disk).expect("the thread has ended its drain"));
            assert!(drain.join().unwrap());
        }
    }
}
