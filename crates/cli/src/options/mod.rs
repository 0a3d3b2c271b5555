//! Options of the command line and keys of the configuration file: the same structs for both.
//!
//! ```text
//!   values ◄─ knobs, nbd, sandbox ◄─ xen ◄─ disk ◄─ serve
//! ```

pub mod api;
pub mod disk;
pub mod knobs;
pub mod nbd;
pub mod sandbox;
pub mod serve;
pub mod values;
pub mod xen;
