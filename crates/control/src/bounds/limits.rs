//! Times that bound what a client occupies.

use std::time::Duration;

/// How long a client may take, and how long it waits for other clients.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// Time to send the header of the first or next request.
    pub header: Duration,
    /// Time to send the body of a request.
    pub body: Duration,
    /// Time in which a client may read nothing of an answer.
    pub stall: Duration,
    /// Time to read a text of metrics or figures. Prometheus waits as long by default.
    pub text: Duration,
    /// Longest wait of a client for the texts of others.
    pub wait: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        let time = Duration::from_secs(10);
        ClientLimits { header: time, body: time, stall: time, text: time, wait: time }
    }
}
