//! Owner, mode and extended attributes of a file that is replaced: its successor gets them before
//! it has data. So a disk that only one user may read stays so, and a server keeps its access.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, bail};
use blockyard_image::{FileId, ImageFile};
use blockyard_storage::file::ABANDONED;
use rustix::fs::{Gid, Mode, Uid, XattrFlags};

/// The access control list. The group bits of the mode are its mask, so the mode alone would give
/// the group more rights.
const ACL: &str = "system.posix_acl_access";

/// Copies the attributes of the file at `path`, which is `replaced`, to a new file.
pub fn copy(path: &Path, replaced: &ImageFile, new: impl AsFd) -> anyhow::Result<()> {
    let old = File::open(path)?;
    if replaced.id() != FileId::of_fd(&old).ok() {
        bail!("another program replaced the file during the command");
    }
    let (stat, fresh) = (old.metadata()?, rustix::fs::fstat(&new)?);
    if (stat.uid(), stat.gid()) != (fresh.st_uid, fresh.st_gid) {
        let (uid, gid) = (Uid::from_raw(stat.uid()), Gid::from_raw(stat.gid()));
        rustix::fs::fchown(&new, Some(uid), Some(gid)).with_context(|| {
            format!("giving its successor the owner {}:{}", stat.uid(), stat.gid())
        })?;
    }
    // The folder's default list must not give more users access. The file system may have no lists.
    let _ = rustix::fs::fremovexattr(&new, ACL);
    rustix::fs::fchmod(&new, Mode::from_raw_mode(stat.mode() & 0o777))?;
    for name in names(&old).unwrap_or_default() {
        // The mark is about the data of the old file.
        if name == ABANDONED {
            continue;
        }
        match copy_one(&old, &new, &name) {
            Ok(()) => {}
            Err(e) if name == ACL => return Err(e).context("copying its access control list"),
            Err(e) => tracing::warn!("{}: its attribute {name} is lost: {e}", path.display()),
        }
    }
    Ok(())
}

/// Returns the names of extended attributes. Fails if the file system has none.
fn names(file: &File) -> io::Result<Vec<String>> {
    let mut list = vec![0; rustix::fs::flistxattr_query(file)?];
    let len = rustix::fs::flistxattr(file, &mut list[..])?;
    let names = list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

fn copy_one(old: &File, new: impl AsFd, name: &str) -> io::Result<()> {
    let mut value = vec![0; rustix::fs::fgetxattr_query(old, name)?];
    let len = rustix::fs::fgetxattr(old, name, &mut value[..])?;
    Ok(rustix::fs::fsetxattr(new, name, &value[..len], XattrFlags::empty())?)
}
