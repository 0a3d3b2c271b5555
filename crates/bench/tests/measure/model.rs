//! The model of a device (`delay:`): nothing is faster on the real clock than its figures say. Its
//! arithmetic is tested without a clock, in the crate `disk`; `tests/perf` measures its rates.

use std::thread;
use std::time::Instant;

use super::*;

/// A simulated device with 32 servers. A read of 512 bytes occupies one of them for 4 ms plus the
/// transfer time: 512 bytes at a 32nd of 64 MiB/s.
const IMAGE: &str = "delay:1G,parallel=32,read=4ms,write=8ms,bandwidth=64M";
const READ: f64 = 4e-3 + 512.0 * 32.0 / (64 << 20) as f64;

/// Runs `bench client --json`, and returns its report.
fn client(socket: &Path, options: &[&str]) -> serde_json::Value {
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "client", "--json", "--seed", "1"]).args(options).arg(socket);
    serde_json::from_str(&run(&mut command, TOOL).good()).unwrap()
}

fn iops(report: &serde_json::Value) -> f64 {
    report["iops"].as_f64().unwrap()
}

#[test]
fn nothing_is_faster_than_its_figures_say() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let daemon = Daemon::serve(IMAGE, &socket, &[]);
    let busy = client(&socket, &["--bs", "512", "--depth", "256", "--ops", "4000"]);
    not_faster("reads", iops(&busy), 32.0 / READ);
    // The device serves 32 writes of 1 MiB at a time, and each write takes 0.508 s. So 64 writes
    // take twice that time.
    let busy =
        client(&socket, &["--bs", "1m", "--depth", "64", "--ops", "64", "--rw", "randwrite"]);
    not_shorter("64 MiB", busy["seconds"].as_f64().unwrap(), 2.0 * 0.508);
    // A read takes the same time alone and together with 31 others, because each has its own
    // server.
    for depth in ["1", "32"] {
        let idle = client(&socket, &["--bs", "512", "--depth", depth, "--ops", "64"]);
        not_shorter(depth, idle["latency_us"]["p50"].as_f64().unwrap() / 1e6, READ * 0.98);
    }
    daemon.stop();
}

/// The disks run on different reactors.
#[test]
fn disks_of_one_device_are_not_faster_than_it() {
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
    let start = Instant::now();
    thread::scope(|scope| {
        for socket in &sockets {
            scope
                .spawn(move || client(socket, &["--bs", "512", "--depth", "256", "--ops", "4000"]));
        }
    });
    not_faster("both", 8000.0 / start.elapsed().as_secs_f64(), 32.0 / READ);
    daemon.stop();
}

#[test]
fn before_an_image_it_takes_its_time_and_stores() {
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
    not_shorter(
        "all",
        figure("seconds"),
        (figure("reads") * 20e-3 + figure("writes") * 40e-3) / 8.0,
    );
    daemon.stop();
    let written =
        std::fs::read(&image).unwrap().chunks(4096).filter(|block| *block != [0; 4096]).count();
    assert!((100..300).contains(&written), "{written} blocks are in the image");
}
