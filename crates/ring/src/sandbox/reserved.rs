//! The files of the server's configuration, and the programs that it starts. No disk may use them.
//!
//! In: the main file, the folder of its parts, the files that the server has read, and programs.
//! Out: whether a path or an open file is one of them. What must hold: the answer is the same for
//! each name of a file: links and hard links do not hide it. It holds for the file that replaces
//! one of them (within a second), and no longer for the old file. The answer does not depend on the
//! sandbox, because a folder of images may also have the configuration, and Landlock cannot leave a
//! part of a folder out. A file system that does not answer delays one caller only.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::folders::real;

static RESERVED: RwLock<Option<Reserved>> = RwLock::new(None);

/// Files that no disk may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// The main file, which may be missing.
    main: Option<PathBuf>,
    /// The folder of the other files, which may be missing.
    folder: Option<PathBuf>,
    /// The other files: parts, which may be links, and programs. A file that replaces one of them
    /// is reserved as well.
    files: HashSet<PathBuf>,
}

impl Reserved {
    /// Reads which files a configuration has. `is_part`: whether a file of the folder is read.
    pub fn of(main: &Path, folder: &Path, is_part: impl Fn(&Path) -> bool) -> Self {
        let parts = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let parts = parts.map(|entry| entry.path()).filter(|path| is_part(path));
        let files = parts.filter_map(|path| absolute(&path)).collect();
        Reserved { main: absolute(main), folder: absolute(folder), files }
    }

    /// Adds files, such as programs.
    pub fn and(mut self, files: impl IntoIterator<Item = PathBuf>) -> Self {
        self.files.extend(files.into_iter().filter_map(|path| absolute(&path)));
        self
    }

    /// Returns where the files are now, without links.
    fn places(&self) -> Places {
        let main = self.main.as_deref().map(real);
        let folder = self.folder.as_deref().map(real);
        let files = self.files.iter().map(|path| real(path)).chain(main).collect::<HashSet<_>>();
        // A hard link to a file has its number.
        let numbers = files.iter().filter_map(|path| identity(path)).collect();
        Places { folder, files, numbers }
    }
}

fn absolute(path: &Path) -> Option<PathBuf> {
    std::path::absolute(path).ok()
}

/// Where reserved files are.
#[derive(Clone, Debug, Default)]
struct Places {
    folder: Option<PathBuf>,
    files: HashSet<PathBuf>,
    /// Device and inode of each file.
    numbers: HashSet<(u64, u64)>,
}

impl Places {
    fn have(&self, real_path: &Path, file: Option<(u64, u64)>) -> bool {
        self.folder.as_ref().is_some_and(|folder| real_path.starts_with(folder))
            || self.files.contains(real_path)
            || file.is_some_and(|file| self.numbers.contains(&file))
    }
}

/// What is known of the places.
#[derive(Default)]
struct Known {
    places: Arc<Places>,
    /// When a thread began to look. None: never.
    since: Option<Instant>,
    /// That thread has not seen all files yet.
    is_looking: bool,
}

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// Time for which places hold. Files of the configuration and programs are replaced rarely, and a
/// server of thousands of disks asks several times for each of them.
const PLACES_HOLD: Duration = Duration::from_secs(1);

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the present places. Only the thread that looks again waits for file systems.
fn present_places() -> Arc<Places> {
    let mut state = known();
    if state.is_looking || state.since.is_some_and(|since| since.elapsed() < PLACES_HOLD) {
        return state.places.clone();
    }
    let begun = Some(Instant::now());
    (state.since, state.is_looking) = (begun, true);
    drop(state);
    let reserved = RESERVED.read().unwrap_or_else(PoisonError::into_inner).clone();
    let places = Arc::new(reserved.unwrap_or_default().places());
    let mut state = known();
    // Other files may be reserved by now.
    if state.since == begun {
        (state.places, state.is_looking) = (places.clone(), false);
    }
    places
}

/// Returns device and inode of a file, if it exists.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Reserves these files, instead of those of an earlier call. Waits for their file systems.
pub fn reserve(reserved: Reserved) {
    let places = Arc::new(reserved.places());
    *RESERVED.write().unwrap_or_else(PoisonError::into_inner) = Some(reserved);
    *known() = Known { places, since: Some(Instant::now()), is_looking: false };
}

fn is_in(path: &Path, file: Option<(u64, u64)>) -> bool {
    present_places().have(path, file)
}

/// Returns whether a path leads to a reserved file. The file may be missing.
pub fn is_reserved(path: &Path) -> bool {
    is_in(&real(path), identity(path))
}

/// Returns whether an open file is reserved, whatever its name was.
pub fn is_reserved_file(file: impl AsFd) -> io::Result<bool> {
    let file = file.as_fd();
    // Other programs than servers need no /proc for this.
    if RESERVED.read().unwrap_or_else(PoisonError::into_inner).is_none() {
        return Ok(false);
    }
    let stat = rustix::fs::fstat(file)?;
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(is_in(&path, Some((stat.st_dev, stat.st_ino))))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_name_hides_a_file_of_the_configuration() {
        let folder =
            std::env::temp_dir().join(format!("blockyard-reserved-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let at = |name: &str| folder.join(name);
        for sub in ["conf/conf.d/more", "images", "elsewhere"] {
            std::fs::create_dir_all(at(sub)).unwrap();
        }
        for file in
            ["conf/main", "conf/conf.d/a.toml", "elsewhere/part", "images/disk", "images/program"]
        {
            std::fs::write(at(file), "").unwrap();
        }
        symlink(at("elsewhere/part"), at("conf/conf.d/b.toml")).unwrap();
        symlink(at("conf/conf.d"), at("images/folder")).unwrap();
        symlink(at("conf/main"), at("images/link")).unwrap();
        std::fs::hard_link(at("conf/main"), at("images/main")).unwrap();
        std::fs::hard_link(at("conf/conf.d/a.toml"), at("images/hard")).unwrap();
        let is_part = |path: &Path| path.extension().is_some_and(|it| it == "toml");
        let reserved = Reserved::of(&at("conf/main"), &at("conf/conf.d"), is_part);
        let reserved = reserved.and([at("images/program")]);
        let has = |name: &str| {
            let path = at(name);
            reserved.places().have(&real(&path), identity(&path))
        };
        for name in [
            "conf/main",
            "conf/conf.d",
            "conf/conf.d/a.toml",
            "conf/conf.d/new.toml",
            "conf/conf.d/more/new",
            "conf/../conf/conf.d/a.toml",
            "elsewhere/part",
            "images/folder/a.toml",
            "images/folder/new",
            "images/link",
            "images/main",
            "images/hard",
            "images/program",
        ] {
            assert!(has(name), "{name}");
        }
        for name in ["images/disk", "images/new", "conf/disk", "conf/conf.d.img", "elsewhere/new"] {
            assert!(!has(name), "{name}");
        }
        let none = Reserved::default().places();
        assert!(!none.have(&at("images/disk"), identity(&at("images/disk"))));
        // A file that replaces another one is reserved. The replaced one is not.
        for (new, old) in [("images/new", "images/program"), ("elsewhere/new", "elsewhere/part")] {
            std::fs::hard_link(at(old), at(&format!("{old}.old"))).unwrap();
            std::fs::write(at(new), "").unwrap();
            std::fs::rename(at(new), at(old)).unwrap();
            assert!(has(old) && !has(&format!("{old}.old")), "{old}");
        }
        // The main file is reserved before it exists.
        std::fs::remove_file(at("conf/main")).unwrap();
        assert!(has("conf/main"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
