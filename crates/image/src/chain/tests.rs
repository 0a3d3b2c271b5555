use std::path::PathBuf;

use blockyard_storage::{CacheMode, ImageFile, OpenOptions};

use super::names::{Allowed, PendingImage};
use super::*;
use crate::format::Format;

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
        let next = top.names(name, Some(Format::Raw)).find(&allowed).unwrap();
        scratch.point(link, bad);
        let opening = OpenOptions {
            found: next.found.clone(),
            ..OpenOptions::new(&next.path, true, CacheMode::Writeback)
        };
        assert_eq!(first_byte(&ImageFile::open(&opening).unwrap()), 1, "{link}");
        let refused = top.names(name, Some(Format::Raw)).find(&allowed).err().unwrap().to_string();
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
        assert!(top.names(name, Some(Format::Raw)).find(&allowed).is_err(), "{name}");
    }
    scratch.point("inside/absolute.raw", "inside/base.raw");
    for name in ["base.raw", "./base.raw", "../inside/base.raw", "absolute.raw"] {
        let next = top.names(name, Some(Format::Raw)).find(&allowed).unwrap();
        assert!(next.found.is_some(), "{name}");
    }
}
