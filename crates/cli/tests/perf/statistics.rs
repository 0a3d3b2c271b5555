//! The times in the statistics of a disk.

use blockyard_bench::client::LoadOptions;

use crate::common::{Daemon, Folder, Signal};
use crate::disks::good;
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
