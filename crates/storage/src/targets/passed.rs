//! `Storage` over a device: the memory of requests is lent to the target's thread.
//!
//! What must hold
//! - A request is not answered while the device, or an operation of its files, may use the memory.
//! - No request goes beyond the end of the disk, also if that has come closer.
//! - After a change that the device did not answer in time the disk accepts no writes, because the
//!   change may still reach the device's storage after a later write.
//! - The memory of copies is bounded for each disk, without those of failed requests that a hanging
//!   operation still uses. A request needs a copy if its memory cannot be lent.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_ring::Segments;

use super::device::AnyDevice;
use super::map::Boxed;
use super::patience::Patience;
use super::promise::is_late;
use super::shared::{Core, limited};
use super::worker::{Living, Worker};
use crate::Geometry;
use crate::storage::{Capabilities, Storage};

/// Bytes of one copy, if granules are not larger.
const PIECE: usize = 1 << 20;

/// A disk of a device on one reactor.
#[derive(Clone)]
pub struct Passed {
    pub(super) core: Arc<Core>,
    pub(super) worker: Arc<Worker>,
    pub(super) patience: Patience,
}

impl Passed {
    /// Returns the bytes of one copy, in whole granules.
    fn piece(&self) -> usize {
        PIECE.max(self.core.granule as usize)
    }

    /// Returns the end of a range, or an error if it is beyond the end of the disk.
    fn end_of(&self, offset: u64, len: u64) -> io::Result<u64> {
        let end = offset.checked_add(len).filter(|end| *end <= self.core.size());
        end.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(Rc<dyn AnyDevice>) -> Boxed<'static, io::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let work = move |target| match target {
            Living::Device(device) => work(device),
            Living::Map(_) => Box::pin(async { Err(io::Error::other("it is no device")) }),
        };
        limited(&self.core, &self.worker, &self.patience, work).await
    }

    /// Returns an error if the disk has ended.
    fn accepts_changes(&self) -> io::Result<()> {
        self.core.lost().map_or(Ok(()), Err)
    }

    /// Ends the disk if the device may still make a change that has failed.
    fn end_if_late(&self, change: &str, error: &io::Error) {
        if is_late(error) {
            self.core.set_lost(change, error);
        }
    }

    /// Passes a request to the device, in parts of which each is short enough for a copy.
    async fn pass(&self, segments: &Segments, offset: u64, write: bool) -> io::Result<()> {
        let mut at = 0;
        while at < segments.len() {
            let (len, offset) = (self.piece().min(segments.len() - at), offset + at as u64);
            let part = segments.slice(at, len);
            let _permit = match part.is_lendable() {
                true => None,
                false => Some(self.core.copies.acquire_many(len as u64).await),
            };
            let loan = part.lend(write);
            let data = loan.lent();
            let called = self.call(move |device| {
                Box::pin(async move {
                    match write {
                        true => device.write(offset, data).await,
                        false => device.read(offset, data).await,
                    }
                })
            });
            let result = called.await;
            if let (true, Err(e)) = (write, &result) {
                self.end_if_late("write", e);
            }
            // A device that is silent is not waited for, but an operation of its files is.
            loan.end(result.is_ok() && !write).await;
            result?;
            at += len;
        }
        Ok(())
    }
}

impl Storage for Passed {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let len = (segments.len() as u64).min(self.core.size().saturating_sub(offset)) as usize;
        let result = match len == segments.len() {
            true => self.pass(&segments, offset, false).await,
            false => self.pass(&segments.slice(0, len), offset, false).await,
        };
        (segments, result.map(|()| len))
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let allowed =
            self.accepts_changes().and_then(|()| self.end_of(offset, segments.len() as u64));
        if let Err(e) = allowed {
            return (segments, Err(e));
        }
        let mut result = self.pass(&segments, offset, true).await;
        if durable && result.is_ok() {
            result = self.sync().await;
        }
        let len = segments.len();
        (segments, result.map(|()| len))
    }

    async fn sync(&self) -> io::Result<()> {
        // The kernel reports a lost page to one sync of a file only. Of two flushes at a time one
        // would succeed for lost data.
        let _one = self.core.flushing.acquire().await;
        self.accepts_changes()?;
        let flush = |device: Rc<dyn AnyDevice>| -> Boxed<'static, io::Result<()>> {
            Box::pin(async move { device.flush().await })
        };
        self.call(flush).await.inspect_err(|e| self.core.set_lost("flush", e))
    }

    /// Discards the whole granules of the range. The rest stays, because a discard is a hint.
    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.accepts_changes()?;
        let granule = self.core.granule;
        let end = self.end_of(offset, len)?;
        let (offset, end) = (offset.next_multiple_of(granule), end & !(granule - 1));
        if offset >= end {
            return Ok(());
        }
        let len = end - offset;
        let called =
            self.call(move |device| Box::pin(async move { device.discard(offset, len).await }));
        called.await.inspect_err(|e| self.end_if_late("discard", e))
    }

    async fn zero(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        self.accepts_changes()?;
        self.end_of(offset, len)?;
        // The raw image above writes zeroes then, and keeps the rest of each granule.
        if !(offset | len).is_multiple_of(self.core.granule) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let called = self
            .call(move |device| Box::pin(async move { device.write_zeroes(offset, len).await }));
        match called.await.inspect_err(|e| self.end_if_late("write of zeroes", e))? {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(self.core.size())
    }

    fn lost(&self) -> Option<io::Error> {
        self.core.lost()
    }

    fn geometry(&self) -> Geometry {
        self.core.geometry
    }

    fn capabilities(&self) -> Capabilities {
        self.core.capabilities
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use blockyard_ring::{Executor, Handle, Lent};

    use super::super::device::Device;
    use super::super::shape::Shape;
    use super::super::shared::Fault;
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Has no zeroes, and cannot flush.
    struct Failing;

    impl Device for Failing {
        async fn read(&self, _: u64, _: Lent) -> io::Result<()> {
            Ok(())
        }

        async fn write(&self, _: u64, _: Lent) -> io::Result<()> {
            Ok(())
        }

        async fn flush(&self) -> io::Result<()> {
            Err(io::Error::other("no idea"))
        }
    }

    #[test]
    fn a_device_without_zeroes_has_no_fault_in_the_log_before_its_first_error() {
        let shape = Shape { size: 8192, granule: 4096 };
        let (geometry, capabilities) = (Geometry::default(), Capabilities::default());
        let core = Arc::new(Core::with("failing".into(), shape, 1, 0, geometry, capabilities));
        let make = |_: &Handle| -> Boxed<'static, io::Result<Living>> {
            Box::pin(async { Ok(Living::Device(Rc::new(Failing))) })
        };
        let worker = Arc::new(Worker::start(Box::new(make), LIMIT).unwrap());
        let executor = Executor::new().unwrap();
        let patience = Patience::new(executor.handle(), LIMIT);
        let disk = Passed { core: core.clone(), worker, patience };
        let work = async move {
            let zeroed = disk.zero(0, 4096, true).await;
            assert_eq!(zeroed.unwrap_err().kind(), io::ErrorKind::Unsupported);
            assert!(!core.has_noted(Fault::Error));
            disk.sync().await.unwrap_err();
            assert!(core.has_noted(Fault::Error));
        };
        executor.block_on(work).unwrap();
    }
}
