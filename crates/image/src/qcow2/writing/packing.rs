//! Writes compressed clusters one after another without gaps, as QEMU packs them.
//!
//! Invariants: the writer has the image exclusively, so nothing overwrites what is being packed. A
//! host cluster's refcount is the number of compressed clusters that overlap it. An entry changes
//! after its data have been written. Compressed clusters that share a block are written one after
//! the other, because with O_DIRECT each write is a read-modify-write of the block.

use std::io;

use crate::qcow2::encoding::bytes;
use crate::qcow2::encoding::entry::{Cluster, L2Entry};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::alloc::Run;
use crate::qcow2::state::packing::ReservedBytes;
use crate::qcow2::state::shared::lock;
use crate::qcow2::state::tables::Entry;

/// Number of bytes of host clusters that are allocated at a time, but at least two clusters. So
/// compressed clusters lie next to each other.
const ROOM: u64 = 256 << 10;
/// Largest O_DIRECT block, in bytes.
const BLOCK: u64 = 4096;

impl Qcow2 {
    /// Writes the guest cluster at `offset`, compressed to `packed` (`encoding::compression`).
    /// Returns false, and changes nothing, if the guest cluster has contents already or if no L2
    /// entry can store the host offset.
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
        // In a very large file not every offset fits a descriptor. The allocated bytes are a leak,
        // which `check` repairs.
        let fits = |at: u64, len: u64| at == host && len >= packed.len() as u64;
        if !matches!(named, Ok(Cluster::Compressed { host: at, len }) if fits(at, len)) {
            return Ok(false);
        }
        {
            let end = (host + packed.len() as u64).next_multiple_of(BLOCK);
            let _alone = self.shared.packing.writing.hold(host - host % BLOCK..end).await;
            bytes::write(&self.file, host, packed).await?;
        }
        self.change(cluster, |_| Entry { word, bitmap }).await?;
        drop(hold);
        self.relieve_metadata().await?;
        Ok(true)
    }

    /// Takes `len` bytes of the file, and adds a reference to each cluster that they overlap.
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
            // Each cluster was allocated with a refcount of 1, which stands for the first
            // compressed cluster in it.
            let shared = !room.next.is_multiple_of(self.shape().cluster_size());
            if shared && !self.retain(room.next >> bits).await? {
                lock(&packing.room).next = room.next.next_multiple_of(self.shape().cluster_size());
                continue;
            }
            lock(&packing.room).next = room.next + len;
            return Ok(room.next);
        }
    }

    /// Allocates more clusters: directly behind the current ones if possible.
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

    /// Releases clusters that were allocated and hold nothing.
    pub(super) fn end_packing(&self) {
        let bits = self.shape().layout.cluster_bits;
        let room = std::mem::take(&mut *lock(&self.shared.packing.room));
        let first = room.next.div_ceil(self.shape().cluster_size());
        let count = (room.end >> bits).saturating_sub(first);
        self.shared.alloc.put_back(Run { start: first, count, fresh: false, has_space: false });
    }
}

#[cfg(test)]
mod tests {
    use blockyard_storage::sim::{Sim, SimConfig, SimDisk, SimImage};

    use crate::qcow2::{CreateOptions, Header, Qcow2, Qcow2Options, create};
    use crate::{Alignment, Raw};

    /// Writes like a conversion: no flush until the end.
    #[test]
    fn the_cache_stays_bounded_while_many_compressed_clusters_are_written() {
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
        assert!(most <= 20 * 512, "{most} bytes of L2 tables, where the limit is 8 tables of 512");
    }
}
