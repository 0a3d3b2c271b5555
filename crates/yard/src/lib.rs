//! The yard: the set of disks that one process serves, as an object.
//!
//! ```text
//!   yard      the handle: add, remove, list, report, change, refresh, snapshot, commit, stream
//!   keeper    the thread that owns the table of disks; commands arrive by one channel
//!   pool      threads that carry out commands, a fixed number
//!   served    one disk with its exports, and what a command does with it
//!   settings  what a disk is: image, share, and the ways to it
//!   shares    which disks share a device or a group
//!   job       snapshot, commit and stream, which run for long
//! ```
//! In: calls of any thread that is no reactor. Out: disks that exports offer, and their figures as
//! structs. What must hold: a command takes effect whole, or leaves the disk as it was; commands
//! for one disk run in the order of their calls; a command that blocks (an image on a slow server)
//! holds up no command for another disk. Signals, the configuration file and toolstacks are clients
//! of the yard. It knows nothing of them.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod error;
mod job;
mod keeper;
mod pool;
mod served;
mod settings;
mod shares;
mod yard;

pub use error::YardError;
pub use job::{Job, JobKind, JobState};
pub use keeper::{DiskInfo, DiskState};
pub use served::{Change, Ended, Report, Resized};
pub use settings::{DiskSettings, Way, WayError};
pub use shares::{MeasuredDevice, Shares};
pub use yard::Yard;
