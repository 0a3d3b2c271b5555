//! A device on simulated disks, without a thread of its own.

use std::io;

use blockyard_ring::Segments;
use blockyard_storage::Storage;

use crate::Device;

pub(super) struct Simulated<D> {
    pub(super) device: D,
    pub(super) size: u64,
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
        let loan = segments.lend(true);
        let mut result = self.device.write(offset, loan.lent()).await;
        let segments = loan.end(false).await;
        if durable && result.is_ok() {
            result = self.device.flush().await;
        }
        let len = segments.len();
        (segments, result.map(|()| len))
    }

    async fn sync(&self) -> io::Result<()> {
        self.device.flush().await
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.device.discard(offset, len).await
    }

    async fn zero(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        self.device.write_zeroes(offset, len).await
    }

    async fn set_len(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(self.size)
    }
}
