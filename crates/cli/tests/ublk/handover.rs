//! A device is handed over to another server under verified load.

use crate::fixture::on_kernel;

/// The device of a qcow2 overlay gets one server after another, while fio writes and verifies. Then
/// new servers fail: one cannot take the device over, one is killed when it has taken it over. The
/// old server takes it back, and can hand it over later.
const HAND_OVERS: &str = r#"
dd if=/dev/urandom of=base.img bs=1M count=4 status=none
truncate -s 32M base.img
blockyard image create -f qcow2 -b base.img -F raw top.qcow2 >/dev/null
options=(top.qcow2 --ublk=0 --queues 2 --control /tmp/control)
serve "${options[@]}"
begin_load --name=a --filename=/dev/ublkb0 --rw=randrw --bs=4k --size=16M --fsync=200
answered ublkb0
replace() {
    local old=$pid
    serve "${options[@]}" --takeover /tmp/control
    wait $old || { cat /tmp/log && return 1; }
    answered ublkb0
}
for ((n = 1; n <= 3; n++)); do replace; done
logged 'handed over after a pause'
# The old server does not search for users of the device.
logged '/dev/ublkb0 is kept for the next server' || { cat /tmp/log && exit 1; }
not logged 'it is kept, and waits' || { cat /tmp/log && exit 1; }

# A new server that the device does not fit.
fails 1 'it is read-only now' -- \
    blockyard serve "${options[@]}" --read-only --takeover /tmp/control
kill -0 $pid
answered ublkb0
# The device would hang.
for other in --ublk=3 '--nbd unix:/tmp/nbd'; do
    fails 1 'top.qcow2' -- blockyard serve top.qcow2 $other --control /tmp/control --takeover /tmp/control
    kill -0 $pid
    answered ublkb0
done
[[ ! -e /dev/ublkb3 ]]
# A new server that dies when all its queues fetch.
not taskset 1 strace -qq -f -o /tmp/strace -e trace=mmap -P /dev/ublkc0 -e inject=mmap:signal=KILL:when=1 \
    /host/blockyard serve "${options[@]}" --takeover /tmp/control >/tmp/other 2>>/tmp/log
not grep -q ready /tmp/other
grep -q 'killed by SIGKILL' /tmp/strace || { cat /tmp/strace /tmp/log && exit 1; }
kill -0 $pid
answered ublkb0
until_logged 'served again' 4

replace
end_load
sync /dev/ublkb0
cp /dev/ublkb0 seen.img
stop
[[ ! -e /dev/ublkb0 && ! -e /tmp/control ]]
blockyard image check top.qcow2 >/dev/null
blockyard image compare top.qcow2 seen.img >/dev/null
dmesg | not grep -E 'I/O error|BUG|WARNING|Oops'
"#;

#[test]
fn a_device_is_handed_over_under_load() {
    on_kernel("7", 2, HAND_OVERS);
}

/// Linux 6.12 cannot quiesce a device, so its server refuses the hand-over and goes on.
const REFUSED: &str = r#"
dd if=/dev/urandom of=a.img bs=1M count=1 status=none
serve a.img --ublk=0 --control /tmp/control
fails 1 '/dev/ublkb0 ends with its server' -- \
    blockyard serve a.img --ublk=0 --control /tmp/control --takeover /tmp/control
cmp /dev/ublkb0 a.img
stop
[[ ! -e /dev/ublkb0 ]]
"#;

#[test]
fn a_device_that_ends_with_its_server_stays_with_it() {
    on_kernel("6", 1, REFUSED);
}
