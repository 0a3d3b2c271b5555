//! A server with several `null:` disks, from a configuration file that tests change.

use std::process::Command;
use std::time::Instant;

use blockyard_bench::client::report::Report;
use blockyard_bench::client::{LoadOptions, measure};

use crate::common::{BLOCKYARD, Daemon, Folder, Signal};
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
    #[track_caller]
    pub fn share(&self, disk: &str) -> String {
        self.daemon.share(disk)
    }

    /// Waits until at least this many requests of a disk wait for its limits or its device.
    #[track_caller]
    pub fn until_waiting(&self, disk: &str, requests: u64) {
        self.daemon.until_waiting(disk, requests);
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
