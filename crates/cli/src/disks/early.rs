//! Looks at images before the server has a sandbox, in a process of its own.
//!
//! In: the path of an image. Out: the file's identity and real path, or nothing if its file system
//! does not answer in time. What must hold: no thread of the server waits for a file system before
//! the server gives up its rights, because such a thread would keep them. The process ends with the
//! start. One that still waits is killed, and another one looks at the next image. If a process
//! dies, the file system does not answer: something has killed a process that waited for it.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::claims::ImageId;
use crate::options::disk::DiskArgs;
use crate::process::looks::{self, MAX_LATE, MAX_LATE_OF_FOLDER, SHORT_LIMIT};

/// Argument with which the program starts as this process.
pub const ARGUMENT: &str = "--look";

/// Maximum length of a path in bytes, on Linux.
const MAX_PATH: usize = 4096;

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Device and inode. None: there is no such file.
    pub id: Option<(u64, u64)>,
    /// Whether it is a block or character device.
    pub is_device: bool,
    /// The path with links resolved.
    pub real: PathBuf,
}

impl Seen {
    /// Waits for the file system.
    fn of(path: &Path) -> Self {
        let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let metadata = std::fs::metadata(&real).ok();
        let is_device = metadata.as_ref().is_some_and(|metadata| {
            metadata.file_type().is_block_device() || metadata.file_type().is_char_device()
        });
        Seen { id: metadata.map(|metadata| (metadata.dev(), metadata.ino())), is_device, real }
    }

    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let (device, inode) = self.id.unwrap_or_default();
        let mut bytes = vec![self.id.is_some().into(), self.is_device.into()];
        bytes.extend(device.to_le_bytes());
        bytes.extend(inode.to_le_bytes());
        to.write_all(&bytes)?;
        write_path(&self.real, to)
    }

    fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; 18];
        from.read_exact(&mut bytes)?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let id = (bytes[0] == 1).then(|| (number(2), number(10)));
        Ok(Seen { id, is_device: bytes[1] == 1, real: read_path(from)? })
    }
}

fn write_path(path: &Path, to: &mut impl Write) -> io::Result<()> {
    let bytes = path.as_os_str().as_bytes();
    to.write_all(&(bytes.len() as u32).to_le_bytes())?;
    to.write_all(bytes)
}

fn read_path(from: &mut impl Read) -> io::Result<PathBuf> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let mut bytes = vec![0; (u32::from_le_bytes(len) as usize).min(MAX_PATH)];
    from.read_exact(&mut bytes)?;
    Ok(OsString::from_vec(bytes).into())
}

/// Looks at the files that the server names on standard input, until the server closes it.
pub fn run() -> io::Result<()> {
    let mut socket = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    loop {
        let path = read_path(&mut socket)?;
        Seen::of(&path).write(&mut socket)?;
    }
}

/// The process that looks at files.
struct Helper {
    child: Child,
    socket: UnixStream,
}

impl Helper {
    fn start() -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("blockyard").arg(ARGUMENT).stdin(OwnedFd::from(theirs));
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        Ok(Helper { child, socket })
    }

    fn ask(&mut self, path: &Path, limit: Duration) -> io::Result<Seen> {
        self.socket.set_read_timeout(Some(limit))?;
        write_path(path, &mut self.socket)?;
        Seen::read(&mut self.socket)
    }
}

#[derive(Default)]
struct Early {
    helper: Option<Helper>,
    /// Processes that were killed while they waited.
    killed: Vec<Child>,
    waited: Duration,
    /// None: the file system has not answered in time.
    seen: HashMap<PathBuf, Option<Seen>>,
    /// Paths with file systems that had not answered when the process ended.
    late: HashSet<PathBuf>,
    is_over: bool,
}

static EARLY: LazyLock<Mutex<Early>> = LazyLock::new(Mutex::default);

fn early() -> MutexGuard<'static, Early> {
    EARLY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Early {
    /// Returns whether too many file systems have not answered to ask a further one.
    fn gives_up(&self, path: &Path) -> bool {
        let late = || self.seen.iter().filter(|(_, seen)| seen.is_none()).map(|(path, _)| path);
        let in_folder = late().filter(|late| late.parent() == path.parent()).count();
        in_folder >= MAX_LATE_OF_FOLDER || late().count() >= MAX_LATE
    }

    fn look(&mut self, path: &Path) -> Option<Seen> {
        if self.helper.is_none() {
            self.helper = Helper::start()
                .inspect_err(|e| {
                    let what = "no process can look at images, so the start waits for their file \
                                systems";
                    tracing::warn!("{what}: {e}");
                })
                .ok();
        }
        let Some(helper) = &mut self.helper else { return Some(Seen::of(path)) };
        let began = Instant::now();
        let limit = looks::LIMIT.saturating_sub(self.waited).max(SHORT_LIMIT);
        let asked = helper.ask(path, limit);
        self.waited += began.elapsed();
        if let Err(e) = &asked
            && let Some(mut helper) = self.helper.take()
        {
            tracing::debug!("{}: the process that looks at images: {e}", path.display());
            let _ = helper.child.kill();
            self.killed.push(helper.child);
        }
        asked.ok()
    }
}

/// Returns what is known of a file, or `None` if its file system does not answer. Looks at it only
/// the first time.
pub fn look(path: &Path) -> Option<Seen> {
    let mut early = early();
    if let Some(seen) = early.seen.get(path) {
        return seen.clone();
    }
    let seen = match early.is_over {
        false if early.gives_up(path) => None,
        false => early.look(path),
        true => {
            let file = path.to_path_buf();
            looks::look(path, looks::LIMIT, move || Seen::of(&file)).ok()
        }
    };
    early.seen.insert(path.to_path_buf(), seen.clone());
    seen
}

/// Returns the identity of a disk's image, if there is one and its file system answers.
pub fn identity(disk: &DiskArgs) -> Option<ImageId> {
    if blockyard_image::scheme_of(&disk.image).is_some() {
        return ImageId::of(disk);
    }
    let (device, inode) = look(&disk.image)?.id?;
    Some(ImageId::File(device, inode))
}

/// Returns whether the file system of a path did not answer at the start.
pub fn was_late(path: &Path) -> bool {
    early().late.contains(path)
}

/// Returns how long the opening of a disk waits for the file system of its image. The start has
/// waited for it already if it did not answer then.
pub fn limit(image: &Path) -> Duration {
    let mut early = early();
    let was_late = early.seen.get(image).is_some_and(Option::is_none);
    if was_late {
        early.seen.remove(image);
    }
    if was_late { SHORT_LIMIT } else { looks::LIMIT }
}

/// Ends the process. From now on, threads look at files.
pub fn end() {
    let mut early = early();
    let late = early.seen.iter().filter(|(_, seen)| seen.is_none());
    early.late = late.map(|(path, _)| path.clone()).collect();
    early.is_over = true;
    if let Some(Helper { mut child, socket }) = early.helper.take() {
        drop(socket);
        let _ = child.wait();
    }
    let killed = std::mem::take(&mut early.killed);
    if killed.is_empty() {
        return;
    }
    // They end when their file systems answer.
    let wait = move || killed.into_iter().for_each(|mut child| drop(child.wait()));
    if let Err(e) = std::thread::Builder::new().name("late looks".into()).spawn(wait) {
        tracing::debug!("no thread waits for the processes that looked at images: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_is_the_same_after_its_way() {
        let missing = Path::new("/no/such/file");
        for path in [Path::new("/dev/null"), Path::new("/proc/self/exe"), missing] {
            let (seen, mut bytes) = (Seen::of(path), Vec::new());
            seen.write(&mut bytes).unwrap();
            assert_eq!(Seen::read(&mut bytes.as_slice()).unwrap(), seen);
            assert_eq!(
                (seen.id.is_none(), seen.is_device),
                (path == missing, path.starts_with("/dev"))
            );
        }
    }
}
