//! `ctl backup`: copies of disks that guests use.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockyard_driver::{Plan, Session, SplitRing};
use serde_json::{Value, json};

use crate::blocks::{BLOCK, byte_of, write, write_by};
use crate::common::{BLOCKYARD, Finished, Folder, SOON, TOOL, blockyard, run, tool, until};
use crate::events::follow;
use crate::server::Server;
use crate::wait::with_slow_base;

/// Size of a disk in bytes.
const SIZE: u64 = 16 << 20;
/// Number of blocks that a guest fills, in their order, again and again.
const BLOCKS: u64 = 256;

fn ctl(server: &Server, arguments: &[&str]) -> Finished {
    let mut command = Command::new(BLOCKYARD);
    command.current_dir(&*server.folder).arg("ctl").arg("--api").arg(server.socket());
    run(command.args(arguments), TOOL)
}

/// Sets a flag on drop, also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Returns the byte of the write with this number.
fn byte_of_write(number: u64) -> u8 {
    (number / BLOCKS % 250 + 1) as u8
}

/// Returns the bytes of all blocks after this number of writes. It is larger than [`BLOCKS`].
fn after(writes: u64) -> Vec<u8> {
    let last_of = |block| (writes - 1 - block) / BLOCKS * BLOCKS + block;
    (0..BLOCKS).map(|block| byte_of_write(last_of(block))).collect()
}

/// Returns the bytes of all blocks of an image, and checks a qcow2 image.
fn blocks_of(image: &Path) -> Vec<u8> {
    let mut raw = image.to_path_buf();
    if image.extension().is_some_and(|extension| extension == "qcow2") {
        tool("qemu-img", ["check", "-q", image.to_str().unwrap()]).good();
        raw.set_extension("as-raw");
        let raw = raw.to_str().unwrap();
        blockyard(["image", "convert", "-O", "raw", image.to_str().unwrap(), raw]).good();
    }
    let bytes = std::fs::read(&raw).unwrap();
    assert_eq!(bytes.len() as u64, SIZE);
    bytes.chunks(BLOCK).take(BLOCKS as usize).map(byte_of).collect()
}

/// Backs a disk up while a guest writes to it.
fn is_of_one_moment(image: &str, body: Value) {
    let server = Server::start();
    let (path, socket) = (server.folder.join(image), server.folder.join("s"));
    let size = SIZE.to_string();
    blockyard(["image", "create", "-q", path.to_str().unwrap(), &size]).good();
    server.good("POST", "/v1/disks", json!({ "name": "a", "image": path, "vhost-user": socket }));
    let (ends, writes) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let target = server.folder.join(body["target"].as_str().unwrap());
    let mut body = body;
    body["target"] = target.to_str().into();
    let (before, later) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut guest = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
            for number in (0..).take_while(|_| !ends.load(Ordering::SeqCst)) {
                write_by(&mut guest, number % BLOCKS, byte_of_write(number));
                writes.store(number + 1, Ordering::SeqCst);
            }
        });
        let _stop = Stop(ends);
        let written = || writes.load(Ordering::SeqCst);
        until("all blocks are written", SOON, || written() > 2 * BLOCKS);
        let before = written();
        let job = server.ended(&server.good("POST", "/v1/disks/a/backup", body));
        assert_eq!(job["state"], "done", "{job}");
        let kind = job["kind"].as_str().unwrap();
        assert!(kind.starts_with("backup") && kind.contains("copy"), "{job}");
        // The image may have a write that has no answer yet.
        let later = written() + 1;
        // The guest goes on after the job, too.
        until("the guest goes on", SOON, || written() > later + BLOCKS);
        (before, later)
    });
    let copied = blocks_of(&target);
    assert!(
        (before..=later).any(|writes| after(writes) == copied),
        "{before}..{later}: {copied:?}"
    );
    let disk = server.good("GET", "/v1/disks/a", Value::Null);
    assert!(!disk["images"].as_str().unwrap().contains("copy"), "{disk}");
}

#[test]
fn a_copy_of_a_raw_disk_is_the_disk_at_one_moment() {
    is_of_one_moment("disk.img", json!({ "target": "copy.qcow2" }));
    is_of_one_moment("disk.img", json!({ "target": "copy.any" }));
}

#[test]
fn a_copy_of_a_qcow2_disk_is_the_disk_at_one_moment() {
    is_of_one_moment("disk.qcow2", json!({ "target": "copy.img" }));
    is_of_one_moment("disk.qcow2", json!({ "target": "copy.of.qcow2", "format": "qcow2" }));
}

#[test]
fn a_cancelled_backup_leaves_no_file_and_can_be_repeated() {
    let slow = with_slow_base();
    let server = &slow.server;
    let mut events = follow(server, "/v1/events");
    let target = server.folder.join("copy.img");
    let body = json!({ "target": target });
    slow.way.set(true);
    let job = server.good("POST", "/v1/disks/a/backup", body.clone());
    assert_eq!(job["state"], "running", "{job}");
    let begun = events.find("job-begun");
    assert_eq!(begun["job"]["number"], job["number"]);
    assert!(begun["job"]["kind"].as_str().unwrap().starts_with("backup"), "{begun}");
    ctl(server, &["cancel", &job["number"].to_string()]).good();
    slow.way.set(false);
    let job = server.ended(&job);
    assert_eq!(job["state"], "failed", "{job}");
    assert!(job["error"].as_str().unwrap().contains("cancelled"), "{job}");
    assert_eq!(events.find("job-ended")["job"]["state"], "failed");
    assert!(!target.exists());
    let job = server.ended(&server.good("POST", "/v1/disks/a/backup", body));
    assert_eq!(job["state"], "done", "{job}");
    assert!(std::fs::read(&target).unwrap().iter().all(|byte| *byte == 7));
}

#[test]
fn a_copy_that_cannot_be_made_is_refused_and_the_field_is_named() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    std::fs::create_dir(folder.join("conf.d")).unwrap();
    folder.image("base.img", 1 << 20);
    let main = "[[disk]]\nname = \"a\"\nimage = \"FOLDER/base.img\"\nvhost-user = \"FOLDER/a\"\n";
    let server = Server::configured_in(folder, main);
    let at = |name: &str| server.folder.join(name).to_str().unwrap().to_string();
    std::fs::write(at("there.img"), "x").unwrap();
    std::os::unix::fs::symlink("nowhere", at("link.img")).unwrap();
    for (name, more, field, part) in [
        ("there.img", json!({}), "target", "exists already"),
        ("link.img", json!({}), "target", "exists already"),
        ("base.img", json!({}), "target", "exists already"),
        ("no/folder.img", json!({}), "target", "does not exist: create it first"),
        ("conf.d/x.img", json!({}), "target", "belongs to the server's configuration"),
        ("a\nb.img", json!({}), "target", "no control characters"),
        ("copy.cow", json!({}), "target", "a backup is raw or qcow2"),
        ("copy", json!({ "format": "cow" }), "format", "use raw or qcow2"),
        ("copy", json!({ "format": "vmdk" }), "format", "use raw or qcow2"),
        ("copy", json!({ "format": 5 }), "format", "must be a text"),
        ("copy", json!({ "compressed": true }), "compressed", "unknown field"),
    ] {
        let mut body = more;
        body["target"] = at(name).into();
        let problem = server.bad("POST", "/v1/disks/a/backup", &body.to_string(), 422);
        assert_eq!(problem["field"], field, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(part), "{problem}");
    }
    for target in ["", "nbd://host/copy"] {
        let body = json!({ "target": target }).to_string();
        let problem = server.bad("POST", "/v1/disks/a/backup", &body, 422);
        assert!(problem["detail"].as_str().unwrap().contains("give its path"), "{problem}");
    }
    server.bad("POST", "/v1/disks/b/backup", &json!({ "target": at("copy") }).to_string(), 404);
    assert_eq!(std::fs::read(at("there.img")).unwrap(), b"x");
    assert!(!server.folder.join("copy").exists() && !server.folder.join("copy.cow").exists());
    // As a snapshot outside of the folders.
    let outside = elsewhere.join("copy.img");
    let body = json!({ "target": outside });
    let job = server.ended(&server.good("POST", "/v1/disks/a/backup", body));
    let option = format!("--allow-folder {}", elsewhere.to_str().unwrap());
    assert!(job["error"].as_str().unwrap().contains(&option), "{job}");
    assert!(!outside.exists());
}

#[test]
fn the_command_copies_a_read_only_disk_into_its_own_folder() {
    let server = Server::start();
    let at = |name: &str| server.folder.join(name);
    std::fs::write(at("disk.img"), vec![9; 1 << 20]).unwrap();
    let keys = json!({
        "name": "a", "image": at("disk.img"), "vhost-user": at("s"), "read-only": true,
    });
    server.good("POST", "/v1/disks", keys);
    std::fs::create_dir(at("backups")).unwrap();
    let out = ctl(&server, &["backup", "a", "backups/copy"]).good();
    assert!(out.contains("done") && out.contains("backup"), "{out}");
    assert_eq!(std::fs::read(at("backups/copy")).unwrap(), vec![9; 1 << 20]);
    let out = ctl(&server, &["backup", "a", "backups/copy-2", "--no-wait", "--json"]).good();
    let job: Value = serde_json::from_str(&out).unwrap();
    ctl(&server, &["wait", &job["number"].to_string()]).good();
    assert!(at("backups/copy-2").exists());
    assert!(ctl(&server, &["jobs"]).good().contains("copy-2"));
    let failed = ctl(&server, &["backup", "a", "backups/copy"]);
    assert!(failed.err.contains("exists already"), "{}", failed.err);
    let failed = ctl(&server, &["backup", "a", "x", "--format", "cow"]);
    assert_eq!(failed.status.code(), Some(2));
    assert!(failed.err.contains("raw") && failed.err.contains("qcow2"), "{}", failed.err);
}

/// The copy has what is in all images of the disk, and needs none of them.
#[test]
fn a_copy_of_a_disk_with_an_overlay_stands_alone() {
    let server = Server::start();
    let at = |name: &str| server.folder.join(name);
    let (base, socket) = (at("base.qcow2"), at("s"));
    blockyard(["image", "create", "-q", base.to_str().unwrap(), &SIZE.to_string()]).good();
    server.good("POST", "/v1/disks", json!({ "name": "a", "image": base, "vhost-user": socket }));
    (0..BLOCKS).for_each(|block| write(&socket, block, 1));
    let overlay = json!({ "overlay": at("top.qcow2") });
    let job = server.ended(&server.good("POST", "/v1/disks/a/snapshot", overlay));
    assert_eq!(job["state"], "done", "{job}");
    write(&socket, 5, 2);
    let body = json!({ "target": at("copy.qcow2") });
    let job = server.ended(&server.good("POST", "/v1/disks/a/backup", body));
    assert_eq!(job["state"], "done", "{job}");
    server.good("DELETE", "/v1/disks/a?force=true", Value::Null);
    std::fs::remove_file(&base).unwrap();
    let copied = blocks_of(&at("copy.qcow2"));
    let expected: Vec<_> = (0..BLOCKS).map(|block| if block == 5 { 2 } else { 1 }).collect();
    assert_eq!(copied, expected);
}
