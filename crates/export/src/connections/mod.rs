//! What every export over stream sockets needs: NBD, and protocols with a socket for each disk.
//!
//! ```text
//!   listener ─► Accepting: limit, count ─► reactor ─► Registry ─► protocol ─► request ─► disk
//!                  ▲                                     │
//!                  └── the socket is closed ◄── ends: the client, an operator, the export
//! ```
//! [`OneDisk`] puts these parts together for a [`Protocol`] that has a socket for each disk. NBD,
//! where several disks share a socket and clients choose one later, uses the parts themselves.
//!
//! What must hold: the number of clients at a socket is bounded. The end of an export waits for the
//! requests in flight, but not for the clients.

mod accepting;
mod one_disk;
mod registry;
mod request;

pub(crate) use accepting::{Accepted, Accepting};
pub use one_disk::{Connection, OneDisk, Protocol};
pub(crate) use registry::{Member, clients, disconnect, end, enter, living, of_disk};
pub(crate) use request::{flush_last, serve_one};

use std::os::fd::AsFd;

/// Prepares a client's socket. Its requests and answers are short, and answers must not wait.
pub(crate) fn prepare(socket: impl AsFd) {
    let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
    // If the client's machine is gone, keepalive ends the connection after some time.
    let _ = rustix::net::sockopt::set_socket_keepalive(&socket, true);
}

#[cfg(test)]
mod tests;
