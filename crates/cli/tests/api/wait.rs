//! `blockyard ctl wait`: it follows events, and resumes the stream if the connection breaks.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::json;

use crate::common::{BLOCKYARD, Daemon, Folder, Gate, SOON, blockyard, tool, until};
use crate::events::try_follow;
use crate::server::Server;

/// A socket in front of the API. It notes the calls, and can break the streams.
struct Between {
    socket: PathBuf,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// First lines of the requests, without the version.
    calls: Vec<String>,
    /// What the server has sent.
    answers: String,
    streams: Vec<UnixStream>,
}

impl Between {
    fn start(server: &Server) -> Self {
        let (socket, api) = (server.folder.join("between"), server.socket());
        let listener = UnixListener::bind(&socket).unwrap();
        let seen = Arc::<Mutex<Seen>>::default();
        let noted = seen.clone();
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, seen) = (client.unwrap(), noted.clone());
                let server = UnixStream::connect(&api).unwrap();
                std::thread::spawn(move || pass(client, server, &seen));
            }
        });
        Between { socket, seen }
    }

    fn calls(&self) -> Vec<String> {
        self.seen.lock().unwrap().calls.clone()
    }

    /// Ends the connections of all streams.
    fn break_streams(&self) {
        for stream in self.seen.lock().unwrap().streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Passes one request to the server, and the answer to the client.
fn pass(mut client: UnixStream, mut server: UnixStream, seen: &Mutex<Seen>) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        request.push(byte[0]);
    }
    let request = String::from_utf8(request).unwrap();
    let call = request.split(" HTTP/1.1").next().unwrap().to_string();
    if call.contains("/v1/events") {
        seen.lock().unwrap().streams.push(client.try_clone().unwrap());
    }
    server.write_all(request.as_bytes()).unwrap();
    // The test waits for a call that has reached the server.
    seen.lock().unwrap().calls.push(call);
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = server.read(&mut bytes) {
        if client.write_all(&bytes[..count]).is_err() {
            return;
        }
        seen.lock().unwrap().answers += &String::from_utf8_lossy(&bytes[..count]);
    }
    let _ = client.shutdown(Shutdown::Both);
}

/// An API server with an overlay of an image on an NBD server.
pub struct SlowBase {
    pub server: Server,
    /// A job of the disk waits while the way to the NBD server is closed.
    pub way: Gate,
    _behind: Daemon,
    _far: Folder,
}

pub fn with_slow_base() -> SlowBase {
    let far = Folder::new();
    let (base, nbd, gate) = (far.join("base.raw"), far.join("nbd"), far.join("gate"));
    std::fs::write(&base, vec![7; 1 << 20]).unwrap();
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg(&base).arg("--nbd").arg(format!("unix:{}", nbd.display()));
    let mut behind = Daemon::start(&mut command);
    behind.wait_ready();
    let way = Gate::default();
    way.start(&gate, &nbd);
    let server = Server::start();
    let (image, uri) =
        (server.folder.join("a.qcow2"), format!("nbd+unix:///?socket={}", gate.display()));
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &uri, image.to_str().unwrap()];
    tool("qemu-img", create).good();
    let keys = json!({ "name": "a", "image": image, "vhost-user": server.folder.join("a"),
        "backing-folders": [uri] });
    server.good("POST", "/v1/disks", keys);
    SlowBase { server, way, _behind: behind, _far: far }
}

#[test]
fn the_command_waits_by_events_and_resumes_their_stream() {
    let slow = with_slow_base();
    let server = &slow.server;
    let between = Between::start(server);
    slow.way.set(true);
    let api = server.socket();
    let begin = ["ctl", "--api", api.to_str().unwrap(), "stream", "a", "--no-wait"];
    blockyard(begin).good();
    let mut command = Command::new(BLOCKYARD);
    command.args(["ctl", "--json", "--api"]).arg(&between.socket).args(["wait", "1"]);
    let mut child = Daemon::start(&mut command);
    until("the command has asked for the job", SOON, || between.calls().len() == 2);
    assert_eq!(between.calls(), ["GET /v1/events", "GET /v1/jobs/1"]);
    server.good("POST", "/v1/disks", server.keys("b"));
    until("the command has an event", SOON, || {
        between.seen.lock().unwrap().answers.contains("disk-added")
    });
    between.break_streams();
    until("the command has asked again", SOON, || between.calls().len() == 4);
    let calls = between.calls();
    assert!(calls[2].starts_with("GET /v1/events?since="), "{calls:?}");
    assert_eq!(calls[3], "GET /v1/jobs/1");
    slow.way.set(false);
    let status = child.ended(SOON);
    assert!(status.success(), "{status}: {}", child.log());
    let job: serde_json::Value = serde_json::from_str(&child.out()).unwrap();
    assert_eq!((&job["number"], &job["state"]), (&json!(1), &json!("done")));
    assert_eq!(between.calls().len(), 4, "events told the end");
}

#[test]
fn commands_without_a_free_stream_wait_too() {
    let slow = with_slow_base();
    let server = &slow.server;
    slow.way.set(true);
    let api = server.socket();
    blockyard(["ctl", "--api", api.to_str().unwrap(), "stream", "a", "--no-wait"]).good();
    // The server has 16 streams.
    let wait = |_| {
        let mut command = Command::new(BLOCKYARD);
        command.args(["ctl", "--api"]).arg(&api).args(["wait", "1"]);
        Daemon::start(&mut command)
    };
    let children: Vec<_> = (0..17).map(wait).collect();
    until("all streams are in use", SOON, || {
        try_follow(server, "/v1/events", "").err() == Some(503)
    });
    slow.way.set(false);
    for mut child in children {
        let status = child.ended(SOON);
        assert!(status.success(), "{status}: {}", child.log());
    }
}

#[test]
fn a_job_that_no_server_has_is_an_error() {
    let server = Server::start();
    let api = server.socket();
    let failed = blockyard(["ctl", "--api", api.to_str().unwrap(), "wait", "7"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("job 7") || failed.err.contains("no job"), "{}", failed.err);
    server.daemon.stop();
    let failed = blockyard(["ctl", "--api", api.to_str().unwrap(), "wait", "7"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("cannot connect to the API"), "{}", failed.err);
}
