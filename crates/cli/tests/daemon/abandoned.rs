//! `abandon-overlay`: a start gives up the overlay of an earlier snapshot, and never that of a
//! later one. Snapshots of raw images into other folders.

use std::path::Path;
use std::process::Command;

use blockyard_driver::status;

use crate::common::{BLOCKYARD, Daemon, Finished, Folder, StateFolder, blockyard};
use crate::guest::{Guest, pattern};

const BLOCK: usize = 4096;

/// A folder with the raw image `base.img`, a configuration and a folder for its changes.
struct Host {
    folder: Folder,
    state: StateFolder,
}

impl Host {
    /// `keys`: those of the disk `a`, besides its name and its socket.
    fn new(keys: &str) -> Self {
        let host = Host { folder: Folder::new(), state: StateFolder::new() };
        host.folder.image("base.img", 1 << 20);
        std::fs::create_dir(host.folder.join("conf.d")).unwrap();
        host.configure(keys);
        host
    }

    fn configure(&self, keys: &str) {
        let socket = self.file("s");
        let text = format!("[[disk]]\nname = \"a\"\nvhost-user = {socket:?}\n{keys}\n");
        std::fs::write(self.folder.join("toml"), text).unwrap();
    }

    fn file(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().into()
    }

    fn command(&self) -> Command {
        let mut command = Command::new(BLOCKYARD);
        command.args(["serve", "--config", &self.file("toml"), "--api", &self.file("api")]);
        command.args(["--allow-folder", &self.file(".")]);
        command.arg("--state-folder").arg(self.state.path());
        command
    }

    fn start(&self) -> Daemon {
        let mut daemon = Daemon::start(&mut self.command());
        daemon.wait_ready();
        daemon
    }

    fn ctl(&self, arguments: &[&str]) -> Finished {
        blockyard([&["ctl", "--api", &self.file("api")], arguments].concat())
    }

    fn guest(&self) -> Guest {
        Guest::connect(&self.folder.join("s"))
    }

    /// Writes a block and flushes it.
    fn write(&self, block: u64) {
        let mut guest = self.guest();
        assert_eq!(guest.write(block * 8, &pattern(block, BLOCK)), status::OK);
        assert_eq!(guest.flush(), status::OK);
        guest.leave();
    }

    #[track_caller]
    fn has(&self, blocks: std::ops::Range<u64>) {
        let mut guest = self.guest();
        for block in blocks {
            assert!(guest.read(block * 8, BLOCK).unwrap() == pattern(block, BLOCK), "{block}");
        }
        guest.leave();
    }
}

/// Returns the keys of a disk with this image.
fn image(path: &str) -> String {
    format!("image = {path:?}\n")
}

#[track_caller]
fn refused(done: &Finished, parts: &[&str]) {
    assert!(!done.status.success(), "{}", done.out);
    for part in parts {
        assert!(done.err.contains(part), "{part:?} is not in it: {}", done.err);
    }
}

#[test]
fn a_disk_that_abandons_overlays_gets_one_only_if_the_configuration_names_it() {
    let host = Host::new("");
    host.configure(&(image(&host.file("base.img")) + "abandon-overlay = true"));
    let daemon = host.start();
    host.write(0);
    let overlay = host.file("top.qcow2");
    let done = host.ctl(&["snapshot", "a", &overlay]);
    refused(&done, &["abandon-overlay", "would be lost", "--persist"]);
    let fork =
        [&format!("image={}", host.file("new.qcow2")), &format!("vhost-user={}", host.file("n"))];
    let done = host.ctl(&["fork", "a", &overlay, "name=b", fork[0], fork[1]]);
    refused(&done, &["abandon-overlay", "would be lost"]);
    assert!(!Path::new(&overlay).exists());

    host.ctl(&["snapshot", "--persist", "a", &overlay]).good();
    let kept = std::fs::read_to_string(host.folder.join("conf.d/90-ctl-a.toml")).unwrap();
    assert!(kept.contains("top.qcow2") && !kept.contains("abandon-overlay"), "{kept}");
    host.write(1);
    // The disk has the key no more, so the next overlay needs no change of the configuration now.
    host.ctl(&["snapshot", "a", &host.file("next.qcow2")]).good();
    host.write(2);
    daemon.stop();
    let (mut command, next) = (host.command(), host.file("next.qcow2"));
    let mut daemon = Daemon::start(&mut command);
    assert!(!daemon.became_ready(), "it serves the image below the overlay");
    assert!(daemon.log().contains(&format!("has put overlay {next} on it")), "{}", daemon.log());
    std::fs::remove_file(host.folder.join("conf.d/90-ctl-a.toml")).unwrap();
    host.configure(&image(&next));
    let daemon = host.start();
    host.has(0..3);
    daemon.stop();
}

#[test]
fn an_abandoned_overlay_is_not_served_before_its_base_is_named_again() {
    let host = Host::new("");
    let (base, overlay) = (host.file("base.img"), host.file("top.qcow2"));
    host.configure(&image(&base));
    let daemon = host.start();
    host.write(0);
    host.ctl(&["snapshot", "a", &overlay]).good();
    host.write(1);
    daemon.stop();
    host.configure(&(image(&base) + "abandon-overlay = true"));
    let daemon = host.start();
    daemon.wait_log("is abandoned");
    host.write(2);
    daemon.stop();

    host.configure(&image(&overlay));
    let config = host.file("toml");
    let checked = blockyard(["serve", "--check-config", "--config", &config]);
    let parts = ["top.qcow2", "was abandoned", "base.img was written to without it"];
    refused(&checked, &parts);
    let mut daemon = Daemon::start(&mut host.command());
    assert!(!daemon.became_ready(), "it serves a mixture");
    assert!(daemon.log().contains("was abandoned"), "{}", daemon.log());
    for command in [&["commit"][..], &["rebase", "-b", ""], &["resize", "--shrink"]] {
        let size = if command[0] == "resize" { &["2M"][..] } else { &[] };
        refused(&blockyard([&["image"], command, &[&overlay], size].concat()), &parts);
    }
    // Commands that only read say it, and show the overlay as it is.
    let copied = blockyard(["image", "convert", "-O", "raw", &overlay, &host.file("copy")]);
    assert!(copied.err.contains("was abandoned"), "{}", copied.err);
    copied.good();
    let copy = std::fs::read(host.folder.join("copy")).unwrap();
    assert!(copy[BLOCK..][..BLOCK] == pattern(1, BLOCK));
    blockyard(["image", "rebase", "-u", "-F", "raw", "-b", "base.img", &overlay]).good();
    let daemon = host.start();
    host.has(0..3);
    daemon.stop();
}

#[test]
fn a_raw_image_has_its_overlay_in_another_folder_if_the_disk_allows_that_of_the_image() {
    let host = Host::new("");
    for folder in ["images", "full"] {
        std::fs::create_dir(host.folder.join(folder)).unwrap();
    }
    std::fs::rename(host.folder.join("base.img"), host.folder.join("full/base.img")).unwrap();
    let (base, overlay) = (host.file("full/base.img"), host.file("images/top.qcow2"));
    host.configure(&image(&base));
    let daemon = host.start();
    let done = host.ctl(&["snapshot", "--persist", "a", &overlay]);
    refused(&done, &["base.img", "outside the allowed folders", "key backing-folders"]);
    assert!(!Path::new(&overlay).exists());
    daemon.stop();
    let folders = format!("backing-folders = [{:?}]\n", host.file("full"));
    host.configure(&(image(&base) + &folders));
    let daemon = host.start();
    host.write(0);
    host.ctl(&["snapshot", "--persist", "a", &overlay]).good();
    host.write(1);
    let kept = std::fs::read_to_string(host.folder.join("conf.d/90-ctl-a.toml")).unwrap();
    assert!(kept.contains("images/top.qcow2") && kept.contains("backing-folders"), "{kept}");
    daemon.stop();
    let daemon = host.start();
    host.has(0..2);
    daemon.stop();
}

/// The disk must allow the server. An overlay of an export cannot be committed.
#[test]
fn a_remote_raw_image_gets_an_overlay_that_is_streamed_but_not_committed() {
    let (host, remote) = (Host::new(""), Folder::new());
    let nbd = remote.join("n");
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg(remote.image("far.img", 1 << 20));
    command.arg("--nbd").arg(format!("unix:{}", nbd.display()));
    let mut server = Daemon::start(&mut command);
    server.wait_ready();
    let uri = format!("nbd+unix:///far.img?socket={}", nbd.display());
    host.configure(&image(&uri));
    let overlay = host.file("top.qcow2");
    let snapshot = ["snapshot", "--persist", "--unrecorded", "a", &overlay];
    let daemon = host.start();
    let done = host.ctl(&snapshot);
    let allowed = format!("nbd+unix:///?socket={}", nbd.display());
    refused(&done, &["is not allowed", &allowed, "key backing-folders"]);
    assert!(!done.err.contains("into nbd"), "{}", done.err);
    let done = host.ctl(&["stream", "a"]);
    refused(&done, &["far.img", "has no backing file"]);
    daemon.stop();
    host.configure(&format!(
        "{}backing-folders = [{allowed:?}, {:?}]",
        image(&uri),
        host.file(".")
    ));
    let daemon = host.start();
    host.write(0);
    host.ctl(&snapshot).good();
    host.write(1);
    daemon.stop();
    let daemon = host.start();
    let done = host.ctl(&["commit", "a"]);
    refused(&done, &["a commit needs a file of this host: use stream"]);
    host.ctl(&["stream", "a"]).good();
    host.has(0..2);
    daemon.stop();
    server.stop();
}
