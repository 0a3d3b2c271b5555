//! A running program: its process, what it said at its start, and where the conversation with it
//! is.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use blockyard_ring::pool::Pool;
use blockyard_ring::sandbox;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_send_signal, waitid,
};

use crate::targets::{Access, Shape};

/// How long a program may take to end after its connection was closed. Then it is killed.
const END: Duration = Duration::from_secs(5);
/// How long a killed program may take to end. If the kernel cannot end it, because it waits for a
/// device, it stays a zombie. So it does not use up the threads.
const KILLED: Duration = Duration::from_secs(1);
/// The threads that wait for the ends of programs: their name, and most of them.
pub(super) const ENDER: &str = "program's end";
pub(super) const MOST_ENDERS: usize = 4;

static ENDERS: LazyLock<Pool> =
    LazyLock::new(|| Pool::new(ENDER, MOST_ENDERS, Duration::from_secs(1)));

/// What a program said at its start.
#[derive(Clone)]
pub(super) struct Introduction {
    pub shape: Shape,
    pub data: Vec<(PathBuf, Access)>,
    pub discards: bool,
}

/// Where the conversation with a program is.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    /// Number of the next question.
    pub next: u64,
    /// Numbers of the questions without an answer. No request waits for these answers.
    pub owed: Vec<u64>,
    /// The beginning of a line that is not whole.
    pub unread: Vec<u8>,
    /// Lines, and the rest of a line, that the program has not got.
    pub unsent: Vec<u8>,
}

/// A program that is ready.
pub(super) struct Started {
    pub introduction: Introduction,
    pub position: Position,
    pub stream: UnixStream,
    pub process: Process,
}

/// A running program. The owner's drop ends the program, in bounded time and without waiting. Any
/// other server's drop leaves it alone.
pub(super) struct Process {
    id: Id,
    is_owned: bool,
}

/// A program's process, and the process group that it leads.
struct Id {
    pidfd: OwnedFd,
    /// The number of both. None: it is unknown.
    group: Option<Pid>,
}

impl Process {
    /// Returns a program that this server has started.
    pub(super) fn of_child(pidfd: OwnedFd, pid: Pid) -> Self {
        Process { id: Id { pidfd, group: Some(pid) }, is_owned: true }
    }

    /// Returns a program that another server has started, and still owns.
    pub(super) fn of_another(pidfd: OwnedFd) -> Self {
        let group = pid_of(&pidfd);
        Process { id: Id { pidfd, group }, is_owned: false }
    }

    /// Returns a descriptor of the process for another server.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.id.pidfd.try_clone()
    }

    pub(super) fn is_owned(&self) -> bool {
        self.is_owned
    }

    /// The program is this server's alone now.
    pub(super) fn own(&mut self) {
        self.is_owned = true;
    }

    /// The program belongs to another server now.
    pub(super) fn release(&mut self) {
        self.is_owned = false;
    }

    /// Kills the program, and the other processes of its group.
    pub(super) fn kill(&self) {
        self.id.kill();
    }
}

impl Id {
    fn try_clone(&self) -> io::Result<Self> {
        Ok(Id { pidfd: self.pidfd.try_clone()?, group: self.group })
    }

    fn kill(&self) {
        // An error: the process has gone, and another one may have its number. A process that has
        // ended, and that this server has not waited for, keeps its number.
        let exists = pidfd_send_signal(&self.pidfd, Signal::KILL).is_ok();
        // The sandbox lets a server signal no group.
        if let (true, false, Some(group)) = (exists, sandbox::is_on(), self.group) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Returns the number of the process of a pidfd.
fn pid_of(pidfd: &OwnedFd) -> Option<Pid> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let number = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    number.trim().parse().ok().filter(|number| *number > 0).and_then(Pid::from_raw)
}

/// Returns whether a program ends before a time.
fn ends(pidfd: &OwnedFd, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let mut ended = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(retry_on_intr(|| rustix::event::poll(&mut ended, Some(&limit))), Ok(1..))
}

/// Waits until a program has ended. Kills it if it has not at `deadline`, and then what is left of
/// its process group.
fn end(id: &Id, deadline: Instant) {
    let has_ended = ends(&id.pidfd, deadline);
    // Before the wait below, which frees the number of the group.
    id.kill();
    if !has_ended {
        ends(&id.pidfd, Instant::now() + KILLED);
    }
    // A program that another server has started may be no child of this process.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let _ = retry_on_intr(|| waitid(WaitId::PidFd(id.pidfd.as_fd()), options));
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.is_owned {
            return;
        }
        let Ok(id) = self.id.try_clone() else { return self.kill() };
        // The time counts from now on, also if all threads are busy.
        let deadline = Instant::now() + END;
        if ENDERS.run(Box::new(move |()| end(&id, deadline))).is_err() {
            self.kill();
        }
    }
}
