//! Exports: the protocols by which a disk is served (vhost-user, NBD, ublk, Xen blkif).
//!
//! An export parses and checks the messages of its protocol once, hands
//! [`blockyard_disk::Request`]s to the disk, and answers. Protocol types exist only in this crate.

// These macros panic if the stream cannot be written. `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod acceptor;
mod budget;
mod client;
pub mod connections;
pub mod custody;
mod descriptors;
mod ending;
mod export;
mod fingerprint;
pub mod keeper;
mod lanes;
mod listener;
mod log;
pub mod nbd;
mod packing;
mod peer;
mod placement;
pub mod policy;
mod reactors;
#[cfg(test)]
mod simulated;
mod start;
pub mod ublk;
pub mod vhost_user;
mod watchdog;
pub mod xen;

pub use client::Client;
pub use ending::{close, leave, sync, sync_always};
pub use export::{Export, Handed, LongestHold, Obstacle, STOP_TIME};
pub use listener::{Listener, SocketError};
pub use peer::Peer;
pub use policy::PolicyFigures;
pub use policy::polling::PollMode;
pub use reactors::Reactors;
pub use watchdog::Alive;
