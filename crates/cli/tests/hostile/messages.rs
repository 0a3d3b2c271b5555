//! Wrong vhost-user messages of every kind. The server refuses each or disconnects the front end,
//! and serves the next front end.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use blockyard_driver::Connection;
use vhost::vhost_user::message::FrontendReq;

use super::daemon::{Daemon, OTHER, QUEUES, VICTIM, are_few};
use super::guest::{BOTH, Guest, Layout, event};
use super::moving::Random;
use crate::common::SOON;

const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
const HEADER: usize = 12;

/// Result of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Fate {
    Done,
    Refused,
    Disconnected,
}

fn message(request: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes: Vec<u8> = [request, flags, size].iter().flat_map(|w| w.to_le_bytes()).collect();
    bytes.extend(payload);
    bytes
}

/// Sends a message that requests a reply, and waits for the reply or the end of the connection.
pub fn send(
    connection: &Connection,
    request: FrontendReq,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Fate {
    let bytes = message(request as u32, VERSION | NEED_REPLY, payload.len() as u32, payload);
    if connection.send_bytes(&bytes, fds).is_err() {
        return Fate::Disconnected;
    }
    let mut reply = [0; HEADER + 8];
    match connection.socket().read_exact(&mut reply) {
        Ok(()) => {
            assert_eq!(reply[..4], (request as u32).to_le_bytes());
            if reply[HEADER..] == [0; 8] { Fate::Done } else { Fate::Refused }
        }
        Err(e)
            if matches!(
                e.kind(),
                std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset
            ) =>
        {
            Fate::Disconnected
        }
        Err(e) => panic!("{request:?}: neither answered nor disconnected: {e}"),
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Returns the payload of a message with a vring index and a value.
fn state(index: u32, value: u32) -> Vec<u8> {
    words(&[u64::from(index) | u64::from(value) << 32])
}

/// Returns the payload of SET_VRING_ADDR with user addresses.
fn addresses(index: u32, desc: u64, avail: u64, used: u64) -> Vec<u8> {
    words(&[index.into(), desc, used, avail, 0])
}

/// Returns the payload of SET_MEM_TABLE with regions (guest address, size, user address, offset).
fn table(regions: &[[u64; 4]]) -> Vec<u8> {
    [words(&[regions.len() as u64]), regions.iter().flat_map(|r| words(r)).collect()].concat()
}

pub fn inflight(size: u64, offset: u64, queues: u16, queue_size: u16) -> Vec<u8> {
    let last = (u32::from(queues) | u32::from(queue_size) << 16).to_le_bytes();
    [words(&[size, offset]), last.to_vec(), vec![0; 4]].concat()
}

pub fn memfd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("hostile", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

/// Runs `act` on a new front end whose rings do not run, and checks that the daemon works
/// afterwards.
fn survives(name: &str, want: &[Fate], act: impl Fn(&mut Guest) -> Fate) {
    let daemon = Daemon::start();
    let mut other = Guest::start(&daemon.socket(OTHER), Layout::Split);
    // Count the descriptors before a front end connects to this disk.
    let descriptors = daemon.descriptors();
    let mut guest = Guest::connect(&daemon.socket(VICTIM), Layout::Split);
    let fate = act(&mut guest);
    assert!(want.contains(&fate), "{name}: {fate:?}");
    drop(guest);
    other.works(0, 0);
    let mut next = Guest::start(&daemon.socket(VICTIM), Layout::Split);
    next.works(0, 0);
    drop(next);
    let log = daemon.complaints();
    assert!(log.len() <= 10, "{name}: {log:#?}");
    daemon.keeps_descriptors(descriptors, name);
    daemon.end();
}

const NO: &[Fate] = &[Fate::Refused, Fate::Disconnected];
const ANY: &[Fate] = &[Fate::Done, Fate::Refused, Fate::Disconnected];

#[test]
fn invalid_rings_are_refused() {
    use FrontendReq::{SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_KICK, SET_VRING_NUM};
    let start = |g: &mut Guest| {
        let kick = event();
        send(&g.connection, SET_VRING_KICK, &words(&[0]), &[kick.as_fd()])
    };
    survives("started before anything", NO, start);
    for size in [0, 32769, 65535, u32::MAX] {
        survives("a size that is refused at once", NO, |g| {
            send(&g.connection, SET_VRING_NUM, &state(0, size), &[])
        });
    }
    for (size, base) in [(3, 0), (65, 0), (100, 7)] {
        survives("no power of two", NO, |g| {
            let user = g.memory.user_address(g.memory.range().0);
            assert_eq!(send(&g.connection, SET_VRING_NUM, &state(0, size), &[]), Fate::Done);
            send(&g.connection, SET_VRING_BASE, &state(0, base), &[]);
            send(
                &g.connection,
                SET_VRING_ADDR,
                &addresses(0, user, user + 8192, user + 16384),
                &[],
            );
            start(g)
        });
    }
    // Columns: offsets from the start of the memory in the front end's process, and what is wrong.
    let len = 8 << 20;
    let far = 1 << 60;
    for (name, desc, avail, used) in [
        ("nowhere", far, far, far),
        ("a descriptor table over the end", len - 512, 8192, 16384),
        ("an available ring over the end", 0, len - 2, 16384),
        ("a used ring over the end", 0, 8192, len - 4),
        ("a used ring behind the end", 0, 8192, len),
        ("no alignment of the table", 8, 8192, 16384),
        ("no alignment of the available ring", 0, 8193, 16384),
        ("no alignment of the used ring", 0, 8192, 16386),
        ("2^64", 0u64.wrapping_sub(0x7f00_0000_0000).wrapping_sub(16), 8192, 16384),
    ] {
        survives(name, NO, |g| {
            let at = |offset: u64| 0x7f00_0000_0000u64.wrapping_add(offset);
            send(&g.connection, SET_VRING_NUM, &state(0, 64), &[]);
            match send(
                &g.connection,
                SET_VRING_ADDR,
                &addresses(0, at(desc), at(avail), at(used)),
                &[],
            ) {
                Fate::Done => start(g),
                fate => fate,
            }
        });
    }
}

#[test]
fn missing_queues_are_refused() {
    use FrontendReq as R;
    for index in [u32::from(QUEUES), 255, 256, 65536, u32::MAX] {
        for request in [R::SET_VRING_NUM, R::SET_VRING_BASE, R::SET_VRING_ENABLE] {
            survives("a state", NO, |g| send(&g.connection, request, &state(index, 1), &[]));
        }
        survives("addresses", NO, |g| {
            send(&g.connection, R::SET_VRING_ADDR, &addresses(index, 0, 0, 0), &[])
        });
        survives("GET_VRING_BASE", NO, |g| {
            send(&g.connection, R::GET_VRING_BASE, &state(index, 0), &[])
        });
    }
    for request in [R::SET_VRING_KICK, R::SET_VRING_CALL, R::SET_VRING_ERR] {
        for index in [u64::from(QUEUES), 255] {
            survives("an eventfd", NO, |g| {
                send(&g.connection, request, &words(&[index]), &[event().as_fd()])
            });
        }
        survives("no descriptor where one belongs", NO, |g| {
            send(&g.connection, request, &words(&[0]), &[])
        });
        survives("several descriptors", NO, |g| {
            let event = event();
            send(&g.connection, request, &words(&[0]), &[event.as_fd(); 3])
        });
    }
}

#[test]
fn invalid_memory_is_refused() {
    let page = 4096;
    let user = 0x7000_0000_0000;
    let tables: &[(&str, &[[u64; 4]])] = &[
        ("the same twice", &[[0, 2 * page, user, 0], [0, 2 * page, user + (1 << 30), 0]]),
        ("overlapping by a byte", &[[0, page, user, 0], [page - 1, page, user + (1 << 30), 0]]),
        ("one in another", &[[0, 4 * page, user, 0], [page, page, user + (1 << 30), 0]]),
        ("empty", &[[0, 0, user, 0]]),
        ("its guest end overflows", &[[u64::MAX - 4095, 2 * page, user, 0]]),
        ("its user end overflows", &[[0, 2 * page, u64::MAX - 4095, 0]]),
        ("its file end overflows", &[[0, 2 * page, user, u64::MAX - 4095]]),
        ("longer than its file", &[[0, (1 << 20) + 1, user, 0]]),
        ("all of its file and an offset", &[[0, 1 << 20, user, 1]]),
        ("2^63 bytes", &[[0, 1 << 63, user, 0]]),
        ("no regions", &[]),
    ];
    for (name, regions) in tables {
        survives(name, NO, |g| {
            let fd = memfd(1 << 20);
            send(
                &g.connection,
                FrontendReq::SET_MEM_TABLE,
                &table(regions),
                &vec![fd.as_fd(); regions.len()],
            )
        });
    }
    let one = &[[0, 4096, user, 0]];
    for fds in [0, 2, 32] {
        survives("another number of descriptors", NO, |g| {
            let fd = memfd(1 << 20);
            send(&g.connection, FrontendReq::SET_MEM_TABLE, &table(one), &vec![fd.as_fd(); fds])
        });
    }
    let folder = File::open("/").unwrap();
    let readable = File::open("/proc/self/exe").unwrap();
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    for fd in [event().as_fd(), folder.as_fd(), readable.as_fd(), null.as_fd()] {
        survives("no memory", NO, |g| {
            send(&g.connection, FrontendReq::SET_MEM_TABLE, &table(one), &[fd])
        });
    }
    survives("a region count that lies", NO, |g| {
        let mut payload = table(one);
        payload[0] = 31;
        send(&g.connection, FrontendReq::SET_MEM_TABLE, &payload, &[memfd(4096).as_fd()])
    });
    survives("regions without end", NO, |g| {
        let fd = memfd(4096);
        for at in 0..600 {
            let region =
                [vec![0; 8], words(&[(1 << 40) + at * 4096, 4096, user + at * 4096, 0])].concat();
            match send(&g.connection, FrontendReq::ADD_MEM_REG, &region, &[fd.as_fd()]) {
                Fate::Done => {}
                fate => {
                    assert!(at > 500, "refused at {at}");
                    return fate;
                }
            }
        }
        Fate::Done
    });
    survives("a region removed that is not there", NO, |g| {
        let region = [vec![0; 8], words(&[0, 4096, 0, 0])].concat();
        send(&g.connection, FrontendReq::REM_MEM_REG, &region, &[])
    });
}

#[test]
fn invalid_in_flight_regions_are_refused() {
    use FrontendReq::{GET_INFLIGHT_FD, SET_INFLIGHT_FD};
    let len = 1 << 20;
    for (name, payload) in [
        ("no queues", inflight(len, 0, 0, 64)),
        ("no entries", inflight(len, 0, 1, 0)),
        ("no bytes", inflight(0, 0, 1, 64)),
        ("too few bytes", inflight(64, 0, 1, 64)),
        ("more than the file has", inflight(len + 1, 0, 1, 64)),
        ("an offset", inflight(len, 4096, 1, 64)),
        ("an offset that overflows", inflight(len, u64::MAX - 1, 1, 64)),
        ("2^64 - 1 bytes", inflight(u64::MAX, 0, 1, 64)),
        ("as many queues as can be said", inflight(len, 0, u16::MAX, u16::MAX)),
        ("an odd offset", inflight(len - 4096, 3, 1, 64)),
    ] {
        survives(name, NO, |g| {
            send(&g.connection, SET_INFLIGHT_FD, &payload, &[memfd(len).as_fd()])
        });
    }
    survives("no memory", NO, |g| {
        send(&g.connection, SET_INFLIGHT_FD, &inflight(len, 0, 1, 64), &[event().as_fd()])
    });
    survives("no descriptor", NO, |g| {
        send(&g.connection, SET_INFLIGHT_FD, &inflight(len, 0, 1, 64), &[])
    });
    for (queues, size) in
        [(0, 64), (QUEUES + 1, 64), (u16::MAX, 64), (1, 0), (1, 32769), (u16::MAX, u16::MAX)]
    {
        survives("asked for", NO, |g| {
            send(&g.connection, GET_INFLIGHT_FD, &inflight(0, 0, queues, size), &[])
        });
    }
}

/// The daemon maps a region of a petabyte, but does not touch it.
#[test]
fn a_vast_in_flight_region_takes_no_memory() {
    let daemon = Daemon::start();
    let mut guest = Guest::connect(&daemon.socket(VICTIM), Layout::Split);
    let before = daemon.own_memory();
    let fd = memfd(1 << 40);
    let payload = inflight(1 << 40, 0, 1, 64);
    assert_eq!(
        send(&guest.connection, FrontendReq::SET_INFLIGHT_FD, &payload, &[fd.as_fd()]),
        Fate::Done
    );
    guest.start_ring(0).unwrap();
    guest.works(0, 0);
    let (grown, file) = (
        daemon.own_memory().saturating_sub(before),
        rustix::fs::fstat(&fd).unwrap().st_blocks * 512,
    );
    assert!(grown < 4 << 20 && file < 4 << 20, "{grown} bytes of memory, {file} of the region");
    daemon.end();
}

/// A region with random contents, as a front end may keep it for a crashed back end. Its queue must
/// still start or stop.
#[test]
fn a_garbage_filled_in_flight_region_stops_its_queue_at_most() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let before = daemon.own_memory();
        const REGIONS: u64 = 60;
        for seed in 0..REGIONS {
            let mut guest = Guest::connect(&daemon.socket(VICTIM), *layout);
            let len = [2048u64, 1 << 16, 1 << 20][seed as usize % 3];
            let fd = memfd(len);
            rustix::io::pwrite(&fd, &garbage(seed, len as usize, *layout), 0).unwrap();
            let payload = inflight(len, 0, 1, 64);
            if send(&guest.connection, FrontendReq::SET_INFLIGHT_FD, &payload, &[fd.as_fd()])
                == Fate::Done
                && guest.start_ring(0).is_ok()
            {
                // A queue can be stopped, whether it runs or is broken.
                guest.rings[0].kick();
                guest.connection.stop_ring(0).unwrap();
            }
            other.works(0, 0);
        }
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        guest.works(0, 0);
        let grown = daemon.own_memory().saturating_sub(before);
        assert!(grown < 16 << 20, "{layout:?}: {grown} bytes more");
        let log = daemon.complaints();
        assert!(are_few(&log, REGIONS as usize), "{log:#?}");
        daemon.end();
    }
}

/// Returns a region with a valid header, and with many entries that are marked as in flight.
pub fn garbage(seed: u64, len: usize, layout: Layout) -> Vec<u8> {
    let mut random = Random::new(seed + 1);
    let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
    let (header, entry) = if layout == Layout::Split { (16, 16) } else { (32, 32) };
    let entries = (((len & !63) - header) / entry).min(32768) as u16;
    bytes[..8].fill(0);
    bytes[8..10].copy_from_slice(&1u16.to_le_bytes());
    bytes[10..12].copy_from_slice(&entries.to_le_bytes());
    for at in (header..len - entry).step_by(entry) {
        bytes[at] = u8::from(random.below(4) > 0);
        match seed % 4 {
            // The seed selects plausible entries: maximum counters, chains of maximum length, or
            // valid heads.
            0 => bytes[at + 8..at + 16].fill(0xff),
            1 if layout == Layout::Packed => {
                bytes[at + 6..at + 8].copy_from_slice(&entries.to_le_bytes())
            }
            2 if layout == Layout::Packed => {
                bytes[at + 2..at + 4]
                    .copy_from_slice(&(random.below(entries.into()) as u16).to_le_bytes());
                bytes[at + 6..at + 8].copy_from_slice(&1u16.to_le_bytes());
            }
            2 if at / entry > 8 => bytes[at] = 0,
            _ => {}
        }
    }
    bytes
}

#[test]
fn invalid_messages_end_the_connection() {
    let get = FrontendReq::GET_FEATURES as u32;
    let bad: &[(&str, Vec<u8>)] = &[
        ("request 0", message(0, VERSION, 0, &[])),
        ("request 1000", message(1000, VERSION, 0, &[])),
        ("request u32::MAX", message(u32::MAX, VERSION, 0, &[])),
        ("version 0", message(get, 0, 0, &[])),
        ("version 2", message(get, 2, 0, &[])),
        ("version 3", message(get, 3, 0, &[])),
        ("a reply", message(get, VERSION | REPLY, 0, &[])),
        ("flags that are not", message(get, VERSION | 0xfff0, 0, &[])),
        ("a payload where none belongs", message(get, VERSION, 8, &[0; 8])),
        ("4097 bytes", message(get, VERSION, 4097, &[0; 4097])),
        ("4 GiB of payload", message(get, VERSION, u32::MAX, &[0; 100])),
        ("text", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("a kick with a wrong size", message(35, VERSION, 16, &[0; 16])),
        ("a back channel with a wrong size", message(21, VERSION, 9, &[0; 9])),
    ];
    for (name, bytes) in bad {
        survives(name, &[Fate::Disconnected], |g| {
            g.connection.send_bytes(bytes, &[]).unwrap();
            ended(g)
        });
    }
    survives("descriptors where none belong", &[Fate::Disconnected], |g| {
        g.connection.send_bytes(&message(get, VERSION, 0, &[]), &[event().as_fd()]).unwrap();
        ended(g)
    });
    survives("half a header", ANY, |g| {
        g.connection.send_bytes(&message(get, VERSION, 0, &[])[..6], &[event().as_fd()]).unwrap();
        Fate::Disconnected
    });
    survives("half a message", ANY, |g| {
        let half = &message(FrontendReq::SET_MEM_TABLE as u32, VERSION, 40, &[0; 40])[..30];
        g.connection.send_bytes(half, &[event().as_fd()]).unwrap();
        Fate::Disconnected
    });
}

fn ended(guest: &Guest) -> Fate {
    let mut rest = Vec::new();
    let mut socket = guest.connection.socket();
    socket.set_read_timeout(Some(SOON)).unwrap();
    match socket.read_to_end(&mut rest) {
        Ok(_) => Fate::Disconnected,
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => Fate::Disconnected,
        Err(_) => Fate::Done,
    }
}

#[test]
fn configuration_beyond_its_end_is_refused() {
    use FrontendReq::{GET_CONFIG, SET_CONFIG};
    let config = |offset: u32, size: u32, len: usize| {
        let head: Vec<u8> = [offset, size, 0].iter().flat_map(|w: &u32| w.to_le_bytes()).collect();
        [head, vec![1; len]].concat()
    };
    for (offset, size, len) in
        [(0, 0, 0), (4096, 1, 1), (u32::MAX, 2, 2), (0, 4097, 0), (0, 8, 4), (0, 8, 16)]
    {
        survives("read", NO, |g| send(&g.connection, GET_CONFIG, &config(offset, size, len), &[]));
        survives("written", NO, |g| {
            send(&g.connection, SET_CONFIG, &config(offset, size, len), &[])
        });
    }
    for (offset, len) in [(0, 8), (31, 1), (33, 4), (64, 8), (4000, 96)] {
        let payload = config(offset, len as u32, len);
        survives("not the write cache", NO, |g| send(&g.connection, SET_CONFIG, &payload, &[]));
    }
}

#[test]
fn descriptors_of_the_wrong_kind_are_refused() {
    use FrontendReq::{SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK};
    let path = std::env::temp_dir().join(format!("blockyard-hostile-kind-{}", std::process::id()));
    let file =
        File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    let (null, folder) =
        (File::options().write(true).open("/dev/null").unwrap(), File::open("/").unwrap());
    for request in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        for fd in [file.as_fd(), null.as_fd(), folder.as_fd()] {
            survives("no notifier", NO, |g| send(&g.connection, request, &words(&[0]), &[fd]));
        }
    }
    std::fs::remove_file(path).unwrap();
    // Writing to a pipe, or polling it, may block because of its other users. An epoll descriptor
    // looks like an eventfd.
    let (reader, writer) = std::io::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    for kick in [reader.as_fd(), socket.as_fd(), epoll.as_fd()] {
        survives("no kick", NO, |g| send(&g.connection, SET_VRING_KICK, &words(&[0]), &[kick]));
    }
    for request in [SET_VRING_CALL, SET_VRING_ERR] {
        for fd in [writer.as_fd(), datagrams.as_fd(), epoll.as_fd()] {
            survives("no call", NO, |g| send(&g.connection, request, &words(&[0]), &[fd]));
        }
    }
    survives("a back channel of many descriptors", ANY, |g| {
        let event = event();
        send(&g.connection, FrontendReq::SET_BACKEND_REQ_FD, &[], &[event.as_fd(); 4])
    });
    survives("a back channel of none", NO, |g| {
        send(&g.connection, FrontendReq::SET_BACKEND_REQ_FD, &[], &[])
    });
}

/// Notifiers whose other end is closed, or is never read.
#[test]
fn dead_notifiers_do_not_block_the_server() {
    let daemon = Daemon::start();
    let mut other = Guest::start(&daemon.socket(OTHER), Layout::Split);
    let mut guest = Guest::start(&daemon.socket(VICTIM), Layout::Split);
    let set = |guest: &Guest, request: FrontendReq, fd: BorrowedFd<'_>| {
        assert_eq!(send(&guest.connection, request, &words(&[0]), &[fd]), Fate::Done);
    };
    // Call into a full socket, and then into one whose other end is closed.
    let (reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    while writer.write(&[0; 4096]).is_ok() {}
    writer.set_nonblocking(false).unwrap();
    set(&guest, FrontendReq::SET_VRING_CALL, writer.as_fd());
    guest.works(0, 0);
    drop(reader);
    guest.works(0, 8);
    other.works(0, 0);
    drop(guest);
    Guest::start(&daemon.socket(VICTIM), Layout::Split).works(0, 0);
    assert_eq!(daemon.end(), [""; 0]);
}

/// Random requests, sizes and numbers of descriptors.
#[test]
fn random_messages_leave_nothing_behind() {
    let daemon = Daemon::start();
    let mut other = Guest::start(&daemon.socket(OTHER), Layout::Split);
    let descriptors = daemon.descriptors();
    drop(Guest::start(&daemon.socket(VICTIM), Layout::Split));
    daemon.keeps_descriptors(descriptors, "at first");
    let mappings = daemon.mappings();
    let memory = daemon.own_memory();
    let mut random = Random::new(7);
    const ROUNDS: usize = 300;
    const MESSAGES: usize = 20;
    for round in 0..ROUNDS {
        let guest = Guest::connect(&daemon.socket(VICTIM), BOTH[round % 2]);
        guest.connection.socket().set_write_timeout(Some(SOON)).unwrap();
        for _ in 0..MESSAGES {
            let request = 1 + random.below(46) as u32;
            let size =
                [0, 8, 8, 16, 24, 40, 40, 1 + random.below(80)][random.below(8) as usize] as usize;
            let mut payload: Vec<u8> = (0..size).map(|_| random.next() as u8).collect();
            // Small numbers are valid more often than large ones.
            for byte in payload.iter_mut().enumerate().filter(|(at, _)| at % 8 > 1).map(|(_, b)| b)
            {
                *byte = if random.below(3) > 0 { 0 } else { *byte };
            }
            let fd = memfd(1 << 16);
            let many = [0, 0, 1, 1, 2, 32][random.below(6) as usize];
            let flags = VERSION | if random.below(2) == 0 { NEED_REPLY } else { 0 };
            if guest
                .connection
                .send_bytes(
                    &message(request, flags, size as u32, &payload),
                    &vec![fd.as_fd(); many],
                )
                .is_err()
            {
                break;
            }
        }
        drop(guest);
        if round % 50 == 0 {
            other.works(0, 0);
        }
    }
    Guest::start(&daemon.socket(VICTIM), Layout::Split).works(0, 0);
    daemon.keeps_descriptors(descriptors, "at last");
    daemon.keeps_mappings(mappings + 8);
    let grown = daemon.own_memory().saturating_sub(memory);
    assert!(grown < 4 << 20, "{grown} bytes more");
    let log = daemon.complaints();
    assert!(are_few(&log, ROUNDS * MESSAGES), "{log:#?}");
    daemon.end();
}
