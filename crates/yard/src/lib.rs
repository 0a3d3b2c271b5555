//! The yard: the set of disks that one process serves, as a library.
//!
//! ```text
//!   yard        the handle: add, remove, list, report, change, refresh, and jobs
//!   keeper      the thread that owns the table of disks, and the pools that run commands
//!   served      one disk with its exports, and what a command does with it
//!   context     what all commands use
//!   jobs        the jobs of a yard, and the threads that run them
//!   shares      which disks share a device or a group
//!   openings    holds disks back that are being opened, during a hand-over
//!   exports     the exports of one disk
//!   interface/  what callers give and get: settings, states, events, errors
//! ```
//! A line uses only lines below it.
//!
//! In: calls from any thread that is no reactor. Out: disks that exports offer, and their
//! statistics.
//!
//! What must hold: a command takes effect as a whole, or leaves the disk as it was. Commands for
//! one disk run in the order of their calls. A command that blocks (an image on a slow server)
//! delays no command for another disk: it uses one thread, and a pool gets more threads while
//! commands hang. Signals, the configuration file and toolstacks are clients of the
//! yard. The yard does not depend on them.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod context;
mod exports;
#[cfg(test)]
mod fixture;
mod interface;
mod jobs;
mod keeper;
mod openings;
mod served;
mod shares;
mod yard;

pub use interface::error::YardError;
pub use interface::job::{Job, JobKind, JobState};
pub use interface::observer::{Event, Observer, Resized};
pub use interface::obstacle::Obstacle;
pub use interface::sample::{DiskSample, ReactorSample, Sample, SampleError};
pub use interface::settings::{Activation, DiskSettings, Way, WayError};
pub use interface::state::DiskState;
pub use keeper::DiskInfo;
pub use openings::HeldOpenings;
pub use served::{Change, Ended, HandedDisk, Report};
pub use shares::{MeasuredDevice, Shares};
pub use yard::{Pending, Yard};
