//! What the command line and the configuration file say: the same structs for both.
//!
//! ```text
//!   values ◄─ knobs, nbd ◄─ xen ◄─ disk ◄─ serve
//! ```

pub mod disk;
pub mod knobs;
pub mod nbd;
pub mod serve;
pub mod values;
pub mod xen;
