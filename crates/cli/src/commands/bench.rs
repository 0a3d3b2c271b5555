//! `blockyard bench`: replaces the process by the program `blockyard-bench`. That is a program of
//! its own because it contains fonts and drawing code, which a server does not need.
//!
//! In: the arguments after `bench`. Out: nothing, because exec(2) does not return. What must hold:
//! the other program receives all arguments unchanged.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use blockyard_program::outline::Outline;
use blockyard_program::{output, peer};

const PROGRAM: &str = "blockyard-bench";

/// Replaces this program by `blockyard-bench`. Returns only if that fails, with the reason.
/// `behind`: the arguments after `bench`.
pub fn become_it(behind: &[OsString]) -> anyhow::Error {
    let program = match peer::find(PROGRAM) {
        Ok(program) => program,
        Err(missing) => return missing.into(),
    };
    let all: Vec<_> = std::env::args_os().skip(1).collect();
    let error = Command::new(&program).args(without_the_word(&all, behind.len())).exec();
    anyhow::Error::new(error).context(format!("starting {}", program.display()))
}

/// Returns all arguments except the word `bench`. General options may come before that word.
fn without_the_word(all: &[OsString], behind: usize) -> impl Iterator<Item = &OsString> {
    let word = all[..all.len() - behind].iter().rposition(|argument| argument == "bench");
    all.iter().enumerate().filter(move |(at, _)| Some(*at) != word).map(|(_, argument)| argument)
}

/// Returns `cli` with the commands of `blockyard-bench`, for man pages and completions. If that
/// program is missing, writes a note to standard error and returns `cli`.
pub fn with_its_commands(cli: clap::Command) -> clap::Command {
    match outline() {
        Ok(outline) => cli.mut_subcommand("bench", |_| {
            outline.command().name("bench").subcommand_required(true).arg_required_else_help(true)
        }),
        Err(error) => {
            output::note(format_args!(
                "blockyard: the commands of `blockyard bench` are missing: {error:#}"
            ));
            cli
        }
    }
}

fn outline() -> anyhow::Result<Outline> {
    let program = peer::find(PROGRAM)?;
    let output = Command::new(&program).arg("outline").output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    anyhow::ensure!(
        output.status.success(),
        "{}: {}",
        program.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("parsing the outline of {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_word_bench_is_removed() {
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
