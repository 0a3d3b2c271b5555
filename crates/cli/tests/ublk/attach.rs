//! `attach` and `detach`, as users call them.

use crate::common::pages::guest_script;
use crate::fixture::{on_kernel, on_one_kernel};

const ATTACH: &str = r#"
truncate -s 64M a.img b.img
# As contrib/tmpfiles.conf makes it on a host with the package.
mkdir -p /run/blockyard
chown 1000 /run/blockyard
fails 1 'there is no such file' -- blockyard attach none.img
fails 2 '<IMAGE>' -- blockyard attach
fails 2 'is not a device of this program' -- blockyard detach /dev/vda
fails 1 'there is no device /dev/ublkb9' -- blockyard detach /dev/ublkb9

device=$(blockyard attach a.img)
[[ -b $device ]]
mkfs.ext4 -q $device
mount $device /mnt
dd if=/dev/urandom of=/mnt/f bs=1M count=1 status=none
sum=$(md5sum </mnt/f)
other=$(blockyard attach b.img --ublk=7)
[[ $other == /dev/ublkb7 && $device != "$other" ]]
fails 1 'is in use: unmount it first' -- blockyard detach $device
umount /mnt
blockyard detach $device
# The server has exited and closed the image.
[[ ! -e $device && -b $other && $(pgrep -cf -- --attached) == 1 ]]
grep -q 'not served any more' /run/blockyard-attach/${device#/dev/}.log
e2fsck -fn a.img >/dev/null

# With --force, while it is open.
exec 5<$other
if [[ $zero_copy ]]; then fails 1 'is in use' -- blockyard detach $other; fi
blockyard detach --force $other
exec 5<&-
[[ ! -e $other ]]
not is_attached

# A device that a server left can be removed without a server.
device=$(blockyard attach a.img)
pkill -9 -f -- --attached
while is_attached; do nap 0.05; done
[[ $(blockyard attach a.img) == "$device" ]]
mount $device /mnt
[[ $(md5sum </mnt/f) == "$sum" ]]
umount /mnt
pkill -9 -f -- --attached
while is_attached; do nap 0.05; done
[[ $(blockyard detach $device 2>&1) == *'had no server. If its server was killed, attach and detach'* ]]
[[ ! -e $device ]]
"#;

#[test]
fn attach_makes_a_device_and_detach_removes_it() {
    on_one_kernel("7", 1, ATTACH);
}

#[test]
fn the_commands_of_the_page_work() {
    let seen = on_kernel("7", 1, &guest_script("ublk.md"));
    assert!(seen.contains("all of it has run"), "{seen}");
}

/// A user without privileges may use the driver. The script does the work of a udev rule.
const UNPRIVILEGED: &str = r#"
truncate -s 32M a.img
chown 1000 a.img
chmod 777 . /tmp
chmod 666 /dev/ublk-control
# Without the udev rule the nodes belong to root, which can remove the device.
fails 1 '/dev/ublkb0: cannot open its character device: Permission denied' -- \
    setpriv --reuid 1000 --clear-groups /host/blockyard serve a.img --ublk=0
blockyard detach /dev/ublkb0
[[ ! -e /dev/ublkc0 ]] || { echo "detach has left the device" && exit 1; }
# The kernel kills its server if a request takes 30 s.
fails 1 'kills its server if a request takes 30 s: use "error"' -- \
    setpriv --reuid 1000 --clear-groups /host/blockyard serve a.img --ublk=0 --on-enospc pause
user() { setpriv --reuid 1000 --clear-groups "$@"; }
serve_as_user() {
    : >/tmp/out
    { until [[ -e /dev/ublkc0 ]]; do nap 0.02; done; chown 1000 /dev/ublkc0; } &
    setpriv --reuid 1000 --clear-groups /host/blockyard serve a.img --ublk=0 --api /tmp/api \
        >/tmp/out 2>/tmp/log &
    pid=$!
    until [[ $(</tmp/out) == *ready* ]]; do
        kill -0 $pid || { cat /tmp/log && return 1; }
        nap 0.02
    done
}
gone() { ! ls /dev/ublkb0 /dev/ublkc0 2>/dev/null || { cat /tmp/log && return 1; }; }

# The block device belongs to root. The server still removes it before it exits, every time.
for ((round = 0; round < 2; round++)); do
    serve_as_user
    until_logged 'because the user has no privileges'
    if ((round == 0)); then
        load --name=a --filename=/dev/ublkb0 --rw=randrw --bs=4k --size=256k --do_verify=1
        fails 1 'a drain is refused, because its requests may wait for at most 20 s' -- \
            blockyard ctl --api /tmp/api drain a.img
        blockyard ctl --api /tmp/api drain a.img --seconds 20 >/dev/null
        blockyard ctl --api /tmp/api resume a.img >/dev/null
        fails 1 'may wait for at most 20 s' -- blockyard ctl --api /tmp/api set a.img on-enospc=pause
    fi
    : >/tmp/events
    blockyard ctl --api /tmp/api events --since 0 --json >/tmp/events &
    events=$!
    until [[ -s /tmp/events ]]; do nap 0.02; done
    stop
    wait $events
    grep -q '"client-connected".*"export":"ublk"' /tmp/events || { cat /tmp/events && exit 1; }
    gone
    # A slow host is no fault.
    sed '/reactor-0 \(stalls\|goes on\)/d' /tmp/log | not grep WARN
done

# A device in use also ends with its server, because the driver keeps no devices of unprivileged
# users. Earlier writes are in the image.
serve_as_user
mkfs.ext4 -q /dev/ublkb0
mount /dev/ublkb0 /mnt
dd if=/dev/urandom of=/mnt/f bs=1M count=1 status=none
sum=$(md5sum </mnt/f)
stop
[[ ! $zero_copy ]] || grep -q '/dev/ublkb0 is in use, and ' /tmp/log || { cat /tmp/log && exit 1; }
umount /mnt
while [[ -e /dev/ublkc0 ]]; do nap 0.05; done
gone
modprobe loop
mount -o loop a.img /mnt
[[ $(md5sum </mnt/f) == "$sum" ]]
umount /mnt

# The server reports a device that the driver does not remove. The driver waits for the last program
# that has the device open, and keeps the device in its list.
serve_as_user
exec 5</dev/ublkb0
mkdir -p /tmp/listed/ublkc0
mount --bind /tmp/listed /sys/class/ublk-char
stop
exec 5<&-
umount /sys/class/ublk-char
grep -q '/dev/ublkb0 is not removed: the driver has not removed the device for 5 s, and may do so later' /tmp/log || {
    cat /tmp/log && exit 1
}
while [[ -e /dev/ublkc0 ]]; do nap 0.05; done
gone

# The user removes it: without --force if the driver reports whether it is in use.
serve_as_user
exec 5</dev/ublkb0
if [[ $zero_copy ]]; then
    fails 1 'is in use' -- user /host/blockyard detach /dev/ublkb0
    exec 5<&-
    user /host/blockyard detach /dev/ublkb0
else
    fails 1 'because this process may not open it' -- user /host/blockyard detach /dev/ublkb0
    exec 5<&-
    user /host/blockyard detach --force /dev/ublkb0
fi
gone
stop

# The udev rule gives the user both nodes.
serve_as_user
chown 1000 /dev/ublkb0
stop
gone
chmod 755 .
chmod 600 /dev/ublk-control
"#;

#[test]
fn a_user_without_privileges_can_attach_with_a_udev_rule() {
    on_one_kernel("6", 1, UNPRIVILEGED);
}

/// Without ublk, `attach` uses the kernel's NBD client. If that is missing too, the message names
/// the modules to load.
const NBD: &str = r#"
rmmod ublk_drv
truncate -s 32M a.img b.img
fails 1 'run `modprobe ublk_drv` (or `modprobe nbd`' -- blockyard attach a.img
modprobe nbd
device=$(blockyard attach a.img)
other=$(blockyard attach b.img --read-only)
[[ $device == /dev/nbd? && $other == /dev/nbd? && $device != "$other" ]]
[[ $(blockdev --getsize64 $device) == 33554432 && $(blockdev --getro $other) == 1 ]]
load --name=a --filename=$device --rw=randrw --bs=4k --size=512k --do_verify=1
mkfs.ext4 -q $device
mount $device /mnt
dd if=/dev/urandom of=/mnt/f bs=1M count=1 status=none
sum=$(md5sum </mnt/f)
fails 1 'is in use: unmount it first' -- blockyard detach $device
umount /mnt
# A program and a loop device, which do not claim it.
exec 5<>$device
fails 1 'in use by process' -- blockyard detach $device
exec 5>&-
modprobe loop
loop=$(losetup -f --show $device)
fails 1 "in use by $loop" -- blockyard detach $device
losetup -d $loop
until blockyard detach $device; do nap 0.05; done
blockyard detach --force $other
not is_attached
[[ ! -e /sys/block/${device#/dev/}/pid ]]
# The server is killed while it sets the device up, and while it serves it. Then the command is
# killed before it has reported the device.
killed() { # CALL:NUMBER OPTION...
    not strace -D -qq "${@:2}" -o /tmp/strace -e trace=${1%:*} -e inject=${1%:*}:signal=KILL:when=${1#*:} \
        /host/blockyard attach a.img >/tmp/said 2>&1
}
works() {
    while is_attached || [[ -e /sys/block/nbd0/pid ]]; do nap 0.02; done
    [[ $(blockyard attach a.img) == /dev/nbd0 ]]
}
killed ioctl:2 -f -P /dev/nbd0
grep -q 'signal 9 ended the server of the device before it was ready' /tmp/said || { cat /tmp/said && exit 1; }
works
pkill -9 -f -- --attached
works
blockyard detach /dev/nbd0
killed write:2
works
blockyard detach /dev/nbd0
fails 1 'is not connected' -- blockyard detach $device
not ls /run/blockyard-attach/*.sock 2>/dev/null
e2fsck -fn a.img >/dev/null
[[ $(blockyard attach a.img) == "$device" ]]
mount $device /mnt
[[ $(md5sum </mnt/f) == "$sum" ]]
umount /mnt
blockyard detach $device
"#;

#[test]
fn without_ublk_attach_uses_the_kernels_nbd_client() {
    on_kernel("6", 1, NBD);
}
