use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use blockyard_storage::{CacheMode, ImageFile, OpenOptions};

use super::error::Role;
use super::left::LeftImage;
use super::names::{Allowed, PendingImage};
use super::*;
use crate::layers::format::Format;
use crate::qcow2::CreateOptions;
use crate::tools::{NewImage, create};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("blockyard-chain-{name}-{}", std::process::id()));
        std::fs::create_dir_all(path.join("inside")).unwrap();
        std::fs::write(path.join("secret.raw"), [7; 4096]).unwrap();
        std::fs::write(path.join("inside/base.raw"), [1; 4096]).unwrap();
        Scratch(std::fs::canonicalize(path).unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Replaces a symbolic link atomically.
    fn point(&self, link: &str, to: &str) {
        let (link, new) = (self.path(link), self.path("inside/new-link"));
        std::os::unix::fs::symlink(self.path(to), &new).unwrap();
        std::fs::rename(new, link).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn first_byte(file: &ImageFile) -> u8 {
    let fd = file.fd().unwrap();
    let mut byte = [0];
    rustix::io::pread(fd, &mut byte, 0).unwrap();
    byte[0]
}

/// The chain opens the file that it checked, even if a link changes after the check.
#[test]
fn a_link_that_changes_after_the_check_is_not_followed() {
    let scratch = Scratch::new("race");
    let options = ChainOptions::new(scratch.path("inside/top.qcow2"));
    let allowed = Allowed::by(&options);
    let top =
        PendingImage { path: options.path.clone(), format: None, named_by: None, found: None };
    for link in ["inside/link.raw", "inside/folder"] {
        let (good, bad, name) = match link {
            "inside/folder" => ("inside", "", "folder/base.raw"),
            _ => ("inside/base.raw", "secret.raw", "link.raw"),
        };
        std::fs::write(scratch.path("base.raw"), [7; 4096]).unwrap();
        scratch.point(link, good);
        let next = top.names(Role::Backing, name, Some(Format::Raw)).find(&allowed).unwrap();
        scratch.point(link, bad);
        let opening = OpenOptions {
            found: next.found.clone(),
            ..OpenOptions::new(&next.path, true, CacheMode::Writeback)
        };
        assert_eq!(first_byte(&ImageFile::open(&opening).unwrap()), 1, "{link}");
        let refused = top
            .names(Role::Backing, name, Some(Format::Raw))
            .find(&allowed)
            .err()
            .unwrap()
            .to_string();
        assert!(refused.contains("lies outside"), "{refused}");
    }
}

#[test]
fn names_outside_the_folders_are_refused_and_links_inside_are_allowed() {
    let scratch = Scratch::new("names");
    let options = ChainOptions::new(scratch.path("inside/top.qcow2"));
    let allowed = Allowed::by(&options);
    let top =
        PendingImage { path: options.path.clone(), format: None, named_by: None, found: None };
    std::fs::create_dir(scratch.path("inside-not")).unwrap();
    std::fs::write(scratch.path("inside-not/x.raw"), [7]).unwrap();
    let absolute = scratch.path("secret.raw");
    for name in [
        "../secret.raw",
        absolute.to_str().unwrap(),
        "../inside-not/x.raw",
        "/proc/self/exe",
        "missing.raw",
    ] {
        assert!(
            top.names(Role::Backing, name, Some(Format::Raw)).find(&allowed).is_err(),
            "{name}"
        );
    }
    std::fs::write(scratch.path("inside/vm:1.raw"), [1]).unwrap();
    let protocol = top.names(Role::Backing, "vm:1.raw", Some(Format::Raw)).find(&allowed);
    let refused = protocol.err().unwrap().to_string();
    assert!(refused.contains("only files are supported"), "{refused}");
    scratch.point("inside/absolute.raw", "inside/base.raw");
    for name in ["base.raw", "./vm:1.raw", "./base.raw", "../inside/base.raw", "absolute.raw"] {
        let next = top.names(Role::Backing, name, Some(Format::Raw)).find(&allowed).unwrap();
        assert!(next.found.is_some(), "{name}");
    }
}

/// Only the file that was left is not checked again: not one that was written since, not one on
/// another inode.
#[test]
fn an_image_is_spared_the_check_only_as_it_was_left() {
    let scratch = Scratch::new("left");
    let path = scratch.path("inside/top.qcow2");
    let options = CreateOptions::new(1 << 20);
    File::create(&path).unwrap();
    create(&path, &OpenedFiles::default(), NewImage::Qcow2 { options, data: None }).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    // The refcount of the header's cluster becomes 0.
    let offset_at = |at: u64| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        u64::from_be_bytes(word)
    };
    let block = offset_at(offset_at(48));
    file.write_all_at(&[0, 0], block).unwrap();

    let left = LeftImage::of(&file);
    assert!(left.is_some());
    let open = |path: &PathBuf, left| {
        Chain::open(&ChainOptions { left, ..ChainOptions::new(path) })
            .map(|chain| chain.top().left())
    };
    assert!(open(&path, None).is_err(), "the check finds the refcount");
    let again = open(&path, left).unwrap();
    assert_eq!(again, left, "nothing has changed the file");
    let copy = scratch.path("inside/copy.qcow2");
    std::fs::copy(&path, &copy).unwrap();
    assert!(open(&copy, left).is_err());
    file.write_all_at(&[0, 0], block).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert!(open(&path, left).is_err());
}

#[test]
fn an_image_that_was_not_checked_is_not_left() {
    let scratch = Scratch::new("unchecked");
    let path = scratch.path("inside/top.qcow2");
    let options = CreateOptions::new(1 << 20);
    File::create(&path).unwrap();
    create(&path, &OpenedFiles::default(), NewImage::Qcow2 { options, data: None }).unwrap();
    let options = ChainOptions { read_only: true, ..ChainOptions::new(&path) };
    assert_eq!(Chain::open(&options).unwrap().top().left(), None);
    let raw = ChainOptions::new(scratch.path("inside/base.raw"));
    assert_eq!(Chain::open(&raw).unwrap().top().left(), None);
}
