//! New files: under a name of their own until they are whole, so that an interrupted command leaves nothing, and a power cut
//! at most that name.
//!
//! What must hold: nothing that exists is replaced unless the user says so, nor while it is in use; the name is given when
//! the content is durable, and is durable itself when the command ends.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use anyhow::{Context, anyhow, bail};
use blockyard_image::{CacheMode, ImageFile, OpenOptions};
use rustix::fs::{CWD, RenameFlags};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Files to be removed when a signal ends the program.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is being made.
pub struct NewFile {
    path: PathBuf,
    temporary: PathBuf,
    /// What it is to replace, locked.
    replaced: Option<ImageFile>,
}

impl NewFile {
    /// Makes an empty file beside `path`.
    pub fn create(path: &Path, force: bool) -> anyhow::Result<Self> {
        // What a link points to is replaced, not the link.
        let real = std::fs::canonicalize(path);
        let replaced = match &real {
            Ok(_) if !force => bail!("{} exists already: say --force to replace it", path.display()),
            Ok(real) => {
                let options = OpenOptions { path: real.clone(), read_only: false, cache: CacheMode::Writeback };
                Some(ImageFile::open(&options)?)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => bail!("{}: {e}", path.display()),
        };
        let path = real.unwrap_or_else(|_| path.into());
        let name = path.file_name().ok_or_else(|| anyhow!("{} is no name for a file", path.display()))?;
        let name = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
        let temporary = path.with_file_name(name);
        remove_on_signals();
        let mut list = unfinished();
        File::create_new(&temporary).with_context(|| format!("creating {}", path.display()))?;
        list.push(temporary.clone());
        drop(list);
        Ok(NewFile { path, temporary, replaced })
    }

    /// Where it is until it is finished.
    pub fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Gives the file its name; its content is durable already.
    pub fn finish(self) -> anyhow::Result<()> {
        let wrong = || format!("giving {} its name", self.path.display());
        {
            // A signal now finds the file either unfinished or finished.
            let mut list = unfinished();
            rename(&self.temporary, &self.path, self.replaced.is_some()).with_context(wrong)?;
            list.retain(|path| *path != self.temporary);
        }
        sync_folder(&self.path).with_context(wrong)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let mut list = unfinished();
        if list.contains(&self.temporary) {
            let _ = std::fs::remove_file(&self.temporary);
            list.retain(|path| *path != self.temporary);
        }
    }
}

fn rename(from: &Path, to: &Path, replace: bool) -> io::Result<()> {
    if replace {
        return std::fs::rename(from, to);
    }
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Not every file system can: somebody who made the file meanwhile loses it there.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => std::fs::rename(from, to),
        done => Ok(done?),
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

fn remove_on_signals() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
        std::thread::spawn(move || {
            if signals.forever().next().is_some() {
                // Held to the end, so that no file is finished any more.
                let list = unfinished();
                for path in list.iter() {
                    let _ = std::fs::remove_file(path);
                }
                eprintln!("blockyard: interrupted");
                std::process::exit(1);
            }
        });
    });
}
