//! bitmap and amend: QEMU reads our bitmaps and their bits.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::common::{guests, run};
use crate::fixture::{
    Images, MIB, SIZE, image, image_any, json, qemu_img, qemu_io, same_answer, text,
};
use crate::mistakes::refused;

/// Returns the bitmaps in QEMU's list: name, flags, granularity.
pub fn listed(path: &Path) -> Vec<(String, Vec<String>, u64)> {
    let info = json(&qemu_img(&["info", "-f", "qcow2", "--output", "json", text(path)]));
    let all = info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
    let string = |value: &Value| value.as_str().unwrap().to_string();
    let flags = |bitmap: &Value| bitmap["flags"].as_array().unwrap().iter().map(string).collect();
    all.iter().map(|b| (string(&b["name"]), flags(b), b["granularity"].as_u64().unwrap())).collect()
}

/// Checks that nothing in the image is damaged or leaked.
fn sound(path: &Path) {
    qemu_img(&["check", "-q", "-f", "qcow2", text(path)]);
    image(&["check", text(path)]);
}

/// Returns the dirty ranges of a bitmap (start and length), as QEMU reads them: `map` of the bitmap
/// over NBD, on a copy of the image.
fn dirty(path: &Path, bitmap: &str) -> Vec<(u64, u64)> {
    let script = "set -e; image=$1 bitmap=$2; cp \"$image\" \"$image.copy\"\n\
        \"$0\" qemu-nbd -f qcow2 -B \"$bitmap\" -k \"$image.nbd\" --fork --pid-file=\"$image.pid\" \"$image.copy\"\n\
        \"$0\" qemu-img map --output=json --image-opts \"driver=nbd,server.type=unix,server.path=$image.nbd,\
        x-dirty-bitmap=qemu:dirty-bitmap:$bitmap\"\n\
        server=$(cat \"$image.pid\")\n\
        kill \"$server\"\n\
        while [ -e \"/proc/$server/exe\" ]; do sleep 0.01; done";
    // (The NBD server writes to the copy until it ends. The next call makes another copy.)
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(guests().join("tool")).arg(path).arg(bitmap);
    // Dirty ranges are reported as ranges without data.
    let all = json(&run(&mut command, Duration::from_secs(60)).good());
    let piece = |p: &Value| (p["start"].as_u64().unwrap(), p["length"].as_u64().unwrap());
    all.as_array().unwrap().iter().filter(|p| p["data"] == false).map(piece).collect()
}

#[test]
fn bitmaps_change_in_the_same_way_as_with_qemu_img() {
    let images = Images::new();
    for options in ["", "cluster_size=512", "extended_l2=on,cluster_size=2M"] {
        let (ours, theirs) = (images.path("ours.qcow2"), images.path("theirs.qcow2"));
        for path in [&ours, &theirs] {
            let options = if options.is_empty() { "compat=1.1" } else { options };
            qemu_img(&[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                options,
                text(path),
                &SIZE.to_string(),
            ]);
        }
        let steps = [
            &["--add", "one"][..],
            &["--add", "-g", "512", "a longer name, with spaces"],
            &["--add", "--disable", "two"],
            &["--disable", "one"],
            &["--enable", "two"],
            &["--remove", "one"],
            &["--clear", "two"],
        ];
        for step in steps {
            let (name, flags) = step.split_last().unwrap();
            image(&[&["bitmap"], flags, &[text(&ours), name]].concat());
            qemu_img(&[&["bitmap", "-f", "qcow2"], flags, &[text(&theirs), name]].concat());
            assert_eq!(listed(&ours), listed(&theirs), "{options} {step:?}");
            sound(&ours);
        }
        image(&["bitmap", "--remove", text(&ours), "two"]);
        image(&["bitmap", "--remove", text(&ours), "a longer name, with spaces"]);
        assert!(listed(&ours).is_empty());
        sound(&ours);
    }
    let path = images.path("ours.qcow2");
    refused(&["bitmap", "--remove", text(&path), "none"], 1, &["there is no bitmap \"none\""]);
    refused(
        &["bitmap", "--add", "-g", "1000", text(&path), "x"],
        1,
        &["power of two from 512 to 2G"],
    );
    refused(&["bitmap", text(&path), "x"], 2, &["--add"]);
    let raw = images.raw("a.raw", MIB * 4, 1);
    refused(
        &["bitmap", "--add", text(&raw), "x", "-f", "raw"],
        1,
        &["only qcow2 images have bitmaps"],
    );
}

#[test]
fn bits_survive_merges_and_resizes() {
    let images = Images::new();
    let path = images.path("a.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", text(&path), "24M"]);
    image(&["bitmap", "--add", "-g", "64k", text(&path), "coarse"]);
    qemu_io(&path, "qcow2", &["write -P 1 1M 64k", "write -P 1 23M 1M"]);
    image(&["bitmap", "--disable", text(&path), "coarse"]);
    image(&["bitmap", "--add", "-g", "4k", text(&path), "fine"]);
    qemu_io(&path, "qcow2", &["write -P 2 4k 4k", "write -P 2 2M 128k"]);
    assert_eq!(dirty(&path, "coarse"), [(1 << 20, 64 << 10), (23 << 20, 1 << 20)]);
    assert_eq!(dirty(&path, "fine"), [(4 << 10, 4 << 10), (2 << 20, 128 << 10)]);
    image(&[
        "bitmap",
        "--add",
        "--merge",
        "coarse",
        "--merge",
        "fine",
        "-g",
        "32k",
        text(&path),
        "all",
    ]);
    let all = [(0, 32 << 10), (1 << 20, 64 << 10), (2 << 20, 128 << 10), (23 << 20, 1 << 20)];
    assert_eq!(dirty(&path, "all"), all);
    sound(&path);

    // Grow by less than a granule; shrink in the middle of a dirty range.
    image(&["resize", text(&path), "40000k"]);
    assert_eq!(dirty(&path, "all"), all);
    image(&["resize", "--shrink", text(&path), "23900k"]);
    assert_eq!(dirty(&path, "all")[3], (23 << 20, (23900 << 10) - (23 << 20)));
    image(&["resize", "--preallocation", "metadata", text(&path), "32M"]);
    assert_eq!(dirty(&path, "all")[3].0, 23 << 20);
    assert!(dirty(&path, "all").last().unwrap().0 < 24 << 20, "what is new is not dirty");
    sound(&path);
    same_answer(&["info", text(&path)]);

    let other = images.path("b.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&other), "32M"]);
    image(&["bitmap", "--add", "-g", "1M", text(&other), "copy"]);
    image(&["bitmap", "--merge", "coarse", "-b", text(&path), text(&other), "copy"]);
    assert_eq!(dirty(&other, "copy"), [(1 << 20, 1 << 20), (23 << 20, 1 << 20)]);
    // The bitmap `all` has all bits of the first megabyte. QEMU writes a table entry without data
    // for them.
    qemu_img(&["bitmap", "--merge", "all", "-b", text(&path), "-F", "qcow2", text(&other), "copy"]);
    assert_eq!(dirty(&other, "copy"), [(0, 3 << 20), (23 << 20, 1 << 20)]);
    sound(&other);
}

#[test]
fn options_of_an_image_change_in_place() {
    let images = Images::new();
    images.raw("base.raw", 7 * MIB, 1);
    let path = images.qcow2("a.qcow2", "compat=0.10", Some(("base.raw", "raw")), SIZE, 3);
    let expected = images.path("expected.raw");
    qemu_img(&["convert", "-O", "raw", text(&path), text(&expected)]);
    qemu_img(&["snapshot", "-c", "kept", text(&path)]);
    refused(&["bitmap", "--add", text(&path), "x"], 1, &["amend -o compat=1.1"]);
    refused(&["amend", "-o", "lazy_refcounts=on", text(&path)], 1, &["compat=1.1"]);
    for (options, lazy) in [
        ("compat=1.1", false),
        ("lazy_refcounts=on", true),
        ("lazy_refcounts=off,compat=v3", false),
    ] {
        image(&["amend", "-o", options, text(&path)]);
        let info = same_answer(&["info", text(&path)]);
        let data = &info["format-specific"]["data"];
        assert_eq!(
            (&data["compat"], &data["lazy-refcounts"]),
            (&"1.1".into(), &lazy.into()),
            "{options}"
        );
        qemu_img(&["compare", "-q", text(&path), text(&expected)]);
        sound(&path);
    }
    image(&["bitmap", "--add", text(&path), "x"]);
    refused(&["amend", "-o", "compat=0.10", text(&path)], 1, &["convert -o compat=0.10"]);
    refused(
        &["amend", "-o", "cluster_size=4k", text(&path)],
        2,
        &["cluster_size", "image convert"],
    );
    refused(&["amend", "-o", "size=1G", text(&path)], 2, &["image resize"]);
    assert!(image_any(&["amend", "-o", "help", text(&path)]).out.contains("lazy_refcounts"));
}
