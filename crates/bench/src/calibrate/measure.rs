//! Measures a device in rounds. Each round runs each step for a short time. The results are the
//! medians of the rounds.
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

impl CalibrationPlan<'_> {
    /// Returns the number of steps of a round.
    fn steps(&self) -> u32 {
        DEPTHS.len() as u32 + 2 + if self.writes { 8 } else { 0 }
    }

    pub fn measure(&self) -> Result<Measured> {
        let each = (self.seconds / f64::from(self.rounds * self.steps())).max(0.02);
        let mut depths = vec![Vec::new(); DEPTHS.len()];
        let mut figures = Figures::new();
        for _ in 0..self.rounds {
            self.reads(each, &mut depths, &mut figures)?;
            if self.writes {
                let rate = depths.get(6).and_then(|d| d.last()).copied().unwrap_or(0.0);
                self.written(each, rate, &mut figures)?;
            }
        }
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

    fn reads(&self, each: f64, depths: &mut [Vec<f64>], figures: &mut Figures) -> Result<()> {
        for (depth, rates) in DEPTHS.iter().zip(depths) {
            rates.push(self.rate(Pattern::Randread, 4096, *depth, each)?);
        }
        let mut note = |name, rate| figures.entry(name).or_default().push(rate);
        note("sequential read", self.rate(Pattern::Read, 4096, PLENTY, each)?);
        note("read stream", self.rate(Pattern::Read, 1 << 20, PLENTY_LARGE, each)?);
        Ok(())
    }

    fn written(&self, each: f64, reads_alone: f64, figures: &mut Figures) -> Result<()> {
        let mut note = |name, rate| figures.entry(name).or_default().push(rate);
        note("random write", self.rate(Pattern::Randwrite, 4096, PLENTY, each)?);
        note("sequential write", self.rate(Pattern::Write, 4096, PLENTY, each)?);
        note("write stream", self.rate(Pattern::Write, 1 << 20, PLENTY_LARGE, each)?);
        note("write alone", self.rate(Pattern::Randwrite, 4096, 1, each)?);
        let pairs =
            LoadOptions { flush_every: 1, ..self.load(Pattern::Randwrite, 16 << 10, 1, each) };
        let alone = self.run(&pairs)?;
        let write = self.rate(Pattern::Randwrite, 16 << 10, 1, each / 2.0)?;
        note("flush", (1e9 / (alone / 2.0) - 1e9 / write).max(0.0));
        let reads = self.load(Pattern::Randread, 4096, PLENTY, each);
        let pairs = LoadOptions { depth: PAIRS, ..pairs };
        let (reads, pairs) = std::thread::scope(|scope| {
            let pairs = scope.spawn(|| self.run(&pairs));
            (self.run(&reads), pairs.join())
        });
        let pairs = pairs.map_err(|_| anyhow::anyhow!("a thread has died"))?? / 2.0;
        note("pair", Displaced { reads_alone, reads: reads?, pairs }.pair());
        // These two operations have the last sixteenth of the target to themselves, a half each.
        for (name, half, flags) in [
            ("discard", 0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
            ("write zeroes", 1, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE),
        ] {
            if let Some(time) = self.clear(flags, each / 2.0, half)? {
                note(name, time);
            }
        }
        Ok(())
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
        assert_eq!(plan.steps(), 11);
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
        assert_eq!(plan.steps(), 19);
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
