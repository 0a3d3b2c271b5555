//! A file that has no name yet: an unnamed file of the file system (O_TMPFILE) where it has such
//! files, else one under a temporary name, `.NAME.PID.part`.
//!
//! In: the path that the file is to have. Out: a descriptor of it, and in the end the file under
//! that path. What must hold: an existing file is replaced at once, by a rename, and only the one
//! that was locked.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use blockyard_image::tools::open_file;
use blockyard_image::{FileId, ImageFile};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::unfinished::{self, Unfinished};
use super::{folder, same_place};

/// As `File::create` has it; the umask takes its part.
const MODE: Mode = Mode::from_raw_mode(0o666);

pub struct Pending {
    path: PathBuf,
    /// The file that is to be replaced, locked.
    replaced: Option<ImageFile>,
    /// None: `path` is a block device.
    made: Option<Made>,
}

struct Made {
    file: Arc<OwnedFd>,
    /// The name that it has meanwhile, where it cannot be without.
    temporary: Option<Unfinished>,
}

/// A file that has its name now.
pub struct Published {
    path: PathBuf,
    replaced: bool,
}

impl Pending {
    /// Begins a file for `path`; `exists`: the error if there is one and it must not be replaced.
    pub fn create(
        path: &Path,
        force: bool,
        exists: impl Fn() -> anyhow::Error,
    ) -> anyhow::Result<Self> {
        // What a link points to is replaced, not the link.
        let real = match std::fs::canonicalize(path) {
            Ok(_) if !force => return Err(exists()),
            Ok(real) => real,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Pending::begin(path.into(), None);
            }
            Err(e) => bail!("{}: {e}", path.display()),
        };
        let replaced = open_file(&real, false)?;
        if replaced.is_device() {
            // Those that write to it lock it again.
            return Ok(Pending { path: real, replaced: None, made: None });
        }
        Pending::begin(real, Some(replaced))
    }

    fn begin(path: PathBuf, replaced: Option<ImageFile>) -> anyhow::Result<Self> {
        let name =
            path.file_name().ok_or_else(|| anyhow!("{} is no name for a file", path.display()))?;
        unfinished::remove_on_signals();
        unfinished::remove_left_behind(folder(&path), name);
        let made = Made::create(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Pending { path, replaced, made: Some(made) })
    }

    pub fn is_device(&self) -> bool {
        self.made.is_none()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_at(&self, path: &Path) -> bool {
        same_place(&self.path, path)
    }

    pub fn file(&self) -> Option<Arc<OwnedFd>> {
        self.made.as_ref().map(|made| made.file.clone())
    }

    pub fn finish(self) -> anyhow::Result<Published> {
        let Pending { path, replaced, made } = self;
        if let Some(made) = made {
            give_name(made, &path, replaced.as_ref())
                .with_context(|| format!("giving {} its name", path.display()))?;
            sync_folder(&path)
                .with_context(|| format!("syncing the folder of {}", path.display()))?;
        }
        Ok(Published { replaced: replaced.is_some(), path })
    }
}

impl Published {
    /// Removes a file that is of no use because the other one could not get its name.
    pub fn take_back(self) {
        if !self.replaced {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

impl Made {
    fn create(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(folder(path), flags | OFlags::TMPFILE, MODE) {
            Ok(file) => return Ok(Made { file: Arc::new(file), temporary: None }),
            // ISDIR: a kernel or file system that does not know the flag.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        let (temporary, file) = Unfinished::add(path, |name| {
            Ok(rustix::fs::open(name, flags | OFlags::CREATE | OFlags::EXCL, MODE)?)
        })?;
        Ok(Made { file: Arc::new(file), temporary: Some(temporary) })
    }

    /// Gives a file without a name this one, at which there must be none.
    fn link(&self, path: &Path) -> io::Result<()> {
        let through = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        Ok(rustix::fs::linkat(CWD, through, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
    }
}

fn give_name(made: Made, path: &Path, replaced: Option<&ImageFile>) -> io::Result<()> {
    if let Some(replaced) = replaced
        && FileId::of_path(path).ok() != replaced.id()
    {
        return Err(io::Error::other("another file has come there meanwhile"));
    }
    match (&made.temporary, replaced) {
        (Some(temporary), _) => temporary.finish(|name| rename(name, path, replaced.is_some()))?,
        (None, None) => made.link(path)?,
        // A link cannot replace a file.
        (None, Some(_)) => {
            let (temporary, ()) = Unfinished::add(path, |name| made.link(name))?;
            temporary.finish(|name| std::fs::rename(name, path))?;
        }
    }
    Ok(rustix::fs::fsync(&made.file)?)
}

fn rename(from: &Path, to: &Path, replace: bool) -> io::Result<()> {
    if replace {
        return std::fs::rename(from, to);
    }
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Not every file system can do that: a file that was made there meanwhile is replaced.
        Err(Errno::INVAL | Errno::NOSYS) => std::fs::rename(from, to),
        done => Ok(done?),
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder(path))?.sync_all()
}
