//! One queue's work from its first operation to its last: warm-up, measured part, draining, and
//! reading back for verification.
//!
//! In: the time (nanoseconds since the run began), and the result of each operation. Out: the next
//! operation, and a tally at the end. This module uses no ring and no file, so all targets share
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use super::quota::Quota;
pub use super::tally::{SLICE, STEP, Slice, Tally};
use super::verify::Verifier;
use super::workload::{Generator, Operation, Pacer, Pauses, RequestKind};
use crate::process::Stop;

/// The condition that ends a load.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// Measures from `from` until `until`, in nanoseconds, except in pauses.
    Time { from: u64, until: u64, pauses: Option<Pauses> },
    /// Ends after this number of operations. All of them are measured.
    Operations(u64),
}

impl Limit {
    fn pauses(&self) -> Option<Pauses> {
        match self {
            Limit::Time { pauses, .. } => *pauses,
            Limit::Operations(_) => None,
        }
    }

    /// Returns the time until `now` without pauses.
    #[inline]
    fn worked(&self, now: u64) -> u64 {
        self.pauses().map_or(now, |pauses| pauses.worked(now))
    }

    /// Returns when the pause ends. `None`: the load works at `now`.
    #[inline]
    fn resumes(&self, now: u64) -> Option<u64> {
        self.pauses()?.resumes(now)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    WarmUp,
    Measured,
    Drain,
    /// A flush after the last operation. True: it has started.
    EndFlush(bool),
    /// Verification reads back what the run has written or read. Has the next block.
    ReadBack(u64),
    Over,
}

/// The next action of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Do(Operation),
    /// Wait until this time.
    At(u64),
    /// Wait until a request in flight completes.
    Finish,
    Over,
}

pub struct Load {
    workload: Generator,
    pub verifier: Option<Verifier>,
    pacer: Option<Pacer>,
    limit: Limit,
    /// If set, the measured time is over.
    over: Arc<AtomicBool>,
    /// If spent, the measured time is over.
    quota: Option<Arc<Quota>>,
    /// Ends the load in each stage. Its figures mean nothing then.
    stop: Stop,
    stage: Stage,
    end_flush: bool,
    count_steps: bool,
    in_flight: u64,
    started: u64,
    block_size: u64,
    pub tally: Tally,
}

impl Load {
    pub fn new(
        workload: Generator,
        verifier: Option<Verifier>,
        pacer: Option<Pacer>,
        limit: Limit,
        over: Arc<AtomicBool>,
        block_size: u64,
    ) -> Result<Self> {
        let stage =
            if matches!(limit, Limit::Time { .. }) { Stage::WarmUp } else { Stage::Measured };
        Ok(Load {
            workload,
            verifier,
            pacer,
            limit,
            over,
            quota: None,
            stop: Stop::default(),
            stage,
            end_flush: false,
            count_steps: false,
            in_flight: 0,
            started: 0,
            block_size,
            tally: Tally::new()?,
        })
    }

    /// Ends the load when the user interrupts the run.
    pub fn with_stop(mut self, stop: Stop) -> Self {
        self.stop = stop;
        self
    }

    /// Ends the measured time, if the load has a limit of time, once the loads that share the quota
    /// have spent it.
    pub fn with_quota(mut self, quota: Arc<Quota>) -> Self {
        self.quota = Some(quota);
        self
    }

    /// Counts completions in steps, if the load has a limit of time.
    pub fn with_steps(mut self) -> Self {
        self.count_steps = matches!(self.limit, Limit::Time { .. });
        self
    }

    /// Ends a number of operations with a flush, inside the measured time. A server may put off
    /// work until the next flush, and this work belongs to the operations.
    pub fn with_end_flush(mut self) -> Self {
        self.end_flush = true;
        self
    }

    /// Returns whether completions are counted now.
    #[inline]
    pub fn counting(&self) -> bool {
        match self.limit {
            Limit::Time { .. } => self.stage == Stage::Measured,
            Limit::Operations(_) => {
                matches!(self.stage, Stage::Measured | Stage::Drain | Stage::EndFlush(_))
            }
        }
    }

    /// Advances the stage of the load (warm-up, measured part, draining) to the time `now`.
    #[inline]
    pub fn tick(&mut self, now: u64) {
        if self.stop.is_requested() {
            self.stage = if self.in_flight > 0 { Stage::Drain } else { Stage::Over };
            return;
        }
        match (self.limit, self.stage) {
            (Limit::Time { from, .. }, Stage::WarmUp) if now >= from => {
                self.stage = Stage::Measured
            }
            (Limit::Time { from, until, .. }, Stage::Measured)
                if now >= until || self.is_told_to_end() =>
            {
                let end = self.limit.worked(now.min(until));
                self.tally.elapsed_ns = end - self.limit.worked(from);
                // The last ones may have had no completion.
                let slices = (self.tally.elapsed_ns / SLICE) as usize;
                self.tally.slices.resize(slices, Slice::default());
                if self.count_steps {
                    self.tally.steps.resize((end / STEP) as usize, 0);
                }
                self.stage = Stage::Drain;
            }
            (Limit::Operations(n), Stage::Measured) if self.started == n => {
                self.stage = Stage::Drain
            }
            _ => {}
        }
        if self.in_flight > 0 {
            return;
        }
        let operations = matches!(self.limit, Limit::Operations(_));
        match self.stage {
            Stage::Drain if operations && self.end_flush => self.stage = Stage::EndFlush(false),
            Stage::Drain | Stage::EndFlush(true) => {
                if operations {
                    self.tally.elapsed_ns = now.max(1);
                }
                self.stage = if self.verifier.is_some() { Stage::ReadBack(0) } else { Stage::Over };
            }
            _ => {}
        }
    }

    #[inline]
    fn is_told_to_end(&self) -> bool {
        self.over.load(Ordering::Relaxed)
            || self.quota.as_ref().is_some_and(|quota| quota.is_spent())
    }

    /// Returns the next operation, and counts it as started.
    #[inline]
    pub fn next(&mut self, now: u64) -> Next {
        match self.stage {
            Stage::WarmUp | Stage::Measured => {}
            Stage::Drain | Stage::EndFlush(true) => return Next::Finish,
            Stage::EndFlush(false) => {
                self.stage = Stage::EndFlush(true);
                self.in_flight += 1;
                return Next::Do(Operation::one(RequestKind::Flush, 0));
            }
            Stage::ReadBack(from) => return self.read_back(from),
            Stage::Over => return Next::Over,
        }
        if let Limit::Operations(n) = self.limit
            && self.started == n
        {
            return Next::Finish;
        }
        if let Some(at) = self.limit.resumes(now) {
            return Next::At(at);
        }
        if let Some(at) = self.pacer.as_mut().and_then(|p| p.wait(now)) {
            return Next::At(at);
        }
        let mut operation = self.workload.draw();
        if let Some(verifier) = &mut self.verifier {
            operation = verifier.claim(operation);
        }
        self.started += 1;
        self.in_flight += 1;
        Next::Do(operation)
    }

    fn read_back(&mut self, from: u64) -> Next {
        match self.verifier.as_mut().and_then(|v| Some((v.known_from(from)?, v))) {
            Some((block, verifier)) => {
                self.stage = Stage::ReadBack(block + 1);
                self.in_flight += 1;
                Next::Do(verifier.claim(Operation::one(RequestKind::Read, block)))
            }
            None if self.in_flight > 0 => Next::Finish,
            None => {
                self.stage = Stage::Over;
                Next::Over
            }
        }
    }

    /// Records the completion of an operation. `read` returns the data that were read, to check
    /// them.
    #[inline]
    pub fn finish(
        &mut self,
        operation: Operation,
        started: u64,
        now: u64,
        outcome: Result<(), Failure>,
        read: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        self.in_flight -= 1;
        if self.counting() {
            self.tally.latency.saturating_record(now - started);
            match operation.kind {
                RequestKind::Read => self.tally.reads += 1,
                RequestKind::Write => self.tally.writes += 1,
                RequestKind::Flush => self.tally.flushes += 1,
                RequestKind::Discard => self.tally.discards += 1,
            }
            let moves = operation.kind.moves();
            let bytes = if moves { self.block_size * u64::from(operation.count) } else { 0 };
            self.tally.bytes += bytes;
            if let Some(quota) = &self.quota {
                quota.take();
            }
            if let Some(slice) = self.slice(now) {
                slice.operations += 1;
                slice.bytes += bytes;
                slice.latency_ns += now - started;
            }
        }
        if let Some(step) = self.step(now) {
            *step += 1;
        }
        let ok = outcome.is_ok();
        if let Err(failure) = outcome {
            self.fail(operation, failure);
        }
        let Some(verifier) = &mut self.verifier else { return Ok(()) };
        verifier.release(operation, ok);
        if operation.kind == RequestKind::Read && ok {
            verifier.check_read(operation.block, read)
        } else {
            Ok(())
        }
    }

    /// Returns the slice of the time `now`. A pause has none.
    #[inline]
    fn slice(&mut self, now: u64) -> Option<&mut Slice> {
        let Limit::Time { from, until, .. } = self.limit else { return None };
        if self.limit.resumes(now).is_some() {
            return None;
        }
        let since = |time| self.limit.worked(time).saturating_sub(self.limit.worked(from));
        let (at, most) = (since(now) / SLICE, since(until) / SLICE);
        grown(&mut self.tally.slices, at, most)
    }

    /// Returns the step of the time `now`. A pause has none, and a drain has no further ones.
    #[inline]
    fn step(&mut self, now: u64) -> Option<&mut u64> {
        let Limit::Time { until, .. } = self.limit else { return None };
        if !self.count_steps || self.limit.resumes(now).is_some() {
            return None;
        }
        let (at, all) = (self.limit.worked(now) / STEP, self.limit.worked(until) / STEP);
        let running = matches!(self.stage, Stage::WarmUp | Stage::Measured);
        let most = if running { all } else { self.tally.steps.len() as u64 };
        grown(&mut self.tally.steps, at, most)
    }

    #[cold]
    fn fail(&mut self, operation: Operation, failure: Failure) {
        self.tally.errors += 1;
        let (offset, len) =
            (operation.block * self.block_size, u64::from(operation.count) * self.block_size);
        let what = match operation.kind {
            RequestKind::Read => format!("read of {len} bytes at offset {offset}"),
            RequestKind::Write => format!("write of {len} bytes at offset {offset}"),
            RequestKind::Flush => "flush".into(),
            RequestKind::Discard => format!("discard of {len} bytes at offset {offset}"),
        };
        self.tally.first_error.get_or_insert_with(|| format!("{what}: {failure}"));
    }
}

/// Returns the element `at`, or `None` if there are `most` at the most. The list grows with the
/// run, because most runs are interrupted long before a long runtime ends.
#[inline]
fn grown<T: Clone + Default>(list: &mut Vec<T>, at: u64, most: u64) -> Option<&mut T> {
    if at >= most {
        return None;
    }
    let at = at as usize;
    if at >= list.len() {
        list.resize(at + 1, T::default());
    }
    list.get_mut(at)
}

/// The reason why an operation failed.
pub enum Failure {
    Status(u8),
    Io(std::io::Error),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use blockyard_driver::status;
        match self {
            Failure::Status(status::IOERR) => write!(f, "status 1 (I/O error)"),
            Failure::Status(status::UNSUPP) => write!(f, "status 2 (unsupported)"),
            Failure::Status(status::NONE) => write!(f, "answered without a status"),
            Failure::Status(other) => write!(f, "status {other}, which means nothing"),
            Failure::Io(error) => write!(f, "{error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::{Mix, Pattern, Split};
    use super::*;

    fn load(limit: Limit, verify: bool) -> Load {
        let mix = Mix {
            pattern: Pattern::Write,
            read_share: 0,
            flush_every: 0,
            first: 0,
            blocks: 100,
            split: Split::default(),
        };
        let verifier = verify.then(|| Verifier::new(1, 512, 0, 100));
        Load::new(Generator::new(mix, 1, 0), verifier, None, limit, Arc::default(), 512).unwrap()
    }

    fn operation(next: Next) -> Operation {
        let Next::Do(operation) = next else { panic!("{next:?}") };
        operation
    }

    #[test]
    fn only_the_measured_part_of_the_time_counts() {
        let mut load = load(Limit::Time { from: 100, until: 200, pauses: None }, false);
        for now in [0, 50, 100, 150, 199, 200] {
            load.tick(now);
            if let Next::Do(o) = load.next(now) {
                load.finish(o, now, now + 1, Ok(()), |_| ()).unwrap();
            }
        }
        load.tick(201);
        assert_eq!((load.tally.writes, load.tally.elapsed_ns), (3, 100));
        assert_eq!(load.next(202), Next::Over);
    }

    #[test]
    fn the_measured_time_is_over_when_somebody_says_so() {
        let mut load = load(Limit::Time { from: 100, until: 1000, pauses: None }, false);
        load.over.store(true, Ordering::Relaxed);
        let o = operation(load.next(50));
        load.tick(120);
        load.finish(o, 50, 130, Ok(()), |_| ()).unwrap();
        load.tick(150);
        assert_eq!((load.tally.writes, load.tally.elapsed_ns, load.next(150)), (1, 50, Next::Over));
    }

    #[test]
    fn loads_that_share_a_quota_end_with_its_last_completion() {
        let ms = 1_000_000;
        let limit = Limit::Time { from: 50 * ms, until: u64::MAX / 4, pauses: None };
        let quota = Arc::new(Quota::new(3));
        let [mut quick, mut idle] =
            [0, 1].map(|_| load(limit, false).with_steps().with_quota(quota.clone()));
        let stuck = operation(idle.next(0));
        // The first completion is in the warm-up.
        for now in [0, 90, 160, 310] {
            assert!(!quota.is_spent());
            quick.tick(now * ms);
            idle.tick(now * ms);
            let o = operation(quick.next(now * ms));
            quick.finish(o, now * ms, (now + 1) * ms, Ok(()), |_| ()).unwrap();
        }
        assert!(quota.is_spent());
        quick.tick(311 * ms);
        assert_eq!((quick.next(311 * ms), quick.tally.writes), (Next::Over, 3));
        assert_eq!(quick.tally.elapsed_ns, 261 * ms);
        let slices: Vec<_> = quick.tally.slices.iter().map(|s| s.operations).collect();
        assert_eq!((slices, quick.tally.steps.len()), (vec![1, 1], 31));
        // A load without a single completion has the same time.
        idle.tick(311 * ms);
        assert_eq!((idle.tally.writes, idle.tally.elapsed_ns), (0, 261 * ms));
        assert_eq!((idle.next(311 * ms), idle.tally.slices.len()), (Next::Finish, 2));
        idle.finish(stuck, 0, 320 * ms, Ok(()), |_| ()).unwrap();
        idle.tick(320 * ms);
        assert_eq!((idle.next(320 * ms), idle.tally.writes), (Next::Over, 0));
    }

    #[test]
    fn each_slice_of_the_time_has_its_own() {
        let ms = 1_000_000;
        let mut load = load(Limit::Time { from: 50 * ms, until: 350 * ms, pauses: None }, false);
        for now in [0, 60, 70, 155, 349] {
            load.tick(now * ms);
            let o = operation(load.next(now * ms));
            load.finish(o, now * ms, (now + 1) * ms, Ok(()), |_| ()).unwrap();
        }
        let slice =
            |operations| Slice { operations, bytes: 512 * operations, latency_ns: operations * ms };
        load.tick(350 * ms);
        assert!(load.tally.slices == [2, 1, 0].map(slice), "the last one was too late");
        let mut both = Tally::new().unwrap();
        both.merge(load.tally).unwrap();
        assert_eq!((both.slices.len(), both.slices[0]), (3, slice(2)));
    }

    #[test]
    fn a_long_runtime_takes_memory_as_it_passes_and_an_early_end_has_whole_slices() {
        let ms = 1_000_000;
        let limit = Limit::Time { from: 0, until: u64::MAX / 4, pauses: None };
        let mut load = load(limit, false).with_steps();
        let capacity = |load: &Load| (load.tally.slices.capacity(), load.tally.steps.capacity());
        assert_eq!(capacity(&load), (0, 0));
        load.tick(0);
        let o = operation(load.next(0));
        load.finish(o, 0, 120 * ms, Ok(()), |_| ()).unwrap();
        assert!(capacity(&load).0 < 10 && capacity(&load).1 < 100, "{:?}", capacity(&load));
        load.over.store(true, Ordering::Relaxed);
        load.tick(350 * ms);
        let slices: Vec<_> = load.tally.slices.iter().map(|s| s.operations).collect();
        assert_eq!((slices, load.tally.steps.len()), (vec![0, 1, 0], 35));
    }

    #[test]
    fn steps_begin_with_the_load_and_pauses_have_none() {
        let ms = 1_000_000;
        let pauses = Some(Pauses { work: 100 * ms, pause: 400 * ms });
        let limit = Limit::Time { from: 0, until: 600 * ms, pauses };
        let mut load = load(limit, false).with_steps();
        for now in [0, 12, 90, 505, 595] {
            load.tick(now * ms);
            let o = operation(load.next(now * ms));
            // The third one completes in the pause.
            load.finish(o, now * ms, (now + 12) * ms, Ok(()), |_| ()).unwrap();
        }
        load.tick(100 * ms);
        assert_eq!(load.next(100 * ms), Next::At(500 * ms));
        load.tick(600 * ms);
        assert_eq!((load.next(600 * ms), load.tally.elapsed_ns), (Next::Over, 200 * ms));
        let steps = load.tally.steps.iter().enumerate().filter(|(_, n)| **n > 0);
        assert_eq!(steps.map(|(at, _)| at).collect::<Vec<_>>(), [1, 2, 11]);
        assert_eq!(load.tally.slices.iter().map(|s| s.operations).collect::<Vec<_>>(), [2, 1]);
        assert_eq!((load.tally.writes, load.tally.steps.len()), (5, 20));
    }

    #[test]
    fn operations_are_counted_to_the_last_and_then_read_back() {
        let mut load = load(Limit::Operations(2), true);
        let (a, b) = (operation(load.next(0)), operation(load.next(0)));
        let contents = load.verifier.as_mut().unwrap().contents(a.block).to_vec();
        load.tick(1);
        assert_eq!(load.next(1), Next::Finish);
        load.finish(a, 0, 5, Ok(()), |_| ()).unwrap();
        load.finish(b, 0, 9, Err(Failure::Status(1)), |_| ()).unwrap();
        load.tick(9);
        assert_eq!((load.tally.writes, load.tally.errors, load.tally.elapsed_ns), (2, 1, 9));
        assert!(
            load.tally
                .first_error
                .as_ref()
                .unwrap()
                .contains("write of 512 bytes at offset 512: status 1")
        );
        // The read-back does not expect the data of the failed write.
        let back = operation(load.next(10));
        assert_eq!(back, Operation::one(RequestKind::Read, 0));
        assert_eq!(load.next(10), Next::Finish);
        load.finish(back, 10, 11, Ok(()), |bytes| bytes.copy_from_slice(&contents)).unwrap();
        assert_eq!(load.next(12), Next::Over);
        assert_eq!(load.tally.writes, 2);
    }

    #[test]
    fn a_flush_ends_the_operations_inside_the_measured_time() {
        let mut load = load(Limit::Operations(2), false).with_end_flush();
        let (a, b) = (operation(load.next(0)), operation(load.next(0)));
        load.tick(1);
        load.finish(a, 0, 5, Ok(()), |_| ()).unwrap();
        load.tick(5);
        assert_eq!(load.next(5), Next::Finish, "the second operation is in flight");
        load.finish(b, 0, 9, Ok(()), |_| ()).unwrap();
        load.tick(9);
        assert!(load.counting());
        let flush = operation(load.next(9));
        assert_eq!((flush.kind, load.next(9)), (RequestKind::Flush, Next::Finish));
        load.tick(10);
        assert!(load.counting(), "the measured time ends with the flush");
        load.finish(flush, 9, 20, Ok(()), |_| ()).unwrap();
        load.tick(20);
        assert_eq!((load.counting(), load.next(20)), (false, Next::Over));
        assert_eq!((load.tally.writes, load.tally.flushes, load.tally.elapsed_ns), (2, 1, 20));
    }

    #[test]
    fn a_wrong_block_ends_the_run() {
        let mut load = load(Limit::Operations(1), true);
        let write = operation(load.next(0));
        load.finish(write, 0, 1, Ok(()), |_| ()).unwrap();
        load.tick(1);
        let back = operation(load.next(2));
        let error = load.finish(back, 2, 3, Ok(()), |bytes| bytes.fill(9)).unwrap_err();
        assert!(error.to_string().contains("wrong data at offset 0"), "{error}");
    }
}
