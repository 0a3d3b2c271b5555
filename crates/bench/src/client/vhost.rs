//! The run on a vhost-user-blk back end: owns the connection, starts the workers, supervises both.
//!
//! In: options and a path. Out: the report. What must hold: no worker touches its ring while a new
//! back end takes it over; a back end that disconnects or hangs ends the run with an error.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_driver::connection::{PROTOCOL, PROTOCOL_WITHOUT_INFLIGHT};
use blockyard_driver::{Link, PackedRing, Plan, Queue, Ring, RingSetup, SplitRing, feature, ring};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::cpu::Meter;
use super::load::Tally;
use super::report::{Report, Target};
use super::worker::{Event, Outbox, PAUSE, RUN, STOP, Shared, Wiring, Worker};
use super::workload::Pattern;
use super::{LoadOptions, LoadSetup};

/// Maximum time to wait for the next back end after one has disconnected.
const AWAY: Duration = Duration::from_secs(60);
/// Interval at which the supervisor checks the progress of the workers.
const WATCH: Duration = Duration::from_millis(250);

pub fn run(options: &LoadOptions, socket: &Path) -> Result<Report> {
    if options.packed {
        drive::<PackedRing>(options, socket)
    } else {
        drive::<SplitRing>(options, socket)
    }
}

fn plan(options: &LoadOptions) -> Plan {
    let chain = if options.indirect { 1 } else { ring::CHAIN_MAX };
    let fits = (usize::from(options.depth) * chain).next_power_of_two().clamp(128, 1 << 15) as u16;
    let flush = if options.flushes() { feature::FLUSH } else { 0 };
    let discard = if options.rw == Pattern::Randtrim { feature::DISCARD } else { 0 };
    let mq = if options.queues > 1 { feature::MQ } else { 0 };
    Plan {
        queues: options.queues,
        queue_size: options.queue_size.unwrap_or(fits),
        slots: options.depth,
        data_len: options.largest() as u32,
        event_idx: !options.no_event_idx,
        indirect: options.indirect,
        required: flush | discard | mq,
        protocol: if options.no_inflight { PROTOCOL_WITHOUT_INFLIGHT } else { PROTOCOL },
        answer_limit: Duration::from_secs_f64(options.timeout.min(10.0)),
        ..Plan::default()
    }
}

fn drive<R: Ring>(options: &LoadOptions, socket: &Path) -> Result<Report> {
    let mut link = Link::open::<R>(socket, &plan(options))?;
    let features = link.connection.features;
    let block =
        if features & feature::BLK_SIZE != 0 { u64::from(link.config.blk_size) } else { 512 };
    anyhow::ensure!(
        options.bs.is_multiple_of(block.max(1)),
        "--bs {}: the disk has blocks of {block}",
        options.bs
    );
    let read_only = features & feature::READ_ONLY != 0;
    anyhow::ensure!(!(read_only && options.rw.writes()), "the disk is read-only");
    let capacity = match link.config.capacity_sectors.saturating_mul(512) {
        // A back end without CONFIG reports no capacity, so the user must state it.
        0 => options
            .size
            .context("the back end reports no capacity: give --size")?
            .saturating_add(options.offset),
        capacity => capacity,
    };
    let setup = LoadSetup::new(options, capacity)?;
    let target = Target {
        kind: "vhost-user",
        capacity_bytes: capacity,
        ring: Some(if options.packed { "packed" } else { "split" }),
        queue_size: Some(plan(options).queue_size),
        features,
        protocol_features: link.connection.protocol.bits(),
        seed: setup.seed,
    };
    let mut meter = Meter::new(options.back_end())?;
    let queues = link.queues::<R>()?;
    let rings: Vec<_> = queues.iter().map(|q| (q.setup(), q.ring.fresh_base())).collect();
    link.start(&rings)?;
    let mut supervisor = Supervisor::new(options, link, rings)?;
    supervisor.start(&setup, queues)?;
    let finished = supervisor.watch(&mut meter);
    supervisor.end();
    finished?;
    supervisor.link.stop().context("stopping the queues")?;
    Ok(Report::new(options, target, &supervisor.tally, &meter, supervisor.reconnects))
}

struct Hand {
    shared: Arc<Shared>,
    /// Resumes the worker. If this sender is dropped, the worker ends instead of resuming.
    resume: Option<Sender<()>>,
    thread: std::thread::JoinHandle<()>,
}

struct Supervisor<'a, R> {
    options: &'a LoadOptions,
    link: Link,
    rings: Vec<(RingSetup, u32)>,
    hands: Vec<Hand>,
    /// Queues of workers that have ended.
    idle: Vec<Option<Box<Queue<R>>>>,
    events: Receiver<Event<Queue<R>>>,
    sender: Option<Sender<Event<Queue<R>>>>,
    bell: Arc<OwnedFd>,
    tally: Tally,
    reconnects: u64,
}

impl<'a, R: Ring> Supervisor<'a, R> {
    fn new(options: &'a LoadOptions, link: Link, rings: Vec<(RingSetup, u32)>) -> Result<Self> {
        let (sender, events) = std::sync::mpsc::channel();
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Supervisor {
            options,
            link,
            idle: rings.iter().map(|_| None).collect(),
            rings,
            hands: Vec::new(),
            events,
            sender: Some(sender),
            bell: Arc::new(bell),
            tally: Tally::new()?,
            reconnects: 0,
        })
    }

    fn start(&mut self, setup: &LoadSetup, queues: Vec<Queue<R>>) -> Result<()> {
        let sender = self.sender.take().context("workers are started once")?;
        let filler = setup.filler();
        let epoch = Instant::now();
        for (index, queue) in queues.into_iter().enumerate() {
            if self.options.rw.writes() {
                (0..self.options.depth).for_each(|slot| queue.write_data(slot, &filler));
            }
            let (resume, resumed) = std::sync::mpsc::channel();
            let shared = Arc::new(Shared::default());
            let wiring = Wiring {
                index,
                shared: shared.clone(),
                outbox: Outbox { events: sender.clone(), bell: self.bell.clone() },
                resume: resumed,
                epoch,
                block_size: self.options.bs as u32,
                depth: self.options.depth,
                poll: self.options.poll,
                inflight_known: self.link.inflight.is_some(),
            };
            let worker = Worker::new(queue, setup.load(index as u16)?, wiring);
            let thread = std::thread::Builder::new()
                .name(format!("queue{index}"))
                .spawn(move || worker.run())?;
            self.hands.push(Hand { shared, resume: Some(resume), thread });
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.idle.iter().all(Option::is_some)
    }

    /// Waits until every worker has ended.
    fn watch(&mut self, meter: &mut Meter) -> Result<()> {
        let limit = Duration::from_secs_f64(self.options.timeout);
        let mut progress = vec![(0, Instant::now()); self.hands.len()];
        loop {
            while let Some(event) = self.next_event()? {
                self.take(event, meter)?;
            }
            if self.is_over() {
                return Ok(());
            }
            if self.lost() {
                anyhow::ensure!(
                    self.options.reconnect,
                    "the back end closed the connection in the middle of the run"
                );
                self.reconnect(meter)?;
                progress.iter_mut().for_each(|p| p.1 = Instant::now());
            }
            for (index, seen) in progress.iter_mut().enumerate() {
                let now = self.hands[index].shared.progress.load(Ordering::Relaxed);
                if now != seen.0 || self.idle[index].is_some() {
                    *seen = (now, Instant::now());
                }
                anyhow::ensure!(
                    seen.1.elapsed() < limit,
                    "queue {index}: the back end finished nothing for {limit:?}"
                );
            }
            self.doze()?;
        }
    }

    fn next_event(&self) -> Result<Option<Event<Queue<R>>>> {
        match self.events.try_recv() {
            Ok(event) => Ok(Some(event)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) if self.is_over() => Ok(None),
            Err(TryRecvError::Disconnected) => anyhow::bail!("a worker thread has died"),
        }
    }

    fn take(&mut self, event: Event<Queue<R>>, meter: &mut Meter) -> Result<()> {
        match event {
            Event::Begin => meter.begin()?,
            Event::End => meter.end(),
            Event::Paused { index, base } => self.rings[index].1 = base,
            Event::Over { index, queue, result } => {
                self.idle[index] = Some(queue);
                let mut load = result?;
                load.tally.verified = load.verifier.as_ref().map_or(0, |v| v.checked);
                self.tally.merge(load.tally)?;
            }
        }
        Ok(())
    }

    /// Waits for an event, for the end of the connection, or for the time of the next check.
    fn doze(&self) -> Result<()> {
        let limit = Timespec { tv_sec: 0, tv_nsec: WATCH.subsec_nanos().into() };
        let socket = self.link.connection.socket();
        let mut fds =
            [PollFd::new(&*self.bell, PollFlags::IN), PollFd::new(socket, PollFlags::RDHUP)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&limit)))?;
        let _ = rustix::io::read(&*self.bell, &mut [0u8; 8]);
        Ok(())
    }

    /// Returns whether the back end has closed the connection.
    fn lost(&self) -> bool {
        let mut fds = [PollFd::new(self.link.connection.socket(), PollFlags::RDHUP)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
            .is_ok_and(|n| n > 0)
    }

    fn command(&self, command: u8) {
        for (hand, (ring, _)) in self.hands.iter().zip(&self.rings) {
            hand.shared.command.store(command, Ordering::Release);
            let _ = rustix::io::write(&*ring.call, &1u64.to_ne_bytes());
        }
    }

    /// Pauses the workers, sets up the next back end with their rings, and resumes them.
    fn reconnect(&mut self, meter: &mut Meter) -> Result<()> {
        tracing::info!(
            "the back end has closed the connection: connecting again for up to {AWAY:?}"
        );
        let deadline = Instant::now() + AWAY;
        self.command(PAUSE);
        let mut still = vec![false; self.hands.len()];
        while still.iter().zip(&self.idle).any(|(still, idle)| !still && idle.is_none()) {
            let left = deadline.saturating_duration_since(Instant::now());
            let event = self.events.recv_timeout(left).context("a worker does not stand still")?;
            if let Event::Paused { index, .. } = event {
                still[index] = true;
            }
            self.take(event, meter)?;
        }
        let known = self.link.inflight.is_some();
        while let Err(error) = self.link.reopen().and_then(|()| {
            // A back end that was killed while it started may have answered requests.
            for (queue, (_, base)) in self.idle.iter_mut().zip(&mut self.rings) {
                if let Some(queue) = queue {
                    *base = queue.resume_base(known);
                }
            }
            self.link.start(&self.rings)
        }) {
            if Instant::now() > deadline {
                return Err(error
                    .context(format!("the back end went away and was not back after {AWAY:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.reconnects += 1;
        tracing::info!(number = self.reconnects, "connected again");
        for (hand, still) in self.hands.iter().zip(still) {
            hand.shared.command.store(RUN, Ordering::Release);
            if let (true, Some(resume)) = (still, &hand.resume) {
                let _ = resume.send(());
            }
        }
        Ok(())
    }

    /// Ends the workers, and waits for them.
    fn end(&mut self) {
        self.command(STOP);
        for mut hand in std::mem::take(&mut self.hands) {
            hand.resume = None;
            let _ = hand.thread.join();
        }
    }
}
