//! Limits and groups, on the command line and in the configuration, and their change while guests are at work.
//!
//! Disks lie on `null:`, which costs nothing: what is measured is what the limits let pass.

use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_bench::client::report::Report;
use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{Options, measure};
use blockyard_bench::driver::{Data, Plan, request, status};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, Signal, at_last, holds, until};
use crate::guest::{ANSWER, Guest};

struct Yard {
    daemon: Daemon,
    folder: Folder,
}

impl Yard {
    /// `FOLDER` in the text is the folder of the sockets.
    fn start(text: &str) -> Self {
        let folder = Folder::new();
        write(&folder, text);
        let mut daemon = Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(folder.join("toml")));
        daemon.wait_ready();
        Yard { daemon, folder }
    }

    /// Has another text read; when it was told to.
    fn reload(&self, text: &str) -> Instant {
        write(&self.folder, text);
        self.daemon.signal(Signal::HUP);
        Instant::now()
    }

    fn guest(&self, disk: &str) -> Guest {
        Guest::connect(&self.folder.join(disk))
    }

    fn load(&self, disk: &str) -> Options {
        Options { warmup: 0.3, runtime: 2.0, ..Options::for_socket(self.folder.join(disk)) }
    }
}

fn write(folder: &Folder, text: &str) {
    std::fs::write(folder.join("toml"), text.replace("FOLDER", folder.to_str().unwrap())).unwrap();
}

/// A disk's table, with more keys.
fn disk(name: &str, keys: &str) -> String {
    format!("[[disk]]\nname = \"{name}\"\nimage = \"null:1G\"\nvhost-user = \"FOLDER/{name}\"\n{keys}\n")
}

fn good(options: &Options) -> Report {
    let report = measure(options).unwrap();
    assert_eq!((report.errors, &report.first_error, report.reconnects), (0, &None, 0));
    report
}

/// Within 2% of the rate, unless the machine is so busy that it cannot be said: then another time. (Completions that come late
/// count for a time that is not theirs; that never more begin than may is proved where the time is simulated.)
#[track_caller]
fn at_rate(what: &str, rate: f64, mut found: impl FnMut() -> f64) {
    at_last(|| {
        let found = found();
        assert!(found <= rate * 1.10, "{what}: {found} a second, and the limit is {rate}");
        holds((found / rate - 1.0).abs() < 0.02, || format!("{what}: {found} a second, and the limit is {rate}"))
    });
}

#[test]
fn limits_hold_for_seconds() {
    let yard = Yard::start(&format!(
        "reactors = 2\n{}{}{}{}",
        disk("iops", "iops = 3000\nqueues = 2"),
        disk("writes", "iops-write = 1500"),
        disk("bps", "bps = \"40M\""),
        disk("both", "bps-read = \"64M\"\niops-read = 500\nbps-write = 1")
    ));
    let queues = Options { queues: 2, ..yard.load("iops") };
    at_rate("operations", 3000.0, || good(&queues).iops);
    let mixed = Options { rw: Pattern::Randrw, ..yard.load("writes") };
    at_rate("writes", 1500.0, || {
        let report = good(&mixed);
        assert!(report.reads > report.writes / 2, "reads are not limited");
        report.writes as f64 / report.seconds
    });
    for (bs, depth) in [(4096, 32), (256 << 10, 4)] {
        let options = Options { bs, depth, ..yard.load("bps") };
        at_rate(&format!("bytes in operations of {bs}"), (40u64 << 20) as f64, || good(&options).bytes_per_second);
    }
    // Of two the one that is reached first.
    let small = Options { bs: 4096, ..yard.load("both") };
    at_rate("small reads", 500.0, || good(&small).iops);
    let large = Options { bs: 256 << 10, depth: 8, ..yard.load("both") };
    at_rate("large reads", 256.0, || good(&large).iops);
    yard.daemon.stop();
}

#[test]
fn a_burst_is_spent_once() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let daemon = Daemon::serve("null:1G", &socket, &["--iops", "500,max=4000,length=1"]);
    // 4000 in the first second, 500 a second behind it; the client counts completions, which come a moment late.
    at_last(|| {
        let took = good(&Options { ops: Some(4500), ..Options::for_socket(socket.clone()) }).seconds;
        assert!(took > 1.95, "{took} s for 4500 operations");
        if took >= 2.05 {
            // Until it is full again.
            std::thread::sleep(Duration::from_secs(8));
            return Err(format!("{took} s for 4500 operations"));
        }
        Ok(())
    });
    daemon.stop();
}

#[test]
fn a_change_reaches_who_waits_within_100_ms() {
    let text = |keys: &str| disk("a", keys);
    // A sector every 6 s.
    const SLOW: &str = "bps = 85";
    let yard = Yard::start(&text(SLOW));
    let mut guest = yard.guest("a");
    // The first one empties the bucket.
    guest.read(0, 512).unwrap();
    for keys in ["iops = 5000", "bps = \"1G\"", "", "weight = 5"] {
        at_last(|| {
            let from = yard.daemon.log().len();
            let waits = std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    guest.read(0, 512).unwrap();
                    Instant::now()
                });
                std::thread::sleep(Duration::from_millis(300));
                assert!(!waits.is_finished(), "a second read within 6 s passes at once");
                let told = yard.reload(&text(keys));
                waits.join().unwrap() - told
            });
            // Far below what is left of the 6 s.
            assert!(waits < Duration::from_secs(3), "{keys}: {waits:?}");
            yard.daemon.wait_log_after(from, "changed while it is in use: ");
            // And back.
            let from = yard.daemon.log().len();
            yard.reload(&text(SLOW));
            yard.daemon.wait_log_after(from, "changed while it is in use: ");
            guest.read(0, 512).unwrap();
            holds(waits < Duration::from_millis(100), || format!("{keys}: {waits:?}"))
        });
    }
    assert!(!yard.daemon.log().contains("closing it"), "{}", yard.daemon.log());
    yard.daemon.stop();
}

/// The limit comes and goes under load, and holds from 100 ms after it came.
#[test]
fn limits_change_under_load() {
    let text = |keys: &str| disk("a", keys);
    let yard = Yard::start(&text(""));
    let load = Options { runtime: 120.0, ..yard.load("a") };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| good(&load));
        yard.daemon.until_served("read", "");
        for round in 0..10 {
            yard.reload(&text(&format!("iops = {}", 100 + round)));
            std::thread::sleep(Duration::from_millis(200));
            yard.reload(&text(""));
            std::thread::sleep(Duration::from_millis(200));
        }
        yard.reload(&text("iops = 1000"));
        std::thread::sleep(Duration::from_millis(500));
        load.over.store(true, Ordering::Relaxed);
        let report = client.join().unwrap();
        // (With limits all the time some thousands, at most.)
        assert!(report.operations > 10_000, "without a limit it is faster: {} operations", report.operations);
    });
    let limited = yard.load("a");
    at_rate("after many changes", 1000.0, || good(&limited).iops);
    yard.daemon.stop();
}

#[test]
fn disks_of_a_group_share_its_limit() {
    let text = |rate: u32| {
        let group = format!("[group.g]\niops = {rate}\n");
        format!("reactors = 2\n{group}{}{}{}", disk("a", "group = \"g\""), disk("b", "group = \"g\""), disk("c", ""))
    };
    let yard = Yard::start(&text(2000));
    let both = |rate: f64| {
        at_last(|| {
            let reports: Vec<Report> = std::thread::scope(|scope| {
                let clients: Vec<_> = [("a", 64), ("b", 8)]
                    .map(|(name, depth)| Options { depth, ..yard.load(name) })
                    .map(|load| scope.spawn(move || good(&load)))
                    .into();
                clients.into_iter().map(|client| client.join().unwrap()).collect()
            });
            let all: f64 = reports.iter().map(|report| report.iops).sum();
            assert!(all <= rate * 1.10, "both: {all} a second, and the limit is {rate}");
            let part = reports[0].iops / all;
            let good = (all / rate - 1.0).abs() < 0.02 && (0.45..0.55).contains(&part);
            holds(good, || format!("{} and {} a second, and the limit is {rate}", reports[0].iops, reports[1].iops))
        });
    };
    both(2000.0);
    // (More than the group may have by half, and no more than a busy machine gives.)
    assert!(good(&yard.load("c")).iops > 3000.0, "one that is not in it");
    let from = yard.daemon.log().len();
    yard.reload(&text(4000));
    yard.daemon.wait_log_after(from, "group");
    both(4000.0);
    assert!(!yard.daemon.log().contains("closing it"), "{}", yard.daemon.log());
    yard.daemon.stop();
}

#[test]
fn writes_that_wait_for_their_limit_hold_up_nothing_else() {
    // A sector every 5 s.
    let yard = Yard::start(&disk("a", "bps-write = 102\nqueues = 2"));
    let mut guest = Guest::with(&yard.folder.join("a"), &Plan { queues: 2, ..Plan::default() });
    let [writes, others] = &mut guest.session.queues[..] else { panic!("two queues") };
    let mut write = || {
        let data = Data::ToDevice(512);
        assert_eq!(writes.call(request::OUT, 0, data, &mut [1; 512], ANSWER).unwrap(), status::OK);
    };
    write();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(write);
        std::thread::sleep(Duration::from_millis(100));
        for _ in 0..10 {
            let read = others.call(request::IN, 0, Data::FromDevice(512), &mut [0; 512], ANSWER);
            let flush = others.call(request::FLUSH, 0, Data::None, &mut [], ANSWER);
            assert_eq!((read.unwrap(), flush.unwrap()), (status::OK, status::OK));
        }
        assert!(!waits.is_finished(), "what came behind the write was held up: {:?}", start.elapsed());
        waits.join().unwrap();
        assert!(start.elapsed() > Duration::from_millis(4500), "{:?}", start.elapsed());
    });
    yard.daemon.stop();
}

#[test]
fn only_another_group_or_device_closes_a_disk() {
    let yard = Yard::start(&format!("[group.g]\n[group.h]\n{}{}", disk("a", "group = \"g\""), disk("b", "")));
    let mut b = yard.guest("b");
    for (keys, said) in [("group = \"h\"", true), ("group = \"h\"\nweight = 7", false), ("device = \"d\"", true)] {
        let from = yard.daemon.log().len();
        yard.reload(&format!("[group.g]\n[group.h]\n{}{}", disk("a", keys), disk("b", "")));
        let log =
            yard.daemon.wait_log_after(from, if said { "serving null:1G" } else { "changed while it is in use: " });
        assert_eq!(log.contains("closing and opening it"), said, "{log}");
        assert!(!log.contains("disk=\"b\""), "{log}");
        yard.guest("a").read(0, 512).unwrap();
        b.read(0, 512).unwrap();
    }
    yard.daemon.stop();
}

#[test]
fn wrong_knobs_change_nothing() {
    let yard = Yard::start(&disk("a", "iops = 1"));
    let mut guest = yard.guest("a");
    guest.read(0, 512).unwrap();
    for (text, said) in [
        (disk("a", "iops = \"100,max=5\""), "line 5: iops: limit \"100,max=5\": max is less than the rate"),
        (disk("a", "weight = 10001"), "line 5: weight: a weight is a number from 1 to 10000"),
        (disk("a", "group = \"g\""), "disk \"a\": there is no group \"g\""),
        (format!("[group.g]\nreserve-bps = 5\nbps = 4\n{}", disk("a", "")), "group \"g\": reserve-bps is 5"),
    ] {
        let from = yard.daemon.log().len();
        yard.reload(&text);
        let log = yard.daemon.wait_log_after(from, said);
        let lines = log.lines().filter(|l| !l.contains("front end")).count();
        assert!(lines == 1 && log.contains("not reloaded: "), "{log}");
    }
    let start = Instant::now();
    guest.read(0, 512).unwrap();
    guest.read(0, 512).unwrap();
    assert!(start.elapsed() > Duration::from_millis(900), "the limit is what it was: {:?}", start.elapsed());
    yard.daemon.stop();
}

#[test]
fn a_limited_disk_ends_at_once() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let mut daemon = Daemon::serve("null:1G", &socket, &["--iops", "1"]);
    let load = Options { depth: 64, runtime: 30.0, reconnect: false, ..Options::for_socket(socket.clone()) };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        daemon.until_served("read", "");
        let start = Instant::now();
        assert!(daemon.terminate().success());
        // 63 wait for a second each.
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        let _ = client.join().unwrap();
    });
}

/// Four servers of 5 ms: 800 reads a second.
const DEVICE: &str = "image = \"delay:1G,parallel=4,read=5ms,device=d\"";

/// Microseconds that each operation of a disk waited for its limits and for its neighbours, and that the device took.
fn reasons(daemon: &Daemon, disk: &str) -> [f64; 3] {
    let from = daemon.log().len();
    daemon.signal(Signal::USR1);
    let of_disk = format!("disk=\"{disk}\"");
    let mut line = String::new();
    until("the log says what became of the share", SOON, || {
        let log = daemon.log()[from..].to_string();
        line = log.lines().find(|l| l.contains("share: ") && l.contains(&of_disk)).unwrap_or_default().to_string();
        !line.is_empty()
    });
    let number = |before: &str, after: &str| {
        let Some((_, rest)) = line.split_once(before) else { return f64::NAN };
        let text = rest.split_once(after).unwrap_or_else(|| panic!("no {after:?}: {line}")).0;
        text.parse().unwrap_or_else(|e| panic!("{e}: {text:?} in {line}"))
    };
    [
        number("waited ", " us for its limits"),
        number("limits, ", " us for its neighbours"),
        number("took ", " us, without"),
    ]
}

#[test]
fn why_a_disk_is_slow_is_told() {
    let with_device = |name: &str, keys: &str| disk(name, keys).replace("image = \"null:1G\"", DEVICE);
    let yard = Yard::start(&format!(
        "reactors = 2\n{}{}{}",
        disk("limited", "iops = 200"),
        with_device("thrash", ""),
        with_device("polite", "")
    ));
    // Its limit: 10 at a time, 200 a second, are 50 ms each. (What is told are means since the disk is served. A machine that
    // stands still now and then makes them longer.)
    at_last(|| {
        good(&Options { depth: 10, ..yard.load("limited") });
        let [limits, neighbours, device] = reasons(&yard.daemon, "limited");
        assert!(neighbours == 0.0 && device.is_nan(), "{neighbours} {device}");
        holds((40_000.0..60_000.0).contains(&limits), || format!("{limits} us for its limits"))
    });
    // The device: nobody else is there.
    at_last(|| {
        good(&Options { depth: 2, ..yard.load("polite") });
        let [limits, neighbours, device] = reasons(&yard.daemon, "polite");
        assert_eq!(limits, 0.0);
        let good = neighbours < 100.0 && (4_500.0..10_000.0).contains(&device);
        holds(good, || format!("{neighbours} us for its neighbours, {device} us of the device"))
    });
    // A neighbour: of 800 reads a second there are 400, and 16 at a time wait 40 ms, less what the device takes.
    let thrash = Options { depth: 256, runtime: 120.0, ..yard.load("thrash") };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| good(&thrash));
        yard.daemon.until_served("read", "thrash");
        std::thread::sleep(Duration::from_millis(500));
        at_last(|| {
            let polite = good(&Options { depth: 16, ..yard.load("polite") }).iops;
            holds((300.0..500.0).contains(&polite), || format!("{polite} a second beside a thrasher"))
        });
        thrash.over.store(true, Ordering::Relaxed);
        client.join().unwrap();
    });
    let [limits, neighbours, _] = reasons(&yard.daemon, "polite");
    assert!(limits == 0.0 && neighbours > 5_000.0, "{limits} {neighbours}");
    let [limits, neighbours, _] = reasons(&yard.daemon, "thrash");
    assert!(limits == 0.0 && neighbours > 100_000.0, "{limits} {neighbours}");
    yard.daemon.stop();
}
