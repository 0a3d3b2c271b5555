//! Hand-over: a new server takes the disks of a running one, and guests stay connected. A new
//! server that fails leaves the old one serving.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::status;

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, TOOL, blockyard, run, tool, until};
use crate::guest::{Guest, pattern, write_base};

const MIB: usize = 1 << 20;
/// Number of writes between two steps under load.
pub const MORE: u64 = 100;

/// A folder with an overlay, and the command line of its servers.
pub struct Case {
    pub folder: Folder,
    pub top: PathBuf,
    pub socket: PathBuf,
    pub control: PathBuf,
    pub api: PathBuf,
}

impl Case {
    pub fn new() -> Self {
        let folder = Folder::new();
        let [top, socket, control, api] =
            ["disk.qcow2", "s", "control", "api"].map(|name| folder.join(name));
        write_base(&folder.join("base.img"), 32 * MIB);
        let create = ["image", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.img"];
        blockyard(create.iter().copied().chain([top.to_str().unwrap()])).good();
        Case { folder, top, socket, control, api }
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg(&self.top).arg("--vhost-user").arg(&self.socket);
        command.arg("--control").arg(&self.control).arg("--api").arg(&self.api);
        command
    }

    /// Returns the command line of a server with a configuration file.
    pub fn configured(&self, config: &Path) -> Command {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg("--config").arg(config);
        command.arg("--control").arg(&self.control).arg("--api").arg(&self.api);
        command
    }

    pub fn serve(&self) -> Daemon {
        let mut daemon = Daemon::start(&mut self.command());
        daemon.wait_ready();
        daemon
    }

    pub fn takeover(&self) -> Command {
        let mut command = self.command();
        command.arg("--takeover").arg(&self.control);
        command
    }

    /// Replaces a server by a new one. Returns the new one, when the old one has ended.
    pub fn replace(&self, old: Daemon) -> Daemon {
        self.replace_by(old, &mut self.takeover())
    }

    pub fn replace_by(&self, mut old: Daemon, command: &mut Command) -> Daemon {
        let mut new = Daemon::start(command);
        assert!(new.became_ready(), "{}\n---- old ----\n{}", new.log(), old.log());
        let status = old.ended(SOON);
        assert!(status.success(), "{status}: {}", old.log());
        // A server that takes over asks whether its peer lives.
        let peer = || {
            let control = UnixStream::connect(&self.control).unwrap();
            blockyard_ring::host::peer(&control).unwrap().process
        };
        until("the new server is the peer", SOON, || peer() == Some(new.pid() as i32));
        new
    }

    pub fn load(&self) -> LoadOptions {
        LoadOptions {
            rw: Pattern::Randrw,
            depth: 16,
            runtime: 300.0,
            flush_every: 200,
            verify: true,
            ..LoadOptions::for_socket(self.socket.clone())
        }
    }

    /// Runs `work` under a verified load that neither reconnects nor sees an error.
    pub fn under_load<T>(&self, load: &LoadOptions, work: impl FnOnce(&dyn Fn()) -> T) -> T {
        std::thread::scope(|scope| {
            let client = scope.spawn(|| measure(load));
            let result = work(&|| assert!(!client.is_finished(), "the load ended early"));
            load.over.store(true, Ordering::Relaxed);
            let report = client.join().unwrap().unwrap();
            assert_eq!((report.errors, report.first_error), (0, None));
            assert!(report.verified_blocks > 100, "{} blocks: no load", report.verified_blocks);
            result
        })
    }

    pub fn is_clean(&self) {
        tool("qemu-img", ["check", self.top.to_str().unwrap()]).good();
    }
}

/// Waits until a server has answered [`MORE`] writes more. A hand-over carries their count over.
pub fn serves(daemon: &Daemon) {
    let before = daemon.served("write", "");
    daemon.until_served_more_than(before + MORE, "write", "");
}

/// Waits until a server has at most a descriptor more than an early one: the journal. Connections
/// of the API come and go. What hand-overs leak stays. A failure shows all that were open.
pub fn has_no_more_descriptors(daemon: &Daemon, before: &[String]) {
    let (most, mut seen) = (before.len() + 1, Vec::new());
    until(&format!("at most {most} descriptors are open, earlier {before:?}"), SOON, || {
        let now = daemon.descriptors();
        if now != seen {
            eprintln!("open are {now:?}");
            seen = now;
        }
        seen.len() <= most
    });
}

fn twenty_handovers(packed: bool) {
    let case = Case::new();
    let first = case.serve();
    let load = LoadOptions { packed, ..case.load() };
    let (daemon, before) = case.under_load(&load, |goes_on| {
        serves(&first);
        let mut daemon = case.replace(first);
        serves(&daemon);
        let before = daemon.descriptors();
        for _ in 1..20 {
            goes_on();
            daemon = case.replace(daemon);
            serves(&daemon);
        }
        has_no_more_descriptors(&daemon, &before);
        (daemon, before)
    });
    assert!(!before.is_empty());
    daemon.stop();
    for gone in [&case.socket, &case.control, &case.api] {
        assert!(!gone.exists(), "{} is left", gone.display());
    }
    case.is_clean();
}

#[test]
fn twenty_handovers_under_load_are_not_noticed() {
    twenty_handovers(false);
}

#[test]
fn twenty_handovers_of_packed_rings_are_not_noticed() {
    twenty_handovers(true);
}

/// Clients that connect later find the new server. The second server replaced the first before any
/// client connected.
#[test]
fn a_disk_without_a_client_is_handed_over() {
    let case = Case::new();
    let daemon = case.replace(case.serve());
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    let daemon = case.replace(daemon);
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    guest.leave();
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    drop(guest);
    daemon.stop();
    case.is_clean();
}

/// Makes the entry of a guest cluster in a qcow2 image invalid.
fn break_entry(image: &Path, cluster_at: u64) {
    let file = File::options().read(true).write(true).open(image).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let cluster_bits = word(16) & 0xffff_ffff;
    let entry_bytes = if word(72) & 1 << 4 == 0 { 8 } else { 16 };
    let (cluster, per_table) = (cluster_at >> cluster_bits, (1 << cluster_bits) / entry_bytes);
    let table = word(word(40) + cluster / per_table * 8) & 0x00ff_ffff_ffff_fe00;
    let entry = table + cluster % per_table * entry_bytes;
    assert!(table != 0 && word(entry) != 0, "the cluster has data");
    let reserved = 1 << 1;
    file.write_all_at(&(word(entry) | reserved).to_be_bytes(), entry).unwrap();
}

/// A check reads all metadata, which would prolong a guest's pause. So the new server opens the
/// image without one. A server that begins anew checks it.
#[test]
fn an_image_is_not_checked_again_at_a_hand_over() {
    let case = Case::new();
    let top = case.top.to_str().unwrap();
    blockyard(["image", "create", "-q", "--force", "-f", "qcow2", top, "4G"]).good();
    let far = 3 << 30;
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(far / 512, &pattern(1, 4096)), status::OK);
    drop(guest);
    daemon.stop();
    case.is_clean();

    let first = case.serve();
    break_entry(&case.top, far);
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &pattern(2, 4096)), status::OK);
    let second = case.replace(case.replace(first));
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(2, 4096));
    drop(guest);
    second.stop();

    let mut anew = Daemon::start(&mut case.command());
    assert!(!anew.became_ready());
    assert!(anew.log().contains("it is not opened for writing"), "{}", anew.log());
}

/// Returns the counters of the disks, without those of policies.
pub fn counters(case: &Case) -> std::io::Result<BTreeMap<String, f64>> {
    let mut stream = UnixStream::connect(&case.api)?;
    stream.set_read_timeout(Some(SOON))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    let is_counter = |series: &str| {
        let name = series.split('{').next().unwrap_or_default();
        let is_policy = ["policy", "signal"].iter().any(|word| name.contains(word));
        let ends = ["_total", "_bucket", "_count", "_sum"];
        name.starts_with("blockyard_disk_") && !is_policy && ends.iter().any(|e| name.ends_with(e))
    };
    let counters = lines.filter(|(series, _)| is_counter(series));
    Ok(counters.map(|(series, value)| (series.to_string(), value.parse().unwrap())).collect())
}

/// Returns the number of requests that have been answered. None: no server answers the API.
pub fn requests(case: &Case) -> Option<f64> {
    let counters = counters(case).ok()?.into_iter();
    let of_kind = |(series, _): &(String, f64)| series.starts_with("blockyard_disk_requests_total");
    Some(counters.filter(of_kind).map(|(_, count)| count).sum())
}

/// Messages of the front end after a hand-over have the features that it has negotiated before.
#[test]
fn a_front_end_goes_on_with_its_negotiated_features() {
    let case = Case::new();
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(8, &pattern(2, 4096)), status::OK);
    let daemon = case.replace(daemon);
    let before = guest.session.link.config;
    let connection = &mut guest.session.link.connection;
    assert_eq!(connection.config().unwrap(), before);
    let Err(e) = connection.enable(77, true) else { panic!("there is no such queue") };
    assert!(!format!("{e:#}").contains("isconnect"), "{e:#}");
    // Stops the ring, which needs its position.
    let base = connection.stop_ring(0).unwrap();
    assert!(base > 0);
    drop(guest);
    daemon.stop();
}

pub fn ctl(case: &Case, arguments: &[&str]) -> crate::common::Finished {
    let mut command = Command::new(BLOCKYARD);
    command.arg("ctl").arg("--api").arg(&case.api).args(arguments);
    run(&mut command, TOOL)
}

/// Returns the lines of a stream of events, from the first one on.
fn follow(case: &Case) -> impl Iterator<Item = String> {
    let mut stream = UnixStream::connect(&case.api).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(b"GET /v1/events?since=0 HTTP/1.0\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "event: server-ready"));
    lines
}

/// Returns the data of the first event of this name that a server has.
pub fn first_event(mut stream: UnixStream, name: &str) -> String {
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(b"GET /v1/events?since=0 HTTP/1.0\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == format!("event: {name}")), "no {name}");
    lines.next().unwrap()
}

#[test]
fn ctl_upgrade_replaces_the_server_and_prints_the_pause() {
    let case = Case::new();
    let mut daemon = case.serve();
    case.under_load(&case.load(), |_| {
        serves(&daemon);
        let first = daemon.pid();
        let mut events = follow(&case);
        let shown = ctl(&case, &["upgrade"]).good();
        assert!(shown.contains("serves the disks") && shown.contains(" ms"), "{shown}");
        // The first server may still run, but only the second one accepts calls.
        let of_second: Vec<serde_json::Value> = (0..5)
            .map(|_| serde_json::from_str(&ctl(&case, &["status", "--json"]).good()).unwrap())
            .collect();
        let second = of_second[0]["pid"].as_u64().unwrap() as u32;
        assert!(of_second.iter().all(|status| status["pid"] == second) && first != second);
        assert!(daemon.ended(SOON).success(), "{}", daemon.log());
        let left = "\"why\":\"another server continues it\"";
        let ended = "event: hand-over-ended";
        for text in ["event: hand-over-begun", left, ended, "event: server-ending"] {
            assert!(events.any(|line| line.contains(text)), "no {text}");
        }
        // The data of the last event, and the end of the stream.
        assert_eq!(events.count(), 2);
        let third: serde_json::Value =
            serde_json::from_str(&ctl(&case, &["upgrade", "--json"]).good()).unwrap();
        let third = third["pid"].as_u64().unwrap() as i32;
        until("the second server has ended", SOON, || !is_running(second as i32));
        LAST.with(|last| last.set(third));
    });
    let last = LAST.with(std::cell::Cell::get);
    end_server(last);
    case.is_clean();
}

thread_local! {
    /// The server that the last upgrade has started. It is no child of this process.
    static LAST: std::cell::Cell<i32> = const { std::cell::Cell::new(0) };
}

pub fn is_running(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !status.is_empty() && !status.contains(") Z ")
}

pub fn end_server(pid: i32) {
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    until("the last server has ended", SOON, || !is_running(pid));
}

/// A hand-over copies the descriptors of the front ends.
#[test]
fn a_server_with_few_free_descriptors_keeps_its_disks() {
    let case = Case::new();
    let open = |daemon: &Daemon| daemon.descriptors().len();
    let connected = {
        let daemon = case.serve();
        let _guest = Guest::connect(&case.socket);
        let connected = open(&daemon);
        daemon.stop();
        connected
    };
    // A quarter of the limit is the reserve.
    let limit = connected * 4 / 3 - 1;
    let serve = case.command();
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--nofile={limit}:{limit}")).arg(serve.get_program());
    let mut daemon = Daemon::start(limited.args(serve.get_args()));
    daemon.wait_ready();
    let mut guest = Guest::connect(&case.socket);
    let refused = ctl(&case, &["upgrade"]);
    assert!(refused.err.contains("descriptors are left (ulimit -n)"), "{}", refused.err);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    guest.leave();
    daemon.stop();
}

/// Writes a program in Bash.
pub fn script(case: &Case, name: &str, body: &str) -> PathBuf {
    case.folder.script(name, &format!("#!/bin/bash\n{body}\n"))
}

/// Programs that fail as the next server, each at another step. Python takes half the time of its
/// start for packages outside its library, which -IS leaves out.
pub fn failing(case: &Case) -> Vec<(String, PathBuf)> {
    let script = |name: &str, body: &str| (name.to_string(), script(case, name, body));
    let disk = case.top.file_name().unwrap().display();
    let half = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/half_server.py");
    let mut all: Vec<_> = ["start", "nonsense", "hello", "take", "given", "took", "ready"]
        .map(|last| script(last, &format!("exec python3 -IS {half} {disk} {last}")))
        .into();
    // The real program, with a disk of another shape: it fails after it has opened the image. Then
    // with options of the API, which fail before.
    for (name, option) in [
        ("queues", "--queues 2"),
        ("group", "--socket-group no"),
        ("metrics", "--metrics 192.0.2.1:9"),
    ] {
        all.push(script(name, &format!("exec {BLOCKYARD} \"$@\" {option}")));
    }
    all
}

#[test]
fn a_new_server_that_fails_leaves_the_old_one_serving() {
    let case = Case::new();
    // In a sandbox the server would not start these programs.
    let mut daemon = Daemon::start(case.command().args(["--sandbox", "off"]));
    daemon.wait_ready();
    case.under_load(&case.load(), |goes_on| {
        serves(&daemon);
        for (stage, program) in failing(&case) {
            let done = ctl(&case, &["upgrade", "--binary", program.to_str().unwrap()]);
            assert!(!done.status.success(), "{stage}: {}", done.out);
            assert!(done.err.contains("not upgraded"), "{stage}: {}", done.err);
            goes_on();
            serves(&daemon);
        }
        ctl(&case, &["list"]).good();
    });
    let mut daemon = case.replace(daemon);
    assert!(daemon.running());
    daemon.stop();
    case.is_clean();
}

/// The new server has served the first disk when it finds that it cannot serve the second one. The
/// old one repeats what the new one left unanswered, with the position of the ring.
fn served_by_both(no_inflight: bool, packed: bool) {
    let case = Case::new();
    let second = (case.folder.image("second.img", 1 << 20), case.folder.join("s2"));
    let config = |name: &str, queues: u32| {
        let [top, socket, image, other] =
            [&case.top, &case.socket, &second.0, &second.1].map(|path| path.display().to_string());
        let text = format!(
            "[[disk]]\nimage = \"{top}\"\nvhost-user = \"{socket}\"\n\
             [[disk]]\nimage = \"{image}\"\nvhost-user = \"{other}\"\nqueues = {queues}\n"
        );
        let path = case.folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let serve = |config: &Path| {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg("--config").arg(config).arg("--control").arg(&case.control);
        command
    };
    let good = config("good.toml", 1);
    let mut daemon = Daemon::start(&mut serve(&good));
    daemon.wait_ready();
    let mut other = Guest::connect(&second.1);
    let wrong = config("wrong.toml", 2);
    let load = LoadOptions { no_inflight, packed, ..case.load() };
    case.under_load(&load, |goes_on| {
        for _ in 0..5 {
            daemon.until_served("write", "disk.qcow2");
            let mut new = Daemon::start(serve(&wrong).arg("--takeover").arg(&case.control));
            assert_eq!(new.ended(SOON).code(), Some(1), "{}", new.log());
            assert!(new.log().contains("configured with 2"), "{}", new.log());
            goes_on();
            assert_eq!(other.write(0, &pattern(1, 4096)), status::OK);
        }
    });
    drop(other);
    let log = daemon.stop();
    assert_eq!(log.matches("served again").count(), 10, "{log}");
    case.is_clean();
}

#[test]
fn the_old_server_goes_on_where_a_new_one_has_served() {
    served_by_both(false, false);
    served_by_both(true, true);
}

#[test]
fn a_front_end_without_in_flight_region_is_served_by_both() {
    served_by_both(true, false);
}

/// Clients that connect after a hand-over find the new server.
#[test]
fn the_address_of_nbd_is_handed_over() {
    let case = Case::new();
    let nbd = case.folder.join("nbd");
    let second = (case.folder.image("second.img", 1 << 20), case.folder.join("third.img"));
    std::fs::write(&second.1, vec![7; 1 << 20]).unwrap();
    let disk = |image: &Path| {
        format!("[[disk]]\nimage = \"{}\"\nnbd = \"unix:{}\"\n", image.display(), nbd.display())
    };
    let config = case.folder.join("nbd.toml");
    std::fs::write(&config, disk(&second.0) + &disk(&second.1)).unwrap();
    let serve = || {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg("--config").arg(&config).arg("--control").arg(&case.control);
        command
    };
    let mut old = Daemon::start(&mut serve());
    old.wait_ready();
    for _ in 0..3 {
        let mut new = Daemon::start(serve().arg("--takeover").arg(&case.control));
        new.wait_ready();
        assert!(old.ended(SOON).success(), "{}", old.log());
        old = new;
        let uri = format!("nbd+unix:///third.img?socket={}", nbd.display());
        assert_eq!(tool("nbdinfo", ["--size", &uri]).good().trim(), "1048576");
    }
    old.stop();
    assert!(!nbd.exists());
}

#[test]
fn an_unknown_format_is_refused() {
    let case = Case::new();
    let daemon = case.serve();
    let stream = std::os::unix::net::UnixStream::connect(&case.control).unwrap();
    let soon = std::time::Instant::now() + Duration::from_secs(60);
    let hello = br#"{"hello":{"format":999,"version":"9.9"}}"#;
    blockyard_ring::parcel::send(&stream, hello, &[], soon).unwrap();
    let answer = blockyard_ring::parcel::receive(&stream, soon).unwrap().unwrap();
    let text = String::from_utf8_lossy(&answer.bytes).into_owned();
    assert!(text.contains("format 999"), "{text}");
    assert!(text.contains("version 9.9"), "{text}");
    drop(stream);
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &pattern(1, 512)), status::OK);
    drop(guest);
    daemon.stop();
}

#[test]
fn a_server_that_cannot_be_reached_is_named() {
    let case = Case::new();
    let daemon = case.serve();
    let absent: &Path = &case.folder.join("nothing");
    let mut command = case.command();
    let done = run(command.arg("--takeover").arg(absent), SOON);
    assert_eq!(done.status.code(), Some(1));
    assert!(done.err.contains("no server can be reached there"), "{}", done.err);
    daemon.stop();
}
