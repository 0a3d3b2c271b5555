//! Distribution of queues to reactors, filters, and statistics.

use std::time::Instant;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{Data, Ring, request, status};

use crate::common::{Daemon, Folder, Signal, blockyard, complaints, until};
use crate::guest::{ANSWER, Guest, pattern};

/// Returns the CPU time of the daemon's threads `reactor-N` in nanoseconds, in the order of their
/// names.
fn reactors(daemon: &Daemon) -> Vec<u64> {
    let mut times: Vec<_> = std::fs::read_dir(format!("/proc/{}/task", daemon.pid()))
        .unwrap()
        .filter_map(|task| {
            let task = task.unwrap().path();
            // A thread that opened the disk may end meanwhile.
            let name = std::fs::read_to_string(task.join("comm")).ok()?;
            let times = std::fs::read_to_string(task.join("schedstat")).ok()?;
            let time = times.split_whitespace().next()?.parse::<u64>().ok()?;
            name.starts_with("reactor-").then_some((name, time))
        })
        .collect();
    times.sort();
    times.into_iter().map(|t| t.1).collect()
}

#[test]
fn queues_are_only_on_the_reactors_of_their_disk() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    let missing = ["--reactors", "2", "--on-reactors", "1-2"];
    let serve =
        [&["serve", image.to_str().unwrap(), "--vhost-user", "never"][..], &missing].concat();
    let refused = blockyard(&serve);
    let what = "there is no reactor 2: the server has 2, from 0 on";
    assert!(!refused.status.success() && refused.err.contains(what), "{}", refused.err);
    let daemon =
        Daemon::serve(&image, &socket, &["--queues", "4", "--reactors", "2", "--on-reactors", "1"]);
    let before = reactors(&daemon);
    let report = measure(&LoadOptions {
        rw: Pattern::Randrw,
        queues: 4,
        depth: 16,
        ops: Some(20_000),
        ..LoadOptions::for_socket(socket.clone())
    });
    assert_eq!(report.unwrap().errors, 0);
    let used: Vec<_> =
        reactors(&daemon).iter().zip(before).map(|(after, before)| after - before).collect();
    // The other reactor only answers commands to all of them.
    assert!(used[0] * 4 < used[1], "{used:?} ns");
    daemon.stop();
}

#[test]
fn queues_are_distributed_to_all_reactors() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    for packed in [false, true] {
        let daemon = Daemon::serve(&image, &socket, &["--queues", "4", "--reactors", "2"]);
        let before = reactors(&daemon);
        assert_eq!(before.len(), 2);
        let report = measure(&LoadOptions {
            rw: Pattern::Randrw,
            queues: 4,
            depth: 16,
            ops: Some(20_000),
            flush_every: 50,
            verify: true,
            packed,
            ..LoadOptions::for_socket(socket.clone())
        });
        let report = report.unwrap();
        assert_eq!((report.errors, report.first_error), (0, None));
        assert!(report.verified_blocks > 1000, "{} blocks: no load", report.verified_blocks);
        let used: Vec<_> =
            reactors(&daemon).iter().zip(before).map(|(after, before)| after - before).collect();
        let (least, most) = (used.iter().min().unwrap(), used.iter().max().unwrap());
        assert!(least * 4 > *most, "one reactor does the other's work: {used:?} ns");
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
    let start = Instant::now();
    let report = measure(&load).unwrap();
    assert!((800..1200).contains(&report.errors), "{} of 4000", report.errors);
    let log = daemon.stop();
    let warnings = complaints(&log).len();
    // One more for each second.
    let most = 5 + start.elapsed().as_secs() as usize;
    assert!(
        (1..=most).contains(&warnings),
        "a thousand errors are not a thousand lines: {warnings}"
    );
}
