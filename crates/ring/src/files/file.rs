//! Files and block devices over io_uring.
//!
//! In: segments, and an offset in bytes. Out: the same segments, and the number of bytes
//! transferred.
//!
//! A write is durable after a later `sync` that returned Ok, or at completion if it is `durable`.
//! Writes in flight at the same time may reach the disk in any order, and a power cut may tear
//! them.

mod attempts;
mod change_time;
mod dirty;
mod inline;

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use self::dirty::CachedWrites;
pub use self::dirty::write_back_rate;
use crate::files::block_device;
use crate::files::host;
use crate::mem::segments::Segments;
use crate::offload::workers::Workers;
use crate::policy::change_time::ChangeTime;
use crate::policy::inline::InlineWrites;
use crate::tasks::executor::Handle;
use crate::tasks::meter::Meter;
use crate::tasks::operation::Operation;
use crate::tasks::semaphore::Semaphore;
use crate::uring::Action;
use crate::uring::file_slot::FileSlot;

/// Flags of an open file that decide how it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenMode {
    pub read_only: bool,
    pub direct: bool,
}

/// An open file with a lock (see [`host::lock`]), which is released when the last reference is
/// dropped. Closing the descriptor is not enough: a ring that has the file registered keeps it, and
/// so its lock, until the ring is destroyed.
#[derive(Debug)]
pub struct LockedFile(OwnedFd);

impl From<OwnedFd> for LockedFile {
    fn from(fd: OwnedFd) -> Self {
        LockedFile(fd)
    }
}

impl AsFd for LockedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // If unlocking fails, closing the descriptor releases the lock.
        let _ = host::lock(&self.0, host::Lock::None);
    }
}

/// Maximum number of bytes that the kernel may copy from or to the page cache on submission. That
/// takes up to about 200 us.
const LONGEST_ON_SUBMISSION: usize = 1 << 20;

/// Maximum number of bytes that the kernel may transfer past the page cache on submission. It fills
/// the memory of a hole with zeroes at once, and pins the memory of a transfer at once.
const LONGEST_DIRECT: usize = 4 << 20;

/// A file or block device on one executor's io_uring.
#[derive(Clone)]
pub struct UringFile {
    slot: Rc<FileSlot<Handle>>,
    block_device: bool,
    blocking: Rc<Blocking>,
    inline: Rc<InlineWrites>,
    change_time: Rc<ChangeTime>,
    /// `None`: the file's writes are never delayed.
    cached: Option<Rc<CachedWrites>>,
}

/// State of a file's blocking calls.
struct Blocking {
    /// Serialises changes of the file's extents, because each holds the inode lock. The kernel
    /// gives each a worker thread, and workers that wait for the lock spin, which takes CPU time
    /// from reactors and guests.
    extents: Semaphore,
    /// Whether the discard ioctl is used, because the kernel has no io_uring discard (before Linux
    /// 6.12).
    discard_by_ioctl: Cell<bool>,
    workers: Workers,
}

impl Default for Blocking {
    fn default() -> Self {
        Blocking {
            extents: Semaphore::new(1),
            discard_by_ioctl: Cell::default(),
            workers: Workers::default(),
        }
    }
}

impl UringFile {
    /// Creates a file on the ring of `handle`. Several executors may share `fd`; each registers it
    /// with its own ring.
    pub fn new(handle: &Handle, fd: Arc<impl AsFd + Send + Sync + 'static>) -> io::Result<Self> {
        let mode = rustix::fs::fstat(&fd)?.st_mode;
        let block_device =
            rustix::fs::FileType::from_raw_mode(mode) == rustix::fs::FileType::BlockDevice;
        let counters = handle.meter().map(Meter::counters).unwrap_or_default();
        let inline = Rc::new(inline::policy(fd.as_fd(), counters.clone())?);
        let change_time = Rc::new(change_time::policy(fd.as_fd(), counters.clone())?);
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        let counted = flags & rustix::fs::OFlags::RWMODE != rustix::fs::OFlags::RDONLY;
        let is_cached = !flags.contains(rustix::fs::OFlags::DIRECT);
        let longest = if is_cached { LONGEST_ON_SUBMISSION } else { LONGEST_DIRECT };
        let slot = FileSlot::new(handle, fd, counted, longest);
        let cached = if is_cached { CachedWrites::new(slot.fd(), counters) } else { None };
        Ok(UringFile {
            slot: Rc::new(slot),
            block_device,
            blocking: Rc::default(),
            inline,
            change_time,
            cached: cached.map(Rc::new),
        })
    }

    /// Writes to the page cache without a delay, as a program that knows nothing of the kernel's
    /// limits does.
    pub fn without_delays(self) -> Self {
        UringFile { cached: None, ..self }
    }

    #[inline]
    fn operation(&self, action: Action, segments: Segments) -> Operation {
        self.count(segments.len());
        self.slot.handle().operation(action, segments, self.slot.clone())
    }

    #[inline]
    fn count(&self, bytes: usize) {
        if let Some(meter) = self.slot.handle().meter() {
            meter.count(bytes);
        }
    }

    /// Writes by one operation, or by several if the kernel would block on the file's mtime update.
    /// The reactor's own call that sets the mtime may block, too, but rarely. It may wait for other
    /// writes in flight, so these writes must not depend on the reactor.
    #[inline]
    async fn write_once(
        &self,
        mut segments: Segments,
        offset: u64,
        rw_flags: i32,
    ) -> (i32, Segments) {
        self.count(segments.len());
        let (fd, alone) = (self.slot.fd(), || self.slot.handle().files() == 1);
        let mut attempt = change_time::first(&self.change_time, fd, alone());
        loop {
            let _held = self.change_time.may_hold(attempt);
            let action = Action::Write { offset, rw_flags: rw_flags | attempt.flags() };
            let result;
            (result, segments) =
                self.slot.handle().operation(action, segments, self.slot.clone()).await;
            match change_time::next(&self.change_time, fd, attempt, result, alone()) {
                Some(again) => attempt = again,
                None => return (result, segments),
            }
        }
    }

    async fn fallocate(&self, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        let _permit = self.blocking.extents.acquire().await;
        let _held = self.change_time.held();
        let (result, _) =
            self.operation(Action::Fallocate { mode, offset, len }, Segments::default()).await;
        match completion_result(result) {
            Ok(_) => Ok(()),
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV)
                ) =>
            {
                Err(io::Error::new(io::ErrorKind::Unsupported, e))
            }
            Err(e) => Err(e),
        }
    }
}

fn next_data(fd: impl AsFd, offset: u64) -> io::Result<Option<Range<u64>>> {
    // No other code uses the file position.
    let seek = |to| rustix::fs::seek(&fd, to);
    let start = match seek(SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // Some file systems and devices do not support SEEK_DATA: everything may be data.
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
            return Ok(Some(offset..u64::MAX));
        }
        Err(e) => return Err(e.into()),
    };
    match seek(SeekFrom::Hole(start)) {
        Ok(end) => Ok(Some(start..end)),
        // Another process has truncated the file since the first seek.
        Err(Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[inline]
pub(crate) fn completion_result(result: i32) -> io::Result<usize> {
    if result >= 0 { Ok(result as usize) } else { Err(io::Error::from_raw_os_error(-result)) }
}

/// The operations of the trait `Storage` of crate `storage`. That trait documents their guarantees.
impl UringFile {
    /// Reads into `segments` from `offset` (bytes). Returns fewer bytes only at the end of the
    /// file.
    #[inline]
    pub async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let want = segments.len();
        self.count(want);
        let (handle, action) = (self.slot.handle(), Action::Read { offset });
        let (result, segments) = handle.operation(action, segments, self.slot.clone()).await;
        match completion_result(result) {
            Ok(n) if n == 0 || n == want => (segments, Ok(n)),
            first => self.finish(Action::Read { offset }, segments, first).await,
        }
    }

    /// Writes `segments` at `offset` (bytes), completely or with an error. `durable`: with
    /// RWF_DSYNC.
    #[inline]
    pub async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let want = segments.len();
        if let Some(wait) = self.cached.as_ref().and_then(|cached| cached.wait(want)) {
            self.slot.handle().sleep(wait).await;
        }
        if !durable
            && self.inline.suits(want)
            && segments.request().is_none()
            && self.slot.handle().files() == 1
            && let Some(n) = inline::write(&self.inline, self.slot.fd(), &segments, offset)
            && n == want
        {
            self.count(n);
            if self.inline.must_yield() {
                self.slot.handle().yield_now().await;
            }
            return (segments, Ok(n));
        }
        let rw_flags = if durable { libc::RWF_DSYNC } else { 0 };
        let (result, segments) = self.write_once(segments, offset, rw_flags).await;
        match completion_result(result) {
            Ok(n) if n == want => (segments, Ok(n)),
            first => self.finish(Action::Write { offset, rw_flags }, segments, first).await,
        }
    }

    /// Makes earlier writes durable (fdatasync).
    pub async fn sync(&self) -> io::Result<()> {
        let (result, _) = self.operation(Action::Sync, Segments::default()).await;
        completion_result(result).map(|_| ())
    }

    /// Discards `len` bytes from `offset`; `Unsupported` if the file system or device cannot.
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.block_device {
            return self.discard_blocks(offset, len).await;
        }
        self.fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len).await
    }

    /// Zeroes `len` bytes from `offset`. `unmap`: their space may be freed.
    pub async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        // On a block device a hole punch means: write zeroes, and unmap if unmapped blocks read as
        // zeroes.
        if unmap {
            match self
                .fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
                .await
            {
                Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
                done => return done,
            }
        }
        self.fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, offset, len).await
    }

    /// As [`UringFile::zero`], but `Unsupported` if zeroes would be written.
    pub async fn zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match (self.block_device, unmap) {
            // On a block device the kernel writes the zeroes itself, unless they are punched.
            (true, true) => {
                self.fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
                    .await
            }
            (true, false) => Err(io::ErrorKind::Unsupported.into()),
            (false, _) => self.zero(offset, len, unmap).await,
        }
    }

    /// Allocates space for `len` bytes from `offset`, and extends the file if necessary.
    /// `Unsupported` for a block device.
    pub async fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.block_device {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.fallocate(0, offset, len).await
    }

    /// Sets the size of the file in bytes.
    pub async fn set_len(&self, len: u64) -> io::Result<()> {
        let fd = self.slot.descriptor().clone();
        let call = move || rustix::fs::ftruncate(&fd, len).map_err(io::Error::from);
        self.blocking.workers.call(self.slot.handle().current_waker(), call).await?
    }

    /// Returns the size in bytes.
    pub async fn len(&self) -> io::Result<u64> {
        host::file_size(self.slot.descriptor())
    }

    /// Returns the next range with data from `offset` on, or `None` if only holes follow.
    ///
    /// The kernel may hold the call up: it waits while extents of the file change, or for storage.
    /// A disk that is served has a meter. Its calls run on a thread, so that other disks go on.
    pub async fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let handle = self.slot.handle();
        if handle.meter().is_none() {
            return next_data(self.slot.fd(), offset);
        }
        let _permit = self.blocking.extents.acquire().await;
        let fd = self.slot.descriptor().clone();
        let call = move || next_data(&fd, offset);
        self.blocking.workers.call_or_run(handle.current_waker(), call).await?
    }

    /// Returns the allocated bytes; `None` for a block device.
    pub fn allocated(&self) -> io::Result<Option<u64>> {
        let blocks = rustix::fs::fstat(self.slot.fd())?.st_blocks;
        Ok((!self.block_device).then_some(blocks as u64 * 512))
    }
}

impl UringFile {
    async fn discard_blocks(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.blocking.discard_by_ioctl.get() {
            let (result, _) =
                self.operation(Action::Discard { offset, len }, Segments::default()).await;
            match completion_result(result) {
                // Only the ioctl distinguishes a kernel without io_uring discard from a device that
                // cannot discard.
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS)
                    ) => {}
                done => return done.map(drop),
            }
        } else {
            self.count(0);
        }
        let fd = self.slot.descriptor().clone();
        let call = move || block_device::discard(&fd, offset, len);
        let done = self.blocking.workers.call(self.slot.handle().current_waker(), call).await?;
        self.blocking.discard_by_ioctl.set(self.blocking.discard_by_ioctl.get() || done.is_ok());
        done
    }

    /// Completes a transfer that was short or interrupted: a signal, a full disk, a huge request.
    async fn finish(
        &self,
        action: Action,
        segments: Segments,
        first: io::Result<usize>,
    ) -> (Segments, io::Result<usize>) {
        let retry = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN));
        let mut done = match first {
            Ok(n) => n,
            Err(e) if retry(&e) => 0,
            Err(e) => return (segments, Err(e)),
        };
        while done < segments.len() {
            let rest = segments.slice(done, segments.len() - done);
            let (action, is_read) = match action {
                Action::Read { offset } => (Action::Read { offset: offset + done as u64 }, true),
                Action::Write { offset, rw_flags } => {
                    (Action::Write { offset: offset + done as u64, rw_flags }, false)
                }
                other => (other, false),
            };
            let (result, _) = self.operation(action, rest).await;
            match completion_result(result) {
                Ok(0) if is_read => break,
                Ok(0) => return (segments, Err(io::ErrorKind::WriteZero.into())),
                Ok(n) => done += n,
                Err(e) if retry(&e) => self.slot.handle().yield_now().await,
                Err(e) => return (segments, Err(e)),
            }
        }
        (segments, Ok(done))
    }
}

#[cfg(test)]
mod tests;
