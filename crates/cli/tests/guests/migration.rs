//! QEMU migrates a running guest from one QEMU to another, and its disks from one server to
//! another: a raw image, a qcow2 image, and an image behind an NBD server.
//!
//! ```text
//!   QEMU 1 ── vhost-user ──► server a ─┐        1. cancelled when QEMU 1 has stopped the guest
//!   QEMU 2 ── vhost-user ──► server b ─┼─ images   2. QEMU 1 ► QEMU 2     3. QEMU 2 ► QEMU 3
//!   QEMU 3 ── vhost-user ──► server a ─┘
//! ```
//! The guest verifies its data all the time. It sees by the serial number which server it has.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::qmp::Qmp;
use crate::common::{Daemon, Folder, Guest, GuestKind, TOOL, md5, tool, until};
use crate::fixture::script_with_prelude;

const SIZE: u64 = 12 << 20;
const NAMES: [&str; 3] = ["raw", "qcow2", "nbd"];
const LIMIT: Duration = Duration::from_secs(300);

const SCRIPT: &str = r#"
disks="/dev/vda /dev/vdb /dev/vdc"
# Data that stay: written before the first migration, verified after the last one.
kept() { # OPTIONS...
    for d in $disks; do
        load --name=kept --filename=$d --offset=8M --size=2M --bs=64k "$@"
    done
}
round() {
    load --rw=randwrite --bsrange=4k-64k --size=1M --randseed=$RANDOM --name=a --filename=/dev/vda \
        --name=b --filename=/dev/vdb --name=c --filename=/dev/vdc
}
kept --rw=write --do_verify=0
echo begun
for server in b a; do
    until [[ $(</sys/block/vda/serial) == "$server" ]]; do round; done
    round
    echo "served by $server"
done
kept --rw=read
for d in $disks; do
    echo "sum $(dd if=$d bs=1M iflag=direct status=none | md5sum)"
done
"#;

/// Two servers with the same three images.
struct Stage {
    folder: Folder,
    script: String,
    servers: Vec<Daemon>,
    nbd: Daemon,
}

impl Stage {
    fn new() -> Self {
        let folder = Folder::new();
        folder.image("raw", SIZE);
        let remote = folder.image("remote", SIZE);
        let overlay = folder.join("qcow2");
        let create = ["create", "-q", "-f", "qcow2"].map(std::ffi::OsStr::new);
        let size = SIZE.to_string();
        tool("qemu-img", create.into_iter().chain([overlay.as_os_str(), size.as_ref()])).good();
        let mut command = std::process::Command::new(crate::common::BLOCKYARD);
        let address = format!("unix:{}", folder.join("nbd.sock").display());
        command.arg("serve").arg(&remote).args(["--nbd", &address]);
        let mut nbd = Daemon::start(&mut command);
        nbd.wait_ready();
        let mut stage = Stage { folder, script: script_with_prelude(SCRIPT), servers: vec![], nbd };
        stage.servers = ["a", "b"].map(|server| stage.serve(server)).into();
        stage
    }

    fn serve(&self, server: &str) -> Daemon {
        let path = |name: &str| self.folder.join(name).display().to_string();
        let mut config = String::new();
        for name in NAMES {
            let (image, format) = match name {
                "nbd" => (format!("nbd+unix:///?socket={}", path("nbd.sock")), "raw"),
                name => (path(name), name),
            };
            let socket = self.socket(server, name);
            config += &format!(
                "[[disk]]\nimage = {image:?}\nformat = {format:?}\nname = {name:?}\n\
                 serial = {server:?}\nactivation = \"rings\"\nvhost-user = {socket:?}\n"
            );
        }
        let file = self.folder.join(format!("{server}.toml"));
        std::fs::write(&file, config).unwrap();
        let mut command = std::process::Command::new(crate::common::BLOCKYARD);
        command.arg("serve").arg("--config").arg(&file);
        let mut daemon = Daemon::start(&mut command);
        daemon.wait_ready();
        daemon
    }

    fn socket(&self, server: &str, name: &str) -> PathBuf {
        self.folder.join(format!("{server}-{name}.sock"))
    }

    /// Starts a guest, or a QEMU that waits for it.
    fn start(&self, server: &str, number: u32, incoming: Option<&str>) -> (Guest, Qmp) {
        let monitor = self.folder.join(format!("qmp{number}"));
        let mut options = vec!["--mem".into(), "192M".into(), "--qmp".into()];
        options.push(monitor.clone().into_os_string());
        match incoming {
            Some(address) => options.extend(["--incoming".into(), address.into()]),
            None => options.push("--migratable".into()),
        }
        for name in NAMES {
            options.extend(Guest::vhost(&self.socket(server, name), ""));
        }
        let guest = Guest::start(GuestKind::Qemu, options, &self.script, LIMIT);
        until("QEMU has a monitor", TOOL, || crate::common::listens(&monitor));
        (guest, Qmp::connect(&monitor))
    }

    /// Moves the guest to a new QEMU.
    fn migrate(&self, (guest, qmp): &mut (Guest, Qmp), server: &str, number: u32) {
        let address = format!("unix:{}", self.folder.join(format!("to{number}")).display());
        let mut target = self.start(server, number, Some(&address));
        qmp.execute("migrate", json!({ "uri": address }));
        let info = wait_for(qmp, "completed");
        println!("paused for {} ms of {} ms", info["downtime"], info["total-time"]);
        // The target may still load the last part.
        until("the guest runs in the new QEMU", TOOL, || {
            target.1.execute("query-status", json!({}))["status"] == "running"
        });
        (*guest, *qmp) = target;
    }
}

/// Waits until a migration has a status. Returns what QEMU says about it.
fn wait_for(qmp: &mut Qmp, status: &str) -> Value {
    let start = Instant::now();
    loop {
        let info = qmp.execute("query-migrate", json!({}));
        if info["status"] == status {
            return info;
        }
        assert!(info["status"] != "failed" && start.elapsed() < LIMIT, "{info}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn set_speed(qmp: &mut Qmp) {
    // The guest dirties its memory fast, and the pause is not the subject here.
    let parameters = json!({ "max-bandwidth": 1u64 << 32, "downtime-limit": 20_000 });
    qmp.execute("migrate-set-parameters", parameters);
}

#[test]
fn a_guest_under_load_is_migrated_with_its_disks() {
    let stage = Stage::new();
    let mut running = stage.start("a", 1, None);
    running.0.expect("begun");

    // A migration that is cancelled when the source has stopped the guest, and so its rings.
    let qmp = &mut running.1;
    set_speed(qmp);
    let capability =
        |on| json!({ "capabilities": [{ "capability": "pause-before-switchover", "state": on }] });
    qmp.execute("migrate-set-capabilities", capability(true));
    let released = stage.servers[0].log().matches("deactivated").count();
    let sink = format!("exec:cat >{}", stage.folder.join("sink").display());
    qmp.execute("migrate", json!({ "uri": sink }));
    wait_for(qmp, "pre-switchover");
    until("the source has released its images", TOOL, || {
        stage.servers[0].log().matches("deactivated").count() == released + NAMES.len()
    });
    qmp.execute("migrate_cancel", json!({}));
    wait_for(qmp, "cancelled");
    qmp.execute("migrate-set-capabilities", capability(false));

    stage.migrate(&mut running, "b", 2);
    running.0.expect("served by b");
    set_speed(&mut running.1);
    stage.migrate(&mut running, "a", 3);
    running.0.expect("served by a");
    let output = running.0.finish();
    let sums: Vec<_> = output
        .lines()
        .filter_map(|line| line.strip_prefix("sum ")?.split_whitespace().next())
        .collect();

    let Stage { folder, servers, nbd, .. } = stage;
    for server in servers {
        let log = server.stop();
        // The statistics count writes that the kernel refused to do at once.
        let is_wrong = |line: &&str| {
            line.contains("ERROR") || line.contains("refused") && !line.contains("INFO writes:")
        };
        let wrong = log.lines().find(is_wrong);
        assert_eq!(wrong, None, "{log}");
    }
    nbd.stop();
    let (overlay, copy) = (folder.join("qcow2"), folder.join("copy"));
    tool("qemu-img", ["check".as_ref(), "-f".as_ref(), "qcow2".as_ref(), overlay.as_os_str()])
        .good();
    let convert = ["convert", "-f", "qcow2", "-O", "raw"].map(std::ffi::OsStr::new);
    tool("qemu-img", convert.into_iter().chain([overlay.as_os_str(), copy.as_os_str()])).good();
    let images = [folder.join("raw"), copy, folder.join("remote")].map(|image| md5(&image));
    assert_eq!(sums, images, "the guest and the host read different bytes");
}
