//! The holder: a small process that keeps descriptors for a server, and starts the server again if
//! a signal ends it.
//!
//! ```text
//!   holder ── socket pair (SOCK_SEQPACKET) ── server
//!     keep(key, descriptors)   ◄── at each change of a session
//!     forget(key)              ◄── at the end of a disk
//!     all?                     ◄── at the server's start; the holder answers with each key
//!     taker(process)           ◄── a process that must end if the server dies: it takes over, or
//!                                  has handed all over; zero: there is none
//!     server(process, program) ◄── a server is ready, or has taken over
//! ```
//! What must hold
//! - After its start the holder allocates nothing, opens nothing, and reads no bytes of a disk. Its
//!   state is an array of fixed size.
//! - A server that exits by itself ends the holder, with the same status. A server that a signal
//!   ends is started again: [`BURST`] times at once, then once a second. If the next one refuses to
//!   start (its configuration has a mistake now), it is tried again [`REFUSALS`] times, once a
//!   second: the sessions are not lost meanwhile.
//! - After SIGTERM or SIGINT no server is started again, however the present one ends.
//! - If [`FAILURES`] servers in a row die before they are ready, the holder ends.
//! - Two processes of a hand-over never serve beside a third one. If the old server dies, the
//!   holder kills the new one. If the new one dies, the old one announces itself again, or ends.
//!   The next server starts only after the end of both.
//! - The holder waits for nothing but messages, signals and ends of processes.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use messages::{Closers, pair, receive, send};

/// Most descriptors of a key. The kernel passes at most 253 with a message.
pub const MOST_FDS: usize = 240;
/// Longest key in bytes: the name of a disk (255) with a protocol before it.
pub const MOST_KEY: usize = 280;
/// Most keys.
const SLOTS: usize = 1024;
/// Longest path of a program, with the byte that ends it.
const MOST_PATH: usize = 4096;
/// Longest message in bytes.
pub const MOST_BYTES: usize = MOST_PATH + 8;

/// Restarts without a pause. One more becomes possible each second.
const BURST: u64 = 60;
/// Attempts to start a server after a death if it refuses.
const REFUSALS: u32 = 60;
/// Time between two attempts to make the process of the next server, in milliseconds.
const AGAIN: libc::c_int = 1000;
/// The time of a wait without a limit.
const FOR_EVER: libc::c_int = -1;
/// Servers that may die in a row before they are ready.
const FAILURES: u32 = 5;

/// First byte of a message.
pub mod kind {
    pub const KEEP: u8 = b'k';
    pub const FORGET: u8 = b'f';
    pub const ALL: u8 = b'a';
    pub const END: u8 = b'e';
    pub const SERVER: u8 = b's';
    pub const TAKER: u8 = b't';
}

/// What is kept under a key. `fds` is zero for a free slot.
#[derive(Clone, Copy)]
struct Slot {
    key: [u8; MOST_KEY],
    key_len: usize,
    fds: [RawFd; MOST_FDS],
    count: usize,
}

/// The other process of a hand-over.
struct Other {
    pid: libc::pid_t,
    process: OwnedFd,
    /// It was the server before, and may serve again. Otherwise it must end if the server dies.
    has_served: bool,
}

struct Holder {
    slots: Vec<Slot>,
    /// Number of servers in a row that died before they were ready.
    failures: u32,
    is_ready: bool,
    /// The server follows one that a signal has ended.
    follows: bool,
    /// Number of servers in a row that have refused to follow.
    refusals: u32,
    /// An operator ends the server.
    is_ending: bool,
    /// Whether the log says that disks are not kept. A front end that changes its session must not
    /// flood it.
    has_noted_loss: bool,
    closers: Closers,
    /// Restarts that are possible now, and when their number was last counted.
    restarts: u64,
    counted: Instant,
    program: [u8; MOST_PATH],
    /// Pointers to `words`, and a null pointer, as execve needs them.
    arguments: Vec<*const libc::c_char>,
    _words: Vec<CString>,
    server: libc::pid_t,
    /// Becomes readable when a server ends that has announced itself. Until the old server exits,
    /// another process is the parent of the new one, and could take its status.
    watched: Option<OwnedFd>,
    other: Option<Other>,
    /// The server has ended. The next one starts when the other process has ended too, and when
    /// the host has room for it.
    is_owed: bool,
    /// No process has the other end of the socket, so the server is about to end.
    is_alone: bool,
    socket: OwnedFd,
    signals: OwnedFd,
}

/// Runs the holder and its server. Returns the status with which the process must exit. Call it
/// before the process has threads. `arguments`: those of the server, which gets its socket as
/// standard input.
pub fn run(program: &Path, arguments: &[OsString]) -> io::Result<u8> {
    let mut holder = Holder::new(program, arguments)?;
    holder.start()?;
    loop {
        let is_left = holder.wait(holder.patience())?.is_left;
        // A new server announces itself before the old one exits, so read messages first.
        while holder.take_message() {}
        // A socket without a peer is always readable, so poll must not wait for it any more.
        holder.is_alone |= is_left;
        // A message may have put other processes in the place of those that woke the holder.
        let Ends { is_over, is_other_gone, .. } = holder.wait(0)?;
        if is_other_gone {
            holder.other = None;
        }
        while let Some(signal) = holder.next_signal() {
            match signal {
                libc::SIGCHLD => {
                    if let Some(status) = holder.reap() {
                        return Ok(status);
                    }
                }
                libc::SIGTERM | libc::SIGINT if holder.is_owed => {
                    if let Some(other) = holder.other.filter(|other| other.has_served) {
                        // SAFETY: kill has no memory arguments.
                        unsafe { libc::kill(other.pid, signal) };
                    }
                    note(b"blockyard holder: ended before the next server could start\n");
                    return Ok(1);
                }
                _ if holder.is_owed => {}
                _ => {
                    holder.is_ending |= matches!(signal, libc::SIGTERM | libc::SIGINT);
                    // SAFETY: kill has no memory arguments.
                    unsafe { libc::kill(holder.server, signal) };
                }
            }
        }
        if is_over && let Some(status) = holder.reap_announced() {
            return Ok(status);
        }
        if holder.is_owed && holder.other.is_none() {
            holder.start_again(Holder::start)?;
        }
    }
}

/// What has ended.
struct Ends {
    /// No process has the other end of the socket any more. Messages that were sent before that can
    /// still be read.
    is_left: bool,
    /// The server that has announced itself.
    is_over: bool,
    is_other_gone: bool,
}

fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::ErrorKind::InvalidInput.into())
}

impl Holder {
    /// Allocates all that the holder will need.
    fn new(program: &Path, arguments: &[OsString]) -> io::Result<Self> {
        let name = program.as_os_str().as_bytes();
        let words = std::iter::once(c_string(name));
        let words = words.chain(arguments.iter().map(|word| c_string(word.as_bytes())));
        let words = words.collect::<io::Result<Vec<_>>>()?;
        let pointers = words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]);
        let arguments = pointers.collect();
        let free = Slot { key: [0; MOST_KEY], key_len: 0, fds: [-1; MOST_FDS], count: 0 };
        // SAFETY: prctl with these arguments has no memory arguments. Servers that a server has
        // started become children of this process.
        check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) })?;
        let (socket, _) = pair()?;
        let mut holder = Holder {
            slots: vec![free; SLOTS],
            failures: 0,
            is_ready: false,
            follows: false,
            refusals: 0,
            is_ending: false,
            has_noted_loss: false,
            closers: Closers::default(),
            restarts: BURST,
            counted: Instant::now(),
            program: [0; MOST_PATH],
            arguments,
            _words: words,
            server: 0,
            watched: None,
            other: None,
            is_owed: false,
            is_alone: false,
            socket,
            signals: signals()?,
        };
        holder.set_program(name);
        Ok(holder)
    }

    /// A path that is too long is ignored: the holder then starts the previous program.
    fn set_program(&mut self, name: &[u8]) {
        if name.len() < MOST_PATH && !name.is_empty() {
            self.program = [0; MOST_PATH];
            self.program[..name.len()].copy_from_slice(name);
        }
    }

    /// Starts the server.
    fn start(&mut self) -> io::Result<()> {
        let (ours, theirs) = pair()?;
        // SAFETY: this process has one thread, so the child may call anything.
        let pid = check(unsafe { libc::fork() })?;
        if pid == 0 {
            // SAFETY: `program` and the arguments are strings that end with a zero byte, and the
            // list of arguments ends with a null pointer. All outlive the call.
            unsafe {
                libc::dup2(theirs.as_raw_fd(), 0);
                let mut none = std::mem::zeroed();
                libc::sigemptyset(&mut none);
                libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
                libc::execv(self.program.as_ptr().cast(), self.arguments.as_ptr());
                libc::_exit(127);
            }
        }
        (self.socket, self.server, self.is_alone) = (ours, pid, false);
        (self.watched, self.is_owed, self.is_ending) = (None, false, false);
        Ok(())
    }

    /// Starts the next server. If the host lacks memory, processes or descriptors, the next attempt
    /// follows after [`AGAIN`], because the sessions would be lost with the holder. Returns the
    /// error after too many attempts.
    fn start_again(&mut self, start: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        let started = start(self);
        if started.is_ok() || self.refusals >= REFUSALS {
            return started;
        }
        self.refusals += 1;
        note(b"blockyard holder: the next server cannot be started: trying again\n");
        Ok(())
    }

    /// Returns how long the holder may wait for the next event, in milliseconds.
    fn patience(&self) -> libc::c_int {
        if self.is_owed && self.other.is_none() { AGAIN } else { FOR_EVER }
    }

    /// Waits for a message, a signal, or an end, for a time in milliseconds.
    fn wait(&self, time: libc::c_int) -> io::Result<Ends> {
        let entry = |fd: Option<&OwnedFd>| {
            let fd = fd.map_or(-1, AsRawFd::as_raw_fd);
            libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
        };
        let socket = Some(&self.socket).filter(|_| !self.is_alone);
        let other = self.other.as_ref().map(|other| &other.process);
        let watched = self.watched.as_ref();
        let mut fds = [entry(Some(&self.signals)), entry(socket), entry(watched), entry(other)];
        // SAFETY: the kernel writes to `fds`, which has four entries.
        let rc = unsafe { libc::poll(fds.as_mut_ptr(), 4, time) };
        if rc < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return Err(io::Error::last_os_error());
        }
        Ok(Ends {
            is_left: fds[1].revents & libc::POLLHUP != 0,
            is_over: fds[2].revents & libc::POLLIN != 0,
            is_other_gone: fds[3].revents & libc::POLLIN != 0,
        })
    }

    /// Reads the next signal, if there is one.
    fn next_signal(&self) -> Option<libc::c_int> {
        // SAFETY: an all-zero structure is valid, and the kernel writes at most its size.
        unsafe {
            let mut info: libc::signalfd_siginfo = std::mem::zeroed();
            let len = size_of::<libc::signalfd_siginfo>();
            let got = libc::read(self.signals.as_raw_fd(), (&raw mut info).cast(), len);
            (got == len as isize).then_some(info.ssi_signo as libc::c_int)
        }
    }

    /// Collects processes that have ended. Returns the status if the holder must end too.
    fn reap(&mut self) -> Option<u8> {
        loop {
            let mut status = 0;
            // SAFETY: the kernel writes the status.
            let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
            if pid <= 0 {
                return None;
            }
            self.closers.ended(pid);
            if pid == self.server
                && let Some(status) = self.follow(status)
            {
                return Some(status);
            }
        }
    }

    /// Collects the announced server, which has ended, if `reap` has not. If its parent has taken
    /// the status, it counts as killed. Returns the status if the holder must end too.
    fn reap_announced(&mut self) -> Option<u8> {
        self.watched.as_ref()?;
        let mut status = 0;
        // SAFETY: the kernel writes the status.
        match unsafe { libc::waitpid(self.server, &mut status, libc::WNOHANG) } {
            0 => None,
            pid if pid == self.server => self.follow(status),
            _ => self.follow(libc::SIGKILL),
        }
    }

    /// Owes the start of the next server after one that has ended with a status of waitpid. If
    /// there is another process, it must end first. Returns the status if the holder must end too.
    fn follow(&mut self, status: libc::c_int) -> Option<u8> {
        if let Some(status) = self.ended(status) {
            if self.is_ending {
                self.end_old();
            }
            return Some(status);
        }
        if self.refusals == 0 {
            note(b"blockyard holder: a signal ended the server: starting it again\n");
        }
        self.follows = true;
        self.pause();
        // It notices the server's death too, and ends. But it may be slow. A killed process that
        // does not end may still have writes in flight.
        if let Some(other) = self.other.as_ref().filter(|other| !other.has_served) {
            let kill = rustix::process::Signal::KILL;
            let _ = rustix::process::pidfd_send_signal(&other.process, kill);
        }
        (self.server, self.watched, self.is_owed) = (0, None, true);
        None
    }

    /// Lets an old server end that would serve again now.
    fn end_old(&self) {
        if let Some(old) = self.other.as_ref().filter(|other| other.has_served) {
            let term = rustix::process::Signal::TERM;
            let _ = rustix::process::pidfd_send_signal(&old.process, term);
        }
    }

    /// Notes that the server has ended with a status of waitpid. Returns the status if the holder
    /// must end too.
    fn ended(&mut self, status: libc::c_int) -> Option<u8> {
        // A status from 128 on stands for a signal (the sandbox's trap).
        let exited = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status) as u8);
        let signalled = || 128 | libc::WTERMSIG(status) as u8;
        if let Some(status) = exited.filter(|status| *status < 128) {
            let refuses = status != 0 && self.follows && !self.is_ready && !self.is_ending;
            if !refuses || self.refusals == REFUSALS {
                return Some(status);
            }
            self.refusals += 1;
            note(b"blockyard holder: the next server does not start: trying again\n");
            return None;
        }
        if self.is_ending {
            note(b"blockyard holder: a signal ended the server while it was ending\n");
            return Some(exited.unwrap_or_else(signalled));
        }
        let was_ready = std::mem::take(&mut self.is_ready);
        self.failures = if was_ready { 0 } else { self.failures + 1 };
        (self.failures >= FAILURES).then(|| {
            note(b"blockyard holder: the server dies before it is ready, again and again\n");
            1
        })
    }

    /// Bounds the rate of restarts.
    fn pause(&mut self) {
        let seconds = self.counted.elapsed().as_secs();
        self.counted += Duration::from_secs(seconds);
        self.restarts = (self.restarts + seconds).min(BURST);
        if self.restarts == 0 || self.refusals > 0 {
            std::thread::sleep(Duration::from_secs(1));
        }
        self.restarts = self.restarts.saturating_sub(1);
    }

    /// Reads and handles a message. Returns false if there is none.
    fn take_message(&mut self) -> bool {
        let (mut bytes, mut fds) = ([0; MOST_BYTES], [-1; MOST_FDS]);
        let Some(got) = receive(self.socket.as_raw_fd(), &mut bytes, &mut fds) else {
            return false;
        };
        let (message, fds) = (&bytes[..got.len], &fds[..got.count]);
        match message.split_first() {
            // What is kept under the key is out of date: with it, a server would read other memory.
            rest if got.is_cut => {
                self.close(fds);
                self.note_loss(
                    b"blockyard holder: no descriptors are left (ulimit -n): disks are not kept\n",
                );
                if let Some((&kind::KEEP, key)) = rest {
                    self.forget(key);
                }
            }
            Some((&kind::KEEP, key)) if key.len() <= MOST_KEY => self.keep(key, fds),
            Some((&kind::FORGET, key)) => self.forget(key),
            Some((&kind::ALL, _)) => self.send_all(),
            Some((&kind::SERVER, rest)) if rest.len() >= 4 => {
                let (pid, process) = number_of(rest);
                self.announced(pid, process, &rest[4..]);
            }
            Some((&kind::TAKER, rest)) if rest.len() >= 4 && !self.is_owed => {
                let (pid, process) = number_of(rest);
                self.other = process.map(|process| Other { pid, process, has_served: false });
            }
            _ => self.close(fds),
        }
        true
    }

    /// Follows a process that is the server now.
    fn announced(&mut self, pid: libc::pid_t, process: Option<OwnedFd>, program: &[u8]) {
        let before = self.other.as_ref().filter(|other| other.pid == pid);
        let (is_other, has_served) = (before.is_some(), before.is_some_and(|b| b.has_served));
        if self.is_owed && is_other && !has_served {
            // It has been killed.
            return;
        }
        if pid != self.server {
            // A server that serves again has failed to hand over. The other one has to end then.
            let last = self.watched.take().or_else(|| pidfd(self.server));
            let last = last.map(|process| (self.server, process));
            self.other = last.map(|(pid, process)| Other { pid, process, has_served: !has_served });
        }
        if self.is_ending && pid != self.server {
            // The signal to end came during the upgrade, and went to the server before.
            // SAFETY: kill has no memory arguments.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        (self.server, self.watched, self.is_owed) = (pid, process, false);
        self.set_program(program);
        (self.is_ready, self.refusals) = (true, 0);
    }

    /// Closes descriptors that were received. Never waits.
    fn close(&mut self, fds: &[RawFd]) {
        if !self.closers.close(fds) {
            self.note_loss(b"blockyard holder: old sockets stay open: too many do not close\n");
        }
    }

    /// Reports once that a disk is not kept.
    fn note_loss(&mut self, text: &[u8]) {
        if !std::mem::replace(&mut self.has_noted_loss, true) {
            note(text);
        }
    }

    fn place(&self, key: &[u8]) -> Option<usize> {
        self.slots.iter().position(|slot| slot.count > 0 && slot.key[..slot.key_len] == *key)
    }

    fn keep(&mut self, key: &[u8], fds: &[RawFd]) {
        if fds.is_empty() {
            return;
        }
        let free = || self.slots.iter().position(|slot| slot.count == 0);
        let Some(place) = self.place(key).or_else(free) else {
            self.note_loss(b"blockyard holder: no room for more disks: some are not kept\n");
            return self.close(fds);
        };
        let Slot { fds: old, count, .. } = self.slots[place];
        self.close(&old[..count]);
        let slot = &mut self.slots[place];
        slot.key[..key.len()].copy_from_slice(key);
        slot.fds[..fds.len()].copy_from_slice(fds);
        (slot.key_len, slot.count) = (key.len(), fds.len());
    }

    fn forget(&mut self, key: &[u8]) {
        if let Some(place) = self.place(key) {
            let Slot { fds, count, .. } = self.slots[place];
            self.slots[place].count = 0;
            self.close(&fds[..count]);
        }
    }

    /// Sends each key with its descriptors, and the end. The server reads them at once. One that
    /// has died does not: the wait for room in the socket has a limit.
    fn send_all(&self) {
        for slot in self.slots.iter().filter(|slot| slot.count > 0) {
            let mut message = [0; MOST_KEY + 1];
            message[0] = kind::KEEP;
            message[1..][..slot.key_len].copy_from_slice(&slot.key[..slot.key_len]);
            let message = &message[..=slot.key_len];
            if send(self.socket.as_raw_fd(), message, &slot.fds[..slot.count]).is_err() {
                return;
            }
        }
        let _ = send(self.socket.as_raw_fd(), &[kind::END], &[]);
    }
}

/// Returns the process at the start of a message: its number, and a descriptor if it is there.
fn number_of(message: &[u8]) -> (libc::pid_t, Option<OwnedFd>) {
    let number = i32::from_ne_bytes([message[0], message[1], message[2], message[3]]);
    (number, pidfd(number))
}

fn pidfd(pid: libc::pid_t) -> Option<OwnedFd> {
    let flags = rustix::process::PidfdFlags::empty();
    rustix::process::pidfd_open(rustix::process::Pid::from_raw(pid)?, flags).ok()
}

fn note(text: &[u8]) {
    // SAFETY: the kernel reads the text.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Blocks the signals of the holder, and returns a descriptor that reads them.
fn signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is ours; the descriptor is new.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1] {
            libc::sigaddset(&mut set, signal);
        }
        check(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
        let fd = check(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

mod messages;
#[cfg(test)]
mod tests;
