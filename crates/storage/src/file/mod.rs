//! Files and block devices of this host.
//!
//! ```text
//!   lock     the lock of an image file, and how long a start waits for it
//!   record   which overlay a live snapshot has put on a file, and which overlay was abandoned
//!   id       the identity of a file, whatever its name
//!   access   the users that may use a new file
//! ```
//!
//! In: a path or a descriptor. Out: an open, locked file; and [`HostFile`], which is the same on
//! one reactor.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use blockyard_ring::small_file::name_of;
use blockyard_ring::{Segments, UringFile, sandbox};
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};

use crate::Geometry;
use crate::cache::CacheMode;
use crate::opened::{OpenError, OpenOptions, Overlaid};
use crate::storage::{Capabilities, Storage};

pub mod access;
mod id;
pub mod lock;
pub(crate) mod record;

pub use id::FileId;
pub use record::{ABANDONED, Abandoned};

/// A file or block device on one reactor.
#[derive(Clone)]
pub struct HostFile {
    pub(crate) file: UringFile,
    pub(crate) geometry: Geometry,
    pub(crate) capabilities: Capabilities,
}

/// Each method returns the file's own future, so that the wrapper costs a request nothing.
impl Storage for HostFile {
    #[inline]
    fn read(
        &self,
        segments: Segments,
        offset: u64,
    ) -> impl Future<Output = (Segments, io::Result<usize>)> {
        self.file.read(segments, offset)
    }

    #[inline]
    fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> impl Future<Output = (Segments, io::Result<usize>)> {
        self.file.write(segments, offset, durable)
    }

    fn sync(&self) -> impl Future<Output = io::Result<()>> {
        self.file.sync()
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> {
        self.file.discard(offset, len)
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool) -> impl Future<Output = io::Result<()>> {
        self.file.zero(offset, len, unmap)
    }

    fn zero_fast(
        &self,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> impl Future<Output = io::Result<()>> {
        self.file.zero_fast(offset, len, unmap)
    }

    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> {
        self.file.allocate(offset, len)
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> {
        self.file.set_len(len)
    }

    fn len(&self) -> impl Future<Output = io::Result<u64>> {
        self.file.len()
    }

    fn next_data(&self, offset: u64) -> impl Future<Output = io::Result<Option<Range<u64>>>> {
        self.file.next_data(offset)
    }

    fn allocated(&self) -> io::Result<Option<u64>> {
        self.file.allocated()
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }
}

/// Returns a path that leads to the file of a descriptor.
pub fn path_of(fd: impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()).into()
}

/// Opens the file. The second value is true if the file was opened with O_DIRECT. Returns an error
/// for files of the server's configuration, also if another image names them.
pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<(OwnedFd, bool), OpenError> {
    let (fd, direct) = open_any(path, options)?;
    // The path may lead to another file since the server has checked it.
    let is_reserved = sandbox::is_reserved_file(&fd).map_err(|source| OpenError::Io {
        path: path.into(),
        operation: "finding its path",
        source,
    })?;
    if is_reserved { Err(OpenError::Reserved { path: path.into() }) } else { Ok((fd, direct)) }
}

fn open_any(path: &Path, options: &OpenOptions) -> Result<(OwnedFd, bool), OpenError> {
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY;
    let found = options.found.as_ref().map(path_of);
    let place = found.as_deref().unwrap_or(path);
    let open = |flags| rustix::fs::open(place, flags, Mode::empty());
    // Check the type first: opening a FIFO would block, and opening a directory would give a
    // misleading error.
    let stat = rustix::fs::stat(place).map_err(|e| explain(path, options.read_only, e.into()))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
        let source =
            io::Error::new(io::ErrorKind::InvalidInput, format!("it is {}", name_of(kind)));
        return Err(OpenError::Open {
            path: path.into(),
            hint: "it must be a regular file or a block device",
            source,
        });
    }
    if options.cache.direct() {
        match open(flags | OFlags::DIRECT) {
            Ok(fd) => return Ok((fd, true)),
            Err(rustix::io::Errno::INVAL) => tracing::warn!(
                "image {}: its file system has no O_DIRECT: using the host's page cache \
                 (as cache mode {} would)",
                path.display(),
                if options.cache.write_back() {
                    CacheMode::Writeback
                } else {
                    CacheMode::Writethrough
                },
            ),
            Err(e) => return Err(explain(path, options.read_only, e.into())),
        }
    }
    open(flags).map(|fd| (fd, false)).map_err(|e| explain(path, options.read_only, e.into()))
}

fn explain(path: &Path, read_only: bool, source: io::Error) -> OpenError {
    if source.kind() == io::ErrorKind::PermissionDenied
        && let Some(advice) = sandbox::advice(path)
    {
        return OpenError::Sandboxed { path: path.into(), advice, source };
    }
    let hint = match source.kind() {
        io::ErrorKind::NotFound => "there is no such file",
        io::ErrorKind::PermissionDenied if read_only => {
            "no permission to read it (see its owner and mode)"
        }
        io::ErrorKind::PermissionDenied => {
            "no permission to open it for writing (see its owner and mode)"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "it is on a read-only file system, and cannot be opened for writing"
        }
        io::ErrorKind::IsADirectory => "it is a directory",
        _ => {
            let hint = "cannot open it";
            return OpenError::Open { path: path.into(), hint, source };
        }
    };
    OpenError::Explained { path: path.into(), hint, kind: source.kind() }
}

impl OpenOptions {
    /// Returns an error if a file could not be opened for writing with these options, which are
    /// those of a reader. Changes nothing.
    pub fn check_writable(&self) -> Result<(), OpenError> {
        let (path, access) = (&self.path, Access::WRITE_OK);
        rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS)
            .map_err(|e| explain(path, false, e.into()))?;
        if self.overlaid == Overlaid::Abandon {
            return Ok(());
        }
        let (fd, _) = open(path, self)?;
        self.check_record(&fd)
    }

    /// Returns an error if a live snapshot has put an overlay on the file and this open may not
    /// write to the file beneath the overlay.
    pub fn check_record(&self, fd: &impl AsFd) -> Result<(), OpenError> {
        let path = self.path.clone();
        let failed =
            |operation| move |source| OpenError::Io { path: self.path.clone(), operation, source };
        let read = record::read(fd, &path).map_err(failed("reading the record of its overlay"))?;
        let Some(overlay) = read else { return Ok(()) };
        match &self.overlaid {
            Overlaid::Abandon => {
                // Without the record nothing else tells that the overlay fits this image no more.
                let marked = record::mark_abandoned(&overlay, fd, &path);
                record::remove(fd).map_err(failed("removing the record of its overlay"))?;
                let (image, overlay) = (path.display(), overlay.to_string_lossy());
                let overlay = overlay.escape_debug();
                match marked {
                    Ok(()) => tracing::warn!("image {image}: overlay {overlay} is abandoned"),
                    Err(e) => tracing::warn!(
                        "image {image}: overlay {overlay} is abandoned, and cannot be marked so \
                         ({e}): never serve it again, because its data do not fit the image"
                    ),
                }
                Ok(())
            }
            Overlaid::Below(overlays)
                if overlays.iter().any(|known| is_same_file(known, &overlay)) =>
            {
                Ok(())
            }
            Overlaid::Below(_) | Overlaid::Refuse => Err(OpenError::Overlaid { path, overlay }),
        }
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    matches!((FileId::of_path(one), FileId::of_path(other)), (Ok(one), Ok(other)) if one == other)
}
