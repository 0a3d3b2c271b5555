//! The processes around a server, and what one server passes to the next.
//!
//! ```text
//!   holder     a process that keeps descriptors for a server, and starts it again
//!   parcel     bytes and descriptors for the next server
//!   inherited  listening sockets passed at start (socket activation)
//!   witness    a process outside the sandbox      holders  processes that have locked a file
//!   user       the user that a server runs as     child    processes that signals do not end
//! ```

pub mod child;
pub mod holder;
pub mod holders;
pub mod inherited;
pub mod parcel;
pub mod user;
pub mod witness;
