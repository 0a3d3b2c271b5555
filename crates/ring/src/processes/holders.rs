//! Finds the processes that have locked a file, for messages.
//!
//! In: a file. Out: the processes, as far as /proc shows them. A server in its sandbox asks its
//! witness, because Landlock hides the open files of other processes.

use std::os::fd::AsFd;

use crate::processes::witness::{self, Question};
use crate::reports::text::is_deceptive;

/// Kind of the question for the holders of locks. The numbers are those of device and inode.
pub const KIND: u8 = b'l';

/// A process that has locked a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub name: String,
    /// Whether the process is exiting: the kernel releases its locks soon.
    pub leaving: bool,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (pid {})", self.name, self.pid)
    }
}

/// Returns the processes that have locked the file, this one included, as far as /proc shows them.
/// For error messages only.
pub fn holders(fd: impl AsFd) -> Vec<Holder> {
    let Ok(ours) = rustix::fs::fstat(fd.as_fd()) else { return Vec::new() };
    let numbers = [ours.st_dev, ours.st_ino];
    match witness::ask(Question { kind: KIND, numbers }) {
        Some(text) => text.lines().filter_map(parse).collect(),
        None => look(numbers),
    }
}

/// Answers the question of another process for holders of locks.
pub fn answer(numbers: [u64; 2]) -> String {
    let line = |holder: Holder| {
        let name = holder.name.replace(is_deceptive, " ");
        format!("{} {} {name}\n", holder.pid, u8::from(holder.leaving))
    };
    look(numbers).into_iter().map(line).collect()
}

fn parse(line: &str) -> Option<Holder> {
    let mut words = line.splitn(3, ' ');
    let pid = words.next()?.parse().ok()?;
    let leaving = words.next()? == "1";
    Some(Holder { pid, name: words.next()?.into(), leaving })
}

fn look([device, inode]: [u64; 2]) -> Vec<Holder> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let locks = |fd: &std::fs::DirEntry, pid: u32| {
        use std::os::unix::fs::MetadataExt;
        let same =
            std::fs::metadata(fd.path()).is_ok_and(|m| m.dev() == device && m.ino() == inode);
        // fdinfo lists the locks that were taken through this descriptor.
        let info = || {
            std::fs::read_to_string(format!(
                "/proc/{pid}/fdinfo/{}",
                fd.file_name().to_string_lossy()
            ))
        };
        // flock(2) locks are not counted, because they do not conflict with OFD and POSIX locks.
        same && info().is_ok_and(|text| text.contains("OFDLCK") || text.contains("POSIX"))
    };
    let holds = |pid: &u32| {
        std::fs::read_dir(format!("/proc/{pid}/fd"))
            .is_ok_and(|fds| fds.flatten().any(|fd| locks(&fd, *pid)))
    };
    pids.filter(holds).map(holder).collect()
}

fn holder(pid: u32) -> Holder {
    const PF_EXITING: u32 = 4;
    let read =
        |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
    // proc(5): the name in the second field may contain anything, even parentheses; the flags are
    // the ninth field.
    let stat = read("stat");
    let flags = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().nth(6)?.parse::<u32>().ok());
    Holder {
        pid,
        name: read("comm").trim().into(),
        leaving: flags.is_none_or(|f| f & PF_EXITING != 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_a_holder_of_a_lock() {
        let file = rustix::fs::memfd_create("locked", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(crate::files::host::lock(&file, crate::files::host::Lock::Exclusive).unwrap());
        let stat = rustix::fs::fstat(&file).unwrap();
        // Tests of the holder start processes that share the descriptors of this one.
        let is_ours = |holder: &Holder| holder.name != "closer";
        let answer = answer([stat.st_dev, stat.st_ino]);
        let found: Vec<_> = answer.lines().map(|l| parse(l).unwrap()).filter(is_ours).collect();
        assert_eq!(found, Vec::from_iter(holders(&file).into_iter().filter(is_ours)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].pid, std::process::id());
    }
}
