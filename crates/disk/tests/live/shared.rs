//! Disks that have a backing image in common: the server opens it once, and a commit needs it for
//! itself.

use std::io::Write;
use std::sync::Arc;

use blockyard_disk::{Disk, DiskOptions, Source, SourceError, Work};
use blockyard_image::{CacheMode, ChainOptions, ImageFile, SharedImages};
use blockyard_ring::Executor;

use crate::peer::{Scratch, judge, qemu_img, random};

const SIZE: usize = 1 << 20;

/// A raw image with two overlays, and the images that their disks share.
struct Fixture {
    scratch: Scratch,
    images: SharedImages,
}

impl Fixture {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        std::fs::write(scratch.path("base.raw"), random(SIZE, 1)).unwrap();
        for overlay in ["a.qcow2", "b.qcow2"] {
            let path = scratch.name(overlay);
            qemu_img(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", &path]);
        }
        Fixture { scratch, images: SharedImages::default() }
    }

    fn open(&self, image: &str, cache: CacheMode) -> Result<Arc<Disk>, SourceError> {
        let (name, serial) = (image.into(), String::new());
        let options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let shared = Some(self.images.clone());
        let path = self.scratch.path(image);
        let source = Source::open(&ChainOptions { shared, cache, ..ChainOptions::new(path) })?;
        Ok(Arc::new(Disk::new(options, source)))
    }

    fn disk(&self, image: &str) -> Arc<Disk> {
        self.open(image, CacheMode::None).unwrap()
    }
}

/// Returns the file of the backing image.
fn base_of(disk: &Disk) -> Arc<ImageFile> {
    disk.source().chain().unwrap().layers()[1].file.clone()
}

fn is_same(one: &Disk, other: &Disk) -> bool {
    Arc::ptr_eq(&base_of(one), &base_of(other))
}

#[test]
fn an_image_is_shared_while_its_file_and_cache_mode_are_the_same() {
    let fixture = Fixture::new("same");
    let a = fixture.disk("a.qcow2");
    assert!(is_same(&a, &fixture.disk("b.qcow2")));
    assert!(!is_same(&a, &fixture.open("b.qcow2", CacheMode::Writeback).unwrap()));
    // Another program that ignores locks makes the image larger.
    let base = std::fs::File::options().append(true).open(fixture.scratch.path("base.raw"));
    base.unwrap().write_all(&[7; 4096]).unwrap();
    let b = fixture.disk("b.qcow2");
    assert!(!is_same(&a, &b));
    assert_eq!((base_of(&a).size(), base_of(&b).size()), (SIZE as u64, SIZE as u64 + 4096));
    drop(a);
    assert!(is_same(&b, &fixture.disk("a.qcow2")), "the newer one is shared");
}

#[test]
fn a_commit_needs_the_backing_image_for_itself() {
    let fixture = Fixture::new("alone");
    let (a, b) = (fixture.disk("a.qcow2"), fixture.disk("b.qcow2"));
    let refused = a.commit(&Work::default()).unwrap_err().to_string();
    assert!(refused.contains("base.raw is in use by another disk of this server"), "{refused}");
    drop(b);
    a.commit(&Work::default()).unwrap();
    // The disk keeps the image for itself, and reads it. Another disk opens it again.
    let b = fixture.disk("b.qcow2");
    assert!(!is_same(&a, &b));
    let refused = a.commit(&Work::default()).unwrap_err().to_string();
    assert!(refused.contains("base.raw is in use by"), "{refused}");
    drop((a, b));
    judge(&fixture.scratch, "a.qcow2", &random(SIZE, 1));
}

#[test]
fn nothing_opens_an_image_while_a_commit_writes_to_it() {
    let fixture = Fixture::new("writes");
    let a = fixture.disk("a.qcow2");
    let chain = a.source().chain().unwrap().clone();
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let writable = executor.block_on(async move { chain.open_backing(&handle).await });
    let writable = writable.unwrap().unwrap();
    let refused = fixture.open("b.qcow2", CacheMode::None).err().unwrap().to_string();
    assert!(refused.contains("base.raw is in use by"), "{refused}");
    drop(writable);
    fixture.disk("b.qcow2");
}
