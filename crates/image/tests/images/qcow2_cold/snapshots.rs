//! Internal snapshots: by QEMU and by this crate, and with power cuts.

use std::cell::Cell;
use std::time::Duration;

use blockyard_image::qcow2::check::{FindingKind, Repair};
use blockyard_image::qcow2::snapshot;
use blockyard_image::qcow2::snapshot_table::Snapshot;
use blockyard_image::{Chain, ChainOptions, ImageError};
use blockyard_storage::sim::SimImage;

use super::cuts::{everywhere, guest, guest_of, header, load, on_image, opened};
use super::peer::{Scratch, on_file, our_check, qemu_check, qemu_img, qemu_io};

const TAKEN: Duration = Duration::new(1_700_000_000, 5);

fn create(path: &str, name: &'static str) -> Result<Snapshot, ImageError> {
    on_file(path, move |raw| async move { snapshot::create(&raw, name, TAKEN).await })
}

fn apply(path: &str, name: &'static str) -> Result<(), ImageError> {
    on_file(path, move |raw| async move { snapshot::apply(&raw, name).await })
}

fn delete(path: &str, name: &'static str) -> Result<(), ImageError> {
    on_file(path, move |raw| async move { snapshot::delete(&raw, name).await })
}

fn names(path: &str) -> Vec<String> {
    let list = on_file(path, |raw| async move { snapshot::list(&raw).await }).unwrap();
    list.iter().map(|s| format!("{} {}", s.id(), s.name())).collect()
}

fn sound(path: &str, what: &str) {
    let (ours, theirs) = (our_check(path, Repair::No), qemu_check(path, None));
    assert!(ours.is_clean(), "{what}: {ours:#?}");
    assert!(theirs.is_clean(), "{what}: {theirs:#?}");
}

const KINDS: [&str; 8] = [
    "compat=0.10",
    "compat=1.1",
    "cluster_size=512",
    "cluster_size=2M",
    "refcount_bits=8",
    "refcount_bits=64,cluster_size=4k",
    "extended_l2=on,cluster_size=32k",
    "lazy_refcounts=on,compression_type=zstd",
];

#[test]
fn qemu_and_this_crate_take_apply_and_delete_snapshots() {
    for options in KINDS {
        let scratch = Scratch::new("snapshots");
        let path = scratch.path("image.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "8M"]);
        qemu_io(&path, &["write -P 1 0 2M", "write -c -P 9 4M 2M", "write -z 1M 64k"]);
        assert_eq!(create(&path, "ours").unwrap().id(), "1");
        sound(&path, options);
        let listed = qemu_img(&["snapshot", "-l", &path]);
        assert!(listed.contains("ours") && listed.contains("2023-11-"), "{listed}");
        qemu_io(&path, &["write -P 2 0 1M", "write -P 2 7M 64k"]);
        qemu_img(&["snapshot", "-c", "theirs", &path]);
        qemu_io(&path, &["write -P 3 512k 1M"]);
        assert_eq!(names(&path), ["1 ours", "2 theirs"]);

        apply(&path, "ours").unwrap();
        sound(&path, options);
        qemu_io(
            &path,
            &["read -P 1 0 1M", "read -P 0 1M 64k", "read -P 9 4M 2M", "read -P 0 7M 64k"],
        );
        qemu_io(&path, &["write -P 4 0 64k"]);
        apply(&path, "2").unwrap();
        sound(&path, options);
        qemu_io(&path, &["read -P 2 0 1M", "read -P 2 7M 64k"]);
        qemu_img(&["snapshot", "-a", "ours", &path]);
        qemu_io(&path, &["read -P 1 0 64k"]);

        delete(&path, "ours").unwrap();
        sound(&path, options);
        assert_eq!(names(&path), ["2 theirs"]);
        qemu_io(&path, &["read -P 1 0 1M", "read -P 9 4M 2M", "write -P 5 0 8M"]);
        qemu_img(&["snapshot", "-a", "theirs", &path]);
        delete(&path, "theirs").unwrap();
        sound(&path, options);
        assert_eq!(names(&path), [""; 0]);
        qemu_io(&path, &["read -P 2 0 1M"]);
    }
}

#[test]
fn snapshots_keep_the_disk_size() {
    let scratch = Scratch::new("snapshot-size");
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", &path, "1M"]);
    qemu_io(&path, &["write -P 1 0 1M"]);
    create(&path, "small").unwrap();
    qemu_img(&["resize", "-q", &path, "4M"]);
    qemu_io(&path, &["write -P 2 3M 1M"]);
    create(&path, "large").unwrap();
    for (name, size) in [("small", 1 << 20), ("large", 4 << 20), ("small", 1 << 20)] {
        apply(&path, name).unwrap();
        sound(&path, name);
        assert!(qemu_img(&["info", &path]).contains(&format!("({size} bytes)")));
    }
}

#[test]
fn invalid_commands_are_refused_and_nothing_is_written() {
    let scratch = Scratch::new("snapshot-refused");
    let (path, data) = (scratch.path("image.qcow2"), scratch.path("data.raw"));
    let refused = |result: Result<(), ImageError>, expected: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &format!("data_file={data}"), &path, "1M"]);
    refused(create(&path, "a").map(|_| ()), "external data file");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "refcount_bits=1", &path, "1M"]);
    create(&path, "empty").unwrap();
    qemu_io(&path, &["write 0 64k"]);
    let before = std::fs::read(&path).unwrap();
    refused(create(&path, "full").map(|_| ()), "would have 2 references");
    refused(create(&path, "empty").map(|_| ()), "a snapshot with this name exists");
    refused(create(&path, "").map(|_| ()), "1 to 65535 bytes");
    refused(apply(&path, "none"), "no snapshot with the name or id \"none\"");
    refused(delete(&path, "7"), "no snapshot with the name or id \"7\"");
    let after = std::fs::read(&path).unwrap();
    // Only the part behind the old file may differ: the command may have written data to free
    // clusters.
    assert!(after[..before.len()] == before, "something was written");
    sound(&path, "refused");
}

#[test]
fn a_snapshot_without_its_table_is_not_shown_as_an_empty_disk() {
    let scratch = Scratch::new("snapshot-truncated");
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &path, "1M"]);
    qemu_io(&path, &["write -P 1 0 1M"]);
    create(&path, "one").unwrap();
    let snapshot = Some("one".into());
    let options = ChainOptions { read_only: true, snapshot, ..ChainOptions::new(&path) };
    drop(Chain::open(&options).unwrap());
    // The first field of the snapshot is the offset of its L1 table.
    let (mut bytes, header) = (std::fs::read(&path).unwrap(), header(&load(&path)).unwrap());
    bytes[header.snapshots_offset as usize..][..8].copy_from_slice(&(1u64 << 40).to_be_bytes());
    std::fs::write(&path, bytes).unwrap();
    let error = Chain::open(&options).unwrap_err().to_string();
    assert!(error.contains("beyond the end of the file"), "{error}");
}

/// Makes a small image with two snapshots; disk and snapshots differ.
fn small(scratch: &Scratch, options: &str) -> SimImage {
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "256k"]);
    qemu_io(&path, &["write -P 1 0 60k", "write -P 2 100k 40k"]);
    qemu_img(&["snapshot", "-c", "one", &path]);
    qemu_io(&path, &["write -P 3 20k 32k", "write -z 100k 16k"]);
    qemu_img(&["snapshot", "-c", "two", &path]);
    qemu_io(&path, &["write -P 4 30k 16k", "write -P 5 200k 16k"]);
    load(&path)
}

/// Returns the guest's disk, and the contents of each snapshot.
fn all_of(image: &SimImage) -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let (list, _) = on_image(image, |raw| async move { snapshot::list(&raw).await.unwrap() });
    let holds = |s: &Snapshot| {
        (s.name(), guest_of(image, s.l1_offset, s.l1_size.into(), s.disk_size.unwrap()))
    };
    (guest(image), list.iter().map(holds).collect())
}

/// Lets QEMU make the repair that the dirty bit demands after a power cut. Checks that QEMU then
/// finds the expected state.
fn qemu_repairs(
    scratch: &Scratch,
    left: &SimImage,
    expected: &(Vec<u8>, Vec<(String, Vec<u8>)>),
) -> Result<(), String> {
    let path = scratch.path("left.qcow2");
    std::fs::write(&path, left.bytes()).unwrap();
    let report = qemu_check(&path, Some("all"));
    match report.is_clean() && all_of(&load(&path)) == *expected {
        true => Ok(()),
        false => Err(format!("after QEMU's repair: {report:?}")),
    }
}

const CUT: [&str; 4] = [
    "compat=0.10,cluster_size=2k",
    "compat=1.1,cluster_size=512",
    "compat=1.1,cluster_size=4k,refcount_bits=8",
    "extended_l2=on,cluster_size=16k",
];

#[test]
fn every_power_cut_leaves_the_old_or_the_new_state() {
    let mut cuts = 0;
    for options in CUT {
        let scratch = Scratch::new("snapshot-cuts");
        let image = small(&scratch, options);
        let version = header(&image).unwrap().version;
        for what in ["create", "apply", "delete"] {
            let operation = |raw| async move {
                match what {
                    "create" => snapshot::create(&raw, "three", TAKEN).await.map(|_| ()),
                    "apply" => snapshot::apply(&raw, "one").await,
                    _ => snapshot::delete(&raw, "one").await,
                }
            };
            let before = all_of(&image);
            let (done, after) = on_image(&image, operation);
            done.unwrap();
            let after = all_of(&after);
            assert!(before != after);
            let judged = Cell::new(0);
            cuts +=
                everywhere(&format!("{options}, {what}"), &image, operation, |through, left| {
                    let (opened, report) = opened(&left)?;
                    let now = all_of(&opened);
                    if now != after && (through || now != before) {
                        return Err(format!(
                            "it is neither what it was nor what it was to be; through: {through}"
                        ));
                    }
                    judged.set(judged.get() + 1);
                    if judged.get() % 50 == 0 {
                        qemu_repairs(&scratch, &left, &now)?;
                    }
                    // Version 2 has no dirty bit: clear COPIED flags are allowed.
                    let careful = |f: &&blockyard_image::qcow2::check::Finding| match f.kind {
                        FindingKind::Leak => !through,
                        FindingKind::Copied => {
                            version == 2 && !through && f.text.contains("is not set")
                        }
                        _ => false,
                    };
                    match report.findings.iter().find(|f| !careful(f)) {
                        None => Ok(()),
                        Some(finding) => Err(format!("{finding}; through: {through}")),
                    }
                });
        }
    }
    println!("{cuts} cuts");
    assert!(cuts > 200, "{cuts} cuts");
}

/// In version 2 a power cut may leave COPIED flags clear. Writes must work, and may copy more than
/// necessary.
#[test]
fn clear_copied_flags_do_not_prevent_writes() {
    for options in ["compat=0.10", "extended_l2=on,cluster_size=16k", "cluster_size=512"] {
        let make = |scratch: &Scratch| {
            let path = scratch.path("image.qcow2");
            qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "2M"]);
            qemu_io(&path, &["write -P 1 0 1M"]);
            let (mut bytes, header) =
                (std::fs::read(&path).unwrap(), header(&load(&path)).unwrap());
            let at = |bytes: &[u8], at: u64| {
                u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap())
            };
            let table = at(&bytes, header.l1_offset) & 0x00ff_ffff_ffff_fe00;
            for flag in [header.l1_offset, table, table + 2 * header.l2_entry_size()] {
                assert!(at(&bytes, flag) >> 63 == 1, "{options}");
                bytes[flag as usize] &= 0x7f;
            }
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(our_check(&path, Repair::No).corruptions, 3, "{options}");
            path
        };
        let scratch = Scratch::new("flags");
        let path = make(&scratch);
        let chain =
            Chain::open(&ChainOptions::new(&path)).unwrap_or_else(|e| panic!("{options}: {e}"));
        drop(chain);
        sound(&path, options);
        let path = make(&scratch);
        create(&path, "one").unwrap_or_else(|e| panic!("{options}: {e}"));
        sound(&path, options);
    }
}
