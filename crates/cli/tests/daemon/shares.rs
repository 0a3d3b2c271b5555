//! Limits and groups, from the command line and the configuration, and their change under load.
//!
//! These tests wait for events: requests that a limit holds, until a reload removes it. The tests
//! of the throttle check times and bursts on a simulated clock, and `tests/perf` measures the
//! rates.

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{Data, Plan, request, status};

use crate::common::{Daemon, Folder, is_of_watchdog};
use crate::disks::{Disks, disk, good};
use crate::guest::{ANSWER, Guest};
use crate::killed::Over;

/// A limit that admits a request of one sector at once, and the next one after 512 s: longer than
/// any test waits.
const SLOW: &str = "bps = 1";

/// Requests that a limit of one operation per second completes within no time that a test waits.
const MANY: u64 = 1000;

/// Fails if a limit of one operation per second does not hold requests of this kind. The
/// configuration `free` has no limit.
#[track_caller]
fn held(disks: &Disks, name: &str, rw: Pattern, free: &str) {
    let kind = if rw == Pattern::Randread { "read" } else { "write" };
    // The client always has requests that wait.
    let load = LoadOptions { rw, depth: 25, runtime: 3600.0, ..disks.load(name) };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| good(&load));
        let over = Over(&load.over);
        // The log has no line about the share before that.
        disks.daemon.until_served(kind, name);
        disks.until_waiting(name, 1);
        let before = disks.daemon.served(kind, name);
        disks.reload(free, "changed without closing it: ");
        disks.daemon.until_served_more_than(before + MANY, kind, name);
        drop(over);
        client.join().unwrap();
    });
}

#[test]
fn each_limit_holds_the_requests_of_its_kind() {
    let (read, write) = (Pattern::Randread, Pattern::Randwrite);
    // Each admits one request of 4096 bytes per second. The lower one of two limits applies.
    let limits = [
        ("iops", "iops = 1", read, None),
        ("bps", "bps = 4096", write, None),
        ("reads", "iops-read = 1\nbps-read = \"64M\"", read, Some(write)),
        ("writes", "iops-write = 1", write, Some(read)),
        ("bytes-read", "bps-read = 4096\niops-read = 500", read, Some(write)),
        ("bytes-written", "bps-write = 4096", write, Some(read)),
    ];
    let text = |free: &str| {
        let disks = limits.map(|(name, keys, ..)| disk(name, if name == free { "" } else { keys }));
        disks.concat()
    };
    let disks = Disks::start(&text(""));
    for (name, _, held_kind, other_kind) in limits {
        if let Some(rw) = other_kind {
            good(&LoadOptions { rw, ops: Some(100), ..disks.load(name) });
            let share = disks.share(name);
            assert!(share.contains("mean wait 0 us for the disk's limits"), "{share}");
        }
        held(&disks, name, held_kind, &text(name));
        disks.reload(&text(""), "changed without closing it: ");
    }
    disks.daemon.stop();
}

#[test]
fn a_changed_limit_applies_to_waiting_requests() {
    let changes = [("a", "iops = 5000"), ("b", "bps = \"1G\""), ("c", ""), ("d", "weight = 5")];
    let mut keys = changes.map(|(name, _)| (name, SLOW));
    let text = |keys: &[(&str, &str)]| {
        keys.iter().map(|(name, keys)| disk(name, keys)).collect::<String>()
    };
    let disks = Disks::start(&text(&keys));
    for (at, change) in changes.into_iter().enumerate() {
        let name = change.0;
        let mut guest = disks.guest(name);
        guest.read(0, 512).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(move || guest.read(0, 512).unwrap());
            disks.until_waiting(name, 1);
            keys[at] = change;
            disks.reload(&text(&keys), "changed without closing it: ");
            second.join().unwrap();
        });
    }
    assert!(!disks.daemon.log().contains("closing and opening"), "{}", disks.daemon.log());
    disks.daemon.stop();
}

#[test]
fn limits_can_change_under_load() {
    let text = |keys: &str| disk("a", keys);
    let disks = Disks::start(&text(""));
    let load = LoadOptions { runtime: 3600.0, ..disks.load("a") };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| good(&load));
        let over = Over(&load.over);
        disks.daemon.until_served("read", "");
        for round in 0..10 {
            disks.reload(&text(&format!("iops = {}", 100 + round)), "changed without closing it: ");
            disks.reload(&text(""), "changed without closing it: ");
        }
        disks.reload(&text("iops = 1000"), "changed without closing it: ");
        drop(over);
        client.join().unwrap();
    });
    disks.reload(&text("iops = 1"), "changed without closing it: ");
    held(&disks, "a", Pattern::Randread, &text(""));
    disks.daemon.stop();
}

#[test]
fn disks_of_a_group_share_its_limit() {
    let text = |limit: &str| {
        let group = format!("[group.g]\n{limit}\n");
        format!(
            "reactors = 2\n{group}{}{}{}",
            disk("a", "group = \"g\""),
            disk("b", "group = \"g\""),
            disk("c", "")
        )
    };
    let disks = Disks::start(&text(SLOW));
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|name| disks.guest(name));
    // Each makes a debt to the group's limit, and that of one disk does not stop the other.
    b.read(0, 512).unwrap();
    a.read(0, 512).unwrap();
    // A disk outside the group still makes progress.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| a.read(0, 512).unwrap());
        let second = scope.spawn(|| b.read(0, 512).unwrap());
        c.read(0, 512).unwrap();
        disks.until_waiting("a", 1);
        disks.until_waiting("b", 1);
        assert!(!waits.is_finished(), "the limit is that of both");
        disks.reload(&text("bps = \"1G\""), "group");
        waits.join().unwrap();
        second.join().unwrap();
    });
    assert!(!disks.daemon.log().contains("closing and opening"), "{}", disks.daemon.log());
    disks.daemon.stop();
}

#[test]
fn throttled_writes_do_not_delay_other_requests() {
    let disks = Disks::start(&disk("a", "bps-write = 1\nqueues = 2"));
    let mut guest = Guest::with(&disks.folder.join("a"), &Plan { queues: 2, ..Plan::default() });
    let [writes, others] = &mut guest.session.queues[..] else { panic!("two queues") };
    let mut write = || {
        let data = Data::ToDevice(512);
        assert_eq!(writes.call(request::OUT, 0, data, &mut [1; 512], ANSWER).unwrap(), status::OK);
    };
    write();
    std::thread::scope(|scope| {
        let waits = scope.spawn(write);
        disks.until_waiting("a", 1);
        for _ in 0..10 {
            let read = others.call(request::IN, 0, Data::FromDevice(512), &mut [0; 512], ANSWER);
            let flush = others.call(request::FLUSH, 0, Data::None, &mut [], ANSWER);
            assert_eq!((read.unwrap(), flush.unwrap()), (status::OK, status::OK));
        }
        assert!(!waits.is_finished(), "a second sector within 512 s");
        disks.reload(&disk("a", "queues = 2"), "changed without closing it: ");
        waits.join().unwrap();
    });
    disks.daemon.stop();
}

#[test]
fn only_a_change_of_group_or_device_closes_a_disk() {
    let disks = Disks::start(&format!(
        "[group.g]\n[group.h]\n{}{}",
        disk("a", "group = \"g\""),
        disk("b", "")
    ));
    let mut b = disks.guest("b");
    // The line may come after the answer to the last message.
    disks.daemon.wait_log("connected disk=\"b\"");
    for (keys, expected) in
        [("group = \"h\"", true), ("group = \"h\"\nweight = 7", false), ("device = \"d\"", true)]
    {
        let text = format!("[group.g]\n[group.h]\n{}{}", disk("a", keys), disk("b", ""));
        let log = disks.reload(
            &text,
            if expected { "serving null:1G" } else { "changed without closing it: " },
        );
        assert_eq!(log.contains("closing and opening it"), expected, "{log}");
        assert!(!log.contains("disk=\"b\""), "{log}");
        disks.guest("a").read(0, 512).unwrap();
        b.read(0, 512).unwrap();
    }
    disks.daemon.stop();
}

#[test]
fn a_reload_with_wrong_knobs_changes_nothing() {
    let disks = Disks::start(&disk("a", "iops = 1"));
    // What the server logs at its start may arrive later.
    disks.daemon.wait_log("serving ");
    for (text, expected) in [
        (
            disk("a", "iops = \"100,max=5\""),
            "line 5: iops: limit \"100,max=5\": max is less than the rate",
        ),
        (disk("a", "weight = 10001"), "line 5: weight: a weight is a number from 1 to 10000"),
        (disk("a", "group = \"g\""), "disk \"a\": there is no group \"g\""),
        (
            format!("[group.g]\nreserve-bps = 5\nbps = 4\n{}", disk("a", "")),
            "group \"g\": reserve-bps is 5",
        ),
    ] {
        let log = disks.reload(&text, expected);
        let is_other = |l: &str| l.contains("front end") || is_of_watchdog(l);
        let lines = log.lines().filter(|l| !is_other(l)).count();
        assert!(lines == 1 && log.contains("not reloaded: "), "{log}");
    }
    // The limit is what it was.
    held(&disks, "a", Pattern::Randread, &disk("a", ""));
    disks.daemon.stop();
}

#[test]
fn a_disk_with_throttled_requests_closes_at_once() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let mut daemon = Daemon::serve("null:1G", &socket, &["--bps", "1"]);
    let load = LoadOptions {
        depth: 64,
        runtime: 3600.0,
        reconnect: false,
        ..LoadOptions::for_socket(socket.clone())
    };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        daemon.until_served("read", "");
        daemon.until_waiting("", 1);
        // Each request waits for 4096 s, which is longer than the limit for the end.
        assert!(daemon.terminate().success());
        let _ = client.join().unwrap();
    });
}

/// A device model with four servers of 5 ms.
const DEVICE: &str = "image = \"delay:1G,parallel=4,read=5ms,device=d\"";

/// `tests/perf` measures the times.
#[test]
fn statistics_show_why_a_disk_is_slow() {
    let with_device =
        |name: &str, keys: &str| disk(name, keys).replace("image = \"null:1G\"", DEVICE);
    let disks = Disks::start(&format!(
        "reactors = 2\n{}{}{}",
        disk("limited", "iops = 200"),
        with_device("thrash", ""),
        with_device("polite", "")
    ));
    let figure = |disk: &str, before: &str| {
        let line = disks.share(disk);
        let number = line
            .split_once(before)
            .map(|(_, rest)| rest.split_once(" us").unwrap().0.parse::<f64>().unwrap());
        number.unwrap_or_else(|| panic!("no {before:?}: {line}"))
    };
    let limited = LoadOptions { depth: 10, runtime: 3600.0, ..disks.load("limited") };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| good(&limited));
        let over = Over(&limited.over);
        disks.daemon.until_served("read", "limited");
        disks.until_waiting("limited", 1);
        drop(over);
        client.join().unwrap();
    });
    assert!(figure("limited", "mean wait ") > 0.0, "{}", disks.share("limited"));
    assert!(disks.share("limited").contains("no device is shared"));
    // Requests on a device that no other disk uses do not wait.
    good(&LoadOptions { depth: 2, ops: Some(40), ..disks.load("polite") });
    assert_eq!(figure("polite", "mean wait "), 0.0);
    assert!(figure("polite", "mean service time ") > 0.0, "{}", disks.share("polite"));
    // The clients have more operations in flight than the device serves at a time.
    let loads = [("thrash", 256), ("polite", 200)].map(|(name, depth)| LoadOptions {
        depth,
        runtime: 3600.0,
        ..disks.load(name)
    });
    std::thread::scope(|scope| {
        let clients = loads.each_ref().map(|load| scope.spawn(|| good(load)));
        let over = loads.each_ref().map(|load| Over(&load.over));
        for name in ["thrash", "polite"] {
            disks.daemon.until_served("read", name);
            disks.until_waiting(name, 1);
        }
        drop(over);
        clients.into_iter().for_each(|client| drop(client.join().unwrap()));
    });
    for name in ["polite", "thrash"] {
        assert_eq!(figure(name, "mean wait "), 0.0);
        assert!(figure(name, "limits, ") > 0.0, "{}", disks.share(name));
    }
    disks.daemon.stop();
}
