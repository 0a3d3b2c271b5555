//! A disk that has its image open only while a guest uses the disk.

use std::sync::Arc;

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_image::{CacheMode, ChainOptions};

use crate::peer::{Scratch, random};

#[test]
fn a_disk_holds_the_lock_of_its_image_only_while_it_is_active() {
    let scratch = Scratch::new("activated");
    std::fs::write(scratch.path("disk.raw"), random(1 << 20, 1)).unwrap();
    let image = ChainOptions::new(scratch.path("disk.raw"));
    let options = DiskOptions {
        name: "disk".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Disk::new(options, Source::open(&image).unwrap());
    let disk = Arc::new(disk.until_activated(image.clone()));
    let is_free = || Source::open(&image).is_ok();
    assert!(disk.is_inactive() && is_free());
    disk.activate(|| true).unwrap();
    assert!(!disk.is_inactive() && !is_free());
    disk.deactivate().unwrap();
    assert!(disk.is_inactive() && is_free());
}
