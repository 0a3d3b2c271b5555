//! `ctl fork`: a second disk that begins with the content of another one.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::blocks::{read, write};
use crate::common::{BLOCKYARD, Finished, Folder, SOON, TOOL, blockyard, run, tool, until};
use crate::persist::again;
use crate::server::Server;

fn ctl(server: &Server, arguments: &[&str]) -> Finished {
    let mut command = Command::new(BLOCKYARD);
    command.current_dir(&*server.folder).arg("ctl").arg("--api").arg(server.socket());
    run(command.args(arguments), TOOL)
}

/// Starts a server with the disk `a`, which has this image.
fn serving(image: &str) -> Server {
    let server = Server::start();
    let path = server.folder.join(image);
    blockyard(["image", "create", "-q", path.to_str().unwrap(), "4M"]).good();
    let socket = server.folder.join("a");
    server.good("POST", "/v1/disks", json!({ "name": "a", "image": path, "vhost-user": socket }));
    server
}

/// Returns the body of a fork: the new disk has an image and a socket with its name.
fn body(server: &Server, overlay: &str, disk: &str) -> Value {
    let at = |name: &str| server.folder.join(name);
    let image = at(&format!("{disk}.qcow2"));
    let keys = json!({ "name": disk, "image": image, "vhost-user": at(disk) });
    json!({ "overlay": at(overlay), "disk": keys })
}

fn images(server: &Server, disk: &str) -> String {
    let disk = server.good("GET", &format!("/v1/disks/{disk}"), Value::Null);
    disk["images"].as_str().unwrap().to_string()
}

fn sound(image: &Path) {
    let image = image.to_str().unwrap();
    tool("qemu-img", ["check", "-q", image]).good();
    blockyard(["image", "check", "-q", image]).good();
}

/// Commits the disk `a`. Other disks had its base until now, and reactors close it a moment later.
fn is_committed(server: &Server) {
    until("the commit is done", SOON, || {
        let job = server.good("POST", "/v1/disks/a/commit", Value::Null);
        server.ended(&job)["state"] == "done"
    });
}

/// Forks a disk, and checks that each of the two has its own writes.
fn two_disks(base: &str) {
    let server = serving(base);
    let at = |name: &str| server.folder.join(name);
    let (a, b, c) = (&at("a"), &at("b"), &at("c"));
    write(a, 0, 1);
    write(a, 1, 2);
    let disk = server.good("POST", "/v1/disks/a/fork", body(&server, "a-2.qcow2", "b"));
    assert_eq!((&disk["name"], &disk["size"]), (&json!("b"), &json!(4 << 20)), "{disk}");
    assert!(disk["images"].as_str().unwrap().contains("b.qcow2"), "{disk}");
    assert_eq!(disk["settings"]["added_by_api"], true, "{disk}");
    assert!(images(&server, "a").contains("a-2.qcow2"));
    assert_eq!([read(a, 0), read(a, 1), read(b, 0), read(b, 1)], [1, 2, 1, 2]);
    write(a, 0, 3);
    write(b, 1, 4);
    write(b, 2, 5);
    assert_eq!([read(a, 0), read(a, 1), read(a, 2)], [3, 2, 0]);
    assert_eq!([read(b, 0), read(b, 1), read(b, 2)], [1, 4, 5]);
    let attributes = |name: &str| {
        let meta = std::fs::metadata(at(name)).unwrap();
        (meta.mode(), meta.uid(), meta.gid())
    };
    assert_eq!(attributes("b.qcow2"), attributes(base));
    assert_eq!(attributes("b.qcow2"), attributes("a-2.qcow2"));

    // The other disk still uses the base. The record of the base names the overlay of the disk a.
    for (disk, why) in [("a", "in use by"), ("b", "its backing image belongs to overlay")] {
        let job = server.good("POST", &format!("/v1/disks/{disk}/commit"), Value::Null);
        let job = server.ended(&job);
        assert_eq!(job["state"], "failed", "{job}");
        assert!(job["error"].as_str().unwrap().contains(why), "{job}");
    }
    // A fork of a fork.
    let disk = server.good("POST", "/v1/disks/b/fork", body(&server, "b-2.qcow2", "c"));
    assert!(disk["images"].as_str().unwrap().contains(base), "{disk}");
    write(b, 2, 6);
    write(c, 0, 7);
    assert_eq!([read(c, 0), read(c, 1), read(c, 2)], [7, 4, 5]);
    assert_eq!([read(b, 0), read(b, 1), read(b, 2)], [1, 4, 6]);
    assert_eq!([read(a, 0), read(a, 1), read(a, 2)], [3, 2, 0]);
    // Without the others, the disk a has the base for itself.
    server.good("DELETE", "/v1/disks/b?force=true", Value::Null);
    server.good("DELETE", "/v1/disks/c?force=true", Value::Null);
    for image in ["b.qcow2", "b-2.qcow2", "c.qcow2"] {
        std::fs::remove_file(at(image)).unwrap();
    }
    is_committed(&server);
    assert_eq!([read(a, 0), read(a, 1), read(a, 2)], [3, 2, 0]);
    let overlay = at("a-2.qcow2");
    let Server { daemon, folder } = server;
    daemon.stop();
    sound(&overlay);
    if base.ends_with(".qcow2") {
        sound(&folder.join(base));
    }
}

#[test]
fn two_disks_have_the_old_content_of_a_raw_disk_and_their_own_writes() {
    two_disks("base.img");
}

#[test]
fn two_disks_have_the_old_content_of_a_qcow2_disk_and_their_own_writes() {
    two_disks("base.qcow2");
}

/// The images of both disks are sound while they have writes of their own.
#[test]
fn the_images_of_a_fork_are_sound() {
    let server = serving("base.qcow2");
    let at = |name: &str| server.folder.join(name);
    (0..8).for_each(|block| write(&at("a"), block, 1));
    server.good("POST", "/v1/disks/a/fork", body(&server, "a-2.qcow2", "b"));
    (4..12).for_each(|block| write(&at("a"), block, 2));
    (2..6).for_each(|block| write(&at("b"), block, 3));
    let all = ["base.qcow2", "a-2.qcow2", "b.qcow2"].map(at);
    let Server { daemon, folder: _folder } = server;
    daemon.stop();
    all.iter().for_each(|image| sound(image));
    let info = blockyard(["image", "info", "--json", all[2].to_str().unwrap()]).good();
    let info: Value = serde_json::from_str(&info).unwrap();
    // A relative name, because both are in one folder.
    assert_eq!(info["backing-filename"], "base.qcow2", "{info}");
    assert_eq!(info["backing-filename-format"], "qcow2", "{info}");
}

#[test]
fn a_fork_that_cannot_be_is_refused_before_anything_changes() {
    let server = serving("base.qcow2");
    let (at, elsewhere) = (|name: &str| server.folder.join(name), Folder::new());
    server.good("POST", "/v1/disks", server.keys("ram"));
    std::fs::write(at("there.qcow2"), "x").unwrap();
    let _taken = UnixListener::bind(at("taken")).unwrap();
    let outside = elsewhere.join("b.qcow2");
    let option = format!("--allow-folder {}", elsewhere.to_str().unwrap());
    let before = (images(&server, "a"), files(&server.folder));
    let refused = |disk: &str, body: &Value, field: &str, part: &str, status: u16| {
        let path = format!("/v1/disks/{disk}/fork");
        let problem = server.bad("POST", &path, &body.to_string(), status);
        assert_eq!(problem["field"].as_str().unwrap_or_default(), field, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(part), "{part}: {problem}");
        assert_eq!(server.names(), ["a", "ram"]);
        assert_eq!((images(&server, "a"), files(&server.folder)), before);
    };
    let good = body(&server, "a-2.qcow2", "b");
    // A key of the new disk with its value, the field and a part of the problem, and its status.
    let cases = [
        ("name", json!("a"), "disk.name", "is called \"a\" already", 409),
        ("name", json!(""), "", "a name has 1 to 255 bytes", 422),
        ("image", json!(at("there.qcow2")), "disk.image", "exists already", 422),
        ("image", json!(at("base.qcow2")), "disk.image", "exists already", 422),
        ("image", json!(at("a-2.qcow2")), "disk.image", "the overlay of the old disk", 422),
        ("image", json!(at("no/b.qcow2")), "disk.image", "create it first", 422),
        ("image", json!(at("b.raw")), "disk.image", "means raw", 422),
        ("image", json!("nbd://host/b"), "disk.image", "give its path", 422),
        ("image", json!("ram:4M"), "disk.image", "give its path", 422),
        ("image", json!(outside), "", option.as_str(), 422),
        ("format", json!("raw"), "disk.format", "leave the key out", 422),
        ("queues", json!("two"), "disk.queues", "a number of queues is", 422),
        ("quues", json!(2), "disk.quues", "did you mean `queues`?", 422),
        ("group", json!("g"), "disk.group", "no table [group.g]", 422),
        ("on-reactors", json!("7"), "disk.on-reactors", "no reactor 7", 422),
        ("vhost-user", json!(at("a")), "", "another disk has the socket", 409),
        ("vhost-user", json!(at("taken")), "", "another server listens on it", 422),
        ("vhost-user", json!(null), "", "no export", 422),
    ];
    for (key, value, field, part, status) in cases {
        let mut body = good.clone();
        body["disk"][key] = value;
        refused("a", &body, field, part, status);
    }
    let with = |key: &str, value: Value| {
        let mut body = good.clone();
        body[key] = value;
        body
    };
    refused("a", &with("overlay", json!(at("there.qcow2"))), "overlay", "exists already", 422);
    refused("a", &with("overlay", json!(at("x"))), "overlay", "without a format", 422);
    refused("a", &with("overlay", json!(at("x.raw"))), "overlay", "means raw", 422);
    refused("a", &with("overlay", json!(at("no/x.qcow2"))), "overlay", "create it first", 422);
    refused("a", &with("to", json!("x")), "to", "unknown field", 422);
    refused("a", &with("disk", json!(5)), "disk", "must be an object", 422);
    refused("a", &with("persist", json!(true)), "", "no configuration file", 409);
    let far = with("overlay", json!(elsewhere.join("a-2.qcow2")));
    refused("a", &far, "", "nothing has changed", 422);
    refused("b", &good, "", "no disk is called \"b\"", 404);
    refused("ram", &good, "", "no image on which", 409);
    let twice = good.to_string().replace("\"name\":\"b\"", "\"name\":\"b\",\"name\":\"c\"");
    let problem = server.bad("POST", "/v1/disks/a/fork", &twice, 422);
    assert!(problem["detail"].as_str().unwrap().contains("\"name\" is there twice"), "{problem}");
    server.good("POST", "/v1/disks/a/drain", json!({}));
    refused("a", &good, "", "it is drained", 409);
    server.good("POST", "/v1/disks/a/resume", Value::Null);
    // Nothing of them is left.
    server.good("POST", "/v1/disks/a/fork", good);
    assert_eq!(server.names(), ["a", "ram", "b"]);
}

/// Returns the names of the files of a folder.
fn files(folder: &Folder) -> Vec<String> {
    let entries = std::fs::read_dir(&**folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[test]
fn a_read_only_disk_cannot_be_forked() {
    let server = Server::start();
    let image = server.folder.image("base.img", 1 << 20);
    let socket = server.folder.join("a");
    let keys = json!({ "name": "a", "image": image, "vhost-user": socket, "read-only": true });
    server.good("POST", "/v1/disks", keys);
    let body = body(&server, "a-2.qcow2", "b").to_string();
    let problem = server.bad("POST", "/v1/disks/a/fork", &body, 409);
    assert!(problem["detail"].as_str().unwrap().contains("image create -b"), "{problem}");
    assert!(!server.folder.join("b.qcow2").exists());
}

/// The socket is free before the snapshot, and its path is the overlay after it.
#[test]
fn a_failure_after_the_snapshot_leaves_no_image_and_says_what_to_do() {
    let server = serving("base.qcow2");
    let at = |name: &str| server.folder.join(name);
    write(&at("a"), 0, 1);
    let mut body = body(&server, "a-2.qcow2", "b");
    body["disk"]["vhost-user"] = at("a-2.qcow2").to_str().into();
    let problem = server.bad("POST", "/v1/disks/a/fork", &body.to_string(), 422);
    let detail = problem["detail"].as_str().unwrap();
    let goes_on = format!("disk \"a\" goes on in {}", at("a-2.qcow2").display());
    for part in [
        "disk \"b\" is not added",
        "The snapshot was taken",
        &goes_on,
        "blockyard image create -b ",
        "`blockyard ctl commit a`",
    ] {
        assert!(detail.contains(part), "{part}: {detail}");
    }
    assert_eq!(server.names(), ["a"]);
    assert!(!at("b.qcow2").exists() && images(&server, "a").contains("a-2.qcow2"));
    write(&at("a"), 0, 2);
    // The commands of the message.
    let create = detail.split('`').find(|part| part.contains("image create")).unwrap();
    let words: Vec<_> = create.split(' ').skip(1).collect();
    blockyard(words).good();
    body["disk"]["vhost-user"] = at("b").to_str().into();
    server.good("POST", "/v1/disks", body["disk"].clone());
    assert_eq!([read(&at("a"), 0), read(&at("b"), 0)], [2, 1]);
    server.good("DELETE", "/v1/disks/b?force=true", Value::Null);
    is_committed(&server);
    assert_eq!(read(&at("a"), 0), 2);
}

#[test]
fn one_of_several_forks_at_a_time_makes_the_new_disk() {
    let server = serving("base.img");
    write(&server.folder.join("a"), 0, 1);
    let statuses: Vec<_> = std::thread::scope(|scope| {
        let fork = |number: usize| {
            let body = body(&server, &format!("a-{number}.qcow2"), "b").to_string();
            server.send("POST", "/v1/disks/a/fork", &body).0
        };
        let all: Vec<_> = (0..8).map(|number| scope.spawn(move || fork(number))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(statuses.iter().filter(|status| **status == 201).count(), 1, "{statuses:?}");
    assert!(statuses.iter().all(|status| [201, 409, 422].contains(status)), "{statuses:?}");
    let winner = statuses.iter().position(|status| *status == 201).unwrap();
    let overlay = format!("a-{winner}.qcow2");
    assert!(images(&server, "a").contains(&overlay));
    let overlays: Vec<_> = files(&server.folder);
    let overlays: Vec<_> = overlays.iter().filter(|name| name.starts_with("a-")).collect();
    assert_eq!(overlays, [&overlay], "the others have changed nothing");
    assert_eq!(read(&server.folder.join("b"), 0), 1);
}

/// The new disk gets the folder of the base, because its image is in another one.
#[test]
fn the_command_makes_a_disk_in_another_folder_and_shares_an_address() {
    let server = Server::start();
    let at = |name: &str| server.folder.join(name);
    for folder in ["old", "new"] {
        std::fs::create_dir(at(folder)).unwrap();
    }
    let (image, nbd) = (at("old/base.img"), format!("unix:{}", at("nbd").display()));
    std::fs::write(&image, vec![5; 1 << 20]).unwrap();
    let keys = json!({ "name": "a", "image": image, "vhost-user": at("a"), "nbd": nbd });
    server.good("POST", "/v1/disks", keys);
    let key = |key: &str, path: PathBuf| format!("{key}={}", path.display());
    let (new, socket, nbd) =
        (key("image", at("new/b")), key("vhost-user", at("b")), format!("nbd={nbd}"));
    // The overlay is relative to the folder of the caller.
    let fork = ["fork", "a", "old/a-2.qcow2", "name=b", &new, &socket, &nbd, "weight=300"];
    let out = ctl(&server, &fork).good();
    let has = |name: &str, value: &str| {
        out.lines().any(|line| line.starts_with(name) && line.contains(value))
    };
    assert!(has("name", "b") && has("weight", "300") && has("format", "qcow2"), "{out}");
    assert!(at("old/a-2.qcow2").exists());
    write(&at("b"), 0, 6);
    assert_eq!([read(&at("a"), 0), read(&at("b"), 0), read(&at("b"), 1)], [5, 6, 5]);
    let failed = ctl(&server, &["fork", "a", "old/a-3.qcow2", "name=b", &new, &socket]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("exists already"), "{}", failed.err);
    let out = ctl(&server, &["--json", "show", "b"]).good();
    let disk: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(disk["exports"].as_array().unwrap().len(), 2, "{disk}");
}

/// Starts a server with the disk `a` in its configuration, which has the folder `conf.d`.
fn configured() -> Server {
    let folder = Folder::new();
    std::fs::create_dir(folder.join("conf.d")).unwrap();
    let base = folder.join("base.qcow2");
    blockyard(["image", "create", "-q", base.to_str().unwrap(), "4M"]).good();
    Server::configured_in(folder, &disk_a("base.qcow2"))
}

/// Returns the text of the disk `a` with this image, and of another disk.
fn disk_a(image: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"FOLDER/{image}\"\nvhost-user = \"FOLDER/a\"\n\
         [[disk]]\nname = \"other\"\nimage = \"ram:1M\"\nvhost-user = \"FOLDER/other\"\n"
    )
}

#[test]
fn a_fork_that_is_persisted_is_there_after_a_restart_and_after_a_kill() {
    let server = configured();
    let at = |server: &Server, name: &str| server.folder.join(name);
    write(&at(&server, "a"), 0, 1);
    let mut body = body(&server, "a-2.qcow2", "b");
    body["persist"] = true.into();
    body["disk"]["weight"] = 300.into();
    let disk = server.good("POST", "/v1/disks/a/fork", body.clone());
    assert_eq!(disk["settings"]["added_by_api"], false, "{disk}");
    // A reload finds nothing to do.
    let done = server.good("POST", "/v1/reload", Value::Null);
    assert_eq!((&done["changed"], &done["removed"]), (&json!([]), &json!([])), "{done}");
    write(&at(&server, "a"), 0, 2);
    write(&at(&server, "b"), 1, 3);
    let check = |server: &Server| {
        let mut names = server.names();
        names.sort();
        assert_eq!(names, ["a", "b", "other"]);
        assert!(images(server, "a").contains("a-2.qcow2"));
        let disk = server.good("GET", "/v1/disks/b", Value::Null);
        assert_eq!(disk["settings"]["weight"], 300, "{disk}");
        let [a, b] = ["a", "b"].map(|name| at(server, name));
        assert_eq!([read(&a, 0), read(&a, 1), read(&b, 0), read(&b, 1)], [2, 0, 1, 3]);
    };
    check(&server);
    let Server { daemon, folder } = server;
    daemon.stop();
    let server = again(folder);
    check(&server);
    let Server { daemon, folder } = server;
    daemon.kill();
    let server = again(folder);
    check(&server);
    // What the next start would refuse changes nothing.
    let path = at(&server, "conf.d/c.toml");
    let socket = at(&server, "c");
    let other = format!(
        "[[disk]]\nname = \"third\"\nimage = \"ram:1M\"\nvhost-user = \"{}\"\n",
        socket.display()
    );
    std::fs::write(&path, other).unwrap();
    let mut body = self::body(&server, "a-3.qcow2", "c");
    body["persist"] = true.into();
    let problem = server.bad("POST", "/v1/disks/a/fork", &body.to_string(), 409);
    assert!(problem["detail"].as_str().unwrap().contains("another disk has the socket"));
    assert!(!at(&server, "a-3.qcow2").exists() && !at(&server, "c.qcow2").exists());
    check(&server);
}

/// The old disk is as after a snapshot without `persist`. The new one is added again.
#[test]
fn a_kill_after_a_fork_leaves_both_images_as_they_were() {
    let server = configured();
    let at = |server: &Server, name: &str| server.folder.join(name);
    write(&at(&server, "a"), 0, 1);
    let body = body(&server, "a-2.qcow2", "b");
    server.good("POST", "/v1/disks/a/fork", body.clone());
    write(&at(&server, "a"), 0, 2);
    write(&at(&server, "b"), 1, 3);
    let Server { daemon, folder } = server;
    daemon.kill();
    let server = again(folder);
    // The configuration names the old image.
    assert_eq!(server.names(), ["other"]);
    let failed = server.good("GET", "/v1", Value::Null)["failed"].clone();
    assert!(failed[0]["error"].as_str().unwrap().contains("a-2.qcow2"), "{failed}");
    server.configure(&disk_a("a-2.qcow2"));
    server.good("POST", "/v1/reload", Value::Null);
    server.good("POST", "/v1/disks", body["disk"].clone());
    let [a, b] = ["a", "b"].map(|name| at(&server, name));
    assert_eq!([read(&a, 0), read(&a, 1), read(&b, 0), read(&b, 1)], [2, 0, 1, 3]);
}
