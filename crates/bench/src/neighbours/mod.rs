//! `blockyard bench neighbours`: effects of guests of one device on each other, with fair shares
//! and without.
//!
//! ```text
//!   rows     the scenes of each row      scene     disks, knobs, loads
//!   stage    images, server, clients     device    a folder's disk, or a model
//!   figures  results                     thrasher  kinds of thrashing disks
//!   arrival  the time to a share         table     for people
//! ```
//! In: rows, and a folder or a model of a device. Out: a table, JSON, a picture. What must hold:
//! scenes take turns, and each round begins with another one, so that a disk that becomes slower
//! affects all; only the report remains.

mod arrival;
mod device;
mod figures;
mod rows;
mod scene;
mod stage;
mod table;
mod thrasher;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockyard_program::costs::DeviceCosts;
use blockyard_program::file::replace;
use blockyard_program::output;
use serde::Serialize;

use self::device::{Device, Model};
use self::figures::{Figure, Round};
use self::rows::{ALL, Known, Row, Settings};
use self::scene::{Export, Scene};
use self::stage::Stage;
use self::thrasher::ThrasherKind;
use crate::calibrate;
use crate::client::report::{Latency, Report};
use crate::client::{parse_seconds, parse_size};
use crate::compare::environment::environment;
use crate::process::{Interrupted, Stop};
use crate::rounds::{Rounds, Turn};

/// A model with 16 servers: 70,000 operations of 4 KiB a second, 2 GiB a second.
const MODEL: &str = "parallel=16,read=200us,write=200us,flush=1ms,discard=200us,bandwidth=2g";

/// Disks of one device beside one another, with fair shares and without: what a thrashing guest
/// leaves the others.
#[derive(Clone, Debug, clap::Args)]
pub struct NeighboursOptions {
    /// On the disk of this folder; files are made there, and removed
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    target: Option<PathBuf>,
    /// On a model of a device, as images delay:SIZE,... are
    #[arg(long, value_name = "MODEL", num_args = 0..=1, default_value = MODEL, default_missing_value = MODEL,
          value_parser = |s: &str| s.parse::<Model>())]
    model: Model,
    /// What to measure [default: all rows but frontier-*; equal-64 on a model only]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = |s: &str| s.parse::<Row>())]
    rows: Vec<Row>,
    /// How often each is measured
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds of each measurement; with --order sleeps, pauses come in addition
    #[arg(long, value_name = "S", default_value = "2", value_parser = parse_seconds)]
    seconds: f64,
    /// Operations of each measurement instead of seconds: it ends when the measured disks have
    /// together finished so many. The rows limits and burst have seconds
    #[arg(long, value_name = "N", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    ops: Option<u64>,
    /// Bytes of each disk
    #[arg(long, value_name = "SIZE", default_value = "1g", value_parser = parse_size)]
    size: u64,
    /// What operations cost the device, as `bench calibrate` wrote it [default: of a folder,
    /// calibrates first]
    #[arg(long, value_name = "FILE", requires = "target")]
    costs: Option<PathBuf>,
    /// Which disk begins first, in rows with a thrasher
    #[arg(long, value_name = "ORDER", value_enum, default_value_t)]
    order: Order,
    /// What the thrasher does, in the rows thrash-*
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    thrasher: ThrasherKind,
    /// The export of the polite disk, in the rows thrash-*
    #[arg(long, value_name = "EXPORT", value_enum, default_value_t)]
    polite_by: Export,
    /// The export of the thrasher, in the rows thrash-*
    #[arg(long, value_name = "EXPORT", value_enum, default_value_t)]
    thrasher_by: Export,
    /// Do not give the device's costs to the server
    #[arg(long)]
    uncalibrated: bool,
    /// The server's threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    reactors: u16,
    /// Write all figures (neighbours.json) and a picture (neighbours.svg) into this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print all figures as JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// Which disk begins first.
#[derive(Clone, Copy, Debug, Default, PartialEq, clap::ValueEnum)]
pub enum Order {
    /// The disks begin together
    #[default]
    Together,
    /// The polite disk works for a second before the thrasher begins
    PoliteFirst,
    /// The thrasher works for a second before the polite disk begins
    ThrasherFirst,
    /// The polite disk works alone, then the thrasher; then the polite disk returns
    Returns,
    /// The thrasher works all the time; the polite disk pauses for 2 s and works for 0.5 s, in turn
    Sleeps,
}

impl Order {
    /// Returns whether the polite disk arrives while the thrasher works.
    fn arrives(self) -> bool {
        matches!(self, Order::ThrasherFirst | Order::Returns | Order::Sleeps)
    }
}

/// All measurements.
#[derive(Serialize)]
struct Results {
    environment: Vec<(String, String)>,
    command: Vec<String>,
    /// A folder's disk, or `model`.
    device: String,
    costs: DeviceCosts,
    rows: Vec<Played>,
}

/// A row and its results.
#[derive(Serialize)]
pub struct Played {
    pub row: String,
    pub about: String,
    pub figures: Vec<Figure>,
    pub rounds: Vec<Vec<Client>>,
}

/// The report of one client of a scene.
#[derive(Serialize)]
pub struct Client {
    scene: &'static str,
    disk: usize,
    iops: f64,
    bytes_per_second: f64,
    latency_us: Latency,
    /// Number of operations in each slice of 100 ms.
    slices: Vec<u64>,
}

pub fn run(options: &NeighboursOptions) -> Result<()> {
    let stop = Stop::on_signals()?;
    anyhow::ensure!(
        options.seconds >= 0.3,
        "--seconds {}: slices are 0.1 s, so 0.3 is the least",
        options.seconds
    );
    if let Some(folder) = &options.report {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("creating {}", folder.display()))?;
    }
    let device = match &options.target {
        Some(folder) => Device::Folder(folder.clone()),
        None => Device::Model(options.model.clone()),
    };
    let model = matches!(device, Device::Model(_));
    let wanted = match &options.rows[..] {
        [] => ALL.iter().map(|(_, row, _)| *row).filter(|row| row.is_default(model)).collect(),
        rows => rows.to_vec(),
    };
    let costs = costs(options, &device, &stop)?;
    let stage = Stage::new(&device, options, &stop)?;
    let known = stage.reckon_by(costs)?;
    let mut rounds: Vec<Vec<Round>> = wanted.iter().map(|_| Vec::new()).collect();
    let play_scene = |scene: &Scene| stage.play(scene);
    let end = play(options, &wanted, &known, &stop, &play_scene, &mut rounds);
    drop(stage);
    let interrupted = end.as_ref().is_err_and(|e| e.is::<Interrupted>());
    if end.is_ok() || (interrupted && rounds.iter().any(|r| !r.is_empty())) {
        let played = wanted.iter().zip(&rounds).filter(|(_, rounds)| !rounds.is_empty());
        let rows = played.map(|(row, rounds)| Played {
            row: row.name().into(),
            about: row.about().into(),
            figures: figures::of(*row, options.order, rounds, &known.costs, model),
            rounds: rounds.iter().map(clients).collect(),
        });
        let folder = options.target.clone().unwrap_or_else(std::env::temp_dir);
        let name = options
            .target
            .as_ref()
            .map_or("model".to_string(), |folder| folder.display().to_string());
        let rows = rows.collect();
        let (environment, command) = (environment(&folder, None), std::env::args().collect());
        tell(
            options,
            &Results { environment, command, device: name, costs: known.costs.clone(), rows },
        )?;
    }
    end
}

fn costs(options: &NeighboursOptions, device: &Device, stop: &Stop) -> Result<DeviceCosts> {
    let folder = match device {
        Device::Model(model) => return Ok(model.costs()),
        Device::Folder(folder) => folder,
    };
    if let Some(file) = &options.costs {
        let looking = || format!("looking at {}", folder.display());
        let open = std::fs::File::open(folder).with_context(looking)?;
        return DeviceCosts::load(
            file,
            &blockyard_ring::host::backing_device(open).with_context(looking)?.0,
        );
    }
    output::note(format_args!("calibrating the device of {}", folder.display()));
    calibrate::of_folder(folder, options.size, 16.0, stop)
}

/// Measures all rows in rounds. `measure` plays a scene, and returns the reports of its disks.
fn play(
    options: &NeighboursOptions,
    rows: &[Row],
    known: &Known,
    stop: &Stop,
    measure: &dyn Fn(&Scene) -> Result<Vec<Option<Report>>>,
    rounds: &mut [Vec<Round>],
) -> Result<()> {
    let settings = Settings {
        seconds: options.seconds,
        ops: options.ops,
        thrasher: options.thrasher,
        polite_by: options.polite_by,
        thrasher_by: options.thrasher_by,
    };
    let scenes: Vec<_> = rows.iter().map(|row| row.scenes(known, &settings)).collect();
    let measure = |turn: Turn| {
        let scene = &scenes[turn.row][turn.system];
        let reports = measure(scene).with_context(|| rows[turn.row].name().to_string())?;
        Ok((scene.name, reports))
    };
    let keep = |round, row: usize, played: Vec<_>| {
        rounds[row].push(Round(played.into_iter().map(|(_, scene)| scene).collect()));
        let name = rows[row].name();
        output::note(format_args!("round {} of {}: {name}", round + 1, options.rounds));
        Ok(())
    };
    Rounds::new(options.rounds, scenes.iter().map(Vec::len), stop).run_whole(measure, keep)
}

fn clients(round: &Round) -> Vec<Client> {
    let client = |scene: &'static str, disk: usize, report: &Report| Client {
        scene,
        disk,
        iops: report.iops,
        bytes_per_second: report.bytes_per_second,
        latency_us: report.latency_us.clone(),
        slices: report.slices.iter().map(|s| s.operations).collect(),
    };
    let of_scene = |(scene, reports): &(&'static str, Vec<Option<Report>>)| {
        let reports =
            reports.iter().enumerate().filter_map(|(disk, report)| Some((disk, report.as_ref()?)));
        reports.map(|(disk, report)| client(scene, disk, report)).collect::<Vec<_>>()
    };
    round.0.iter().flat_map(of_scene).collect()
}

fn tell(options: &NeighboursOptions, results: &Results) -> Result<()> {
    let json = serde_json::to_string(results)?;
    if let Some(folder) = &options.report {
        write(folder, &json, results)?;
    }
    if options.json {
        output::print(format_args!("{json}\n"))?;
    } else {
        output::print(table::table(&results.rows))?;
    }
    Ok(())
}

fn write(folder: &Path, json: &str, results: &Results) -> Result<()> {
    replace(&folder.join("neighbours.json"), json.as_bytes())?;
    let picture = table::picture(&results.rows)
        .file("Neighbours on one device, with fair shares and without");
    replace(&folder.join("neighbours.svg"), picture.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use clap::Parser;

    use super::*;
    use crate::client::LoadOptions;
    use crate::client::cpu::{BackEnd, Meter};
    use crate::client::load::{Slice, Tally};
    use crate::client::report::Target;
    use crate::scratch::Scratch;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: NeighboursOptions,
    }

    fn options(words: &[&str]) -> NeighboursOptions {
        Line::try_parse_from(["neighbours"].iter().chain(words)).unwrap().options
    }

    fn known() -> Known {
        Known { costs: DeviceCosts::default(), mean_d1: 100_000, mean_d8: 200_000 }
    }

    /// Returns the report of a client with so many operations of 200 us in a second.
    fn report(operations: u64) -> Report {
        let mut tally = Tally::new().unwrap();
        (tally.reads, tally.bytes, tally.elapsed_ns) =
            (operations, operations * 4096, 1_000_000_000);
        tally.latency.saturating_record_n(200_000, operations);
        tally.slices = vec![Slice { operations: operations / 10, bytes: 0, latency_ns: 0 }; 10];
        let options = LoadOptions::for_socket("s".into());
        let meter = Meter::new(BackEnd::Unknown).unwrap();
        Report::new(&options, Target::default(), &tally, &meter, 0)
    }

    /// Plays rows. Returns the names of the scenes in the order of their measurement, and the
    /// finished rounds.
    fn played(
        rows: &[Row],
        rounds: &str,
        answer: impl Fn(usize) -> Result<Vec<Option<Report>>>,
    ) -> (Result<()>, Vec<&'static str>, Vec<Vec<Round>>) {
        let scenes = RefCell::new(Vec::new());
        let measure = |scene: &Scene| {
            scenes.borrow_mut().push(scene.name);
            answer(scenes.borrow().len())
        };
        let mut finished: Vec<Vec<Round>> = rows.iter().map(|_| Vec::new()).collect();
        let options = options(&["--rounds", rounds]);
        let stop = Stop::default();
        let end = play(&options, rows, &known(), &stop, &measure, &mut finished);
        (end, scenes.into_inner(), finished)
    }

    #[test]
    fn each_round_plays_all_scenes_and_begins_with_another_one() {
        let rows = ["lone".parse().unwrap(), "reserve".parse().unwrap()];
        let (end, scenes, rounds) = played(&rows, "3", |_| Ok(Vec::new()));
        end.unwrap();
        let first = ["without", "with", "without, d1", "with, d1", "with", "unreserved"];
        let second = ["with", "without, d1", "with, d1", "without", "unreserved", "with"];
        let third = ["without, d1", "with, d1", "without", "with", "with", "unreserved"];
        assert_eq!(scenes, [first, second, third].concat());
        assert_eq!(rounds.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3]);
    }

    #[test]
    fn a_scene_that_fails_names_its_row_and_leaves_the_finished_rounds() {
        let rows = ["lone".parse().unwrap(), "burst".parse().unwrap()];
        let answer = |call| match call {
            // The seventh scene is in the second round of the first row.
            7 => Err(anyhow::anyhow!("disk lone: the server ended")),
            _ => Ok(vec![Some(report(1000))]),
        };
        let (end, _, rounds) = played(&rows, "5", answer);
        assert_eq!(format!("{:#}", end.unwrap_err()), "lone: disk lone: the server ended");
        assert_eq!(rounds.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn the_json_has_each_client_of_each_scene() {
        let round = Round(vec![
            ("alone", vec![Some(report(5_000)), None]),
            ("with", vec![Some(report(2_000)), Some(report(8_000))]),
        ]);
        let json = serde_json::to_value(clients(&round)).unwrap();
        let found: Vec<_> = json
            .as_array()
            .unwrap()
            .iter()
            .map(|c| (c["scene"].as_str().unwrap(), c["disk"].as_u64(), c["iops"].as_f64()))
            .collect();
        let rate = |iops: f64| Some(iops);
        assert_eq!(
            found,
            [
                ("alone", Some(0), rate(5_000.0)),
                ("with", Some(0), rate(2_000.0)),
                ("with", Some(1), rate(8_000.0)),
            ]
        );
        assert_eq!(json[2]["slices"], serde_json::json!(vec![800; 10]));
        let p99 = json[0]["latency_us"]["p99"].as_f64().unwrap();
        assert!((p99 - 200.0).abs() < 0.5, "{p99} us");
    }

    #[test]
    fn a_report_has_the_figures_and_the_picture_of_each_row() {
        let folder = Scratch::new();
        let row: Row = "thrash-d1".parse().unwrap();
        let pair = |own, other| vec![Some(report(own)), Some(report(other))];
        let rounds = [Round(vec![
            ("alone", vec![Some(report(4_000))]),
            ("saturated", vec![Some(report(10_000))]),
            ("without", pair(400, 9_000)),
            ("with", pair(3_900, 5_000)),
        ])];
        let figures = figures::of(row, Order::Together, &rounds, &known().costs, true);
        let played = Played {
            row: row.name().into(),
            about: row.about().into(),
            figures,
            rounds: rounds.iter().map(clients).collect(),
        };
        let results = Results {
            environment: vec![("kernel".into(), "7".into())],
            command: vec!["neighbours".into()],
            device: "model".into(),
            costs: DeviceCosts::default(),
            rows: vec![played],
        };
        let json = serde_json::to_string(&results).unwrap();
        write(&folder, &json, &results).unwrap();
        assert_eq!(folder.lines("neighbours.json").concat(), json);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["rows"][0]["rounds"][0].as_array().unwrap().len(), 6);
        let svg = std::fs::read_to_string(folder.join("neighbours.svg")).unwrap();
        assert!(svg.contains("thrash-d1: polite: random reads of 4 KiB, one at a time"), "{svg}");
        assert!(svg.contains("p99 without") && svg.trim_end().ends_with("</svg>"));
        let missing = write(Path::new("/nonexistent"), "{}", &results).unwrap_err();
        assert!(format!("{missing:#}").contains("/nonexistent/neighbours.json"), "{missing:#}");
    }

    #[test]
    fn options_that_do_not_fit_are_refused() {
        let refused = |words: &[&str]| {
            let error = Line::try_parse_from(["neighbours"].iter().chain(words)).err().unwrap();
            error.to_string()
        };
        assert!(refused(&["--target", "/d", "--model", "parallel=1"]).contains("--model"));
        assert!(refused(&["--costs", "c.toml"]).contains("--target"));
        assert!(refused(&["--rows", "thrash-d1,none"]).contains("\"none\" is no row"));
        let arrives: Vec<_> = ["together", "polite-first", "thrasher-first", "returns", "sleeps"]
            .map(|order| options(&["--order", order]).order.arrives())
            .into();
        assert_eq!(arrives, [false, false, true, true, true]);
        // The costs of a folder's device are those of the file, which must have the device.
        let folder = Scratch::new();
        let costs_file = folder.file("costs.toml", "");
        let (target, file) = (folder.to_str().unwrap(), costs_file.to_str().unwrap());
        let options = options(&["--target", target, "--costs", file]);
        let device = Device::Folder(folder.to_path_buf());
        let error = format!("{:#}", costs(&options, &device, &Stop::default()).unwrap_err());
        assert!(error.contains("bench calibrate") && error.contains("costs.toml"), "{error}");
    }
}
