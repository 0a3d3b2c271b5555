//! resize: old data stays, and new space reads as zeroes.

use std::path::Path;

use crate::commit::{copy, size};
use crate::common::allocated;
use crate::fixture::{
    Images, MIB, SIZE, image, image_any, json, qemu_img, qemu_io, sound_and_same, text,
};
use crate::mistakes::refused;

fn set_len(path: &Path, len: u64) {
    std::fs::File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn an_image_grows_and_shrinks() {
    for (number, options) in
        ["", "compat=0.10", "cluster_size=512", "extended_l2=on", "data_file=data.bin"]
            .into_iter()
            .enumerate()
    {
        println!("{options}");
        let images = Images::new();
        let path = images.qcow2("a.qcow2", options, None, SIZE, 5);
        let expected = copy(&images, &path);
        for (change, len) in
            [("+8M", 32 * MIB), ("5000k", 5000 << 10), ("-1024", 4999 << 10), ("1G", 1 << 30)]
        {
            let before = size(&path, "qcow2");
            if len < before {
                refused(&["resize", text(&path), change], 1, &["a.qcow2", "--shrink"]);
                assert_eq!(size(&path, "qcow2"), before);
            }
            match number {
                0 => qemu_img(&["resize", "--shrink", text(&path), "--", change]),
                _ => image(&["resize", "--shrink", text(&path), change]),
            };
            set_len(&expected, len);
            assert_eq!(size(&path, "qcow2"), len);
            sound_and_same((&path, "qcow2"), (&expected, "raw"));
        }
    }
}

#[test]
fn a_grown_overlay_does_not_show_data_of_a_longer_backing_file() {
    for options in ["", "cluster_size=512", "extended_l2=on,cluster_size=128k"] {
        let images = Images::new();
        images.raw("base.raw", SIZE, 3);
        let path = images.qcow2("a.qcow2", options, Some(("base.raw", "raw")), 10 * MIB + 512, 5);
        let expected = copy(&images, &path);
        for (preallocation, len) in [("off", 20 * MIB), ("falloc", 22 * MIB), ("full", 30 * MIB)] {
            image(&[
                "resize",
                "-q",
                "--preallocation",
                preallocation,
                text(&path),
                &len.to_string(),
            ]);
            set_len(&expected, len);
            sound_and_same((&path, "qcow2"), (&expected, "raw"));
        }
    }
}

#[test]
fn raw_images_grow_and_shrink() {
    let images = Images::new();
    let path = images.raw("a.raw", SIZE, 3);
    let expected = copy(&images, &path);
    for (change, len) in [("+1M", SIZE + MIB), ("-2M", SIZE - MIB), ("32M", 32 * MIB)] {
        assert_eq!(
            image(&["resize", "--shrink", "-f", "raw", text(&path), change]),
            "Image resized.\n"
        );
        set_len(&expected, len);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
        sound_and_same((&path, "raw"), (&expected, "raw"));
    }
    refused(&["resize", text(&path), "1M"], 1, &["a.raw", "--shrink"]);
    refused(
        &["resize", "--preallocation=metadata", text(&path), "+1M"],
        1,
        &["a.raw", "no metadata"],
    );
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 32 * MIB);
    for mode in ["falloc", "full"] {
        let before = (allocated(&path), std::fs::metadata(&path).unwrap().len());
        image(&["resize", "-q", "--preallocation", mode, text(&path), "+3M"]);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), before.1 + 3 * MIB);
        assert!(
            allocated(&path) >= before.0 + 3 * MIB,
            "{mode}: {} of {}",
            allocated(&path),
            before.0
        );
    }
}

#[test]
fn preallocation_takes_the_requested_space() {
    for options in ["extended_l2=on,cluster_size=64k", "data_file=data.bin", ""] {
        println!("{options}");
        let images = Images::new();
        let path = images.qcow2("a.qcow2", options, None, 10 * MIB + 512, 5);
        let expected = copy(&images, &path);
        let file =
            if options.contains("data") { images.path("a.qcow2.data") } else { path.clone() };
        let mut len = 10 * MIB + 512;
        for (mode, takes) in [("off", false), ("metadata", false), ("falloc", true), ("full", true)]
        {
            let before = allocated(&file);
            image(&["resize", "-q", &format!("--preallocation={mode}"), text(&path), "+20M"]);
            len += 20 * MIB;
            set_len(&expected, len);
            sound_and_same((&path, "qcow2"), (&expected, "raw"));
            let more = allocated(&file) - before;
            // (The cluster at the old end is partial.)
            assert!(if takes { more >= 19 * MIB } else { more < 4 * MIB }, "{mode}: {more}");
            let map = json(&qemu_img(&[
                "map",
                "--output",
                "json",
                "-s",
                &(len - MIB).to_string(),
                text(&path),
            ]));
            assert_eq!(map[0].get("offset").is_some(), mode != "off", "{mode}: {map}");
        }
        // The image is writable.
        for file in [(&path, "qcow2"), (&expected, "raw")] {
            qemu_io(file.0, file.1, &["write -P 7 20M 70M"]);
        }
        sound_and_same((&path, "qcow2"), (&expected, "raw"));
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let images = Images::new();
    let path = images.qcow2("a.qcow2", "", None, SIZE, 1);
    let raw = images.raw("base.raw", SIZE, 1);
    for (size, status, part) in [
        ("+1", 1, "not whole sectors"),
        ("-24M", 1, "the new size is out of range"),
        ("-25M", 1, "the new size is out of range"),
        ("0", 1, "the new size is out of range"),
        ("4P", 1, "L1 table larger than 32 MiB"),
        ("x", 2, "is no size"),
        ("+", 2, "is no size"),
        ("+-1M", 2, "is no size"),
    ] {
        refused(&["resize", text(&path), size], status, &[part]);
    }
    refused(
        &["resize", "--preallocation=some", text(&path), "+1M"],
        2,
        &["off, metadata, falloc or full"],
    );
    refused(
        &["resize", "--shrink", "--preallocation=full", text(&path), "-1M"],
        1,
        &["--preallocation"],
    );
    refused(&["resize", text(&path)], 2, &["SIZE"]);
    image(&["snapshot", "-c", "one", text(&path)]);
    refused(&["resize", "--shrink", text(&path), "1M"], 1, &["a.qcow2", "snapshots"]);
    let cow = images.path("a.cow");
    image(&["create", "-q", "-b", "base.raw", text(&cow)]);
    refused(&["resize", text(&cow), "+1M"], 1, &["a.cow", "the size of its backing file"]);
    assert_eq!(size(&raw, "raw"), SIZE);
    assert_eq!(size(&path, "qcow2"), SIZE);
}

#[test]
fn an_overlay_with_a_base_in_another_folder_can_be_resized() {
    let (images, elsewhere) = (Images::new(), Images::new());
    let base = elsewhere.raw("base.raw", SIZE, 3);
    let path = images.qcow2("a.qcow2", "", Some((text(&base), "raw")), 10 * MIB, 5);
    let (expected, own) =
        (copy(&images, &path), json(&image_any(&["map", "--json", text(&path)]).out));
    for extent in json(&qemu_img(&["map", "--output", "json", text(&path)])).as_array().unwrap() {
        let shown = own.as_array().unwrap().iter().any(|own| own == extent);
        assert_eq!(shown, extent["depth"] == 0, "{extent} {own}");
    }
    let changes = [("9M", 9 * MIB), ("30M", 30 * MIB), ("31M", 31 * MIB)];
    for (change, len) in changes {
        image(&["resize", "--shrink", text(&path), change]);
        set_len(&expected, len);
        sound_and_same((&path, "qcow2"), (&expected, "raw"));
    }
    // Completing the last cluster may need data of the backing file.
    let odd = images.qcow2("b.qcow2", "", Some((text(&base), "raw")), 10 * MIB + 512, 5);
    refused(&["resize", text(&odd), "11M"], 1, &["b.qcow2", "--backing-folder"]);
    image(&["resize", "--backing-folder", text(&elsewhere.path("")), text(&odd), "11M"]);
}
