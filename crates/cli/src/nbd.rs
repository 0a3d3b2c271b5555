//! The NBD servers, one for each address.
//!
//! What must hold: disks with the same address share one server. It listens until the last of its
//! exports ends.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Instant;

use anyhow::Context;
use blockyard_disk::Disk;
use blockyard_export::nbd::{Exported, Limits, Offer, Server, Settings};
use blockyard_export::{Listener, Reactors};
use blockyard_nbd::ServerTls;
use blockyard_ring::parcel::Parcel;
use blockyard_yard::WayError;

use crate::options::disk::DiskArgs;
use crate::options::nbd::{NbdAddress, NbdArgs};

/// What TLS tells the NBD servers about a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// There is no TLS.
    None,
    /// There are no authorities, so no client's certificate can be verified.
    Unverified,
    /// The names in its certificate.
    Names,
}

impl Tls {
    /// `folder`: the folder of certificates.
    pub fn of(folder: Option<&Path>) -> Self {
        match folder {
            None => Tls::None,
            Some(folder) if folder.join("ca-cert.pem").exists() => Tls::Names,
            Some(_) => Tls::Unverified,
        }
    }
}

/// Settings of all NBD servers.
pub struct ServerSettings {
    clients: Arc<Settings>,
    pub tls: Tls,
}

/// Returns the settings of the NBD servers, and reads the certificates. Returns an error if TLS is
/// required but no certificates are configured.
pub fn settings(args: &NbdArgs) -> anyhow::Result<ServerSettings> {
    let required = args.tls_required || args.tls_verify_peer;
    anyhow::ensure!(
        args.tls_certificates.is_some() || !required,
        "TLS is required for NBD clients, but no certificates are configured: set \
         --tls-certificates, or tls-certificates in [nbd]"
    );
    let open = |folder: &PathBuf| ServerTls::open(folder, required, args.tls_verify_peer);
    let tls = args.tls_certificates.as_ref().map(open).transpose()?;
    let default = Limits::default();
    let limits = Limits {
        clients: args.max_clients.unwrap_or(default.clients),
        handshake: args.handshake.unwrap_or(default.handshake),
    };
    let names = Tls::of(args.tls_certificates.as_deref());
    Ok(ServerSettings { clients: Arc::new(Settings { limits, tls }), tls: names })
}

/// Returns an error if a disk restricts its NBD clients without effect.
pub fn check(tls: Tls, disk: &DiskArgs) -> anyhow::Result<()> {
    let (name, Some(names)) = (disk.name(), &disk.tls_allow) else { return Ok(()) };
    // tls-allow restricts NBD only. A user could believe that it protects other exports too.
    anyhow::ensure!(
        disk.nbd.is_some(),
        "disk \"{name}\": tls-allow is for NBD clients, and the disk has no NBD export: leave it \
         out"
    );
    anyhow::ensure!(
        tls != Tls::None,
        "disk \"{name}\": tls-allow names client certificates, and there is no TLS: set \
         --tls-certificates, or tls-certificates in [nbd]"
    );
    anyhow::ensure!(
        tls == Tls::Names || names.is_empty(),
        "disk \"{name}\": tls-allow names client certificates, and the folder of \
         tls-certificates has no ca-cert.pem to verify them: put the authorities there"
    );
    Ok(())
}

/// The NBD servers. Each closes its address when its last export ends.
pub struct Servers {
    settings: ServerSettings,
    reactors: Arc<Reactors>,
    /// Each with [`NbdAddress::whole`].
    all: Vec<(NbdAddress, Weak<Server>)>,
    /// Listening sockets of the server from which this one takes over, by address.
    handed: HashMap<String, Parcel>,
    /// Servers during the hand-over of their disks. They go on listening if the next server fails.
    leaving: Vec<Arc<Server>>,
}

impl Servers {
    pub fn new(settings: ServerSettings, reactors: Arc<Reactors>) -> Self {
        Servers { settings, reactors, all: Vec::new(), handed: HashMap::new(), leaving: Vec::new() }
    }

    /// Listens on a socket of another server when a disk needs its address.
    pub fn continue_on(&mut self, address: &str, parcel: Parcel) {
        let whole = address.parse::<NbdAddress>().map(|address| address.whole().to_string());
        self.handed.insert(whole.unwrap_or_else(|_| address.into()), parcel);
    }

    /// Returns the listening sockets by address, for the next server.
    pub fn hand_over(&mut self) -> std::io::Result<Vec<(String, Parcel)>> {
        self.leaving = self.listening().collect();
        // The clients of all addresses have the same time: the next server waits for it once.
        self.leaving.iter().try_for_each(|server| server.pause())?;
        let since = Instant::now();
        let parcel =
            |server: &Arc<Server>| Ok((server.address().to_string(), server.hand_over(since)?));
        self.leaving.iter().map(parcel).collect()
    }

    /// Returns the number of clients that the hand-over has disconnected.
    pub fn disconnected(&self) -> u64 {
        self.leaving.iter().map(|server| server.disconnected()).sum()
    }

    /// Returns what TLS tells the servers about a client.
    pub fn tls(&self) -> Tls {
        self.settings.tls
    }

    /// Closes the addresses of the other server that no disk has any more.
    pub fn close_unused(&mut self) {
        // A listener removes the file of its socket.
        self.handed.drain().for_each(|(_, parcel)| drop(Listener::from_parcel(parcel)));
    }

    /// The next server has failed. When the disks are served again, call
    /// [`Servers::has_taken_back`].
    pub fn take_back(&self) {
        self.leaving.iter().for_each(|server| server.take_back());
    }

    /// Closes the addresses that no disk has any more.
    pub fn has_taken_back(&mut self) {
        self.leaving.clear();
    }

    /// Applies other settings to clients that connect from now on.
    pub fn set(&mut self, settings: ServerSettings) {
        let old = std::mem::replace(&mut self.settings, settings).clients;
        let settings = self.settings.clients.clone();
        self.listening().for_each(|server| server.set(settings.clone()));
        if settings.limits != old.limits || settings.tls.is_some() || old.tls.is_some() {
            let Limits { clients, handshake } = settings.limits;
            let tls = match &settings.tls {
                None => "none",
                Some(tls) if tls.required => "required, certificates read again",
                Some(_) => "offered, certificates read again",
            };
            tracing::info!(
                "new settings for NBD clients: at most {clients} for each address, handshake \
                 within \
                 {handshake:?}, TLS: {tls}"
            );
        }
    }

    /// Exports `disk` at `address`. Starts a server if none listens there, on a socket of `listen`.
    pub fn offer(
        &mut self,
        address: &NbdAddress,
        disk: &Arc<Disk>,
        args: &DiskArgs,
        listen: impl FnOnce() -> Result<Listener, WayError>,
    ) -> anyhow::Result<Offer> {
        let name = args.nbd_name.as_deref().unwrap_or(disk.name());
        let description = args.description.as_deref().unwrap_or_default();
        let exported = Exported::new(disk.clone(), name, description, args.nbd_block_size);
        let exported = exported.polled(args.poll).only_for(args.tls_allow.as_deref());
        let whole = address.whole();
        let listening = self.all.iter().find(|(at, _)| *at == whole);
        if let Some(server) = listening.and_then(|(_, server)| server.upgrade()) {
            return Ok(server.offer(exported));
        }
        let (settings, reactors) = (self.settings.clients.clone(), self.reactors.clone());
        let listener = match self.handed.remove(&whole.to_string()) {
            Some(parcel) => Listener::from_parcel(parcel)?,
            None => listen()?,
        };
        let server = Server::start(listener, &address.to_string(), settings, reactors);
        let server = server.with_context(|| format!("listening on {address}"))?;
        self.all.retain(|(_, server)| server.strong_count() > 0);
        self.all.push((whole, Arc::downgrade(&server)));
        Ok(server.offer(exported))
    }

    fn listening(&self) -> impl Iterator<Item = Arc<Server>> {
        self.all.iter().filter_map(|(_, server)| server.upgrade())
    }
}
