//! The times in the statistics of a disk.

use std::sync::atomic::Ordering;

use blockyard_bench::client::LoadOptions;

use crate::common::{Daemon, Folder, Signal};
use crate::disks::{Disks, disk, good};
use crate::figures::Figures;
use crate::guest::Guest;

/// Returns the number after `name` in the statistics line of a kind, in microseconds.
fn microseconds(log: &str, kind: &str, name: &str) -> f64 {
    let line = log.lines().find(|line| line.contains(&format!(" {kind}: ")));
    let number = line.and_then(|line| {
        let rest = line.split_once(name)?.1.split_whitespace().next()?;
        rest.trim_end_matches([',', ';']).parse().ok()
    });
    number.unwrap_or_else(|| panic!("no {name}of {kind}: {log}"))
}

#[test]
fn queue_time_and_service_time_are_reported_separately() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 4 << 20), folder.join("s"));
    let filters = ["--filter", "delay:read=20ms", "--filter", "delay:flush=5ms"];
    let daemon = Daemon::serve(&image, &socket, &filters);
    let load = LoadOptions { depth: 8, ops: Some(200), ..LoadOptions::for_socket(socket.clone()) };
    let report = good(&load);
    figures.row("ms of a read of 20 ms, at the client", report.latency_us.p50 / 1e3, 19.5..22.0);
    let mut guest = Guest::connect(&socket);
    guest.flush();
    let from = daemon.log().len();
    daemon.signal(Signal::USR1);
    let log = daemon.wait_log_after(from, "flush: ");
    let ms = |kind: &str, time: &str| microseconds(&log, kind, &format!("{time} time p50 ")) / 1e3;
    figures.row("ms of service of a read of 20 ms", ms("read", "service"), 19.5..22.0);
    // The disk has all requests of a batch at once. One that waited for another would wait for the
    // delay of that one.
    figures.row("ms of the same read in the queue", ms("read", "queue"), 0.0..5.0);
    figures.row("ms of service of a flush of 5 ms", ms("flush", "service"), 4.9..7.0);
    daemon.stop();
    figures.judge();
}

/// A device model with four servers of 5 ms: 800 reads per second.
const DEVICE: &str = "image = \"delay:1G,parallel=4,read=5ms,device=d\"";

/// `daemon/shares.rs` checks that these times are there.
#[test]
fn a_share_shows_for_what_its_requests_wait() {
    let mut figures = Figures::default();
    let with_device = |name: &str| disk(name, "").replace("image = \"null:1G\"", DEVICE);
    let disks = Disks::start(&format!(
        "reactors = 2\n{}{}{}",
        disk("limited", "iops = 200"),
        with_device("thrash"),
        with_device("polite")
    ));
    let ms = |disk: &str, before: &str| {
        let line = disks.share(disk);
        let number = line.split_once(before).and_then(|(_, rest)| rest.split_once(" us"));
        let number = number.and_then(|(number, _)| number.parse::<f64>().ok());
        number.unwrap_or_else(|| panic!("no {before:?}: {line}")) / 1e3
    };
    good(&LoadOptions { depth: 10, ops: Some(60), ..disks.load("limited") });
    let what = "ms of wait for a limit of 200/s, with 10 in flight";
    // The first ones do not wait, and the later ones wait for 50 ms.
    figures.row(what, ms("limited", "mean wait "), 25.0..51.0);
    good(&LoadOptions { depth: 2, ops: Some(40), ..disks.load("polite") });
    let what = "ms of service of a device of 5 ms";
    figures.row(what, ms("polite", "mean service time "), 3.0..6.0);
    let thrash = LoadOptions { depth: 256, runtime: 120.0, ..disks.load("thrash") };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| good(&thrash));
        disks.daemon.until_served("read", "thrash");
        // The client has 200 operations in flight, of which the device serves four at a time.
        good(&LoadOptions { depth: 200, ops: Some(400), ..disks.load("polite") });
        thrash.over.store(true, Ordering::Relaxed);
        client.join().unwrap();
    });
    for name in ["polite", "thrash"] {
        let what = format!("ms of wait for the device, of the disk {name:?}");
        figures.row(&what, ms(name, "limits, "), 5.0..1000.0);
    }
    disks.daemon.stop();
    figures.judge();
}
