//! A raw image as a block device: file systems, the parameters that the kernel sees, and its
//! requests.

use crate::fixture::on_kernel;

const DEVICE: &str = r#"
truncate -s 200M a.img
serve a.img --ublk=3
queue=/sys/block/ublkb3/queue
[[ $(blockdev --getsize64 /dev/ublkb3) == 209715200 ]]
[[ $(<$queue/write_cache)/$(<$queue/fua) == "write back/1" ]]
(($(<$queue/discard_max_bytes) > 0 && $(<$queue/write_zeroes_max_bytes) > 0))
if [[ $zero_copy ]]; then until_logged 'ublkb3 made: zero copy'; else until_logged 'ublkb3 made: data are copied'; fi

# A file system, and its contents afterwards.
mkfs.ext4 -q /dev/ublkb3
mount /dev/ublkb3 /mnt
load --name=a --directory=/mnt --rw=randwrite --bsrange=512-64k --blockalign=512 --size=12M --fsync=32 --do_verify=1
dd if=/dev/urandom of=/mnt/f bs=1M count=4 status=none
sum=$(md5sum </mnt/f)
sync
used=$(stat -c %b a.img)
rm /mnt/a.*
sync
fstrim /mnt
(($(stat -c %b a.img) < used - 20000)) || { echo "$used blocks, and after fstrim $(stat -c %b a.img)" && exit 1; }
umount /mnt

# Discards free space. WRITE_ZEROES makes zeroes.
dd if=/dev/urandom of=/dev/ublkb3 bs=1M seek=150 count=2 oflag=direct status=none
blkdiscard -o 157286400 -l 1048576 /dev/ublkb3
blkdiscard -z -o 158334976 -l 1048576 /dev/ublkb3
dd if=/dev/ublkb3 bs=1M skip=150 count=2 iflag=direct status=none | cmp -n 2097152 - /dev/zero
map=$(blockyard image map -U -f raw a.img)
(($(wc -l <<<"$map") > 1)) && ! grep 0x9600000 <<<"$map" || { echo "$map" && exit 1; }

# The device grows, if the kernel supports that.
truncate -s 300M a.img
kill -HUP $pid
until logged 'has its size' || logged 'keeps its size'; do nap 0.02; done
if [[ $zero_copy ]]; then
    [[ $(blockdev --getsize64 /dev/ublkb3) == 314572800 ]]
    dd if=/dev/urandom of=/dev/ublkb3 bs=1M seek=299 count=1 oflag=direct status=none
else
    grep -q 'keeps its size: only Linux 6.16 or later can change the size' /tmp/log
fi

# SIGTERM: the device is removed, and all writes are in the image.
if [[ $zero_copy ]]; then
    # With zero copy the server has no data buffers and copies nothing.
    not grep -q memfd:ublk /proc/$pid/maps
    stop
    (($(figure copied) == 0 && $(figure bytes) > 27000000)) || { cat /tmp/log && exit 1; }
else
    grep -q memfd:ublk /proc/$pid/maps
    stop
fi
[[ ! -e /dev/ublkb3 && ! -e /dev/ublkc3 ]]
truncate -s 200M a.img
e2fsck -fn a.img >/dev/null
mount -o loop,ro a.img /mnt 2>/dev/null || { modprobe loop && mount -o loop,ro a.img /mnt; }
[[ $(md5sum </mnt/f) == "$sum" ]]
"#;

#[test]
fn file_systems_work_with_copied_data() {
    on_kernel("6", 1, DEVICE);
}

#[test]
fn file_systems_work_with_zero_copy() {
    on_kernel("7", 1, DEVICE);
}

const MODES: &str = r#"
dd if=/dev/urandom of=a.img bs=1M count=4 status=none
md5=$(md5sum <a.img)

# Read-only: the kernel refuses writes.
serve a.img --ublk=1 --read-only
[[ $(blockdev --getro /dev/ublkb1) == 1 ]]
# The whole program is locked in memory, because swap may be on the device.
sed -n '/\/host\/blockyard/,/^VmFlags/p' /proc/$pid/smaps >/tmp/program
grep -q '^VmFlags' /tmp/program
[[ ! $(sed -n 's/^\(Size\|Rss\): *//p' /tmp/program | uniq -u) ]] && ! grep '^VmFlags' /tmp/program | grep -v ' lo' || { cat /tmp/program && exit 1; }
not dd if=/dev/zero of=/dev/ublkb1 bs=4k count=1 oflag=direct status=none 2>/dev/null
[[ $(md5sum </dev/ublkb1) == "$md5" ]]
stop

# Without a write cache the kernel sends no flushes.
serve a.img --ublk=1 --cache writethrough
[[ $(</sys/block/ublkb1/queue/write_cache) == "write through" ]]
load --name=a --filename=/dev/ublkb1 --rw=randwrite --bs=4k --size=256k --do_verify=1
stop

# Zero copy works with the page cache too: the kernel copies once.
serve a.img --ublk=1 --cache writeback --queues 2 --queue-size 16 --reactors 2
queues=(/sys/block/ublkb1/mq/*)
[[ ${#queues[@]} == 2 && $(</sys/block/ublkb1/queue/nr_requests) == 16 ]]
# The next server may take it over with O_DIRECT.
[[ $(</sys/block/ublkb1/queue/dma_alignment) == 511 ]]
load --name=a --filename=/dev/ublkb1 --rw=randrw --bs=4k --size=256k --numjobs=1 --do_verify=1
load --name=b --filename=/dev/ublkb1 --rw=write --bs=1M --offset=2M --size=2M --do_verify=1
md5=$(md5sum </dev/ublkb1)
not grep memfd:ublk /proc/$pid/maps
stop
(($(figure copied) == 0 && $(figure bytes) > 8000000)) || { cat /tmp/log && exit 1; }
[[ $(md5sum <a.img) == "$md5" ]]

# It ends in the middle of a block. The rest of the block reads as zeroes and is not written.
head -c 1000001 a.img >odd.img
md5=$( (cat odd.img && head -c 447 /dev/zero) | md5sum)
serve odd.img --ublk=1 --cache writeback
[[ $(md5sum </dev/ublkb1) == "$md5" ]]
stop

# A disk in memory, with errors from a filter.
serve ram:4M --ublk=1 --filter error:write=1,range=2097152-4194304
grep memfd:ublk /proc/$pid/maps >/dev/null
dd if=/dev/zero of=/dev/ublkb1 bs=1M count=1 oflag=direct status=none
not dd if=/dev/zero of=/dev/ublkb1 bs=64k seek=50 count=1 oflag=direct status=none 2>/dev/null
dd if=/dev/ublkb1 of=/dev/null bs=1M count=4 iflag=direct status=none
stop
"#;

#[test]
fn cache_modes_queues_and_errors_reach_the_kernel() {
    on_kernel("7", 2, MODES);
}
