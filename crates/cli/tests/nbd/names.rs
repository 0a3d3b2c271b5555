//! Several exports on one address, and an export whose size changes.

use std::process::Command;

use crate::common::{BLOCKYARD, Daemon, Folder, Signal, tool};
use crate::fixture::{MB, NbdServer, address, python, uri};

/// Starts three disks on one socket, one of them read-only. `more` is appended to the configuration
/// file.
fn yard(folder: &Folder) -> Daemon {
    let socket = address(&folder.join("s"));
    let mut file = String::new();
    for (name, more) in [("one", ""), ("two", ""), ("three", "read-only = true\n")] {
        let image = folder.image(name, 4 * MB);
        std::fs::write(&image, vec![name.as_bytes()[1]; 4 << 20]).unwrap();
        file += &format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{}\"\nnbd = \"{socket}\"\n{more}",
            image.display()
        );
    }
    std::fs::write(folder.join("toml"), file).unwrap();
    let mut daemon = Daemon::start(
        Command::new(BLOCKYARD).arg("serve").arg("--config").arg(folder.join("toml")),
    );
    daemon.wait_ready();
    daemon
}

#[test]
fn each_name_selects_its_own_disk() {
    let folder = Folder::new();
    let daemon = yard(&folder);
    let socket = folder.join("s");
    let out = tool("nbdinfo", ["--list", "--json", &uri(&socket, "")]).good();
    let told: serde_json::Value = serde_json::from_str(&out).unwrap();
    let mut names: Vec<&str> = told["exports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["export-name"].as_str().unwrap())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["one", "three", "two"], "{out}");
    for name in ["one", "two", "three"] {
        let letter = name.as_bytes()[1];
        let out = tool(
            "qemu-io",
            ["-r", "-f", "raw", "-c", &format!("read -P {letter} 0 4M"), &uri(&socket, name)],
        )
        .good();
        assert!(out.contains("4194304/4194304") && !out.contains("failed"), "{name}: {out}");
    }
    // Writes go only to the selected disk.
    tool("qemu-io", ["-f", "raw", "-c", "write -P 9 1M 64k", &uri(&socket, "two")]).good();
    assert!(
        tool("qemu-io", ["-f", "raw", "-c", "write -P 9 1M 64k", &uri(&socket, "three")])
            .status
            .code()
            != Some(0)
    );
    daemon.stop();
    for (name, changed) in [("one", false), ("two", true), ("three", false)] {
        let image = std::fs::read(folder.join(name)).unwrap();
        let bytes = if changed { 64 << 10 } else { 0 };
        assert_eq!(image.iter().filter(|b| **b == 9).count(), bytes, "{name}");
    }
}

/// Metadata contexts belong to one export. A client that opens another export does not keep them.
#[test]
fn contexts_belong_to_their_export() {
    let folder = Folder::new();
    let daemon = yard(&folder);
    let code = "
h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(URI)
h.set_export_name('one')
assert h.opt_set_meta_context_queries(['base:allocation'], lambda name: None) == 1
h.set_export_name('two')
h.set_request_meta_context(False)
h.opt_go()
h.set_strict_mode(nbd.STRICT_AUTO_FLAG)
try:
    h.block_status(4096, 0, lambda *all: 0)
    raise SystemExit('a block status of contexts that belong to another export')
except nbd.Error:
    pass
assert len(h.pread(512, 0)) == 512
";
    python(&uri(&folder.join("s"), "one"), code).good();
    daemon.stop();
}

/// SIGHUP adds and removes disks. Connections to the remaining disks continue, and those to removed
/// disks end.
#[test]
fn a_reload_adds_and_removes_exports() {
    let folder = Folder::new();
    let daemon = yard(&folder);
    let socket = folder.join("s");
    let text = std::fs::read_to_string(folder.join("toml")).unwrap();
    let without: String =
        text.split_inclusive("[[disk]]").filter(|part| !part.contains("\"two\"")).collect();
    std::fs::write(folder.join("toml"), without.trim_end_matches("[[disk]]")).unwrap();
    daemon.signal(Signal::HUP);
    crate::common::until("two is gone", crate::common::SOON, || {
        !tool("nbdinfo", [uri(&socket, "two")]).status.success()
    });
    tool("nbdinfo", [uri(&socket, "one")]).good();
    std::fs::write(folder.join("toml"), text).unwrap();
    daemon.signal(Signal::HUP);
    crate::common::until("two is back", crate::common::SOON, || {
        tool("nbdinfo", [uri(&socket, "two")]).status.success()
    });
    daemon.stop();
}

/// NBD reports a size only when a client opens the export. A client that connects after a resize
/// gets the new size.
#[test]
fn a_new_client_sees_a_new_size() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 4 * MB, &[]);
    let size = || tool("nbdinfo", ["--size", &disk.uri()]).good().trim().parse::<u64>().unwrap();
    assert_eq!(size(), 4 * MB);
    std::fs::File::options()
        .write(true)
        .open(folder.join("disk.img"))
        .unwrap()
        .set_len(6 * MB)
        .unwrap();
    let from = disk.daemon.log().len();
    disk.daemon.signal(Signal::HUP);
    disk.daemon.wait_log_after(from, "the image has a new size");
    assert_eq!(size(), 6 * MB);
    let out = tool(
        "qemu-io",
        ["-f", "raw", "-c", "write -P 1 5M 1M", "-c", "read -P 1 5M 1M", &disk.uri()],
    )
    .good();
    assert!(!out.contains("failed"), "{out}");
    disk.daemon.stop();
}
