//! Resized and emptied images.

use std::sync::Arc;

use blockyard_image::qcow2::bitmap::edit::{self, Edit};
use blockyard_image::qcow2::bitmap::prepare_for_writing;
use blockyard_image::qcow2::check::Repair;
use blockyard_image::qcow2::empty::make_empty;
use blockyard_image::qcow2::header::AUTOCLEAR_KNOWN;
use blockyard_image::qcow2::resize::{Resize, grow_in_place, resize};
use blockyard_image::qcow2::{Header, Preallocation};
use blockyard_image::tools::{self, NewSize};
use blockyard_image::{Chain, ChainOptions, ImageError};

use super::cuts::{everywhere, guest, load, on_image, opened_sound};
use super::peer::{Scratch, on_file, our_check, qemu_check, qemu_img, qemu_io, two_files};

const MIB: u64 = 1 << 20;

fn to(path: &str, wanted: Resize) -> Result<(), ImageError> {
    on_file(path, move |raw| async move { resize(&raw, None, wanted).await })
}

fn larger(path: &str, size: u64) -> Result<(), ImageError> {
    to(path, Resize { size, shrink: false, below: 0 })
}

fn smaller(path: &str, size: u64) -> Result<(), ImageError> {
    to(path, Resize { size, shrink: true, below: 0 })
}

fn sound(path: &str, what: &str) {
    let (ours, theirs) = (our_check(path, Repair::No), qemu_check(path, None));
    assert!(ours.is_clean(), "{what}: {ours:#?}");
    assert!(theirs.is_clean(), "{what}: {theirs:#?}");
}

/// Returns the number of bytes that a file occupies on the host's disk.
fn blocks(path: &str) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

const KINDS: [&str; 7] = [
    "compat=0.10",
    "compat=1.1",
    "cluster_size=512",
    "cluster_size=2M",
    "cluster_size=4k,refcount_bits=1",
    "extended_l2=on,cluster_size=64k",
    "preallocation=metadata,cluster_size=8k",
];

#[test]
fn old_data_stay_and_the_new_part_reads_as_zeroes() {
    for options in KINDS {
        let scratch = Scratch::new("resize");
        let path = scratch.path("image.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "3M"]);
        qemu_io(&path, &["write -P 1 0 3M"]);
        larger(&path, 70 * MIB + 512).unwrap();
        sound(&path, options);
        qemu_io(
            &path,
            &["read -P 1 0 3M", "read -P 0 3M 67M", "write -P 2 40M 31457792", "write -P 3 2M 64k"],
        );
        // Shrinks into the middle of a cluster, and grows again. The data behind the smaller size
        // must read as zeroes.
        smaller(&path, 2 * MIB + 512).unwrap();
        sound(&path, options);
        assert!(blocks(&path) < 16 * MIB, "{options}: the host keeps {}", blocks(&path));
        larger(&path, 70 * MIB).unwrap();
        sound(&path, options);
        qemu_io(&path, &["read -P 1 0 2M", "read -P 3 2M 512", "read -P 0 2097664 71302656"]);
        smaller(&path, 0).unwrap();
        sound(&path, options);
        larger(&path, MIB).unwrap();
        qemu_io(&path, &["read -P 0 0 1M", "write -P 4 0 1M"]);
        sound(&path, options);
    }
}

#[test]
fn a_longer_backing_file_does_not_show() {
    for options in ["compat=1.1", "cluster_size=1k", "extended_l2=on,cluster_size=32k"] {
        let scratch = Scratch::new("resize-below");
        let (path, base) = (scratch.path("image.qcow2"), scratch.path("base.qcow2"));
        qemu_img(&["create", "-q", "-f", "qcow2", &base, "5M"]);
        qemu_io(&base, &["write -P 1 0 5M"]);
        let at = 2 * MIB + 3 * 512;
        let create = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            options,
            "-F",
            "qcow2",
            "-b",
            "base.qcow2",
            &path,
            &at.to_string(),
        ];
        qemu_img(&create);
        let grown = Resize { size: 8 * MIB, shrink: false, below: 5 * MIB };
        let error = to(&path, grown).unwrap_err().to_string();
        assert!(error.contains("write the last sector"), "{error}");
        qemu_io(&path, &[&format!("write -P 2 {} 512", at - 512)]);
        to(&path, grown).unwrap();
        sound(&path, options);
        let reads = [
            format!("read -P 1 0 {}", at - 512),
            format!("read -P 2 {} 512", at - 512),
            format!("read -P 0 {at} {}", 8 * MIB - at),
        ];
        qemu_io(&path, &reads.each_ref().map(String::as_str));
    }
}

#[test]
fn snapshots_keep_data_behind_the_old_end() {
    // In the first case a snapshot shares the last cluster. In the second case it is compressed.
    let scratch = Scratch::new("resize-shared");
    let path = scratch.path("image.qcow2");
    for compressed in [false, true] {
        qemu_img(&["create", "-q", "-f", "qcow2", &path, "128k"]);
        qemu_io(&path, &[if compressed { "write -c -P 1 0 128k" } else { "write -P 1 0 128k" }]);
        if !compressed {
            qemu_img(&["snapshot", "-c", "one", &path]);
        }
        // Simulates a program that shrinks a disk and does not zero the rest of its last cluster.
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[24..32].copy_from_slice(&(100u64 << 10).to_be_bytes());
        std::fs::write(&path, &bytes).unwrap();
        larger(&path, MIB).unwrap();
        sound(&path, "shared");
        qemu_io(&path, &["read -P 1 0 100k", "read -P 0 100k 924k"]);
        if !compressed {
            qemu_img(&["snapshot", "-a", "one", &path]);
            qemu_io(&path, &["read -P 1 0 128k"]);
        }
    }
}

#[test]
fn an_external_data_file_is_resized_too() {
    let scratch = Scratch::new("resize-data");
    let (path, data) = (scratch.path("image.qcow2"), scratch.path("data.raw"));
    for raw in ["off", "on"] {
        let options = format!("data_file={data},data_file_raw={raw}");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, &path, "1M"]);
        qemu_io(&path, &["write -P 1 0 1M"]);
        for size in [3 * MIB, 640 << 10, 2 * MIB] {
            let wanted = Resize { size, shrink: true, below: 0 };
            let resized = two_files(&path, &data, move |raw, data| async move {
                resize(&raw, Some(&data), wanted).await
            });
            resized.unwrap();
            assert_eq!(std::fs::metadata(&data).unwrap().len(), size);
            sound(&path, &options);
        }
        qemu_io(&path, &["read -P 1 0 640k", "read -P 0 640k 1408k"]);
        let bytes = std::fs::read(&data).unwrap();
        assert!(
            bytes[..640 << 10].iter().all(|&b| b == 1)
                && bytes[640 << 10..].iter().all(|&b| b == 0)
        );
    }
}

/// A server marks bitmaps that record writes before it writes. Their contents are lost then, but
/// the disk may be resized. A resize frees the clusters of all bitmaps, so it must not leave a
/// bitmap there.
#[test]
fn a_resized_image_keeps_its_bitmaps_in_use() {
    // Cluster size, granularity, the first size, and the later sizes in MiB. With small clusters
    // the table of a bitmap of the new size has more entries.
    let cases: [(&str, &str, &str, &[u64]); 3] = [
        ("512", "512", "1M", &[16, 2]),
        ("64k", "64k", "1G", &[2048, 1024]),
        ("64k", "64k", "1G", &[512, 1536]),
    ];
    for (cluster, granularity, first, sizes) in cases {
        let scratch = Scratch::new("resize-in-use");
        let path = scratch.path("image.qcow2");
        let options = format!("cluster_size={cluster}");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, &path, first]);
        qemu_img(&["bitmap", "--add", "-g", granularity, &path, "daily"]);
        qemu_img(&["bitmap", "--add", "--disable", "-g", granularity, &path, "rests"]);
        mark(&path);
        for mib in sizes {
            let (what, size) = (format!("{cluster}, {first} to {mib} MiB"), mib * MIB);
            to(&path, Resize { size, shrink: true, below: 0 })
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            sound(&path, &what);
            let info = qemu_img(&["info", "--output=json", &path]);
            for text in [size.to_string().as_str(), "\"daily\"", "\"rests\""] {
                assert!(info.contains(text), "{what}: {text}: {info}");
            }
            assert_eq!(info.matches("\"in-use\"").count(), 1, "{what}: {info}");
        }
        for name in ["daily", "rests"] {
            qemu_img(&["bitmap", "--remove", &path, name]);
        }
        sound(&path, "without bitmaps");
    }
}

/// Returns how many bitmaps of an image are in use, as QEMU lists them.
fn in_use(path: &str) -> usize {
    qemu_img(&["info", "--output=json", path]).matches("\"in-use\"").count()
}

/// Marks the bitmaps that record writes, as a server does before its first write.
fn mark(path: &str) {
    let marked = on_file(path, |raw| async move {
        prepare_for_writing(&raw, &mut Header::read(&raw).await?, AUTOCLEAR_KNOWN).await
    });
    marked.unwrap();
}

/// The bits of each bitmap of the larger disk would take 256 MiB.
#[test]
fn bitmaps_in_use_take_no_memory_of_a_resize() {
    let scratch = Scratch::new("resize-many");
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &path, "1M"]);
    for name in ["1", "2", "3", "4", "5"] {
        qemu_img(&["bitmap", "--add", "-g", "512", &path, name]);
    }
    mark(&path);
    larger(&path, 1 << 40).unwrap();
    sound(&path, "larger");
    assert_eq!(in_use(&path), 5);
    // QEMU would hold more than it accepts.
    let error = larger(&path, 4 << 40).unwrap_err().to_string();
    assert!(error.contains("512 MiB"), "{error}");
    sound(&path, "refused");
    assert_eq!(in_use(&path), 5);
}

/// QEMU refuses the whole image if the table of a bitmap has no entries. If the bitmap is not in
/// use, it refuses one entry too.
#[test]
fn bitmaps_of_a_disk_without_bytes_are_in_use() {
    let scratch = Scratch::new("resize-nothing");
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &path, "1M"]);
    for name in ["daily", "rests"] {
        qemu_img(&["bitmap", "--add", "--disable", &path, name]);
    }
    smaller(&path, 0).unwrap();
    sound(&path, "no bytes");
    assert_eq!(in_use(&path), 2);
    let added = on_file(&path, |raw| async move {
        edit::edit(&raw, "new", &[Edit::Add { granularity: None }]).await
    });
    let error = added.unwrap_err().to_string();
    assert!(error.contains("a disk without a sector has no bitmaps"), "{error}");
    larger(&path, 2 * MIB).unwrap();
    sound(&path, "larger again");
    assert_eq!(in_use(&path), 2);
    // QEMU opens the image for writing.
    qemu_img(&["bitmap", "--remove", &path, "daily"]);
    sound(&path, "without one");
    assert_eq!(in_use(&path), 1);
}

#[test]
fn a_disk_without_bytes_grows_over_its_backing_file() {
    let scratch = Scratch::new("resize-from-nothing");
    let path = scratch.path("image.qcow2");
    std::fs::write(scratch.path("base.raw"), vec![7; MIB as usize]).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", &path, "0"]);
    let options = ChainOptions { only_locked: true, ..ChainOptions::new(&path) };
    let chain = Arc::new(Chain::open(&options).unwrap());
    let wanted = NewSize { size: 2 * MIB, shrink: false, preallocation: Preallocation::Off };
    tools::resize(&chain, wanted).unwrap();
    drop(chain);
    sound(&path, "larger");
    qemu_io(&path, &["read -P 0 0 2M"]);
}

#[test]
fn impossible_resizes_are_refused_with_a_reason() {
    let scratch = Scratch::new("resize-refused");
    let path = scratch.path("image.qcow2");
    let refused = |result: Result<(), ImageError>, expected: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", &path, "1M"]);
    refused(to(&path, Resize { size: 512, shrink: false, below: 0 }), "--shrink");
    refused(larger(&path, MIB + 1), "whole sectors");
    refused(larger(&path, 1 << 40), "larger than 32 MiB");
    qemu_img(&["snapshot", "-c", "one", &path]);
    refused(smaller(&path, 512), "an image with snapshots");
    larger(&path, 2 * MIB).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "compat=0.10", &path, "1M"]);
    qemu_img(&["snapshot", "-c", "one", &path]);
    refused(larger(&path, 2 * MIB), "version 2");
    sound(&path, "refused");
}

#[test]
fn an_emptied_overlay_shows_its_backing_file_and_keeps_its_snapshots() {
    for options in
        ["compat=0.10", "compat=1.1", "cluster_size=512", "extended_l2=on,cluster_size=64k"]
    {
        let scratch = Scratch::new("empty");
        let (path, base) = (scratch.path("image.qcow2"), scratch.path("base.raw"));
        std::fs::write(&base, vec![7; 3 << 20]).unwrap();
        qemu_img(&[
            "create", "-q", "-f", "qcow2", "-o", options, "-F", "raw", "-b", "base.raw", &path,
        ]);
        qemu_io(&path, &["write -P 1 0 1M"]);
        qemu_img(&["snapshot", "-c", "one", &path]);
        qemu_io(&path, &["write -P 2 1M 1M"]);
        on_file(&path, |raw| async move { make_empty(&raw).await }).unwrap();
        sound(&path, options);
        qemu_io(&path, &["read -P 7 0 3M"]);
        qemu_img(&["snapshot", "-a", "one", &path]);
        qemu_io(&path, &["read -P 1 0 1M", "read -P 7 1M 2M"]);
        qemu_img(&["snapshot", "-d", "one", &path]);
        on_file(&path, |raw| async move { make_empty(&raw).await }).unwrap();
        sound(&path, options);
        assert!(blocks(&path) < MIB, "{options}: the host keeps {}", blocks(&path));
    }
}

#[test]
fn every_power_cut_leaves_the_old_or_the_new_size() {
    let mut cuts = 0;
    let kinds = [
        "compat=0.10,cluster_size=1k",
        "cluster_size=512",
        "cluster_size=4k",
        "extended_l2=on,cluster_size=16k",
    ];
    for options in kinds {
        let scratch = Scratch::new("resize-cuts");
        let path = scratch.path("image.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "200k"]);
        qemu_io(&path, &["write -P 1 0 200k"]);
        let image = load(&path);
        for wanted in [Some(3 * MIB), Some(60 << 10), Some(62_976), None] {
            let operation = move |raw| async move {
                match wanted {
                    Some(size) => resize(&raw, None, Resize { size, shrink: true, below: 0 }).await,
                    None => make_empty(&raw).await,
                }
            };
            let before = guest(&image);
            let (done, after) = on_image(&image, operation);
            done.unwrap();
            let after = guest(&after);
            let what = format!("{options}, {wanted:?}");
            cuts += everywhere(&what, &image, operation, |through, left| {
                match guest(&opened_sound(&left)?) {
                    now if now == after || (!through && now == before) => Ok(()),
                    now => Err(format!("{} bytes that are neither; through: {through}", now.len())),
                }
            });
        }
    }
    println!("{cuts} cuts");
    assert!(cuts > 200, "{cuts} cuts");
}

#[test]
fn growth_in_place_changes_the_header_only_and_leaves_the_rest_to_a_resize() {
    // Clusters of 512 bytes: an L1 table of one cluster reaches to 2 MiB.
    let cases = [
        ("cluster_size=512", 200, MIB, 0, true),
        ("cluster_size=512", 200, 2 * MIB, 0, true),
        ("cluster_size=512", 200, 2 * MIB + 512, 0, false),
        ("cluster_size=64k", 1024, 4 << 40, 0, true),
        ("cluster_size=64k", 1024, (4 << 40) + 512, 0, false),
        ("extended_l2=on,cluster_size=64k", 1024, 64 * MIB, MIB, true),
        ("cluster_size=64k", 1024, 64 * MIB, MIB + 512, false),
        ("cluster_size=4k", 201, MIB, 0, false),
        ("cluster_size=4k", 200, 200 << 10, 0, false),
        ("compat=0.10", 1024, 2 * MIB, 0, false),
    ];
    for (options, kib, size, below, expected) in cases {
        let old = format!("{kib}k");
        let scratch = Scratch::new("in-place");
        let path = scratch.path("image.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, &old]);
        qemu_io(&path, &[&format!("write -P 1 0 {old}")]);
        let what = format!("{options}: {old} to {size}, {below}");
        let wanted = Resize { size, shrink: false, below };
        let before = std::fs::read(&path).unwrap();
        let done = on_file(&path, move |raw| async move { grow_in_place(&raw, wanted).await });
        assert_eq!(done.unwrap(), expected, "{what}");
        let after = std::fs::read(&path).unwrap();
        // The header is in the first sector.
        assert!(before[512..] == after[512..] && (before == after) != expected, "{what}");
        if expected {
            sound(&path, &what);
            let zeroes = size.min(2 * MIB) - (kib << 10);
            qemu_io(&path, &[&format!("read -P 1 0 {old}"), &format!("read -P 0 {old} {zeroes}")]);
            qemu_io(&path, &[&format!("write -P 2 {} 512", size - 512)]);
            sound(&path, &what);
        }
    }
}

/// Another program leaves old data behind an L1 table that it has moved to a used cluster.
#[test]
fn growth_in_place_uses_no_entries_that_are_not_zero() {
    let scratch = Scratch::new("in-place");
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", &path, "200k"]);
    let mut bytes = std::fs::read(&path).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes.resize(bytes.len().max(l1 + 512), 0);
    bytes[l1 + 30 * 8] = 1;
    std::fs::write(&path, &bytes).unwrap();
    let to = |size| {
        let wanted = Resize { size, shrink: false, below: 0 };
        on_file(&path, move |raw| async move { grow_in_place(&raw, wanted).await }).unwrap()
    };
    assert!(!to(2 * MIB));
    assert!(std::fs::read(&path).unwrap() == bytes);
    assert!(to(512 << 10), "the entries up to there are zero");
    // A table must lie in the file, or the image does not open again.
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..l1 + 20 * 8]).unwrap();
    assert!(to(640 << 10));
    assert!(!to(MIB), "the file ends before entry 32");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), l1 as u64 + 160);
}

#[test]
fn every_power_cut_of_a_growth_in_place_leaves_the_old_or_the_new_size() {
    let scratch = Scratch::new("in-place-cuts");
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", &path, "200k"]);
    qemu_io(&path, &["write -P 1 0 200k"]);
    let (image, wanted) = (load(&path), Resize { size: MIB, shrink: false, below: 0 });
    let operation =
        move |raw| async move { grow_in_place(&raw, wanted).await.map(|is_done| assert!(is_done)) };
    let (before, (done, after)) = (guest(&image), on_image(&image, operation));
    done.unwrap();
    let after = guest(&after);
    let cuts = everywhere("in place", &image, operation, |through, left| {
        match guest(&opened_sound(&left)?) {
            now if now == after || (!through && now == before) => Ok(()),
            now => Err(format!("{} bytes that are neither; through: {through}", now.len())),
        }
    });
    assert!(cuts > 2, "{cuts} cuts");
}
