//! Who makes the writes: the server's own thread, not io_uring's workers, also where ext4 refuses what would have to wait for the
//! file's time of change to be noted.

use crate::stage::on_kernel;

const WRITES: &str = r#"
mount -t tracefs none /sys/kernel/tracing 2>/dev/null || :
handed=/sys/kernel/tracing/events/io_uring/io_uring_queue_async_work
# All of it is there: space that has to be taken is the workers' in any case.
dd if=/dev/zero of=a.img bs=1M count=32 oflag=direct status=none
touch -d 2001-01-01 a.img
began=$(date +%s)
serve a.img --ublk=0
echo hist:keys=opcode >$handed/trigger
# One at a time, and each in a tick of its own: all of them would be refused.
fio --eta=never --output=/tmp/fio.log --name=a --filename=/dev/ublkb0 --ioengine=libaio --direct=1 --iodepth=1 \
    --rw=randwrite --bs=4k --size=32M --number_ios=300 --rate_iops=100
by_workers=$(sed -n 's/^ *Hits: //p' $handed/hist)
stop
requests=$(figure requests)
((requests >= 300 && by_workers < 150)) || { echo "$requests requests, workers made $by_workers" && exit 1; }
# The file's time is what it is after any write.
(($(stat -c %Y a.img) >= began)) || { stat a.img && exit 1; }
"#;

#[test]
fn writes_are_not_left_to_workers_for_the_time_of_change() {
    on_kernel("7", WRITES);
}
