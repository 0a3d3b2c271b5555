//! Where journals are: a folder on tmpfs, with a file for each image that is open for writing.
//!
//! Page 0 of a journal, in words:
//! ```text
//!   0 magic   1, 2 boot   3 device   4 inode   5 time of birth   6, 7 session   8 checksum
//!   16, 32 generations of the halves   17, 33 whether a half counts only without the older one
//!   24, 40 their numbers of claimed slots   48 whether the session has finished
//! ```
//!
//! Invariant: only the server's own user can write to the folder, so that no other user can
//! make a server change an image.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_ring::SharedWords;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use serde::{Deserialize, Serialize};

use super::log::{self, Log, Session};
use super::record::words_of;
use super::recovered::Recovered;

/// "BLKYJRN1".
const MAGIC: u64 = 0x424c_4b59_4a52_4e31;
const CHECKSUM: usize = 8;
const PAGE: u64 = 4096;
/// Types of file systems in memory (linux/magic.h).
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;
/// Environment variable that names the folder.
const VARIABLE: &str = "BLOCKYARD_STATE_FOLDER";

/// Why a folder on another file system than tmpfs is refused.
const NOT_IN_MEMORY: &str = "it is not on tmpfs: a journal must be in memory, so that a reboot \
                             clears it; name another folder (--state-folder)";

/// Identity of an image's file: a copy of the file at the same path has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
pub struct ImageKey {
    /// Number of the device that has the file, or of the block device itself.
    pub device: u64,
    /// 0: a block device.
    pub inode: u64,
    /// Time of birth in nanoseconds; 0: unknown.
    pub born: u64,
}

impl ImageKey {
    /// Returns the identity of an open file or block device.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        Self::found(file, AtFlags::EMPTY_PATH)
    }

    /// Like [`ImageKey::of`], as the kernel knows it. Does not wait for a server of the file
    /// system.
    pub fn as_known(file: impl AsFd) -> io::Result<Self> {
        Self::found(file, AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC)
    }

    fn found(file: impl AsFd, flags: AtFlags) -> io::Result<Self> {
        let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(file, c"", flags, mask)?;
        let device = |major: u32, minor: u32| u64::from(major) << 32 | u64::from(minor);
        if stat.stx_rdev_major != 0 {
            let device = device(stat.stx_rdev_major, stat.stx_rdev_minor);
            return Ok(ImageKey { device, inode: 0, born: 0 });
        }
        let born = stat.stx_btime.tv_sec as u64 * 1_000_000_000 + u64::from(stat.stx_btime.tv_nsec);
        let known = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        Ok(ImageKey {
            device: device(stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            born: if known { born } else { 0 },
        })
    }

    /// Returns whether two identities may be of the same file. A file system may not know the time
    /// of birth.
    pub fn may_be(&self, other: &Self) -> bool {
        let is_born_then = self.born == other.born || self.born == 0 || other.born == 0;
        (self.device, self.inode) == (other.device, other.inode) && is_born_then
    }

    /// Returns whether this is the number of a block device. The host uses it again for another
    /// device.
    fn is_of_device(&self) -> bool {
        self.inode == 0
    }
}

/// Why there is no journal.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("state folder {}: {operation}: {error}", path.display())]
    Io { path: PathBuf, operation: &'static str, error: io::Error },
    #[error("state folder {}: {what}", path.display())]
    Unusable { path: PathBuf, what: String },
    #[error("there is no state folder")]
    None,
    #[error("another server may take the image back, and would not find the journal")]
    Held,
    #[error("memory for a journal: {0}")]
    Memory(io::Error),
    #[error("finding the identity of the image: {0}")]
    Image(io::Error),
}

/// The folder of the journals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateFolder {
    path: PathBuf,
    boot: u128,
}

/// Journals of simulated images, which survive a simulated death of the process.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    journals: Arc<Mutex<HashMap<ImageKey, Kept>>>,
    boots: Arc<AtomicU64>,
    /// Number of records that each half of a journal has memory for. `None`: no limit.
    room: Option<[usize; 2]>,
    /// Number of creations that fail before one succeeds.
    failures: Arc<AtomicU64>,
}

#[derive(Clone, Debug)]
struct Kept {
    words: Arc<SharedWords>,
    session: Session,
}

/// What keeps the journals.
#[derive(Clone, Debug)]
pub enum JournalStore {
    Folder(Arc<StateFolder>),
    /// For simulations.
    Memory(MemoryStore),
}

impl StateFolder {
    /// Returns the folder that is used if the caller names none: the one of the environment
    /// variable `BLOCKYARD_STATE_FOLDER`, else one in the runtime directory.
    pub fn default_path() -> PathBuf {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(folder) = variable(VARIABLE) {
            return folder.into();
        }
        let user = rustix::process::geteuid().as_raw();
        let runtime = match user {
            0 => Some(PathBuf::from("/run")),
            _ => variable("XDG_RUNTIME_DIR").map(PathBuf::from),
        };
        let runtime = runtime.filter(|path| path.is_absolute() && is_in_memory(path) == Ok(true));
        match runtime {
            Some(runtime) => runtime.join("blockyard-journals"),
            None => format!("/dev/shm/blockyard-journals-{user}").into(),
        }
    }

    /// Opens the folder, and creates it if it does not exist.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let path = path.into();
        let failed = |operation| {
            let path = path.clone();
            move |error| StoreError::Io { path, operation, error }
        };
        let refuse = |what: &str| StoreError::Unusable { path: path.clone(), what: what.into() };
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        // A folder that cannot be used is not created.
        if !path.exists() && is_in_memory(parent.unwrap_or(Path::new("."))) == Ok(false) {
            return Err(refuse(NOT_IN_MEMORY));
        }
        match std::fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(failed("creating it")(e)),
            _ => Self::open_existing(path),
        }
    }

    /// Opens the folder, which exists.
    fn open_existing(path: PathBuf) -> Result<Self, StoreError> {
        let failed = |operation| {
            let path = path.clone();
            move |error| StoreError::Io { path, operation, error }
        };
        let refuse = |what: &str| StoreError::Unusable { path: path.clone(), what: what.into() };
        let folder = std::fs::symlink_metadata(&path).map_err(failed("finding its owner"))?;
        let user = rustix::process::geteuid().as_raw();
        if !folder.is_dir() {
            return Err(refuse("it is no folder"));
        }
        if folder.uid() != user && user != 0 || folder.mode() & 0o022 != 0 {
            return Err(refuse(
                "other users can write to it: it must belong to the server's user, with mode 700",
            ));
        }
        let in_memory =
            is_in_memory(&path).map_err(|e| failed("finding its file system")(e.into()))?;
        if !in_memory {
            return Err(refuse(NOT_IN_MEMORY));
        }
        let boot = read_boot().map_err(failed("reading the boot's number"))?;
        Ok(StateFolder { path, boot })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the free space in bytes. `None`: the file system has no limit.
    pub fn free(&self) -> io::Result<Option<u64>> {
        let of = rustix::fs::statvfs(&self.path)?;
        Ok((of.f_blocks > 0).then(|| of.f_bavail * of.f_frsize))
    }

    fn file(&self, image: &ImageKey) -> PathBuf {
        self.path.join(format!("{:x}-{:x}.journal", image.device, image.inode))
    }

    fn create(&self, image: &ImageKey) -> Result<Log, StoreError> {
        let path = self.file(image);
        let failed = |operation| {
            let path = path.clone();
            move |error| StoreError::Io { path, operation, error }
        };
        // Gives the journal of another image another name.
        drop(self.find(image)?);
        self.remove(image).map_err(failed("removing an old journal"))?;
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(failed("creating a journal"))?;
        let made = || {
            file.set_len((log::TOTAL * 8) as u64)?;
            log::allocate(&file, 0, PAGE)?;
            SharedWords::of_file(&file, log::TOTAL)
        };
        let words = made().map_err(failed("creating a journal")).inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })?;
        let session = Session { number: random(), boot: self.boot };
        write_header(&words, image, session);
        Ok(Log::over(Arc::new(words), Some(file), session))
    }

    /// Opens the journal of an image. A journal of another boot is removed. One of another image
    /// gets a name of its own, see [`StateFolder::find_marked`].
    fn find(&self, image: &ImageKey) -> Result<Option<Recovered>, StoreError> {
        let path = self.file(image);
        let failed = |operation| {
            let path = path.clone();
            move |error| StoreError::Io { path, operation, error }
        };
        let mut options = File::options();
        options.read(true).write(true).custom_flags((OFlags::NOFOLLOW).bits() as i32);
        let file = match options.open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed("opening a journal"))?,
        };
        let meta = file.metadata().map_err(failed("reading a journal"))?;
        let mut bytes = [0; log::HEADER * 8];
        let whole = meta.is_file() && meta.len() == (log::TOTAL * 8) as u64;
        if whole {
            file.read_exact_at(&mut bytes, 0).map_err(failed("reading a journal"))?;
        }
        let header = words_of(&bytes);
        if self.is_of_another_version(&file, &meta)? {
            let what = "a journal of another version of Blockyard has answered writes of this image: \
                        start that version once, and stop it";
            return Err(StoreError::Unusable { path, what: what.into() });
        }
        let read = whole.then(|| read_header(&header)).flatten();
        let session = match read.filter(|(_, session)| session.boot == self.boot) {
            Some((of, session)) if of == *image => session,
            Some((_, session)) => {
                self.put_aside(&path, session)?;
                return Ok(None);
            }
            None => {
                self.remove(image).map_err(failed("removing an old journal"))?;
                return Ok(None);
            }
        };
        let words = SharedWords::of_file(&file, log::TOTAL).map_err(failed("mapping a journal"))?;
        Ok(Some(Recovered::new(Arc::new(words), Some(file), session)))
    }

    /// Returns the name of a journal while another image has the numbers of its image.
    fn aside(&self, session: Session) -> PathBuf {
        self.path.join(format!("{:032x}.journal", session.number))
    }

    fn put_aside(&self, path: &Path, session: Session) -> Result<(), StoreError> {
        let aside = self.aside(session);
        rename(path, &aside)?;
        tracing::warn!(
            "the journal of another image that had the numbers of this one is now {}",
            aside.display()
        );
        Ok(())
    }

    /// Like [`StateFolder::find`], for an image with this mark. The host uses the numbers of a
    /// device or volume that is detached again, so a journal with these numbers may belong to
    /// another image. It then gets a name of its own until that image is back. It must be back
    /// under its numbers: under others the mark may be that of a copy. A server may use the journal
    /// for the volume of which this is a snapshot.
    fn find_marked(
        &self,
        image: &ImageKey,
        marked: Option<Session>,
    ) -> Result<Option<Recovered>, StoreError> {
        let path = self.file(image);
        let found = self.find(image)?;
        match found.as_ref().map(Recovered::session) {
            Some(session) if Some(session) == marked => return Ok(found),
            // Another program has removed the mark, or the journal is of an earlier copy.
            Some(_) if !image.is_of_device() => return Ok(found),
            Some(session) => self.put_aside(&path, session)?,
            None => {}
        }
        let Some(session) = marked else { return Ok(None) };
        let aside = self.aside(session);
        let header = File::open(&aside).and_then(|file| {
            let mut bytes = [0; log::HEADER * 8];
            file.read_exact_at(&mut bytes, 0).map(|()| words_of(&bytes))
        });
        if header.is_ok_and(|words| read_header(&words) == Some((*image, session))) {
            rename(&aside, &path)?;
            return self.find(image);
        }
        Ok(None)
    }

    /// Returns whether a file is a journal of this boot that only another version can read. All
    /// versions have the magic number and the boot in the same words.
    fn is_of_another_version(&self, file: &File, meta: &Metadata) -> Result<bool, StoreError> {
        let mut bytes = [0; 3 * 8];
        if !meta.is_file() || meta.len() < bytes.len() as u64 {
            return Ok(false);
        }
        let read = file.read_exact_at(&mut bytes, 0);
        read.map_err(|error| StoreError::Io {
            path: self.path.clone(),
            operation: "reading a journal",
            error,
        })?;
        let words = words_of(&bytes);
        let is_ours = words[0] == MAGIC && meta.len() == (log::TOTAL * 8) as u64;
        let is_journal = words[0] >> 8 == MAGIC >> 8;
        Ok(is_journal && !is_ours && joined([words[1], words[2]]) == self.boot)
    }

    fn remove(&self, image: &ImageKey) -> io::Result<()> {
        match std::fs::remove_file(self.file(image)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }
}

impl MemoryStore {
    fn journals(&self) -> std::sync::MutexGuard<'_, HashMap<ImageKey, Kept>> {
        self.journals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a store that is full soon: each half of a journal has memory for so many records.
    pub fn with_room(room: [usize; 2]) -> Self {
        MemoryStore { room: Some(room), ..MemoryStore::default() }
    }

    /// Lets the next creations fail, so many of them.
    pub fn fail_creations(&self, count: u64) {
        self.failures.store(count, Ordering::Relaxed);
    }

    fn room(&self) -> [usize; 2] {
        self.room.unwrap_or([log::SLOTS; 2])
    }

    /// Number of journals that exist.
    pub fn len(&self) -> usize {
        self.journals().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all journals, as a reboot does.
    pub fn reboot(&self) {
        self.journals().clear();
        self.boots.fetch_add(1, Ordering::Relaxed);
    }

    fn boot(&self) -> u128 {
        self.boots.load(Ordering::Relaxed).into()
    }

    fn create(&self, image: &ImageKey) -> Result<Log, StoreError> {
        let less = |left: u64| left.checked_sub(1);
        if self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return Err(StoreError::Memory(io::ErrorKind::StorageFull.into()));
        }
        let words = Arc::new(SharedWords::anonymous(log::TOTAL).map_err(StoreError::Memory)?);
        let session = Session { number: random(), boot: self.boot() };
        write_header(&words, image, session);
        self.journals().insert(*image, Kept { words: words.clone(), session });
        Ok(Log::over(words, None, session).with_room(self.room()))
    }

    fn find(&self, image: &ImageKey) -> Option<Recovered> {
        let Kept { words, session } = self.journals().get(image)?.clone();
        Some(Recovered::new(words, None, session).with_room(self.room()))
    }
}

impl JournalStore {
    /// Returns the folder that commands use if none is named. `None`: there is none on this
    /// machine, so no server can have left a journal in it.
    pub fn of_commands() -> Result<Option<Self>, StoreError> {
        let path = StateFolder::default_path();
        match std::fs::metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::Io { path, operation: "finding it", error }),
            Ok(_) => StateFolder::open_existing(path).map(|folder| Some(folder.into())),
        }
    }

    /// Creates the journal of an image. An older one is removed.
    pub fn create(&self, image: &ImageKey) -> Result<Log, StoreError> {
        match self {
            JournalStore::Folder(folder) => folder.create(image),
            JournalStore::Memory(memory) => memory.create(image),
        }
    }

    /// Returns the journal that a dead server has left for an image.
    pub fn find(&self, image: &ImageKey) -> Result<Option<Recovered>, StoreError> {
        match self {
            JournalStore::Folder(folder) => folder.find(image),
            JournalStore::Memory(memory) => Ok(memory.find(image)),
        }
    }

    /// Returns the journal that a dead server has left for an image with this mark, or a journal
    /// that is out of date, because another program has removed the mark.
    pub fn find_marked(
        &self,
        image: &ImageKey,
        marked: Option<Session>,
    ) -> Result<Option<Recovered>, StoreError> {
        match self {
            JournalStore::Folder(folder) => folder.find_marked(image, marked),
            JournalStore::Memory(memory) => Ok(memory.find(image)),
        }
    }

    pub fn remove(&self, image: &ImageKey) -> io::Result<()> {
        match self {
            JournalStore::Folder(folder) => folder.remove(image),
            JournalStore::Memory(memory) => {
                memory.journals().remove(image);
                Ok(())
            }
        }
    }

    /// Number of the host's present boot.
    pub fn boot(&self) -> u128 {
        match self {
            JournalStore::Folder(folder) => folder.boot,
            JournalStore::Memory(memory) => memory.boot(),
        }
    }
}

impl From<MemoryStore> for JournalStore {
    fn from(store: MemoryStore) -> Self {
        JournalStore::Memory(store)
    }
}

impl From<StateFolder> for JournalStore {
    fn from(folder: StateFolder) -> Self {
        JournalStore::Folder(Arc::new(folder))
    }
}

impl std::fmt::Display for JournalStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            JournalStore::Folder(folder) => write!(f, "{}", folder.path.display()),
            JournalStore::Memory(_) => f.write_str("memory"),
        }
    }
}

fn is_in_memory(path: &Path) -> rustix::io::Result<bool> {
    let kind = rustix::fs::statfs(path)?.f_type as u64;
    Ok(kind == TMPFS || kind == RAMFS)
}

impl Session {
    /// Returns whether the session is not known to be of an earlier boot.
    pub fn may_be_of_this_boot(&self) -> bool {
        read_boot().map_or(true, |boot| boot == self.boot)
    }
}

fn read_boot() -> io::Result<u128> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map_err(io::Error::other)
}

fn random() -> u128 {
    let mut bytes = [0; 16];
    let flags = rustix::rand::GetRandomFlags::empty();
    // The kernel always has random bytes after its boot, and returns up to 256 at once.
    let _ = rustix::rand::getrandom(&mut bytes, flags);
    u128::from_ne_bytes(bytes)
}

fn halves(number: u128) -> [u64; 2] {
    [number as u64, (number >> 64) as u64]
}

fn joined([low, high]: [u64; 2]) -> u128 {
    u128::from(low) | u128::from(high) << 64
}

fn write_header(words: &SharedWords, image: &ImageKey, session: Session) {
    let ([boot, boot_high], [number, number_high]) = (halves(session.boot), halves(session.number));
    let ImageKey { device, inode, born } = *image;
    let fields = [MAGIC, boot, boot_high, device, inode, born, number, number_high];
    for (word, field) in words.iter().zip(fields) {
        word.store(field, Ordering::Relaxed);
    }
    words[CHECKSUM].store(sum(&fields), Ordering::Release);
}

/// Returns the image and the session of a header. `None`: it is no header.
fn read_header(words: &[u64]) -> Option<(ImageKey, Session)> {
    let is_ours = words[0] == MAGIC && words[CHECKSUM] == sum(&words[..CHECKSUM]);
    is_ours.then(|| {
        let image = ImageKey { device: words[3], inode: words[4], born: words[5] };
        let (boot, number) = (joined([words[1], words[2]]), joined([words[6], words[7]]));
        (image, Session { number, boot })
    })
}

fn rename(from: &Path, to: &Path) -> Result<(), StoreError> {
    std::fs::rename(from, to).map_err(|error| {
        let (path, operation) = (from.to_path_buf(), "renaming a journal");
        StoreError::Io { path, operation, error }
    })
}

fn sum(fields: &[u64]) -> u64 {
    fields
        .iter()
        .fold(0, |sum: u64, field| sum.rotate_left(7) ^ field.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
mod tests;
