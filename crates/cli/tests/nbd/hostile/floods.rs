//! Too many clients, and clients that do not read replies or do not send announced data.

use std::process::Command;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::common::{BLOCKYARD, Signal};

/// Thousands of clients that connect and send nothing, or half a handshake.
#[test]
fn half_open_handshakes_are_disconnected() {
    let (_folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    let before = disk.daemon.descriptors().len();
    let mut held = Vec::new();
    for i in 0..1000usize {
        let mut raw = Raw::silent(&disk.socket);
        match i % 4 {
            0 => {}
            1 => raw.write(&3u32.to_be_bytes()),
            2 => raw.write(&[0, 0]),
            _ => {
                raw.write(&3u32.to_be_bytes());
                raw.option_of(opt::GO, 4096, &[0; 100]);
            }
        }
        held.push(raw);
        // There are a hundred clients at a time. The server disconnects them before the next
        // hundred connect.
        if held.len() == 100 {
            good.is_unharmed();
            held.clear();
        }
    }
    crate::common::until("those who went are forgotten", SOON, || {
        disk.daemon.descriptors().len() <= before + 2
    });
    Good::new(&disk.socket).is_unharmed();
    held.extend((0..150).map(|_| Raw::silent(&disk.socket)));
    good.is_unharmed();
    ends(disk, held);
}

/// More clients than the limit: the admitted ones continue, and the others wait.
#[test]
fn a_thousand_connections_wait_beyond_the_limit() {
    let (_folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    let mut held: Vec<UnixStream> = Vec::new();
    for _ in 0..1000 {
        // Clients beyond the limit wait in the kernel's backlog. The kernel refuses clients beyond
        // the backlog.
        match rustix_connect(&disk.socket) {
            Some(stream) => held.push(stream),
            None => break,
        }
    }
    assert!(held.len() >= 256, "only {} connected", held.len());
    good.is_unharmed();
    held.clear();
    crate::common::until("a new client is let in", SOON, || {
        Good::new(&disk.socket).works();
        true
    });
    good.is_unharmed();
    ends(disk, held);
}

/// Clients use up all descriptors that clients can have. A reload can still open its files. The
/// server raised a low limit at its start.
#[test]
fn clients_cannot_use_up_the_servers_descriptors() {
    let folder = Folder::new();
    let (socket, config, image) =
        (folder.join("s"), folder.join("toml"), folder.image("second.img", MB));
    let configure = |more: &str| {
        let nbd = format!("nbd = \"unix:{}\"", socket.display());
        let limits = "max-clients = 10000\nhandshake = \"600s\"";
        let disk = format!(
            "[nbd]\n{limits}\n[[disk]]\nimage = \"ram:64M\"\nname = \"disk\"\n{nbd}\n{more}\n"
        );
        std::fs::write(&config, disk).unwrap();
    };
    configure("");
    let script = "ulimit -Sn 64; ulimit -Hn 256; \
                  exec \"$0\" serve --config \"$1\" --allow-folder \"${1%/*}\"";
    let mut daemon =
        Daemon::start(Command::new("bash").args(["-c", script, BLOCKYARD]).arg(&config));
    daemon.wait_ready();
    let mut held = Vec::new();
    crate::common::until("all descriptors are taken", SOON, || {
        held.extend((0..50).map_while(|_| rustix_connect(&socket)));
        daemon.log().contains("of 256 descriptors are left, which are kept for the server itself")
    });
    assert!(daemon.descriptors().len() > 128, "the limit was not raised");
    let second = format!(
        "[[disk]]\nimage = \"{}\"\nnbd = \"unix:{}\"",
        image.display(),
        folder.join("t").display()
    );
    configure(&second);
    daemon.signal(crate::common::Signal::HUP);
    daemon.wait_log("second.img on unix:");
    held.clear();
    Good::new(&socket).is_unharmed();
    stop(daemon);
}

/// Returns a connection, or `None` if it would block.
fn rustix_connect(socket: &Path) -> Option<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let fd = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    rustix::net::connect(&fd, &SocketAddrUnix::new(socket).unwrap()).ok().map(|()| fd.into())
}

/// Clients that request gigabytes and read no replies.
#[test]
fn clients_that_read_no_replies_block_no_others() {
    let (_folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    let held: Vec<Raw> = (0..12)
        .map(|_| {
            let mut raw = Raw::ready(&disk.socket, Headers::Simple);
            let mut bytes = Vec::new();
            let request =
                Request { flags: 0, command: cmd::READ, cookie: 1, offset: 0, len: 32 * MB };
            (0..100).for_each(|_| request.put(Headers::Simple, &mut bytes));
            raw.write(&bytes);
            raw
        })
        .collect();
    good.is_unharmed();
    let memory = disk.daemon.kilobytes("VmHWM");
    assert!(memory < MOST_MEMORY, "it took {memory} kB");
    // A client that connects later is served too.
    Good::new(&disk.socket).is_unharmed();
    ends(disk, held);
}

/// Clients that announce writes, and then send a byte now and then.
#[test]
fn clients_that_send_no_payload_block_no_others() {
    let (_folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    let mut held: Vec<Raw> = (0..24)
        .map(|_| {
            let mut raw = Raw::ready(&disk.socket, Headers::Simple);
            raw.request(cmd::WRITE, 32 * MB, 32 * MB);
            raw
        })
        .collect();
    for _ in 0..10 {
        held.iter_mut().for_each(|raw| drop(raw.stream.write_all(&[1])));
        good.is_unharmed();
    }
    Good::new(&disk.socket).is_unharmed();
    ends(disk, held);
}

/// Clients that hold all buffers, and read a byte now and then. A large request of another client
/// waits until the server disconnects them, and small requests do not wait.
#[test]
fn slow_readers_delay_others_only_for_a_short_time() {
    /// Number of requests of 32 MiB that the buffers of a reactor hold.
    const HELD: usize = 7;
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &["--reactors", "1"]);
    let (mut small, mut large) =
        (Good::new(&disk.socket), Raw::ready(&disk.socket, Headers::Simple));
    let mut held: Vec<Raw> = (0..12).map(|_| Raw::ready(&disk.socket, Headers::Simple)).collect();
    held.iter_mut().for_each(|raw| raw.request(cmd::READ, 32 * MB, 32 * MB));
    let hears = |raw: &&Raw| rustix::io::ioctl_fionread(&raw.stream).unwrap() > 0;
    crate::common::until("the buffers are full", SOON, || {
        held.iter().filter(hears).count() >= HELD
    });
    large.request(cmd::READ, 8 * MB, 4 * MB);
    let start = Instant::now();
    while !hears_soon(&large) {
        assert!(start.elapsed() < SOON, "the large request is not answered");
        small.works();
        for raw in held.iter_mut().filter(|raw| hears(&&**raw)) {
            // The server may have disconnected the client already.
            let _ = raw.stream.read(&mut [0]);
        }
    }
    assert_eq!(large.error(), 0);
    large.read(4 * MB as usize);
    assert!(held.iter().any(is_disconnected), "there was room, although all buffers were held");
    small.is_unharmed();
    ends(disk, held);
}

/// Returns whether a client gets a reply within 5 ms.
fn hears_soon(raw: &Raw) -> bool {
    let limit = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
    poll(&mut [PollFd::new(&raw.stream, PollFlags::IN)], Some(&limit)).unwrap() > 0
}

/// Returns whether the server has disconnected a client.
pub fn is_disconnected(raw: &Raw) -> bool {
    let mut state = [PollFd::new(&raw.stream, PollFlags::RDHUP)];
    poll(&mut state, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    state[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP)
}

/// Clients that announced more payload than the buffers hold, and sent a part of it, occupy only
/// that part. Requests of other clients complete, and none of those clients is disconnected.
#[test]
fn announced_payloads_occupy_no_buffers() {
    let (_folder, disk) = disk();
    let mut pipelined = Raw::ready(&disk.socket, Headers::Simple);
    let mut held: Vec<Raw> = (0..24).map(|_| Raw::ready(&disk.socket, Headers::Simple)).collect();
    for raw in &mut held {
        raw.request(cmd::WRITE, 32 * MB, 32 * MB);
        raw.write(&vec![1; 2 * MB as usize]);
    }
    let mut bytes = Vec::new();
    for at in 0..128 {
        Request { flags: 0, command: cmd::READ, cookie: at, offset: at << 12, len: 4096 }
            .put(Headers::Simple, &mut bytes);
    }
    Request { flags: 0, command: cmd::WRITE, cookie: 128, offset: 0, len: 32 * MB }
        .put(Headers::Simple, &mut bytes);
    pipelined.write(&bytes);
    for _ in 0..128 {
        assert_eq!(pipelined.error(), 0);
        pipelined.read(4096);
    }
    pipelined.write(&vec![1; 32 * MB as usize]);
    assert_eq!(pipelined.error(), 0);
    for raw in &mut held {
        raw.stream.set_nonblocking(true).unwrap();
        assert_eq!(
            raw.stream.read(&mut [0]).unwrap_err().kind(),
            io::ErrorKind::WouldBlock,
            "it was let go"
        );
    }
    ends(disk, held);
}

/// SIGTERM with three clients: one floods, one reads nothing, one is in the handshake.
#[test]
fn sigterm_ends_the_server_during_a_flood() {
    let (_folder, disk) = disk();
    let mut mute = Raw::ready(&disk.socket, Headers::Structured);
    (0..60).for_each(|_| mute.request(cmd::READ, 0, MB));
    let half = Raw::greeted(&disk.socket);
    let socket = disk.socket.clone();
    let (flows, flowing) = std::sync::mpsc::channel();
    let flood = std::thread::spawn(move || {
        let mut raw = Raw::ready(&socket, Headers::Simple);
        let mut bytes = Vec::new();
        Request { flags: 0, command: cmd::WRITE, cookie: 1, offset: 0, len: 65536 }
            .put(Headers::Simple, &mut bytes);
        bytes.extend([5; 65536]);
        let mut reader = raw.stream.try_clone().unwrap();
        let taking = std::thread::spawn(move || {
            let _ = reader.read_exact(&mut [0; 100 * SimpleReply::BYTES]);
            let _ = flows.send(());
            io::copy(&mut reader, &mut io::sink())
        });
        let end = Instant::now() + SOON * 3;
        while Instant::now() < end && raw.stream.write_all(&bytes).is_ok() {}
        let _ = taking.join();
        assert!(Instant::now() < end, "the flood was not ended by the server");
    });
    flowing.recv_timeout(SOON).expect("the flood flows");
    ends(disk, (mute, half));
    flood.join().unwrap();
}

/// The requests of a disk that hardly moves hold buffers while they wait. Another disk's client on
/// the same reactor gets buffers, too, and its export ends.
#[test]
fn requests_that_wait_for_one_disk_leave_buffers_for_another() {
    let folder = Folder::new();
    let (socket, file) = (folder.join("s"), folder.join("toml"));
    let disk = |name: &str, more: &str| {
        let socket = crate::fixture::address(&socket);
        format!("[[disk]]\nname = \"{name}\"\nimage = \"ram:64M\"\nnbd = \"{socket}\"\n{more}")
    };
    let (slow, fast) = (disk("slow", "bps = \"64K\"\n"), disk("fast", ""));
    std::fs::write(&file, format!("reactors = 1\n{slow}{fast}")).unwrap();
    let mut daemon = Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&file));
    daemon.wait_ready();
    let mut stuck = Vec::new();
    for _ in 0..10 {
        let mut raw = Raw::ready_for("slow", &socket, Headers::Simple);
        raw.request(cmd::READ, 0, 32 * MB);
        stuck.push(raw);
    }
    let read = |raw: &mut Raw| {
        raw.request(cmd::READ, 0, 32 * MB);
        assert_eq!(raw.error(), 0);
        assert_eq!(raw.read(32 << 20).len(), 32 << 20);
    };
    let mut raw = Raw::ready_for("fast", &socket, Headers::Simple);
    (0..4).for_each(|_| read(&mut raw));
    // The slow disk ends although its requests wait for buffers.
    std::fs::write(&file, format!("reactors = 1\n{fast}")).unwrap();
    daemon.signal(Signal::HUP);
    for mut raw in stuck {
        let ended = raw.stream.read_to_end(&mut Vec::new());
        assert!(ended.is_ok_and(|len| len < 33 << 20), "the slow disk does not end");
    }
    read(&mut raw);
    daemon.stop();
}
