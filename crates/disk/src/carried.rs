//! What a disk carries over to the next server in a hand-over: its statistics, so that counters do
//! not go back; the state of its share, so that a hand-over is no way past a limit; and what its
//! clients rely on, so that they do not get another disk.
//!
//! In: a disk after its drain. Out: the same figures at the next server, which adds to them. What
//! must hold: another process has written the state, so each number is bounded before it is used.

use std::time::Duration;

use blockyard_image::{FileId, Format, LeftImage};
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
    /// None: the server before did not say it, or no client is connected.
    pub shown: Option<Shown>,
}

/// What clients that stay connected rely on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Shown {
    /// The topmost image. None: it is no file of this host.
    file: Option<FileId>,
    format: String,
    read_only: bool,
}

impl Shown {
    /// `None`: the image is not open, because no ring runs.
    fn of(disk: &Disk) -> Option<Self> {
        if disk.is_inactive() {
            return None;
        }
        let source = disk.source();
        let (file, format) = match source.chain().map(|chain| chain.top()) {
            Some(top) => (top.file.id(), top.format),
            None => (source.file().and_then(|file| file.id()), Format::Raw),
        };
        Some(Shown { file, format: format.to_string(), read_only: disk.options().read_only })
    }

    fn difference(&self, later: &Shown) -> Option<Difference> {
        if self.file != later.file {
            return Some(Difference::File);
        }
        if self.format != later.format {
            let (before, now) = (self.format.clone(), later.format.clone());
            return Some(Difference::Format { before, now });
        }
        let what = if later.read_only { Difference::ReadOnly } else { Difference::Writable };
        (self.read_only != later.read_only).then_some(what)
    }
}

/// What clients that stay connected would not expect.
#[derive(Debug, thiserror::Error)]
pub enum Difference {
    #[error("its image is another file now")]
    File,
    #[error("its format was {before}, and is {now} now")]
    Format { before: String, now: String },
    #[error("it is read-only now")]
    ReadOnly,
    #[error("it is writable now")]
    Writable,
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
            shown: Shown::of(self),
        }
    }

    /// Returns why clients of the server before must not stay connected to this disk.
    pub fn differs_from(&self, carried: &Carried) -> Option<Difference> {
        carried.shown.as_ref()?.difference(&Shown::of(self)?)
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

#[cfg(test)]
mod tests {
    use std::io;

    use crate::{Disk, DiskOptions, Source};

    use super::*;

    /// The device may report their loss to the first durable write, and only to that.
    #[test]
    fn what_an_earlier_server_wrote_counts_as_not_synced() {
        let options = DiskOptions {
            name: "taken over".into(),
            serial: String::new(),
            read_only: false,
            cache: Default::default(),
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk = Disk::new(options, Source::Null { size: 1 << 20 });
        let lost = |disk: &Disk| disk.lost_others_with(&io::Error::other("lost"), disk.syncs());
        assert!(!lost(&disk));
        disk.continue_from(&Carried::default());
        assert!(lost(&disk));
        disk.begin_sync();
        assert!(lost(&disk), "the sync may not have reported it yet");
        disk.end_sync();
        assert!(!lost(&disk));
        // A write that began before a sync may have got the only report of a loss.
        let before = disk.syncs();
        disk.begin_sync();
        disk.end_sync();
        assert!(disk.lost_others_with(&io::Error::other("lost"), before));
    }
}
