//! Images crafted to be expensive: huge, sparse, with tables that point to one another. A check
//! ends soon and reports what is wrong.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use blockyard_image::qcow2::bitmap_directory::{self, BitmapEntry, DIRTY_TRACKING, IN_USE};
use blockyard_image::qcow2::check::{FindingKind, Repair, Report};
use blockyard_image::qcow2::header::AUTOCLEAR_BITMAPS;
use blockyard_image::qcow2::{BitmapsExtension, Compression, Header};
use blockyard_image::tools::{Disk, on_reactor};
use blockyard_image::{Chain, ChainOptions};
use blockyard_ring::Meter;

use super::peer::{Scratch, check_in_pieces, metered_check};
use crate::tools;

const CLUSTER: u64 = 1 << 16;
const TIB: u64 = 1 << 40;

/// An image of 8 TiB, all holes except what a test writes.
struct Hostile {
    file: File,
    path: String,
    header: Header,
    _scratch: Scratch,
}

impl Hostile {
    fn new() -> Self {
        let scratch = Scratch::new("hostile");
        let path = scratch.path("image.qcow2");
        let file = File::create(&path).unwrap();
        file.set_len(8 * TIB).unwrap();
        let header = Header {
            version: 3,
            cluster_bits: 16,
            size: 0,
            l1_size: 4 << 20,
            l1_offset: TIB,
            refcount_table_offset: CLUSTER,
            refcount_table_clusters: 128,
            snapshot_count: 0,
            snapshots_offset: 2 * TIB,
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            header_length: 104,
            compression: Compression::Zlib,
            backing: None,
            backing_offset: 0,
            backing_format: None,
            data_file: None,
            bitmaps: None,
            extensions: Vec::new(),
            unknown_fields: Vec::new(),
        };
        Hostile { file, path, header, _scratch: scratch }
    }

    fn words(&self, at: u64, words: impl Iterator<Item = u64>) {
        let bytes: Vec<u8> = words.flat_map(|word| word.to_be_bytes()).collect();
        self.file.write_all_at(&bytes, at).unwrap();
    }

    fn write_header(&self) {
        self.file.write_all_at(&self.header.serialize().unwrap(), 0).unwrap();
    }

    fn check(&self) -> Report {
        self.check_and_repair(Repair::No)
    }

    fn check_and_repair(&self, repair: Repair) -> Report {
        self.write_header();
        let path = self.path.clone();
        let (report, transfers) =
            tools::within("the check ends", move || metered_check(&path, repair));
        assert_few(transfers);
        report
    }
}

/// Most operations on the file, and most bytes of them. The images have at most 42 MB of data, and
/// up to four million references to tables and blocks. To follow each would take as many reads.
const MOST_OPERATIONS: u64 = 1000;
const MOST_BYTES: u64 = 128 << 20;

fn assert_few((operations, bytes): (u64, u64)) {
    assert!(operations <= MOST_OPERATIONS, "{operations} operations");
    assert!(bytes <= MOST_BYTES, "{bytes} bytes");
}

#[test]
fn tables_that_all_point_to_one_place() {
    let hostile = Hostile::new();
    hostile.words(TIB, (0..4 << 20).map(|_| 3 * TIB));
    hostile.words(3 * TIB, (0..8192).map(|_| 3 * TIB));
    hostile.words(CLUSTER, (0..1 << 20).map(|_| 4 * TIB));
    let report = hostile.check();
    assert!(report.corruptions > 1 << 20, "{report:?}");
    assert_eq!(report.findings.len(), 1000);
    assert!(report.findings_left_off > 1 << 20);
}

/// To read each of these tables would take minutes.
#[test]
fn tables_that_are_all_holes() {
    let mut hostile = Hostile::new();
    hostile.header.l1_size = 1 << 20;
    hostile.words(TIB, (0..1 << 20).map(|n| 3 * TIB + n * CLUSTER));
    let report = hostile.check();
    assert!(report.corruptions > 1 << 20, "{report:?}");
}

#[test]
fn snapshots_that_share_and_overlap_their_tables() {
    let mut hostile = Hostile::new();
    (hostile.header.l1_size, hostile.header.snapshot_count) = (1, 65536);
    hostile.words(TIB, [3 * TIB].into_iter());
    // Entries of 40 bytes. Their L1 tables overlap one another except for their first cluster.
    let entry = |n: u64| [4 * TIB + n % 60_000 * CLUSTER, (4 << 20) << 32, 0, 0, 0];
    hostile.words(2 * TIB, (0..65536).flat_map(entry));
    let report = hostile.check();
    let overlaps = report.findings.iter().filter(|f| f.kind == FindingKind::BadTable).count();
    assert!(overlaps > 100, "{:#?}", &report.findings[..20]);
}

/// To count the clusters of a table for each snapshot would take minutes.
#[test]
fn snapshots_that_share_one_long_table_or_have_one_each() {
    const TABLE: u64 = 32 << 20;
    for (distance, expected) in [(0, FindingKind::Overlap), (TABLE, FindingKind::BadTable)] {
        let mut hostile = Hostile::new();
        let header = &mut hostile.header;
        (header.cluster_bits, header.l1_size, header.snapshot_count) = (9, 1, 65_536);
        // Entries of 56 bytes, 16 of which are extra data.
        let entry = |n: u64| [4 * TIB + n * distance, (TABLE / 8) << 32, 0, 0, 16, 0, 0];
        hostile.words(2 * TIB, (0..65_536).flat_map(entry));
        let report = hostile.check();
        assert!(report.corruptions > 65_000, "{distance}: {report:?}");
        let other = report.findings.iter().find(|finding| finding.kind != expected);
        assert_eq!(other, None, "{distance}");
        assert!(report.findings[0].structure.contains("of snapshot"), "{:?}", report.findings[0]);
    }
}

#[test]
fn bitmaps_that_share_one_long_table() {
    const BITMAPS: u32 = 65_535;
    let entry = BitmapEntry {
        at: 0,
        len: 0,
        table_offset: 3 * TIB,
        table_size: 1 << 20,
        flags: IN_USE,
        kind: DIRTY_TRACKING,
        granularity_bits: 16,
        extra_len: 0,
        name: "b".into(),
    };
    let entries: Vec<_> = std::iter::repeat_n(entry, BITMAPS as usize).collect();
    let directory = bitmap_directory::encode(&entries);
    let mut hostile = Hostile::new();
    hostile.file.write_all_at(&directory, 2 * TIB).unwrap();
    let header = &mut hostile.header;
    (header.cluster_bits, header.l1_size, header.autoclear) = (9, 1, AUTOCLEAR_BITMAPS);
    let directory_size = directory.len() as u64;
    header.bitmaps =
        Some(BitmapsExtension { count: BITMAPS, directory_size, directory_offset: 2 * TIB });
    let report = hostile.check();
    // The table has 16,384 clusters. Each of them is shared.
    assert!(report.corruptions > 16_384, "{report:?}");
    let first = &report.findings[0];
    assert_eq!(first.kind, FindingKind::Overlap, "{first:?}");
    assert!(first.structure.contains("table of bitmap"), "{first:?}");
}

/// To read each of these blocks of 2 MiB would take minutes.
#[test]
fn refcount_blocks_that_are_all_holes() {
    let cluster: u64 = 2 << 20;
    let mut hostile = Hostile::new();
    let header = &mut hostile.header;
    (header.cluster_bits, header.l1_size) = (21, 1);
    (header.refcount_table_offset, header.refcount_table_clusters) = (cluster, 4);
    hostile.words(cluster, (0..1 << 20).map(|n| 3 * TIB + n * cluster));
    // A check ignores blocks for clusters behind the end of the file. A repair does not.
    let report = hostile.check_and_repair(Repair::All);
    assert!(report.is_clean(), "{report:?}");
    assert!(report.corruptions_fixed > 1 << 20, "{report:?}");
}

/// A map of a disk begins with the number of clusters in use, to find out if the file has fewer.
#[test]
fn the_clusters_in_use_are_not_searched_in_refcount_blocks_that_are_holes() {
    let mut hostile = Hostile::new();
    let header = &mut hostile.header;
    (header.cluster_bits, header.size, header.l1_size) = (9, 512, 1);
    (header.refcount_order, header.refcount_table_clusters) = (0, 16_384);
    hostile.words(CLUSTER, (0..1 << 20).map(|n| 3 * TIB + n * 512));
    hostile.write_header();
    let options = ChainOptions { read_only: true, ..ChainOptions::new(&hostile.path) };
    let transfers = tools::within("the disk is opened", move || {
        let (chain, meter) = (Chain::open(&options).unwrap(), Rc::new(Meter::default()));
        let counts = meter.clone();
        let opened = on_reactor(|handle| async move {
            Disk::of(&chain, &handle.metered(&meter)).await.map(drop)
        });
        opened.unwrap();
        counts.counted()
    });
    assert_few(transfers);
}

#[test]
fn references_to_random_clusters_are_counted_in_bounded_memory() {
    let hostile = Hostile::new();
    hostile.words(TIB, (0..8).map(|n| 3 * TIB + n * CLUSTER));
    let mut random = 1u64;
    let scattered = (0..8 * 8192).map(|_| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random % (7 * TIB)) & !(CLUSTER - 1)
    });
    hostile.words(3 * TIB, scattered);
    let report = hostile.check();
    assert!(report.corruptions > 60_000, "{report:?}");
    // A limit of 1000 bytes would need thousands of passes.
    let limited = check_in_pieces(&hostile.path, Repair::No, 1 << 20);
    assert_eq!(limited.corruptions, report.corruptions);
}
