//! Blockyard: serves virtual disks to virtual machines from user space.
//!
//! The top floor: command line, configuration, start-up and shutdown. Exit status: 0 done, 1 failed, 2 usage; of
//! `image check` also 3 (corrupt) and 4 (no danger to data), of `image compare` 0 same, 1 different, 2 failed. 141: the reader of
//! standard output has gone (`| head`), as a shell reports a program that SIGPIPE ended.

// These macros panic when the stream cannot be written; `blockyard_bench::output` and the log do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod attach;
mod cli;
mod config;
mod image;
mod inherited;
mod knobs;
mod log;
mod nbd;
mod panics;
mod reload;
mod serve;
mod shares;
mod xen;

use std::process::ExitCode;

use blockyard_bench::output::{self, OutputError};
use clap::{CommandFactory, Parser};

use cli::{Bench, Cli, Command};

/// The shell's status of a program that SIGPIPE ended.
const READER_HAS_GONE: u8 = 141;

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|e| refuse(&e));
    let xen_server = matches!(&cli.command, Command::Xen(command) if command.serves());
    let server = xen_server || matches!(cli.command, Command::Serve(_));
    if server || matches!(cli.command, Command::Attach(_)) {
        panics::end_the_process();
    }
    let done = log::start(cli.log, server).map_err(Failure::from).and_then(|()| run(&cli.command));
    let status = match done {
        Ok(status) => status,
        Err(Failure { error, .. }) if error.downcast_ref().is_some_and(OutputError::reader_has_gone) => READER_HAS_GONE,
        Err(Failure { error, status }) => {
            log::last_words(&format!("blockyard: {error:#}"));
            status
        }
    };
    log::flush();
    ExitCode::from(status)
}

/// Does what the command says; the exit status when it went well.
fn run(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Serve(options) => serve::run(options)?,
        Command::Attach(options) => attach::attach(options)?,
        Command::Detach(options) => attach::detach(options)?,
        Command::Xen(command) => xen::run(command)?,
        Command::Image(command) => return image::run(command),
        Command::Bench(bench) => return measure(bench),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "blockyard", &mut script);
            output::print(String::from_utf8_lossy(&script))?;
        }
        Command::Man { folder } => clap_mangen::generate_to(Cli::command(), folder)?,
    }
    Ok(0)
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
    if let Some(what) = negative(error) {
        output::note(format_args!("blockyard: {what} (see --help)"));
        std::process::exit(2)
    }
    let text = error.render().to_string();
    let parts = text.trim_start_matches("error: ").split("\n\n");
    let parts = parts.take_while(|p| !p.starts_with("Usage:") && !p.starts_with("For more information"));
    let parts: Vec<_> = parts.map(|p| p.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    output::note(format_args!("blockyard: {} (see --help)", parts.join("; ")));
    std::process::exit(2)
}

/// A negative number as a value: clap takes it for an option, and advises `-- -5`, which would make it an IMAGE.
fn negative(error: &clap::Error) -> Option<String> {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let Some(ContextValue::String(found)) = error.get(ContextKind::InvalidArg) else { return None };
    let number = found.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if error.kind() != ErrorKind::UnknownArgument || !number {
        return None;
    }
    let arguments: Vec<_> = std::env::args().collect();
    let at = arguments.iter().position(|argument| argument.starts_with(found.as_str()))?;
    let option = arguments[..at].last().filter(|before| before.starts_with("--")).map(|option| format!("{option}: "));
    Some(format!("{}'{}' is negative, and a value here is not", option.unwrap_or_default(), arguments[at]))
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
