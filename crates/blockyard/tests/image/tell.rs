//! info, map, compare.

use crate::common::tool;
use crate::fixture::{Images, MIB, QCOW2, SIZE, image, image_any, json, qemu_img, qemu_io, same_answer, text};

#[test]
fn qcow2_images_of_all_options_are_told_of_as_qemu_does() {
    for options in QCOW2 {
        println!("{options}");
        let images = Images::new();
        let alone = images.qcow2("alone.qcow2", options, None, SIZE, 7);
        let top = images.chain(options);
        for path in [&alone, &top] {
            same_answer(&["info", text(path)]);
            same_answer(&["map", text(path)]);
        }
        let all = same_answer(&["info", "--backing-chain", text(&top)]);
        assert_eq!(all.as_array().unwrap().len(), 3);
        same_answer(&["map", "--start-offset", "1000k", "--max-length", "3M", text(&top)]);
    }
}

#[test]
fn what_people_read_is_what_qemu_img_prints() {
    let images = Images::new();
    let raw = images.raw("a.raw", 9 * MIB, 1);
    images.qcow2("b.qcow2", "compat=0.10", Some(("a.raw", "raw")), 10 * MIB, 2);
    let top = images.path("c.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "b.qcow2", "-F", "qcow2", text(&top)]);
    qemu_io(&top, "qcow2", &["write -P 9 1234k 3k"]);
    let sorted = |s: String| {
        let mut lines: Vec<_> = s.lines().map(str::trim_end).map(str::to_string).collect();
        lines.sort();
        lines
    };
    for args in [&["info", "-f", "raw"][..], &["info", "--backing-chain"], &["info"], &["map"]] {
        let path = if args.contains(&"raw") { &raw } else { &top };
        let args = [args, &[text(path)]].concat();
        if args[0] == "map" {
            // Compressed clusters, which qemu-img does not tell of in this form, are told of here.
            let ours = image(&args);
            assert!(ours.starts_with("Offset          Length          Mapped to       File\n"), "{ours}");
            assert_eq!(ours.lines().filter(|line| line.contains("compressed")).count(), 2, "{ours}");
            assert!(
                ours.contains(&format!("0x130000        0x10000         0x50000         {}\n", text(&top))),
                "{ours}"
            );
            continue;
        }
        assert_eq!(sorted(image(&args)), sorted(qemu_img(&args)), "{args:?}");
    }
    let args = ["map", "-f", "raw", text(&raw)];
    assert_eq!(image(&args), qemu_img(&args));
}

#[test]
fn snapshots_and_bitmaps_are_in_info() {
    let images = Images::new();
    let path = images.qcow2("a.qcow2", "", None, SIZE, 7);
    for name in ["first", "a second one, of a longer name"] {
        qemu_img(&["snapshot", "-c", name, text(&path)]);
    }
    qemu_img(&["bitmap", "--add", text(&path), "one"]);
    qemu_img(&["bitmap", "--add", "--disable", "-g", "4096", text(&path), "two"]);
    same_answer(&["info", text(&path)]);
    assert_eq!(image(&["info", text(&path)]), qemu_img(&["info", text(&path)]));
}

#[test]
fn files_that_end_in_the_middle_of_a_sector() {
    let images = Images::new();
    let path = images.path("odd.raw");
    std::fs::write(&path, vec![7; 70_000]).unwrap();
    same_answer(&["info", "-f", "raw", text(&path)]);
    same_answer(&["map", "-f", "raw", text(&path)]);
    let empty = images.0.image("empty.raw", 0);
    assert_eq!(json(&image(&["map", "--json", text(&empty)])), json("[]"));
}

/// Both compare, and say the same with the same status.
fn compared(args: &[&str]) -> i32 {
    let args = [&["compare"], args].concat();
    let (ours, theirs) = (image_any(&args), tool("qemu-img", &args));
    let status = theirs.status.code().unwrap();
    assert_eq!((ours.status.code(), ours.out.as_str()), (Some(status), theirs.out.as_str()), "{args:?} {}", ours.err);
    let json = json(&image_any(&[&args[..], &["--json"]].concat()).out);
    assert_eq!(json["identical"], status == 0, "{args:?}");
    let number = theirs.out.split(['!', ' ']).find_map(|word| word.parse::<u64>().ok());
    assert_eq!(json["offset"].as_u64(), number, "{args:?}");
    status
}

#[test]
fn comparisons_end_as_qemu_s_do() {
    let images = Images::new();
    let top = images.chain("extended_l2=on,cluster_size=128k,compression_type=zstd");
    let copy = images.path("copy.raw");
    qemu_img(&["convert", "-O", "raw", text(&top), text(&copy)]);
    let both = [text(&top), text(&copy)];
    assert_eq!(compared(&both), 0);
    // As for the sizes; but only one knows of all its zeroes.
    assert_eq!(compared(&[&["-s"], &both[..]].concat()), 1);
    assert_eq!(compared(&["-s", both[1], both[1]]), 0);
    assert_eq!(image(&[&["compare", "-q"], &both[..]].concat()), "");
    // Only the size differs; then a byte behind the other's end.
    let longer = std::fs::File::options().write(true).open(&copy).unwrap();
    longer.set_len(SIZE + 5 * MIB).unwrap();
    assert_eq!(compared(&both), 0);
    assert_eq!(compared(&["-f", "raw", "-F", "qcow2", both[1], both[0]]), 0);
    assert_eq!(compared(&[&["-s"], &both[..]].concat()), 1);
    let write = |at: u64| qemu_io(&copy, "raw", &[&format!("write -P 77 {at} 512")]);
    for at in [SIZE + 4 * MIB, SIZE - 512, 17 * MIB + 1024, 6 * MIB + 4096, MIB, 0] {
        write(at);
        assert_eq!(compared(&both), 1);
        let answer = json(&image_any(&["compare", "--json", both[0], both[1]]).out);
        assert_eq!(answer["offset"], at);
    }
    let missing = images.path("missing.raw");
    assert_eq!(image_any(&["compare", both[0], text(&missing)]).status.code(), Some(2));
}
