//! The record of a live snapshot: a later start that names the old image does not write beneath the
//! overlay.

use std::path::Path;
use std::sync::Arc;

use blockyard_disk::{SnapshotOptions, Source};
use blockyard_image::journal::CrashSafety;
use blockyard_image::tools::{self, Progress};
use blockyard_image::{CacheMode, Chain, ChainOptions, Overlaid};
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
    let chain = Chain::of_raw(&file, CrashSafety::default());
    let mut grown = executor
        .block_on(async move { chain.grow(&handle, &overlay, None).await })
        .unwrap()
        .unwrap();
    grown.record().unwrap();
    drop((grown, file, executor));
    assert!(!scratch.path("top.qcow2").exists());
    open(&scratch.path("base.raw"), Overlaid::Refuse).unwrap();
}
