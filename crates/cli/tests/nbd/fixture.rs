//! A disk on NBD with its daemon, socket and URI, and the client programs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{
    BLOCKYARD, Daemon, Finished, Folder, SOON, TOOL, listens, run, tool, tool_command, until,
};

pub const MB: u64 = 1 << 20;

/// One disk, named `disk`, on a Unix socket.
pub struct NbdServer {
    pub daemon: Daemon,
    pub socket: PathBuf,
}

impl NbdServer {
    /// Starts `blockyard serve IMAGE --nbd unix:SOCKET --name disk OPTIONS...` and waits until it
    /// is ready.
    #[track_caller]
    pub fn start(image: impl AsRef<OsStr>, socket: PathBuf, options: &[&str]) -> Self {
        let mut command = Command::new(BLOCKYARD);
        command
            .arg("serve")
            .arg(image)
            .arg("--nbd")
            .arg(address(&socket))
            .args(["--name", "disk"])
            .args(options);
        let mut daemon = Daemon::start(&mut command);
        daemon.wait_ready();
        NbdServer { daemon, socket }
    }

    /// Creates a sparse raw image of `bytes` in `folder`, and serves it on a socket there.
    #[track_caller]
    pub fn empty(folder: &Folder, bytes: u64, options: &[&str]) -> Self {
        Self::start(folder.image("disk.img", bytes), folder.join("s"), options)
    }

    pub fn uri(&self) -> String {
        uri(&self.socket, "disk")
    }
}

/// Returns `unix:SOCKET`.
pub fn address(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}

pub fn uri(socket: &Path, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", socket.display())
}

/// Runs a script of libnbd/ with a URI.
#[track_caller]
pub fn script(name: &str, uri: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/nbd/libnbd")
        .join(name)
        .with_extension("py");
    let mut command = tool_command("python3");
    command.arg("-B").arg(file).arg(uri);
    run(&mut command, TOOL).good()
}

/// Runs Python code with libnbd: `nbd` is imported, `URI` is set.
#[track_caller]
pub fn python(uri: &str, code: &str) -> Finished {
    tool("python3", ["-B", "-c", &format!("import nbd\nURI = {uri:?}\n{code}")])
}

/// qemu-nbd with the same image, for comparison. Dropping it kills the process.
pub struct Stock {
    _daemon: Daemon,
    pub uri: String,
}

impl Stock {
    #[track_caller]
    pub fn start(image: &Path, format: &str, socket: &Path) -> Self {
        let mut command = tool_command("qemu-nbd");
        command
            .args(["-t", "-r", "-A", "-e", "8", "-x", "disk", "-f", format, "-k"])
            .arg(socket)
            .arg(image);
        let daemon = Daemon::start(&mut command);
        until("qemu-nbd listens", SOON, || listens(socket));
        Stock { _daemon: daemon, uri: uri(socket, "disk") }
    }
}

/// Starts any program of the tree in the background. Dropping it kills the process.
#[track_caller]
pub fn start_in_background<S: AsRef<OsStr>>(
    name: &str,
    args: impl IntoIterator<Item = S>,
) -> Daemon {
    Daemon::start(tool_command(name).args(args))
}

/// Returns random bytes, the same for the same seed. The loop is short and makes words, because
/// tests are built without optimisation and need megabytes.
pub fn noise(bytes: u64, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut words = vec![[0; 8]; bytes.div_ceil(8) as usize];
    for place in &mut words {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *place = state.to_le_bytes();
    }
    let mut noise = words.into_flattened();
    noise.truncate(bytes as usize);
    noise
}

/// Creates a sparse file of 64 MiB with random data in some places. Its end is a hole.
pub fn sparse(folder: &Folder, name: &str) -> PathBuf {
    use std::os::unix::fs::FileExt;
    let path = folder.image(name, 64 * MB);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    for (offset, len) in [(0, MB), (5 * MB, 3 * MB), (20 * MB + 4096, 64 << 10), (40 * MB, 8 * MB)]
    {
        file.write_all_at(&noise(len, offset + 1), offset).unwrap();
    }
    file.sync_all().unwrap();
    path
}

/// Checks that two files are equal, without printing their bytes.
#[track_caller]
pub fn same(a: &Path, b: &Path) {
    let read =
        |p: &Path| std::fs::read(p).unwrap_or_else(|e| panic!("reading {}: {e}", p.display()));
    let (left, right) = (read(a), read(b));
    // A loop over the bytes takes a second in a test that is built without optimisation.
    if left != right {
        let first = left.iter().zip(&right).position(|(a, b)| a != b);
        panic!(
            "{} ({} bytes) is not {} ({} bytes): first at {first:?}",
            a.display(),
            left.len(),
            b.display(),
            right.len()
        );
    }
}

/// Timeout for a copy of a disk on a busy machine.
pub const COPY: Duration = Duration::from_secs(120);
