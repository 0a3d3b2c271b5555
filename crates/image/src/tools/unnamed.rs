//! A new image file that has no name until it is complete: an unnamed file (O_TMPFILE) if the file
//! system supports it, else a file with a temporary name, `.NAME.PID.part`.
//!
//! In: the final path, where no file may exist. Out: descriptors for the work on the image, and
//! finally the file at that path. What must hold: a file with the final name is complete and
//! durable. It never takes the place of another file. Without its name it is removed with its
//! owner, and an unnamed file is gone also after the death of the process. The next process that
//! makes a file for the same path removes what a dead one has left under a temporary name.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_ring::sandbox;
use blockyard_storage::file::access::PRIVATE;
use blockyard_storage::{FileId, ImageFile, path_of, scheme_of};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::file::open_file;
use crate::chain::overlay::{folder, sync_folder};
use crate::chain::{ChainError, OpenedFiles};
use crate::error::ImageError;

const STRUCTURE: &str = "new image";

/// Temporary names that this process uses now. No call of a file system runs with the lock held,
/// because the file system may not answer.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn temporary() -> MutexGuard<'static, Vec<PathBuf>> {
    TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new file without its name. Dropping it removes it.
#[derive(Debug)]
pub struct UnnamedFile {
    path: PathBuf,
    file: Arc<OwnedFd>,
    /// None: the file has no name at all.
    temporary: Option<Temporary>,
}

impl UnnamedFile {
    /// Starts a file for `path`. Only its owner may use it until it has its name.
    pub fn create(path: &Path) -> Result<Self, ChainError> {
        check(path)?;
        // linkat(2) would find it later. A link to nothing also counts.
        if std::fs::symlink_metadata(path).is_ok() {
            return Err(failed(path, "creating it", io::ErrorKind::AlreadyExists.into()));
        }
        let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::from_raw_mode(PRIVATE));
        let (file, temporary) = match rustix::fs::open(folder(path), flags | OFlags::TMPFILE, mode)
        {
            // The kernel or the file system does not support O_TMPFILE.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
                let made = Temporary::create(path, flags | OFlags::CREATE | OFlags::EXCL, mode);
                made.map(|(file, name)| (file, Some(name)))
            }
            made => made.map(|file| (file, None)).map_err(io::Error::from),
        }
        .map_err(|e| failed(path, "creating it", e))?;
        Ok(UnnamedFile { path: path.into(), file: Arc::new(file), temporary })
    }

    /// Returns the file for [`ChainOptions::files`](crate::ChainOptions::files).
    pub fn files(&self) -> OpenedFiles {
        OpenedFiles { image: Some(self.file.clone()), data: None }
    }

    /// Gives the file its name, durably, and the mode, owner and group of `base`. The caller has
    /// made its contents durable. At the end this sets `decided`. If that is set already, the
    /// caller has given the file up: then the file is removed.
    pub fn publish(mut self, base: &ImageFile, decided: &AtomicBool) -> Result<(), ChainError> {
        let path = self.path.clone();
        check(&path)?;
        self.link().map_err(|e| failed(&path, "giving it its name", e))?;
        let named = Named { path: path.clone(), file: self.file.clone(), is_kept: false };
        // After the link, because the kernel lets only the owner of a file link it.
        if let Err(e) = base.share_access(&self.file) {
            let (path, base) = (path.display(), base.path().display());
            tracing::warn!("image {path}: it has not the permissions of {base}: {e}");
        }
        let synced = rustix::fs::fsync(&self.file).map_err(io::Error::from);
        synced.map_err(|e| failed(&path, "syncing it", e))?;
        sync_folder(&path).map_err(|e| failed(&path, "syncing its folder", e))?;
        if decided.swap(true, Ordering::SeqCst) {
            return Err(wrong(&path, ImageError::refused(STRUCTURE, "it was given up")));
        }
        named.keep();
        Ok(())
    }

    fn link(&mut self) -> io::Result<()> {
        match &mut self.temporary {
            Some(temporary) => temporary.rename(&self.file, &self.path),
            None => {
                let (from, follow) = (path_of(&self.file), AtFlags::SYMLINK_FOLLOW);
                Ok(rustix::fs::linkat(CWD, from, CWD, &self.path, follow)?)
            }
        }
    }
}

/// A file that has its name. Dropping it removes it, unless it is kept.
struct Named {
    path: PathBuf,
    file: Arc<OwnedFd>,
    is_kept: bool,
}

impl Named {
    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if !self.is_kept && is_at(&self.file, &self.path) {
            let _ = std::fs::remove_file(&self.path);
            let _ = sync_folder(&self.path);
        }
    }
}

/// An entry of [`TEMPORARY`]. Dropping it removes the entry.
#[derive(Debug)]
struct UsedName(PathBuf);

impl UsedName {
    /// Adds the name. Returns it with the other names.
    fn new(name: PathBuf) -> io::Result<(Self, Vec<PathBuf>)> {
        let mut used = temporary();
        if used.contains(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let others = used.clone();
        used.push(name.clone());
        Ok((UsedName(name), others))
    }
}

impl Drop for UsedName {
    fn drop(&mut self) {
        temporary().retain(|name| *name != self.0);
    }
}

/// A file with a temporary name. Dropping it removes the file, unless it was renamed.
#[derive(Debug)]
struct Temporary {
    /// Another thread may use the name only after the file is removed.
    name: UsedName,
    is_renamed: bool,
}

impl Temporary {
    fn create(path: &Path, flags: OFlags, mode: Mode) -> io::Result<(OwnedFd, Self)> {
        let name = path.file_name().unwrap_or_default();
        let temporary = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
        let (used, others) = UsedName::new(folder(path).join(temporary))?;
        // A dead process may have left the own name, too.
        remove_left_behind(folder(path), name, &others);
        let file = rustix::fs::open(&used.0, flags, mode)?;
        Ok((file, Temporary { name: used, is_renamed: false }))
    }

    /// Gives `file` its final name, where no file may exist.
    fn rename(&mut self, file: &OwnedFd, path: &Path) -> io::Result<()> {
        let name = &self.name.0;
        if !is_at(file, name) {
            return Err(io::Error::other("another program replaced the file under its name"));
        }
        match rustix::fs::renameat_with(CWD, name, CWD, path, RenameFlags::NOREPLACE) {
            // The file system does not support RENAME_NOREPLACE: NFS. A link replaces no file
            // either.
            Err(Errno::INVAL | Errno::NOSYS) => {
                std::fs::hard_link(name, path)?;
                let _ = std::fs::remove_file(name);
            }
            renamed => renamed?,
        }
        self.is_renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_renamed {
            let _ = std::fs::remove_file(&self.name.0);
        }
    }
}

/// Removes files with a temporary name for `name` that dead processes left. Keeps files of running
/// processes, those in `used`, and locked files: their process may be on another host or in another
/// PID namespace.
fn remove_left_behind(in_folder: &Path, name: &OsStr, used: &[PathBuf]) {
    let Ok(entries) = std::fs::read_dir(in_folder) else { return };
    let prefix = format!(".{}.", name.to_string_lossy());
    for entry in entries.flatten() {
        let (path, Ok(entry)) =
            (in_folder.join(entry.file_name()), entry.file_name().into_string())
        else {
            continue;
        };
        let process = entry.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".part"));
        let process = process.and_then(|process| process.parse().ok()).and_then(Pid::from_raw);
        let Some(process) = process.filter(|_| !used.contains(&path)) else { continue };
        // A dead process of a container may have had this process's PID.
        let is_gone =
            process == rustix::process::getpid() || test_kill_process(process) == Err(Errno::SRCH);
        if is_gone && open_file(&path, false).is_ok() {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Returns whether the path leads to the file.
fn is_at(file: &OwnedFd, path: &Path) -> bool {
    match (FileId::of_fd(file), FileId::of_path(path)) {
        (Ok(own), Ok(present)) => own == present,
        _ => false,
    }
}

/// Returns an error if no image may be created at the path.
fn check(path: &Path) -> Result<(), ChainError> {
    let refuse = |what: &str| Err(wrong(path, ImageError::refused(STRUCTURE, what)));
    if scheme_of(path).is_some() || path.file_name().is_none() {
        return refuse("it must be a file of this host");
    }
    if sandbox::is_reserved(path) {
        return refuse(
            "it belongs to the server's configuration or is a program of it, which no disk may use",
        );
    }
    Ok(())
}

fn wrong(path: &Path, error: ImageError) -> ChainError {
    ChainError::Image { path: path.into(), error }
}

fn failed(path: &Path, operation: &str, e: io::Error) -> ChainError {
    let is_refused = e.kind() == io::ErrorKind::PermissionDenied;
    let advice = is_refused.then(|| sandbox::advice(path)).flatten();
    let error = match (e.kind(), advice) {
        (io::ErrorKind::AlreadyExists, _) => {
            ImageError::refused(STRUCTURE, "the file exists already")
        }
        (_, Some(advice)) => ImageError::refused(STRUCTURE, advice),
        _ => ImageError::io(STRUCTURE, None, operation, e),
    };
    wrong(path, error)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A folder that is removed with the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let folder = format!("blockyard-unnamed-{name}-{}", std::process::id());
            let folder = Path::new("/var/tmp").join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            Scratch(folder)
        }

        fn files(&self) -> Vec<String> {
            let names = std::fs::read_dir(&self.0).unwrap();
            let mut names: Vec<_> =
                names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        /// Makes an image with a mode that new files get.
        fn base(&self) -> ImageFile {
            let path = self.0.join("base");
            std::fs::write(&path, [1; 512]).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
            open_file(&path, true).unwrap()
        }

        /// Starts a file as on a file system without unnamed files.
        fn with_temporary_name(&self, name: &str) -> io::Result<UnnamedFile> {
            let path = self.0.join(name);
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
            let (file, temporary) = Temporary::create(&path, flags, Mode::from_raw_mode(PRIVATE))?;
            Ok(UnnamedFile { path, file: Arc::new(file), temporary: Some(temporary) })
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn publish(new: UnnamedFile, base: &ImageFile) -> Result<(), String> {
        rustix::io::write(&new.file, b"data").unwrap();
        new.publish(base, &AtomicBool::new(false)).map_err(|e| e.to_string())
    }

    #[test]
    fn a_file_has_its_name_only_when_it_is_published() {
        let scratch = Scratch::new("publish");
        let (base, path) = (scratch.base(), scratch.0.join("new"));
        drop(UnnamedFile::create(&path).unwrap());
        assert_eq!(scratch.files(), ["base"]);
        let new =
            [UnnamedFile::create(&path).unwrap(), scratch.with_temporary_name("renamed").unwrap()];
        assert!(scratch.files().iter().all(|name| name != "new" && name != "renamed"));
        for new in new {
            publish(new, &base).unwrap();
        }
        assert_eq!(scratch.files(), ["base", "new", "renamed"]);
        for name in ["new", "renamed"] {
            let path = scratch.0.join(name);
            assert_eq!(std::fs::read(&path).unwrap(), b"data");
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        }
    }

    #[test]
    fn a_file_never_takes_the_place_of_another_one() {
        let scratch = Scratch::new("exists");
        let (base, path, link) = (scratch.base(), scratch.0.join("new"), scratch.0.join("link"));
        let late = UnnamedFile::create(&path).unwrap();
        let renamed = scratch.with_temporary_name("new").unwrap();
        std::fs::write(&path, b"other").unwrap();
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        for path in [&path, &link] {
            let error = UnnamedFile::create(path).unwrap_err().to_string();
            assert!(error.contains("the file exists already"), "{error}");
        }
        for new in [late, renamed] {
            let error = publish(new, &base).unwrap_err();
            assert!(error.contains("the file exists already"), "{error}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        assert_eq!(scratch.files(), ["base", "link", "new"]);
    }

    #[test]
    fn a_file_that_was_given_up_loses_its_name() {
        let scratch = Scratch::new("given-up");
        let base = scratch.base();
        let new = UnnamedFile::create(&scratch.0.join("new")).unwrap();
        let error = new.publish(&base, &AtomicBool::new(true)).unwrap_err().to_string();
        assert!(error.contains("given up"), "{error}");
        assert_eq!(scratch.files(), ["base"]);
    }

    #[test]
    fn only_names_that_dead_processes_left_are_removed() {
        let scratch = Scratch::new("left");
        // Process 1 runs. A PID has at most 22 bits.
        for process in [1, 1 << 23, std::process::id()] {
            std::fs::write(scratch.0.join(format!(".new.{process}.part")), b"left").unwrap();
        }
        let new = scratch.with_temporary_name("new").unwrap();
        let own = format!(".new.{}.part", std::process::id());
        let mut expected = vec![".new.1.part".to_string(), own];
        expected.sort();
        assert_eq!(scratch.files(), expected);
        let second = scratch.with_temporary_name("new").unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AlreadyExists, "the first one uses the name");
        drop(new);
        assert_eq!(scratch.files(), [".new.1.part"]);
    }

    #[test]
    fn a_temporary_name_is_free_after_an_error_and_after_its_file() {
        let scratch = Scratch::new("free");
        let missing = scratch.with_temporary_name("later/new").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        std::fs::create_dir(scratch.0.join("later")).unwrap();
        for _ in 0..2 {
            let new = scratch.with_temporary_name("later/new").unwrap();
            assert!(new.temporary.as_ref().is_some_and(|name| temporary().contains(&name.name.0)));
        }
        let base = scratch.base();
        publish(scratch.with_temporary_name("later/new").unwrap(), &base).unwrap();
        let left = |name: &PathBuf| name.starts_with(&scratch.0);
        assert!(!temporary().iter().any(left), "a name is left");
    }

    #[test]
    fn a_path_that_names_no_file_of_this_host_is_refused() {
        for path in ["nbd://host/disk", "/"] {
            let error = UnnamedFile::create(Path::new(path)).unwrap_err().to_string();
            assert!(error.contains("a file of this host"), "{error}");
        }
    }
}
