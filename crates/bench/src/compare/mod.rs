//! `blockyard bench compare`: the same work on several systems, in interleaved rounds.
//!
//! ```text
//!   system  the compared systems       work         scripts, and their output
//!   stage   images, servers, guests    environment  the machine, for reports
//!   cpu     processor time             tables       the tables of docs/benchmark-tables.md
//!   blockdev  qemu-storage-daemon's nodes of an image
//!   trace     the lines of a script: marks by two clocks, data
//! ```
//! In: names of works and systems. Out: [`Results`], saved after each run; a table, and a report if
//! wanted. What must hold: `rounds` orders the measurements; a run that is interrupted, or that
//! fails, leaves each measurement before that.

mod blockdev;
mod cpu;
pub(crate) mod environment;
mod stage;
pub(crate) mod system;
mod tables;
mod trace;
mod workload;

use std::path::PathBuf;

use anyhow::{Context, Result};
use blockyard_program::output;

use self::stage::Stage;
use self::system::System;
use self::workload::{Amount, Workload};
use crate::client::{parse_seconds, parse_size};
use crate::process::Stop;
use crate::report;
use crate::results::{Results, Run};
use crate::rounds::{Rounds, Turn};

/// The same work on the host and in guests, in turn: a table, and with --report a page.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareOptions {
    /// What to do: rate:read, rate:write, rate:writesync, or job:NAME with a name of `bench job`
    /// [default: the three rates]
    #[arg(value_name = "WORK", value_parser = |s: &str| s.parse::<Workload>())]
    works: Vec<Workload>,
    /// host, uml-ubd, uml-ubd-sync, uml-blockyard, qemu-virtio, qemu-qsd, qemu-blockyard, nbd,
    /// nbd-qsd; with :qcow2 or :overlay for an image that is not raw [default: host and those of
    /// UML]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = |s: &str| s.parse::<System>())]
    systems: Vec<System>,
    /// How often each is measured
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Bytes of the disk [default: 300m; of a table its own]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Operations of a run, at most [default: 2000]; of the tables clients and overlays: instead
    /// of seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    ops: Option<u64>,
    /// Seconds of a run, at most [default: 20; of a table its own]
    #[arg(long, value_name = "S", value_parser = parse_seconds)]
    seconds: Option<f64>,
    /// Bytes of the smallest operation
    #[arg(long, value_name = "SIZE", default_value = "512", value_parser = parse_size)]
    min_size: u64,
    /// Bytes of the largest operation
    #[arg(long, value_name = "SIZE", default_value = "1m", value_parser = parse_size)]
    max_size: u64,
    /// Measure a table of docs/benchmark-tables.md instead, and print it as Markdown
    #[arg(long, value_enum, value_name = "NAME", conflicts_with_all = ["works", "systems", "report", "min_size", "max_size"])]
    table: Option<tables::TableName>,
    /// Only rows of the table with this text in their names
    #[arg(long, value_name = "TEXT", default_value = "", requires = "table")]
    only: String,
    /// Only systems of the table with this name; may be repeated
    #[arg(long = "peer", value_name = "NAME", requires = "table")]
    peers: Vec<String>,
    /// Measure this earlier build of the program blockyard too, and print the ratios (not for the
    /// tables `ublk` and `demo`). Without --peer no other systems are measured
    #[arg(long, value_name = "PROGRAM", requires = "table")]
    before: Option<PathBuf>,
    /// Kernel of the guest of the table `ublk` [default: 7]
    #[arg(long, value_name = "6|7", value_parser = ["6", "7"], requires = "table")]
    kernel: Option<String>,
    /// Processors of the guest of the table `uml`: a list, or any [default: any]
    #[arg(long, value_name = "LIST", requires = "table")]
    guest_cpus: Option<String>,
    /// Processors of the back end of the table `uml` [default: those of the guest]
    #[arg(long, value_name = "LIST", requires = "table")]
    server_cpus: Option<String>,
    /// Write a page with pictures (index.html) and all figures (results.json, results.csv) into
    /// this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print all figures as JSON instead of the table
    #[arg(long)]
    json: bool,
}

impl CompareOptions {
    fn amount(&self) -> Amount {
        Amount {
            ops: self.ops.unwrap_or(2000),
            seconds: self.seconds.unwrap_or(20.0),
            min_size: self.min_size,
            max_size: self.max_size,
        }
    }
}

const USUAL: [&str; 4] = ["host", "uml-ubd", "uml-ubd-sync", "uml-blockyard"];

pub fn run(options: &CompareOptions) -> Result<()> {
    let stop = Stop::on_signals()?;
    let guests = guests();
    if let Some(name) = options.table {
        let CompareOptions { rounds, seconds, ops, size, json, .. } = *options;
        let (only, peers, kernel) = (&options.only, &options.peers, options.kernel.as_deref());
        let (guest_cpus, server_cpus) =
            (options.guest_cpus.as_deref(), options.server_cpus.as_deref());
        let plan = tables::TablePlan {
            name,
            rounds,
            seconds,
            ops,
            size,
            only,
            peers,
            before: options.before.as_deref(),
            kernel,
            guest_cpus,
            server_cpus,
            json,
        };
        return tables::run(&plan, guests, stop);
    }
    let parsed =
        |names: &[&str]| names.iter().filter_map(|n| n.parse().ok()).collect::<Vec<System>>();
    let wanted = if options.systems.is_empty() { parsed(&USUAL) } else { options.systems.clone() };
    let works = match &options.works[..] {
        [] => ["rate:writesync", "rate:write", "rate:read"]
            .iter()
            .filter_map(|w| w.parse().ok())
            .collect(),
        works => works.to_vec(),
    };
    if let Some(folder) = &options.report {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("creating {}", folder.display()))?;
    }
    let temporary = std::env::temp_dir();
    let facts = environment::environment(
        options.report.as_deref().unwrap_or(&temporary),
        guests.as_deref(),
    );
    let mut results = Results::new(std::env::args().collect(), facts);
    let (mut systems, mut missing) = (Vec::new(), Vec::new());
    for system in wanted {
        match system.missing(guests.as_deref()) {
            None => systems.push(system),
            Some(why) => missing.push((system.to_string(), why)),
        }
    }
    for (system, why) in &missing {
        output::note(format_args!("{system} is left out: {why}"));
    }
    anyhow::ensure!(!systems.is_empty(), "none of the systems can be measured here");
    results.about = works.iter().map(|w| (w.to_string(), w.about(&options.amount()))).collect();
    results.about.extend(systems.iter().map(|s| (s.to_string(), s.about())));
    results.absent = missing;
    let mut stage = Stage::new(guests, options.size.unwrap_or(300 << 20), stop.clone())?;
    let amount = options.amount();
    let mut measure = |work: &Workload, system: &System| {
        work.read(stage.play(system, work.contents(), &work.script(&amount))?)
    };
    let end = rounds(options, &systems, &works, &stop, &mut measure, &mut results);
    drop(stage);
    if !results.runs.is_empty() {
        tell(options, &results)?;
    }
    end
}

/// Measures all works on all systems in interleaved rounds. `measure` runs a work on a system once.
fn rounds(
    options: &CompareOptions,
    systems: &[System],
    works: &[Workload],
    stop: &Stop,
    measure: &mut dyn FnMut(&Workload, &System) -> Result<Run>,
    results: &mut Results,
) -> Result<()> {
    let measure = |turn: Turn| {
        let (work, system) = (&works[turn.row], &systems[turn.system]);
        if let Some(why) = work.refuses(system) {
            if turn.round == 0 {
                output::note(format_args!("{work} is not done on {system}: {why}"));
            }
            return Ok(None);
        }
        Ok(Some(Run { round: turn.round + 1, ..measure(work, system)? }))
    };
    let keep = |turn: Turn, run: Option<Run>| {
        let Some(run) = run else { return Ok(()) };
        output::note(format_args!(
            "round {} of {}: {} on {}: {}",
            run.round,
            options.rounds,
            works[turn.row],
            systems[turn.system],
            report::figure(&run)
        ));
        results.runs.push(run);
        match &options.report {
            Some(folder) => results.save(folder),
            None => Ok(()),
        }
    };
    Rounds::new(options.rounds, works.iter().map(|_| systems.len()), stop).run(measure, keep)
}

fn tell(options: &CompareOptions, results: &Results) -> Result<()> {
    if let Some(folder) = &options.report {
        report::write(results, folder)?;
        output::note(format_args!("{} is written", folder.join("index.html").display()));
    }
    if options.json {
        output::print(format_args!("{}\n", serde_json::to_string(results)?))?;
    } else {
        output::print(report::table(results))?;
    }
    Ok(())
}

/// Returns the folder of the guests' runners: `$BLOCKYARD_GUESTS`, or that of the installed program
/// (in `bin` or in `libexec/blockyard`), or that of the checkout that it was built in.
fn guests() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let named = std::env::var_os("BLOCKYARD_GUESTS").map(PathBuf::from);
    let beside = ["../share/blockyard/guests", "../../share/blockyard/guests", "../../guests"]
        .map(|p| program.parent().map(|f| f.join(p)));
    let mut all = named.into_iter().chain(beside.into_iter().flatten());
    all.find(|folder| folder.join("lib.sh").exists())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::scratch::Scratch;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: CompareOptions,
    }

    fn options(words: &[&str]) -> CompareOptions {
        Line::try_parse_from(["compare"].iter().chain(words)).unwrap().options
    }

    fn systems(names: &[&str]) -> Vec<System> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn works(names: &[&str]) -> Vec<Workload> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    /// Returns a run of a second.
    fn a_run(work: &Workload, system: &System) -> Run {
        let (work, system) = (work.to_string(), system.to_string());
        Run { work, system, seconds: 1.0, operations: 100, ..Run::default() }
    }

    #[test]
    fn each_round_measures_all_systems_and_begins_with_another_one() {
        let (mut calls, mut results) = (Vec::new(), Results::default());
        let mut measure = |work: &Workload, system: &System| {
            calls.push(format!("{work} {system}"));
            Ok(a_run(work, system))
        };
        let names = ["host", "nbd", "uml-ubd"];
        // A job needs fio, which has no NBD.
        let works = works(&["rate:read", "job:fileserver"]);
        let options = options(&["--rounds", "3"]);
        let stop = Stop::default();
        rounds(&options, &systems(&names), &works, &stop, &mut measure, &mut results).unwrap();
        let reads: Vec<_> = calls.iter().filter(|call| call.starts_with("rate:read")).collect();
        let order = ["host", "nbd", "uml-ubd", "nbd", "uml-ubd", "host", "uml-ubd", "host", "nbd"];
        assert!(reads.iter().map(|call| &call[10..]).eq(order), "{reads:?}");
        let jobs: Vec<_> = calls.iter().filter(|call| call.starts_with("job:")).collect();
        let order = ["host", "uml-ubd", "uml-ubd", "host", "uml-ubd", "host"];
        assert!(jobs.iter().map(|call| &call[15..]).eq(order), "{jobs:?}");
        let of_round = |round| results.runs.iter().filter(|run| run.round == round).count();
        assert_eq!([0, 1, 2, 3, 4].map(of_round), [0, 5, 5, 5, 0]);
    }

    #[test]
    fn the_report_of_a_run_that_fails_has_the_measurements_before_it() {
        let folder = Scratch::new();
        let mut results = Results::new(Vec::new(), Vec::new());
        let mut left = 4;
        let mut measure = |work: &Workload, system: &System| {
            left -= 1;
            anyhow::ensure!(left > 0, "{system}: the script says: no space");
            Ok(a_run(work, system))
        };
        let options = options(&["--rounds", "5", "--report", folder.to_str().unwrap()]);
        let (systems, works) = (systems(&["host", "nbd"]), works(&["rate:write"]));
        let stop = Stop::default();
        let end = rounds(&options, &systems, &works, &stop, &mut measure, &mut results);
        let error = end.unwrap_err();
        assert_eq!(error.to_string(), "host: the script says: no space");
        let saved = Results::load(&folder).unwrap();
        let runs: Vec<_> = saved.runs.iter().map(|run| (run.round, &*run.system)).collect();
        assert_eq!(runs, [(1, "host"), (1, "nbd"), (2, "nbd")]);
    }

    #[test]
    fn options_that_do_not_fit_are_refused_and_named() {
        let refused = |words: &[&str]| {
            let error = Line::try_parse_from(["compare"].iter().chain(words)).err().unwrap();
            error.to_string()
        };
        assert!(refused(&["rate:sideways"]).contains("sideways"));
        assert!(refused(&["--systems", "host,qemu"]).contains("\"qemu\" is none of host, uml-ubd"));
        assert!(
            refused(&["--systems", "host:qcow2"]).contains("host is measured on raw images only")
        );
        assert!(refused(&["--table", "nbd", "--report", "d"]).contains("--report"));
        assert!(refused(&["--only", "4k"]).contains("--table"));
        assert!(refused(&["--rounds", "0"]).contains("1..=1000"));
        assert_eq!(options(&["--seconds", "3", "--ops", "7"]).amount().seconds, 3.0);
        assert_eq!((options(&[]).amount().seconds, options(&[]).amount().ops), (20.0, 2000));
        assert_eq!(options(&["--ops", "7"]).amount().ops, 7);
    }
}
