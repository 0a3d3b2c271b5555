//! `blockyard bench xen`: the blkif back end and a front end of our own in this process, beside the
//! vhost-user back end on the same image, under the same load.
//!
//! ```text
//!   image ── disk ── reactors ─┬─ vhost-user ── socket ──────────────── load
//!                              └─ xen ── machine (no hypervisor) ────── load
//! ```
//! In: an image, a load. Out: a table, or JSON. What must hold: all rows use the same disk,
//! reactors and load, one after the other, in each round. The back end's CPU time is that of this
//! process without the load's threads.

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

use crate::client;
use crate::client::report::Report;
use crate::client::xen::{FrontEnd, XenLoadOptions};

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
    round: u16,
    report: Report,
}

pub fn run(options: &CompareXenOptions) -> anyhow::Result<()> {
    let rows: Vec<_> = ROWS.into_iter().filter(|(name, _)| name.contains(&options.only)).collect();
    anyhow::ensure!(!rows.is_empty(), "--only {}: no row has such a name", options.only);
    let stage = Stage::new(options)?;
    let mut measured = Vec::new();
    for round in 0..options.rounds {
        for (row, kind) in &rows {
            let report = stage.measure(*kind).with_context(|| format!("row \"{row}\""))?;
            if let Some(first) = &report.first_error {
                anyhow::bail!(
                    "row \"{row}\": {} operations failed, the first: {first}",
                    report.errors
                );
            }
            measured.push(Measured { row, round, report });
        }
    }
    anyhow::ensure!(
        blockyard_export::close(&stage.disk, &stage.reactors),
        "closing {}",
        options.image.display()
    );
    let text = if options.json {
        format!("{}\n", serde_json::to_string(&measured)?)
    } else {
        table(&rows, &measured)
    };
    Ok(output::print(text)?)
}

struct Stage<'a> {
    options: &'a CompareXenOptions,
    disk: Arc<Disk>,
    reactors: Arc<Reactors>,
    socket: PathBuf,
}

impl<'a> Stage<'a> {
    fn new(options: &'a CompareXenOptions) -> anyhow::Result<Self> {
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
        Ok(Stage { options, disk: Arc::new(Disk::new(disk, source)), reactors, socket })
    }

    fn measure(&self, kind: BackEndKind) -> anyhow::Result<Report> {
        match kind {
            BackEndKind::VhostUser(poll) => self.vhost_user(poll),
            BackEndKind::Xen { data, persistent } => self.xen(data, persistent),
        }
    }

    fn vhost_user(&self, poll: PollMode) -> anyhow::Result<Report> {
        let load = self.options.load.options(self.socket.clone());
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
        let load = self.options.load.options(self.socket.clone());
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
