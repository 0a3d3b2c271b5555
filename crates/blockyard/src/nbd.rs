//! NBD on the command line and in the configuration: addresses, and the servers that listen on them.
//!
//! What must hold: an address that several disks name is one server; it listens as long as one of them is offered there.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::Context;
use blockyard_disk::{Disk, parse_time};
use blockyard_export::nbd::{Exported, Limits, Offer, Server, Settings};
use blockyard_export::{Listener, Reactors};
use blockyard_nbd::ServerTls;
use clap::Args;
use serde::Deserialize;

use crate::cli::DiskArgs;
use crate::{config, inherited};

/// Where NBD clients come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    Unix(PathBuf),
    Tcp { host: String, port: u16 },
    Inherited(String),
}

impl FromStr for NbdAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\": an NBD address is unix:PATH, tcp:HOST:PORT, fd:N or fd:NAME");
        let (kind, rest) = text.split_once(':').filter(|(_, rest)| !rest.is_empty()).ok_or_else(wrong)?;
        match kind {
            "unix" => Ok(NbdAddress::Unix(rest.into())),
            "fd" => Ok(NbdAddress::Inherited(rest.into())),
            "tcp" => {
                // (An IPv6 address is in brackets, and has colons of its own.)
                let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
                let port =
                    port.parse().map_err(|_| format!("\"{text}\": \"{port}\" is no port: a port is 0 to 65535"))?;
                let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
                Ok(NbdAddress::Tcp { host: host.into(), port })
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            NbdAddress::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            NbdAddress::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            NbdAddress::Inherited(name) => write!(f, "fd:{name}"),
        }
    }
}

impl NbdAddress {
    fn listen(&self) -> anyhow::Result<Listener> {
        Ok(match self {
            NbdAddress::Unix(path) => Listener::bind(path)?,
            NbdAddress::Tcp { host, port } => Listener::bind_tcp(host, *port)?,
            NbdAddress::Inherited(name) => Listener::inherited(inherited::socket(name)?),
        })
    }
}

/// How all NBD clients are dealt with: options, and the table `[nbd]`.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NbdArgs {
    /// NBD clients of an address at a time; others wait [default: 256].
    #[arg(long = "nbd-max-clients", value_name = "N", value_parser = parse_clients, help_heading = "NBD")]
    #[serde(default, deserialize_with = "clients")]
    pub max_clients: Option<usize>,

    /// The time in which an NBD client must have chosen its export [default: 10s].
    #[arg(long = "nbd-handshake", value_name = "TIME", value_parser = parse_handshake, help_heading = "NBD")]
    #[serde(default, deserialize_with = "handshake")]
    pub handshake: Option<Duration>,

    /// Offer TLS to NBD clients, with server-cert.pem and server-key.pem of this folder, and ca-cert.pem to judge theirs.
    #[arg(long, value_name = "FOLDER", help_heading = "NBD")]
    #[serde(default)]
    pub tls_certificates: Option<PathBuf>,

    /// Serve no NBD client without TLS.
    #[arg(long, help_heading = "NBD")]
    #[serde(default)]
    pub tls_required: bool,

    /// Serve no NBD client without a certificate that ca-cert.pem vouches for. (Means --tls-required.)
    #[arg(long, help_heading = "NBD")]
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
    config::parsed(d, parse_block).map(Some)
}

fn parse_handshake(text: &str) -> Result<Duration, String> {
    let time = parse_time(text).filter(|time| !time.is_zero() && *time <= Duration::from_secs(3600));
    time.ok_or_else(|| format!("\"{text}\": a time is a number and a unit (us, ms or s), up to 3600s"))
}

fn clients<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<usize>, D::Error> {
    config::parsed(d, parse_clients).map(Some)
}

fn handshake<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    config::parsed(d, parse_handshake).map(Some)
}

impl NbdArgs {
    /// What is said here, else there.
    pub fn or(&self, other: &NbdArgs) -> NbdArgs {
        NbdArgs {
            max_clients: self.max_clients.or(other.max_clients),
            handshake: self.handshake.or(other.handshake),
            tls_certificates: self.tls_certificates.clone().or_else(|| other.tls_certificates.clone()),
            tls_required: self.tls_required || other.tls_required,
            tls_verify_peer: self.tls_verify_peer || other.tls_verify_peer,
        }
    }

    /// What they mean, certificates included, as their files are now. Wrong is also what `disks` ask for and this has not.
    pub fn settings(&self, disks: &[DiskArgs]) -> anyhow::Result<Arc<Settings>> {
        let required = self.tls_required || self.tls_verify_peer;
        anyhow::ensure!(
            self.tls_certificates.is_some() || !required,
            "TLS is demanded of NBD clients: say where its certificates are (--tls-certificates, tls-certificates)"
        );
        for disk in disks.iter().filter(|disk| !disk.tls_allow.is_empty()) {
            let name = disk.name();
            // Who takes it for a lock of other ways in is to learn that it is none.
            anyhow::ensure!(
                disk.nbd.is_some(),
                "disk \"{name}\": tls-allow is for NBD clients, and the disk has none (nbd): leave it out"
            );
            anyhow::ensure!(
                self.tls_certificates.is_some(),
                "disk \"{name}\": tls-allow names client certificates, and there is no TLS (--tls-certificates)"
            );
        }
        let open = |folder: &PathBuf| ServerTls::open(folder, required, self.tls_verify_peer);
        let tls = self.tls_certificates.as_ref().map(open).transpose().map_err(anyhow::Error::msg)?;
        let default = Limits::default();
        let limits = Limits {
            clients: self.max_clients.unwrap_or(default.clients),
            handshake: self.handshake.unwrap_or(default.handshake),
        };
        Ok(Arc::new(Settings { limits, tls }))
    }
}

/// The addresses that are listened on. Each is closed with its last offer.
pub struct Servers {
    settings: Arc<Settings>,
    reactors: Arc<Reactors>,
    all: Vec<(NbdAddress, Weak<Server>)>,
}

impl Servers {
    pub fn new(settings: Arc<Settings>, reactors: Arc<Reactors>) -> Self {
        Servers { settings, reactors, all: Vec::new() }
    }

    /// Other settings, for clients that come from now on.
    pub fn set(&mut self, settings: Arc<Settings>) {
        let old = &self.settings;
        if settings.limits != old.limits || settings.tls.is_some() || old.tls.is_some() {
            let Limits { clients, handshake } = settings.limits;
            let tls = match &settings.tls {
                None => "none",
                Some(tls) if tls.required => "demanded, certificates as they are now",
                Some(_) => "offered, certificates as they are now",
            };
            tracing::info!(
                "NBD clients from now on: at most {clients} of an address, {handshake:?} to choose; TLS: {tls}"
            );
        }
        self.listening().for_each(|server| server.set(settings.clone()));
        self.settings = settings;
    }

    /// Offers `disk` at `address`, as `args` say.
    pub fn offer(&mut self, address: &NbdAddress, disk: &Arc<Disk>, args: &DiskArgs) -> anyhow::Result<Offer> {
        let name = args.nbd_name.as_deref().unwrap_or(disk.name());
        let description = args.description.as_deref().unwrap_or_default();
        let exported = Exported::new(disk.clone(), name, description, args.nbd_block_size);
        let exported = exported.polled(args.poll).only_for(&args.tls_allow);
        let listening = self.all.iter().find(|(at, _)| at == address);
        if let Some(server) = listening.and_then(|(_, server)| server.upgrade()) {
            return Ok(server.offer(exported));
        }
        let (settings, reactors) = (self.settings.clone(), self.reactors.clone());
        let server = Server::start(address.listen()?, &address.to_string(), settings, reactors);
        let server = server.with_context(|| format!("listening on {address}"))?;
        self.all.retain(|(_, server)| server.strong_count() > 0);
        self.all.push((address.clone(), Arc::downgrade(&server)));
        Ok(server.offer(exported))
    }

    fn listening(&self) -> impl Iterator<Item = Arc<Server>> {
        self.all.iter().filter_map(|(_, server)| server.upgrade())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["unix:/run/a:b", "tcp:localhost:10809", "tcp:[::1]:1", "tcp:*:5", "fd:3", "fd:nbd"] {
            assert_eq!(text.parse::<NbdAddress>().unwrap().to_string(), text);
        }
        assert_eq!("tcp::7".parse(), Ok(NbdAddress::Tcp { host: String::new(), port: 7 }));
        for text in ["tcp:host:", "tcp:host:70000", "tcp:localhost:99999", "tcp:host:nbd"] {
            let port = text.rsplit(':').next().unwrap();
            assert!(text.parse::<NbdAddress>().unwrap_err().contains(&format!("\"{port}\" is no port")), "{text}");
        }
        for text in ["/run/x", "unix:", "tcp:7", "udp:a:1", ""] {
            assert!(text.parse::<NbdAddress>().unwrap_err().contains("an NBD address is"), "{text}");
        }
    }
}
