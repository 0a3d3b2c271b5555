//! The work that each system does.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::stage::Played;
use super::system::{System, SystemKind};
use crate::experiment::{Contents, Experiment};
use crate::job::{self, Job, JobName, UnknownJob};
use crate::rate::Operation;
use crate::results::{Run, Spent};
use crate::samples;

/// One piece of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Workload {
    /// A run of `bench rate`, with O_DIRECT.
    Rate(Operation),
    /// A run of `bench job`, by fio.
    Job(Job),
    /// Commands such as dd, cp or mount, each timed.
    Experiment(Experiment),
}

/// Limits of a run, and the bounds of its operations' sizes in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    pub ops: u64,
    pub seconds: f64,
    pub min_size: u64,
    pub max_size: u64,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Workload::Rate(operation) => {
                let value = operation.to_possible_value();
                write!(f, "rate:{}", value.as_ref().map_or("", |v| v.get_name()))
            }
            Workload::Job(job) => write!(f, "job:{}", job.name()),
            Workload::Experiment(experiment) => write!(f, "job:{}", experiment.name()),
        }
    }
}

/// A text that names no work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownWorkload {
    #[error("invalid variant: {0}")]
    Operation(String),
    #[error(transparent)]
    Job(#[from] UnknownJob),
    #[error("\"{0}\": say rate:read, rate:write, rate:writesync, or job:NAME")]
    Kind(String),
}

impl FromStr for Workload {
    type Err = UnknownWorkload;

    /// Parses the name of a work, such as `rate:read` or `job:fileserver`.
    fn from_str(text: &str) -> Result<Self, UnknownWorkload> {
        match text.split_once(':') {
            Some(("rate", operation)) => Operation::from_str(operation, false)
                .map(Workload::Rate)
                .map_err(|_| UnknownWorkload::Operation(operation.into())),
            Some(("job", name)) => Ok(match JobName::parse(name)? {
                JobName::Job(job) => Workload::Job(job),
                JobName::Experiment(experiment) => Workload::Experiment(experiment),
            }),
            _ => Err(UnknownWorkload::Kind(text.into())),
        }
    }
}

impl Workload {
    /// Returns a sentence about the work.
    pub fn about(&self, amount: &Amount) -> String {
        let Amount { ops, seconds, min_size, max_size } = amount;
        let what = match self {
            Workload::Rate(Operation::Read) => "random reads",
            Workload::Rate(Operation::Write) => "random writes",
            Workload::Rate(Operation::Writesync) => "random writes, each durable when it ends",
            Workload::Job(job) => {
                return format!(
                    "fio's job of this name (`bench job {} --print`), {seconds} s each round",
                    job.name()
                );
            }
            Workload::Experiment(experiment) => return experiment.about().into(),
        };
        format!(
            "{what} of {min_size} to {max_size} bytes, one at a time, past the page cache: {ops} or {seconds} s each round"
        )
    }

    pub fn contents(&self) -> Contents {
        if let Workload::Experiment(experiment) = self {
            experiment.contents()
        } else {
            Contents::Random
        }
    }

    /// Returns why a system cannot do this work, or `None` if it can.
    pub fn refuses(&self, system: &System) -> Option<&'static str> {
        let guest = system.uml() || system.qemu();
        match self {
            Workload::Experiment(experiment)
                if !guest && (experiment.mounts() || system.kind != SystemKind::Host) =>
            {
                Some("it mounts the disk: that needs a guest")
            }
            Workload::Job(_) if system.nbd() => Some("jobs are run by fio on files and devices"),
            _ => None,
        }
    }

    /// Returns the script for [`super::stage`]. It is the same in each round and on each system.
    pub fn script(&self, amount: &Amount) -> String {
        let Amount { ops, seconds, min_size, max_size } = amount;
        match self {
            Workload::Rate(operation) => format!(
                "rate() {{ $BENCH rate {} \"$DISK\" --direct --destroy --min-size {min_size} --max-size {max_size} \"$@\"; }}\n\
                 out=$(mktemp)\n\
                 rate --ops 20 --seed 2 >\"$out\"\n\
                 mark begin\nrate --ops {ops} --seconds {seconds} --seed 1 >\"$out\"\nmark end\n\
                 echo data samples; cat \"$out\"; echo end samples\nrm \"$out\"",
                operation.to_possible_value().expect("no variant is hidden").get_name(),
            ),
            Workload::Job(job) => format!(
                "work=$(mktemp -d); cd \"$work\"\ncat >job <<END\n{}END\n\
                 mark begin\n$FIO --output-format=json --output=out job >&2\nmark end\n\
                 echo data fio; cat out; echo end fio\necho data log; cat log_bw.log; echo end log\ncd /; rm -r \"$work\"",
                job.file("$DISK", *seconds, Some("log")),
            ),
            Workload::Experiment(experiment) => experiment.script(),
        }
    }

    /// Parses the output of the script.
    pub fn read(&self, played: Played) -> Result<Run> {
        let Played { mut run, data, clock, spent } = played;
        run.work = self.to_string();
        if let Workload::Job(_) = self {
            let text =
                |name: &str| data.get(name).map(|lines| lines.join("\n")).unwrap_or_default();
            let told = job::read(&text("fio"), &text("log"))?;
            // fio's duration, converted to the host's clock. The time between the script's marks
            // would include the preparation before the load and the draining after it.
            let seconds = told.seconds * clock;
            let latency = told.latency.iter().map(|(q, s)| (*q, s * clock)).collect();
            let spent = Spent { submission: told.spent.submission, ..spent };
            let Run { cpu, work, system, .. } = run;
            return Ok(Run {
                seconds,
                latency,
                guest_seconds: Some(told.seconds),
                cpu,
                work,
                system,
                spent,
                ..told
            });
        }
        if let Workload::Experiment(_) = self {
            return Ok(Run { operations: 1, spent, ..run });
        }
        let lines = data.get("samples").context("the script printed no samples")?;
        let samples =
            samples::read(lines.join("\n").as_bytes()).context("what the script printed")?;
        anyhow::ensure!(!samples.is_empty(), "no operation was timed");
        run.spent = spent;
        run.operations = samples.len() as u64;
        run.bytes = samples.iter().map(|s| s.bytes).sum();
        // A guest's clock may be slow, which would make its disk look fast. So durations are
        // converted to the host's clock.
        run.samples = samples.iter().map(|s| (s.bytes, s.seconds * clock)).collect();
        Ok(run)
    }
}
