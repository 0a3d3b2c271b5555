//! Disks on storage that hangs: calls for other disks are answered meanwhile.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};
use serde_json::{Value, json};

use crate::common::{Folder, Gated, SOON, blockyard, until};
use crate::server::Server;

/// More disks than the API has places for calls that may block (6), and than the yard has threads
/// for commands (4).
const HUNG: usize = 10;

/// As many disks as calls that may block have places, with those that run for long (32).
const ALL_PLACES: usize = 38;

/// A server with disks that hang at a flush, and one that does not. All have a guest.
struct Hung {
    server: Server,
    _guests: Vec<Session<SplitRing>>,
    /// Calls that have no answer yet.
    calls: Vec<UnixStream>,
}

fn guest(server: &Server, disk: &str) -> Session<SplitRing> {
    let mut guest =
        Session::<SplitRing>::start(&server.folder.join(disk), &Plan::default()).unwrap();
    let (write, mut data) = (Data::ToDevice(4096), [7; 4096]);
    let written = guest.queues[0].call(request::OUT, 0, write, &mut data, SOON).unwrap();
    assert_eq!(written, status::OK);
    guest
}

fn state(server: &Server, disk: &str) -> String {
    let disks = server.good("GET", "/v1/disks", Value::Null);
    let is_it = |row: &&Value| row["name"] == disk;
    let row = disks["disks"].as_array().unwrap().iter().find(is_it).unwrap();
    row["state"].as_str().unwrap().to_string()
}

/// Sends a call, and does not wait for its answer.
fn begin(server: &Server, method: &str, path: &str, body: &str) -> UnixStream {
    let mut stream = server.connect();
    let len = body.len();
    let text =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len}\r\n\r\n{body}");
    stream.write_all(text.as_bytes()).unwrap();
    stream
}

/// Adds a disk that hangs at a flush.
fn add_hanging(server: &Server, name: &str) {
    let mut keys = server.keys(name);
    keys["filters"] = json!(["delay:flush=3600s"]);
    server.good("POST", "/v1/disks", keys);
}

fn flush(name: &str) -> String {
    format!("/v1/disks/{name}/flush")
}

impl Hung {
    fn start() -> Self {
        Self::with(HUNG)
    }

    fn with(count: usize) -> Self {
        let server = Server::start();
        let names: Vec<_> = (0..count).map(|number| format!("h{number}")).collect();
        names.iter().for_each(|name| add_hanging(&server, name));
        server.good("POST", "/v1/disks", server.keys("a"));
        let disks = names.iter().map(String::as_str).chain(["a"]);
        let _guests = disks.map(|name| guest(&server, name)).collect();
        let calls: Vec<_> =
            names.iter().map(|name| begin(&server, "POST", &flush(name), "")).collect();
        for name in &names {
            until("the flush runs", SOON, || state(&server, name) == "busy");
        }
        Hung { server, _guests, calls }
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // No call has been answered. The daemon is killed, because its end would flush the disks.
        for mut call in self.calls.drain(..) {
            call.set_nonblocking(true).unwrap();
            let answer = call.read(&mut [0; 1]);
            if !std::thread::panicking() {
                assert_eq!(answer.unwrap_err().kind(), ErrorKind::WouldBlock);
            }
        }
    }
}

#[test]
fn disks_that_hang_do_not_delay_calls_for_others() {
    let hung = Hung::start();
    let server = &hung.server;
    server.good("POST", "/v1/disks", server.keys("new"));
    let disk = server.good("PATCH", "/v1/disks/a", json!({ "weight": 300 }));
    assert_eq!(disk["settings"]["weight"], 300);
    server.good("POST", "/v1/disks/a/flush", Value::Null);
    server.good("POST", "/v1/disks/a/drain", json!({}));
    server.good("POST", "/v1/disks/a/resume", Value::Null);
    server.good("POST", "/v1/disks/a/refresh", Value::Null);
    server.good("DELETE", "/v1/disks/a?force=true", Value::Null);
    server.good("DELETE", "/v1/disks/new", Value::Null);
}

#[test]
fn a_disk_that_hangs_is_shown_and_takes_no_second_command() {
    let hung = Hung::start();
    let server = &hung.server;
    let disk = server.good("GET", "/v1/disks/h1", Value::Null);
    assert_eq!((&disk["state"], &disk["size"]), (&json!("busy"), &json!(1 << 20)));
    assert_eq!(disk["clients"][0]["pid"], std::process::id(), "{disk}");
    assert_eq!(disk["requests"]["write"]["requests"], 1, "{disk}");
    assert!(disk["share"].is_object() && disk["settings"].is_object(), "{disk}");
    let refused = |method: &str, path: &str, body: &str| {
        let problem = server.bad(method, path, body, 409);
        let what = problem["detail"].as_str().unwrap();
        assert!(what.contains("another command works on disk \"h1\""), "{problem}");
        assert!(what.contains("storage does not answer"), "{problem}");
    };
    refused("POST", "/v1/disks/h1/flush", "");
    refused("POST", "/v1/disks/h1/drain", "{}");
    refused("POST", "/v1/disks/h1/refresh", "");
    refused("POST", "/v1/disks/h1/commit", "");
    refused("PATCH", "/v1/disks/h1", r#"{"weight": 300}"#);
    // A guest can be disconnected.
    let gone = server.good("POST", "/v1/disks/h1/disconnect", json!({}));
    assert_eq!(gone["clients"].as_array().unwrap().len(), 1, "{gone}");
    let api = server.socket();
    let shown = blockyard(["ctl", "--api", api.to_str().unwrap(), "show", "h1"]).good();
    assert!(shown.contains("busy"), "{shown}");
}

#[test]
fn a_disk_is_shown_and_disconnected_while_no_other_call_has_a_place() {
    let hung = Hung::with(ALL_PLACES);
    let server = &hung.server;
    let disk = server.good("GET", "/v1/disks/h1", Value::Null);
    assert_eq!(disk["state"], "busy", "{disk}");
    let gone = server.good("POST", "/v1/disks/h1/disconnect", json!({}));
    assert_eq!(gone["clients"].as_array().unwrap().len(), 1, "{gone}");
}

/// Returns the status of the answer to a call.
fn status_of(mut call: UnixStream) -> String {
    let mut head = [0; 12];
    call.read_exact(&mut head).unwrap();
    String::from_utf8_lossy(&head[9..]).into_owned()
}

/// Each of these calls waits until the storage answers the request of the client.
#[test]
fn calls_that_wait_for_the_clients_of_one_disk_take_no_place_of_others() {
    let server = Server::start();
    let storage = Gated::start(&server.folder, &server.folder.image("far.img", 1 << 20));
    let mut keys = server.keys("h");
    (keys["image"], keys["nbd-timeout"]) = (storage.image().into(), json!(300));
    server.good("POST", "/v1/disks", keys);
    server.good("POST", "/v1/disks", server.keys("a"));
    let (mut guest, _other) = (guest(&server, "h"), guest(&server, "a"));
    let closed = storage.close();
    guest.queues[0].submit(0, request::FLUSH, 0, Data::None);
    guest.queues[0].publish().unwrap();
    let in_flight = || server.good("GET", "/v1/figures", Value::Null)["disks"][0]["in_flight"] == 1;
    until("the request is in flight", SOON, in_flight);
    let disconnect = || begin(&server, "POST", "/v1/disks/h/disconnect", "{}");
    let calls: Vec<_> = (0..ALL_PLACES + 12).map(|_| disconnect()).collect();
    server.good("POST", "/v1/disks/a/flush", Value::Null);
    server.good("GET", "/v1/disks/h", Value::Null);
    for mut call in &calls {
        call.set_nonblocking(true).unwrap();
        let answer = call.read(&mut [0; 1]);
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::WouldBlock);
        call.set_nonblocking(false).unwrap();
    }
    drop(closed);
    for call in calls {
        assert_eq!(status_of(call), "200");
    }
}

#[test]
fn a_command_that_gets_no_answer_says_that_the_call_may_still_run() {
    let server = Server::start();
    add_hanging(&server, "a");
    let _guest = guest(&server, "a");
    let api = server.socket();
    let flush = ["ctl", "--api", api.to_str().unwrap(), "--timeout", "3", "flush", "a"];
    let failed = blockyard(flush);
    assert_eq!(failed.status.code(), Some(1));
    for part in ["the call may still run", "ctl show", "--timeout"] {
        assert!(failed.err.contains(part), "{}", failed.err);
    }
    until("it runs", SOON, || state(&server, "a") == "busy");
}

/// Returns the text of a disk in the configuration file.
fn configured(name: &str, more: &str) -> String {
    format!(
        "[[disk]]\nname = \"{name}\"\nimage = \"FOLDER/{name}\"\nformat = \"raw\"\n\
         vhost-user = \"FOLDER/{name}.s\"\n{more}"
    )
}

/// Starts a server with the disk "a" in its configuration, and "h", which hangs at a flush.
fn start_configured() -> (Server, String) {
    let hanging = configured("h", "filters = [\"delay:flush=3600s\"]\n");
    let folder = Folder::new();
    for name in ["a", "h"] {
        folder.image(name, 1 << 20);
    }
    std::fs::create_dir(folder.join("conf.d")).unwrap();
    let server = Server::configured_in(folder, &(configured("a", "") + &hanging));
    (server, hanging)
}

/// The reload has read the file without the overlay, and would put the old image into its record.
#[test]
fn a_snapshot_that_is_kept_does_not_begin_during_a_reload() {
    let (server, _) = start_configured();
    let guest = guest(&server, "h.s");
    server.configure(&configured("a", "weight = 300\n"));
    let _call = begin(&server, "POST", "/v1/reload", "");
    until("the reload runs", SOON, || state(&server, "h") == "closing");
    let overlay = json!({ "overlay": server.folder.join("top.qcow2"), "persist": true });
    let problem = server.bad("POST", "/v1/disks/a/snapshot", &overlay.to_string(), 409);
    assert!(problem["detail"].as_str().unwrap().contains("a reload or an upgrade"), "{problem}");
    drop(guest);
}

/// Reloads, and keeps changes of the disk "a", while a call waits for the disk "h".
fn others_go_on(server: &Server, hanging: &str) {
    server.configure(&(configured("a", "weight = 300\n") + hanging));
    let reloaded = server.good("POST", "/v1/reload", Value::Null);
    assert_eq!(reloaded["changed"][0]["disk"], "a", "{reloaded}");
    for none in ["added", "removed", "failed"] {
        assert_eq!(reloaded[none], json!([]), "{none}: {reloaded}");
    }
    server.good("PATCH", "/v1/disks/a?persist=true", json!({ "weight": 400 }));
    server.good("PATCH", "/v1/disks/a", json!({ "cache": "writeback" }));
    server.good("DELETE", "/v1/disks/a?persist=true", Value::Null);
}

#[test]
fn a_removal_that_hangs_delays_no_reload_and_no_change_that_is_kept() {
    let (server, hanging) = start_configured();
    let guest = guest(&server, "h.s");
    let _call = begin(&server, "DELETE", "/v1/disks/h?force=true&persist=true", "");
    until("the removal runs", SOON, || state(&server, "h") == "closing");
    others_go_on(&server, &hanging);
    drop(guest);
}

#[test]
fn a_change_of_the_cache_mode_that_hangs_delays_no_reload_and_no_change_that_is_kept() {
    let (server, hanging) = start_configured();
    let guest = guest(&server, "h.s");
    let path = "/v1/disks/h?force=true&persist=true";
    let _call = begin(&server, "PATCH", path, r#"{"cache": "writeback"}"#);
    until("the flush runs", SOON, || state(&server, "h") == "busy");
    others_go_on(&server, &hanging);
    drop(guest);
}

/// The removal waits for the storage, for a limited time. Nothing else waits for it.
#[test]
fn a_disk_whose_removal_hangs_keeps_its_name_and_delays_no_other() {
    let server = Server::start();
    add_hanging(&server, "a");
    server.good("POST", "/v1/disks", server.keys("b"));
    let guest = guest(&server, "a");
    let _call = begin(&server, "DELETE", "/v1/disks/a?force=true", "");
    until("the removal runs", SOON, || state(&server, "a") == "closing");
    let problem = server.bad("DELETE", "/v1/disks/a?force=true", "", 409);
    assert!(problem["detail"].as_str().unwrap().contains("another command works"), "{problem}");
    server.good("DELETE", "/v1/disks/b", Value::Null);
    assert_eq!(server.names(), ["a"]);
    let problem = server.bad("POST", "/v1/upgrade", "{}", 409);
    let why = problem["detail"].as_str().unwrap();
    assert!(why.contains("disk \"a\", which is closing (`ctl show a`): try again later"), "{why}");
    drop(guest);
}
