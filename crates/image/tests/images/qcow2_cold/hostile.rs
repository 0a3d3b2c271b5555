//! Images crafted to be expensive: huge, sparse, with tables that point to one another. A check
//! ends soon and reports what is wrong.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use blockyard_image::qcow2::check::{FindingKind, Repair, Report};
use blockyard_image::qcow2::{Compression, Header};
use blockyard_ring::Clock;

use super::peer::{Scratch, check_in_pieces, our_check};

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

    fn check(&self) -> Report {
        self.file.write_all_at(&self.header.serialize().unwrap(), 0).unwrap();
        // Measure the thread's own processor time, because the machine may be busy with other work.
        let start = Clock::Thread.read();
        let report = our_check(&self.path, Repair::No);
        let time = Clock::Thread.read() - start;
        assert!(time < Duration::from_secs(60), "it took {time:?} of processor time");
        report
    }
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
