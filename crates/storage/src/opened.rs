//! What an open of an image takes and returns, whatever opens it.
//!
//! In: a name and [`OpenOptions`]. Out: an [`Opened`] (a storage that is no file of this host), or
//! an [`OpenError`], which says what the operator can do.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_ring::Handle;
use blockyard_ring::host::Geometry;
use blockyard_ring::parcel::Parcel;

use crate::boxed::AnyStore;
use crate::cache::CacheMode;
use crate::error::{ErrorKind, StorageError};
use crate::nbd::options as nbd;
use crate::sim::Journal;
use crate::storage::Capabilities;

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
    /// Open the image and remove the record: the overlay is abandoned, and marked so.
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
    #[error("image {0}: a live snapshot has put overlay {1} on it, and the disk's data are in the \
             overlay now: serve the overlay; or merge it (blockyard image commit {1}), if it still \
             has {0} as its backing file; or abandon the overlay and its data \
             (blockyard serve --abandon-overlay)",
             path.display(), overlay.to_string_lossy().escape_debug())]
    Overlaid { path: PathBuf, overlay: PathBuf },
    #[error("image {0}: this overlay was abandoned (serve --abandon-overlay): {1} was written to \
             without it, so the overlay shows a mixture of old and new data. Remove it; or copy \
             what it shows (blockyard image convert {0} COPY). If {1} has its old data again: \
             blockyard image rebase -u -F FORMAT -b {1} {0}",
             path.display(), base.to_string_lossy().escape_debug())]
    Abandoned { path: PathBuf, base: PathBuf },
    #[error("image {}: {advice}", path.display())]
    Sandboxed { path: PathBuf, advice: String, source: io::Error },
    #[error("image {}: it belongs to the server's configuration or is a program of it, which no disk may use", path.display())]
    Reserved { path: PathBuf },
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
            | OpenError::Abandoned { .. }
            | OpenError::Reserved { .. }
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
    fn storage(self: Arc<Self>, handle: &Handle) -> io::Result<AnyStore>;
    /// Returns the normalized name by which an image may refer to the storage.
    fn name(&self) -> String;
    /// Returns the storage's kind for `image info`: "nbd".
    fn kind(&self) -> &'static str;
    /// Returns whether a target (code of others) decides where the data lie. It may keep changes in
    /// memory until a flush.
    fn is_target(&self) -> bool {
        false
    }
    /// Returns the storage's size in bytes.
    fn size(&self) -> u64;
    /// Returns the block sizes that the storage prefers or requires, as its [`Storage`] does.
    ///
    /// [`Storage`]: crate::Storage
    fn geometry(&self) -> Geometry {
        Geometry::default()
    }
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
    fn device(&self) -> io::Result<Option<(String, bool)>> {
        Ok(None)
    }
}
