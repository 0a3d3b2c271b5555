//! The files of the server's configuration. No disk may use them.
//!
//! In: the main file, the folder of its parts, and the files that the server has read. Out: whether
//! a path or an open file is one of them. What must hold: the answer is the same for each name of a
//! file: links and hard links do not hide it. The answer does not depend on the sandbox, because a
//! folder of images may also have the configuration, and Landlock cannot leave a part of a folder
//! out.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use super::folders::real;

static RESERVED: RwLock<Option<Reserved>> = RwLock::new(None);

/// Files that belong to the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// The main file, which may be missing.
    pub main: PathBuf,
    /// The folder of the other files, which may be missing.
    pub folder: PathBuf,
    /// Device and inode of the present files, so that a hard link and the end of a link of the
    /// folder are known.
    pub files: HashSet<(u64, u64)>,
}

impl Reserved {
    /// Reads which files there are. `is_part`: whether a file of the folder is read.
    pub fn of(main: &Path, folder: &Path, is_part: impl Fn(&Path) -> bool) -> Self {
        let parts = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let parts = parts.map(|entry| entry.path()).filter(|path| is_part(path));
        let all = parts.chain([main.to_path_buf()]);
        let files = all.filter_map(|path| std::fs::metadata(path).ok());
        let files = files.map(|meta| (meta.dev(), meta.ino())).collect();
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
        Reserved { main: absolute(main), folder: absolute(folder), files }
    }

    fn has(&self, real_path: &Path, file: Option<(u64, u64)>) -> bool {
        // A link may lead elsewhere since.
        real_path.starts_with(real(&self.folder))
            || real_path == real(&self.main)
            || file.is_some_and(|file| self.files.contains(&file))
    }
}

/// Reserves these files, instead of those of an earlier call.
pub fn reserve(reserved: Reserved) {
    *RESERVED.write().unwrap_or_else(PoisonError::into_inner) = Some(reserved);
}

fn is_in(path: &Path, file: Option<(u64, u64)>) -> bool {
    let reserved = RESERVED.read().unwrap_or_else(PoisonError::into_inner);
    reserved.as_ref().is_some_and(|reserved| reserved.has(path, file))
}

/// Returns whether a path leads to a file of the configuration. The file may be missing.
pub fn is_reserved(path: &Path) -> bool {
    let file = std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    is_in(&real(path), file)
}

/// Returns whether an open file belongs to the configuration, whatever its name was.
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
        for file in ["conf/main", "conf/conf.d/a.toml", "elsewhere/part", "images/disk"] {
            std::fs::write(at(file), "").unwrap();
        }
        symlink(at("elsewhere/part"), at("conf/conf.d/b.toml")).unwrap();
        symlink(at("conf/conf.d"), at("images/folder")).unwrap();
        symlink(at("conf/main"), at("images/link")).unwrap();
        std::fs::hard_link(at("conf/main"), at("images/main")).unwrap();
        std::fs::hard_link(at("conf/conf.d/a.toml"), at("images/hard")).unwrap();
        let is_part = |path: &Path| path.extension().is_some_and(|it| it == "toml");
        let reserved = Reserved::of(&at("conf/main"), &at("conf/conf.d"), is_part);
        let has = |name: &str| {
            let path = at(name);
            let meta = std::fs::metadata(&path).ok();
            reserved.has(&real(&path), meta.map(|meta| (meta.dev(), meta.ino())))
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
        ] {
            assert!(has(name), "{name}");
        }
        for name in ["images/disk", "images/new", "conf/disk", "conf/conf.d.img", "elsewhere/new"] {
            assert!(!has(name), "{name}");
        }
        // The main file is reserved before it exists.
        std::fs::remove_file(at("conf/main")).unwrap();
        assert!(has("conf/main"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
