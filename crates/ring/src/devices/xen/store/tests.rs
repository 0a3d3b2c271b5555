use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::super::abi::{Header, message};
use super::*;
use crate::testing::waits;

/// Returns a store. Its xenstored sends these bytes in reply to any request.
fn answering(bytes: &[u8]) -> (Store, UnixStream) {
    let (ours, theirs) = waits::peers();
    rustix::io::write(&theirs, bytes).unwrap();
    (Store::over(ours.into()), theirs)
}

fn message(kind: u32, request: u32, body: &[u8]) -> Vec<u8> {
    let header = Header { kind, request, transaction: 0, len: body.len() as u32 };
    [&header.bytes()[..], body].concat()
}

fn sent(peer: &UnixStream) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    let len = rustix::io::read(peer, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

#[test]
fn requests_have_the_format_of_the_wire_protocol() {
    let (mut store, peer) = answering(&message(message::WRITE, 1, b"OK\0"));
    store.write("/a/b", 7).unwrap();
    assert_eq!(
        sent(&peer),
        [11, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, b'/', b'a', b'/', b'b', 0, b'7']
    );
    let (mut store, peer) = answering(&message(message::SET_PERMS, 1, b"OK\0"));
    store.set_access("/a", 0, Access::None, &[(12, Access::Read)]).unwrap();
    assert_eq!(&sent(&peer)[16..], b"/a\0n0\0r12\0");
    let (mut store, peer) = answering(&message(message::WATCH, 1, b"OK\0"));
    store.watch("/a", "t").unwrap();
    assert_eq!(&sent(&peer)[16..], b"/a\0t\0");
}

#[test]
fn errors_contain_the_name_of_the_errno() {
    let (mut store, _peer) = answering(&message(message::ERROR, 1, b"EACCES\0"));
    let error = store.write("/a", 1).unwrap_err();
    assert_eq!(error.to_string(), "xenstore: /a: EACCES");
    let (mut store, _peer) = answering(&message(message::ERROR, 1, b"ENOENT\0"));
    assert_eq!(store.read("/a").unwrap(), None);
    let (mut store, _peer) = answering(&message(message::READ, 1, b"\xff"));
    assert!(matches!(store.read("/a"), Err(StoreError::NoText(_))));
    let (mut store, _peer) = answering(&message(message::READ, 1, b"4\x005"));
    assert!(matches!(store.read("/a"), Err(StoreError::NoText(_))));
    let (mut store, _peer) = answering(b"");
    assert!(matches!(store.write("/a", "x".repeat(4096)), Err(StoreError::TooLong(_))));
}

#[test]
fn an_invalid_message_ends_the_connection() {
    for bytes in
        [message(message::READ, 2, b""), message(message::WRITE, 1, b""), message(99, 1, b"")]
    {
        let (mut store, _peer) = answering(&bytes);
        assert!(matches!(store.read("/a"), Err(StoreError::Protocol(_))));
        assert!(store.read("/a").unwrap_err().to_string().contains("broken"));
    }
    let too_long = Header { kind: message::READ, request: 1, transaction: 0, len: 4097 };
    let (mut store, _peer) = answering(&too_long.bytes());
    assert!(matches!(store.read("/a"), Err(StoreError::Protocol(_))));
    let (mut store, peer) = answering(&message(message::READ, 1, b"1")[..10]);
    drop(peer);
    assert!(matches!(store.read("/a"), Err(StoreError::Io(_))));
}

#[test]
fn many_changes_of_a_node_are_one_event() {
    let event = message(message::WATCH_EVENT, 0, b"/a/state\0one\0");
    let other = message(message::WATCH_EVENT, 0, b"/b\0two\0");
    let (mut store, peer) =
        answering(&[event.repeat(100), message(message::READ, 1, b"4"), other].concat());
    assert_eq!(store.read("/a").unwrap().as_deref(), Some("4"));
    let wake = peer.as_fd();
    let mut next = || store.event(wake, Some(Instant::now() + waits::LIMIT)).unwrap();
    assert_eq!((next().as_deref(), next().as_deref()), (Some("one"), Some("two")));
    // The peer's unread request makes `wake` readable.
    assert_eq!(next(), None);
}

#[test]
fn lists_that_exceed_one_message_come_in_parts() {
    let part = |request, body: &[u8]| message(message::DIRECTORY_PART, request, body);
    let answers = [
        message(message::ERROR, 1, b"E2BIG\0"),
        part(2, b"7\0one\0two\0"),
        // The names have changed between two requests.
        part(3, b"8\0three\0"),
        part(4, b"8\0one\0two\0new\0"),
        part(5, b"8\0three\0\0"),
    ];
    let (mut store, peer) = answering(&answers.concat());
    assert_eq!(store.list("/a").unwrap(), ["one", "two", "new", "three"]);
    let requests = sent(&peer);
    let offsets = [b"/a\x000\0".as_slice(), b"/a\x008\0", b"/a\x0012\0"];
    let times = offsets
        .map(|offset| requests.windows(offset.len()).filter(|bytes| *bytes == offset).count());
    assert_eq!(times, [2, 1, 1]);
    let endless = [message(message::ERROR, 1, b"E2BIG\0"), part(2, b"no number")].concat();
    let (mut store, _peer) = answering(&endless);
    assert!(matches!(store.list("/a"), Err(StoreError::Protocol(_))));
}

/// The service stops: no call after that waits for a xenstored that answers nothing.
#[test]
fn a_limit_that_another_thread_sets_holds_for_later_calls() {
    let (mut store, _peer) = answering(&[]);
    let limit = Arc::default();
    store.share_limit(&limit);
    *limit.lock().unwrap() = Some(Instant::now());
    let error = store.read("/a").unwrap_err();
    assert!(matches!(&error, StoreError::Io(e) if e.kind() == io::ErrorKind::TimedOut), "{error}");
}
