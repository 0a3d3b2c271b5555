//! A server with several `null:` disks, from a configuration file that tests change.

use std::process::Command;
use std::time::Instant;

use blockyard_bench::client::report::Report;
use blockyard_bench::client::{LoadOptions, measure};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, Signal, until};
use crate::guest::Guest;

pub struct Disks {
    pub daemon: Daemon,
    pub folder: Folder,
}

impl Disks {
    /// Starts a server. `FOLDER` in the text stands for the folder of the sockets.
    pub fn start(text: &str) -> Self {
        let folder = Folder::new();
        write(&folder, text);
        let mut daemon = Daemon::start(
            Command::new(BLOCKYARD).arg("serve").arg("--config").arg(folder.join("toml")),
        );
        daemon.wait_ready();
        Disks { daemon, folder }
    }

    /// Writes another configuration file and sends SIGHUP. Returns the time of the signal.
    pub fn begin_reload(&self, text: &str) -> Instant {
        write(&self.folder, text);
        self.daemon.signal(Signal::HUP);
        Instant::now()
    }

    /// Reloads another configuration file, and waits until the log has `expected`.
    pub fn reload(&self, text: &str, expected: &str) -> String {
        let from = self.daemon.log().len();
        self.begin_reload(text);
        self.daemon.wait_log_after(from, expected)
    }

    /// Returns the log line about a disk's share.
    pub fn share(&self, disk: &str) -> String {
        let from = self.daemon.log().len();
        self.daemon.signal(Signal::USR1);
        let of_disk = format!("disk=\"{disk}\"");
        let mut line = String::new();
        until("the log has a line about the share", SOON, || {
            let log = self.daemon.log()[from..].to_string();
            line = log
                .lines()
                .find(|l| l.contains("share: ") && l.contains(&of_disk))
                .unwrap_or_default()
                .to_string();
            !line.is_empty()
        });
        line
    }

    /// Waits until at least this many requests of a disk wait for its limits or its device.
    pub fn until_waiting(&self, disk: &str, requests: u64) {
        until("requests wait for their share", SOON, || {
            let line = self.share(disk);
            let waiting =
                line.split("; ").find_map(|part| part.split_once(" wait")?.0.parse::<u64>().ok());
            waiting.is_some_and(|waiting| waiting >= requests)
        });
    }

    pub fn guest(&self, disk: &str) -> Guest {
        Guest::connect(&self.folder.join(disk))
    }

    pub fn load(&self, disk: &str) -> LoadOptions {
        LoadOptions::for_socket(self.folder.join(disk))
    }
}

fn write(folder: &Folder, text: &str) {
    std::fs::write(folder.join("toml"), text.replace("FOLDER", folder.to_str().unwrap())).unwrap();
}

/// Returns a `[[disk]]` table with additional keys.
pub fn disk(name: &str, keys: &str) -> String {
    format!(
        "[[disk]]\nname = \"{name}\"\nimage = \"null:1G\"\nvhost-user = \"FOLDER/{name}\"\n{keys}\n"
    )
}

/// Runs a load without errors.
pub fn good(options: &LoadOptions) -> Report {
    let report = measure(options).unwrap();
    assert_eq!((report.errors, &report.first_error, report.reconnects), (0, &None, 0));
    report
}
