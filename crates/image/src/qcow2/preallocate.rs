//! Clusters taken ahead for a range of the disk: entries and refcounts, without a write of data.
//!
//! What must hold: what was read as zeroes is read as zeroes afterwards, also after a power cut; clusters that the range has
//! already stay.

use std::io;
use std::ops::Range;

use blockyard_ring::Storage;

use super::alloc::Run;
use super::entry::{Bitmap, COPIED, Cluster, L2Entry, ZERO};
use super::tables::Entry;
use super::view::Qcow2;

impl<S: Storage> Qcow2<S> {
    /// Gives clusters to a range that reads as zeroes. `keep_space`: the host takes space for them, too. Durable after a
    /// flush. Not for images with an external data file.
    pub async fn preallocate(&self, range: Range<u64>, keep_space: bool) -> io::Result<()> {
        let shape = *self.shape();
        let (mut cluster, end) = (shape.cluster(range.start), range.end.div_ceil(shape.cluster_size()));
        while cluster < end {
            let stop = end.min((shape.table(cluster) + 1) * shape.table_entries);
            let hold = self.shared.held.hold(cluster..stop).await;
            self.own_table(shape.table(cluster)).await?;
            while cluster < stop {
                let mut wanted = 0;
                while cluster + wanted < stop && self.lacks_cluster(cluster + wanted).await? {
                    wanted += 1;
                }
                cluster += if wanted == 0 { 1 } else { self.preallocate_run(cluster, wanted, keep_space).await? };
            }
            drop(hold);
            self.relieve().await?;
        }
        Ok(())
    }

    async fn lacks_cluster(&self, cluster: u64) -> io::Result<bool> {
        let Entry { word, bitmap } = self.current_entry(cluster).await?;
        let entry = L2Entry::decode(word, bitmap, self.shape().layout).unwrap_or(L2Entry::UNALLOCATED);
        Ok(!matches!(entry.cluster, Cluster::Compressed { .. }) && entry.cluster.host().is_none())
    }

    /// Up to `wanted` clusters from `first` on; gives how many.
    async fn preallocate_run(&self, first: u64, wanted: u64, keep_space: bool) -> io::Result<u64> {
        let layout = self.shape().layout;
        let run = self.allocate(wanted).await?;
        let (host, len) = (run.start << layout.cluster_bits, run.count << layout.cluster_bits);
        let zeroed = match (run.fresh, keep_space) {
            (true, true) => Ok(()),
            // A hint: what fails costs space only.
            (true, false) => self.file().discard(host, len).await.or(Ok(())),
            (false, _) => self.file().write_zeroes(host, len, !keep_space).await,
        };
        if let Err(e) = zeroed {
            self.shared.alloc.put_back(Run { fresh: false, ..run });
            return Err(e);
        }
        for number in 0..run.count {
            let word = ((run.start + number) << layout.cluster_bits) | COPIED;
            let entry = |old: Entry| match layout.extended_l2 {
                true => Entry { word, bitmap: Bitmap::ALL_ZERO.0 },
                false => Entry { word: word | old.word & ZERO, bitmap: 0 },
            };
            self.change(first + number, entry).await?;
        }
        Ok(run.count)
    }
}
