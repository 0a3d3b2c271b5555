//! Measured data. `bench compare` writes it; reports, pictures and comparisons are made from it.
//!
//! In and out: JSON (all data) and CSV (a line for each operation that was timed by itself). What
//! must hold: a newer program reads what an older one wrote; a file is whole whenever the program
//! ends.

use std::path::Path;

use anyhow::{Context, Result};
use blockyard_program::file::replace;
use serde::{Deserialize, Serialize};

/// Version of the file format. It is raised when an existing field changes its meaning.
const FORMAT: u32 = 1;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Results {
    pub format: u32,
    pub environment: Vec<(String, String)>,
    /// The command line that made these results.
    pub command: Vec<String>,
    /// Names of works and systems, and what they mean.
    #[serde(default)]
    pub about: Vec<(String, String)>,
    /// Systems that could not be measured, and why.
    #[serde(default)]
    pub absent: Vec<(String, String)>,
    pub runs: Vec<Run>,
}

/// One run of one piece of work on one system.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub system: String,
    pub work: String,
    pub round: u32,
    /// Duration by the host's clock, from the script's mark `begin` to its mark `end`.
    pub seconds: f64,
    /// The same duration by the guest's clock. `None`: the run had no guest.
    #[serde(default)]
    pub guest_seconds: Option<f64>,
    pub operations: u64,
    pub bytes: u64,
    /// Operations timed one by one: bytes, seconds. Measured by the guest's clock, and corrected by
    /// the ratio of the host's clock to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<(u64, f64)>,
    /// Latencies: quantile (0 to 1), seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latency: Vec<(f64, f64)>,
    /// Bytes in each tenth of a second.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub throughput: Vec<f64>,
    /// Single commands: names, and seconds by the host's clock.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<(String, f64)>,
    pub cpu: Cpu,
    /// Parts of an operation's latency, as far as they were measured. Each is a mean or a median.
    #[serde(default)]
    pub spent: Spent,
}

/// CPU seconds, user and system, in the measured part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// CPU seconds of the guest's processes on the host, or of the load generator if there is no
    /// guest.
    pub guest: f64,
    /// CPU seconds of the server.
    pub backend: Option<f64>,
    /// CPU seconds of the host kernel's own threads.
    pub kernel: f64,
}

/// Parts of one operation's latency, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// Time from the program's call until the driver has the operation (fio's submission latency).
    pub submission: Option<f64>,
    /// Time that the operation waits in the server before the server starts it.
    pub queueing: Option<f64>,
    /// Time from the start of the operation in the server until its completion there.
    pub service: Option<f64>,
}

impl Results {
    pub fn new(command: Vec<String>, environment: Vec<(String, String)>) -> Self {
        Results { format: FORMAT, environment, command, ..Results::default() }
    }

    /// Reads a file of results, or the folder of a report.
    pub fn load(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { path.join("results.json") } else { path.to_path_buf() };
        let text = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let results: Results = serde_json::from_slice(&text)
            .with_context(|| format!("{} is no file of results", path.display()))?;
        let newer = results.format > FORMAT;
        anyhow::ensure!(
            !newer,
            "{} is of format {}; this program knows {FORMAT}",
            path.display(),
            results.format
        );
        Ok(results)
    }

    /// Writes `results.json` and `results.csv` into a folder. Each file is replaced as a whole:
    /// after an interruption it is the new or the previous one.
    pub fn save(&self, folder: &Path) -> Result<()> {
        replace(&folder.join("results.json"), &serde_json::to_vec(self)?)?;
        replace(&folder.join("results.csv"), self.csv().as_bytes())
    }

    fn csv(&self) -> String {
        use std::fmt::Write;
        let mut text = String::from("system,work,round,bytes,seconds\n");
        for run in &self.runs {
            for (bytes, seconds) in &run.samples {
                let _ = writeln!(
                    text,
                    "{},{},{},{bytes},{seconds:.9}",
                    run.system, run.work, run.round
                );
            }
        }
        text
    }

    /// Returns the explanation of the name of a work or system.
    pub fn meaning(&self, name: &str) -> Option<&str> {
        self.about.iter().find(|a| a.0 == name).map(|a| a.1.as_str())
    }

    /// Returns the names of all systems, in the order of their first runs.
    pub fn systems(&self) -> Vec<&str> {
        unique(self.runs.iter().map(|r| r.system.as_str()))
    }

    pub fn works(&self) -> Vec<&str> {
        unique(self.runs.iter().map(|r| r.work.as_str()))
    }

    pub fn of<'a>(&'a self, work: &'a str, system: &'a str) -> impl Iterator<Item = &'a Run> {
        self.runs.iter().filter(move |r| r.work == work && r.system == system)
    }
}

impl Run {
    pub fn per_second(&self) -> f64 {
        self.operations as f64 / self.seconds
    }

    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// Returns the CPU seconds for a million operations: of guest, server and kernel together.
    pub fn cpu_per_million(&self) -> f64 {
        let all = self.cpu.guest + self.cpu.backend.unwrap_or(0.0) + self.cpu.kernel;
        all * 1e6 / self.operations.max(1) as f64
    }
}

fn unique<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut all: Vec<&str> = Vec::new();
    for name in names {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page that is drawn again from the file is the page that was drawn at once.
    #[test]
    fn what_is_read_is_what_was_written() {
        let differences = (0..1000u32).map(|i| (f64::from(i) / 100.0 + 0.35) - 0.12);
        let quotients = (1..1000u32).map(|i| 1.0 / f64::from(i));
        let samples = differences.chain(quotients).map(|seconds| (1, seconds)).collect();
        let run = Run { samples, seconds: 0.1 + 0.2, ..Run::default() };
        let results = Results { runs: vec![run], ..Results::new(Vec::new(), Vec::new()) };
        let text = serde_json::to_vec(&results).unwrap();
        assert!(
            serde_json::from_slice::<Results>(&text).unwrap() == results,
            "numbers have changed on their way"
        );
    }
}
