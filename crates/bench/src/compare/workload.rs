//! The work that each system does.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::stage::Played;
use super::system::{System, SystemKind};
use crate::experiment::{Contents, Experiment};
use crate::job::{self, Job, JobName, RunLimit, UnknownJob};
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
                job.file("$DISK", RunLimit::Seconds(*seconds), Some("log")),
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::results::Cpu;

    const AMOUNT: Amount = Amount { ops: 50, seconds: 2.0, min_size: 512, max_size: 65536 };

    fn work(name: &str) -> Workload {
        name.parse().unwrap()
    }

    /// What a script printed, in a guest with a clock at half of the host's speed.
    fn played(data: &[(&str, &str)]) -> Played {
        let lines = |text: &str| text.lines().map(String::from).collect();
        let data: HashMap<_, _> =
            data.iter().map(|(name, text)| (name.to_string(), lines(text))).collect();
        let cpu = Cpu { guest: 1.5, backend: Some(0.5), kernel: 0.25 };
        let run = Run { seconds: 4.0, guest_seconds: Some(2.0), cpu, ..Run::default() };
        let spent = Spent { service: Some(1e-4), ..Spent::default() };
        Played { run, data, clock: 2.0, spent }
    }

    fn error(name: &str, data: &[(&str, &str)]) -> String {
        format!("{:#}", work(name).read(played(data)).unwrap_err())
    }

    #[test]
    fn names_there_and_back() {
        for name in ["rate:read", "rate:writesync", "job:fileserver", "job:dd-rm", "job:boot"] {
            assert_eq!(work(name).to_string(), name);
        }
        for (wrong, says) in [
            ("rate:sideways", "sideways"),
            ("job:nothing", "nothing"),
            ("read", "say rate:read, rate:write, rate:writesync, or job:NAME"),
            ("", "say rate:read"),
        ] {
            let error = wrong.parse::<Workload>().unwrap_err().to_string();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }

    #[test]
    fn durations_of_single_operations_are_converted_to_the_clock_of_the_host() {
        let run = work("rate:read").read(played(&[("samples", "512 0.001\n4096 0.25")])).unwrap();
        assert_eq!(run.samples, [(512, 0.002), (4096, 0.5)]);
        assert_eq!((run.operations, run.bytes), (2, 4608));
        // The whole run was timed by both clocks, so neither is converted.
        assert_eq!((run.seconds, run.guest_seconds), (4.0, Some(2.0)));
        assert_eq!((run.work.as_str(), run.spent.service), ("rate:read", Some(1e-4)));
    }

    #[test]
    fn the_figures_of_fio_are_converted_to_the_clock_of_the_host() {
        let fio = serde_json::json!({"jobs": [{
            "read": {"total_ios": 900, "io_bytes": 3686400, "runtime": 1900,
                "slat_ns": {"mean": 2000.0},
                "clat_ns": {"percentile": {"50.000000": 1000000, "99.000000": 4000000}}},
            "write": {"total_ios": 100, "io_bytes": 409600, "runtime": 2000},
            "usr_cpu": 10.0, "sys_cpu": 20.0,
        }]});
        let fio = format!("fio: a note\n{fio}");
        let run = work("job:fileserver").read(played(&[("fio", &fio), ("log", "")])).unwrap();
        assert_eq!((run.seconds, run.guest_seconds), (4.0, Some(2.0)), "of fio, by both clocks");
        assert_eq!((run.operations, run.bytes), (1000, 4096000));
        assert_eq!(run.latency, [(0.5, 0.002), (0.99, 0.008)]);
        let spent = (run.spent.submission, run.spent.service);
        assert_eq!(spent, (Some(2e-6), Some(1e-4)), "of fio, and of the server");
        assert_eq!(run.cpu.guest, 1.5, "of the processes on the host");
    }

    #[test]
    fn an_experiment_is_one_operation() {
        let run = work("job:dd-rm").read(played(&[])).unwrap();
        assert_eq!((run.operations, run.seconds, &*run.work), (1, 4.0, "job:dd-rm"));
    }

    #[test]
    fn output_without_figures_is_an_error_that_says_what_is_missing() {
        assert!(error("rate:read", &[]).contains("printed no samples"));
        assert!(error("rate:read", &[("samples", "# nothing")]).contains("no operation was timed"));
        let wrong = error("rate:read", &[("samples", "512 0.1\nkilled")]);
        assert!(wrong.contains("what the script printed") && wrong.contains("line 2"), "{wrong}");
        assert!(error("job:fileserver", &[]).contains("fio printed no JSON"));
        let idle = [("fio", r#"{"jobs": [{"read": {"total_ios": 0}}]}"#)];
        assert!(error("job:fileserver", &idle).contains("fio did nothing"));
    }

    #[test]
    fn a_system_refuses_work_that_it_cannot_do() {
        let refuses = |work_name: &str, system: &str| {
            work(work_name).refuses(&system.parse().unwrap()).unwrap_or_default()
        };
        for system in ["host", "nbd"] {
            assert!(refuses("job:copy", system).contains("needs a guest"), "{system}");
        }
        assert_eq!(refuses("job:dd-rm", "host"), "", "it mounts nothing on the host");
        assert!(refuses("job:dd-rm", "nbd").contains("needs a guest"));
        assert!(refuses("job:fileserver", "nbd-qsd").contains("fio"));
        for system in ["uml-ubd", "qemu-blockyard"] {
            assert_eq!(refuses("job:copy", system), "", "{system}");
        }
        assert_eq!(refuses("rate:read", "nbd"), "");
    }

    #[test]
    fn a_script_has_the_limits_of_the_run() {
        let script = work("rate:write").script(&AMOUNT);
        assert!(script.contains("$BENCH rate write \"$DISK\" --direct"), "{script}");
        assert!(script.contains("--min-size 512 --max-size 65536"), "{script}");
        // The warm-up has another seed than the measured operations, which are always the same.
        assert!(script.contains("rate --ops 50 --seconds 2 --seed 1"), "{script}");
        assert_eq!(script, work("rate:write").script(&AMOUNT));
        let about = work("rate:writesync").about(&AMOUNT);
        assert!(about.contains("each durable when it ends") && about.contains("50 or 2 s"));
        let job = work("job:fileserver").script(&AMOUNT);
        assert!(job.contains("mark begin") && job.contains("filename=$DISK"), "{job}");
        assert_eq!(work("job:boot").contents(), Contents::Linux);
        assert_eq!(work("job:fileserver").contents(), Contents::Random);
    }
}
