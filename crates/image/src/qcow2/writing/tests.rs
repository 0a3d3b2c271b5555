//! What operations that fail leave behind, on simulated disks. A write that fails has changed some
//! of its sectors.

use std::io;
use std::rc::Rc;

use blockyard_ring::Segments;
use blockyard_storage::sim::{Fault, OpKind, Sim, SimConfig, SimDisk, SimImage};

use crate::extent::{BackingLayers, NoBacking};
use crate::qcow2::encoding::entry::{Cluster, L2Entry};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::tables::Entry;
use crate::qcow2::{CreateOptions, Header, Qcow2Options, create};
use crate::{Alignment, Raw};

const CLUSTER: u64 = 64 << 10;
const PART: u64 = CLUSTER / 16;
const SEEDS: u64 = 16;

/// Opens a new image of 1 MiB.
async fn image(disk: &SimDisk) -> Qcow2 {
    let raw = || Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
    create(&raw(), None, &CreateOptions::new(1 << 20)).await.unwrap();
    let header = Header::read(&raw()).await.unwrap();
    Qcow2::open(header, raw(), None, &Qcow2Options::default()).await.unwrap()
}

fn disk(seed: u64) -> SimDisk {
    SimDisk::new(SimImage::zeroed(0), SimConfig { allocates: true, ..SimConfig::new(seed) })
}

async fn write<B: BackingLayers>(
    image: &Qcow2,
    below: &B,
    offset: u64,
    bytes: Vec<u8>,
) -> io::Result<()> {
    image.write(below, Segments::from_bytes(&bytes), offset).await.1
}

async fn read<B: BackingLayers>(image: &Qcow2, below: &B, offset: u64, len: u64) -> Vec<u8> {
    let buffer = Segments::buffer(len as usize);
    image.read_current(below, &buffer, 0, offset, len).await.unwrap();
    let mut bytes = vec![0; len as usize];
    buffer.copy_out(0, &mut bytes);
    bytes
}

/// The next write to a new cluster gets the host cluster, and must not show what is in it.
#[test]
fn a_cluster_of_a_failed_write_does_not_count_as_new() {
    for seed in 0..SEEDS {
        let disk = disk(seed);
        let test = async move {
            let image = image(&disk).await;
            // From here on no write of metadata precedes that of data.
            write(&image, &NoBacking, 0, vec![1; 512]).await.unwrap();
            disk.fail(Fault::new(OpKind::Write, 5));
            write(&image, &NoBacking, CLUSTER, vec![2; CLUSTER as usize]).await.unwrap_err();
            write(&image, &NoBacking, 2 * CLUSTER + PART, vec![3; 512]).await.unwrap();
            let mut expected = vec![0; CLUSTER as usize];
            expected[PART as usize..][..512].fill(3);
            let found = read(&image, &NoBacking, 2 * CLUSTER, CLUSTER).await;
            assert!(found == expected, "seed {seed}");
        };
        Sim::new(seed).block_on(test).unwrap();
    }
}

/// Backing layers that have data in each part but `ZERO_PART`.
struct Below;

const ZERO_PART: u64 = 5;

impl BackingLayers for Below {
    async fn read_backing(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let bytes = (offset..offset + segments.len() as u64)
            .map(|at| if at % CLUSTER / PART == ZERO_PART { 0 } else { 7 });
        let bytes: Vec<u8> = bytes.collect();
        segments.copy_in(0, &bytes);
        (segments, Ok(()))
    }

    async fn backing_is_zero(&self, offset: u64, len: u64) -> io::Result<bool> {
        let (first, last) = (offset % CLUSTER / PART, (offset + len - 1) % CLUSTER / PART);
        Ok((first, last) == (ZERO_PART, ZERO_PART))
    }

    fn exists(&self) -> bool {
        true
    }
}

/// The guest has read zeroes there after the failed write, and a flush must not change them.
#[test]
fn a_flush_shows_nothing_of_a_failed_write_to_a_partial_cluster() {
    for seed in 0..SEEDS {
        let disk = disk(seed);
        let test = async move {
            let image = image(&disk).await;
            // The part of the failed write lacks data, and its neighbours have some.
            for part in [ZERO_PART - 1, ZERO_PART + 1] {
                write(&image, &Below, part * PART, vec![1; PART as usize]).await.unwrap();
            }
            let decoded = |entry: Entry| {
                L2Entry::cached(entry.word, entry.bitmap, image.shape().layout).unwrap().cluster
            };
            let cluster = decoded(image.current_entry(0).await.unwrap());
            assert!(matches!(cluster, Cluster::Partial { parts: 0b101_0000, .. }), "{cluster:?}");
            disk.fail(Fault::new(OpKind::Write, 5));
            let part = vec![2; PART as usize];
            write(&image, &Below, ZERO_PART * PART, part).await.unwrap_err();
            let before = read(&image, &Below, 0, CLUSTER).await;
            image.flush(&Below).await.unwrap();
            let cluster = decoded(image.current_entry(0).await.unwrap());
            assert!(matches!(cluster, Cluster::Standard { .. }), "{cluster:?}");
            assert!(read(&image, &Below, 0, CLUSTER).await == before, "seed {seed}");
        };
        Sim::new(seed).block_on(test).unwrap();
    }
}

/// The flush has read the part before the write, and writes it after that. It does not complete the
/// cluster, so the entry does not show what it has done.
#[test]
fn a_completion_that_fails_takes_nothing_from_a_write_beside_it() {
    for seed in 0..64 {
        let (disk, sim) = (disk(seed), Sim::new(seed));
        let storage = disk.clone();
        let image = sim.block_on(async move {
            let image = image(&storage).await;
            // Other parts lack data on both sides of this one.
            write(&image, &Below, 8 * PART, vec![1; PART as usize]).await.unwrap();
            Rc::new(image)
        });
        let image = image.unwrap();
        // The first write is that of the guest.
        disk.fail(Fault::new(OpKind::Write, 5).after(1));
        let guest = image.clone();
        let written =
            sim.spawn(async move { write(&guest, &Below, 2 * PART, vec![9; PART as usize]).await });
        let flusher = image.clone();
        let flushed = sim.spawn(async move { flusher.flush(&Below).await });
        let test = async move {
            written.await.unwrap();
            let _ = flushed.await;
            assert_eq!(read(&image, &Below, 2 * PART, PART).await, [9; PART as usize]);
            image.flush(&Below).await.unwrap();
            assert_eq!(read(&image, &Below, 2 * PART, PART).await, [9; PART as usize]);
        };
        sim.block_on(test).unwrap();
    }
}

/// The next flush releases it.
#[test]
fn a_flush_that_fails_forgets_no_freed_cluster() {
    let disk = disk(1);
    let test = async move {
        let image = image(&disk).await;
        write(&image, &NoBacking, 0, vec![1; CLUSTER as usize]).await.unwrap();
        image.flush(&NoBacking).await.unwrap();
        let entry = image.current_entry(0).await.unwrap();
        let decoded = L2Entry::cached(entry.word, entry.bitmap, image.shape().layout).unwrap();
        let host = decoded.cluster.host().unwrap() / CLUSTER;
        image.discard(&NoBacking, 0, CLUSTER).await.unwrap();
        disk.fail(Fault::new(OpKind::Write, 28).always());
        image.flush(&NoBacking).await.unwrap_err();
        disk.heal();
        assert_eq!(image.count(host).await.unwrap(), 1);
        // The first flush makes the entry durable. The clusters wait for the epoch of readers.
        for _ in 0..3 {
            image.flush(&NoBacking).await.unwrap();
        }
        assert_eq!(image.count(host).await.unwrap(), 0);
    };
    Sim::new(1).block_on(test).unwrap();
}

#[test]
fn compressed_data_in_two_clusters_free_both() {
    let disk = disk(1);
    let test = async move {
        let image = image(&disk).await;
        let (host, len) = (8 * CLUSTER - 512, 1024);
        let cluster = Cluster::Compressed { host, len };
        let entry = L2Entry { cluster, copied: false };
        let (word, bitmap) = entry.encode(image.shape().layout);
        image.let_go(Entry { word, bitmap });
        assert_eq!(image.shared.alloc.freed(), 2);
    };
    Sim::new(1).block_on(test).unwrap();
}
