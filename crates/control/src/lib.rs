//! The API of a server: HTTP and JSON on a Unix socket, under `/v1`, and a client for it.
//!
//! ```text
//!   operator   the trait that a server implements: one function for each call
//!   types      what calls receive and return, as JSON
//!   problem    errors as problem documents (RFC 9457)
//!   routes     paths, parameters and bodies of the calls; their OpenAPI description
//!   events/    the latest events of a server, and their stream
//!   figures    the figures of a server, for programs that collect them
//!   metrics/   figures as metrics in Prometheus' text format
//!   scrape     sends figures and metrics within bounds
//!   page       what the metrics' address offers
//!   keys       the keys of a disk in a body
//!   body       reads a JSON body within bounds
//!   wrong_type describes values of a wrong type without Rust's names of types
//!   limits     times that bound what a client occupies
//!   log        lines about calls and connections, within bounds
//!   server     the thread that accepts connections, and the bounds of a connection
//!   connections  the connections of a listener, and which of them makes room for another one
//!   access     who may connect
//!   client     one call to a server
//! ```
//!
//! In: connections of processes of this host. Out: calls of an [`Operator`]. Metrics are also on a
//! loopback address, if the server has one.
//!
//! What must hold: one thread reads and writes all connections, and a bounded number of threads
//! runs the calls, so that no client delays a request of a disk. A client that sends or reads
//! nothing is disconnected. Only root, the server's own user and members of a configured group may
//! call. The metrics' address changes nothing.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod access;
mod body;
pub mod client;
mod connections;
mod description;
pub mod events;
pub mod figures;
mod keys;
mod limits;
mod log;
pub mod metrics;
mod operator;
mod page;
mod problem;
mod query;
mod routes;
mod scrape;
mod server;
pub mod types;
mod wrong_type;

pub use access::{Access, Peer};
pub use body::invalid;
pub use keys::Object;
pub use limits::ClientLimits;
pub use operator::{Answer, Departure, Operator};
pub use problem::{Kind, Problem};
pub use routes::description;
pub use server::{Acceptance, Api, Listeners};
pub use wrong_type::wrong_type;
