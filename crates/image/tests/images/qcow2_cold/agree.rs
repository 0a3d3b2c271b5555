//! This crate's check agrees with `qemu-img check` in all figures, on images of all kinds.

use blockyard_image::qcow2::check::{Repair, Report};

use super::images::image;
use super::peer::{Scratch, check_in_pieces, our_check, qemu_check};

/// Options of `qemu-img create`, and what else the image contains.
const IMAGES: [(&str, &[&str]); 14] = [
    ("compat=0.10", &["snapshots"]),
    ("compat=1.1", &["snapshots", "bitmaps"]),
    ("compat=1.1,cluster_size=512", &["snapshots"]),
    ("compat=1.1,cluster_size=2M", &["snapshots"]),
    ("refcount_bits=1", &[]),
    ("refcount_bits=2", &["snapshots", "not compressed"]),
    ("refcount_bits=4,cluster_size=4k", &["snapshots", "not compressed"]),
    ("refcount_bits=8", &["snapshots", "bitmaps"]),
    ("refcount_bits=32,cluster_size=1k", &["snapshots"]),
    ("refcount_bits=64,cluster_size=512", &["snapshots", "bitmaps"]),
    ("extended_l2=on,cluster_size=128k", &["snapshots"]),
    ("extended_l2=on,cluster_size=16k,refcount_bits=32", &["snapshots", "bitmaps"]),
    ("compression_type=zstd,cluster_size=8k", &["snapshots"]),
    ("data_file=DATA", &["not compressed"]),
];

fn figures(report: &Report) -> Report {
    Report { findings: Vec::new(), findings_left_off: 0, ..report.clone() }
}

#[test]
fn checks_agree_on_consistent_images() {
    for (options, extras) in IMAGES {
        let scratch = Scratch::new("sound");
        let path = image(&scratch, options, extras);
        let (ours, theirs) = (our_check(&path, Repair::No), qemu_check(&path, None));
        assert_eq!(figures(&ours), theirs, "{options}: {:#?}", ours.findings);
        assert!(ours.is_clean(), "{options}: {:?}", ours.findings);
        assert_eq!(check_in_pieces(&path, Repair::No, 1000), ours, "{options}");
    }
}
