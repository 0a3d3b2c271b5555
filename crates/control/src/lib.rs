//! The API of a server: HTTP and JSON on a Unix socket, under `/v1`, and a client for it.
//!
//! ```text
//!   server     the thread that accepts connections, and the bounds of a connection
//!   client     one call to a server
//!   calls/     the paths of the calls, with their OpenAPI description
//!   metrics/   figures as text for Prometheus, and what the metrics' address offers
//!   operator   the trait that a server implements: one function for each call
//!   events/    the latest events of a server, and their stream
//!   figures    the figures of a server, for programs that collect them
//!   json/      what calls receive and return, and errors as problem documents (RFC 9457)
//!   bounds/    what a client may do and occupy: access, connections, times, log lines
//! ```
//! A line uses only lines below it. `server` does not use `client`.
//!
//! In: connections of processes of this host. Out: calls of an [`Operator`]. Metrics are also on a
//! loopback address, if the server has one.
//!
//! What must hold: one thread reads and writes all connections, and a bounded number of threads
//! runs the calls, so that no client delays a request of a disk. A client that sends or reads
//! nothing is disconnected. Only root, the server's own user and members of a configured group may
//! call. The metrics' address changes nothing.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bounds;
mod calls;
pub mod client;
pub mod events;
pub mod figures;
mod json;
pub mod metrics;
mod operator;
mod server;

pub use bounds::access::{Access, Peer};
pub use bounds::limits::ClientLimits;
pub use calls::routes::description;
pub use json::body::invalid;
pub use json::keys::Object;
pub use json::problem::{Answer, Kind, Problem};
pub use json::types;
pub use json::wrong_type::wrong_type;
pub use operator::{Departure, Operator};
pub use server::{Acceptance, Api, Listeners};
