//! rebase: another backing file and the same disk, checked by QEMU.

use crate::bitmap::listed;
use crate::commit::{copy, own};
use crate::common::allocated;
use crate::fixture::{Images, MIB, SIZE, image, image_any, json, qemu_img, sound_and_same, text};
use crate::mistakes::refused;

fn backing(path: &std::path::Path) -> (Option<String>, Option<String>) {
    let info = json(&qemu_img(&["info", "--output", "json", text(path)]));
    let text = |key: &str| info[key].as_str().map(str::to_string);
    (text("backing-filename"), text("backing-filename-format"))
}

/// Names and formats of the backing files that the overlay gets one after the other, larger and
/// smaller. With the last one, the overlay has no backing file.
const BASES: [(&str, &str); 5] = [
    ("base.raw", "raw"),
    ("other.raw", "raw"),
    ("small.qcow2", "qcow2"),
    ("large.qcow2", "qcow2"),
    ("", ""),
];

#[test]
fn a_rebase_does_not_change_the_disk() {
    let all = ["compat=0.10", "extended_l2=on,cluster_size=128k", "cluster_size=512"];
    for (number, options) in all.into_iter().enumerate() {
        let images = Images::new();
        let top = images.chain(options);
        let expected = copy(&images, &top);
        images.raw("other.raw", 20 * MIB, 77);
        images.qcow2("small.qcow2", "", None, 11 * MIB + 512, 40);
        images.qcow2(
            "large.qcow2",
            "cluster_size=4k",
            Some(("other.raw", "raw")),
            SIZE + 4 * MIB,
            80,
        );
        let had = own(&top);
        for (name, format) in BASES {
            println!("{options} over {name}");
            let with = ["-b", name, "-F", format];
            let with = if name.is_empty() { &with[..2] } else { &with[..] };
            match (number, name) {
                // QEMU does one of the rebases. Both programs continue with images of the other.
                (2, "small.qcow2") => qemu_img(&[&["rebase"], with, &[text(&top)]].concat()),
                _ => image(&[&["rebase"], with, &[text(&top)]].concat()),
            };
            let name = (!name.is_empty()).then(|| name.to_string());
            assert_eq!(backing(&top), (name.clone(), name.map(|_| format.to_string())));
            sound_and_same((&top, "qcow2"), (&expected, "raw"));
            image(&["compare", text(&top), text(&expected)]);
            // The overlay now has the data of the middle image, except data that is equal in both.
            if format == "raw" && with[1] == "base.raw" {
                assert!((had..had + 7 * MIB).contains(&own(&top)), "{had} {}", own(&top));
            }
        }
    }
}

/// The disk does not change, so an incremental backup can go on with the bitmap.
#[test]
fn a_rebase_keeps_a_bitmap_that_records_writes_valid() {
    let images = Images::new();
    let top = images.chain("compat=1.1");
    let expected = copy(&images, &top);
    images.raw("other.raw", 20 * MIB, 77);
    image(&["bitmap", "--add", text(&top), "daily"]);
    let had = own(&top);
    image(&["rebase", "-b", "other.raw", "-F", "raw", text(&top)]);
    assert!(own(&top) > had, "nothing was copied");
    let bitmaps = listed(&top);
    assert_eq!((bitmaps.len(), bitmaps[0].0.as_str()), (1, "daily"));
    assert_eq!(bitmaps[0].1, ["auto"], "it is marked as in use");
    sound_and_same((&top, "qcow2"), (&expected, "raw"));
}

/// Both chains have the base. The new one hides its end, so the disk's data there must be copied.
#[test]
fn a_rebase_to_a_shorter_overlay_of_the_same_base_keeps_what_lies_behind_its_end() {
    let images = Images::new();
    images.raw("base.raw", 16 * MIB, 3);
    let over_base = |name: &str, size: &str| {
        let path = images.path(name);
        let base = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw"];
        qemu_img(&[&base[..], &[text(&path), size]].concat());
        path
    };
    over_base("middle.qcow2", "8M");
    let top = over_base("top.qcow2", "16M");
    let expected = copy(&images, &top);
    image(&["rebase", "-b", "middle.qcow2", "-F", "qcow2", text(&top)]);
    sound_and_same((&top, "qcow2"), (&expected, "raw"));
}

#[test]
fn copied_clusters_are_compressed_with_the_option() {
    for options in [
        "compat=0.10",
        "extended_l2=on,cluster_size=128k",
        "compression_type=zstd,cluster_size=512",
    ] {
        let images = Images::new();
        let top = images.chain(options);
        let (expected, plain) = (copy(&images, &top), images.path("plain.qcow2"));
        std::fs::copy(&top, &plain).unwrap();
        let compressed = |path: &std::path::Path| {
            json(&image(&["check", "--json", text(path)]))["compressed-clusters"].as_u64()
        };
        let before = compressed(&top).unwrap();
        image(&["rebase", "-b", "", text(&plain)]);
        image(&["rebase", "-c", "-b", "", text(&top)]);
        sound_and_same((&top, "qcow2"), (&expected, "raw"));
        assert!(compressed(&top).unwrap() > before, "{options}");
        assert!(
            allocated(&top) < allocated(&plain),
            "{options}: {} {}",
            allocated(&top),
            allocated(&plain)
        );
    }
    let images = Images::new();
    images.raw("base.raw", SIZE, 3);
    let cow = images.path("a.cow");
    image(&["create", "-q", "-b", "base.raw", text(&cow)]);
    refused(&["rebase", "-c", "-b", "base.raw", text(&cow)], 2, &["-c", "only qcow2 images"]);
    refused(&["rebase", "-c", "-u", "-b", "base.raw", text(&cow)], 2, &["--unsafe"]);
}

#[test]
fn images_in_both_chains_are_not_read() {
    let images = Images::new();
    let top = images.chain("");
    let expected = copy(&images, &top);
    // An empty overlay on the middle image. The top image is rebased to this overlay, and back to
    // the middle image.
    image(&["create", "-q", "-b", "middle.qcow2", text(&images.path("between.qcow2"))]);
    let had = own(&top);
    for name in ["between.qcow2", "middle.qcow2"] {
        image(&["rebase", "-b", name, text(&top)]);
        // Nothing is copied, although there is data to compare after the end of the middle image.
        assert_eq!(own(&top), had);
        sound_and_same((&top, "qcow2"), (&expected, "raw"));
    }
}

#[test]
fn unsafe_rebase_changes_only_the_name() {
    let images = Images::new();
    let top = images.chain("");
    let expected = copy(&images, &top);
    std::fs::rename(images.path("middle.qcow2"), images.path("moved.qcow2")).unwrap();
    refused(
        &["rebase", "-b", "moved.qcow2", text(&top)],
        1,
        &["top.qcow2", "middle.qcow2", "is missing"],
    );
    assert_eq!(image(&["rebase", "-u", "-b", "moved.qcow2", text(&top)]), "");
    assert_eq!(backing(&top), (Some("moved.qcow2".into()), Some("qcow2".into())));
    sound_and_same((&top, "qcow2"), (&expected, "raw"));
    image(&["rebase", "--unsafe", "-b", "not-there-yet", "-F", "raw", text(&top)]);
    assert_eq!(backing(&top), (Some("not-there-yet".into()), Some("raw".into())));
    image(&["rebase", "-u", "-b", "", text(&top)]);
    assert_eq!(backing(&top), (None, None));
    qemu_img(&["check", "-q", text(&top)]);
    // For a base in another folder, the warning names the option that opens the image.
    let other = Images::new();
    let far = other.raw("far.raw", SIZE, 3);
    let done = image_any(&["rebase", "-b", text(&far), text(&top)]);
    assert!(done.status.success() && done.err.contains("--backing-folder"), "{}", done.err);
}

#[test]
fn cow_files_can_be_rebased() {
    let images = Images::new();
    let (source, cow) = (images.raw("source.raw", SIZE, 9), images.path("over.cow"));
    images.raw("base.raw", SIZE, 1);
    images.raw("other.raw", SIZE, 50);
    images.raw("small.raw", 4 * MIB, 1);
    image(&["convert", "-B", "base.raw", text(&source), text(&cow)]);
    image(&["rebase", "-b", "other.raw", text(&cow)]);
    image(&["compare", text(&cow), text(&source)]);
    let info = json(&image(&["info", "--json", text(&cow)]));
    let real = images.path("other.raw").canonicalize().unwrap();
    assert_eq!(info["backing-filename"], text(&real));
    refused(
        &["rebase", "-b", "small.raw", text(&cow)],
        1,
        &["over.cow", "4194304 bytes", "25165824"],
    );
    refused(&["rebase", "-u", "-b", "small.raw", text(&cow)], 1, &["over.cow", "as many sectors"]);
    refused(&["rebase", "-b", "", text(&cow)], 1, &["over.cow", "convert"]);
    refused(&["rebase", "-b", "x.qcow2", text(&cow)], 1, &["x.qcow2", "is raw"]);
    // The backing file has another modification time: only an unsafe rebase accepts that.
    let touched = std::fs::File::options().write(true).open(&real).unwrap();
    touched.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    refused(&["map", text(&cow)], 1, &["over.cow", "rebase --unsafe -b"]);
    image(&["rebase", "-u", "-b", "other.raw", text(&cow)]);
    image(&["compare", text(&cow), text(&source)]);
}

#[test]
fn impossible_rebases_are_refused() {
    let images = Images::new();
    let (raw, top) = (images.raw("a.raw", 4 * MIB, 1), images.chain(""));
    refused(&["rebase", text(&top)], 2, &["--backing"]);
    refused(&["rebase", "-b", "nameless", text(&top)], 2, &["nameless", "-F"]);
    refused(&["rebase", "-b", "missing.raw", text(&top)], 1, &["missing.raw", "no such file"]);
    refused(&["rebase", "-b", "base.raw", text(&raw)], 1, &["a.raw", "no backing file"]);
    refused(&["rebase", "-b", "top.qcow2", text(&top)], 1, &["top.qcow2", "its own backing file"]);
    let middle = images.path("middle.qcow2");
    let before = std::fs::read(&middle).unwrap();
    refused(&["rebase", "-b", "top.qcow2", text(&middle)], 1, &["middle.qcow2", "circle"]);
    refused(
        &["rebase", "-b", &"x".repeat(1100), "-F", "raw", "-u", text(&top)],
        1,
        &["top.qcow2", "1 to 1023 bytes"],
    );
    assert!(std::fs::read(&middle).unwrap() == before);
}
