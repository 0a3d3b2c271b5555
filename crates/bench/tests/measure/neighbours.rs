//! `bench neighbours`: what it prints, on a model of a device and on a folder, and what it leaves
//! behind.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::common::{BLOCKYARD, Daemon, Finished, Folder, Signal, TOOL, blockyard, run, until};

fn command(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = Command::new(BLOCKYARD);
    command.args(["bench", "neighbours"]).args(arguments).env("TMPDIR", &**folder);
    command
}

fn neighbours(folder: &Folder, arguments: &[&str]) -> Finished {
    run(&mut command(folder, arguments), Duration::from_secs(120))
}

fn entries(folder: &std::path::Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[track_caller]
fn figure(results: &Value, row: &str, name: &str) -> f64 {
    let rows = results["rows"].as_array().unwrap();
    let row = rows.iter().find(|r| r["row"] == row).unwrap_or_else(|| panic!("no row {row}"));
    let figures = row["figures"].as_array().unwrap();
    let figure = figures
        .iter()
        .find(|f| f["name"] == name)
        .unwrap_or_else(|| panic!("no {name} in {figures:?}"));
    figure["median"].as_f64().unwrap_or_else(|| panic!("{name} is no number: {figure}"))
}

/// A simulated device that does at most 1,600 operations a second. So 30 operations of a disk of
/// depth 1 take at least 0.15 s, and 200 of depth 8 at least 0.12 s. On a machine of any speed this
/// is a whole slice of 100 ms, which has operations.
const MODEL: &str = "parallel=8,read=5ms,write=5ms,flush=10ms,bandwidth=1g";

#[test]
fn neighbours_of_a_model_are_told_with_all_figures() {
    let folder = Folder::new();
    let report = folder.join("report");
    let rows =
        ["--model", MODEL, "--rows", "thrash-d1,weights,lone", "--rounds", "1", "--ops", "30"];
    let done = neighbours(
        &folder,
        &[&rows[..], &["--json", "--report", report.to_str().unwrap()]].concat(),
    );
    let json: Value = serde_json::from_str(&done.good()).unwrap();
    assert_eq!(entries(&folder), ["report"]);
    assert_eq!(entries(&report), ["neighbours.json", "neighbours.svg"]);
    assert_eq!(
        serde_json::from_slice::<Value>(&std::fs::read(report.join("neighbours.json")).unwrap())
            .unwrap(),
        json
    );
    let picture = std::fs::read_to_string(report.join("neighbours.svg")).unwrap();
    assert!(
        picture.contains("thrash-d1")
            && picture.contains("weights")
            && picture.trim_end().ends_with("</svg>")
    );

    for row in json["rows"].as_array().unwrap() {
        for figure in row["figures"].as_array().unwrap() {
            assert!(
                figure["median"].is_number() && !figure["values"].as_array().unwrap().is_empty(),
                "{figure}"
            );
        }
    }
    for (row, name) in [("thrash-d1", "alone"), ("lone", "without")] {
        assert!(figure(&json, row, name) > 0.0, "{row}: {name}");
    }
    let shares: f64 = ["share 1", "share 2", "share 4", "share 8"]
        .map(|s| figure(&json, "weights", s))
        .iter()
        .sum();
    assert!((shares - 100.0).abs() < 0.1, "all shares together are {shares}%");
}

/// Measures a polite disk beside four thrashers.
fn several_by_nbd(folder: &Folder, length: &[&str]) -> Value {
    let rows = ["--model", MODEL, "--rows", "thrash-d8", "--rounds", "1"];
    let kind = ["--thrasher", "several", "--json"];
    let by = ["--polite-by", "nbd", "--thrasher-by", "nbd"];
    let done = neighbours(folder, &[&rows[..], &kind, &by, length].concat());
    serde_json::from_str(&done.good()).unwrap()
}

/// The polite disk arrives beside four thrashers, and all of them use NBD.
#[test]
fn neighbours_of_any_kind_by_any_export_are_told_with_all_figures() {
    let folder = Folder::new();
    let json = several_by_nbd(&folder, &["--order", "thrasher-first", "--ops", "200"]);
    let row = &json["rows"][0];
    for figure in row["figures"].as_array().unwrap() {
        assert!(figure["median"].is_number(), "{figure}");
    }
    for name in ["to share ms", "share", "alone"] {
        assert!(figure(&json, "thrash-d8", name) > 0.0, "{name}");
    }
}

/// The polite disk arrives again and again. Neither the disks, nor the slices of a measurement of
/// seconds, nor its steps depend on its progress.
#[test]
fn neighbours_have_their_disks_and_the_slices_of_their_seconds() {
    let folder = Folder::new();
    let json = several_by_nbd(&folder, &["--order", "sleeps", "--seconds", "1"]);
    let row = &json["rows"][0];
    let disks = |scene: &str| {
        row["rounds"][0].as_array().unwrap().iter().filter(|c| c["scene"] == scene).count()
    };
    assert_eq!(["alone", "saturated", "without", "with"].map(disks), [1, 1, 5, 5]);
    let slices = |scene: &str| {
        let clients = row["rounds"][0].as_array().unwrap().iter();
        let mut polite = clients.filter(|c| c["scene"] == scene && c["disk"] == 0);
        polite.next().unwrap()["slices"].as_array().unwrap().len()
    };
    assert!(figure(&json, "thrash-d8", "to share ms") > 0.0, "{row}");
    assert_eq!(slices("with"), 10, "two works, without the pause between them");
}

#[test]
fn neighbours_on_a_folder() {
    let folder = Folder::new();
    let (target, costs) = (folder.join("target"), folder.join("costs.toml"));
    std::fs::create_dir(&target).unwrap();
    std::fs::write(&costs, "").unwrap();
    let name = |path: &std::path::Path| path.to_str().unwrap().to_string();
    let (on, of) = (name(&target), name(&costs));
    let short =
        ["--target", &on, "--costs", &of, "--size", "64m", "--rows", "lone,burst", "--rounds", "1"];
    let both = neighbours(&folder, &["--ops", "9", "--seconds", "9"]);
    assert_eq!(both.status.code(), Some(2), "{}", both.err);
    let refused = neighbours(&folder, &short);
    assert!(refused.err.contains("run bench calibrate"), "{}", refused.err);
    blockyard([
        "bench",
        "calibrate",
        &on,
        "-o",
        &of,
        "--size",
        "64m",
        "--seconds",
        "1",
        "--rounds",
        "1",
    ])
    .good();
    let out = neighbours(&folder, &[&short[..], &["--ops", "50"]].concat()).good();
    assert!(
        out.contains("lone: one disk alone")
            && out.contains("d1 kept %")
            && out.contains("burst of max %"),
        "{out}"
    );
    assert_eq!(
        (entries(&target), entries(&folder)),
        (vec![], vec!["costs.toml".to_string(), "target".into()])
    );
    for (wrong, part) in [("thrash", "is no row"), ("thrash-d1,,", "is no row")] {
        let refused = neighbours(&folder, &["--rows", wrong]);
        assert!(refused.status.code() == Some(2) && refused.err.contains(part), "{}", refused.err);
    }
    assert!(neighbours(&folder, &["--model", "parallel=0"]).err.contains("a model needs"));
    for option in ["--thrasher", "--order", "--polite-by", "--thrasher-by"] {
        let refused = neighbours(&folder, &[option, "none"]);
        assert_eq!(refused.status.code(), Some(2), "{}", refused.err);
    }
}

#[test]
fn an_interruption_of_neighbours_leaves_finished_rounds() {
    let folder = Folder::new();
    let mut command = command(
        &folder,
        &["--model", MODEL, "--rows", "burst", "--rounds", "100", "--seconds", "0.3"],
    );
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut daemon = Daemon::start(&mut command);
    until("a round is finished", TOOL, || daemon.log().contains("round 1 of 100"));
    // A shell makes its background processes ignore SIGINT.
    daemon.signal(Signal::TERM);
    let status = daemon.ended(TOOL);
    assert_eq!(status.code(), Some(130), "{}", daemon.log());
    assert!(daemon.out().contains("burst of max %"), "{}", daemon.out());
    assert!(entries(&folder).is_empty(), "{:?}", entries(&folder));
}

#[test]
fn an_interruption_ends_a_long_load() {
    let folder = Folder::new();
    let mut command = command(&folder, &["--model", MODEL, "--rows", "burst", "--seconds", "600"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut daemon = Daemon::start(&mut command);
    until("the server listens", TOOL, || {
        let stages = std::fs::read_dir(&*folder).unwrap().flatten();
        stages.into_iter().any(|stage| stage.path().join("0.sock").exists())
    });
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended(TOOL).code(), Some(130), "{}", daemon.log());
    assert!(entries(&folder).is_empty(), "{:?}", entries(&folder));
}
