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
use blockyard_image::ImageFile;
use blockyard_image::tools::{self, NewImage, open_file};
use rustix::fs::{CWD, RenameFlags};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Files to be removed when a signal ends the program.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is being made; the files that it needs beside it are made under their own names.
pub struct NewFile {
    path: PathBuf,
    /// The same as `path` where that is a block device.
    temporary: PathBuf,
    /// What it is to replace, locked.
    replaced: Option<ImageFile>,
    force: bool,
    device: bool,
    /// To be removed if it is not finished.
    made: Vec<PathBuf>,
}

impl NewFile {
    /// Makes an empty file beside `path`. (A block device is taken as it is.)
    pub fn create(path: &Path, force: bool) -> anyhow::Result<Self> {
        // What a link points to is replaced, not the link.
        let real = std::fs::canonicalize(path);
        let replaced = match &real {
            Ok(_) if !force => bail!("{} exists already: say --force to replace it", path.display()),
            Ok(real) => Some(open_file(real, false)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => bail!("{}: {e}", path.display()),
        };
        let path = real.unwrap_or_else(|_| path.into());
        let device = replaced.as_ref().is_some_and(ImageFile::is_device);
        // A device is locked anew by those who write to it.
        let replaced = replaced.filter(|_| !device);
        let mut file = NewFile { temporary: path.clone(), path, replaced, force, device, made: Vec::new() };
        if device {
            return Ok(file);
        }
        let name = file.path.file_name().ok_or_else(|| anyhow!("{} is no name for a file", file.path.display()))?;
        let name = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
        file.temporary = file.path.with_file_name(name);
        let temporary = file.temporary.clone();
        file.add(&temporary).with_context(|| format!("creating {}", file.path.display()))?;
        Ok(file)
    }

    pub fn is_device(&self) -> bool {
        self.device
    }

    /// Makes the image in it, and its data file.
    pub fn make(&mut self, new: NewImage) -> anyhow::Result<()> {
        if let NewImage::Qcow2 { data: Some(data), .. } = &new {
            match self.add(data) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && self.force => File::create(data).map(|_| ()),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    bail!("data file {} exists already: say --force to empty it", data.display())
                }
                done => done,
            }
            .with_context(|| format!("data file {}", data.display()))?;
        }
        Ok(tools::create(&self.temporary, new)?)
    }

    /// Makes an empty file that goes if this is not finished.
    fn add(&mut self, path: &Path) -> io::Result<()> {
        remove_on_signals();
        let mut list = unfinished();
        File::create_new(path)?;
        list.push(path.into());
        self.made.push(path.into());
        Ok(())
    }

    /// Where it is until it is finished.
    pub fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Gives the file its name; its content is durable already.
    pub fn finish(self) -> anyhow::Result<()> {
        if self.device {
            return Ok(());
        }
        let wrong = || format!("giving {} its name", self.path.display());
        {
            // A signal now finds the file either unfinished or finished.
            let mut list = unfinished();
            rename(&self.temporary, &self.path, self.replaced.is_some()).with_context(wrong)?;
            list.retain(|path| !self.made.contains(path));
        }
        let folders = self.made.iter().map(|path| sync_folder(path));
        folders.collect::<io::Result<()>>().with_context(wrong)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let mut list = unfinished();
        for made in &self.made {
            if list.contains(made) {
                let _ = std::fs::remove_file(made);
            }
        }
        list.retain(|path| !self.made.contains(path));
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
                blockyard_bench::output::note("blockyard: interrupted");
                std::process::exit(1);
            }
        });
    });
}
