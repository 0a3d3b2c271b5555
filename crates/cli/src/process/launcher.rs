//! A process outside the sandbox that starts the next server for `ctl upgrade`, and kills it if it
//! hangs. A server in a sandbox can start no program, and what it starts would be in the same
//! sandbox. It can send no signal to a process outside.
//!
//! In: a connection for the next server. Out: the number of its process.
//!
//! What must hold
//! - The launcher starts only the server's own program with the server's own arguments. It has them
//!   from its command line, before the server opens anything that a guest or a client can change.
//! - It kills only what it has started.
//! - It ends with the server, because the server's end of the socket closes.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use blockyard_ring::parcel::{self, Parcel};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use super::inherited;

/// Argument with which the program starts as a launcher. The path of the server's program and its
/// arguments follow.
pub const ARGUMENT: &str = "--launcher";

/// Longest time for the start of a process, and for its answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Answer about a process that has not ended. No process has this status.
const RUNS: i32 = -1;

static LAUNCHER: Mutex<Option<(UnixStream, Number)>> = Mutex::new(None);

/// Starts the launcher of this process. Call this before the process enters its sandbox.
pub fn start() -> anyhow::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    Command::new("/proc/self/exe")
        // An administrator looks for this name in the list of processes.
        .arg0("blockyard")
        .arg(ARGUMENT)
        .arg(own_binary()?)
        .args(own_arguments())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    *LAUNCHER.lock().unwrap_or_else(PoisonError::into_inner) = Some((ours, 0));
    Ok(())
}

/// The number of an order, which its answer repeats. An answer may come after its order was given
/// up.
type Number = u64;

/// What the server asks for.
#[derive(Serialize, Deserialize)]
enum Order {
    /// Start the next server, with the descriptor beside the order as its standard input.
    Start,
    /// Kill the process of this number.
    Kill(i32),
    /// Return the status of this process, as wait(2) has it, if it has ended.
    Ended(i32),
}

/// The process that starts the next server is gone. Only a new server can have another one.
#[derive(Debug, thiserror::Error)]
#[error(
    "the process that starts programs for this server has ended, so it can start no next server: \
     restart the server instead of an upgrade"
)]
struct Died;

/// Starts the next server, with `connection` as its standard input. Returns its process.
pub fn launch(connection: OwnedFd) -> anyhow::Result<i32> {
    let launched = order(Order::Start, &[connection.as_fd()]);
    launched.inspect_err(|e| tracing::error!("no next server is started: {e:#}"))
}

/// Kills a process. Fails if [`launch`] has not started it.
pub fn kill(pid: i32) -> anyhow::Result<()> {
    order(Order::Kill(pid), &[]).map(|_| ())
}

/// Returns how a process that [`launch`] has started has ended. None: it runs.
pub fn ended(pid: i32) -> anyhow::Result<Option<String>> {
    let status = order(Order::Ended(pid), &[])?;
    Ok((status != RUNS).then(|| ExitStatus::from_raw(status).to_string()))
}

fn order(order: Order, fds: &[BorrowedFd<'_>]) -> anyhow::Result<i32> {
    let mut launcher = LAUNCHER.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((stream, number)) = launcher.as_mut() else {
        bail!("the process that starts the next server is missing");
    };
    *number += 1;
    ask(stream, *number, &order, fds)
}

fn ask(
    stream: &UnixStream,
    number: Number,
    order: &Order,
    fds: &[BorrowedFd<'_>],
) -> anyhow::Result<i32> {
    let deadline = Instant::now() + PATIENCE;
    let bytes = serde_json::to_vec(&(number, order))?;
    parcel::send(stream, &bytes, fds, deadline).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Died.into(),
        _ => anyhow::Error::from(e).context("talking to the process that starts programs"),
    })?;
    loop {
        let Parcel { bytes, .. } = parcel::receive(stream, deadline)?.ok_or(Died)?;
        let (of, answer): (Number, Result<i32, String>) = serde_json::from_slice(&bytes)?;
        if of == number {
            return answer.map_err(anyhow::Error::msg);
        }
    }
}

/// Runs the launcher until its server ends.
pub fn run(mut command_line: impl Iterator<Item = OsString>) -> anyhow::Result<()> {
    let program = command_line.next().context("the program is missing")?.into();
    let launcher = Launcher {
        program,
        arguments: command_line.collect(),
        started: HashMap::default(),
        last: None,
    };
    launcher.serve(&UnixStream::from(inherited::connection()?))
}

struct Launcher {
    program: PathBuf,
    arguments: Vec<OsString>,
    /// The processes that it has started and that run, by number.
    started: HashMap<i32, Started>,
    /// The process that has ended last, and its status.
    last: Option<(i32, i32)>,
}

struct Started {
    child: Child,
    /// Tells the end of the child (pidfd).
    process: OwnedFd,
}

impl Launcher {
    fn serve(mut self, server: &UnixStream) -> anyhow::Result<()> {
        loop {
            self.wait_for_order(server)?;
            let order = parcel::receive(server, Instant::now() + PATIENCE)?;
            let Some(Parcel { bytes, mut fds }) = order else { return Ok(()) };
            let (number, order): (Number, Order) = serde_json::from_slice(&bytes)?;
            let answer = match order {
                Order::Start => self.start(fds.pop().context("the connection is missing")?),
                Order::Kill(pid) => self.kill(pid),
                Order::Ended(pid) => self.ended(pid),
            };
            let answer = serde_json::to_vec(&(number, answer.map_err(|e| format!("{e:#}"))))?;
            parcel::send(server, &answer, &[], Instant::now() + PATIENCE)?;
        }
    }

    /// Waits until the server sends or ends. Meanwhile it waits for the processes that end, which
    /// would be zombies otherwise.
    fn wait_for_order(&mut self, server: &UnixStream) -> io::Result<()> {
        loop {
            let mut waits = vec![PollFd::new(server, PollFlags::IN)];
            let processes = self.started.values();
            waits.extend(processes.map(|started| PollFd::new(&started.process, PollFlags::IN)));
            match poll(&mut waits, None) {
                Err(Errno::INTR) => continue,
                result => result?,
            };
            let is_sent = !waits[0].revents().is_empty();
            self.note_ends();
            if is_sent {
                return Ok(());
            }
        }
    }

    fn note_ends(&mut self) {
        let last = &mut self.last;
        self.started.retain(|pid, started| match started.child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                *last = Some((*pid, status.into_raw()));
                false
            }
            Err(_) => false,
        });
    }

    fn ended(&mut self, pid: i32) -> anyhow::Result<i32> {
        self.note_ends();
        let last = self.last.filter(|(last, _)| *last == pid).map(|(_, status)| status);
        match self.started.contains_key(&pid) {
            true => Ok(RUNS),
            false => last.context("it has started no such process"),
        }
    }

    fn start(&mut self, connection: OwnedFd) -> anyhow::Result<i32> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).args(["--takeover", "-"]).stdin(Stdio::from(connection));
        let spawned = command.spawn();
        // It has the connection too, which must not outlive the new server.
        drop(command);
        let child = spawned.with_context(|| format!("starting {}", self.program.display()))?;
        // Only this thread waits for the child, and only later: the number is the child's.
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        let pid = child.id() as i32;
        self.started.insert(pid, Started { child, process });
        Ok(pid)
    }

    fn kill(&mut self, pid: i32) -> anyhow::Result<i32> {
        let started = self.started.get_mut(&pid).context("it runs no such process")?;
        started.child.kill()?;
        Ok(pid)
    }
}

/// Returns the path of the running program. A new program may be there by now.
pub fn own_binary() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe().context("finding the running program")?;
    let text = path.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or_else(|| path.clone(), PathBuf::from))
}

/// Returns the arguments of this process without `--takeover`.
pub fn own_arguments() -> Vec<OsString> {
    let (mut arguments, mut skip) = (Vec::new(), false);
    for argument in std::env::args_os().skip(1) {
        if std::mem::take(&mut skip) {
            continue;
        }
        match argument.to_str() {
            Some("--takeover") => skip = true,
            Some(text) if text.starts_with("--takeover=") => {}
            _ => arguments.push(argument),
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::awaited::{HANG, end_of};

    #[test]
    fn the_death_of_the_launcher_is_named() {
        let (server, end) = UnixStream::pair().unwrap();
        drop(end);
        let error = ask(&server, 1, &Order::Start, &[]).unwrap_err();
        assert!(error.is::<Died>(), "{error:#}");
        // It dies after it has got the order.
        let (server, end) = UnixStream::pair().unwrap();
        let order = std::thread::spawn(move || ask(&server, 1, &Order::Start, &[]));
        assert!(parcel::receive(&end, Instant::now() + PATIENCE).unwrap().is_some());
        drop(end);
        let error = order.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("restart the server"), "{error:#}");
    }

    #[test]
    fn it_kills_what_it_has_started_and_no_other_process() {
        let (server, end) = UnixStream::pair().unwrap();
        let script = "read line";
        let launcher = Launcher {
            program: "/bin/sh".into(),
            arguments: ["-c", script].map(OsString::from).into(),
            started: HashMap::default(),
            last: None,
        };
        let thread = std::thread::spawn(move || launcher.serve(&end));
        let (connection, theirs) = UnixStream::pair().unwrap();
        // The server gave this order up, and its answer is still in the socket.
        let order = serde_json::to_vec(&(1, Order::Kill(1))).unwrap();
        parcel::send(&server, &order, &[], Instant::now() + PATIENCE).unwrap();
        let pid = ask(&server, 2, &Order::Start, &[theirs.as_fd()]).unwrap();
        drop(theirs);
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let refused = ask(&server, 3, &Order::Kill(other.id() as i32), &[]).unwrap_err();
        assert_eq!(refused.to_string(), "it runs no such process");
        assert_eq!(ask(&server, 4, &Order::Ended(pid), &[]).unwrap(), RUNS);
        ask(&server, 5, &Order::Kill(pid), &[]).unwrap();
        // The end of the process closes its connection.
        assert!(parcel::receive(&connection, Instant::now() + PATIENCE).unwrap().is_none());
        let (mut number, until) = (5, Instant::now() + HANG);
        let status = loop {
            number += 1;
            match ask(&server, number, &Order::Ended(pid), &[]).unwrap() {
                RUNS => assert!(Instant::now() < until, "the process does not end"),
                status => break status,
            }
        };
        assert_eq!(ExitStatus::from_raw(status).signal(), Some(9));
        assert_eq!(other.try_wait().unwrap(), None, "the other process runs on");
        other.kill().unwrap();
        assert_eq!(end_of(&mut other).signal(), Some(9));
        drop(server);
        thread.join().unwrap().unwrap();
    }
}
