//! Listening sockets that this process inherited: systemd's socket activation, or descriptors of a
//! parent.
//!
//! In: descriptor numbers from the configuration. Out: sockets, and whether a descriptor is one of
//! them.
//!
//! What must hold
//! - A number that is not an inherited descriptor is refused. This holds also later, when this
//!   process may have a listening socket of its own with that number.
//! - At any time at most one export uses a socket.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::FdFlags;

static SOCKETS: Mutex<Sockets> =
    Mutex::new(Sockets { noted: BTreeSet::new(), kept: BTreeMap::new() });

struct Sockets {
    /// Numbers of inherited descriptors that nothing in this process owns yet.
    noted: BTreeSet<i32>,
    /// Descriptors that an export has requested, and whether they are in use.
    kept: BTreeMap<i32, (OwnedFd, bool)>,
}

fn sockets() -> MutexGuard<'static, Sockets> {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to accept connections on an inherited socket. Dropping it lets another export use the
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

/// Records which descriptors from 3 on this process inherited. Must be called at start: later the
/// process may open descriptors without close-on-exec, which would count as inherited.
pub fn note() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let numbers: Vec<_> = numbers.filter(|number| *number >= 3).collect();
    let inherited: Vec<_> = numbers.into_iter().filter(|number| survives_exec(*number)).collect();
    for number in &inherited {
        // Programs that this process starts must not keep the socket open.
        // SAFETY: fcntl with any number is harmless; nothing in this process owns it.
        unsafe { libc::fcntl(*number, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    sockets().noted.extend(inherited);
}

/// Returns whether the descriptor is open without close-on-exec. Inherited descriptors are.
fn survives_exec(number: i32) -> bool {
    // SAFETY: fcntl with any number is harmless; it fails if the descriptor is not open.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

/// Returns whether this process inherited a descriptor, whether or not it is in use.
pub fn has(number: i32) -> bool {
    let sockets = sockets();
    sockets.noted.contains(&number) || sockets.kept.contains_key(&number)
}

/// Returns whether a descriptor refers to the same socket or file as an inherited one.
pub fn is_same(fd: BorrowedFd<'_>) -> bool {
    let identity = |fd: BorrowedFd<'_>| {
        let file = rustix::fs::fstat(fd).ok()?;
        Some((file.st_dev, file.st_ino))
    };
    let Some(file) = identity(fd) else { return false };
    let sockets = sockets();
    let noted = sockets.noted.iter().map(|number| {
        // SAFETY: the parent opened it, and nothing in this process closes it while it is in
        // `noted`, which stays locked meanwhile.
        unsafe { BorrowedFd::borrow_raw(*number) }
    });
    let mut all = noted.chain(sockets.kept.values().map(|(socket, _)| socket.as_fd()));
    all.any(|inherited| identity(inherited) == Some(file))
}

/// Returns an inherited listening socket, for one export at a time.
pub fn take(number: i32) -> io::Result<(OwnedFd, Claim)> {
    let mut sockets = sockets();
    if sockets.noted.contains(&number) {
        // SAFETY: the parent opened it, and nothing in this process closes it before it is in
        // `kept`.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        if !rustix::net::sockopt::socket_acceptconn(borrowed)? {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor is not a listening socket",
            ));
        }
        rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC)?;
        sockets.noted.remove(&number);
        // SAFETY: it is open (checked above), and nothing else owns it, because each number leaves
        // `noted` once.
        let owned = unsafe { OwnedFd::from_raw_fd(number) };
        sockets.kept.insert(number, (owned, false));
    }
    let Some((socket, in_use)) = sockets.kept.get_mut(&number) else {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "this process did not inherit the descriptor",
        ));
    };
    if *in_use {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another export uses it"));
    }
    // The socket stays open here, so that a disk that is closed and reopened can use it again.
    let copy = socket.try_clone()?;
    *in_use = true;
    Ok((copy, Claim(number)))
}

/// Returns an inherited descriptor of any kind, once, for this process alone.
pub fn take_any(number: i32) -> io::Result<OwnedFd> {
    if !sockets().noted.remove(&number) {
        let what = "this process did not inherit the descriptor";
        return Err(io::Error::new(io::ErrorKind::NotFound, what));
    }
    // SAFETY: the parent opened it, and nothing in this process owns it, because each number leaves
    // `noted` once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// This is a single test, because descriptors belong to the whole process.
    #[test]
    fn only_inherited_sockets_are_given_out_and_to_one_export_at_a_time() {
        let listener = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // A parent passes a socket without close-on-exec. The process owns the socket, so the test
        // does not drop it.
        let passed = std::mem::ManuallyDrop::new(listener());
        rustix::io::fcntl_setfd(passed.as_fd(), FdFlags::empty()).unwrap();
        let (copy, passed) = (passed.try_clone().unwrap(), passed.as_raw_fd());
        note();
        assert!(is_same(copy.as_fd()), "it is noted");
        let (socket, claim) = take(passed).unwrap();
        assert!(is_same(copy.as_fd()), "it is in use");
        assert!(!is_same(listener().as_fd()), "another socket");
        assert_eq!(take(passed).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop((socket, claim));
        let (_socket, _claim) = take(passed).expect("a disk that is reopened can use it");

        // A descriptor of another kind, once.
        let (other, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        rustix::io::fcntl_setfd(&other, FdFlags::empty()).unwrap();
        let number = std::mem::ManuallyDrop::new(other).as_raw_fd();
        note();
        assert_eq!(take_any(number).unwrap().as_raw_fd(), number);
        assert_eq!(take_any(number).unwrap_err().kind(), io::ErrorKind::NotFound);

        // The process opens a socket of its own later: with close-on-exec, and without.
        let own = listener();
        assert_eq!(take(own.as_raw_fd()).unwrap_err().kind(), io::ErrorKind::NotFound);
        rustix::io::fcntl_setfd(own.as_fd(), FdFlags::empty()).unwrap();
        assert_eq!(take(own.as_raw_fd()).unwrap_err().kind(), io::ErrorKind::NotFound);
        drop(own);
    }
}
