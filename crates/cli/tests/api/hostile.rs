//! Clients that send or read nothing, or too much.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use serde_json::Value;

use crate::common::{SOON, until};
use crate::server::Server;

/// A connection without a request. The socket's queue may be full.
fn idle(server: &Server) -> Option<UnixStream> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
        None,
    )
    .unwrap();
    let address = rustix::net::SocketAddrUnix::new(server.socket()).unwrap();
    rustix::net::connect(&socket, &address).ok().map(|()| socket.into())
}

#[test]
fn a_thousand_idle_connections_take_few_descriptors_and_the_server_answers() {
    let server = Server::start();
    server.good("POST", "/v1/disks", server.keys("a"));
    let all: Vec<_> = (0..1000).filter_map(|_| idle(&server)).collect();
    assert!(all.len() > 64, "{}", all.len());
    // It has accepted as many as it may when the first one of the rest is still in the queue.
    let open = || server.daemon.descriptors().len();
    until("the server has accepted 64", SOON, || open() >= 64);
    assert!(open() < 64 + 64, "the server holds {} descriptors", open());
    drop(all);
    assert_eq!(server.names(), ["a"]);
    assert!(server.daemon.stop().contains("POST /v1/disks"));
}

#[test]
fn calls_that_fail_do_not_fill_the_log_and_changes_are_all_logged() {
    let server = Server::start();
    for _ in 0..100 {
        server.bad("DELETE", "/v1/disks/none", "", 404);
    }
    for _ in 0..20 {
        server.good("POST", "/v1/disks", server.keys("a"));
        server.good("DELETE", "/v1/disks/a", Value::Null);
    }
    let log = server.daemon.stop();
    let lines = |call: &str| log.lines().filter(|line| line.contains(call)).count();
    assert!((10..100).contains(&lines("DELETE /v1/disks/none")), "{log}");
    assert_eq!((lines("POST /v1/disks "), lines("DELETE /v1/disks/a ")), (20, 20), "{log}");
}

#[test]
fn connections_that_send_part_of_a_request_are_closed() {
    let server = Server::start();
    // The server waits for the rest of all of them at the same time.
    let parts = [
        "GET /v1 HT",
        "POST /v1/disks HTTP/1.1\r\nhost: x\r\n",
        "POST /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{",
        "\0\0\0\r\n\r\n",
    ];
    let streams = parts.map(|part| {
        let mut stream = server.connect();
        stream.write_all(part.as_bytes()).unwrap();
        (part, stream)
    });
    for (part, mut stream) in streams {
        let mut answer = Vec::new();
        // The server closes the connection, with or without an answer.
        let end = stream.read_to_end(&mut answer);
        assert!(!end.is_err_and(|e| e.kind() == ErrorKind::WouldBlock), "{part:?}: not closed");
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{part:?}: {answer}");
    }
    assert_eq!(server.names(), [""; 0]);
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    let server = Server::start();
    server.good("POST", "/v1/disks", server.keys("a"));
    let mut stream = server.connect();
    // The server stops to read when its answers fill the socket, and closes the connection later.
    let request = "GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n";
    let error = (0..1_000_000).find_map(|_| stream.write_all(request.as_bytes()).err());
    let error = error.expect("the server stops to read");
    assert_ne!(error.kind(), ErrorKind::WouldBlock, "the server does not close the connection");
    assert_eq!(server.names(), ["a"]);
}

#[test]
fn the_socket_is_for_its_owner() {
    let server = Server::start();
    let mode = std::fs::metadata(server.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let socket = server.socket();
    server.good("GET", "/v1", Value::Null);
    server.daemon.stop();
    assert!(!socket.exists(), "the socket is removed");
}
