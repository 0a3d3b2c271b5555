//! The record of a live snapshot: a later start that names the old image does not write beneath the
//! overlay.

use std::path::Path;
use std::sync::Arc;

use blockyard_disk::{Disk, DiskOptions, SnapshotOptions, Source, Work};
use blockyard_image::journal::CrashSafety;
use blockyard_image::tools::{self, NewBacking, Progress};
use blockyard_image::{CacheMode, Chain, ChainOptions, Format, Overlaid};
use blockyard_ring::Executor;

use crate::load::{Load, Reactor, close};
use crate::peer::{Scratch, judge, qemu_img};

const SIZE: usize = 1 << 20;

fn open(path: &Path, overlaid: Overlaid) -> Result<Source, String> {
    let options = ChainOptions { overlaid, cache: CacheMode::Writeback, ..ChainOptions::new(path) };
    Source::open(&options).map_err(|e| e.to_string())
}

/// Serves a base image, takes a live snapshot and ends. Returns the contents of the disk.
fn serve_with_snapshot(scratch: &Scratch, base: &str, format: &str) -> Vec<u8> {
    qemu_img(&["create", "-f", format, &scratch.name(base), &SIZE.to_string()]);
    let (disk, reactors) = (scratch.disk(base), [Reactor::start()]);
    let load = Load::start(&reactors, &disk, 1, &vec![0; SIZE]);
    load.go_on(50);
    disk.snapshot(&SnapshotOptions::new(scratch.path("top.qcow2"))).unwrap();
    load.go_on(50);
    let known = load.end();
    close(&disk, &reactors);
    known
}

/// Closes a disk that no reactor serves.
fn end(disk: Arc<Disk>) {
    close(&disk, &[Reactor::start()]);
}

#[test]
fn an_image_below_a_live_snapshot_is_not_opened_for_writing() {
    for (base, format) in [("base.raw", "raw"), ("base.qcow2", "qcow2")] {
        let scratch = Scratch::new("remembered");
        let known = serve_with_snapshot(&scratch, base, format);
        let path = scratch.path(base);
        let error = open(&path, Overlaid::Refuse).unwrap_err();
        let overlay = scratch.name("top.qcow2");
        assert!(error.contains(&format!("has put overlay {overlay} on it")), "{error}");
        assert!(error.contains("image commit") && error.contains("--abandon-overlay"), "{error}");
        let other = Overlaid::Below(vec![scratch.path(base)]);
        assert_eq!(open(&path, other).unwrap_err(), error, "another file's backing image");
        // A start may open the image for reading, or open the overlay.
        let reading = ChainOptions {
            read_only: true,
            cache: CacheMode::Writeback,
            ..ChainOptions::new(&path)
        };
        Source::open(&reading).unwrap();
        open(&scratch.path("top.qcow2"), Overlaid::Refuse).unwrap();
        judge(&scratch, "top.qcow2", &known);
        // Abandoning the overlay removes the record.
        open(&path, Overlaid::Abandon).unwrap();
        open(&path, Overlaid::Refuse).unwrap();
    }
}

/// Its base may have changed beneath it, so that it would show a mixture.
#[test]
fn an_abandoned_overlay_is_opened_only_to_read_it_or_when_its_base_is_named_again() {
    for (base, format) in [("base.raw", Format::Raw), ("base.qcow2", Format::Qcow2)] {
        let scratch = Scratch::new("abandoned");
        serve_with_snapshot(&scratch, base, &format.to_string());
        let (path, top) = (scratch.path(base), scratch.path("top.qcow2"));
        open(&path, Overlaid::Abandon).unwrap();
        let error = open(&top, Overlaid::Refuse).unwrap_err();
        let named = format!("{} was written to without it", scratch.name(base));
        assert!(error.contains("was abandoned") && error.contains(&named), "{error}");
        assert!(error.contains("image convert") && error.contains("rebase -u"), "{error}");
        // Neither a read-only disk nor an overlay above it shows the mixture.
        let reading = ChainOptions {
            read_only: true,
            cache: CacheMode::Writeback,
            ..ChainOptions::new(&top)
        };
        assert_eq!(Source::open(&reading).err().unwrap().to_string(), error);
        let (above, below) = (scratch.name("above.qcow2"), scratch.name("top.qcow2"));
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &below, &above]);
        assert_eq!(open(&scratch.path("above.qcow2"), Overlaid::Refuse).unwrap_err(), error);
        // A command that reads may show it, one that writes may not.
        let reading = ChainOptions { reads_abandoned: true, ..reading };
        Chain::open(&reading).unwrap();
        for writing in [
            ChainOptions { read_only: false, ..reading.clone() },
            ChainOptions { commit_into: Some(1), ..reading.clone() },
        ] {
            assert_eq!(Chain::open(&writing).unwrap_err().to_string(), error);
        }
        // A new name of the base does not hide the mark.
        std::fs::rename(&path, scratch.path("moved")).unwrap();
        std::os::unix::fs::symlink(scratch.path("moved"), &path).unwrap();
        assert!(open(&top, Overlaid::Refuse).unwrap_err().contains("was abandoned"));
        let file = Arc::new(tools::open_file(&top, false).unwrap());
        let name = scratch.name("moved");
        tools::set_backing(&file, NewBacking::Qcow2 { name, format }).unwrap();
        drop(file);
        open(&top, Overlaid::Refuse).unwrap();
    }
}

/// The record of a base stays when its overlay is made independent of it. Then the base can be
/// served again, and the overlay still holds sound data.
#[test]
fn an_overlay_that_does_not_need_the_base_is_not_spoilt_when_it_is_abandoned() {
    let scratch = Scratch::new("independent");
    let known = serve_with_snapshot(&scratch, "base.raw", "raw");
    let disk = scratch.disk("top.qcow2");
    disk.stream(&Work::default()).unwrap();
    end(disk);
    open(&scratch.path("base.raw"), Overlaid::Abandon).unwrap();
    open(&scratch.path("top.qcow2"), Overlaid::Refuse).unwrap();
    judge(&scratch, "top.qcow2", &known);

    let scratch = Scratch::new("rebased");
    let known = serve_with_snapshot(&scratch, "base.raw", "raw");
    std::fs::copy(scratch.path("base.raw"), scratch.path("copy.raw")).unwrap();
    let (copy, top) = (scratch.name("copy.raw"), scratch.name("top.qcow2"));
    qemu_img(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", &copy, &top]);
    open(&scratch.path("base.raw"), Overlaid::Abandon).unwrap();
    open(&scratch.path("top.qcow2"), Overlaid::Refuse).unwrap();
    judge(&scratch, "top.qcow2", &known);
}

/// An overlay that cannot be marked does not keep the base closed.
#[test]
fn a_base_with_a_lost_overlay_can_be_opened_and_get_another_one() {
    let scratch = Scratch::new("lost");
    serve_with_snapshot(&scratch, "base.raw", "raw");
    std::fs::remove_file(scratch.path("top.qcow2")).unwrap();
    open(&scratch.path("base.raw"), Overlaid::Abandon).unwrap();
    let disk = scratch.disk("base.raw");
    disk.snapshot(&SnapshotOptions::new(scratch.path("top.qcow2"))).unwrap();
    end(disk);
    open(&scratch.path("top.qcow2"), Overlaid::Refuse).unwrap();
}

/// Another server may put an overlay on the image while this one has it closed.
#[test]
fn a_disk_abandons_an_overlay_only_when_it_is_activated_for_the_first_time() {
    let scratch = Scratch::new("activated-again");
    serve_with_snapshot(&scratch, "base.raw", "raw");
    let path = scratch.path("base.raw");
    let image = ChainOptions {
        overlaid: Overlaid::Abandon,
        cache: CacheMode::Writeback,
        ..ChainOptions::new(&path)
    };
    let first = ChainOptions { read_only: true, force_share: true, ..image.clone() };
    let options = DiskOptions {
        name: "disk".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::Writeback,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Disk::new(options, Source::open(&first).unwrap()).until_activated(image);
    let disk = Arc::new(disk);
    disk.activate(|| true).unwrap();
    disk.deactivate().unwrap();
    let other = scratch.disk("base.raw");
    other.snapshot(&SnapshotOptions::new(scratch.path("new.qcow2"))).unwrap();
    end(other);
    let error = disk.activate(|| true).unwrap_err().to_string();
    assert!(error.contains("has put overlay") && error.contains("new.qcow2"), "{error}");
    open(&scratch.path("new.qcow2"), Overlaid::Refuse).unwrap();
}

/// A raw image cannot say where its overlays lie, so the disk does.
#[test]
fn an_overlay_of_a_raw_image_lies_in_another_folder_if_the_disk_allows_that_of_the_image() {
    let scratch = Scratch::new("elsewhere");
    std::fs::write(scratch.path("base.raw"), vec![7; SIZE]).unwrap();
    std::fs::create_dir(scratch.path("other")).unwrap();
    let (disk, overlay) = (scratch.disk("base.raw"), scratch.path("other/top.qcow2"));
    let error = disk.snapshot(&SnapshotOptions::new(&overlay)).unwrap_err().to_string();
    assert!(error.contains("lies outside the allowed folders"), "{error}");
    assert!(error.contains("key backing-folders of the disk"), "{error}");
    let folders = vec![scratch.path(".")];
    let allowed = SnapshotOptions { folders: folders.clone(), ..SnapshotOptions::new(&overlay) };
    disk.snapshot(&allowed).unwrap();
    // The next snapshot has the same rule, because the disk keeps it.
    disk.snapshot(&SnapshotOptions::new(scratch.path("other/next.qcow2"))).unwrap();
    end(disk);
    let next = ChainOptions { folders, ..ChainOptions::new(scratch.path("other/next.qcow2")) };
    Source::open(&next).unwrap();
    judge(&scratch, "other/next.qcow2", &vec![7; SIZE]);
}

#[test]
fn committing_an_overlay_removes_its_record() {
    for (base, format) in [("base.raw", "raw"), ("base.qcow2", "qcow2")] {
        let scratch = Scratch::new("forgotten");
        let known = serve_with_snapshot(&scratch, base, format);
        let options = ChainOptions {
            only_locked: true,
            commit_into: Some(1),
            cache: CacheMode::Writeback,
            ..ChainOptions::new(scratch.path("top.qcow2"))
        };
        let chain = Arc::new(Chain::open(&options).unwrap());
        tools::commit(&chain, None, 1, &Arc::<Progress>::default()).unwrap();
        tools::make_empty(&chain).unwrap();
        drop(chain);
        open(&scratch.path(base), Overlaid::Refuse).unwrap();
        judge(&scratch, base, &known);
    }
}

#[test]
fn an_overlay_that_was_never_used_leaves_no_record() {
    let scratch = Scratch::new("unused");
    std::fs::write(scratch.path("base.raw"), vec![1; SIZE]).unwrap();
    let Source::File(file) = open(&scratch.path("base.raw"), Overlaid::Refuse).unwrap() else {
        unreachable!()
    };
    let executor = Executor::new().unwrap();
    let (handle, overlay) = (executor.handle().clone(), scratch.path("top.qcow2"));
    let chain = Chain::of_raw(&file, CrashSafety::default(), Vec::new());
    let mut grown = executor
        .block_on(async move { chain.grow(&handle, &overlay, None).await })
        .unwrap()
        .unwrap();
    grown.record().unwrap();
    drop((grown, file, executor));
    assert!(!scratch.path("top.qcow2").exists());
    open(&scratch.path("base.raw"), Overlaid::Refuse).unwrap();
}
