//! What a job on a disk has to know of the requests that change the disk, or to do before them.

use std::sync::Arc;

use crate::copy_map::CopyMap;
use crate::dirty::{Changing, DirtyMap};
use crate::request::Op;

/// The map of the job that runs, on all reactors that have the disk open.
#[derive(Clone, Debug)]
pub enum Tracker {
    /// A commit records the ranges that change.
    Dirty(Arc<DirtyMap>),
    /// A backup copies each range before it changes.
    Copy(Arc<CopyMap>),
}

impl Tracker {
    /// Returns the map for which a request must wait before it begins. A discard does not wait,
    /// because it may have no effect: see [`Tracker::ignores`].
    #[cold]
    pub(crate) fn must_wait(&self, op: Op, offset: u64, len: u64) -> Option<&Arc<CopyMap>> {
        match (self, op) {
            (Tracker::Dirty(_), _) | (_, Op::Read | Op::Flush | Op::Discard) => None,
            (Tracker::Copy(map), _) => Some(map).filter(|map| !map.allows(offset, len)),
        }
    }

    /// Returns whether a request must have no effect: a discard of parts that a backup has not
    /// copied yet. A discard is a hint, so it succeeds. It may cover much of the disk, so it must
    /// not wait for the copies.
    pub(crate) fn ignores(&self, op: Op, offset: u64, len: u64) -> bool {
        match (self, op) {
            (Tracker::Copy(map), Op::Discard) => !map.allows(offset, len),
            _ => false,
        }
    }

    /// Notes that a request changes the range until the returned value is dropped.
    pub(crate) fn changing(&self, offset: u64, len: u64) -> Option<Changing<'_>> {
        match self {
            Tracker::Dirty(map) => Some(map.changing(offset, len)),
            Tracker::Copy(map) => {
                debug_assert!(map.allows(offset, len), "a change before the copy: {offset}+{len}");
                None
            }
        }
    }
}
