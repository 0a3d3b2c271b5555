//! Each call: what it answers, and what the server does.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};
use serde_json::{Value, json};

use crate::common::{Folder, SOON, blockyard, tool, until};
use crate::metrics::scrape;
use crate::server::Server;

#[test]
fn a_disk_is_added_shown_changed_and_removed() {
    let server = Server::start();
    assert_eq!(server.names(), [""; 0]);
    let disk = server.good("POST", "/v1/disks", server.keys("a"));
    assert_eq!(
        (&disk["name"], &disk["size"], &disk["state"]),
        (&json!("a"), &json!(1 << 20), &json!("serving"))
    );
    assert_eq!(disk["settings"]["added_by_api"], true);
    let session = Session::<SplitRing>::start(&server.folder.join("a"), &Plan::default()).unwrap();
    let disk = server.good("GET", "/v1/disks/a", Value::Null);
    let client = &disk["clients"][0];
    assert_eq!(client["pid"], std::process::id());
    assert_eq!(client["uid"], rustix::process::geteuid().as_raw());
    assert!(client["program"].is_string() && client["since"].is_u64(), "{client}");
    let features = client["features"].as_str().unwrap();
    assert!(features.starts_with("0x") && features != "0x0", "{client}");

    let set = json!({ "weight": 300, "iops": "1k,max=2k" });
    let disk = server.good("PATCH", "/v1/disks/a", set);
    assert_eq!(disk["settings"]["weight"], 300);
    assert_eq!(disk["settings"]["iops"], json!({ "rate": 1024, "max": 2048, "length": 1.0 }));
    let disk = server.good("PATCH", "/v1/disks/a", json!({ "iops": null }));
    assert_eq!(
        (&disk["settings"]["iops"], &disk["settings"]["weight"]),
        (&Value::Null, &json!(300))
    );
    assert_eq!(disk["clients"].as_array().unwrap().len(), 1, "the guest stays connected: {disk}");
    server.good("POST", "/v1/disks/a/flush", Value::Null);

    let problem = server.bad("DELETE", "/v1/disks/a", "", 409);
    assert!(problem["detail"].as_str().unwrap().contains("force=true"), "{problem}");
    let removed = server.good("DELETE", "/v1/disks/a?force=true", Value::Null);
    assert_eq!(removed, json!({ "name": "a", "flushed": true }));
    server.bad("GET", "/v1/disks/a", "", 404);
    server.bad("DELETE", "/v1/disks/a", "", 404);
    drop(session);
    server.good("POST", "/v1/disks", server.keys("a"));
    server.good("DELETE", "/v1/disks/a", Value::Null);
    assert_eq!(server.names(), [""; 0]);
    let log = server.daemon.stop();
    assert!(log.contains("POST /v1/disks by process"), "{log}");
}

#[test]
fn a_name_may_have_any_characters() {
    let server = Server::start();
    let keys =
        json!({ "name": "a/b ?%", "image": "ram:1M", "vhost-user": server.folder.join("s") });
    server.good("POST", "/v1/disks", keys);
    server.good("GET", "/v1/disks/a%2Fb%20%3F%25", Value::Null);
    server.good("DELETE", "/v1/disks/a%2Fb%20%3F%25", Value::Null);
}

#[test]
fn one_of_many_concurrent_adds_of_a_disk_succeeds() {
    let server = Server::start();
    let keys = server.keys("a").to_string();
    let statuses: Vec<_> = std::thread::scope(|scope| {
        let add = || server.send("POST", "/v1/disks", &keys).0;
        let all: Vec<_> = (0..16).map(|_| scope.spawn(add)).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(statuses.iter().filter(|status| **status == 201).count(), 1, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 409).count(), 15, "{statuses:?}");
    assert_eq!(server.names(), ["a"]);
    // A conflict in another key than the name.
    let mut other = server.keys("b");
    other["vhost-user"] = server.folder.join("a").to_str().unwrap().into();
    server.bad("POST", "/v1/disks", &other.to_string(), 409);
    assert_eq!(server.names(), ["a"]);
}

/// Commands for one disk wait for each other, and each has an answer. Refusals are no faults of the
/// server.
#[test]
fn concurrent_and_repeated_calls_all_have_an_answer() {
    let server = Server::start();
    let (server, added) = (&server, &AtomicUsize::new(0));
    let calls = |seed: usize| {
        for round in 0..30 {
            let name = format!("d{}", (seed + round) % 3);
            let path = |what: &str| format!("/v1/disks/{name}{what}");
            let (method, path, body) = match (seed * 7 + round * 5) % 11 {
                0..3 => ("POST", "/v1/disks".into(), server.keys(&name).to_string()),
                3 => ("DELETE", path("?force=true"), String::new()),
                4 => ("PATCH", path(""), r#"{"iops": 5000}"#.into()),
                5 => ("POST", path("/flush"), String::new()),
                6 => ("POST", path("/resume"), String::new()),
                7 => ("POST", path("/resize"), r#"{"size": 2097152}"#.into()),
                8 => ("POST", path("/refresh"), String::new()),
                9 => ("POST", path("/commit"), String::new()),
                _ => ("GET", path(""), String::new()),
            };
            let (status, answer) = server.send(method, &path, &body);
            assert!(status < 500 || status == 503, "{method} {path}: {status} {answer}");
            added.fetch_add(usize::from(status == 201), Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| (0..8).for_each(|seed| drop(scope.spawn(move || calls(seed)))));
    assert!(added.load(Ordering::Relaxed) > 0, "no disk was added");
    for name in server.names() {
        server.good("DELETE", &format!("/v1/disks/{name}?force=true"), Value::Null);
    }
    assert_eq!(server.names(), [""; 0]);
}

#[test]
fn a_disk_that_cannot_be_opened_leaves_nothing() {
    let server = Server::start();
    let mut keys = server.keys("a");
    keys["image"] = "/no/such/image".into();
    let problem = server.bad("POST", "/v1/disks", &keys.to_string(), 422);
    assert!(problem["detail"].as_str().unwrap().contains("/no/such/image"), "{problem}");
    assert_eq!(server.names(), [""; 0]);
    server.good("POST", "/v1/disks", server.keys("a"));
}

/// Returns a configuration with one `[[disk]]` for each pair of name and keys.
fn disks(all: &[(&str, &str)]) -> String {
    let table = |(name, keys): &(&str, &str)| {
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"null:1M\"\nvhost-user = \"FOLDER/{name}\"\n\
             {keys}\n"
        )
    };
    all.iter().map(table).collect()
}

#[test]
fn a_reload_answers_what_changes_and_keeps_disks_of_the_api() {
    let server = Server::configured(&disks(&[("a", ""), ("b", ""), ("c", "")]));
    server.good("POST", "/v1/disks", server.keys("mine"));
    server.configure(&format!(
        "reactors = 2\n{}[group.slow]\niops = \"100\"\n",
        disks(&[("a", "weight = 200"), ("b", "queues = 2"), ("new", "")])
    ));
    let expected = json!({
        "dry_run": true,
        "added": ["new"],
        "changed": [
            { "disk": "a", "keys": [{ "key": "weight", "old": "100", "new": "200" }],
              "disconnects": false },
            { "disk": "b", "keys": [{ "key": "queues", "old": "1", "new": "2" }],
              "disconnects": true },
        ],
        "removed": ["c"],
        "groups": [{ "group": "slow",
                     "keys": [{ "key": "iops", "old": "not set", "new": "\"100\"" }] }],
        "nbd": [],
        "ignored": [{ "key": "reactors", "old": "1", "new": "2",
                      "reason": "restart or upgrade the server to apply it" }],
        "failed": [],
    });
    assert_eq!(server.good("POST", "/v1/reload?dry-run=true", Value::Null), expected);
    assert_eq!(server.names(), ["a", "b", "c", "mine"], "nothing was applied");
    let mut done = server.good("POST", "/v1/reload", Value::Null);
    done["dry_run"] = true.into();
    assert_eq!(done, expected);
    let mut names = server.names();
    names.sort();
    assert_eq!(names, ["a", "b", "mine", "new"]);

    // Values of a call last until the file says otherwise.
    server.good("PATCH", "/v1/disks/a", json!({ "weight": 300 }));
    let change = server.good("POST", "/v1/reload?dry-run=true", Value::Null)["changed"].clone();
    assert_eq!(change[0]["keys"], json!([{ "key": "weight", "old": "300", "new": "200" }]));
    // The socket of a disk of the API is taken, so the disk a is not closed for it.
    let text = disks(&[("a", ""), ("b", "queues = 2"), ("new", "")]);
    server.configure(&text.replacen("FOLDER/a", "FOLDER/mine", 1));
    for query in ["?dry-run=true", ""] {
        let done = server.good("POST", &format!("/v1/reload{query}"), Value::Null);
        assert_eq!((&done["failed"][0]["disk"], &done["changed"]), (&json!("a"), &json!([])));
        assert!(done["failed"][0]["error"].as_str().unwrap().contains("the socket"), "{done}");
    }
    assert_eq!(server.good("GET", "/v1/disks/a", Value::Null)["settings"]["weight"], 300);
    server.configure("");
    assert_eq!(server.good("POST", "/v1/reload", Value::Null)["removed"], json!(["a", "b", "new"]));
    assert_eq!(server.names(), ["mine"], "a file without disks is valid for a server with an API");
    server.configure("reactors = \"x\"");
    let problem = server.bad("POST", "/v1/reload", "", 422);
    assert!(problem["detail"].as_str().unwrap().contains("line 1: reactors"), "{problem}");
}

/// The disk keeps the group, because nothing else says what it may use.
#[test]
fn a_reload_names_disks_of_the_api_in_a_group_that_the_file_lost() {
    let group = "[group.slow]\niops = \"100\"\n";
    let server = Server::configured(group);
    let mut keys = server.keys("mine");
    keys["group"] = "slow".into();
    server.good("POST", "/v1/disks", keys);
    server.good("POST", "/v1/disks", server.keys("other"));
    let reload = || server.good("POST", "/v1/reload", Value::Null)["ignored"].clone();
    assert_eq!(reload(), json!([]));
    server.configure("");
    let ignored = reload();
    assert_eq!(ignored.as_array().unwrap().len(), 1, "{ignored}");
    assert_eq!((&ignored[0]["key"], &ignored[0]["old"]), (&json!("group"), &json!("\"slow\"")));
    let reason = ignored[0]["reason"].as_str().unwrap();
    assert!(reason.contains("disk \"mine\"") && reason.contains("[group.slow]"), "{reason}");
    server.configure(group);
    assert_eq!(reload(), json!([]));
}

#[test]
fn a_disk_of_the_api_follows_the_file_once_the_file_has_it() {
    let server = Server::configured(&disks(&[("a", "")]));
    server.good("POST", "/v1/disks", server.keys("mine"));
    let mine = disks(&[("mine", "")]).replace("null:", "ram:");
    server.configure(&(disks(&[("a", "")]) + &mine));
    let done = server.good("POST", "/v1/reload", Value::Null);
    assert_eq!((&done["added"], &done["changed"]), (&json!([]), &json!([])), "{done}");
    server.configure(&disks(&[("a", "")]));
    assert_eq!(server.good("POST", "/v1/reload", Value::Null)["removed"], json!(["mine"]));
}

#[test]
fn snapshots_commits_and_streams_are_jobs() {
    let server = Server::start();
    let image = |name: &str| server.folder.join(name).to_str().unwrap().to_string();
    let (base, top) = (image("base.qcow2"), image("top.qcow2"));
    tool("qemu-img", ["create", "-q", "-f", "qcow2", &base, "16M"]).good();
    let keys = json!({ "name": "a", "image": base, "vhost-user": server.folder.join("s") });
    server.good("POST", "/v1/disks", keys);
    let run = |what: &str, body: Value| {
        let job = server.good("POST", &format!("/v1/disks/a/{what}"), body);
        let path = format!("/v1/jobs/{}", job["number"]);
        let mut job = job;
        until("the job ends", SOON, || {
            job = server.good("GET", &path, Value::Null);
            job["state"] != "running"
        });
        job
    };
    let job = run("snapshot", json!({ "overlay": top }));
    assert_eq!(job["state"], "done", "{job}");
    let disk = server.good("GET", "/v1/disks/a", Value::Null);
    assert!(disk["images"].as_str().unwrap().contains("top.qcow2"), "{disk}");
    let job = run("snapshot", json!({ "overlay": top }));
    assert_eq!(job["state"], "failed", "the overlay exists: {job}");
    assert!(job["error"].as_str().unwrap().contains("top.qcow2"), "{job}");
    assert_eq!(run("commit", Value::Null)["state"], "done");
    assert_eq!(run("stream", Value::Null)["state"], "done");
    let jobs = server.good("GET", "/v1/jobs", Value::Null);
    assert_eq!(jobs["jobs"].as_array().unwrap().len(), 4);
    server.good("DELETE", "/v1/jobs/1", Value::Null);
    server.bad("DELETE", "/v1/jobs/99", "", 404);
    server.bad("GET", "/v1/jobs/99", "", 404);
}

#[test]
fn a_raw_disk_grows_and_its_guest_sees_the_size() {
    let server = Server::start();
    let image = server.folder.image("disk.img", 1 << 20);
    let keys = json!({ "name": "a", "image": image, "vhost-user": server.folder.join("s") });
    server.good("POST", "/v1/disks", keys);
    let resized = server.good("POST", "/v1/disks/a/resize", json!({ "size": 2 << 20 }));
    assert_eq!(resized, json!({ "old": 1 << 20, "new": 2 << 20 }));
    let session = Session::<SplitRing>::start(&server.folder.join("s"), &Plan::default()).unwrap();
    assert_eq!(session.link.config.capacity_sectors * 512, 2 << 20);
    server.bad("POST", "/v1/disks/a/resize", r#"{"size": 1048576}"#, 422);
    server.bad("POST", "/v1/disks/a/resize", r#"{"size": 3000001}"#, 422);
    server.good("POST", "/v1/disks/a/drain", json!({}));
    let refused = server.bad("POST", "/v1/disks/a/resize", r#"{"size": 3145728}"#, 409);
    assert!(refused["detail"].as_str().unwrap().contains("the disk is drained"), "{refused}");
    server.good("POST", "/v1/disks/a/resume", Value::Null);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(4 << 20).unwrap();
    let resized = server.good("POST", "/v1/disks/a/refresh", Value::Null);
    assert_eq!(resized, json!({ "old": 2 << 20, "new": 4 << 20 }));
    // Its path names another file now. Both stay as they are.
    let len = |path: &std::path::Path| std::fs::metadata(path).unwrap().len();
    let opened = server.folder.join("opened.img");
    std::fs::rename(&image, &opened).unwrap();
    server.folder.image("disk.img", 1 << 20);
    let refused = server.bad("POST", "/v1/disks/a/resize", r#"{"size": 5242880}"#, 422);
    assert!(refused["detail"].as_str().unwrap().contains("another file is there"), "{refused}");
    assert_eq!((len(&image), len(&opened)), (1 << 20, 4 << 20));
    server.good("POST", "/v1/disks", server.keys("ram"));
    server.bad("POST", "/v1/disks/ram/resize", r#"{"size": 2097152}"#, 422);
}

#[test]
fn a_qcow2_disk_grows_and_its_guest_sees_the_size() {
    let server = Server::start();
    let path = server.folder.join("disk.qcow2");
    blockyard(["image", "create", "-q", path.to_str().unwrap(), "1M"]).good();
    let socket = server.folder.join("s");
    let keys = json!({ "name": "a", "image": path, "vhost-user": socket });
    server.good("POST", "/v1/disks", keys);
    let mut session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let mut data = vec![7; 4096];
    let mut ask = |kind, sector, data_of, bytes: &mut [u8]| {
        session.queues[0].call(kind, sector, data_of, bytes, SOON).unwrap()
    };
    assert_eq!(ask(request::OUT, 8, Data::ToDevice(4096), &mut data), status::OK);
    // Far beyond what the present L1 table holds. The session stays.
    let resized = server.good("POST", "/v1/disks/a/resize", json!({ "size": 5u64 << 30 }));
    assert_eq!(resized, json!({ "old": 1 << 20, "new": 5u64 << 30 }));
    let far = (5u64 << 30) / 512 - 8;
    assert_eq!(ask(request::OUT, far, Data::ToDevice(4096), &mut data), status::OK);
    for (sector, expected) in [(8, 7), (far, 7), (far - 8, 0), (1 << 11, 0)] {
        let mut bytes = vec![1; 4096];
        assert_eq!(ask(request::IN, sector, Data::FromDevice(4096), &mut bytes), status::OK);
        assert!(bytes.iter().all(|byte| *byte == expected), "sector {sector}");
    }
    drop(session);
    let session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    assert_eq!(session.link.config.capacity_sectors * 512, 5 << 30);
    drop(session);
    let again = server.good("POST", "/v1/disks/a/resize", json!({ "size": 5u64 << 30 }));
    assert_eq!(again, json!({ "old": 5u64 << 30, "new": 5u64 << 30 }));
    server.bad("POST", "/v1/disks/a/resize", r#"{"size": 1048576}"#, 422);
    server.daemon.stop();
    tool("qemu-img", ["check", path.to_str().unwrap()]).good();
}

/// The disk is closed and opened again, so a connected guest must agree to that.
#[test]
fn the_cache_mode_of_a_disk_changes_and_its_data_stay() {
    let server = Server::start();
    let file = |name: &str| server.folder.join(name).to_str().unwrap().to_string();
    let (path, socket, top) = (file("disk.qcow2"), server.folder.join("s"), file("top.qcow2"));
    blockyard(["image", "create", "-q", &path, "1M"]).good();
    let keys = json!({
        "name": "a", "image": path, "format": "qcow2", "vhost-user": socket, "weight": 300,
    });
    server.good("POST", "/v1/disks", keys);
    let session = || Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let mut guest = session();
    let mut bytes = vec![7; 4096];
    let queue = &mut guest.queues[0];
    let written = queue.call(request::OUT, 8, Data::ToDevice(4096), &mut bytes, SOON).unwrap();
    assert_eq!(written, status::OK);
    let change = |query: &str, cache: &str| {
        (format!("/v1/disks/a{query}"), json!({ "cache": cache, "iops": 5000 }))
    };
    let (target, body) = change("", "writeback");
    let problem = server.bad("PATCH", &target, &body.to_string(), 409);
    assert!(problem["detail"].as_str().unwrap().contains("force=true"), "{problem}");
    let (target, body) = change("?force=true", "writeback");
    let disk = server.good("PATCH", &target, body);
    let settings = &disk["settings"];
    assert_eq!((&settings["cache"], &settings["weight"]), (&json!("writeback"), &json!(300)));
    drop(guest);
    let mut guest = session();
    let queue = &mut guest.queues[0];
    let read = queue.call(request::IN, 8, Data::FromDevice(4096), &mut bytes, SOON).unwrap();
    assert!(read == status::OK && bytes == [7; 4096]);
    drop(guest);
    until("the guest has gone", SOON, || {
        server.good("GET", "/v1/disks/a", Value::Null)["clients"] == json!([])
    });
    // An attempt to open the image would fail.
    let image = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    image.write_all_at(b"other", 0).unwrap();
    let (target, body) = change("", "none");
    let problem = server.bad("PATCH", &target, &body.to_string(), 409);
    assert!(problem["detail"].as_str().unwrap().contains("lacks the magic bytes"), "{problem}");
    image.write_all_at(b"QFI\xfb\0", 0).unwrap();
    let job = server.good("POST", "/v1/disks/a/snapshot", json!({ "overlay": top }));
    let job = format!("/v1/jobs/{}", job["number"]);
    until("the snapshot is taken", SOON, || {
        server.good("GET", &job, Value::Null)["state"] == "done"
    });
    let disk = server.good("GET", "/v1/disks/a", Value::Null);
    assert!(disk["images"].as_str().unwrap().contains("top.qcow2"), "{disk}");
    let (target, body) = change("", "none");
    let problem = server.bad("PATCH", &target, &body.to_string(), 409);
    assert!(problem["detail"].as_str().unwrap().contains("overlay"), "{problem}");
}

#[test]
fn the_description_has_every_call() {
    let server = Server::start();
    let description = server.good("GET", "/v1/openapi.json", Value::Null);
    let paths = description["paths"].as_object().unwrap();
    for (path, method) in [
        ("/v1", "get"),
        ("/v1/disks", "post"),
        ("/v1/disks/{name}", "patch"),
        ("/v1/disks/{name}/snapshot", "post"),
        ("/v1/disks/{name}/backup", "post"),
        ("/v1/disks/{name}/fork", "post"),
        ("/v1/jobs/{number}", "delete"),
        ("/v1/reload", "post"),
    ] {
        assert!(paths[path][method]["responses"].is_object(), "{method} {path}");
    }
    // A call that takes a body refuses this text. The others do not read it.
    let calls = paths.iter().flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().iter().filter(|(method, _)| *method != "get");
        methods.map(move |(method, call)| (path, method.to_uppercase(), call))
    });
    for (path, method, call) in calls {
        let target = path.replace("{name}", "none").replace("{number}", "9");
        let (status, answer) = server.send(&method, &target, "{");
        let detail = answer["detail"].as_str().unwrap_or_default();
        let takes_body = status == 400 && detail.contains("the body is not JSON");
        assert_eq!(call["requestBody"].is_object(), takes_body, "{method} {path}: {answer}");
    }
    let info = server.good("GET", "/v1", Value::Null);
    assert_eq!(info["pid"], server.daemon.pid());
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn disks_that_could_not_be_opened_are_listed_until_a_reload_opens_them() {
    let folder = Folder::new();
    let missing = folder.join("missing.img");
    let disk = |name: &str, image: &str| {
        let folder = folder.display();
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\nvhost-user = \"{folder}/{name}\"\n"
        )
    };
    let image = missing.to_str().unwrap().to_string();
    let both = disk("a", "ram:1M") + &disk("b", &image);
    let alone = disk("a", "ram:1M");
    let server = Server::configured_in(folder, &both);
    let failed = || server.good("GET", "/v1", Value::Null)["failed"].clone();
    let gauge = || {
        let all = scrape(&server);
        let family = all.iter().find(|family| family.name == "blockyard_disks_failed").unwrap();
        family.samples[0].value
    };
    let list = failed();
    assert_eq!((&list[0]["name"], &list[0]["image"]), (&json!("b"), &json!(image)), "{list}");
    assert!(list[0]["error"].as_str().unwrap().contains("there is no such file"), "{list}");
    assert!(list[0]["since"].as_u64().unwrap() > 1_600_000_000, "{list}");
    assert_eq!((list.as_array().unwrap().len(), gauge()), (1, 1.0));
    let socket = server.socket();
    let ctl = |command: &[&str]| {
        let arguments = ["ctl", "--api", socket.to_str().unwrap()];
        blockyard(arguments.iter().chain(command)).good()
    };
    let status = ctl(&["status"]);
    assert!(status.contains("NOT SERVED") && status.contains("there is no such file"), "{status}");
    // The first time stays, and the same error has no second event.
    server.good("POST", "/v1/reload", Value::Null);
    assert_eq!(failed(), list);
    std::fs::write(&missing, vec![0; 1 << 20]).unwrap();
    server.good("POST", "/v1/reload", Value::Null);
    assert_eq!((failed(), gauge(), server.names().len()), (json!([]), 0.0, 2));
    // A disk that the configuration lacks is no failed disk.
    server.good("DELETE", "/v1/disks/b", Value::Null);
    std::fs::remove_file(&missing).unwrap();
    server.good("POST", "/v1/reload", Value::Null);
    assert_eq!(failed()[0]["name"], "b");
    server.configure(&alone);
    server.good("POST", "/v1/reload", Value::Null);
    assert_eq!(failed(), json!([]));
    let mut stream = server.connect();
    let request = "GET /v1/events?since=0 HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut events = String::new();
    let mut reader = BufReader::new(stream);
    let reloads = |text: &str| text.lines().filter(|line| *line == "event: reloaded").count();
    while reloads(&events) < 4 {
        assert!(reader.read_line(&mut events).unwrap() > 0, "{events}");
    }
    let failures = events.lines().filter(|line| *line == "event: disk-failed").count();
    assert_eq!(failures, 2, "{events}");
}

/// A dry run finds what the reload would find, and makes no file.
#[test]
fn a_dry_run_finds_what_disks_lack() {
    let server = Server::configured(&disks(&[("a", "")]));
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let all = [("a", "queues = 2"), ("b", ""), ("c", ""), ("d", ""), ("e", "")];
    let text = disks(&all)
        .replacen("null:1M", "/none/such", 2)
        .replacen("/none/such", "null:1M", 1)
        .replace("FOLDER/c", "FOLDER/none/c")
        .replace("FOLDER/a", "FOLDER/none/a");
    let nbd = format!("FOLDER/d\"\nnbd = \"tcp:127.0.0.1:{port}\"\n");
    server.configure(&text.replace("FOLDER/d\"\n", &nbd));
    let done = server.good("POST", "/v1/reload?dry-run=true", Value::Null);
    assert_eq!((&done["added"], &done["changed"]), (&json!(["e"]), &json!([])), "{done}");
    let failed = done["failed"].as_array().unwrap().iter();
    let failed: Vec<_> = failed.map(|f| (f["disk"].as_str(), f["error"].as_str())).collect();
    let expected = [
        ("a", "the disk stays as it is: socket"),
        ("b", "there is no such file"),
        ("c", "does not exist: create it first"),
        ("d", "Address already in use"),
    ];
    for ((disk, error), (name, part)) in failed.iter().zip(expected) {
        assert!(*disk == Some(name) && error.unwrap().contains(part), "{name}: {failed:?}");
    }
    assert_eq!(failed.len(), 4);
    assert!(!server.folder.join("e").exists() && !server.folder.join("b").exists());
    // The reload does not close the disk a either.
    assert_eq!(server.good("POST", "/v1/reload", Value::Null)["added"], json!(["e"]));
    assert_eq!(server.names(), ["a", "e"]);
    assert_eq!(server.good("GET", "/v1/disks/a", Value::Null)["settings"]["queues"], 1);
}
