//! The record of a live snapshot: which overlay is on an image, stored with the image's file.
//!
//! A live snapshot moves a disk to a new overlay, but configurations still name the old image. A
//! server that writes to the old image changes what the overlay shows. In: an open file. Out: the
//! extended attribute [`ATTRIBUTE`], which holds the overlay's path.
//!
//! What must hold: the record is durable before a guest's first write goes to the overlay. It
//! belongs to the file, follows a rename, works for every format, and other programs ignore it.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, fsync};
use rustix::io::Errno;

/// Name of the extended attribute.
pub const ATTRIBUTE: &str = "user.blockyard.overlay";
/// Largest value of an extended attribute on Linux.
const MAX_VALUE: usize = 64 << 10;
/// Size of the first buffer in bytes. The kernel clears a buffer of this size for each read.
const USUAL_VALUE: usize = 256;

/// Returns the overlay that the record of the image at `image` names; None if there is no record.
pub fn read(fd: impl AsFd, image: &Path) -> io::Result<Option<PathBuf>> {
    let mut value = vec![0; USUAL_VALUE];
    let mut result = fgetxattr(&fd, ATTRIBUTE, &mut value[..]);
    if result == Err(Errno::RANGE) {
        value.resize(MAX_VALUE, 0);
        result = fgetxattr(&fd, ATTRIBUTE, &mut value[..]);
    }
    match result {
        Ok(len) => Ok(Some(real_folder(image).join(OsStr::from_bytes(&value[..len])))),
        // There is no record. Block devices, for example, have no user attributes.
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
    match fremovexattr(&fd, ATTRIBUTE) {
        Ok(()) => Ok(fsync(&fd)?),
        Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn real_folder(image: &Path) -> PathBuf {
    let real = std::fs::canonicalize(image).unwrap_or_else(|_| image.into());
    real.parent().map(PathBuf::from).unwrap_or_default()
}
