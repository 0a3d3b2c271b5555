//! `blockyard bench job`: the loads of the reports that this project began with, by name.
//!
//! In: a name. Out: a job file for fio, and a run of it on a target; without fio the same load by
//! our own engine (`client`). What must hold: `--print` shows what runs, except for the log of the
//! throughput.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_program::output;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::Value;

use crate::client::{self, parse_seconds, workload::Pattern};
use crate::experiment::{self, Experiment};
use crate::process::{Process, Stop};
use crate::results::{Run, Spent};
use crate::targets::{TargetAddress, guard};

/// A load with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Job {
    /// IOMeter's file server mix (Xen, 2011): 512 B to 64 KiB, 80% reads as in the job file, depth
    /// 256, 2 jobs
    Fileserver,
    /// The same with 80% writes, as in the report's text
    FileserverWrites,
    /// Random writes of 64 KiB, depth 256, 4 jobs (Xen, 2011)
    #[value(name = "random-writes-64k")]
    RandomWrites,
    /// Reads of 1 MiB, one after the other, depth 8 (KVM, 2013): throughput and how even it is
    StreamRead,
    /// Writes of 1 MiB, one after the other, depth 8 (KVM, 2013)
    StreamWrite,
}

/// A job, or an experiment without a job file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobName {
    Job(Job),
    Experiment(Experiment),
}

/// A name of no job and of no experiment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid variant: {0}")]
pub struct UnknownJob(String);

impl JobName {
    pub fn parse(text: &str) -> Result<Self, UnknownJob> {
        let experiment = || Experiment::from_str(text, false).map(JobName::Experiment);
        let known = Job::from_str(text, false).map(JobName::Job).or_else(|_| experiment());
        known.map_err(|_| UnknownJob(text.into()))
    }

    fn parser() -> impl TypedValueParser<Value = JobName> {
        let jobs = Job::value_variants().iter().filter_map(|j| j.to_possible_value());
        let experiments = Experiment::value_variants().iter().filter_map(|e| e.to_possible_value());
        PossibleValuesParser::new(jobs.chain(experiments)).try_map(|name| JobName::parse(&name))
    }
}

/// What ends a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RunLimit {
    Seconds(f64),
    /// Operations in all.
    Operations(u64),
}

/// The parameters of a job.
struct Parts {
    pattern: Pattern,
    /// Percentage of reads.
    reads: u8,
    /// Sizes in the syntax of `bssplit`, or one size.
    sizes: &'static str,
    depth: u16,
    jobs: u16,
}

const FILESERVER: &str = "512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10";

impl Job {
    pub fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default()
    }

    pub fn writes(self) -> bool {
        self.parts().pattern.writes()
    }

    fn parts(self) -> Parts {
        let (pattern, reads, sizes, depth, jobs) = match self {
            Job::Fileserver => (Pattern::Randrw, 80, FILESERVER, 256, 2),
            Job::FileserverWrites => (Pattern::Randrw, 20, FILESERVER, 256, 2),
            Job::RandomWrites => (Pattern::Randwrite, 0, "64k", 256, 4),
            Job::StreamRead => (Pattern::Read, 100, "1m", 8, 1),
            Job::StreamWrite => (Pattern::Write, 0, "1m", 8, 1),
        };
        Parts { pattern, reads, sizes, depth, jobs }
    }

    /// Returns fio's job file. `log`: the file for throughput, a line for each tenth of a second.
    pub fn file(self, target: &str, limit: RunLimit, log: Option<&str>) -> String {
        let Parts { pattern, reads, sizes, depth, jobs } = self.parts();
        let rw = pattern.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default();
        let size =
            if sizes.contains('/') { format!("bssplit={sizes}") } else { format!("bs={sizes}") };
        let mix = if matches!(pattern, Pattern::Randrw) {
            format!("rwmixread={reads}\n")
        } else {
            String::new()
        };
        let limit = match limit {
            RunLimit::Seconds(seconds) => format!("time_based=1\nruntime={seconds}"),
            // fio ends after the file's bytes, too. So many bytes are no end.
            RunLimit::Operations(ops) => {
                format!("number_ios={}\nio_size={IO_SIZE}", ops.div_ceil(jobs.into()))
            }
        };
        let log = log
            .map(|log| format!("write_bw_log={log}\nlog_avg_msec=100\nper_job_logs=0\n"))
            .unwrap_or_default();
        // A colon separates the names of files. fio removes a backslash only before a colon.
        let target = target.replace(':', "\\:");
        format!(
            "[global]\nioengine=libaio\ndirect=1\nfilename={target}\n{limit}\nrandrepeat=1\n\
             randseed=1\nnorandommap=1\ngroup_reporting=1\npercentile_list=1:5:10:25:50:75:90:95:99:99.9\n{log}\n\
             [{}]\nrw={rw}\n{mix}{size}\niodepth={depth}\nnumjobs={jobs}\n",
            self.name()
        )
    }

    /// Returns the same load for our own engine.
    fn options(self, target: &TargetAddress, limit: RunLimit) -> Result<client::LoadOptions> {
        let Parts { pattern, reads, sizes, depth, jobs } = self.parts();
        let mut options = client::LoadOptions::for_socket("socket".into());
        match target {
            TargetAddress::File(path) => {
                (options.file, options.socket) = (Some(path.clone()), None)
            }
            TargetAddress::Vhost(path) => options.socket = Some(path.clone()),
            TargetAddress::Nbd(_) => {
                anyhow::bail!(
                    "over NBD jobs are run by fio (its nbd engine) only, and there is none here"
                )
            }
        }
        (options.rw, options.rwmixread, options.depth, options.queues) =
            (pattern, reads, depth, jobs);
        options.seed = Some(1);
        match limit {
            RunLimit::Seconds(seconds) => options.runtime = seconds,
            RunLimit::Operations(ops) => options.ops = Some(ops),
        }
        if sizes.contains('/') {
            options.bssplit = Some(client::parse_split(sizes)?);
        } else {
            options.bs = client::parse_size(sizes)?;
        }
        Ok(options)
    }
}

/// Runs one of the reports' loads on a target, by fio where it is installed.
#[derive(Clone, Debug, clap::Args)]
pub struct JobOptions {
    #[arg(value_name = "NAME", value_parser = JobName::parser())]
    pub name: JobName,
    /// A file, a block device, or a vhost-user-blk socket; for dd-rm a folder, for copy a block
    /// device
    #[arg(value_name = "TARGET", required_unless_present = "print")]
    pub target: Option<String>,
    /// Seconds to run
    #[arg(long, value_name = "S", default_value = "10", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Operations to do in all, instead of seconds; fio rounds up to a multiple of its jobs
    #[arg(long, value_name = "N", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    pub ops: Option<u64>,
    /// Print fio's job file, and do nothing
    #[arg(long)]
    pub print: bool,
    /// What runs it [default: fio where it is installed, for files and devices]
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
    /// Write also to a device that is in use, or to what holds a file system
    #[arg(long)]
    pub destroy: bool,
    /// One JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

impl JobOptions {
    fn limit(&self) -> RunLimit {
        self.ops.map_or(RunLimit::Seconds(self.seconds), RunLimit::Operations)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    Fio,
    /// The engine of `bench client`
    Own,
}

pub fn run(options: &JobOptions) -> Result<()> {
    let target = options.target.as_deref().unwrap_or("TARGET");
    match options.name {
        JobName::Experiment(experiment) if options.print => {
            output::print(format_args!("{}\n", experiment.script()))?
        }
        JobName::Experiment(experiment) => {
            return experiment_on(experiment, target, options.destroy);
        }
        JobName::Job(job) if options.print => {
            output::print(job.file(target, options.limit(), None))?
        }
        JobName::Job(job) => return load(options, job, target),
    }
    Ok(())
}

/// Runs an experiment on a target. Without `destroy`, checks first that the target has no data,
/// because the script's mke2fs overwrites it without a question.
fn experiment_on(experiment: Experiment, target: &str, destroy: bool) -> Result<()> {
    let path = Path::new(target);
    if !path.is_dir() && !destroy {
        guard::check_unopened(&TargetAddress::File(path.into()))
            .with_context(|| target.to_string())?;
    }
    experiment::run(experiment, path)
}

fn load(options: &JobOptions, job: Job, target: &str) -> Result<()> {
    let place = TargetAddress::parse(target)?;
    if job.writes() && !options.destroy {
        guard::check_unopened(&place).with_context(|| target.to_string())?;
    }
    let fio = matches!(place, TargetAddress::File(_)).then(fio).flatten();
    let engine = options.engine.unwrap_or(if fio.is_some() { Engine::Fio } else { Engine::Own });
    if engine == Engine::Own {
        return client::run(&client::LoadOptions {
            json: options.json,
            ..job.options(&place, options.limit())?
        });
    }
    let fio =
        fio.context("fio is not installed, or cannot be used on this target: say --engine own")?;
    let run = by_fio(&fio, job, target, options.limit())?;
    if options.json {
        output::print(format_args!("{}\n", serde_json::to_string(&run)?))?;
        return Ok(());
    }
    let latency = |q: f64| run.latency.iter().find(|l| l.0 == q).map_or(f64::NAN, |l| l.1 * 1e6);
    output::print(format_args!("{} by fio, {:.2} s\n", job.name(), run.seconds))?;
    output::print(format_args!(
        "IOPS       {:>12.0}    {:.1} MB/s\n",
        run.per_second(),
        run.bytes_per_second() / 1e6
    ))?;
    output::print(format_args!(
        "latency us {:>12.1}    p50\n           {:>12.1}    p99\n",
        latency(0.5),
        latency(0.99)
    ))?;
    if let Some(variation) = crate::report::variation(&run.throughput) {
        output::print(format_args!(
            "burstiness {variation:>12.3}    coefficient of variation of each tenth of a second\n"
        ))?;
    }
    output::print(format_args!("CPU        {:>12.2}    seconds of fio\n", run.cpu.guest))?;
    Ok(())
}

/// Returns the path of fio, if a folder in `PATH` has it.
fn fio() -> Option<std::path::PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|folder| folder.join("fio")).find(|file| file.is_file())
}

/// Time that fio has beyond the load's own: it lays out a file, and waits for its last operations.
const ENDING: Duration = Duration::from_secs(600);
/// Longest run of a number of operations, which has no time of its own.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
/// Bytes that no run moves.
const IO_SIZE: &str = "1p";

fn by_fio(fio: &Path, job: Job, target: &str, limit: RunLimit) -> Result<Run> {
    let stop = Stop::on_signals()?;
    let folder = std::env::temp_dir().join(format!("blockyard-job.{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let done = (|| {
        let (file, log) = (folder.join("job"), folder.join("log"));
        let target = std::path::absolute(target)?;
        let target = target.to_str().context("fio takes no path that is not UTF-8")?;
        anyhow::ensure!(!target.contains("\\:"), "{target}: fio cannot have \"\\:\" in a path");
        std::fs::write(&file, job.file(target, limit, log.to_str()))?;
        let mut command = Command::new(fio);
        command.arg("--output-format=json").arg(&file);
        let mut process = Process::start(&command)?;
        // fio prints its results at the end.
        let load = match limit {
            RunLimit::Seconds(seconds) => Duration::from_secs_f64(seconds),
            RunLimit::Operations(_) => LONGEST,
        };
        let limit = Instant::now() + load + ENDING;
        let mut text = String::new();
        while let Some((_, line)) = process.line(&stop, limit)? {
            text += &line;
            text.push('\n');
        }
        process.finish().with_context(|| text.clone())?;
        let log = std::fs::read_to_string(folder.join("log_bw.log")).unwrap_or_default();
        read(&text, &log)
    })();
    let _ = std::fs::remove_dir_all(&folder);
    done
}

/// Parses the results of one group from fio's JSON, and its log of throughput.
pub fn read(text: &str, log: &str) -> Result<Run> {
    // fio may print notes before the JSON.
    let text = &text[text.find('{').context("fio printed no JSON")?..];
    let all: Value = serde_json::from_str(text).context("what fio printed")?;
    let job = &all["jobs"][0];
    let number = |side: &str, name: &str| job[side][name].as_f64().unwrap_or(0.0);
    let sum = |name: &str| number("read", name) + number("write", name);
    let operations = sum("total_ios");
    anyhow::ensure!(operations > 0.0, "fio did nothing");
    // A mix reports the latencies of its more frequent direction.
    let side =
        if number("read", "total_ios") >= number("write", "total_ios") { "read" } else { "write" };
    let percentiles = job[side]["clat_ns"]["percentile"].as_object().into_iter().flatten();
    let latency = percentiles
        .filter_map(|(q, ns)| Some((q.parse::<f64>().ok()? / 100.0, ns.as_f64()? / 1e9)));
    let seconds = number("read", "runtime").max(number("write", "runtime")) / 1e3;
    let (user, system) =
        (job["usr_cpu"].as_f64().unwrap_or(0.0), job["sys_cpu"].as_f64().unwrap_or(0.0));
    Ok(Run {
        seconds,
        operations: operations as u64,
        bytes: sum("io_bytes") as u64,
        latency: latency.map(|(q, s)| ((q * 1e6).round() / 1e6, s)).collect(),
        throughput: throughput(log),
        cpu: crate::results::Cpu { guest: (user + system) / 100.0 * seconds, ..Default::default() },
        spent: Spent {
            submission: job[side]["slat_ns"]["mean"].as_f64().map(|ns| ns / 1e9),
            ..Spent::default()
        },
        ..Run::default()
    })
}

/// Returns the bytes in each tenth of a second from fio's log. A line has milliseconds and KiB/s,
/// then fields that this function ignores.
fn throughput(log: &str) -> Vec<f64> {
    let mut steps: Vec<f64> = Vec::new();
    for line in log.lines() {
        let mut columns = line.split(", ").map(|c| c.trim().parse::<f64>());
        let (Some(Ok(at)), Some(Ok(rate))) = (columns.next(), columns.next()) else { continue };
        // A line has the tenth of a second that ends with it. Each job has lines of its own.
        let step = (at / 100.0).round().max(1.0) as usize - 1;
        if steps.len() <= step {
            steps.resize(step + 1, 0.0);
        }
        steps[step] += rate * 1024.0 / 10.0;
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: RunLimit = RunLimit::Seconds(10.0);

    #[test]
    fn job_files_are_those_of_the_reports() {
        let file = Job::Fileserver.file("/dev/vdb", TEN, None);
        for line in [
            "[fileserver]",
            "rw=randrw",
            "rwmixread=80",
            "iodepth=256",
            "numjobs=2",
            "filename=/dev/vdb",
        ] {
            assert!(file.lines().any(|l| l == line), "{line} is missing:\n{file}");
        }
        let path = Job::Fileserver.file("/dev/disk/by-path/pci-0000:00:05.0", TEN, None);
        assert!(path.contains("filename=/dev/disk/by-path/pci-0000\\:00\\:05.0\n"), "{path}");
        let label = Job::Fileserver.file(r"/dev/disk/by-label/My\x20Disk", TEN, None);
        assert!(label.contains("filename=/dev/disk/by-label/My\\x20Disk\n"), "{label}");
        assert!(Job::FileserverWrites.file("x", TEN, None).contains("rwmixread=20\n"));
        let timed = file.lines().filter(|l| ["time_based=1", "runtime=10"].contains(l));
        assert_eq!(timed.count(), 2, "{file}");
        let shares = client::parse_split(FILESERVER).unwrap();
        assert_eq!(shares.0.iter().map(|s| u32::from(s.1)).sum::<u32>(), 100);
        assert!(
            Job::RandomWrites.file("x", TEN, None).contains("bs=64k\niodepth=256\nnumjobs=4\n")
        );
    }

    #[test]
    fn a_number_of_operations_is_divided_among_the_jobs_and_ends_the_run() {
        let file = Job::RandomWrites.file("x", RunLimit::Operations(1001), None);
        // Four jobs.
        assert!(file.contains("number_ios=251\n") && file.contains("io_size=1p\n"), "{file}");
        assert!(!file.contains("time"), "{file}");
        let options =
            |limit| Job::Fileserver.options(&TargetAddress::File("x".into()), limit).unwrap();
        assert_eq!(options(RunLimit::Operations(1001)).ops, Some(1001));
        let timed = options(RunLimit::Seconds(3.0));
        assert_eq!((timed.ops, timed.runtime), (None, 3.0));
    }

    #[test]
    fn fio_is_understood() {
        let text = r#"note: something
            {"jobs": [{"usr_cpu": 10.0, "sys_cpu": 15.0,
              "read": {"total_ios": 100, "io_bytes": 409600, "runtime": 2000, "slat_ns": {"mean": 2000.0},
                       "clat_ns": {"percentile": {"50.000000": 1000000, "99.900000": 5000000}}},
              "write": {"total_ios": 20, "io_bytes": 81920, "runtime": 2000}}]}"#;
        let run = read(
            text,
            "100, 1000, 0, 4096, 0, 0\n100, 1000, 1, 4096, 0, 0\n201, 500, 0, 4096, 0\n",
        )
        .unwrap();
        assert_eq!(
            (run.operations, run.bytes, run.seconds, run.cpu.guest),
            (120, 491520, 2.0, 0.5)
        );
        assert_eq!(run.latency, [(0.5, 0.001), (0.999, 0.005)]);
        assert_eq!((run.spent.submission, run.throughput), (Some(2e-6), vec![204800.0, 51200.0]));
        assert!(read("fio: failed", "").is_err());
    }
}
