//! Errors that a guest or a front end repeats very often: the log stays short, and memory and
//! descriptors do not grow.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockyard_driver::request::{DISCARD, IN, OUT};
use vhost::vhost_user::message::FrontendReq;

use super::beside::End;
use super::daemon::{CAPACITY, Daemon, OTHER, VICTIM, are_few};
use super::guest::{BOTH, D, Guest, Layout, event, into, out};
use super::messages::{Fate, send};

/// Offers chains of the same descriptors, a few at a time, until `count` were completed. The last
/// descriptor is the status.
fn flood(guest: &mut Guest, chain: &[D], count: u32) {
    let taken = chain.len() as u16;
    let deep = u32::from(guest.rings[0].size / taken / 2).max(1);
    let (mut offered, mut answered) = (0, 0);
    let start = Instant::now();
    while answered < count {
        while offered < count && offered - answered < deep {
            guest.rings[0].offer(chain);
            offered += 1;
        }
        guest.rings[0].kick();
        guest.rings[0].wait(taken);
        answered += 1;
        while guest.rings[0].reap(taken).is_some() {
            answered += 1;
        }
        assert!(
            start.elapsed() < Duration::from_secs(180),
            "{answered} of {count} answered in 3 minutes"
        );
    }
}

/// Bad requests of several kinds cause no log line, or a few.
#[test]
fn bad_requests_do_not_fill_the_log() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        let (beyond, unknown) = (guest.header(IN, u64::MAX), guest.header(99, 0));
        let (data, status) = (guest.bytes(&[0; 512]), guest.status());
        let chains: [&[D]; 3] = [
            &[out(beyond, 16), into(data, 512), into(status, 1)],
            &[out(unknown, 16), into(status, 1)],
            &[out(beyond, 16), into(0, u32::MAX), into(status, 1)],
        ];
        flood(&mut guest, chains[0], 1000);
        let before = daemon.own_memory();
        const REQUESTS: u32 = 34_000;
        for chain in chains {
            flood(&mut guest, chain, REQUESTS);
            assert_ne!(guest.byte(status), 0);
        }
        let grown = daemon.own_memory().saturating_sub(before);
        assert!(grown < 1 << 20, "{grown} bytes more");
        let log = daemon.complaints();
        assert!(are_few(&log, 3 * REQUESTS as usize), "{log:#?}");
        guest.works(0, 0);
        other.works(0, 0);
        daemon.end();
    }
}

/// Chains with many ranges use more memory than their results free.
#[test]
fn discards_of_many_ranges_take_no_memory() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        let header = guest.header(DISCARD, 0);
        let range = (8u128 | 8 << 64).to_le_bytes();
        let (ranges, status) = (guest.bytes(&range.repeat(64)), guest.status());
        let chain = [out(header, 16), out(ranges, 1024), into(status, 1)];
        flood(&mut guest, &chain, 500);
        assert_eq!(guest.byte(status), 0);
        let before = daemon.own_memory();
        flood(&mut guest, &chain, 10_000);
        let grown = daemon.own_memory().saturating_sub(before);
        assert!(grown < 1 << 20, "{layout:?}: {grown} bytes more");
        daemon.end();
    }
}

/// Requests that a disk with O_DIRECT must copy, of maximum size and all at once: the memory for
/// copies is bounded.
#[test]
fn large_unaligned_requests_take_bounded_memory() {
    let daemon = Daemon::with(|folder, disk| match disk {
        VICTIM => folder.image("image", CAPACITY).display().to_string(),
        _ => "ram:1M".into(),
    });
    let mut guest = Guest::start(&daemon.socket(VICTIM), Layout::Split);
    guest.works(0, 0);
    let before = daemon.own_memory();
    let data = guest.memory.take((1 << 20) + 4096, 4096).unwrap();
    for (kind, make) in [(IN, into as fn(u64, u32) -> D), (OUT, out)] {
        let (header, status) = (guest.header(kind, 0), guest.status());
        let chain =
            [vec![out(header, 16)], vec![make(data + 1, 1 << 20); 32], vec![into(status, 1)]]
                .concat();
        let table = guest.table(&chain);
        let stop = AtomicBool::new(false);
        let most = std::thread::scope(|scope| {
            let end = End(&stop);
            let watch = scope.spawn(|| {
                let mut most = 0;
                while !stop.load(Ordering::Relaxed) {
                    most = most.max(daemon.own_memory());
                    std::thread::sleep(Duration::from_millis(2));
                }
                most
            });
            for _ in 0..24 {
                guest.rings[0].offer(&[table]);
            }
            guest.rings[0].kick();
            for _ in 0..24 {
                guest.rings[0].wait(1);
            }
            drop(end);
            watch.join().unwrap()
        });
        assert_eq!(guest.byte(status), 0);
        let grown = most.saturating_sub(before);
        assert!(grown < 160 << 20, "type {kind}: {} MiB of copies", grown >> 20);
    }
    daemon.end();
}

/// A guest that breaks its ring and resets it in a loop.
#[test]
fn rings_that_break_in_a_loop_do_not_fill_the_log() {
    let daemon = Daemon::start();
    let mut other = Guest::start(&daemon.socket(OTHER), Layout::Split);
    let mut guest = Guest::start(&daemon.socket(VICTIM), Layout::Split);
    let (descriptors, memory) = (daemon.descriptors(), daemon.own_memory());
    const RINGS: usize = 1000;
    for _ in 0..RINGS {
        guest.rings[0].push_split(u16::MAX);
        guest.rings[0].kick();
        guest.reset_ring(0);
    }
    guest.works(0, 0);
    other.works(0, 0);
    let log = daemon.complaints();
    assert!(!log.is_empty() && are_few(&log, RINGS), "{log:#?}");
    daemon.keeps_descriptors(descriptors, "at last");
    let grown = daemon.own_memory().saturating_sub(memory);
    assert!(grown < 1 << 20, "{grown} bytes more");
    daemon.end();
}

#[test]
fn refused_messages_do_not_fill_the_log() {
    let daemon = Daemon::start();
    let mut other = Guest::start(&daemon.socket(OTHER), Layout::Split);
    let guest = Guest::connect(&daemon.socket(VICTIM), Layout::Split);
    let memory = daemon.own_memory();
    const MESSAGES: usize = 10_000;
    for _ in 0..MESSAGES / 2 {
        assert_eq!(
            send(&guest.connection, FrontendReq::SET_VRING_NUM, &[0; 8], &[]),
            Fate::Refused
        );
        let kick = event();
        assert_eq!(
            send(&guest.connection, FrontendReq::SET_VRING_KICK, &[0; 8], &[kick.as_fd()]),
            Fate::Refused
        );
    }
    other.works(0, 0);
    let log = daemon.complaints();
    assert!(!log.is_empty() && are_few(&log, MESSAGES), "{log:#?}");
    let grown = daemon.own_memory().saturating_sub(memory);
    assert!(grown < 1 << 20, "{grown} bytes more");
    daemon.end();
}

/// Front ends that connect, run their rings, and disconnect without a message, or with an invalid
/// one.
#[test]
fn disconnected_front_ends_leave_no_resources_behind() {
    let daemon = Daemon::start();
    let mut other = Guest::start(&daemon.socket(OTHER), Layout::Split);
    let visit = |layout: Layout, garbage: bool| {
        let mut guest = Guest::start(&daemon.socket(VICTIM), layout);
        guest.works(0, 0);
        if garbage {
            guest.connection.send_bytes(b"this is no message", &[]).unwrap();
        }
    };
    let descriptors = daemon.descriptors();
    for _ in 0..20 {
        visit(Layout::Split, false);
        visit(Layout::Packed, true);
    }
    daemon.keeps_descriptors(descriptors, "at first");
    let (mappings, memory) = (daemon.mappings(), daemon.own_memory());
    const VISITS: usize = 250;
    for _ in 0..VISITS {
        visit(Layout::Split, false);
        visit(Layout::Packed, true);
    }
    other.works(0, 0);
    daemon.keeps_descriptors(descriptors, "at last");
    daemon.keeps_mappings(mappings + 8);
    let grown = daemon.own_memory().saturating_sub(memory);
    assert!(grown < 1 << 20, "{grown} bytes more");
    // Each visit connects and disconnects two front ends.
    assert!(daemon.log().len() < 4 * VISITS / 10, "{:#?}", daemon.log());
    daemon.end();
}
