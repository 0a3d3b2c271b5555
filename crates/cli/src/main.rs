//! Blockyard: serves virtual disks to virtual machines from user space.
//!
//! ```text
//!   commands/  the command line, and the commands that run no server: ctl, top, image, ...
//!   serve/     the commands that run a server: serve, attach, xen; its start and its end
//!   api/       calls of the API
//!   reload/    SIGHUP and `ctl reload`
//!   handover/  the next server gets the disks
//!   server/    a running server: its state, its sandbox, its late disks, its events
//!   config     the configuration file; changes: differences between two of them
//!   disks/     one disk, from its options to its settings for the yard; the book of all disks
//!   claims     what two disks cannot both have
//!   exports/   the exports of a disk, from its options; nbd: the NBD servers
//!   options/   options of the command line, and keys of the configuration file
//!   process/   the process and its host, without disks: log, files that do not answer, ...
//! ```
//! A line uses lines below it.
//!
//! Command line, configuration, start-up and shutdown. Exit status: 0 success, 1 failure, 2 usage
//! error. `image check` also returns 3 (corrupt) and 4 (no data in danger). `image compare` returns
//! 0 (same), 1 (different) or 2 (failure). 141 means that the reader of standard output closed it
//! (`| head`); shells report the same status for a program that SIGPIPE ended.

// These macros panic when the stream cannot be written; `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod api;
mod changes;
mod claims;
mod commands;
mod config;
mod disks;
mod exports;
mod handover;
mod nbd;
mod options;
mod process;
mod reload;
mod serve;
mod server;

use std::process::ExitCode;

use anyhow::Context;
use blockyard_program::ending::{Failure, refuse};
use blockyard_program::output;
use clap::FromArgMatches;

use commands::{Cli, Command, bench, completions, ctl, image, man, top};
use disks::early;
use handover::holder;
use process::{launcher, log, panics};
use serve::{attach, xen};
use server::sandbox;

/// Stack of the parser of arguments in bytes: that of a main thread.
const PARSER_STACK: usize = 8 << 20;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|word| word == blockyard_ring::witness::ARGUMENT) {
        return ExitCode::from(u8::from(sandbox::run_witness().is_err()));
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == early::ARGUMENT) {
        // It ends when the server closes its standard input.
        let _ = early::run();
        return ExitCode::SUCCESS;
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == launcher::ARGUMENT) {
        let run = launcher::run(std::env::args_os().skip(2));
        return ExitCode::from(u8::from(run.is_err()));
    }
    let cli = parse_apart();
    let xen_server = matches!(&cli.command, Command::Xen(command) if command.serves());
    let server = xen_server || matches!(cli.command, Command::Serve(_));
    if server || matches!(cli.command, Command::Attach(_)) {
        panics::end_the_process();
    }
    log::start(cli.log);
    if let Command::Serve(options) = &cli.command
        && options.keep_sessions
        && !options.check_config
        && options.takeover.is_none()
        && !holder::is_stored()
    {
        return ExitCode::from(
            holder::run().unwrap_or_else(|e| Failure::from(e).end(log::last_words)),
        );
    }
    let status = run(&cli.command).unwrap_or_else(|failure| failure.end(log::last_words));
    log::flush();
    ExitCode::from(status)
}

/// Parses the arguments, or ends the process.
fn parse() -> Cli {
    let matches = commands::command().try_get_matches();
    matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|e| refuse(&e))
}

/// Parses the arguments on a thread of its own. The parser uses some hundred KiB of its stack, and
/// a server would keep these pages on the main thread for ever.
fn parse_apart() -> Cli {
    let thread = std::thread::Builder::new().name("arguments".into()).stack_size(PARSER_STACK);
    std::thread::scope(|scope| match thread.spawn_scoped(scope, parse) {
        Ok(parsed) => parsed.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        Err(_) => parse(),
    })
}

/// Runs the command. Returns the exit status if the command succeeds.
fn run(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Serve(options) => serve::run(options)?,
        Command::Attach(options) => attach::attach(options)?,
        Command::Detach(options) => attach::detach(options)?,
        Command::Xen(command) => xen::run(command)?,
        Command::Ctl(options) => ctl::run(options)?,
        Command::Top(options) => top::run(options)?,
        Command::Image(command) => return image::run(command),
        Command::Bench { arguments } => return Err(bench::become_it(arguments).into()),
        Command::Completions { shell } => {
            output::print(completions::script(*shell, commands::whole_command()))?;
        }
        Command::Man { folder } => man::write_pages(commands::whole_command(), folder)
            .with_context(|| format!("writing man pages into {}", folder.display()))?,
    }
    Ok(0)
}
