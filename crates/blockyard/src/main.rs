//! Blockyard: serves virtual disks to virtual machines from user space.
//!
//! The top floor: command line, configuration, start-up and shutdown. Exit status: 0 done, 1 failed, 2 usage; of
//! `image check` also 3 (corrupt) and 4 (leaks only), of `image compare` 0 same, 1 different, 2 failed.

mod attach;
mod cli;
mod config;
mod image;
mod inherited;
mod knobs;
mod nbd;
mod serve;
mod shares;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use cli::{Bench, Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|e| refuse(&e));
    start_log(cli.log);
    let result = match cli.command {
        Command::Serve(options) => serve::run(&options),
        Command::Attach(options) => attach::attach(&options),
        Command::Detach(options) => attach::detach(&options),
        Command::Image(command) => match image::run(&command) {
            Ok(status) => return ExitCode::from(status),
            Err(failure) => Err(failure),
        },
        Command::Bench(bench) => match measure(&bench) {
            Ok(status) => return ExitCode::from(status),
            Err(failure) => Err(failure),
        },
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "blockyard", &mut std::io::stdout());
            Ok(())
        }
        Command::Man { folder } => {
            clap_mangen::generate_to(Cli::command(), folder).map_err(|e| Failure::from(anyhow::Error::from(e)))
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { error, status }) => {
            eprintln!("blockyard: {error:#}");
            ExitCode::from(status)
        }
    }
}

/// `bench`; the exit status when it went well.
fn measure(bench: &Bench) -> Result<u8, Failure> {
    match bench {
        Bench::Client(options) => blockyard_bench::client::run(options)?,
        Bench::Rate(options) => blockyard_bench::rate::run(options)?,
        Bench::Median(options) => blockyard_bench::figures::median(options)?,
        Bench::Percentile(options) => blockyard_bench::figures::percentile(options)?,
        Bench::Job(options) => blockyard_bench::job::run(options)?,
        Bench::Plot(options) => blockyard_bench::draw::run(options)?,
        Bench::Compare(options) => to_its_end(blockyard_bench::compare::run(options))?,
        Bench::Neighbours(options) => to_its_end(blockyard_bench::neighbours::run(options))?,
        Bench::Calibrate(options) => to_its_end(blockyard_bench::calibrate::run(options))?,
        Bench::Diff(options) => {
            let same = blockyard_bench::diff::run(options).map_err(|e| Failure::with_status(2, e))?;
            return Ok(u8::from(!same));
        }
    }
    Ok(0)
}

/// Interrupted it ends as the shell says of what a signal has ended.
fn to_its_end(result: anyhow::Result<()>) -> Result<(), Failure> {
    result.map_err(|e| {
        let status = if e.is::<blockyard_bench::process::Interrupted>() { 130 } else { 1 };
        Failure::with_status(status, e)
    })
}

/// Help and version as clap has them; a mistake as one line, like every other error of ours.
fn refuse(error: &clap::Error) -> ! {
    use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if !error.use_stderr() || error.kind() == DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let text = error.render().to_string();
    let parts = text.trim_start_matches("error: ").split("\n\n");
    let parts = parts.take_while(|p| !p.starts_with("Usage:") && !p.starts_with("For more information"));
    let parts: Vec<_> = parts.map(|p| p.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    eprintln!("blockyard: {} (see --help)", parts.join("; "));
    std::process::exit(2)
}

/// What ends the program: one line for a person, and the exit status.
pub struct Failure {
    error: anyhow::Error,
    status: u8,
}

impl Failure {
    /// The user asked for what cannot be.
    pub fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self::with_status(2, error)
    }

    pub fn with_status(status: u8, error: impl Into<anyhow::Error>) -> Self {
        Failure { error: error.into(), status }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure { error: error.into(), status: 1 }
    }
}

fn start_log(level: tracing::Level) {
    // The journal has its own clock.
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(level)
        .with_target(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    if journal { log.without_time().init() } else { log.init() }
}
