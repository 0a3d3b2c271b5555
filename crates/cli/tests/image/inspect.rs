//! info, map, compare.

use crate::common::{Daemon, tool};
use crate::fixture::{
    Images, MIB, QCOW2, SIZE, image, image_any, json, qemu_img, qemu_io, same_answer, text,
};

#[test]
fn info_and_map_print_the_same_as_qemu_img() {
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
fn the_text_is_that_of_qemu_img() {
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
            // We list compressed clusters, which the text of qemu-img omits.
            let ours = image(&args);
            assert!(
                ours.starts_with("Offset          Length          Mapped to       File\n"),
                "{ours}"
            );
            assert_eq!(
                ours.lines().filter(|line| line.contains("compressed")).count(),
                2,
                "{ours}"
            );
            assert!(
                ours.contains(&format!(
                    "0x130000        0x10000         0x50000         {}\n",
                    text(&top)
                )),
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
fn info_lists_snapshots_and_bitmaps() {
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
fn files_with_a_partial_last_sector_are_reported_as_by_qemu() {
    let images = Images::new();
    let path = images.path("odd.raw");
    std::fs::write(&path, vec![7; 70_000]).unwrap();
    same_answer(&["info", "-f", "raw", text(&path)]);
    same_answer(&["map", "-f", "raw", text(&path)]);
    let empty = images.0.image("empty.raw", 0);
    assert_eq!(json(&image(&["map", "--json", text(&empty)])), json("[]"));
}

#[test]
fn measure_prints_the_same_as_qemu_img() {
    let images = Images::new();
    let raw = images.raw("a.raw", 9 * MIB + 512, 1);
    images.raw("base.raw", 7 * MIB, 1);
    let overlay = images.qcow2("b.qcow2", "", Some(("base.raw", "raw")), SIZE, 3);
    let marked = images.qcow2("c.qcow2", "", None, SIZE, 7);
    qemu_img(&["bitmap", "--add", text(&marked), "one"]);
    qemu_img(&["bitmap", "--add", "-g", "512", text(&marked), "a bitmap of a longer name"]);
    let sources = [
        vec!["--size", "0"],
        vec!["--size", "1000003"],
        vec!["--size", "3T"],
        vec!["-f", "raw", text(&raw)],
        vec![text(&overlay)],
        vec![text(&marked)],
    ];
    let options =
        ["", "cluster_size=4k", "cluster_size=2M,refcount_bits=1", "compat=0.10", "extended_l2=on"];
    let targets = options.map(|options| vec!["-O", "qcow2", "-o", options]);
    for source in &sources {
        same_answer(&[&["measure"], source.as_slice()].concat());
        for target in &targets {
            let target = if target[3].is_empty() { &target[..2] } else { &target[..] };
            same_answer(&[&["measure"], target, source.as_slice()].concat());
        }
    }
    let full = ["measure", "-O", "qcow2", "-o", "preallocation=falloc", text(&marked)];
    assert_eq!(image(&full), qemu_img(&full));
    for options in [
        "cluster_size=0",
        "cluster_size=1",
        "refcount_bits=0",
        "cluster_size=512,refcount_bits=4096",
    ] {
        let wrong = image_any(&["measure", "--size", "1G", "-O", "qcow2", "-o", options]);
        assert_eq!(wrong.status.code(), Some(1), "{options}: {}", wrong.err);
    }
    let neither = image_any(&["measure", "-O", "qcow2"]);
    assert_eq!(neither.status.code(), Some(2), "{}", neither.err);
}

/// While a server has the image open, other programs can read it only with -U.
#[test]
fn a_served_image_is_readable_with_force_share() {
    let images = Images::new();
    images.raw("base.raw", 7 * MIB, 1);
    let path = images.qcow2("served.qcow2", "", Some(("base.raw", "raw")), SIZE, 3);
    let socket = images.path("socket");
    let known = json(&qemu_img(&["map", "--output", "json", text(&path)]));
    let measured = json(&qemu_img(&["measure", "-O", "qcow2", "--output", "json", text(&path)]));
    let daemon = Daemon::serve(&path, &socket, &[]);
    for command in ["info", "map"] {
        let refused = image_any(&[command, text(&path)]);
        assert_eq!(refused.status.code(), Some(1), "{command}");
        assert!(refused.err.contains("is in use by blockyard"), "{}", refused.err);
    }
    assert_eq!(json(&image(&["map", "-U", "--json", text(&path)])), known);
    assert_eq!(json(&image(&["measure", "-U", "-O", "qcow2", "--json", text(&path)])), measured);
    let info = json(&image(&["info", "--force-share", "--backing-chain", "--json", text(&path)]));
    assert_eq!(
        (info[0]["virtual-size"].as_u64(), info[1]["format"].as_str()),
        (Some(SIZE), Some("raw")),
        "{info}"
    );
    drop(daemon);
}

/// Runs `compare` by both programs. Their output and status must be equal. Returns the status.
fn compared(args: &[&str]) -> i32 {
    let args = [&["compare"], args].concat();
    let (ours, theirs) = (image_any(&args), tool("qemu-img", &args));
    let status = theirs.status.code().unwrap();
    assert_eq!(
        (ours.status.code(), ours.out.as_str()),
        (Some(status), theirs.out.as_str()),
        "{args:?} {}",
        ours.err
    );
    let json = json(&image_any(&[&args[..], &["--json"]].concat()).out);
    assert_eq!(json["identical"], status == 0, "{args:?}");
    let number = theirs.out.split(['!', ' ']).find_map(|word| word.parse::<u64>().ok());
    assert_eq!(json["offset"].as_u64(), number, "{args:?}");
    status
}

#[test]
fn comparisons_print_the_same_as_qemu_img() {
    let images = Images::new();
    let top = images.chain("extended_l2=on,cluster_size=128k,compression_type=zstd");
    let copy = images.path("copy.raw");
    qemu_img(&["convert", "-O", "raw", text(&top), text(&copy)]);
    let both = [text(&top), text(&copy)];
    assert_eq!(compared(&both), 0);
    // Equal data and sizes, but only one image has explicit zeroes.
    assert_eq!(compared(&[&["-s"], &both[..]].concat()), 1);
    assert_eq!(compared(&["-s", both[1], both[1]]), 0);
    assert_eq!(image(&[&["compare", "-q"], &both[..]].concat()), "");
    // At first only the size differs. Then one byte after the end of the shorter image differs too.
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
