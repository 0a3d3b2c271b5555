//! Blockyard: serves virtual disks to virtual machines from user space.
//!
//! The top floor: command line, configuration, start-up and shutdown. Exit status: 0 done, 1
//! failed, 2 usage; of `image check` also 3 (corrupt) and 4 (no danger to data), of `image compare`
//! 0 same, 1 different, 2 failed. 141: the reader of standard output has gone (`| head`), as a
//! shell reports a program that SIGPIPE ended.

// These macros panic when the stream cannot be written; `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod attach;
mod bench;
mod changes;
mod cli;
mod config;
mod disks;
mod exports;
mod figures;
mod image;
mod inherited;
mod log;
mod nbd;
mod options;
mod panics;
mod reload;
mod serve;
mod shares;
mod toolstack;
mod xen;

use std::process::ExitCode;

use blockyard_program::ending::{Failure, refuse};
use blockyard_program::output;
use clap::{CommandFactory, Parser};

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|e| refuse(&e));
    let xen_server = matches!(&cli.command, Command::Xen(command) if command.serves());
    let server = xen_server || matches!(cli.command, Command::Serve(_));
    if server || matches!(cli.command, Command::Attach(_)) {
        panics::end_the_process();
    }
    let done = log::start(cli.log, server).map_err(Failure::from).and_then(|()| run(&cli.command));
    let status = done.unwrap_or_else(|failure| failure.end(log::last_words));
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
        Command::Bench { arguments } => return Err(bench::become_it(arguments).into()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(
                *shell,
                &mut bench::with_its_commands(Cli::command()),
                "blockyard",
                &mut script,
            );
            output::print(String::from_utf8_lossy(&script))?;
        }
        Command::Man { folder } => {
            clap_mangen::generate_to(bench::with_its_commands(Cli::command()), folder)?
        }
    }
    Ok(0)
}
