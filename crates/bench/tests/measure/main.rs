//! `blockyard bench`: `rate`, `median` and `percentile` on a vhost-user socket and over NBD;
//! `compare` and its reports. `tests/perf` judges rates and durations on the real clock.

mod calibrate;
mod client;
#[path = "../../../cli/tests/common/mod.rs"]
mod common;
mod compare;
mod install;
mod model;
mod neighbours;
mod streams;
mod xen;

use std::path::Path;
use std::process::Command;

use common::{
    BLOCKYARD, Daemon, Finished, Folder, SOON, TOOL, blockyard, listens, run, tool, tool_command,
    until,
};

/// The program that `blockyard bench` executes.
const BENCH: &str = env!("CARGO_BIN_EXE_blockyard-bench");

fn rate(operation: &str, target: &str, options: &[&str]) -> Finished {
    blockyard(["bench", "rate", operation, target].iter().chain(options))
}

/// Parses each line that `bench median` or `percentile` prints: size in bytes, seconds, number of
/// operations.
fn figures(command: &[&str], samples: &Path) -> Vec<(u64, f64, usize)> {
    let out =
        blockyard(["bench"].iter().chain(command).map(AsRef::as_ref).chain([samples.as_os_str()]))
            .good();
    let line = |line: &str| {
        let columns: Vec<_> = line.split(' ').collect();
        (columns[0].parse().unwrap(), columns[1].parse().unwrap(), columns[2].parse().unwrap())
    };
    out.lines().map(line).collect()
}

#[test]
fn each_operation_of_a_disk_with_a_delay_is_timed() {
    let folder = Folder::new();
    let (socket, samples) = (folder.join("s"), folder.join("samples"));
    let delay = "delay:read=2ms,write=3ms,flush=2ms";
    let daemon = Daemon::serve("null:64M", &socket, &["--filter", delay]);
    for operation in ["read", "write", "writesync"] {
        let fixed = ["--ops", "20", "--min-size", "4k", "--max-size", "4k", "--seed", "1"];
        let out = rate(operation, socket.to_str().unwrap(), &fixed).good();
        std::fs::write(&samples, out).unwrap();
        let [(4096, median, 20)] = figures(&["median"], &samples)[..] else {
            panic!("{operation}: one size, 20 operations")
        };
        let [(4096, least, 20)] = figures(&["percentile", "0"], &samples)[..] else {
            panic!("{operation}: one size, 20 operations")
        };
        assert!(least > 0.0 && median >= least, "{operation}: {least} s, and {median} s");
    }
    daemon.stop();
}

/// A server of QEMU's with the export `disk` of `image`, and its URI.
fn nbd_server(folder: &Folder, image: &Path) -> (Daemon, String) {
    let socket = folder.join("n");
    let mut server = tool_command("qemu-storage-daemon");
    server.arg("--blockdev").arg(format!("driver=file,node-name=f,filename={}", image.display()));
    server.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())]);
    server.args(["--export", "type=nbd,id=e,node-name=f,name=disk,writable=on"]);
    let server = Daemon::start(&mut server);
    until("the NBD server listens", SOON, || listens(&socket));
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    (server, uri)
}

/// The input has durations whose percentiles are known.
#[test]
fn figures_are_those_that_can_be_computed() {
    let folder = Folder::new();
    let samples = folder.join("samples");
    let line = |size: u32, n: u32| format!("{size} {:.6}\n", f64::from(n) * 1e-6);
    // The durations are 0 to 1000 us, each once, because 5 and 1001 have no common divisor. They
    // are not in ascending order.
    let text: String = [512, 65536]
        .iter()
        .flat_map(|&size| (0..1001).map(move |n| line(size, n * 5 % 1001)))
        .collect();
    std::fs::write(&samples, "# size duration\n".to_string() + &text).unwrap();
    assert_eq!(figures(&["median"], &samples), [(512, 0.0005, 1001), (65536, 0.0005, 1001)]);
    for (percent, seconds) in
        [("0", 0.0), ("5", 50e-6), ("99", 990e-6), ("99.9", 999e-6), ("100", 1e-3)]
    {
        assert_eq!(
            figures(&["percentile", percent], &samples)[1],
            (65536, seconds, 1001),
            "{percent}"
        );
    }
    std::fs::write(&samples, "512 0.1\n512 fast\n").unwrap();
    let wrong = blockyard(["bench", "median", samples.to_str().unwrap()]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(wrong.err.contains("line 2") && wrong.err.contains("samples"), "{}", wrong.err);
    assert_eq!(blockyard(["bench", "percentile", "101"]).status.code(), Some(2));
}

#[test]
fn nbd_servers_are_measured() {
    let folder = Folder::new();
    let image = folder.image("disk", 8 << 20);
    let (_server, target) = nbd_server(&folder, &image);
    for operation in ["read", "write", "writesync"] {
        let out =
            rate(operation, &target, &["--ops", "50", "--max-size", "64k", "--seed", "3"]).good();
        assert_eq!(out.lines().count(), 50, "{operation}");
    }
    let written = std::fs::read(&image).unwrap();
    assert!(
        written.iter().filter(|b| **b != 0).count() > 200_000,
        "the writes are not in the image"
    );
    let refused = rate("read", &target.replace("disk", "none"), &[]);
    assert!(
        refused.status.code() == Some(1) && refused.err.contains("no such export"),
        "{}",
        refused.err
    );
}

#[test]
fn what_holds_a_file_system_is_not_written_to() {
    let folder = Folder::new();
    let image = folder.image("disk", 16 << 20);
    let name = image.to_str().unwrap();
    tool("mkfs.ext4", ["-q", "-F", name]).good();
    let before = std::fs::read(&image).unwrap();
    let refused = rate("write", name, &["--ops", "10"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.err.contains("--destroy") && refused.err.contains("ext4"), "{}", refused.err);
    rate("read", name, &["--ops", "10"]).good();
    assert!(std::fs::read(&image).unwrap() == before, "it was written to");
    let socket = folder.join("s");
    let daemon = Daemon::serve(&image, &socket, &[]);
    let refused = rate("writesync", socket.to_str().unwrap(), &["--ops", "10"]);
    assert!(refused.err.contains("ext4"), "{}", refused.err);
    rate("writesync", socket.to_str().unwrap(), &["--ops", "10", "--destroy"]).good();
    daemon.stop();
    assert!(std::fs::read(&image).unwrap() != before, "nothing was written");
}

#[test]
fn load_on_what_is_no_socket() {
    let folder = Folder::new();
    let image = folder.image("disk", 1 << 20);
    let refused = blockyard(["bench", "client", image.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(1));
    for part in [image.to_str().unwrap(), "is no socket", "--file"] {
        assert!(refused.err.contains(part), "{part}: {}", refused.err);
    }
}

/// If the reader of standard output closes it, the command ends without a message, with the status
/// of a broken pipe. The reader has got whole lines only.
#[test]
fn a_reader_that_stops_ends_the_command() {
    let folder = Folder::new();
    let image = folder.image("disk", 16 << 20);
    let script =
        format!("'{BLOCKYARD}' bench rate read '{}' --seconds 30 | head -n 5", image.display());
    let done = run(Command::new("bash").args(["-o", "pipefail", "-c", &script]), TOOL);
    assert_eq!(done.out.lines().count(), 5, "{}", done.err);
    assert_eq!(done.status.code(), Some(141), "{}", done.err);
    assert!(done.err.lines().all(|line| line.starts_with("seed ")), "{}", done.err);
}
