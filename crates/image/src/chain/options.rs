//! How a chain is to be opened.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_storage::sim::Journal;
use blockyard_storage::{CacheMode, Overlaid, nbd};

use crate::format::Format;

#[derive(Clone, Debug)]
pub struct ChainOptions {
    pub path: PathBuf,
    /// None: the file's name tells.
    pub format: Option<Format>,
    pub read_only: bool,
    /// The topmost image's files are opened (and locked) for writing, but the disk is only read:
    /// for work on structures.
    pub only_locked: bool,
    /// What the images above this one hold is to go into it: it is opened for writing.
    pub commit_into: Option<usize>,
    pub cache: CacheMode,
    /// Bytes of L2 tables kept in memory, of all images together; None: all, up to a limit.
    pub l2_cache: Option<u64>,
    /// Load metadata when the chain is opened.
    pub prime: bool,
    pub copy_on_read: bool,
    /// Backing and data files lie in or below these; no folder: in or below that of the image
    /// itself. NBD URIs among them allow exports.
    pub folders: Vec<PathBuf>,
    /// Lock no file of a chain that is only read: other programs may write to it meanwhile
    /// (`qemu-img --force-share`).
    pub force_share: bool,
    /// Show the disk as it was when this snapshot of the topmost image (a name or an id) was taken.
    /// For readers only.
    pub snapshot: Option<String>,
    /// End the chain above a backing file that may not be opened, instead of an error: see
    /// [`Chain::cut`].
    pub cut_outside: bool,
    /// Open the topmost image alone, as if nothing were below.
    pub no_backing: bool,
    /// A COW file's backing file may differ from what the COW file says of it.
    pub accept_changed_backing: bool,
    /// Of images that lie on an NBD server.
    pub nbd: nbd::Options,
    /// Of the topmost image.
    pub overlaid: Overlaid,
    /// Notes what is done to the images' files, for simulated power cuts.
    pub journal: Option<Journal>,
    /// The topmost image's files, if they do not have their names yet.
    pub files: OpenedFiles,
}

impl ChainOptions {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        ChainOptions {
            path: path.into(),
            format: None,
            read_only: false,
            only_locked: false,
            commit_into: None,
            cache: CacheMode::default(),
            l2_cache: None,
            prime: false,
            copy_on_read: false,
            folders: Vec::new(),
            force_share: false,
            snapshot: None,
            cut_outside: false,
            no_backing: false,
            accept_changed_backing: false,
            nbd: nbd::Options::default(),
            overlaid: Overlaid::default(),
            journal: None,
            files: OpenedFiles::default(),
        }
    }
}

/// Descriptors of an image's files, which do not have their names yet. None: the file is found by
/// its name. Never those of a file with a name: a qcow2 image without one is written without the
/// syncs that order its metadata.
#[derive(Clone, Debug, Default)]
pub struct OpenedFiles {
    pub image: Option<Arc<OwnedFd>>,
    /// The external data file of a qcow2 image.
    pub data: Option<Arc<OwnedFd>>,
}
