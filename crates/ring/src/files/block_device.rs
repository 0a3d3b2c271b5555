//! Requests to a block device of the host.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Request of `ioctl` that discards a range of a block device.
pub(crate) const BLKDISCARD: u64 = 0x1277;

/// Discards a range of a block device (BLKDISCARD). Blocks until done.
pub fn discard(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64 from the pointer, which outlives the call.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), BLKDISCARD as _, range.as_ptr()) };
    match (rc, io::Error::last_os_error()) {
        (0, _) => Ok(()),
        (_, e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
            Err(io::Error::new(io::ErrorKind::Unsupported, e))
        }
        (_, e) => Err(e),
    }
}
