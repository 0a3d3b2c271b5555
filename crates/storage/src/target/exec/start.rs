//! Starts a program, and reads what it says at its start.

use std::collections::HashMap;
use std::io::{self, ErrorKind as IoKind, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blockyard_ring::parcel::Parcel;
use blockyard_ring::pool::Pool;
use blockyard_ring::{child, rights, sandbox};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open,
    pidfd_send_signal, waitid,
};

use super::handed::{self, Introduction, Position};
use super::program::Program;
use super::protocol::{Hello, LineError, MOST_LINE};
use super::{program_of, refused};
use crate::error::{ErrorKind, StorageError};
use crate::target::{Access, Shape, Target};

/// Longest time for the start of a program.
const START: Duration = Duration::from_secs(30);
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

/// Why a program did not become ready.
#[derive(Debug, thiserror::Error)]
enum GreetError {
    #[error("it was not ready within {} s", START.as_secs())]
    Late,
    #[error("it ended at its start")]
    Ended,
    #[error("it sent a line of more than {MOST_LINE} bytes at its start")]
    TooLong,
    #[error(transparent)]
    Line(#[from] LineError),
    #[error(transparent)]
    Io(#[from] io::Error),
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

/// Programs that were started early, by name.
static EARLY: Mutex<Option<HashMap<String, Vec<Started>>>> = Mutex::new(None);

/// Starts the program of an `exec:` name for the next open of this name. For a server that enters a
/// sandbox, where it can start none. Returns the paths of the program's data files.
pub fn start_early(name: &str) -> Result<Vec<PathBuf>, StorageError> {
    let started = start(named(name)?)?;
    let files = started.introduction.data.iter().map(|(path, _)| path.clone()).collect();
    keep(name, started);
    Ok(files)
}

/// Continues a program of another server at the next open of its image. `parcel`: from
/// [`Opened::hand_over`](crate::Opened::hand_over). `is_owner`: whether the program is this
/// server's alone. If not, this server asks it nothing and leaves it alone before
/// [`Opened::own_program`](crate::Opened::own_program).
pub fn continue_from(parcel: Parcel, is_owner: bool) -> io::Result<()> {
    let (image, mut started) = handed::unpack(parcel)?;
    started.process.is_owned = is_owner;
    keep(&image, started);
    Ok(())
}

/// Ends the programs of another server that no disk of this one continues. This server is their
/// owner now.
pub fn end_unused() {
    let mut early = EARLY.lock().unwrap_or_else(PoisonError::into_inner);
    let all = early.iter_mut().flat_map(HashMap::values_mut);
    let unused: Vec<_> =
        all.flat_map(|each| each.extract_if(.., |one| !one.process.is_owned)).collect();
    drop(early);
    unused.into_iter().for_each(|mut started| started.process.own());
}

fn keep(name: &str, started: Started) {
    let mut early = EARLY.lock().unwrap_or_else(PoisonError::into_inner);
    early.get_or_insert_default().entry(name.into()).or_default().push(started);
}

/// Returns a program that was started early, or starts it.
pub(super) fn take(name: &str) -> Result<Started, StorageError> {
    let program = named(name)?;
    let mut early = EARLY.lock().unwrap_or_else(PoisonError::into_inner);
    let known = early.as_mut().and_then(|early| early.get_mut(name)).and_then(Vec::pop);
    drop(early);
    if let Some(started) = known {
        return Ok(started);
    }
    if sandbox::is_on() {
        return Err(refused(
            ErrorKind::Refused,
            "a server in a sandbox cannot start a program: name the disk in the configuration or \
             on the command line and restart the server, or start it with --sandbox off",
        ));
    }
    start(program)
}

/// Returns the program of an `exec:` name.
fn named(name: &str) -> Result<PathBuf, StorageError> {
    program_of(name).ok_or_else(|| refused(ErrorKind::Name, "the form is exec:/path/of/program"))
}

fn start(program: PathBuf) -> Result<Started, StorageError> {
    let failed = |what: String| refused(ErrorKind::Unreachable, what);
    let pair = UnixStream::pair().and_then(|(ours, theirs)| {
        let output = OwnedFd::from(theirs.try_clone()?);
        Ok((ours, Stdio::from(OwnedFd::from(theirs)), Stdio::from(output)))
    });
    let (stream, input, output) = pair.map_err(|e| failed(format!("cannot make a socket: {e}")))?;
    // Without descriptors, io_uring reads the socket. An older kernel has no such option.
    rights::refuse(&stream);
    let mut command = Command::new(&program);
    // It must answer the last flush, after the signal that ends the server.
    child::shield(&mut command);
    let child = command.stdin(input).stdout(output).spawn();
    // It has the program's end of the socket, which must close with the program.
    drop(command);
    let mut child =
        child.map_err(|e| failed(format!("cannot start {}: {e}", program.display())))?;
    let pid = Pid::from_child(&child);
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| {
        let _ = child.kill().and_then(|()| child.wait());
        failed(format!("cannot watch {}: {e}", program.display()))
    })?;
    let process = Process { id: Id { pidfd, group: Some(pid) }, is_owned: true };
    let wrong = |what: GreetError| failed(format!("program {}: {what}", program.display()));
    let (shape, hello) = greet(&stream).inspect_err(|_| process.kill()).map_err(wrong)?;
    let Hello { data, discards, .. } = hello;
    let (introduction, position) =
        (Introduction { shape, data, discards }, Position { next: 1, ..Position::default() });
    Ok(Started { introduction, position, stream, process })
}

/// Reads the lines of a program until it is ready. Reads byte by byte, so that nothing of later
/// lines is lost.
fn greet(mut stream: &UnixStream) -> Result<(Shape, Hello), GreetError> {
    let (mut hello, mut line, deadline) = (Hello::default(), Vec::new(), Instant::now() + START);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(GreetError::Late);
        }
        if line.len() > MOST_LINE {
            return Err(GreetError::TooLong);
        }
        stream.set_read_timeout(Some(left))?;
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(0) => return Err(GreetError::Ended),
            Ok(_) if byte == *b"\n" => {
                let text = String::from_utf8_lossy(&line).into_owned();
                if let Some(shape) = hello.line(&text)? {
                    stream.set_read_timeout(None)?;
                    return Ok((shape, hello));
                }
                line.clear();
            }
            Ok(_) => line.push(byte[0]),
            Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::TimedOut) => {}
            Err(e) if e.kind() == IoKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
}

impl Started {
    pub(super) fn target(self, name: &str, read_only: bool) -> Target {
        let Introduction { shape, data, .. } = self.introduction.clone();
        let named = name.to_string();
        let make =
            move |ring: &blockyard_ring::Handle, handle| Program::begin(ring, named, self, handle);
        let target = Target::of_program(name.into(), shape, make);
        data.into_iter().fold(target, |target, (path, access)| {
            target.data(path, if read_only { Access::Read } else { access })
        })
    }
}

impl Process {
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
