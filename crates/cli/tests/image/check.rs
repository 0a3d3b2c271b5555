//! check: the same findings as QEMU, our own exit statuses, and repairs that lose no data.

use std::os::unix::fs::FileExt;
use std::path::Path;

use blockyard_image::qcow2::Header;

use crate::common::tool;
use crate::fixture::{
    Images, MIB, QCOW2, SIZE, image, image_any, json, qemu_img, same_answer, sound_and_same, text,
};
use crate::mistakes::refused;

#[test]
fn consistent_images_are_reported_as_by_qemu() {
    for options in QCOW2 {
        println!("{options}");
        let images = Images::new();
        images.chain(options);
        for name in ["middle.qcow2", "top.qcow2"] {
            same_answer(&["check", text(&images.path(name))]);
        }
        let alone = images.qcow2("alone.qcow2", options, None, SIZE, 1);
        same_answer(&["check", text(&alone)]);
        assert_eq!(image(&["check", text(&alone)]), qemu_img(&["check", text(&alone)]));
        assert_eq!(image(&["check", "-q", text(&alone)]), "");
    }
}

fn write_at(path: &Path, offset: u64, bytes: &[u8]) {
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

/// Offset of the refcount block of a new image with 64 KiB clusters and 16-bit refcounts.
const COUNTS: u64 = 0x20000;

/// Checks that our check exits with `status` and reports the same as QEMU.
#[track_caller]
fn found(path: &Path, status: i32) {
    let args = ["check", "--output", "json", text(path)];
    let (ours, theirs) = (image_any(&args), tool("qemu-img", args));
    assert_eq!(ours.status.code(), Some(status), "{}{}", ours.out, ours.err);
    assert_eq!(json(&ours.out), json(&theirs.out));
    assert!(!ours.err.is_empty() && ours.err.contains("offset"), "{}", ours.err);
    let human = image_any(&["check", text(path)]);
    assert_eq!(human.out, tool("qemu-img", ["check", text(path)]).out);
}

#[test]
fn leaks_are_status_4_and_repaired() {
    let images = Images::new();
    let path = images.qcow2("a.qcow2", "", None, SIZE, 1);
    let copy = images.path("copy.raw");
    qemu_img(&["convert", "-O", "raw", text(&path), text(&copy)]);
    let clusters = std::fs::metadata(&path).unwrap().len() / 65536;
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len((clusters + 2) * 65536)
        .unwrap();
    write_at(&path, COUNTS + clusters * 2, &[0, 1, 0, 3]);
    found(&path, 4);
    let repaired = image_any(&["check", "-r", "leaks", text(&path)]);
    assert_eq!(repaired.status.code(), Some(0), "{}", repaired.err);
    assert!(
        repaired.out.contains("found and repaired:\n\n    2 leaked clusters\n    0 corruptions"),
        "{}",
        repaired.out
    );
    image(&["check", text(&path)]);
    sound_and_same((&path, "qcow2"), (&copy, "raw"));
}

#[test]
fn corruptions_are_status_3_and_repaired() {
    let images = Images::new();
    let path = images.qcow2("a.qcow2", "", None, SIZE, 1);
    let copy = images.path("copy.raw");
    qemu_img(&["convert", "-O", "raw", text(&path), text(&copy)]);
    // Set the refcount of two data clusters to 0.
    write_at(&path, COUNTS + 2 * 5, &[0, 0, 0, 0]);
    found(&path, 3);
    let leaks_only = image_any(&["check", "--repair", "leaks", text(&path)]);
    assert_eq!(leaks_only.status.code(), Some(3));
    let repaired = image_any(&["check", "--repair", "all", "--json", text(&path)]);
    assert_eq!(repaired.status.code(), Some(0), "{}", repaired.err);
    assert!(json(&repaired.out)["corruptions-fixed"].as_u64().unwrap() >= 2, "{}", repaired.out);
    sound_and_same((&path, "qcow2"), (&copy, "raw"));
}

#[test]
fn images_that_cannot_be_checked_are_refused() {
    let images = Images::new();
    let raw = images.raw("a.raw", 4 * MIB, 1);
    refused(&["check", text(&raw)], 1, &["a.raw", "no metadata to check"]);
    refused(&["check", "-f", "qcow2", text(&raw)], 1, &["a.raw", "qcow2 header"]);
    refused(&["check", "-r", "some", text(&raw)], 2, &["'some'", "leaks, all"]);
}

#[test]
fn cow_files_are_checked_and_repaired() {
    let images = Images::new();
    images.raw("base.raw", SIZE, 1);
    let path = images.path("a.cow");
    image(&["create", "-q", "-b", "base.raw", text(&path)]);
    let fields = json(&image(&["check", "--json", text(&path)]));
    assert_eq!(
        (&fields["total-clusters"], &fields["check-errors"]),
        (&(SIZE / 512).into(), &0.into())
    );
    let len = std::fs::metadata(&path).unwrap().len();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(len + 5000).unwrap();
    assert_eq!(image_any(&["check", text(&path)]).status.code(), Some(4));
    image(&["check", "-r", "leaks", text(&path)]);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
    file.set_len(len - 512).unwrap();
    assert_eq!(image_any(&["check", text(&path)]).status.code(), Some(3));
    assert_eq!(image_any(&["check", "-r", "all", text(&path)]).status.code(), Some(0));
    image(&["compare", text(&path), text(&images.path("base.raw"))]);
}

/// Checks that our check exits with status 4 and gives advice, while QEMU reports corruption.
/// Opening the image repairs it.
#[track_caller]
fn repaired_by_opening(path: &Path) {
    assert_eq!(tool("qemu-img", ["check", text(path)]).status.code(), Some(2));
    let done = image_any(&["check", text(path)]);
    assert_eq!(done.status.code(), Some(4), "{}{}", done.out, done.err);
    assert!(done.out.contains("Opening the image for writing, or --repair all"), "{}", done.out);
    assert!(
        !done.out.contains("may be corrupted") && !done.out.contains("No errors"),
        "{}",
        done.out
    );
    let fields = json(&image_any(&["check", "--json", text(path)]).out);
    assert!(
        fields["mended-by-opening"].as_u64() > Some(0) && fields.get("corruptions").is_none(),
        "{fields}"
    );
    let (opened, repaired) =
        (path.with_extension("opened.qcow2"), path.with_extension("repaired.qcow2"));
    std::fs::copy(path, &opened).unwrap();
    std::fs::copy(path, &repaired).unwrap();
    image(&["resize", "-q", text(&opened), "+1M"]);
    assert_eq!(image_any(&["check", "-q", "-r", "all", text(&repaired)]).status.code(), Some(0));
    for mended in [opened, repaired] {
        image(&["check", text(&mended)]);
        qemu_img(&["check", text(&mended)]);
    }
}

#[test]
fn an_image_that_was_not_closed_is_status_4() {
    let images = Images::new();
    let path = images.qcow2("a.qcow2", "lazy_refcounts=on", None, SIZE, 1);
    let killed = tool(
        "qemu-io",
        ["-f", "qcow2", "-c", "write -P 9 16M 1M", "-c", "flush", "-c", "sigraise 9", text(&path)],
    );
    assert!(!killed.status.success());
    repaired_by_opening(&path);
    // An additional error makes the image corrupt: an L1 entry with a reserved bit.
    let header = Header::parse(&std::fs::read(&path).unwrap(), u64::MAX).unwrap();
    write_at(&path, header.l1_offset + 7, &[1]);
    assert_eq!(image_any(&["check", "-q", text(&path)]).status.code(), Some(3));
}

/// An interrupted command leaves COPIED flags unset in an image of version 2.
#[test]
fn copied_flags_that_are_not_set_are_status_4() {
    let images = Images::new();
    let path = images.qcow2("a.qcow2", "compat=0.10", None, SIZE, 1);
    let header = Header::parse(&std::fs::read(&path).unwrap(), u64::MAX).unwrap();
    write_at(&path, header.l1_offset, &[0]);
    repaired_by_opening(&path);
}
