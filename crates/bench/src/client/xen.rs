//! Runs a load on a Xen back end in this process, over a [`Machine`]. The load is that of the other
//! targets.
//!
//! In: options, a machine, and a device that a back end has made there. Out: the report, with the
//! back end's grant operations. What must hold: a back end that hangs ends the run with an error.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_driver::xen::{Offer, Plan, Queue, Session, state};
use blockyard_ring::xen::Machine;
use blockyard_ring::xen::machine::GrantCounts;
use rustix::event::EventfdFlags;
use serde::Serialize;

use super::cpu::{BackEnd, Meter};
use super::load::Tally;
use super::report::{Grants, Report, Target};
use super::worker::{Event, Outbox, STOP, Shared, Wiring, Worker};
use super::workload::Pattern;
use super::{LoadOptions, LoadSetup, Sizes, parse_seconds, parse_size, parse_split};

/// Interval at which the supervisor checks the progress of the workers.
const WATCH: Duration = Duration::from_millis(250);

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
    let mut run = Run::start(&setup, queues)?;
    let finished = run.watch();
    run.end();
    finished?;
    front.set("state", state::CLOSING)?;
    front.close()?;
    anyhow::ensure!(
        front.domain.mapped() == 0,
        "the back end has closed the device, and left pages mapped"
    );
    let mut report = Report::new(options, target, &run.tally, &run.meter, 0);
    report.grants = Some(run.grants(report.operations));
    Ok(report)
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
        options.flush_every == 0 || offer.flush,
        "--flush-every: the back end has no flush"
    );
    anyhow::ensure!(
        options.rw != Pattern::Randtrim || offer.discard,
        "--rw randtrim: the back end has no discard"
    );
    LoadSetup::new(options, offer.sectors * 512)
}

struct Hand {
    shared: Arc<Shared>,
    event: std::os::fd::OwnedFd,
    thread: std::thread::JoinHandle<()>,
    is_over: bool,
}

struct Run<'a> {
    options: &'a LoadOptions,
    hands: Vec<Hand>,
    events: Receiver<Event<Queue>>,
    tally: Tally,
    meter: Meter,
    /// Counts of grant operations, each from the time when a queue's measured part began or ended.
    marks: Vec<GrantCounts>,
    still_mapped: u64,
}

impl<'a> Run<'a> {
    fn start(setup: &LoadSetup<'a>, queues: Vec<Queue>) -> Result<Self> {
        let options = setup.options;
        let (sender, events) = std::sync::mpsc::channel();
        let bell =
            Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let meter = Meter::new(BackEnd::Here)?;
        let (hands, marks, still_mapped) = Default::default();
        let mut run =
            Run { options, hands, events, tally: Tally::new()?, meter, marks, still_mapped };
        let filler = if options.rw.writes() { setup.filler() } else { Vec::new() };
        let epoch = Instant::now();
        for (index, queue) in queues.into_iter().enumerate() {
            (0..options.depth).for_each(|slot| queue.write_data(slot, &filler));
            let shared = Arc::new(Shared::default());
            let event = queue.ring.event().try_clone()?;
            let wiring = Wiring {
                index,
                shared: shared.clone(),
                outbox: Outbox { events: sender.clone(), bell: bell.clone() },
                // A worker pauses only when its back end is replaced. This back end stays for the
                // whole run.
                resume: std::sync::mpsc::channel().1,
                epoch,
                block_size: options.bs as u32,
                depth: options.depth,
                poll: options.poll,
                inflight_known: true,
            };
            let worker = Worker::new(queue, setup.load(index as u16)?, wiring);
            let thread = std::thread::Builder::new()
                .name(format!("queue{index}"))
                .spawn(move || worker.run())?;
            run.hands.push(Hand { shared, event, thread, is_over: false });
        }
        Ok(run)
    }

    /// Waits until every worker has ended.
    fn watch(&mut self) -> Result<()> {
        let limit = Duration::from_secs_f64(self.options.timeout);
        let mut progress = vec![(0, Instant::now()); self.hands.len()];
        while self.hands.iter().any(|hand| !hand.is_over) {
            match self.events.recv_timeout(WATCH) {
                Ok(event) => self.take(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => anyhow::bail!("a worker thread has died"),
            }
            for (index, (seen, hand)) in progress.iter_mut().zip(&self.hands).enumerate() {
                let now = hand.shared.progress.load(Ordering::Relaxed);
                if now != seen.0 || hand.is_over {
                    *seen = (now, Instant::now());
                }
                anyhow::ensure!(
                    seen.1.elapsed() < limit,
                    "queue {index}: the back end finished nothing for {limit:?}"
                );
            }
        }
        Ok(())
    }

    fn take(&mut self, event: Event<Queue>) -> Result<()> {
        match event {
            Event::Begin => self.meter.begin()?,
            Event::End => self.meter.end(),
            Event::Paused { .. } => {}
            Event::Over { index, queue, result } => {
                self.hands[index].is_over = true;
                self.still_mapped += queue.still_mapped;
                self.marks.extend_from_slice(&queue.marks);
                let mut load = result.with_context(|| format!("queue {index}"))?;
                load.tally.verified = load.verifier.as_ref().map_or(0, |v| v.checked);
                self.tally.merge(load.tally)?;
            }
        }
        Ok(())
    }

    /// Ends the workers, and waits for them.
    fn end(&mut self) {
        for hand in &self.hands {
            hand.shared.command.store(STOP, Ordering::Release);
            let _ = rustix::io::write(&hand.event, &1u64.to_ne_bytes());
        }
        self.hands.drain(..).for_each(|hand| drop(hand.thread.join()));
    }

    fn grants(&self, operations: u64) -> Grants {
        // A count never falls, so the smallest mark is the start, and the largest is the end.
        let from = self.marks.iter().min_by_key(|mark| mark.calls()).copied().unwrap_or_default();
        let to = self.marks.iter().max_by_key(|mark| mark.calls()).copied().unwrap_or_default();
        let per = |count: u64| count as f64 / operations.max(1) as f64;
        Grants {
            maps_per_io: per(to.mapped - from.mapped),
            copies_per_io: per(to.copied - from.copied),
            calls_per_io: per(to.calls() - from.calls()),
            still_mapped: self.still_mapped,
        }
    }
}
