//! `GET /v1/events` and `blockyard ctl events`.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};
use serde_json::{Value, json};

use crate::common::{BLOCKYARD, Daemon, SOON, blockyard, guests, listens, until};
use crate::metrics::{scrape, value};
use crate::server::Server;

/// Number of events that a server keeps.
const CAPACITY: u64 = 1024;

/// A stream of events.
pub struct Stream(BufReader<UnixStream>);

/// Begins a stream. Returns the status instead if it is not 200.
pub fn try_follow(server: &Server, path: &str, headers: &str) -> Result<Stream, u16> {
    let mut stream = server.connect();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // The body of an answer to HTTP/1.0 has no chunks.
    stream.write_all(format!("GET {path} HTTP/1.0\r\n{headers}\r\n").as_bytes()).unwrap();
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(stream.read_line(&mut head).unwrap(), 0, "{head}");
    }
    match head.split(' ').nth(1).unwrap().parse().unwrap() {
        200 => {
            assert!(head.contains("content-type: text/event-stream\r\n"), "{head}");
            Ok(Stream(stream))
        }
        status => Err(status),
    }
}

#[track_caller]
pub fn follow(server: &Server, path: &str) -> Stream {
    try_follow(server, path, "").unwrap_or_else(|status| panic!("{path}: {status}"))
}

impl Stream {
    /// Returns the next event, or None at the end of the stream.
    fn next(&mut self) -> Option<Value> {
        let (mut id, mut name) = (String::new(), String::new());
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(text) = line.strip_prefix("id: ") {
                id = text.trim_end().into();
            } else if let Some(text) = line.strip_prefix("event: ") {
                name = text.trim_end().into();
            } else if let Some(text) = line.strip_prefix("data: ") {
                let event: Value = serde_json::from_str(text).unwrap();
                assert_eq!((&event["id"], &event["event"]), (&json!(id), &json!(name)));
                return Some(event);
            }
        }
    }

    /// Returns the next event of this name.
    #[track_caller]
    pub fn find(&mut self, name: &str) -> Value {
        loop {
            let event = self.next().unwrap_or_else(|| panic!("the stream ended before {name}"));
            if event["event"] == name {
                return event;
            }
        }
    }

    /// Returns the next event, which has this name.
    #[track_caller]
    fn expect(&mut self, name: &str) -> Value {
        let event = self.next().unwrap_or_else(|| panic!("the stream ended before {name}"));
        assert_eq!(event["event"], name, "{event}");
        event
    }
}

/// Changes a disk `count` times, by one connection.
fn change(server: &Server, disk: &str, count: u64) {
    let stream = server.connect();
    let mut writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for number in 1..=count {
                let body = json!({ "weight": 1 + number % 2 }).to_string();
                let close = if number == count { "connection: close\r\n" } else { "" };
                let head = format!("PATCH /v1/disks/{disk} HTTP/1.1\r\nhost: x\r\n{close}");
                let text = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
                writer.write_all(text.as_bytes()).unwrap();
            }
        });
        let mut answers = String::new();
        BufReader::new(stream).read_to_string(&mut answers).unwrap();
        assert_eq!(answers.matches("HTTP/1.1 200").count() as u64, count);
    });
}

#[test]
fn the_events_of_a_disk_come_in_order() {
    let server = Server::start();
    let mut events = follow(&server, "/v1/events?since=0");
    assert_eq!(events.expect("server-ready")["disks"], 0);
    let image = server.folder.join("a.qcow2");
    blockyard(["image", "create", "-q", image.to_str().unwrap(), "16M"]).good();
    let socket = server.folder.join("a");
    server.good("POST", "/v1/disks", json!({ "name": "a", "image": image, "vhost-user": socket }));
    let added = events.expect("disk-added");
    assert_eq!((&added["disk"], &added["size"]), (&json!("a"), &json!(16 << 20)));
    assert!(added["time_us"].as_u64().unwrap() > 1_700_000_000_000_000, "{added}");
    let session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let client = events.expect("client-connected");
    assert_eq!(
        (&client["disk"], &client["export"], &client["pid"]),
        (&json!("a"), &json!("vhost-user"), &json!(std::process::id()))
    );
    let overlay = server.folder.join("b.qcow2");
    server.good("POST", "/v1/disks/a/snapshot", json!({ "overlay": overlay }));
    assert_eq!(events.expect("job-begun")["job"]["state"], "running");
    assert_eq!(events.expect("job-ended")["job"]["state"], "done");
    server.good("POST", "/v1/disks/a/resize", json!({ "size": 32 << 20 }));
    assert_eq!(events.expect("resize-begun")["size"], 32 << 20);
    assert_eq!(events.expect("resize-ended")["error"], Value::Null);
    let resized = events.expect("disk-resized");
    assert_eq!((&resized["old"], &resized["new"]), (&json!(16 << 20), &json!(32 << 20)));
    let disk = server.good("PATCH", "/v1/disks/a", json!({ "weight": 300, "on-enospc": "pause" }));
    assert_eq!(disk["settings"]["on_enospc"], "pause");
    let keys = json!([
        { "key": "on-enospc", "old": "error", "new": "\"pause\"" },
        { "key": "weight", "old": "100", "new": "300" },
    ]);
    assert_eq!(events.expect("disk-changed")["keys"], keys);
    drop(session);
    let why = events.expect("client-disconnected")["why"].clone();
    assert!(why.as_str().unwrap().contains("closed its connection"), "{why}");
    let session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    events.expect("client-connected");
    server.good("DELETE", "/v1/disks/a?force=true", Value::Null);
    assert_eq!(events.expect("client-disconnected")["why"], "the export has ended");
    assert_eq!(events.expect("disk-removed")["flushed"], true);
    drop(session);
    server.good("POST", "/v1/reload?dry-run=true", Value::Null);
    server.good("POST", "/v1/reload", Value::Null);
    assert_eq!(events.expect("reloaded")["error"], Value::Null);
    server.daemon.stop();
    events.expect("server-ending");
    assert_eq!(events.next(), None);
}

/// An NBD server that fails flushes stands for a device that has lost writes.
#[test]
fn a_failed_flush_is_an_event_and_a_figure() {
    let server = Server::start();
    let (kit, socket) = (server.folder.join("kit"), server.folder.join("s"));
    let mut command = Command::new(guests().join("tool"));
    command.args(["nbdkit", "-f", "-U"]).arg(&kit);
    command.args([
        "eval",
        "get_size=echo 1048576",
        "pread=head -c $3 /dev/zero",
        "pwrite=cat >/dev/null",
        "can_write=exit 0",
        "can_flush=exit 0",
        "flush=echo EIO the device has lost writes >&2; exit 1",
    ]);
    let _kit = Daemon::start(&mut command);
    until("nbdkit listens", SOON, || listens(&kit));
    let image = format!("nbd+unix:///?socket={}", kit.display());
    server.good("POST", "/v1/disks", json!({ "name": "a", "image": image, "vhost-user": socket }));
    let mut session = Session::<SplitRing>::start(&socket, &Plan::default()).unwrap();
    let mut events = follow(&server, "/v1/events");
    let mut ask = |kind, data| session.queues[0].call(kind, 0, data, &mut [7; 4096], SOON).unwrap();
    let write = (request::OUT, Data::ToDevice(4096));
    assert_eq!(ask(write.0, write.1), status::OK);
    assert_eq!(ask(request::FLUSH, Data::None), status::IOERR);
    let poisoned = events.find("disk-poisoned");
    assert_eq!(poisoned["disk"], "a");
    assert!(poisoned["why"].as_str().unwrap().contains("a flush failed"), "{poisoned}");
    assert_eq!(ask(write.0, write.1), status::IOERR, "it accepts no more writes");
    let figures = server.good("GET", "/v1/figures", Value::Null);
    assert_eq!(figures["disks"][0]["poisoned"], true);
    assert_eq!(value(&scrape(&server), "blockyard_disk_poisoned", "a"), 1.0);
    let disk = server.good("GET", "/v1/disks/a", Value::Null);
    assert_eq!(disk["poisoned"], poisoned["why"]);
    let api = server.socket();
    for (command, what) in [("list", "  poisoned  "), ("status", "a: poisoned: a flush failed")] {
        let shown = blockyard(["ctl", "--api", api.to_str().unwrap(), command]).good();
        assert!(shown.contains(what), "{shown}");
    }
    for (call, body) in [("flush", ""), ("drain", "{}")] {
        let problem = server.bad("POST", &format!("/v1/disks/a/{call}"), body, 422);
        assert!(problem["detail"].as_str().unwrap().contains("flush"), "{call}: {problem}");
    }
    drop(session);
    server.good("DELETE", "/v1/disks/a?force=true", Value::Null);
}

#[test]
fn a_stream_resumes_and_tells_what_it_has_missed() {
    let server = Server::start();
    server.good("POST", "/v1/disks", server.keys("a"));
    let mut events = follow(&server, "/v1/events?since=0");
    let first = events.expect("server-ready");
    let header = format!("Last-Event-ID: {}\r\n", first["id"].as_str().unwrap());
    let resume = || try_follow(&server, "/v1/events", &header).ok().unwrap();
    assert_eq!(resume().expect("disk-added"), events.expect("disk-added"));
    change(&server, "a", CAPACITY + 5);
    // The client that was connected gets all of them. Then the log has them: it gets an event soon
    // after the answer of a call.
    (0..CAPACITY + 5).for_each(|_| drop(events.expect("disk-changed")));
    let mut late = resume();
    // The addition and five changes.
    assert_eq!(late.expect("lost")["count"], 6);
    assert_eq!(late.expect("disk-changed")["disk"], "a");
    let mut other = follow(&server, "/v1/events");
    server.good("DELETE", "/v1/disks/a", Value::Null);
    let last = events.expect("disk-removed");
    assert_eq!(other.expect("disk-removed"), last, "a stream without an id begins with the next");
    // The header of a browser that connects again has precedence over its first path.
    let header = format!("Last-Event-ID: {}\r\n", last["id"].as_str().unwrap());
    let mut again = try_follow(&server, "/v1/events?since=0", &header).ok().unwrap();
    server.good("POST", "/v1/disks", server.keys("b"));
    again.expect("disk-added");
    let unknown = follow(&server, "/v1/events?since=17-3").expect("lost");
    assert_eq!(unknown["count"], Value::Null);
}

#[test]
fn wrong_ids_and_parameters_are_refused() {
    let server = Server::start();
    for path in ["?since=x", "?since=", "?since=1-", "?since=1-99999999999999999999999", "?sinc=0"]
    {
        server.bad("GET", &format!("/v1/events{path}"), "", 400);
    }
    for header in ["Last-Event-ID: 1:2\r\n", "Last-Event-ID: \u{e4}\r\n"] {
        assert_eq!(try_follow(&server, "/v1/events", header).err(), Some(400), "{header}");
    }
    server.bad("POST", "/v1/events", "", 405);
}

/// Clients that read nothing have the streams that there are, and nothing more.
#[test]
fn clients_that_read_nothing_hurt_nobody() {
    let server = Server::start();
    server.good("POST", "/v1/disks", server.keys("a"));
    let mut all: Vec<_> = (0..16).map(|_| follow(&server, "/v1/events")).collect();
    assert_eq!(try_follow(&server, "/v1/events", "").err(), Some(503));
    change(&server, "a", 2 * CAPACITY);
    assert_eq!(server.names(), ["a"]);
    // One that reads now gets all that its socket and the ring hold, and what it has missed.
    let mut slow = all.pop().unwrap();
    let mut seen = 0;
    while seen < 2 * CAPACITY {
        let event = slow.next().unwrap();
        seen += event["count"].as_u64().unwrap_or(1);
    }
    assert_eq!(seen, 2 * CAPACITY);
    drop(slow);
    until("a stream is free", SOON, || try_follow(&server, "/v1/events", "").is_ok());
    server.daemon.stop();
}

#[test]
fn the_command_prints_events_until_the_server_ends() {
    let server = Server::start();
    let socket = server.socket();
    let print = |more: &[&str]| {
        let mut command = Command::new(BLOCKYARD);
        command.args(["ctl", "events", "--since", "0", "--api"]).arg(&socket).args(more);
        Daemon::start(&mut command)
    };
    let mut commands = [print(&[]), print(&["--json"])];
    server.good("POST", "/v1/disks", server.keys("a"));
    for command in &commands {
        until("the command prints the event", SOON, || command.out().contains("disk-added"));
    }
    let failed = blockyard(["ctl", "--api", socket.to_str().unwrap(), "events", "--since", "x"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("no id of an event"), "{}", failed.err);
    server.daemon.stop();
    let [table, lines] = commands.each_mut().map(|command| {
        let status = command.ended(SOON);
        assert!(status.success(), "{status}: {}", command.log());
        command.out()
    });
    let names: Vec<_> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone())
        .collect();
    assert_eq!(names, ["server-ready", "disk-added", "server-ending"]);
    assert_eq!(table.lines().count(), names.len(), "{table}");
    for (line, name) in table.lines().zip(names) {
        assert!(line.contains(name.as_str().unwrap()), "{table:?}");
    }
}
