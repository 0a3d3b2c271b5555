//! An open image file: a locked file of this host, or what a scheme has opened.
//!
//! In: [`OpenOptions`], or an [`Opened`]. Out: an [`ImageFile`], which may be sent to any thread;
//! and its [`Store`] on each reactor.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::host::{self, Geometry, Lock, Topology};
use blockyard_ring::{Handle, LockedFile, UringFile};
use rustix::fs::{FileType, Mode, OFlags};

use crate::cache::CacheMode;
use crate::file::lock::{LockError, take_lock};
use crate::file::{self, Abandoned, FileId, HostFile, access, path_of, record};
use crate::opened::{OpenError, OpenOptions, Opened};
use crate::range_lock::RangeLock;
use crate::sim::{Journal, Recorded};
use crate::storage::{Alignment, Capabilities};
use crate::store::Store;

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
    /// Opens and locks a file or block device of this host.
    pub(crate) fn open_file(options: &OpenOptions) -> Result<Self, OpenError> {
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

    /// Returns the image file of what a scheme has opened.
    pub(crate) fn other(opened: Arc<dyn Opened>, options: &OpenOptions) -> Self {
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
                let simulated = self.journal.as_ref().and_then(Journal::files);
                if let Some(files) = simulated {
                    return files.storage(&self.path, &**fd);
                }
                let (file, geometry) = (UringFile::new(handle, fd.clone())?, self.geometry);
                let file = HostFile { file, geometry, capabilities: self.capabilities };
                match &self.journal {
                    None => Store::File(file),
                    Some(journal) => {
                        Store::Recorded(Box::new(Recorded::new(file, journal, &self.path)?))
                    }
                }
            }
            Medium::Other(opened) => Store::Other(opened.clone().storage(handle)?),
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
        let mine = self.local_writer()?;
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

    /// Returns the descriptor. Returns an error if only a server or a program can write the data.
    fn local_writer(&self) -> Result<&Arc<LockedFile>, OpenError> {
        self.fd().ok_or_else(|| {
            let hint = "a commit needs a file of this host: use stream";
            let kind = io::ErrorKind::Unsupported;
            OpenError::Explained { path: self.path.clone(), hint, kind }
        })
    }

    fn local(&self) -> io::Result<&Arc<LockedFile>> {
        self.fd().ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "it is not a file of this host")
        })
    }

    /// Gives a new file the mode of this one, and if possible its owner and group. Does nothing if
    /// this is not a regular file of this host.
    pub fn share_access(&self, new: impl AsFd) -> io::Result<()> {
        self.fd().map_or(Ok(()), |fd| access::copy(fd.as_fd(), new))
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

    /// Returns the mark of an overlay that was abandoned. None: it was not, or the storage is no
    /// file of this host.
    pub fn abandoned(&self) -> Result<Option<Abandoned>, OpenError> {
        let read = self.fd().map_or(Ok(None), |fd| record::abandoned(fd, &self.path));
        let operation = "reading the mark of an abandoned overlay";
        read.map_err(|source| OpenError::Io { path: self.path.clone(), operation, source })
    }

    /// Durably removes the mark of an abandoned overlay, if there is one.
    pub fn remove_abandoned_mark(&self) -> io::Result<()> {
        self.fd().map_or(Ok(()), record::remove_mark)
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
        let writer = ImageFile::open_file(&options(&path, false)).unwrap();
        assert_eq!(writer.size(), 1000);
        assert!(matches!(
            ImageFile::open_file(&options(&path, true)),
            Err(OpenError::Locked { .. })
        ));
        drop(writer);
        let _a = ImageFile::open_file(&options(&path, true)).unwrap();
        let _b = ImageFile::open_file(&options(&path, true)).unwrap();
        assert!(matches!(
            ImageFile::open_file(&options(&path, false)),
            Err(OpenError::Locked { .. })
        ));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_writer_becomes_a_reader_and_no_other_process_takes_the_lock_in_between() {
        let path = scratch("reader", 4096);
        let writer = ImageFile::open_file(&options(&path, false)).unwrap();
        // The old path names another file now. The reader must not open that file.
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).unwrap();
        let _other = scratch("reader", 1);
        let reader = writer.reader().unwrap();
        assert!(ImageFile::open_file(&options(&moved, true)).is_err());
        writer.hand_lock_to(&reader).unwrap();
        let _second = ImageFile::open_file(&options(&moved, true)).unwrap();
        assert!(ImageFile::open_file(&options(&moved, false)).is_err());
        assert!(
            matches!(reader.writer(), Err(OpenError::Locked { .. })),
            "there is a second reader"
        );
        drop(_second);
        drop(writer);
        let writer = reader.writer().unwrap();
        assert!(ImageFile::open_file(&options(&moved, true)).is_err());
        writer.hand_lock_to(&reader).unwrap();
        drop(writer);
        assert!(
            ImageFile::open_file(&options(&moved, false)).is_err(),
            "the reader's lock is its own"
        );
        drop(reader);
        ImageFile::open_file(&options(&moved, false)).unwrap();
        std::fs::remove_file(&moved).unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn errors_name_the_file_and_what_to_do() {
        let missing =
            ImageFile::open_file(&options(Path::new("/nonexistent/x.img"), false)).unwrap_err();
        assert_eq!(missing.to_string(), "image /nonexistent/x.img: there is no such file");
        let folder = ImageFile::open_file(&options(&std::env::temp_dir(), false)).unwrap_err();
        assert!(
            folder.to_string().contains("must be a regular file or a block device"),
            "{folder}"
        );
        let device = ImageFile::open_file(&options(Path::new("/dev/null"), false)).unwrap_err();
        assert!(
            device.to_string().contains("must be a regular file or a block device"),
            "{device}"
        );
    }
}
