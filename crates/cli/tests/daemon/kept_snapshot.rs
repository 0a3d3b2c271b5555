//! `ctl snapshot --persist`, killed at each of its steps: the next start serves the disk with all
//! data.

use std::process::{Command, Stdio};

use blockyard_driver::status;
use rustix::process::{Pid, kill_process};

use crate::common::{
    BLOCKYARD, Daemon, Folder, Lines, SOON, Signal, StateFolder, blockyard, end_of, tool,
    tool_command,
};
use crate::guest::{Guest, pattern};

const BLOCK: usize = 4096;

/// Calls of the threads that prepare and take the snapshot. strace counts each one by itself.
const CALLS: [&str; 6] = ["openat", "fsync", "rename", "unlink", "fsetxattr", "ftruncate"];

struct Host {
    folder: Folder,
    state: StateFolder,
}

impl Host {
    fn new() -> Self {
        let host = Host { folder: Folder::new(), state: StateFolder::new() };
        blockyard(["image", "create", "-q", &host.file("a.qcow2"), "1M"]).good();
        std::fs::create_dir(host.folder.join("conf.d")).unwrap();
        let (image, socket) = (host.file("a.qcow2"), host.file("s"));
        let text = format!("[[disk]]\nname = \"a\"\nimage = {image:?}\nvhost-user = {socket:?}\n");
        std::fs::write(host.folder.join("toml"), text).unwrap();
        host
    }

    fn file(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().into()
    }

    fn start(&self) -> Daemon {
        let mut command = Command::new(BLOCKYARD);
        command.args(["serve", "--config", &self.file("toml"), "--api", &self.file("api")]);
        let mut daemon = Daemon::start(command.arg("--state-folder").arg(self.state.path()));
        daemon.wait_ready();
        daemon
    }

    /// Returns whether the configuration names the overlay.
    fn names_overlay(&self) -> bool {
        let file = std::fs::read_to_string(self.folder.join("conf.d/90-ctl-a.toml"));
        file.is_ok_and(|text| text.contains("top.qcow2"))
    }

    /// Takes a snapshot while strace waits to kill the server at the `n`-th such call of a thread.
    /// Returns whether the snapshot was taken.
    fn snapshot_killed_at(&self, daemon: &Daemon, call: &str, n: usize) -> bool {
        let mut strace = tool_command("strace");
        strace.args(["-f", "-o", "/dev/null", "-p", &daemon.pid().to_string()]);
        strace.args(["-e", &format!("trace={call}")]);
        strace.args(["-e", &format!("inject={call}:signal=KILL:when={n}")]);
        let mut strace = strace.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = Lines::of(strace.stderr.take().unwrap());
        let attached = lines.find(|line| line.contains("attached") || line.contains("ptrace"));
        assert!(attached.is_some_and(|line| line.contains("attached")), "strace cannot attach");
        let api = self.file("api");
        let arguments = ["ctl", "--api", &api, "snapshot", "--persist", "a"];
        let taken = blockyard(arguments.into_iter().chain([self.file("top.qcow2").as_str()]));
        if taken.status.success() {
            kill_process(Pid::from_child(&strace), Signal::TERM).unwrap();
        }
        end_of(&mut strace, SOON);
        taken.status.success()
    }
}

/// Takes a snapshot, with a kill at a call or right after it. The next start serves the disk.
/// Returns whether the snapshot was taken, and whether the configuration names the overlay.
fn killed_at(call: &str, n: usize) -> (bool, bool) {
    let host = Host::new();
    let daemon = host.start();
    let data = |block: u64| pattern(n as u64 * 64 + block, BLOCK);
    let mut guest = Guest::connect(&host.folder.join("s"));
    for block in 0..8 {
        assert_eq!(guest.write(block * 8, &data(block)), status::OK);
    }
    let is_taken = host.snapshot_killed_at(&daemon, call, n);
    let names_overlay = host.names_overlay();
    assert!(names_overlay || !is_taken, "{call} {n}: the configuration has the old image");
    assert!(!names_overlay || host.folder.join("top.qcow2").exists(), "{call} {n}: no overlay");
    daemon.kill();
    drop(guest);
    let daemon = host.start();
    let mut guest = Guest::connect(&host.folder.join("s"));
    for block in 0..8 {
        assert!(guest.read(block * 8, BLOCK).unwrap() == data(block), "{call} {n}: block {block}");
    }
    assert_eq!(guest.write(64, &data(8)), status::OK);
    drop(guest);
    daemon.stop();
    let image = if names_overlay { "top.qcow2" } else { "a.qcow2" };
    tool("qemu-img", ["check", &host.file(image)]).good();
    (is_taken, names_overlay)
}

#[test]
fn a_kill_at_any_step_of_a_persisted_snapshot_leaves_a_disk_that_starts() {
    let (mut before, mut after) = (0, 0);
    for call in CALLS {
        for n in 1.. {
            match killed_at(call, n) {
                (true, _) => break,
                (false, false) => before += 1,
                (false, true) => after += 1,
            }
        }
    }
    // Kills before and after the step that changes the configuration.
    assert!(before > 1 && after > 1, "{before}, {after}");
}
