//! Images are exchanged under a guest that verifies its data: snapshot, commit, snapshot, stream,
//! in a loop. After each round the image grows.
//!
//! The test's own process is the server. It calls the functions that the API calls.

use std::time::Duration;

use blockyard_disk::Work;

use crate::common::{Folder, Guest, GuestKind, Server, md5, tool, until};
use crate::fixture::script_with_prelude;

const SIZE: u64 = 64 << 20;
const ROUNDS: u64 = 4;
/// By how much the image grows after each round.
const STEP: u64 = 4 << 20;
/// Limit for the guest, and for a write of it.
const LIMIT: Duration = Duration::from_secs(180);

const SCRIPT: &str = r#"
    mkfs.ext4 -q /dev/vda
    mount /dev/vda /mnt
    echo begun
    # The disk has its last size after the last round.
    n=0
    until ((n >= 3)) && [[ $(</sys/block/vda/size) == "$SECTORS" ]]; do
        load --directory=/mnt --end_fsync=1 \
            --name=small --rw=randwrite --bs=4k --size=${MIB}M --fsync=32 \
            --name=mixed --rw=randrw --bsrange=4k-128k --size=$((2 * MIB))M --fsync=16
        ((++n % 3)) || { rm /mnt/*.0 && fstrim /mnt; }
        echo "loaded $n"
    done
    load --name=new --filename=/dev/vda --offset=64M --size=8M --rw=randwrite --bs=4k --io_size=${MIB}M
    umount /mnt
    e2fsck -fn /dev/vda >/tmp/fsck 2>&1 || { cat /tmp/fsck && exit 1; }
    echo "sum $(dd if=/dev/vda bs=1M iflag=direct status=none | md5sum)"
"#;

#[test]
fn images_are_exchanged_under_user_mode_linux() {
    exchange(GuestKind::Uml);
}

#[test]
fn images_are_exchanged_under_qemu() {
    exchange(GuestKind::Qemu);
}

fn exchange(kind: GuestKind) {
    let folder = Folder::new();
    let (base, socket) = (folder.image("base.img", SIZE), folder.join("disk.sock"));
    let mut server = Server::start(&base, &socket, &[]);
    let script = script_with_prelude(SCRIPT);
    let mut options = Vec::from(Guest::vhost(&socket, ""));
    let sectors = (SIZE + ROUNDS * STEP) / 512;
    // Emulated, a load takes ten times as long.
    let mib = if kind == GuestKind::Qemu { 1 } else { 4 };
    for value in [format!("SECTORS={sectors}"), format!("MIB={mib}")] {
        options.extend(["--env".into(), value.into()]);
    }
    let mut guest = Guest::start(kind, options, &script, LIMIT);
    guest.expect("begun");
    for round in 0..ROUNDS {
        let overlay = |name: &str| folder.join(format!("{round}-{name}.qcow2"));
        let until_written = || {
            let before = server.writes();
            until("a write is answered", LIMIT, || server.writes() > before);
        };
        server.snapshot(overlay("a")).unwrap();
        until_written();
        server.disk.commit(&Work::default()).unwrap();
        until_written();
        server.snapshot(overlay("b")).unwrap();
        until_written();
        server.disk.stream(&Work::default()).unwrap();
        server.grow(SIZE + (round + 1) * STEP).unwrap();
        // The disk has no other image than the last one now.
        if let Some(last) = round.checked_sub(1) {
            for name in ["a", "b"] {
                std::fs::remove_file(folder.join(format!("{last}-{name}.qcow2"))).unwrap();
            }
        }
    }
    let output = guest.finish();
    // perf/exchange.rs judges this time.
    println!("requests were held back for {:?} at most", server.disk.longest_held_back());
    server.end();

    let sum = output
        .lines()
        .find_map(|l| l.strip_prefix("sum "))
        .unwrap_or_else(|| panic!("no sum: {output}"));
    let (last, copy) = (folder.join(format!("{}-b.qcow2", ROUNDS - 1)), folder.join("copy.img"));
    tool("qemu-img", ["check".as_ref(), last.as_os_str()]).good();
    let convert = ["convert", "-f", "qcow2", "-O", "raw"].map(std::ffi::OsStr::new);
    tool("qemu-img", convert.into_iter().chain([last.as_os_str(), copy.as_os_str()])).good();
    assert_eq!(
        sum.split_whitespace().next(),
        Some(md5(&copy).as_str()),
        "the guest and the host read different bytes"
    );
    tool("e2fsck", ["-fn".as_ref(), copy.as_os_str()]).good();
}
