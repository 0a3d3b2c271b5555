//! All connections of a disk share its write cache: a flush on one connection makes the completed
//! writes of all of them survive kill -9.

use std::process::Command;

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, tool, until};
use crate::fixture::{MB, NbdServer, python, uri};

/// A qcow2 image keeps new allocations in memory until a flush. Without a flush that covers the
/// other connections' writes, their data would be lost after the kill.
#[test]
fn a_flush_on_one_connection_covers_the_writes_of_others() {
    let folder = Folder::new();
    let image = folder.join("disk.qcow2");
    tool("qemu-img", ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "256M"]).good();
    let socket = folder.join("s");
    for round in 1..=5u8 {
        let disk = serve_again(&image, &socket, &["--reactors", "2"]);
        python(
            &uri(&socket, "disk"),
            &format!(
                "
connections = [nbd.NBD() for _ in range(4)]
for h in connections: h.connect_uri(URI)
assert all(h.can_multi_conn() for h in connections)
for i in range(60):
    connections[i % 3].pwrite(bytes([{round}]) * 65536, i * (4 << 20) + {round} * 65536)
connections[3].flush()
"
            ),
        )
        .good();
        disk.kill();
    }
    unlocked(&image);
    let check = tool("qemu-img", ["check", "--output=json", image.to_str().unwrap()]);
    // Status 3 means leaked clusters, which a kill may leave. Status 2 would mean corruptions.
    assert!(matches!(check.status.code(), Some(0 | 3)), "{}{}", check.out, check.err);
    let reads: Vec<String> = (0..60u64)
        .flat_map(|i| {
            (1..=5u64).map(move |round| {
                format!("-c read -P {round} {} 64k", i * (4 << 20) + round * 65536)
            })
        })
        .collect();
    let args = ["-f", "qcow2"].map(String::from).into_iter().chain(reads.iter().flat_map(|r| {
        let (flag, command) = r.split_once(' ').unwrap();
        [flag.to_string(), command.to_string()]
    }));
    let out = tool("qemu-io", args.chain([image.to_str().unwrap().to_string()])).good();
    assert!(!out.contains("verification failed") && !out.contains("error"), "{out}");
    assert_eq!(out.matches("65536/65536").count(), 300, "{out}");
}

/// A write with FUA survives a kill without a flush.
#[test]
fn writes_with_fua_survive_a_kill() {
    let folder = Folder::new();
    let image = folder.join("disk.qcow2");
    tool("qemu-img", ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "64M"]).good();
    let socket = folder.join("s");
    let disk = serve_again(&image, &socket, &[]);
    let write = "
h = nbd.NBD()
h.connect_uri(URI)
h.pwrite(b'f' * 65536, 5 << 20, nbd.CMD_FLAG_FUA)
h.pwrite(b'g' * 65536, 9 << 20, nbd.CMD_FLAG_FUA)
h.zero(65536, 9 << 20, nbd.CMD_FLAG_FUA)
";
    python(&uri(&socket, "disk"), write).good();
    disk.kill();
    unlocked(&image);
    let reads = ["-c", "read -P 0x66 5M 64k", "-c", "read -P 0 9M 64k"];
    let out =
        tool("qemu-io", [&["-f", "qcow2"], &reads[..], &[image.to_str().unwrap()]].concat()).good();
    assert!(!out.contains("verification failed"), "{out}");
}

/// Acknowledged writes without a flush are on the disk when the server has ended after SIGTERM.
#[test]
fn sigterm_drains_and_flushes() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &["--cache", "writeback"]);
    let socket = disk.socket.clone();
    // The client is still connected when the signal arrives.
    let mut client = crate::fixture::start_in_background(
        "python3",
        [
            "-c",
            &format!(
                "import nbd,signal\nh=nbd.NBD()\nh.connect_uri({:?})\nh.pwrite(b'k'*{MB},{MB})\n\
                 print('written',flush=True)\nsignal.pause()",
                disk.uri()
            ),
        ],
    );
    until("the client has written", SOON, || client.out().contains("written") || !client.running());
    assert!(client.running(), "{}", client.log());
    disk.daemon.stop();
    let image = std::fs::read(folder.join("disk.img")).unwrap();
    assert!(image[MB as usize..2 * MB as usize].iter().all(|b| *b == b'k'));
    assert!(!socket.exists(), "its socket stayed behind");
}

/// Waits until the kernel releases the lock of a killed process that had requests in flight.
fn unlocked(image: &std::path::Path) {
    until("the lock is gone", SOON, || {
        !tool("qemu-img", ["info", image.to_str().unwrap()]).err.contains("lock")
    });
}

/// Starts a daemon after another one on the same socket and image was killed. The socket and the
/// image may be in use for a moment.
pub fn serve_again(image: &std::path::Path, socket: &std::path::Path, options: &[&str]) -> Daemon {
    let mut command = Command::new(BLOCKYARD);
    command
        .arg("serve")
        .arg(image)
        .arg("--nbd")
        .arg(crate::fixture::address(socket))
        .args(["--name", "disk"])
        .args(options);
    let start = std::time::Instant::now();
    loop {
        let mut daemon = Daemon::start(&mut command);
        if daemon.became_ready() {
            return daemon;
        }
        assert!(daemon.log().contains("is in use by"), "not about a lock: {}", daemon.log());
        assert!(start.elapsed() < SOON, "the lock stays: {}", daemon.log());
    }
}
