//! The share of a polite disk beside thrashers, on the disk of the temporary folder, without a
//! calibration: in each order of arrival, beside each kind of thrasher, by each export, and with an
//! independent client.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use serde_json::Value;

use crate::common::{BLOCKYARD, Daemon, Folder, run, tool};
use crate::figures::Figures;

/// Rows of `bench neighbours`, and the least `of part %` of each: what the polite disk keeps of
/// half of its rate alone (of a fifth beside four thrashers).
const ROWS: [(&str, f64); 2] = [("thrash-d1", 70.0), ("thrash-d8", 80.0)];
/// Most milliseconds from the arrival of a disk until it has its share.
const TO_SHARE: f64 = 100.0;

/// Measures both rows with these options, and judges them.
fn measure_rows(figures: &mut Figures, folder: &Folder, options: &[&str]) {
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "neighbours", "--rows", "thrash-d1,thrash-d8", "--json"]);
    command.args(["--uncalibrated", "--size", "512m", "--seconds", "1.5", "--rounds", "3"]);
    command.arg("--target").arg(&**folder).args(options);
    let out = run(&mut command, Duration::from_secs(600)).good();
    let results: Value = serde_json::from_str(&out).unwrap();
    for ((name, least), row) in ROWS.iter().zip(results["rows"].as_array().unwrap()) {
        let found = |figure: &str| {
            let all = row["figures"].as_array().unwrap();
            all.iter().find(|f| f["name"] == figure).and_then(|f| f["median"].as_f64())
        };
        let what = |figure: &str| format!("{name} {}: {figure}", options.join(" "));
        figures.row(&what("of part %"), found("of part %").unwrap(), *least..f64::INFINITY);
        if let Some(time) = found("to share ms") {
            figures.row(&what("to share ms"), time, 0.0..TO_SHARE);
        }
        for figure in ["p99 x", "work-csv %"] {
            figures.show(&what(figure), found(figure).unwrap());
        }
    }
}

#[test]
fn a_polite_disk_keeps_its_share_in_each_order() {
    let (mut figures, folder) = (Figures::default(), Folder::new());
    for order in ["together", "polite-first", "thrasher-first", "returns", "sleeps"] {
        measure_rows(&mut figures, &folder, &["--order", order]);
    }
    figures.judge();
}

#[test]
fn a_polite_disk_keeps_its_share_beside_each_thrasher() {
    let (mut figures, folder) = (Figures::default(), Folder::new());
    for kind in ["reads", "writes", "large", "flushes", "discards", "one-queue", "several"] {
        let options = ["--order", "thrasher-first", "--thrasher", kind];
        measure_rows(&mut figures, &folder, &options);
    }
    figures.judge();
}

#[test]
fn a_polite_disk_keeps_its_share_by_each_export() {
    let (mut figures, folder) = (Figures::default(), Folder::new());
    for (polite, thrasher) in [("nbd", "vhost-user"), ("vhost-user", "nbd"), ("nbd", "nbd")] {
        let by = ["--polite-by", polite, "--thrasher-by", thrasher];
        let options = [&["--order", "thrasher-first", "--thrasher", "one-queue"][..], &by].concat();
        measure_rows(&mut figures, &folder, &options);
    }
    figures.judge();
}

/// The polite client is `qemu-img bench` with libblkio. The thrasher works before it begins.
#[test]
fn an_independent_client_keeps_its_share() {
    let (mut figures, folder) = (Figures::default(), Folder::new());
    let socket = |name: &str| folder.join(format!("{name}.sock"));
    let disk = |name: &str| {
        std::fs::write(folder.join(name), vec![7; 256 << 20]).unwrap();
        let (image, socket) = (folder.join(name), socket(name));
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{}\"\nvhost-user = \"{}\"\ncache = \"none\"\n",
            image.display(),
            socket.display()
        )
    };
    let config = folder.join("config");
    std::fs::write(&config, disk("polite") + &disk("thrasher")).unwrap();
    for (depth, count, least) in [("1", "20000", 70.0), ("8", "60000", 80.0)] {
        let mut daemon =
            Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&config));
        daemon.wait_ready();
        let load = LoadOptions {
            rw: Pattern::Randrw,
            depth: 256,
            warmup: 0.0,
            runtime: 120.0,
            ..LoadOptions::for_socket(socket("thrasher"))
        };
        let beside = std::thread::scope(|scope| {
            let client = scope.spawn(|| measure(&load).unwrap());
            daemon.until_served("read", "thrasher");
            let rate = qemu_img(&socket("polite"), depth, count);
            load.over.store(true, Ordering::Relaxed);
            client.join().unwrap();
            rate
        });
        let half = qemu_img(&socket("polite"), depth, count) / 2.0;
        let what = format!("qemu-img bench, depth {depth}: % of half of {half:.0}/s");
        figures.row(&what, 100.0 * beside / half, least..f64::INFINITY);
        daemon.stop();
    }
    figures.judge();
}

/// Returns the reads a second of `qemu-img bench` in steps over the whole disk.
fn qemu_img(socket: &Path, depth: &str, count: &str) -> f64 {
    let disk = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", socket.display());
    let arguments = ["bench", "-c", count, "-d", depth, "-s", "4096", "-S", "10489856"];
    let out = tool("qemu-img", arguments.iter().chain(&["--image-opts", &disk])).good();
    let time = out.split("Run completed in ").nth(1).and_then(|rest| rest.split(' ').next());
    count.parse::<f64>().unwrap() / time.unwrap().parse::<f64>().unwrap()
}
