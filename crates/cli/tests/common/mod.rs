//! Shared by the tests of the whole program: folders, the daemon, guests and tools, all with time
//! limits.
//!
//! ```text
//!   daemon    `blockyard serve` as a process: ready line, log, signals, its descriptors and memory
//!   guest     guests/uml and guests/qemu: runs a script in a virtual machine; output line by line
//!   gate      the way to a server, which a test closes and opens
//!   qmp       QEMU's monitor: pauses a guest, adds a device, begins a migration
//!   server    a disk that the test's own process serves
//!   journals  folders for journals
//!   here      folders, images, commands
//! ```
//!
//! What must hold: dropping a value kills its processes (by their IDs) and removes its folders.
//! No wait here is without a limit, also that for the end of a killed process. A missing tool fails
//! the test.

// Each test program uses a part of this.
#![allow(dead_code, unused_imports)]

pub mod daemon;
pub mod gate;
pub mod guest;
mod hang;
pub mod journals;
pub mod pages;
pub mod qmp;
pub mod server;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::RecvFlags;

pub use daemon::{Daemon, complaints, is_of_watchdog};
pub use gate::{Closed, Gate, Gated};
pub use guest::{Guest, GuestKind, NAP, stripped_program};
pub use journals::StateFolder;
pub use rustix::process::Signal;
pub use server::Server;

/// The program under test. Tests of `blockyard-bench` expect it beside their own program: `cargo
/// test --workspace` builds both.
pub const BLOCKYARD: &str =
    match (option_env!("CARGO_BIN_EXE_blockyard"), option_env!("CARGO_BIN_EXE_blockyard-bench")) {
        (Some(program), _) => program,
        (None, Some(bench)) => bench.split_at(bench.len() - "-bench".len()).0,
        (None, None) => panic!("cargo names no program"),
    };
/// Timeout for things that should be immediate. A slower program counts as hung. A busy machine may
/// delay it by several seconds.
pub const SOON: Duration = Duration::from_secs(60);
/// Timeout for a whole run of a tool on a busy machine.
pub const TOOL: Duration = Duration::from_secs(60);

/// Waits until the peer has closed the connection.
#[track_caller]
pub fn until_disconnected(socket: &UnixStream) {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    until("it is disconnected", SOON, || match rustix::net::recv(socket, &mut [0u8], flags) {
        Ok((bytes, _)) => {
            assert_eq!(bytes, 0, "a message instead");
            true
        }
        Err(e) => e == Errno::CONNRESET,
    });
}

/// A folder for a test. Dropping it removes the folder. It is not in /tmp, which may be a tmpfs,
/// because tests need O_DIRECT and holes.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let base =
            std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        // The name is short, because paths of sockets are limited.
        let name = format!("by-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = base.join(name);
        std::fs::create_dir(&path).unwrap_or_else(|e| panic!("creating {}: {e}", path.display()));
        Folder(path)
    }

    /// Creates a sparse file of `bytes` bytes, and returns its path.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.join(name);
        std::fs::File::create_new(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// Makes a program of a script, and returns its path. Another process writes the file: a
    /// process that a second thread starts in the meantime would inherit a descriptor of this one,
    /// and the kernel starts no program that is open for writing.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.join(name);
        let mut install = Command::new("install");
        install.args(["-m", "755", "/dev/stdin"]).arg(&path).stdin(Stdio::piped());
        let mut install = install.spawn().expect("install starts");
        install.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(end_of(&mut install, TOOL).success(), "writing {}", path.display());
        path
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the bytes that a file occupies on the disk.
pub fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// Result of a program that has ended.
pub struct Finished {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Finished {
    /// Returns the program's standard output. Panics if the status is not 0.
    #[track_caller]
    pub fn good(self) -> String {
        assert!(self.status.success(), "{}\n{}{}", self.status, self.out, self.err);
        self.out
    }
}

/// Runs a command to its end. Panics if that takes longer than `limit`.
#[track_caller]
pub fn run(command: &mut Command, limit: Duration) -> Finished {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
    let (out, err) = (collect(child.stdout.take().unwrap()), collect(child.stderr.take().unwrap()));
    let status = wait(&mut child, limit);
    let mut threads = String::new();
    if status.is_none() {
        threads = hang::threads(child.id());
        end(&mut child);
    }
    // A process that it has started may still have its output.
    let [out, err] = [out, err].map(|output| output.recv_timeout(SOON));
    match (status, out, err) {
        (Some(status), Ok(out), Ok(err)) => Finished { status, out, err },
        (None, out, err) => {
            let output = out.unwrap_or_default() + &err.unwrap_or_default();
            panic!("{command:?} has not ended within {limit:?}\n{output}\n{threads}")
        }
        (Some(status), ..) => panic!("{command:?} has ended ({status}), but not its output"),
    }
}

/// Runs the program under test to its end.
#[track_caller]
pub fn blockyard<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Finished {
    run(Command::new(BLOCKYARD).args(args), TOOL)
}

/// Runs a program of guests/tool, such as qemu-img, e2fsck, fio or md5sum.
#[track_caller]
pub fn tool<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> Finished {
    run(tool_command(name).args(args), TOOL)
}

/// Returns a command that runs a program of guests/tool. The script prints once for each program
/// how to start it, because bash takes longer than most runs of these programs.
#[track_caller]
pub fn tool_command(name: &str) -> Command {
    static PRINTED: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());
    let script = guests().join("tool");
    // The script changes the arguments of this program.
    if name == "nbdkit" {
        let mut command = Command::new(script);
        command.arg(name);
        return command;
    }
    let printed = PRINTED.lock().unwrap().get(name).cloned();
    let printed = printed.unwrap_or_else(|| {
        let printed = run(Command::new(script).args(["--print", name]), TOOL).good();
        PRINTED.lock().unwrap().insert(name.to_string(), printed.clone());
        printed
    });
    let (variables, words) = printed.split_once("\0\0").expect("variables and words");
    let mut words = words.split_terminator('\0');
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words);
    command.envs(variables.split('\0').filter_map(|variable| variable.split_once('=')));
    command
}

/// Returns the MD5 sum of a file in hexadecimal. (MD5 takes half the time of SHA-256 in an emulated
/// guest.)
#[track_caller]
pub fn md5(path: &Path) -> String {
    let out = tool("md5sum", [path]).good();
    out.split_whitespace().next().expect("md5sum prints a sum").to_string()
}

/// Returns the folder of the guests' runners.
pub fn guests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests")
}

/// Waits until `done` returns true. Panics with `what` if that takes longer than `limit`.
#[track_caller]
pub fn until(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        let waited = start.elapsed();
        assert!(waited < limit, "not within {limit:?}: {what}");
        std::thread::sleep(pause(waited));
    }
}

/// Returns the time until the next check of a condition that a test has awaited for `waited`. The
/// first checks come fast, because the loads of many tests take both processors meanwhile.
pub fn pause(waited: Duration) -> Duration {
    (waited / 8).clamp(Duration::from_micros(500), Duration::from_millis(5))
}

/// Waits until a connection or data can be taken from a descriptor. Panics with `what` if that
/// takes longer than [`SOON`].
#[track_caller]
pub fn until_readable(what: &str, fd: impl AsFd) {
    let limit = Timespec { tv_sec: SOON.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&limit))).unwrap();
    assert_eq!(ready, 1, "not within {SOON:?}: {what}");
}

/// Returns whether a process listens on a socket. (The file exists before that: between bind and
/// listen a connection is refused.)
pub fn listens(socket: &Path) -> bool {
    // Columns: type, state and path. 00010000 is the flag of a listening socket.
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.to_str().unwrap();
    all.lines()
        .any(|line| line.contains(" 00010000 ") && line.split_whitespace().last() == Some(path))
}

/// Returns the status of a child that ends within `limit`, else `None`.
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        let waited = start.elapsed();
        if waited > limit {
            return None;
        }
        std::thread::sleep(pause(waited));
    }
}

/// Waits until a child ends, and returns its status. Panics if that takes longer than `limit`. The
/// child must not have a pipe as its output that it can fill.
#[track_caller]
pub fn end_of(child: &mut Child, limit: Duration) -> ExitStatus {
    wait(child, limit).unwrap_or_else(|| {
        end(child);
        panic!("the child has not ended within {limit:?}")
    })
}

/// Kills a child, and waits until it has ended. A process that the kernel cannot end is left.
pub fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = wait(child, SOON);
}

/// The lines that a child prints. Each must come within [`SOON`].
pub struct Lines(Receiver<String>);

impl Lines {
    pub fn of(output: impl Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.map(|line| sender.send(line)).all(|sent| sent.is_ok())
        });
        Lines(lines)
    }
}

impl Iterator for Lines {
    type Item = String;

    /// Waits for the next line. Returns `None` at the end of the output.
    fn next(&mut self) -> Option<String> {
        match self.0.recv_timeout(SOON) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no line within {SOON:?}"),
        }
    }
}

/// Reads to the end, and then sends all.
fn collect(mut from: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, collected) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    collected
}
