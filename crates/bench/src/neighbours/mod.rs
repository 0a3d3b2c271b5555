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
use self::scene::Export;
use self::stage::Stage;
use self::thrasher::ThrasherKind;
use crate::calibrate;
use crate::client::report::{Latency, Report};
use crate::client::{parse_seconds, parse_size};
use crate::compare::environment::environment;
use crate::process::{Interrupted, Stop};

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
    let end = play(options, &wanted, &known, &stage, &mut rounds);
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

fn play(
    options: &NeighboursOptions,
    rows: &[Row],
    known: &Known,
    stage: &Stage,
    rounds: &mut [Vec<Round>],
) -> Result<()> {
    let settings = Settings {
        seconds: options.seconds,
        thrasher: options.thrasher,
        polite_by: options.polite_by,
        thrasher_by: options.thrasher_by,
    };
    for round in 0..options.rounds {
        for (row, rounds) in rows.iter().zip(&mut *rounds) {
            let scenes = row.scenes(known, &settings);
            let first = round as usize % scenes.len();
            let mut played = Round(Vec::new());
            for scene in scenes[first..].iter().chain(&scenes[..first]) {
                played
                    .0
                    .push((scene.name, stage.play(scene).with_context(|| row.name().to_string())?));
            }
            output::note(format_args!("round {} of {}: {}", round + 1, options.rounds, row.name()));
            rounds.push(played);
        }
    }
    Ok(())
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
