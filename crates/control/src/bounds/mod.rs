//! What a client may do and occupy.
//!
//! ```text
//!   access       which peers may connect
//!   connections  the connections of a listener, and which of them makes room for another one
//!   limits       times that bound what a client occupies
//!   log          lines about calls and connections, within bounds
//! ```

pub(crate) mod access;
pub(crate) mod connections;
pub(crate) mod limits;
pub(crate) mod log;
