//! A server that is killed during a resize, snapshot, commit or stream, under verified load. The
//! next server finds the disk as it was before or as it is after, with each answered write.
//!
//! A kill comes after a number of answers that a generator chooses, so some come before the work
//! begins or after its end. `BLOCKYARD_KILLS=N` sets the number of kills for each kind of work.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_storage::sim::Rng;
use serde_json::Value;

use crate::common::{
    BLOCKYARD, Daemon, Folder, SOON, StateFolder, TOOL, blockyard, end_of, run, tool,
};
use crate::guest::{base_bytes, write_base};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 24 * MIB;
/// Kills of an ordinary run, for each kind of work.
const KILLS: u64 = 2;

/// A qcow2 overlay of a raw base, or the base itself, served with an API.
struct Server {
    folder: Folder,
    state: StateFolder,
    /// The images that the disk has had on top, the present one last.
    images: Vec<PathBuf>,
    daemon: Option<Daemon>,
    overlays: u32,
}

impl Server {
    fn of_overlay() -> Self {
        let folder = Folder::new();
        write_base(&folder.join("base.img"), SIZE as usize);
        let image = folder.join("0.qcow2");
        let top = image.to_str().unwrap();
        blockyard(["image", "create", "-q", "-F", "raw", "-b", "base.img", top]).good();
        Server::of(folder, image)
    }

    fn of_raw() -> Self {
        let folder = Folder::new();
        let image = folder.join("base.img");
        write_base(&image, SIZE as usize);
        Server::of(folder, image)
    }

    fn of(folder: Folder, image: PathBuf) -> Self {
        let state = StateFolder::new();
        let images = vec![image];
        let mut server = Server { folder, state, images, daemon: None, overlays: 0 };
        server.start();
        server
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("s")
    }

    /// Starts a server. It follows the record of an overlay that the last one has put on the image,
    /// as an operator does.
    fn start(&mut self) {
        let begin = std::time::Instant::now();
        loop {
            let mut command = Command::new(BLOCKYARD);
            command
                .arg("serve")
                .arg(self.images.last().unwrap())
                .arg("--vhost-user")
                .arg(self.socket());
            command.args(["--name", "disk", "--state-folder"]).arg(self.state.path());
            let mut daemon = Daemon::start(command.arg("--api").arg(self.folder.join("api")));
            if daemon.became_ready() {
                self.daemon = Some(daemon);
                return;
            }
            let log = daemon.log();
            assert!(begin.elapsed() < SOON, "it does not start: {log}");
            match log.split_once("has put overlay ") {
                Some((_, rest)) => self.images.push(rest.split(' ').next().unwrap().into()),
                None => assert!(log.contains("is in use by"), "not about a lock: {log}"),
            }
        }
    }

    fn kill(&mut self) {
        self.daemon.take().unwrap().kill();
    }

    /// Kills the server when it has answered more than `answered` writes.
    fn kill_after(&mut self, answered: u64) {
        self.daemon.as_ref().unwrap().until_served_more_than(answered, "write", "");
        self.kill();
    }

    fn ctl(&self, command: &[&str]) -> Command {
        let mut ctl = Command::new(BLOCKYARD);
        ctl.arg("ctl").arg("--api").arg(self.folder.join("api")).args(command);
        ctl
    }

    fn good(&self, command: &[&str]) {
        run(&mut self.ctl(command), TOOL).good();
    }

    /// Begins a command that may fail, because the server is killed.
    fn begin(&self, command: &[&str]) -> Child {
        self.ctl(command).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    fn next_overlay(&mut self) -> PathBuf {
        self.overlays += 1;
        self.folder.join(format!("{}.qcow2", self.overlays))
    }

    fn snapshot(&mut self) {
        let overlay = self.next_overlay();
        self.good(&["snapshot", "disk", overlay.to_str().unwrap()]);
        self.images.push(overlay);
    }

    fn size(&self) -> u64 {
        let done = run(&mut self.ctl(&["--json", "list"]), TOOL).good();
        let list: Value = serde_json::from_str(&done).unwrap();
        list["disks"][0]["size"].as_u64().unwrap()
    }

    /// Begins the work of a round.
    fn work(&mut self, kind: &str) -> Child {
        match kind {
            "resize" => {
                // Also beyond what the present L1 table holds.
                let size = (self.size() * 3 / 2).next_multiple_of(512).to_string();
                self.begin(&["resize", "disk", &size])
            }
            "snapshot" => {
                let overlay = self.next_overlay();
                self.begin(&["snapshot", "disk", overlay.to_str().unwrap()])
            }
            "stream" => {
                self.snapshot();
                self.begin(&["stream", "disk"])
            }
            _ => self.begin(&["commit", "disk"]),
        }
    }
}

/// Ends the load, also if the test fails.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn is_clean(image: &Path) {
    tool("qemu-img", ["check", image.to_str().unwrap()]).good();
}

/// Returns the number of kills of a test. `ordinary`: the number without the variable.
pub fn kills(ordinary: u64) -> u64 {
    let given = std::env::var("BLOCKYARD_KILLS");
    given.map_or(ordinary, |text| text.parse().expect("BLOCKYARD_KILLS is a number"))
}

/// Returns a verified load that never flushes, and goes on after a kill.
fn load(server: &Server) -> LoadOptions {
    LoadOptions {
        rw: Pattern::Randrw,
        depth: 16,
        size: Some(SIZE),
        runtime: 3600.0,
        verify: true,
        reconnect: true,
        ..LoadOptions::for_socket(server.socket())
    }
}

/// `latest`: kills come after less than this many writes more than before the work. The work takes
/// the time of about as many writes.
fn killed_during(kind: &str, latest: u64) {
    let kills = kills(KILLS);
    let (mut server, mut rng) = (Server::of_overlay(), Rng::new(kind.len() as u64));
    let load = LoadOptions { flush_every: 200, ..load(&server) };
    let report = std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        let over = Over(&load.over);
        for _ in 0..kills {
            server.daemon.as_ref().unwrap().until_goes_on(16);
            assert!(!client.is_finished(), "the load ended early");
            let before = server.size();
            let answered = server.daemon.as_ref().unwrap().served("write", "");
            let mut work = server.work(kind);
            server.kill_after(answered + rng.below(latest));
            end_of(&mut work, TOOL);
            server.start();
            let after = server.size();
            let grown = (before * 3 / 2).next_multiple_of(512);
            assert!(after == before || kind == "resize" && after == grown, "{before}, {after}");
        }
        // The work succeeds after all.
        server.daemon.as_ref().unwrap().until_goes_on(16);
        assert!(end_of(&mut server.work(kind), TOOL).success(), "{kind}");
        server.daemon.as_ref().unwrap().until_served_more_than(1000, "write", "");
        drop(over);
        client.join().unwrap().unwrap()
    });
    assert_eq!((report.errors, report.first_error, report.reconnects), (0, None, kills));
    assert!(report.verified_blocks > 500, "{} blocks: no load", report.verified_blocks);
    server.daemon.take().unwrap().stop();
    assert_eq!(server.state.journals(), 0, "a journal is left after a clean end");
    server.images.iter().for_each(|image| is_clean(image));
    let base = std::fs::read(server.folder.join("base.img")).unwrap();
    assert!(kind == "commit" || base == base_bytes(SIZE as usize), "the base was changed");
}

#[test]
fn a_kill_during_a_resize_leaves_the_old_size_or_the_new_one() {
    killed_during("resize", 400);
}

#[test]
fn a_kill_during_a_snapshot_leaves_the_image_or_its_overlay() {
    killed_during("snapshot", 300);
}

/// The disk began with an image that has no metadata.
#[test]
fn a_kill_after_a_snapshot_of_a_raw_image_loses_no_answered_write() {
    let mut server = Server::of_raw();
    let load = load(&server);
    let report = std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        let over = Over(&load.over);
        server.daemon.as_ref().unwrap().until_goes_on(16);
        server.snapshot();
        for served in [1000, 500] {
            server.daemon.as_ref().unwrap().until_served_more_than(served, "write", "");
            assert!(server.state.journals() > 0, "the overlay has no journal");
            server.kill();
            server.start();
            server.daemon.as_ref().unwrap().until_goes_on(16);
        }
        drop(over);
        client.join().unwrap().unwrap()
    });
    assert_eq!((report.errors, report.first_error, report.reconnects), (0, None, 2));
    assert!(report.verified_blocks > 500, "{} blocks: no load", report.verified_blocks);
    server.daemon.take().unwrap().stop();
    assert_eq!(server.state.journals(), 0, "a journal is left after a clean end");
    is_clean(server.images.last().unwrap());
}

#[test]
fn a_kill_during_a_commit_loses_no_answered_write() {
    killed_during("commit", 4000);
}

#[test]
fn a_kill_during_a_stream_loses_no_answered_write() {
    killed_during("stream", 1400);
}
