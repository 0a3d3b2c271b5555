use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;

use blockyard_disk::{DiskOptions, Source};
use blockyard_driver::Connection;
use blockyard_driver::connection::PROTOCOL;
use blockyard_image::{CacheMode, ChainOptions};
use rustix::net::sockopt;

use super::*;

/// Returns a TCP connection. Its close blocks until the other side is closed, at most an hour.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    sockopt::set_socket_linger(&ours, Some(Duration::from_secs(3600))).unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 1 << 16]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    (ours, theirs)
}

/// Serves a disk at a socket. Returns the socket's path, too.
fn export(name: &str) -> (VhostUser, PathBuf) {
    let socket = std::env::temp_dir().join(format!("blockyard-{name}-{}", std::process::id()));
    let (name, serial) = ("disk".to_string(), "disk".to_string());
    let options = DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()));
    let tuning = Tuning {
        poll: PollMode::Off,
        in_band: false,
        pin_memory: false,
        any_memory_file: false,
        second_client: SecondClient::Wait,
    };
    let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
    let shape = QueueShape { queues: 1, size: 64 };
    let listener = Listener::bind(&socket).unwrap();
    (VhostUser::start(disk, listener, shape, tuning, reactors).unwrap(), socket)
}

#[test]
fn stop_waits_until_the_session_has_ended() {
    let (mut export, socket) = export("stop");
    let mut connection = Connection::open(&socket).unwrap();
    connection.negotiate(0, 0, PROTOCOL).unwrap();
    export.stop(Instant::now() + STOP_TIME);
    assert_eq!((*lock(&export.export.threads.running), export.clients().len()), (0, 0));
}

#[test]
fn a_descriptor_that_does_not_close_does_not_block_stop() {
    // The test hangs if only the deadline ends the stop.
    stops_beside_a_blocked_close("linger", SHORT, Duration::from_secs(3600));
}

#[test]
fn stop_ends_at_its_deadline() {
    stops_beside_a_blocked_close("deadline", Duration::from_secs(3600), SHORT);
}

const SHORT: Duration = Duration::from_millis(50);

/// The session's thread closes the last copy of a received descriptor, and the close blocks.
fn stops_beside_a_blocked_close(name: &str, descriptor_time: Duration, stop_time: Duration) {
    let (mut export, socket) = export(name);
    export.descriptor_time = descriptor_time;
    let mut connection = Connection::open(&socket).unwrap();
    connection.negotiate(0, 0, PROTOCOL).unwrap();
    let (lingers, other) = lingering();
    // The message ADD_MEM_REG carries a descriptor that is not memory.
    let message: Vec<u8> =
        [37u32, 1, 40].iter().flat_map(|w| w.to_ne_bytes()).chain([1; 40]).collect();
    let (first, rest) = message.split_at(message.len() - 1);
    // The session cannot close its copy before it has the whole message. So this close does not
    // block, and the session has the last copy.
    connection.send_bytes(first, &[lingers.as_fd()]).unwrap();
    drop(lingers);
    connection.send_bytes(rest, &[]).unwrap();
    export.stop(Instant::now() + stop_time);
    assert_eq!(*lock(&export.export.threads.running), 1, "the close has blocked the session");
    drop(other);
    let ended = &export.export.threads.ended;
    let running = lock(&export.export.threads.running);
    drop(ended.wait_while(running, |running| *running > 0).unwrap());
}
