//! SIGHUP: disks are added, removed and changed while others are in use. Guests are notified of new
//! sizes.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::connection::PROTOCOL;
use blockyard_driver::{Plan, feature, status};
use rustix::fs::{CWD, Mode};
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use crate::common::{
    BLOCKYARD, Daemon, Folder, SOON, Signal, is_of_watchdog, until, until_disconnected,
};
use crate::guest::{Guest, pattern};

/// A daemon with a configuration file.
struct Yard {
    daemon: Daemon,
    folder: Folder,
}

impl Yard {
    fn start(disks: &[(&str, &str)]) -> Self {
        let folder = Folder::new();
        configure(&folder, disks);
        let mut daemon = Daemon::start(
            Command::new(BLOCKYARD).arg("serve").arg("--config").arg(folder.join("toml")),
        );
        daemon.wait_ready();
        // What the server logs at its start may arrive later.
        for (disk, _) in disks {
            daemon.wait_log(&format!("disk={disk:?}"));
        }
        Yard { daemon, folder }
    }

    /// Writes the configuration file, reloads it, waits until the log has `expected`, and returns
    /// the new log lines.
    #[track_caller]
    fn reload(&self, disks: &[(&str, &str)], expected: &str) -> String {
        configure(&self.folder, disks);
        self.hangup(expected)
    }

    #[track_caller]
    fn hangup(&self, expected: &str) -> String {
        let from = self.daemon.log().len();
        self.daemon.signal(Signal::HUP);
        self.daemon.wait_log_after(from, expected);
        // The last log line of each reload contains "reloaded: ", or "not reloaded: " after an
        // error.
        self.daemon.wait_log_after(from, "reloaded: ")
    }

    fn socket(&self, disk: &str) -> PathBuf {
        self.folder.join(disk).with_extension("s")
    }

    fn guest(&self, disk: &str) -> Guest {
        Guest::connect(&self.socket(disk))
    }
}

/// Returns the number of log lines, without those about front ends and final statistics, whose
/// order is not fixed.
fn changes(log: &str) -> usize {
    let is_other =
        |l: &str| l.contains("front end") || l.contains(": queue time") || is_of_watchdog(l);
    log.lines().filter(|l| !is_other(l)).count()
}

/// Writes the configuration file. Each disk has a name, an image and a socket of that name, and
/// additional lines.
fn configure(folder: &Path, disks: &[(&str, &str)]) {
    let mut text = String::new();
    for (name, more) in disks {
        let image = folder.join(name).with_extension("img");
        if !image.exists() {
            std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        }
        let socket = folder.join(name).with_extension("s");
        text += &format!(
            "[[disk]]\nname = \"{name}\"\nvhost-user = \"{}\"\n{more}\n",
            socket.display()
        );
        if !more.contains("image =") {
            text += &format!("image = \"{}\"\n", image.display());
        }
    }
    std::fs::write(folder.join("toml"), text).unwrap();
}

/// The disk would open again without its data.
#[test]
fn a_disk_in_memory_stays_open() {
    let yard = Yard::start(&[("memory", "image = \"ram:1M\"")]);
    let mut guest = yard.guest("memory");
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    let log = yard.reload(&[("memory", "image = \"ram:1M\"\nqueues = 2")], "would be lost");
    assert!(log.contains("changed 0") && log.contains("failed 1"), "{log}");
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    guest.leave();
    yard.daemon.stop();
}

#[test]
fn a_reload_adds_removes_and_changes_disks_around_a_busy_one() {
    let yard = Yard::start(&[("busy", ""), ("other", "")]);
    let load = LoadOptions {
        rw: Pattern::Randrw,
        runtime: 600.0,
        verify: true,
        ..LoadOptions::for_socket(yard.socket("busy"))
    };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        yard.daemon.until_served("write", "");
        let mut other = yard.guest("other");
        assert_eq!(other.write(0, &pattern(1, 4096)), status::OK);

        yard.reload(&[("busy", ""), ("other", ""), ("new", "")], "serving");
        assert_eq!(yard.guest("new").write(0, &pattern(2, 512)), status::OK);
        assert_eq!(other.read(0, 4096).unwrap(), pattern(1, 4096), "its connection is not touched");

        let log = yard.reload(
            &[("new", "queues = 3"), ("busy", ""), ("other", "read-only = true")],
            "other.img on",
        );
        assert!(!log.contains("busy"), "{log}");
        until_disconnected(other.session.link.connection.socket());
        let mut other = yard.guest("other");
        assert!(other.has(feature::READ_ONLY));
        assert_eq!(other.read(0, 4096).unwrap(), pattern(1, 4096));
        assert_eq!(yard.guest("new").session.link.config.num_queues, 3);

        yard.reload(&[("busy", ""), ("other", "read-only = true")], "closing it");
        until("its socket is gone", SOON, || !yard.socket("new").exists());
        assert_eq!(other.read(0, 4096).unwrap(), pattern(1, 4096));

        // A reload of the same file changes nothing.
        let log =
            yard.reload(&[("busy", ""), ("other", "read-only = true"), ("last", "")], "reloaded: ");
        assert_eq!(changes(&log), 2, "{log}");
        assert!(log.contains("reloaded: disks added 1, changed 0, removed 0, failed 0"), "{log}");
        assert!(!client.is_finished(), "the load went on meanwhile");
        load.over.store(true, Ordering::Relaxed);
        let report = client.join().unwrap().unwrap();
        assert_eq!((report.errors, report.first_error, report.reconnects), (0, None, 0));
    });
    yard.daemon.stop();
}

#[test]
fn a_bad_file_changes_nothing() {
    let yard = Yard::start(&[("a", ""), ("b", "")]);
    let (mut a, mut b) = (yard.guest("a"), yard.guest("b"));
    for (disks, expected) in [
        (&[("a", "cache = \"fast\"")][..], "line 4: cache: cache mode \"fast\" is not known"),
        (&[("a", ""), ("a", "")], "two disks are called \"a\""),
        (&[("a", "serial = \"123456789012345678901\"")], "has 21 bytes"),
    ] {
        let log = yard.reload(disks, expected);
        assert!(
            changes(&log) == 1 && log.contains("ERROR") && log.contains("not reloaded: "),
            "{log}"
        );
    }
    std::fs::remove_file(yard.folder.join("toml")).unwrap();
    let log = yard.hangup("cannot read it");
    assert!(log.contains("not reloaded: ") && log.contains("No such file"), "{log}");
    // The server does not wait for a writer of the pipe, so it can be stopped.
    rustix::fs::mkfifoat(CWD, yard.folder.join("toml"), Mode::RWXU).unwrap();
    let log = yard.hangup("it is a pipe");
    assert!(log.contains("not reloaded: "), "{log}");
    assert_eq!(
        (a.write(0, &pattern(1, 512)), b.write(0, &pattern(1, 512))),
        (status::OK, status::OK)
    );
    yard.daemon.stop();
}

#[test]
fn a_disk_whose_new_configuration_fails_keeps_the_old_one() {
    let yard = Yard::start(&[("a", ""), ("b", "")]);
    let mut b = yard.guest("b");
    let log = yard.reload(
        &[("a", "image = \"/not/there\""), ("b", ""), ("c", "image = \"/nor/there\"")],
        "/nor/there",
    );
    assert!(
        log.contains("image /not/there: there is no such file")
            && log.contains("the disk stays as it is"),
        "{log}"
    );
    assert_eq!(yard.guest("a").write(0, &pattern(1, 512)), status::OK);
    assert_eq!(b.write(0, &pattern(1, 512)), status::OK);
    assert!(!yard.socket("c").exists());
    // The next reload succeeds when the image exists.
    yard.reload(&[("a", "queues = 2"), ("b", "")], "a.img on");
    assert_eq!(yard.guest("a").session.link.config.num_queues, 2);
    yard.daemon.stop();
}

#[test]
fn a_reload_logs_every_change() {
    let mut yard = Yard::start(&[("a", "queues = 2"), ("b", "iops = 500"), ("c", ""), ("d", "")]);
    let file = |start: &str| {
        let path = yard.folder.join("toml");
        let disks = std::fs::read_to_string(&path).unwrap();
        std::fs::write(path, format!("{start}{disks}")).unwrap();
    };
    configure(
        &yard.folder,
        &[
            ("a", ""),
            ("b", "iops = \"2k\"\nweight = 300"),
            ("d", ""),
            ("e", "image = \"/not/there\""),
        ],
    );
    file("reactors = 2\nfair-share = false\n");
    let log = yard.hangup("reloaded: ");
    for line in [
        "not applied: reactors: 1 -> 2: restart or upgrade the server",
        "not applied: fair-share: true -> false: restart or upgrade the server",
        "changed: queues: 2 -> 1: closing and opening it; its clients are disconnected disk=\"a\"",
        "changed without closing it: iops: 500 -> \"2k\", weight: 100 -> 300 disk=\"b\"",
        "removed from the configuration: closing it disk=\"c\"",
        "the disk cannot be served as configured: image /not/there: there is no such file",
        "the disk is not served disk=\"e\"",
        "reloaded: disks added 0, changed 2, removed 1, failed 1",
    ] {
        assert!(log.contains(line), "{line:?} is not in it: {log}");
    }
    assert!(!log.contains("disk=\"d\""), "{log}");
    // Keys that are not applied are logged at each reload, and nothing else.
    let log = yard.hangup("reloaded: disks added 0, changed 0, removed 0");
    assert!(log.contains("not applied: reactors: 1 -> 2") && !log.contains(": closing"), "{log}");
    assert!(yard.daemon.terminate().success());
}

/// Connects a guest with a back channel.
fn connect_with_back_channel(socket: &Path) -> (Guest, UnixStream) {
    let protocol = PROTOCOL | VhostUserProtocolFeatures::BACKEND_REQ;
    let guest = Guest::with(socket, &Plan { protocol, ..Plan::default() });
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(SOON)).unwrap();
    // VHOST_USER_SET_BACKEND_REQ_FD
    guest.session.link.connection.message(21, &[], &[theirs.as_fd()]).unwrap();
    (guest, ours)
}

/// Takes a CONFIG_CHANGE message and acknowledges it.
#[track_caller]
fn take_config_change(mut channel: &UnixStream) {
    let mut message = [0; 12];
    channel.read_exact(&mut message).expect("the change is announced");
    let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
    // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1 and need_reply, no payload.
    assert_eq!((word(0), word(4), word(8)), (2, 9, 0));
    let words = [2u32, 5, 8, 0, 0];
    channel.write_all(&words.map(u32::to_le_bytes).concat()).unwrap();
}

#[test]
fn a_guest_is_notified_when_its_image_grows_or_shrinks() {
    for mode in ["none", "writeback"] {
        let folder = Folder::new();
        let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
        let daemon = Daemon::serve(&image, &socket, &["--cache", mode]);
        let (mut guest, channel) = connect_with_back_channel(&socket);
        assert_eq!(guest.read(2048, 512), Err(status::IOERR));
        // The first length is 3 MiB and a part of a sector.
        for (len, sectors) in [((3 << 20) + 77, 6145), (2 << 20, 4096)] {
            // An unchanged size causes no notification: the next one tells the new size.
            daemon.signal(Signal::HUP);
            daemon.until_signals_are_taken();
            std::fs::File::options().write(true).open(&image).unwrap().set_len(len).unwrap();
            daemon.signal(Signal::HUP);
            take_config_change(&channel);
            assert_eq!(guest.session.link.connection.config().unwrap().capacity_sectors, sectors);
            assert_eq!(guest.write(sectors - 1, &pattern(len, 512)), status::OK);
            assert_eq!(guest.read(sectors - 1, 512).unwrap(), pattern(len, 512));
            assert_eq!(guest.read(sectors, 512), Err(status::IOERR));
            assert_eq!(guest.read(0, 512).unwrap(), [0; 512]);
        }
        assert_eq!(guest.flush(), status::OK);
        drop(guest);
        // A later guest reads the new size. The server does not wait for a guest without a back
        // channel. The log is taken before the size changes: the reload of an earlier signal may
        // still run, and may find the change.
        let from = daemon.log().len();
        std::fs::File::options().write(true).open(&image).unwrap().set_len(4 << 20).unwrap();
        let guest = Guest::connect(&socket);
        daemon.signal(Signal::HUP);
        daemon.wait_log_after(from, "the image has a new size");
        drop(guest);
        assert_eq!(Guest::connect(&socket).capacity(), 4 << 20);
        daemon.stop();
    }
}

#[test]
fn a_front_end_that_does_not_acknowledge_blocks_nothing() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    let (mut guest, _channel) = connect_with_back_channel(&socket);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    daemon.signal(Signal::HUP);
    assert_eq!(guest.write(0, &pattern(1, 512)), status::OK);
    daemon.wait_log("cannot notify the front end of the new size");
    assert_eq!(guest.session.link.connection.config().unwrap().capacity_sectors, 4096);
    daemon.stop();
}

/// A wrong address is found before the disk is closed, and a right one is bound before that.
#[test]
fn a_disk_whose_new_address_fails_keeps_its_guest() {
    let yard = Yard::start(&[("a", ""), ("b", "")]);
    let mut a = yard.guest("a");
    assert_eq!(a.write(0, &pattern(1, 4096)), status::OK);
    let used = yard.folder.join("used");
    let _server = std::os::unix::net::UnixListener::bind(&used).unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let nowhere = yard.folder.join("nowhere/s").display().to_string();
    let with_nbd = |address: &str| format!("nbd = \"{address}\"");
    for (more, why) in [
        (with_nbd(&format!("unix:{nowhere}")), "does not exist: create it first"),
        (with_nbd(&format!("unix:{}", used.display())), "another server listens on it"),
        (with_nbd(&format!("tcp:127.0.0.1:{port}")), "cannot listen on it: Address already in use"),
    ] {
        let log = yard.reload(&[("a", &more), ("b", "")], why);
        assert!(log.contains("the disk stays as it is") && log.contains("failed 1"), "{log}");
        assert_eq!(a.read(0, 4096).unwrap(), pattern(1, 4096), "its guest stays");
    }
    let free = yard.folder.join("free");
    let log =
        yard.reload(&[("a", &with_nbd(&format!("unix:{}", free.display()))), ("b", "")], "on");
    assert!(log.contains("changed 1") && log.contains("failed 0"), "{log}");
    until_disconnected(a.session.link.connection.socket());
    assert!(free.exists());
    yard.daemon.stop();
    assert!(!free.exists());
}
