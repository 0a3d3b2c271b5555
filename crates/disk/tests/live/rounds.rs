//! Repeated snapshots, commits and streams under load, and the contents of the files afterwards.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockyard_disk::{Disk, Op, SnapshotOptions, Work};
use blockyard_image::CacheMode;

use crate::load::{Load, Reactor, WRITE, ask, close};
use crate::peer::{Scratch, judge, qemu_img, random};

const SIZE: usize = 8 << 20;

fn snapshot(disk: &Arc<Disk>, overlay: PathBuf) {
    disk.snapshot(&SnapshotOptions::new(overlay)).unwrap();
}

/// Returns the backing file that the image names.
fn backing(scratch: &Scratch, image: &str) -> Option<String> {
    let info = qemu_img(&["info", "--output=json", &scratch.name(image)]);
    let name = info.split("\"backing-filename\": \"").nth(1)?;
    name.split('"').next().map(str::to_string)
}

#[test]
fn snapshots_under_load_preserve_each_state_and_lose_no_write() {
    for (base, format) in [("base.raw", "raw"), ("base.qcow2", "qcow2")] {
        let scratch = Scratch::new("snapshots");
        qemu_img(&["create", "-f", format, &scratch.name(base), &SIZE.to_string()]);
        let (disk, reactors) = (scratch.disk(base), [Reactor::start(), Reactor::start()]);
        let mut known = vec![0; SIZE];
        let mut states = Vec::new();
        for round in 0..3 {
            let load = Load::start(&reactors, &disk, round, &known);
            load.go_on(200);
            snapshot(&disk, scratch.path(&format!("{round}.qcow2")));
            load.go_on(200);
            known = load.end();
            // Another snapshot without load: the contents of its backing image are known exactly.
            snapshot(&disk, scratch.path(&format!("{round}-still.qcow2")));
            states.push((format!("{round}.qcow2"), known.clone()));
        }
        close(&disk, &reactors);
        drop(disk);
        for (image, state) in &states {
            judge(&scratch, image, state);
        }
        judge(&scratch, "2-still.qcow2", &known);
        assert_eq!(backing(&scratch, "0.qcow2").as_deref(), Some(base));
        assert_eq!(backing(&scratch, "2-still.qcow2").as_deref(), Some("2.qcow2"));
    }
}

#[test]
fn writes_before_a_snapshot_are_in_the_old_image_and_later_ones_are_not() {
    let scratch = Scratch::new("line");
    qemu_img(&["create", "-f", "raw", &scratch.name("base.raw"), &SIZE.to_string()]);
    let (disk, reactors) = (scratch.disk("base.raw"), [Reactor::start(), Reactor::start()]);
    let load = Load::start(&reactors, &disk, 1, &vec![0; SIZE]);
    load.go_on(500);
    let known = load.end();
    snapshot(&disk, scratch.path("new.qcow2"));
    let load = Load::start(&reactors, &disk, 2, &known);
    load.go_on(500);
    let later = load.end();
    assert!(std::fs::read(scratch.path("base.raw")).unwrap() == known, "the old image has changed");
    close(&disk, &reactors);
    drop(disk);
    judge(&scratch, "base.raw", &known);
    judge(&scratch, "new.qcow2", &later);
}

#[test]
fn an_image_streamed_under_load_needs_no_backing_image() {
    let scratch = Scratch::new("stream");
    qemu_img(&["create", "-f", "raw", &scratch.name("base.raw"), &SIZE.to_string()]);
    let (disk, reactors) = (scratch.disk("base.raw"), [Reactor::start(), Reactor::start()]);
    let mut load = Load::start(&reactors, &disk, 1, &vec![0; SIZE]);
    load.go_on(500);
    for round in 0..3u64 {
        for name in ["a", "b"] {
            snapshot(&disk, scratch.path(&format!("{round}{name}.qcow2")));
            load.go_on(100);
        }
        let work = Work::default();
        disk.stream(&work).unwrap();
        assert_eq!((work.progress().done(), work.progress().total()), (SIZE as u64, SIZE as u64));
        let chain = disk.source();
        assert_eq!(chain.chain().unwrap().layers().len(), 1);
        // The former backing images may be removed while the disk is served.
        let _ = std::fs::remove_file(scratch.path("base.raw"));
        std::fs::remove_file(scratch.path(&format!("{round}a.qcow2"))).unwrap();
        load.go_on(200);
        let known = load.end();
        load = Load::start(&reactors, &disk, round + 2, &known);
    }
    let known = load.end();
    close(&disk, &reactors);
    drop(disk);
    assert_eq!(backing(&scratch, "2b.qcow2"), None);
    judge(&scratch, "2b.qcow2", &known);
}

#[test]
fn an_overlay_committed_under_load_is_empty_and_its_backing_image_holds_all_data() {
    let bases: [(&str, &[&str]); 4] = [
        ("base.raw", &["-O", "raw"]),
        ("base.qcow2", &["-O", "qcow2"]),
        ("small.qcow2", &["-O", "qcow2", "-o", "cluster_size=4k"]),
        // A write to the compressed backing image first frees the old cluster.
        ("packed.qcow2", &["-O", "qcow2", "-c"]),
    ];
    for (base, options) in bases {
        let scratch = Scratch::new("commit");
        let (name, source) = (scratch.name(base), scratch.name("source"));
        let mut known = random(SIZE, 3);
        // Make three quarters of the data compressible.
        known.iter_mut().skip(SIZE / 4).step_by(2).for_each(|byte| *byte = 7);
        std::fs::write(&source, &known).unwrap();
        qemu_img(&[&["convert", "-f", "raw"], options, &[&source, &name]].concat());
        let (disk, reactors) = (scratch.disk(base), [Reactor::start(), Reactor::start()]);
        let mut load = Load::start(&reactors, &disk, 1, &known);
        snapshot(&disk, scratch.path("top.qcow2"));
        for round in 0..3u64 {
            load.go_on(200);
            let work = Work::default();
            disk.commit(&work).unwrap();
            assert!(work.progress().done() >= SIZE as u64);
            assert_eq!(work.progress().done(), work.progress().total());
            load.go_on(200);
            let known = load.end();
            load = Load::start(&reactors, &disk, round + 2, &known);
        }
        let known = load.end();
        // Another commit without load. Then the backing image holds everything, and the topmost one
        // nothing.
        disk.commit(&Work::default()).unwrap();
        close(&disk, &reactors);
        drop(disk);
        judge(&scratch, base, &known);
        judge(&scratch, "top.qcow2", &known);
        let map = qemu_img(&["map", "--output=json", &scratch.name("top.qcow2")]);
        assert!(
            !map.contains("\"depth\": 0, \"present\": true, \"zero\": false"),
            "the overlay is not empty: {map}"
        );
    }
}

/// Where the backing image has zeroes, a stream copies nothing, so a cluster stays partial. A disk
/// that ignores flushes must complete it before the image has no backing file.
#[test]
fn a_stream_of_a_disk_that_ignores_flushes_holds_all_data() {
    let (scratch, reactors) = (Scratch::new("unsafe"), [Reactor::start()]);
    let mut known = vec![0; SIZE];
    known[32 << 10..64 << 10].fill(7);
    std::fs::write(scratch.path("source"), &known).unwrap();
    let names = ["source", "base.qcow2", "top.qcow2"].map(|name| scratch.name(name));
    let [source, base, top] = names.each_ref().map(String::as_str);
    let small = "cluster_size=4k";
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-o", small, source, base]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, top]);
    let disk = scratch.disk_with("top.qcow2", |options| options.cache = CacheMode::Unsafe);
    let (status, _) =
        reactors[0].on(&disk, async move |served| ask(&served, WRITE, 4096, vec![9; 4096]).await);
    assert_eq!(status, Ok(()));
    known[4096..8192].fill(9);
    disk.stream(&Work::default()).unwrap();
    close(&disk, &reactors);
    drop(disk);
    assert_eq!(backing(&scratch, "top.qcow2"), None);
    judge(&scratch, "top.qcow2", &known);
}

/// The server marks such a bitmap as in use when it opens the image.
#[test]
fn an_image_with_a_bitmap_that_records_writes_grows() {
    let (scratch, reactors) = (Scratch::new("bitmap"), [Reactor::start()]);
    let top = scratch.name("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &top, &SIZE.to_string()]);
    qemu_img(&["bitmap", "--add", &top, "daily"]);
    let disk = scratch.disk("top.qcow2");
    let bytes = vec![9; 4096];
    let (status, _) =
        reactors[0].on(&disk, async move |served| ask(&served, WRITE, 0, bytes).await);
    assert_eq!(status, Ok(()));
    disk.grow(2 * SIZE as u64).unwrap();
    assert_eq!(disk.refresh_capacity().unwrap(), Some(2 * SIZE as u64));
    close(&disk, &reactors);
    drop(disk);
    let mut known = vec![0; 2 * SIZE];
    known[..4096].fill(9);
    judge(&scratch, "top.qcow2", &known);
    let info = qemu_img(&["info", &top]);
    assert!(info.contains("daily") && info.contains("in-use"), "{info}");
}

/// During a drain the files hold all answered writes, so that an operator can copy them.
#[test]
fn a_copy_made_during_a_drain_of_a_disk_that_ignores_flushes_holds_all_data() {
    for (image, format) in [("disk.raw", "raw"), ("disk.qcow2", "qcow2")] {
        let (scratch, reactors) = (Scratch::new("drained"), [Reactor::start()]);
        qemu_img(&["create", "-q", "-f", format, &scratch.name(image), &SIZE.to_string()]);
        let disk = scratch.disk_with(image, |options| options.cache = CacheMode::Unsafe);
        let mut known = vec![0; SIZE];
        for (op, at, byte) in [(WRITE, 4096, 9), (WRITE, 1 << 20, 7), (Op::Flush, 0, 0)] {
            let len = if op == Op::Flush { 0 } else { 4096 };
            known[at..at + len].fill(byte);
            let (status, _) = reactors[0]
                .on(&disk, async move |served| ask(&served, op, at as u64, vec![byte; len]).await);
            assert_eq!(status, Ok(()));
        }
        assert_eq!(disk.flushes().syncs, 0, "{format}");
        disk.drain(Duration::from_secs(60)).unwrap();
        assert!(disk.flushes().syncs > 0, "{format}");
        let copy = format!("copy-{image}");
        std::fs::copy(scratch.path(image), scratch.path(&copy)).unwrap();
        // `judge` would complain about clusters that the server has reserved.
        std::fs::write(scratch.path("expected"), &known).unwrap();
        let (copy, expected) = (scratch.name(&copy), scratch.name("expected"));
        qemu_img(&["compare", "-f", format, "-F", "raw", &copy, &expected]);
        disk.resume();
        close(&disk, &reactors);
    }
}

#[test]
fn a_qcow2_image_grows_under_load_and_hides_a_longer_backing_image() {
    for cluster in ["65536", "512"] {
        let scratch = Scratch::new("grow");
        // The base has data behind the end of the overlay, which ends within a cluster.
        let old = SIZE - 1536;
        std::fs::write(scratch.path("base.raw"), random(SIZE + (1 << 20), 5)).unwrap();
        let options = format!("cluster_size={cluster}");
        let (base, top) = (scratch.name("base.raw"), scratch.name("top.qcow2"));
        let size = old.to_string();
        qemu_img(&["create", "-f", "qcow2", "-o", &options, "-b", &base, "-F", "raw", &top, &size]);
        let known = std::fs::read(scratch.path("base.raw")).unwrap()[..old].to_vec();
        let (disk, reactors) = (scratch.disk("top.qcow2"), [Reactor::start(), Reactor::start()]);
        let load = Load::start(&reactors, &disk, 1, &known);
        load.go_on(200);
        for size in [old + 512, SIZE, SIZE + (3 << 20)] {
            disk.grow(size as u64).unwrap();
            assert_eq!(disk.refresh_capacity().unwrap(), Some(size as u64));
            load.go_on(100);
        }
        assert!(disk.grow(SIZE as u64).unwrap_err().to_string().contains("only grow"));
        let mut known = load.end();
        known.resize(SIZE + (3 << 20), 0);
        close(&disk, &reactors);
        drop(disk);
        judge(&scratch, "top.qcow2", &known);
    }
}
