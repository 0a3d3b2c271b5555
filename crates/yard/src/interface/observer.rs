//! Events of the yard, for programs that follow them.
//!
//! In: commands and jobs. Out: calls of the yard's [`Observer`], if it has one. What must hold: the
//! events of one disk are in the order in which they happen: it is added first and removed last.

use std::sync::Weak;

use blockyard_disk::{Disk, DiskObserver};

use super::job::Job;

/// Capacity in bytes, before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    pub old: u64,
    pub new: u64,
}

/// What has happened in the yard.
#[derive(Clone)]
pub enum Event {
    /// The image is open, and the exports start. `ways`: their addresses.
    Added {
        name: String,
        disk: Weak<Disk>,
        size: u64,
        images: String,
        ways: Vec<String>,
    },
    /// The disk is closed. `error`: why an export could not start.
    Removed {
        disk: String,
        is_flushed: bool,
        error: Option<String>,
    },
    Resized {
        disk: String,
        size: Resized,
    },
    /// The image begins to grow.
    GrowthBegun {
        disk: String,
        size: u64,
    },
    /// The growth has ended. `error`: why it failed.
    GrowthEnded {
        disk: String,
        error: Option<String>,
    },
    JobBegun(Job),
    JobEnded(Job),
}

/// Follows the events of a yard and of its disks.
pub trait Observer: DiskObserver {
    /// Threads of the yard call this, and no reactor. The call may wait a moment.
    fn event(&self, event: Event);
}
