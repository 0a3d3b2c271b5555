//! The command line: the commands of the program, and those that run no server.
//!
//! `ctl` and `top` call a running server. `image` works on images that no server has open. `bench`,
//! `completions` and `man` are of the program itself. The commands that run a server are in
//! `serve/`: `serve`, `attach`, `detach` and `xen`.

pub mod bench;
pub mod completions;
pub mod ctl;
pub mod image;
pub mod man;
pub mod top;

use std::ffi::OsString;
use std::path::PathBuf;

use blockyard_program::help;
use blockyard_program::log::parse_level;
use clap::builder::Resettable;
use clap::{CommandFactory, Parser, Subcommand, ValueHint};

use crate::options::serve::{AttachOptions, DetachOptions, ServeOptions};
use crate::options::values;
use ctl::VARIABLE;

#[derive(Parser)]
#[command(
    name = "blockyard",
    version,
    about = "Serves virtual disks to virtual machines from user space.",
    propagate_version = true
)]
pub struct Cli {
    /// Least severe messages to log on standard error: error, warn, info, debug or trace.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL",
        value_parser = values::suggest(&["error", "warn", "info", "debug", "trace"], parse_level),
        hide_possible_values = true, help_heading = help::GENERAL)]
    pub log: tracing::Level,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Serve a disk image, or all disks of a configuration file.
    ///
    /// An export option selects the clients of the disk: a virtual machine (--vhost-user), NBD
    /// clients (--nbd), this host (--ublk) or a guest of Xen (--xen). A disk may have several.
    Serve(Box<ServeOptions>),
    /// Attach an image as a block device of this host.
    ///
    /// Starts a server in the background and prints the device. `detach` removes it.
    Attach(Box<AttachOptions>),
    /// Detach a block device that `attach` or `serve --ublk` made.
    Detach(DetachOptions),
    /// Attach disks to guests of Xen, and detach them.
    #[command(subcommand)]
    Xen(crate::serve::xen::Command),
    /// Control a running server through its API (`serve --api`).
    Ctl(Box<ctl::CtlOptions>),
    /// Show a live table of the disks of a running server.
    ///
    /// Rates, latencies, depth, share and CPU time of each disk, and the histogram of one.
    Top(top::TopOptions),
    /// Create, inspect, check and change disk images.
    ///
    /// Commands, options and JSON output are those of qemu-img.
    #[command(subcommand)]
    Image(Box<image::Command>),
    /// Run benchmarks (`blockyard bench --help` lists them).
    ///
    /// The program blockyard-bench runs them.
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        arguments: Vec<OsString>,
    },
    /// Print completions for a shell.
    Completions { shell: clap_complete::Shell },
    /// Write the man pages into a folder.
    Man {
        /// The folder, which exists.
        #[arg(value_hint = ValueHint::DirPath)]
        folder: PathBuf,
    },
}

/// Returns the command line that the program parses. `bench` passes its arguments on.
pub fn command() -> clap::Command {
    let command = Cli::command();
    // An empty variable is like none.
    let is_empty = std::env::var_os(VARIABLE).is_some_and(|path| path.is_empty());
    let commands = if is_empty { &["ctl", "top"][..] } else { &[] };
    let without = |command: clap::Command| command.mut_arg("api", |api| api.env(Resettable::Reset));
    let command = commands.iter().fold(command, |all, name| all.mut_subcommand(name, without));
    help::complete(command, "")
}

/// Returns the command line with the commands of `bench`, for man pages and completions.
pub fn whole_command() -> clap::Command {
    help::complete(bench::with_its_commands(Cli::command()), "")
}

#[cfg(test)]
mod tests {
    use blockyard_program::examples;
    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn every_example_is_a_command_line_of_its_command() {
        for (path, example) in examples::all() {
            let begin = format!("blockyard {path}");
            assert!(example.line.starts_with(begin.trim_end()), "{path}: {}", example.line);
            let parsed = command().try_get_matches_from(example.words());
            if let Err(e) = parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
                panic!("{}: {e}", example.line);
            }
        }
    }

    #[test]
    fn every_command_has_an_example() {
        fn visit(command: &clap::Command, path: &str) {
            assert!(!examples::of(path).is_empty(), "blockyard {path}");
            for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
                visit(below, format!("{path} {}", below.get_name()).trim_start());
            }
        }
        visit(&Cli::command(), "");
    }

    #[test]
    fn options_of_serve_are_in_groups_and_help_is_the_last() {
        let mut command = command();
        command.build();
        let help = command.find_subcommand_mut("serve").unwrap().render_help().to_string();
        let headings: Vec<_> =
            help.lines().filter(|line| !line.starts_with(' ') && line.ends_with(':')).collect();
        let expected = [
            "Arguments:",
            "Server:",
            "Exports:",
            "Image:",
            "Image cache:",
            "Remote images:",
            "Queues:",
            "Guest memory:",
            "Share and limits:",
            "Sandbox:",
            "NBD server:",
            "Xen toolstacks:",
            "Testing:",
            "General options:",
            "Examples:",
        ];
        let mut sorted = headings.clone();
        sorted.sort_by_key(|heading| expected.iter().position(|e| e == heading));
        assert_eq!(sorted, expected);
        let options: Vec<_> = help.lines().filter(|line| line.trim().starts_with('-')).collect();
        assert!(options.last().is_some_and(|line| line.trim().starts_with("-h, --help")), "{help}");
    }

    /// Returns the completions for a shell.
    fn completions(shell: clap_complete::Shell) -> String {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command(), "blockyard", &mut script);
        String::from_utf8(script).unwrap()
    }

    #[test]
    fn shells_complete_values_and_files() {
        use clap_complete::Shell::{Bash, Fish, Zsh};
        for (shell, parts) in [
            (
                Bash,
                ["none writeback writethrough directsync unsafe", "compgen -f", "raw qcow2 cow"],
            ),
            (Zsh, ["writethrough", "_files -/", "qcow2"]),
            (Fish, ["writethrough\\t", "-l backing-folder", "qcow2\\t"]),
        ] {
            let script = completions(shell);
            for part in parts {
                assert!(script.contains(part), "{shell}: {part}");
            }
        }
    }
}
