//! Finds the users of a block device: what has it open.
//!
//! An exclusive open fails if a file system, swap, or another device holds the block device. It
//! does not fail if a program has opened the device without O_EXCL. Linux 7.0 and later count these
//! opens too (`UBLK_CMD_TRY_STOP_DEV`). On older kernels, `/proc` shows the open files of all
//! processes.
//!
//! What must hold: this module never waits for a file system, because it reads no attribute that
//! needs a query to a file server. It does not find: programs in a PID namespace that this process
//! cannot see; open files of other users if this process is not root; a program that has mapped the
//! device and then closed it.

use std::fs;
use std::path::{Path, PathBuf};

use blockyard_ring::witness::{self, Question};
use blockyard_ring::{host, ublk};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags};
use rustix::io::Errno;
use rustix::process::Pid;

/// Kind of the witness's question for the user of a block device. The number is the device's.
pub const KIND: u8 = b'u';

/// A process that has the device open, or a loop device on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum User {
    Process { id: i32, name: String },
    Loop(String),
}

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            User::Process { id, name } => write!(f, "process {id} ({name})"),
            User::Loop(device) => write!(f, "/dev/{device}"),
        }
    }
}

/// Returns `ResourceBusy` if block device `id` is in use, and `PermissionDenied` if this process
/// cannot check that.
pub(super) fn check_unused(id: u32) -> std::io::Result<()> {
    host::claim(&ublk::block_device(id))?;
    match find(id) {
        Some(_) => Err(Errno::BUSY.into()),
        None => Ok(()),
    }
}

/// Returns whether block device `id` has requests in flight. Does not wait. (The attribute
/// `inflight` does not count requests that wait for the next server.)
pub(super) fn requests_in_flight(id: u32) -> bool {
    let text = fs::read_to_string(format!("/sys/block/ublkb{id}/stat")).unwrap_or_default();
    text.split_whitespace().nth(8).is_some_and(|count| count != "0")
}

/// Returns a user of block device `id` or of one of its partitions, if the search finds one. The
/// device may already be removed.
pub(super) fn find(id: u32) -> Option<User> {
    match witness::ask(Question { kind: KIND, numbers: [id.into(), 0] }) {
        Some(text) => parse(&text),
        None => look(id),
    }
}

/// Answers the question of another process for a user of block device `id`.
pub fn answer(id: u64) -> String {
    match u32::try_from(id).ok().and_then(look) {
        Some(User::Process { id, name }) => format!("{id} {name}"),
        Some(User::Loop(device)) => format!("loop {device}"),
        None => String::new(),
    }
}

fn parse(text: &str) -> Option<User> {
    let (first, name) = text.split_once(' ')?;
    let name = name.to_string();
    match first {
        "loop" => Some(User::Loop(name)),
        id => Some(User::Process { id: id.parse().ok()?, name }),
    }
}

fn look(id: u32) -> Option<User> {
    look_at(&ublk::block_device(id), None)
}

/// Returns a user of a block device or of one of its partitions, except its server, if the search
/// finds one.
pub fn user_of(device: &Path, server: Pid) -> Option<String> {
    Some(look_at(device, Some(server.as_raw_nonzero().get()))?.to_string())
}

fn look_at(device: &Path, server: Option<i32>) -> Option<User> {
    let numbers = numbers(Path::new("/sys/block").join(device.file_name()?));
    process_with(Path::new("/proc"), device, &numbers, server)
        .or_else(|| loop_of(Path::new("/sys/block"), device))
}

/// Returns the device numbers of a disk and its partitions from `/sys/block/DISK`.
fn numbers(disk: PathBuf) -> Vec<(u32, u32)> {
    let partitions =
        fs::read_dir(&disk).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let number = |folder: PathBuf| {
        let text = fs::read_to_string(folder.join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    partitions.chain([disk.clone()]).filter_map(number).collect()
}

/// Finds a process that has the device open, except the process `server`. A removed device has no
/// device numbers any more, so the search compares the name of the opened file.
fn process_with(
    proc: &Path,
    device: &Path,
    numbers: &[(u32, u32)],
    server: Option<i32>,
) -> Option<User> {
    let device = device.to_str()?;
    let is_device = |link: &Path| {
        let Ok(target) = fs::read_link(link) else { return false };
        let Some(target) = target.to_str().filter(|t| t.starts_with('/')) else { return false };
        let removed = target.strip_suffix(" (deleted)");
        if numbers.is_empty() && removed.unwrap_or(target) == device {
            return true;
        }
        let stat = rustix::fs::statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        stat.is_ok_and(|s| {
            let block = FileType::from_raw_mode(s.stx_mode.into()) == FileType::BlockDevice;
            block && numbers.contains(&(s.stx_rdev_major, s.stx_rdev_minor))
        })
    };
    fs::read_dir(proc).ok()?.flatten().find_map(|process| {
        let id = process.file_name().to_str()?.parse().ok()?;
        if server == Some(id) {
            return None;
        }
        let mut files = fs::read_dir(process.path().join("fd")).ok()?.flatten();
        files.any(|file| is_device(&file.path())).then(|| {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            User::Process { id, name: name.trim().into() }
        })
    })
}

/// Finds a loop device whose file is the device. The kernel itself holds the file of a loop device
/// open.
fn loop_of(block: &Path, device: &Path) -> Option<User> {
    fs::read_dir(block).ok()?.flatten().find_map(|entry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        let file = Path::new(backing.trim_end().trim_end_matches(" (deleted)"));
        (file == device).then(|| User::Loop(entry.file_name().to_string_lossy().into_owned()))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn an_answer_names_a_process_or_a_loop_device() {
        let process = User::Process { id: 7, name: "a b".into() };
        assert_eq!(parse("7 a b"), Some(process));
        assert_eq!(parse("loop loop3"), Some(User::Loop("loop3".into())));
        assert_eq!(parse(""), None);
    }

    #[test]
    fn a_process_is_found_by_the_name_of_a_removed_device() {
        let proc = std::env::temp_dir().join(format!("blockyard-users-{}", std::process::id()));
        let folder = |id: u32| proc.join(id.to_string()).join("fd");
        for (id, target) in [(7, "/dev/ublkb33"), (8, "/dev/ublkb3 (deleted)"), (9, "socket:[1]")] {
            fs::create_dir_all(folder(id)).unwrap();
            symlink(target, folder(id).join("0")).unwrap();
            fs::write(proc.join(id.to_string()).join("comm"), "dd\n").unwrap();
        }
        fs::create_dir_all(proc.join("self")).unwrap();
        let found = process_with(&proc, Path::new("/dev/ublkb3"), &[], Some(7));
        assert_eq!(found.map(|user| user.to_string()).as_deref(), Some("process 8 (dd)"));
        assert_eq!(process_with(&proc, Path::new("/dev/ublkb3"), &[], Some(8)), None);
        assert_eq!(process_with(&proc, Path::new("/dev/ublkb4"), &[], None), None);
        fs::remove_dir_all(&proc).unwrap();
    }

    #[test]
    fn a_loop_device_is_found_by_its_file() {
        let block = std::env::temp_dir().join(format!("blockyard-loops-{}", std::process::id()));
        for (name, file) in [("loop0", "/dev/ublkb33\n"), ("loop1", "/dev/ublkb3\n")] {
            fs::create_dir_all(block.join(name).join("loop")).unwrap();
            fs::write(block.join(name).join("loop/backing_file"), file).unwrap();
        }
        fs::create_dir_all(block.join("sda")).unwrap();
        assert_eq!(loop_of(&block, Path::new("/dev/ublkb3")), Some(User::Loop("loop1".into())));
        assert_eq!(loop_of(&block, Path::new("/dev/ublkb4")), None);
        fs::remove_dir_all(&block).unwrap();
    }
}
