//! What the tests of the whole program share: a folder of their own, the daemon, guests, tools, all
//! with time limits.
//!
//! ```text
//!   daemon    `blockyard serve` as a process: ready line, log, signals, its descriptors and memory
//!   guest     guests/uml and guests/qemu: a script in a whole guest, its output line by line
//!   server    a disk that this very process serves
//!   here      folders, images, commands that end
//! ```
//!
//! What must hold: nothing outlives its value (processes are killed by their id, folders removed),
//! and nothing waits without a limit. A tool that is missing is a failure that says so.

// Each test program takes its own part of this.
#![allow(dead_code, unused_imports)]

pub mod daemon;
pub mod guest;
pub mod server;

use std::ffi::OsStr;
use std::io::Read;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub use daemon::Daemon;
pub use guest::{Guest, GuestKind};
pub use rustix::process::Signal;
pub use server::Server;

/// The program under test. Tests of `blockyard-bench` find it beside that one: `cargo test
/// --workspace` builds both.
pub const BLOCKYARD: &str =
    match (option_env!("CARGO_BIN_EXE_blockyard"), option_env!("CARGO_BIN_EXE_blockyard-bench")) {
        (Some(program), _) => program,
        (None, Some(bench)) => bench.split_at(bench.len() - "-bench".len()).0,
        (None, None) => panic!("cargo names no program"),
    };
/// Limit of a wait for something that takes a moment. A program that takes longer hangs. A busy
/// machine may delay it by several seconds.
pub const SOON: Duration = Duration::from_secs(30);
/// For a tool's whole run, on a busy machine.
pub const TOOL: Duration = Duration::from_secs(60);

/// A folder that goes with its value. Not in /tmp, which may be memory: O_DIRECT and holes are to
/// be real.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let base =
            std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        // Short, because sockets go in there.
        let name = format!("by-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = base.join(name);
        std::fs::create_dir(&path).unwrap_or_else(|e| panic!("creating {}: {e}", path.display()));
        Folder(path)
    }

    /// A new sparse file of `bytes` bytes.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.join(name);
        std::fs::File::create_new(&path).unwrap().set_len(bytes).unwrap();
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

/// Bytes that a file takes on the disk.
pub fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// A program that has ended.
pub struct Finished {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Finished {
    /// Its standard output; panics unless it ended with status 0.
    #[track_caller]
    pub fn good(self) -> String {
        assert!(self.status.success(), "{}\n{}{}", self.status, self.out, self.err);
        self.out
    }
}

/// Runs a command to its end; panics when that takes longer than `limit`.
#[track_caller]
pub fn run(command: &mut Command, limit: Duration) -> Finished {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
    let (out, err) = (collect(child.stdout.take().unwrap()), collect(child.stderr.take().unwrap()));
    let Some(status) = wait(&mut child, limit) else {
        let _ = child.kill();
        let _ = child.wait();
        panic!(
            "{command:?} has not ended within {limit:?}\n{}{}",
            out.join().unwrap(),
            err.join().unwrap()
        );
    };
    Finished { status, out: out.join().unwrap(), err: err.join().unwrap() }
}

/// Runs the program under test to its end.
#[track_caller]
pub fn blockyard<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Finished {
    run(Command::new(BLOCKYARD).args(args), TOOL)
}

/// Runs a program of guests/tool: qemu-img, e2fsck, xfs_repair, fio, md5sum...
#[track_caller]
pub fn tool<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> Finished {
    run(Command::new(guests().join("tool")).arg(name).args(args), TOOL)
}

/// The MD5 sum of a file's bytes, in hexadecimal. (An emulated guest takes half the time for it
/// that SHA-256 takes.)
#[track_caller]
pub fn md5(path: &Path) -> String {
    let out = tool("md5sum", [path]).good();
    out.split_whitespace().next().expect("md5sum prints a sum").to_string()
}

/// The folder of the guests' runners.
pub fn guests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests")
}

/// Waits until `done` says so; panics with `what` when that takes longer than `limit`.
#[track_caller]
pub fn until(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether somebody listens on a socket. (It is there before that: between bind and listen a client
/// is refused.)
pub fn listens(socket: &Path) -> bool {
    // Kind, state and path of each: 00010000 is the flag of one that accepts.
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.to_str().unwrap();
    all.lines()
        .any(|line| line.contains(" 00010000 ") && line.split_whitespace().last() == Some(path))
}

/// The status of a child that ends within `limit`.
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if start.elapsed() > limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn collect(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
