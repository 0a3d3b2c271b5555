//! Signals that come before a server is ready.

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use blockyard_ring::parcel;

use crate::common::{Daemon, SOON, Signal, until_readable};
use crate::guest::Guest;
use crate::handover::Case;
use crate::holder::{Keeper, keep_command};

/// Starts a server that takes over from a server which does not answer. Returns it when it waits
/// for the answer: it has not entered its sandbox then.
fn wait_for_answer(case: &Case) -> (Daemon, UnixStream) {
    let old = UnixListener::bind(&case.control).unwrap();
    let daemon = Daemon::start(&mut case.takeover());
    until_readable("the new server connects", &old);
    let (connection, _) = old.accept().unwrap();
    parcel::receive(&connection, Instant::now() + SOON).unwrap().expect("a message");
    (daemon, connection)
}

#[test]
fn sighup_and_sigusr1_do_not_end_a_server_that_starts() {
    let case = Case::new();
    let (mut daemon, connection) = wait_for_answer(&case);
    daemon.signal(Signal::HUP);
    daemon.signal(Signal::USR1);
    let refused = br#"{"refused":{"what":"not today"}}"#;
    parcel::send(&connection, refused, &[], Instant::now() + SOON).unwrap();
    let status = daemon.ended(SOON);
    assert_eq!(status.code(), Some(1), "{status}: {}", daemon.log());
    assert!(daemon.log().contains("not today"), "{}", daemon.log());
}

#[test]
fn sigterm_ends_a_server_that_starts() {
    let case = Case::new();
    // The connection stays open, so the server does not end by itself.
    let (mut daemon, _connection) = wait_for_answer(&case);
    let status = daemon.terminate();
    assert_eq!(status.code(), Some(0), "{status}: {}", daemon.log());
}

/// The storage of the disk does not answer when a server has died, and an operator ends the next
/// one.
#[test]
fn sigterm_during_a_restart_ends_what_the_holder_keeps() {
    let case = Case::new();
    let [image, config, slow] = ["a.img", "config.toml", "slow"].map(|name| case.folder.join(name));
    let socket = case.folder.join("a.s");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let write = |image: &str| {
        let disk = format!("[[disk]]\nname = \"a\"\nimage = {image:?}\nvhost-user = {socket:?}\n");
        std::fs::write(&config, disk).unwrap();
    };
    write(image.to_str().unwrap());
    let mut command = case.configured(&config);
    let mut holder = keep_command(&case, Keeper::Holder, command.args(["--sandbox", "off"]));
    let guest = Guest::connect(&socket);
    let storage = UnixListener::bind(&slow).unwrap();
    write(&format!("nbd+unix:///far?socket={}", slow.display()));
    let server = rustix::process::Pid::from_raw(holder.kept().unwrap()).unwrap();
    rustix::process::kill_process(server, Signal::KILL).unwrap();
    until_readable("the next server opens the disk", &storage);
    let _connection = storage.accept().unwrap();
    let status = holder.terminate();
    assert!(status.success(), "{status}: {}", holder.log());
    assert!(!socket.exists(), "{}", holder.log());
    drop(guest);
}
