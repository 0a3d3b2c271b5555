//! convert: from everything to everything.

use crate::common::allocated;
use crate::fixture::{Images, QCOW2, SIZE, image, image_any, qemu_img, sound_and_same, text};

#[test]
fn everything_becomes_raw_and_stays_sparse() {
    for options in QCOW2 {
        println!("{options}");
        let images = Images::new();
        let source = images.chain(options);
        let (ours, theirs) = (images.path("ours.raw"), images.path("theirs.raw"));
        image(&["convert", text(&source), text(&ours)]);
        qemu_img(&["convert", "-O", "raw", text(&source), text(&theirs)]);
        sound_and_same((&ours, "raw"), (&source, "qcow2"));
        assert_eq!(std::fs::metadata(&ours).unwrap().len(), SIZE);
        // (File systems may take a block or two for the list of extents.)
        assert!(allocated(&ours) <= allocated(&theirs) + 16384, "{} {}", allocated(&ours), allocated(&theirs));
        // Read past the page cache, written without it, and all of it.
        let full = images.path("full.raw");
        image(&["convert", "-T", "none", "-t", "none", "-S", "0", text(&source), text(&full)]);
        sound_and_same((&full, "raw"), (&ours, "raw"));
        assert!(allocated(&full) >= SIZE);
    }
}

#[test]
fn what_exists_is_replaced_only_when_that_is_said() {
    let images = Images::new();
    let source = images.raw("a.raw", SIZE, 1);
    let target = images.path("b.raw");
    std::fs::write(&target, "precious").unwrap();
    let refused = image_any(&["convert", text(&source), text(&target)]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.err.contains("b.raw exists already: say --force"), "{}", refused.err);
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    image(&["convert", "--force", text(&source), text(&target)]);
    sound_and_same((&target, "raw"), (&source, "raw"));
    // Onto itself: the image is in use.
    let itself = image_any(&["convert", "--force", text(&source), text(&source)]);
    assert_eq!(itself.status.code(), Some(1));
    assert!(itself.err.contains("is in use by blockyard"), "{}", itself.err);
    let names: Vec<_> = std::fs::read_dir(&*images.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "nothing else is left: {names:?}");
}
