//! A host without space: requests of a disk with `on-enospc = "pause"` wait until an operator has
//! freed space and resumes the disk. No write is lost, and an end of the disk is never held up.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::status;
use serde_json::Value;

use crate::common::{Daemon, Finished, Folder, SOON, blockyard, tool, until};
use crate::guest::{Guest, pattern};

const MIB: usize = 1 << 20;
/// Size of the disk, and of the file that takes its place.
const SIZE: usize = 16 * MIB;
/// Bytes of one write.
const PIECE: usize = 64 << 10;

/// A small file system. Dropping it unmounts it.
struct Mount(PathBuf);

impl Mount {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = PathBuf::from(format!("/dev/shm/by-full-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        tool("mount", ["-t", "tmpfs", "-o", "size=24m", "tmpfs", folder.to_str().unwrap()]).good();
        Mount(folder)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = tool("umount", ["--lazy", self.0.to_str().unwrap()]);
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A disk on a file system that a large file leaves too little space on.
struct Case {
    daemon: Daemon,
    folder: Folder,
    mount: Mount,
    options: Vec<String>,
}

impl Case {
    fn new(image: &str, options: &[&str]) -> Self {
        Case::cached(image, "writeback", options)
    }

    fn cached(image: &str, cache: &str, options: &[&str]) -> Self {
        let (folder, mount) = (Folder::new(), Mount::new());
        let path = mount.0.join(image);
        let size = SIZE.to_string();
        let format = if image.ends_with("qcow2") { "qcow2" } else { "raw" };
        let image = path.to_str().unwrap();
        blockyard(["image", "create", "-q", "-f", format, image, &size]).good();
        std::fs::write(mount.0.join("filler"), vec![1; SIZE]).unwrap();
        let api = folder.join("api");
        let fixed = ["--name", "disk", "--cache", cache, "--api", api.to_str().unwrap()];
        // A snapshot may be elsewhere.
        let elsewhere = api.parent().unwrap().to_str().unwrap();
        let below = mount.0.to_str().unwrap();
        let folders = ["--backing-folder", below, "--allow-folder", elsewhere];
        let folders = if format == "qcow2" { &folders[..] } else { &[] };
        let options = [&fixed[..], folders, options].concat();
        let daemon = Daemon::serve(&path, &folder.join("s"), &options);
        let options = options.into_iter().map(String::from).collect();
        Case { daemon, folder, mount, options }
    }

    fn free(&self) {
        std::fs::remove_file(self.mount.0.join("filler")).unwrap();
    }

    fn ctl(&self, command: &[&str]) -> Finished {
        let api = self.folder.join("api");
        blockyard([&["ctl", "--api", api.to_str().unwrap()], command].concat())
    }

    /// Returns the number of requests that wait for space.
    fn paused(&self) -> u64 {
        let answer = self.ctl(&["--json", "list"]).good();
        let list: Value = serde_json::from_str(&answer).unwrap();
        list["disks"][0]["paused"].as_u64().unwrap()
    }

    fn until_paused(&self) {
        until("requests wait for space", SOON, || self.paused() > 0);
    }

    /// Returns the metric of requests that wait for space.
    fn metric(&self) -> String {
        let mut stream = UnixStream::connect(self.folder.join("api")).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
        lines.find(|line| line.starts_with("blockyard_disk_paused{")).expect("it is a metric")
    }

    /// Writes to the whole disk in the background, and then reads it back.
    fn load(&self, rw: Pattern) -> JoinHandle<()> {
        let load = LoadOptions {
            rw,
            bs: 16 << 10,
            depth: 16,
            ops: Some(3000),
            flush_every: 50,
            verify: true,
            ..LoadOptions::for_socket(self.folder.join("s"))
        };
        std::thread::spawn(move || {
            let report = measure(&load).unwrap();
            assert_eq!((report.errors, report.first_error), (0, None));
            assert!(report.verified_blocks > 500, "{} blocks", report.verified_blocks);
        })
    }
}

#[test]
fn writes_wait_for_space_and_all_of_them_succeed_after_a_resume() {
    for (image, rw) in [("disk", Pattern::Write), ("disk.qcow2", Pattern::Randwrite)] {
        let case = Case::new(image, &["--on-enospc", "pause"]);
        let load = case.load(rw);
        case.until_paused();
        assert_eq!(case.metric(), "blockyard_disk_paused{disk=\"disk\"} 1");
        let status = case.ctl(&["status"]).good();
        assert!(status.contains("paused") && status.contains("wait for space"), "{status}");
        assert!(case.ctl(&["show", "disk"]).good().contains("on-enospc"), "{image}");
        // The end of its session would answer them.
        let refused = case.ctl(&["upgrade"]);
        assert!(refused.err.contains("requests wait for space"), "{}", refused.err);
        // Without space they wait again.
        let resumed = case.ctl(&["resume", "disk"]).good();
        assert!(resumed.starts_with("resumed disk: "), "{resumed}");
        case.until_paused();
        assert!(!load.is_finished());
        case.free();
        // A request may meet the full file system just after a resume.
        until("the load ends", SOON, || {
            case.ctl(&["resume", "disk"]).good();
            load.is_finished()
        });
        load.join().unwrap_or_else(|_| panic!("{image}"));
        assert_eq!(case.paused(), 0);
        let log = case.daemon.stop();
        assert!(log.contains("requests that need space wait now"), "{log}");
        if image.ends_with("qcow2") {
            tool("qemu-img", ["check", case.mount.0.join(image).to_str().unwrap()]).good();
        }
    }
}

/// Writes to the disk in the background, one request at a time. Returns the first error.
fn fill(socket: PathBuf) -> JoinHandle<Option<u8>> {
    std::thread::spawn(move || {
        let mut guest = Guest::connect(&socket);
        let data = pattern(1, PIECE);
        let mut sectors = (0..(SIZE / PIECE) as u64).map(|at| at * (PIECE / 512) as u64);
        sectors.find_map(|at| Some(guest.write(at, &data)).filter(|answer| *answer != status::OK))
    })
}

#[test]
fn a_paused_disk_takes_a_snapshot_on_another_file_system() {
    let case = Case::new("disk.qcow2", &["--on-enospc", "pause"]);
    let guest = fill(case.folder.join("s"));
    case.until_paused();
    let overlay = case.folder.join("top.qcow2");
    case.ctl(&["snapshot", "disk", overlay.to_str().unwrap()]).good();
    assert_eq!(case.paused(), 1, "only a resume ends the pause");
    case.ctl(&["resume", "disk"]).good();
    assert_eq!(guest.join().unwrap(), None, "the overlay has space");
    case.daemon.stop();
}

/// Reads the events of the server so far, and further ones, until one has this name.
fn until_event(case: &Case, name: &str) {
    let mut stream = UnixStream::connect(case.folder.join("api")).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(b"GET /v1/events?since=0 HTTP/1.0\r\n\r\n").unwrap();
    let line = format!("event: {name}");
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    assert!(lines.any(|read| read == line), "no event {name}");
}

#[test]
fn on_enospc_changes_at_run_time_and_events_tell_the_pause() {
    let case = Case::new("disk", &[]);
    case.ctl(&["set", "disk", "on-enospc=pause"]).good();
    let guest = fill(case.folder.join("s"));
    until_event(&case, "disk-paused");
    case.until_paused();
    // The requests that wait try again, and fail.
    case.ctl(&["set", "disk", "on-enospc=error"]).good();
    assert_eq!(guest.join().unwrap(), Some(status::IOERR));
    until_event(&case, "disk-resumed");
    assert_eq!(case.paused(), 0);
    case.daemon.stop();
}

#[test]
fn an_end_of_the_server_answers_waiting_requests_with_the_error() {
    for image in ["disk", "disk.qcow2"] {
        let mut case = Case::new(image, &["--on-enospc", "pause"]);
        let guest = fill(case.folder.join("s"));
        case.until_paused();
        let status = case.daemon.terminate();
        assert!(status.success(), "{image}: {status}: {}", case.daemon.log());
        assert_eq!(guest.join().unwrap(), Some(status::IOERR), "{image}");
    }
}

#[test]
fn by_default_a_write_without_space_fails() {
    let case = Case::new("disk", &[]);
    let mut guest = Guest::connect(&case.folder.join("s"));
    let data = pattern(1, PIECE);
    let mut sectors = (0..(SIZE / PIECE) as u64).map(|at| at * (PIECE / 512) as u64);
    assert!(sectors.any(|at| guest.write(at, &data) == status::IOERR));
    assert_eq!(case.paused(), 0);
    assert_eq!(guest.flush(), status::OK, "no write was lost");
    guest.leave();
    case.daemon.stop();
}

/// Nothing has written the metadata of the old image before, because the disk ignores flushes.
#[test]
fn a_snapshot_fails_while_the_old_image_cannot_be_flushed() {
    let case = Case::cached("disk.qcow2", "unsafe", &[]);
    let mut guest = Guest::connect(&case.folder.join("s"));
    let data = pattern(1, PIECE);
    (0..4).for_each(|n| assert_eq!(guest.write(n * 1024, &data), status::OK));
    let rest = std::fs::write(case.mount.0.join("rest"), vec![1; SIZE]);
    assert_eq!(rest.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    let snapshot =
        |name: &str| case.ctl(&["snapshot", "disk", case.folder.join(name).to_str().unwrap()]);
    let refused = snapshot("1.qcow2");
    assert!(refused.err.contains("snapshot: a flush failed"), "{}", refused.err);
    std::fs::remove_file(case.mount.0.join("rest")).unwrap();
    (0..4).for_each(|n| assert!(guest.read(n * 1024, PIECE).unwrap() == data));
    snapshot("2.qcow2").good();
    case.daemon.kill();
    let (old, raw) = (case.mount.0.join("disk.qcow2"), case.folder.join("raw"));
    let names = [&old, &raw].map(|path| path.to_str().unwrap());
    tool("qemu-img", ["check", "-q", names[0]]).good();
    tool("qemu-img", ["convert", "-U", "-f", "qcow2", "-O", "raw", names[0], names[1]]).good();
    let bytes = std::fs::read(&raw).unwrap();
    (0..4).for_each(|n| assert!(bytes[n * 1024 * 512..][..PIECE] == data));
}

/// The journal of the killed server has changes of metadata for which the host has no space.
#[test]
fn a_disk_whose_replay_needs_space_waits_for_it() {
    let mut case = Case::new("disk.qcow2", &["--on-enospc", "pause"]);
    let mut guest = Guest::connect(&case.folder.join("s"));
    let data = pattern(3, PIECE);
    assert_eq!(guest.write(0, &data), status::OK);
    let rest = std::fs::write(case.mount.0.join("rest"), vec![1; SIZE]);
    assert_eq!(rest.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    // The server keeps what it cannot write, and says so.
    let refused = case.ctl(&["flush", "disk"]);
    assert!(refused.err.contains("no write is lost"), "{}", refused.err);
    let mut command = std::process::Command::new(crate::common::BLOCKYARD);
    command.arg("serve").arg(case.mount.0.join("disk.qcow2")).args(&case.options);
    command.arg("--vhost-user").arg(case.folder.join("s"));
    // The new server replaces the sockets of the dead one.
    case.daemon.signal(crate::common::Signal::KILL);
    case.daemon.ended(SOON);
    drop(guest);
    case.daemon = Daemon::start(&mut command);
    case.daemon.wait_ready();
    let status = || case.ctl(&["status"]).good();
    let shown = status();
    for part in ["opening", "NOT SERVED", "No space left", "free some; `ctl resume disk`"] {
        assert!(shown.contains(part), "{part:?} is not in it: {shown}");
    }
    until_event(&case, "disk-failed");
    assert!(case.ctl(&["resume", "disk"]).good().contains("it tries again now"));
    assert!(status().contains("opening"));
    std::fs::remove_file(case.mount.0.join("rest")).unwrap();
    // It tries again by itself, and at once after a resume.
    case.ctl(&["resume", "disk"]).good();
    until("the disk is served", SOON, || status().contains("serving"));
    assert!(!status().contains("NOT SERVED"));
    let mut guest = Guest::connect(&case.folder.join("s"));
    assert!(guest.read(0, PIECE).unwrap() == data);
    guest.leave();
    case.daemon.stop();
    tool("qemu-img", ["check", case.mount.0.join("disk.qcow2").to_str().unwrap()]).good();
}
