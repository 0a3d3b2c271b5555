//! Attacks that other modules test for errors. Here a neighbour reads from its own disk during each
//! attack.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blockyard_driver::connection::PROTOCOL;
use blockyard_driver::request::{DISCARD, WRITE_ZEROES};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use super::beside::{Attack, beside};
use super::daemon::{CAPACITY, Daemon, MANY_QUEUES, OTHER, VICTIM};
use super::guest::{BOTH, Guest, Layout, into, out};
use super::messages::{Fate, garbage, inflight, memfd, send};
use super::regions::add;
use crate::common::Folder;

/// Number of ranges of a request: the maximum that the device offers.
const RANGES: u64 = 64;
/// Number of requests in flight, over all rings.
const REQUESTS: u16 = 60;

/// A part of a round that takes this long is a step too.
const LONG_ROUND: Duration = Duration::from_secs(1);

/// Fills the rings with requests of 64 ranges of 4 KiB each, again whenever the device has
/// completed all of them. Each round is a step. A slow host takes minutes for a round, so there a
/// step is [`LONG_ROUND`] in which the device completes requests.
fn ranges_without_end(attack: &Attack<'_>, queues: u16, kind: u32) {
    let mut guest = Guest::start_queues(&attack.socket(VICTIM), Layout::Split, queues);
    let mut ranges = Vec::new();
    for n in 0..RANGES {
        ranges.extend((n * 64).to_le_bytes());
        ranges.extend(8u32.to_le_bytes());
        ranges.extend(0u32.to_le_bytes());
    }
    let (header, ranges, status) = (guest.header(kind, 0), guest.bytes(&ranges), guest.status());
    let table = guest.table(&[out(header, 16), out(ranges, RANGES as u32 * 16), into(status, 1)]);
    let requests = REQUESTS.div_ceil(queues);
    while attack.goes_on() {
        let mut step = Instant::now();
        for ring in &mut guest.rings {
            for _ in 0..requests {
                ring.offer(&[table]);
            }
            ring.kick();
        }
        for ring in &mut guest.rings {
            for _ in 0..requests {
                ring.wait(1);
                if step.elapsed() >= LONG_ROUND {
                    attack.goes_on();
                    step = Instant::now();
                }
            }
        }
    }
    assert_eq!(guest.byte(status), 0);
}

/// Makes the attacked disk a file. The neighbour's disk is in memory, so it does not use the file
/// system's locks.
fn victim_in_a_file(folder: &Folder, disk: &str) -> String {
    if disk != VICTIM {
        return format!("ram:{CAPACITY}");
    }
    let path = folder.join("victim.raw");
    File::create(&path).unwrap().set_len(CAPACITY).unwrap();
    path.display().to_string()
}

fn beside_ranges(what: &str, daemon: Daemon, queues: u16, kind: u32) {
    beside(what, &daemon, |attack| ranges_without_end(attack, queues, kind));
    assert_eq!(daemon.end(), [""; 0]);
}

#[test]
fn beside_discards_without_end() {
    beside_ranges("discards without end", Daemon::with(victim_in_a_file), 1, DISCARD);
}

#[test]
fn beside_discards_of_many_queues() {
    beside_ranges(
        "discards of many queues",
        Daemon::crowded(victim_in_a_file),
        MANY_QUEUES,
        DISCARD,
    );
}

#[test]
fn beside_zeroes_without_end() {
    beside_ranges("zeroes without end", Daemon::with(victim_in_a_file), 1, WRITE_ZEROES);
}

#[test]
fn beside_memory_files_that_are_refused() {
    let daemon = Daemon::start();
    beside("memory files that are refused", &daemon, |attack| {
        let guest = Guest::connect(&attack.socket(VICTIM), Layout::Split);
        let file = File::options().read(true).write(true).open("/proc/self/comm").unwrap();
        while attack.goes_on() {
            assert_eq!(add(&guest, [1 << 40, 4096, 1 << 40, 0], file.as_fd()), Fate::Refused);
        }
    });
    daemon.end();
}

#[test]
fn beside_memory_that_comes_and_goes() {
    let daemon = Daemon::start();
    beside("memory that comes and goes", &daemon, |attack| {
        let mut guest = Guest::start(&attack.socket(VICTIM), Layout::Split);
        let file = memfd(1 << 30);
        while attack.goes_on() {
            for request in [FrontendReq::ADD_MEM_REG, FrontendReq::REM_MEM_REG] {
                let body: Vec<u8> = [0, 1 << 40, 1 << 30, 1 << 40, 0]
                    .iter()
                    .flat_map(|w: &u64| w.to_le_bytes())
                    .collect();
                assert_eq!(send(&guest.connection, request, &body, &[file.as_fd()]), Fate::Done);
                guest.works(0, 0);
            }
        }
    });
    daemon.end();
}

#[test]
fn beside_in_flight_regions_of_garbage() {
    let daemon = Daemon::start();
    beside("in-flight regions of garbage", &daemon, |attack| {
        let mut seed = 0;
        while attack.goes_on() {
            seed += 1;
            let layout = BOTH[seed as usize % 2];
            let mut guest = Guest::connect(&attack.socket(VICTIM), layout);
            let (len, fd) = (1 << 16, memfd(1 << 16));
            rustix::io::pwrite(&fd, &garbage(seed, len as usize, layout), 0).unwrap();
            let payload = inflight(len, 0, 1, 64);
            if send(&guest.connection, FrontendReq::SET_INFLIGHT_FD, &payload, &[fd.as_fd()])
                == Fate::Done
                && guest.start_ring(0).is_ok()
            {
                guest.rings[0].kick();
                guest.connection.stop_ring(0).unwrap();
            }
        }
    });
    daemon.end();
}

/// The replies fill the socket, and the daemon's thread for this front end waits for room.
#[test]
fn beside_a_front_end_that_reads_no_replies() {
    let daemon = Daemon::start();
    beside("a front end that reads no replies", &daemon, |attack| {
        let guest = Guest::connect(&attack.socket(VICTIM), Layout::Split);
        let question: Vec<u8> = [FrontendReq::GET_FEATURES as u32, 1, 0]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        guest.connection.socket().set_write_timeout(Some(Duration::from_millis(1))).unwrap();
        while attack.goes_on() {
            let _ = guest.connection.send_bytes(&question, &[]);
        }
    });
    daemon.end();
}

/// The daemon starts and ends a session for each front end.
#[test]
fn beside_front_ends_that_come_and_go() {
    let daemon = Daemon::start();
    beside("front ends that come and go", &daemon, |attack| {
        while attack.goes_on() {
            drop(UnixStream::connect(attack.socket(VICTIM)));
            drop(UnixStream::connect(attack.socket(OTHER)));
            let mut guest = Guest::start(&attack.socket(VICTIM), Layout::Packed);
            guest.works(1, 8);
        }
    });
    daemon.end();
}

/// The buffer of the back channel is full, and the front end acknowledges nothing.
#[test]
fn beside_a_back_channel_that_is_replaced() {
    let daemon = Daemon::start();
    beside("a back channel that is replaced", &daemon, |attack| {
        let features = PROTOCOL | VhostUserProtocolFeatures::BACKEND_REQ;
        let mut guest = Guest::connect_with(&attack.socket(VICTIM), Layout::Split, features);
        guest.start_ring(0).unwrap();
        while attack.goes_on() {
            let (channel, _unread) = UnixStream::pair().unwrap();
            let sent =
                send(&guest.connection, FrontendReq::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]);
            assert_eq!(sent, Fate::Done);
            guest.works(0, 0);
        }
    });
    daemon.end();
}
