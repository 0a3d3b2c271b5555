//! The model of a device (`delay:`): rates and latencies on the real clock are those that its figures say.

use std::thread;

use super::*;

/// 32 servers; a read of 512 bytes is one's for 4 ms and for 512 x 32 / 64 MiB.
const IMAGE: &str = "delay:1G,parallel=32,read=4ms,write=8ms,bandwidth=64M";
const READ: f64 = 4e-3 + 512.0 * 32.0 / (64 << 20) as f64;

/// What `bench client --json` says of a load.
fn client(socket: &Path, options: &[&str]) -> serde_json::Value {
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "client", "--json", "--seed", "1"]).args(options).arg(socket);
    serde_json::from_str(&run(&mut command, TOOL).good()).unwrap()
}

fn iops(report: &serde_json::Value) -> f64 {
    report["iops"].as_f64().unwrap()
}

#[test]
fn rate_and_latency_are_those_of_its_figures() {
    let _machine = alone();
    let folder = Folder::new();
    let socket = folder.join("s");
    let daemon = Daemon::serve(IMAGE, &socket, &[]);
    at_last(|| {
        let busy = client(&socket, &["--bs", "512", "--depth", "256", "--runtime", "1.5"]);
        near("reads a second", iops(&busy), 32.0 / READ, 0.02)
    });
    // 32 writes of 1 MiB end at a time, each 0.508 s: 8 times that. Nothing is faster.
    at_last(|| {
        let busy = client(&socket, &["--bs", "1m", "--depth", "64", "--ops", "256", "--rw", "randwrite"]);
        let (seconds, truth) = (busy["seconds"].as_f64().unwrap(), 8.0 * 0.508);
        assert!(seconds > truth * 0.995, "{seconds} s for what takes {truth}");
        near("seconds of 256 MiB", seconds, truth, 0.02)
    });
    // Alone, and beside others while there is a server for each.
    for depth in ["1", "32"] {
        at_last(|| {
            let idle = client(&socket, &["--bs", "512", "--depth", depth, "--runtime", "1"]);
            near(depth, idle["latency_us"]["p50"].as_f64().unwrap() / 1e6, READ, 0.10)
        });
    }
    daemon.stop();
}

/// On reactors of their own.
#[test]
fn disks_of_one_device_share_its_rate() {
    let _machine = alone();
    let folder = Folder::new();
    let sockets = [folder.join("0"), folder.join("1"), folder.join("2")];
    let image = |disk: usize| if disk == 2 { IMAGE.to_string() } else { format!("{IMAGE},device=both") };
    let disk = |(n, s): (usize, &std::path::PathBuf)| {
        format!("[[disk]]\nname = \"{n}\"\nimage = \"{}\"\nvhost-user = \"{}\"\n", image(n), s.display())
    };
    let config = folder.join("config");
    let disks: String = sockets.iter().enumerate().map(disk).collect();
    std::fs::write(&config, format!("reactors = 2\n{disks}")).unwrap();
    let mut daemon = Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&config));
    daemon.wait_ready();
    let load = |socket| client(socket, &["--bs", "512", "--depth", "256", "--warmup", "0.4", "--runtime", "1.5"]);
    at_last(|| {
        let all: Vec<f64> = thread::scope(|scope| {
            let loads: Vec<_> = sockets.iter().map(|socket| scope.spawn(move || iops(&load(socket)))).collect();
            loads.into_iter().map(|load| load.join().unwrap()).collect()
        });
        near("two of one device", all[0] + all[1], 32.0 / READ, 0.03)?;
        near("the second of them", all[1], 16.0 / READ, 0.10)?;
        near("one with a device of its own", all[2], 32.0 / READ, 0.03)
    });
    daemon.stop();
}

#[test]
fn before_an_image_it_takes_its_time_and_stores() {
    let _machine = alone();
    let folder = Folder::new();
    let (socket, image) = (folder.join("s"), folder.image("disk", 16 << 20));
    let model = format!("delay:file={},parallel=8,read=20ms,write=40ms,flush=20ms", image.display());
    let daemon = Daemon::serve(&model, &socket, &[]);
    let second = ["serve", &model, "--vhost-user", folder.join("t").to_str().unwrap()].map(String::from);
    assert!(blockyard(second).err.contains("is in use by"), "the image is locked");
    let options = ["--verify", "--rw", "randrw", "--bs", "4k", "--depth", "32", "--ops", "600", "--flush-every", "100"];
    at_last(|| {
        let verified = client(&socket, &options);
        let figure = |name: &str| verified[name].as_f64().unwrap();
        let served = figure("reads") * 20e-3 + figure("writes") * 40e-3;
        // Flushes take a server each, and there is a little to come before and after.
        near("seconds", figure("seconds"), served / 8.0, 0.15)
    });
    daemon.stop();
    let written = std::fs::read(&image).unwrap().chunks(4096).filter(|block| block.iter().any(|b| *b != 0)).count();
    assert!((200..600).contains(&written), "{written} blocks are in the image");
}
