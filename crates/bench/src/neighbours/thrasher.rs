//! The disks that take all of the device that they get.

use clap::ValueEnum;

use super::scene::{Disk, load};
use crate::client::LoadOptions;
use crate::client::workload::Pattern;

/// The load of a thrasher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ThrasherKind {
    /// Random reads of 4 KiB, depth 256 on each of 4 queues
    Reads,
    /// Random writes of 4 KiB, depth 256 on each of 4 queues
    Writes,
    /// Random reads and writes of 4 KiB, depth 256 on each of 4 queues
    #[default]
    Mixed,
    /// Random reads and writes of 1 MiB, depth 32
    Large,
    /// Random writes of 4 KiB, each followed by a flush, depth 64
    Flushes,
    /// Random discards of 64 KiB, depth 64
    Discards,
    /// Random reads and writes of 4 KiB, depth 256 on one queue
    OneQueue,
    /// Four disks, each with random reads and writes of 4 KiB, depth 64 on one queue
    Several,
}

/// Number of disks of [`ThrasherKind::Several`].
const SEVERAL: usize = 4;

impl ThrasherKind {
    /// Returns the thrashing disks.
    pub fn disks(self) -> Vec<Disk> {
        let count = if self == ThrasherKind::Several { SEVERAL } else { 1 };
        let name = |n: usize| match count {
            1 => "thrasher".to_string(),
            _ => format!("thrasher{}", n + 1),
        };
        (0..count).map(|n| Disk::new(&name(n), self.load()).beside()).collect()
    }

    /// Returns the load of each thrashing disk.
    pub fn load(self) -> LoadOptions {
        let on_four = |rw| LoadOptions { queues: 4, ..load(rw, 4096, 256) };
        match self {
            ThrasherKind::Reads => on_four(Pattern::Randread),
            ThrasherKind::Writes => on_four(Pattern::Randwrite),
            ThrasherKind::Mixed => on_four(Pattern::Randrw),
            ThrasherKind::Large => load(Pattern::Randrw, 1 << 20, 32),
            ThrasherKind::Flushes => {
                LoadOptions { flush_every: 1, ..load(Pattern::Randwrite, 4096, 64) }
            }
            ThrasherKind::Discards => load(Pattern::Randtrim, 64 << 10, 64),
            ThrasherKind::OneQueue => load(Pattern::Randrw, 4096, 256),
            ThrasherKind::Several => load(Pattern::Randrw, 4096, 64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_load_and_disks_with_different_names() {
        for kind in ThrasherKind::value_variants() {
            let disks = kind.disks();
            let count = if *kind == ThrasherKind::Several { 4 } else { 1 };
            assert_eq!(disks.len(), count, "{kind:?}");
            assert!(disks.iter().all(|disk| disk.beside), "{kind:?}");
            let mut names: Vec<_> = disks.iter().map(|disk| &disk.name).collect();
            names.dedup();
            assert_eq!(names.len(), count, "{kind:?}");
        }
        let form = |kind: ThrasherKind| {
            let load = kind.load();
            (load.rw, load.bs, load.depth, load.queues, load.flush_every)
        };
        assert_eq!(form(ThrasherKind::default()), (Pattern::Randrw, 4096, 256, 4, 0));
        assert_eq!(form(ThrasherKind::Flushes), (Pattern::Randwrite, 4096, 64, 1, 1));
        assert_eq!(form(ThrasherKind::Discards), (Pattern::Randtrim, 65536, 64, 1, 0));
    }
}
