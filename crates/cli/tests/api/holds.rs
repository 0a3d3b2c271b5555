//! Requests that an operator holds back, and clients that an operator disconnects.

use std::path::Path;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};
use serde_json::{Value, json};

use crate::common::{Daemon, SOON, blockyard, guests, until};
use crate::events::follow;
use crate::metrics::{scrape, value};
use crate::server::Server;

/// Returns how many requests of disk "a" have no answer, and how many writes have ended.
fn counts(server: &Server) -> (u64, u64) {
    let figures = server.good("GET", "/v1/figures", Value::Null);
    let disk = &figures["disks"][0];
    let writes = &disk["operations"]["write"]["requests"];
    (disk["in_flight"].as_u64().unwrap(), writes.as_u64().unwrap_or(0))
}

fn disk_state(server: &Server) -> Value {
    server.good("GET", "/v1/disks/a", Value::Null)["drained"].clone()
}

/// Returns whether the disk is drained by its figures, which `top` shows, and by its metrics.
fn shown(server: &Server) -> (Value, bool) {
    let figures = server.good("GET", "/v1/figures", Value::Null);
    let metric = value(&scrape(server), "blockyard_disk_drained", "a");
    (figures["disks"][0]["drained"].clone(), metric == 1.0)
}

#[test]
fn a_drained_disk_holds_requests_until_it_is_resumed() {
    let server = Server::start();
    let image = server.folder.image("disk.img", 1 << 20);
    let socket = server.folder.join("s");
    server.good("POST", "/v1/disks", json!({ "name": "a", "image": image, "vhost-user": socket }));
    let mut session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let queue = &mut session.queues[0];
    let mut data = vec![7; 4096];
    let first = queue.call(request::OUT, 0, Data::ToDevice(4096), &mut data, SOON).unwrap();
    assert_eq!(first, status::OK);

    let mut events = follow(&server, "/v1/events");
    let drained = server.good("POST", "/v1/disks/a/drain", json!({}));
    assert_eq!(drained, json!({ "name": "a", "seconds": 60 }));
    assert_eq!((disk_state(&server), counts(&server)), (true.into(), (0, 1)));
    assert_eq!(shown(&server), (true.into(), true));
    queue.write_data(0, &[8; 4096]);
    queue.submit(0, request::OUT, 0, Data::ToDevice(4096));
    queue.publish().unwrap();
    until("the request is there", SOON, || counts(&server) == (1, 1));
    assert_eq!(std::fs::read(&image).unwrap()[0], 7, "the image does not change");
    // Commands go on, and none of them waits for the held request.
    server.good("POST", "/v1/disks/a/flush", Value::Null);
    server.good("POST", "/v1/disks/a/refresh", Value::Null);
    server.good("PATCH", "/v1/disks/a", json!({ "weight": 200 }));
    let busy = server.bad("POST", "/v1/disks/a/drain", "{}", 409);
    assert!(
        busy["detail"]
            .as_str()
            .unwrap()
            .contains("is drained already, and its time goes on: `ctl resume "),
        "{busy}"
    );
    let cache = r#"{"cache": "writeback"}"#;
    let refused = server.bad("PATCH", "/v1/disks/a?force=true", cache, 409);
    assert!(refused["detail"].as_str().unwrap().contains("it is drained"), "{refused}");

    let resumed = server.good("POST", "/v1/disks/a/resume", Value::Null);
    let expected = json!({ "name": "a", "requests": 0, "drained": true, "opening": false });
    assert_eq!(resumed, expected);
    until("the write ends", SOON, || queue.reap().unwrap() == Some((0, status::OK)));
    assert_eq!(std::fs::read(&image).unwrap()[0], 8);
    assert_eq!(disk_state(&server), false);
    assert_eq!(shown(&server), (false.into(), false));

    // The end of the time, and the end of the disk, end a drain too.
    server.good("POST", "/v1/disks/a/drain", json!({ "seconds": 1 }));
    for expired in [false, true] {
        assert_eq!(events.find("disk-drained")["disk"], "a");
        assert_eq!(events.find("drain-ended")["expired"], expired);
    }
    let again = queue.call(request::OUT, 0, Data::ToDevice(4096), &mut data, SOON).unwrap();
    assert_eq!(again, status::OK);
    until("the drain ends", SOON, || disk_state(&server) == false);
    until("a drain begins", SOON, || server.send("POST", "/v1/disks/a/drain", "{}").0 == 200);
    server.good("DELETE", "/v1/disks/a?force=true", Value::Null);
    server.bad("POST", "/v1/disks/a/drain", "{}", 404);
    server.good("POST", "/v1/disks", server.keys("a"));
    server.good("POST", "/v1/disks/a/drain", json!({ "seconds": 600 }));
    for seconds in ["0", "601", "-1", "\"5\""] {
        let body = format!("{{\"seconds\": {seconds}}}");
        let problem = server.bad("POST", "/v1/disks/a/drain", &body, 422);
        assert_eq!(problem["field"], "seconds", "{problem}");
    }
    // The end of the server does not wait for the drain.
    server.daemon.stop();
}

/// A guest waits for the answer of a request that the drain holds back.
#[test]
fn a_drained_disk_refuses_at_once_what_would_wait_for_its_requests() {
    let server = Server::start();
    let (image, socket) = (server.folder.image("disk.img", 1 << 20), server.folder.join("s"));
    server.good("POST", "/v1/disks", json!({ "name": "a", "image": image, "vhost-user": socket }));
    let left = || server.good("GET", "/v1/disks/a", Value::Null)["drain_seconds_left"].clone();
    assert_eq!(left(), Value::Null);
    let mut session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let queue = &mut session.queues[0];
    server.good("POST", "/v1/disks/a/drain", json!({ "seconds": 600 }));
    assert!((1..=600).contains(&left().as_u64().unwrap()), "{}", left());
    queue.submit(0, request::OUT, 0, Data::ToDevice(4096));
    queue.publish().unwrap();
    until("the request is there", SOON, || counts(&server) == (1, 0));

    let refused = server.bad("POST", "/v1/disks/a/disconnect", "{}", 409);
    let what = refused["detail"].as_str().unwrap();
    assert!(what.contains("is drained") && what.contains("`ctl resume a` first"), "{refused}");
    for (call, body) in [
        ("commit", Value::Null),
        ("stream", Value::Null),
        ("snapshot", json!({ "overlay": server.folder.join("top.qcow2") })),
        ("backup", json!({ "target": server.folder.join("copy.qcow2") })),
    ] {
        let job = server.ended(&server.good("POST", &format!("/v1/disks/a/{call}"), body));
        assert!(job["error"].as_str().unwrap().contains("the disk is drained: resume"), "{job}");
    }
    let api = server.socket();
    let shown = blockyard(["ctl", "--api", api.to_str().unwrap(), "show", "a"]).good();
    assert!(shown.contains(" s left; `blockyard ctl resume a` ends it"), "{shown}");

    server.good("POST", "/v1/disks/a/resume", Value::Null);
    until("the write ends", SOON, || queue.reap().unwrap() == Some((0, status::OK)));
    assert_eq!(left(), Value::Null);
    let gone = server.good("POST", "/v1/disks/a/disconnect", json!({}));
    assert_eq!(gone["clients"].as_array().unwrap().len(), 1, "{gone}");
}

#[test]
fn a_drain_holds_the_reads_of_a_read_only_disk() {
    let server = Server::start();
    let (image, socket) = (server.folder.image("disk.img", 1 << 20), server.folder.join("s"));
    let keys = json!({ "name": "a", "image": image, "vhost-user": socket, "read-only": true });
    server.good("POST", "/v1/disks", keys);
    let mut session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let queue = &mut session.queues[0];
    server.good("POST", "/v1/disks/a/drain", json!({}));
    assert_eq!(disk_state(&server), true);
    queue.submit(0, request::IN, 0, Data::FromDevice(4096));
    queue.publish().unwrap();
    until("the request is there", SOON, || counts(&server) == (1, 0));
    server.good("POST", "/v1/disks/a/resume", Value::Null);
    until("the read ends", SOON, || queue.reap().unwrap() == Some((0, status::OK)));
}

#[test]
fn a_disk_without_a_guest_shows_that_its_image_is_closed() {
    let server = Server::start();
    let (image, socket) = (server.folder.image("disk.img", 1 << 20), server.folder.join("s"));
    let keys = json!({ "name": "a", "image": image, "vhost-user": socket, "activation": "rings" });
    server.good("POST", "/v1/disks", keys);
    let is_inactive = || server.good("GET", "/v1/disks/a", Value::Null)["inactive"] == true;
    assert!(is_inactive());
    let api = server.socket();
    let shown = blockyard(["ctl", "--api", api.to_str().unwrap(), "show", "a"]).good();
    let has = |row: [&str; 2]| {
        let mut rows = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.any(|cells| cells == row)
    };
    assert!(has(["state", "no-guest"]) && has(["activation", "rings"]), "{shown}");
    let session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    until("the image is open", SOON, || !is_inactive());
    drop(session);
    until("the image is closed", SOON, is_inactive);
}

/// Starts nbdsh, which connects, prints "connected", and ends when its connection ends.
fn nbd_client(socket: &Path) -> Daemon {
    let script = format!(
        "h.connect_unix({:?})\nprint('connected', flush=True)\n\
         while h.aio_is_ready(): h.poll(-1)\n",
        socket.to_str().unwrap()
    );
    let mut command = std::process::Command::new(guests().join("tool"));
    Daemon::start(command.args(["nbdsh", "-c", &script]))
}

#[test]
fn clients_are_disconnected_one_by_one_or_all() {
    let server = Server::start();
    let (socket, nbd) = (server.folder.join("s"), server.folder.join("nbd"));
    let export = format!("unix:{}", nbd.display());
    let keys = json!({ "name": "", "image": "ram:1M", "vhost-user": socket, "nbd": export });
    let mut keys = keys;
    keys["name"] = "a".into();
    server.good("POST", "/v1/disks", keys);
    let clients = || {
        let disk = server.good("GET", "/v1/disks/a", Value::Null);
        let clients = disk["clients"].as_array().unwrap().iter();
        clients.map(|client| client["description"].clone()).collect::<Vec<_>>()
    };
    let disconnect =
        |body: Value| server.good("POST", "/v1/disks/a/disconnect", body)["clients"].clone();
    assert_eq!(disconnect(json!({})), json!([]));
    let problem = server.bad("POST", "/v1/disks/a/disconnect", r#"{"client": "pid 1"}"#, 404);
    assert_eq!(problem["field"], "client", "{problem}");

    let session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let me = json!(format!("pid {}", std::process::id()));
    let mut child = nbd_client(&nbd);
    until("both are connected", SOON, || clients().len() == 2);
    assert_eq!(disconnect(json!({ "client": me })), json!([me]));
    assert_eq!(clients().len(), 1);
    drop(session);
    // Nothing keeps it from connecting again.
    let session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    assert_eq!(disconnect(json!({})).as_array().unwrap().len(), 2);
    assert_eq!(clients(), [] as [Value; 0]);
    drop(session);
    child.ended(SOON);
    server.good("DELETE", "/v1/disks/a", Value::Null);
    let log = server.daemon.stop();
    assert!(log.contains("disconnect by process"), "{log}");
}
