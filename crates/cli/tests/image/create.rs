//! create: new images, compared by QEMU.

use serde_json::Value;

use crate::common::allocated;
use crate::fixture::{
    Images, MIB, QCOW2, SIZE, image, image_any, json, qemu_img, same_answer, sound_and_same, text,
};
use crate::mistakes::refused;

fn info(path: &std::path::Path) -> Value {
    json(&qemu_img(&["info", "--output", "json", text(path)]))
}

#[test]
fn qcow2_images_are_the_same_as_those_of_qemu() {
    for options in
        QCOW2.into_iter().chain(["preallocation=falloc", "preallocation=full,cluster_size=4k"])
    {
        println!("{options}");
        let images = Images::new();
        let (ours, theirs) = (images.path("a.qcow2"), images.path("b.qcow2"));
        let with = |data: &str| options.replace("data.bin", data);
        // QEMU resolves a relative name in its working directory.
        let here = with(text(&images.path("a.data")));
        let output = image(&["create", "-o", &here, text(&ours), "24M"]);
        assert!(
            output.starts_with(&format!("Formatting '{}', fmt=qcow2 cluster_size=", text(&ours))),
            "{output}"
        );
        let data = with(text(&images.path("b.data")));
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &data, text(&theirs), "24M"]);
        qemu_img(&["check", "-q", text(&ours)]);
        same_answer(&["map", text(&ours)]);
        let (mut a, mut b) = (info(&ours), info(&theirs));
        a["format-specific"]["data"]["data-file"].take();
        b["format-specific"]["data"]["data-file"].take();
        for field in ["virtual-size", "cluster-size", "format-specific", "dirty-flag"] {
            assert_eq!(a[field], b[field], "{field}");
        }
        qemu_img(&["compare", "-q", text(&ours), text(&theirs)]);
    }
}

#[test]
fn overlays_have_fast_options_and_the_size_of_their_base() {
    let images = Images::new();
    let base = images.raw("base.raw", 7 * MIB + 512, 3);
    let overlay = images.path("overlay.qcow2");
    // The name is relative to the folder of the image, not to the working directory.
    image(&["create", "-b", "base.raw", text(&overlay)]);
    let fields = info(&overlay);
    assert_eq!(fields["virtual-size"], 7 * MIB + 512);
    assert_eq!(fields["cluster-size"], 131072);
    assert_eq!(fields["format-specific"]["data"]["extended-l2"], true);
    assert_eq!(fields["backing-filename"], "base.raw");
    assert_eq!(fields["backing-filename-format"], "raw");
    sound_and_same((&overlay, "qcow2"), (&base, "raw"));
    // Given options override the defaults.
    for (options, cluster, extended) in [
        ("extended_l2=off", 65536, Some(false)),
        ("cluster_size=4k", 4096, Some(false)),
        ("cluster_size=64k", 65536, Some(true)),
        ("compat=0.10", 65536, None),
        ("extended_l2=on,cluster_size=32k", 32768, Some(true)),
    ] {
        let image_options =
            ["create", "-q", "--force", "-o", options, "-b", "overlay.qcow2", "-F", "qcow2"];
        let top = images.path("top.qcow2");
        assert_eq!(image(&[&image_options[..], &[text(&top), "20M"]].concat()), "");
        let fields = info(&top);
        assert_eq!(
            (&fields["virtual-size"], &fields["cluster-size"]),
            (&(20 * MIB).into(), &cluster.into())
        );
        assert_eq!(
            fields["format-specific"]["data"].get("extended-l2"),
            extended.map(Value::Bool).as_ref()
        );
        sound_and_same((&top, "qcow2"), (&base, "raw"));
    }
    refused(
        &["create", "-b", "missing.raw", text(&images.path("x.qcow2"))],
        1,
        &["missing.raw", "no such file"],
    );
    refused(
        &["create", "-u", "-b", "missing.raw", text(&images.path("x.qcow2"))],
        2,
        &["x.qcow2", "size"],
    );
    image(&["create", "-q", "-u", "-b", "missing.raw", text(&images.path("x.qcow2")), "1M"]);
    assert_eq!(info(&images.path("x.qcow2"))["backing-filename"], "missing.raw");
    // For a base in another folder, the warning names the option that opens the overlay.
    let other = Images::new();
    let far = other.path("far.qcow2");
    let done = image_any(&["create", "-q", "-b", text(&base), text(&far)]);
    assert!(done.status.success() && done.err.contains("--backing-folder"), "{}", done.err);
}

#[test]
fn raw_and_cow_images_are_created() {
    let images = Images::new();
    for (preallocation, least, most) in
        [("off", 0, 8192), ("falloc", 5 * MIB, 6 * MIB), ("full", 5 * MIB, 6 * MIB)]
    {
        let path = images.path(&format!("{preallocation}.raw"));
        image(&[
            "create",
            "-q",
            "-o",
            &format!("preallocation={preallocation}"),
            text(&path),
            "5M",
        ]);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 5 * MIB);
        assert!(
            (least..=most).contains(&allocated(&path)),
            "{preallocation}: {}",
            allocated(&path)
        );
    }
    let base = images.raw("base.raw", SIZE, 1);
    for version in ["1", "2", "3"] {
        let cow = images.path(&format!("{version}.cow"));
        image(&["create", "-b", "base.raw", "-o", &format!("version={version}"), text(&cow)]);
        image(&["compare", text(&cow), text(&base)]);
        let fields = json(&image(&["info", "--json", text(&cow)]));
        assert_eq!((&fields["format"], &fields["virtual-size"]), (&"cow".into(), &SIZE.into()));
        assert_eq!(fields["full-backing-filename"], text(&base.canonicalize().unwrap()));
    }
    refused(
        &["create", text(&images.path("x.cow")), "1M"],
        2,
        &["a cow image needs a backing file"],
    );
}

#[test]
fn wrong_options_are_refused() {
    let images = Images::new();
    let new = images.path("new.qcow2");
    let new = text(&new);
    for (options, parts) in [
        ("cluster_size=5k", &["cluster size", "power of two"][..]),
        ("cluster_size=big", &["cluster_size=\"big\"", "a size"]),
        ("compat=3", &["compat=\"3\"", "0.10 or 1.1"]),
        ("clustersize=4k", &["no option \"clustersize\"", "cluster_size"]),
        ("compat=0.10,extended_l2=on", &["version 2"]),
        ("extended_l2=on,cluster_size=4k", &["extended L2", "16 KiB"]),
        ("data_file_raw=on", &["raw data file"]),
        ("preallocation=some", &["preallocation=\"some\"", "falloc"]),
        ("refcount_bits=17", &["refcounts"]),
    ] {
        let status = if parts.len() == 2 && parts[0].contains('"') { 2 } else { 1 };
        refused(&["create", "-o", options, new, "1M"], status, parts);
    }
    refused(&["create", new], 2, &["new.qcow2", "size"]);
    refused(&["create", new, "1Q"], 2, &["1Q", "is no size"]);
    refused(&["create", new, "7E"], 1, &["L1 table", "larger clusters"]);
    refused(&["create", "-b", "", new], 2, &["name is empty"]);
    refused(
        &["create", "-f", "raw", "-b", "x.raw", "-u", new, "1M"],
        2,
        &["raw images have no backing files"],
    );
    assert_eq!(std::fs::read_dir(&*images.0).unwrap().count(), 0, "nothing is left");
    assert!(image(&["create", "-o", "help", new]).contains("compression_type"));
    image(&["create", "-q", new, "1M"]);
    refused(&["create", new, "2M"], 1, &["exists already", "--force"]);
    image(&["create", "-q", "--force", new, "2M"]);
    assert_eq!(info(std::path::Path::new(new))["virtual-size"], 2 * MIB);
    let data = images.path("d");
    std::fs::write(&data, "precious").unwrap();
    refused(
        &["create", "-o", "data_file=d", text(&images.path("y.qcow2")), "1M"],
        1,
        &["exists already", "data file"],
    );
    assert_eq!(std::fs::read(&data).unwrap(), b"precious");
}
