//! The model of a device (`delay:`), and known delays: rates and latencies are those that the
//! figures say.

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::common::guest::run_guest;
use crate::common::{BLOCKYARD, Daemon, Folder, Guest, GuestKind, TOOL, blockyard, guests, run};
use crate::figures::Figures;

/// The program that `blockyard bench` executes.
const BENCH: &str = env!("CARGO_BIN_EXE_blockyard-bench");

/// A simulated device with 32 servers. A read of 512 bytes occupies one of them for 4 ms plus the
/// transfer time: 512 bytes at a 32nd of 64 MiB/s.
const IMAGE: &str = "delay:1G,parallel=32,read=4ms,write=8ms,bandwidth=64M";
const READ: f64 = 4e-3 + 512.0 * 32.0 / (64 << 20) as f64;

/// Runs `bench client --json`, and returns its report.
fn client(socket: &Path, options: &[&str]) -> Value {
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "client", "--json", "--seed", "1"]).args(options).arg(socket);
    serde_json::from_str(&run(&mut command, TOOL).good()).unwrap()
}

fn iops(report: &Value) -> f64 {
    report["iops"].as_f64().unwrap()
}

/// Returns the range of a rate that the device limits. Half a percent above it is the error of the
/// measurement.
fn not_above(rate: f64, below: f64) -> Range<f64> {
    rate * (1.0 - below)..rate * 1.005
}

/// Returns the range of a duration that the device does not shorten.
fn not_below(time: f64, above: f64) -> Range<f64> {
    time * 0.995..time * (1.0 + above)
}

#[test]
fn rate_and_latency_of_a_model() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let socket = folder.join("s");
    let daemon = Daemon::serve(IMAGE, &socket, &[]);
    let busy = client(&socket, &["--bs", "512", "--depth", "256", "--runtime", "1.5"]);
    figures.row("reads/s at depth 256", iops(&busy), not_above(32.0 / READ, 0.02));
    // The device serves 32 writes of 1 MiB at a time, and each write takes 0.508 s. So 256 writes
    // take 8 times that.
    let busy =
        client(&socket, &["--bs", "1m", "--depth", "64", "--ops", "256", "--rw", "randwrite"]);
    let seconds = busy["seconds"].as_f64().unwrap();
    figures.row("s for 256 writes of 1 MiB", seconds, not_below(8.0 * 0.508, 0.02));
    // A read takes the same time alone and together with 31 others, because each has its own
    // server.
    for depth in ["1", "32"] {
        let idle = client(&socket, &["--bs", "512", "--depth", depth, "--runtime", "1"]);
        let p50 = idle["latency_us"]["p50"].as_f64().unwrap() / 1e6;
        let what = format!("ms, median of reads at depth {depth}");
        figures.row(&what, 1e3 * p50, READ * 980.0..READ * 1100.0);
    }
    daemon.stop();
    figures.judge();
}

#[test]
fn disks_of_one_device_share_its_rate() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let sockets = [folder.join("0"), folder.join("1"), folder.join("2")];
    let image =
        |disk: usize| if disk == 2 { IMAGE.to_string() } else { format!("{IMAGE},device=both") };
    let disk = |(n, s): (usize, &std::path::PathBuf)| {
        format!(
            "[[disk]]\nname = \"{n}\"\nimage = \"{}\"\nvhost-user = \"{}\"\n",
            image(n),
            s.display()
        )
    };
    let config = folder.join("config");
    let disks: String = sockets.iter().enumerate().map(disk).collect();
    std::fs::write(&config, format!("reactors = 2\n{disks}")).unwrap();
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&config));
    daemon.wait_ready();
    let load = |socket| {
        client(socket, &["--bs", "512", "--depth", "256", "--warmup", "0.4", "--runtime", "1.5"])
    };
    let all: Vec<f64> = thread::scope(|scope| {
        let loads: Vec<_> =
            sockets.iter().map(|socket| scope.spawn(move || iops(&load(socket)))).collect();
        loads.into_iter().map(|load| load.join().unwrap()).collect()
    });
    let most = not_above(32.0 / READ, 0.03);
    figures.row("reads/s of two disks on one device", all[0] + all[1], most.clone());
    figures.near("reads/s of the second of them", all[1], 16.0 / READ, 0.10);
    figures.row("reads/s of a disk with a device of its own", all[2], most);
    daemon.stop();
    figures.judge();
}

#[test]
fn a_model_before_an_image() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let (socket, image) = (folder.join("s"), folder.image("disk", 16 << 20));
    let model =
        format!("delay:file={},parallel=8,read=20ms,write=40ms,flush=20ms", image.display());
    let daemon = Daemon::serve(&model, &socket, &[]);
    let options =
        ["--rw", "randrw", "--bs", "4k", "--depth", "32", "--ops", "600", "--flush-every", "100"];
    let found = client(&socket, &options);
    let figure = |name: &str| found[name].as_f64().unwrap();
    let served = figure("reads") * 20e-3 + figure("writes") * 40e-3;
    // The tolerance covers the flushes, which occupy a server each, and the start and end of the
    // run.
    figures.row("s for 600 operations", figure("seconds"), not_below(served / 8.0, 0.15));
    daemon.stop();
    figures.judge();
}

/// A read takes at least about its cost, because the cost is the time for a read when many are in
/// flight. The latency without other load cannot be much shorter.
#[test]
fn the_latency_of_a_calibrated_device_and_the_cost_of_its_reads() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let (target, costs) = (folder.join("target"), folder.join("costs.toml"));
    std::fs::create_dir(&target).unwrap();
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "calibrate", "--size", "64m", "--seconds", "3", "--rounds", "1"]);
    run(command.arg(&target).arg("-o").arg(&costs), TOOL).good();
    let table: toml::Table = std::fs::read_to_string(&costs).unwrap().parse().unwrap();
    let figure = |name: &str| table["device"][0][name].as_integer().unwrap() as f64;
    let times = figure("base-latency-read") / figure("read");
    figures.row("times the cost of a read is its latency alone", times, 0.5..1e6);
    figures.judge();
}

/// Delays that are long compared with the time that the machine itself adds.
const DELAY: &str = "delay:read=20ms,write=30ms,flush=25ms";

/// Milliseconds of what `bench percentile` prints for operations of 4 KiB.
fn percentile(samples: &Path, percent: &str) -> f64 {
    let out =
        blockyard(["bench".as_ref(), "percentile".as_ref(), percent.as_ref(), samples.as_os_str()])
            .good();
    1e3 * out.split(' ').nth(1).unwrap().parse::<f64>().unwrap()
}

#[test]
fn known_delays() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let (socket, samples) = (folder.join("s"), folder.join("samples"));
    let daemon = Daemon::serve("null:64M", &socket, &["--filter", DELAY]);
    for (operation, truth) in [("read", 20.0), ("write", 30.0), ("writesync", 55.0)] {
        let target = socket.to_str().unwrap();
        let fixed = [
            "bench",
            "rate",
            operation,
            target,
            "--ops",
            "60",
            "--min-size",
            "4k",
            "--max-size",
            "4k",
        ];
        std::fs::write(&samples, blockyard(fixed).good()).unwrap();
        let median = percentile(&samples, "50");
        figures.row(&format!("ms, median of {operation}"), median, truth..truth * 1.03);
        // No operation is shorter than its delay.
        let shortest = percentile(&samples, "0");
        figures.row(&format!("ms, shortest {operation}"), shortest, truth..truth * 1.03);
    }
    daemon.stop();
    figures.judge();
}

/// fio runs in a guest on the same disk, with one request of 4 KiB at a time.
#[test]
fn fio_finds_the_same() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let (socket, share) = (folder.join("s"), folder.join("share"));
    std::fs::create_dir(&share).unwrap();
    std::fs::copy(BENCH, share.join("blockyard-bench")).unwrap();
    let daemon = Daemon::serve("null:64M", &socket, &["--filter", DELAY]);
    let script = "
        fio --name=x --filename=/dev/vda --ioengine=psync --direct=1 --rw=randread --bs=4k --number_ios=100 \
            --lat_percentiles=1 --output-format=json >/share/fio
        /share/blockyard-bench rate read /dev/vda --direct --ops 100 --min-size 4k --max-size 4k >/share/rate";
    let mut options = Guest::vhost(&socket, "").to_vec();
    options.extend(["--share".into(), share.clone().into()]);
    run_guest(GuestKind::Uml, options, script);
    let out = std::fs::read_to_string(share.join("fio")).unwrap();
    // fio prints notes before the JSON.
    let fio: Value = serde_json::from_str(&out[out.find('{').unwrap()..]).unwrap();
    for (ours, its) in [("50", "50.000000"), ("99", "99.000000")] {
        let fios = fio["jobs"][0]["read"]["lat_ns"]["percentile"][its].as_f64().unwrap() / 1e6;
        let found = percentile(&share.join("rate"), ours);
        figures.near(&format!("ms, percentile {ours}, beside fio's"), found, fios, 0.10);
        // fio's percentiles have buckets, which are up to 2% below the value.
        figures.row(&format!("ms, percentile {ours} of a delay of 20 ms"), found, 20.0..30.0);
        figures.row(&format!("ms, percentile {ours} of it, by fio"), fios, 19.6..30.0);
    }
    let done = std::fs::read_to_string(share.join("rate")).unwrap().lines().count();
    figures.row("operations of bench rate", done as f64, 100.0..101.0);
    let done = fio["jobs"][0]["read"]["total_ios"].as_f64().unwrap();
    figures.row("operations of fio", done, 100.0..101.0);
    daemon.stop();
    figures.judge();
}

/// The median of a figure of a row that `bench neighbours` measured.
fn median_of(results: &Value, row: &str, name: &str) -> f64 {
    let with = |key: &'static str, value: &str, all: &Value| {
        all.as_array().unwrap().iter().find(|found| found[key] == value).unwrap().clone()
    };
    let row = with("row", row, &results["rows"]);
    with("name", name, &row["figures"])["median"].as_f64().unwrap()
}

/// Measures rows on a model of 8,000 operations a second.
fn neighbours(options: &[&str]) -> Value {
    let folder = Folder::new();
    let model = "parallel=8,read=1ms,write=1ms,flush=2ms,bandwidth=1g";
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "neighbours", "--model", model, "--rounds", "1", "--json"]);
    command.args(options).env("TMPDIR", &*folder);
    serde_json::from_str(&run(&mut command, Duration::from_secs(120)).good()).unwrap()
}

/// A request takes 1 ms, and 30.5 us for its 4 KiB: the rate with one request at a time.
const ALONE: f64 = 1e6 / (1000.0 + 30.5);

#[test]
fn neighbours_of_a_model() {
    let mut figures = Figures::default();
    let json = neighbours(&["--rows", "thrash-d1,weights,lone", "--seconds", "0.5"]);
    let figure = |row: &str, name: &str| median_of(&json, row, name);
    let one = figure("thrash-d1", "alone");
    figures.row("operations/s, one at a time", one, ALONE * 0.3..ALONE * 1.02);
    let most = figure("lone", "without");
    figures.row("operations/s, one disk", most, 8.0 * ALONE * 0.3..8.0 * ALONE * 1.05);
    // Without the scheduler, a request waits behind a thousand requests of the thrasher.
    let without = figure("thrash-d1", "without");
    figures.row("operations/s beside a thrasher, no scheduler", without, 0.0..0.25 * ALONE);
    figures.row(
        "operations/s beside a thrasher",
        figure("thrash-d1", "with"),
        4.0 * without..ALONE * 1.02,
    );
    figures.row("worst error of four weights, %", figure("weights", "worst error %"), 0.0..10.0);
    figures.row("busy with four weights, %", figure("weights", "busy %"), 30.0..106.0);
    figures.judge();
}

/// The polite disk arrives again and again beside four thrashers, and all of them use NBD. It has
/// two arrivals of half a second.
#[test]
fn a_neighbour_that_arrives_by_nbd() {
    let mut figures = Figures::default();
    let rows = ["--rows", "thrash-d8", "--seconds", "1", "--order", "sleeps"];
    let by = ["--thrasher", "several", "--polite-by", "nbd", "--thrasher-by", "nbd"];
    let json = neighbours(&[&rows[..], &by].concat());
    let figure = |name: &str| median_of(&json, "thrash-d8", name);
    figures.row("ms until a disk that arrives has its share", figure("to share ms"), 0.0..500.001);
    for name in ["share", "alone"] {
        figures.row(&format!("operations/s, {name}"), figure(name), 1.0..8.0 * ALONE * 1.05);
    }
    figures.judge();
}

/// The durations in guests are those of the host, so that systems can be compared. A wrong clock
/// affects all runs of a system.
#[test]
fn the_clocks_of_guests_and_of_the_host() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let report = folder.join("report");
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "compare", "rate:writesync", "--rounds", "2", "--report"]).arg(&report);
    command.args(["--systems", "host,uml-blockyard,uml-ubd", "--size", "96m", "--max-size", "64k"]);
    command.args(["--ops", "1000000", "--seconds", "2"]);
    command.env("TMPDIR", &*folder).env("BLOCKYARD_GUESTS", guests());
    run(&mut command, Duration::from_secs(300)).good();
    let results = std::fs::read(report.join("results.json")).unwrap();
    let results: Value = serde_json::from_slice(&results).unwrap();
    for run in results["runs"].as_array().unwrap() {
        let time = |name: &str| run[name].as_f64().unwrap();
        let what = format!("s a second by the clock of {}", run["system"].as_str().unwrap());
        figures.near(&what, time("guest_seconds") / time("seconds"), 1.0, 0.05);
    }
    figures.judge();
}
