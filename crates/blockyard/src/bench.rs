//! `blockyard bench`: the program `blockyard-bench` does this work. It has fonts and pictures,
//! which a server does not need.
//!
//! In: the arguments behind `bench`. Out: nothing, because the other program takes this process
//! over. What must hold: the other program receives all arguments as they were given.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use blockyard_program::outline::Outline;
use blockyard_program::{output, peer};

const PROGRAM: &str = "blockyard-bench";

/// Replaces this program by `blockyard-bench`. Returns why that is impossible. `behind`: the
/// arguments behind `bench`.
pub fn become_it(behind: &[OsString]) -> anyhow::Error {
    let program = match peer::find(PROGRAM) {
        Ok(program) => program,
        Err(missing) => return missing.into(),
    };
    let all: Vec<_> = std::env::args_os().skip(1).collect();
    let error = Command::new(&program).args(without_the_word(&all, behind.len())).exec();
    anyhow::Error::new(error).context(format!("starting {}", program.display()))
}

/// Returns all arguments except the word `bench`: options that every command takes may stand before
/// it.
fn without_the_word(all: &[OsString], behind: usize) -> impl Iterator<Item = &OsString> {
    let word = all[..all.len() - behind].iter().rposition(|argument| argument == "bench");
    all.iter().enumerate().filter(move |(at, _)| Some(*at) != word).map(|(_, argument)| argument)
}

/// Returns the whole command line, with the commands of `blockyard-bench` if it is there. For man
/// pages and completions.
pub fn with_its_commands(cli: clap::Command) -> clap::Command {
    match outline() {
        Ok(outline) => cli.mut_subcommand("bench", |_| {
            outline.command().name("bench").subcommand_required(true).arg_required_else_help(true)
        }),
        Err(error) => {
            output::note(format_args!(
                "blockyard: the commands of `blockyard bench` are left out: {error:#}"
            ));
            cli
        }
    }
}

fn outline() -> anyhow::Result<Outline> {
    let program = peer::find(PROGRAM)?;
    let told = Command::new(&program).arg("outline").output();
    let told = told.with_context(|| format!("starting {}", program.display()))?;
    anyhow::ensure!(
        told.status.success(),
        "{}: {}",
        program.display(),
        String::from_utf8_lossy(&told.stderr).trim()
    );
    serde_json::from_slice(&told.stdout)
        .with_context(|| format!("what {} says of its commands", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_word_is_left_out() {
        for (all, behind, passed) in [
            ("bench rate read bench", 3, "rate read bench"),
            ("--log debug bench", 0, "--log debug"),
            ("bench --log debug rate x", 2, "--log debug rate x"),
            ("--log debug bench --help", 1, "--log debug --help"),
        ] {
            let all: Vec<OsString> = all.split(' ').map(Into::into).collect();
            let found: Vec<_> =
                without_the_word(&all, behind).map(|a| a.to_str().unwrap()).collect();
            assert_eq!(found.join(" "), passed);
        }
    }
}
