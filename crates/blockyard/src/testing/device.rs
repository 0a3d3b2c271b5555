//! A device on simulated disks, without a thread of its own.

use std::cell::Cell;
use std::io;

use blockyard_ring::Segments;
use blockyard_storage::Storage;

use crate::{Device, Lock};

pub(super) struct Simulated<D> {
    device: D,
    size: u64,
    /// A disk has one flush at a time.
    flushing: Lock<()>,
    /// Whether a flush has failed. The device gets no other one.
    lost: Cell<bool>,
}

impl<D> Simulated<D> {
    pub(super) fn new(device: D, size: u64) -> Self {
        Simulated { device, size, flushing: Lock::new(()), lost: Cell::new(false) }
    }

    /// Returns an error if a flush has failed. In a yard the disk accepts no changes then.
    fn accepts_changes(&self) -> io::Result<()> {
        if self.lost.get() { Err(io::Error::other("a flush has failed")) } else { Ok(()) }
    }
}

impl<D: Device> Storage for Simulated<D> {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let loan = segments.lend(false);
        let result = self.device.read(offset, loan.lent()).await;
        let segments = loan.end(result.is_ok()).await;
        let len = segments.len();
        (segments, result.map(|()| len))
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        if let Err(e) = self.accepts_changes() {
            return (segments, Err(e));
        }
        let loan = segments.lend(true);
        let mut result = self.device.write(offset, loan.lent()).await;
        let segments = loan.end(false).await;
        if durable && result.is_ok() {
            result = self.sync().await;
        }
        let len = segments.len();
        (segments, result.map(|()| len))
    }

    async fn sync(&self) -> io::Result<()> {
        let _one = self.flushing.lock().await;
        self.accepts_changes()?;
        self.device.flush().await.inspect_err(|_| self.lost.set(true))
    }

    fn lost(&self) -> Option<io::Error> {
        self.accepts_changes().err()
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.accepts_changes()?;
        self.device.discard(offset, len).await
    }

    async fn zero(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        self.accepts_changes()?;
        self.device.write_zeroes(offset, len).await
    }

    async fn set_len(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(self.size)
    }
}
