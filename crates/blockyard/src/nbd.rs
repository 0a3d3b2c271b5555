//! The servers that listen on NBD addresses.
//!
//! What must hold: an address that several disks name is one server; it listens as long as one of
//! them is offered there.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use anyhow::Context;
use blockyard_disk::Disk;
use blockyard_export::nbd::{Exported, Limits, Offer, Server, Settings};
use blockyard_export::{Listener, Reactors};
use blockyard_nbd::ServerTls;

use crate::inherited;
use crate::options::disk::DiskArgs;
use crate::options::nbd::{NbdAddress, NbdArgs};

/// Returns what the options of NBD mean, with the certificates as their files are now. Returns an
/// error if a disk requires TLS and no certificates are configured.
pub fn settings(args: &NbdArgs, disks: &[DiskArgs]) -> anyhow::Result<Arc<Settings>> {
    let required = args.tls_required || args.tls_verify_peer;
    anyhow::ensure!(
        args.tls_certificates.is_some() || !required,
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
            args.tls_certificates.is_some(),
            "disk \"{name}\": tls-allow names client certificates, and there is no TLS (--tls-certificates)"
        );
    }
    let open = |folder: &PathBuf| ServerTls::open(folder, required, args.tls_verify_peer);
    let tls = args.tls_certificates.as_ref().map(open).transpose().map_err(anyhow::Error::msg)?;
    let default = Limits::default();
    let limits = Limits {
        clients: args.max_clients.unwrap_or(default.clients),
        handshake: args.handshake.unwrap_or(default.handshake),
    };
    Ok(Arc::new(Settings { limits, tls }))
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
    pub fn offer(
        &mut self,
        address: &NbdAddress,
        disk: &Arc<Disk>,
        args: &DiskArgs,
    ) -> anyhow::Result<Offer> {
        let name = args.nbd_name.as_deref().unwrap_or(disk.name());
        let description = args.description.as_deref().unwrap_or_default();
        let exported = Exported::new(disk.clone(), name, description, args.nbd_block_size);
        let exported = exported.polled(args.poll).only_for(&args.tls_allow);
        let listening = self.all.iter().find(|(at, _)| at == address);
        if let Some(server) = listening.and_then(|(_, server)| server.upgrade()) {
            return Ok(server.offer(exported));
        }
        let (settings, reactors) = (self.settings.clone(), self.reactors.clone());
        let server = Server::start(listen(address)?, &address.to_string(), settings, reactors);
        let server = server.with_context(|| format!("listening on {address}"))?;
        self.all.retain(|(_, server)| server.strong_count() > 0);
        self.all.push((address.clone(), Arc::downgrade(&server)));
        Ok(server.offer(exported))
    }

    fn listening(&self) -> impl Iterator<Item = Arc<Server>> {
        self.all.iter().filter_map(|(_, server)| server.upgrade())
    }
}

fn listen(address: &NbdAddress) -> anyhow::Result<Listener> {
    Ok(match address {
        NbdAddress::Unix(path) => Listener::bind(path)?,
        NbdAddress::Tcp { host, port } => Listener::bind_tcp(host, *port)?,
        NbdAddress::Inherited(name) => Listener::inherited(inherited::socket(name)?),
    })
}
