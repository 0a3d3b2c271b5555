//! The API of a server: HTTP and JSON on a Unix socket, under `/v1`, and a client for it.
//!
//! ```text
//!   operator   the trait that a server implements: one function for each call
//!   types      what calls receive and return, as JSON
//!   problem    errors as problem documents (RFC 9457)
//!   routes     paths, parameters and bodies of the calls; their OpenAPI description
//!   body       reads a JSON body within bounds
//!   server     the thread that accepts connections, and the bounds of a connection
//!   access     who may connect
//!   client     one call to a server
//! ```
//!
//! In: connections of processes of this host. Out: calls of an [`Operator`].
//!
//! What must hold: one thread reads and writes all connections, and a bounded number of threads
//! runs the calls, so that no client delays a request of a disk. A client that sends or reads
//! nothing is disconnected. Only root, the server's own user and members of a configured group may
//! call.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod access;
mod body;
pub mod client;
mod operator;
mod problem;
mod routes;
mod server;
pub mod types;

pub use access::{Access, Peer};
pub use body::invalid;
pub use operator::{Answer, Object, Operator};
pub use problem::{Kind, Problem};
pub use routes::description;
pub use server::Api;
