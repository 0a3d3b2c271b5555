//! `blockyard-bench`, which `blockyard bench` starts: the command line of all measurements.
//!
//! Exit status: 0 done, 1 failed, 2 usage, 130 interrupted, 141 the reader of standard output has
//! gone. `diff`: 0 nothing is slower, 1 something is slower or missing, 2 failed.

// These macros panic when the stream cannot be written; `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use blockyard_bench::process::Interrupted;
use blockyard_bench::{
    calibrate, client, compare, diff, draw, figures, job, neighbours, rate, turns, xen,
};
use blockyard_program::ending::{Failure, refuse};
use blockyard_program::outline::Outline;
use blockyard_program::{help, log, output};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Measure.
#[derive(Parser)]
#[command(
    name = "blockyard-bench",
    bin_name = "blockyard bench",
    version,
    propagate_version = true
)]
struct Cli {
    /// Least severe messages to log on standard error: error, warn, info, debug, trace.
    #[arg(long, global = true, default_value = "warn", help_heading = help::GENERAL, value_name = "LEVEL", value_parser = log::parse_level)]
    log: tracing::Level,
    #[command(subcommand)]
    command: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Drive a vhost-user-blk server without a VM: load, latencies, verified data.
    Client(Box<client::LoadOptions>),
    /// Random seeks and operations of random sizes, one at a time: prints size in bytes and
    /// duration in seconds of each.
    Rate(rate::RateOptions),
    /// The median duration for each size, of what `rate` printed.
    Median(figures::Median),
    /// A percentile of the durations for each size, of what `rate` printed.
    Percentile(figures::Percentile),
    /// One of the reports' loads on a target, by fio where it is installed.
    Job(job::JobOptions),
    /// The same work on the host and in guests, in turn: a table, and a page with pictures.
    Compare(Box<compare::CompareOptions>),
    /// Measure what operations cost a device, for fair shares.
    Calibrate(calibrate::CalibrateOptions),
    /// Disks that share one device: what a thrashing guest leaves the others, with fair shares and
    /// without.
    Neighbours(Box<neighbours::NeighboursOptions>),
    /// The blkif back end, without a hypervisor, beside the vhost-user back end on the same image.
    Xen(xen::CompareXenOptions),
    /// Draw a report again, or one picture of it (SVG, PNG).
    Plot(draw::DrawOptions),
    /// Compare two sets of results. Exit status: 0 nothing is slower, 1 something is slower beyond
    /// the noise or missing, 2 failed.
    Diff(diff::DiffOptions),
    /// Print the turns of interleaved rounds, for a script that measures in guests: each line has
    /// a round, a row and a system.
    #[command(hide = true)]
    Turns(turns::TurnsOptions),
    /// Print these commands and their options as JSON: `blockyard` writes man pages and completions
    /// from it.
    #[command(hide = true)]
    Outline,
}

/// Returns the command line with examples in its help.
fn command() -> clap::Command {
    help::complete(Cli::command(), "bench")
}

fn main() -> ExitCode {
    let matches = command().try_get_matches();
    let cli =
        matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|e| refuse(&e));
    log::start(cli.log, std::io::stderr);
    let status = run(&cli.command).unwrap_or_else(|failure| failure.end(|line| output::note(line)));
    ExitCode::from(status)
}

/// Returns the exit status of a command that went well.
fn run(command: &Bench) -> Result<u8, Failure> {
    match command {
        Bench::Client(options) => {
            options.check().map_err(Failure::usage)?;
            client::run(options)?
        }
        Bench::Rate(options) => {
            options.check().map_err(Failure::usage)?;
            rate::run(options)?
        }
        Bench::Median(options) => figures::median(options)?,
        Bench::Percentile(options) => figures::percentile(options)?,
        Bench::Job(options) => job::run(options)?,
        Bench::Plot(options) => draw::run(options)?,
        Bench::Compare(options) => interruptible(compare::run(options))?,
        Bench::Neighbours(options) => interruptible(neighbours::run(options))?,
        Bench::Calibrate(options) => interruptible(calibrate::run(options))?,
        Bench::Xen(options) => interruptible(xen::run(options))?,
        Bench::Diff(options) => {
            let same = diff::run(options).map_err(|e| Failure::with_status(2, e))?;
            return Ok(u8::from(!same));
        }
        Bench::Turns(options) => turns::run(options)?,
        Bench::Outline => output::print(format_args!(
            "{}\n",
            serde_json::to_string(&Outline::of(&Cli::command()))?
        ))?,
    }
    Ok(0)
}

/// An interrupted run ends with the status that a shell gives to a program that SIGINT ended.
fn interruptible(result: anyhow::Result<()>) -> Result<(), Failure> {
    result.map_err(|e| {
        let status = if e.is::<Interrupted>() { 130 } else { 1 };
        Failure::with_status(status, e)
    })
}

#[cfg(test)]
mod tests {
    use blockyard_program::examples;

    use super::*;

    #[test]
    fn every_example_is_a_command_line_of_its_command() {
        for (path, example) in examples::all().filter(|(path, _)| path.starts_with("bench")) {
            assert!(example.line.starts_with(&format!("blockyard {path} ")) || path == "bench");
            let parsed = command().try_get_matches_from(&example.words()[1..]);
            let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
            if let Err(e) = parsed {
                panic!("{}: {e}", example.line);
            }
        }
    }

    #[test]
    fn every_command_has_an_example() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let path = format!("bench {}", command.get_name());
            assert!(!examples::of(&path).is_empty(), "{path}");
        }
    }
}
