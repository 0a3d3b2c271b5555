//! nbdkit's nbd plugin (libnbd) is the client of our server. Its filters inject faults, and nothing
//! else may cause errors.

use std::os::unix::fs::FileExt;

use crate::common::{Daemon, Folder, SOON, TOOL, listens, run, tool, tool_command, until};
use crate::durable::serve_again;
use crate::fixture::{COPY, MB, NbdServer, same, sparse, start_in_background, uri};

/// nbdkit with filters in front of the server, and its URI.
struct Kit {
    daemon: Daemon,
    uri: String,
}

impl Kit {
    #[track_caller]
    fn start(folder: &Folder, filters: &[&str], behind: &str, parameters: &[&str]) -> Self {
        let socket = folder.join("kit");
        let _ = std::fs::remove_file(&socket);
        let mut args = vec!["-f".to_string(), "-U".into(), socket.to_str().unwrap().into()];
        args.extend(filters.iter().map(|f| format!("--filter={f}")));
        args.extend(["nbd".into(), behind.into()]);
        args.extend(parameters.iter().map(ToString::to_string));
        let mut daemon = start_in_background("nbdkit", args);
        until("nbdkit listens", SOON, || listens(&socket) || !daemon.running());
        assert!(daemon.running(), "{}", daemon.log());
        Kit { daemon, uri: uri(&socket, "") }
    }
}

fn copy(from: &str, to: &str) {
    run(tool_command("nbdcopy").args(["--connections=2", from, to]), COPY).good();
}

/// One request in ten fails before it reaches the server, and is retried. In the end all data is
/// right.
#[test]
fn a_copy_with_retried_requests_is_complete() {
    let folder = Folder::new();
    let source = sparse(&folder, "source");
    let disk = NbdServer::empty(&folder, 64 * MB, &[]);
    let filters = ["retry-request", "error"];
    let parameters =
        ["error-rate=10%", "error=EIO", "retry-request-retries=20", "retry-request-delay=0.001"];
    let kit = Kit::start(&folder, &filters, &disk.uri(), &parameters);
    copy(source.to_str().unwrap(), &kit.uri);
    let back = folder.join("back");
    copy(&kit.uri, back.to_str().unwrap());
    same(&source, &back);
    drop(kit);
    assert!(!disk.daemon.stop().contains("ERROR"));
    same(&source, &folder.join("disk.img"));
}

/// A client that pauses between two requests, longer than any test, does not delay other clients.
#[test]
fn a_slow_client_does_not_delay_a_fast_one() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &[]);
    let kit = Kit::start(&folder, &["delay"], &disk.uri(), &["rdelay=36000"]);
    let mut slow = start_in_background(
        "qemu-io",
        ["-f", "raw", "-c", "write -P 5 32M 4k", "-c", "read -P 5 32M 4k", &kit.uri],
    );
    let image = std::fs::File::open(folder.join("disk.img")).unwrap();
    let has_written = || {
        let mut byte = [0];
        image.read_exact_at(&mut byte, 32 * MB).unwrap();
        byte == [5]
    };
    until("the slow client has written", TOOL, || has_written() || !slow.running());
    let out = tool(
        "qemu-io",
        [
            "-f",
            "raw",
            "-c",
            "write -P 6 0 16M",
            "-c",
            "read -P 6 0 16M",
            "-c",
            "flush",
            &disk.uri(),
        ],
    );
    assert!(!out.good().contains("failed"));
    assert!(slow.running() && !slow.out().contains("failed"), "{}", slow.out());
    drop((slow, kit));
    disk.daemon.stop();
}

/// Flipped bits are detected: data that is right without the filter is wrong with it.
#[test]
fn flipped_bits_are_detected() {
    let folder = Folder::new();
    let source = sparse(&folder, "source");
    let disk = NbdServer::start(&source, folder.join("s"), &[]);
    let evil = ["evil=cosmic", "evil-probability=1e-7", "evil-seed=6"];
    let kit = Kit::start(&folder, &["evil"], &disk.uri(), &evil);
    let (bad, good) = (folder.join("bad"), folder.join("good"));
    copy(&kit.uri, bad.to_str().unwrap());
    copy(&disk.uri(), good.to_str().unwrap());
    same(&source, &good);
    assert!(
        std::fs::read(&bad).unwrap() != std::fs::read(&source).unwrap(),
        "the filter has flipped nothing"
    );
    drop(kit);
    disk.daemon.stop();
}

/// The server is killed during a copy and restarted. The retry filter reconnects, and the copy is
/// complete. A limit holds the copy until the kill: each of the first two servers admits 2 MiB of
/// writes, and then a byte each second.
#[test]
fn a_copy_survives_a_restart_of_the_server() {
    let folder = Folder::new();
    let source = sparse(&folder, "source");
    let (image, socket) = (folder.image("disk.img", 64 * MB), folder.join("s"));
    let held = ["--bps-write", "1,max=2M,length=1"];
    let mut server = serve_again(&image, &socket, &held);
    let parameters = ["retries=10", "retry-delay=1"];
    let kit = Kit::start(&folder, &["retry"], &uri(&socket, "disk"), &parameters);
    let mut copy = start_in_background(
        "nbdcopy",
        [
            "--connections=1",
            "--requests=1",
            "--request-size=65536",
            source.to_str().unwrap(),
            &kit.uri,
        ],
    );
    for next in [&held[..], &[]] {
        server.until_served("write", "disk");
        server.until_waiting("disk", 1);
        assert!(copy.running(), "over too early: {}", copy.log());
        server.kill();
        server = serve_again(&image, &socket, next);
    }
    let status = copy.ended(COPY);
    assert!(status.success(), "{}", copy.log());
    // Acknowledged writes of the copy before the kill are in the page cache or on the disk.
    tool("qemu-io", ["-f", "raw", "-c", "flush", &uri(&socket, "disk")]).good();
    assert!(kit.daemon.log().len() < 100_000);
    drop(kit);
    server.stop();
    same(&source, &image);
}
