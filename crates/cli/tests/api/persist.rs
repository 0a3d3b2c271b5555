//! Changes that a restart keeps: `ctl --persist` and the folder `conf.d`.

use std::process::Command;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};

use crate::common::{BLOCKYARD, Daemon, Finished, Folder, SOON, blockyard};
use crate::server::Server;

fn ctl(server: &Server, arguments: &[&str]) -> Finished {
    let socket = server.socket();
    blockyard(["ctl", "--api", socket.to_str().unwrap()].iter().chain(arguments))
}

fn weight(server: &Server, disk: &str) -> serde_json::Value {
    let answer = server.good("GET", &format!("/v1/disks/{disk}"), serde_json::Value::Null);
    answer["settings"]["weight"].clone()
}

const MAIN: &str = "[[disk]]\nname = \"a\"\nimage = \"ram:1M\"\nvhost-user = \"FOLDER/a\"\n";

/// Starts a server with the disk `a` in its configuration, and an empty folder `conf.d`.
fn start() -> Server {
    let server = Server::configured(MAIN);
    std::fs::create_dir(server.folder.join("conf.d")).unwrap();
    restarted(server)
}

fn restarted(server: Server) -> Server {
    let Server { daemon, folder } = server;
    daemon.stop();
    again(folder)
}

/// Starts a server with the configuration of one that has ended.
pub fn again(folder: Folder) -> Server {
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg("--config").arg(folder.join("toml")).arg("--api");
    command.arg(folder.join("api"));
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    Server { daemon, folder }
}

#[test]
fn on_enospc_is_persisted_and_reloaded_while_a_client_is_connected() {
    let server = start();
    ctl(&server, &["set", "--persist", "a", "on-enospc=pause"]).good();
    let server = restarted(server);
    let shown = |server: &Server| server.good("GET", "/v1/disks/a", serde_json::Value::Null);
    assert_eq!(shown(&server)["settings"]["on_enospc"], "pause");
    std::fs::remove_file(server.folder.join("conf.d/90-ctl-a.toml")).unwrap();
    let session = Session::<SplitRing>::start(&server.folder.join("a"), &Plan::default()).unwrap();
    let answer = server.good("POST", "/v1/reload", serde_json::Value::Null);
    assert_eq!(answer["changed"][0]["disconnects"], false, "{answer}");
    let disk = shown(&server);
    assert_eq!(disk["settings"]["on_enospc"], "error");
    assert_eq!(disk["clients"].as_array().unwrap().len(), 1, "{disk}");
    drop(session);
    assert!(ctl(&server, &["show", "a"]).good().contains("on-enospc"));
    let wrong = ctl(&server, &["set", "a", "on-enospc=stop"]);
    assert!(wrong.err.contains("use error or pause"), "{}", wrong.err);
}

#[test]
fn a_restart_keeps_what_was_persisted_and_nothing_else() {
    let server = start();
    let [b, c] =
        ["b", "c"].map(|name| format!("vhost-user={}", server.folder.join(name).display()));
    ctl(&server, &["add", "--persist", "name=b", "image=ram:1M", &b, "weight=50"]).good();
    ctl(&server, &["add", "name=c", "image=ram:1M", &c]).good();
    ctl(&server, &["set", "--persist", "a", "weight=300"]).good();
    ctl(&server, &["set", "b", "weight=60"]).good();
    let server = restarted(server);
    assert_eq!(server.names(), ["a", "b"]);
    assert_eq!((weight(&server, "a"), weight(&server, "b")), (300.into(), 50.into()));

    // A reload finds nothing to do after a change that was persisted.
    ctl(&server, &["set", "--persist", "b", "weight=70"]).good();
    let answer = server.good("POST", "/v1/reload", serde_json::Value::Null);
    let nothing = serde_json::json!([]);
    assert_eq!((&answer["changed"], &answer["removed"]), (&nothing, &nothing), "{answer}");

    ctl(&server, &["remove", "--persist", "a"]).good();
    ctl(&server, &["remove", "b"]).good();
    let server = restarted(server);
    assert_eq!((server.names(), weight(&server, "b")), (vec!["b".to_string()], 70.into()));
}

#[test]
fn a_call_keeps_the_comments_of_the_file_that_it_changes() {
    let server = start();
    ctl(&server, &["set", "--persist", "a", "weight=300"]).good();
    let file = server.folder.join("conf.d/90-ctl-a.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace("weight = 300", "# Twice the usual.\nweight  =  300 # ask Ada");
    std::fs::write(&file, text.clone() + "# The end.\n").unwrap();
    ctl(&server, &["set", "--persist", "a", "iops=100"]).good();
    let expected = text.clone() + "iops = 100\n# The end.\n";
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    ctl(&server, &["set", "--persist", "a", "iops=", "weight=200"]).good();
    let expected = text.replace("weight  =  300", "weight  =  200") + "# The end.\n";
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    assert_eq!(weight(&restarted(server), "a"), 200);
}

#[test]
fn a_call_keeps_its_own_values_and_not_those_of_earlier_calls() {
    let server = start();
    server.configure(&format!("{MAIN}bps = 5000\n"));
    let server = restarted(server);
    let b = format!("vhost-user={}", server.folder.join("b").display());
    ctl(&server, &["add", "--persist", "name=b", "image=ram:1M", &b]).good();
    for disk in ["a", "b"] {
        ctl(&server, &["set", disk, "iops=100", "bps=7000"]).good();
        ctl(&server, &["set", "--persist", disk, "weight=200"]).good();
    }
    let settings = |server: &Server, disk: &str| {
        let disk = server.good("GET", &format!("/v1/disks/{disk}"), serde_json::Value::Null);
        let rate = |limit: &str| disk["settings"][limit]["rate"].as_u64();
        (disk["settings"]["weight"].as_u64(), rate("iops"), rate("bps"))
    };
    assert_eq!(settings(&server, "a"), (Some(200), Some(100), Some(7000)), "until a restart");
    let server = restarted(server);
    assert_eq!(settings(&server, "a"), (Some(200), None, Some(5000)));
    assert_eq!(settings(&server, "b"), (Some(200), None, None));
    // The values of the file and of the call must agree: the change has no effect otherwise.
    ctl(&server, &["set", "a", "iops=500"]).good();
    let main = std::fs::read_to_string(server.folder.join("toml")).unwrap();
    std::fs::write(server.folder.join("toml"), main + "wieght = 5\n").unwrap();
    let failed = ctl(&server, &["set", "--persist", "a", "iops=900"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("unknown key `wieght`"), "{}", failed.err);
    assert_eq!(settings(&server, "a"), (Some(200), Some(500), Some(5000)));
}

#[test]
fn a_call_that_the_next_start_would_refuse_or_not_see_changes_nothing() {
    let server = start();
    let file = |name: &str| server.folder.join("conf.d").join(name);
    let refused = |arguments: &[&str], part: &str| {
        let done = ctl(&server, arguments);
        assert_eq!(done.status.code(), Some(1), "{arguments:?}: {}", done.out);
        assert!(done.err.contains(part), "{arguments:?}: {}", done.err);
    };
    // The file has the disk a with this socket, although the server does not serve it any more.
    ctl(&server, &["remove", "a"]).good();
    let socket = format!("vhost-user={}", server.folder.join("a").display());
    let add = ["add", "--persist", "name=b", "image=ram:1M", &socket];
    refused(&add, "another disk has the socket");
    assert_eq!((server.names().len(), file("90-ctl-b.toml").exists()), (0, false));
    ctl(&server, &["reload"]).good();
    refused(&["set", "--persist", "a", "tls-allow=[\"x\"]"], "tls-allow is for NBD clients");
    refused(&["set", "a", "tls-allow=[\"x\"]"], "tls-allow is for NBD clients");
    // A file that is read later overrides what calls keep.
    let later = "[[disk]]\nname = \"w\"\nimage = \"ram:1M\"\nvhost-user = \"FOLDER/w\"\n";
    let later = later.replace("FOLDER", server.folder.to_str().unwrap());
    std::fs::write(file("w.toml"), later).unwrap();
    ctl(&server, &["reload"]).good();
    refused(&["set", "--persist", "w", "weight=300"], "read after 90-ctl-w.toml has disk");
    refused(&["remove", "--persist", "w"], "w.toml: line 1 is read after 90-ctl-w.toml");
    assert_eq!((server.names(), weight(&server, "w")), (vec!["a".into(), "w".into()], 100.into()));
    assert!(!file("90-ctl-w.toml").exists() && !file("90-ctl-a.toml").exists());
}

/// A full or read-only file system fails in the same way.
#[test]
fn a_snapshot_whose_file_cannot_be_written_has_failed_and_is_no_conflict() {
    let server = start();
    std::fs::create_dir(server.folder.join("conf.d/90-ctl-a.new")).unwrap();
    let overlay = serde_json::json!({ "overlay": server.folder.join("t.qcow2"), "persist": true });
    let problem = server.bad("POST", "/v1/disks/a/snapshot", &overlay.to_string(), 422);
    assert!(problem["detail"].as_str().unwrap().contains("preparing"), "{problem}");
    ctl(&server, &["set", "a", "weight=300"]).good();
}

/// Writes a block to the disk a, and reads it and block 0, which holds `first`.
fn write_and_read(server: &Server, sector: u64, byte: u8, first: u8) {
    let mut guest =
        Session::<SplitRing>::start(&server.folder.join("a"), &Plan::default()).unwrap();
    let mut ask = |kind, sector, data, byte| {
        let mut bytes = [byte; 4096];
        let queue = &mut guest.queues[0];
        assert_eq!(queue.call(kind, sector, data, &mut bytes, SOON).unwrap(), status::OK);
        bytes
    };
    ask(request::OUT, sector, Data::ToDevice(4096), byte);
    assert_eq!(ask(request::IN, sector, Data::FromDevice(4096), 0), [byte; 4096]);
    assert_eq!(ask(request::IN, 0, Data::FromDevice(4096), 0), [first; 4096]);
}

#[test]
fn a_snapshot_that_is_persisted_is_served_after_a_crash() {
    let server = start();
    let file = |name: &str| server.folder.join(name).to_str().unwrap().to_string();
    let (base, top, topmost) = (file("base.qcow2"), file("top.qcow2"), file("topmost.qcow2"));
    blockyard(["image", "create", "-q", &base, "1M"]).good();
    // Without a key name, the name follows from the image.
    let disk = format!("[[disk]]\nimage = \"{base}\"\nvhost-user = \"FOLDER/a\"\nweight = 50\n");
    server.configure(&disk);
    let server = restarted(server);
    write_and_read(&server, 0, 1, 1);
    ctl(&server, &["set", "base.qcow2", "iops=100000"]).good();
    let failed = ctl(&server, &["snapshot", "--persist", "base.qcow2", &base]);
    assert!(failed.err.contains("exists already"), "{}", failed.err);
    let kept = || std::fs::read_dir(server.folder.join("conf.d")).unwrap().count();
    assert_eq!(kept(), 0, "a snapshot that failed changes no file");
    ctl(&server, &["snapshot", "--persist", "base.qcow2", &top]).good();
    write_and_read(&server, 8, 2, 1);
    let shown = server.good("GET", "/v1/disks/base.qcow2", serde_json::Value::Null);
    assert_eq!(shown["image"], *top, "an upgrade opens this image: {shown}");
    let failed = ctl(&server, &["snapshot", "--persist", "base.qcow2", &base]);
    assert!(failed.err.contains("exists already"), "{}", failed.err);
    assert_eq!(kept(), 1);
    ctl(&server, &["snapshot", "--persist", "base.qcow2", &topmost]).good();
    write_and_read(&server, 16, 3, 1);
    assert_eq!(kept(), 1);
    let reload = |server: &Server| server.good("POST", "/v1/reload", serde_json::Value::Null);
    let done = reload(&server);
    let keys = done["changed"][0]["keys"].as_array().unwrap();
    assert_eq!((keys.len(), &keys[0]["key"]), (1, &"iops".into()), "only the temporary value");
    assert_eq!(done["changed"][0]["disconnects"], false, "{done}");
    let Server { daemon, folder } = server;
    daemon.kill();
    let server = again(folder);
    assert_eq!(server.names(), ["base.qcow2"]);
    let shown = server.good("GET", "/v1/disks/base.qcow2", serde_json::Value::Null);
    assert_eq!((&shown["image"], &shown["settings"]["weight"]), (&topmost.into(), &50.into()));
    assert!(shown["settings"]["iops"].is_null(), "{shown}");
    write_and_read(&server, 16, 4, 1);
    assert_eq!(reload(&server)["changed"], serde_json::json!([]));
    // The disk can be changed again, and a commit keeps the overlay.
    ctl(&server, &["set", "--persist", "base.qcow2", "weight=60"]).good();
    ctl(&server, &["commit", "base.qcow2"]).good();
    let server = restarted(server);
    assert_eq!(weight(&server, "base.qcow2"), 60);
    write_and_read(&server, 24, 5, 1);
}

/// Otherwise the next start opens the disk without the overlay, or refuses it.
#[test]
fn a_change_is_not_kept_beside_a_snapshot_that_is_not() {
    let server = start();
    let file = |name: &str| server.folder.join(name).to_str().unwrap().to_string();
    let (base, top) = (file("base.qcow2"), file("top.qcow2"));
    blockyard(["image", "create", "-q", &base, "1M"]).good();
    let disk = |image: &str| {
        format!("[[disk]]\nname = \"web\"\nimage = \"{image}\"\nvhost-user = \"FOLDER/a\"\n")
    };
    server.configure(&disk(&base));
    let server = restarted(server);
    ctl(&server, &["snapshot", "web", &top]).good();
    let failed = ctl(&server, &["set", "--persist", "web", "weight=300"]);
    assert_eq!(failed.status.code(), Some(1), "{}", failed.err);
    assert!(failed.err.contains(&format!("overlay {top}")), "{}", failed.err);
    assert_eq!(weight(&server, "web"), 100);
    let kept = |server: &Server| std::fs::read_dir(server.folder.join("conf.d")).unwrap().count();
    assert_eq!(kept(&server), 0);
    server.configure(&disk(&top));
    ctl(&server, &["set", "--persist", "web", "weight=300"]).good();
    assert_eq!((weight(&server, "web"), kept(&server)), (300.into(), 1));
    let server = restarted(server);
    let shown = server.good("GET", "/v1/disks/web", serde_json::Value::Null);
    assert_eq!(
        (&shown["image"], &shown["settings"]["weight"]),
        (&top.as_str().into(), &300.into())
    );
    // The file with the image is gone.
    server.configure(&disk(&base));
    std::fs::remove_file(server.folder.join("conf.d/90-ctl-web.toml")).unwrap();
    let failed = ctl(&server, &["set", "--persist", "web", "weight=400"]);
    assert_eq!(failed.status.code(), Some(1), "{}", failed.err);
    for part in ["the files have image", &base, &format!("the disk has {top}")] {
        assert!(failed.err.contains(part), "{part:?} is not in it: {}", failed.err);
    }
    assert_eq!((weight(&server, "web"), kept(&server)), (300.into(), 0));
}

#[test]
fn a_server_without_the_folder_says_what_to_do() {
    let server = Server::configured(MAIN);
    let failed = ctl(&server, &["set", "--persist", "a", "weight=300"]);
    assert_eq!(failed.status.code(), Some(1));
    let folder = server.folder.join("conf.d");
    let expected = format!("folder {} does not exist: create it", folder.display());
    assert!(failed.err.contains(&expected), "{}", failed.err);
    assert_eq!(weight(&server, "a"), 100);
    let server = Server::start();
    let keys = server.keys("x").to_string();
    let answer = server.bad("POST", "/v1/disks?persist=true", &keys, 409);
    assert!(answer["detail"].as_str().unwrap().contains("start it with --config"), "{answer}");
    assert_eq!(server.names(), [""; 0]);
}

#[test]
fn a_reload_without_the_main_file_fails_and_keeps_its_disks() {
    let folder = Folder::new();
    let main = folder.join("blockyard.toml");
    let text = MAIN.replace("FOLDER", folder.to_str().unwrap());
    std::fs::write(&main, &text).unwrap();
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg("--config").arg(folder.join(".")).arg("--api");
    command.arg(folder.join("api"));
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    let server = Server { daemon, folder };
    let refused = || {
        let answer = server.bad("POST", "/v1/reload", "", 422);
        let detail = answer["detail"].as_str().unwrap();
        assert!(detail.contains("blockyard.toml: "), "{answer}");
        assert_eq!(server.names(), ["a"]);
    };
    std::fs::remove_file(&main).unwrap();
    refused();
    std::os::unix::fs::symlink("missing", &main).unwrap();
    refused();
    std::fs::remove_file(&main).unwrap();
    std::fs::create_dir(&main).unwrap();
    refused();
    std::fs::remove_dir(&main).unwrap();
    // An operator closes the disks of the file by an empty one.
    std::fs::write(&main, "").unwrap();
    server.good("POST", "/v1/reload", serde_json::Value::Null);
    assert_eq!(server.names(), [""; 0]);
}
