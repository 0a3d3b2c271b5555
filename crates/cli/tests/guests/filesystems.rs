//! File systems in guests: created, loaded, trimmed, checked, and compared on the host.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::{BLOCKYARD, Daemon, Folder, Guest, GuestKind, allocated, md5, tool};
use crate::fixture::{GuestFixture, Statistics, go_on, md5_of_first, script_with_prelude};

const MIB: u64 = 1 << 20;
/// Sizes in bytes of the ext4 disk and of the XFS disk. mkfs.xfs needs the larger size.
const DISKS: [u64; 2] = [96 * MIB, 304 * MIB];
/// Number of bytes at the start of each disk that the guest and the host compare. Reading a whole
/// disk takes an emulated guest seconds. They contain the file that the guest leaves on XFS, and
/// `debugfs` reads that file of ext4.
const COMPARED: u64 = 48 * MIB;
/// Number of bytes that the guest writes, deletes and trims.
const BIG: u64 = 16 * MIB;
/// Size of a block of XFS in bytes.
const BLOCK: usize = 4096;

const SCRIPT: &str = r#"
exercise() { # FILE-SYSTEM DISK
    "mkfs.$1" -q "$2"
    mount "$2" /mnt
    load --directory=/mnt --end_fsync=1 \
        --name=small --rw=randwrite --bs=4k --size=2M \
        --name=large --rw=write --bs=64k --size=8M \
        --name=mixed --rw=randrw --bsrange=4k-128k --size=4M --fsync=16
    rm /mnt/*.0
    head -c 16M /dev/zero | tr '\0' x >/mnt/big
    sync
    tell "$1 big"
    rm /mnt/big
    # XFS frees a file's blocks in the background, some time after rm and sync: umount waits for it.
    umount /mnt
    mount "$2" /mnt
    fstrim /mnt
    seq 1 50000 >/mnt/known
    umount /mnt
    case $1 in
    ext4) e2fsck -fn "$2" >/tmp/fsck 2>&1 ;;
    xfs) xfs_repair -n "$2" >/tmp/fsck 2>&1 ;;
    esac || { cat /tmp/fsck && return 1; }
    sum=$(dd if="$2" bs=1M count=48 iflag=direct status=none | md5sum)
    echo "$1 $sum"
}
exercise ext4 /dev/vda
exercise xfs /dev/vdb
"#;

#[test]
fn file_systems_in_user_mode_linux() {
    file_systems(GuestKind::Uml);
}

#[test]
fn file_systems_in_qemu() {
    file_systems(GuestKind::Qemu);
}

fn file_systems(kind: GuestKind) {
    let folder = Folder::new();
    let names = ["ext4", "xfs"];
    let [ext4, xfs] = [0, 1].map(|i| folder.image(&format!("{}.img", names[i]), DISKS[i]));
    let sockets = names.map(|n| folder.join(format!("{n}.sock")));
    let mut daemon = daemon_of_two(&folder, [&ext4, &xfs], [&sockets[0], &sockets[1]]);

    let disks = sockets.iter().flat_map(|s| Guest::vhost(s, ""));
    let mut guest =
        Guest::start(kind, disks, &script_with_prelude(SCRIPT), Duration::from_secs(150));
    // Sizes of the images while the guest has its large file.
    let sizes = [("ext4", &ext4), ("xfs", &xfs)].map(|(name, image)| {
        guest.expect(&format!("tell {name} big"));
        let size = allocated(image);
        go_on(&ext4, &daemon);
        size
    });
    let output = guest.finish();
    let known: String = (1..=50000).map(|n| format!("{n}\n")).collect();

    for (name, image, most) in [("ext4", &ext4, sizes[0]), ("xfs", &xfs, sizes[1])] {
        let line = output
            .lines()
            .find_map(|l| l.strip_prefix(name))
            .unwrap_or_else(|| panic!("no sum: {output}"));
        let sum = line.split_whitespace().next().unwrap();
        let part = folder.join("part");
        let on_host = md5_of_first(COMPARED, image, &part);
        assert_eq!(sum, on_host, "{name}: the guest and the host read different bytes");
        if name == "xfs" {
            let part = std::fs::read(part).unwrap();
            assert!(holds(&part, known.as_bytes()), "{name}: the file is in another part");
        }
        let now = allocated(image);
        // The guest writes another file later, and the file system more of its journal.
        assert!(
            most >= BIG && now + BIG * 4 / 5 <= most,
            "{name}: fstrim gave too little back: {most} to {now} bytes"
        );
    }
    assert!(daemon.running());
    let log = daemon.stop();
    let statistics = Statistics(log.clone());
    for kind in ["read", "write", "flush", "discard", "write-zeroes"] {
        assert_eq!(statistics.figure(kind, "errors"), 0, "{log}");
    }
    assert!(
        statistics.figure("discard", "bytes") >= 2 * BIG
            && statistics.figure("flush", "requests") > 0,
        "{log}"
    );

    tool("e2fsck", ["-fn".as_ref(), ext4.as_os_str()]).good();
    tool("xfs_repair", ["-n".as_ref(), xfs.as_os_str()]).good();
    let found = tool("debugfs", ["-R".as_ref(), "cat /known".as_ref(), ext4.as_os_str()]).good();
    assert!(found == known, "the guest's file has other content on the host");
}

/// Returns whether a part of a disk has each whole block of a file.
fn holds(part: &[u8], file: &[u8]) -> bool {
    let has = |block: &[u8]| part.chunks_exact(BLOCK).any(|here| here == block);
    file.chunks_exact(BLOCK).all(has)
}

fn daemon_of_two(folder: &Folder, images: [&Path; 2], sockets: [&Path; 2]) -> Daemon {
    let disk =
        |i: usize| format!("[[disk]]\nimage = {:?}\nvhost-user = {:?}\n", images[i], sockets[i]);
    let config = folder.join("blockyard.toml");
    std::fs::write(&config, disk(0) + &disk(1)).unwrap();
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(config));
    daemon.wait_ready();
    daemon
}

/// The front end sends kicks and the server sends calls by vhost-user messages, as User Mode Linux
/// uses them in simulated time.
#[test]
fn in_band_notifications_work_in_user_mode_linux() {
    let mut fixture = GuestFixture::new(64 * MIB, &["--in-band-notifications"]);
    let script = "mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt
        load --directory=/mnt --name=job --rw=randrw --bs=4k --size=2M --end_fsync=1
        umount /mnt && e2fsck -fn /dev/vda";
    fixture.boot(GuestKind::Uml, "", &[], script, Duration::from_secs(600)).finish();
    fixture.stop();
    tool("e2fsck", ["-fn".as_ref(), fixture.image.as_os_str()]).good();
}

/// A guest on an overlay: its file system is loaded, and checked on the host. The base stays
/// unchanged.
#[test]
fn file_systems_work_on_an_overlay_in_user_mode_linux() {
    let folder = Folder::new();
    let (base, overlay, socket) =
        (folder.image("base.img", 96 * MIB), folder.join("disk.qcow2"), folder.join("s"));
    tool("mkfs.ext4", ["-q".as_ref(), "-L".as_ref(), "golden".as_ref(), base.as_os_str()]).good();
    let before = md5(&base);
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "extended_l2=on,cluster_size=128k",
        "-F",
        "raw",
        "-b",
        "base.img",
    ];
    tool("qemu-img", create.iter().map(|a| a.as_ref()).chain([overlay.as_os_str()])).good();
    let daemon = Daemon::serve(&overlay, &socket, &[]);
    let script = r#"
        [[ $(blkid -o value -s LABEL /dev/vda) == golden ]]
        mount /dev/vda /mnt
        load --directory=/mnt --end_fsync=1 --name=small --rw=randwrite --bs=4k --size=4M \
            --name=mixed --rw=randrw --bsrange=4k-128k --size=16M --fsync=16
        seq 1 50000 >/mnt/known
        rm /mnt/*.0
        umount /mnt
        mount /dev/vda /mnt
        fstrim /mnt
        umount /mnt
        e2fsck -fn /dev/vda
        sum=$(dd if=/dev/vda bs=1M iflag=direct status=none | md5sum)
        echo "sum $sum""#;
    let disk = Guest::vhost(&socket, "");
    let mut guest =
        Guest::start(GuestKind::Uml, disk, &script_with_prelude(script), Duration::from_secs(600));
    let sum = guest.expect("sum ");
    guest.finish();
    daemon.stop();
    tool("qemu-img", ["check".as_ref(), overlay.as_os_str()]).good();
    assert_eq!(md5(&base), before, "the base image was written to");
    let flat = folder.join("flat");
    let convert =
        ["convert".as_ref(), "-O".as_ref(), "raw".as_ref(), overlay.as_os_str(), flat.as_os_str()];
    tool("qemu-img", convert).good();
    assert!(sum.starts_with(&md5(&flat)), "the guest and QEMU read different bytes");
    tool("e2fsck", ["-fn".as_ref(), flat.as_os_str()]).good();
}
