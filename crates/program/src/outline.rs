//! A command line as data.
//!
//! `blockyard-bench` prints the outline of its commands as JSON. `blockyard` puts them below its
//! command `bench`, so that one program writes all man pages and completions. An outline has what
//! these need: it does not parse.

use clap::builder::PossibleValue;
use clap::{Arg, ArgAction, Command, ValueHint};
use serde::{Deserialize, Serialize};

/// A command, its arguments, and the commands below it. Options that the program gives to all
/// commands, such as `--help` and `--log`, are left out, because the command above it has them.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Outline {
    name: String,
    about: Option<String>,
    long_about: Option<String>,
    arguments: Vec<Argument>,
    commands: Vec<Outline>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct Argument {
    id: String,
    short: Option<char>,
    long: Option<String>,
    help: Option<String>,
    long_help: Option<String>,
    heading: Option<String>,
    value_names: Vec<String>,
    /// Possible values, each with its help.
    values: Vec<(String, Option<String>)>,
    defaults: Vec<String>,
    /// What shells complete the value with: `ValueHint` by name.
    hint: String,
    takes_value: bool,
    /// The option may stand without its value.
    value_optional: bool,
    repeats: bool,
    required: bool,
}

impl Outline {
    pub fn of(command: &Command) -> Self {
        let arguments = command.get_arguments().filter(|a| !a.is_global_set() && !a.is_hide_set());
        Outline {
            name: command.get_name().into(),
            about: command.get_about().map(ToString::to_string),
            long_about: command.get_long_about().map(ToString::to_string),
            arguments: arguments.map(Argument::of).collect(),
            commands: command
                .get_subcommands()
                .filter(|c| !c.is_hide_set())
                .map(Outline::of)
                .collect(),
        }
    }

    /// Returns a command with this outline, which keeps its text until the program ends.
    pub fn command(self) -> Command {
        let mut command = Command::new(keep(self.name));
        if let Some(about) = self.about {
            command = command.about(about);
        }
        if let Some(about) = self.long_about {
            command = command.long_about(about);
        }
        command = command.args(self.arguments.into_iter().map(Argument::arg));
        command.subcommands(self.commands.into_iter().map(Outline::command))
    }

    pub fn commands(self) -> impl Iterator<Item = Command> {
        self.commands.into_iter().map(Outline::command)
    }
}

impl Argument {
    fn of(arg: &Arg) -> Self {
        let takes_value = arg.get_action().takes_values();
        let value =
            |v: PossibleValue| (v.get_name().to_string(), v.get_help().map(ToString::to_string));
        // The possible values of a flag are "true" and "false", which are not listed.
        let values = if takes_value { arg.get_possible_values() } else { Vec::new() };
        Argument {
            id: arg.get_id().to_string(),
            short: arg.get_short(),
            long: arg.get_long().map(Into::into),
            help: arg.get_help().map(ToString::to_string),
            long_help: arg.get_long_help().map(ToString::to_string),
            heading: arg.get_help_heading().map(Into::into),
            value_names: arg
                .get_value_names()
                .into_iter()
                .flatten()
                .map(ToString::to_string)
                .collect(),
            values: values.into_iter().filter(|v| !v.is_hide_set()).map(value).collect(),
            defaults: arg
                .get_default_values()
                .iter()
                .map(|v| v.to_string_lossy().into_owned())
                .collect(),
            hint: format!("{:?}", arg.get_value_hint()),
            takes_value,
            value_optional: takes_value
                && arg.get_num_args().is_some_and(|range| range.min_values() == 0),
            repeats: matches!(arg.get_action(), ArgAction::Append),
            required: arg.is_required_set(),
        }
    }

    fn arg(self) -> Arg {
        let action = match (self.takes_value, self.repeats) {
            (true, true) => ArgAction::Append,
            (true, false) => ArgAction::Set,
            (false, _) => ArgAction::SetTrue,
        };
        let names: Vec<_> = self.value_names.into_iter().map(keep).collect();
        let value = |(name, help): (String, Option<String>)| {
            let value = PossibleValue::new(keep(name));
            if let Some(help) = help { value.help(help) } else { value }
        };
        let mut arg = Arg::new(keep(self.id)).action(action).required(self.required);
        if let Some(short) = self.short {
            arg = arg.short(short);
        }
        if let Some(long) = self.long {
            arg = arg.long(keep(long));
        }
        if let Some(help) = self.help {
            arg = arg.help(help);
        }
        if let Some(help) = self.long_help {
            arg = arg.long_help(help);
        }
        if let Some(heading) = self.heading {
            arg = arg.help_heading(keep(heading));
        }
        if !names.is_empty() {
            arg = arg.value_names(names);
        }
        if !self.values.is_empty() {
            arg = arg.value_parser(self.values.into_iter().map(value).collect::<Vec<_>>());
        }
        if let Ok(hint) = self.hint.parse::<ValueHint>() {
            arg = arg.value_hint(hint);
        }
        if self.value_optional {
            arg = arg.num_args(0..=1);
        }
        if self.takes_value { arg.default_values(self.defaults.into_iter().map(keep)) } else { arg }
    }
}

fn keep(text: String) -> &'static str {
    text.leak()
}

#[cfg(test)]
mod tests {
    use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

    use super::*;

    /// A program.
    #[derive(Parser)]
    #[command(name = "x")]
    struct Cli {
        #[arg(long, global = true)]
        log: Option<String>,
        #[command(subcommand)]
        command: Works,
    }

    #[derive(Subcommand)]
    enum Works {
        /// Does one thing.
        ///
        /// Slowly.
        One(One),
        #[command(hide = true)]
        Two,
    }

    #[derive(Args)]
    struct One {
        /// The file.
        file: String,
        more: Vec<String>,
        #[arg(short, long, value_name = "SIZE", default_value = "4k", help_heading = "Amount")]
        size: String,
        #[arg(long, num_args = 0..=1)]
        kind: Option<Kind>,
        #[arg(long)]
        json: bool,
    }

    #[derive(Clone, ValueEnum)]
    enum Kind {
        /// The first.
        A,
        B,
    }

    #[test]
    fn a_command_is_the_same_after_its_travel_as_data() {
        let outline = Outline::of(&Cli::command());
        let text = serde_json::to_string(&outline).unwrap();
        let mut command = serde_json::from_str::<Outline>(&text).unwrap().command();
        assert_eq!(Outline::of(&command), outline);
        let help = |of: &mut Command| {
            of.find_subcommand_mut("one").unwrap().render_long_help().to_string()
        };
        assert!(command.find_subcommand("two").is_none());
        assert_eq!(help(&mut command), help(&mut Cli::command()));
    }
}
