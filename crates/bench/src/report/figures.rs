//! The figures of a work on each system: medians over the rounds.

use crate::compare::system::System;
use crate::results::{Results, Run};
use crate::statistics::{median, quantile, sorted};

pub struct Figures {
    pub system: String,
    /// The system answers flushes without a sync.
    pub drops_flushes: bool,
    pub per_second: f64,
    /// Seconds of the whole run. The next field has the seconds of each command.
    pub seconds: f64,
    pub steps: Vec<(String, f64)>,
    /// Minimum and maximum of the rounds.
    pub range: (f64, f64),
    pub bytes_per_second: f64,
    /// Seconds of an operation.
    pub median: f64,
    pub p99: f64,
    pub to_host: Option<f64>,
    pub cpu_per_million: f64,
    /// Processors that the guest (or, without one, the load) kept busy.
    pub guest_cores: f64,
    pub backend_cores: Option<f64>,
    /// Coefficient of variation of the throughput of each tenth of a second.
    pub burstiness: Option<f64>,
}

impl Figures {
    /// Returns the system's name for a table, with a mark if its writes are not durable.
    pub fn row_name(&self) -> String {
        if self.drops_flushes {
            format!("{} (not durable)", self.system)
        } else {
            self.system.clone()
        }
    }
}

/// Returns the figures of each system, in the order of the results.
pub fn of(results: &Results, work: &str) -> Vec<Figures> {
    let systems = results.systems().into_iter().filter(|s| results.of(work, s).next().is_some());
    let mut all: Vec<_> = systems.map(|system| one(results, work, system)).collect();
    let host = all.iter().find(|f| f.system == "host").map(|f| f.per_second);
    for figures in &mut all {
        figures.to_host = host.map(|host| figures.per_second / host);
    }
    all
}

fn one(results: &Results, work: &str, system: &str) -> Figures {
    let runs = || results.of(work, system);
    let mid = |of: fn(&Run) -> f64| median(runs().map(of));
    let rates = sorted(runs().map(Run::per_second));
    let latencies = sorted(runs().flat_map(|r| &r.samples).map(|s| s.1));
    let told =
        |q: f64| median(runs().filter_map(|r| r.latency.iter().find(|l| l.0 == q)).map(|l| l.1));
    let latency = |q: f64| if latencies.is_empty() { told(q) } else { quantile(&latencies, q) };
    let has_backend = runs().any(|r| r.cpu.backend.is_some());
    let variations = runs().filter_map(|r| variation(&throughput(r)));
    Figures {
        system: system.into(),
        drops_flushes: system.parse::<System>().is_ok_and(|s| s.drops_flushes()),
        per_second: mid(Run::per_second),
        seconds: mid(|r| r.seconds),
        steps: steps(&runs().collect::<Vec<_>>()),
        range: (
            rates.first().copied().unwrap_or(f64::NAN),
            rates.last().copied().unwrap_or(f64::NAN),
        ),
        bytes_per_second: mid(Run::bytes_per_second),
        median: latency(0.5),
        p99: latency(0.99),
        to_host: None,
        cpu_per_million: mid(Run::cpu_per_million),
        guest_cores: mid(|r| r.cpu.guest / r.seconds),
        backend_cores: has_backend.then(|| mid(|r| r.cpu.backend.unwrap_or(0.0) / r.seconds)),
        burstiness: Some(median(variations)).filter(|v| v.is_finite()),
    }
}

fn steps(runs: &[&Run]) -> Vec<(String, f64)> {
    let first = runs.first().map(|r| r.steps.clone()).unwrap_or_default();
    let mid = |name: &str| {
        median(runs.iter().flat_map(|r| &r.steps).filter(|s| s.0 == name).map(|s| s.1))
    };
    first.into_iter().map(|(name, _)| (name.clone(), mid(&name))).collect()
}

/// Returns the bytes in each tenth of a second: as measured, or summed from single operations.
pub fn throughput(run: &Run) -> Vec<f64> {
    const STEP: f64 = 0.1;
    if !run.throughput.is_empty() {
        return run.throughput.clone();
    }
    let (mut at, mut steps) = (0.0, Vec::new());
    for (bytes, seconds) in &run.samples {
        at += seconds;
        let step = (at / STEP) as usize;
        if steps.len() <= step {
            steps.resize(step + 1, 0.0);
        }
        steps[step] += *bytes as f64;
    }
    // Drop the last slice, because it is shorter than the others.
    steps.pop();
    steps
}

/// Returns standard deviation / mean. None: fewer than three values.
pub fn variation(values: &[f64]) -> Option<f64> {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let square = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (values.len() > 2 && mean > 0.0).then(|| square.sqrt() / mean)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_over_time_from_single_operations() {
        let samples = vec![(100, 0.05), (200, 0.04), (300, 0.1), (400, 0.25)];
        let run = Run { samples, ..Run::default() };
        assert_eq!(throughput(&run), [300.0, 300.0, 0.0, 0.0]);
        assert_eq!(variation(&[1.0, 1.0]), None);
        // The expected value is statistics.stdev([2, 4, 4, 4, 5, 5, 7, 9]) / 5 in Python.
        let cv = variation(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).unwrap();
        assert!((cv - 2.138089935 / 5.0).abs() < 1e-9, "{cv}");
    }
}
