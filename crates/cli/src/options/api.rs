//! Options of the API's socket.

use clap::{Args, ValueHint};
use serde::{Deserialize, Deserializer};

use super::values;

/// Default permissions of the socket.
const MODE: u32 = 0o600;

#[derive(Args, Clone, Debug, Default)]
pub struct ApiArgs {
    /// Offer the HTTP API on this Unix socket, for `blockyard ctl` and other programs.
    ///
    /// fd:N or fd:NAME is a listening socket that the server inherits (systemd). Only root, the
    /// server's own user and the group of --socket-group may call.
    #[arg(long, value_name = "SOCKET", help_heading = "Server", value_parser = parse_socket,
        value_hint = ValueHint::AnyPath)]
    pub api: Option<String>,

    /// Permissions of the API's socket in octal [default: 600, with --socket-group 660].
    #[arg(long, value_name = "MODE", value_parser = parse_mode, help_heading = "Server")]
    pub socket_mode: Option<u32>,

    /// Group of the API's socket, by name or number. Its members may call the API.
    #[arg(long, value_name = "GROUP", help_heading = "Server")]
    pub socket_group: Option<String>,
}

impl ApiArgs {
    /// Returns an error if an option has no effect.
    pub fn check(&self) -> anyhow::Result<()> {
        let of_socket = [
            ("--socket-mode (key socket-mode)", self.socket_mode.is_some()),
            ("--socket-group (key socket-group)", self.socket_group.is_some()),
        ];
        let given = of_socket.iter().find(|(_, given)| *given && self.api.is_none());
        given.map_or(Ok(()), |(option, _)| {
            anyhow::bail!(
                "{option} is for the API's socket, and there is none: set --api (key api), or \
                 leave it out"
            )
        })
    }

    /// Returns the permissions of the socket.
    pub fn mode(&self) -> u32 {
        let default = if self.socket_group.is_some() { MODE | 0o060 } else { MODE };
        self.socket_mode.unwrap_or(default)
    }
}

fn parse_socket(text: &str) -> Result<String, String> {
    match text {
        "" => Err("the path of the API's socket is empty".into()),
        _ => values::plain(text).map(str::to_string),
    }
}

/// Deserializes the key `api`.
pub fn socket<'de, D: Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    values::parsed(d, parse_socket).map(Some)
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("\"{text}\": a mode is an octal number, such as 660"))
}

/// Deserializes a mode: a text, because a number would be decimal.
pub fn mode<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    parse_mode(&String::deserialize(d)?).map(Some).map_err(serde::de::Error::custom)
}
