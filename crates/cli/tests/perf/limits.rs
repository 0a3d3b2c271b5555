//! Limits and groups: the rates that they allow, and how soon a change takes effect.
//!
//! The disks are `null:`, which has no cost of its own, so the test measures only the limits.

use std::sync::atomic::Ordering;
use std::time::Instant;

use blockyard_bench::client::LoadOptions;
use blockyard_bench::client::report::Report;
use blockyard_bench::client::workload::Pattern;

use crate::common::{Daemon, Folder};
use crate::disks::{Disks, disk, good};
use crate::figures::Figures;

fn load(disks: &Disks, disk: &str) -> LoadOptions {
    LoadOptions { warmup: 0.3, runtime: 2.0, ..disks.load(disk) }
}

#[test]
fn limits_are_reached_and_not_exceeded() {
    let mut figures = Figures::default();
    let disks = Disks::start(&format!(
        "reactors = 2\n{}{}{}{}",
        disk("iops", "iops = 3000\nqueues = 2"),
        disk("writes", "iops-write = 1500"),
        disk("bps", "bps = \"40M\""),
        disk("both", "bps-read = \"64M\"\niops-read = 500\nbps-write = 1")
    ));
    let found = good(&LoadOptions { queues: 2, ..load(&disks, "iops") }).iops;
    figures.near("iops of a limit of 3000", found, 3000.0, 0.02);
    let report = good(&LoadOptions { rw: Pattern::Randrw, ..load(&disks, "writes") });
    figures.near(
        "writes/s of a limit of 1500",
        report.writes as f64 / report.seconds,
        1500.0,
        0.02,
    );
    for (bs, depth) in [(4096, 32), (256 << 10, 4)] {
        let found = good(&LoadOptions { bs, depth, ..load(&disks, "bps") }).bytes_per_second;
        figures.near(
            &format!("MiB/s of a limit of 40, operations of {bs}"),
            found / 1048576.0,
            40.0,
            0.02,
        );
    }
    // The lower one of the two limits applies.
    for (bs, depth, rate) in [(4096, 32, 500.0), (256 << 10, 8, 256.0)] {
        let found = good(&LoadOptions { bs, depth, ..load(&disks, "both") }).iops;
        figures.near(
            &format!("reads/s of 500/s and 64 MiB/s, operations of {bs}"),
            found,
            rate,
            0.02,
        );
    }
    disks.daemon.stop();
    figures.judge();
}

#[test]
fn a_burst_lasts_for_its_length() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let socket = folder.join("s");
    let daemon = Daemon::serve("null:1G", &socket, &["--iops", "500,max=4000,length=1"]);
    // The disk admits 4000 requests in the first second, then 500 per second. The client counts
    // completions, which arrive a moment later.
    let took = good(&LoadOptions { ops: Some(4500), ..LoadOptions::for_socket(socket) }).seconds;
    figures.row("s for 4500 operations, 500/s with a burst of 4000", took, 1.95..2.05);
    daemon.stop();
    figures.judge();
}

#[test]
fn a_change_takes_effect_within_100_ms() {
    let mut figures = Figures::default();
    let text = |keys: &str| disk("a", keys);
    // A limit of one sector in 6 s.
    const SLOW: &str = "bps = 85";
    let disks = Disks::start(&text(SLOW));
    let mut guest = disks.guest("a");
    // The first request empties the token bucket.
    guest.read(0, 512).unwrap();
    for keys in ["iops = 5000", "bps = \"1G\"", "", "weight = 5"] {
        let from = disks.daemon.log().len();
        let waits = std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                guest.read(0, 512).unwrap();
                Instant::now()
            });
            disks.until_waiting("a", 1);
            let sent = disks.begin_reload(&text(keys));
            waits.join().unwrap() - sent
        });
        figures.row(&format!("s until {keys:?} is in effect"), waits.as_secs_f64(), 0.0..0.1);
        disks.daemon.wait_log_after(from, "changed without closing it: ");
        // Change the limit back.
        let from = disks.daemon.log().len();
        disks.begin_reload(&text(SLOW));
        disks.daemon.wait_log_after(from, "changed without closing it: ");
        guest.read(0, 512).unwrap();
    }
    disks.daemon.stop();
    figures.judge();
}

#[test]
fn disks_of_a_group_share_its_rate_evenly() {
    let mut figures = Figures::default();
    let group = "[group.g]\niops = 2000\n";
    let disks = format!("{}{}", disk("a", "group = \"g\""), disk("b", "group = \"g\""));
    let disks = Disks::start(&format!("reactors = 2\n{group}{disks}"));
    let reports: Vec<Report> = std::thread::scope(|scope| {
        let clients: Vec<_> = [("a", 64), ("b", 8)]
            .map(|(name, depth)| LoadOptions { depth, ..load(&disks, name) })
            .map(|load| scope.spawn(move || good(&load)))
            .into();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let all: f64 = reports.iter().map(|report| report.iops).sum();
    figures.near("iops of a group's limit of 2000", all, 2000.0, 0.02);
    figures.row("part of the disk with depth 64 of 72", reports[0].iops / all, 0.45..0.55);
    disks.daemon.stop();
    figures.judge();
}

/// A device model with four servers of 5 ms: 800 reads per second.
const DEVICE: &str = "image = \"delay:1G,parallel=4,read=5ms,device=d\"";

/// Runs the test in both orders of connection, because the share of a disk must not depend on the
/// order.
#[test]
fn a_disk_gets_half_of_a_device_beside_a_thrasher() {
    let mut figures = Figures::default();
    let with_device = |name: &str| disk(name, "").replace("image = \"null:1G\"", DEVICE);
    for polite_is_first in [true, false] {
        let disks = Disks::start(&format!(
            "reactors = 2\n{}{}",
            with_device("thrash"),
            with_device("polite")
        ));
        if polite_is_first {
            good(&LoadOptions { depth: 2, ..load(&disks, "polite") });
        }
        let thrash = LoadOptions { depth: 256, runtime: 120.0, ..load(&disks, "thrash") };
        std::thread::scope(|scope| {
            let client = scope.spawn(|| good(&thrash));
            disks.daemon.until_served("read", "thrash");
            let polite = good(&LoadOptions { depth: 16, ..load(&disks, "polite") }).iops;
            let first = if polite_is_first { "it was first" } else { "the thrasher was first" };
            figures.row(
                &format!("reads/s of 800 beside a thrasher; {first}"),
                polite,
                300.0..500.0,
            );
            thrash.over.store(true, Ordering::Relaxed);
            client.join().unwrap();
        });
        disks.daemon.stop();
    }
    figures.judge();
}
