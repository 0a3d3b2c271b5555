//! Messages between the holder and a server, with descriptors.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::process::Signal;

use super::{MOST_FDS, check};

/// How long the holder waits for a server that does not read what it has asked for.
const SEND_TIME: Duration = Duration::from_secs(1);
const SEND: rustix::net::sockopt::Timeout = rustix::net::sockopt::Timeout::Send;

/// Most processes that close sockets at the same time.
const MOST_CLOSERS: usize = 16;
/// Most descriptors that wait for such a process.
const MOST_WAITING: usize = 4096;

/// Processes that close sockets. Another process can block the last close of a socket: one in its
/// queue may linger. The holder must never wait for that, and has no threads.
pub(super) struct Closers {
    pids: [libc::pid_t; MOST_CLOSERS],
    /// Descriptors that none of them closes yet.
    waiting: [RawFd; MOST_WAITING],
    count: usize,
}

impl Default for Closers {
    fn default() -> Self {
        Closers { pids: [0; MOST_CLOSERS], waiting: [-1; MOST_WAITING], count: 0 }
    }
}

impl Closers {
    /// Closes descriptors that the holder has received. Returns false if they stay open, because
    /// too many wait for a process.
    pub(super) fn close(&mut self, fds: &[RawFd]) -> bool {
        if !fds.iter().any(|fd| is_socket(*fd)) {
            close_all(fds);
            return true;
        }
        let Some(room) = self.waiting[self.count..].get_mut(..fds.len()) else { return false };
        room.copy_from_slice(fds);
        self.count += fds.len();
        self.start();
        true
    }

    /// Starts a process for all descriptors that wait, if there is a place for it.
    fn start(&mut self) {
        let Some(free) = self.pids.iter_mut().find(|pid| **pid == 0) else { return };
        let waiting = &mut self.waiting[..self.count];
        // The memory of a guest must not wait for a socket.
        waiting.sort_unstable_by_key(|fd| is_socket(*fd));
        let parent = rustix::process::getpid();
        // The process inherits its name, so that no moment of it looks like one of a server.
        let name = renamed(CLOSER);
        let flags = libc::CLONE_FILES | libc::SIGCHLD;
        // SAFETY: the process has this one's table of descriptors and a copy of its memory. It
        // makes system calls only.
        let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
        if pid == 0 {
            // The table must not outlive this process.
            let killed = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            if killed.is_ok() && rustix::process::getppid() == Some(parent) {
                close_all(waiting);
            }
            // SAFETY: it ends at once.
            unsafe { libc::_exit(0) };
        }
        renamed(name);
        if pid > 0 {
            (*free, self.count) = (pid as libc::pid_t, 0);
        }
    }

    #[cfg(test)]
    pub(super) fn numbers(&self) -> Vec<libc::pid_t> {
        self.pids.iter().copied().filter(|pid| *pid > 0).collect()
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.count
    }

    /// Notes that a process has ended.
    pub(super) fn ended(&mut self, pid: libc::pid_t) {
        let closers = self.pids.iter_mut().filter(|closer| **closer == pid);
        let ended = closers.map(|closer| *closer = 0).count();
        if ended > 0 && self.count > 0 {
            self.start();
        }
    }
}

/// Name of a process that closes sockets.
const CLOSER: [u8; 16] = *b"closer\0\0\0\0\0\0\0\0\0\0";

/// Gives the calling thread another name. Returns the one before.
fn renamed(name: [u8; 16]) -> [u8; 16] {
    let mut before = [0; 16];
    // SAFETY: the kernel writes at most 16 bytes to `before`, and reads at most as many from
    // `name`, which ends with a zero.
    unsafe {
        libc::prctl(libc::PR_GET_NAME, before.as_mut_ptr());
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
    before
}

fn is_socket(fd: RawFd) -> bool {
    // SAFETY: the kernel writes the status, which is plain data.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        libc::fstat(fd, &mut status) == 0 && status.st_mode & libc::S_IFMT == libc::S_IFSOCK
    }
}

pub(super) fn close_all(fds: &[RawFd]) {
    for fd in fds {
        // SAFETY: the holder has received the descriptor, and uses it nowhere else.
        unsafe { libc::close(*fd) };
    }
}

/// Makes the socket pair of the holder and a server.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes two descriptors, which nothing else owns.
    let (ours, theirs) = unsafe {
        check(libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()))?;
        (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))
    };
    rustix::net::sockopt::set_socket_timeout(&ours, SEND, Some(SEND_TIME))?;
    Ok((ours, theirs))
}

/// Room for the control data of a message, aligned as `cmsghdr` requires.
#[repr(C, align(8))]
struct Control([u8; 1024]);

const _: () = assert!(MOST_FDS * size_of::<RawFd>() + 64 <= 1024);

/// A message that was received.
pub(super) struct Got {
    pub(super) len: usize,
    /// Number of descriptors.
    pub(super) count: usize,
    /// Whether the kernel has dropped some.
    pub(super) is_cut: bool,
}

/// Receives a message without waiting.
pub(super) fn receive(socket: RawFd, bytes: &mut [u8], fds: &mut [RawFd]) -> Option<Got> {
    let mut control = Control([0; 1024]);
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the message refers to `piece` and `control`, which outlive the call. The kernel
    // writes well-formed control data, and the macros stay in it.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut piece, 1);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len();
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let got = libc::recvmsg(socket, &mut message, flags);
        if got <= 0 {
            return None;
        }
        let mut count = 0;
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while let Some(part) = header.as_ref() {
            if (part.cmsg_level, part.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data = libc::CMSG_DATA(part).cast::<RawFd>();
                let len = part.cmsg_len - libc::CMSG_LEN(0) as usize;
                for at in 0..len / size_of::<RawFd>() {
                    let fd = data.add(at).read_unaligned();
                    match fds.get_mut(count) {
                        Some(place) => (*place, count) = (fd, count + 1),
                        None => close_all(&[fd]),
                    }
                }
            }
            header = libc::CMSG_NXTHDR(&message, part);
        }
        Some(Got { len: got as usize, count, is_cut: message.msg_flags & libc::MSG_CTRUNC != 0 })
    }
}

/// Sends a message with descriptors.
pub(super) fn send(socket: RawFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let mut control = Control([0; 1024]);
    let len = size_of_val(fds);
    let mut piece =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    assert!(fds.len() <= MOST_FDS, "the caller checks the number of descriptors");
    // SAFETY: the message refers to `piece` and `control`, which outlive the call. `control` has
    // room for the header and `MOST_FDS` descriptors.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut piece, 1);
        if !fds.is_empty() {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(len as u32) as usize;
            if let Some(header) = libc::CMSG_FIRSTHDR(&message).as_mut() {
                (header.cmsg_level, header.cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
                header.cmsg_len = libc::CMSG_LEN(len as u32) as usize;
                std::ptr::copy_nonoverlapping(
                    fds.as_ptr().cast::<u8>(),
                    libc::CMSG_DATA(header),
                    len,
                );
            }
        }
        if libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
