//! Images on an NBD server (qemu-nbd), which is killed and restarted.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::status;

use crate::common::{
    BLOCKYARD, Daemon, Folder, SOON, Signal, blockyard, end, listens, md5, tool, tool_command,
    until, until_readable,
};
use crate::guest::{Guest, pattern};

const MIB: u64 = 1 << 20;
/// Size of the remote disk in bytes, except under a load that reads it for long.
const SIZE: u64 = 4 * MIB;

/// qemu-nbd with one export. Dropping it kills the process.
pub struct Peer {
    child: Child,
}

impl Peer {
    pub fn start(image: &Path, socket: &Path, options: &[&str]) -> Self {
        let _ = std::fs::remove_file(socket);
        let mut command = tool_command("qemu-nbd");
        command
            .args(["--persistent", "--format=raw", "--export-name=base", "--socket"])
            .arg(socket);
        let child = command
            .args(options)
            .arg(image)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        until("qemu-nbd listens", SOON, || listens(socket));
        Peer { child }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

struct RemoteFixture {
    folder: Folder,
    base: PathBuf,
    nbd: PathBuf,
    socket: PathBuf,
    uri: String,
}

impl RemoteFixture {
    fn new() -> Self {
        Self::of(SIZE)
    }

    fn of(bytes: u64) -> Self {
        let folder = Folder::new();
        let (base, nbd, socket) = (folder.join("base.raw"), folder.join("n"), folder.join("s"));
        std::fs::write(&base, pattern(5, bytes as usize)).unwrap();
        let uri = format!("nbd+unix:///base?socket={}", nbd.display());
        RemoteFixture { folder, base, nbd, socket, uri }
    }

    fn peer(&self, options: &[&str]) -> Peer {
        Peer::start(&self.base, &self.nbd, options)
    }

    fn overlay(&self) -> PathBuf {
        let path = self.folder.join("top.qcow2");
        blockyard(["image", "create", "-q", path.to_str().unwrap(), "-b", &self.uri, "-F", "raw"])
            .good();
        path
    }
}

/// Reads and writes on an overlay while the server of its base is killed and restarted. There are
/// no errors, the data is right, and the base is not written. Tests a connection for each reactor,
/// and one shared connection.
#[test]
fn an_overlay_survives_a_restart_of_its_bases_server() {
    for shared in ["--shared=4", "--shared=1"] {
        let fixture = RemoteFixture::of(32 * MIB);
        let mut peer = fixture.peer(&["--read-only", shared]);
        let (top, sum) = (fixture.overlay(), md5(&fixture.base));
        let backing = [
            "--backing-folder",
            &fixture.uri,
            "--reactors",
            "2",
            "--queues",
            "2",
            "--l2-cache",
            "64k",
        ];
        let daemon = Daemon::serve(&top, &fixture.socket, &backing);
        let load = LoadOptions {
            rw: Pattern::Randrw,
            queues: 2,
            depth: 8,
            runtime: 600.0,
            flush_every: 50,
            verify: true,
            ..LoadOptions::for_socket(fixture.socket.clone())
        };
        let (report, _peer) = std::thread::scope(|scope| {
            let client = scope.spawn(|| measure(&load));
            for kill in 1..=3 {
                daemon.until_served_more_than(kill * 300, "write", "");
                let from = daemon.log().len();
                drop(peer);
                daemon.wait_log_after(from, "connecting again");
                peer = fixture.peer(&["--read-only", shared]);
                daemon.wait_log_after(from, "connected again");
            }
            daemon.until_served_more_than(1200, "write", "");
            assert!(!client.is_finished(), "the load ended early");
            load.over.store(true, Ordering::Relaxed);
            (client.join().unwrap().unwrap(), peer)
        });
        assert_eq!((report.errors, report.first_error), (0, None), "{shared}");
        assert!(report.verified_blocks > 100, "{} blocks: no load", report.verified_blocks);
        daemon.stop();
        assert_eq!(md5(&fixture.base), sum, "the base was written to");
        tool("qemu-img", ["check", "-q", top.to_str().unwrap()]).good();
    }
}

/// If the server is killed while no request is in flight, the client notices at once and reconnects
/// before the next request. Tests a connection for each reactor, and one shared connection.
#[test]
fn an_idle_client_reconnects_before_the_next_request() {
    for shared in ["--shared=4", "--shared=1"] {
        let fixture = RemoteFixture::new();
        let peer = fixture.peer(&["--read-only", shared]);
        let top = fixture.overlay();
        let daemon = Daemon::serve(&top, &fixture.socket, &["--backing-folder", &fixture.uri]);
        let mut guest = Guest::connect(&fixture.socket);
        let expected = pattern(5, SIZE as usize);
        assert!(guest.read(MIB / 512, 4096).unwrap() == expected[MIB as usize..][..4096]);
        drop(peer);
        daemon.wait_log("connecting again");
        let peer = fixture.peer(&["--read-only", shared]);
        daemon.wait_log("connected again");
        assert!(guest.read(2 * MIB / 512, 4096).unwrap() == expected[2 * MIB as usize..][..4096]);
        drop(guest);
        let log = daemon.stop();
        let missed = "the request was the one to miss it";
        assert_eq!(log.matches("connecting again").count(), 1, "{shared}: {missed}: {log}");
        drop(peer);
    }
}

/// QEMU reads the same disk.
#[test]
fn qemu_reads_the_same_disk() {
    let fixture = RemoteFixture::new();
    let _peer = fixture.peer(&["--read-only", "--shared=4"]);
    let top = fixture.overlay();
    let daemon = Daemon::serve(&top, &fixture.socket, &["--backing-folder", &fixture.uri]);
    let mut guest = Guest::connect(&fixture.socket);
    assert_eq!(
        guest.read(MIB / 512, 4096).unwrap(),
        pattern(5, SIZE as usize)[MIB as usize..][..4096]
    );
    assert_eq!(guest.write(MIB / 512 + 1, &[7; 1024]), status::OK);
    assert_eq!(guest.flush(), status::OK);
    drop(guest);
    daemon.stop();
    let (top, allowed) = (top.to_str().unwrap(), ["--backing-folder", &fixture.uri]);
    let copy = fixture.folder.join("copy.raw");
    let copy = copy.to_str().unwrap();
    tool("qemu-img", ["convert", "-O", "raw", top, copy]).good();
    let compared =
        blockyard(["image", "compare", top, copy, "-F", "raw"].into_iter().chain(allowed));
    assert!(compared.good().contains("identical"));
    let not = blockyard(["image", "compare", &fixture.uri, copy, "-F", "raw"]);
    assert_eq!(not.status.code(), Some(1), "{}{}", not.out, not.err);
}

/// A name in an image opens no connection unless the user allows it.
#[test]
fn names_in_image_headers_open_no_connections() {
    let fixture = RemoteFixture::new();
    let peer = fixture.peer(&["--read-only", "--shared=4"]);
    let top = fixture.overlay();
    // A listener at the server's address would notice a connection.
    drop(peer);
    let _ = std::fs::remove_file(&fixture.nbd);
    let listener = std::os::unix::net::UnixListener::bind(&fixture.nbd).unwrap();
    listener.set_nonblocking(true).unwrap();
    let top = top.to_str().unwrap();
    let other = format!("nbd+unix:///?socket={}x", fixture.nbd.display());
    for allowed in [
        &[][..],
        &["--backing-folder", "/"],
        &["--backing-folder", "nbd://localhost"],
        &["--backing-folder", &other],
    ] {
        let refused = blockyard(["image", "compare", top, top].iter().chain(allowed));
        assert_eq!(refused.status.code(), Some(2), "{}{}", refused.out, refused.err);
        assert!(
            refused.err.contains(
                "it is not a file of this host: pass --backing-folder nbd+unix:///?socket="
            ),
            "{}",
            refused.err
        );
    }
    assert_eq!(
        listener.accept().unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock,
        "a client connected"
    );
}

/// A server in the place of the lost one, which ends each connection at once. Dropping it ends its
/// thread.
struct Refusing {
    socket: PathBuf,
    attempts: Arc<AtomicU32>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Refusing {
    fn start(socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let (attempts, over) = (Arc::<AtomicU32>::default(), Arc::<AtomicBool>::default());
        let (counted, ends) = (attempts.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            while listener.accept().is_ok() && !ends.load(Ordering::SeqCst) {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        Refusing { socket: socket.to_path_buf(), attempts, over, thread: Some(thread) }
    }

    fn attempts(&self) -> u32 {
        self.attempts.load(Ordering::SeqCst)
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.socket);
        let _ = self.thread.take().unwrap().join();
    }
}

/// A server that is gone for longer than the timeout causes errors, but no hang, and the disk can
/// be closed. When the server is back, everything works.
#[test]
fn requests_wait_for_a_lost_server_only_for_the_timeout() {
    let fixture = RemoteFixture::new();
    let peer = fixture.peer(&["--read-only", "--shared=4"]);
    let options = ["--read-only", "--nbd-reconnect", "0.5", "--nbd-timeout", "60"];
    let mut daemon = Daemon::serve(&fixture.uri, &fixture.socket, &options);
    let mut guest = Guest::connect(&fixture.socket);
    assert!(guest.read(0, 4096).is_ok());
    drop(peer);
    let lost = Refusing::start(&fixture.nbd);
    // The guest fails if an answer takes longer than `ANSWER`.
    assert_eq!(guest.read(0, 4096), Err(status::IOERR));
    // A request that waits for the server by itself causes an attempt to connect. The client makes
    // one every 2 s, whatever the number of requests is.
    const REQUESTS: u32 = 1000;
    let before = lost.attempts();
    for _ in 0..REQUESTS {
        assert_eq!(guest.read(0, 4096), Err(status::IOERR));
    }
    let attempts = lost.attempts() - before;
    assert!(attempts < REQUESTS / 10, "{attempts} attempts to connect for {REQUESTS} requests");
    until("the client tries again", SOON, || {
        let _ = guest.read(0, 4096);
        lost.attempts() > before + attempts
    });
    let lines = daemon.log().lines().count();
    assert!(lines < 20, "{lines} lines: {}", daemon.log());
    drop(lost);
    let peer = fixture.peer(&["--read-only", "--shared=4"]);
    until("it is served again", SOON, || guest.read(0, 4096).is_ok());
    drop(peer);
    // SIGTERM arrives while the daemon waits for the lost server.
    drop(guest);
    assert!(daemon.terminate().success());
}

#[test]
fn a_remote_disk_writes_and_flushes_to_its_server() {
    let fixture = RemoteFixture::new();
    let peer = fixture.peer(&["--discard=unmap"]);
    let daemon =
        Daemon::serve(&fixture.uri, &fixture.socket, &["--reactors", "2", "--queues", "2"]);
    let report = measure(&LoadOptions {
        rw: Pattern::Randrw,
        queues: 2,
        depth: 8,
        ops: Some(2000),
        flush_every: 20,
        verify: true,
        ..LoadOptions::for_socket(fixture.socket.clone())
    });
    assert_eq!(report.unwrap().errors, 0);
    let mut guest = Guest::connect(&fixture.socket);
    assert_eq!(guest.write(8, &[9; 8192]), status::OK);
    assert_eq!(guest.flush(), status::OK);
    // All writes are flushed. A write before the next flush could be lost.
    drop(peer);
    let peer = fixture.peer(&[]);
    assert_eq!(guest.write(128, &[8; 512]), status::OK);
    assert_eq!(guest.read(8, 8192), Ok(vec![9; 8192]));
    drop(peer);
    let _peer = fixture.peer(&[]);
    assert_eq!(guest.flush(), status::IOERR, "the server that had it is gone");
    daemon.wait_log("may be lost");
    assert_eq!(guest.read(8, 8192), Ok(vec![9; 8192]));
}

/// The storage of a disk accepts a connection, and sends nothing.
#[test]
fn a_start_that_waits_for_storage_ends_at_sigterm() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let folder = Folder::new();
    let (image, config) = (folder.image("a", 1 << 20), folder.join("toml"));
    let disk = |name: &str, image: &str| {
        let socket = folder.join(name).with_extension("s");
        format!("[[disk]]\nname = \"{name}\"\nimage = {image:?}\nvhost-user = {socket:?}\n")
    };
    let hung = disk("b", &format!("nbd://127.0.0.1:{port}/b")) + "nbd-timeout = 300\n";
    std::fs::write(&config, disk("a", image.to_str().unwrap()) + &hung).unwrap();
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg("--config").arg(&config).args(["--sandbox", "off"]);
    let mut daemon = Daemon::start(&mut command);
    // The server opens the disk now.
    until_readable("the server opens the disk", &listener);
    let _connection = listener.accept().unwrap();
    daemon.wait_log("serving ");
    let status = daemon.terminate();
    assert!(status.success(), "{status}: {}", daemon.log());
    daemon.wait_log("a signal ends the server before it is ready");
    assert!(!daemon.log().contains("are not served"), "{}", daemon.log());
    assert!(!folder.join("a.s").exists(), "its disk is closed");
}

/// The storage of a new disk accepts a connection, and sends nothing.
#[test]
fn a_reload_that_waits_for_storage_delays_no_other_signal() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let folder = Folder::new();
    let config = folder.join("toml");
    let disk = |name: &str, image: &str| {
        let socket = folder.join(name);
        format!("[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\nvhost-user = {socket:?}\n")
    };
    std::fs::write(&config, disk("a", "ram:1M")).unwrap();
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg("--config").arg(&config).args(["--sandbox", "off"]);
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    let guest = Guest::connect(&folder.join("a"));
    let hung = disk("b", &format!("nbd://127.0.0.1:{port}/b"));
    std::fs::write(&config, disk("a", "ram:1M") + &hung).unwrap();
    daemon.signal(Signal::HUP);
    // The server opens the disk now.
    until_readable("the server opens the disk", &listener);
    let (connection, _) = listener.accept().unwrap();
    daemon.signal(Signal::USR1);
    daemon.wait_log("clients: ");
    assert!(!daemon.log().contains("reloaded"), "{}", daemon.log());
    drop((listener, connection));
    daemon.wait_log("reloaded: disks added 0, changed 0, removed 0, failed 1");
    guest.leave();
    daemon.stop();
}
