//! Measures a device in rounds. Each round runs each step for a short time, and begins with another
//! step. The results are the medians of the rounds.
//!
//! In: a file or a block device, and whether it may be written to. Out: rates and times. What must
//! hold: nothing is written without permission; discarded ranges are not read or written again.

use std::collections::BTreeMap;
use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use rustix::io::Errno;

use super::arithmetic::{Displaced, Times};
use crate::client::workload::Pattern;
use crate::client::{self, LoadOptions};
use crate::process::Stop;
use crate::rounds::{Rounds, Turn};
use crate::statistics::median;

/// Number of operations in flight that keep a device busy.
const PLENTY: u16 = 64;
/// Number of operations of 1 MiB in flight that keep a device busy.
const PLENTY_LARGE: u16 = 16;
/// Number of concurrent pairs of a write and a flush during reads. Their effect on the reads must
/// be measurable.
const PAIRS: u16 = 4;
/// A round of at least this many seconds in which no operation completes is an error. A shorter one
/// is repeated with twice its time.
const LONGEST_ROUND: f64 = 10.0;
pub const DEPTHS: [u16; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Size in bytes of a measured discard or write of zeroes.
const CLEARED: u64 = 64 << 10;
/// Maximum number of measured discards, or writes of zeroes, of a round.
const MOST_CLEARED: u64 = 128;

/// The target, and the time of each step.
pub struct CalibrationPlan<'a> {
    pub path: &'a Path,
    /// Number of bytes of the target that are used, a multiple of 16 MiB.
    pub size: u64,
    pub writes: bool,
    pub rounds: u32,
    pub seconds: f64,
    pub stop: &'a Stop,
}

#[derive(Clone, Debug)]
pub struct Written {
    pub times: Times,
    /// Device time of a pair of write (16 KiB) and flush, in nanoseconds.
    pub pair: f64,
    /// Latency of a flush in nanoseconds.
    pub flush: f64,
    /// Duration of a discard in nanoseconds. `None`: the file or the device does not support it.
    pub discard: Option<f64>,
    pub write_zeroes: Option<f64>,
}

#[derive(Clone, Debug)]
pub struct Measured {
    pub reads: Times,
    /// Queue depths, each with the number of random 4 KiB reads per second.
    pub depths: Vec<(u16, f64)>,
    pub written: Option<Written>,
}

/// Figures by name. Each has one value for each round.
type Figures = BTreeMap<&'static str, Vec<f64>>;

/// A step of a round. Steps are the systems of the harness's one row.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// Random reads of 4 KiB at this depth.
    Depth(u16),
    /// A rate: its name, pattern, size in bytes and depth.
    Rate(&'static str, Pattern, u64, u16),
    /// The latency of a flush.
    Flush,
    /// Pairs of a write and a flush beside reads.
    Pair,
    /// Discards.
    Discard,
    WriteZeroes,
}

/// The steps of all targets.
const READS: [Step; DEPTHS.len() + 2] = {
    let mut steps = [Step::Depth(0); DEPTHS.len() + 2];
    let mut n = 0;
    while n < DEPTHS.len() {
        steps[n] = Step::Depth(DEPTHS[n]);
        n += 1;
    }
    steps[n] = Step::Rate("sequential read", Pattern::Read, 4096, PLENTY);
    steps[n + 1] = Step::Rate("read stream", Pattern::Read, 1 << 20, PLENTY_LARGE);
    steps
};
/// The steps of a target that may be written to.
const WRITES: [Step; 8] = [
    Step::Rate("random write", Pattern::Randwrite, 4096, PLENTY),
    Step::Rate("sequential write", Pattern::Write, 4096, PLENTY),
    Step::Rate("write stream", Pattern::Write, 1 << 20, PLENTY_LARGE),
    Step::Rate("write alone", Pattern::Randwrite, 4096, 1),
    Step::Flush,
    Step::Pair,
    Step::Discard,
    Step::WriteZeroes,
];

/// What a step has measured.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    /// Operations a second.
    Rate(f64),
    /// Nanoseconds, or `None` if the target does not support the operation.
    Time(Option<f64>),
    /// Operations a second: of reads, and of pairs beside them.
    Beside { reads: f64, pairs: f64 },
}

/// Adds the outcomes of a round to the figures.
fn note(round: &[(Step, Outcome)], depths: &mut [Vec<f64>], figures: &mut Figures) {
    let alone = round.iter().find_map(|(step, outcome)| match (step, outcome) {
        (Step::Depth(PLENTY), Outcome::Rate(rate)) => Some(*rate),
        _ => None,
    });
    for (step, outcome) in round {
        let figure = match (step, outcome) {
            (Step::Depth(depth), Outcome::Rate(rate)) => {
                if let Some(at) = DEPTHS.iter().position(|d| d == depth) {
                    depths[at].push(*rate);
                }
                continue;
            }
            (Step::Rate(name, ..), Outcome::Rate(rate)) => (*name, *rate),
            (Step::Flush, Outcome::Time(Some(time))) => ("flush", *time),
            (Step::Discard, Outcome::Time(Some(time))) => ("discard", *time),
            (Step::WriteZeroes, Outcome::Time(Some(time))) => ("write zeroes", *time),
            // The reads alone are those of the same round.
            (Step::Pair, Outcome::Beside { reads, pairs }) => {
                let reads_alone = alone.unwrap_or(0.0);
                ("pair", Displaced { reads_alone, reads: *reads, pairs: *pairs }.pair())
            }
            _ => continue,
        };
        figures.entry(figure.0).or_default().push(figure.1);
    }
}

impl CalibrationPlan<'_> {
    /// Returns the steps of a round.
    fn steps(&self) -> Vec<Step> {
        let writes = WRITES.iter().filter(|_| self.writes);
        READS.iter().chain(writes).copied().collect()
    }

    pub fn measure(&self) -> Result<Measured> {
        let steps = self.steps();
        let each = (self.seconds / (f64::from(self.rounds) * steps.len() as f64)).max(0.02);
        let mut depths = vec![Vec::new(); DEPTHS.len()];
        let mut figures = Figures::new();
        let measure = |turn: Turn| self.step(steps[turn.system], each);
        let keep = |_, _, outcomes: Vec<(usize, Outcome)>| {
            let round: Vec<_> = outcomes.into_iter().map(|(n, o)| (steps[n], o)).collect();
            note(&round, &mut depths, &mut figures);
            Ok(())
        };
        Rounds::new(self.rounds, [steps.len()], self.stop).run_whole(measure, keep)?;
        let middle = |name: &str| median(figures.get(name).into_iter().flatten().copied());
        let rate = |name: &str| 1e9 / middle(name);
        let depths: Vec<_> =
            DEPTHS.iter().zip(depths).map(|(depth, rates)| (*depth, median(rates))).collect();
        let at = |depth| depths.iter().find(|d| d.0 == depth).map_or(f64::NAN, |d| 1e9 / d.1);
        let reads = Times {
            random: at(PLENTY),
            sequential: rate("sequential read"),
            stream: rate("read stream"),
            alone: at(1),
        };
        let written = self.writes.then(|| Written {
            times: Times {
                random: rate("random write"),
                sequential: rate("sequential write"),
                stream: rate("write stream"),
                alone: rate("write alone"),
            },
            pair: middle("pair"),
            flush: middle("flush"),
            discard: Some(middle("discard")).filter(|v| v.is_finite()),
            write_zeroes: Some(middle("write zeroes")).filter(|v| v.is_finite()),
        });
        Ok(Measured { reads, depths, written })
    }

    /// Measures a step for `each` seconds.
    fn step(&self, step: Step, each: f64) -> Result<Outcome> {
        // These two operations have the last sixteenth of the target to themselves, a half each.
        let (discard, zero) = (FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
        let clear = |flags, half| self.clear(flags | FallocateFlags::KEEP_SIZE, each / 2.0, half);
        Ok(match step {
            Step::Depth(depth) => Outcome::Rate(self.rate(Pattern::Randread, 4096, depth, each)?),
            Step::Rate(_, rw, bs, depth) => Outcome::Rate(self.rate(rw, bs, depth, each)?),
            Step::Flush => Outcome::Time(Some(self.flush(each)?)),
            Step::Pair => self.pair(each)?,
            Step::Discard => Outcome::Time(clear(discard, 0)?),
            Step::WriteZeroes => Outcome::Time(clear(zero, 1)?),
        })
    }

    /// Returns a load of writes of 16 KiB, each with a flush.
    fn pairs(&self, depth: u16, each: f64) -> LoadOptions {
        LoadOptions { flush_every: 1, ..self.load(Pattern::Randwrite, 16 << 10, depth, each) }
    }

    /// Returns the latency of a flush in nanoseconds: that of a pair without that of a write.
    fn flush(&self, each: f64) -> Result<f64> {
        let pairs = self.run(&self.pairs(1, each))? / 2.0;
        let write = self.rate(Pattern::Randwrite, 16 << 10, 1, each / 2.0)?;
        Ok((1e9 / pairs - 1e9 / write).max(0.0))
    }

    fn pair(&self, each: f64) -> Result<Outcome> {
        let reads = self.load(Pattern::Randread, 4096, PLENTY, each);
        let pairs = self.pairs(PAIRS, each);
        let (reads, pairs) = std::thread::scope(|scope| {
            let pairs = scope.spawn(|| self.run(&pairs));
            (self.run(&reads), pairs.join())
        });
        let pairs = pairs.map_err(|_| anyhow::anyhow!("a thread has died"))?? / 2.0;
        Ok(Outcome::Beside { reads: reads?, pairs })
    }

    fn load(&self, rw: Pattern, bs: u64, depth: u16, seconds: f64) -> LoadOptions {
        let size = Some(self.size / 16 * 15);
        let warmup = (seconds / 5.0).min(0.1);
        LoadOptions {
            rw,
            bs,
            depth,
            size,
            runtime: seconds - warmup,
            warmup,
            stop: self.stop.clone(),
            ..LoadOptions::for_file(self.path.into())
        }
    }

    fn rate(&self, rw: Pattern, bs: u64, depth: u16, seconds: f64) -> Result<f64> {
        self.run(&self.load(rw, bs, depth, seconds))
    }

    /// Returns the number of operations a second. A round in which no operation ends, because the
    /// device is slow or the machine is busy, is followed by one of twice its time.
    fn run(&self, load: &LoadOptions) -> Result<f64> {
        let mut load = load.clone();
        loop {
            self.stop.check()?;
            let report = client::measure(&load);
            self.stop.check()?;
            let report = report?;
            if let Some(first) = report.first_error {
                anyhow::bail!("{}: {first}", self.path.display());
            }
            if report.operations > 0 {
                return Ok(report.iops);
            }
            anyhow::ensure!(
                load.runtime < LONGEST_ROUND,
                "{}: no operation ended within {} s",
                self.path.display(),
                load.runtime
            );
            load.runtime *= 2.0;
        }
    }

    /// Returns the duration of one fallocate(2) call on data in nanoseconds, or `None` if the file
    /// or the device does not support the operation. `half`: of the last sixteenth. Writes it
    /// first, because a call on a hole has nothing to do.
    fn clear(&self, flags: FallocateFlags, seconds: f64, half: u64) -> Result<Option<f64>> {
        self.stop.check()?;
        let failed = || format!("clearing a part of {}", self.path.display());
        let file = File::options().read(true).write(true).open(self.path).with_context(failed)?;
        let first = self.size / 16 * 15 + self.size / 32 * half;
        let places = (self.size / 32 / CLEARED).min(MOST_CLEARED);
        let data = vec![0x5a; (places * CLEARED) as usize];
        file.write_all_at(&data, first).and_then(|()| file.sync_data()).with_context(failed)?;
        // Otherwise the calls would also free pages, which an image opened with O_DIRECT has not.
        fadvise(&file, first, NonZero::new(places * CLEARED), Advice::DontNeed)
            .with_context(failed)?;
        let (begin, mut done) = (Instant::now(), 0u64);
        while done == 0 || (done < places && begin.elapsed() < Duration::from_secs_f64(seconds)) {
            match fallocate(&file, flags, first + done * CLEARED, CLEARED) {
                Err(Errno::OPNOTSUPP | Errno::NODEV) => return Ok(None),
                other => other.with_context(failed)?,
            }
            done += 1;
        }
        let time = begin.elapsed().as_nanos() as f64 / done as f64;
        // The next calibration of the file must find no holes.
        file.write_all_at(&data, first).with_context(failed)?;
        Ok(Some(time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Interrupted, fill};
    use crate::scratch::Scratch;

    const SIZE: u64 = 16 << 20;

    fn plan<'a>(path: &'a Path, writes: bool, stop: &'a Stop) -> CalibrationPlan<'a> {
        CalibrationPlan { path, size: SIZE, writes, rounds: 1, seconds: 0.1, stop }
    }

    #[test]
    fn reads_are_measured_at_all_depths_and_leave_the_file_as_it_is() {
        let (scratch, stop) = (Scratch::new(), Stop::default());
        let path = scratch.join("target");
        fill(&path, SIZE, &stop).unwrap();
        let before = std::fs::read(&path).unwrap();
        let plan = plan(&path, false, &stop);
        assert_eq!(plan.steps().len(), 11);
        let measured = plan.measure().unwrap();
        assert!(measured.written.is_none());
        assert!(measured.depths.iter().map(|(depth, _)| *depth).eq(DEPTHS));
        assert!(measured.depths.iter().all(|(_, rate)| *rate > 0.0), "{:?}", measured.depths);
        // The times are those of the rates at one and at 64 operations in flight.
        let Times { random, sequential, stream, alone } = measured.reads;
        assert_eq!((alone, random), (1e9 / measured.depths[0].1, 1e9 / measured.depths[6].1));
        assert!(sequential > 0.0 && stream > 0.0, "{:?}", measured.reads);
        assert!(std::fs::read(&path).unwrap() == before, "it was written to");
    }

    #[test]
    fn writes_are_measured_if_they_are_permitted_and_leave_no_hole() {
        let (scratch, stop) = (Scratch::new(), Stop::default());
        let path = scratch.join("target");
        fill(&path, SIZE, &stop).unwrap();
        let before = std::fs::read(&path).unwrap();
        let plan = plan(&path, true, &stop);
        assert_eq!(plan.steps().len(), 19);
        let written = plan.measure().unwrap().written.unwrap();
        let Times { random, sequential, stream, alone } = written.times;
        for time in [random, sequential, stream, alone] {
            assert!(time > 0.0 && time.is_finite(), "{:?}", written.times);
        }
        assert!(written.flush >= 0.0 && written.pair >= 0.0, "{written:?}");
        let after = std::fs::read(&path).unwrap();
        assert!(after != before && after.len() as u64 == SIZE);
        // The last sixteenth was discarded and zeroed, and has data again.
        let last = (SIZE / 16 * 15) as usize;
        if written.discard.is_some() && written.write_zeroes.is_some() {
            assert!(after[last..].iter().all(|byte| *byte == 0x5a));
        }
        let file = File::open(&path).unwrap();
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0));
        assert!(hole.is_err() || hole == Ok(SIZE), "{hole:?}");
    }

    #[test]
    fn a_round_gives_each_figure_a_value_whatever_its_order() {
        let step = |step| match step {
            Step::Depth(depth) => (step, Outcome::Rate(f64::from(depth) * 10.0)),
            Step::Rate(name, ..) => (step, Outcome::Rate(name.len() as f64)),
            Step::Pair => (step, Outcome::Beside { reads: 320.0, pairs: 100.0 }),
            Step::Discard => (step, Outcome::Time(None)),
            Step::Flush | Step::WriteZeroes => (step, Outcome::Time(Some(7.0))),
        };
        let mut round: Vec<_> = READS.into_iter().chain(WRITES).map(step).collect();
        let (mut depths, mut figures) = (vec![Vec::new(); DEPTHS.len()], Figures::new());
        for first in [0, 14] {
            round.rotate_left(first);
            note(&round, &mut depths, &mut figures);
        }
        assert!(depths.iter().zip(DEPTHS).all(|(d, depth)| *d == [f64::from(depth) * 10.0; 2]));
        // Pairs displaced the half of 640 reads a second, the rate at the depth of 64.
        let pair = Displaced { reads_alone: 640.0, reads: 320.0, pairs: 100.0 }.pair();
        assert_eq!((&figures["pair"], &figures["flush"]), (&vec![pair; 2], &vec![7.0; 2]));
        assert_eq!(figures["write stream"], [12.0; 2]);
        assert!(!figures.contains_key("discard") && figures.contains_key("write zeroes"));
        assert_eq!(figures.len(), 9);
    }

    #[test]
    fn a_call_that_the_file_does_not_support_has_no_time() {
        let (scratch, stop) = (Scratch::new(), Stop::default());
        let path = scratch.join("target");
        fill(&path, SIZE, &stop).unwrap();
        let plan = plan(&path, true, &stop);
        // No file system inserts a range inside a file and keeps its length.
        let both = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        assert_eq!(plan.clear(both, 0.01, 0).unwrap(), None);
        let time = plan.clear(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0.01, 1);
        assert!(time.unwrap().is_none_or(|time| time > 0.0));
    }

    #[test]
    fn an_interrupted_or_impossible_measurement_is_an_error() {
        let (scratch, stop) = (Scratch::new(), Stop::default());
        let missing = scratch.join("missing");
        let error = format!("{:#}", plan(&missing, true, &stop).measure().unwrap_err());
        assert!(error.contains("missing"), "{error}");
        let error = plan(&missing, true, &stop).clear(FallocateFlags::KEEP_SIZE, 0.01, 0);
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains("clearing a part of") && error.contains("missing"), "{error}");
        stop.request();
        assert!(plan(&missing, false, &stop).measure().unwrap_err().is::<Interrupted>());
    }
}
