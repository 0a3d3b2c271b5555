//! Recovery from the death of a server, by the journal of its metadata.
//!
//! ```text
//!   replay    writes the journal's records into the image
//!   session   the mark in the image: which journal belongs to it
//! ```

mod replay;
pub mod session;
