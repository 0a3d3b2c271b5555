//! Writing compressed clusters: byte by byte one after another, as QEMU packs them.
//!
//! What must hold: whoever packs has the image's clusters for itself (nobody overwrites what is
//! being packed); each host cluster counts the compressed clusters that have a part in it; an entry
//! changes when its data have been written. Clusters that share a sector are written one after the
//! other, for with O_DIRECT each write of it reads it first.

use std::io;
use std::sync::Mutex;

use blockyard_storage::Storage;

use blockyard_ring::semaphore::Semaphore;
use blockyard_storage::RangeLock;

use super::alloc::Run;
use super::bytes;
use super::entry::{Cluster, L2Entry};
use super::shared::lock;
use super::tables::Entry;
use super::view::Qcow2;

/// Bytes of host clusters that are taken at a time, so that what is packed lies together; two
/// clusters at least.
const ROOM: u64 = 256 << 10;
/// The largest unit in which O_DIRECT reads, changes and writes.
const BLOCK: u64 = 4096;

/// Where the next compressed cluster goes.
#[derive(Debug)]
pub(super) struct Packing {
    one_at_a_time: Semaphore,
    room: Mutex<ReservedBytes>,
    writing: RangeLock,
}

/// Bytes of the file that were taken, and not used yet.
#[derive(Clone, Copy, Debug, Default)]
struct ReservedBytes {
    next: u64,
    end: u64,
}

impl Default for Packing {
    fn default() -> Self {
        Packing {
            one_at_a_time: Semaphore::new(1),
            room: Mutex::default(),
            writing: RangeLock::default(),
        }
    }
}

impl<S: Storage> Qcow2<S> {
    /// Writes the guest cluster at `offset`, whose bytes [`super::pack`] has made `packed`. False,
    /// and nothing is done: it has something already, or there is no place that its entry could
    /// name.
    pub async fn write_compressed(&self, offset: u64, packed: &[u8]) -> io::Result<bool> {
        let shape = *self.shape();
        let cluster = shape.cluster(offset);
        if shape.layout.data_file {
            return Ok(false);
        }
        let hold = self.shared.held.hold(cluster..cluster + 1).await;
        let old = loop {
            match self.entry(cluster) {
                Some(entry) => break entry,
                None => self.load(offset).await?,
            }
        };
        if old != Entry::default() {
            return Ok(false);
        }
        self.own_table(shape.table(cluster)).await?;
        let host = self.room_for(packed.len() as u64).await?;
        let entry = L2Entry {
            cluster: Cluster::Compressed { host, len: packed.len() as u64 },
            copied: false,
        };
        let (word, bitmap) = entry.encode(shape.layout);
        let named = L2Entry::decode(word, bitmap, shape.layout).map(|e| e.cluster);
        // In a file that large, not every offset fits an entry. (What was taken is a leak; `check`
        // gives it back.)
        if !matches!(named, Ok(Cluster::Compressed { host: at, len }) if at == host && len >= packed.len() as u64)
        {
            return Ok(false);
        }
        {
            let end = (host + packed.len() as u64).next_multiple_of(BLOCK);
            let _alone = self.shared.packing.writing.hold(host - host % BLOCK..end).await;
            bytes::write(&self.file, host, packed).await?;
        }
        self.change(cluster, |_| Entry { word, bitmap }).await?;
        drop(hold);
        self.relieve().await?;
        Ok(true)
    }

    /// Takes `len` bytes of the file, and counts a reference to each cluster that they have a part
    /// in.
    async fn room_for(&self, len: u64) -> io::Result<u64> {
        let packing = &self.shared.packing;
        let bits = self.shape().layout.cluster_bits;
        let _permit = packing.one_at_a_time.acquire().await;
        loop {
            let room = *lock(&packing.room);
            if room.end - room.next < len {
                self.take_room(room).await?;
                continue;
            }
            // Each cluster was taken with a count of one, which is for the first in it.
            let shared = !room.next.is_multiple_of(self.shape().cluster_size());
            if shared && !self.retain(room.next >> bits).await? {
                lock(&packing.room).next = room.next.next_multiple_of(self.shape().cluster_size());
                continue;
            }
            lock(&packing.room).next = room.next + len;
            return Ok(room.next);
        }
    }

    /// Takes more clusters: behind those that are there, or all new ones.
    async fn take_room(&self, room: ReservedBytes) -> io::Result<()> {
        let bits = self.shape().layout.cluster_bits;
        let run = self.allocate((ROOM >> bits).max(2)).await?;
        let (start, end) = (run.start << bits, (run.start + run.count) << bits);
        if start == room.end {
            lock(&self.shared.packing.room).end = end;
            return Ok(());
        }
        self.end_packing();
        *lock(&self.shared.packing.room) = ReservedBytes { next: start, end };
        Ok(())
    }

    /// Gives back the clusters that were taken and have nothing.
    pub(super) fn end_packing(&self) {
        let bits = self.shape().layout.cluster_bits;
        let room = std::mem::take(&mut *lock(&self.shared.packing.room));
        let first = room.next.div_ceil(self.shape().cluster_size());
        let count = (room.end >> bits).saturating_sub(first);
        self.shared.alloc.put_back(Run { start: first, count, fresh: false });
    }
}

#[cfg(test)]
mod tests {
    use blockyard_storage::sim::{Sim, SimConfig, SimDisk, SimImage};

    use crate::qcow2::{CreateOptions, Header, Qcow2, Qcow2Options, create};
    use crate::{Alignment, Raw};

    /// As a conversion does it: no flush until the end.
    #[test]
    fn many_compressed_clusters_do_not_keep_their_tables_in_memory() {
        const CLUSTERS: u64 = 64 * 60;
        let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
        let most = Sim::new(1).block_on(async move {
            let file = Raw::on(disk, Alignment { memory_align: 1, offset_align: 1 });
            let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(CLUSTERS * 512) };
            create(&file, None, &options).await.unwrap();
            let header = Header::read(&file).await.unwrap();
            let options = Qcow2Options { l2_cache: Some(0), ..Qcow2Options::default() };
            let image = Qcow2::open(header, file, None, &options).await.unwrap();
            let mut most = 0;
            for cluster in 0..CLUSTERS {
                assert!(image.write_compressed(cluster * 512, &[1; 40]).await.unwrap());
                most = most.max(image.shared().cache_bytes().0);
            }
            most
        });
        let most = most.unwrap();
        assert!(most <= 20 * 512, "{most} bytes of L2 tables, and 8 tables of 512 are to be kept");
    }
}
