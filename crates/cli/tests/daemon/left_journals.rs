//! Journals that a dead server has left, and a server without journals of its own, or one that
//! looks at an image that it serves.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use blockyard_driver::status;

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, StateFolder, blockyard, until};
use crate::guest::{Guest, pattern};

/// Bytes and sectors of a write: one cluster.
const BLOCK: usize = 64 << 10;
const SECTORS: u64 = 128;
const BLOCKS: u64 = 8;

/// A qcow2 disk, and a state folder for servers that have no other one.
struct Host {
    folder: Folder,
    state: StateFolder,
    image: PathBuf,
}

impl Host {
    fn new() -> Self {
        let (folder, state) = (Folder::new(), StateFolder::new());
        let image = folder.join("a.qcow2");
        blockyard(["image", "create", "-q", image.to_str().unwrap(), "8M"]).good();
        let socket = folder.join("s");
        let text = format!("[[disk]]\nname = \"a\"\nimage = {image:?}\nvhost-user = {socket:?}\n");
        std::fs::write(folder.join("toml"), text).unwrap();
        Host { folder, state, image }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg("--config").arg(self.folder.join("toml"));
        command.arg("--api").arg(self.folder.join("api"));
        command.env("BLOCKYARD_STATE_FOLDER", self.state.path());
        command
    }

    fn start(&self) -> Daemon {
        let mut daemon = Daemon::start(&mut self.command());
        daemon.wait_ready();
        daemon
    }

    /// Starts a server with an unusable state folder: each user can write to it. The kernel may
    /// still have the lock of a killed server.
    fn start_without_journals(&self, unusable: &StateFolder) -> Daemon {
        std::fs::create_dir(unusable.path()).unwrap();
        let everybody = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(unusable.path(), everybody).unwrap();
        let (mut command, mut ready) = (self.command(), None);
        command.arg("--state-folder").arg(unusable.path());
        until("the server is ready", SOON, || {
            let mut daemon = Daemon::start(&mut command);
            let is_ready = daemon.became_ready();
            let log = daemon.log();
            assert!(is_ready || log.contains("is in use by"), "not about a lock: {log}");
            ready = is_ready.then_some(daemon);
            is_ready
        });
        ready.unwrap()
    }

    fn guest(&self) -> Guest {
        Guest::connect(&self.folder.join("s"))
    }

    fn write(&self, guest: &mut Guest) {
        for block in 0..BLOCKS {
            assert_eq!(guest.write(block * SECTORS, &pattern(block, BLOCK)), status::OK);
        }
    }

    fn reads(&self, guest: &mut Guest) {
        for block in 0..BLOCKS {
            let found = guest.read(block * SECTORS, BLOCK).unwrap();
            assert!(found == pattern(block, BLOCK), "block {block}");
        }
    }

    fn ctl(&self, arguments: &[&str]) -> String {
        let api = self.folder.join("api");
        let ctl = ["ctl", "--api", api.to_str().unwrap()];
        blockyard(ctl.iter().copied().chain(arguments.iter().copied())).good()
    }
}

/// Returns a server that has replayed the journal of a killed one, and has no journals.
fn replayed(host: &Host, unusable: &StateFolder) -> Daemon {
    let daemon = host.start();
    let mut guest = host.guest();
    host.write(&mut guest);
    assert_eq!(host.state.journals(), 1);
    daemon.kill();
    drop(guest);
    let daemon = host.start_without_journals(unusable);
    let log = daemon.log();
    assert!(log.contains("other users can write to it"), "{log}");
    assert!(log.contains("replayed the journal"), "{log}");
    let mut guest = host.guest();
    host.reads(&mut guest);
    guest.leave();
    daemon
}

#[test]
fn a_server_without_journals_ends_the_journal_that_it_has_replayed() {
    let (host, unusable) = (Host::new(), StateFolder::new());
    let daemon = replayed(&host, &unusable);
    assert_eq!(host.state.journals(), 1);
    daemon.stop();
    assert_eq!(host.state.journals(), 0);
    let daemon = host.start();
    host.reads(&mut host.guest());
    daemon.stop();
}

/// A removal, a reload, a snapshot and an upgrade close the image while the server goes on.
#[test]
fn each_close_of_an_image_ends_the_journal_that_was_replayed() {
    let overlay = |host: &Host| host.folder.join("top.qcow2").to_str().unwrap().to_string();
    for close in ["remove", "set", "snapshot"] {
        let (host, unusable) = (Host::new(), StateFolder::new());
        let mut daemon = replayed(&host, &unusable);
        match close {
            "remove" => host.ctl(&["remove", "a"]),
            "set" => host.ctl(&["set", "a", "cache=writethrough"]),
            _ => host.ctl(&["snapshot", "a", &overlay(&host)]),
        };
        assert_eq!(host.state.journals(), 0, "{close}");
        if close != "remove" {
            host.reads(&mut host.guest());
        }
        assert!(daemon.running(), "{close}");
        daemon.stop();
    }
}

/// The server looks at the image, which carries the mark of its own journal.
#[test]
fn a_server_does_not_report_its_own_journal() {
    let host = Host::new();
    let daemon = host.start();
    let mut guest = host.guest();
    host.write(&mut guest);
    guest.leave();
    assert_eq!(host.state.journals(), 1);
    let config = std::fs::read_to_string(host.folder.join("toml")).unwrap();
    std::fs::write(host.folder.join("toml"), config + "cache = \"writethrough\"\n").unwrap();
    let planned = host.ctl(&["reload", "--dry-run"]);
    assert!(planned.contains("cache"), "{planned}");
    host.ctl(&["reload"]);
    let mut guest = host.guest();
    host.reads(&mut guest);
    host.write(&mut guest);
    guest.leave();
    host.ctl(&["set", "a", "cache=none"]);
    host.reads(&mut host.guest());
    let log = daemon.stop();
    assert!(log.contains("writethrough -> none"), "{log}");
    assert!(!log.contains("a server has the image in use"), "{log}");
    assert!(host.image.exists());
}
