//! Preallocates clusters for a range of the disk: entries and refcounts, without writing data.
//!
//! Invariant: what reads as zeroes reads as zeroes afterwards, also after a power cut. Clusters
//! that are allocated already stay.

use std::io;
use std::ops::Range;

use crate::qcow2::encoding::entry::{COPIED, Cluster, L2Entry, SubclusterBitmap, ZERO};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::alloc::Run;
use crate::qcow2::state::tables::Entry;

impl Qcow2 {
    /// Allocates clusters for a range that reads as zeroes. With `keep_space` the host allocates
    /// their space too. Durable after a flush. Not for images with an external data file.
    pub async fn preallocate(&self, range: Range<u64>, keep_space: bool) -> io::Result<()> {
        let shape = *self.shape();
        let (mut cluster, end) =
            (shape.cluster(range.start), range.end.div_ceil(shape.cluster_size()));
        while cluster < end {
            let stop = end.min((shape.table(cluster) + 1) * shape.table_entries);
            let hold = self.shared.held.hold(cluster..stop).await;
            // Number of clusters that are left to allocate, plus the number of their L2 tables.
            let left =
                |cluster: u64| (end - cluster) + (end - cluster).div_ceil(shape.table_entries);
            if !keep_space {
                self.reserve_ahead(left(cluster)).await?;
            }
            self.own_table(shape.table(cluster)).await?;
            while cluster < stop {
                let (lacking, count) = self.lacking(cluster, stop - cluster).await?;
                if lacking && !keep_space {
                    self.reserve_ahead(left(cluster)).await?;
                }
                cluster += if lacking {
                    self.preallocate_run(cluster, count, keep_space).await?
                } else {
                    count
                };
            }
            drop(hold);
            self.relieve_metadata().await?;
        }
        Ok(())
    }

    /// Returns whether the guest cluster `first` has no host cluster, and for how many clusters
    /// from there on that holds, up to `most`.
    async fn lacking(&self, first: u64, most: u64) -> io::Result<(bool, u64)> {
        let lacks = |Entry { word, bitmap }: Entry| {
            let entry =
                L2Entry::cached(word, bitmap, self.shape().layout).unwrap_or(L2Entry::UNALLOCATED);
            !matches!(entry.cluster, Cluster::Compressed { .. }) && entry.cluster.host().is_none()
        };
        let lacking = lacks(self.current_entry(first).await?);
        let mut count = 1;
        while count < most && lacks(self.current_entry(first + count).await?) == lacking {
            count += 1;
        }
        Ok((lacking, count))
    }

    /// Preallocates up to `wanted` clusters from `first` on; returns how many.
    async fn preallocate_run(&self, first: u64, wanted: u64, keep_space: bool) -> io::Result<u64> {
        let layout = self.shape().layout;
        let run = self.allocate(wanted).await?;
        let (host, len) = (run.start << layout.cluster_bits, run.count << layout.cluster_bits);
        let zeroed = match (run.fresh, keep_space) {
            (true, true) => Ok(()),
            // The discard is a hint: a failure costs only space.
            (true, false) => self.file().discard(host, len).await.or(Ok(())),
            (false, _) => self.file().write_zeroes(host, len, !keep_space).await,
        };
        if let Err(e) = zeroed {
            self.shared.alloc.put_back(Run { fresh: false, ..run });
            return Err(e);
        }
        let entry = |number: u64, old: Entry| {
            let word = ((run.start + number) << layout.cluster_bits) | COPIED;
            match layout.extended_l2 {
                true => Entry { word, bitmap: SubclusterBitmap::ALL_ZERO.0 },
                false => Entry { word: word | old.word & ZERO, bitmap: 0 },
            }
        };
        self.change_run(first, run.count, entry).await?;
        Ok(run.count)
    }
}
