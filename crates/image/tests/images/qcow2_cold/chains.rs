//! Circular chains, and backing files in forbidden places: the error names the images, and no file
//! is written.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use blockyard_image::qcow2::{CreateOptions, create};
use blockyard_image::{Chain, ChainOptions, MAX_DEPTH};

use super::peer::{Scratch, on_file};

/// Creates an overlay of 1 MiB with the backing file `backing`; returns its path.
fn overlay(scratch: &Scratch, name: &str, backing: &str) -> String {
    let path = scratch.path(name);
    fs::File::create(&path).unwrap();
    let options = CreateOptions::overlay(1 << 20, backing, "qcow2");
    let options = CreateOptions { cluster_size: 4096, extended_l2: false, ..options };
    on_file(&path, |raw| async move { create(&raw, None, &options).await }).unwrap();
    path
}

/// Opens the chain for reading and for writing. Both must fail with this text, and leave all files
/// of the folder unchanged.
fn refused(top: &str, expected: &[&str]) {
    let all = || {
        let files = fs::read_dir(Path::new(top).parent().unwrap())
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = files.map(|path| (fs::read(&path).ok(), path)).collect();
        files.sort();
        files
    };
    let before = all();
    for read_only in [true, false] {
        let options = ChainOptions { read_only, ..ChainOptions::new(top) };
        let error = Chain::open(&options).err().unwrap().to_string();
        assert!(expected.iter().all(|text| error.contains(text)), "{error}");
        assert!(all() == before, "something was written");
    }
}

#[test]
fn circular_chains_are_found_also_through_links() {
    let scratch = Scratch::new("circles");
    refused(&overlay(&scratch, "one.qcow2", "one.qcow2"), &["one.qcow2", "the chain is a circle"]);
    let a = overlay(&scratch, "a.qcow2", "b.qcow2");
    overlay(&scratch, "b.qcow2", "c.qcow2");
    overlay(&scratch, "c.qcow2", "link.qcow2");
    symlink(&a, scratch.path("link.qcow2")).unwrap();
    refused(&a, &["c.qcow2", "link.qcow2", "the chain is a circle"]);
    fs::remove_file(scratch.path("link.qcow2")).unwrap();
    fs::hard_link(&a, scratch.path("link.qcow2")).unwrap();
    refused(&a, &["c.qcow2", "link.qcow2", "the chain is a circle"]);
}

#[test]
fn chains_that_are_too_long_are_refused() {
    let scratch = Scratch::new("long");
    for n in 0..MAX_DEPTH {
        overlay(&scratch, &format!("{n}.qcow2"), &format!("{}.qcow2", n + 1));
    }
    overlay(&scratch, &format!("{MAX_DEPTH}.qcow2"), "none");
    refused(&scratch.path("0.qcow2"), &["200.qcow2", "longer than 200 images"]);
}

#[test]
fn backing_files_outside_the_folders_are_refused() {
    let (scratch, elsewhere) = (Scratch::new("inside"), Scratch::new("outside"));
    let secret = overlay(&elsewhere, "secret.qcow2", "none");
    let top = overlay(&scratch, "top.qcow2", &secret);
    refused(&top, &["top.qcow2", "secret.qcow2", "lies outside", "--backing-folder"]);
    symlink(&secret, scratch.path("link.qcow2")).unwrap();
    refused(&overlay(&scratch, "linked.qcow2", "link.qcow2"), &["secret.qcow2", "lies outside"]);
    refused(
        &overlay(&scratch, "net.qcow2", "nbd:host:1"),
        &["net.qcow2", "only files are supported"],
    );
}
