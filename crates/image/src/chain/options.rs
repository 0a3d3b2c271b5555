//! Options of opening a chain.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_storage::sim::Journal;
use blockyard_storage::{CacheMode, Opened, Overlaid, nbd};

use crate::journal::CrashSafety;
use crate::layers::format::Format;

use super::left::LeftImage;
use super::shared::SharedImages;

/// Options of opening a chain.
#[derive(Clone, Debug)]
pub struct ChainOptions {
    pub path: PathBuf,
    /// Format of the topmost image. None: derived from the file's name.
    pub format: Option<Format>,
    pub read_only: bool,
    /// Whether to open (and lock) the topmost image's files for writing, but allow only reads of
    /// the disk. For jobs that change only metadata.
    pub only_locked: bool,
    /// Whether the caller's writes leave the disk's contents unchanged. If so, bitmaps of the
    /// topmost image that record writes stay valid.
    pub keeps_disk: bool,
    /// Layer that a commit writes to: it is opened for writing.
    pub commit_into: Option<usize>,
    pub cache: CacheMode,
    /// Maximum size of the L2 tables that are cached for all images together, in bytes. None: all
    /// tables, up to a limit.
    pub l2_cache: Option<u64>,
    /// Whether to load metadata when the chain is opened.
    pub prime: bool,
    pub copy_on_read: bool,
    /// Folders that may contain backing and data files (subfolders too); empty: the image's own
    /// folder. NBD URIs among them allow exports.
    pub folders: Vec<PathBuf>,
    /// Whether to leave the files of a read-only chain unlocked, so that other programs may write
    /// to them (`qemu-img --force-share`).
    pub force_share: bool,
    /// Name or id of a snapshot of the topmost image: the disk is shown as of this snapshot. Only
    /// for read-only chains.
    pub snapshot: Option<String>,
    /// Whether to end the chain above a backing file that may not be opened, instead of failing;
    /// see [`Chain::cut`](super::Chain::cut).
    pub cut_outside: bool,
    /// Whether to open only the topmost image, as if it had no backing file.
    pub no_backing: bool,
    /// Whether to accept a changed size or mtime of a COW file's backing file.
    pub accept_changed_backing: bool,
    /// Options of images on an NBD server.
    pub nbd: nbd::Options,
    /// What to do if the topmost image's file carries the record that an overlay uses it as backing
    /// file.
    pub overlaid: Overlaid,
    /// Whether a chain that is only read may contain an overlay that was abandoned. Opening it
    /// logs a warning.
    pub reads_abandoned: bool,
    /// Backing images that this chain has in common with others. None: it opens all of its images.
    pub shared: Option<SharedImages>,
    /// Records operations on the images' files, for simulated power cuts.
    pub journal: Option<Journal>,
    /// How the topmost image's changed metadata survive a death of the process.
    pub crash_safety: CrashSafety,
    /// The topmost image as the server before has left it. If its file is still the same, it is not
    /// checked again, and its metadata are not loaded in advance.
    pub left: Option<LeftImage>,
    /// The topmost image's storage, if it is open already; then `path` is only its name.
    pub given: Option<Arc<dyn Opened>>,
    /// Descriptors of the topmost image's files while these have no name.
    pub files: OpenedFiles,
}

impl ChainOptions {
    /// Returns the default options: writable, with the format that the file's name gives.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        ChainOptions {
            path: path.into(),
            format: None,
            read_only: false,
            only_locked: false,
            keeps_disk: false,
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
            reads_abandoned: false,
            shared: None,
            journal: None,
            crash_safety: CrashSafety::default(),
            left: None,
            given: None,
            files: OpenedFiles::default(),
        }
    }
}

impl ChainOptions {
    /// Returns whether a chain with these options may contain an overlay that was abandoned.
    pub(super) fn may_show_abandoned(&self) -> bool {
        self.reads_abandoned && self.read_only && !self.only_locked && self.commit_into.is_none()
    }
}

/// Descriptors of files that have no name yet (O_TMPFILE). None: opened by name. Never pass
/// descriptors of named files: a qcow2 image in an unnamed file is written without the syncs that
/// order its metadata.
#[derive(Clone, Debug, Default)]
pub struct OpenedFiles {
    pub image: Option<Arc<OwnedFd>>,
    /// The external data file of a qcow2 image.
    pub data: Option<Arc<OwnedFd>>,
}
