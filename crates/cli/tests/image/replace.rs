//! Files that `--force` replaces, and files that it must not replace: those that are in use, those
//! that the command reads, and all files if the command fails later.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use blockyard_image::tools::open_file;

use crate::common::{Daemon, SOON};
use crate::fixture::{Images, MIB, image, qemu_img, qemu_io, sound_and_same, text};
use crate::mistakes::refused;

/// Runs a command, which must be refused, leave each of `files` unchanged, and create no file.
#[track_caller]
fn refused_unchanged(images: &Images, args: &[&str], parts: &[&str]) {
    let look = || {
        let files = std::fs::read_dir(&*images.0).unwrap().map(|file| file.unwrap().path());
        let state = |file: &Path| {
            let stat = std::fs::metadata(file).unwrap();
            (
                stat.ino(),
                stat.len(),
                (stat.mtime(), stat.mtime_nsec()),
                (stat.ctime(), stat.ctime_nsec()),
            )
        };
        files.map(|file| (file.clone(), state(&file))).collect::<BTreeMap<_, _>>()
    };
    let before = look();
    refused(args, 1, parts);
    assert_eq!(before, look(), "{args:?}");
}

fn data_option(data: &Path) -> String {
    format!("data_file={}", text(data))
}

#[test]
fn a_data_file_in_use_is_not_replaced() {
    let images = Images::new();
    let (source, data) = (images.raw("a.raw", 4 * MIB, 1), images.raw("data", 4 * MIB, 2));
    let (new, option) = (images.path("new.qcow2"), data_option(&data));
    let _reader = open_file(&data, true).unwrap();
    let parts = ["data", "is in use by"];
    refused_unchanged(&images, &["create", "--force", "-o", &option, text(&new), "1M"], &parts);
    refused_unchanged(
        &images,
        &["convert", "--force", "-o", &option, text(&source), text(&new)],
        &parts,
    );
}

#[test]
fn files_that_the_command_reads_are_not_replaced() {
    let images = Images::new();
    let base = images.raw("base.raw", 4 * MIB, 1);
    images.qcow2("middle.qcow2", "", Some(("base.raw", "raw")), 10 * MIB, 2);
    let top = images.qcow2(
        "top.qcow2",
        "data_file=data.bin",
        Some(("middle.qcow2", "qcow2")),
        10 * MIB,
        3,
    );
    // Other names of the same files: a hard link and a symbolic link.
    let (linked, symbolic) = (images.path("linked"), images.path("symbolic"));
    std::fs::hard_link(&base, &linked).unwrap();
    std::os::unix::fs::symlink(&top, &symbolic).unwrap();
    let new = images.path("new.qcow2");
    for path in [
        &base,
        &images.path("middle.qcow2"),
        &top,
        &images.path("top.qcow2.data"),
        &linked,
        &symbolic,
    ] {
        let (option, parts) = (data_option(path), ["cannot be replaced: the command reads it"]);
        let backing = ["-b", "top.qcow2", "-F", "qcow2"];
        let create = |args: &[&str]| {
            refused_unchanged(
                &images,
                &[&["create", "--force"], &backing[..], args].concat(),
                &parts,
            )
        };
        create(&["-o", &option, text(&new)]);
        create(&["-f", "qcow2", text(path)]);
        let convert = |args: &[&str]| {
            refused_unchanged(&images, &[&["convert", "--force"], args].concat(), &parts)
        };
        convert(&["-o", &option, text(&top), text(&new)]);
        convert(&["-O", "qcow2", text(&top), text(path)]);
        convert(&[
            "-B",
            "top.qcow2",
            "-F",
            "qcow2",
            "-o",
            &option,
            text(&images.path("base.raw")),
            text(&new),
        ]);
    }
    // The backing file must not be replaced, not even with -u, with which it need not exist.
    let parts = ["cannot be replaced"];
    refused_unchanged(
        &images,
        &["create", "--force", "-u", "-b", "top.qcow2", text(&top), "1M"],
        &parts,
    );
}

#[test]
fn nothing_is_replaced_if_the_backing_chain_cannot_be_opened() {
    let (images, other) = (Images::new(), Images::new());
    let base = other.raw("base.raw", 4 * MIB, 1);
    let middle = images.path("middle.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&middle)]);
    let old = images.raw("old.qcow2", 4 * MIB, 2);
    let args = ["create", "-q", "--force", "-b", "middle.qcow2", text(&old)];
    refused_unchanged(&images, &args, &["--force", "base.raw", "--backing-folder"]);
    image(&[&args[..], &["--backing-folder", text(&other.0)]].concat());
}

#[test]
fn nothing_is_replaced_if_an_option_is_wrong() {
    let images = Images::new();
    let (old, data, source) = (
        images.raw("old.qcow2", 4 * MIB, 1),
        images.raw("data", 4 * MIB, 2),
        images.raw("a.raw", 4 * MIB, 3),
    );
    for (bad, part) in [
        ("cluster_size=5k", "power of two"),
        ("compat=0.10", "version 2"),
        ("refcount_bits=3", "refcounts"),
    ] {
        let options = format!("{},{bad}", data_option(&data));
        refused_unchanged(
            &images,
            &["create", "--force", "-o", &options, text(&old), "1M"],
            &[part],
        );
        refused_unchanged(
            &images,
            &["convert", "--force", "-o", &options, text(&source), text(&old)],
            &[part],
        );
    }
    for itself in [&old, &images.path("new.qcow2")] {
        let option = data_option(itself);
        refused_unchanged(
            &images,
            &["create", "--force", "-o", &option, text(itself), "1M"],
            &["the image itself"],
        );
    }
}

#[test]
fn an_image_and_its_data_file_are_replaced_together() {
    let images = Images::new();
    let (source, data) = (images.raw("a.raw", 8 * MIB, 1), images.path("data"));
    let (target, option) = (images.path("new.qcow2"), data_option(&data));
    image(&["create", "-q", "-o", &option, text(&target), "16M"]);
    qemu_io(&target, "qcow2", &["write -P 9 0 16M"]);
    let count = || std::fs::read_dir(&*images.0).unwrap().count();
    // A reader of the old data file keeps its data.
    let old = std::fs::File::open(&data).unwrap();
    image(&["convert", "--force", "-o", &option, text(&source), text(&target)]);
    sound_and_same((&target, "qcow2"), (&source, "raw"));
    assert_eq!((old.metadata().unwrap().len(), count()), (16 * MIB, 3));
    // These names are relative, and go through a link in another folder.
    let elsewhere = Images::new();
    let link = elsewhere.path("link.qcow2");
    std::os::unix::fs::symlink(&target, &link).unwrap();
    image(&["convert", "--force", "-o", &option, text(&source), text(&link)]);
    sound_and_same((&target, "qcow2"), (&source, "raw"));
    assert!(link.is_symlink() && count() == 3);
}

/// The new file must be as private as the old one, and its user must be able to open it.
#[test]
fn a_new_file_has_the_attributes_of_the_file_that_it_replaces() {
    use rustix::fs::{Gid, Uid, XattrFlags};
    let images = Images::new();
    let source = images.raw("a.raw", 4 * MIB, 1);
    let (target, data) = (images.raw("b.qcow2", 4 * MIB, 2), images.raw("data", 4 * MIB, 3));
    let is_root = rustix::process::geteuid().is_root();
    for file in [&target, &data] {
        rustix::fs::chmod(file, rustix::fs::Mode::from_raw_mode(0o640)).unwrap();
        rustix::fs::setxattr(file, "user.backup", b"daily", XattrFlags::CREATE).unwrap();
        if is_root {
            let (user, group) = (Uid::from_raw(1234), Gid::from_raw(4321));
            rustix::fs::chown(file, Some(user), Some(group)).unwrap();
        }
    }
    let state = |file: &Path| {
        let stat = std::fs::metadata(file).unwrap();
        let mut value = [0; 16];
        let len = rustix::fs::getxattr(file, "user.backup", &mut value[..]).unwrap();
        (stat.mode() & 0o7777, stat.uid(), stat.gid(), value[..len].to_vec())
    };
    let before = [state(&target), state(&data)];
    let inode = std::fs::metadata(&target).unwrap().ino();
    image(&["convert", "--force", "-o", &data_option(&data), text(&source), text(&target)]);
    assert_ne!(std::fs::metadata(&target).unwrap().ino(), inode);
    assert_eq!([state(&target), state(&data)], before);
    image(&["create", "-q", "--force", "-f", "raw", text(&data), "1M"]);
    assert_eq!(state(&data), before[1]);
}

#[test]
fn files_of_a_killed_command_are_removed() {
    let images = Images::new();
    let mut child = Daemon::start(&mut Command::new("true"));
    let gone = child.pid();
    child.ended(SOON);
    let part = |name: &str, process| images.0.image(&format!(".{name}.{process}.part"), MIB);
    let left = part("b.raw", gone);
    // The command keeps a file for another name, one of a running process, and one that an unknown
    // process has locked.
    let stays =
        [part("c.raw", gone), part("b.raw", std::process::id()), part("b.raw", u32::MAX >> 1)];
    let _user = open_file(&stays[2], false).unwrap();
    image(&["create", "-q", text(&images.path("b.raw")), "1M"]);
    assert!(!left.exists() && stays.iter().all(|file| file.exists()));
}
