//! What calls receive and return, as JSON.
//!
//! ```text
//!   types       what calls receive and return
//!   body        reads a JSON body within bounds
//!   keys        the keys of a disk in a body
//!   problem     errors as problem documents (RFC 9457)
//!   wrong_type  describes values of a wrong type without Rust's names of types
//! ```

pub(crate) mod body;
pub(crate) mod keys;
pub(crate) mod problem;
pub mod types;
pub(crate) mod wrong_type;
