//! State that the acceptor, the reactors and the program share.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_nbd::ServerTls;

use super::crowd::Crowds;
use super::exported::{Exported, Peer};
use super::left::LeftConnection;
use super::limits::Limits;
use crate::connections::Accepting;
use crate::log::Log;

/// Settings for new clients.
#[derive(Debug, Default)]
pub struct Settings {
    pub limits: Limits,
    pub tls: Option<ServerTls>,
}

/// Number of places that an export has in any case, if its address has as many.
const LEAST_PLACES: usize = 16;

/// State that the acceptor, the reactors and the program share.
pub struct Shared {
    pub exports: Mutex<Vec<Arc<Exported>>>,
    /// Settings for clients that connect from now on. A connected client keeps the settings that
    /// applied when it connected.
    pub settings: Mutex<Arc<Settings>>,
    pub log: Log,
    /// The address, as the log shows it.
    pub address: String,
    /// Counts all clients of the address. It has the limit of `settings`.
    pub accepting: Arc<Accepting>,
    /// The clients that have not chosen an export, by source.
    pub crowds: Crowds,
    /// Number of clients that the present hand-over has disconnected.
    pub disconnected: AtomicU64,
    /// Connections of another server, until the acceptor gives them to reactors.
    pub resumed: Mutex<Vec<(Arc<Exported>, LeftConnection)>>,
}

impl Shared {
    pub fn new(settings: Arc<Settings>, address: &str) -> Arc<Self> {
        let (exports, log, crowds, disconnected, resumed) = Default::default();
        let accepting = Accepting::new(settings.limits.clients);
        let (settings, address) = (Mutex::new(settings), address.into());
        Arc::new(Shared {
            exports,
            settings,
            log,
            address,
            accepting,
            crowds,
            disconnected,
            resumed,
        })
    }

    pub fn exports(&self) -> Vec<Arc<Exported>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn settings(&self) -> Arc<Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the exports that a client may see.
    pub fn visible(&self, peer: &Peer) -> Vec<Arc<Exported>> {
        let mut exports = self.exports();
        exports.retain(|exported| exported.is_for(peer));
        exports
    }

    /// Returns the maximum number of connections of one export. The clients of one disk must leave
    /// places at the address to those of the other disks.
    pub fn places(&self) -> usize {
        let (all, exports) = (self.settings().limits.clients, self.exports().len());
        (all / exports.max(1)).max(LEAST_PLACES).min(all)
    }

    /// Returns whether some exports are only for clients with certain names in their certificates.
    pub fn has_exports_under_tls(&self) -> bool {
        let is_open = |exported: &Arc<Exported>| exported.is_for(&Peer::default());
        !self.exports().iter().all(is_open)
    }

    /// Returns the export of this name, if the client may see it. The empty name selects the only
    /// export.
    pub fn find(&self, name: &[u8], peer: &Peer) -> Option<Arc<Exported>> {
        let exports = self.visible(peer);
        let named = exports.iter().find(|exported| exported.name.as_bytes() == name);
        named
            .or(if name.is_empty() && exports.len() == 1 { exports.first() } else { None })
            .cloned()
    }
}
