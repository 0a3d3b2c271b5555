//! The yard: the set of disks that one process serves, as a library.
//!
//! ```text
//!   yard      the handle: add, remove, list, report, change, refresh, and jobs
//!   keeper    the thread that owns the table of disks, and the pools that run commands
//!   served    one disk with its exports, and what a command does with it
//!   sample    the figures of all disks and reactors at one moment
//!   settings  settings of a disk: image, share and exports
//!   shares    which disks share a device or a group
//!   observer  events, for programs that follow them
//!   job       snapshot, commit, stream and backup, which run for long; jobs: all of them
//!   obstacle  why a disk cannot be handed over
//!   openings  holds disks back that are being opened, during a hand-over
//!   context   what all commands use
//!   state     the state of a disk
//! ```
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
mod error;
mod exports;
#[cfg(test)]
mod fixture;
mod job;
mod jobs;
mod keeper;
mod observer;
mod obstacle;
mod openings;
mod sample;
mod served;
mod settings;
mod shares;
mod state;
mod yard;

pub use error::YardError;
pub use job::{Job, JobKind, JobState};
pub use keeper::DiskInfo;
pub use observer::{Event, Observer, Resized};
pub use obstacle::Obstacle;
pub use openings::HeldOpenings;
pub use sample::{DiskSample, ReactorSample, Sample, SampleError};
pub use served::{Change, Ended, HandedDisk, Report};
pub use settings::{Activation, DiskSettings, Way, WayError};
pub use shares::{MeasuredDevice, Shares};
pub use state::DiskState;
pub use yard::{Pending, Yard};
