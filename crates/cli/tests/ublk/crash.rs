//! The server dies, and its device stays.

use crate::fixture::{on_kernel, on_one_kernel};

/// The server is killed ten times under verified load, on each kernel. Its successors use the page
/// cache and O_DIRECT alternately.
const KILLS: &str = r#"
truncate -s 64M a.img
serve a.img --ublk=0
begin_load --name=a --filename=/dev/ublkb0 --rw=randrw --bs=4k --size=16M
answered ublkb0
for ((n = 1; n <= 10; n++)); do
    kill -9 $pid
    wait $pid 2>/dev/null || :
    kill -0 $load
    serve a.img --ublk=0 --cache $( ((n % 2)) && echo writeback || echo none)
    answered ublkb0
done
end_load
until_logged 'ublkb0 taken over' 10
stop
[[ ! -e /dev/ublkb0 ]]
dmesg | not grep -E 'I/O error|BUG|WARNING|Oops'
"#;

#[test]
fn kill_9_loses_no_request_with_copied_data() {
    on_kernel("6", 2, KILLS);
}

#[test]
fn kill_9_loses_no_request_with_zero_copy() {
    on_kernel("7", 2, KILLS);
}

/// A mounted device stays when the program ends. The next server of the same disk takes it over,
/// and servers of other disks do not.
const KEPT: &str = r#"
truncate -s 64M a.img b.img
serve a.img --ublk
device=$(echo /dev/ublkb*)
mkfs.ext4 -q $device
mount $device /mnt
dd if=/dev/urandom of=/mnt/f bs=1M count=4 status=none
cp /mnt/f /tmp/f
stop
grep -q "$device is in use: it is kept, and waits for --ublk=" /tmp/log
cp /mnt/f /dev/null
cp /tmp/f /mnt/g &
writer=$!
fails 1 'belongs to another disk' -- blockyard serve b.img --ublk=${device#/dev/ublkb}
serve b.img --ublk
[[ $(ls /dev/ublkb* | wc -l) == 2 ]]
stop
[[ $(echo /dev/ublkb*) == "$device" ]]
serve a.img --ublk
until_logged "$device taken over"
wait $writer
fails 1 'is in use by' -- blockyard serve a.img --ublk
fails 1 'is served by process' -- blockyard serve b.img --ublk=${device#/dev/ublkb}
echo 3 >/proc/sys/vm/drop_caches
cmp /mnt/f /tmp/f
cmp /mnt/g /tmp/f
umount /mnt
stop
[[ ! -e $device ]]
e2fsck -fn a.img >/dev/null
"#;

#[test]
fn a_mounted_device_survives_its_server() {
    on_one_kernel("6", 1, KEPT);
}
