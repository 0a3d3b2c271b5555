//! libnbd calls in scripts. Each script says what it checks.

use crate::common::{Folder, SOON};
use crate::fixture::{MB, NbdServer, script, uri};

#[test]
fn the_handshake_supports_all_options() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &[]);
    let out = script("handshake", &disk.uri());
    assert!(out.lines().filter(|l| l.starts_with("ok ")).count() >= 12, "{out}");
    disk.daemon.stop();
}

/// The disk is served through the page cache, which supports any alignment, and with O_DIRECT,
/// which does not.
#[test]
fn all_commands_work_on_a_raw_disk() {
    for cache in ["none", "writeback"] {
        let folder = Folder::new();
        let disk = NbdServer::empty(&folder, 64 * MB, &["--cache", cache]);
        script("commands", &disk.uri());
        disk.daemon.stop();
    }
}

#[test]
fn all_commands_work_on_a_qcow2_disk() {
    let folder = Folder::new();
    let image = folder.join("disk.qcow2");
    crate::common::tool(
        "qemu-img",
        ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "64M"],
    )
    .good();
    let disk = NbdServer::start(&image, folder.join("s"), &[]);
    script("commands", &disk.uri());
    disk.daemon.stop();
    crate::common::tool("qemu-img", ["check", "-q", image.to_str().unwrap()]).good();
}

/// Such an image is qcow2 version 2, which has no entry for zeroes over a base.
#[test]
fn zeroes_that_cannot_be_fast_are_refused() {
    let folder = Folder::new();
    let (base, image) = (folder.join("base.raw"), folder.join("disk.qcow2"));
    std::fs::write(&base, vec![7; 64 << 20]).unwrap();
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "compat=0.10",
        "-F",
        "raw",
        "-b",
        base.to_str().unwrap(),
    ];
    crate::common::tool("qemu-img", create.iter().chain(&[image.to_str().unwrap()])).good();
    let disk = NbdServer::start(&image, folder.join("s"), &[]);
    script("slow_zeroes", &disk.uri());
    disk.daemon.stop();
}

/// The default export has the empty name.
#[test]
fn the_default_export_works_over_tcp() {
    let folder = Folder::new();
    let image = folder.image("disk.img", 32 * MB);
    let start = std::time::Instant::now();
    let (port, daemon) = loop {
        let port = free_port();
        let address = format!("tcp:127.0.0.1:{port}");
        let mut command = std::process::Command::new(crate::common::BLOCKYARD);
        command.arg("serve").arg(&image).args(["--nbd", &address, "--cache", "writeback"]);
        let mut daemon = crate::common::Daemon::start(&mut command);
        if daemon.became_ready() {
            break (port, daemon);
        }
        // If the start failed, another process must have taken the port meanwhile.
        assert!(daemon.log().contains("Address already in use"), "{}", daemon.log());
        assert!(start.elapsed() < SOON, "no port stays free");
    };
    script("commands", &format!("nbd://127.0.0.1:{port}"));
    script("handshake", &format!("nbd://127.0.0.1:{port}"));
    daemon.stop();
}

#[test]
fn block_status_shows_the_extents() {
    for options in [&[][..], &["--nbd-block-size", "512"]] {
        let folder = Folder::new();
        let disk = NbdServer::empty(&folder, 64 * MB, options);
        script("status", &disk.uri());
        disk.daemon.stop();
    }
}

#[test]
fn a_read_only_export_refuses_writes() {
    let folder = Folder::new();
    let image = folder.image("disk.img", MB);
    let disk = NbdServer::start(&image, folder.join("s"), &["--read-only"]);
    script("readonly", &disk.uri());
    // A read-only server's lock is shared: a second read-only server of the same image starts.
    let second = NbdServer::start(&image, folder.join("t"), &["--read-only"]);
    script("readonly", &uri(&second.socket, "disk"));
    disk.daemon.stop();
    second.daemon.stop();
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
