//! The folder of records and locks of devices.
//!
//! Records must survive a killed server, but not a reboot, so the folder is in `/run`.
//!
//! What must hold: no other user can write into the folder, rename it or replace it. Otherwise that
//! user could change the requests of guests, or let two servers serve one device.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

const ROOT: u32 = 0;

/// Returns the folder for records of requests in flight, and creates it. Returns `None` and logs a
/// warning if this process cannot have such a folder.
pub fn records() -> Option<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let folder = folder(Path::new("/run"), user, ROOT);
    match make(&folder, user) {
        Ok(()) => Some(folder),
        Err(e) => {
            tracing::warn!(
                "cannot use folder {} for records and locks of Xen devices: {e}; if this server is \
                 killed, the next server cannot answer the requests that were in flight",
                folder.display()
            );
            None
        }
    }
}

/// Returns the path of the folder in `run`. An earlier version used `blockyard/xen` as root too. A
/// host that runs such a version has its records there, but on many hosts the folder `blockyard`
/// belongs to the user of the service. `root`: its number.
fn folder(run: &Path, user: u32, root: u32) -> PathBuf {
    let service = run.join("blockyard");
    let earlier = service.join("xen");
    if user != root || (is_of(&earlier, root) && is_of(&service, root)) {
        return earlier;
    }
    run.join("blockyard-xen")
}

fn make(folder: &Path, user: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if is_of(folder, user) {
        return Ok(());
    }
    Err(io::Error::other("it is not a folder of the server's user"))
}

/// Returns whether the path is a folder, and no link, that only this user may change.
fn is_of(path: &Path, user: u32) -> bool {
    let found = std::fs::symlink_metadata(path);
    found.is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn run(name: &str) -> PathBuf {
        let run = std::env::temp_dir().join(format!("blockyard-{name}-{}", std::process::id()));
        std::fs::create_dir(&run).unwrap();
        run
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let (run, user) = (run("records"), rustix::process::geteuid().as_raw());
        let folder = folder(&run, user, user);
        assert_eq!(folder, run.join("blockyard-xen"));
        make(&folder, user).unwrap();
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        make(&folder, user).unwrap();
        let refused = make(&folder, user + 1).unwrap_err().to_string();
        assert!(refused.contains("not a folder of the server's user"), "{refused}");
        // A link leads into a folder that another user may replace.
        std::os::unix::fs::symlink(&folder, run.join("link")).unwrap();
        make(&run.join("link"), user).unwrap_err();
        std::fs::remove_dir_all(&run).unwrap();
    }

    #[test]
    fn root_goes_on_with_an_earlier_folder_that_only_root_can_replace() {
        let (run, user) = (run("earlier"), rustix::process::geteuid().as_raw());
        let earlier = run.join("blockyard/xen");
        let make = |folder: &Path| DirBuilder::new().mode(0o755 & !0o022).create(folder).unwrap();
        make(&run.join("blockyard"));
        // This user stands for root.
        assert_eq!(folder(&run, user, user), run.join("blockyard-xen"));
        make(&earlier);
        assert_eq!(folder(&run, user, user), earlier);
        // The folders belong to another user than root, as contrib/tmpfiles.conf makes one.
        assert_eq!(folder(&run, user + 1, user + 1), run.join("blockyard-xen"));
        assert_eq!(folder(&run, user + 1, user), earlier);
        // Others could rename the folder in one that they may write to.
        std::fs::set_permissions(run.join("blockyard"), Permissions::from_mode(0o770)).unwrap();
        assert_eq!(folder(&run, user, user), run.join("blockyard-xen"));
        std::fs::remove_dir_all(&run).unwrap();
    }
}
