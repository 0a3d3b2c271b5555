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

impl<Q: RequestQueue> Worker<Q> {
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
            return self.queue.sleep(limit);
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
        self.queue.kick()
    }
}
