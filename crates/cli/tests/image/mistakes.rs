//! Errors: one line with the file and the reason, and an exit status.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::common::{BLOCKYARD, Daemon, SOON, Signal, TOOL, blockyard, until};
use crate::fixture::{Images, MIB, image, image_any, qemu_img, sound_and_same, text};

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
    let size = ["option \"size\"", "has the size of"];
    refused(&["convert", "-o", "size=2M", text(&raw), text(&target)], 2, &size);
    refused(&["measure", "-O", "qcow2", "-o", "size=1G", text(&raw)], 2, &size);
    let link = images.path("link.raw");
    std::os::unix::fs::symlink("nowhere.raw", &link).unwrap();
    refused(&["convert", text(&raw), text(&link)], 1, &["link.raw is a link to nothing"]);
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

/// The advice for a backing file would add a backing file to the image.
#[test]
fn a_missing_data_file_is_named_as_such() {
    let images = Images::new();
    let path = images.path("a.qcow2");
    image(&["create", "-q", "-f", "qcow2", "-o", "data_file=gone.raw", text(&path), "1M"]);
    std::fs::remove_file(images.path("gone.raw")).unwrap();
    let missing = ["its data file gone.raw", "is missing: restore it"];
    refused(&["map", text(&path)], 1, &missing);
    assert!(!image_any(&["map", text(&path)]).err.contains("rebase"));
    refused(&["check", text(&path)], 1, &["data file", "gone.raw", "No such file"]);
}

/// No program opens an image that stores such a name, because the name means a protocol.
#[test]
fn a_name_with_a_protocol_is_refused_before_an_image_stores_it() {
    let images = Images::new();
    let base = images.raw("vm:base.img", 4 * MIB, 1);
    let top = images.path("top.qcow2");
    let (base_arg, top_arg) = (text(&base), text(&top));
    let advice = ["backing file vm:base.img", "write ./vm:base.img"];
    refused(&["create", "-b", "vm:base.img", "-F", "raw", top_arg], 2, &advice);
    refused(&["create", "-u", "-b", "vm:base.img", "-F", "raw", top_arg, "4M"], 2, &advice);
    refused(&["convert", "-B", "vm:base.img", "-F", "raw", base_arg, top_arg], 2, &advice);
    let (option, advice_data) = ("data_file=vm:1.raw", ["data file vm:1.raw", "write ./vm:1.raw"]);
    refused(&["create", "-o", option, top_arg, "4M"], 2, &advice_data);
    refused(&["convert", "-o", option, base_arg, top_arg], 2, &advice_data);
    assert!(!top.exists() && !images.path("vm:1.raw").exists());
    for name in ["exec:base.img", ":base.img"] {
        std::fs::copy(&base, images.path(name)).unwrap();
        let create = ["create", "-b", name, "-F", "raw", top_arg];
        refused(&create, 2, &[&format!("write ./{name}")]);
    }

    image(&["create", "-q", "-b", "./vm:base.img", "-F", "raw", top_arg]);
    sound_and_same((&top, "qcow2"), (&base, "raw"));
    image(&["compare", top_arg, base_arg]);
    let safely: &[&str] = &[];
    for only_name in [safely, &["-u"]] {
        let rebase = ["-b", "vm:base.img", "-F", "raw", top_arg];
        refused(&[&["rebase"], only_name, &rebase].concat(), 2, &advice);
        let rebase = ["-b", "./vm:base.img", "-F", "raw", top_arg];
        image(&[&["rebase"], only_name, &rebase].concat());
        image(&["compare", top_arg, base_arg]);
    }
    let split = images.path("split.qcow2");
    image(&["convert", "-o", "data_file=./vm:1.raw", base_arg, text(&split)]);
    image(&["compare", text(&split), base_arg]);
    // A COW file stores the absolute path.
    let cow = images.path("a.cow");
    image(&["create", "-q", "-b", "vm:base.img", "-F", "raw", text(&cow)]);
    image(&["compare", text(&cow), base_arg]);
}

#[test]
fn names_in_an_image_cannot_control_a_terminal() {
    let images = Images::new();
    let path = images.path("a.qcow2");
    let name = "./x\u{1b}[31m\nfile format: raw";
    image(&["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", text(&path), "1M"]);
    let info = image(&["info", text(&path)]);
    assert!(info.contains("backing file: ./x?[31m?file format: raw"), "{info}");
    assert_eq!(info.matches("\nfile format").count(), 1, "{info}");
    refused(&["map", text(&path)], 1, &["its backing file ./x?[31m?file format: raw"]);
}

/// `nohup` ignores SIGHUP, and a shell ignores SIGINT for a command in the background.
#[test]
fn a_signal_that_the_caller_ignores_does_not_end_a_conversion() {
    let images = Images::new();
    let source = images.0.image("a.raw", 256 << 20);
    let target = images.path("b.raw");
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP INT; exec \"$0\" image convert -S 0 \"$1\" \"$2\""]);
    let mut child = Daemon::start(command.args([BLOCKYARD, text(&source), text(&target)]));
    let is_begun = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", child.pid())).unwrap();
        fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
            .any(|link| link.parent() == Some(&*images.0) && link != source)
    };
    until("a file is being made", SOON, is_begun);
    for signal in [Signal::HUP, Signal::INT] {
        child.signal(signal);
    }
    let status = child.ended(TOOL);
    assert!(status.success(), "{status}: {}", child.log());
    assert_eq!(std::fs::metadata(&target).unwrap().len(), 256 << 20);
}

#[test]
fn an_interrupted_or_killed_conversion_leaves_nothing() {
    let images = Images::new();
    let source = images.0.image("a.raw", 2 << 30);
    let target = images.path("b.raw");
    for signal in [Signal::TERM, Signal::KILL] {
        let mut command = Command::new(BLOCKYARD);
        command.args(["image", "convert", "-S", "0", "-t", "none", text(&source), text(&target)]);
        let mut child = Daemon::start(&mut command);
        // A file without a name appears as "FOLDER/#INODE (deleted)".
        let descriptors = format!("/proc/{}/fd", child.pid());
        let is_new = |link: &std::path::Path| {
            link.parent() == Some(&*images.0)
                && link.file_name().unwrap().to_string_lossy().starts_with('#')
        };
        let links = || {
            std::fs::read_dir(&descriptors)
                .unwrap()
                .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        };
        until("a file is being made", SOON, || links().any(|link| is_new(&link)));
        child.signal(signal);
        assert_eq!(child.ended(TOOL).signal(), Some(signal.as_raw()));
        assert_eq!(std::fs::read_dir(&*images.0).unwrap().count(), 1);
    }
}
