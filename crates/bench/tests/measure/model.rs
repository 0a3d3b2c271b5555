//! The model of a device (`delay:`) in a whole server: it serves every operation. Its times are
//! tested on a simulated clock, in the crate `disk`; `tests/perf` measures its rates.

use std::thread;

use serde_json::Value;

use super::*;

/// A simulated device with 32 servers.
const IMAGE: &str = "delay:1G,parallel=32,read=4ms,write=8ms,bandwidth=64M";

/// Runs `bench client --json`, and returns its report.
fn client(socket: &Path, options: &[&str]) -> Value {
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "client", "--json", "--seed", "1"]).args(options).arg(socket);
    serde_json::from_str(&run(&mut command, TOOL).good()).unwrap()
}

/// Fails if the report counts other operations, or has no figure for their rate or duration.
#[track_caller]
fn has_done(report: &Value, reads: u64, writes: u64) {
    assert_eq!((&report["reads"], &report["writes"]), (&reads.into(), &writes.into()), "{report}");
    assert_eq!((&report["errors"], &report["operations"]), (&0.into(), &(reads + writes).into()));
    for figure in [&report["iops"], &report["seconds"], &report["latency_us"]["p50"]] {
        assert!(figure.as_f64() > Some(0.0), "{report}");
    }
}

#[test]
fn a_model_serves_all_operations() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let daemon = Daemon::serve(IMAGE, &socket, &[]);
    has_done(&client(&socket, &["--bs", "512", "--depth", "256", "--ops", "1000"]), 1000, 0);
    let writes = ["--bs", "1m", "--depth", "64", "--ops", "64", "--rw", "randwrite"];
    has_done(&client(&socket, &writes), 0, 64);
    daemon.stop();
}

/// The disks run on different reactors.
#[test]
fn disks_of_one_device_serve_all_operations() {
    let folder = Folder::new();
    let sockets = [folder.join("0"), folder.join("1")];
    let disk = |(n, s): (usize, &std::path::PathBuf)| {
        format!(
            "[[disk]]\nname = \"{n}\"\nimage = \"{IMAGE},device=both\"\nvhost-user = \"{}\"\n",
            s.display()
        )
    };
    let config = folder.join("config");
    let disks: String = sockets.iter().enumerate().map(disk).collect();
    std::fs::write(&config, format!("reactors = 2\n{disks}")).unwrap();
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&config));
    daemon.wait_ready();
    thread::scope(|scope| {
        for socket in &sockets {
            let options = ["--bs", "512", "--depth", "256", "--ops", "1000"];
            scope.spawn(move || has_done(&client(socket, &options), 1000, 0));
        }
    });
    daemon.stop();
}

#[test]
fn before_an_image_it_stores() {
    let folder = Folder::new();
    let (socket, image) = (folder.join("s"), folder.image("disk", 16 << 20));
    let model =
        format!("delay:file={},parallel=8,read=20ms,write=40ms,flush=20ms", image.display());
    let daemon = Daemon::serve(&model, &socket, &[]);
    let second =
        ["serve", &model, "--vhost-user", folder.join("t").to_str().unwrap()].map(String::from);
    assert!(blockyard(second).err.contains("is in use by"), "the image is locked");
    let options = [
        "--verify",
        "--rw",
        "randrw",
        "--bs",
        "4k",
        "--depth",
        "32",
        "--ops",
        "300",
        "--flush-every",
        "100",
    ];
    let verified = client(&socket, &options);
    let figure = |name: &str| verified[name].as_f64().unwrap();
    assert!(figure("seconds") > 0.0 && figure("verified_blocks") > 0.0, "{verified}");
    // The flushes come in addition.
    assert!(figure("reads") + figure("writes") == 300.0 - figure("flushes"), "{verified}");
    assert!(figure("flushes") > 0.0, "{verified}");
    daemon.stop();
    let written =
        std::fs::read(&image).unwrap().chunks(4096).filter(|block| *block != [0; 4096]).count();
    assert!((100..300).contains(&written), "{written} blocks are in the image");
}
