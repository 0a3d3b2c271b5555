//! CPU time: of the back end's process, from /proc; of this process, and of each thread that makes
//! load, from their clocks.

use anyhow::{Context, Result};
use blockyard_ring::Clock;
use serde::Serialize;

/// Returns the CPU seconds of a process: user and system, of all its threads, ended ones included.
pub fn seconds(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path)
        .with_context(|| format!("reading {path}: is the process there?"))?;
    let ticks = parse(&stat).with_context(|| format!("{path} has an unknown form"))?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Parses fields 14 and 15. The name (field 2) may contain spaces and parentheses.
fn parse(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// CPU time of a process in the measured part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Usage {
    pub seconds: f64,
    /// Number of busy processors: CPU seconds for each second of the measured part.
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

/// Returns the CPU nanoseconds of this thread so far.
pub fn thread_nanos() -> u64 {
    Clock::Thread.read().as_nanos() as u64
}

/// The process of the back end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackEnd {
    #[default]
    Unknown,
    Process(u32),
    /// The back end runs in this process, like the load. Its CPU time is that of the process
    /// without the load's threads.
    Here,
}

/// Reads the clocks of both processes when the measured part begins (with the first queue) and ends
/// (with the last).
pub struct Meter {
    backend: BackEnd,
    begin: Option<(f64, Option<f64>)>,
    end: Option<(f64, Option<f64>)>,
}

impl Meter {
    pub fn new(backend: BackEnd) -> Result<Self> {
        let meter = Meter { backend, begin: None, end: None };
        meter.read()?;
        Ok(meter)
    }

    fn read(&self) -> Result<(f64, Option<f64>)> {
        let own = Clock::Process.read().as_secs_f64();
        match self.backend {
            BackEnd::Unknown => Ok((own, None)),
            BackEnd::Process(pid) => Ok((own, Some(seconds(pid)?))),
            BackEnd::Here => Ok((own, Some(own))),
        }
    }

    pub fn begin(&mut self) -> Result<()> {
        if self.begin.is_none() {
            self.begin = Some(self.read()?);
        }
        Ok(())
    }

    /// Reads the clocks at the end of a queue's measured part. The call of the last queue decides.
    /// A back end whose process has ended has no figure.
    pub fn end(&mut self) {
        self.end = self.read().ok();
    }

    /// Returns the CPU time of this process and of the back end. `load`: CPU seconds of the load's
    /// threads.
    pub fn usage(
        &self,
        elapsed: f64,
        operations: u64,
        load: f64,
    ) -> (Option<Usage>, Option<Usage>) {
        let (Some(begin), Some(end)) = (self.begin, self.end) else { return (None, None) };
        let usage = |seconds: f64| Usage::new(seconds, elapsed, operations);
        let (ours, theirs) = (end.0 - begin.0, begin.1.zip(end.1).map(|(from, to)| to - from));
        match self.backend {
            BackEnd::Here => (Some(usage(load)), Some(usage((ours - load).max(0.0)))),
            _ => (Some(usage(ours)), theirs.map(usage)),
        }
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
        assert_eq!(
            (usage.cores, usage.iops_per_core, usage.seconds_per_million_ios),
            (0.5, 500_000.0, 2.0)
        );
        assert_eq!(Usage::new(0.0, 1.0, 10).iops_per_core, 0.0);
    }
    #[test]
    fn a_back_end_of_this_process_uses_what_the_load_does_not() {
        let mut meter = Meter::new(BackEnd::Here).unwrap();
        (meter.begin, meter.end) = (Some((1.0, Some(1.0))), Some((4.0, Some(4.0))));
        let (client, back_end) = meter.usage(2.0, 1_000_000, 1.0);
        assert_eq!(client.map(|u| (u.seconds, u.cores)), Some((1.0, 0.5)));
        assert_eq!(back_end.map(|u| (u.seconds, u.iops_per_core)), Some((2.0, 500_000.0)));
        assert!(thread_nanos() > 0);
    }
}
