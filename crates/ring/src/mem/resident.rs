//! Locks this process's memory, for servers of the host's own block devices. Maps its code before a
//! guest waits for it.
//!
//! If swap is on such a device, the kernel must not swap out memory that the server needs to answer
//! requests: reading it back would need the device itself. `PR_SET_IO_FLUSHER` does not prevent
//! this. A memory limit of the server's control group does not either, because pages of the
//! program's file are charged to the group that read them first.
//!
//! What must hold: guests' memory stays swappable. It is mapped here too, but a ublk device does
//! not need it.

use std::collections::HashSet;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{MlockAllFlags, MlockFlags};

static LOCKED: AtomicBool = AtomicBool::new(false);

const CAP_IPC_LOCK: u32 = 14;

/// Locks the memory of this process, now and in future, except guests' memory. The program and its
/// libraries are locked as a whole, everything else when it is first used. Needs CAP_IPC_LOCK.
/// Without it, RLIMIT_MEMLOCK applies, and later allocations could fail.
pub fn lock() -> io::Result<()> {
    if LOCKED.load(Ordering::SeqCst) {
        return Ok(());
    }
    let status = std::fs::read_to_string("/proc/self/status")?;
    let effective = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    if effective.unwrap_or_default() & 1 << CAP_IPC_LOCK == 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "locking memory needs CAP_IPC_LOCK",
        ));
    }
    LOCKED.store(true, Ordering::SeqCst);
    rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mappings: Vec<_> = maps.lines().filter_map(Mapping::parse).collect();
    let programs: HashSet<_> = mappings
        .iter()
        .filter(|m| m.executable && m.path.starts_with('/'))
        .map(|m| m.path)
        .collect();
    for mapping in &mappings {
        let Some(base) = NonNull::new(mapping.start as *mut u8) else { continue };
        if programs.contains(mapping.path) {
            // SAFETY: locking does not change the content. If the mapping is gone by now, the call
            // fails.
            let locked = unsafe { rustix::mm::mlock(base.as_ptr().cast(), mapping.len) };
            locked?;
        } else if mapping.shared && !mapping.path.starts_with("/memfd:ublk") {
            release(base, mapping.len);
        }
    }
    Ok(())
}

/// Maps all code of this program now. The first call of a function would otherwise wait for the
/// kernel, which takes some 100 us for each new part of a server's work.
pub fn map_code() -> io::Result<()> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mappings = maps.lines().filter_map(Mapping::parse);
    for mapping in mappings.filter(|m| m.executable && m.path.starts_with('/')) {
        let (base, advice) = (mapping.start as *mut _, rustix::mm::Advice::LinuxPopulateRead);
        // SAFETY: reading code changes nothing. If the mapping is gone by now, the call fails.
        unsafe { rustix::mm::madvise(base, mapping.len, advice) }?;
    }
    Ok(())
}

/// Locks a mapping of this process's own memory, page by page at its first use.
pub(crate) fn keep(base: NonNull<u8>, len: usize) {
    if LOCKED.load(Ordering::SeqCst) {
        // SAFETY: locking does not change the content.
        let _ = unsafe { rustix::mm::mlock_with(base.as_ptr().cast(), len, MlockFlags::ONFAULT) };
    }
}

/// Unlocks a mapping of guests' memory.
pub(crate) fn release(base: NonNull<u8>, len: usize) {
    if LOCKED.load(Ordering::SeqCst) {
        // SAFETY: unlocking does not change the content.
        let _ = unsafe { rustix::mm::munlock(base.as_ptr().cast(), len) };
    }
}

/// A line of `/proc/PID/maps`.
#[derive(Debug, PartialEq)]
struct Mapping<'a> {
    start: usize,
    len: usize,
    executable: bool,
    shared: bool,
    path: &'a str,
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let (start, end) =
            (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
        let (mode, rest) = rest.split_once(' ')?;
        // The rest is offset, device, inode, blanks and the path, which may contain blanks.
        let path = rest.splitn(4, ' ').nth(3).unwrap_or_default().trim_start();
        let (executable, shared) = (mode.contains('x'), mode.contains('s'));
        Some(Mapping { start, len: end.checked_sub(start)?, executable, shared, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_parsed() {
        let line = "7f00-7f10 r-xp 00001000 fe:00 1234                     /usr/bin/a program";
        let mapping = Mapping {
            start: 0x7f00,
            len: 0x10,
            executable: true,
            shared: false,
            path: "/usr/bin/a program",
        };
        assert_eq!(Mapping::parse(line), Some(mapping));
        let mapping =
            Mapping::parse("1000-3000 rw-s 00000000 00:01 9 /memfd:ublk (deleted)").unwrap();
        assert!(mapping.shared && mapping.len == 0x2000 && mapping.path.starts_with("/memfd:ublk"));
        assert_eq!(Mapping::parse("1000-3000 rw-p 00000000 00:00 0 ").unwrap().path, "");
        assert_eq!(Mapping::parse("text"), None);
    }
}
