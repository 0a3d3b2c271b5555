//! What the accepting thread of a server, the reactors and the program share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blockyard_nbd::ServerTls;

use super::exported::{Exported, Peer};
use crate::log::Log;

/// What clients may do to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Clients at a time; others wait until one goes.
    pub clients: usize,
    /// The time in which a client must have chosen its export.
    pub handshake: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { clients: 256, handshake: Duration::from_secs(10) }
    }
}

/// How a server takes clients up.
#[derive(Debug, Default)]
pub struct Settings {
    pub limits: Limits,
    pub tls: Option<ServerTls>,
}

/// What the accepting thread, the reactors and the program share.
pub struct Shared {
    pub exports: Mutex<Vec<Arc<Exported>>>,
    /// For clients that connect from now on. A connected client keeps those under which it came.
    pub settings: Mutex<Arc<Settings>>,
    pub log: Log,
    /// What it is called in the log.
    pub address: String,
    pub clients: AtomicUsize,
    pub stop: AtomicBool,
    pub wake: OwnedFd,
}

impl Shared {
    pub fn exports(&self) -> Vec<Arc<Exported>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn settings(&self) -> Arc<Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Those that a client may see.
    pub fn visible(&self, peer: &Peer) -> Vec<Arc<Exported>> {
        let mut exports = self.exports();
        exports.retain(|exported| exported.is_for(peer));
        exports
    }

    /// Whether there are exports for clients of certain names only.
    pub fn has_exports_under_tls(&self) -> bool {
        let is_open = |exported: &Arc<Exported>| exported.is_for(&Peer::default());
        !self.exports().iter().all(is_open)
    }

    /// The export of that name. The empty name means the only one. What a client may not see is not
    /// there.
    pub fn find(&self, name: &[u8], peer: &Peer) -> Option<Arc<Exported>> {
        let exports = self.visible(peer);
        let named = exports.iter().find(|exported| exported.name.as_bytes() == name);
        named
            .or(if name.is_empty() && exports.len() == 1 { exports.first() } else { None })
            .cloned()
    }

    /// Wakes the accepting thread.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}
