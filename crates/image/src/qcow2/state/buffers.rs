//! Bounds the memory of bounce buffers for each image, independent of the number of requests and of
//! the cluster size.
//!
//! Invariants, which exclude deadlocks: a request that has a buffer needs no second buffer of the
//! same kind to finish, and no buffer of a kind that [`Buffers`] lists earlier. Such a request
//! already holds the guest clusters that it needs, and waits for no others. Reserving clusters and
//! writing back metadata need no buffers. Backing images have their own buffers.

use blockyard_ring::semaphore::Semaphore;

/// Maximum size in bytes of the buffers for copy-on-write, and of those of each other kind.
/// Copy-on-write of partial clusters needs most: the limit admits a thousand clusters of 64 KiB.
const BESIDE: u64 = 64 << 20;
const OTHERS: u64 = 16 << 20;

/// Semaphores in bytes. A request acquires the size of its buffer.
#[derive(Debug)]
pub(in crate::qcow2) struct Buffers {
    /// Data copied up from the backing images.
    pub copied_up: Semaphore,
    /// Zeroes written as data.
    pub zeroes: Semaphore,
    /// Copy-on-write: old data around a write that allocates a cluster, or that completes one.
    pub beside: Semaphore,
    /// Compressed clusters as the file has them.
    pub packed: Semaphore,
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers {
            copied_up: Semaphore::new(OTHERS),
            zeroes: Semaphore::new(OTHERS),
            beside: Semaphore::new(BESIDE),
            packed: Semaphore::new(OTHERS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::io;
    use std::rc::Rc;
    use std::sync::Arc;

    use blockyard_ring::Segments;
    use blockyard_storage::sim::{Rng, Sim, SimConfig, SimDisk, SimImage};
    use blockyard_storage::{Storage, Store};

    use crate::qcow2::{CreateOptions, Header, Qcow2, Qcow2Options, create, pack};
    use crate::{Alignment, Image, Layer, Raw};
    use blockyard_ring::join;

    const SHAPE: Alignment = Alignment { memory_align: 1, offset_align: 1 };
    const CLUSTER: u64 = 2 << 20;

    /// Measures the bytes in flight and their maximum. Ignores operations of up to 64 KiB, because
    /// those do not use bounce buffers.
    #[derive(Clone)]
    struct Meter {
        disk: SimDisk,
        now: Rc<Cell<usize>>,
        most: Rc<Cell<usize>>,
    }

    impl Meter {
        fn begin(&self, len: usize) -> usize {
            let len = if len > 64 << 10 { len } else { 0 };
            self.now.set(self.now.get() + len);
            self.most.set(self.most.get().max(self.now.get()));
            len
        }

        fn end(&self, len: usize) {
            self.now.set(self.now.get() - len);
        }
    }

    impl Storage for Meter {
        async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
            let len = self.begin(segments.len());
            let done = self.disk.read(segments, offset).await;
            self.end(len);
            done
        }

        async fn write(
            &self,
            segments: Segments,
            offset: u64,
            durable: bool,
        ) -> (Segments, io::Result<usize>) {
            let len = self.begin(segments.len());
            let done = self.disk.write(segments, offset, durable).await;
            self.end(len);
            done
        }

        async fn sync(&self) -> io::Result<()> {
            self.disk.sync().await
        }

        async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
            self.disk.discard(offset, len).await
        }

        async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
            self.disk.zero(offset, len, unmap).await
        }

        async fn set_len(&self, len: u64) -> io::Result<()> {
            self.disk.set_len(len).await
        }

        async fn len(&self) -> io::Result<u64> {
            self.disk.len().await
        }
    }

    /// Makes an overlay without subclusters over a raw image of `clusters` clusters, filled with 7.
    /// The overlay's last cluster is compressed.
    async fn overlay(clusters: u64, buffers: Buffers, copy_on_read: bool) -> (Image, Meter) {
        let size = clusters * CLUSTER;
        let (now, most) = <(Rc<Cell<usize>>, Rc<Cell<usize>>)>::default();
        let meter = |image, seed| {
            let disk = SimDisk::new(image, SimConfig::new(seed));
            Meter { disk, now: now.clone(), most: most.clone() }
        };
        let (base, top) = (
            meter(SimImage::from_bytes(&vec![7; size as usize]), 1),
            meter(SimImage::zeroed(0), 2),
        );
        let file = Raw::on(Store::other(top.clone()), SHAPE);
        let backing = Some(("base.raw".into(), "raw".into()));
        let options = CreateOptions {
            version: 2,
            cluster_size: CLUSTER,
            backing,
            ..CreateOptions::new(size)
        };
        create(&file, None, &options).await.unwrap();
        let header = Header::read(&file).await.unwrap();
        let mut qcow2 = Qcow2::open(header, file, None, &Qcow2Options::default()).await.unwrap();
        Arc::get_mut(&mut qcow2.shared).unwrap().buffers = buffers;
        let packed = pack(&vec![7; CLUSTER as usize], qcow2.shared.compression).unwrap().unwrap();
        assert!(qcow2.write_compressed(size - CLUSTER, &packed).await.unwrap());
        most.set(0);
        let backing = Layer::Raw { raw: Raw::on(Store::other(base.clone()), SHAPE), size };
        (Image::new(vec![Layer::Qcow2(qcow2), backing], copy_on_read), top)
    }

    #[test]
    fn a_full_queue_of_allocating_writes_takes_bounded_memory() {
        const WRITES: u64 = 72;
        let most = Sim::new(1).block_on(async {
            let (image, meter) = overlay(WRITES + 1, Buffers::default(), false).await;
            let write = async |n: u64| {
                image.write(Segments::from_bytes(&[1; 4096]), n * CLUSTER + 8192).await.1
            };
            join::all(WRITES as usize, (0..WRITES).map(write)).await.unwrap();
            // The flush copies the rest of each cluster.
            image.flush().await.unwrap();
            let (bytes, read) = image.read(Segments::buffer(16384), (WRITES - 1) * CLUSTER).await;
            read.unwrap();
            let mut found = vec![0; 16384];
            bytes.copy_out(0, &mut found);
            assert_eq!(found, [[7; 4096], [7; 4096], [1; 4096], [7; 4096]].concat());
            meter.most.get() as u64
        });
        let most = most.unwrap();
        assert!(most <= BESIDE, "{most} bytes at a time");
        assert!(most > BESIDE / 2, "many requests are in flight: {most}");
    }

    /// If memory suffices for one buffer of each kind, all requests finish, because no request
    /// needs two buffers of one kind.
    #[test]
    fn one_buffer_of_each_kind_is_enough() {
        for seed in 1..=8 {
            Sim::new(seed).block_on(one_at_a_time(seed)).unwrap();
        }
    }

    async fn one_at_a_time(seed: u64) {
        const CLUSTERS: u64 = 4;
        const REQUESTS: u64 = 48;
        let one = || Semaphore::new(1);
        let buffers = Buffers { copied_up: one(), zeroes: one(), beside: one(), packed: one() };
        let (image, _) = overlay(CLUSTERS, buffers, seed.is_multiple_of(2)).await;
        let mut rng = Rng::new(seed);
        let mut expected = vec![7; (CLUSTERS * CLUSTER) as usize];
        let mut requests = Vec::new();
        let place = CLUSTERS * CLUSTER / REQUESTS / 512 * 512;
        for n in 0..REQUESTS {
            let (at, len) = (n * place, *rng.pick(&[512, 4096, place - 512, place]));
            let kind = rng.below(4);
            if kind < 2 {
                expected[at as usize..(at + len) as usize].fill(kind as u8);
            }
            requests.push((kind, at, len));
        }
        for n in (1..requests.len()).rev() {
            requests.swap(n, rng.below(n as u64 + 1) as usize);
        }
        let image = &image;
        let request = async |(kind, at, len): (u64, u64, u64)| match kind {
            0 => image.write_zeroes(at, len, true).await,
            1 => image.write(Segments::from_bytes(&vec![1; len as usize]), at).await.1,
            2 => image.read(Segments::buffer(len as usize), at).await.1,
            _ => image.populate(at, len).await,
        };
        join::all(requests.len(), requests.into_iter().map(request)).await.unwrap();
        let (bytes, read) = image.read(Segments::buffer(expected.len()), 0).await;
        read.unwrap();
        let mut found = vec![0; expected.len()];
        bytes.copy_out(0, &mut found);
        assert!(found == expected, "seed {seed}");
        image.close().await.unwrap();
    }
}
