//! NBD connections are handed over: clients see no disconnection, whatever is on its way.

use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use blockyard_bench::client::LoadOptions;
use blockyard_nbd::wire::{self, Headers, Request, cmd, handshake, opt};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::ioctl_fionread;

use crate::common::{BLOCKYARD, Daemon, Lines, SOON, TOOL, end_of, tool_command, until};
use crate::guest::{Guest, base_bytes, pattern};
use crate::handover::{Case, ctl, failing, has_no_more_descriptors, script, serves};
use crate::handover_unopened::Storage;
use crate::tls::TlsFixture;

const MIB: usize = 1 << 20;

/// The overlay of a [`Case`], exported by NBD.
struct NbdCase {
    case: Case,
    socket: PathBuf,
}

impl NbdCase {
    fn new() -> Self {
        let case = Case::new();
        let socket = case.folder.join("nbd");
        NbdCase { case, socket }
    }

    fn command(&self) -> Command {
        let mut command = self.case.command();
        command.arg("--nbd").arg(format!("unix:{}", self.socket.display()));
        // A stall of the machine must not look like a client that does not choose.
        command.args(["--reactors", "2", "--nbd-handshake", "600s"]);
        command
    }

    fn serve(&self) -> Daemon {
        let mut daemon = Daemon::start(&mut self.command());
        daemon.wait_ready();
        daemon
    }

    fn replace(&self, old: Daemon) -> Daemon {
        self.case.replace_by(old, self.command().arg("--takeover").arg(&self.case.control))
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk.qcow2?socket={}", self.socket.display())
    }

    fn load(&self) -> LoadOptions {
        let nbd = Some(blockyard_nbd::Uri::parse(&self.uri()).unwrap());
        LoadOptions { nbd, queues: 3, ..self.case.load() }
    }

    fn end(&self, daemon: Daemon) {
        daemon.stop();
        assert!(!self.socket.exists());
        self.case.is_clean();
    }
}

#[test]
fn twenty_handovers_of_nbd_clients_are_not_noticed() {
    let nbd = NbdCase::new();
    let first = nbd.serve();
    let daemon = nbd.case.under_load(&nbd.load(), |goes_on| {
        serves(&first);
        let mut daemon = nbd.replace(first);
        serves(&daemon);
        let before = daemon.descriptors();
        for _ in 1..20 {
            goes_on();
            daemon = nbd.replace(daemon);
            serves(&daemon);
        }
        has_no_more_descriptors(&daemon, &before);
        daemon
    });
    nbd.end(daemon);
}

#[test]
fn nbd_clients_stay_with_the_old_server_if_the_new_one_fails() {
    let nbd = NbdCase::new();
    // In a sandbox the server would not start these programs.
    let mut daemon = Daemon::start(nbd.command().args(["--sandbox", "off"]));
    daemon.wait_ready();
    nbd.case.under_load(&nbd.load(), |goes_on| {
        serves(&daemon);
        for (stage, program) in failing(&nbd.case) {
            // The others end at a step that concerns no NBD client.
            if !["take", "given", "ready"].contains(&&stage[..]) {
                continue;
            }
            let done = ctl(&nbd.case, &["upgrade", "--binary", program.to_str().unwrap()]);
            assert!(!done.status.success(), "{stage}: {}", done.out);
            goes_on();
            serves(&daemon);
        }
    });
    let daemon = nbd.replace(daemon);
    nbd.end(daemon);
}

/// The new server fails when it has the disk. The disk's storage does not answer while the old
/// server opens it again. A server that answered a new client then would refuse it.
#[test]
fn a_new_client_waits_until_a_disk_that_comes_back_is_served() {
    let case = Case::new();
    let storage = Storage::new(&case);
    let [gate, next, image, socket, nbd, given, end] =
        ["gate", "next", "good.img", "good.s", "nbd", "given", "end"]
            .map(|name| case.folder.join(name));
    // The disk finds its storage at the gate.
    symlink(case.folder.join("far"), &gate).unwrap();
    symlink(case.folder.join("slow"), &next).unwrap();
    std::fs::write(&image, pattern(1, MIB)).unwrap();
    let config = case.folder.join("toml");
    let text = format!(
        "[[disk]]\nname = \"far\"\nimage = \"nbd+unix:///far?socket={}\"\n\
         nbd = \"unix:{}\"\nnbd-timeout = 300\n\
         [[disk]]\nname = \"good\"\nimage = {image:?}\nvhost-user = {socket:?}\n",
        gate.display(),
        nbd.display()
    );
    std::fs::write(&config, text).unwrap();
    let mut daemon = Daemon::start(case.configured(&config).args(["--sandbox", "off"]));
    daemon.wait_ready();
    let half = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/half_server.py");
    let body = format!("python3 -IS {half} far given\ntouch {given:?}\nread < {end:?}\nexit 1");
    mknodat(CWD, &end, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let program = script(&case, "half", &body);
    let server = std::thread::scope(|scope| {
        let upgrade =
            scope.spawn(|| ctl(&case, &["upgrade", "--binary", program.to_str().unwrap()]));
        until("the new server has the disk", SOON, || given.exists());
        std::fs::rename(&next, &gate).unwrap();
        std::fs::write(&end, "\n").unwrap();
        let asked = storage.asked();
        let client = UnixStream::connect(&nbd).unwrap();
        // The thread that accepts clients, and the reactor, come to this guest after the client.
        let mut guest = Guest::connect(&socket);
        assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, MIB)[..4096]);
        assert_eq!(ioctl_fionread(&client).unwrap(), 0, "a server has greeted the client");
        guest.leave();
        let server = storage.answer(asked);
        let mut client = Raw::choose(client, "far");
        assert_eq!(client.read(0, 4096), pattern(9, MIB)[..4096]);
        let done = upgrade.join().unwrap();
        assert!(done.err.contains("not upgraded"), "{}", done.err);
        server
    });
    daemon.stop();
    server.stop();
}

/// A client with simple replies.
struct Raw(UnixStream);

impl Raw {
    fn connect(nbd: &NbdCase) -> Self {
        Self::choose(UnixStream::connect(&nbd.socket).unwrap(), "disk.qcow2")
    }

    /// Chooses an export.
    fn choose(mut stream: UnixStream, name: &str) -> Self {
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        let flags = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        let mut bytes = flags.to_be_bytes().to_vec();
        bytes.extend(wire::OPTION.to_be_bytes());
        bytes.extend([opt::EXPORT_NAME, name.len() as u32].map(u32::to_be_bytes).as_flattened());
        bytes.extend(name.as_bytes());
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut [0; 10]).unwrap();
        Raw(stream)
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// Receives a reply without data. Returns its cookie and its error code.
    fn reply(&mut self) -> (u64, u32) {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        (wire::u64_at(&reply, 8), wire::u32_at(&reply, 4))
    }

    /// Receives the reply to a read. Returns its cookie and its data.
    fn data(&mut self, len: usize) -> (u64, Vec<u8>) {
        let (cookie, error) = self.reply();
        assert_eq!(error, 0);
        let mut data = vec![0; len];
        self.0.read_exact(&mut data).unwrap();
        (cookie, data)
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.send(&request(cmd::READ, 99, offset, len as u64));
        self.data(len).1
    }
}

fn request(command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    Request { flags: 0, command, cookie, offset, len }.put(Headers::Simple, &mut bytes);
    bytes
}

/// Each client stops at another byte of a write of 2 MiB: in the header, behind it, and in the
/// payload. They go on after two hand-overs, and the write is complete.
#[test]
fn a_request_that_has_arrived_in_part_is_handed_over() {
    let nbd = NbdCase::new();
    let mut daemon = nbd.serve();
    let stops = [1, 27, 28, 29, 1000, 200_000, MIB + 77, 2 * MIB + 27];
    let write = |at: usize| {
        let header = request(cmd::WRITE, at as u64, (at * 2 * MIB) as u64, 2 * MIB as u64);
        [header, pattern(at as u64, 2 * MIB)].concat()
    };
    let mut clients: Vec<_> = stops.iter().map(|_| Raw::connect(&nbd)).collect();
    for (at, (client, stop)) in clients.iter_mut().zip(stops).enumerate() {
        assert_eq!(client.read(0, 512), pattern(77, 512));
        client.send(&write(at)[..stop]);
    }
    daemon = nbd.replace(daemon);
    daemon = nbd.replace(daemon);
    for (at, (client, stop)) in clients.iter_mut().zip(stops).enumerate() {
        client.send(&write(at)[stop..]);
        assert_eq!(client.reply(), (at as u64, 0));
        assert!(client.read((at * 2 * MIB) as u64, 2 * MIB) == pattern(at as u64, 2 * MIB));
    }
    // The payload of a request that is refused: the server skips it.
    let refused = request(cmd::WRITE, 7, 1 << 40, MIB as u64);
    clients[0].send(&[&refused[..], &vec![1; 300_000]].concat());
    daemon = nbd.replace(daemon);
    clients[0].send(&vec![1; MIB - 300_000]);
    let (cookie, error) = clients[0].reply();
    assert!(cookie == 7 && error != 0, "{cookie}, {error}");
    assert_eq!(clients[0].read(31 * MIB as u64, 512).len(), 512);
    drop(clients);
    nbd.end(daemon);
}

/// A client reads nothing while its disk is handed over twice. It finds all replies later. It does
/// not delay the hand-over of others.
#[test]
fn replies_that_a_client_has_not_read_are_handed_over() {
    const READS: u64 = 24;
    let nbd = NbdCase::new();
    let mut daemon = nbd.serve();
    let mut slow = Raw::connect(&nbd);
    let all: Vec<u8> =
        (0..READS).flat_map(|n| request(cmd::READ, n, n * MIB as u64, MIB as u64)).collect();
    slow.send(&all);
    daemon.until_served("read", "");
    daemon = nbd.replace(daemon);
    daemon = nbd.replace(daemon);
    let expected = base_bytes(32 * MIB);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..READS {
        let (n, data) = slow.data(MIB);
        let at = n as usize * MIB;
        assert!(data == expected[at..at + MIB], "read {n}");
        assert!(seen.insert(n), "read {n} has two replies");
    }
    assert_eq!(slow.read(0, 512), expected[..512]);
    // A long request that the server does in parts begins anew at the next one.
    slow.send(&request(cmd::CACHE, 5, 0, 32 * MIB as u64));
    daemon = nbd.replace(daemon);
    assert_eq!(slow.reply(), (5, 0));
    drop(slow);
    nbd.end(daemon);
}

/// A client that is choosing its disk cannot go on at the next server. The log and the answer of
/// the upgrade say so.
#[test]
fn a_client_that_has_chosen_no_disk_is_disconnected_and_counted() {
    let nbd = NbdCase::new();
    let mut daemon = nbd.serve();
    let mut chosen = Raw::connect(&nbd);
    let mut choosing: Vec<_> = (0..3).map(|_| UnixStream::connect(&nbd.socket).unwrap()).collect();
    for stream in &mut choosing {
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
    }
    let answer = ctl(&nbd.case, &["upgrade", "--json"]).good();
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["disconnected"], 3, "{answer}");
    assert!(daemon.ended(SOON).success());
    let log = daemon.log();
    assert!(log.contains("3 NBD clients that had chosen no export were disconnected"), "{log}");
    for stream in &mut choosing {
        assert!(matches!(stream.read(&mut [0]), Ok(0)));
    }
    assert_eq!(chosen.read(0, 512), pattern(77, 512));
    drop(chosen);
    let shown = ctl(&nbd.case, &["upgrade"]).good();
    assert!(!shown.contains("NBD clients"), "{shown}");
    let pid = ctl(&nbd.case, &["status", "--json"]).good();
    let pid: serde_json::Value = serde_json::from_str(&pid).unwrap();
    crate::handover::end_server(pid["pid"].as_i64().unwrap() as i32);
    assert!(!nbd.socket.exists());
    nbd.case.is_clean();
}

/// NBD clients wait for the end of the hand-over, so they must not wait for other disks.
#[test]
fn disks_with_nbd_are_handed_over_last() {
    let nbd = NbdCase::new();
    let (image, socket) =
        (nbd.case.folder.image("second.img", 1 << 20), nbd.case.folder.join("s2"));
    let (top, nbd_socket) = (&nbd.case.top, format!("unix:{}", nbd.socket.display()));
    let text = format!(
        "[[disk]]\nname = \"first\"\nimage = {top:?}\nnbd = {nbd_socket:?}\n\
         [[disk]]\nname = \"second\"\nimage = {image:?}\nvhost-user = {socket:?}\n"
    );
    let config = nbd.case.folder.join("toml");
    std::fs::write(&config, text).unwrap();
    let mut daemon = Daemon::start(&mut nbd.case.configured(&config));
    daemon.wait_ready();
    let answer = ctl(&nbd.case, &["upgrade", "--json"]).good();
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let order: Vec<_> = (0..2).map(|at| answer["disks"][at]["name"].as_str().unwrap()).collect();
    assert_eq!(order, ["second", "first"]);
    assert!(daemon.ended(SOON).success());
    let pid = ctl(&nbd.case, &["status", "--json"]).good();
    let pid: serde_json::Value = serde_json::from_str(&pid).unwrap();
    crate::handover::end_server(pid["pid"].as_i64().unwrap() as i32);
}

/// Structured replies, extents and flags are those that the client has negotiated.
const SCRIPT: &str = r#"
import sys, errno
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.add_meta_context("qemu:allocation-depth")
h.connect_uri(sys.stdin.readline().strip())
assert h.get_structured_replies_negotiated()
for line in sys.stdin:
    at = int(line) << 20
    data = b"%08d" % at * 512
    h.pwrite(data, at)
    assert h.pread(4096, at) == data
    seen = []
    h.block_status(4 << 20, 0, lambda name, offset, entries, err: seen.append(name))
    assert sorted(seen) == ["base:allocation", "qemu:allocation-depth"], seen
    try:
        h.pread(512, 1 << 50)
        assert False
    except nbd.Error as e:
        pass
    h.flush()
    print("done", flush=True)
"#;

#[test]
fn what_a_client_has_negotiated_goes_on() {
    let nbd = NbdCase::new();
    let mut daemon = nbd.serve();
    let mut client = tool_command("nbdsh")
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = client.stdin.take().unwrap();
    let mut from = Lines::of(client.stdout.take().unwrap());
    writeln!(to, "{}", nbd.uri()).unwrap();
    for round in 0..3 {
        writeln!(to, "{round}").unwrap();
        assert_eq!(from.next().unwrap(), "done");
        daemon = nbd.replace(daemon);
    }
    drop(to);
    assert!(end_of(&mut client, TOOL).success());
    nbd.end(daemon);
}

#[test]
fn a_client_with_tls_is_disconnected_after_its_last_reply() {
    let tls = TlsFixture::new();
    let control = tls.folder.join("control");
    let serve = || {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg(&tls.disk).arg("--control").arg(&control);
        command.arg("--nbd").arg(format!("unix:{}", tls.socket.display()));
        command.arg("--tls-certificates").arg(&tls.server);
        command
    };
    let mut old = Daemon::start(&mut serve());
    old.wait_ready();
    let uri = tls.uri("", &tls.vm1);
    let script = format!(
        "import sys\nh.set_uri_allow_local_file(True)\nh.connect_uri('{uri}')\nh.pread(512, 0)\n\
         print('ready', flush=True)\nsys.stdin.readline()\n\
         try:\n    h.pread(512, 0)\nexcept nbd.Error:\n    print('closed', flush=True)\n"
    );
    let mut client = tool_command("nbdsh")
        .args(["-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut from = Lines::of(client.stdout.take().unwrap());
    assert_eq!(from.next().unwrap(), "ready");
    let mut new = Daemon::start(serve().arg("--takeover").arg(&control));
    new.wait_ready();
    assert!(old.ended(SOON).success(), "{}", old.log());
    assert!(old.log().contains("1 NBD clients with TLS were disconnected"), "{}", old.log());
    writeln!(client.stdin.take().unwrap()).unwrap();
    assert_eq!(from.next().unwrap(), "closed");
    assert!(end_of(&mut client, TOOL).success());
    new.stop();
}
