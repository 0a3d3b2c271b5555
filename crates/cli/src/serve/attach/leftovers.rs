//! Files of `attach` commands that were killed: logs and sockets, named after the process.
//!
//! What must hold
//! - No file of a running `attach` is removed.
//! - The log that an error names stays. There is at most one such log for each name of a disk.

use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

const PREFIX: &str = "attach-";
/// The prefix of the logs of servers that were killed.
const KILLED: &str = "killed-";

/// Returns the name of the log of an `attach` that does not know the device yet.
pub fn name(disk: &str, process: u32) -> String {
    format!("{PREFIX}{}-{process}.log", disk.replace('/', "_"))
}

/// Renames the log of a server that was killed, so that it stays. Replaces the log of the last such
/// server of the disk. Returns the path of the log.
pub fn keep(log: &Path) -> PathBuf {
    let name = log.file_name().and_then(|name| name.to_str()).and_then(parse);
    let Some((disk, _)) = name else { return log.into() };
    let kept = log.with_file_name(format!("{KILLED}{disk}.log"));
    if std::fs::rename(log, &kept).is_ok() { kept } else { log.into() }
}

/// Removes the files of processes that have ended.
pub fn remove(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_str().and_then(parse).is_some_and(|(_, process)| has_ended(process)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Returns the disk and the process in the name of a log or a socket.
fn parse(name: &str) -> Option<(&str, Pid)> {
    let stem = name.strip_suffix(".log").or_else(|| name.strip_suffix(".sock"))?;
    let (disk, process) = stem.strip_prefix(PREFIX)?.rsplit_once('-')?;
    Some((disk, Pid::from_raw(process.parse().ok()?)?))
}

fn has_ended(process: Pid) -> bool {
    test_kill_process(process) == Err(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::awaited::end_of;

    #[test]
    fn only_files_of_ended_processes_are_removed() {
        let folder = std::env::temp_dir().join(format!("blockyard-left-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        end_of(&mut child);
        let ended = name("a-b/c", child.id());
        let files =
            [&ended, &ended.replace(".log", ".sock"), &name("a", std::process::id()), "ublkb0.log"];
        files.iter().for_each(|file| std::fs::write(folder.join(file), "").unwrap());
        remove(&folder);
        let left = files.map(|file| folder.join(file).exists());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, [false, false, true, true]);
    }

    #[test]
    fn the_log_of_a_killed_server_stays_until_the_next_one_of_its_disk() {
        let folder = std::env::temp_dir().join(format!("blockyard-kept-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        end_of(&mut child);
        for text in ["first", "second"] {
            let log = folder.join(name("a-b/c", child.id()));
            std::fs::write(&log, text).unwrap();
            let kept = keep(&log);
            assert_eq!(kept, folder.join("killed-a-b_c.log"));
            remove(&folder);
            assert_eq!(std::fs::read_to_string(&kept).unwrap(), text);
        }
        let left = std::fs::read_dir(&folder).unwrap().count();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, 1);
    }
}
