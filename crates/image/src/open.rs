//! Opening an image file: O_DIRECT where the cache mode asks for it, the lock, the geometry.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::host::{self, Geometry, Lock};
use blockyard_ring::sim::{Journal, Recorded};
use blockyard_ring::{Handle, LockedFile, UringFile};
use rustix::fs::{FileType, Mode, OFlags};

use crate::cache::CacheMode;
use crate::file_id::FileId;
use crate::lock::take_lock;
use crate::nbd::{self, Remote};
use crate::overlay::record;
use crate::range_lock::RangeLock;
use crate::raw::Raw;
use crate::store::Store;

#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub path: PathBuf,
    /// A descriptor of the file (O_PATH will do). It is opened through this, whatever has its name now.
    pub found: Option<Arc<OwnedFd>>,
    pub read_only: bool,
    pub cache: CacheMode,
    /// Takes no lock: another program may write to the file meanwhile. For readers only.
    pub force_share: bool,
    /// Of images that lie on an NBD server.
    pub nbd: nbd::Options,
    pub overlaid: Overlaid,
    /// Notes what is done to the file, for simulated power cuts.
    pub journal: Option<Journal>,
}

/// What to do if the image is to be written to and a live snapshot has put an overlay on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Overlaid {
    #[default]
    Refuse,
    /// Open it and remove the record: the overlay is given up.
    Abandon,
    /// Open it if the record names one of these files: they hide what is written.
    Below(Vec<PathBuf>),
}

impl OpenOptions {
    pub fn new(path: impl Into<PathBuf>, read_only: bool, cache: CacheMode) -> Self {
        let (found, nbd, overlaid, journal) = Default::default();
        OpenOptions { path: path.into(), found, read_only, cache, force_share: false, nbd, overlaid, journal }
    }
}

/// Descriptors of an image's files, which do not have their names yet. None: the file is found by its name.
/// Never those of a file with a name: a qcow2 image without one is written without the syncs that order its metadata.
#[derive(Clone, Debug, Default)]
pub struct OpenedFiles {
    pub image: Option<Arc<OwnedFd>>,
    /// The external data file of a qcow2 image.
    pub data: Option<Arc<OwnedFd>>,
}

/// Why an image could not be opened: what, where, and what a person can do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("image {}: {hint}", path.display())]
    Open { path: PathBuf, hint: &'static str, source: io::Error },
    #[error("image {} is in use by {holder}: an image is opened by one writer, \
             or by any number of readers", path.display())]
    Locked { path: PathBuf, holder: String },
    #[error("image {}: a live snapshot has put overlay {} on it, and writing to it would damage the overlay: serve the \
             overlay, or merge it (blockyard image commit), or give it up (blockyard serve --abandon-overlay)",
             path.display(), overlay.to_string_lossy().escape_debug())]
    Overlaid { path: PathBuf, overlay: PathBuf },
    #[error("image {}: {operation}", path.display())]
    Io { path: PathBuf, operation: &'static str, source: io::Error },
    #[error("image {}: {what}", path.display())]
    Remote { path: PathBuf, what: String },
}

impl OpenError {
    /// Returns whether the image could perhaps be opened by a reader.
    pub fn may_be_read(&self) -> bool {
        use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        match self {
            OpenError::Open { source, .. } => matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem),
            OpenError::Remote { what, .. } => what == READ_ONLY_EXPORT,
            // The holder may be a writer, which bears no reader.
            OpenError::Locked { .. } | OpenError::Overlaid { .. } | OpenError::Io { .. } => false,
        }
    }
}

/// Why an export cannot be opened for writing.
pub(crate) const READ_ONLY_EXPORT: &str = "the server offers it for reading only";

/// Where the bytes are.
#[derive(Clone, Debug)]
enum Medium {
    File(Arc<LockedFile>),
    Nbd(Arc<Remote>),
}

/// An open, locked image file. The lock is on the open file description: it lasts as long as the last copy of this. (An
/// export of an NBD server is such a file, too. Nobody locks it but its server.)
#[derive(Debug)]
pub struct ImageFile {
    path: PathBuf,
    medium: Medium,
    size: AtomicU64,
    geometry: Geometry,
    read_only: bool,
    direct: bool,
    is_device: bool,
    /// None: it is no file of this host.
    id: Option<FileId>,
    cache: CacheMode,
    pub(crate) range_lock: Arc<RangeLock>,
    journal: Option<Journal>,
}

impl ImageFile {
    pub fn open(options: &OpenOptions) -> Result<Self, OpenError> {
        let path = options.path.clone();
        if let Some(uri) = path.to_str().filter(|name| nbd::uri::is_uri(name)) {
            let remote = Remote::open(uri, options.read_only, options.nbd);
            let remote = remote.map_err(|what| OpenError::Remote { path: path.clone(), what })?;
            return Ok(ImageFile::remote(path, remote, options));
        }
        let (fd, direct) = open_file(&path, options)?;
        let failed = |operation| {
            let path = path.clone();
            move |source| OpenError::Io { path, operation, source }
        };
        let lock = match options.read_only {
            true if options.force_share => Lock::None,
            true => Lock::Shared,
            false => Lock::Exclusive,
        };
        let locked = take_lock(&path, fd.as_fd(), lock);
        match locked.map_err(failed("locking it (an OFD lock; network file systems may not have them)"))? {
            Ok(()) => {}
            Err(holder) => return Err(OpenError::Locked { path, holder }),
        }
        if !options.read_only {
            options.judge_record(&fd)?;
        }
        let size = host::file_size(&fd).map_err(failed("finding its size"))?;
        let geometry = host::geometry(&fd).map_err(failed("reading the geometry of its device"))?;
        let stat = rustix::fs::fstat(&fd).map_err(io::Error::from).map_err(failed("finding what it is"))?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        Ok(ImageFile {
            medium: Medium::File(Arc::new(fd.into())),
            size: AtomicU64::new(size),
            geometry,
            read_only: options.read_only,
            direct,
            is_device,
            id: Some(FileId::of(&stat)),
            cache: options.cache,
            range_lock: Arc::default(),
            journal: options.journal.clone(),
            path,
        })
    }

    fn remote(path: PathBuf, remote: Arc<Remote>, options: &OpenOptions) -> Self {
        let terms = remote.terms();
        let geometry = Geometry {
            logical_block: terms.minimum.max(512),
            physical_block: terms.preferred.max(512),
            minimum_io: terms.preferred.max(512),
            optimal_io: 0,
            alignment_offset: 0,
            direct_memory: 1,
            direct_offset: terms.minimum,
            rotational: terms.has(nbd::wire::export::ROTATIONAL),
        };
        ImageFile {
            path,
            size: AtomicU64::new(terms.size),
            geometry,
            read_only: options.read_only,
            // No page cache of this host is between.
            direct: true,
            is_device: true,
            id: None,
            cache: options.cache,
            range_lock: Arc::default(),
            journal: None,
            medium: Medium::Nbd(remote),
        }
    }

    /// The file on one reactor.
    pub fn storage(&self, handle: &Handle) -> io::Result<Store> {
        Ok(match &self.medium {
            Medium::File(fd) => {
                let file = UringFile::new(handle, fd.clone())?;
                match &self.journal {
                    None => Store::File(file),
                    Some(journal) => Store::Recorded(Box::new(Recorded::new(file, journal, &self.path)?)),
                }
            }
            Medium::Nbd(remote) => Store::Nbd(remote.storage(handle)?),
        })
    }

    /// The raw image that it is, or that a format lies in, on one reactor.
    pub fn raw(&self, handle: &Handle) -> io::Result<Raw<Store>> {
        Ok(Raw::new(self.storage(handle)?, self))
    }

    /// The same file by a descriptor that only reads, and is not locked yet: see [`ImageFile::hand_lock_to`].
    pub(crate) fn reader(&self) -> io::Result<ImageFile> {
        let fd = self.open_again(OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY)?;
        Ok(ImageFile { medium: Medium::File(Arc::new(fd.into())), read_only: true, ..self.twin() })
    }

    /// The same file by a descriptor that also writes; it takes this one's lock over, and more: nobody else may have the file
    /// open. [`ImageFile::hand_lock_to`] gives the lock back.
    pub(crate) fn writer(&self) -> Result<ImageFile, OpenError> {
        let failed = |operation| move |source| OpenError::Io { path: self.path.clone(), operation, source };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opening = "opening it once more, to write to it";
        let mine = self.local().map_err(failed(opening))?;
        let fd = Arc::new(LockedFile::from(self.open_again(flags).map_err(failed(opening))?));
        let writer = ImageFile { medium: Medium::File(fd.clone()), read_only: false, ..self.twin() };
        let locking = failed("locking it (an OFD lock)");
        // A reader's lock at each moment, so that no writer comes between.
        let locked = host::lock(&fd, Lock::Shared)
            .and_then(|_| host::lock(mine, Lock::None))
            .and_then(|_| take_lock(&self.path, fd.as_fd(), Lock::Exclusive));
        if !matches!(locked, Ok(Ok(()))) {
            host::lock(mine, Lock::Shared).map_err(locking)?;
        }
        match locked.map_err(locking)? {
            Ok(()) => Ok(writer),
            Err(holder) => Err(OpenError::Locked { path: self.path.clone(), holder }),
        }
    }

    /// By its descriptor: under its name there may be another file meanwhile.
    fn open_again(&self, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = if self.direct { flags | OFlags::DIRECT } else { flags };
        Ok(rustix::fs::open(through(self.local()?.as_fd()), flags, Mode::empty())?)
    }

    /// What is known of the file, without its lock.
    fn twin(&self) -> ImageFile {
        ImageFile {
            path: self.path.clone(),
            medium: self.medium.clone(),
            size: AtomicU64::new(self.size()),
            geometry: self.geometry,
            read_only: self.read_only,
            direct: self.direct,
            is_device: self.is_device,
            id: self.id,
            cache: self.cache,
            range_lock: Arc::default(),
            journal: self.journal.clone(),
        }
    }

    /// From a writer's lock to a reader's, which `reader` has from now on. At no moment may anybody else write to the file.
    pub(crate) fn hand_lock_to(&self, reader: &ImageFile) -> io::Result<()> {
        let (Medium::File(mine), Medium::File(theirs)) = (&self.medium, &reader.medium) else { return Ok(()) };
        host::lock(mine, Lock::Shared)?;
        if Arc::ptr_eq(mine, theirs) {
            return Ok(());
        }
        host::lock(theirs, Lock::Shared)?;
        host::lock(mine, Lock::None).map(|_| ())
    }

    fn local(&self) -> io::Result<&Arc<LockedFile>> {
        self.fd().ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "it lies on an NBD server"))
    }

    /// Records durably that the overlay lies on this image; see [`record`].
    pub(crate) fn record_overlay(&self, overlay: &Path) -> io::Result<()> {
        let write = || record::write(self.local()?, &self.path, overlay);
        self.journal.as_ref().map_or_else(write, |journal| journal.note(&self.path, Some(overlay), write))
    }

    pub(crate) fn remove_overlay_record(&self) -> io::Result<()> {
        let remove = || self.fd().map_or(Ok(()), record::remove);
        self.journal.as_ref().map_or_else(remove, |journal| journal.note(&self.path, None, remove))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// None: it is no file of this host.
    pub fn fd(&self) -> Option<&Arc<LockedFile>> {
        match &self.medium {
            Medium::File(fd) => Some(fd),
            Medium::Nbd(_) => None,
        }
    }

    /// The server's export that it is.
    pub fn remote_image(&self) -> Option<&Arc<Remote>> {
        match &self.medium {
            Medium::File(_) => None,
            Medium::Nbd(remote) => Some(remote),
        }
    }

    /// The file's length in bytes, which need not be a multiple of a sector.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Asks the file again how long it is (it was resized by a person); answers the new length.
    pub fn refresh_size(&self) -> io::Result<u64> {
        let Some(fd) = self.fd() else { return Ok(self.size()) };
        let size = host::file_size(fd)?;
        self.size.store(size, Ordering::Relaxed);
        Ok(size)
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether the page cache is really bypassed: `cache` may have asked for it in vain.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// A block device, not a file.
    pub fn is_device(&self) -> bool {
        self.is_device
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    /// Which file of this host it is; None: it lies on an NBD server.
    pub fn id(&self) -> Option<FileId> {
        self.id
    }

    pub fn cache(&self) -> CacheMode {
        self.cache
    }
}

impl OpenOptions {
    /// Returns an error if a live snapshot has put an overlay on the file and this open may not write beneath it.
    fn judge_record(&self, fd: &OwnedFd) -> Result<(), OpenError> {
        let path = self.path.clone();
        let failed = |operation| move |source| OpenError::Io { path: self.path.clone(), operation, source };
        let read = record::read(fd, &path).map_err(failed("reading the record of its overlay"))?;
        let Some(overlay) = read else { return Ok(()) };
        match &self.overlaid {
            Overlaid::Abandon => {
                record::remove(fd).map_err(failed("removing the record of its overlay"))?;
                tracing::warn!("image {}: overlay {} is given up", path.display(), overlay.display());
                Ok(())
            }
            Overlaid::Below(overlays) if overlays.iter().any(|known| is_same_file(known, &overlay)) => Ok(()),
            Overlaid::Below(_) | Overlaid::Refuse => Err(OpenError::Overlaid { path, overlay }),
        }
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    matches!((FileId::of_path(one), FileId::of_path(other)), (Ok(one), Ok(other)) if one == other)
}

/// The path that leads to the file of a descriptor.
pub(crate) fn through(fd: impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()).into()
}

/// Opens the file; the answer's second part says whether with O_DIRECT.
fn open_file(path: &Path, options: &OpenOptions) -> Result<(OwnedFd, bool), OpenError> {
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY;
    let found = options.found.as_ref().map(through);
    let place = found.as_deref().unwrap_or(path);
    let open = |flags| rustix::fs::open(place, flags, Mode::empty());
    // A FIFO would hang the open below; a folder would say something odd. Look first.
    let stat = rustix::fs::stat(place).map_err(|e| explain(path, options.read_only, e.into()))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
        let source = io::Error::new(io::ErrorKind::InvalidInput, format!("it is a {kind:?}"));
        return Err(OpenError::Open { path: path.into(), hint: "it must be a regular file or a block device", source });
    }
    if options.cache.direct() {
        match open(flags | OFlags::DIRECT) {
            Ok(fd) => return Ok((fd, true)),
            Err(rustix::io::Errno::INVAL) => tracing::warn!(
                "image {}: its file system has no O_DIRECT: using the host's page cache (as cache mode {} would)",
                path.display(),
                if options.cache.write_back() { CacheMode::Writeback } else { CacheMode::Writethrough },
            ),
            Err(e) => return Err(explain(path, options.read_only, e.into())),
        }
    }
    open(flags).map(|fd| (fd, false)).map_err(|e| explain(path, options.read_only, e.into()))
}

fn explain(path: &Path, read_only: bool, source: io::Error) -> OpenError {
    let hint = match source.kind() {
        io::ErrorKind::NotFound => "there is no such file",
        io::ErrorKind::PermissionDenied if read_only => "no permission to read it (see its owner and mode)",
        io::ErrorKind::PermissionDenied => "no permission to open it for writing (see its owner and mode)",
        io::ErrorKind::ReadOnlyFilesystem => "it lies on a read-only file system, and is opened for writing",
        io::ErrorKind::IsADirectory => "it is a folder",
        _ => "cannot open it",
    };
    OpenError::Open { path: path.into(), hint, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str, len: u64) -> PathBuf {
        let path = std::env::temp_dir().join(format!("blockyard-open-{name}-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        path
    }

    fn options(path: &Path, read_only: bool) -> OpenOptions {
        OpenOptions::new(path, read_only, CacheMode::Writeback)
    }

    #[test]
    fn one_writer_or_many_readers() {
        let path = scratch("lock", 1000);
        let writer = ImageFile::open(&options(&path, false)).unwrap();
        assert_eq!(writer.size(), 1000);
        assert!(matches!(ImageFile::open(&options(&path, true)), Err(OpenError::Locked { .. })));
        drop(writer);
        let _a = ImageFile::open(&options(&path, true)).unwrap();
        let _b = ImageFile::open(&options(&path, true)).unwrap();
        assert!(matches!(ImageFile::open(&options(&path, false)), Err(OpenError::Locked { .. })));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_writer_becomes_a_reader_and_nobody_gets_between() {
        let path = scratch("reader", 4096);
        let writer = ImageFile::open(&options(&path, false)).unwrap();
        // Under its old name there is another file, which is not meant.
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).unwrap();
        let _other = scratch("reader", 1);
        let reader = writer.reader().unwrap();
        assert!(ImageFile::open(&options(&moved, true)).is_err());
        writer.hand_lock_to(&reader).unwrap();
        let _second = ImageFile::open(&options(&moved, true)).unwrap();
        assert!(ImageFile::open(&options(&moved, false)).is_err());
        assert!(matches!(reader.writer(), Err(OpenError::Locked { .. })), "there is a second reader");
        drop(_second);
        drop(writer);
        let writer = reader.writer().unwrap();
        assert!(ImageFile::open(&options(&moved, true)).is_err());
        writer.hand_lock_to(&reader).unwrap();
        drop(writer);
        assert!(ImageFile::open(&options(&moved, false)).is_err(), "the reader's lock is its own");
        drop(reader);
        ImageFile::open(&options(&moved, false)).unwrap();
        std::fs::remove_file(&moved).unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn errors_name_the_file_and_the_way_out() {
        let missing = ImageFile::open(&options(Path::new("/nonexistent/x.img"), false)).unwrap_err();
        assert_eq!(missing.to_string(), "image /nonexistent/x.img: there is no such file");
        let folder = ImageFile::open(&options(&std::env::temp_dir(), false)).unwrap_err();
        assert!(folder.to_string().contains("must be a regular file or a block device"), "{folder}");
        let device = ImageFile::open(&options(Path::new("/dev/null"), false)).unwrap_err();
        assert!(device.to_string().contains("must be a regular file or a block device"), "{device}");
    }
}
