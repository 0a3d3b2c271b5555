//! systemd socket activation and notification (sd_listen_fds(3), sd_notify(3)).

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Command, Stdio};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, Signal, TOOL, run};
use crate::guest::Guest;

/// The shell moves its standard input and output, which are sockets, to descriptors 3 and 4, sets
/// the variables of systemd, and executes the daemon. This keeps the process ID.
const AS_SYSTEMD: &str =
    "exec 3<&0 4>&1 1>&2 </dev/null; LISTEN_PID=$$ LISTEN_FDS=2 exec \"$0\" \"$@\"";

struct Manager {
    folder: Folder,
    notified: UnixDatagram,
}

impl Manager {
    fn new() -> Self {
        let folder = Folder::new();
        let notified = UnixDatagram::bind(folder.join("notify")).unwrap();
        notified.set_read_timeout(Some(SOON)).unwrap();
        Manager { folder, notified }
    }

    fn listener(&self, name: &str) -> OwnedFd {
        UnixListener::bind(self.folder.join(name)).unwrap().into()
    }

    /// Returns `blockyard ARGS` with the listening sockets `first` and `second` as descriptors 3
    /// and 4.
    fn command(&self, names: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", AS_SYSTEMD, BLOCKYARD]).env("LISTEN_FDNAMES", names);
        command.env("NOTIFY_SOCKET", self.folder.join("notify"));
        command
            .stdin(Stdio::from(self.listener("first")))
            .stdout(Stdio::from(self.listener("second")));
        command
    }

    #[track_caller]
    fn next(&self) -> String {
        let mut bytes = [0; 256];
        let len = loop {
            match self.notified.recv(&mut bytes) {
                // A stopped process that continues, because the socket has a limit for waits.
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                received => break received.expect("the service manager is notified"),
            }
        };
        String::from_utf8_lossy(&bytes[..len]).trim().to_string()
    }

    /// Returns the capacity of the disk on a socket, in bytes.
    fn capacity(&self, name: &str) -> u64 {
        Guest::connect(&self.folder.join(name)).capacity()
    }
}

#[test]
fn sockets_are_found_by_name_and_the_manager_is_notified_of_start_and_stop() {
    let manager = Manager::new();
    let config = manager.folder.join("toml");
    let disk = |image: &str, fd: &str| {
        format!("[[disk]]\nimage = \"{image}\"\nvhost-user = \"fd:{fd}\"\n")
    };
    std::fs::write(&config, disk("null:1M", "data") + &disk("null:2M", "root")).unwrap();
    let mut command = manager.command("root:data");
    let mut daemon = Daemon::start_with(
        command.arg("serve").arg("--config").arg(&config).stderr(Stdio::piped()),
    );
    assert_eq!(manager.next(), "READY=1");
    assert_eq!((manager.capacity("first"), manager.capacity("second")), (2 << 20, 1 << 20));
    // Front ends connect and disconnect. The socket keeps listening.
    assert_eq!(manager.capacity("first"), 2 << 20);
    daemon.signal(Signal::TERM);
    assert_eq!(manager.next(), "STOPPING=1");
    assert!(daemon.ended(SOON).success());
    assert!(manager.folder.join("first").exists(), "the socket is systemd's");
}

#[test]
fn an_idle_server_reports_to_the_watchdog_of_the_manager() {
    let manager = Manager::new();
    let mut command = Command::new(BLOCKYARD);
    command.args(["serve", "null:1M", "--vhost-user"]).arg(manager.folder.join("s"));
    command.env("NOTIFY_SOCKET", manager.folder.join("notify")).env("WATCHDOG_USEC", "200000");
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    let reports = std::iter::repeat_with(|| manager.next()).filter(|text| text == "WATCHDOG=1");
    assert_eq!(reports.take(5).count(), 5);
    daemon.stop();
}

/// The next server has the environment of the first one, which names the first one's process.
#[test]
fn the_next_server_reports_to_the_watchdog_too() {
    let manager = Manager::new();
    let as_main = "WATCHDOG_PID=$$ exec \"$0\" \"$@\"";
    let api = manager.folder.join("api");
    let mut command = Command::new("sh");
    command.args(["-c", as_main, BLOCKYARD, "serve"]).arg(manager.folder.image("disk", 1 << 20));
    command.arg("--vhost-user").arg(manager.folder.join("s")).arg("--api").arg(&api);
    command.env("NOTIFY_SOCKET", manager.folder.join("notify")).env("WATCHDOG_USEC", "200000");
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    run(Command::new(BLOCKYARD).arg("ctl").arg("--api").arg(&api).arg("upgrade"), TOOL).good();
    assert!(daemon.ended(SOON).success());
    // What the first server has sent is in the queue.
    manager.notified.set_nonblocking(true).unwrap();
    while manager.notified.recv(&mut [0; 256]).is_ok() {}
    manager.notified.set_nonblocking(false).unwrap();
    let reports = std::iter::repeat_with(|| manager.next()).filter(|text| text == "WATCHDOG=1");
    assert_eq!(reports.take(5).count(), 5);
    run(Command::new("fuser").args(["-k", "-TERM"]).arg(&api), TOOL);
}

#[test]
fn a_socket_is_found_by_its_number() {
    let manager = Manager::new();
    for (fd, name) in [("fd:3", "first"), ("fd:4", "second")] {
        for socket in ["first", "second"] {
            let _ = std::fs::remove_file(manager.folder.join(socket));
        }
        let mut command = manager.command("");
        let mut daemon = Daemon::start_with(
            command.args(["serve", "null:3M", "--vhost-user", fd]).stderr(Stdio::piped()),
        );
        // Drop the command's copies of the sockets.
        drop(command);
        assert_eq!(manager.next(), "READY=1");
        assert_eq!(manager.capacity(name), 3 << 20);
        daemon.signal(Signal::TERM);
        assert!(daemon.ended(SOON).success());
        assert_eq!(manager.next(), "STOPPING=1");
    }
}

#[test]
fn a_disk_that_a_reload_reopens_keeps_its_inherited_socket() {
    let manager = Manager::new();
    let config = manager.folder.join("toml");
    let configure = |more: &str| {
        let text = format!("[[disk]]\nimage = \"null:1M\"\nvhost-user = \"fd:3\"\n{more}");
        std::fs::write(&config, text).unwrap();
    };
    configure("");
    let mut command = manager.command("root:data");
    let mut daemon = Daemon::start_with(
        command.arg("serve").arg("--config").arg(&config).stderr(Stdio::piped()),
    );
    drop(command);
    assert_eq!(manager.next(), "READY=1");
    configure("queues = 3\n");
    daemon.signal(Signal::HUP);
    daemon.wait_log("reloaded: disks added 0, changed 1");
    assert_eq!(Guest::connect(&manager.folder.join("first")).session.link.config.num_queues, 3);
    // A second disk on the same socket would take the guests of the first one. All other
    // descriptors belong to the server itself.
    let others = (5..40).map(|fd| {
        format!("[[disk]]\nimage = \"ram:1M\"\nname = \"{fd}\"\nvhost-user = \"fd:{fd}\"\n")
    });
    let same = "[[disk]]\nimage = \"null:2M\"\nvhost-user = \"fd:root\"\n";
    configure(&format!("queues = 3\n{same}{}", others.collect::<String>()));
    daemon.signal(Signal::HUP);
    daemon.wait_log("failed 36");
    assert_eq!(manager.capacity("first"), 1 << 20);
    assert!(daemon.log().contains("another export uses it"), "{}", daemon.log());
    daemon.signal(Signal::TERM);
    assert!(daemon.ended(SOON).success());
}

#[test]
fn nbd_clients_connect_to_an_inherited_socket() {
    let manager = Manager::new();
    let mut command = manager.command("root:nbd");
    let args = ["serve", "null:5M", "--nbd", "fd:nbd", "--vhost-user", "fd:root", "--name", "both"];
    let mut daemon = Daemon::start_with(command.args(args).stderr(Stdio::piped()));
    drop(command);
    assert_eq!(manager.next(), "READY=1");
    let uri = format!("nbd+unix:///both?socket={}", manager.folder.join("second").display());
    for _ in 0..2 {
        assert_eq!(crate::common::tool("nbdinfo", ["--size", &uri]).good().trim(), "5242880");
    }
    // Both exports serve the same disk.
    assert_eq!(manager.capacity("first"), 5 << 20);
    daemon.signal(Signal::TERM);
    assert!(daemon.ended(SOON).success());
    assert!(manager.folder.join("second").exists(), "the socket is systemd's");
}

#[test]
fn missing_sockets_are_refused() {
    let manager = Manager::new();
    for (fd, parts) in [
        (
            "fd:backup",
            &["fd:backup", "no inherited socket has this name; the names are \"root:data\""][..],
        ),
        ("fd:9", &["fd:9: this descriptor is not an inherited listening socket"]),
        ("fd:0", &["fd:0: inherited sockets begin at descriptor 3"]),
        ("fd:-1", &["fd:-1: inherited sockets begin at descriptor 3"]),
    ] {
        for socket in ["first", "second"] {
            let _ = std::fs::remove_file(manager.folder.join(socket));
        }
        let mut command = manager.command("root:data");
        // With a manager, the end would wait a moment.
        command.env_remove("NOTIFY_SOCKET");
        let mut daemon = Daemon::start_with(
            command.args(["serve", "null:1M", "--vhost-user", fd]).stderr(Stdio::piped()),
        );
        assert_eq!(daemon.ended(SOON).code(), Some(1), "{fd}");
        daemon.wait_log(parts[0]);
        let log = daemon.log();
        assert!(log.lines().count() == 1 && parts.iter().all(|p| log.contains(p)), "{fd}: {log}");
    }
    // LISTEN_PID is the ID of another process, so the names are not valid.
    let done = run(
        Command::new(BLOCKYARD).args(["serve", "null:1M", "--vhost-user", "fd:root"]).envs([
            ("LISTEN_PID", "1"),
            ("LISTEN_FDS", "1"),
            ("LISTEN_FDNAMES", "root"),
        ]),
        SOON,
    );
    assert_eq!(done.status.code(), Some(1));
    assert!(done.err.contains("LISTEN_PID is not its own"), "{}", done.err);
    // This descriptor is open, but does not listen.
    let mut command = Command::new("sh");
    command.args(["-c", "exec 3</dev/null \"$0\" serve null:1M --vhost-user fd:3", BLOCKYARD]);
    let done = run(&mut command, SOON);
    assert_eq!((done.status.code(), done.err.lines().count()), (Some(1), 1), "{}", done.err);
    assert!(done.err.contains("is not an inherited listening socket"), "{}", done.err);
    // A message of a process that has ended is there.
    manager.notified.set_nonblocking(true).unwrap();
    assert!(manager.notified.recv(&mut [0; 64]).is_err(), "READY=1 only when it is true");
}

#[test]
fn systemd_rates_the_units_below_1_2() {
    let (folder, contrib) = (Folder::new(), concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib"));
    for unit in ["blockyard.service", "blockyard@.service"] {
        let text = std::fs::read_to_string(format!("{contrib}/{unit}")).unwrap();
        let installed = folder.join(unit);
        std::fs::write(&installed, text.replace("@bindir@", "/usr/bin")).unwrap();
        let mut analyze = Command::new("systemd-analyze");
        // The threshold is 10 times the rate.
        analyze.args(["security", "--no-pager", "--offline=true", "--threshold=12"]);
        let done = run(analyze.arg(&installed), SOON);
        assert!(done.status.success(), "{unit}: {} {}", done.out, done.err);
        assert!(done.out.contains("Overall exposure level"), "{unit}: {}", done.out);
    }
}

/// Guests wait for the service while its images are missing, so it must never give up, and must not
/// start too often.
#[test]
fn the_units_never_give_up_and_a_server_without_images_ends_after_a_moment() {
    let contrib = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib");
    for unit in ["blockyard.service", "blockyard@.service"] {
        let text = std::fs::read_to_string(format!("{contrib}/{unit}")).unwrap();
        let (unit_section, service) = text.split_once("[Service]").unwrap();
        assert!(unit_section.contains("\nStartLimitIntervalSec=0\n"), "{unit_section}");
        for line in ["Restart=on-failure", "RestartSteps=10", "RestartMaxDelaySec=10s"] {
            assert!(service.lines().any(|own| own == line), "{unit}: {line}");
        }
    }
    let manager = Manager::new();
    let mut command = Command::new(BLOCKYARD);
    command.args(["serve", "/none/such", "--vhost-user"]).arg(manager.folder.join("s"));
    command.env("NOTIFY_SOCKET", manager.folder.join("notify"));
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_log("the server ends in 1 s");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended(SOON).code(), Some(1), "{}", daemon.log());
}
