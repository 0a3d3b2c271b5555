//! Errors: one line with the file and the reason, and an exit status.

use crate::common::{Signal, blockyard};
use crate::fixture::{Images, MIB, image_any, qemu_img, text};

/// Runs `blockyard image ARGS`, which must fail with `status` and one line that has all of `parts`.
#[track_caller]
pub fn refused(args: &[&str], status: i32, parts: &[&str]) {
    let done = image_any(args);
    let context = format!("blockyard image {args:?}: {}\n{}{}", done.status, done.out, done.err);
    assert_eq!(done.status.code(), Some(status), "{context}");
    assert_eq!(
        (done.out.as_str(), done.err.lines().count()),
        ("", 1),
        "one line is wanted: {context}"
    );
    assert!(done.err.starts_with("blockyard: "), "{context}");
    for part in parts {
        assert!(done.err.contains(part), "{part:?} is not in it: {context}");
    }
}

#[test]
fn wrong_options_and_names_are_refused() {
    let images = Images::new();
    let nameless = images.0.image("disk", MIB);
    let raw = images.0.image("disk.raw", MIB);
    let target = images.path("new.raw");
    for command in ["info", "map"] {
        refused(&[command, text(&nameless)], 2, &["disk", "--format"]);
        refused(&[command, "-f", "qcow3", text(&raw)], 2, &["qcow3", "raw, qcow2, cow"]);
        refused(&[command, text(&target)], 1, &["new.raw", "there is no such file"]);
        refused(&[command, "/dev/null", "-f", "raw"], 1, &["/dev/null", "must be a regular file"]);
        refused(
            &[command, "-f", "qcow2", text(&raw)],
            1,
            &["disk.raw", "qcow2 header", "offset 0"],
        );
    }
    refused(&["convert", text(&raw)], 2, &["TARGET"]);
    refused(&["convert", text(&raw), text(&images.path("new"))], 2, &["new", "--format"]);
    refused(&["convert", "-S", "4q", text(&raw), text(&target)], 2, &["4q", "is no size"]);
    refused(
        &["convert", text(&raw), "/no/such/folder/new.raw"],
        1,
        &["/no/such/folder/new.raw", "folder /no/such/folder does not exist"],
    );
    refused(&["create", "-f", "raw", text(&target), "-5M"], 2, &["'-5M' is negative"]);
    assert!(!target.exists());
    assert_eq!(blockyard(["image"]).status.code(), Some(2));
}

#[test]
fn missing_and_forbidden_backing_files_are_refused() {
    let (images, other) = (Images::new(), Images::new());
    let base = other.raw("base.raw", 4 * MIB, 1);
    let overlay = images.path("overlay.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&overlay)]);
    let new = images.path("new.raw");
    let outside = ["overlay.qcow2", "base.raw", "lies outside", "--backing-folder"];
    refused(&["convert", text(&overlay), text(&new)], 1, &outside);
    let allowed = image_any(&["map", "--backing-folder", text(&other.0), text(&overlay)]);
    assert!(allowed.status.success(), "{}", allowed.err);
    std::fs::remove_file(&base).unwrap();
    let way_out = "restore it, or name its new place";
    refused(&["map", text(&overlay)], 1, &["overlay.qcow2", "base.raw", "is missing", way_out]);
    // `info` works without its backing file.
    assert!(image_any(&["info", text(&overlay)]).status.success());
}

#[test]
fn an_interrupted_or_killed_conversion_leaves_nothing() {
    let images = Images::new();
    let source = images.0.image("a.raw", 2 << 30);
    let target = images.path("b.raw");
    for (signal, status) in [(Signal::TERM, Some(1)), (Signal::KILL, None)] {
        let mut child = std::process::Command::new(crate::common::BLOCKYARD)
            .args(["image", "convert", "-S", "0", "-t", "none", text(&source), text(&target)])
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // A file without a name appears as "FOLDER/#INODE (deleted)".
        let descriptors = format!("/proc/{}/fd", child.id());
        let is_new = |link: &std::path::Path| {
            link.parent() == Some(&*images.0)
                && link.file_name().unwrap().to_string_lossy().starts_with('#')
        };
        let links = || {
            std::fs::read_dir(&descriptors)
                .unwrap()
                .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        };
        crate::common::until("a file is being made", crate::common::SOON, || {
            links().any(|link| is_new(&link))
        });
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), status);
        assert_eq!(std::fs::read_dir(&*images.0).unwrap().count(), 1);
    }
}
