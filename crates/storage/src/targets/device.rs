//! The trait `Device`: reads, writes and flushes of a disk.

use std::future::Future;
use std::io;

use blockyard_ring::Lent;

use super::map::Boxed;

/// A target that moves the disk's data itself.
///
/// All methods run on the target's own thread, several at a time if they wait. They get the memory
/// of the request. Pass it to [`OwnFile`] and nothing is copied. Requests are whole granules.
/// Requests that overlap have no order.
///
/// [`OwnFile`]: super::OwnFile
pub trait Device: 'static {
    /// Fills `data` with the disk's bytes from `offset`.
    fn read(&self, offset: u64, data: Lent) -> impl Future<Output = io::Result<()>>;

    /// Writes all of `data` at `offset`. It need not be durable before [`Device::flush`]. A guest
    /// may change `data` meanwhile. A device that uses it twice copies it first.
    fn write(&self, offset: u64, data: Lent) -> impl Future<Output = io::Result<()>>;

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
    fn read(&self, offset: u64, data: Lent) -> Boxed<'_, io::Result<()>>;
    fn write(&self, offset: u64, data: Lent) -> Boxed<'_, io::Result<()>>;
    fn flush(&self) -> Boxed<'_, io::Result<()>>;
    fn discard(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<()>>;
    /// False: the caller writes zeroes instead.
    fn write_zeroes(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<bool>>;
}

impl<D: Device> AnyDevice for D {
    fn read(&self, offset: u64, data: Lent) -> Boxed<'_, io::Result<()>> {
        Box::pin(Device::read(self, offset, data))
    }

    fn write(&self, offset: u64, data: Lent) -> Boxed<'_, io::Result<()>> {
        Box::pin(Device::write(self, offset, data))
    }

    fn flush(&self) -> Boxed<'_, io::Result<()>> {
        Box::pin(Device::flush(self))
    }

    fn discard(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<()>> {
        Box::pin(Device::discard(self, offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Boxed<'_, io::Result<bool>> {
        Box::pin(async move {
            match Device::write_zeroes(self, offset, len).await {
                Err(e) if e.kind() == io::ErrorKind::Unsupported => Ok(false),
                done => done.map(|()| true),
            }
        })
    }
}
