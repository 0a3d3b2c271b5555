//! Why a disk was not quiesced.

use std::io;
use std::time::Duration;

/// Longest time that a quiesce waits for the requests in flight. New requests are held back during
/// this time.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Why a disk was not quiesced, or its image not exchanged.
#[derive(Debug, thiserror::Error)]
pub enum QuiesceError {
    #[error("requests in flight have not ended within {} s", PATIENCE.as_secs())]
    Patience,
    #[error("a reactor cannot open the image")]
    Reactor(#[source] io::Error),
    #[error("cannot create a ring for the quiesce")]
    Ring(#[source] io::Error),
}
