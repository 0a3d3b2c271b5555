//! Starts a program, and reads what it says at its start.

use std::collections::HashMap;
use std::io::{self, ErrorKind as IoKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use blockyard_ring::parcel::Parcel;
use blockyard_ring::{child, rights, sandbox};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::handed;
use super::process::{Introduction, Position, Process, Started};
use super::program::{self, Program};
use super::protocol::{Hello, LineError, MOST_LINE};
use super::{program_of, refused};
use crate::error::{ErrorKind, StorageError};
use crate::targets::{Access, Shape, Target};

/// Longest time for the start of a program.
const START: Duration = Duration::from_secs(30);
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
    if is_owner {
        started.process.own();
    }
    keep(&image, started);
    Ok(())
}

/// Ends the programs of another server that no disk of this one continues. This server is their
/// owner now.
pub fn end_unused() {
    let mut early = EARLY.lock().unwrap_or_else(PoisonError::into_inner);
    let all = early.iter_mut().flat_map(HashMap::values_mut);
    let unused: Vec<_> =
        all.flat_map(|each| each.extract_if(.., |one| !one.process.is_owned())).collect();
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
    let process = Process::of_child(pidfd, pid);
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
        let target = Target::of_program(name.into(), shape, program::CALLS, make);
        data.into_iter().fold(target, |target, (path, access)| {
            target.data(path, if read_only { Access::Read } else { access })
        })
    }
}
