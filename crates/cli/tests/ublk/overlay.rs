//! qcow2 overlays as block devices. With zero copy, system calls copy the data that needs
//! processing: zeroes for holes, compressed clusters.

use crate::fixture::on_one_kernel;

/// The images are small, because an emulated guest compresses and compares slowly.
const OVERLAY: &str = r#"
dd if=/dev/urandom of=base.img bs=1M count=1 status=none
truncate -s 4M base.img
cp --sparse=always base.img expected.img
blockyard image create -f qcow2 -b base.img -F raw top.qcow2 >/dev/null
serve top.qcow2 --ublk=0 --queues 2 --reactors 2
cmp /dev/ublkb0 base.img

# The same random writes, mostly parts of clusters, into a raw file and into the overlay.
writes() {
    fio --eta=never --output=/tmp/fio.log --name=a --ioengine=libaio --iodepth=8 --direct=1 --buffer_pattern=0x5eed "$@"
}
writes --filename=expected.img --rw=randwrite --bsrange=512-24k --blockalign=512 --size=3M --io_size=1M --write_iolog=/tmp/iolog
writes --read_iolog=/tmp/iolog --replay_redirect=/dev/ublkb0 --replay_no_stall=1
echo 3 >/proc/sys/vm/drop_caches
cmp /dev/ublkb0 expected.img
# Flushed data survives a kill.
sync /dev/ublkb0
kill -9 $pid
wait $pid 2>/dev/null || :
serve top.qcow2 --ublk=0
cmp /dev/ublkb0 expected.img
blkdiscard -z -o 2097152 -l 524288 /dev/ublkb0
dd if=/dev/zero of=expected.img bs=512k seek=4 count=1 conv=notrunc status=none
stop
blockyard image check top.qcow2 >/dev/null
blockyard image compare top.qcow2 expected.img >/dev/null
not cmp -s base.img expected.img

# A file system on an overlay whose base is compressed.
blockyard image convert -c -O qcow2 expected.img packed.qcow2 >/dev/null
blockyard image create -f qcow2 -b packed.qcow2 -F qcow2 over.qcow2 >/dev/null
serve over.qcow2 --ublk=0
cmp /dev/ublkb0 expected.img
dd if=/dev/urandom of=/dev/ublkb0 bs=512 seek=5000 count=1 oflag=direct status=none
dd if=/dev/ublkb0 of=expected.img bs=512 skip=5000 seek=5000 count=1 conv=notrunc iflag=direct status=none
echo 3 >/proc/sys/vm/drop_caches
cmp /dev/ublkb0 expected.img
stop
if [[ $zero_copy ]]; then
    grep -q 'zero copy' /tmp/log
    (($(figure copied) > 0 && $(figure copied) <= $(figure bytes))) || { cat /tmp/log && exit 1; }
fi
"#;

#[test]
fn overlays_have_the_same_data_as_with_other_exports() {
    on_one_kernel("7", 2, OVERLAY);
}
