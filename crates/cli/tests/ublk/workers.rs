//! The server's own thread makes the writes, not io_uring's workers. This includes writes that ext4
//! refuses because updating the modification time would block. No request is larger than the device
//! below allows, because the kernel would have to split it, and none begins within a sector of it.

use crate::fixture::on_kernel;

const WRITES: &str = r#"
mount -t tracefs none /sys/kernel/tracing 2>/dev/null || :
handed=/sys/kernel/tracing/events/io_uring/io_uring_queue_async_work
# The file is allocated, because writes that allocate space always go to the workers.
dd if=/dev/zero of=a.img bs=1M count=32 oflag=direct status=none
touch -d 2001-01-01 a.img
began=$(date +%s)
serve a.img --ublk=0
echo hist:keys=opcode >$handed/trigger
# A hundred writes, one at a time. fio waits at least 10 ms after each one, so each one is in its own
# timer tick, however slow the machine is: the kernel would refuse all of them.
fio --eta=never --output=/tmp/fio.log --name=a --filename=/dev/ublkb0 --ioengine=libaio --direct=1 --iodepth=1 \
    --rw=randwrite --bs=4k --size=32M --number_ios=100 --thinktime=10ms
by_workers=$(sed -n 's/^ *Hits: //p' $handed/hist)
echo '!hist:keys=opcode' >$handed/trigger
stop
requests=$(figure requests)
# Without the server's own updates of the modification time, workers would make all writes. They make
# some where the guest is so slow that a tick ends between the update and the write. perf/ublk.rs
# judges how many.
((requests >= 100 && by_workers < 100)) || {
    echo "$requests requests, workers made $by_workers" && exit 1
}
grep -q 'updated [1-9][0-9]* modification times' /tmp/log || { cat /tmp/log && exit 1; }
# The file has the usual modification time of a write.
(($(stat -c %Y a.img) >= began)) || { stat a.img && exit 1; }
"#;

#[test]
fn updates_of_the_modification_time_need_no_workers() {
    on_kernel("7", 2, WRITES);
}

const DEVICE: &str = r#"
modprobe loop
truncate -s 64M a.img
device=$(losetup -f --show --direct-io=on --sector-size 4096 a.img)
below=/sys/block/${device#/dev/}/queue
echo 256 >$below/max_sectors_kb
serve $device --ublk=0
above=/sys/block/ublkb0/queue
for limit in max_segments max_segment_size max_sectors_kb; do
    (($(cat $above/$limit) <= $(cat $below/$limit))) || { grep . $above/max_* $below/max_* && exit 1; }
done
(($(<$above/logical_block_size) == 4096)) || { grep . $above/*_block_size && exit 1; }
load --name=a --filename=/dev/ublkb0 --rw=write --bs=1M --size=32M --do_verify=1
stop
(($(figure requests) >= 256 && $(figure copied) == 0)) || { cat /tmp/log && exit 1; }
"#;

#[test]
fn a_device_has_the_sectors_and_the_limits_of_the_device_below() {
    on_kernel("7", 1, DEVICE);
}
