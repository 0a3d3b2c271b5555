//! The users that may use a new file: no more than may use the file that it continues.
//!
//! In: the old file and a new one, which only its owner may use. Out: the new file has the mode
//! and, if the process may give them, the owner and the group of the old one. What must hold: users
//! without access to the old file never have access to the new one, also after an error.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{FileType, Gid, Mode, Uid, XattrFlags};

/// Mode of a new file, before [`copy`].
pub const PRIVATE: u32 = 0o600;

/// The access control list. The group bits of the mode are its mask.
const ACL: &str = "system.posix_acl_access";

const GROUP: u32 = 0o070;
/// Permissions of an image: no bits that change users, and no program.
const READ_WRITE: u32 = 0o666;

/// Gives `new` the mode, and if possible the owner and the group, of `old`. Does nothing if `old`
/// is no regular file.
pub fn copy(old: impl AsFd, new: impl AsFd) -> io::Result<()> {
    let (stat, fresh) = (rustix::fs::fstat(&old)?, rustix::fs::fstat(&new)?);
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(());
    }
    // The folder's default list must not give more users access. The file system may have no lists.
    let _ = rustix::fs::fremovexattr(&new, ACL);
    let gid = Gid::from_raw(stat.st_gid);
    let has_group =
        stat.st_gid == fresh.st_gid || rustix::fs::fchown(&new, None, Some(gid)).is_ok();
    let list = list_of(&old)?;
    let has_list = list.is_some();
    let mode = stat.st_mode & READ_WRITE;
    // The bits of the group are for the old group only, and with a list they are its mask. Without
    // them, its members may use what all others may use, but not more than before.
    let narrow = (mode & !GROUP & !0o007) | (mode & (mode >> 3) & 0o007);
    let first = if has_group && !has_list { mode } else { narrow };
    rustix::fs::fchmod(&new, Mode::from_raw_mode(first))?;
    if let Some(list) = list.filter(|_| has_group) {
        rustix::fs::fsetxattr(&new, ACL, &list, XattrFlags::empty())?;
    }
    // The last step, because only the owner may change the mode. An unprivileged process cannot
    // give a file away, and keeps it.
    if stat.st_uid != fresh.st_uid {
        let _ = rustix::fs::fchown(&new, Some(Uid::from_raw(stat.st_uid)), None);
    }
    Ok(())
}

/// Returns the access control list of a file. `None`: it has none.
fn list_of(file: impl AsFd) -> io::Result<Option<Vec<u8>>> {
    use rustix::io::Errno;
    let mut list = vec![0; 4096];
    match rustix::fs::fgetxattr(file, ACL, &mut list[..]) {
        Ok(len) => {
            list.truncate(len);
            Ok(Some(list))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, Permissions};
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};

    use super::*;

    #[test]
    fn a_new_file_has_the_mode_and_the_group_of_the_old_one() {
        let folder = std::env::temp_dir().join(format!("blockyard-access-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let old = File::create(folder.join("old")).unwrap();
        for (at, mode) in [0o600, 0o640, 0o660, 0o604, 0o4755].into_iter().enumerate() {
            // Root may give files to every group.
            let is_root = fchown(&old, Some(12), Some(34)).is_ok();
            old.set_permissions(Permissions::from_mode(mode)).unwrap();
            let mut options = File::options();
            let new = options.write(true).create_new(true).mode(PRIVATE);
            let new = new.open(folder.join(at.to_string())).unwrap();
            copy(&old, &new).unwrap();
            let (old, new) = (old.metadata().unwrap(), new.metadata().unwrap());
            assert_eq!(new.mode() & 0o7777, mode & READ_WRITE);
            assert_eq!((new.uid(), new.gid()), (old.uid(), old.gid()), "root: {is_root}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
