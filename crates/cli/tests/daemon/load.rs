//! Distribution of queues to reactors, filters, and statistics.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{Data, Ring, request, status};
use serde_json::Value;

use crate::common::{Daemon, Folder, SOON, Signal, blockyard, complaints, until};
use crate::guest::{ANSWER, Guest, pattern};

/// Number of queues of the disk, and of requests in flight in each.
const QUEUES: u16 = 4;
const DEPTH: u16 = 16;
/// Number of requests of a load.
const OPS: u64 = 20_000;

/// Returns the number of iterations of each reactor's event loop. A reactor that has nothing to do
/// makes none.
#[track_caller]
fn iterations(api: &Path) -> Vec<u64> {
    let mut stream = UnixStream::connect(api).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(b"GET /v1/figures HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}")).1;
    let figures: Value = serde_json::from_str(body).unwrap();
    let of_reactor = |reactor: &Value| reactor["iterations"].as_u64().unwrap();
    figures["reactors"].as_array().unwrap().iter().map(of_reactor).collect()
}

/// Puts a load on a disk of two reactors. Returns the number of iterations of each reactor's event
/// loop during the load.
#[track_caller]
fn iterations_under(load: &LoadOptions, api: &Path) -> [u64; 2] {
    let before = iterations(api);
    let report = measure(load).unwrap();
    assert_eq!((report.errors, &report.first_error), (0, &None));
    if load.verify {
        assert!(report.verified_blocks > 1000, "{} blocks: no load", report.verified_blocks);
    }
    let made: Vec<_> =
        iterations(api).iter().zip(before).map(|(after, before)| after - before).collect();
    made.try_into().expect("two reactors")
}

/// Least number of iterations of a reactor that serves its part of the queues: an iteration
/// completes at most the requests that are in flight when it begins.
const LEAST: u64 = OPS / (QUEUES as u64 * DEPTH as u64);

/// Most iterations of a reactor without a queue. It only answers commands: the client's connection
/// and its end, and the calls of the API.
const COMMANDS: u64 = 50;

#[test]
fn queues_are_only_on_the_reactors_of_their_disk() {
    let folder = Folder::new();
    let (image, socket, api) = (folder.image("disk", 64 << 20), folder.join("s"), folder.join("a"));
    let missing = ["--reactors", "2", "--on-reactors", "1-2"];
    let serve =
        [&["serve", image.to_str().unwrap(), "--vhost-user", "never"][..], &missing].concat();
    let refused = blockyard(&serve);
    let what = "there is no reactor 2: the server has 2, from 0 on";
    assert!(!refused.status.success() && refused.err.contains(what), "{}", refused.err);
    let options = ["--queues", "4", "--reactors", "2", "--on-reactors", "1", "--api"];
    let options = [&options[..], &[api.to_str().unwrap()]].concat();
    let daemon = Daemon::serve(&image, &socket, &options);
    let load = LoadOptions {
        rw: Pattern::Randrw,
        queues: QUEUES,
        depth: DEPTH,
        ops: Some(OPS),
        ..LoadOptions::for_socket(socket)
    };
    let made = iterations_under(&load, &api);
    assert!(made[0] < COMMANDS && made[1] >= LEAST, "{made:?} iterations");
    daemon.stop();
}

/// `tests/perf` measures how the reactors divide the CPU time.
#[test]
fn queues_are_distributed_to_all_reactors() {
    let folder = Folder::new();
    let (image, socket, api) = (folder.image("disk", 64 << 20), folder.join("s"), folder.join("a"));
    for packed in [false, true] {
        let options = ["--queues", "4", "--reactors", "2", "--api", api.to_str().unwrap()];
        let daemon = Daemon::serve(&image, &socket, &options);
        let load = LoadOptions {
            rw: Pattern::Randrw,
            queues: QUEUES,
            depth: DEPTH,
            ops: Some(OPS),
            flush_every: 50,
            verify: true,
            packed,
            ..LoadOptions::for_socket(socket.clone())
        };
        let made = iterations_under(&load, &api);
        let all_serve = made.iter().all(|made| *made >= LEAST);
        assert!(all_serve, "one reactor does the other's work: {made:?} iterations");
        daemon.stop();
    }
}

#[test]
fn a_front_end_with_too_many_queues_is_refused() {
    let folder = Folder::new();
    let daemon = Daemon::serve("ram:1M", &folder.join("s"), &["--queues", "2"]);
    let options = LoadOptions { queues: 3, ..LoadOptions::for_socket(folder.join("s")) };
    let error = measure(&options).unwrap_err().to_string();
    assert!(error.contains("has 2 queues, not 3"), "{error}");
    daemon.stop();
}

/// Returns the number after `name` in the statistics line of a kind, in microseconds.
fn figure(log: &str, kind: &str, name: &str) -> f64 {
    let line = log
        .lines()
        .find(|l| l.contains(&format!(" {kind}: ")))
        .unwrap_or_else(|| panic!("no {kind}: {log}"));
    let rest = line.split_once(name).unwrap_or_else(|| panic!("no {name}: {line}")).1;
    let number = rest.split_whitespace().next().unwrap().trim_end_matches([',', ';']);
    number.parse().unwrap_or_else(|e| panic!("{e}: {line}"))
}

/// The tests of the statistics check the times, and `tests/perf` measures them.
#[test]
fn statistics_have_all_requests_with_their_times() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 4 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    let load = LoadOptions { depth: 8, ops: Some(200), ..LoadOptions::for_socket(socket.clone()) };
    measure(&load).unwrap();
    let mut guest = Guest::connect(&socket);
    assert_eq!(guest.write(0, &pattern(1, 512)), status::OK);
    assert_eq!(guest.flush(), status::OK);
    let from = daemon.log().len();
    daemon.signal(Signal::USR1);
    let log = daemon.wait_log_after(from, "flush: ");
    for kind in ["read", "write", "flush"] {
        assert!(figure(&log, kind, "service time p50 ") > 0.0, "{log}");
        figure(&log, kind, "queue time p50 ");
    }
    assert!(log.contains(&format!("clients: pid {} disk=\"disk", std::process::id())), "{log}");
    assert_eq!(figure(&log, "read", "requests="), 200.0, "{log}");
    assert_eq!(figure(&log, "read", "bytes="), 200.0 * 4096.0, "{log}");
    // An idle disk reports the same statistics again.
    daemon.stop();
}

#[test]
fn a_sequential_load_takes_fewer_operations_than_requests() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 16 << 20), folder.join("s"));
    for (options, merges) in [
        (&["--cache", "none"][..], true),
        (&["--cache", "writeback"], true),
        (&["--filter", "delay:flush=1us"], false),
    ] {
        for packed in [false, true] {
            let daemon = Daemon::serve(&image, &socket, options);
            let load = LoadOptions {
                rw: Pattern::Write,
                depth: 32,
                ops: Some(8_000),
                packed,
                verify: true,
                ..LoadOptions::for_socket(socket.clone())
            };
            let written = measure(&load).unwrap();
            // A client that verifies is slow to submit writes. A page cache may complete each
            // request before the next one arrives.
            let fast = LoadOptions { verify: false, ops: Some(24_000), ..load.clone() };
            let more = measure(&fast).unwrap();
            let read =
                measure(&LoadOptions { rw: Pattern::Read, ops: Some(8_000), ..fast }).unwrap();
            let errors = [written.first_error, more.first_error, read.first_error];
            assert!(errors.iter().all(Option::is_none), "{options:?}: {errors:?}");
            assert!(
                written.verified_blocks >= 4096,
                "{} blocks: not all is read back",
                written.verified_blocks
            );
            let from = daemon.log().len();
            daemon.signal(Signal::USR1);
            let log = daemon.wait_log_after(from, "write: ");
            for kind in ["read", "write"] {
                let (requests, merged) =
                    (figure(&log, kind, "requests="), figure(&log, kind, "merged="));
                assert!(requests >= 8_000.0, "{log}");
                assert!(
                    if merges { merged > requests / 4.0 } else { merged == 0.0 },
                    "{options:?}: {log}"
                );
            }
            daemon.stop();
        }
    }
}

/// Offers requests of one kind as one batch. Each has a first sector and a length in bytes.
fn offer(guest: &mut Guest, kind: u32, batch: &[(u64, u32)]) {
    let queue = guest.queue();
    for (slot, &(sector, len)) in batch.iter().enumerate() {
        let data = if kind == request::IN { Data::FromDevice(len) } else { Data::ToDevice(len) };
        queue.submit(slot as u16, kind, sector, data);
    }
    queue.publish().unwrap();
}

#[test]
fn merged_requests_complete_separately() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    for mode in ["none", "writeback", "writethrough"] {
        let daemon = Daemon::serve(&image, &socket, &["--cache", mode]);
        let mut guest = Guest::connect(&socket);
        let end = guest.capacity() / 512;
        let good = [(end - 10, 2048), (end - 6, 512), (end - 5, 2560)];
        for round in 0..2 {
            // In the second round an additional request lies beyond the end of the disk.
            let batch = [&good[..], &[(end, 512)]].concat();
            let batch = &batch[..3 + round];
            for (slot, &(sector, len)) in batch.iter().enumerate() {
                guest
                    .queue()
                    .write_data(slot as u16, &pattern(sector + round as u64, len as usize));
            }
            offer(&mut guest, request::OUT, batch);
            let mut answers = [None; 4];
            until("all are answered", ANSWER, || {
                while let Some((slot, status)) = guest.queue().reap().unwrap() {
                    answers[usize::from(slot)] = Some(status);
                }
                guest.queue().in_flight() == 0
            });
            let beyond = (round == 1).then_some(status::IOERR);
            assert_eq!(
                answers,
                [Some(status::OK), Some(status::OK), Some(status::OK), beyond],
                "{mode}"
            );
            for (sector, len) in good {
                let want = pattern(sector + round as u64, len as usize);
                assert_eq!(guest.read(sector, len as usize), Ok(want), "{mode}");
            }
        }
        guest.leave();
        for (batch, lengths) in
            [(good, [2049, 513, 2561]), ([good[1], good[2], (end, 1024)], [513, 2561, 1])]
        {
            let mut guest = Guest::connect(&socket);
            offer(&mut guest, request::IN, &batch);
            // Bytes written by each request including its status, from the used ring.
            let mut written = [0; 3];
            until("all are answered", ANSWER, || {
                while let Some((slot, len)) = guest.queue().ring.reap() {
                    written[slot as usize] = len;
                }
                !written.contains(&0)
            });
            assert_eq!(written, lengths, "{mode}");
            for (slot, &(sector, len)) in batch.iter().enumerate().filter(|(_, b)| b.0 < end) {
                let mut bytes = vec![0; len as usize];
                guest.queue().read_data(slot as u16, &mut bytes);
                assert_eq!(bytes, pattern(sector + 1, len as usize), "{mode}");
            }
        }
        let log = daemon.stop();
        assert_eq!(figure(&log, "write", "merged="), 2.0, "{log}");
        assert_eq!(figure(&log, "read", "merged="), 2.0, "{log}");
    }
}

#[test]
fn the_error_filter_fails_the_configured_requests() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(
        &image,
        &socket,
        &["--filter", "error:read=1,write-zeroes=1,range=4096-8192"],
    );
    let mut guest = Guest::connect(&socket);
    assert_eq!(guest.write(0, &pattern(1, 16384)), status::OK, "writes are not meant");
    for (sector, len, good) in [
        (0, 4096, true),
        (7, 512, true),
        (7, 1024, false),
        (8, 512, false),
        (15, 512, false),
        (16, 512, true),
        (0, 16384, false),
    ] {
        let read = guest.read(sector, len);
        let want = pattern(1, 16384)[sector as usize * 512..][..len].to_vec();
        assert_eq!(
            read,
            if good { Ok(want) } else { Err(status::IOERR) },
            "{len} bytes at sector {sector}"
        );
    }
    assert_eq!(
        guest.ranges(request::WRITE_ZEROES, &[(20, 1, 0), (8, 1, 0)]),
        status::IOERR,
        "one range of two fails"
    );
    assert_eq!(guest.ranges(request::DISCARD, &[(8, 1, 0)]), status::OK);
    assert_eq!(guest.flush(), status::OK);
    let log = daemon.stop();
    assert!(log.contains("read failed: the error filter fails this request"), "{log}");
    assert!(figure(&log, "read", "errors=") == 4.0, "{log}");
}

#[test]
fn a_disk_with_a_filter_serves_a_fixed_rate() {
    let folder = Folder::new();
    let daemon =
        Daemon::serve("ram:16M", &folder.join("s"), &["--filter", "error:read=0.25,write=0.25"]);
    let load = LoadOptions {
        rw: Pattern::Randrw,
        ops: Some(4000),
        ..LoadOptions::for_socket(folder.join("s"))
    };
    let report = measure(&load).unwrap();
    assert!((800..1200).contains(&report.errors), "{} of 4000", report.errors);
    let log = daemon.stop();
    let warnings = complaints(&log).len() as u64;
    // The tests of `disk::once_a_second` check the number of lines.
    assert!(
        (1..report.errors / 4).contains(&warnings),
        "a thousand errors are not a thousand lines: {warnings}"
    );
}
