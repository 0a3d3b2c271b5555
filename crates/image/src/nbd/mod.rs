//! Images that an NBD server serves.
//!
//! ```text
//!   uri        where an export is                      wire       the protocol's numbers and headers
//!   dial       a socket to the server, in time         negotiate  what server and client agree on
//!   client     requests of one reactor, reconnecting   receive    replies, checked and put where they belong
//!   watch      a server that is silent, or gone        hub        one connection for several reactors
//!   remote     one export: facts, state, connections
//!   storage    `Storage` over all of it
//!   link, tls  a connection's bytes, plain or by TLS (the server's, too)
//! ```
//! In: a URI, and reads, writes, zeroes, trims and flushes. Out: the same on the server. What must hold: nothing that the
//! server says is believed before it is checked; a server that lies, drips or falls silent costs bounded memory and time;
//! what it acknowledged and may have lost is never called durable.

mod client;
mod dial;
mod hub;
pub mod link;
mod negotiate;
mod receive;
mod remote;
mod slots;
mod storage;
pub mod tls;
pub mod uri;
mod watch;
pub mod wire;

pub use link::Link;
pub use remote::{Options, Remote};
pub use storage::Nbd;
pub use tls::ServerTls;
pub use uri::Uri;
