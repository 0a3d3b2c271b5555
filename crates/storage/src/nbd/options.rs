//! Timeouts of a remote image.

use std::time::Duration;

/// Timeouts of a remote image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long requests wait for a lost connection.
    pub reconnect: Duration,
    /// How long a server may take to answer or to accept a connection, before the connection counts
    /// as lost.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options { reconnect: Duration::from_secs(30), timeout: Duration::from_secs(30) }
    }
}
