//! The thread of a queue: reap, submit, publish, wait; and pause while the back end is replaced.
//!
//! In: a queue and its load. Out: events to the supervisor, which owns the connection. What must
//! hold: an iteration reads the clock once and allocates nothing; the worker kicks only if the back
//! end wants that, and wants a call only before it sleeps.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_driver::{Data, RequestQueue, request, status};

use super::cpu;
use super::load::{Failure, Load, Next};
use super::workload::{Operation, RequestKind};

/// Commands of the supervisor. After a change it writes the call eventfd, because the worker may
/// sleep.
pub const RUN: u8 = 0;
pub const PAUSE: u8 = 1;
pub const STOP: u8 = 2;

/// Number of polls of the ring between two checks for commands.
const SPINS: u32 = 256;

#[derive(Default)]
pub struct Shared {
    pub command: AtomicU8,
    /// Counter that grows with each completion. The supervisor finds a hang by it.
    pub progress: AtomicU64,
}

pub enum Event<Q> {
    /// The measured part of a queue begins or ends.
    Begin,
    End,
    /// The worker pauses. `base` is the SET_VRING_BASE for the next back end.
    Paused {
        index: usize,
        base: u32,
    },
    /// The worker has ended. Has the queue, because a later back end must know it.
    Over {
        index: usize,
        queue: Box<Q>,
        result: Result<Box<Load>>,
    },
}

/// Sends events, and wakes their receiver by an eventfd.
pub struct Outbox<Q> {
    pub events: Sender<Event<Q>>,
    pub bell: Arc<OwnedFd>,
}

impl<Q> Outbox<Q> {
    fn send(&self, event: Event<Q>) {
        // If the receiver is gone, the run has failed already, and another part reports the error.
        let _ = self.events.send(event);
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

/// The settings of a worker, and what it shares with its supervisor.
pub struct Wiring<Q> {
    pub index: usize,
    pub shared: Arc<Shared>,
    pub outbox: Outbox<Q>,
    pub resume: Receiver<()>,
    pub epoch: Instant,
    pub block_size: u32,
    pub depth: u16,
    pub poll: bool,
    /// Whether the next back end receives this back end's in-flight region.
    pub inflight_known: bool,
}

pub struct Worker<Q> {
    queue: Q,
    load: Load,
    wiring: Wiring<Q>,
    /// The operation of each slot, and its start.
    slots: Vec<(Operation, u64)>,
    free: Vec<u16>,
    /// Number of kicks and calls, and this thread's CPU time, at the start of the measured part.
    marks: Option<((u64, u64), u64)>,
    last_done: u64,
    stalled_since: Option<u64>,
}

impl<Q: RequestQueue> Worker<Q>
where
    anyhow::Error: From<Q::Error>,
{
    pub fn new(queue: Q, load: Load, wiring: Wiring<Q>) -> Self {
        let nothing = (Operation::one(RequestKind::Flush, 0), 0);
        Worker {
            queue,
            load,
            slots: vec![nothing; wiring.depth.into()],
            free: (0..wiring.depth).rev().collect(),
            wiring,
            marks: None,
            last_done: 0,
            stalled_since: None,
        }
    }

    pub fn run(mut self) {
        // Pacing sleeps for tens of microseconds. The default timer slack of 50 us would double
        // that.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1_000));
        let result = self.work();
        let Worker { queue, load, wiring, .. } = self;
        let result = result.map(|()| Box::new(load));
        wiring.outbox.send(Event::Over { index: wiring.index, queue: Box::new(queue), result });
    }

    fn work(&mut self) -> Result<()> {
        loop {
            let (reaped, now) = self.reap()?;
            self.mark(now)?;
            let next = self.fill(now);
            self.queue.publish()?;
            if next == Some(Next::Over) {
                return Ok(());
            }
            match self.wiring.shared.command.load(Ordering::Acquire) {
                RUN => {}
                PAUSE => self.pause()?,
                _ => anyhow::bail!("stopped with {} requests in flight", self.queue.in_flight()),
            }
            if reaped == 0 {
                self.wait(next, now)?;
            } else {
                self.wiring.shared.progress.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    #[inline]
    fn now(&self) -> u64 {
        self.wiring.epoch.elapsed().as_nanos() as u64
    }

    /// Reaps all completions. Returns their number, and the time. The time is read after the first
    /// completion, because a time from before would make a run look shorter than it was.
    fn reap(&mut self) -> Result<(usize, u64)> {
        let (mut reaped, mut time) = (0, None);
        while let Some((slot, status)) = self.queue.reap()? {
            let now = *time.get_or_insert_with(|| self.wiring.epoch.elapsed().as_nanos() as u64);
            let (operation, started) = self.slots[slot as usize];
            let outcome = if status == status::OK { Ok(()) } else { Err(Failure::Status(status)) };
            let queue = &self.queue;
            self.load
                .finish(operation, started, now, outcome, |bytes| queue.read_data(slot, bytes))?;
            self.free.push(slot);
            reaped += 1;
        }
        let now = time.unwrap_or_else(|| self.now());
        if reaped > 0 {
            self.last_done = now;
            if let Some(since) = self.stalled_since.take() {
                let longest = &mut self.load.tally.longest_stall_ns;
                *longest = (*longest).max(now - since);
            }
        }
        Ok((reaped, now))
    }

    /// Advances the load to the time `now`, and records the start and the end of the measured part.
    #[inline]
    fn mark(&mut self, now: u64) -> Result<()> {
        self.load.tick(now);
        if self.load.counting() == self.marks.is_some() {
            return Ok(());
        }
        let ((kicks, signals), cpu) = (self.queue.notifications()?, cpu::thread_nanos());
        match self.marks.take() {
            None => {
                self.marks = Some(((kicks, signals), cpu));
                self.wiring.outbox.send(Event::Begin);
            }
            Some((marks, since)) => {
                self.load.tally.kicks = kicks - marks.0;
                self.load.tally.signals = signals - marks.1;
                self.load.tally.cpu_ns = cpu - since;
                self.wiring.outbox.send(Event::End);
            }
        }
        Ok(())
    }

    /// Starts operations in all free slots. Returns the last action of the load, or `None` if no
    /// slot is free.
    fn fill(&mut self, now: u64) -> Option<Next> {
        while let Some(slot) = self.free.pop() {
            let operation = match self.load.next(now) {
                Next::Do(operation) => operation,
                other => {
                    self.free.push(slot);
                    return Some(other);
                }
            };
            self.slots[slot as usize] = (operation, now);
            let len = self.wiring.block_size * operation.count;
            let sector = operation.block * u64::from(self.wiring.block_size / 512);
            let (kind, sector, data) = match operation.kind {
                RequestKind::Read => (request::IN, sector, Data::FromDevice(len)),
                RequestKind::Write => (request::OUT, sector, Data::ToDevice(len)),
                RequestKind::Flush => (request::FLUSH, 0, Data::None),
                RequestKind::Discard => {
                    self.queue.write_data(slot, &request::range(sector, len / 512));
                    (request::DISCARD, 0, Data::ToDevice(request::RANGE as u32))
                }
            };
            if let (RequestKind::Write, Some(verifier)) = (operation.kind, &mut self.load.verifier)
            {
                self.queue.write_data(slot, verifier.contents(operation.block));
            }
            self.queue.submit(slot, kind, sector, data);
        }
        None
    }

    /// Waits for the ring, or until the load has an operation to start.
    fn wait(&mut self, next: Option<Next>, now: u64) -> Result<()> {
        let limit = match next {
            Some(Next::At(at)) => Some(Duration::from_nanos(at.saturating_sub(now))),
            _ => None,
        };
        if self.queue.in_flight() == 0 {
            self.wiring.shared.progress.fetch_add(1, Ordering::Relaxed);
            // The sleep is short, so that the worker sees a command soon.
            std::thread::sleep(limit.unwrap_or_default().min(Duration::from_millis(100)));
            return Ok(());
        }
        if !self.wiring.poll {
            return Ok(self.queue.sleep(limit)?);
        }
        for _ in 0..SPINS {
            if self.queue.ready() {
                break;
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Reaps the completions of the lost back end, prepares the ring for the next back end, and
    /// waits until the supervisor resumes this worker.
    fn pause(&mut self) -> Result<()> {
        self.reap()?;
        if self.queue.in_flight() > 0 {
            self.stalled_since = Some(self.last_done);
        }
        let base = self.queue.resume_base(self.wiring.inflight_known);
        self.wiring.outbox.send(Event::Paused { index: self.wiring.index, base });
        self.wiring.resume.recv().context("the back end went away and did not come back")?;
        self.queue.publish()?;
        Ok(self.queue.kick()?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use rustix::event::EventfdFlags;

    use super::super::fake::{BASE, FakeQueue, Fault};
    use super::super::workload::Pattern;
    use super::super::{LoadOptions, LoadSetup};
    use super::*;
    use crate::scratch::HANG;

    const SIZE: u64 = 1 << 20;

    fn options(rw: Pattern, ops: u64) -> LoadOptions {
        LoadOptions {
            rw,
            ops: Some(ops),
            depth: 8,
            seed: Some(1),
            verify: rw != Pattern::Randtrim,
            ..LoadOptions::for_socket("unused".into())
        }
    }

    struct Hand {
        shared: Arc<Shared>,
        resume: Option<Sender<()>>,
        events: Receiver<Event<FakeQueue>>,
        wake: OwnedFd,
        disk: Arc<Mutex<Vec<u8>>>,
    }

    /// Starts a worker with a command.
    fn start(options: &LoadOptions, fault: Fault, command: u8) -> Hand {
        let disk = Arc::new(Mutex::new(vec![0xee; SIZE as usize]));
        let queue = FakeQueue::new(&disk, fault, options.depth, options.bs as usize);
        let (wake, (sender, events), (resume, resumed)) =
            (queue.call().unwrap(), channel(), channel());
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let shared = Arc::new(Shared { command: AtomicU8::new(command), ..Shared::default() });
        let wiring = Wiring {
            index: 3,
            shared: shared.clone(),
            outbox: Outbox { events: sender, bell: Arc::new(bell) },
            resume: resumed,
            epoch: Instant::now(),
            block_size: options.bs as u32,
            depth: options.depth,
            poll: options.poll,
            inflight_known: true,
        };
        let load = LoadSetup::new(options, SIZE).unwrap().load(0).unwrap();
        let worker = Worker::new(queue, load, wiring);
        std::thread::spawn(move || worker.run());
        Hand { shared, resume: Some(resume), events, wake, disk }
    }

    impl Hand {
        fn event(&self) -> Event<FakeQueue> {
            self.events.recv_timeout(HANG).expect("an event")
        }

        /// Waits for the end. Returns the load, and the names of the events before.
        fn over(&self) -> (Result<Box<Load>>, Vec<&'static str>) {
            let mut before = Vec::new();
            loop {
                match self.event() {
                    Event::Begin => before.push("begin"),
                    Event::End => before.push("end"),
                    Event::Paused { .. } => before.push("paused"),
                    Event::Over { index, result, .. } => {
                        assert_eq!(index, 3);
                        return (result, before);
                    }
                }
            }
        }

        fn error(&self) -> String {
            format!("{:#}", self.over().0.err().expect("an error"))
        }
    }

    #[test]
    fn a_load_is_done_counted_and_verified() {
        for poll in [false, true] {
            let options = LoadOptions { poll, flush_every: 10, ..options(Pattern::Randrw, 500) };
            let hand = start(&options, Fault::Nothing, RUN);
            let (load, events) = hand.over();
            let (tally, verifier) = load.map(|load| (load.tally, load.verifier.unwrap())).unwrap();
            assert_eq!(events, ["begin", "end"]);
            assert_eq!(tally.reads + tally.writes + tally.flushes, 500);
            assert!(tally.flushes > 10 && verifier.checked > 100, "{}", verifier.checked);
            assert_eq!((tally.latency.len(), tally.errors), (500, 0));
            assert_eq!(tally.bytes, (tally.reads + tally.writes) * 4096);
            // A notification has at most a request for each slot.
            assert!((500 / 8..=500).contains(&tally.kicks), "{} kicks", tally.kicks);
            assert!(hand.shared.progress.load(Ordering::Relaxed) > 0);
            assert!(hand.disk.lock().unwrap().chunks(4096).any(|block| block[100] != 0xee));
        }
    }

    #[test]
    fn discards_name_their_ranges() {
        let options = LoadOptions { bs: 8192, ..options(Pattern::Randtrim, 100) };
        let hand = start(&options, Fault::Nothing, RUN);
        let tally = hand.over().0.unwrap().tally;
        assert_eq!((tally.discards, tally.bytes), (100, 0));
        let disk = hand.disk.lock().unwrap();
        let gone = disk.chunks(8192).filter(|block| block.iter().all(|byte| *byte == 0)).count();
        let whole =
            disk.chunks(8192).filter(|block| block.iter().all(|byte| *byte == 0xee)).count();
        assert!(gone > 20 && gone + whole == 128, "{gone} blocks are gone, {whole} are not");
    }

    #[test]
    fn requests_that_fail_are_counted_and_the_first_is_named() {
        let tally = start(&options(Pattern::Write, 100), Fault::Fails, RUN).over().0.unwrap().tally;
        // The read back of the verification fails at times, too.
        assert!(tally.errors >= 10, "{} errors", tally.errors);
        let first = tally.first_error.unwrap();
        assert_eq!(first, "write of 4096 bytes at offset 36864: status 1 (I/O error)");
    }

    #[test]
    fn wrong_data_end_the_run() {
        let error = start(&options(Pattern::Randrw, 500), Fault::Corrupts(200), RUN).error();
        assert!(error.contains("wrong data at offset"), "{error}");
        let error = start(&options(Pattern::Randrw, 500), Fault::Breaks, RUN).error();
        assert_eq!(error, "the ring has an impossible index");
    }

    #[test]
    fn a_worker_stops_when_the_supervisor_says_so() {
        let hand = start(&options(Pattern::Randread, 500), Fault::Hangs, RUN);
        assert!(matches!(hand.event(), Event::Begin));
        hand.shared.command.store(STOP, Ordering::Release);
        rustix::io::write(&hand.wake, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(hand.error(), "stopped with 8 requests in flight");
    }

    #[test]
    fn a_worker_pauses_until_the_next_back_end_is_there() {
        let hand = start(&options(Pattern::Randrw, 100), Fault::Nothing, PAUSE);
        assert!(matches!(hand.event(), Event::Begin));
        assert!(matches!(hand.event(), Event::Paused { index: 3, base: BASE }));
        hand.shared.command.store(RUN, Ordering::Release);
        hand.resume.as_ref().unwrap().send(()).unwrap();
        let (load, events) = hand.over();
        let tally = load.unwrap().tally;
        assert_eq!((tally.reads + tally.writes, tally.errors), (100, 0));
        assert_eq!(events, ["end"]);
        // The next back end does not come.
        let mut hand = start(&options(Pattern::Randrw, 100), Fault::Nothing, PAUSE);
        hand.resume = None;
        let error = hand.error();
        assert!(error.starts_with("the back end went away and did not come back"), "{error}");
    }
}
