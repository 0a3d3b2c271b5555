//! Work that must not grow with unallocated space: counts operations on simulated disks.

use blockyard_image::qcow2::check::{Repair, check};
use blockyard_image::qcow2::{CreateOptions, Header, Qcow2, Qcow2Options, create};
use blockyard_image::{Alignment, Image, Layer, NoBacking, Place, Raw};
use blockyard_ring::Segments;
use blockyard_storage::sim::{OpKind, Phase, Sim, SimConfig, SimDisk, SimImage};

const MIB: u64 = 1 << 20;

fn raw(disk: &SimDisk) -> Raw {
    Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 })
}

async fn open(disk: &SimDisk) -> Image {
    let header = Header::read(&raw(disk)).await.unwrap();
    let image = Qcow2::open(header, raw(disk), None, &Qcow2Options::default()).await.unwrap();
    Image::new(vec![Layer::Qcow2(image)], false)
}

/// Returns the number of operations of a kind that have started.
fn count(disk: &SimDisk, kind: OpKind) -> usize {
    disk.trace().iter().filter(|line| line.kind == kind && line.phase == Phase::Started).count()
}

fn on_new_image<F: Future<Output = ()> + 'static>(
    options: CreateOptions,
    work: impl FnOnce(SimDisk) -> F + 'static,
) {
    let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
    let sim = Sim::new(1);
    sim.block_on(async move {
        create(&raw(&disk), None, &options).await.unwrap();
        work(disk).await;
    })
    .unwrap();
}

#[test]
fn ranges_without_tables_are_found_without_reads() {
    const SIZE: u64 = 8 << 30;
    on_new_image(CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) }, async |disk| {
        let image = open(&disk).await;
        let before = count(&disk, OpKind::Read);
        let status = image.status(0, SIZE).await.unwrap();
        assert_eq!((status.len, status.zero, status.present), (SIZE, true, false));
        let extent = image.find_above(1, 0, SIZE).await.unwrap();
        assert_eq!((extent.len, extent.place), (SIZE, Place::Absent));
        assert_eq!(count(&disk, OpKind::Read), before, "missing tables were loaded");
        // One table in the middle, of 32 KiB.
        let middle = SIZE / 2 + 512;
        image.write(Segments::from_bytes(&[7; 512]), middle).await.1.unwrap();
        let (mut at, mut found) = (0, Vec::new());
        while at < SIZE {
            let status = image.status(at, SIZE - at).await.unwrap();
            found.push((at, status.zero));
            at += status.len;
        }
        let table = SIZE / 2;
        let expected = [
            (0, true),
            (table, true),
            (middle, false),
            (middle + 512, true),
            (table + (32 << 10), true),
        ];
        assert_eq!(found, expected);
    });
}

#[test]
fn preallocation_does_not_write_each_cluster() {
    const SIZE: u64 = 64 * MIB;
    for (extended_l2, keep_space) in [(false, false), (false, true), (true, false)] {
        on_new_image(
            CreateOptions { extended_l2, ..CreateOptions::new(SIZE) },
            async move |disk| {
                let image = open(&disk).await;
                image.write(Segments::from_bytes(&[7; 512]), 5 * MIB).await.1.unwrap();
                let before = count(&disk, OpKind::Write);
                let Layer::Qcow2(top) = &image.layers()[0] else { unreachable!() };
                top.preallocate(MIB..SIZE, keep_space).await.unwrap();
                image.close().await.unwrap();
                let writes = count(&disk, OpKind::Write) - before;
                assert!(writes < 60, "{writes} writes for {} clusters", SIZE >> 16);
                let report = check(&raw(&disk), None, Repair::No).await.unwrap();
                assert!(report.is_clean(), "{report:?}");
                assert_eq!(report.allocated_clusters, (SIZE - MIB) >> 16);
                let (bytes, read) = image.read(Segments::buffer(SIZE as usize), 0).await;
                read.unwrap();
                assert_eq!(bytes.find_nonzero(0, SIZE as usize), Some(5 * MIB as usize));
                let behind = 5 * MIB as usize + 512;
                assert_eq!(bytes.find_nonzero(behind, SIZE as usize - behind), None);
            },
        );
    }
}

/// A new image has no name until it is complete. A power cut loses it in any case, so the order of
/// writes does not matter.
#[test]
fn an_image_without_a_name_is_synced_once() {
    const SIZE: u64 = 8 * MIB;
    on_new_image(CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) }, async |disk| {
        let header = Header::read(&raw(&disk)).await.unwrap();
        let options =
            Qcow2Options { unfinished: true, l2_cache: Some(0), ..Qcow2Options::default() };
        let image = Qcow2::open(header, raw(&disk), None, &options).await.unwrap();
        let image = Image::new(vec![Layer::Qcow2(image)], false);
        let before = count(&disk, OpKind::Sync);
        let ones = vec![1; MIB as usize];
        for at in (0..SIZE).step_by(ones.len()) {
            image.write(Segments::from_bytes(&ones), at).await.1.unwrap();
        }
        assert_eq!(count(&disk, OpKind::Sync), before, "synced before its end");
        image.close().await.unwrap();
        assert_eq!(count(&disk, OpKind::Sync), before + 1);
        let trace = disk.trace();
        let last =
            |kind| trace.iter().rposition(|line| line.kind == kind && line.phase == Phase::Started);
        assert!(last(OpKind::Sync) > last(OpKind::Write), "written behind the last sync");
        let report = check(&raw(&disk), None, Repair::No).await.unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.allocated_clusters, SIZE / 512);
        image.write(Segments::from_bytes(&[2; 512]), 0).await.1.unwrap();
        image.flush().await.unwrap();
        assert_eq!(count(&disk, OpKind::Sync), before + 2, "each flush syncs");
    });
}

#[test]
fn refcounts_of_preallocated_clusters_are_written_together() {
    const SIZE: u64 = 16 * MIB;
    const TABLES: usize = (SIZE / (64 * 512)) as usize;
    on_new_image(CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) }, async |disk| {
        let header = Header::read(&raw(&disk)).await.unwrap();
        // If the image did not reserve clusters ahead, it would reserve those of one refcount block
        // at a time, with a sync for each block.
        let options = Qcow2Options { reserve: Some(256 * 512), ..Qcow2Options::default() };
        let image = Qcow2::open(header, raw(&disk), None, &options).await.unwrap();
        let before = (count(&disk, OpKind::Sync), count(&disk, OpKind::Write));
        image.preallocate(0..SIZE, false).await.unwrap();
        image.close(&NoBacking).await.unwrap();
        let (syncs, writes) =
            (count(&disk, OpKind::Sync) - before.0, count(&disk, OpKind::Write) - before.1);
        assert!(syncs < 12, "{syncs} syncs");
        // Each 64 clusters have an L2 table and its refcount block: two writes.
        assert!(writes < 2 * TABLES, "{writes} writes for {TABLES} tables");
        let report = check(&raw(&disk), None, Repair::No).await.unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.allocated_clusters, SIZE / 512);
    });
}
