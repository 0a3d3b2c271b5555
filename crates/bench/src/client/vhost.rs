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
use super::watchdog::Watchdog;
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
        let mut watchdog = Watchdog::new(self.hands.len(), self.options.timeout, Instant::now());
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
                watchdog.restart(Instant::now());
            }
            let progress = self.hands.iter().zip(&self.idle).map(|(hand, idle)| {
                idle.is_none().then(|| hand.shared.progress.load(Ordering::Relaxed))
            });
            watchdog.check(Instant::now(), "back end", progress)?;
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
                return Err(error)
                    .context(format!("the back end went away and was not back after {AWAY:?}"));
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use blockyard_disk::{Disk, DiskOptions, LocalDisk, OpKind, Source};
    use blockyard_export::vhost_user::{QueueShape, SecondClient, Tuning, VhostUser};
    use blockyard_export::{Export, Listener, PollMode, Reactors, STOP_TIME};
    use blockyard_image::{CacheMode, ChainOptions};

    use super::*;
    use crate::scratch::{HANG, Scratch, until};

    /// A disk of 1 MiB in memory, which this process serves.
    struct Server {
        scratch: Scratch,
        disk: Arc<Disk>,
        reactors: Arc<Reactors>,
        export: VhostUser,
    }

    impl Server {
        fn start(read_only: bool) -> Self {
            let scratch = Scratch::new();
            let options = DiskOptions {
                name: "disk".into(),
                serial: String::new(),
                read_only,
                cache: CacheMode::None,
                filters: Vec::new(),
                on_enospc: Default::default(),
            };
            let source = Source::open(&ChainOptions::new("ram:1M")).unwrap();
            let disk = Arc::new(Disk::new(options, source));
            let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
            let tuning = Tuning {
                poll: PollMode::Off,
                in_band: false,
                pin_memory: false,
                any_memory_file: false,
                second_client: SecondClient::Refuse,
            };
            let listener = Listener::bind(&scratch.join("s")).unwrap();
            let shape = QueueShape { queues: 2, size: 256 };
            let export =
                VhostUser::start(disk.clone(), listener, shape, tuning, reactors.clone()).unwrap();
            Server { scratch, disk, reactors, export }
        }

        fn load(&self, options: LoadOptions) -> Result<Report> {
            run(&options, &self.scratch.join("s"))
        }

        fn reads(&self) -> u64 {
            let of_reactor = self.reactors.all().filter_map(|reactor| {
                let disk = self.disk.clone();
                let statistics = reactor.ask(move |handle, reply| {
                    reply.send(LocalDisk::known(handle, &disk).map(|served| served.statistics()));
                });
                Some(statistics??.summary(OpKind::Read)?.requests)
            });
            of_reactor.sum()
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            self.export.stop(Instant::now() + STOP_TIME);
        }
    }

    fn options(rw: Pattern, ops: u64) -> LoadOptions {
        LoadOptions {
            rw,
            ops: Some(ops),
            depth: 8,
            timeout: 60.0,
            ..LoadOptions::for_socket("unused".into())
        }
    }

    fn error(result: Result<Report>) -> String {
        format!("{:#}", result.expect_err("an error"))
    }

    #[test]
    fn a_ring_has_room_for_the_depth_and_the_back_end_must_have_what_the_load_needs() {
        let size = |change: &dyn Fn(&mut LoadOptions)| {
            let mut options = options(Pattern::Randread, 1);
            change(&mut options);
            plan(&options).queue_size
        };
        assert_eq!(size(&|_| ()), 128, "the least");
        // A request takes three descriptors, or one with indirect ones.
        assert_eq!(size(&|o| o.depth = 100), 512);
        assert_eq!(size(&|o| (o.depth, o.indirect) = (100, true)), 128);
        assert_eq!(size(&|o| o.depth = 32768), 1 << 15, "the most");
        assert_eq!(size(&|o| (o.depth, o.queue_size) = (100, Some(64))), 64);
        let required = |change: &dyn Fn(&mut LoadOptions)| {
            let mut options = options(Pattern::Randread, 1);
            change(&mut options);
            plan(&options).required
        };
        assert_eq!(required(&|_| ()), 0);
        assert_eq!(required(&|o| o.end_flush = true), feature::FLUSH);
        assert_eq!(required(&|o| o.rw = Pattern::Randtrim), feature::DISCARD);
        let both = |o: &mut LoadOptions| (o.queues, o.flush_every) = (4, 1);
        assert_eq!(required(&both), feature::MQ | feature::FLUSH);
    }

    #[test]
    fn loads_are_verified_on_both_rings() {
        let server = Server::start(false);
        for packed in [false, true] {
            let load = LoadOptions {
                packed,
                queues: 2,
                verify: true,
                flush_every: 20,
                ..options(Pattern::Randrw, 400)
            };
            let report = server.load(load).unwrap();
            assert_eq!(report.target.ring, Some(if packed { "packed" } else { "split" }));
            assert_eq!(report.target.capacity_bytes, 1 << 20);
            assert_eq!((report.operations, report.errors, report.reconnects), (400, 0, 0));
            assert!(report.verified_blocks > 0 && report.flushes > 0, "{report}");
            assert!(report.kicks > 0 && report.signals > 0, "{report}");
        }
    }

    #[test]
    fn what_the_disk_cannot_do_is_refused() {
        let server = Server::start(true);
        let refused = |options: LoadOptions| error(server.load(options));
        assert_eq!(refused(options(Pattern::Randwrite, 1)), "the disk is read-only");
        let large = LoadOptions { size: Some(2 << 20), ..options(Pattern::Randread, 1) };
        assert!(refused(large).contains("beyond the disk's 1048576 bytes"));
        let many = LoadOptions { queues: 3, ..options(Pattern::Randread, 30) };
        assert!(refused(many).contains("the back end has 2 queues, not 3"));
        assert_eq!(server.load(options(Pattern::Randread, 10)).unwrap().reads, 10);
    }

    #[test]
    fn a_back_end_that_is_gone_or_silent_is_an_error() {
        let scratch = Scratch::new();
        let socket = scratch.join("s");
        let said = error(run(&options(Pattern::Randread, 1), &socket));
        assert!(said.contains(&format!("cannot connect to {}", socket.display())), "{said}");
        let listener = UnixListener::bind(&socket).unwrap();
        // The kernel accepts the connection, and no back end answers.
        let begin = Instant::now();
        let silent = LoadOptions { timeout: 0.05, ..options(Pattern::Randread, 1) };
        error(run(&silent, &socket));
        assert!(begin.elapsed() < HANG, "{:?}", begin.elapsed());
        let server = std::thread::spawn(move || {
            // The connection of the silent back end is still in the queue.
            for _ in 0..2 {
                drop(listener.accept().unwrap());
            }
        });
        error(run(&options(Pattern::Randread, 1), &socket));
        until("both connections were closed", || server.is_finished());
        server.join().unwrap();
    }

    #[test]
    fn a_back_end_that_ends_in_the_middle_ends_the_run() {
        let mut server = Server::start(false);
        let load =
            LoadOptions { ops: None, warmup: 0.0, runtime: 1e6, ..options(Pattern::Randread, 1) };
        let socket = server.scratch.join("s");
        let client = std::thread::spawn(move || run(&load, &socket));
        until("the load has begun", || server.reads() > 100);
        server.export.stop(Instant::now() + STOP_TIME);
        until("the client has ended", || client.is_finished());
        let said = error(client.join().unwrap());
        assert_eq!(said, "the back end closed the connection in the middle of the run");
    }
}
