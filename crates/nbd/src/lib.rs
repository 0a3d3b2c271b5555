//! The NBD protocol, for the server (`export`), the client of images (`storage`) and the client of
//! the benchmark (`bench`).
//!
//! ```text
//!   wire       numbers and headers                     uri        where an export is
//!   error      errors of peers and URIs
//!   negotiate  a client's side of the option phase     link, tls  a connection, plain or by TLS
//! ```
//! Source: the NBD project's proto.md and uri.md. What must hold: each value from the
//! peer is checked before its use.

pub mod error;
pub mod link;
pub mod negotiate;
pub mod tls;
pub mod uri;
pub mod wire;

pub use error::{NbdError, NbdErrorKind};
pub use link::Link;
pub use tls::ServerTls;
pub use uri::Uri;
