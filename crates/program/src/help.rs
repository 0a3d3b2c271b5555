//! What the help of both programs has in common: examples, and the general options as the last
//! group.
//!
//! In: a clap command. Out: the same command with an `Examples` section at the end of its help,
//! and with `--log`, `--version` and `--help` in the group `General options`, which comes last.

use clap::{Arg, ArgAction, Command};

use crate::examples;

/// Heading of the options that every command has.
pub const GENERAL: &str = "General options";

/// Returns `command` and its subcommands with examples and general options. `path`: the path of
/// the command without `blockyard`, such as `image create`.
///
/// A command without a help option of its own stays as it is: it passes its arguments on.
pub fn complete(command: Command, path: &str) -> Command {
    if command.is_disable_help_flag_set() {
        return command.after_help(section(path));
    }
    let names: Vec<_> = command.get_subcommands().map(|c| c.get_name().to_string()).collect();
    let command = names.into_iter().fold(command, |command, name| {
        let below = if path.is_empty() { name.clone() } else { format!("{path} {name}") };
        command.mut_subcommand(name, |subcommand| complete(subcommand, &below))
    });
    let general = |name: &'static str, short: char, action: ArgAction| {
        Arg::new(name).short(short).long(name).action(action).help_heading(GENERAL)
    };
    command
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(general("version", 'V', ArgAction::Version).help("Print version").display_order(998))
        .arg(
            general("help", 'h', ArgAction::Help)
                .help("Print help (-h: a summary)")
                .display_order(999),
        )
        .after_help(section(path))
}

/// Returns the section `Examples` of a command, or an empty text if it has none.
fn section(path: &str) -> String {
    let lines: Vec<_> =
        examples::of(path).iter().map(|e| format!("  # {}\n  {}", e.does, e.line)).collect();
    if lines.is_empty() { String::new() } else { format!("Examples:\n{}", lines.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_ends_with_the_help_option_and_examples() {
        let log = Arg::new("log").long("log").global(true).help_heading(GENERAL).help("Level");
        let weight = Arg::new("weight").long("weight").help_heading("Share");
        let attach = Command::new("attach").version("1").arg(weight);
        let mut command =
            complete(Command::new("blockyard").version("1").arg(log).subcommand(attach), "");
        command.build();
        let help = command.find_subcommand_mut("attach").unwrap().render_help().to_string();
        let positions: Vec<_> = ["Share:", "General options:", "--log", "-V", "-h", "Examples:"]
            .map(|part| help.find(part).unwrap_or_else(|| panic!("{part} is missing in {help}")))
            .into();
        assert!(positions.is_sorted(), "{help}");
        assert!(help.trim_end().ends_with("--read-only --ublk=5"), "{help}");
    }
}
