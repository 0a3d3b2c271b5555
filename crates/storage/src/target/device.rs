//! The trait `Device`: reads, writes and flushes of a disk.

use std::future::Future;
use std::io;

use super::map::Boxed;

/// A target that moves the disk's data itself.
///
/// All methods run on the target's own thread, several at a time if they wait. Blockyard copies the
/// data between that thread and its reactors. Requests are whole granules. Requests that overlap
/// have no order.
pub trait Device: 'static {
    /// Fills `data` with the disk's bytes from `offset`.
    fn read(&self, offset: u64, data: &mut [u8]) -> impl Future<Output = io::Result<()>>;

    /// Writes all of `data` at `offset`. It need not be durable before [`Device::flush`].
    fn write(&self, offset: u64, data: &[u8]) -> impl Future<Output = io::Result<()>>;

    /// Makes all writes durable that were answered before this call. After an error the disk
    /// accepts no more writes.
    fn flush(&self) -> impl Future<Output = io::Result<()>>;

    /// Frees the space of a range. This is a hint. Default: does nothing.
    fn discard(&self, _offset: u64, _len: u64) -> impl Future<Output = io::Result<()>> {
        std::future::ready(Ok(()))
    }

    /// Zeroes a range. An error of kind `Unsupported` makes Blockyard write zeroes, which is the
    /// default.
    fn write_zeroes(&self, _offset: u64, _len: u64) -> impl Future<Output = io::Result<()>> {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
}

/// [`Device`] as an object.
pub(crate) trait AnyDevice {
    fn read<'a>(&'a self, offset: u64, data: &'a mut [u8]) -> Boxed<'a, io::Result<()>>;
    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> Boxed<'a, io::Result<()>>;
    fn flush(&self) -> Boxed<'_, io::Result<()>>;
    fn discard(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<()>>;
    fn write_zeroes(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<()>>;
}

impl<D: Device> AnyDevice for D {
    fn read<'a>(&'a self, offset: u64, data: &'a mut [u8]) -> Boxed<'a, io::Result<()>> {
        Box::pin(Device::read(self, offset, data))
    }

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> Boxed<'a, io::Result<()>> {
        Box::pin(Device::write(self, offset, data))
    }

    fn flush(&self) -> Boxed<'_, io::Result<()>> {
        Box::pin(Device::flush(self))
    }

    fn discard(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<()>> {
        Box::pin(Device::discard(self, offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<()>> {
        Box::pin(Device::write_zeroes(self, offset, len))
    }
}
