//! Fast zeroes: done, or refused with nothing changed, depending on the entries that the format
//! has.

use std::os::unix::fs::{FileExt, MetadataExt};

use blockyard_image::{Progress, copy_up};
use blockyard_ring::Segments;

use super::peer::{Scratch, qemu_img};
use super::{Model, check, judged_by_qemu, on_image, write};

const SIZE: u64 = 4 << 20;
const CLUSTER: u64 = 64 << 10;
const NO_BASE: bool = false;
const BASE: bool = true;

/// Makes an image whose bytes are all 7. The data are in its base, or in the image itself,
/// compressed or not.
fn image(scratch: &Scratch, options: &str, over_base: bool) {
    std::fs::write(scratch.path("base.raw"), vec![7; SIZE as usize]).unwrap();
    let (options, compressed) = match options.strip_suffix(",compressed") {
        Some(options) => (options, &["-c"][..]),
        None => (options, &[][..]),
    };
    let (name, base) = (scratch.name("a.qcow2"), scratch.name("base.raw"));
    if over_base {
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "-F", "raw", "-b", base, name]);
    } else {
        let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", options, base, name];
        qemu_img(&[&convert[..1], compressed, &convert[1..]].concat());
    }
}

#[test]
fn zeroes_are_fast_or_refused_with_nothing_changed() {
    let (one, unit) = (CLUSTER, 2 << 10);
    for (options, over_base, (offset, len), unmap, fast) in [
        // Whole clusters, also at the end of the disk.
        ("compat=1.1", NO_BASE, (one, 4 * one), true, true),
        ("compat=1.1", NO_BASE, (one, 4 * one), false, true),
        ("compat=1.1", BASE, (one, 4 * one), false, true),
        ("compat=1.1", BASE, (SIZE - one, one), true, true),
        ("compat=1.1,compressed", NO_BASE, (one, 4 * one), true, true),
        // The format cannot store zeroes in a part of a cluster except as data.
        ("compat=1.1", BASE, (512, 4 * one - 512), true, false),
        ("compat=1.1", BASE, (one, 4 * one + 512), true, false),
        ("compat=1.1", NO_BASE, (512, 4 * one), false, false),
        ("extended_l2=on", BASE, (unit, 3 * one + 512), true, false),
        ("compat=1.1", NO_BASE, (512, 1024), true, false),
        ("compat=1.1", BASE, (one - 512, one), true, false),
        // Version 2 has no zero entry. Without a backing file an empty entry reads as zeroes too,
        // if the space need not be kept.
        ("compat=0.10", NO_BASE, (one, 4 * one), true, true),
        ("compat=0.10", NO_BASE, (one, 4 * one), false, false),
        ("compat=0.10", BASE, (one, 4 * one), true, false),
        ("compat=0.10", BASE, (512, 4 * one), true, false),
        // Subclusters can be zero one by one. A compressed cluster has no subclusters.
        ("extended_l2=on", BASE, (unit, 3 * unit), true, true),
        ("extended_l2=on", BASE, (unit, 512), true, false),
        ("extended_l2=on,compressed", NO_BASE, (one, one), true, true),
        ("extended_l2=on,compressed", NO_BASE, (one, one + unit), true, false),
        // With a raw external data file, the host must zero the range of the file.
        ("data_file=DATA,data_file_raw=on", NO_BASE, (one, 4 * one), true, true),
        ("data_file=DATA,data_file_raw=on", NO_BASE, (one, 4 * one), false, true),
    ] {
        let case = format!("{options} {over_base} {offset}+{len} {unmap}");
        println!("{case}");
        let scratch = Scratch::new("fast");
        image(&scratch, &options.replace("DATA", scratch.name("data.bin")), over_base);
        let mut model = Model(vec![7; SIZE as usize]);
        if fast {
            model.0[offset as usize..][..len as usize].fill(0);
        }
        let model = on_image(&scratch, async move |image| {
            let done = image.write_zeroes_fast(offset, len, unmap).await;
            match done {
                Ok(()) => assert!(fast, "{case}: was not refused"),
                Err(e) => {
                    assert!(!fast && e.kind() == std::io::ErrorKind::Unsupported, "{case}: {e}")
                }
            }
            check(&image, &model, 0, SIZE as usize).await;
            image.write_zeroes(offset, len, unmap).await.unwrap();
            model.0[offset as usize..][..len as usize].fill(0);
            if fast {
                image.write_zeroes_fast(offset, len, unmap).await.unwrap();
            }
            image.write(Segments::from_bytes(&[9; 512]), offset).await.1.unwrap();
            model.0[offset as usize..][..512].fill(9);
            check(&image, &model, 0, SIZE as usize).await;
            image.close().await.unwrap();
            model
        });
        judged_by_qemu(&scratch, "a.qcow2", &model);
    }
}

/// Parts of clusters that read as zeroes already need no write.
#[test]
fn partial_clusters_of_zeroes_are_fast() {
    let scratch = Scratch::new("fast-ends");
    image(&scratch, "compat=1.1", BASE);
    let mut model = Model(vec![7; SIZE as usize]);
    let model = on_image(&scratch, async move |image| {
        for at in [0, 4 * CLUSTER] {
            image.write_zeroes(at, CLUSTER, true).await.unwrap();
        }
        image.write_zeroes_fast(512, 4 * CLUSTER, true).await.unwrap();
        model.0[..5 * CLUSTER as usize].fill(0);
        check(&image, &model, 0, SIZE as usize).await;
        // The whole range is checked before any of it is changed, however long it is.
        image.may_zero_fast(512, 5 * CLUSTER - 512, true).await.unwrap();
        let refused = image.may_zero_fast(512, 5 * CLUSTER, true).await.unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::Unsupported);
        image.close().await.unwrap();
        model
    });
    judged_by_qemu(&scratch, "a.qcow2", &model);
}

/// Holes of the backing image begin and end inside clusters, and at the disk's end.
#[test]
fn a_stream_copies_no_holes_of_a_raw_backing_image() {
    const BIG: u64 = 64 << 20;
    for options in ["cluster_size=64k", "cluster_size=2M", "extended_l2=on,cluster_size=128k"] {
        let scratch = Scratch::new("holes");
        let (base, name) = (scratch.path("base.raw"), scratch.name("a.qcow2"));
        let file = std::fs::File::create(&base).unwrap();
        let mut model = Model(vec![0; BIG as usize]);
        for (at, len) in [(0, 4096), (3 << 20, 1 << 20), (53 << 20, 12 << 10), (BIG - 512, 512)] {
            file.write_all_at(&vec![9; len], at).unwrap();
            model.0[at as usize..][..len].fill(9);
        }
        let below = ["-F", "raw", "-b", scratch.name("base.raw"), name];
        qemu_img(&[&["create", "-q", "-f", "qcow2", "-o", options], &below[..]].concat());
        let model = on_image(&scratch, async move |image| {
            write(&image, &mut model, 40 << 20, &[8; 512]).await;
            let progress = Progress::default();
            copy_up(&image, &progress, async |_| Ok(())).await.unwrap();
            assert_eq!((progress.done(), progress.total()), (BIG, BIG));
            image.flush().await.unwrap();
            image.close().await.unwrap();
            model
        });
        qemu_img(&["rebase", "-u", "-b", "", "-f", "qcow2", name]);
        judged_by_qemu(&scratch, "a.qcow2", &model);
        let used = std::fs::metadata(scratch.path("a.qcow2")).unwrap().blocks() * 512;
        assert!(used < BIG / 2, "{options}: {used} bytes");
    }
}
