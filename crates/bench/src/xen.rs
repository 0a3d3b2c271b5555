//! `blockyard bench xen`: the blkif back end and a front end of our own in this process, beside the
//! vhost-user back end on the same image, under the same load.
//!
//! ```text
//!   image ── disk ── reactors ─┬─ vhost-user ── socket ──────────────── load
//!                              └─ xen ── machine (no hypervisor) ────── load
//! ```
//! In: an image, a load. Out: a table, or JSON; after an interruption that of the finished rounds.
//! What must hold: all rows use the same disk, reactors and load; `rounds` orders them. The back
//! end's CPU time is that of this process without the load's threads.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_export::vhost_user::{QueueShape, SecondClient, Tuning, VhostUser};
use blockyard_export::xen::{Name, Xen, XenData, XenOptions};
use blockyard_export::{Export, Listener, PollMode, Reactors, STOP_TIME};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_program::output;
use blockyard_ring::xen::{Host, Machine};
use serde::Serialize;

use crate::client::report::Report;
use crate::client::xen::{FrontEnd, XenLoadOptions};
use crate::client::{self, LoadOptions};
use crate::process::{Interrupted, Stop};
use crate::rounds::{Rounds, Turn};

/// Domain id and device name of the front end that makes the load.
const DOMAIN: u16 = 1;
const DEVICE: &str = "xvda";

#[derive(clap::Args)]
pub struct CompareXenOptions {
    /// The image, or null:SIZE, ram:SIZE. Writes of the load change it.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    #[command(flatten)]
    load: XenLoadOptions,
    /// Cache mode of the disk, as `serve` has it.
    #[arg(long, value_name = "MODE", default_value = "none")]
    cache: CacheMode,
    /// Threads that serve queues.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    reactors: u16,
    /// Number of rounds; the table has the round with the median IOPS.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Only rows with this text in their name.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// A JSON array of all measurements instead of the table.
    #[arg(long)]
    json: bool,
}

/// A back end, and the settings of its front end.
#[derive(Clone, Copy)]
enum BackEndKind {
    VhostUser(PollMode),
    Xen { data: XenData, persistent: bool },
}

/// `auto` chooses the first row of Xen for front ends with persistent grants, and the last row for
/// others.
const ROWS: [(&str, BackEndKind); 5] = [
    ("vhost-user", BackEndKind::VhostUser(PollMode::Auto)),
    ("vhost-user, no polling", BackEndKind::VhostUser(PollMode::Off)),
    ("xen, persistent grants", BackEndKind::Xen { data: XenData::Auto, persistent: true }),
    ("xen, mapped", BackEndKind::Xen { data: XenData::Map, persistent: false }),
    ("xen, copied", BackEndKind::Xen { data: XenData::Auto, persistent: false }),
];

#[derive(Serialize)]
struct Measured {
    row: &'static str,
    round: u32,
    report: Report,
}

pub fn run(options: &CompareXenOptions) -> anyhow::Result<()> {
    let rows: Vec<_> = ROWS.into_iter().filter(|(name, _)| name.contains(&options.only)).collect();
    anyhow::ensure!(!rows.is_empty(), "--only {}: no row has such a name", options.only);
    let stop = Stop::on_signals()?;
    let stage = Stage::new(options, &stop)?;
    let mut measured = Vec::new();
    let end = play(&rows, options.rounds, &stop, &|kind| stage.measure(kind), &mut measured);
    if end.as_ref().is_err_and(|e| !e.is::<Interrupted>()) {
        return end;
    }
    anyhow::ensure!(
        blockyard_export::close(&stage.disk, &stage.reactors),
        "closing {}",
        options.image.display()
    );
    if measured.is_empty() {
        return end;
    }
    let text = if options.json {
        format!("{}\n", serde_json::to_string(&measured)?)
    } else {
        table(&rows, &measured)
    };
    output::print(text)?;
    end
}

/// Measures all rows in rounds, and adds the reports of each finished round.
fn play(
    rows: &[(&'static str, BackEndKind)],
    rounds: u16,
    stop: &Stop,
    measure: &dyn Fn(BackEndKind) -> anyhow::Result<Report>,
    measured: &mut Vec<Measured>,
) -> anyhow::Result<()> {
    let measure = |turn: Turn| {
        let (row, kind) = rows[turn.system];
        let report = measure(kind).with_context(|| format!("row \"{row}\""))?;
        if let Some(first) = &report.first_error {
            anyhow::bail!("row \"{row}\": {} operations failed, the first: {first}", report.errors);
        }
        Ok(report)
    };
    let keep = |round, _, reports: Vec<(usize, Report)>| {
        let of_row = |(row, report): (usize, Report)| Measured { row: rows[row].0, round, report };
        measured.extend(reports.into_iter().map(of_row));
        Ok(())
    };
    // The back ends are the systems of one row.
    Rounds::new(rounds.into(), [rows.len()], stop).run_whole(measure, keep)
}

struct Stage<'a> {
    options: &'a CompareXenOptions,
    stop: Stop,
    disk: Arc<Disk>,
    reactors: Arc<Reactors>,
    socket: PathBuf,
}

impl<'a> Stage<'a> {
    fn new(options: &'a CompareXenOptions, stop: &Stop) -> anyhow::Result<Self> {
        let chain = ChainOptions { cache: options.cache, ..ChainOptions::new(&options.image) };
        let source =
            Source::open(&chain).with_context(|| format!("opening {}", options.image.display()))?;
        let disk = DiskOptions {
            name: "bench".into(),
            serial: "bench".into(),
            read_only: false,
            cache: options.cache,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let reactors = Arc::new(Reactors::start(options.reactors.into(), &[])?);
        let socket =
            std::env::temp_dir().join(format!("blockyard-bench-{}.sock", std::process::id()));
        let disk = Arc::new(Disk::new(disk, source));
        Ok(Stage { options, stop: stop.clone(), disk, reactors, socket })
    }

    fn load(&self) -> LoadOptions {
        LoadOptions { stop: self.stop.clone(), ..self.options.load.options(self.socket.clone()) }
    }

    fn measure(&self, kind: BackEndKind) -> anyhow::Result<Report> {
        match kind {
            BackEndKind::VhostUser(poll) => self.vhost_user(poll),
            BackEndKind::Xen { data, persistent } => self.xen(data, persistent),
        }
    }

    fn vhost_user(&self, poll: PollMode) -> anyhow::Result<Report> {
        let load = self.load();
        let tuning = Tuning {
            poll,
            in_band: false,
            pin_memory: false,
            any_memory_file: false,
            second_client: SecondClient::Refuse,
        };
        // A request takes three descriptors: header, data and status.
        let size = (load.depth * 3).next_power_of_two().max(128);
        let shape = QueueShape { queues: load.queues, size };
        let listener = Listener::bind(&self.socket)?;
        let mut export =
            VhostUser::start(self.disk.clone(), listener, shape, tuning, self.reactors.clone())?;
        let report = client::measure(&load);
        export.stop(Instant::now() + STOP_TIME);
        report
    }

    fn xen(&self, data: XenData, persistent: bool) -> anyhow::Result<Report> {
        let load = self.load();
        let machine = Machine::new();
        let device: Name = DEVICE.parse().map_err(anyhow::Error::msg)?;
        let options =
            XenOptions { domain: DOMAIN, device, queues: load.queues, data, records: None };
        let host = Host::Machine(machine.clone());
        // A connection of the domain creates its first nodes.
        let _domain = machine.store(DOMAIN)?;
        let mut export =
            Xen::start(self.disk.clone(), &options, &host, self.reactors.clone(), || ())?;
        let front_end = FrontEnd { domain: DOMAIN, device: device.number(), persistent };
        let report = client::xen::measure(&load, &machine, front_end);
        export.stop(Instant::now() + STOP_TIME);
        report
    }
}

/// Returns a line for each row, from the round with the median IOPS.
fn table(rows: &[(&'static str, BackEndKind)], measured: &[Measured]) -> String {
    let mut text = format!(
        "{:<24}{:>10}{:>12}{:>13}{:>10}{:>10}{:>9}{:>9}{:>9}{:>10}\n",
        "",
        "IOPS",
        "CPU us/I/O",
        "IOPS/core",
        "I/O/kick",
        "I/O/sig",
        "p99 us",
        "maps/IO",
        "cop/IO",
        "gcalls/IO"
    );
    for (name, _) in rows {
        let mut reports: Vec<_> =
            measured.iter().filter(|m| m.row == *name).map(|m| &m.report).collect();
        reports.sort_by(|a, b| a.iops.total_cmp(&b.iops));
        let Some(report) = reports.get(reports.len() / 2) else { continue };
        let cpu = report.backend_cpu.as_ref();
        let per =
            |per_io: f64| if per_io > 0.0 { format!("{:.1}", 1.0 / per_io) } else { "-".into() };
        let grants = report.grants.map(|g| [g.maps_per_io, g.copies_per_io, g.calls_per_io]);
        let grant = |at: usize| grants.map_or("-".into(), |all| format!("{:.3}", all[at]));
        text += &format!(
            "{name:<24}{:>10.0}{:>12.2}{:>13.0}{:>10}{:>10}{:>9.0}{:>9}{:>9}{:>9}\n",
            report.iops,
            cpu.map_or(0.0, |cpu| cpu.seconds_per_million_ios),
            cpu.map_or(0.0, |cpu| cpu.iops_per_core),
            per(report.kicks_per_io),
            per(report.signals_per_io),
            report.latency_us.p99,
            grant(0),
            grant(1),
            grant(2),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::client::cpu::{BackEnd, Meter};
    use crate::client::load::Tally;
    use crate::client::report::Target;

    /// Returns the report of this number of reads in a second.
    fn report(reads: u64, first_error: Option<&str>) -> Report {
        let mut tally = Tally::new().unwrap();
        (tally.reads, tally.elapsed_ns) = (reads, 1_000_000_000);
        (tally.errors, tally.first_error) =
            (u64::from(first_error.is_some()), first_error.map(Into::into));
        let options = LoadOptions::for_socket("s".into());
        Report::new(&options, Target::default(), &tally, &Meter::new(BackEnd::Unknown).unwrap(), 0)
    }

    /// Plays three rounds of two rows. `measure` gets the number of the measurement, from 1 on.
    fn played(
        stop: &Stop,
        measure: impl Fn(u64) -> Report,
    ) -> (anyhow::Result<()>, Vec<(&'static str, u32, f64)>) {
        let (calls, mut measured) = (Cell::new(0), Vec::new());
        let next = |_| {
            calls.set(calls.get() + 1);
            Ok(measure(calls.get()))
        };
        let end = play(&ROWS[..2], 3, stop, &next, &mut measured);
        (end, measured.iter().map(|m| (m.row, m.round, m.report.iops)).collect())
    }

    const FIRST: [(&str, u32, f64); 2] =
        [("vhost-user", 0, 1.0), ("vhost-user, no polling", 0, 2.0)];

    #[test]
    fn each_round_begins_with_another_row_and_the_table_has_the_median() {
        let (end, measured) = played(&Stop::default(), |call| report(call, None));
        end.unwrap();
        let rest = [
            ("vhost-user, no polling", 1, 3.0),
            ("vhost-user", 1, 4.0),
            ("vhost-user", 2, 5.0),
            ("vhost-user, no polling", 2, 6.0),
        ];
        assert_eq!(measured, [&FIRST[..], &rest].concat());
        let all: Vec<_> = measured
            .iter()
            .map(|(row, round, iops)| Measured {
                row,
                round: *round,
                report: report(*iops as u64, None),
            })
            .collect();
        let table = table(&ROWS[..2], &all);
        let iops: Vec<_> = table.lines().skip(1).map(|l| l[24..34].trim()).collect();
        assert_eq!(iops, ["4", "3"], "{table}");
    }

    #[test]
    fn an_interruption_or_a_failed_operation_leaves_the_finished_rounds() {
        let stop = Stop::default();
        let (end, measured) = played(&stop, |call| {
            if call == 4 {
                stop.request();
            }
            report(call, None)
        });
        assert!(end.unwrap_err().is::<Interrupted>());
        assert_eq!(measured, FIRST);
        let failed = |call| report(call, (call == 3).then_some("read of 512 bytes"));
        let (end, measured) = played(&Stop::default(), failed);
        let said = format!("{:#}", end.unwrap_err());
        let row = "row \"vhost-user, no polling\"";
        assert_eq!(said, format!("{row}: 1 operations failed, the first: read of 512 bytes"));
        assert_eq!(measured, FIRST);
    }
}
