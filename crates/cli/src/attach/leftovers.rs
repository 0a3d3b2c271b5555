//! Files of `attach` commands that were killed: logs and sockets, named after the process.
//!
//! What must hold: no file of a running `attach` is removed.

use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

const PREFIX: &str = "attach-";

/// Returns the name of the log of an `attach` that does not know the device yet.
pub fn name(disk: &str, process: u32) -> String {
    format!("{PREFIX}{}-{process}.log", disk.replace('/', "_"))
}

/// Removes the files of processes that have ended.
pub fn remove(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_str().and_then(process_of).is_some_and(has_ended) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn process_of(name: &str) -> Option<Pid> {
    let stem = name.strip_suffix(".log").or_else(|| name.strip_suffix(".sock"))?;
    let (_, process) = stem.strip_prefix(PREFIX)?.rsplit_once('-')?;
    Pid::from_raw(process.parse().ok()?)
}

fn has_ended(process: Pid) -> bool {
    test_kill_process(process) == Err(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_ended_processes_are_removed() {
        let folder = std::env::temp_dir().join(format!("blockyard-left-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let ended = name("a-b/c", child.id());
        let files =
            [&ended, &ended.replace(".log", ".sock"), &name("a", std::process::id()), "ublkb0.log"];
        files.iter().for_each(|file| std::fs::write(folder.join(file), "").unwrap());
        remove(&folder);
        let left = files.map(|file| folder.join(file).exists());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, [false, false, true, true]);
    }
}
