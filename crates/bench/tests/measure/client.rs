//! `bench client` on NBD exports, and its discards on all targets.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockyard_bench::client::report::Report;
use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_bench::targets::nbd;
use serde_json::Value;

use crate::common::{BLOCKYARD, Daemon, Folder, allocated, blockyard};
use crate::nbd_server;

/// Serves an image as the NBD export `disk`, and returns its URI.
fn serve(image: &Path, socket: &Path) -> (Daemon, String) {
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg(image).args(["--nbd-name", "disk", "--nbd"]);
    command.arg(format!("unix:{}", socket.display()));
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    (daemon, format!("nbd+unix:///disk?socket={}", socket.display()))
}

fn on_nbd(uri: &str) -> LoadOptions {
    let nbd = Some(nbd::parse(uri).unwrap());
    LoadOptions { nbd, socket: None, seed: Some(1), ..LoadOptions::for_socket("unused".into()) }
}

#[track_caller]
fn good(options: &LoadOptions) -> Report {
    let report = measure(options).unwrap();
    assert_eq!((report.errors, &report.first_error), (0, &None));
    report
}

#[test]
fn loads_on_nbd_are_verified_at_a_depth() {
    let folder = Folder::new();
    let (daemon, uri) = serve(&folder.image("disk", 16 << 20), &folder.join("n"));
    let load = LoadOptions { rw: Pattern::Randrw, verify: true, ..on_nbd(&uri) };
    let report = good(&LoadOptions { queues: 2, flush_every: 50, ops: Some(2000), ..load.clone() });
    assert_eq!((report.target.kind, report.target.capacity_bytes), ("nbd", 16 << 20));
    assert!(report.flushes > 0 && report.verified_blocks > 100, "{report}");
    let flushed = LoadOptions { queues: 2, end_flush: true, ops: Some(100), ..load.clone() };
    assert_eq!(good(&flushed).flushes, 2, "each queue ends with one");
    let large = LoadOptions { bs: 512 << 10, depth: 4, ops: Some(60), ..load };
    assert!(good(&large).verified_blocks > 10);
    let timed = LoadOptions { warmup: 0.0, runtime: 0.2, ..on_nbd(&uri) };
    assert!(good(&timed).seconds > 0.0);

    let json = ["bench", "client", "--nbd", &uri, "--ops", "10", "--json"];
    let json: Value = serde_json::from_str(&blockyard(json).good()).unwrap();
    assert_eq!((&json["operations"], &json["options"]["nbd"]), (&10.into(), &uri.clone().into()));
    let refused = |arguments: &[&str], says: &str| {
        let done = blockyard(["bench", "client", "--nbd"].iter().chain(arguments));
        assert!(done.err.contains(says), "{}", done.err);
        done.status.code()
    };
    assert_eq!(refused(&["nbds://host/disk"], "without TLS"), Some(2));
    assert_eq!(refused(&[&uri, "--bs", "100"], "a multiple of 512"), Some(2));
    assert_eq!(refused(&[&uri, "--depth", "32768", "--bs", "1g"], "the most"), Some(2));
    assert_eq!(refused(&[&uri, "--packed"], "cannot be used with"), Some(2));
    let none = uri.replace("disk", "none");
    assert_eq!(refused(&[&none, "--ops", "1"], "no such export"), Some(1));
    daemon.stop();
}

#[test]
fn another_nbd_server_serves_the_load_too() {
    let folder = Folder::new();
    let (_server, uri) = nbd_server(&folder, &folder.image("disk", 8 << 20));
    let load = LoadOptions { rw: Pattern::Randrw, verify: true, ..on_nbd(&uri) };
    assert!(good(&LoadOptions { flush_every: 20, ops: Some(400), ..load }).flushes > 0);
}

/// Creates an image of 4 MiB without holes.
fn full(folder: &Folder) -> PathBuf {
    let image = folder.join("disk");
    std::fs::write(&image, vec![7; 4 << 20]).unwrap();
    image
}

#[test]
fn discards_free_space_on_each_target() {
    let folder = Folder::new();
    let discards = |load: LoadOptions| {
        let (rw, bs, ops, seed) = (Pattern::Randtrim, 64 << 10, Some(100), Some(1));
        let report = good(&LoadOptions { rw, bs, ops, seed, depth: 8, ..load });
        assert_eq!((report.discards, report.operations, report.reads), (100, 100, 0));
        assert_eq!(report.bytes_per_second, 0.0);
        // A hundred random places of 64 KiB reach more than half of the disk.
        let left = allocated(&folder.join("disk"));
        assert!(left < 2 << 20, "{left} bytes are still allocated");
    };
    discards(LoadOptions::for_file(full(&folder)));
    let socket = folder.join("s");
    let daemon = Daemon::serve(full(&folder), &socket, &[]);
    discards(LoadOptions::for_socket(socket));
    daemon.stop();
    let (daemon, uri) = serve(&full(&folder), &folder.join("n"));
    discards(on_nbd(&uri));
    let refused = measure(&LoadOptions { rw: Pattern::Randtrim, verify: true, ..on_nbd(&uri) });
    assert!(refused.unwrap_err().to_string().contains("--verify"));
    daemon.stop();
}
