//! snapshot: created, applied and deleted by this program and by QEMU in turn.

use std::path::Path;

use crate::common::tool;
use crate::fixture::{Images, MIB, SIZE, image, json, qemu_img, qemu_io, sound_and_same, text};
use crate::mistakes::refused;

/// Checks that both programs list the same snapshots. Returns their number.
fn same_list(path: &Path) -> usize {
    let list = image(&["snapshot", "-l", text(path)]);
    assert_eq!(list, qemu_img(&["snapshot", "-l", text(path)]));
    assert_eq!(image(&["snapshot", text(path)]), list);
    let (ours, info) = (
        image(&["snapshot", "--json", text(path)]),
        qemu_img(&["info", "--output", "json", text(path)]),
    );
    let (ours, theirs) = (json(&ours), json(&info)["snapshots"].take());
    assert_eq!(ours, if theirs.is_null() { json("[]") } else { theirs });
    ours.as_array().unwrap().len()
}

#[test]
fn snapshots_work_with_both_programs() {
    for options in ["compat=0.10", "extended_l2=on,cluster_size=128k,refcount_bits=64"] {
        println!("{options}");
        let images = Images::new();
        let path = images.qcow2("a.qcow2", options, None, SIZE, 5);
        let states: Vec<_> = (0..3).map(|n| images.path(&format!("{n}.raw"))).collect();
        let tool = |ours: bool, args: &[&str]| match ours {
            true => image(args),
            false => qemu_img(args),
        };
        assert_eq!(same_list(&path), 0);
        for (n, state) in states.iter().enumerate() {
            qemu_io(
                &path,
                "qcow2",
                &[
                    &format!("write -P {} {n}M 1500k", 60 + n),
                    &format!("write -z {}M 300k", 10 + n),
                ],
            );
            qemu_img(&["convert", "-O", "raw", text(&path), text(state)]);
            assert_eq!(
                tool(n % 2 == 0, &["snapshot", "-c", &format!("state {n}"), text(&path)]),
                ""
            );
        }
        for (n, ours) in [(0, true), (2, false), (1, true)] {
            tool(ours, &["snapshot", "-a", &format!("state {n}"), text(&path)]);
            sound_and_same((&path, "qcow2"), (&states[n], "raw"));
            qemu_io(&path, "qcow2", &["write -P 3 5M 3M"]);
        }
        assert_eq!(same_list(&path), 3);
        // Apply a snapshot by its ID.
        image(&["snapshot", "-a", "3", text(&path)]);
        sound_and_same((&path, "qcow2"), (&states[2], "raw"));
        for (left, ours) in [(2, true), (1, false), (0, true)] {
            tool(ours, &["snapshot", "-d", &format!("state {left}"), text(&path)]);
            sound_and_same((&path, "qcow2"), (&states[2], "raw"));
        }
        assert_eq!(same_list(&path), 0);
    }
}

#[test]
fn applying_a_snapshot_restores_its_size() {
    let images = Images::new();
    let path = images.qcow2("a.qcow2", "", None, SIZE, 5);
    let before = images.path("before.raw");
    qemu_img(&["convert", "-O", "raw", text(&path), text(&before)]);
    image(&["snapshot", "-c", "small", text(&path)]);
    image(&["resize", "-q", text(&path), "+10M"]);
    qemu_io(&path, "qcow2", &["write -P 3 20M 14M"]);
    image(&["snapshot", "-a", "small", text(&path)]);
    sound_and_same((&path, "qcow2"), (&before, "raw"));
    assert_eq!(crate::commit::size(&path, "qcow2"), SIZE);
}

#[test]
fn wrong_snapshot_commands_are_refused() {
    let images = Images::new();
    let (path, raw) = (images.qcow2("a.qcow2", "", None, SIZE, 5), images.raw("a.raw", 4 * MIB, 1));
    image(&["snapshot", "-c", "one", text(&path)]);
    refused(
        &["snapshot", "-c", "one", text(&path)],
        1,
        &["a.qcow2", "a snapshot with this name exists"],
    );
    for option in ["-a", "-d"] {
        refused(&["snapshot", option, "two", text(&path)], 1, &["a.qcow2", "\"two\""]);
        refused(&["snapshot", option, "two", text(&raw)], 1, &["a.raw", "only qcow2"]);
    }
    refused(&["snapshot", "-l", "-c", "x", text(&path)], 2, &["cannot be used with"]);
    refused(
        &["snapshot", "-c", "x", text(&images.path("none.qcow2"))],
        1,
        &["none.qcow2", "no such file"],
    );
    refused(&["snapshot", "-c", "x", text(&images.path("none"))], 2, &["none", "--format"]);
    let data = images.qcow2("b.qcow2", "data_file=data.bin", None, SIZE, 5);
    refused(&["snapshot", "-c", "x", text(&data)], 1, &["b.qcow2", "external data file"]);
    assert!(tool("qemu-img", ["check", "-q", text(&path)]).status.success());
}
