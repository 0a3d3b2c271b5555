//! How the reactors divide the work.

use blockyard_bench::client::LoadOptions;
use blockyard_bench::client::workload::Pattern;

use crate::common::{Daemon, Folder};
use crate::disks::good;
use crate::figures::Figures;

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

/// Returns the part of the reactors' CPU time that reactor 0 of 2 takes under a load.
fn part_of_first(options: &[&str]) -> f64 {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    let options = [&["--queues", "4", "--reactors", "2"], options].concat();
    let daemon = Daemon::serve(&image, &socket, &options);
    let before = reactors(&daemon);
    good(&LoadOptions {
        rw: Pattern::Randrw,
        queues: 4,
        depth: 16,
        ops: Some(100_000),
        ..LoadOptions::for_socket(socket)
    });
    let used: Vec<_> =
        reactors(&daemon).iter().zip(before).map(|(after, before)| after - before).collect();
    daemon.stop();
    used[0] as f64 / used.iter().sum::<u64>() as f64
}

/// The other reactor only answers commands to all of them.
#[test]
fn a_reactor_takes_the_cpu_time_of_its_queues() {
    let mut figures = Figures::default();
    let what = "part of the CPU time of a reactor";
    figures.row(&format!("{what} with half of the queues"), part_of_first(&[]), 0.4..0.6);
    let none = part_of_first(&["--on-reactors", "1"]);
    figures.row(&format!("{what} without queues"), none, 0.0..0.05);
    figures.judge();
}
