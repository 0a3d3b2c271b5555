//! nbdinfo: what the server lists and reports. Its block status is compared with that of qemu-nbd
//! for the same image.

use std::path::Path;

use serde_json::Value;

use crate::common::{Folder, tool};
use crate::fixture::{MB, NbdServer, Stock, sparse};

fn json(args: &[&str]) -> Value {
    let out = tool("nbdinfo", [&["--json"], args].concat()).good();
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

#[test]
fn nbdinfo_shows_the_properties_of_an_export() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &[]);
    let told = json(&[&disk.uri()]);
    assert_eq!(told["protocol"], "newstyle-fixed", "{told}");
    assert_eq!((&told["structured"], &told["extended"]), (&true.into(), &true.into()), "{told}");
    let export = &told["exports"][0];
    assert_eq!(export["export-size"], 64 * MB, "{told}");
    assert_eq!(export["export-name"], "disk");
    for can in [
        "can_cache",
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        assert_eq!(export[can], true, "{can}: {told}");
    }
    assert_eq!(
        (&export["is_read_only"], &export["block_size_minimum"]),
        (&false.into(), &1.into()),
        "{told}"
    );
    let contexts = export["contexts"].as_array().unwrap();
    for context in ["base:allocation", "qemu:allocation-depth"] {
        assert!(contexts.contains(&context.into()), "{told}");
    }
    // Queries with an exit status, for scripts: 0 yes, 2 no.
    for (question, what, status) in [
        ("--can", "multi-conn", 0),
        ("--can", "write", 0),
        ("--is", "read-only", 2),
        ("--is", "tls", 2),
    ] {
        assert_eq!(
            tool("nbdinfo", [question, what, &disk.uri()]).status.code(),
            Some(status),
            "{question} {what}"
        );
    }
    assert_eq!(tool("nbdinfo", ["--size", &disk.uri()]).good().trim(), (64 * MB).to_string());
    disk.daemon.stop();
}

#[test]
fn a_missing_export_is_reported_by_name() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, MB, &[]);
    let finished = tool("nbdinfo", [crate::fixture::uri(&disk.socket, "other")]);
    assert_eq!(finished.status.code(), Some(1));
    // The error message comes from the server, and contains the name.
    assert!(finished.err.contains("other"), "{}", finished.err);
    disk.daemon.stop();
}

/// Returns the extents of a map, adjacent equal ones joined: (length, flags).
fn runs(uri: &str, context: &str) -> Vec<(u64, u64)> {
    let out = tool("nbdinfo", ["--json", &format!("--map={context}"), uri]).good();
    let map: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"));
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    for entry in map.as_array().unwrap() {
        let number = |key: &str| entry[key].as_u64().unwrap_or_else(|| panic!("no {key}: {entry}"));
        assert_eq!(number("offset"), at, "a gap: {out}");
        at += number("length");
        match runs.last_mut() {
            Some((length, kind)) if *kind == number("type") => *length += number("length"),
            _ => runs.push((number("length"), number("type"))),
        }
    }
    runs
}

fn same_map_as_qemu_nbd(image: &Path, format: &str, folder: &Folder) -> Vec<(u64, u64)> {
    let ours = NbdServer::start(image, folder.join("s"), &["--read-only", "--format", format]);
    let theirs = Stock::start(image, format, &folder.join("t"));
    let map = runs(&ours.uri(), "base:allocation");
    assert_eq!(map, runs(&theirs.uri, "base:allocation"), "base:allocation");
    let depths = runs(&ours.uri(), "qemu:allocation-depth");
    assert_eq!(depths, runs(&theirs.uri, "qemu:allocation-depth"), "qemu:allocation-depth");
    // The lower half of our numbers equals qemu-nbd's. The upper half has flags that qemu-nbd does
    // not report.
    let layers = runs(&ours.uri(), "blockyard:layers");
    let mut lower: Vec<(u64, u64)> = Vec::new();
    for (length, kind) in layers {
        match lower.last_mut() {
            Some((so_far, last)) if *last == kind & 0xffff => *so_far += length,
            _ => lower.push((length, kind & 0xffff)),
        }
    }
    assert_eq!(lower, depths, "blockyard:layers");
    ours.daemon.stop();
    depths
}

#[test]
fn the_map_of_a_raw_image_is_that_of_qemu_nbd() {
    let folder = Folder::new();
    let image = sparse(&folder, "disk.img");
    same_map_as_qemu_nbd(&image, "raw", &folder);
}

/// The chain has three images, with zeroes over data.
#[test]
fn the_map_of_a_chain_is_that_of_qemu_nbd() {
    let folder = Folder::new();
    sparse(&folder, "base.img");
    let create = |name: &str, backing: &str, format: &str, size: &str| {
        let (file, backing) = (folder.join(name), folder.join(backing));
        let (file, backing) = (file.to_str().unwrap(), backing.to_str().unwrap());
        tool("qemu-img", ["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, file, size])
            .good();
    };
    create("middle.qcow2", "base.img", "raw", "64M");
    create("top.qcow2", "middle.qcow2", "qcow2", "64M");
    let io = |name: &str, command: &str| {
        tool("qemu-io", ["-f", "qcow2", "-c", command, folder.join(name).to_str().unwrap()]).good();
    };
    io("middle.qcow2", "write -P 1 2M 1M");
    io("middle.qcow2", "write -z 6M 1M");
    io("top.qcow2", "write -P 2 2M 64k");
    io("top.qcow2", "write -P 3 30M 1M");
    io("top.qcow2", "write -z 41M 128k");
    io("top.qcow2", "write -P 4 60M 64k");
    let depths = same_map_as_qemu_nbd(&folder.join("top.qcow2"), "qcow2", &folder);
    let kinds: std::collections::BTreeSet<u64> = depths.iter().map(|(_, kind)| *kind).collect();
    assert!(kinds.contains(&1) && kinds.contains(&2) && kinds.contains(&3), "{depths:?}");
}
