//! The handshake: wrong magic, wrong lengths, too many options.

use std::process::Command;

use super::floods::is_disconnected;
use super::*;
use crate::common::{BLOCKYARD, Signal};

/// Columns: an option, its data, and the reply, after which the client continues.
#[test]
fn invalid_options_get_an_error_reply() {
    let (_folder, disk) = disk();
    let long = vec![b'x'; 5000];
    let named = |len: u32, rest: &[u8]| [&len.to_be_bytes()[..], rest].concat();
    let cases: Vec<(u32, Vec<u8>, u32)> = vec![
        (99, vec![], rep::ERR_UNSUP),
        (u32::MAX, vec![1; 100], rep::ERR_UNSUP),
        (opt::LIST, vec![0], rep::ERR_INVALID),
        (opt::STRUCTURED_REPLY, vec![0; 4], rep::ERR_INVALID),
        (opt::EXTENDED_HEADERS, vec![0; 4], rep::ERR_INVALID),
        (opt::STARTTLS, vec![], rep::ERR_POLICY),
        (opt::GO, vec![], rep::ERR_INVALID),
        (opt::GO, vec![0; 5], rep::ERR_INVALID),
        (opt::GO, named(u32::MAX, b"disk\0\0"), rep::ERR_INVALID),
        (opt::GO, named(5, b"disk\0\0"), rep::ERR_INVALID),
        (opt::GO, named(4, b"disk\0\x09\0\0"), rep::ERR_INVALID),
        (opt::GO, named(4, b"disk\0\0\0"), rep::ERR_INVALID),
        (opt::GO, go("no such"), rep::ERR_UNKNOWN),
        (opt::INFO, go(std::str::from_utf8(&long[..4096]).unwrap()), rep::ERR_UNKNOWN),
        (opt::INFO, named(4, b"\xff\xfe\0\x01\0\0"), rep::ERR_UNKNOWN),
        (opt::INFO, named(5000, &[&long[..], &[0, 0]].concat()), rep::ERR_TOO_BIG),
        (opt::LIST_META_CONTEXT, named(4, b"disk\0\0\0\0"), rep::ERR_INVALID),
        (opt::SET_META_CONTEXT, named(4, b"disk\xff\xff\xff\xff"), rep::ERR_INVALID),
        (opt::SET_META_CONTEXT, vec![0xff; 64 << 10], rep::ERR_INVALID),
        // This data is too long for the server's buffer. The reply still depends on the option.
        (77, vec![0; 1 << 20], rep::ERR_UNSUP),
        (opt::LIST, vec![0; 1 << 20], rep::ERR_INVALID),
        (opt::STARTTLS, vec![0; 1 << 20], rep::ERR_POLICY),
        (opt::INFO, vec![0; 1 << 20], rep::ERR_TOO_BIG),
        (opt::SET_META_CONTEXT, vec![0; 1 << 20], rep::ERR_TOO_BIG),
    ];
    for (option, data, answer) in cases {
        let mut raw = Raw::greeted(&disk.socket);
        raw.option(option, &data);
        let (reply, _) = raw.reply();
        assert_eq!(reply.option, option);
        assert_eq!(
            reply.reply,
            answer,
            "option {option} with {} bytes: {:#x}",
            data.len(),
            reply.reply
        );
        raw.option(opt::GO, &go("disk"));
        while raw.reply().0.reply != rep::ACK {}
    }
    ends(disk, ());
}

/// An overlong NBD_OPT_ABORT still ends the session. An overlong NBD_OPT_SET_META_CONTEXT still
/// clears earlier contexts.
#[test]
fn overlong_options_keep_their_effect() {
    let (_folder, disk) = disk();
    let mut raw = Raw::greeted(&disk.socket);
    raw.option(opt::ABORT, &vec![0; 1 << 20]);
    assert_eq!(raw.reply().0.reply, rep::ACK);
    raw.ends();
    let mut raw = Raw::greeted(&disk.socket);
    raw.option(opt::STRUCTURED_REPLY, &[]);
    assert_eq!(raw.reply().0.reply, rep::ACK);
    let query = [
        &4u32.to_be_bytes()[..],
        b"disk",
        &1u32.to_be_bytes(),
        &15u32.to_be_bytes(),
        b"base:allocation",
    ];
    raw.option(opt::SET_META_CONTEXT, &query.concat());
    assert_eq!(raw.reply().0.reply, rep::META_CONTEXT);
    assert_eq!(raw.reply().0.reply, rep::ACK);
    raw.option(opt::SET_META_CONTEXT, &vec![0; 1 << 20]);
    assert_eq!(raw.reply().0.reply, rep::ERR_TOO_BIG);
    raw.option(opt::GO, &go("disk"));
    while raw.reply().0.reply != rep::ACK {}
    raw.headers = Headers::Structured;
    raw.request(cmd::BLOCK_STATUS, 0, 4096);
    let chunk = wire::Chunk::parse(Headers::Structured, &raw.read(20)).unwrap();
    assert_eq!(chunk.kind, wire::chunk::ERROR);
    assert_eq!(wire::u32_at(&raw.read(chunk.len as usize), 0), wire::errno::EINVAL);
    ends(disk, raw);
}

#[test]
fn invalid_messages_end_the_connection() {
    let (_folder, disk) = disk();
    // The client sets handshake flags that are not defined.
    let mut raw = Raw::silent(&disk.socket);
    raw.read(18);
    raw.write(&u32::MAX.to_be_bytes());
    raw.ends();
    // Text that is not an NBD option.
    let mut raw = Raw::greeted(&disk.socket);
    raw.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    raw.ends();
    // An option with a length of 4 GiB: the server does not wait for its data.
    let mut raw = Raw::greeted(&disk.socket);
    raw.option_of(opt::LIST, u32::MAX, &[]);
    raw.ends();
    // NBD_OPT_EXPORT_NAME with an invalid name. This option has no error reply.
    let mut raw = Raw::greeted(&disk.socket);
    raw.option(opt::EXPORT_NAME, b"no such");
    raw.ends();
    // Bytes that are not an NBD request.
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        let mut raw = Raw::ready(&disk.socket, headers);
        raw.write(&[0x55; 32]);
        raw.ends();
    }
    ends(disk, ());
}

/// The server escapes names from clients in its replies and in the log. The log names the client
/// and the existing exports.
#[test]
fn control_characters_in_names_are_escaped() {
    let (_folder, disk) = disk();
    let evil = "no\0 \x1b[31msuch\n";
    let mut raw = Raw::greeted(&disk.socket);
    raw.option(opt::GO, &go(evil));
    let (reply, text) = raw.reply();
    assert_eq!(reply.reply, rep::ERR_UNKNOWN);
    let text = String::from_utf8(text).unwrap();
    assert_eq!(text, r#"there is no export "no\0 \u{1b}[31msuch\n": there is "disk""#);
    raw.option(opt::EXPORT_NAME, evil.as_bytes());
    raw.ends();
    let me = format!("(pid {})", std::process::id());
    disk.daemon.wait_log(&format!("a client was refused {me}: {text}"));
    disk.daemon.wait_log(&format!("a client {me} was disconnected: {text}"));
    let log = ends(disk, ());
    assert!(!log.contains(['\0', '\x1b']), "{log:?}");
}

/// The memory for options, and the number of options, are bounded.
#[test]
fn endless_options_end_the_connection() {
    let (_folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    let mut raw = Raw::greeted(&disk.socket);
    let mut answered = 0;
    for _ in 0..100_000 {
        let mut bytes = Vec::new();
        OptionHeader { option: opt::LIST, len: 0 }.put(&mut bytes);
        if raw.stream.write_all(&bytes).is_err() {
            break;
        }
        let mut reply = [0; OptionReply::BYTES];
        while raw.stream.read_exact(&mut reply).is_ok() {
            let reply = OptionReply::parse(&reply).unwrap();
            raw.read(reply.len as usize);
            if reply.reply == rep::ACK {
                answered += 1;
                break;
            }
        }
    }
    assert!((100..100_000).contains(&answered), "{answered} options answered");
    good.is_unharmed();
    ends(disk, ());
}

/// The client does not read the replies to its options. Then the server cannot send any more, and
/// disconnects the client after the time for a handshake.
#[test]
fn a_client_that_reads_no_replies_to_its_options_is_disconnected() {
    let folder = Folder::new();
    let (socket, file) = (folder.join("s"), folder.join("toml"));
    let configure = |handshake: &str| {
        let nbd = crate::fixture::address(&socket);
        let disk = format!("[[disk]]\nname = \"disk\"\nimage = \"ram:64M\"\nnbd = \"{nbd}\"\n");
        std::fs::write(&file, format!("[nbd]\nhandshake = \"{handshake}\"\n{disk}")).unwrap();
    };
    configure("600s");
    let mut daemon = Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&file));
    daemon.wait_ready();
    let disk = NbdServer { daemon, socket: socket.clone() };
    let mut good = Good::new(&socket);
    // Later clients have a short time. It may end at any step of this client.
    configure("300ms");
    disk.daemon.signal(Signal::HUP);
    disk.daemon.wait_log("handshake within 300ms");
    let mut mute = Raw::silent(&socket);
    mute.read(18);
    // The server logs nothing about an unknown option, so the log has room for the last line.
    let mut bytes = Vec::new();
    OptionHeader { option: 99, len: 0 }.put(&mut bytes);
    mute.stream.set_nonblocking(true).unwrap();
    let _ = mute.stream.write_all(&3u32.to_be_bytes());
    let mut written = 0;
    crate::common::until("the server has disconnected it", SOON, || {
        while let Ok(more) = mute.stream.write(&bytes[written % bytes.len()..]) {
            written += more;
        }
        is_disconnected(&mute)
    });
    disk.daemon.wait_log("chose no export in 0.3 s: it was disconnected");
    good.is_unharmed();
    ends(disk, mute);
}
