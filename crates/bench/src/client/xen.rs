//! Runs a load on a Xen back end in this process, over a [`Machine`]. The load is that of the other
//! targets.
//!
//! In: options, a machine, and a device that a back end has made there. Out: the report, with the
//! back end's grant operations. What must hold: a back end that hangs ends the run with an error.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use blockyard_driver::xen::{Offer, Plan, Queue, Session, state};
use blockyard_ring::xen::Machine;
use serde::Serialize;

use super::cpu::BackEnd;
use super::crew::Crew;
use super::report::{Grants, Report, Target};
use super::workload::Pattern;
use super::{LoadOptions, LoadSetup, Sizes, parse_seconds, parse_size, parse_split};

/// Options of a load that several back ends of this process serve in turn.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct XenLoadOptions {
    /// What to do: one pattern of reads and writes
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    pub rw: Pattern,
    /// Reads in a hundred operations, for randrw and rw
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Bytes of one operation, a multiple of 512, at most 1m (suffixes k, m)
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = parse_size)]
    pub bs: u64,
    /// Operations of several sizes: SIZE/PERCENT:..., as fio's option of this name (not with
    /// --verify)
    #[arg(long, value_name = "LIST", conflicts_with_all = ["bs", "verify"], value_parser = parse_split)]
    pub bssplit: Option<Sizes>,
    /// Operations in flight, each queue
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=512))]
    pub depth: u16,
    /// Queues, one thread each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
    pub queues: u16,
    /// Seconds to measure, each time
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_seconds)]
    pub runtime: f64,
    /// Operations to do in all, instead of a runtime
    #[arg(long, value_name = "N", conflicts_with = "runtime", value_parser = clap::value_parser!(u64).range(1..))]
    pub ops: Option<u64>,
    /// Give every block a header and a CRC32C, check what is read, and read back all that was
    /// written at the end
    #[arg(long)]
    pub verify: bool,
}

impl XenLoadOptions {
    /// Returns the load as options for [`super::measure`] and [`measure`], with a back end of this
    /// process at `socket`.
    pub fn options(&self, socket: PathBuf) -> LoadOptions {
        let XenLoadOptions { rw, rwmixread, bs, bssplit, depth, queues, runtime, ops, verify } =
            self.clone();
        let defaults = LoadOptions::for_socket(socket);
        let load = LoadOptions {
            rw,
            rwmixread,
            bs,
            bssplit,
            depth,
            queues,
            runtime,
            ops,
            verify,
            ..defaults
        };
        LoadOptions { back_end_is_here: true, ..load }
    }
}

/// The device, and the settings of its front end.
#[derive(Clone, Copy, Debug)]
pub struct FrontEnd {
    pub domain: u16,
    pub device: u32,
    /// Use persistent grants, if the back end offers them.
    pub persistent: bool,
}

/// Runs a load by a front end in a new domain of `machine`. Ignores the socket in `options`.
pub fn measure(options: &LoadOptions, machine: &Machine, front_end: FrontEnd) -> Result<Report> {
    if let Some(options) = options.in_smallest_blocks() {
        return measure(&options, machine, front_end);
    }
    options.check()?;
    let mut plan =
        Plan::new(options.queues, options.depth, options.largest() as u32, front_end.persistent);
    plan.limit = Duration::from_secs_f64(options.timeout.min(10.0));
    let Session { mut front, queues, offer, plan } =
        Session::start(machine, front_end.domain, front_end.device, &plan)?;
    let setup = setup(options, &offer)?;
    let target = Target {
        kind: "xen",
        capacity_bytes: offer.sectors * 512,
        ring: Some("blkif"),
        queue_size: Some(plan.terms.abi.entries(plan.terms.ring_pages()) as u16),
        seed: setup.seed,
        ..Target::default()
    };
    let crew = Crew::run(&setup, queues, BackEnd::Here, |queue| queue.ring.event().try_clone())?;
    front.set("state", state::CLOSING)?;
    front.close()?;
    anyhow::ensure!(
        front.domain.mapped() == 0,
        "the back end has closed the device, and left pages mapped"
    );
    let mut report = Report::new(options, target, &crew.tally, &crew.meter, 0);
    report.grants = Some(grants(&crew.queues, report.operations));
    report.compared()
}

fn setup<'a>(options: &'a LoadOptions, offer: &Offer) -> Result<LoadSetup<'a>> {
    let block = offer.sector_size.max(1);
    anyhow::ensure!(
        options.bs.is_multiple_of(block),
        "--bs {}: the disk has blocks of {block}",
        options.bs
    );
    anyhow::ensure!(!(offer.read_only && options.rw.writes()), "the disk is read-only");
    anyhow::ensure!(
        !options.flushes() || offer.flush,
        "--flush-every, --end-flush: the back end has no flush"
    );
    anyhow::ensure!(
        options.rw != Pattern::Randtrim || offer.discard,
        "--rw randtrim: the back end has no discard"
    );
    LoadSetup::new(options, offer.sectors * 512)
}

/// Returns the grant operations for each operation of the load. The queues are those of a run that
/// has ended.
fn grants(queues: &[Box<Queue>], operations: u64) -> Grants {
    let marks = || queues.iter().flat_map(|queue| &queue.marks);
    // A count never falls, so the smallest mark is the start, and the largest is the end.
    let from = marks().min_by_key(|mark| mark.calls()).copied().unwrap_or_default();
    let to = marks().max_by_key(|mark| mark.calls()).copied().unwrap_or_default();
    let per = |count: u64| count as f64 / operations.max(1) as f64;
    Grants {
        maps_per_io: per(to.mapped - from.mapped),
        copies_per_io: per(to.copied - from.copied),
        calls_per_io: per(to.calls() - from.calls()),
        still_mapped: queues.iter().map(|queue| queue.still_mapped).sum(),
    }
}
