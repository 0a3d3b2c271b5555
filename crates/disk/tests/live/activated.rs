//! A disk that has its image open only while a guest uses the disk.

use std::sync::Arc;
use std::time::Duration;

use blockyard_disk::{BackupOptions, Disk, DiskOptions, Source, Work};
use blockyard_image::{CacheMode, ChainOptions, Format};

use crate::load::{Reactor, WRITE, ask};
use crate::peer::{Scratch, random};

/// Returns a disk that is inactive, and the options that open its image.
fn inactive(scratch: &Scratch) -> (Arc<Disk>, ChainOptions) {
    inactive_with(scratch, CacheMode::None)
}

fn inactive_with(scratch: &Scratch, cache: CacheMode) -> (Arc<Disk>, ChainOptions) {
    std::fs::write(scratch.path("disk.raw"), random(1 << 20, 1)).unwrap();
    let image = ChainOptions { cache, ..ChainOptions::new(scratch.path("disk.raw")) };
    let options = DiskOptions {
        name: "disk".into(),
        serial: String::new(),
        read_only: false,
        cache,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Disk::new(options, Source::open(&image).unwrap());
    (Arc::new(disk.until_activated(image.clone())), image)
}

#[test]
fn a_disk_holds_the_lock_of_its_image_only_while_it_is_active() {
    let scratch = Scratch::new("activated");
    let (disk, image) = inactive(&scratch);
    let is_free = || Source::open(&image).is_ok();
    assert!(disk.is_inactive() && is_free());
    disk.activate(|| true).unwrap();
    assert!(!disk.is_inactive() && !is_free());
    disk.deactivate().unwrap();
    assert!(disk.is_inactive() && is_free());
}

/// Another host may open the image next, so a migration keeps also what the guest has not flushed.
#[test]
fn the_writes_of_a_disk_that_ignores_flushes_are_durable_when_it_is_inactive() {
    let scratch = Scratch::new("deactivated");
    let (disk, _) = inactive_with(&scratch, CacheMode::Unsafe);
    disk.activate(|| true).unwrap();
    let reactor = Reactor::start();
    let (status, _) = reactor.on(&disk, async |served| ask(&served, WRITE, 0, vec![1; 512]).await);
    assert_eq!((status, disk.flushes().syncs), (Ok(()), 0));
    disk.deactivate().unwrap();
    assert_eq!(disk.flushes().syncs, 1);
}

/// An inactive disk has no writes that a drain could make durable, and no requests to hold. Its
/// image may be in use on another host, so no backup of it is the disk at one moment.
#[test]
fn a_drain_or_backup_of_an_inactive_disk_is_refused_and_changes_nothing() {
    let scratch = Scratch::new("inactive-drain");
    let (disk, _) = inactive(&scratch);
    let copy = BackupOptions::new(scratch.path("copy.raw"), Format::Raw);
    let drained = disk.drain(Duration::from_secs(60));
    for refused in [drained, disk.backup(&copy, &Work::default())] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("no guest runs"), "{error}");
    }
    assert!(!copy.target.exists());
    assert!(disk.poisoned().is_none());
    disk.activate(|| true).unwrap();
    assert!(!disk.is_inactive());
}
