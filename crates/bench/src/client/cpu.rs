//! The CPU time of processes, from /proc: of the back end, and of ourselves.

use anyhow::{Context, Result};
use serde::Serialize;

/// CPU seconds of a process so far, user and system, all its threads (also those that have ended).
pub fn seconds(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("reading {path}: is the process there?"))?;
    let ticks = parse(&stat).with_context(|| format!("{path} has an unknown form"))?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Fields 14 and 15; the name (field 2) may hold spaces and parentheses.
fn parse(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// What a process used in the measured part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Usage {
    pub seconds: f64,
    /// Of one core, while it ran.
    pub cores: f64,
    pub iops_per_core: f64,
    pub seconds_per_million_ios: f64,
}

impl Usage {
    fn new(seconds: f64, elapsed: f64, operations: u64) -> Self {
        let per = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        Usage {
            seconds,
            cores: per(seconds, elapsed),
            iops_per_core: per(operations as f64, seconds),
            seconds_per_million_ios: per(seconds * 1e6, operations as f64),
        }
    }
}

/// Reads the clocks of both processes when the measured part begins (with the first queue) and ends (with the last).
pub struct Meter {
    backend: Option<u32>,
    begin: Option<(f64, Option<f64>)>,
    end: Option<(f64, Option<f64>)>,
}

impl Meter {
    pub fn new(backend: Option<u32>) -> Result<Self> {
        let meter = Meter { backend, begin: None, end: None };
        meter.read()?;
        Ok(meter)
    }

    fn read(&self) -> Result<(f64, Option<f64>)> {
        Ok((seconds(std::process::id())?, self.backend.map(seconds).transpose()?))
    }

    pub fn begin(&mut self) -> Result<()> {
        if self.begin.is_none() {
            self.begin = Some(self.read()?);
        }
        Ok(())
    }

    /// Each queue's end; the last one stands. A back end that is gone by then has no figure.
    pub fn end(&mut self) {
        self.end = self.read().ok();
    }

    /// (ours, the back end's).
    pub fn usage(&self, elapsed: f64, operations: u64) -> (Option<Usage>, Option<Usage>) {
        let (Some(begin), Some(end)) = (self.begin, self.end) else { return (None, None) };
        let usage = |from: f64, to: f64| Usage::new(to - from, elapsed, operations);
        (Some(usage(begin.0, end.0)), begin.1.zip(end.1).map(|(from, to)| usage(from, to)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_process_may_be_anything() {
        let stat = "12 (a) b (c) S 1 12 12 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 3 0 1000";
        assert_eq!(parse(stat), Some(300));
        assert_eq!(parse("nothing"), None);
        seconds(std::process::id()).unwrap();
    }

    #[test]
    fn usage_is_by_time_and_by_operation() {
        let usage = Usage::new(2.0, 4.0, 1_000_000);
        assert_eq!((usage.cores, usage.iops_per_core, usage.seconds_per_million_ios), (0.5, 500_000.0, 2.0));
        assert_eq!(Usage::new(0.0, 1.0, 10).iops_per_core, 0.0);
    }
}
