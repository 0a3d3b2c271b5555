//! What a disk carries over to the next server in a hand-over: its statistics, so that counters do
//! not go back, and the state of its share, so that a hand-over is no way past a limit.
//!
//! In: a disk after its drain. Out: the same figures at the next server, which adds to them. What
//! must hold: another process has written the state, so each number is bounded before it is used.

use std::time::Duration;

use blockyard_image::LeftImage;
use blockyard_sched::ShareState;
use serde::{Deserialize, Serialize};

use crate::disk::Disk;
use crate::flush::FlushFigures;
use crate::statistics::{Statistics, StatisticsState};
use crate::throttle::sched_time;

/// Largest count that is carried over. So many can be added to it that no sum overflows.
pub(crate) const MAX_COUNT: u64 = 1 << 60;

/// What a disk carries over. A field that is missing is that of a new disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Carried {
    pub statistics: StatisticsState,
    /// Number of flushes, and of the syncs that they shared.
    pub flushes: u64,
    pub syncs: u64,
    /// Longest time that a quiesce has held requests back, in microseconds.
    pub held_back_us: u64,
    pub share: ShareState,
    /// The topmost image's file as it was left. None: the next server checks the image.
    pub left: Option<LeftImage>,
}

impl Disk {
    /// Returns what the next server needs. `statistics`: the sum of all reactors. The disk is
    /// drained and must not be served any more, because its tokens move.
    pub fn hand_over(&self, statistics: &Statistics) -> Carried {
        let FlushFigures { requested, syncs } = self.flushes();
        Carried {
            statistics: statistics.into(),
            flushes: requested,
            syncs,
            held_back_us: self.longest_held_back().as_micros() as u64,
            share: self.share().hand_over(sched_time()),
            left: self.source().chain().and_then(|chain| chain.top().left()),
        }
    }

    /// Continues from the figures of another server. Call it before the first export starts.
    pub fn continue_from(&self, carried: &Carried) {
        // The earlier server need not have synced what it had written.
        self.note_unsynced();
        self.share().continue_from(sched_time(), &carried.share);
        self.flushes.continue_from(carried.flushes.min(MAX_COUNT), carried.syncs.min(MAX_COUNT));
        self.note_held_back(Duration::from_micros(carried.held_back_us.min(MAX_COUNT)));
        let _ = self.before.set((&carried.statistics).into());
    }

    /// Returns what earlier servers have counted.
    pub fn counted_before(&self) -> Option<&Statistics> {
        self.before.get()
    }
}
