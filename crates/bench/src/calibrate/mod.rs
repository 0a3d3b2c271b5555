//! `blockyard bench calibrate`: what operations cost a device, for fair shares.
//!
//! ```text
//!   options -> measure (rounds of short loads) -> arithmetic (linear model) -> costs (the file)
//! ```
//! In: a folder, a file, or a block device. Out: a table, and a file of costs with those of this
//! device. What must hold: without an option only a file of our own is written to, and it has no
//! name.

mod arithmetic;
mod measure;

use std::fmt::Write;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockyard_program::costs::{DeviceCosts, describe};
use blockyard_program::output;
use blockyard_sched::Costs;
use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;

use self::arithmetic::{enough, flush, in_proportion};
use self::measure::{CalibrationPlan, Measured};
use crate::client::{parse_seconds, parse_size};
use crate::process::{Stop, fill};
use crate::targets::{TargetAddress, guard};

/// What operations cost a device: measures it for a while, and notes the figures where `serve
/// --costs` finds them.
#[derive(Clone, Debug, clap::Args)]
pub struct CalibrateOptions {
    /// A folder on the device (a file is made there, and removed), or a file or block device, which
    /// is only read
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// The file of costs to make, or to change
    #[arg(short, long, value_name = "FILE", default_value = blockyard_program::costs::USUAL)]
    output: PathBuf,
    /// Seconds to measure, in all
    #[arg(long, value_name = "S", default_value_t = 24.0, value_parser = parse_seconds)]
    seconds: f64,
    /// How often everything is measured; figures are medians
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Bytes of the file that is made, or of the target to use
    #[arg(long, value_name = "SIZE", default_value = "2g", value_parser = parse_size)]
    size: u64,
    /// Write to the file or block device, too: what it holds is lost
    #[arg(long)]
    writes: bool,
    /// With --writes: also where something is that looks like data
    #[arg(long, requires = "writes")]
    destroy: bool,
    /// Print the costs as JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// Minimum size of a target in bytes.
const LEAST: u64 = 64 << 20;

pub fn run(options: &CalibrateOptions) -> Result<()> {
    let stop = Stop::on_signals()?;
    let (costs, measured) = calibrate(options, &stop)?;
    costs.save(&options.output)?;
    if options.json {
        output::print(format_args!("{}\n", serde_json::to_string(&costs)?))?;
    } else {
        output::print(table(&costs, &measured))?;
        output::print(format_args!("{} is written\n", options.output.display()))?;
    }
    Ok(())
}

/// Measures the costs of the device that holds a folder, with a temporary file in the folder.
pub fn of_folder(folder: &Path, size: u64, seconds: f64, stop: &Stop) -> Result<DeviceCosts> {
    let options = CalibrateOptions {
        target: folder.into(),
        output: PathBuf::new(),
        seconds,
        rounds: 4,
        size,
        writes: false,
        destroy: false,
        json: false,
    };
    Ok(calibrate(&options, stop)?.0)
}

fn calibrate(options: &CalibrateOptions, stop: &Stop) -> Result<(DeviceCosts, Measured)> {
    let name = options.target.display();
    let kind = std::fs::metadata(&options.target).with_context(|| format!("looking at {name}"))?;
    let own = if kind.is_dir() {
        Some(Own::make(&options.target, options.size.max(LEAST), stop)?)
    } else {
        None
    };
    let path = own.as_ref().map_or(options.target.as_path(), |own| &own.path);
    if own.is_none() && options.writes && !options.destroy {
        guard::check_unopened(&TargetAddress::File(path.into()))
            .with_context(|| format!("{name} is not written to"))?;
    }
    let file = File::open(path).with_context(|| format!("opening {name}"))?;
    let size = blockyard_ring::host::file_size(&file)
        .with_context(|| format!("{name} cannot be measured"))?;
    let size = size.min(options.size.max(LEAST)) >> 24 << 24;
    anyhow::ensure!(
        size >= LEAST,
        "{name} has less than {} MiB: too small to be measured",
        LEAST >> 20
    );
    if own.is_none() && kind.is_file() {
        check_holes(&file, size).with_context(|| format!("{name} cannot be measured"))?;
    }
    let (device, _) = blockyard_ring::host::backing_device(&file)
        .with_context(|| format!("finding the device of {name}"))?;
    let writes = own.is_some() || options.writes;
    let plan = CalibrationPlan {
        path,
        size,
        writes,
        rounds: options.rounds,
        seconds: options.seconds,
        stop,
    };
    let measured = plan.measure()?;
    Ok((costs(device, &measured), measured))
}

/// Returns an error if a part of the file has no blocks. The device has nothing to do for reads of
/// such a part.
fn check_holes(file: &File, size: u64) -> Result<()> {
    // Cached pages of an extent that was never written count as data else.
    file.sync_all()?;
    fadvise(file, 0, None, Advice::DontNeed)?;
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0)) {
        Ok(at) if at < size => anyhow::bail!(
            "it has a hole at byte {at}, and holes are read without the device: name a folder, or \
             a file that was written completely"
        ),
        // Some file systems do not tell.
        Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
        Err(e) => Err(e).context("looking for holes"),
    }
}

/// A temporary file in the measured folder, without a name: another user of the folder cannot
/// exchange it, and it ends with this process.
struct Own {
    /// Keeps `path` valid.
    _file: File,
    path: PathBuf,
}

impl Own {
    fn make(folder: &Path, size: u64, stop: &Stop) -> Result<Self> {
        let file =
            tempfile_in(folder).with_context(|| format!("a file in {}", folder.display()))?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        fill(&path, size, stop).with_context(|| format!("a file in {}", folder.display()))?;
        Ok(Own { _file: file, path })
    }
}

/// Creates a file and removes its name.
fn tempfile_in(folder: &Path) -> std::io::Result<File> {
    let path = folder.join(format!(".blockyard-calibrate.{}", std::process::id()));
    // Fails if the name exists, also as a link.
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn costs(device: String, measured: &Measured) -> DeviceCosts {
    let read = measured.reads.linear_cost();
    let nanos = |time: f64| time.round().max(1.0) as u64;
    let depth = enough(&measured.depths);
    let mut costs = DeviceCosts {
        description: describe(&device),
        device,
        read: read.random,
        read_sequential: read.sequential,
        read_per_mib: read.per_mib,
        write: in_proportion(&read, |c| c.write),
        write_sequential: in_proportion(&read, |c| c.write_sequential),
        write_per_mib: read.per_mib,
        flush: in_proportion(&read, |c| c.flush),
        discard: in_proportion(&read, |c| c.discard),
        write_zeroes: in_proportion(&read, |c| c.write_zeroes),
        // The cost of `depth` random reads in flight.
        window: nanos(f64::from(depth) * measured.reads.random),
        base_latency_read: nanos(measured.reads.alone),
        base_latency_write: nanos(measured.reads.alone),
    };
    if let Some(written) = &measured.written {
        let write = written.times.linear_cost();
        (costs.write, costs.write_sequential, costs.write_per_mib) =
            (write.random, write.sequential, write.per_mib);
        costs.flush = flush(written.pair, &write, written.flush);
        costs.discard = written.discard.map_or(costs.discard, nanos);
        costs.write_zeroes = written.write_zeroes.map_or(costs.write_zeroes, nanos);
        costs.base_latency_write = nanos(written.times.alone);
    }
    costs
}

fn table(costs: &DeviceCosts, measured: &Measured) -> String {
    let mut text = format!("device {} ({})\n", costs.device, costs.description);
    let mut line = |name: &str, cost: u64, about: String| {
        let _ = writeln!(text, "{name:<20} {:>12.1} us   {about}", cost as f64 / 1e3);
    };
    let model = costs.costs();
    let busy = |base: u64, per_mib: u64| {
        format!("{:.0} a second of 4 KiB", 1e9 / (base as f64 + per_mib as f64 / 256.0))
    };
    let speed = |base: u64, per_mib: u64| {
        format!("{:.0} MB/s of 1 MiB", (1 << 20) as f64 * 1e3 / (base + per_mib) as f64)
    };
    let Costs {
        read, read_sequential, read_per_mib, write, write_sequential, write_per_mib, ..
    } = model;
    let guess = if measured.written.is_some() {
        ""
    } else {
        ", not measured: in the proportion of the defaults"
    };
    line("read", read, busy(read, read_per_mib));
    line("read, sequential", read_sequential, busy(read_sequential, read_per_mib));
    line("read, each MiB", read_per_mib, speed(read_sequential, read_per_mib));
    line("write", write, busy(write, write_per_mib) + guess);
    line("write, sequential", write_sequential, busy(write_sequential, write_per_mib) + guess);
    line("write, each MiB", write_per_mib, speed(write_sequential, write_per_mib) + guess);
    let takes = measured.written.as_ref().map_or(guess[2.min(guess.len())..].to_string(), |w| {
        format!("what it displaces; it takes {:.0} us", w.flush / 1e3)
    });
    line("flush", costs.flush, takes);
    let known = |time: Option<Option<f64>>| match time {
        Some(Some(_)) => "of 64 KiB".into(),
        Some(None) => "not supported: in the proportion of the defaults".into(),
        None => guess[2..].to_string(),
    };
    line("discard", costs.discard, known(measured.written.as_ref().map(|w| w.discard)));
    line(
        "write zeroes",
        costs.write_zeroes,
        known(measured.written.as_ref().map(|w| w.write_zeroes)),
    );
    let depth = enough(&measured.depths);
    line(
        "window",
        costs.window,
        format!("{depth} random reads of 4 KiB in flight give 98% of the most"),
    );
    line("latency of a read", costs.base_latency_read, "4 KiB, nothing else in flight".into());
    line(
        "latency of a write",
        costs.base_latency_write,
        format!("4 KiB, nothing else in flight{guess}"),
    );
    let rates: Vec<_> =
        measured.depths.iter().map(|(depth, rate)| format!("{depth}: {rate:.0}")).collect();
    text + "random reads a second, by depth: " + &rates.join(", ") + "\n"
}

#[cfg(test)]
mod tests {
    use super::measure::Written;
    use super::*;

    fn measured(written: bool) -> Measured {
        let times = arithmetic::Times {
            random: 20_000.0,
            sequential: 10_000.0,
            stream: 1e6,
            alone: 150_000.0,
        };
        let written = written.then_some(Written {
            times,
            pair: 400_000.0,
            flush: 900_000.0,
            discard: None,
            write_zeroes: Some(5e4),
        });
        let depths = vec![(1, 6_666.0), (2, 13_000.0), (16, 49_500.0), (64, 50_000.0)];
        Measured { reads: times, depths, written }
    }

    #[test]
    fn costs_of_what_was_measured() {
        let found = costs("254:1".into(), &measured(true));
        assert_eq!((found.device.as_str(), found.window), ("254:1", 16 * 20_000));
        assert_eq!((found.base_latency_write, found.write_zeroes), (150_000, 50_000));
        assert_eq!((found.read, found.write), (found.write, found.read));
        // A flush costs as much as the pair without its write of 16 KiB. That write costs a base
        // cost and a 64th of a MiB.
        let write = found.write + found.write_per_mib / 64;
        assert!((found.flush + write).abs_diff(400_000) <= 2, "{found:?}");
        let guessed = costs("254:1".into(), &measured(false));
        assert_eq!(guessed.write, (guessed.read as f64 * 15.0 / 9.0).round() as u64);
    }

    #[test]
    fn the_table_says_what_was_not_measured() {
        for (written, times) in [(true, 1), (false, 7)] {
            let measured = measured(written);
            let text = table(&costs("0:0".into(), &measured), &measured);
            assert_eq!(text.matches("proportion of the defaults").count(), times, "{text}");
            assert!(text.contains("16 random reads") && text.contains("64: 50000"), "{text}");
        }
    }
}
