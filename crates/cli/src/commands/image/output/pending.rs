//! A file that has no name yet: an unnamed file (O_TMPFILE) if the file system supports it, else a
//! file with a temporary name, `.NAME.PID.part`.
//!
//! In: the final path of the file. Out: a descriptor, and finally the file at that path. What must
//! hold: an existing file is replaced atomically, by a rename, and only if it is the locked one.
//! The new file has its owner, mode and extended attributes.

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
use super::{attributes, folder, same_place};
use crate::commands::image::new::check_folder;

/// Mode of a new file before the umask, as in `File::create`.
const MODE: Mode = Mode::from_raw_mode(0o666);
const PRIVATE: Mode = Mode::from_raw_mode(0o600);

pub struct Pending {
    path: PathBuf,
    /// The existing file to replace, locked.
    replaced: Option<ImageFile>,
    /// `None` if `path` is a block device.
    new: Option<UnnamedFile>,
}

struct UnnamedFile {
    file: Arc<OwnedFd>,
    /// The file's temporary name, on file systems without O_TMPFILE.
    temporary: Option<Unfinished>,
}

/// A file that has its final name.
pub struct Published {
    path: PathBuf,
    replaced: bool,
}

impl Pending {
    /// Starts a file for `path`. `exists`: the error if a file exists there and `force` is false.
    pub fn create(
        path: &Path,
        force: bool,
        exists: impl Fn() -> anyhow::Error,
    ) -> anyhow::Result<Self> {
        // Replace the target of a link, not the link.
        let real = match std::fs::canonicalize(path) {
            Ok(_) if !force => return Err(exists()),
            Ok(real) => real,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if path.is_symlink() {
                    bail!("{} is a link to nothing: remove or mend it", path.display());
                }
                return Pending::begin(path.into(), None);
            }
            Err(e) => bail!("{}: {e}", path.display()),
        };
        let replaced = open_file(&real, false)?;
        if replaced.is_device() {
            // The lock ends here. Opening the device for writing locks it again.
            return Ok(Pending { path: real, replaced: None, new: None });
        }
        Pending::begin(real, Some(replaced))
    }

    fn begin(path: PathBuf, replaced: Option<ImageFile>) -> anyhow::Result<Self> {
        let name =
            path.file_name().ok_or_else(|| anyhow!("{} is not a file name", path.display()))?;
        check_folder(&path)?;
        unfinished::remove_on_signals();
        unfinished::remove_left_behind(folder(&path), name);
        // Until the new file has the mode of the old one, no other user may open it.
        let mode = if replaced.is_some() { PRIVATE } else { MODE };
        let new = UnnamedFile::create(&path, mode)
            .with_context(|| format!("creating {}", path.display()))?;
        if let Some(replaced) = &replaced {
            attributes::copy(&path, replaced, &new.file)
                .with_context(|| format!("replacing {}", path.display()))?;
        }
        Ok(Pending { path, replaced, new: Some(new) })
    }

    pub fn is_device(&self) -> bool {
        self.new.is_none()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_at(&self, path: &Path) -> bool {
        same_place(&self.path, path)
    }

    pub fn file(&self) -> Option<Arc<OwnedFd>> {
        self.new.as_ref().map(|new| new.file.clone())
    }

    pub fn finish(self) -> anyhow::Result<Published> {
        let Pending { path, replaced, new } = self;
        if let Some(new) = new {
            give_name(new, &path, replaced.as_ref())
                .with_context(|| format!("giving {} its name", path.display()))?;
            sync_folder(&path)
                .with_context(|| format!("syncing the folder of {}", path.display()))?;
        }
        Ok(Published { replaced: replaced.is_some(), path })
    }
}

impl Published {
    /// Removes the file, because the image that refers to it failed to get its name. Keeps a file
    /// that replaced an older one.
    pub fn remove(self) {
        if !self.replaced {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

impl UnnamedFile {
    fn create(path: &Path, mode: Mode) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(folder(path), flags | OFlags::TMPFILE, mode) {
            Ok(file) => return Ok(UnnamedFile { file: Arc::new(file), temporary: None }),
            // The kernel or the file system does not support O_TMPFILE.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        let (temporary, file) = Unfinished::add(path, |name| {
            Ok(rustix::fs::open(name, flags | OFlags::CREATE | OFlags::EXCL, mode)?)
        })?;
        Ok(UnnamedFile { file: Arc::new(file), temporary: Some(temporary) })
    }

    /// Links the unnamed file to `path`, where no file may exist.
    fn link(&self, path: &Path) -> io::Result<()> {
        let through = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        Ok(rustix::fs::linkat(CWD, through, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
    }
}

fn give_name(new: UnnamedFile, path: &Path, replaced: Option<&ImageFile>) -> io::Result<()> {
    if let Some(replaced) = replaced
        && FileId::of_path(path).ok() != replaced.id()
    {
        return Err(io::Error::other("another program replaced the file during the command"));
    }
    match (&new.temporary, replaced) {
        (Some(temporary), _) => temporary.finish(|name| rename(name, path, replaced.is_some()))?,
        (None, None) => new.link(path)?,
        // linkat(2) cannot replace a file: link to a temporary name, and rename that.
        (None, Some(_)) => {
            let (temporary, ()) = Unfinished::add(path, |name| new.link(name))?;
            temporary.finish(|name| std::fs::rename(name, path))?;
        }
    }
    Ok(rustix::fs::fsync(&new.file)?)
}

fn rename(from: &Path, to: &Path, replace: bool) -> io::Result<()> {
    if replace {
        return std::fs::rename(from, to);
    }
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system does not support RENAME_NOREPLACE. A plain rename may replace a file that
        // another program created at that path in the meantime.
        Err(Errno::INVAL | Errno::NOSYS) => std::fs::rename(from, to),
        done => Ok(done?),
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder(path))?.sync_all()
}
