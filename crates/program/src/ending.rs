//! The end of a program: errors as one line, and the exit status.
//!
//! Exit status of every command: 0 done, 1 failed, 2 usage, 141 the reader of standard output has
//! gone (`| head`). 141 is what a shell reports of a program that SIGPIPE ended.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::output::{self, OutputError};

/// The shell's status of a program that SIGPIPE ended.
const READER_HAS_GONE: u8 = 141;

/// What ends the program: one line for a person, and the exit status.
#[derive(Debug)]
pub struct Failure {
    pub error: anyhow::Error,
    pub status: u8,
}

impl Failure {
    /// An error in the arguments.
    pub fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self::with_status(2, error)
    }

    pub fn with_status(status: u8, error: impl Into<anyhow::Error>) -> Self {
        Failure { error: error.into(), status }
    }

    /// Returns the exit status. Passes the message for the user to `tell`, unless the reader of
    /// standard output has gone.
    pub fn end(self, tell: impl FnOnce(&str)) -> u8 {
        if self.error.downcast_ref().is_some_and(OutputError::reader_has_gone) {
            return READER_HAS_GONE;
        }
        tell(&format!("blockyard: {:#}", self.error));
        self.status
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure { error: error.into(), status: 1 }
    }
}

/// Ends the program after clap has refused its arguments, or has printed help or the version. A
/// mistake is one line.
pub fn refuse(error: &clap::Error) -> ! {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    if let Some(what) = negative(error).or_else(|| conflict(error, arguments())) {
        output::note(format_args!("blockyard: {what} (see --help)"));
        std::process::exit(2)
    }
    let text = error.render().to_string();
    let parts = text.trim_start_matches("error: ").split("\n\n");
    let parts =
        parts.take_while(|p| !p.starts_with("Usage:") && !p.starts_with("For more information"));
    let parts: Vec<_> = parts.map(|p| p.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    output::note(format_args!("blockyard: {} (see --help)", parts.join("; ")));
    std::process::exit(2)
}

/// Returns the arguments of this process, for messages. They need not be UTF-8.
fn arguments() -> impl Iterator<Item = String> {
    std::env::args_os().map(|argument| argument.to_string_lossy().into_owned())
}

/// Returns a message about a negative number as a value. clap reads it as an option, and advises
/// `-- -5`, which would make it an IMAGE.
fn negative(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(found)) = error.get(ContextKind::InvalidArg) else { return None };
    let number =
        found.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if error.kind() != ErrorKind::UnknownArgument || !number {
        return None;
    }
    let arguments: Vec<_> = arguments().collect();
    let at = arguments.iter().position(|argument| argument.starts_with(found.as_str()))?;
    let option = arguments[..at]
        .last()
        .filter(|before| before.starts_with("--"))
        .map(|option| format!("{option}: "));
    Some(format!(
        "{}'{}' is negative, and a value here is not",
        option.unwrap_or_default(),
        arguments[at]
    ))
}

/// Returns a message about an option that excludes others. clap lists all that it excludes, even
/// those that were not given.
fn conflict(error: &clap::Error, mut given: impl Iterator<Item = String>) -> Option<String> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let Some(ContextValue::Strings(others)) = error.get(ContextKind::PriorArg) else {
        return None;
    };
    let name = |shown: &str| shown.split(['=', ' ', '[']).next().unwrap_or_default().to_string();
    let option_given = given.find_map(|argument| {
        let argument = name(&argument);
        others.iter().find(|other| argument.starts_with("--") && name(other) == argument)
    });
    // An argument without an option's name, such as [IMAGE].
    let found = option_given.or_else(|| others.iter().find(|other| !other.starts_with('-')))?;
    Some(format!("the argument '{option}' cannot be used with '{found}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conflict_names_an_argument_that_was_given() {
        const ALL: [&str; 4] = ["one", "two", "three", "image"];
        let option = |name: &'static str| clap::Arg::new(name).long(name).value_name("V");
        let command = clap::Command::new("program")
            .args(["one", "two", "three"].map(option))
            .arg(clap::Arg::new("image").value_name("IMAGE"))
            .group(clap::ArgGroup::new("disk").args(ALL).multiple(true))
            .arg(option("file").conflicts_with("disk"));
        let told = |arguments: &[&str]| {
            let given = ["program"].iter().chain(arguments).map(|word| word.to_string());
            let error = command.clone().try_get_matches_from(given.clone()).unwrap_err();
            conflict(&error, given)
        };
        let expected = |option: &str, other: &str| {
            Some(format!("the argument '--{option} <V>' cannot be used with '--{other} <V>'"))
        };
        assert_eq!(told(&["--file", "x", "--three", "3", "--two=2"]), expected("file", "three"));
        let image = "the argument '--file <V>' cannot be used with '[IMAGE]'";
        assert_eq!(told(&["--file", "x", "disk.img"]).as_deref(), Some(image));
        assert_eq!(told(&["--four"]), None);
    }
}
