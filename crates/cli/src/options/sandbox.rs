//! Options of the sandbox, and of the user that the server runs as.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Deserializer;

use super::values::{self, explain};

/// Values of `--sandbox`, for help.
const VALUES: &[(&str, &str)] = &[
    ("on", "The kernel restricts the server to its folders and system calls"),
    ("off", "No restrictions, and a warning in the log"),
];

#[derive(Args, Clone, Debug, Default)]
pub struct SandboxArgs {
    /// Whether the server restricts itself [default: on].
    #[arg(long, value_name = "MODE", help_heading = "Sandbox",
        value_parser = explain(VALUES, parse))]
    pub sandbox: Option<bool>,

    /// Let the server use files in this folder and below, besides those of its disks. May be
    /// repeated.
    ///
    /// For disks that the API or a reload adds later, and for their sockets.
    #[arg(long = "allow-folder", value_name = "FOLDER", help_heading = "Sandbox",
        value_hint = ValueHint::DirPath)]
    pub allow_folders: Vec<PathBuf>,

    /// Run as this user, by name or number, if root starts the server [default: stay root].
    ///
    /// The user needs access to images, sockets' folders, devices and certificates.
    #[arg(long, value_name = "NAME", help_heading = "Sandbox", value_hint = ValueHint::Username)]
    pub user: Option<String>,
}

impl SandboxArgs {
    pub fn is_on(&self) -> bool {
        self.sandbox != Some(false)
    }
}

fn parse(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("it must be on or off".into()),
    }
}

/// Deserializes the key `sandbox`: `"on"` or `"off"`.
pub fn mode<'de, D: Deserializer<'de>>(d: D) -> Result<Option<bool>, D::Error> {
    values::parsed(d, parse).map(Some)
}

/// Deserializes the key `user`: a name or a number.
pub fn user<'de, D: Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    values::parsed(d, |text| Ok(text.to_string())).map(Some)
}
