//! Simulated disks for the data of files of this host.
//!
//! In: files that code under test opens and creates by their paths, with a journal of these files
//! ([`Journal::simulated`]). The name, the lock and the records of a file are real. Out: its data
//! lie on a [`SimDisk`]. All disks share one power supply, so a power cut is at an event of any
//! file.
//!
//! What must hold: one thread uses the files, because simulated disks belong to a thread. The disk
//! of a file that the test did not add begins with the contents of the file, which are durable.
//!
//! [`Journal::simulated`]: super::Journal::simulated

use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{LeftFile, Power, Rng, SimConfig, SimDisk, SimImage};
use crate::file::path_of;
use crate::store::Store;

thread_local! {
    static FILES: RefCell<Vec<Weak<Inner>>> = const { RefCell::new(Vec::new()) };
}

/// The files; see the module documentation. Clones are the same files.
#[derive(Clone)]
pub struct SimFiles(Rc<Inner>);

/// Names files of one thread. Any thread may have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FilesId(u64);

struct Inner {
    id: FilesId,
    config: SimConfig,
    wrap: Box<dyn Fn(SimDisk) -> Store>,
    rng: RefCell<Rng>,
    files: RefCell<Vec<SimFile>>,
}

struct SimFile {
    path: PathBuf,
    disk: SimDisk,
    storage: Store,
    /// The note of the file: the record of the overlay on it.
    note: Option<PathBuf>,
}

impl SimFiles {
    /// Returns an empty set. Each disk has the settings of `config`, with a seed of its own. `wrap`
    /// may replace a disk by a defective one.
    pub fn new(config: SimConfig, wrap: impl Fn(SimDisk) -> Store + 'static) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = FilesId(NEXT.fetch_add(1, Ordering::Relaxed));
        let (rng, files) = (RefCell::new(Rng::new(config.seed)), RefCell::default());
        let inner = Rc::new(Inner { id, config, wrap: Box::new(wrap), rng, files });
        FILES.with_borrow_mut(|all| {
            all.retain(|known| known.strong_count() > 0);
            all.push(Rc::downgrade(&inner));
        });
        SimFiles(inner)
    }

    pub(crate) fn id(&self) -> FilesId {
        self.0.id
    }

    /// Adds a file with its contents and its note. Returns its storage.
    pub fn add(&self, path: &Path, image: SimImage, note: Option<PathBuf>) -> Store {
        self.0.add(path, image, note)
    }

    /// Returns the disk of a file.
    pub fn disk(&self, path: &Path) -> Option<SimDisk> {
        let files = self.0.files.borrow();
        files.iter().find(|file| file.path == path).map(|file| file.disk.clone())
    }

    /// Returns the power supply of all disks.
    pub fn power(&self) -> &Power {
        &self.0.config.power
    }

    /// Cuts the power if it is on. Returns one of the possible states of the files. Another call
    /// returns another one.
    pub fn power_cut(&self) -> Vec<LeftFile> {
        let left = |file: &SimFile| LeftFile {
            path: file.path.clone(),
            image: file.disk.power_cut(),
            note: file.note.clone(),
        };
        self.0.files.borrow().iter().map(left).collect()
    }

    /// Fails all operations that a power cut left unanswered; see [`SimDisk::give_up`].
    pub fn give_up(&self) {
        let disks: Vec<_> = self.0.files.borrow().iter().map(|file| file.disk.clone()).collect();
        disks.iter().for_each(SimDisk::give_up);
    }
}

impl Inner {
    fn add(&self, path: &Path, image: SimImage, note: Option<PathBuf>) -> Store {
        let seed = self.rng.borrow_mut().next_u64();
        let disk = SimDisk::new(image, SimConfig { seed, ..self.config.clone() });
        let storage = (self.wrap)(disk.clone());
        let file = SimFile { path: path.into(), disk, storage: storage.clone(), note };
        self.files.borrow_mut().push(file);
        storage
    }
}

impl FilesId {
    fn find(self) -> io::Result<Rc<Inner>> {
        let found = FILES
            .with_borrow(|all| all.iter().filter_map(Weak::upgrade).find(|files| files.id == self));
        found.ok_or_else(|| io::Error::other("the simulated files belong to another thread"))
    }

    /// Returns the storage of a file that is open as `fd`.
    pub fn storage(self, path: &Path, fd: impl AsFd) -> io::Result<Store> {
        let files = self.find()?;
        let known =
            files.files.borrow().iter().find(|file| file.path == path).map(|f| f.storage.clone());
        match known {
            Some(storage) => Ok(storage),
            None => Ok(files.add(path, SimImage::from_bytes(&std::fs::read(path_of(fd))?), None)),
        }
    }

    /// Changes the note of a file, which `keep` does for the real file. The change is durable at
    /// its end. A power cut during the change leaves the old note or the new one.
    pub fn note(
        self,
        path: &Path,
        note: Option<&Path>,
        keep: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let files = self.find()?;
        let power = &files.config.power;
        let no_power = || io::Error::new(io::ErrorKind::NotConnected, "the host has no power");
        if !power.event() {
            return Err(no_power());
        }
        keep()?;
        let is_on = power.event();
        if (is_on || files.rng.borrow_mut().one_in(2))
            && let Some(file) = files.files.borrow_mut().iter_mut().find(|f| f.path == path)
        {
            file.note = note.map(PathBuf::from);
        }
        if is_on { Ok(()) } else { Err(no_power()) }
    }
}
