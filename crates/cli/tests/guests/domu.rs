//! A PV guest of an emulated Xen whose disk this program serves from dom0. `scripts/soak.d/xen-*`
//! have further tests.
//!
//! Tests run in the order of their names. This long one must not be the last: it leaves a processor
//! idle.

use std::ffi::OsString;
use std::time::Duration;

use crate::common::{Folder, Guest, GuestKind, allocated, md5, stripped_program, tool};
use crate::fixture::script_with_prelude;

const MIB: u64 = 1 << 20;

/// One boot tests as much as possible: the kernel's driver reads, writes, flushes and discards.
const SCRIPT: &str = r#"
mkfs.ext4 -q /dev/xvda
mount /dev/xvda /mnt
load --directory=/mnt --end_fsync=1 --name=mixed --rw=randrw --bsrange=4k-64k --size=2M --fsync=32
rm /mnt/mixed*
head -c 8M /dev/zero | tr '\0' x >/mnt/big
sync
rm /mnt/big
sync
fstrim /mnt
seq 1 20000 >/mnt/known
umount /mnt
sum=$(dd if=/dev/xvda bs=1M iflag=direct status=none | md5sum)
echo "sum $sum"
"#;

#[test]
fn a_file_system_of_a_domu_is_the_same_on_the_host() {
    let folder = Folder::new();
    let image = folder.image("disk.img", 16 * MIB);
    let disk = format!("blockyard={}", image.display());
    let program = stripped_program(&folder);
    // One processor: the emulator spends more on the work of two together than on the work itself.
    let options: [OsString; 6] = [
        "--smp".into(),
        "1".into(),
        "--disk".into(),
        disk.into(),
        "--program".into(),
        program.into(),
    ];
    let guest = Guest::start(
        GuestKind::Xen,
        options,
        &script_with_prelude(SCRIPT),
        Duration::from_secs(600),
    );
    let output = guest.finish();
    let sum = output
        .lines()
        .find_map(|line| line.strip_prefix("sum "))
        .unwrap_or_else(|| panic!("no sum: {output}"));
    assert_eq!(
        sum.split_whitespace().next(),
        Some(md5(&image).as_str()),
        "the domU and the host read different bytes"
    );
    let left = allocated(&image);
    assert!(left < 8 * MIB, "fstrim gave too little back: {left} bytes are left");
    tool("e2fsck", ["-fn".as_ref(), image.as_os_str()]).good();
    let known: String = (1..=20000).map(|n| format!("{n}\n")).collect();
    let found = tool("debugfs", ["-R".as_ref(), "cat /known".as_ref(), image.as_os_str()]).good();
    assert!(found == known, "the domU's file has other content on the host");
}
