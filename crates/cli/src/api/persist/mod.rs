//! Changes of the API that a restart keeps: files in the folder `conf.d` of the configuration.
//!
//! In: the keys of a disk, or the name of one that is gone. Out: a file of the folder. It replaces
//! what earlier files say about the disk. What must hold: a power cut leaves the old file or the
//! new one, and the new one is durable when the call returns. The next start accepts the files, and
//! finds the disk as the call left it: a caller checks that before it changes the disk. A call does
//! not replace a file in which an operator has put anything else.

mod edit;

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::Context;
use blockyard_ring::small_file;
use toml::{Table, Value};

use crate::config::files::{FOLDER, Instead, OF_API};
use crate::config::{Config, ConfigError};
use crate::disks;
use crate::disks::book::Entry;
use crate::disks::identities::Images;
use crate::nbd;
use crate::options::disk::DiskArgs;
use crate::options::nbd::NbdArgs;

/// Maximum length of a file's name in bytes, on Linux.
const MAX_FILE_NAME: usize = 255;

/// The folder of a configuration, as the API changes it.
pub struct Persistence {
    config: PathBuf,
    folder: PathBuf,
    /// Options of the command line, which replace keys of the file.
    nbd: NbdArgs,
    /// What is known of the images of the files.
    images: Images,
}

impl Persistence {
    /// Returns the folder of a configuration. Returns an error if it does not exist, or if the
    /// disk's name is too long for a file.
    pub fn of(config: Option<&Path>, nbd: &NbdArgs, disk: &str) -> anyhow::Result<Self> {
        let config = config
            .context("persist: the server has no configuration file: start it with --config")?;
        let folder = crate::config::files::root(config).join(FOLDER);
        anyhow::ensure!(
            folder.is_dir(),
            "persist: folder {} does not exist: create it, and restart the server",
            folder.display()
        );
        let store = Persistence {
            config: config.to_path_buf(),
            folder,
            nbd: nbd.clone(),
            images: Images::default(),
        };
        let file = store.path(disk);
        let len = file.file_name().map_or(0, |name| name.len());
        anyhow::ensure!(
            len <= MAX_FILE_NAME,
            "persist: the disk's name is too long for the name of a file: choose a shorter one"
        );
        Ok(store)
    }

    /// Does not ask the file systems of these disks, because their images are open.
    pub fn with_served(self, served: &[Entry]) -> Self {
        Persistence { images: Images::of(served), ..self }
    }

    /// Returns the keys of a disk in the files as they are now. None: no file has the disk.
    pub fn keys(&self, name: &str) -> anyhow::Result<Option<Table>> {
        let config = Config::read_with(&self.config, true, None, &self.images)?;
        let at = config.disks.iter().position(|disk| disk.name() == name);
        Ok(at.map(|at| config.keys(at)))
    }

    /// Returns the text of the disk's file, or `None` if there is no such file. Returns an error if
    /// it has anything that this module does not write there.
    fn own_text(&self, name: &str) -> anyhow::Result<Option<String>> {
        let path = self.path(name);
        let text = match small_file::read_text(&path) {
            Err(e) if e.is_missing() => return Ok(None),
            text => text.context("persist")?,
        };
        let Ok(table) = text.parse::<Table>() else {
            anyhow::bail!("persist: {} is no TOML: mend or remove it", path.display());
        };
        anyhow::ensure!(
            is_own(&table, name),
            "persist: {} has more than disk \"{name}\": move the rest into another file of that \
             folder",
            path.display()
        );
        Ok(Some(text))
    }

    /// Returns the text of the disk's file with these keys.
    fn with_disk(&self, name: &str, keys: &Table) -> anyhow::Result<String> {
        let edited = edit::with_disk(self.own_text(name)?.as_deref(), keys);
        edited.with_context(|| format!("persist: {}", self.path(name).display()))
    }

    /// Returns the text of the disk's file that removes the disk of earlier files.
    fn without_disk(&self, name: &str) -> anyhow::Result<String> {
        let edited = edit::without_disk(self.own_text(name)?.as_deref(), name);
        edited.with_context(|| format!("persist: {}", self.path(name).display()))
    }

    /// Returns an error if the next start would refuse the files with these keys of a disk, or
    /// would not serve the disk with them.
    pub fn check(&self, name: &str, keys: &Table) -> anyhow::Result<()> {
        let path = self.path(name);
        let text = self.with_disk(name, keys)?;
        let instead = Instead { path: &path, text: Some(&text) };
        let refused = "persist: the next start would refuse the configuration";
        let config = Config::read_with(&self.config, true, Some(instead), &self.images);
        let config = config.context(refused)?;
        let args = self.nbd.or(&config.nbd);
        let tls = nbd::Tls::of(args.tls_certificates.as_deref());
        let checked =
            config.check_each(|disk| disks::check(disk).and_then(|()| nbd::check(tls, disk)));
        checked.context(refused)?;
        let at = config.disks.iter().position(|disk| disk.name() == name);
        anyhow::ensure!(
            at.is_some_and(|at| config.keys(at) == *keys),
            "persist: a file of {} that is read after {} has disk \"{name}\": change it there",
            self.folder.display(),
            path.file_name().unwrap_or_default().display()
        );
        Ok(())
    }

    /// Returns an error if the next start would serve a disk although [`Persistence::forget`] has
    /// been called.
    pub fn check_forget(&self, name: &str) -> anyhow::Result<()> {
        let path = self.path(name);
        let text = self.without_disk(name)?;
        let instead = Instead { path: &path, text: Some(&text) };
        let config = match Config::read_with(&self.config, true, Some(instead), &self.images) {
            Ok(config) => config,
            // A disk can be removed although another file has a mistake.
            Err(ConfigError::Parse { .. } | ConfigError::Value { .. }) => return Ok(()),
            Err(e) => return Err(e).context("persist: the files do not show what a start serves"),
        };
        match config.disks.iter().position(|disk| disk.name() == name) {
            Some(at) => anyhow::bail!(
                "persist: {} is read after {} and has disk \"{name}\": remove it there",
                config.places.get(at).map(ToString::to_string).unwrap_or_default(),
                path.file_name().unwrap_or_default().display()
            ),
            None => Ok(()),
        }
    }

    /// Makes the next start serve a disk with these keys.
    pub fn keep(&self, name: &str, keys: &Table) -> anyhow::Result<()> {
        self.write(name, &self.with_disk(name, keys)?)
    }

    /// Prepares to keep the keys of a disk, so that it can be done at once, and taken back without
    /// space on the host.
    pub fn prepare(&self, name: &str, keys: &Table) -> anyhow::Result<Prepared> {
        let path = self.path(name);
        let failed = || format!("persist: preparing {}", path.display());
        let present = match small_file::read(&path) {
            Ok(text) => Some(text),
            Err(e) if e.is_missing() => None,
            Err(e) => return Err(e).context("persist"),
        };
        // Drop removes the files after an error.
        let like = attributes(&path).with_context(failed)?;
        let prepared = Prepared { path: path.clone(), replaces: present.is_some() };
        let new = self.with_disk(name, keys)?;
        let written = write_durably(&prepared.new_file(), new.as_bytes(), like.as_ref());
        let old = present.map(|text| write_durably(&prepared.old_file(), &text, like.as_ref()));
        written.and(old.unwrap_or(Ok(()))).with_context(failed)?;
        Ok(prepared)
    }

    /// Makes the next start leave a disk out. After an error or a power cut, the files have the
    /// disk as before, or not at all: the disk of an earlier file must not come back, because it
    /// may have another image.
    pub fn forget(&self, name: &str) -> anyhow::Result<()> {
        self.write(name, &self.without_disk(name)?)?;
        let path = self.path(name);
        let is_in = |config: Config| config.disks.iter().any(|disk| disk.name() == name);
        // With a mistake in another file, the file stays. It does no harm.
        let instead = Instead { path: &path, text: None };
        if crate::config::files::read(&self.config, Some(instead))
            .is_ok_and(|others| !is_in(others))
        {
            let removed = std::fs::remove_file(&path).and_then(|()| self.sync());
            removed.with_context(|| format!("persist: removing {}", path.display()))?;
        }
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.path(name);
        let replaced = self.replace(&path, text);
        replaced.with_context(|| format!("persist: writing {}", path.display()))
    }

    fn replace(&self, path: &Path, text: &str) -> io::Result<()> {
        let unfinished = path.with_extension("new");
        let like = attributes(path)?;
        let written = write_durably(&unfinished, text.as_bytes(), like.as_ref());
        written.and_then(|()| std::fs::rename(&unfinished, path)).inspect_err(|_| {
            let _ = std::fs::remove_file(&unfinished);
        })?;
        self.sync()
    }

    fn sync(&self) -> io::Result<()> {
        sync_folder(&self.folder)
    }

    /// Returns the file of a disk. Letters that are unusual in names of files are encoded.
    fn path(&self, name: &str) -> PathBuf {
        let mut file = String::from(OF_API);
        for byte in name.bytes() {
            if byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) {
                file.push(byte.into());
            } else {
                file += &format!("%{byte:02x}");
            }
        }
        self.folder.join(file + ".toml")
    }
}

/// A file of the folder that can replace the present one at once. Drop removes the parts of this
/// that are not in use.
#[derive(Debug)]
pub struct Prepared {
    path: PathBuf,
    /// Whether the folder had the file before.
    replaces: bool,
}

impl Prepared {
    fn new_file(&self) -> PathBuf {
        self.path.with_extension("new")
    }

    fn old_file(&self) -> PathBuf {
        self.path.with_extension("old")
    }

    /// Puts the new file into the folder, durably.
    pub fn apply(&self) -> io::Result<()> {
        std::fs::rename(self.new_file(), &self.path)?;
        self.sync()
    }

    /// Puts the old file into the folder again, durably, also after an error of `apply`.
    pub fn take_back(&self) -> io::Result<()> {
        if self.replaces {
            std::fs::rename(self.old_file(), &self.path)?;
            return self.sync();
        }
        match std::fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => self.sync(),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.path.parent().map_or(Ok(()), sync_folder)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for file in [self.new_file(), self.old_file()] {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Returns whether a file has only keys that [`edit`] writes for this disk.
fn is_own(file: &Table, name: &str) -> bool {
    let is_disk = |disk: &Value| {
        let args: Result<DiskArgs, _> = disk.clone().try_into();
        args.is_ok_and(|args| args.name() == name)
    };
    file.iter().all(|(key, value)| match (key.as_str(), value) {
        ("disk", Value::Array(disks)) => disks.iter().all(is_disk),
        ("remove", Value::Array(names)) => names.iter().all(|it| it.as_str() == Some(name)),
        _ => false,
    })
}

/// Returns the attributes of a file that is to be replaced. None: there is no such file.
fn attributes(path: &Path) -> io::Result<Option<Metadata>> {
    match std::fs::metadata(path) {
        Ok(attributes) => Ok(Some(attributes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Mode of a new file: it may name the disks of others.
const PRIVATE: u32 = 0o600;

/// Writes a file. It gets mode and owner of the file that it will replace. A new one is private.
fn write_durably(path: &Path, bytes: &[u8], like: Option<&Metadata>) -> io::Result<()> {
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(PRIVATE).open(path)?;
    let mode = like.map_or(PRIVATE, |like| like.mode() & 0o7777);
    if let Some(like) = like {
        let new = file.metadata()?;
        // Only a privileged server may give it to another user. The file of another server stays
        // with its own user.
        if (new.uid(), new.gid()) != (like.uid(), like.gid())
            && let Err(e) = fchown(&file, Some(like.uid()), Some(like.gid()))
            && e.kind() != io::ErrorKind::PermissionDenied
        {
            return Err(e);
        }
    }
    // A file that a crash has left may have another mode.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(config: &Path) -> Vec<(String, u32)> {
        let config = Config::read(config, true).unwrap();
        config.disks.iter().map(|disk| (disk.name(), disk.weight)).collect()
    }

    #[test]
    fn a_file_keeps_its_mode_and_what_an_operator_has_added() {
        let folder =
            std::env::temp_dir().join(format!("blockyard-persist-own-{}", std::process::id()));
        let config = folder.join("disks.toml");
        std::fs::create_dir_all(folder.join(FOLDER)).unwrap();
        std::fs::write(&config, "").unwrap();
        let store = Persistence::of(Some(&config), &NbdArgs::default(), "a").unwrap();
        let keys = "name = \"a\"\nimage = \"ram:1M\"\nublk = true\n".parse::<Table>().unwrap();
        store.keep("a", &keys).unwrap();
        let file = folder.join(FOLDER).join("90-ctl-a.toml");
        let mode = || std::fs::metadata(&file).unwrap().mode() & 0o7777;
        assert_eq!(mode(), 0o600);
        std::fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        store.keep("a", &keys).unwrap();
        assert_eq!(mode(), 0o640);
        let prepared = store.prepare("a", &keys).unwrap();
        prepared.apply().unwrap();
        assert_eq!(mode(), 0o640);
        prepared.take_back().unwrap();
        assert_eq!(mode(), 0o640);
        store.check("a", &keys).unwrap();
        store.check_forget("a").unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.starts_with(edit::HEADER), "{text}");
        for more in [
            "[group.g]\nweight = 5\n",
            "[[disk]]\nname = \"b\"\nimage = \"ram:1M\"\nublk = true\n",
            "no TOML",
        ] {
            std::fs::write(&file, format!("{text}{more}")).unwrap();
            for refused in [store.check("a", &keys), store.check_forget("a")] {
                let error = refused.unwrap_err().to_string();
                assert!(error.contains("90-ctl-a.toml"), "{error}");
            }
        }
        std::fs::write(&file, "remove = [\"a\", \"b\"]\n").unwrap();
        assert!(store.check("a", &keys).is_err());
        std::fs::write(&file, "remove = [\"a\"]\n").unwrap();
        store.check("a", &keys).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }

    /// Another folder of that name is beside a configuration that has gone.
    #[test]
    fn a_configuration_that_cannot_be_read_is_not_changed() {
        let name = format!("blockyard-persist-gone-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let config = folder.join("c");
        for parts in [folder.join(FOLDER), config.join(FOLDER)] {
            std::fs::create_dir_all(parts).unwrap();
        }
        std::fs::write(config.join("blockyard.toml"), "").unwrap();
        let of = || Persistence::of(Some(&config), &NbdArgs::default(), "a");
        let store = of().unwrap();
        store.check_forget("a").unwrap();
        std::fs::rename(&config, folder.join("d")).unwrap();
        let error = format!("{:#}", store.check_forget("a").unwrap_err());
        assert!(error.contains("blockyard.toml: cannot read it"), "{error}");
        let error = of().err().unwrap().to_string();
        assert!(error.contains("c/conf.d does not exist"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn disks_are_kept_replaced_and_forgotten() {
        let folder = std::env::temp_dir().join(format!("blockyard-persist-{}", std::process::id()));
        let config = folder.join("disks.toml");
        std::fs::create_dir_all(folder.join(FOLDER)).unwrap();
        let disk = |name: &str| format!("name = \"{name}\"\nimage = \"ram:1M\"\nublk = true\n");
        std::fs::write(&config, format!("[[disk]]\n{}", disk("a"))).unwrap();
        let of =
            |config: Option<&Path>, disk: &str| Persistence::of(config, &NbdArgs::default(), disk);
        let store = of(Some(&config), "a").unwrap();
        assert!(of(Some(&config), &"x".repeat(243)).is_ok());
        assert!(of(Some(&config), &"x".repeat(244)).is_err());
        let keys = |name: &str, more: &str| (disk(name) + more).parse::<Table>().unwrap();
        store.keep("b/ c", &keys("b/ c", "")).unwrap();
        store.keep("a", &keys("a", "weight = 300\n")).unwrap();
        assert_eq!(names(&config), [("a".into(), 300), ("b/ c".into(), 100)]);
        store.forget("a").unwrap();
        assert_eq!(names(&config), [("b/ c".into(), 100)]);
        let files = || {
            let entries = std::fs::read_dir(folder.join(FOLDER)).unwrap().flatten();
            let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
            names.sort();
            names
        };
        let before = (names(&config), files());
        for name in ["b/ c", "new"] {
            let prepare = || store.prepare(name, &keys(name, "weight = 9\n")).unwrap();
            assert_eq!(names(&config), before.0);
            let prepared = prepare();
            prepared.apply().unwrap();
            assert!(names(&config).contains(&(name.into(), 9)));
            prepared.take_back().unwrap();
            drop(prepared);
            assert_eq!((names(&config), files()), before);
            // Without an application, too.
            prepare().take_back().unwrap();
            assert_eq!((names(&config), files()), before);
        }
        let prepared = store.prepare("b/ c", &keys("b/ c", "weight = 9\n")).unwrap();
        prepared.apply().unwrap();
        drop(prepared);
        assert_eq!((names(&config), files()), (vec![("b/ c".into(), 9)], before.1));
        store.forget("b/ c").unwrap();
        let left: Vec<_> = std::fs::read_dir(folder.join(FOLDER)).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "the main file has the first disk: {left:?}");
        store.keep("a", &keys("a", "")).unwrap();
        assert_eq!(names(&config), [("a".into(), 100)]);
        // A mistake in another file: the disk of the main file does not come back.
        store.keep("a", &keys("a", "weight = 300\n")).unwrap();
        let wrong = folder.join(FOLDER).join("99.toml");
        std::fs::write(&wrong, "no TOML").unwrap();
        store.forget("a").unwrap();
        std::fs::remove_file(&wrong).unwrap();
        assert_eq!(names(&config), []);
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(of(Some(&config), "a").is_err());
        assert!(of(None, "a").is_err());
    }
}
