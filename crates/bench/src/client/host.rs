//! Runs the load of `bench client` on a host file or block device, to compare a back end with it.
//!
//! In: options and a path. Out: the report. Each queue has one thread and one io_uring. Each slot
//! (one operation in flight) is a task. No virtqueue is involved. O_DIRECT is the default.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_ring::{Executor, Handle, Segments, UringFile, host};
use rustix::fs::{Mode, OFlags};

use super::cpu::{BackEnd, Meter};
use super::load::{Failure, Load, Next, Tally};
use super::report::{Report, Target};
use super::watchdog::Watchdog;
use super::workload::{Operation, RequestKind};
use super::{LoadOptions, LoadSetup};

/// Interval at which an idle slot checks for work.
const LULL: Duration = Duration::from_millis(1);
/// Longest sleep of a slot that waits for its next operation.
const NAP: Duration = Duration::from_millis(100);
/// Interval at which the progress of the threads is checked.
const WATCH: Duration = Duration::from_millis(250);

enum Event {
    Begin,
    End,
    Over(usize, Result<Box<Load>>),
}

pub fn run(options: &LoadOptions, path: &Path) -> Result<Report> {
    let access = if options.rw.writes() { OFlags::RDWR } else { OFlags::RDONLY };
    let direct = if options.buffered { OFlags::empty() } else { OFlags::DIRECT };
    let fd = rustix::fs::open(path, access | direct | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("opening {}", path.display()))?;
    let fd = Arc::new(fd);
    let capacity =
        host::file_size(&fd).with_context(|| format!("{} cannot be a disk", path.display()))?;
    let setup = LoadSetup::new(options, capacity)?;
    let filler = if options.rw.writes() { setup.filler() } else { Vec::new() };
    let (sender, events) = std::sync::mpsc::channel();
    let epoch = Instant::now();
    let mut meter = Meter::new(BackEnd::Unknown)?;
    let (mut threads, mut hands) = (Vec::new(), Vec::new());
    for queue in 0..options.queues {
        let (load, fd, filler, sender) =
            (setup.load(queue)?, fd.clone(), filler.clone(), sender.clone());
        let (depth, block_size, largest) =
            (options.depth, options.bs as usize, options.largest() as usize);
        let progress = Arc::new(AtomicU64::new(0));
        hands.push(Hand::new(progress.clone()));
        let work = move || {
            let thread = Thread { sender: sender.clone(), progress, epoch };
            let result = drive(load, &fd, &filler, thread, depth, (block_size, largest));
            let _ = sender.send(Event::Over(queue.into(), result.map(Box::new)));
        };
        threads.push(std::thread::Builder::new().name(format!("queue{queue}")).spawn(work)?);
    }
    drop(sender);
    let tally = watch(&events, &mut hands, &mut meter, options.timeout)?;
    threads.into_iter().for_each(|t| drop(t.join()));
    let target =
        Target { kind: "file", capacity_bytes: capacity, seed: setup.seed, ..Target::default() };
    Ok(Report::new(options, target, &tally, &meter, 0))
}

/// What the supervisor knows of a thread.
struct Hand {
    progress: Arc<AtomicU64>,
    is_over: bool,
}

impl Hand {
    fn new(progress: Arc<AtomicU64>) -> Self {
        Hand { progress, is_over: false }
    }

    /// Returns the thread's counter, or `None` if the thread has ended.
    fn progress(&self) -> Option<u64> {
        (!self.is_over).then(|| self.progress.load(Ordering::Relaxed))
    }
}

/// Waits until every thread has sent its end. `timeout`: seconds without progress of a thread after
/// which the run fails. The thread stays behind then, because the kernel has its buffers.
fn watch(
    events: &Receiver<Event>,
    hands: &mut [Hand],
    meter: &mut Meter,
    timeout: f64,
) -> Result<Tally> {
    let mut watchdog = Watchdog::new(hands.len(), timeout, Instant::now());
    let mut tally = Tally::new()?;
    while hands.iter().any(|hand| !hand.is_over) {
        match events.recv_timeout(WATCH.min(watchdog.limit())) {
            Ok(Event::Begin) => meter.begin()?,
            Ok(Event::End) => meter.end(),
            Ok(Event::Over(queue, result)) => {
                hands[queue].is_over = true;
                let mut load = result?;
                load.tally.verified = load.verifier.as_ref().map_or(0, |v| v.checked);
                tally.merge(load.tally)?;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("a worker thread has died"),
        }
        watchdog.check(Instant::now(), "file", hands.iter().map(Hand::progress))?;
    }
    Ok(tally)
}

/// What a thread and its supervisor share.
struct Thread {
    sender: Sender<Event>,
    /// Counter that grows with each completion, and while nothing is in flight.
    progress: Arc<AtomicU64>,
    epoch: Instant,
}

/// State that the slots of one thread share.
struct Slots {
    load: RefCell<Load>,
    file: UringFile,
    handle: Handle,
    thread: Thread,
    in_flight: Cell<u16>,
    block_size: usize,
    counting: Cell<bool>,
    left: Cell<u16>,
    error: RefCell<Option<anyhow::Error>>,
}

fn drive(
    load: Load,
    fd: &Arc<OwnedFd>,
    filler: &[u8],
    thread: Thread,
    depth: u16,
    (block_size, largest): (usize, usize),
) -> Result<Load> {
    let executor = Executor::new()?;
    let slots = Rc::new(Slots {
        load: RefCell::new(load),
        file: UringFile::new(executor.handle(), fd.clone())?.without_delays(),
        handle: executor.handle().clone(),
        thread,
        in_flight: Cell::new(0),
        block_size,
        counting: Cell::new(false),
        left: Cell::new(depth),
        error: RefCell::default(),
    });
    for _ in 0..depth {
        let segments = Segments::buffer(largest);
        segments.copy_in(0, filler);
        let slots = slots.clone();
        executor.handle().spawn(async move {
            if let Err(error) = slots.work(segments).await {
                slots.error.borrow_mut().get_or_insert(error);
                slots.handle.stop();
            }
            slots.left.set(slots.left.get() - 1);
            if slots.left.get() == 0 {
                slots.handle.stop();
            }
        });
    }
    executor.run()?;
    drop(executor);
    let slots = Rc::into_inner(slots).context("a slot outlived its executor")?;
    match slots.error.into_inner() {
        Some(error) => Err(error),
        None => Ok(slots.load.into_inner()),
    }
}

impl Slots {
    /// Returns the executor's time, which it reads once in an iteration.
    fn now(&self) -> u64 {
        self.handle.now().saturating_duration_since(self.thread.epoch).as_nanos() as u64
    }

    fn tick(&self, now: u64) {
        let mut load = self.load.borrow_mut();
        load.tick(now);
        if load.counting() != self.counting.replace(load.counting()) {
            let _ = self.thread.sender.send(if self.counting.get() {
                Event::Begin
            } else {
                Event::End
            });
        }
    }

    async fn work(&self, mut segments: Segments) -> Result<()> {
        loop {
            let now = self.now();
            self.tick(now);
            let next = self.load.borrow_mut().next(now);
            if self.in_flight.get() == 0 {
                self.thread.progress.fetch_add(1, Ordering::Relaxed);
            }
            match next {
                Next::Over => return Ok(()),
                Next::Finish => self.handle.sleep(LULL).await,
                Next::At(at) => {
                    let at = self.thread.epoch + Duration::from_nanos(at);
                    self.handle.sleep_until(at.min(self.handle.now() + NAP)).await
                }
                Next::Do(operation) => {
                    self.in_flight.update(|n| n + 1);
                    let (back, outcome) = self.operate(operation, segments).await;
                    self.in_flight.update(|n| n - 1);
                    self.thread.progress.fetch_add(1, Ordering::Relaxed);
                    segments = back;
                    let mut load = self.load.borrow_mut();
                    let read = |bytes: &mut [u8]| segments.copy_out(0, bytes);
                    load.finish(operation, now, self.now(), outcome.map_err(Failure::Io), read)?;
                }
            }
        }
    }

    async fn operate(
        &self,
        operation: Operation,
        segments: Segments,
    ) -> (Segments, std::io::Result<()>) {
        let offset = operation.block * self.block_size as u64;
        let len = operation.count as usize * self.block_size;
        let whole =
            |n| if n == len { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) };
        match operation.kind {
            RequestKind::Flush => return (segments, self.file.sync().await),
            RequestKind::Discard => {
                return (segments, self.file.discard(offset, len as u64).await);
            }
            RequestKind::Read | RequestKind::Write => {}
        }
        if len < segments.len() {
            let part = segments.slice(0, len);
            let moved = match operation.kind {
                RequestKind::Write => self.file.write(part, offset, false).await.1,
                _ => self.file.read(part, offset).await.1,
            };
            return (segments, moved.and_then(whole));
        }
        let (segments, moved) = match operation.kind {
            RequestKind::Write => {
                if let Some(verifier) = &mut self.load.borrow_mut().verifier {
                    segments.copy_in(0, verifier.contents(operation.block));
                }
                self.file.write(segments, offset, false).await
            }
            _ => self.file.read(segments, offset).await,
        };
        (segments, moved.and_then(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supervise(hands: usize, events: &Receiver<Event>, timeout: f64) -> Result<Tally> {
        let mut hands: Vec<_> = (0..hands).map(|_| Hand::new(Arc::default())).collect();
        watch(events, &mut hands, &mut Meter::new(BackEnd::Unknown).unwrap(), timeout)
    }

    #[test]
    fn a_file_that_hangs_and_a_thread_that_dies_end_the_run() {
        let (sender, events) = std::sync::mpsc::channel();
        let error = supervise(2, &events, 0.01).map(drop).unwrap_err().to_string();
        assert!(error.contains("queue 0: the file finished nothing for 10ms"), "{error}");
        drop(sender);
        let error = supervise(2, &events, 60.0).map(drop).unwrap_err().to_string();
        assert!(error.contains("a worker thread has died"), "{error}");
        let (sender, events) = std::sync::mpsc::channel();
        sender.send(Event::Over(1, Err(anyhow::anyhow!("the first error")))).unwrap();
        assert_eq!(
            supervise(2, &events, 60.0).map(drop).unwrap_err().to_string(),
            "the first error"
        );
    }
}
