//! A daemon with three disks. Tests check its log, memory and descriptors, and how it ends.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{self, BLOCKYARD, Folder, SOON, until};

/// The attacked disk, the disk of the neighbour, and a disk whose reads are slow.
pub const VICTIM: &str = "victim";
pub const OTHER: &str = "other";
pub const SLOW: &str = "slow";
pub const QUEUES: u16 = 2;
/// Number of queues of each disk of a crowded daemon.
pub const MANY_QUEUES: u16 = 16;
/// Size of each disk in bytes.
pub const CAPACITY: u64 = 32 << 20;

/// Names of guest memory files in `/proc/PID/maps`: those of the driver, and those of the tests.
const GUEST_MEMORY: [&str; 3] = ["/memfd:blockyard-bench", "/memfd:extra", "/memfd:hostile"];

pub struct Daemon {
    daemon: common::Daemon,
    folder: Folder,
}

/// Returns whether the complaints are far fewer than the events that cause them. The tests of
/// `ring::log_budget` check the exact number: a first budget, and one for each 10 s.
pub fn are_few(complaints: &[String], events: usize) -> bool {
    complaints.len() < 20 + events / 100
}

impl Daemon {
    /// Starts a daemon with disks in memory.
    pub fn start() -> Self {
        Self::with(|_, _| format!("ram:{CAPACITY}"))
    }

    /// Starts a daemon with disks in memory. Each read of the slow disk takes `delay`.
    pub fn slow(delay: &str) -> Self {
        Self::made(|_, _| format!("ram:{CAPACITY}"), delay, "")
    }

    /// Starts a daemon with disks of many queues, all on one reactor. `image`: as in
    /// [`Daemon::with`].
    pub fn crowded(image: impl Fn(&Folder, &str) -> String) -> Self {
        Self::configured(image, "200ms", "", MANY_QUEUES, "reactors = 1\n")
    }

    /// Starts a daemon with disks in memory. `limits`: limits of the attacked disk.
    pub fn limited(limits: &str) -> Self {
        Self::made(|_, _| format!("ram:{CAPACITY}"), "400ms", limits)
    }

    /// Starts a daemon. `image` returns the image of a disk, which may be in the folder.
    pub fn with(image: impl Fn(&Folder, &str) -> String) -> Self {
        Self::made(image, "400ms", "")
    }

    /// Starts a daemon. The attacked disk is read-only. `image`: as in [`Daemon::with`].
    pub fn read_only(image: impl Fn(&Folder, &str) -> String) -> Self {
        Self::made(image, "400ms", "read-only = true")
    }

    fn made(image: impl Fn(&Folder, &str) -> String, delay: &str, limits: &str) -> Self {
        Self::configured(image, delay, limits, QUEUES, "")
    }

    fn configured(
        image: impl Fn(&Folder, &str) -> String,
        delay: &str,
        limits: &str,
        queues: u16,
        server: &str,
    ) -> Self {
        let folder = Folder::new();
        let mut config = String::from(server);
        for disk in [VICTIM, OTHER, SLOW] {
            let (image, socket) = (image(&folder, disk), folder.join(disk));
            config +=
                &format!("[[disk]]\nname = \"{disk}\"\nimage = \"{image}\"\nqueues = {queues}\n");
            config += &format!("vhost-user = \"{}\"\n", socket.display());
            if disk == VICTIM {
                config += &format!("{limits}\n");
                config += "in-band-notifications = true\n";
            }
            if disk == SLOW {
                config += &format!("filters = [\"delay:read={delay}\"]\n");
            }
        }
        let path = folder.join("config.toml");
        std::fs::write(&path, config).unwrap();
        let mut daemon =
            common::Daemon::start(Command::new(BLOCKYARD).args(["serve", "--config"]).arg(&path));
        daemon.wait_ready();
        Daemon { daemon, folder }
    }

    /// Waits until requests of the disk wait for its limits or its device.
    pub fn until_waiting(&self, disk: &str) {
        self.daemon.until_waiting(disk, 1);
    }

    pub fn socket(&self, disk: &str) -> PathBuf {
        self.folder.join(disk)
    }

    pub fn log(&self) -> Vec<String> {
        self.daemon.log().lines().map(String::from).collect()
    }

    /// Returns the log lines that report errors or warnings.
    pub fn complaints(&self) -> Vec<String> {
        common::complaints(&self.daemon.log())
    }

    /// Waits for a complaint. Returns all complaints so far.
    pub fn complained(&self) -> Vec<String> {
        until("a complaint", SOON, || !self.complaints().is_empty());
        self.complaints()
    }

    /// Waits until the daemon has handled what the front end of a disk, which is still connected,
    /// has sent so far.
    pub fn has_handled_all(&self, disk: &str) {
        self.daemon.has_handled_all(disk);
    }

    /// Returns the size in bytes of the daemon's own memory, without the shared memory of guests.
    pub fn own_memory(&self) -> u64 {
        self.daemon.kilobytes("RssAnon") << 10
    }

    pub fn descriptors(&self) -> usize {
        self.daemon.descriptors().len()
    }

    /// Waits until the daemon has at most `most` descriptors. It closes those of disconnected front
    /// ends asynchronously.
    pub fn keeps_descriptors(&self, most: usize, what: &str) {
        until(&format!("{what}: at most {most} descriptors"), SOON, || self.descriptors() <= most);
    }

    /// Waits until the daemon has at most `most` mappings of guest memory.
    pub fn keeps_mappings(&self, most: usize) {
        until(&format!("at most {most} mappings"), SOON, || self.mappings() <= most);
    }

    /// Returns the number of the daemon's mappings of guest memory. Other mappings depend on its
    /// threads and its allocator.
    pub fn mappings(&self) -> usize {
        let of_guests = |line: &&str| GUEST_MEMORY.iter().any(|name| line.contains(name));
        std::fs::read_to_string(self.proc("maps")).unwrap().lines().filter(of_guests).count()
    }

    fn proc(&self, what: &str) -> PathBuf {
        Path::new("/proc").join(self.daemon.pid().to_string()).join(what)
    }

    /// Ends the daemon by SIGTERM. It must still run, drain, and exit with status 0. Returns its
    /// complaints.
    pub fn end(mut self) -> Vec<String> {
        assert!(self.daemon.running(), "the daemon died: {:#?}", self.log());
        let log = self.daemon.stop();
        assert!(!log.contains("panicked"), "{log}");
        common::complaints(&log)
    }
}
