//! The events of the server: from the threads that cause them to the API's log of events.
//!
//! ```text
//!   reactors, exports, yard, commands ── queue ──► one thread ──► the API's log ──► streams
//! ```
//!
//! In: reports of disks, of the yard and of commands. Out: events in the words of the API.
//!
//! What must hold: a reactor never waits: if the queue is full, its report is lost, and streams
//! get the number of lost events. A guest or a client causes a bounded number of events a second.
//! Without an API there is no thread and no report.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use blockyard_control::events::{EventLog, What};
use blockyard_disk::{ClientId, Disk, DiskObserver, DrainState};
use blockyard_ring::sandbox::{self, Kind};
use blockyard_yard::{Event, Job, Observer};

use super::words;

/// Maximum number of reports in the queue.
const QUEUED: usize = 4096;

/// Shortest time between two events about the progress of a job, or about the pause of a disk.
const PERIOD: Duration = Duration::from_secs(1);

/// Maximum number of events a second about the clients of one disk.
const CLIENTS_A_SECOND: u32 = 64;

/// How long the end of the server waits until its last event is in the log.
const LAST: Duration = Duration::from_secs(1);

enum Report {
    /// The state of the disk with this name.
    Changed(Arc<str>),
    Client {
        disk: String,
        what: What,
    },
    Yard(Event),
    Server(What),
    /// Answers when all earlier reports are handled.
    Flush(SyncSender<()>),
}

/// The events of the server; see the module documentation.
pub struct Events {
    log: Arc<EventLog>,
    queue: Option<Queue>,
}

#[derive(Clone)]
struct Queue {
    reports: SyncSender<Report>,
    lost: Arc<Lost>,
}

/// What did not fit into the queue.
#[derive(Default)]
struct Lost {
    events: AtomicU64,
    /// A change of a disk's state.
    changes: AtomicBool,
}

impl Events {
    /// Starts the thread, if the server has an API.
    pub fn start(has_api: bool) -> io::Result<Self> {
        let log = Arc::new(EventLog::default());
        if !has_api {
            return Ok(Events { log, queue: None });
        }
        let (sender, reports) = mpsc::sync_channel(QUEUED);
        let lost = Arc::new(Lost::default());
        let follower = Follower::new(log.clone(), lost.clone());
        std::thread::Builder::new().name("events".into()).spawn(move || {
            sandbox::confine(Kind::Control);
            follower.run(&reports);
        })?;
        Ok(Events { log, queue: Some(Queue { reports: sender, lost }) })
    }

    pub fn log(&self) -> &Arc<EventLog> {
        &self.log
    }

    /// Returns the observer for the yard.
    pub fn observer(&self) -> Option<Arc<dyn Observer>> {
        self.queue.clone().map(|queue| Arc::new(queue) as Arc<dyn Observer>)
    }

    /// Adds an event of the server, after the events so far. No reactor calls this.
    pub fn publish(&self, what: What) {
        self.queue.iter().for_each(|queue| drop(queue.reports.send(Report::Server(what.clone()))));
    }

    /// Waits until the events so far are in the log.
    pub fn flush(&self) {
        let Some(queue) = &self.queue else { return };
        let (done, handled) = mpsc::sync_channel(1);
        if queue.reports.send(Report::Flush(done)).is_ok() {
            let _ = handled.recv_timeout(LAST);
        }
    }
}

impl Queue {
    fn client(&self, disk: &str, what: What) {
        if self.reports.try_send(Report::Client { disk: disk.into(), what }).is_err() {
            self.lost.events.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl DiskObserver for Queue {
    fn changed(&self, disk: &Arc<str>) -> bool {
        let is_sent = self.reports.try_send(Report::Changed(disk.clone())).is_ok();
        if !is_sent {
            self.lost.changes.store(true, Ordering::SeqCst);
        }
        is_sent
    }

    fn connected(&self, disk: &str, export: &'static str, client: &ClientId) {
        let ClientId { description, pid, program } = client.clone();
        let (name, export) = (disk.to_string(), export.to_string());
        let what = What::ClientConnected { disk: name, export, client: description, pid, program };
        self.client(disk, what);
    }

    fn disconnected(&self, disk: &str, export: &'static str, client: &ClientId, why: &str) {
        let ClientId { description, pid, program } = client.clone();
        let (name, export, why) = (disk.to_string(), export.to_string(), why.to_string());
        let what =
            What::ClientDisconnected { disk: name, export, client: description, pid, program, why };
        self.client(disk, what);
    }
}

impl Observer for Queue {
    fn event(&self, event: Event) {
        let _ = self.reports.send(Report::Yard(event));
    }
}

/// What the log says about a disk.
struct Known {
    disk: Weak<Disk>,
    is_paused: bool,
    is_poisoned: bool,
    drain: DrainState,
    /// When the last event about a pause was published.
    told: Option<Instant>,
    /// The second in which the events about clients are counted.
    second: Instant,
    clients: u32,
}

/// The thread: translates reports into events.
struct Follower {
    log: Arc<EventLog>,
    lost: Arc<Lost>,
    disks: BTreeMap<String, Known>,
    /// Running jobs, with the number of bytes that the last event had.
    jobs: Vec<(Job, u64)>,
    /// Some disk has another state than the log says, because its last event was short ago.
    is_behind: bool,
    ticked: Instant,
}

impl Follower {
    fn new(log: Arc<EventLog>, lost: Arc<Lost>) -> Self {
        let (disks, jobs, is_behind) = Default::default();
        Follower { log, lost, disks, jobs, is_behind, ticked: Instant::now() }
    }

    fn run(mut self, reports: &Receiver<Report>) {
        loop {
            let needs_ticks = self.is_behind || !self.jobs.is_empty();
            let report = if needs_ticks {
                match reports.recv_timeout(PERIOD.saturating_sub(self.ticked.elapsed())) {
                    Ok(report) => Some(report),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            } else {
                let Ok(report) = reports.recv() else { return };
                Some(report)
            };
            report.into_iter().for_each(|report| self.handle(report));
            self.log.skip(self.lost.events.swap(0, Ordering::SeqCst));
            let has_missed = self.lost.changes.swap(false, Ordering::SeqCst);
            let is_due = needs_ticks && self.ticked.elapsed() >= PERIOD;
            if is_due || has_missed {
                self.tick();
            }
        }
    }

    fn handle(&mut self, report: Report) {
        match report {
            Report::Changed(disk) => self.changed(&disk),
            Report::Client { disk, what } if self.may_tell(&disk) => self.log.publish(what),
            Report::Client { .. } => self.log.skip(1),
            Report::Yard(event) => self.of_yard(event),
            Report::Server(what) => self.log.publish(what),
            Report::Flush(done) => drop(done.send(())),
        }
    }

    fn of_yard(&mut self, event: Event) {
        let what = match event {
            Event::Added { name, disk, size, images, ways } => {
                self.disks.insert(name.clone(), Known::new(disk));
                let (disk, exports) = (name.clone(), ways);
                self.log.publish(What::DiskAdded { disk, images, size, exports });
                // A change that the disk has reported before is handled here.
                return self.changed(&name);
            }
            Event::Removed { disk, is_flushed, error } => {
                self.disks.remove(&disk);
                What::DiskRemoved { disk, flushed: is_flushed, error }
            }
            Event::Resized { disk, size } => {
                What::DiskResized { disk, old: size.old, new: size.new }
            }
            Event::GrowthBegun { disk, size } => What::ResizeBegun { disk, size },
            Event::GrowthEnded { disk, error } => What::ResizeEnded { disk, error },
            Event::JobBegun(job) => {
                let what = What::JobBegun { job: words::job(&job) };
                // The ticks of this job begin now.
                if self.jobs.is_empty() && !self.is_behind {
                    self.ticked = Instant::now();
                }
                self.jobs.push((job, 0));
                what
            }
            Event::JobEnded(job) => {
                self.jobs.retain(|(running, _)| running.number() != job.number());
                What::JobEnded { job: words::job(&job) }
            }
        };
        self.log.publish(what);
    }

    /// Handles a report that the state of a disk may have changed.
    fn changed(&mut self, disk: &str) {
        let known = self.disks.get(disk).and_then(|known| known.disk.upgrade());
        if let Some(disk) = known {
            disk.handled();
            self.check(&disk);
        }
    }

    /// Publishes what has changed since the last tick.
    fn tick(&mut self) {
        self.ticked = Instant::now();
        for (job, told) in &mut self.jobs {
            let (done, _) = job.progress();
            if done != std::mem::replace(told, done) {
                self.log.publish(What::JobProgressed { job: words::job(job) });
            }
        }
        self.is_behind = false;
        let disks: Vec<_> = self.disks.values().filter_map(|known| known.disk.upgrade()).collect();
        disks.iter().for_each(|disk| self.check(disk));
    }

    /// Publishes the state of a disk if the log says another one.
    fn check(&mut self, disk: &Arc<Disk>) {
        let Some(known) = self.disks.get_mut(disk.name()) else { return };
        let name = || disk.name().to_string();
        if let Some(why) = disk.poisoned()
            && !std::mem::replace(&mut known.is_poisoned, true)
        {
            self.log.publish(What::DiskPoisoned { disk: name(), why: why.to_string() });
        }
        let now = disk.drain_state();
        let before = std::mem::replace(&mut known.drain, now);
        let mut is_drained = before.is_drained;
        if now.expired != before.expired {
            self.log.publish(What::DrainEnded { disk: name(), expired: true });
            is_drained = false;
        }
        match (is_drained, now.is_drained) {
            (false, true) => self.log.publish(What::DiskDrained { disk: name() }),
            (true, false) => self.log.publish(What::DrainEnded { disk: name(), expired: false }),
            _ => {}
        }
        let requests = disk.paused();
        if known.is_paused == (requests > 0) {
            return;
        }
        // A guest can cause such events.
        if known.told.is_some_and(|told| told.elapsed() < PERIOD) {
            self.is_behind = true;
            return;
        }
        (known.told, known.is_paused) = (Some(Instant::now()), requests > 0);
        self.log.publish(match requests {
            0 => What::DiskResumed { disk: name() },
            _ => What::DiskPaused { disk: name(), requests },
        });
    }

    /// Returns whether another event about the clients of a disk may be published in this second.
    fn may_tell(&mut self, disk: &str) -> bool {
        let Some(known) = self.disks.get_mut(disk) else { return true };
        if known.second.elapsed() >= Duration::from_secs(1) {
            (known.second, known.clients) = (Instant::now(), 0);
        }
        known.clients += 1;
        known.clients <= CLIENTS_A_SECOND
    }
}

impl Known {
    fn new(disk: Weak<Disk>) -> Self {
        let (is_paused, is_poisoned, drain, told, clients) = Default::default();
        Known { disk, is_paused, is_poisoned, drain, told, second: Instant::now(), clients }
    }
}
