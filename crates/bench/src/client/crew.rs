//! The workers of a back end that stays for the whole run: one for each queue, and their
//! supervision.
//!
//! In: queues that are connected. Out: tallies, and the queues. What must hold: a back end that
//! hangs ends the run with an error; no worker outlives the run.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_driver::RequestQueue;
use rustix::event::EventfdFlags;

use super::cpu::{BackEnd, Meter};
use super::load::Tally;
use super::watchdog::Watchdog;
use super::worker::{Event, Outbox, STOP, Shared, Wiring, Worker};
use super::{LoadOptions, LoadSetup};

/// Interval at which the supervisor checks the progress of the workers.
const WATCH: Duration = Duration::from_millis(250);

struct Hand {
    shared: Arc<Shared>,
    /// A write to this eventfd ends the worker's sleep.
    wake: OwnedFd,
    thread: std::thread::JoinHandle<()>,
    is_over: bool,
}

impl Hand {
    /// Returns the worker's counter, or `None` if the worker has ended.
    fn progress(&self) -> Option<u64> {
        (!self.is_over).then(|| self.shared.progress.load(Ordering::Relaxed))
    }
}

pub struct Crew<'a, Q> {
    options: &'a LoadOptions,
    hands: Vec<Hand>,
    events: Receiver<Event<Q>>,
    pub tally: Tally,
    pub meter: Meter,
    /// Queues of workers that have ended.
    pub queues: Vec<Box<Q>>,
}

impl<'a, Q: RequestQueue> Crew<'a, Q>
where
    anyhow::Error: From<Q::Error>,
{
    /// Runs the load to its end. `wake`: returns an eventfd that ends the sleep of a queue.
    pub fn run(
        setup: &LoadSetup<'a>,
        queues: Vec<Q>,
        back_end: BackEnd,
        wake: impl Fn(&Q) -> std::io::Result<OwnedFd>,
    ) -> Result<Self> {
        let mut crew = Crew::start(setup, queues, back_end, wake)?;
        let finished = crew.watch();
        crew.end();
        finished?;
        Ok(crew)
    }

    fn start(
        setup: &LoadSetup<'a>,
        queues: Vec<Q>,
        back_end: BackEnd,
        wake: impl Fn(&Q) -> std::io::Result<OwnedFd>,
    ) -> Result<Self> {
        let options = setup.options;
        let (sender, events) = std::sync::mpsc::channel();
        let bell =
            Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (tally, meter) = (Tally::new()?, Meter::new(back_end)?);
        let mut crew =
            Crew { options, hands: Vec::new(), events, tally, meter, queues: Vec::new() };
        let filler = if options.rw.writes() { setup.filler() } else { Vec::new() };
        let epoch = Instant::now();
        for (index, queue) in queues.into_iter().enumerate() {
            (0..options.depth).for_each(|slot| queue.write_data(slot, &filler));
            let shared = Arc::new(Shared::default());
            let wake = wake(&queue)?;
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
            crew.hands.push(Hand { shared, wake, thread, is_over: false });
        }
        Ok(crew)
    }

    /// Waits until every worker has ended.
    fn watch(&mut self) -> Result<()> {
        let mut watchdog = Watchdog::new(self.hands.len(), self.options.timeout, Instant::now());
        while self.hands.iter().any(|hand| !hand.is_over) {
            match self.events.recv_timeout(WATCH) {
                Ok(event) => self.take(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => anyhow::bail!("a worker thread has died"),
            }
            watchdog.check(Instant::now(), "back end", self.hands.iter().map(Hand::progress))?;
        }
        Ok(())
    }

    fn take(&mut self, event: Event<Q>) -> Result<()> {
        match event {
            Event::Begin => self.meter.begin()?,
            Event::End => self.meter.end(),
            Event::Paused { .. } => {}
            Event::Over { index, queue, result } => {
                self.hands[index].is_over = true;
                self.queues.push(queue);
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
            let _ = rustix::io::write(&hand.wake, &1u64.to_ne_bytes());
        }
        self.hands.drain(..).for_each(|hand| drop(hand.thread.join()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::fake::{FakeQueue, Fault};
    use super::super::workload::Pattern;
    use super::*;

    const SIZE: u64 = 1 << 20;

    /// Runs a load on queues with these faults.
    fn run(options: &LoadOptions, faults: &[Fault]) -> Result<(Tally, usize)> {
        let options = LoadOptions { queues: faults.len() as u16, ..options.clone() };
        let disk = Arc::new(Mutex::new(vec![0; SIZE as usize]));
        let queue = |fault: &Fault| FakeQueue::new(&disk, *fault, options.depth, 4096);
        let queues = faults.iter().map(queue).collect();
        let setup = LoadSetup::new(&options, SIZE)?;
        let crew = Crew::run(&setup, queues, BackEnd::Unknown, FakeQueue::call)?;
        Ok((crew.tally, crew.queues.len()))
    }

    fn options(timeout: f64) -> LoadOptions {
        LoadOptions {
            rw: Pattern::Randrw,
            ops: Some(301),
            depth: 4,
            verify: true,
            timeout,
            ..LoadOptions::for_socket("unused".into())
        }
    }

    #[test]
    fn the_tally_has_the_operations_of_all_queues() {
        let (tally, queues) = run(&options(60.0), &[Fault::Nothing; 3]).unwrap();
        assert_eq!((tally.reads + tally.writes, tally.latency.len(), queues), (301, 301, 3));
        assert!(tally.verified > 0 && tally.errors == 0, "{}", tally.verified);
    }

    /// Beside a queue that works, the real clock may name either of them on a busy machine. So
    /// `watchdog` tests that on a simulated clock.
    #[test]
    fn a_queue_that_hangs_ends_the_run_and_is_named() {
        let error = run(&options(0.05), &[Fault::Hangs]).err().unwrap();
        assert_eq!(error.to_string(), "queue 0: the back end finished nothing for 50ms");
    }

    #[test]
    fn only_a_worker_that_has_not_ended_has_progress() {
        let (shared, wake) =
            (Arc::new(Shared::default()), rustix::event::eventfd(0, EventfdFlags::CLOEXEC));
        shared.progress.store(7, Ordering::Relaxed);
        let thread = std::thread::spawn(|| ());
        let mut hand = Hand { shared, wake: wake.unwrap(), thread, is_over: false };
        assert_eq!(hand.progress(), Some(7));
        hand.is_over = true;
        assert_eq!(hand.progress(), None);
        hand.thread.join().unwrap();
    }

    #[test]
    fn a_queue_that_fails_ends_the_others_and_is_named() {
        let error = run(&options(60.0), &[Fault::Hangs, Fault::Breaks]).err().unwrap();
        assert_eq!(format!("{error:#}"), "queue 1: the ring has an impossible index");
        let error = run(&options(60.0), &[Fault::Corrupts(0), Fault::Hangs]).err().unwrap();
        assert!(format!("{error:#}").contains("queue 0: wrong data"), "{error:#}");
    }
}
