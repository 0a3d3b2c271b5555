//! commit: writes the data of an overlay into its backing file. QEMU reads both afterwards.

use std::path::Path;
use std::process::Command;

use crate::common::{BLOCKYARD, Daemon, SOON, Signal, TOOL, allocated, until};
use crate::fixture::{Images, MIB, SIZE, image, json, qemu_img, qemu_io, sound_and_same, text};
use crate::mistakes::refused;

/// Returns the bytes that the topmost image itself holds.
pub fn own(path: &Path) -> u64 {
    let map = json(&qemu_img(&["map", "--output", "json", text(path)]));
    let own = map.as_array().unwrap().iter().filter(|e| e["depth"] == 0 && e["present"] == true);
    own.map(|e| e["length"].as_u64().unwrap()).sum()
}

/// Copies the disk into a raw file.
pub fn copy(images: &Images, path: &Path) -> std::path::PathBuf {
    let copy = images.path("expected.raw");
    qemu_img(&["convert", "-O", "raw", text(path), text(&copy)]);
    copy
}

pub fn size(path: &Path, format: &str) -> u64 {
    json(&qemu_img(&["info", "-f", format, "--output", "json", text(path)]))["virtual-size"]
        .as_u64()
        .unwrap()
}

#[test]
fn the_backing_file_has_the_overlays_data_after_a_commit() {
    let all = [
        "compat=0.10",
        "cluster_size=512",
        "extended_l2=on,cluster_size=128k",
        "data_file=data.bin",
    ];
    for (number, options) in all.into_iter().enumerate() {
        println!("{options}");
        let images = Images::new();
        let top = images.chain(options);
        let (middle, expected) = (images.path("middle.qcow2"), copy(&images, &top));
        let had = own(&top);
        // With -d the overlay is not emptied.
        assert_eq!(image(&["commit", "-q", "-d", text(&top)]), "");
        sound_and_same((&middle, "qcow2"), (&expected, "raw"));
        assert_eq!((own(&top), size(&middle, "qcow2")), (had, SIZE));
        // There are more changes, and a snapshot that prevents emptying the image.
        if !options.contains("data_file") {
            image(&["snapshot", "-c", "before", text(&top)]);
        }
        let write = ["write -P 99 100k 1M", "write -z 9M 2M", "write -P 98 23M 5k"];
        qemu_io(&top, "qcow2", &write);
        qemu_io(&expected, "raw", &write);
        let committed = match number {
            // QEMU does the commit, for comparison.
            0 => qemu_img(&["commit", text(&top)]),
            _ => image(&["commit", text(&top)]),
        };
        assert_eq!(committed, "Image committed.\n");
        for path in [&middle, &top] {
            sound_and_same((path, "qcow2"), (&expected, "raw"));
        }
        assert_eq!(own(&top), 0);
        if number == 1 {
            assert!(qemu_img(&["snapshot", "-l", text(&top)]).contains("before"));
        }
    }
}

#[test]
fn committed_zeroes_hide_old_data_and_take_no_space() {
    let images = Images::new();
    let base = images.qcow2("base.qcow2", "", None, SIZE, 1);
    qemu_io(&base, "qcow2", &["write -P 1 0 24M"]);
    let full = allocated(&base);
    let top = images.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", text(&top)]);
    qemu_io(&top, "qcow2", &["write -z 1M 20M", "write -P 5 10M 4k"]);
    let expected = copy(&images, &top);
    image(&["commit", text(&top)]);
    sound_and_same((&base, "qcow2"), (&expected, "raw"));
    assert!(allocated(&base) < full - 18 * MIB, "{} of {full}", allocated(&base));
}

#[test]
fn a_commit_into_a_deeper_image_keeps_the_overlay() {
    for (options, cache) in [("", "writeback"), ("extended_l2=on,cluster_size=128k", "none")] {
        let images = Images::new();
        let top = images.chain(options);
        let (base, expected) = (images.path("base.raw"), copy(&images, &top));
        let had = own(&top);
        refused(
            &["commit", "-b", "top.qcow2", text(&top)],
            1,
            &["top.qcow2 is not one of its backing files"],
        );
        assert_eq!(
            image(&["commit", "-t", cache, "-b", "base.raw", text(&top)]),
            "Image committed.\n"
        );
        // Before the commit the base had 7 MiB and one sector.
        assert_eq!((std::fs::metadata(&base).unwrap().len(), own(&top)), (SIZE, had));
        sound_and_same((&top, "qcow2"), (&expected, "raw"));
        sound_and_same((&base, "raw"), (&expected, "raw"));
    }
}

#[test]
fn a_commit_updates_the_backing_time_of_a_cow_file() {
    for size in [SIZE, 7 * MIB + 100] {
        let images = Images::new();
        let (base, cow) = (images.raw("base.raw", SIZE, 1), images.path("over.cow"));
        std::fs::File::options().write(true).open(&base).unwrap().set_len(size).unwrap();
        let source = images.raw("source.raw", SIZE, 9);
        std::fs::File::options().write(true).open(&source).unwrap().set_len(size).unwrap();
        image(&["convert", "-B", "base.raw", text(&source), text(&cow)]);
        assert!(allocated(&cow) > MIB);
        for (option, holds) in [("-d", true), ("-q", false)] {
            image(&["commit", option, text(&cow)]);
            qemu_img(&["compare", "-q", "-f", "raw", "-F", "raw", text(&base), text(&source)]);
            image(&["compare", text(&cow), text(&source)]);
            assert_eq!(allocated(&cow) > MIB, holds);
        }
        image(&["check", text(&cow)]);
    }
}

#[test]
fn impossible_commits_are_refused() {
    let images = Images::new();
    let raw = images.raw("a.raw", 4 * MIB, 1);
    let alone = images.qcow2("alone.qcow2", "", None, SIZE, 1);
    refused(&["commit", text(&raw)], 1, &["a.raw", "no backing file"]);
    refused(&["commit", text(&alone)], 1, &["alone.qcow2", "no backing file"]);
    refused(&["commit", "-r", "0", text(&alone)], 2, &["more than 0"]);
    let top = images.chain("");
    std::fs::write(images.path("middle.qcow2"), vec![0; 65536]).unwrap();
    refused(&["commit", text(&top)], 1, &["middle.qcow2", "qcow2 header"]);
}

/// During a slow commit no other command changes its images.
#[test]
fn a_commit_locks_its_images() {
    let images = Images::new();
    let top = images.chain("");
    let (middle, expected) = (images.path("middle.qcow2"), copy(&images, &top));
    image(&["resize", "-q", text(&middle), "24M"]);
    let mut command = Command::new(BLOCKYARD);
    let mut commit = Daemon::start(command.args(["image", "commit", "-p", "-r", "2M", text(&top)]));
    let holder = format!("blockyard (pid {})", commit.pid());
    until("the commit holds its images", SOON, || {
        let done = crate::fixture::image_any(&["snapshot", "-l", text(&top)]);
        !done.status.success() && done.err.contains(&holder)
    });
    // It waits meanwhile, however long the commands take. A continuation of all processes would end
    // the stop, so each command has its own one.
    let refused_meanwhile = |command: &[&str], says: &[&str]| {
        commit.signal(Signal::STOP);
        refused(command, 1, says);
    };
    for path in [&top, &middle] {
        for command in [
            &["resize", text(path), "+1M"][..],
            &["commit", text(path)],
            &["snapshot", "-c", "x", text(path)],
        ] {
            refused_meanwhile(command, &[path.file_name().unwrap().to_str().unwrap(), &holder]);
        }
    }
    refused_meanwhile(&["rebase", "-u", "-b", "", text(&top)], &["top.qcow2", &holder]);
    commit.signal(Signal::CONT);
    let status = commit.ended(TOOL);
    let out = commit.out();
    assert!(status.success() && out.contains("(100.00/100%)"), "{status}: {out}{}", commit.log());
    sound_and_same((&middle, "qcow2"), (&expected, "raw"));
    sound_and_same((&top, "qcow2"), (&expected, "raw"));
}
