//! A thrashing neighbour: two User Mode Linux guests on one server, one of which runs out of memory
//! and swaps to its disk.
//!
//! ```text
//!   worker    fio with checksums (random writes, each read back), then small steps, as of a
//!             person at a terminal: save a new file of 4 KiB (synced, with its folder), read
//!             three small uncached files, pause
//!   thrasher  is idle, or uses twice the memory that it has; the server shares the device fairly,
//!             or does not; the thrasher swaps before the worker works, or before it boots
//! ```
//! A row is a device: the machine's disk, and Blockyard's model of a slower one before the same
//! files. An emulated guest needs much processor time for each page that it swaps, so it does not
//! saturate a fast disk. In: the two scripts of `thrash_scripts`. Out: fio's rate and latency,
//! durations of steps by the guest's clock, rates of swapping by the thrasher's kernel. What must
//! hold: the worker is measured only while the thrasher swaps.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use super::thrash_scripts::{PAUSE, THRASHER, WORKER};
use super::workspace::{Workspace, zeroes};
use super::{Figures, Measured, Row, Table, cell, grouped, markdown};
use crate::calibrate;
use crate::compare::cpu::Snapshot;
use crate::process::{Process, Stop};
use crate::statistics::median;

/// A device with 4 concurrent requests of 1 ms: 4000 requests and 128 MiB a second, like a small
/// disk of a cloud provider.
const MODEL: &str = "parallel=4,read=1ms,write=1ms,flush=2ms,bandwidth=128M,device=slow";
const MODEL_COSTS: &str = r#"[[device]]
device = "slow"
description = "the model of a device: a quarter of what each operation takes one of its four"
read = 250000
read-sequential = 250000
read-per-mib = 7812500
write = 250000
write-sequential = 250000
write-per-mib = 7812500
flush = 500000
discard = 250000
write-zeroes = 250000
window = 1000000
base-latency-read = 1000000
base-latency-write = 1000000
"#;

/// Names of the rows, and whether a model of a device delays the files.
const DEVICES: [(&str, bool); 2] = [("the machine's disk", false), ("4,000 IOPS, 128 MiB/s", true)];

/// A system: what the neighbour does, and how the server treats it.
struct Way {
    name: &'static str,
    thrashes: bool,
    /// The server's `fair-share`.
    fair: bool,
    /// The neighbour swaps before the worker's guest boots.
    swaps_first: bool,
}

const IDLE: Way = Way { name: "idle", thrashes: false, fair: true, swaps_first: false };
const WAYS: [Way; 5] = [
    IDLE,
    Way { name: "thrashes, `fair-share = false`", thrashes: true, fair: false, ..IDLE },
    Way { name: "thrashes, `fair-share = true`", thrashes: true, ..IDLE },
    Way {
        name: "thrashes first, `fair-share = false`",
        thrashes: true,
        fair: false,
        swaps_first: true,
    },
    Way { name: "thrashes first, `fair-share = true`", thrashes: true, swaps_first: true, ..IDLE },
];

const WORKER_MEMORY: &str = "256M";
const THRASHER_MEMORY: &str = "128M";
/// MiB that the thrasher uses, and the number of processes that use it.
const USED_MIB: u32 = 256;
const PROCESSES: u32 = 32;
/// Number of operations that fio keeps in flight.
const DEPTH: u32 = 4;
/// Number of swapped-in pages at which the neighbour counts as thrashing.
const THRASHES: u64 = 5000;

/// A guest that is not up, or does not swap, after this time has failed.
const READY: Duration = Duration::from_secs(120);

pub struct Thrash {
    place: Workspace,
    costs: PathBuf,
    /// Set once the file of costs has the costs of the machine's disk.
    calibrated: bool,
    /// Durations of all steps of all rounds in ms, by row and system.
    steps: BTreeMap<(usize, usize), Vec<f64>>,
}

impl Thrash {
    pub fn new(place: Workspace) -> Result<Self> {
        let costs = place.folder.join("costs.toml");
        std::fs::write(&costs, MODEL_COSTS)?;
        for name in ["worker", "thrasher"] {
            zeroes(&place.folder.join(format!("{name}.img")), place.size, &place.stop)?;
            std::fs::create_dir(place.folder.join(name))?;
        }
        Ok(Thrash { place, costs, calibrated: false, steps: BTreeMap::new() })
    }

    /// Starts `blockyard serve` with a disk for each guest, and waits until it is ready.
    fn server(&self, model: bool, fair: bool) -> Result<Process> {
        let folder = self.place.folder.display();
        let mut text =
            format!("reactors = 2\nfair-share = {fair}\ncosts = \"{}\"\n", self.costs.display());
        for name in ["worker", "thrasher"] {
            let file = format!("{folder}/{name}.img");
            let image = if model { format!("delay:file={file},{MODEL}") } else { file };
            text += &format!(
                "[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\nvhost-user = \"{folder}/{name}.sock\"\n{}",
                if model { "device = \"slow\"\n" } else { "" }
            );
        }
        let config = self.place.folder.join("config.toml");
        std::fs::write(&config, text)?;
        let server = Process::start(
            Command::new(&self.place.program).args(["serve", "--config"]).arg(&config),
        )?;
        let line = server.line(&self.place.stop, Instant::now() + READY)?;
        anyhow::ensure!(
            line.is_some_and(|l| l.1 == "ready"),
            "the server does not start: {}",
            server.errors().trim()
        );
        Ok(server)
    }

    fn guest(
        &self,
        name: &'static str,
        script: &str,
        memory: &str,
        cpu: &str,
    ) -> Result<Guest<'_>> {
        let folder = &self.place.folder;
        let share = folder.join(name);
        for word in ["thrash", "work", "end"] {
            let _ = std::fs::remove_file(share.join(word));
        }
        let file = folder.join(format!("{name}.sh"));
        std::fs::write(&file, format!("set -eu\n{PAUSE}{script}"))?;
        let mut command = Command::new(self.place.guests()?.join("uml"));
        command.args([
            "--mem",
            memory,
            "--cpu",
            cpu,
            "--seccomp",
            "on",
            "--timeout",
            "300",
            "--disk",
        ]);
        command.arg(format!("vhost={}/{name}.sock", folder.display())).arg("--share").arg(&share);
        for (key, value) in [("MEMORY", USED_MIB), ("PROCESSES", PROCESSES), ("DEPTH", DEPTH)] {
            command.args(["--env", &format!("{key}={value}")]);
        }
        // Round up, because bash counts whole seconds.
        command.args(["--env", &format!("SECONDS_EACH={}", self.place.seconds.ceil())]).arg(&file);
        Ok(Guest {
            name,
            share,
            process: Process::start(&command)?,
            said: Vec::new(),
            stop: &self.place.stop,
        })
    }

    fn worker(&self) -> Result<Guest<'_>> {
        let mut worker = self.guest("worker", WORKER, WORKER_MEMORY, "0")?;
        worker.expect("ready", READY)?;
        Ok(worker)
    }

    /// Boots the neighbour. Returns when it swaps, if it shall thrash.
    fn thrasher(&self, thrashes: bool) -> Result<Guest<'_>> {
        let last = std::thread::available_parallelism().map_or(0, |n| n.get() - 1).min(1);
        let mut thrasher = self.guest("thrasher", THRASHER, THRASHER_MEMORY, &last.to_string())?;
        thrasher.expect("ready", READY)?;
        thrasher.tell("thrash", if thrashes { "yes" } else { "no" })?;
        let mut pages = if thrashes { 0 } else { u64::MAX };
        while pages <= THRASHES {
            let figures = thrasher.expect("swapped", READY)?;
            pages = figures
                .split(' ')
                .next()
                .and_then(|n| n.parse().ok())
                .context("the thrasher prints no figure")?;
        }
        Ok(thrasher)
    }

    /// Runs both guests once. Returns figures, and the steps of the worker.
    fn run(&self, model: bool, way: &Way) -> Result<(Figures, Vec<f64>)> {
        let limit = READY + Duration::from_secs_f64(self.place.seconds);
        let mut server = self.server(model, way.fair)?;
        let first = if way.swaps_first { Some(self.thrasher(way.thrashes)?) } else { None };
        let mut worker = self.worker()?;
        let mut thrasher = first.map_or_else(|| self.thrasher(way.thrashes), Ok)?;
        let (before, begin) = (Snapshot::take(), Instant::now());
        worker.tell("work", "")?;
        let fio = worker.expect("fio", limit)?;
        worker.expect("done", limit)?;
        let (after, end) = (Snapshot::take(), Instant::now());
        worker.finish()?;
        thrasher.tell("end", "")?;
        thrasher.finish()?;
        let seconds = (end - begin).as_secs_f64();
        let used = |pid| (after.tree(pid) - before.tree(pid)) / seconds;
        let mut figures = of_fio(&fio)?;
        figures.insert("thrasher_cpu", used(thrasher.process.pid()));
        figures.insert("server_cpu", used(server.pid()));
        server.end()?;
        let (pages_in, pages_out) = swapping(&thrasher.said, begin, end)?;
        figures.extend([("pages_in", pages_in), ("pages_out", pages_out)]);
        let steps: Vec<f64> = worker.said.iter().filter_map(|(_, line)| step(line)).collect();
        anyhow::ensure!(!steps.is_empty(), "the script beside the thrasher has completed no step");
        figures.extend([
            ("step_median_ms", median(steps.iter().copied())),
            ("step_p99_ms", percentile(&steps, 0.99)),
        ]);
        Ok((figures, steps))
    }
}

impl Table for Thrash {
    fn rows(&self) -> Vec<Row> {
        let systems = || WAYS.iter().map(|way| way.name.to_string()).collect();
        DEVICES.iter().map(|device| Row { name: device.0.into(), systems: systems() }).collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        let (_, model) = DEVICES[row];
        if !model && !self.calibrated {
            calibrate::of_folder(&self.place.folder, 1 << 30, 24.0, &self.place.stop)?
                .save(&self.costs)?;
            self.calibrated = true;
        }
        let (figures, steps) = self.run(model, &WAYS[system])?;
        self.steps.entry((row, system)).or_default().extend(steps);
        Ok(figures)
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    /// All systems are settings of Blockyard.
    fn is_ours(&self, _row: usize, _system: usize) -> bool {
        true
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let head = [
            "device",
            "the neighbour",
            "fio IOPS",
            "fio p99",
            "a step: median",
            "p99",
            "worst",
            "swaps, pages/s",
            "its CPU",
            "server's CPU",
        ];
        let mut lines = Vec::new();
        for m in measured {
            for (n, system) in m.row.systems.iter().enumerate() {
                let Some(steps) = self.steps.get(&(m.number, n)) else { continue };
                let figure = |key: &str, text: &dyn Fn(f64) -> String| cell(m.median(n, key), text);
                let ms = |x: f64| format!("{x:.0} ms");
                let percent = |x: f64| format!("{:.0}%", x * 100.0);
                let swaps = format!(
                    "{} in, {} out",
                    figure("pages_in", &grouped),
                    figure("pages_out", &grouped)
                );
                lines.push(vec![
                    m.row.name.clone(),
                    system.clone(),
                    figure("iops", &grouped),
                    figure("p99_ms", &|x| format!("{x:.1} ms")),
                    ms(median(steps.iter().copied())),
                    ms(percentile(steps, 0.99)),
                    ms(percentile(steps, 1.0)),
                    swaps,
                    figure("thrasher_cpu", &percent),
                    figure("server_cpu", &percent),
                ]);
            }
        }
        markdown(&head.map(String::from), &lines)
    }
}

/// A script in a guest, and its lines with their time of arrival.
struct Guest<'a> {
    name: &'static str,
    share: PathBuf,
    process: Process,
    said: Vec<(Instant, String)>,
    stop: &'a Stop,
}

impl Guest<'_> {
    /// Waits for the next line that begins with the word, and returns the rest of it.
    fn expect(&mut self, word: &str, limit: Duration) -> Result<String> {
        let end = Instant::now() + limit;
        while let Some((came, line)) = self.process.line(self.stop, end)? {
            let (first, rest) = line.split_once(' ').unwrap_or((&line, ""));
            let rest = (first == word).then(|| rest.to_string());
            self.said.push((came, line));
            if let Some(rest) = rest {
                return Ok(rest);
            }
            anyhow::ensure!(
                Instant::now() < end,
                "the {} does not say \"{word}\"{}",
                self.name,
                self.last()
            );
        }
        let _ = self.process.finish();
        anyhow::bail!(
            "the {} ended without \"{word}\"{}; {}",
            self.name,
            self.last(),
            self.process.errors().trim()
        )
    }

    fn last(&self) -> String {
        let lines: Vec<_> =
            self.said.iter().rev().take(5).rev().map(|(_, line)| line.as_str()).collect();
        format!("; it said: {}", lines.join("; "))
    }

    /// Creates the file that the script waits for.
    fn tell(&self, word: &str, text: &str) -> Result<()> {
        let new = self.share.join(format!("{word}.new"));
        std::fs::write(&new, text)?;
        Ok(std::fs::rename(&new, self.share.join(word))?)
    }

    fn finish(&mut self) -> Result<()> {
        while let Some(line) = self.process.line(self.stop, Instant::now() + READY)? {
            self.said.push(line);
        }
        self.process.finish().with_context(|| format!("the {} failed{}", self.name, self.last()))
    }
}

/// Parses rate and p99 of both directions from fio's JSON. A wrong checksum is an error.
fn of_fio(text: &str) -> Result<Figures> {
    let job =
        serde_json::from_str::<Value>(text).context("fio's figures are no JSON")?["jobs"][0].take();
    anyhow::ensure!(job["error"] == 0, "fio found an error: {}", job["error"]);
    let figure = |value: &Value| value.as_f64().context("fio's JSON lacks a figure");
    let (read, write) = (&job["read"], &job["write"]);
    let p99 = |side: &Value| anyhow::Ok(figure(&side["lat_ns"]["percentile"]["99.000000"])? / 1e6);
    let iops = figure(&read["iops"])? + figure(&write["iops"])?;
    Ok(Figures::from([("iops", iops), ("p99_ms", p99(read)?.max(p99(write)?))]))
}

/// Returns the duration of a step in ms, from its save and its reads in us.
fn step(line: &str) -> Option<f64> {
    let parts: Option<Vec<f64>> =
        line.strip_prefix("step ")?.split(' ').map(|us| us.parse().ok()).collect();
    Some(parts?.iter().sum::<f64>() / 1000.0)
}

/// Returns the pages that are swapped in and out per second, from the first to the last figures of
/// the guest between `begin` and `end`.
fn swapping(said: &[(Instant, String)], begin: Instant, end: Instant) -> Result<(f64, f64)> {
    let figures = |(at, line): &(Instant, String)| {
        let mut numbers = line.strip_prefix("swapped ")?.split(' ').map(|n| n.parse::<f64>().ok());
        (begin..=end).contains(at).then_some((*at, numbers.next()??, numbers.next()??))
    };
    let all: Vec<_> = said.iter().filter_map(figures).collect();
    let [first, .., last] = all[..] else {
        anyhow::bail!(
            "the thrasher has printed fewer than two `swapped` lines in the measured time"
        )
    };
    let seconds = (last.0 - first.0).as_secs_f64();
    Ok(((last.1 - first.1) / seconds, (last.2 - first.2) / seconds))
}

fn percentile(values: &[f64], part: f64) -> f64 {
    let sorted = crate::statistics::sorted(values.iter().copied());
    let place = (sorted.len() as f64 * part) as usize;
    sorted.get(place.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_figures() {
        assert_eq!(
            (step("step 1500 500"), step("step fast"), step("ready")),
            (Some(2.0), None, None)
        );
        let begin = Instant::now();
        let at =
            |seconds: u64, text: &str| (begin + Duration::from_secs(seconds), text.to_string());
        let said = [
            (begin.checked_sub(Duration::from_secs(1)).unwrap_or(begin), "swapped 0 x".into()),
            at(1, "swapped 100 10"),
            at(2, "ready"),
            at(5, "swapped 900 50"),
            at(9, "swapped 5000 5000"),
        ];
        assert_eq!(swapping(&said, begin, begin + Duration::from_secs(6)).unwrap(), (200.0, 10.0));
        assert!(
            swapping(&said[..2], begin, begin + Duration::from_secs(6)).is_err(),
            "one figure is no rate"
        );
        let steps: Vec<f64> = (0..100).rev().map(f64::from).collect();
        assert_eq!((percentile(&steps, 0.99), percentile(&steps, 1.0)), (99.0, 99.0));
    }

    #[test]
    fn a_wrong_checksum_is_no_figure() {
        let side = |p99: u64| serde_json::json!({"iops": 100, "lat_ns": {"percentile": {"99.000000": p99}}});
        let job = |error: u32| {
            serde_json::json!({"jobs": [{"error": error, "read": side(2_000_000), "write": side(3_000_000)}]})
                .to_string()
        };
        assert_eq!(of_fio(&job(0)).unwrap(), Figures::from([("iops", 200.0), ("p99_ms", 3.0)]));
        assert!(of_fio(&job(84)).unwrap_err().to_string().contains("84"));
    }
}
