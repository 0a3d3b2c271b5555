//! The device that neighbours share: a folder's disk or a model, and the costs of its operations.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result};
use blockyard_program::costs::DeviceCosts;
use blockyard_sched::Costs;

use crate::client::parse_size;
use crate::client::report::Report;

#[derive(Clone, Debug)]
pub enum Device {
    Folder(PathBuf),
    Model(Model),
}

/// A simulated device, like an image `delay:SIZE,...`: several servers, which serve requests in the
/// order of arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    text: String,
    parallel: u64,
    /// Nanoseconds.
    read: u64,
    write: u64,
    flush: u64,
    /// 0 if the text has none: discards are free.
    discard: u64,
    bandwidth: u64,
}

/// Name of the simulated device, in images and in the file of costs.
pub const NAME: &str = "model";

/// The window is larger than the servers need by one part in this number. The server can then start
/// operations while completions are under way.
const SPARE: u64 = 8;

impl FromStr for Model {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut model = Model {
            text: text.into(),
            parallel: 0,
            read: 0,
            write: 0,
            flush: 0,
            discard: 0,
            bandwidth: 0,
        };
        for part in text.split(',') {
            let (key, value) =
                part.split_once('=').with_context(|| format!("\"{part}\" has no value"))?;
            match key {
                "parallel" => model.parallel = value.parse()?,
                "read" => model.read = nanoseconds(value)?,
                "write" => model.write = nanoseconds(value)?,
                "flush" => model.flush = nanoseconds(value)?,
                "discard" => model.discard = nanoseconds(value)?,
                "bandwidth" => model.bandwidth = parse_size(value)?,
                "spread" => {}
                _ => anyhow::bail!(
                    "a model has parallel, read, write, flush, discard, bandwidth and spread, \
                     not \"{key}\""
                ),
            }
        }
        let all = [model.parallel, model.read, model.write, model.flush, model.bandwidth];
        anyhow::ensure!(
            !all.contains(&0),
            "a model needs parallel, read, write, flush and bandwidth, none of them 0"
        );
        Ok(model)
    }
}

fn nanoseconds(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => anyhow::bail!("\"{text}\" is not a time: give a number and a unit (us, ms or s)"),
    };
    digits.parse::<u64>()?.checked_mul(unit).with_context(|| format!("\"{text}\" is too long"))
}

impl Model {
    pub fn image(&self, size: u64) -> String {
        format!("delay:{size},{},device={NAME}", self.text)
    }

    /// Returns the exact costs: the time of a request, divided by the number of servers.
    pub fn costs(&self) -> DeviceCosts {
        let part = |time: u64| time / self.parallel;
        let per_mib = (1_000_000_000u128 << 20) / u128::from(self.bandwidth);
        let per_mib = per_mib as u64;
        let time = |base: u64| base + per_mib / 256 * self.parallel;
        DeviceCosts {
            device: NAME.into(),
            description: self.text.clone(),
            read: part(self.read),
            read_sequential: part(self.read),
            read_per_mib: per_mib,
            write: part(self.write),
            write_sequential: part(self.write),
            write_per_mib: per_mib,
            flush: part(self.flush),
            discard: part(self.discard).max(1),
            write_zeroes: 1,
            window: time(self.read) + time(self.read) / SPARE,
            base_latency_read: time(self.read),
            base_latency_write: time(self.write),
        }
    }
}

/// Returns the device time of a load in nanoseconds a second, its pauses included.
pub fn spent(costs: &Costs, report: &Report) -> f64 {
    let moved = (report.reads + report.writes).max(1) as f64;
    let mib = report.bytes_per_second * report.seconds / moved / f64::from(1 << 20);
    let random = report.options.rw.is_random();
    let read = if random { costs.read } else { costs.read_sequential } as f64
        + mib * costs.read_per_mib as f64;
    let write = if random { costs.write } else { costs.write_sequential } as f64
        + mib * costs.write_per_mib as f64;
    let (flush, discard) = (costs.flush as f64, costs.discard as f64);
    let all = report.reads as f64 * read
        + report.writes as f64 * write
        + report.flushes as f64 * flush
        + report.discards as f64 * discard;
    all / report.seconds * report.options.pauses.map_or(1.0, |pauses| pauses.part())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::LoadOptions;
    use crate::client::cpu::{BackEnd, Meter};
    use crate::client::load::Tally;
    use crate::client::report::Target;
    use crate::client::workload::Pauses;

    const TEXT: &str = "parallel=16,read=200us,write=400us,flush=1ms,bandwidth=2g";

    #[test]
    fn a_models_costs_are_exact() {
        let model: Model = TEXT.parse().unwrap();
        let costs = model.costs();
        assert_eq!((costs.read, costs.write, costs.flush), (12_500, 25_000, 62_500));
        // 2 GiB a second: a MiB takes a 2048th of it.
        assert_eq!(costs.read_per_mib, 488_281);
        assert!(
            costs.base_latency_read.abs_diff(200_000 + 4096 * 16 * 1_000_000_000 / (2 << 30)) < 20
        );
        assert_eq!(model.image(1 << 30), format!("delay:1073741824,{TEXT},device=model"));
        let discards =
            |more: &str| format!("{TEXT}{more}").parse::<Model>().unwrap().costs().discard;
        assert_eq!((discards(""), discards(",discard=160us")), (1, 10_000));
        for bad in [
            "",
            "parallel=1",
            "parallel=0,read=1us,write=1us,flush=1us,bandwidth=1",
            "read=5",
            "x=1",
        ] {
            assert!(bad.parse::<Model>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_busy_device_is_spent_whole() {
        let costs = TEXT.parse::<Model>().unwrap().costs().costs();
        // 4 KiB reads at the model's rate for half of the time, flushes at theirs for the other.
        let each = 12_500.0 + 488_281.0 / 256.0;
        let mut tally = Tally::new().unwrap();
        (tally.reads, tally.flushes, tally.elapsed_ns) =
            ((0.5e9 / each) as u64, 8_000, 1_000_000_000);
        tally.bytes = tally.reads * 4096;
        let options = LoadOptions::for_socket("s".into());
        let report = Report::new(
            &options,
            Target::default(),
            &tally,
            &Meter::new(BackEnd::Unknown).unwrap(),
            0,
        );
        assert!((spent(&costs, &report) / 1e9 - 1.0).abs() < 1e-3, "{}", spent(&costs, &report));
        // A load that works a fifth of the time uses a fifth of the device.
        let pauses = Some(Pauses { work: 1, pause: 4 });
        let report = Report { options: LoadOptions { pauses, ..options }, ..report };
        assert!((spent(&costs, &report) / 1e9 - 0.2).abs() < 1e-3, "{}", spent(&costs, &report));
    }
}
