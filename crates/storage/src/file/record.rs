//! The record of a live snapshot: which overlay is on an image, stored with the image's file. The
//! mark of an overlay that was abandoned, stored with the overlay's file.
//!
//! A live snapshot moves a disk to a new overlay, but configurations still name the old image. A
//! server that writes to the old image changes what the overlay shows. In: an open file. Out: the
//! extended attribute [`ATTRIBUTE`], which holds the overlay's path, or [`ABANDONED`], which holds
//! the identity and the path of the overlay's backing file.
//!
//! What must hold: the record is durable before a guest's first write goes to the overlay. The mark
//! is durable before the record is removed. Both belong to the file, follow a rename, work for
//! every format, and other programs ignore them.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use blockyard_ring::sandbox;
use blockyard_ring::small_file::name_of;
use rustix::fs::{
    FileType, Mode, OFlags, XattrFlags, fgetxattr, fremovexattr, fsetxattr, fstat, fsync,
};
use rustix::io::Errno;

use super::{FileId, path_of};

/// Name of the extended attribute of an image that has an overlay.
pub const ATTRIBUTE: &str = "user.blockyard.overlay";
/// Name of the extended attribute of an abandoned overlay.
pub const ABANDONED: &str = "user.blockyard.abandoned";
/// Largest value of an extended attribute on Linux.
const MAX_VALUE: usize = 64 << 10;
/// Size of the first buffer in bytes. The kernel clears a buffer of this size for each read.
const USUAL_VALUE: usize = 256;

/// What the mark of an abandoned overlay says about the backing file that was opened for writing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// Path of the backing file, as it was then.
    pub base: PathBuf,
    /// None: the mark is not one of this program. 0: the file lay on another file system.
    inode: Option<u64>,
    /// Number of the overlay's file system, on which the inode is.
    device: u64,
}

impl Abandoned {
    /// Parses the value of a mark: a number, a blank, and a path. A relative path begins at
    /// `folder`.
    fn parse(value: &[u8], folder: &Path, device: u64) -> Self {
        let mut parts = value.splitn(2, |byte| *byte == b' ');
        let inode = parts.next().and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        let path = parts.next().unwrap_or(value);
        Abandoned { base: folder.join(OsStr::from_bytes(path)), inode, device }
    }

    /// Returns whether a backing file of the overlay is the one that was opened for writing. The
    /// file is known by its inode, because it may have another name now, or by its path, because it
    /// may be a copy.
    pub fn is_about(&self, id: Option<FileId>) -> bool {
        match (self.inode, id) {
            (None, _) => true,
            (Some(inode), id @ Some(_)) => {
                id == Some(FileId::File { device: self.device, inode })
                    || id == FileId::of_path(&self.base).ok()
            }
            (Some(_), None) => false,
        }
    }
}

/// Returns the overlay that the record of the image at `image` names; None if there is no record.
pub fn read(fd: impl AsFd, image: &Path) -> io::Result<Option<PathBuf>> {
    let value = value(fd, ATTRIBUTE)?;
    Ok(value.map(|value| real_folder(image).join(OsStr::from_bytes(&value))))
}

/// Returns the mark of the overlay at `overlay`; None if it was not abandoned.
pub fn abandoned(fd: impl AsFd, overlay: &Path) -> io::Result<Option<Abandoned>> {
    let Some(value) = value(&fd, ABANDONED)? else { return Ok(None) };
    Ok(Some(Abandoned::parse(&value, &real_folder(overlay), fstat(&fd)?.st_dev)))
}

fn value(fd: impl AsFd, attribute: &str) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; USUAL_VALUE];
    let mut result = fgetxattr(&fd, attribute, &mut value[..]);
    if result == Err(Errno::RANGE) {
        value.resize(MAX_VALUE, 0);
        result = fgetxattr(&fd, attribute, &mut value[..]);
    }
    match result {
        Ok(len) => {
            value.truncate(len);
            Ok(Some(value))
        }
        // There is no attribute. Block devices, for example, have no user attributes.
        Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Records that the overlay lies on the image. Durable when it returns.
pub fn write(fd: impl AsFd, image: &Path, overlay: &Path) -> io::Result<()> {
    let overlay = std::fs::canonicalize(overlay)?;
    // A relative name stays valid when the folder is renamed.
    let name = overlay.strip_prefix(real_folder(image)).unwrap_or(&overlay);
    fsetxattr(&fd, ATTRIBUTE, name.as_os_str().as_bytes(), XattrFlags::empty())?;
    Ok(fsync(&fd)?)
}

/// Removes the record, if there is one. Durable when it returns.
pub fn remove(fd: impl AsFd) -> io::Result<()> {
    remove_attribute(fd, ATTRIBUTE)
}

/// Marks the overlay of the image `fd` as abandoned. Durable when it returns. Any program that may
/// write to the image can have set its record, so the path is not trusted.
pub fn mark_abandoned(overlay: &Path, fd: impl AsFd, image: &Path) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::open(overlay, flags, Mode::empty())?;
    let (stat, base) = (fstat(&found)?, fstat(&fd)?);
    let refuse = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    // An open of other kinds of files can block, or change what they are for.
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::RegularFile {
        return refuse(format!("it is {}", name_of(kind)));
    }
    if FileId::of(&stat) == FileId::of(&base) {
        return refuse("it is the image itself".into());
    }
    // Otherwise a user could have the server mark files that are not theirs.
    let own = rustix::process::geteuid();
    let is_own = !own.is_root() && stat.st_uid == own.as_raw();
    if stat.st_uid != base.st_uid && !is_own {
        return refuse("it belongs to another user than the image".into());
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path_of(&found), flags, Mode::empty())?;
    if sandbox::is_reserved_file(&file)? {
        return refuse("it belongs to the server's configuration".into());
    }
    let image = std::fs::canonicalize(image)?;
    // A relative name stays valid when the folder is renamed.
    let name = image.strip_prefix(real_folder(overlay)).unwrap_or(&image);
    let inode = if stat.st_dev == base.st_dev { base.st_ino } else { 0 };
    let mut value = format!("{inode} ").into_bytes();
    value.extend(name.as_os_str().as_bytes());
    fsetxattr(&file, ABANDONED, &value, XattrFlags::empty())?;
    Ok(fsync(&file)?)
}

/// Removes the mark of an abandoned overlay, if there is one. Durable when it returns.
pub fn remove_mark(fd: impl AsFd) -> io::Result<()> {
    remove_attribute(fd, ABANDONED)
}

fn remove_attribute(fd: impl AsFd, attribute: &str) -> io::Result<()> {
    match fremovexattr(&fd, attribute) {
        Ok(()) => Ok(fsync(&fd)?),
        Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn real_folder(image: &Path) -> PathBuf {
    let real = std::fs::canonicalize(image).unwrap_or_else(|_| image.into());
    real.parent().map(PathBuf::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_mark_knows_its_backing_file_by_inode_and_by_path() {
        let folder = Path::new("/var/tmp").join(format!("blockyard-mark-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        for name in ["base", "top", "other"] {
            std::fs::write(at(name), name).unwrap();
        }
        let mark = |name: &str| {
            let base = File::open(at("base")).unwrap();
            mark_abandoned(&at(name), &base, &at("base"))
        };
        let read = |name: &str| abandoned(File::open(at(name)).unwrap(), &at(name)).unwrap();
        let is_about =
            |of: &str, file: &str| read(of).unwrap().is_about(FileId::of_path(&at(file)).ok());
        assert_eq!(read("top"), None);
        mark("top").unwrap();
        assert_eq!(read("top").unwrap().base, at("base"));
        assert!(is_about("top", "base") && !is_about("top", "other"));
        assert!(!read("top").unwrap().is_about(None), "an image on a server");
        std::fs::rename(at("base"), at("renamed")).unwrap();
        assert!(is_about("top", "renamed"));
        std::fs::copy(at("renamed"), at("base")).unwrap();
        assert!(is_about("top", "base") && is_about("top", "renamed"));
        // A mark of another program is about each backing file.
        fsetxattr(File::open(at("other")).unwrap(), ABANDONED, b"1x", XattrFlags::empty()).unwrap();
        assert!(is_about("other", "base"));
        remove_mark(File::open(at("top")).unwrap()).unwrap();
        assert_eq!(read("top"), None);

        // A record can name any path.
        assert_eq!(mark("missing").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(mark("base").unwrap_err().to_string().contains("the image itself"));
        assert!(mark("").unwrap_err().to_string().contains("it is"), "a folder");
        std::os::unix::fs::symlink(at("top"), at("link")).unwrap();
        assert!(mark("link").is_err());
        assert_eq!(read("top"), None);
        let fifo = at("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(mark("fifo").unwrap_err().to_string().contains("it is"), "an open would block");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
