//! The files of the server's configuration, and the programs that it starts. No disk may use them.
//!
//! In: the main file, the folder of its parts, the files that the server has read, and programs.
//! Out: whether a path or an open file is one of them. What must hold: the answer is the same for
//! each name of a file: links and hard links do not hide it. The answer does not depend on the
//! sandbox, because a folder of images may also have the configuration, and Landlock cannot leave a
//! part of a folder out.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
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
    /// Device and inode of the present files, so that a hard link and the end of a link of the
    /// folder are known.
    files: HashSet<(u64, u64)>,
}

impl Reserved {
    /// Reads which files a configuration has. `is_part`: whether a file of the folder is read.
    pub fn of(main: &Path, folder: &Path, is_part: impl Fn(&Path) -> bool) -> Self {
        let parts = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let parts = parts.map(|entry| entry.path()).filter(|path| is_part(path));
        let files = parts.chain([main.to_path_buf()]).filter_map(|path| identity(&path)).collect();
        let absolute = |path: &Path| std::path::absolute(path).ok();
        Reserved { main: absolute(main), folder: absolute(folder), files }
    }

    /// Adds files, such as programs.
    pub fn and(mut self, files: impl IntoIterator<Item = PathBuf>) -> Self {
        self.files.extend(files.into_iter().filter_map(|path| identity(&path)));
        self
    }

    /// Returns where the files are, without links.
    fn places(&self) -> Places {
        Places { main: self.main.as_deref().map(real), folder: self.folder.as_deref().map(real) }
    }

    fn has(&self, places: &Places, real_path: &Path, file: Option<(u64, u64)>) -> bool {
        places.folder.as_ref().is_some_and(|folder| real_path.starts_with(folder))
            || places.main.as_ref().is_some_and(|main| real_path == main)
            || file.is_some_and(|file| self.files.contains(&file))
    }
}

/// The real paths of the main file and of the folder.
#[derive(Clone, Debug)]
struct Places {
    main: Option<PathBuf>,
    folder: Option<PathBuf>,
}

/// The real paths, and when they were looked up.
static PLACES: Mutex<Option<(Instant, Arc<Places>)>> = Mutex::new(None);

/// Time for which real paths hold. Links of the configuration change rarely, and a server of
/// thousands of disks asks several times for each of them.
const PLACES_HOLD: Duration = Duration::from_secs(1);

fn present_places(reserved: &Reserved) -> Arc<Places> {
    let mut known = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    match &*known {
        Some((since, places)) if since.elapsed() < PLACES_HOLD => places.clone(),
        _ => {
            let places = Arc::new(reserved.places());
            *known = Some((Instant::now(), places.clone()));
            places
        }
    }
}

/// Returns device and inode of a file, if it exists.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Reserves these files, instead of those of an earlier call.
pub fn reserve(reserved: Reserved) {
    *RESERVED.write().unwrap_or_else(PoisonError::into_inner) = Some(reserved);
    *PLACES.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

fn is_in(path: &Path, file: Option<(u64, u64)>) -> bool {
    let reserved = RESERVED.read().unwrap_or_else(PoisonError::into_inner);
    reserved.as_ref().is_some_and(|reserved| reserved.has(&present_places(reserved), path, file))
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
            reserved.has(&reserved.places(), &real(&path), identity(&path))
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
        let none = Reserved::default();
        assert!(!none.has(&none.places(), &at("images/disk"), identity(&at("images/disk"))));
        // The main file is reserved before it exists.
        std::fs::remove_file(at("conf/main")).unwrap();
        assert!(has("conf/main"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
