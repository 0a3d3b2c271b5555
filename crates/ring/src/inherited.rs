//! Listening sockets that this process was started with: socket activation of systemd, or a
//! parent's descriptors.
//!
//! In: descriptor numbers, as a person writes them. Out: sockets. What must hold: a number that
//! means no descriptor of the parent is refused, also after the start, when this process may have a
//! listening socket of its own there; at any time one export at most has a socket.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::FdFlags;

static SOCKETS: Mutex<Sockets> =
    Mutex::new(Sockets { noted: BTreeSet::new(), kept: BTreeMap::new() });

struct Sockets {
    /// Numbers of descriptors that were inherited, and that nothing here owns.
    noted: BTreeSet<i32>,
    /// Those that were asked for, and whether they are in use.
    kept: BTreeMap<i32, (OwnedFd, bool)>,
}

fn sockets() -> MutexGuard<'static, Sockets> {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to accept connections of an inherited socket. Dropped, another export may have the
/// socket.
#[derive(Debug)]
pub struct Claim(i32);

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((_, in_use)) = sockets().kept.get_mut(&self.0) {
            *in_use = false;
        }
    }
}

/// Notes which descriptors from 3 on this process was started with. To be called at start: a
/// descriptor of its own that was made without close-on-exec must not be taken for one of them.
pub fn note() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let numbers: Vec<_> = numbers.filter(|number| *number >= 3).collect();
    sockets().noted.extend(numbers.into_iter().filter(|number| survives_exec(*number)));
}

/// Returns whether the descriptor is open without close-on-exec. Those that a parent passes are.
fn survives_exec(number: i32) -> bool {
    // SAFETY: fcntl on any number is harmless; it fails if the descriptor is not open.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

/// Returns a listening socket that this process was started with, for one export at a time.
pub fn take(number: i32) -> io::Result<(OwnedFd, Claim)> {
    let mut sockets = sockets();
    if sockets.noted.contains(&number) {
        // SAFETY: the parent opened it, and nothing in this process closes it before it is in
        // `kept`.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        if !rustix::net::sockopt::socket_acceptconn(borrowed)? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it does not listen"));
        }
        rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC)?;
        sockets.noted.remove(&number);
        // SAFETY: open (above); nothing else owns it, because each number leaves `noted` once.
        let owned = unsafe { OwnedFd::from_raw_fd(number) };
        sockets.kept.insert(number, (owned, false));
    }
    let Some((socket, in_use)) = sockets.kept.get_mut(&number) else {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "this process was not started with it",
        ));
    };
    if *in_use {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another export has it"));
    }
    // The socket itself is kept, so that a disk which is closed and opened again finds it.
    let copy = socket.try_clone()?;
    *in_use = true;
    Ok((copy, Claim(number)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    /// One test, because descriptors are the whole process's.
    #[test]
    fn only_what_the_process_was_started_with_and_for_one_export_at_a_time() {
        let listener = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // As a parent leaves it: without close-on-exec. (Leaked: its owner is the process.)
        let passed = std::mem::ManuallyDrop::new(listener());
        rustix::io::fcntl_setfd(passed.as_fd(), FdFlags::empty()).unwrap();
        let passed = passed.as_raw_fd();
        note();
        let (socket, claim) = take(passed).unwrap();
        assert_eq!(take(passed).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop((socket, claim));
        let (_socket, _claim) = take(passed).expect("a disk that is opened again finds it");

        // Our own, made later: with close-on-exec, and without.
        let own = listener();
        assert_eq!(take(own.as_raw_fd()).unwrap_err().kind(), io::ErrorKind::NotFound);
        rustix::io::fcntl_setfd(own.as_fd(), FdFlags::empty()).unwrap();
        assert_eq!(take(own.as_raw_fd()).unwrap_err().kind(), io::ErrorKind::NotFound);
        drop(own);
    }
}
