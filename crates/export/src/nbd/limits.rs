//! Limits of an address.

use std::time::Duration;

/// Limits for the clients of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of clients at a time. Further clients wait until one disconnects.
    pub clients: usize,
    /// Time in which a client must choose its export.
    pub handshake: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { clients: 256, handshake: Duration::from_secs(10) }
    }
}
