//! Open images with paths that lead to another file, and disks that cannot be opened again.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use blockyard_driver::status;
use blockyard_ring::host::{self, Lock};
use rustix::process::{Pid, kill_process};

use crate::common::{Daemon, SOON, Signal, blockyard, until};
use crate::guest::Guest;
use crate::handover::{Case, ctl};
use crate::holder::{Keeper, keep_command};

const SIZE: u64 = 1 << 20;
const REPLACED: &str = "another file is there now";

fn works(guest: &mut Guest, fill: u8) {
    assert_eq!(guest.write(8, &[fill; 4096]), status::OK);
    assert_eq!(guest.read(8, 4096).unwrap(), [fill; 4096]);
}

/// Disks `a` and `b`. The image of `a` is a link, which leads to `one.img`.
struct Disks(Case);

impl Disks {
    /// `keys`: more keys of `a`.
    fn new(keys: &str) -> Self {
        let disks = Disks(Case::new());
        for image in ["one.img", "two.img", "b.img"] {
            disks.0.folder.image(image, SIZE);
        }
        disks.lead_to("one.img");
        let entry = |name: &str, keys: &str| {
            let [image, socket] = [".img", ".s"].map(|end| disks.path(&format!("{name}{end}")));
            format!(
                "[[disk]]\nname = \"{name}\"\nimage = {image:?}\nvhost-user = {socket:?}\n{keys}"
            )
        };
        let text = entry("a", keys) + &entry("b", "");
        std::fs::create_dir(disks.path("conf.d")).unwrap();
        std::fs::write(disks.path("toml"), text).unwrap();
        disks
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.folder.join(name)
    }

    /// Switches the link of `a`, as `ln -sfn` does.
    fn lead_to(&self, image: &str) {
        symlink(self.path(image), self.path("new")).unwrap();
        std::fs::rename(self.path("new"), self.path("a.img")).unwrap();
    }

    fn serve(&self) -> Daemon {
        let mut daemon = Daemon::start(&mut self.0.configured(&self.path("toml")));
        daemon.wait_ready();
        daemon
    }

    fn keep(&self) -> Daemon {
        keep_command(&self.0, Keeper::Holder, &mut self.0.configured(&self.path("toml")))
    }

    fn guest(&self, disk: &str) -> Guest {
        Guest::connect(&self.path(&format!("{disk}.s")))
    }

    #[track_caller]
    fn refuses(&self, arguments: &[&str], why: &str) {
        let done = ctl(&self.0, arguments);
        assert!(!done.status.success(), "{arguments:?} succeeded");
        assert!(done.err.contains(why), "{arguments:?}: {}", done.err);
    }

    /// Kills the server of a holder. `between` runs before the next server starts.
    fn kill(&self, holder: &Daemon, between: impl FnOnce()) {
        let mut server = None;
        until("the server runs", SOON, || {
            server = holder.kept();
            server.is_some()
        });
        holder.signal(Signal::STOP);
        kill_process(Pid::from_raw(server.unwrap()).unwrap(), Signal::KILL).unwrap();
        between();
        holder.signal(Signal::CONT);
    }

    fn status(&self) -> String {
        ctl(&self.0, &["status", "--json"]).out
    }
}

#[test]
fn a_disk_with_a_path_to_another_file_is_neither_changed_nor_opened_again() {
    let disks = Disks::new("");
    let daemon = disks.serve();
    let mut guest = disks.guest("a");
    works(&mut guest, 1);
    disks.lead_to("two.img");
    let overlay = disks.path("o.qcow2");
    let overlay = overlay.to_str().unwrap();
    disks.refuses(&["snapshot", "a", overlay], REPLACED);
    assert!(!disks.path("o.qcow2").exists());
    disks.refuses(&["resize", "a", "2M"], REPLACED);
    disks.refuses(&["set", "a", "cache=writethrough", "--force"], REPLACED);
    disks.refuses(&["upgrade"], REPLACED);
    let text = std::fs::read_to_string(disks.path("toml")).unwrap();
    let changed = text.replacen("vhost-user", "cache = \"writethrough\"\nvhost-user", 1);
    std::fs::write(disks.path("toml"), changed).unwrap();
    let reloaded = ctl(&disks.0, &["reload"]);
    assert!(format!("{}{}", reloaded.out, reloaded.err).contains(REPLACED), "{}", reloaded.err);
    works(&mut guest, 2);
    let len = |name: &str| std::fs::metadata(disks.path(name)).unwrap().len();
    assert_eq!(["one.img", "two.img"].map(len), [SIZE, SIZE]);
    // A backup reads the open file.
    let copy = disks.path("copy.qcow2");
    ctl(&disks.0, &["backup", "a", copy.to_str().unwrap()]).good();
    disks.lead_to("one.img");
    ctl(&disks.0, &["resize", "a", "2M"]).good();
    ctl(&disks.0, &["snapshot", "a", overlay]).good();
    works(&mut guest, 3);
    guest.leave();
    daemon.stop();
}

/// The images below belong to the disk, too.
#[test]
fn a_backing_image_that_is_another_file_is_found() {
    let case = Case::new();
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    works(&mut guest, 1);
    let [base, other] = ["base.img", "other.img"].map(|name| case.folder.join(name));
    std::fs::copy(&base, &other).unwrap();
    std::fs::rename(&other, &base).unwrap();
    let overlay = case.folder.join("o.qcow2");
    for call in [
        &["snapshot", "disk.qcow2", overlay.to_str().unwrap()][..],
        &["set", "disk.qcow2", "cache=writethrough", "--force"],
        &["upgrade"],
    ] {
        let done = ctl(&case, call);
        assert!(!done.status.success() && done.err.contains(REPLACED), "{call:?}: {}", done.err);
    }
    assert!(!overlay.exists());
    works(&mut guest, 2);
    guest.leave();
    daemon.stop();
}

/// The session waits until its file is back.
#[test]
fn a_kept_session_is_not_continued_on_another_file() {
    let disks = Disks::new("");
    let holder = disks.keep();
    let mut guests = ["a", "b"].map(|disk| disks.guest(disk));
    guests.iter_mut().for_each(|guest| works(guest, 1));
    disks.kill(&holder, || disks.lead_to("two.img"));
    holder.wait_log("the images are other files than those that the front end has used");
    until("the status has the reason", SOON, || disks.status().contains("are other files"));
    works(&mut guests[1], 2);
    disks.lead_to("one.img");
    ctl(&disks.0, &["reload"]).good();
    guests.iter_mut().for_each(|guest| works(guest, 3));
    assert!(!disks.status().contains("are other files"));
    let two = std::fs::read(disks.path("two.img")).unwrap();
    assert!(two.iter().all(|byte| *byte == 0), "the guest has written to the other file");
    guests.into_iter().for_each(Guest::leave);
    holder.stop();
}

/// The server notes for the next one that the images have changed.
#[test]
fn a_kept_session_goes_on_after_a_snapshot_and_a_stream() {
    let disks = Disks::new("");
    let holder = disks.keep();
    let mut guest = disks.guest("a");
    works(&mut guest, 1);
    let overlay = disks.path("o.qcow2");
    let overlay = overlay.to_str().unwrap();
    ctl(&disks.0, &["snapshot", "--persist", "a", overlay]).good();
    works(&mut guest, 2);
    ctl(&disks.0, &["stream", "a"]).good();
    works(&mut guest, 3);
    holder.kill_kept();
    works(&mut guest, 4);
    guest.leave();
    holder.stop();
}

#[test]
fn an_upgrade_keeps_an_unused_disk_that_would_not_open_again() {
    let disks = Disks::new("activation = \"rings\"\n");
    let daemon = disks.serve();
    std::fs::rename(disks.path("one.img"), disks.path("moved.img")).unwrap();
    disks.refuses(&["upgrade"], "its image cannot be opened again");
    std::fs::rename(disks.path("moved.img"), disks.path("one.img")).unwrap();
    let mut guest = disks.guest("a");
    works(&mut guest, 1);
    guest.leave();
    let log = daemon.stop();
    assert!(!log.contains("cannot serve it again"), "{log}");
}

#[test]
fn after_a_crash_a_used_disk_with_rings_says_that_its_image_is_locked() {
    let disks = Disks::new("activation = \"rings\"\n");
    let holder = disks.keep();
    let mut guests = ["a", "b"].map(|disk| disks.guest(disk));
    guests.iter_mut().for_each(|guest| works(guest, 1));
    let image = File::options().read(true).write(true).open(disks.path("one.img")).unwrap();
    disks.kill(&holder, || {
        until("the image is locked", SOON, || host::lock(&image, Lock::Exclusive).unwrap());
    });
    holder.wait_log("disk \"a\" waits for the lock of its image");
    until("the status has the reason", SOON, || disks.status().contains("waits for the lock"));
    works(&mut guests[1], 2);
    let shown = ctl(&disks.0, &["show", "a"]).good();
    assert!(shown.contains("opening"), "{shown}");
    drop(image);
    // Its connection has waited.
    works(&mut guests[0], 3);
    until("the status has no reason", SOON, || !disks.status().contains("waits for the lock"));
    guests.into_iter().for_each(Guest::leave);
    let log = holder.stop();
    assert!(!log.contains("still opening"), "{log}");
}

/// The overlay of a snapshot without `--persist` is not the image of the configuration.
#[test]
fn an_upgrade_keeps_an_unused_disk_with_an_overlay() {
    let disks = Disks::new("activation = \"rings\"\n");
    let daemon = disks.serve();
    let mut guest = disks.guest("a");
    works(&mut guest, 1);
    let overlay = disks.path("o.qcow2");
    ctl(&disks.0, &["snapshot", "a", overlay.to_str().unwrap()]).good();
    guest.leave();
    daemon.wait_log("deactivated");
    disks.refuses(&["upgrade"], "since a snapshot its image is");
    let mut guest = disks.guest("a");
    assert_eq!(guest.read(8, 4096).unwrap(), [1; 4096]);
    guest.leave();
    daemon.stop();
    blockyard(["image", "check", overlay.to_str().unwrap()]).good();
}
