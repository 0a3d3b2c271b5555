//! What callers of the yard give and get.
//!
//! ```text
//!   settings  settings of a disk: image, share and exports
//!   state     the state of a disk
//!   job       snapshot, commit, stream and backup, which run for long
//!   observer  events, for programs that follow them
//!   sample    the figures of all disks and reactors at one moment
//!   obstacle  why a disk cannot be handed over
//!   error     why a command failed
//! ```

pub mod error;
pub mod job;
pub mod observer;
pub mod obstacle;
pub mod sample;
pub mod settings;
pub mod state;
