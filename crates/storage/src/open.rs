//! Opens the storage of an image by its name: a file of this host, or what a scheme of the table
//! opens.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::host::{self, Geometry, Lock, Topology};
use blockyard_ring::parcel::Parcel;
use blockyard_ring::{Handle, LockedFile, UringFile};
use rustix::fs::{FileType, Mode, OFlags};

use crate::cache::CacheMode;
use crate::error::{ErrorKind, StorageError};
use crate::file::lock::{LockError, take_lock};
use crate::file::{self, FileId, HostFile, path_of, record};
use crate::nbd;
use crate::range_lock::RangeLock;
use crate::schemes::{SCHEMES, Store, scheme_of};
use crate::sim::{Journal, Recorded};
use crate::storage::{Alignment, Capabilities};

/// Options for opening an image file.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub path: PathBuf,
    /// A descriptor of the file (O_PATH suffices). The file is opened through it, even if the path
    /// now names another file.
    pub found: Option<Arc<OwnedFd>>,
    pub read_only: bool,
    pub cache: CacheMode,
    /// Whether to open without a lock, so that another program may write to the file. Only readers
    /// may do this.
    pub force_share: bool,
    /// For images on an NBD server.
    pub nbd: nbd::Options,
    pub overlaid: Overlaid,
    /// Records all operations on the file, for simulated power cuts.
    pub journal: Option<Journal>,
    /// A storage that is open already; then `path` is only its name.
    pub given: Option<Arc<dyn Opened>>,
}

/// What to do when an image is opened for writing and a live snapshot has put an overlay on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Overlaid {
    #[default]
    Refuse,
    /// Open the image and remove the record: the overlay is abandoned.
    Abandon,
    /// Open the image if the record names one of these files, which lie over the image and hide
    /// what is written to it.
    Below(Vec<PathBuf>),
}

impl OpenOptions {
    pub fn new(path: impl Into<PathBuf>, read_only: bool, cache: CacheMode) -> Self {
        let (found, nbd, overlaid, journal, given) = Default::default();
        OpenOptions {
            path: path.into(),
            found,
            read_only,
            cache,
            force_share: false,
            nbd,
            overlaid,
            journal,
            given,
        }
    }
}

/// Why an image could not be opened, and what the operator can do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("image {}: {hint}", path.display())]
    Open { path: PathBuf, hint: &'static str, source: io::Error },
    /// Like `Open`, without the text of the kernel's error, which would only repeat the hint.
    #[error("image {}: {hint}", path.display())]
    Explained { path: PathBuf, hint: &'static str, kind: io::ErrorKind },
    #[error("image {} is in use by {holder}: an image is opened by one writer, \
             or by any number of readers", path.display())]
    Locked { path: PathBuf, holder: String },
    #[error("image {}: a live snapshot has put overlay {} on it, and writing to it would damage \
             the overlay: serve the overlay, or merge it (blockyard image commit), or abandon it \
             (blockyard serve --abandon-overlay)",
             path.display(), overlay.to_string_lossy().escape_debug())]
    Overlaid { path: PathBuf, overlay: PathBuf },
    #[error("image {}: {advice}", path.display())]
    Sandboxed { path: PathBuf, advice: String, source: io::Error },
    #[error("image {}: {operation}", path.display())]
    Io { path: PathBuf, operation: &'static str, source: io::Error },
    #[error(
        "image {}: there is no such file, and no storage has such a name: use a path, or {forms}",
        path.display()
    )]
    Scheme { path: PathBuf, forms: String },
    #[error("image {}: {error}", path.display())]
    Storage { path: PathBuf, error: StorageError },
}

impl OpenError {
    /// Returns whether the image could perhaps be opened by a reader.
    pub fn may_be_read(&self) -> bool {
        use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        match self {
            OpenError::Explained { kind, .. } => {
                matches!(kind, PermissionDenied | ReadOnlyFilesystem)
            }
            OpenError::Storage { error, .. } => error.kind == ErrorKind::ReadOnly,
            // The holder may be a writer, which excludes readers.
            OpenError::Open { .. }
            | OpenError::Locked { .. }
            | OpenError::Overlaid { .. }
            | OpenError::Io { .. }
            | OpenError::Sandboxed { .. }
            | OpenError::Scheme { .. } => false,
        }
    }
}

/// A program that decides where the data of an image lie.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name of the image, such as `exec:/path/of/program`.
    pub image: String,
    /// The files in which the data lie.
    pub files: Vec<PathBuf>,
}

/// An open storage that is no file of this host, before a reactor uses it.
pub trait Opened: fmt::Debug + Send + Sync {
    /// Returns the storage on one reactor.
    fn storage(self: Arc<Self>, handle: &Handle) -> io::Result<Store>;
    /// Returns the normalized name by which an image may refer to the storage.
    fn name(&self) -> String;
    /// Returns the storage's kind for `image info`: "nbd".
    fn kind(&self) -> &'static str;
    /// Returns the storage's size in bytes.
    fn size(&self) -> u64;
    fn geometry(&self) -> Geometry;
    fn capabilities(&self) -> Capabilities;
    /// Returns whether io_uring moves all data between files of this host and the memory of the
    /// requests. Else this process copies them.
    fn has_files(&self) -> bool {
        false
    }
    /// Returns the program that decides where the data lie, if there is one.
    fn program(&self) -> Option<Program> {
        None
    }
    /// Gives up the program that decides where the data lie, for the next server. None: there is
    /// none. The storage must be flushed and not be used any more.
    fn hand_over(&self) -> io::Result<Option<Parcel>> {
        Ok(None)
    }
    /// The program that decides where the data lie is this server's alone now, after a hand-over.
    fn own_program(&self) {}
    /// Returns the device that holds the storage's data and that other disks may share, and whether
    /// it is rotational. None: no other disk can share the device.
    fn device(&self) -> io::Result<Option<(String, bool)>>;
}

/// What holds the data.
#[derive(Clone, Debug)]
enum Medium {
    File(Arc<LockedFile>),
    Other(Arc<dyn Opened>),
}

/// An open, locked image file, or what a scheme opened. The lock belongs to the open file
/// description, so it lasts until the last copy is dropped. A storage of a scheme locks itself, if
/// it can.
#[derive(Debug)]
pub struct ImageFile {
    path: PathBuf,
    medium: Medium,
    size: AtomicU64,
    geometry: Geometry,
    /// Of the device under a file. Other files on the device use it while this one is open.
    topology: Option<Arc<Topology>>,
    capabilities: Capabilities,
    read_only: bool,
    /// Identity of the file. None: the storage is not a file of this host.
    id: Option<FileId>,
    cache: CacheMode,
    range_lock: Arc<RangeLock>,
    journal: Option<Journal>,
}

impl ImageFile {
    /// Opens and locks an image file, or connects to what its name's scheme describes.
    pub fn open(options: &OpenOptions) -> Result<Self, OpenError> {
        if let Some(opened) = &options.given {
            return Ok(ImageFile::other(opened.clone(), options));
        }
        match scheme_of(&options.path) {
            Some((scheme, name)) => {
                let failed = |error| OpenError::Storage { path: options.path.clone(), error };
                Ok(ImageFile::other(scheme.open(name, options).map_err(failed)?, options))
            }
            None if is_unknown_uri(&options.path) => {
                let forms =
                    SCHEMES.iter().map(|scheme| scheme.forms()).collect::<Vec<_>>().join(", or ");
                Err(OpenError::Scheme { path: options.path.clone(), forms })
            }
            None => ImageFile::open_file(options),
        }
    }

    fn open_file(options: &OpenOptions) -> Result<Self, OpenError> {
        let path = options.path.clone();
        let (fd, direct) = file::open(&path, options)?;
        let failed = |operation| {
            let path = path.clone();
            move |source| OpenError::Io { path, operation, source }
        };
        let lock = match options.read_only {
            true if options.force_share => Lock::None,
            true => Lock::Shared,
            false => Lock::Exclusive,
        };
        take_lock(&path, fd.as_fd(), lock).map_err(|e| match e {
            LockError::Held(holder) => OpenError::Locked { path: path.clone(), holder },
            LockError::Io(e) => {
                failed("locking it (an OFD lock; network file systems may not have them)")(e)
            }
        })?;
        if !options.read_only {
            options.check_record(&fd)?;
        }
        let size = host::file_size(&fd).map_err(failed("finding its size"))?;
        let topology = Topology::of(&fd).map_err(failed("reading the geometry of its device"))?;
        let stat = rustix::fs::fstat(&fd)
            .map_err(io::Error::from)
            .map_err(failed("finding what it is"))?;
        let fixed_length = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        Ok(ImageFile {
            size: AtomicU64::new(size),
            geometry: host::geometry_on(&fd, &topology),
            topology: Some(topology),
            medium: Medium::File(Arc::new(fd.into())),
            capabilities: Capabilities { direct, fixed_length },
            read_only: options.read_only,
            id: Some(FileId::of(&stat)),
            cache: options.cache,
            range_lock: Arc::default(),
            journal: options.journal.clone(),
            path,
        })
    }

    fn other(opened: Arc<dyn Opened>, options: &OpenOptions) -> Self {
        ImageFile {
            path: options.path.clone(),
            size: AtomicU64::new(opened.size()),
            geometry: opened.geometry(),
            topology: None,
            capabilities: opened.capabilities(),
            read_only: options.read_only,
            id: None,
            cache: options.cache,
            range_lock: Arc::default(),
            journal: None,
            medium: Medium::Other(opened),
        }
    }

    /// Returns the file on one reactor.
    pub fn storage(&self, handle: &Handle) -> io::Result<Store> {
        Ok(match &self.medium {
            Medium::File(fd) => {
                let (file, geometry) = (UringFile::new(handle, fd.clone())?, self.geometry);
                let file = HostFile { file, geometry, capabilities: self.capabilities };
                match &self.journal {
                    None => Store::File(file),
                    Some(journal) => {
                        Store::Recorded(Box::new(Recorded::new(file, journal, &self.path)?))
                    }
                }
            }
            Medium::Other(opened) => opened.clone().storage(handle)?,
        })
    }

    /// Opens the same file for reading by a new descriptor, without a lock. See
    /// [`ImageFile::hand_lock_to`].
    pub fn reader(&self) -> io::Result<ImageFile> {
        let fd = self.open_again(OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY)?;
        Ok(ImageFile { medium: Medium::File(Arc::new(fd.into())), read_only: true, ..self.twin() })
    }

    /// Opens the same file for writing by a new descriptor. It takes over this one's lock and makes
    /// it exclusive. [`ImageFile::hand_lock_to`] returns the lock.
    pub fn writer(&self) -> Result<ImageFile, OpenError> {
        let failed =
            |operation| move |source| OpenError::Io { path: self.path.clone(), operation, source };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opening = "opening it once more, to write to it";
        let mine = self.local().map_err(failed(opening))?;
        let fd = Arc::new(LockedFile::from(self.open_again(flags).map_err(failed(opening))?));
        let writer =
            ImageFile { medium: Medium::File(fd.clone()), read_only: false, ..self.twin() };
        let locking = failed("locking it (an OFD lock)");
        // A shared lock is held at each moment, so that no writer can take the file in between.
        let locked = host::lock(&fd, Lock::Shared)
            .and_then(|_| host::lock(mine, Lock::None))
            .map_err(LockError::Io)
            .and_then(|_| take_lock(&self.path, fd.as_fd(), Lock::Exclusive));
        if locked.is_err() {
            host::lock(mine, Lock::Shared).map_err(locking)?;
        }
        match locked {
            Ok(()) => Ok(writer),
            Err(LockError::Held(holder)) => {
                Err(OpenError::Locked { path: self.path.clone(), holder })
            }
            Err(LockError::Io(e)) => Err(locking(e)),
        }
    }

    /// Opens the file by its descriptor, because its path may name another file by now.
    fn open_again(&self, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = if self.direct() { flags | OFlags::DIRECT } else { flags };
        Ok(rustix::fs::open(path_of(self.local()?.as_fd()), flags, Mode::empty())?)
    }

    /// Returns a copy of the file's properties, without the lock.
    fn twin(&self) -> ImageFile {
        ImageFile {
            path: self.path.clone(),
            medium: self.medium.clone(),
            size: AtomicU64::new(self.size()),
            geometry: self.geometry,
            topology: self.topology.clone(),
            capabilities: self.capabilities,
            read_only: self.read_only,
            id: self.id,
            cache: self.cache,
            range_lock: Arc::default(),
            journal: self.journal.clone(),
        }
    }

    /// Turns this writer's lock into a shared lock of `reader`. At no moment can another process
    /// write to the file.
    pub fn hand_lock_to(&self, reader: &ImageFile) -> io::Result<()> {
        let (Medium::File(mine), Medium::File(theirs)) = (&self.medium, &reader.medium) else {
            return Ok(());
        };
        host::lock(mine, Lock::Shared)?;
        if Arc::ptr_eq(mine, theirs) {
            return Ok(());
        }
        host::lock(theirs, Lock::Shared)?;
        host::lock(mine, Lock::None).map(|_| ())
    }

    fn local(&self) -> io::Result<&Arc<LockedFile>> {
        self.fd().ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "it is not a file of this host")
        })
    }

    /// Durably records that the overlay is on this image; see `record`.
    pub fn record_overlay(&self, overlay: &Path) -> io::Result<()> {
        let write = || record::write(self.local()?, &self.path, overlay);
        self.journal
            .as_ref()
            .map_or_else(write, |journal| journal.note(&self.path, Some(overlay), write))
    }

    /// Durably removes the record of an overlay, if there is one.
    pub fn remove_overlay_record(&self) -> io::Result<()> {
        let remove = || self.fd().map_or(Ok(()), record::remove);
        self.journal.as_ref().map_or_else(remove, |journal| journal.note(&self.path, None, remove))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the descriptor. None: the storage is no file of this host.
    pub fn fd(&self) -> Option<&Arc<LockedFile>> {
        match &self.medium {
            Medium::File(fd) => Some(fd),
            Medium::Other(_) => None,
        }
    }

    /// Returns whether io_uring moves all data between files of this host and the memory of the
    /// requests. A map of a target has such files, but no descriptor of its own.
    pub fn has_files(&self) -> bool {
        match &self.medium {
            Medium::File(_) => true,
            Medium::Other(opened) => opened.has_files(),
        }
    }

    /// Returns what a scheme opened. None: the storage is a file of this host.
    pub fn opened(&self) -> Option<&dyn Opened> {
        match &self.medium {
            Medium::File(_) => None,
            Medium::Other(opened) => Some(&**opened),
        }
    }

    /// Returns the device that holds the file's data and that other disks may share, and whether it
    /// is rotational. None: no other disk can share the device.
    pub fn device(&self) -> io::Result<Option<(String, bool)>> {
        match &self.medium {
            Medium::File(fd) => host::backing_device(fd).map(Some),
            Medium::Other(opened) => opened.device(),
        }
    }

    /// Returns the file's length in bytes, which need not be a multiple of a sector.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Reads the file's length again, after a resize. Returns the new length in bytes.
    pub fn refresh_size(&self) -> io::Result<u64> {
        let size = match &self.medium {
            Medium::File(fd) => host::file_size(fd)?,
            Medium::Other(opened) => opened.size(),
        };
        self.size.store(size, Ordering::Relaxed);
        Ok(size)
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns whether requests bypass the page cache. This may be false although the cache mode
    /// asks for it.
    pub fn direct(&self) -> bool {
        self.capabilities.direct
    }

    /// Returns whether the storage is a block device or an export, not a file.
    pub fn is_device(&self) -> bool {
        self.capabilities.fixed_length
    }

    /// Returns what requests must be multiples of.
    pub fn alignment(&self) -> Alignment {
        Alignment::of(&self.geometry, self.capabilities)
    }

    /// Returns the lock for read-modify-write, which all reactors that use this file share.
    pub fn range_lock(&self) -> &Arc<RangeLock> {
        &self.range_lock
    }

    pub fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    /// Returns the identity of the file. None: the storage is no file of this host.
    pub fn id(&self) -> Option<FileId> {
        self.id
    }

    /// Returns the cache mode that was requested.
    pub fn cache(&self) -> CacheMode {
        self.cache
    }
}

/// Returns whether the name looks like a URI, and is not the path of an existing file.
fn is_unknown_uri(path: &Path) -> bool {
    path.to_str().is_some_and(|name| name.contains("://")) && !path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str, len: u64) -> PathBuf {
        let path =
            std::env::temp_dir().join(format!("blockyard-open-{name}-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        path
    }

    fn options(path: &Path, read_only: bool) -> OpenOptions {
        OpenOptions::new(path, read_only, CacheMode::Writeback)
    }

    #[test]
    fn an_image_has_one_writer_or_many_readers() {
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
    fn a_writer_becomes_a_reader_and_no_other_process_takes_the_lock_in_between() {
        let path = scratch("reader", 4096);
        let writer = ImageFile::open(&options(&path, false)).unwrap();
        // The old path names another file now. The reader must not open that file.
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).unwrap();
        let _other = scratch("reader", 1);
        let reader = writer.reader().unwrap();
        assert!(ImageFile::open(&options(&moved, true)).is_err());
        writer.hand_lock_to(&reader).unwrap();
        let _second = ImageFile::open(&options(&moved, true)).unwrap();
        assert!(ImageFile::open(&options(&moved, false)).is_err());
        assert!(
            matches!(reader.writer(), Err(OpenError::Locked { .. })),
            "there is a second reader"
        );
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
    fn the_error_for_an_unknown_scheme_lists_the_known_ones() {
        let error = ImageFile::open(&options(Path::new("http://host/disk.img"), false))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("image http://host/disk.img: there is no such file"), "{error}");
        for scheme in SCHEMES {
            assert!(error.contains(scheme.forms()), "{error}");
        }
    }

    #[test]
    fn errors_name_the_file_and_what_to_do() {
        let missing =
            ImageFile::open(&options(Path::new("/nonexistent/x.img"), false)).unwrap_err();
        assert_eq!(missing.to_string(), "image /nonexistent/x.img: there is no such file");
        let folder = ImageFile::open(&options(&std::env::temp_dir(), false)).unwrap_err();
        assert!(
            folder.to_string().contains("must be a regular file or a block device"),
            "{folder}"
        );
        let device = ImageFile::open(&options(Path::new("/dev/null"), false)).unwrap_err();
        assert!(
            device.to_string().contains("must be a regular file or a block device"),
            "{device}"
        );
    }
}
