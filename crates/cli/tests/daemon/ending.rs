//! How a daemon ends: SIGTERM drains and flushes; kill -9 loses no acknowledged write.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{Data, Plan, request, status};

use crate::cache::dirty;
use crate::common::{Daemon, Folder, Gated, SOON, Signal, until};
use crate::guest::{ANSWER, Guest, bytes_of, pattern};
use crate::killed::Over;

const BLOCK: usize = 4096;
const DEPTH: u16 = 32;

/// Waits for all requests in flight. Returns the number of successful ones.
fn drain(guest: &mut Guest) -> usize {
    let (start, mut good) = (Instant::now(), 0);
    while guest.queue().in_flight() > 0 {
        assert!(
            start.elapsed() < ANSWER,
            "{} requests were never answered",
            guest.queue().in_flight()
        );
        guest.queue().sleep(Some(Duration::from_millis(100))).unwrap();
        while let Some((_, status)) = guest.queue().reap().unwrap() {
            good += usize::from(status == status::OK);
        }
    }
    good
}

#[test]
fn sigterm_completes_requests_in_flight() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &["--filter", "delay:write=2s"]);
    let mut guest = Guest::connect(&socket);
    for slot in 0..16 {
        guest.queue().write_data(slot, &pattern(slot.into(), BLOCK));
        guest.queue().submit(slot, request::OUT, u64::from(slot) * 8, Data::ToDevice(BLOCK as u32));
    }
    // The requests wait in the filter.
    let early = guest.all_taken(16);
    daemon.stop();
    assert!(early.iter().all(|(_, status)| *status == status::OK), "{early:?}");
    assert_eq!(early.len() + drain(&mut guest), 16);
    for slot in 0..16 {
        assert_eq!(
            bytes_of(&image, slot * BLOCK as u64, BLOCK),
            pattern(slot, BLOCK),
            "block {slot}"
        );
    }
    assert!(!socket.exists());
}

/// Writes blocks one after the other until `over`, and then waits for the last answers. Returns the
/// acknowledged blocks. `count`: their number so far.
fn write_until(socket: &Path, over: &AtomicBool, count: &AtomicUsize) -> Vec<u64> {
    let mut guest = Guest::with(socket, &Plan { slots: DEPTH, ..Plan::default() });
    let (mut next, mut answered) = (0, Vec::new());
    let mut carries = [0; DEPTH as usize];
    let mut free: Vec<u16> = (0..DEPTH).collect();
    loop {
        // After the end of the daemon the ring has its last answers.
        let last = over.load(Ordering::Relaxed);
        for slot in free.drain(..) {
            guest.queue().write_data(slot, &pattern(next, BLOCK));
            guest.queue().submit(slot, request::OUT, next * 8, Data::ToDevice(BLOCK as u32));
            carries[usize::from(slot)] = next;
            next += 1;
        }
        guest.queue().publish().unwrap();
        guest.queue().sleep(Some(Duration::from_millis(20))).unwrap();
        while let Some((slot, status)) = guest.queue().reap().unwrap() {
            assert_eq!(status, status::OK);
            answered.push(carries[usize::from(slot)]);
            count.store(answered.len(), Ordering::Relaxed);
            free.push(slot);
        }
        if last {
            return answered;
        }
    }
}

#[test]
fn sigterm_under_load_keeps_acknowledged_writes() {
    for mode in ["none", "writeback"] {
        let folder = Folder::new();
        let (image, socket) = (folder.image("disk", 8 << 30), folder.join("s"));
        let daemon = Daemon::serve(&image, &socket, &["--cache", mode]);
        let (over, count) = (AtomicBool::new(false), AtomicUsize::new(0));
        let answered = std::thread::scope(|scope| {
            let writer = scope.spawn(|| write_until(&socket, &over, &count));
            let ends = Over(&over);
            until("there is a load", SOON, || count.load(Ordering::Relaxed) > 2000);
            // The daemon ends within bounded time although the guest continues to submit requests.
            daemon.stop();
            drop(ends);
            writer.join().unwrap()
        });
        let end = answered.iter().max().unwrap() + 1;
        assert_eq!(dirty(&image, end * BLOCK as u64), 0, "{mode}: flushed at the end");
        for block in answered {
            let found = bytes_of(&image, block * BLOCK as u64, BLOCK);
            assert!(
                found == pattern(block, BLOCK),
                "{mode}: block {block} was answered, and is not in the image"
            );
        }
    }
}

#[test]
fn sigterm_does_not_wait_for_front_ends() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    let mut idle = Guest::connect(&socket);
    assert_eq!(idle.flush(), status::OK);
    // A connection that waits in the backlog of the socket.
    let _waiting = UnixStream::connect(&socket).unwrap();
    daemon.stop();

    // One front end stops in the middle of a message, one in the middle of a handshake.
    for message in [
        &[1, 0, 0, 0, 1][..],
        &[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        &[8, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1],
    ] {
        let daemon = Daemon::serve(&image, &socket, &[]);
        let before = daemon.descriptors().len();
        let mut half = UnixStream::connect(&socket).unwrap();
        half.write_all(message).unwrap();
        until("it is accepted", SOON, || daemon.descriptors().len() > before);
        daemon.stop();
    }
}

#[test]
fn further_signals_during_a_drain_change_nothing() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("far.img", 1 << 20), folder.join("s"));
    let storage = Gated::start(&folder, &image);
    let mut daemon = Daemon::serve(storage.image(), &socket, &["--nbd-timeout", "300"]);
    let mut guest = Guest::connect(&socket);
    let closed = storage.close();
    guest.queue().submit(0, request::OUT, 0, Data::ToDevice(BLOCK as u32));
    guest.queue().publish().unwrap();
    daemon.has_handled_all("");
    for signal in [Signal::TERM, Signal::HUP, Signal::USR1, Signal::TERM, Signal::INT] {
        daemon.signal(signal);
        daemon.until_signals_are_taken();
    }
    assert!(daemon.running(), "it waits for its storage");
    assert_eq!(guest.queue().in_flight(), 1);
    drop(closed);
    assert!(daemon.ended(SOON).success());
    assert_eq!(drain(&mut guest), 1);
}

/// Kills a daemon under verified load and restarts it, five times.
fn kill_9_five_times(packed: bool) {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    let options = ["--queues", "2", "--reactors", "2"];
    let mut daemon = Daemon::serve(&image, &socket, &options);
    let load = LoadOptions {
        rw: Pattern::Randrw,
        queues: 2,
        depth: 16,
        runtime: 600.0,
        flush_every: 20,
        verify: true,
        reconnect: true,
        packed,
        ..LoadOptions::for_socket(socket.clone())
    };
    let (report, daemon) = std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        for _ in 0..5 {
            daemon.until_goes_on(500);
            assert!(!client.is_finished(), "the load ended early");
            daemon.kill();
            daemon = Daemon::serve_again(&image, &socket, &options);
        }
        daemon.until_goes_on(32);
        load.over.store(true, Ordering::Relaxed);
        (client.join().unwrap().unwrap(), daemon)
    });
    assert_eq!((report.errors, report.first_error, report.reconnects), (0, None, 5));
    assert!(report.verified_blocks > 1000, "{} blocks: no load", report.verified_blocks);
    daemon.stop();
}

#[test]
fn kill_9_under_load_loses_nothing_with_split_rings() {
    kill_9_five_times(false);
}

#[test]
fn kill_9_under_load_loses_nothing_with_packed_rings() {
    kill_9_five_times(true);
}
