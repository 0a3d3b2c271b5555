//! Hundreds of overlays of one base in one server: what each idle disk costs.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use blockyard_driver::status;

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, Signal, tool, until};
use crate::guest::{Guest, pattern};

const DISKS: usize = 300;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes a configuration with the first `count` disks.
fn configure(folder: &Folder, count: usize) {
    let disk = |n: usize| {
        let (image, socket) = (folder.join(format!("o{n}.qcow2")), folder.join(format!("s{n}")));
        format!(
            "[[disk]]\nname = \"d{n}\"\nimage = \"{}\"\nvhost-user = \"{}\"\n",
            image.display(),
            socket.display()
        )
    };
    std::fs::write(folder.join("toml"), (0..count).map(disk).collect::<String>()).unwrap();
}

/// Returns the names of the threads. Not those of io_uring's workers: the kernel makes one for a
/// reactor if a write would wait, and the last one stays.
fn names(daemon: &Daemon) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| !name.starts_with("iou-wrk-")).collect()
}

/// Returns the numbers of threads and of descriptors. Not the in-flight region of another test: its
/// front end receives the region without the flag close-on-exec, so a server that starts at that
/// moment inherits it.
fn holdings(daemon: &Daemon) -> (usize, usize) {
    let descriptors = daemon.descriptors();
    let own = descriptors.iter().filter(|target| !target.contains("blockyard-inflight"));
    (names(daemon).len(), own.count())
}

/// Waits until the daemon has this many threads and descriptors. The threads that opened disks end
/// when they have no more work.
fn until_holds(daemon: &Daemon, expected: (usize, usize)) {
    let mut found = (0, 0);
    until(&format!("the daemon has {expected:?} threads and descriptors"), SOON, || {
        let before = std::mem::replace(&mut found, holdings(daemon));
        if before != found {
            println!("{found:?} threads and descriptors: {:?}", names(daemon));
        }
        found == expected
    });
}

#[test]
fn an_idle_overlay_has_two_descriptors_and_no_thread() {
    let folder = Folder::new();
    let (base, first) = (folder.join("base.raw"), folder.join("o0.qcow2"));
    std::fs::write(&base, pattern(5, 1 << 20)).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", text(&first)];
    tool("qemu-img", create).good();
    for n in 1..DISKS {
        std::fs::copy(&first, folder.join(format!("o{n}.qcow2"))).unwrap();
    }
    configure(&folder, 1);
    let mut daemon = Daemon::start(
        Command::new(BLOCKYARD).arg("serve").arg("--config").arg(folder.join("toml")),
    );
    daemon.wait_ready();
    until("the threads that opened the disk have ended", SOON, || {
        !names(&daemon).iter().any(|name| name.starts_with("yard open"))
    });
    let (threads, descriptors) = holdings(&daemon);
    configure(&folder, DISKS);
    let from = daemon.log().len();
    daemon.signal(Signal::HUP);
    daemon.wait_log_after(from, "reloaded: disks added 299");
    let idle = (threads, descriptors + 2 * (DISKS - 1));
    until_holds(&daemon, idle);
    // A disk has a thread and more descriptors only while a front end is connected.
    let mut guest = Guest::connect(&folder.join("s299"));
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(5, 4096));
    assert_eq!(guest.write(8, &pattern(6, 4096)), status::OK);
    assert!(holdings(&daemon).0 > threads);
    guest.leave();
    // The journal of the changed disk is open until the disk is closed.
    until_holds(&daemon, (idle.0, idle.1 + 1));
    daemon.stop();
    tool("qemu-img", ["check", text(&folder.join("o299.qcow2"))]).good();
}

/// Starts a server with `count` NBD addresses, each with a disk.
fn with_addresses(folder: &Folder, count: usize) -> Daemon {
    let disk = |n: usize| {
        let socket = folder.join(format!("n{n}"));
        let nbd = socket.display();
        format!("[[disk]]\nname = \"d{n}\"\nimage = \"ram:1M\"\nnbd = \"unix:{nbd}\"\n")
    };
    std::fs::write(folder.join("toml"), (0..count).map(disk).collect::<String>()).unwrap();
    let mut daemon = Daemon::start(
        Command::new(BLOCKYARD).arg("serve").arg("--config").arg(folder.join("toml")),
    );
    daemon.wait_ready();
    until("the threads that opened the disks have ended", SOON, || {
        !names(&daemon).iter().any(|name| name.starts_with("yard open"))
    });
    daemon
}

#[test]
fn nbd_addresses_share_threads() {
    const ADDRESSES: usize = 100;
    let folder = Folder::new();
    let one = with_addresses(&folder, 1);
    let (threads, descriptors) = holdings(&one);
    one.stop();
    let many = with_addresses(&folder, ADDRESSES);
    let idle = (threads, descriptors + ADDRESSES - 1);
    until_holds(&many, idle);
    // Each address greets its clients, at the same time.
    let mut clients: Vec<_> = (0..ADDRESSES)
        .map(|n| UnixStream::connect(folder.join(format!("n{n}"))).unwrap())
        .collect();
    for client in &mut clients {
        client.set_read_timeout(Some(SOON)).unwrap();
        let mut greeting = [0; 18];
        client.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..8], b"NBDMAGIC");
    }
    until_holds(&many, (idle.0, idle.1 + ADDRESSES));
    drop(clients);
    until_holds(&many, idle);
    many.stop();
}
