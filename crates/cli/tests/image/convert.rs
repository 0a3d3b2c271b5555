//! convert: between all formats and options.

use crate::common::allocated;
use crate::fixture::{
    Images, MIB, QCOW2, SIZE, image, image_any, json, qemu_img, qemu_io, sound_and_same, text,
};
use crate::mistakes::refused;

#[test]
fn all_formats_convert_to_sparse_raw_images() {
    for options in QCOW2 {
        println!("{options}");
        let images = Images::new();
        let source = images.chain(options);
        let (ours, theirs) = (images.path("ours.raw"), images.path("theirs.raw"));
        image(&["convert", text(&source), text(&ours)]);
        qemu_img(&["convert", "-O", "raw", text(&source), text(&theirs)]);
        sound_and_same((&ours, "raw"), (&source, "qcow2"));
        assert_eq!(std::fs::metadata(&ours).unwrap().len(), SIZE);
        // (A file system may use some blocks for the list of extents.)
        assert!(
            allocated(&ours) <= allocated(&theirs) + 16384,
            "{} {}",
            allocated(&ours),
            allocated(&theirs)
        );
        // With cache mode none for the source and the target, and without leaving out zeroes.
        let full = images.path("full.raw");
        image(&["convert", "-T", "none", "-t", "none", "-S", "0", text(&source), text(&full)]);
        sound_and_same((&full, "raw"), (&ours, "raw"));
        assert!(allocated(&full) >= SIZE);
    }
}

#[test]
fn an_existing_target_is_replaced_only_with_force() {
    let images = Images::new();
    let source = images.raw("a.raw", SIZE, 1);
    let target = images.path("b.raw");
    std::fs::write(&target, "precious").unwrap();
    let refused = image_any(&["convert", text(&source), text(&target)]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.err.contains("b.raw exists already: use --force"), "{}", refused.err);
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    image(&["convert", "--force", text(&source), text(&target)]);
    sound_and_same((&target, "raw"), (&source, "raw"));
    let itself = image_any(&["convert", "--force", text(&source), text(&source)]);
    assert_eq!(itself.status.code(), Some(1));
    assert!(
        itself.err.contains("a.raw cannot be replaced: the command reads it"),
        "{}",
        itself.err
    );
    let names: Vec<_> =
        std::fs::read_dir(&*images.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "nothing else is left: {names:?}");
}

/// Returns the bytes of the clusters that `qemu-img map` reports as compressed.
fn compressed(path: &std::path::Path) -> u64 {
    let map = json(&qemu_img(&["map", "--output", "json", text(path)]));
    let entries = map.as_array().unwrap().iter().filter(|entry| entry["compressed"] == true);
    entries.map(|entry| entry["length"].as_u64().unwrap()).sum()
}

#[test]
fn raw_images_convert_to_qcow2_with_all_options() {
    for options in QCOW2 {
        println!("{options}");
        let images = Images::new();
        let source = images.raw("source.raw", SIZE - MIB + 512, 9);
        let target = images.path("target.qcow2");
        // QEMU resolves a relative name in its working directory.
        let here = options.replace("data.bin", text(&images.path("target.data")));
        image(&["convert", "-o", &here, text(&source), text(&target)]);
        sound_and_same((&target, "qcow2"), (&source, "raw"));
        let theirs = images.path("theirs.qcow2");
        let options = options.replace("data.bin", text(&images.path("theirs.data")));
        qemu_img(&["convert", "-O", "qcow2", "-o", &options, text(&source), text(&theirs)]);
        assert!(
            allocated(&target) <= allocated(&theirs) + MIB / 4,
            "{} {}",
            allocated(&target),
            allocated(&theirs)
        );
        if here.contains("data_file") {
            assert!(allocated(&images.path("target.data")) < 4 * MIB);
        }
        // With -S 0 zeroes are not left out.
        let full = images.path("full.qcow2");
        image(&[
            "convert",
            "-S",
            "0",
            "-o",
            &here.replace("target.data", "full.data"),
            text(&source),
            text(&full),
        ]);
        sound_and_same((&full, "qcow2"), (&source, "raw"));
        let data = if here.contains("data_file") { images.path("full.data") } else { full.clone() };
        assert!(allocated(&data) >= SIZE - MIB, "{}", allocated(&data));
    }
}

#[test]
fn a_chain_converts_to_one_compressed_image() {
    for (number, options) in QCOW2
        .into_iter()
        .filter(|o| !o.contains("data_file") && !o.contains("prealloc"))
        .enumerate()
    {
        println!("{options}");
        let images = Images::new();
        let source = images.chain(QCOW2[number]);
        // A part of the data does not compress: at least one cluster.
        let mib = if options.contains("cluster_size=2M") { 3 } else { 1 };
        let noise = std::fs::File::open("/dev/urandom").unwrap();
        let mut bytes = vec![0; mib << 20];
        std::io::Read::read_exact(&mut &noise, &mut bytes).unwrap();
        std::fs::write(images.path("noise"), &bytes).unwrap();
        let write = format!("write -s {} 13M {mib}M", text(&images.path("noise")));
        qemu_io(&source, "qcow2", &[&write]);
        let (target, theirs) = (images.path("target.qcow2"), images.path("theirs.qcow2"));
        let cache = ["writeback", "none"][number % 2];
        image(&["convert", "-c", "-t", cache, "-o", options, text(&source), text(&target)]);
        sound_and_same((&target, "qcow2"), (&source, "qcow2"));
        qemu_img(&["convert", "-c", "-O", "qcow2", "-o", options, text(&source), text(&theirs)]);
        // (Some random clusters compress by chance.)
        assert!(compressed(&target).abs_diff(compressed(&theirs)) < 65536);
        let (ours, theirs) =
            (std::fs::metadata(&target).unwrap().len(), std::fs::metadata(&theirs).unwrap().len());
        assert!(ours <= theirs + theirs / 16 + 262_144, "{ours} bytes, and QEMU's {theirs}");
        // Convert the compressed image back to raw.
        let raw = images.path("raw.raw");
        image(&["convert", text(&target), text(&raw)]);
        sound_and_same((&raw, "raw"), (&source, "qcow2"));
    }
}

#[test]
fn an_overlay_gets_only_the_data_that_differs() {
    let images = Images::new();
    let source = images.chain("");
    for (backing, format) in [("middle.qcow2", "qcow2"), ("base.raw", "raw")] {
        for options in ["compat=0.10", "", "extended_l2=off", "cluster_size=4k"] {
            println!("{options} over {backing}");
            let target = images.path("target.qcow2");
            let with = ["-B", backing, "-F", format, "-o", options];
            image(&[&["convert", "--force"], &with[..], &[text(&source), text(&target)]].concat());
            sound_and_same((&target, "qcow2"), (&source, "qcow2"));
            let info = json(&qemu_img(&["info", "--output", "json", text(&target)]));
            assert_eq!(
                (&info["backing-filename"], &info["backing-filename-format"]),
                (&backing.into(), &format.into())
            );
            // The target has less data than the whole disk.
            let map = json(&qemu_img(&["map", "--output", "json", text(&target)]));
            let own: u64 = map
                .as_array()
                .unwrap()
                .iter()
                .filter(|e| e["depth"] == 0 && e["data"] == true)
                .map(|e| e["length"].as_u64().unwrap())
                .sum();
            assert!(own < if backing == "base.raw" { 8 * MIB } else { 6 * MIB }, "{own}");
        }
    }
    // The new base is another one than that of the source. The guest still sees the same data.
    images.raw("other.raw", 20 * MIB, 77);
    let target = images.path("other.qcow2");
    image(&["convert", "-B", "other.raw", "-F", "raw", text(&source), text(&target)]);
    sound_and_same((&target, "qcow2"), (&source, "qcow2"));
}

#[test]
fn cow_files_are_created_and_read() {
    let images = Images::new();
    let base = images.raw("base.raw", SIZE, 1);
    let source = images.raw("source.raw", SIZE, 2);
    let cow = images.path("over.cow");
    image(&["convert", "-B", "base.raw", text(&source), text(&cow)]);
    image(&["compare", text(&source), text(&cow)]);
    assert!(allocated(&cow) < 4 * MIB);
    let back = images.path("back.qcow2");
    image(&["convert", text(&cow), text(&back)]);
    sound_and_same((&back, "qcow2"), (&source, "raw"));
    image(&["compare", text(&base), text(&images.path("base.raw"))]);
}

#[test]
fn an_existing_target_is_written_with_no_create() {
    let images = Images::new();
    let source = images.chain("");
    for (name, format, options) in
        [("a.raw", "raw", ""), ("b.qcow2", "qcow2", "compat=0.10"), ("c.qcow2", "qcow2", "")]
    {
        let target = images.path(name);
        if format == "raw" {
            images.raw(name, SIZE, 50);
        } else {
            images.qcow2(name, options, None, SIZE, 50);
        }
        image(&["convert", "-n", text(&source), text(&target)]);
        sound_and_same((&target, format), (&source, "qcow2"));
    }
    let small = images.0.image("small.raw", MIB);
    let refused = image_any(&["convert", "-n", text(&source), text(&small)]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused.err.contains("small.raw has 1048576 bytes; 25165824 are needed"),
        "{}",
        refused.err
    );
}

/// Both images share a backing image, and have data of their own. (Equal data is skipped in whole
/// MiB.)
#[test]
fn a_target_with_a_shared_base_keeps_no_old_data() {
    let images = Images::new();
    let base = images.raw("base.raw", SIZE, 1);
    qemu_io(&base, "raw", &["write -P 99 10M 6M"]);
    images.qcow2("middle.qcow2", "", Some(("base.raw", "raw")), SIZE, 3);
    let source = images.qcow2("source.qcow2", "", Some(("middle.qcow2", "qcow2")), SIZE, 5);
    // The target's backing image is that of the source, or another image with the same base.
    images.qcow2("other.qcow2", "", Some(("base.raw", "raw")), SIZE, 90);
    for backing in ["middle.qcow2", "other.qcow2"] {
        for own in ["write -P 77 12M 64k", "write -z 12M 1M", "write -P 78 20M 1M"] {
            let target = images.qcow2("target.qcow2", "", Some((backing, "qcow2")), SIZE, 40);
            qemu_io(&target, "qcow2", &[own]);
            image(&["convert", "-n", text(&source), text(&target)]);
            sound_and_same((&target, "qcow2"), (&source, "qcow2"));
            std::fs::remove_file(&target).unwrap();
        }
    }
}

/// A backing file holds another disk if it is opened in another format. So two images share it only
/// if both use the same format.
#[test]
fn a_backing_file_in_another_format_is_not_shared() {
    let images = Images::new();
    let base = images.qcow2("base.qcow2", "", None, SIZE, 1);
    qemu_io(&base, "qcow2", &["write -P 99 10M 6M"]);
    std::fs::File::options().write(true).open(&base).unwrap().set_len(SIZE).unwrap();
    let (source, target) = (images.path("source.qcow2"), images.path("target.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", text(&source)]);
    image(&["convert", "-B", "base.qcow2", "-F", "raw", text(&source), text(&target)]);
    sound_and_same((&target, "qcow2"), (&source, "qcow2"));
    let target = images.path("existing.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "raw", text(&target)]);
    image(&["convert", "-n", text(&source), text(&target)]);
    sound_and_same((&target, "qcow2"), (&source, "qcow2"));
}

#[test]
fn several_sources_are_concatenated() {
    let images = Images::new();
    let one = images.raw("one.raw", 5 * MIB + 512, 1);
    let two = images.qcow2("two.qcow2", "", None, 11 * MIB + 1024, 30);
    for (options, name) in [
        (&["-O", "raw"][..], "raw"),
        (&["-O", "qcow2"], "qcow2"),
        (&["-c", "-O", "qcow2"], "small"),
    ] {
        let (ours, theirs) =
            (images.path(&format!("ours.{name}")), images.path(&format!("theirs.{name}")));
        let two_raw = images.path("two.raw");
        qemu_img(&["convert", "-O", "raw", text(&two), text(&two_raw)]);
        let sources = ["-f", "raw", text(&one), text(&two_raw), text(&one)];
        image(&[&["convert"], options, &sources, &[text(&ours)]].concat());
        qemu_img(&[&["convert"], options, &sources, &[text(&theirs)]].concat());
        let format = if name == "raw" { "raw" } else { "qcow2" };
        sound_and_same((&ours, format), (&theirs, format));
    }
    refused(&["convert", text(&one)], 2, &["TARGET"]);
}

#[test]
fn an_internal_snapshot_can_be_converted() {
    let images = Images::new();
    images.raw("base.raw", 7 * MIB, 1);
    let path = images.qcow2("a.qcow2", "", Some(("base.raw", "raw")), 12 * MIB, 3);
    let (then, raw) = (images.path("then.raw"), images.path("ours.raw"));
    qemu_img(&["convert", "-O", "raw", text(&path), text(&then)]);
    qemu_img(&["snapshot", "-c", "then", text(&path)]);
    qemu_io(&path, "qcow2", &["write -P 99 0 3M", "write -z 4M 1M"]);
    qemu_img(&["resize", "-q", text(&path), "20M"]);
    for name in ["then", "1", "snapshot.name=then"] {
        image(&["convert", "-W", "--force", "-l", name, text(&path), text(&raw)]);
        sound_and_same((&raw, "raw"), (&then, "raw"));
    }
    // The overlay's base is the same file, but shows another disk now.
    let over = images.path("over.qcow2");
    image(&["convert", "-l", "then", "-B", "a.qcow2", "-F", "qcow2", text(&path), text(&over)]);
    sound_and_same((&over, "qcow2"), (&then, "raw"));
    refused(
        &["convert", "-l", "none", text(&path), text(&images.path("x.raw"))],
        1,
        &["a.qcow2", "\"none\""],
    );
    refused(
        &["convert", "-l", "1", text(&raw), text(&images.path("x.qcow2"))],
        2,
        &["is not a qcow2 image"],
    );
}

/// As in dd(1): `count` blocks after the `skip` blocks. (QEMU 10.0 counts both from the beginning.)
#[test]
fn dd_copies_a_part() {
    let images = Images::new();
    images.raw("base.raw", 7 * MIB, 1);
    let path = images.qcow2("a.qcow2", "", Some(("base.raw", "raw")), 12 * MIB, 3);
    let (all, expected) = (images.path("all.raw"), images.path("expected.raw"));
    qemu_img(&["convert", "-O", "raw", text(&path), text(&all)]);
    let disk = std::fs::read(&all).unwrap();
    let mib = MIB as usize;
    let parts = [
        (&["bs=1M", "count=3", "skip=1"][..], mib..4 * mib),
        (&["bs=512", "skip=2049"], 2049 * 512..12 * mib),
        (&["bs=64k", "count=1000"], 0..12 * mib),
        (&["count=17"], 0..17 * 512),
        (&["bs=1M", "skip=11"], 11 * mib..12 * mib),
    ];
    for (operands, range) in parts {
        std::fs::write(&expected, &disk[range]).unwrap();
        for format in ["raw", "qcow2"] {
            let ours = images.path(&format!("ours.{format}"));
            let (from, to) = (format!("if={}", text(&path)), format!("of={}", text(&ours)));
            image(&[&["dd", "--force", "-O", format, &from, &to], operands].concat());
            sound_and_same((&ours, format), (&expected, "raw"));
        }
    }
    let from = format!("if={}", text(&path));
    refused(&["dd", &from, "of=x", "bs=7", "count=3"], 2, &["whole sectors"]);
    refused(&["dd", &from, "bs=7"], 2, &["of=FILE is missing"]);
    refused(&["dd", &from, "of=x", "seek=7"], 2, &["\"seek=7\""]);
    refused(&["dd", &from, &format!("of={}", text(&path)), "--force"], 1, &["cannot be replaced"]);
}

/// Several threads decompress clusters in any order. The error names the broken cluster, and no
/// file is left.
#[test]
fn a_broken_compressed_cluster_is_named() {
    let images = Images::new();
    let raw = images.raw("source.raw", SIZE, 3);
    for compression in ["zlib", "zstd"] {
        let packed = images.path(&format!("{compression}.qcow2"));
        let options = format!("compression_type={compression}");
        qemu_img(&["convert", "-c", "-O", "qcow2", "-o", &options, text(&raw), text(&packed)]);
        let whole = images.path(&format!("{compression}.raw"));
        image(&["convert", text(&packed), text(&whole)]);
        sound_and_same((&whole, "raw"), (&raw, "raw"));
        let at = first_compressed(&packed);
        let mut bytes = std::fs::read(&packed).unwrap();
        bytes[at..at + 16].fill(0xff);
        std::fs::write(&packed, bytes).unwrap();
        let target = images.path("target.raw");
        let done = image_any(&["convert", text(&packed), text(&target)]);
        assert_eq!(done.status.code(), Some(1));
        let named = format!("qcow2 compressed cluster at offset {at}");
        assert!(done.err.contains(&named), "{named}: {}", done.err);
        assert!(!target.exists());
    }
}

/// Returns the file offset of the data of the first compressed cluster, from the L2 entry (version
/// 3, 64 KiB clusters).
fn first_compressed(path: &std::path::Path) -> usize {
    let bytes = std::fs::read(path).unwrap();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = word(40) as usize;
    let table = (word(l1) & 0x00ff_ffff_ffff_fe00) as usize;
    let entry = (0..8192).map(|n| word(table + n * 8)).find(|entry| entry >> 62 == 1).unwrap();
    // The offset has 62 - (cluster_bits - 8) bits.
    (entry & ((1 << 54) - 1)) as usize
}
