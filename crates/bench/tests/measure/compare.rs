//! `bench compare`, `plot`, `diff`, `job`: what they write, what they leave behind, how they end.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::common::{
    BLOCKYARD, Daemon, Folder, SOON, Signal, TOOL, blockyard, guests, run, tool, until,
};

fn compare(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = Command::new(BLOCKYARD);
    command
        .args(["bench", "compare", "--size", "96m", "--ops", "40", "--max-size", "64k"])
        .args(arguments);
    command.env("TMPDIR", &**folder).env("BLOCKYARD_GUESTS", guests());
    command
}

fn results(report: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(report.join("results.json")).unwrap()).unwrap()
}

/// Fails if the folder has anything but the report, or if the command line of a process names the
/// folder. Waits, because killed processes of the group need a moment to end.
#[track_caller]
fn nothing_is_left(folder: &Folder) {
    let names: Vec<_> =
        std::fs::read_dir(&**folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    let inside = || tool("find", [folder.to_str().unwrap()]).out;
    assert!(names.iter().all(|n| n == "report"), "left behind: {}", inside());
    until("no process names the folder", SOON, || {
        let left = named(folder);
        left.iter().for_each(|line| println!("left: {line}"));
        left.is_empty()
    });
}

/// Returns the command lines of the processes that name the folder.
fn named(folder: &Folder) -> Vec<String> {
    let name = folder.to_str().unwrap().as_bytes();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|e| std::fs::read(e.path().join("cmdline")).ok());
    let named = lines.filter(|l| l.windows(name.len()).any(|w| w == name));
    named.map(|l| String::from_utf8_lossy(&l).into_owned()).collect()
}

#[test]
fn a_report_is_whole_and_needs_nothing_else() {
    let folder = Folder::new();
    let report = folder.join("report");
    // The test of interruptions uses `rate:read`.
    let options = [
        "rate:writesync",
        "job:dd-rm",
        "--systems",
        "host,uml-blockyard,uml-ubd,ublk",
        "--rounds",
        "2",
    ];
    let done =
        run(compare(&folder, &options).arg("--report").arg(&report), Duration::from_secs(300));
    nothing_is_left(&folder);
    assert!(done.err.contains("ublk is left out"), "{}", done.err);
    let table = done.good();
    assert!(
        table.contains("uml-ubd") && table.contains("dd-sync") && table.contains("guest"),
        "{table}"
    );
    let json = results(&report);
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 12, "two works, three systems, two rounds");
    // Every system has done the same operations: their sizes come from the seed.
    let sizes = |run: &Value| {
        run["samples"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| s[0].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    let rates: Vec<_> = runs.iter().filter(|r| r["work"] == "rate:writesync").map(sizes).collect();
    assert!(rates.len() == 6 && rates.iter().all(|r| r.len() == 40 && *r == rates[0]));
    // How near the clocks are is a figure of `tests/perf`.
    for run in runs {
        for time in ["seconds", "guest_seconds"] {
            assert!(run[time].as_f64() > Some(0.0), "{time} of {run}");
        }
    }
    let served = runs.iter().find(|r| r["system"] == "uml-blockyard").unwrap();
    assert!(
        served["spent"]["service"].as_f64().unwrap() > 0.0 && served["cpu"]["backend"].is_number(),
        "{served}"
    );
    let csv = std::fs::read_to_string(report.join("results.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 6 * 40);
    let page = std::fs::read_to_string(report.join("index.html")).unwrap();
    for outside in ["<script", "src=", "url(", "@import"] {
        assert!(!page.contains(outside), "the page asks for more: {outside}");
    }
    let links = page.matches("http").count();
    assert_eq!(
        links,
        page.matches("http://www.w3.org/2000/svg").count(),
        "the page names other places"
    );
    pictures(&folder, &report);
}

/// Draws the pictures again, from the saved data alone.
fn pictures(folder: &Folder, report: &Path) {
    let plot = |more: &[&str]| {
        blockyard(["bench", "plot", report.to_str().unwrap()].iter().chain(more)).good()
    };
    let (svg, png, again) = (folder.join("a.svg"), folder.join("a.png"), folder.join("again"));
    plot(&["-o", svg.to_str().unwrap(), "--work", "rate:writesync", "--title", "A & B"]);
    let text = std::fs::read_to_string(&svg).unwrap();
    assert!(text.contains("A &amp; B") && text.contains("uml-ubd") && text.contains("</svg>"));
    plot(&["-o", png.to_str().unwrap(), "--picture", "rate"]);
    assert!(std::fs::read(&png).unwrap().starts_with(b"\x89PNG\r\n"));
    plot(&["-o", again.to_str().unwrap()]);
    let page = |folder: &Path| std::fs::read_to_string(folder.join("index.html")).unwrap();
    assert!(page(&again) == page(report), "the page is another one");
    let wrong = blockyard(["bench", "plot", report.to_str().unwrap(), "-o", "/nonexistent/x.svg"]);
    assert_eq!(wrong.status.code(), Some(1));
}

#[test]
fn a_loss_is_told_from_noise() {
    let folder = Folder::new();
    let runs = |factor: f64| {
        let run = |(i, noise): (usize, &f64)| {
            serde_json::json!({"system": "s", "work": "w", "round": i + 1, "seconds": 1.0 / (factor * noise), "operations": 1000,
                "bytes": 0, "cpu": {"guest": 0.0, "backend": null, "kernel": 0.0}})
        };
        let runs: Vec<_> = [1.0, 1.02, 0.99, 1.01, 0.98].iter().enumerate().map(run).collect();
        serde_json::json!({"format": 1, "environment": [], "command": [], "runs": runs}).to_string()
    };
    let (old, new) = (folder.join("old.json"), folder.join("new.json"));
    std::fs::write(&old, runs(1.0)).unwrap();
    for (factor, status) in [(1.0, 0), (1.2, 0), (0.85, 1)] {
        std::fs::write(&new, runs(factor)).unwrap();
        let done = blockyard(["bench", "diff", old.to_str().unwrap(), new.to_str().unwrap()]);
        assert_eq!(done.status.code(), Some(status), "{factor}: {}{}", done.out, done.err);
        assert_eq!(done.out.contains("SLOWER"), status == 1);
    }
    assert_eq!(
        blockyard(["bench", "diff", old.to_str().unwrap(), "/nonexistent"]).status.code(),
        Some(2)
    );
}

/// When an interruption comes.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Start,
    /// The command has made its folder, and makes images.
    Images,
    /// A process beside the command works in the folder: a server or a guest.
    Guest,
    /// A round is finished.
    Round,
}

#[test]
fn an_interruption_leaves_nothing_but_finished_rounds() {
    for moment in [Moment::Start, Moment::Images, Moment::Guest, Moment::Round] {
        let folder = Folder::new();
        let report = folder.join("report");
        let mut command =
            compare(&folder, &["rate:read", "--systems", "host,uml-blockyard", "--rounds", "100"]);
        command.arg("--report").arg(&report).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut daemon = Daemon::start(&mut command);
        let entries = || std::fs::read_dir(&*folder).unwrap().count();
        until(&format!("{moment:?}"), 5 * TOOL, || match moment {
            Moment::Start => true,
            Moment::Images => entries() > 0,
            Moment::Guest => named(&folder).iter().any(|line| line.contains("linux.uml")),
            Moment::Round => daemon.log().lines().any(|line| line.starts_with("round ")),
        });
        // The test sends SIGTERM, because a shell makes its background processes ignore SIGINT.
        daemon.signal(Signal::TERM);
        let status = daemon.ended(TOOL);
        assert_eq!(status.code().or(Some(130)), Some(130), "{status}: {}", daemon.log());
        nothing_is_left(&folder);
        let rounds = daemon.log().lines().filter(|l| l.starts_with("round ")).count();
        assert!(rounds > 0 || !matches!(moment, Moment::Round), "{}", daemon.log());
        if rounds > 0 {
            assert_eq!(results(&report)["runs"].as_array().unwrap().len(), rounds);
            assert!(report.join("index.html").exists());
        }
    }
}

#[test]
fn a_table_has_a_line_for_each_system() {
    let folder = Folder::new();
    let table = |more: &[&str]| {
        let mut command = Command::new(BLOCKYARD);
        command.args([
            "bench", "compare", "--table", "clients", "--rounds", "2", "--ops", "300", "--size",
            "1m",
        ]);
        command
            .args(["--only", "client polls"])
            .args(more)
            .env("TMPDIR", &*folder)
            .env("BLOCKYARD_GUESTS", guests());
        let done = run(&mut command, TOOL);
        nothing_is_left(&folder);
        done.good()
    };
    let markdown = table(&[]);
    let cells: Vec<Vec<_>> =
        markdown.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    assert_eq!(
        (cells.len(), cells[2][1], cells[2][2]),
        (4, "null, 4k random read, depth 32, client polls", "qsd")
    );
    assert_eq!((cells[3][1], cells[3][2]), ("", "blockyard"));
    // Blockyard's IOPS, and their ratio to those of qemu-storage-daemon, to two digits.
    let iops = |line: usize| cells[line][3].replace(',', "").parse::<f64>().unwrap();
    let (theirs, ours) = (iops(2), iops(3));
    assert!(theirs > 0.0 && ours > 0.0, "{markdown}");
    let ratio = cells[3][10].parse::<f64>().unwrap();
    let rounded = 0.006 + ours / theirs * (0.5 / ours + 0.5 / theirs);
    assert!((ratio - ours / theirs).abs() < rounded, "{ratio}: {markdown}");
    let refused = blockyard(["bench", "compare", "--table", "nbd", "--ops", "9"]);
    assert!(refused.err.contains("only the tables clients and overlays"), "{}", refused.err);
    let json: Value = serde_json::from_str(&table(&["--json"])).unwrap();
    let rounds = json[cells[2][1]]["blockyard"].as_array().unwrap();
    assert!(rounds.len() == 2 && rounds.iter().all(|round| round["cpu_us"].is_number()), "{json}");
}

#[test]
fn image_tools_are_compared_and_judged() {
    let folder = Folder::new();
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "compare", "--table", "image-tools", "--rounds", "1", "--size", "8m"]);
    command.args(["--only", "sparse"]).env("TMPDIR", &*folder).env("BLOCKYARD_GUESTS", guests());
    let done = run(&mut command, TOOL);
    nothing_is_left(&folder);
    let markdown = done.good();
    let rows: Vec<Vec<_>> =
        markdown.lines().skip(2).map(|line| line.split('|').map(str::trim).collect()).collect();
    let names: Vec<_> = rows.iter().map(|cells| cells[1]).collect();
    let convert = ["raw to qcow2", "qcow2 to raw", "raw to raw"]
        .map(|what| format!("convert {what}, sparse"));
    assert_eq!(names[..3], convert);
    assert_eq!(names[3..], ["map, sparse", "compare raw and qcow2, sparse"]);
    // Seconds of qemu-img and of Blockyard, the ratio, CPU seconds of both.
    for cells in rows {
        let figures: Vec<f64> = cells[2..7].iter().map(|cell| cell.parse().unwrap()).collect();
        assert!(figures[..3].iter().all(|figure| *figure > 0.0), "{cells:?}");
    }
}

#[test]
fn jobs_run_by_fio_and_without() {
    let folder = Folder::new();
    let image = folder.image("disk", 64 << 20);
    let name = image.to_str().unwrap();
    let printed = blockyard(["bench", "job", "fileserver", name, "--print"]).good();
    assert!(
        printed.contains("bssplit=512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10"),
        "{printed}"
    );
    // fio accepts the printed job file.
    std::fs::write(folder.join("job"), &printed).unwrap();
    tool("fio", ["--parse-only", folder.join("job").to_str().unwrap()]).good();
    for (job, ops, wanted) in [
        ("fileserver", 4000, 0.8),
        ("fileserver-writes", 4000, 0.2),
        ("random-writes-64k", 200, 0.0),
        ("stream-read", 100, 1.0),
    ] {
        let number = ops.to_string();
        let own = ["bench", "job", job, name, "--engine", "own", "--ops", &number, "--json"];
        let report: Value = serde_json::from_str(&blockyard(own).good()).unwrap();
        let (reads, writes) =
            (report["reads"].as_u64().unwrap(), report["writes"].as_u64().unwrap());
        assert_eq!((reads + writes, &report["errors"]), (ops, &0.into()), "{job}: {report}");
        // The tolerance is six standard deviations of a mean, because operations are chosen at
        // random.
        let chance = |deviation: f64| 6.0 * deviation / (ops as f64).sqrt();
        let share = reads as f64 / ops as f64;
        let most = chance((wanted * (1.0f64 - wanted)).sqrt());
        assert!((share - wanted).abs() <= most, "{job}: {share} of all are reads");
        if job.starts_with("fileserver") {
            // 512 B 10%, 1k 5%, ... 64k 10%: 11,346 bytes on average, with a standard deviation of
            // 19,135.
            let mean =
                report["bytes_per_second"].as_f64().unwrap() / report["iops"].as_f64().unwrap();
            assert!((mean - 11_345.9).abs() < chance(19_135.0), "{job}: {mean} bytes on average");
        }
    }
    // fio gets a whole path, because it runs elsewhere, and none of two files.
    std::fs::rename(&image, folder.join("a:b")).unwrap();
    let tool = guests().join("tool");
    folder.script("fio", &format!("#!/bin/sh\nexec {} fio \"$@\"\n", tool.display()));
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "job", "stream-read", "a:b", "--engine", "fio", "--ops", "50"]);
    let done = run(command.current_dir(&*folder).env("PATH", path).arg("--json"), TOOL).good();
    let report: Value = serde_json::from_str(&done).unwrap();
    assert_eq!(report["operations"], 50, "{report}");
    let both = blockyard(["bench", "job", "stream-read", "a:b", "--ops", "1", "--seconds", "1"]);
    assert_eq!(both.status.code(), Some(2), "{}", both.err);
}

#[test]
fn experiments_leave_files_alone() {
    let folder = Folder::new();
    let names = || {
        let entries = std::fs::read_dir(&*folder).unwrap();
        entries.map(|e| e.unwrap().file_name()).collect::<Vec<_>>()
    };
    let file = folder.join("testfile");
    std::fs::write(&file, "mine").unwrap();
    let done = blockyard(["bench", "job", "dd-rm", folder.to_str().unwrap()]).good();
    assert_eq!(
        done.lines().map(|l| l.split(' ').next().unwrap()).collect::<Vec<_>>(),
        ["dd", "dd-sync", "rm", "rm-sync"]
    );
    // A plain file is neither a folder nor a device.
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "job", "dd-rm", "testfile"]).current_dir(&*folder);
    let refused = run(&mut command, TOOL);
    assert!(refused.err.contains("needs a folder or a block device"), "{}", refused.err);
    assert_eq!(
        (names(), &*std::fs::read_to_string(&file).unwrap()),
        (vec!["testfile".into()], "mine")
    );
}

#[test]
fn unknown_jobs_are_refused() {
    let folder = Folder::new();
    let name = folder.to_str().unwrap();
    assert_eq!(blockyard(["bench", "job", "nothing", name]).status.code(), Some(2));
}
