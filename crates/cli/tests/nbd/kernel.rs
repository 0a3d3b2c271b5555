//! The kernel's NBD driver. Blockyard serves inside a User Mode Linux guest, and the guest's kernel
//! is the client.

use std::time::Duration;

use crate::common::{BLOCKYARD, Guest, GuestKind};

/// The script: mkfs, fio with checksums on the file system, unmount, check. Then Blockyard serves
/// the image again, with another number of connections, and its contents are compared. Trim frees
/// space.
const SCRIPT: &str = r#"
modprobe nbd nbds_max=2
truncate -s 400M /tmp/disk.img
serve() {
    /host/blockyard --log warn serve /tmp/disk.img --nbd unix:/tmp/s --name disk --cache writeback >/tmp/out & server=$!
    until grep -qsx ready /tmp/out; do kill -0 $server; sleep 0.05; done
    rm /tmp/out
}
serve
nbd-client -unix /tmp/s /dev/nbd0 -N disk -C 4 -b 4096
[[ $(blockdev --getsize64 /dev/nbd0) == $((400 << 20)) ]]
queue=/sys/block/nbd0/queue
echo "flush $(<$queue/write_cache) fua $(<$queue/fua) discard $(<$queue/discard_max_bytes) zeroes $(<$queue/write_zeroes_max_bytes)"
mkfs.ext4 -q -E nodiscard /dev/nbd0
mount /dev/nbd0 /mnt
fio --name=verify --directory=/mnt --size=24M --numjobs=2 --rw=randwrite --bsrange=4k-64k --verify=crc32c \
    --verify_fatal=1 --ioengine=io_uring --iodepth=16 --direct=1 --fsync=64 --group_reporting | grep -E 'err=|READ:|WRITE:'
dd if=/dev/urandom of=/mnt/file bs=1M count=16 status=none
sum=$(md5sum </mnt/file)
umount /mnt
e2fsck -fn /dev/nbd0
nbd-client -d /dev/nbd0
kill $server; wait $server
# The server exited with all data on the disk. Start another one, with one connection.
serve
nbd-client -unix /tmp/s /dev/nbd0 -N disk
mount /dev/nbd0 /mnt
[[ $(md5sum </mnt/file) == "$sum" ]]
before=$(stat -c %b /tmp/disk.img)
rm /mnt/file /mnt/verify*
sync
fstrim /mnt
umount /mnt
e2fsck -fn /dev/nbd0
blkdiscard -z -o 0 -l 1M /dev/nbd0
cmp -n 1048576 /dev/nbd0 /dev/zero
nbd-client -d /dev/nbd0
echo "blocks $before $(stat -c %b /tmp/disk.img)"
kill $server; wait $server
! dmesg | grep -iE 'nbd.*(error|failed|timed out)|I/O error'
"#;

#[test]
fn a_file_system_works_on_the_kernels_nbd_driver() {
    let options = ["--file", BLOCKYARD, "--mem", "1G"];
    let mut guest = Guest::start(GuestKind::Uml, options, SCRIPT, Duration::from_secs(120));
    let queue = guest.expect("flush ");
    assert!(
        queue.starts_with("write back fua 1 discard")
            && !queue.contains("discard 0")
            && !queue.contains("zeroes 0"),
        "{queue}"
    );
    let blocks = guest.expect("blocks ");
    let out = guest.finish();
    assert!(out.contains("err= 0") && out.contains("READ:"), "{out}");
    let (before, after) = blocks.split_once(' ').unwrap();
    let number = |text: &str| text.parse::<u64>().unwrap();
    // The freed space is a file of 16 MiB and fio's 48 MiB, in blocks of 512 bytes.
    assert!(number(before) > number(after) + (60 << 11), "trim gave nothing back: {blocks}");
}
