//! Copies of whole disks in both directions, by common programs.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::{Folder, SOON, Signal, allocated, tool, until};
use crate::fixture::{MB, NbdServer, same, sparse, start_in_background};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn nbdcopy_reads_a_disk() {
    let folder = Folder::new();
    let image = sparse(&folder, "disk.img");
    let disk = NbdServer::start(&image, folder.join("s"), &["--read-only", "--reactors", "2"]);
    let (one, many) = (folder.join("one"), folder.join("many"));
    tool("nbdcopy", ["--connections=1", "--requests=64", &disk.uri(), text(&one)]).good();
    tool(
        "nbdcopy",
        ["--connections=4", "--requests=64", "--request-size=65536", &disk.uri(), text(&many)],
    )
    .good();
    for copy in [&one, &many] {
        same(&image, copy);
        // nbdcopy finds the holes, and leaves them out.
        assert!(
            allocated(copy) <= allocated(&image) + MB,
            "{} of {}",
            allocated(copy),
            allocated(&image)
        );
    }
    disk.daemon.stop();
}

#[test]
fn nbdcopy_writes_a_disk_and_copies_between_two() {
    let folder = Folder::new();
    let source = sparse(&folder, "source");
    let (first, second) = (folder.image("first.img", 64 * MB), folder.join("second.qcow2"));
    tool("qemu-img", ["create", "-q", "-f", "qcow2", text(&second), "64M"]).good();
    // The copy must overwrite old data, also where the source has holes.
    let junk = std::fs::File::options().write(true).open(&first).unwrap();
    junk.write_all_at(&vec![0xee; 12 << 20], 0).unwrap();
    let to = NbdServer::start(&first, folder.join("s"), &[]);
    let on = NbdServer::start(&second, folder.join("t"), &[]);
    tool("nbdcopy", ["--connections=4", "--flush", text(&source), &to.uri()]).good();
    tool("nbdcopy", ["--connections=4", "--flush", &to.uri(), &on.uri()]).good();
    to.daemon.stop();
    on.daemon.stop();
    same(&source, &first);
    tool("qemu-img", ["check", "-q", text(&second)]).good();
    tool("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", text(&source), text(&second)]).good();
    assert!(
        allocated(&first) <= allocated(&source) + MB,
        "holes are holes again: {}",
        allocated(&first)
    );
}

#[test]
fn qemu_img_converts_compares_and_maps_a_disk() {
    let folder = Folder::new();
    let source = sparse(&folder, "source");
    let disk = NbdServer::empty(&folder, 64 * MB, &["--reactors", "2"]);
    tool(
        "qemu-img",
        ["convert", "-n", "-f", "raw", "-O", "raw", "-W", "-m", "8", text(&source), &disk.uri()],
    )
    .good();
    let out =
        tool("qemu-img", ["compare", "-f", "raw", "-F", "raw", text(&source), &disk.uri()]).good();
    assert!(out.contains("identical"), "{out}");
    let copy = folder.join("copy.qcow2");
    tool("qemu-img", ["convert", "-f", "raw", "-O", "qcow2", &disk.uri(), text(&copy)]).good();
    tool("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", text(&source), text(&copy)]).good();
    let info = tool("qemu-img", ["info", "--output=json", &disk.uri()]).good();
    assert!(info.contains(&format!("\"virtual-size\": {}", 64 * MB)), "{info}");
    disk.daemon.stop();
}

/// nbdfuse shows the disk as a file. Then the kernel's page cache is a client too.
#[test]
fn nbdfuse_makes_the_disk_a_file() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 16 * MB, &[]);
    let mount = folder.join("mount");
    std::fs::create_dir(&mount).unwrap();
    let mut fuse = start_in_background("nbdfuse", [text(&mount), &disk.uri()]);
    let file = mount.join("nbd");
    until("nbdfuse has mounted", SOON, || !fuse.running() || file.exists());
    assert!(fuse.running(), "it needs /dev/fuse, and root or fusermount3: {}", fuse.log());
    {
        let file = std::fs::File::options().read(true).write(true).open(&file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 16 * MB);
        file.write_all_at(&vec![7; 3 << 20], 12345).unwrap();
        file.sync_all().unwrap();
    }
    fuse.signal(Signal::TERM);
    fuse.ended(SOON);
    disk.daemon.stop();
    let image = std::fs::read(folder.join("disk.img")).unwrap();
    let mut expected = vec![0u8; 16 << 20];
    expected[12345..][..3 << 20].fill(7);
    assert!(image == expected);
}
