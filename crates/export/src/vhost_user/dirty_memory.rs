//! What a session has of a live migration. `migration.rs` handles its messages.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blockyard_ring::DirtyLog;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

/// The front end stops a ring without waiting for all requests by a message of its own
/// (VHOST_USER_PROTOCOL_F_GET_VRING_BASE_SKIP_DRAIN, which the `vhost` crate does not know).
pub const SKIP_DRAIN: VhostUserProtocolFeatures =
    VhostUserProtocolFeatures::from_bits_retain(1 << 23);

/// Protocol features of a migration.
pub const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::LOG_SHMFD
    .union(VhostUserProtocolFeatures::DEVICE_STATE)
    .union(VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT)
    .union(SKIP_DRAIN);

/// The mapped log, and the transfer of the device's state.
#[derive(Default)]
pub struct DirtyMemory {
    pub log: Option<Arc<DirtyLog>>,
    /// A queue wrote something that no log has a bit for.
    pub missed: Arc<AtomicBool>,
    /// The pipe from which the device's state must be read.
    pub state: Option<OwnedFd>,
}
