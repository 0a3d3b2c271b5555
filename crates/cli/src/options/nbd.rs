//! Options of NBD: addresses, and settings for all clients.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use blockyard_disk::parse_time;
use clap::{Args, ValueHint};
use serde::Deserialize;

use super::values::{parsed, plain};

/// An address for NBD clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    Unix(PathBuf),
    Tcp { host: String, port: u16 },
    Inherited(String),
}

impl FromStr for NbdAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("\"{text}\": an NBD address is unix:PATH, tcp:HOST:PORT, fd:N or fd:NAME");
        let (kind, rest) =
            text.split_once(':').filter(|(_, rest)| !rest.is_empty()).ok_or_else(wrong)?;
        match kind {
            "unix" => Ok(NbdAddress::Unix(plain(rest)?.into())),
            "fd" => Ok(NbdAddress::Inherited(rest.into())),
            "tcp" => {
                // Split at the last colon, because an IPv6 address (in brackets) contains colons.
                let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
                let port = port.parse().map_err(|_| {
                    format!("\"{text}\": \"{port}\" is no port: a port is 0 to 65535")
                })?;
                let host =
                    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
                // Both are all addresses of this host.
                let host = if host.is_empty() { "*" } else { host };
                Ok(NbdAddress::Tcp { host: host.into(), port })
            }
            _ => Err(wrong()),
        }
    }
}

impl NbdAddress {
    /// Returns the address with its path from the root on, equal for two texts of one address.
    /// Disks with the same address share a server. (The path to listen on stays as it was given,
    /// because its length is limited.)
    pub fn whole(&self) -> Self {
        match self {
            NbdAddress::Unix(path) => {
                NbdAddress::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
            }
            other => other.clone(),
        }
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            NbdAddress::Tcp { host, port } if host.contains(':') => {
                write!(f, "tcp:[{host}]:{port}")
            }
            NbdAddress::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            NbdAddress::Inherited(name) => write!(f, "fd:{name}"),
        }
    }
}

/// Settings for all NBD clients: options, which are also the keys of the table `[nbd]`.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NbdArgs {
    /// Maximum NBD clients of an address; further clients wait [default: 256].
    #[arg(long = "nbd-max-clients", value_name = "N", value_parser = parse_clients,
        help_heading = "NBD server")]
    #[serde(default, deserialize_with = "clients")]
    pub max_clients: Option<usize>,

    /// Time within which an NBD client must complete the handshake [default: 10s].
    #[arg(long = "nbd-handshake", value_name = "TIME", value_parser = parse_handshake,
        help_heading = "NBD server")]
    #[serde(default, deserialize_with = "handshake")]
    pub handshake: Option<Duration>,

    /// Offer TLS to NBD clients, with the certificates in this folder.
    ///
    /// The folder has server-cert.pem and server-key.pem. ca-cert.pem verifies the clients'
    /// certificates.
    #[arg(long, value_name = "FOLDER", help_heading = "NBD server",
        value_hint = ValueHint::DirPath)]
    #[serde(default)]
    pub tls_certificates: Option<PathBuf>,

    /// Reject NBD clients without TLS.
    #[arg(long, help_heading = "NBD server")]
    #[serde(default)]
    pub tls_required: bool,

    /// Reject NBD clients without a certificate that ca-cert.pem verifies.
    ///
    /// Implies --tls-required.
    #[arg(long, help_heading = "NBD server")]
    #[serde(default)]
    pub tls_verify_peer: bool,
}

fn parse_clients(text: &str) -> Result<usize, String> {
    let clients = text.parse().ok().filter(|clients| (1..=100_000).contains(clients));
    clients.ok_or_else(|| "max-clients is a number from 1 to 100000".into())
}

pub fn parse_block(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|size: &u32| size.is_power_of_two() && *size <= 4096);
    size.ok_or_else(|| "an NBD block size is a power of two from 1 to 4096".into())
}

pub fn block<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    parsed(d, parse_block).map(Some)
}

fn parse_handshake(text: &str) -> Result<Duration, String> {
    let time =
        parse_time(text).filter(|time| !time.is_zero() && *time <= Duration::from_secs(3600));
    time.ok_or_else(|| {
        format!("\"{text}\": a time is a number and a unit (us, ms or s), up to 3600s")
    })
}

fn clients<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<usize>, D::Error> {
    parsed(d, parse_clients).map(Some)
}

fn handshake<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    parsed(d, parse_handshake).map(Some)
}

impl NbdArgs {
    /// Returns these settings, with those of `other` where these have none.
    pub fn or(&self, other: &NbdArgs) -> NbdArgs {
        NbdArgs {
            max_clients: self.max_clients.or(other.max_clients),
            handshake: self.handshake.or(other.handshake),
            tls_certificates: self
                .tls_certificates
                .clone()
                .or_else(|| other.tls_certificates.clone()),
            tls_required: self.tls_required || other.tls_required,
            tls_verify_peer: self.tls_verify_peer || other.tls_verify_peer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_address_parses_to_the_same_address() {
        for text in
            ["unix:/run/a:b", "tcp:localhost:10809", "tcp:[::1]:1", "tcp:*:5", "fd:3", "fd:nbd"]
        {
            assert_eq!(text.parse::<NbdAddress>().unwrap().to_string(), text);
        }
        let here = std::env::current_dir().unwrap().join("n.s");
        let whole = |text: &str| text.parse::<NbdAddress>().unwrap().whole();
        for (one, other) in [
            ("tcp::7", "tcp:*:7"),
            ("unix:n.s", "unix:./n.s"),
            ("unix:n.s", &format!("unix:{}", here.display())),
            ("unix:/run/./x", "unix:/run/x"),
        ] {
            assert_eq!(whole(one), whole(other));
            assert_eq!(whole(one).to_string(), whole(other).to_string());
        }
        for text in ["tcp:host:", "tcp:host:70000", "tcp:localhost:99999", "tcp:host:nbd"] {
            let port = text.rsplit(':').next().unwrap();
            assert!(
                text.parse::<NbdAddress>().unwrap_err().contains(&format!("\"{port}\" is no port")),
                "{text}"
            );
        }
        for text in ["/run/x", "unix:", "tcp:7", "udp:a:1", ""] {
            assert!(
                text.parse::<NbdAddress>().unwrap_err().contains("an NBD address is"),
                "{text}"
            );
        }
    }
}
