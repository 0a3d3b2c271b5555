//! A process outside the sandbox that starts the next server for `ctl upgrade`. A server in a
//! sandbox can start no program, and what it starts would be in the same sandbox.
//!
//! In: a connection for the next server. Out: the number of its process.
//!
//! What must hold
//! - The launcher starts only the server's own program with the server's own arguments. It has them
//!   from its command line, before the server opens anything that a guest or a client can change.
//! - It ends with the server, because the server's end of the socket closes.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use blockyard_ring::parcel::{self, Parcel};

use super::inherited_connection;

/// Argument with which the program starts as a launcher. The path of the server's program and its
/// arguments follow.
pub const ARGUMENT: &str = "--launcher";

/// Longest time for the start of a process, and for its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The server may ask at any time.
const FOR_EVER: Duration = Duration::from_secs(1 << 32);

static LAUNCHER: Mutex<Option<UnixStream>> = Mutex::new(None);

/// Starts the launcher of this process. Call this before the process enters its sandbox.
pub fn start() -> anyhow::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    Command::new("/proc/self/exe")
        .arg(ARGUMENT)
        .arg(own_binary()?)
        .args(own_arguments())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    *LAUNCHER.lock().unwrap_or_else(PoisonError::into_inner) = Some(ours);
    Ok(())
}

/// Starts the next server, with `connection` as its standard input. Returns its process.
pub fn launch(connection: OwnedFd) -> anyhow::Result<i32> {
    use std::os::fd::AsFd;

    let launcher = LAUNCHER.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(stream) = launcher.as_ref() else {
        bail!("the process that starts the next server is missing");
    };
    let deadline = Instant::now() + PATIENCE;
    parcel::send(stream, &[], &[connection.as_fd()], deadline)?;
    let Some(Parcel { bytes, .. }) = parcel::receive(stream, deadline)? else {
        bail!("the process that starts the next server has ended");
    };
    let answer: Result<i32, String> = serde_json::from_slice(&bytes)?;
    answer.map_err(anyhow::Error::msg)
}

/// Runs the launcher until its server ends.
pub fn run(mut command_line: impl Iterator<Item = OsString>) -> anyhow::Result<()> {
    let program = command_line.next().context("the program is missing")?;
    let arguments: Vec<_> = command_line.collect();
    let server = UnixStream::from(inherited_connection()?);
    while let Some(mut parcel) = parcel::receive(&server, Instant::now() + FOR_EVER)? {
        let connection = parcel.fds.pop().context("the connection is missing")?;
        let mut command = Command::new(&program);
        command.args(&arguments).args(["--takeover", "-"]).stdin(Stdio::from(connection));
        let started = command.spawn();
        // It has the connection too, which must not outlive the new server.
        drop(command);
        let answer = match started {
            Ok(mut child) => {
                let pid = child.id() as i32;
                std::thread::spawn(move || child.wait());
                Ok(pid)
            }
            Err(e) => Err(format!("starting {}: {e}", program.display())),
        };
        let answer = serde_json::to_vec(&answer)?;
        parcel::send(&server, &answer, &[], Instant::now() + PATIENCE)?;
    }
    Ok(())
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
